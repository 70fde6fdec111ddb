//! Peers that remember which host saw which prompt: SGLang's, llm-d's, Dynamo's, Preble's rules.
//!
//! Guarantee: they see prompts as chains of hashed blocks of 64 characters and their own gateway's
//! requests, no engine (but for metrics and, in one variant of Dynamo's, cache events). Not here:
//! our own index.

use std::collections::VecDeque;

use rand_chacha::ChaCha8Rng;
use rustc_hash::FxHashMap;

use super::{Ask, Chosen, Fleet, Policy, Usage, load, lowest};

const NS_PER_S: u64 = 1_000_000_000;

/// SGLang's router: one tree of all prompts, whose nodes know their hosts.
///
/// Rule: if loads differ by more than 64 and by more than a factor of 1.5, the least loaded host;
/// else, if more than 0.3 of the prompt is in the tree, the host that had it last; else the host
/// with the smallest part of the tree.
#[derive(Default)]
pub(super) struct CacheAware {
    nodes: FxHashMap<u64, Node>,
    blocks: FxHashMap<u32, u64>,
}

struct Node {
    hosts: u64,
    last: u32,
}

const BALANCE_ABSOLUTE: u32 = 64;
const BALANCE_RELATIVE: f64 = 1.5;
const MATCH_MIN: f64 = 0.3;

impl CacheAware {
    fn insert(&mut self, chain: &[u64], host: u32) {
        // A run has far fewer hosts than bits.
        let bit = 1_u64 << (host % 64);
        let mut fresh = 0;
        for &hash in chain {
            let node = self.nodes.entry(hash).or_insert(Node {
                hosts: 0,
                last: host,
            });
            fresh += u64::from(node.hosts & bit == 0);
            node.hosts |= bit;
            node.last = host;
        }
        *self.blocks.entry(host).or_insert(0) += fresh;
    }

    fn matched(&self, chain: &[u64], hosts: &[u32]) -> Option<u32> {
        let depth = chain.partition_point(|hash| self.nodes.contains_key(hash));
        let share = depth as f64 / chain.len().max(1) as f64;
        let node = self.nodes.get(chain.get(depth.checked_sub(1)?)?)?;
        (share > MATCH_MIN && hosts.contains(&node.last)).then_some(node.last)
    }
}

impl Policy for CacheAware {
    fn choose(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen {
        let loads = || fleet.hosts.iter().map(|&host| fleet.load(host));
        let (least, most) = (loads().min().unwrap_or(0), loads().max().unwrap_or(0));
        let uneven = most - least > BALANCE_ABSOLUTE
            && f64::from(most) > f64::from(least) * BALANCE_RELATIVE;
        let chain = ask.prepared.chain();
        let matched = self.matched(chain, fleet.hosts);
        let host = if uneven {
            load::least_loaded(fleet, rng)
        } else {
            matched.unwrap_or_else(|| {
                let size = |host: u32| self.blocks.get(&host).copied().unwrap_or(0);
                load::any(&lowest(fleet.hosts, size), rng)
            })
        };
        self.insert(chain, host);
        Chosen {
            host,
            diverted: uneven && matched.is_some_and(|matched| matched != host),
        }
    }
}

/// Blocks that were sent to a host, the least recently used forgotten.
struct Recent {
    capacity: usize,
    clock: u64,
    used: FxHashMap<u64, u64>,
    order: VecDeque<(u64, u64)>,
}

impl Recent {
    fn new(capacity: u32) -> Self {
        Self {
            capacity: capacity as usize,
            clock: 0,
            used: FxHashMap::default(),
            order: VecDeque::new(),
        }
    }

    fn touch(&mut self, chain: &[u64]) {
        for &hash in chain {
            self.clock += 1;
            self.used.insert(hash, self.clock);
            self.order.push_back((hash, self.clock));
        }
        while self.used.len() > self.capacity {
            let Some((hash, clock)) = self.order.pop_front() else {
                break;
            };
            if self.used.get(&hash) == Some(&clock) {
                self.used.remove(&hash);
            }
        }
        if self.order.len() > 4 * self.capacity {
            let used = &self.used;
            self.order
                .retain(|(hash, clock)| used.get(hash) == Some(clock));
        }
    }

    fn depth(&self, chain: &[u64]) -> usize {
        chain
            .iter()
            .take_while(|hash| self.used.contains_key(hash))
            .count()
    }
}

/// What each host was sent.
struct Sent {
    kv_blocks: u32,
    hosts: FxHashMap<u32, Recent>,
}

impl Sent {
    fn new(kv_blocks: u32) -> Self {
        Self {
            kv_blocks,
            hosts: FxHashMap::default(),
        }
    }

    fn touch(&mut self, host: u32, chain: &[u64]) {
        let kv_blocks = self.kv_blocks;
        self.hosts
            .entry(host)
            .or_insert_with(|| Recent::new(kv_blocks))
            .touch(chain);
    }

    fn depth(&self, host: u32, chain: &[u64]) -> usize {
        self.hosts
            .get(&host)
            .map_or(0, |recent| recent.depth(chain))
    }
}

/// llm-d's approximate prefix scorer (also Gateway API Inference Extension's): the share of the
/// prompt's first 256 blocks that the host was sent, three times; how short its queue is, from
/// the shortest to the longest, twice; how much of its KV cache is free, twice.
pub(super) struct Llmd {
    sent: Sent,
}

/// 256 blocks of 64 characters.
const BLOCKS_SCORED: usize = 256;

impl Llmd {
    pub(super) fn new(kv_blocks: u32) -> Self {
        Self {
            sent: Sent::new(kv_blocks),
        }
    }
}

impl Policy for Llmd {
    fn choose(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen {
        let chain = ask.prepared.chain();
        let chain = chain.get(..BLOCKS_SCORED).unwrap_or(chain);
        let scrape = |host: u32| {
            fleet
                .scraped
                .get(host as usize)
                .copied()
                .unwrap_or_default()
        };
        let queues = || fleet.hosts.iter().map(|&host| scrape(host).waiting);
        let shortest = f64::from(queues().min().unwrap_or(0));
        let longest = f64::from(queues().max().unwrap_or(0));
        let badness = |host: u32| {
            let prefix = self.sent.depth(host, chain) as f64 / chain.len().max(1) as f64;
            let queue = if longest > shortest {
                (longest - f64::from(scrape(host).waiting)) / (longest - shortest)
            } else {
                1.0
            };
            -(3.0 * prefix + 2.0 * queue + 2.0 * (1.0 - scrape(host).kv_usage))
        };
        let scores: Vec<(u32, f64)> = fleet
            .hosts
            .iter()
            .map(|&host| (host, badness(host)))
            .collect();
        let of = |host: u32| {
            scores
                .iter()
                .find(|(other, _)| *other == host)
                .map_or(0.0, |(_, score)| *score)
        };
        let host = load::any(&lowest(fleet.hosts, of), rng);
        self.sent.touch(host, chain);
        Chosen::at(host)
    }
}

/// Dynamo's cost: blocks to be computed (those of requests without a first token, and this
/// prompt's that the host has not) plus blocks held by requests in flight.
pub(super) struct Dynamo {
    events: bool,
    /// Until when a host is taken to hold a block.
    until: FxHashMap<(u32, u64), u64>,
    active: FxHashMap<u64, Active>,
    prefill: FxHashMap<u32, u64>,
    held: FxHashMap<u32, u64>,
    swept_ns: u64,
}

struct Active {
    host: u32,
    prefill: u64,
    blocks: u64,
}

/// How long a block is taken to stay in a cache without events.
const LIFE_NS: u64 = 120 * NS_PER_S;

impl Dynamo {
    pub(super) fn new(events: bool) -> Self {
        Self {
            events,
            until: FxHashMap::default(),
            active: FxHashMap::default(),
            prefill: FxHashMap::default(),
            held: FxHashMap::default(),
            swept_ns: 0,
        }
    }

    fn overlap(&self, ask: &Ask<'_>, fleet: &Fleet<'_>, host: u32) -> u64 {
        let chain = ask.prepared.chain();
        if self.events {
            let engine = fleet.engines.get(host as usize);
            return engine.map_or(0, |engine| u64::from(engine.pool().depth(chain)));
        }
        let known = |hash: &&u64| {
            self.until
                .get(&(host, **hash))
                .is_some_and(|&until| until > ask.now_ns)
        };
        chain.iter().take_while(known).count() as u64
    }

    fn sweep(&mut self, now_ns: u64) {
        if now_ns - self.swept_ns > LIFE_NS {
            self.swept_ns = now_ns;
            self.until.retain(|_, until| *until > now_ns);
        }
    }
}

impl Policy for Dynamo {
    fn choose(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen {
        let chain = ask.prepared.chain();
        let blocks = chain.len() as u64 + 1;
        let cost = |host: u32| {
            let overlap = self.overlap(ask, fleet, host);
            let prefill = self.prefill.get(&host).copied().unwrap_or(0) + blocks - overlap;
            prefill + self.held.get(&host).copied().unwrap_or(0) + blocks
        };
        let costs: Vec<(u32, u64)> = fleet.hosts.iter().map(|&host| (host, cost(host))).collect();
        let of = |host: u32| {
            costs
                .iter()
                .find(|(other, _)| *other == host)
                .map_or(u64::MAX, |(_, cost)| *cost)
        };
        let host = load::any(&lowest(fleet.hosts, of), rng);
        let prefill = blocks - self.overlap(ask, fleet, host);
        if !self.events {
            self.sweep(ask.now_ns);
            let until = ask.now_ns + LIFE_NS;
            self.until
                .extend(chain.iter().map(|&hash| ((host, hash), until)));
        }
        *self.prefill.entry(host).or_insert(0) += prefill;
        *self.held.entry(host).or_insert(0) += blocks;
        self.active.insert(
            ask.id,
            Active {
                host,
                prefill,
                blocks,
            },
        );
        Chosen::at(host)
    }

    fn first_byte(&mut self, id: u64, _now_ns: u64) {
        if let Some(active) = self.active.get_mut(&id) {
            let prefill = std::mem::take(&mut active.prefill);
            if let Some(total) = self.prefill.get_mut(&active.host) {
                *total -= prefill;
            }
        }
    }

    fn ended(&mut self, id: u64, _: Option<Usage>, now_ns: u64) {
        self.first_byte(id, now_ns);
        if let Some(active) = self.active.remove(&id)
            && let Some(total) = self.held.get_mut(&active.host)
        {
            *total -= active.blocks;
        }
    }
}

/// Preble's E2, simplified: a prompt known by more than half goes where it is known best, unless
/// that host had twice the least load of the last three minutes; others go where load is least.
pub(super) struct Preble {
    sent: Sent,
    window: VecDeque<(u64, u32, f64)>,
    loads: FxHashMap<u32, f64>,
}

const WINDOW_NS: u64 = 180 * NS_PER_S;
const REDIRECT: f64 = 2.0;
/// Tokens an answer counts for: a decoded token costs a step's share, about 1/8 of which is its
/// own (40 µs beside 71 µs of a prompt token, and its context).
const ANSWER_WEIGHT: f64 = 1.0;

impl Preble {
    pub(super) fn new(kv_blocks: u32) -> Self {
        Self {
            sent: Sent::new(kv_blocks),
            window: VecDeque::new(),
            loads: FxHashMap::default(),
        }
    }

    fn load(&self, host: u32) -> f64 {
        self.loads.get(&host).copied().unwrap_or(0.0)
    }

    fn age(&mut self, now_ns: u64) {
        while let Some(&(at, host, tokens)) = self.window.front() {
            if at + WINDOW_NS > now_ns {
                return;
            }
            self.window.pop_front();
            *self.loads.entry(host).or_insert(0.0) -= tokens;
        }
    }
}

impl Policy for Preble {
    fn choose(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen {
        self.age(ask.now_ns);
        let chain = ask.prepared.chain();
        let depths: Vec<(u32, usize)> = fleet
            .hosts
            .iter()
            .map(|&host| (host, self.sent.depth(host, chain)))
            .collect();
        let deepest = depths.iter().map(|&(_, depth)| depth).max().unwrap_or(0);
        let lightest = load::any(&lowest(fleet.hosts, |host| self.load(host)), rng);
        let mut host = lightest;
        let mut diverted = false;
        if deepest * 2 > chain.len() {
            let best: Vec<u32> = depths
                .iter()
                .filter(|&&(_, depth)| depth == deepest)
                .map(|&(host, _)| host)
                .collect();
            let best = load::any(&lowest(&best, |host| self.load(host)), rng);
            diverted = self.load(best) > REDIRECT * self.load(lightest) && best != lightest;
            host = if diverted { lightest } else { best };
        }
        let known = depths
            .iter()
            .find(|(other, _)| *other == host)
            .map_or(0, |&(_, d)| d);
        let share = 1.0 - known as f64 / chain.len().max(1) as f64;
        let job = &ask.prepared.job;
        let tokens =
            f64::from(job.prompt_tokens) * share + f64::from(job.output_tokens) * ANSWER_WEIGHT;
        self.window.push_back((ask.now_ns, host, tokens));
        *self.loads.entry(host).or_insert(0.0) += tokens;
        self.sent.touch(host, chain);
        Chosen { host, diverted }
    }
}
