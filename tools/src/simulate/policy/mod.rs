//! Who chooses a host: our router and its peers, behind one trait.
//!
//! Guarantee: a policy sees what its product sees in a gateway, and no more; only the oracle looks
//! into the engines. Not here: the engines, time, the network (world.rs).
//!
//! The peers are written anew from their published decision rules; the products may be tuned
//! otherwise.

mod affinity;
mod hashing;
mod load;
mod oracle;
pub(crate) mod ours;

use clap::ValueEnum;
use prefix_router::pool::Rules;
use rand_chacha::ChaCha8Rng;

use crate::engine::scheduler::Engine;
use crate::simulate::prepare::Prepared;

/// A request to be routed.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// Its number in this run.
    pub id: u64,
    /// What is known of it.
    pub prepared: &'a Prepared,
    /// Nanoseconds since the run's start.
    pub now_ns: u64,
    /// Whether the answer is streamed.
    pub streamed: bool,
}

/// What an engine's metrics said when they were last read.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scrape {
    /// Requests in its queue.
    pub waiting: u32,
    /// Part of its KV cache in use.
    pub kv_usage: f64,
}

/// The hosts as one gateway sees them; slices are by host number.
#[derive(Clone, Copy, Debug)]
pub struct Fleet<'a> {
    /// Hosts that can be chosen, ascending.
    pub hosts: &'a [u32],
    /// Their names.
    pub names: &'a [String],
    /// Requests this gateway has sent to each and not seen the end of.
    pub in_flight: &'a [u32],
    /// Their metrics, as of up to 50 ms ago.
    pub scraped: &'a [Scrape],
    /// The engines themselves.
    pub engines: &'a [Engine],
}

impl Fleet<'_> {
    /// Requests in flight on a host.
    #[must_use]
    pub fn load(&self, host: u32) -> u32 {
        self.in_flight.get(host as usize).copied().unwrap_or(0)
    }

    /// Requests in flight on all hosts that can be chosen.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.hosts.iter().map(|&host| self.load(host)).sum()
    }
}

/// A choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The host.
    pub host: u32,
    /// Whether load led away from where the prefix belongs; false where nothing belongs anywhere.
    pub diverted: bool,
}

impl Chosen {
    fn at(host: u32) -> Self {
        Self {
            host,
            diverted: false,
        }
    }
}

/// Tokens of a prompt, and how many of them its engine found in its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// All.
    pub prompt_tokens: u32,
    /// Found.
    pub cached_tokens: u32,
}

/// One gateway's policy.
pub trait Policy {
    /// Chooses a host; there is at least one.
    fn choose(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen;

    /// The first byte of a streamed answer came.
    fn first_byte(&mut self, _id: u64, _now_ns: u64) {}

    /// The request ended; usage if its answer told any.
    fn ended(&mut self, _id: u64, _usage: Option<Usage>, _now_ns: u64) {}

    /// Hosts came or went.
    fn hosts_changed(&mut self, _hosts: &[u32], _names: &[String], _now_ns: u64) {}
}

/// The policies there are.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[value(rename_all = "snake_case")]
pub enum Kind {
    /// Our router's production code, `adaptive`, `gateways: many`
    PrefixRouter,
    /// The same, `gateways: one`
    PrefixRouterOne,
    /// Our router's production code, `gateways: many`, with an index in each of its workers
    PrefixRouterLocalIndex,
    /// Our router's production code in `fixed` mode: 4,096 characters, limit 64, panic rule
    PrefixRouterFixed,
    /// Any host
    Random,
    /// One after the other
    RoundRobin,
    /// The less loaded of two random hosts
    LeastRequest2,
    /// The least loaded host
    LeastRequest,
    /// A hash ring over the first 256 characters
    RingHash256,
    /// A hash ring over the first 1,024 characters
    RingHash1024,
    /// A hash ring over the first 4,096 characters
    RingHash4096,
    /// A hash ring with bounded loads, 1,024 characters, factor 1.25
    Chwbl,
    /// AWS's published rule: 4,096 characters, concurrency threshold 64, else the least loaded
    Aws,
    /// AWS's published rule at the threshold of its examples, 10
    Aws10,
    /// SGLang's cache_aware: a tree of prompts, thresholds 0.3, 64, 1.5
    SglCacheAware,
    /// llm-d's approximate prefix scorer with queue and KV scorers, weights 3, 2, 2
    LlmdApprox,
    /// Dynamo's cost with an approximate index, 120 s to live
    DynamoApprox,
    /// Dynamo's cost with exact cache events
    DynamoEvents,
    /// Preble's exploit or explore, three minutes of load, redirect at twice the least
    Preble,
    /// Knows every engine's cache and queue exactly
    Oracle,
}

impl Kind {
    /// The name in rows and on the command line.
    #[must_use]
    pub fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// A fresh policy for one gateway.
    #[must_use]
    pub fn start(self, fleet: &Start<'_>) -> Box<dyn Policy> {
        let kv_blocks = fleet.kv_blocks;
        match self {
            Self::PrefixRouter => Box::new(ours::Ours::adaptive(fleet, false)),
            Self::PrefixRouterOne => Box::new(ours::Ours::adaptive(fleet, true)),
            Self::PrefixRouterLocalIndex => Box::new(ours::Ours::with_local_index(fleet)),
            Self::PrefixRouterFixed => Box::new(ours::Ours::fixed(fleet, 64)),
            Self::Random => Box::new(load::Random),
            Self::RoundRobin => Box::new(load::RoundRobin::default()),
            Self::LeastRequest2 => Box::new(load::LeastOfTwo),
            Self::LeastRequest => Box::new(load::LeastOfAll::default()),
            Self::RingHash256 => Box::new(hashing::RingHash::new(0, fleet)),
            Self::RingHash1024 => Box::new(hashing::RingHash::new(1, fleet)),
            Self::RingHash4096 => Box::new(hashing::RingHash::new(2, fleet)),
            Self::Chwbl => Box::new(hashing::Bounded::new(1, fleet)),
            Self::Aws => Box::new(hashing::Aws {
                head: 2,
                threshold: 64,
            }),
            Self::Aws10 => Box::new(hashing::Aws {
                head: 2,
                threshold: 10,
            }),
            Self::SglCacheAware => Box::new(affinity::CacheAware::default()),
            Self::LlmdApprox => Box::new(affinity::Llmd::new(kv_blocks)),
            Self::DynamoApprox => Box::new(affinity::Dynamo::new(false)),
            Self::DynamoEvents => Box::new(affinity::Dynamo::new(true)),
            Self::Preble => Box::new(affinity::Preble::new(kv_blocks)),
            Self::Oracle => Box::new(oracle::Oracle::default()),
        }
    }
}

/// What a policy knows when it starts.
#[derive(Clone, Copy, Debug)]
pub struct Start<'a> {
    /// Hosts that can be chosen.
    pub hosts: &'a [u32],
    /// Names of all hosts.
    pub names: &'a [String],
    /// Blocks in each engine's cache.
    pub kv_blocks: u32,
    /// What our own policies go by instead of their defaults.
    pub rules: Option<Rules>,
    /// Worker threads of a gateway.
    pub workers: u32,
}

/// The hosts with the lowest value, in order.
fn lowest<V: PartialOrd + Copy>(hosts: &[u32], value: impl Fn(u32) -> V) -> Vec<u32> {
    let mut best: Vec<u32> = Vec::new();
    let mut least: Option<V> = None;
    for &host in hosts {
        let value = value(host);
        if least.is_none_or(|least| value < least) {
            least = Some(value);
            best.clear();
        }
        if least.is_some_and(|least| value <= least) {
            best.push(host);
        }
    }
    best
}
