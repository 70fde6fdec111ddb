//! Policies that look at load or at nothing: random, round robin, least request.
//!
//! Guarantee: ties are broken at random. Not here: prefixes.

use rand::seq::IndexedRandom as _;
use rand_chacha::ChaCha8Rng;

use super::{Ask, Chosen, Fleet, Policy, lowest};

pub(super) fn any(hosts: &[u32], rng: &mut ChaCha8Rng) -> u32 {
    hosts.choose(rng).copied().unwrap_or(0)
}

pub(super) fn least_loaded(fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> u32 {
    any(&lowest(fleet.hosts, |host| fleet.load(host)), rng)
}

pub(super) struct Random;

impl Policy for Random {
    fn choose(&mut self, _: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen {
        Chosen::at(any(fleet.hosts, rng))
    }
}

#[derive(Default)]
pub(super) struct RoundRobin {
    turn: usize,
}

impl Policy for RoundRobin {
    fn choose(&mut self, _: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen {
        self.turn = self.turn.wrapping_add(1);
        let host = fleet
            .hosts
            .get(self.turn % fleet.hosts.len().max(1))
            .copied();
        Chosen::at(host.unwrap_or_else(|| any(fleet.hosts, rng)))
    }
}

pub(super) struct LeastOfTwo;

impl Policy for LeastOfTwo {
    fn choose(&mut self, _: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen {
        let pair = [any(fleet.hosts, rng), any(fleet.hosts, rng)];
        let best = lowest(&pair, |host| fleet.load(host));
        Chosen::at(any(&best, rng))
    }
}

/// Ties go to the host that was chosen longest ago: at random they would let requests bunch.
#[derive(Default)]
pub(super) struct LeastOfAll {
    last: u32,
}

impl Policy for LeastOfAll {
    fn choose(&mut self, _: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen {
        let best = lowest(fleet.hosts, |host| fleet.load(host));
        let next = best.iter().copied().find(|&host| host > self.last);
        let host = next.or_else(|| best.first().copied());
        self.last = host.unwrap_or_else(|| any(fleet.hosts, rng));
        Chosen::at(self.last)
    }
}
