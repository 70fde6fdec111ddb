//! Policies that hash a fixed number of characters: the ring, the ring with bounded loads, AWS's.
//!
//! Guarantee: the same characters have the same home as long as the hosts stay. Not here: caches.

use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::{Ask, Chosen, Fleet, Policy, Start, load};

/// Points of a host on a ring: Envoy's least ring of 1,024 points over 7 hosts.
const RING_POINTS: u64 = 147;
/// KubeAI's number.
const BOUNDED_POINTS: u64 = 256;
/// KubeAI's load factor.
const LOAD_FACTOR: f64 = 1.25;

struct Ring {
    points_per_host: u64,
    points: Vec<(u64, u32)>,
}

impl Ring {
    fn new(points_per_host: u64, start: &Start<'_>) -> Self {
        let mut ring = Self {
            points_per_host,
            points: Vec::new(),
        };
        ring.set(start.hosts, start.names);
        ring
    }

    fn set(&mut self, hosts: &[u32], names: &[String]) {
        self.points.clear();
        for &host in hosts {
            let name = names.get(host as usize).map_or("", String::as_str);
            let point = |at: u64| xxh3_64_with_seed(name.as_bytes(), at);
            self.points
                .extend((0..self.points_per_host).map(|at| (point(at), host)));
        }
        self.points.sort_unstable();
    }

    /// The hosts' points from `hash` on, once around.
    fn from(&self, hash: u64) -> impl Iterator<Item = u32> + '_ {
        let first = self.points.partition_point(|&(point, _)| point < hash);
        let (before, behind) = self.points.split_at(first);
        behind.iter().chain(before).map(|&(_, host)| host)
    }
}

pub(super) struct RingHash {
    head: usize,
    ring: Ring,
}

impl RingHash {
    pub(super) fn new(head: usize, start: &Start<'_>) -> Self {
        Self {
            head,
            ring: Ring::new(RING_POINTS, start),
        }
    }
}

impl Policy for RingHash {
    fn choose(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen {
        let home = self.ring.from(ask.prepared.head(self.head)).next();
        Chosen::at(home.unwrap_or_else(|| load::any(fleet.hosts, rng)))
    }

    fn hosts_changed(&mut self, hosts: &[u32], names: &[String], _now_ns: u64) {
        self.ring.set(hosts, names);
    }
}

/// Around the ring to the first host with room: its load with this request is at most 1.25 times
/// the mean.
pub(super) struct Bounded {
    head: usize,
    ring: Ring,
}

impl Bounded {
    pub(super) fn new(head: usize, start: &Start<'_>) -> Self {
        Self {
            head,
            ring: Ring::new(BOUNDED_POINTS, start),
        }
    }
}

impl Policy for Bounded {
    fn choose(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen {
        let mean = f64::from(fleet.total() + 1) / fleet.hosts.len().max(1) as f64;
        let has_room = |host: &u32| f64::from(fleet.load(*host) + 1) <= mean * LOAD_FACTOR;
        let hash = ask.prepared.head(self.head);
        let home = self.ring.from(hash).next();
        let found = self.ring.from(hash).find(has_room);
        let host = found
            .or(home)
            .unwrap_or_else(|| load::any(fleet.hosts, rng));
        Chosen {
            host,
            diverted: home != Some(host),
        }
    }

    fn hosts_changed(&mut self, hosts: &[u32], names: &[String], _now_ns: u64) {
        self.ring.set(hosts, names);
    }
}

/// AWS's rule: the home until it has `threshold` requests in flight, then the least loaded host.
pub(super) struct Aws {
    pub(super) head: usize,
    pub(super) threshold: u32,
}

impl Policy for Aws {
    fn choose(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen {
        let hash = ask.prepared.head(self.head).to_le_bytes();
        let score = |host: &&u32| {
            let name = fleet.names.get(**host as usize).map_or("", String::as_str);
            xxh3_64_with_seed(&hash, xxh3_64(name.as_bytes()))
        };
        let home = fleet.hosts.iter().max_by_key(score).copied().unwrap_or(0);
        if fleet.load(home) < self.threshold {
            return Chosen::at(home);
        }
        let host = load::least_loaded(fleet, rng);
        Chosen {
            host,
            diverted: host != home,
        }
    }
}
