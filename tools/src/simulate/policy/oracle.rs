//! The oracle: every engine's cache and queue as they are, and our own form of cost.
//!
//! Guarantee: nothing it knows is out of date. It is greedy, so another policy may beat it in
//! single cells. Not here: what a gateway can really know.

use rand_chacha::ChaCha8Rng;
use rustc_hash::FxHashMap;

use super::{Ask, Chosen, Fleet, Policy, load, lowest};

/// Cost of a token to be computed, against one that waits before it (ROUTING.md 6, ALPHA).
const WORK_WEIGHT: f64 = 2.0;
/// Queued tokens on the least loaded host that add one to that weight (STEP).
const QUEUE_TOKENS: f64 = 8192.0;
/// Cost of a request in flight, in tokens (DELTA).
const REQUEST_TOKENS: f64 = 50.0;

/// Blocks of prompts on their way: how many requests bring each to a host.
#[derive(Default)]
pub(super) struct Oracle {
    coming: FxHashMap<(u32, u64), u32>,
    sent: FxHashMap<u64, (u32, Vec<u64>)>,
}

impl Oracle {
    fn known_tokens(&self, ask: &Ask<'_>, fleet: &Fleet<'_>, host: u32) -> u32 {
        let Some(engine) = fleet.engines.get(host as usize) else {
            return 0;
        };
        let chain = ask.prepared.chain();
        let cached = engine.pool().depth(chain);
        // Behind what is cached, what is on its way; in the other order it would be no chain.
        let coming = chain
            .iter()
            .skip(cached as usize)
            .take_while(|&&hash| self.coming.contains_key(&(host, hash)))
            .count();
        (cached + coming as u32) * engine.config().block_tokens
    }
}

impl Policy for Oracle {
    fn choose(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen {
        let backlog = |host: u32| {
            let engine = fleet.engines.get(host as usize);
            engine.map_or(0.0, |engine| engine.backlog_tokens() as f64)
        };
        let shortest = fleet
            .hosts
            .iter()
            .map(|&host| backlog(host))
            .fold(f64::INFINITY, f64::min);
        let weight = WORK_WEIGHT + shortest / QUEUE_TOKENS;
        let tokens = ask.prepared.job.prompt_tokens;
        let costs: Vec<(u32, f64)> = fleet
            .hosts
            .iter()
            .map(|&host| {
                let known = self.known_tokens(ask, fleet, host).min(tokens - 1);
                let engine = fleet.engines.get(host as usize);
                let jobs = engine.map_or(0, |engine| engine.running() + engine.waiting());
                let work = weight * f64::from(tokens - known);
                (
                    host,
                    backlog(host) + work + REQUEST_TOKENS * f64::from(jobs),
                )
            })
            .collect();
        let cost = |host: u32| {
            let found = costs.iter().find(|(other, _)| *other == host);
            found.map_or(f64::INFINITY, |(_, cost)| *cost)
        };
        let host = load::any(&lowest(fleet.hosts, cost), rng);
        let chain = ask.prepared.chain().to_vec();
        for &hash in &chain {
            *self.coming.entry((host, hash)).or_insert(0) += 1;
        }
        self.sent.insert(ask.id, (host, chain));
        Chosen::at(host)
    }

    fn first_byte(&mut self, id: u64, now_ns: u64) {
        self.ended(id, None, now_ns);
    }

    fn ended(&mut self, id: u64, _: Option<super::Usage>, _now_ns: u64) {
        let Some((host, chain)) = self.sent.remove(&id) else {
            return;
        };
        for hash in chain {
            if let Some(count) = self.coming.get_mut(&(host, hash)) {
                *count -= 1;
                if *count == 0 {
                    self.coming.remove(&(host, hash));
                }
            }
        }
    }
}
