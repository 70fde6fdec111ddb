//! What a log's prompts share: how long they are, how much of each came before, and which
//! beginnings are common.
//!
//! Guarantee: "came before" is judged by the filter's checkpoints, the most that any cache could
//! hold by the engine's blocks. Not here: hosts.

use std::collections::BTreeMap;

use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;

use super::ready::{Ready, Requests, places};
use crate::explain::pieces::tokens;

/// Depths at which sharing is told, in tokens: the first rungs of the key's ladder, doubled.
const DEPTHS: [u64; 8] = [256, 512, 1024, 2048, 4096, 8192, 16_384, 65_536];

/// Common beginnings that are told.
const PREFIXES: usize = 5;

/// What prompts share.
#[derive(Debug, Serialize)]
pub(super) struct Sharing {
    pub requests: u64,
    /// Requests by API.
    pub apis: BTreeMap<&'static str, u64>,
    /// Of the prompts' tokens, as the filter estimates them.
    pub tokens: Lengths,
    pub depths: Vec<Depth>,
    /// Part of all prompt tokens that one engine would find in a cache that never forgets: more is
    /// not possible on any number of hosts.
    pub most: f64,
    pub prefixes: Vec<Prefix>,
}

/// A distribution.
#[derive(Debug, Serialize)]
pub(super) struct Lengths {
    pub total: u64,
    pub mean: f64,
    pub p10: u64,
    pub p50: u64,
    pub p90: u64,
    pub max: u64,
}

/// Sharing at one depth.
#[derive(Debug, Serialize)]
pub(super) struct Depth {
    pub tokens: u64,
    /// Requests whose prompts are at least so long.
    pub requests: u64,
    /// Of those, the ones whose first so many tokens came before.
    pub shared: u64,
}

/// A beginning that many requests have in common.
#[derive(Debug, Serialize)]
pub(super) struct Prefix {
    pub hash: String,
    pub tokens: u64,
    pub requests: u64,
    pub excerpt: String,
}

pub(super) fn sharing(requests: &Requests, block_tokens: u64) -> Sharing {
    let all = &requests.all;
    let lengths: Vec<u64> = all
        .iter()
        .map(|ready| ready.prepared.prompt.tokens())
        .collect();
    let counts = counts(all);
    let mut apis = BTreeMap::new();
    for ready in all {
        *apis.entry(ready.prepared.prompt.api).or_insert(0) += 1;
    }
    Sharing {
        requests: all.len() as u64,
        apis,
        depths: depths(all, &lengths),
        tokens: distribution(lengths),
        most: most(all, block_tokens),
        prefixes: prefixes(all, &counts),
    }
}

fn distribution(mut lengths: Vec<u64>) -> Lengths {
    lengths.sort_unstable();
    let total: u64 = lengths.iter().sum();
    let at = |share: f64| {
        let rank = (share * lengths.len() as f64).ceil().max(1.0) as usize;
        lengths.get(rank - 1).copied().unwrap_or(0)
    };
    Lengths {
        total,
        mean: total as f64 / lengths.len().max(1) as f64,
        p10: at(0.1),
        p50: at(0.5),
        p90: at(0.9),
        max: at(1.0),
    }
}

/// How many requests have each checkpoint.
fn counts(all: &[Ready]) -> FxHashMap<u64, u32> {
    let mut counts = FxHashMap::default();
    for ready in all {
        for (_, key) in places(&ready.prepared.prompt) {
            *counts.entry(key).or_insert(0) += 1;
        }
    }
    counts
}

fn depths(all: &[Ready], lengths: &[u64]) -> Vec<Depth> {
    let mut depths: Vec<Depth> = DEPTHS
        .iter()
        .map(|&tokens| Depth {
            tokens,
            requests: 0,
            shared: 0,
        })
        .collect();
    let mut seen: FxHashSet<u64> = FxHashSet::default();
    for (ready, &length) in all.iter().zip(lengths) {
        let prompt = &ready.prepared.prompt;
        let deepest = places(prompt).rev().find(|(_, key)| seen.contains(key));
        let deepest = deepest.map_or(0, |(position, _)| tokens(position));
        for depth in depths.iter_mut().filter(|depth| depth.tokens <= length) {
            depth.requests += 1;
            depth.shared += u64::from(deepest >= depth.tokens);
        }
        seen.extend(places(prompt).map(|(_, key)| key));
    }
    depths.retain(|depth| depth.requests > 0);
    depths
}

/// Part of the tokens that a cache which never forgets would hold.
fn most(all: &[Ready], block_tokens: u64) -> f64 {
    let mut seen: FxHashSet<u64> = FxHashSet::default();
    let (mut found, mut asked) = (0_u64, 0_u64);
    for ready in all {
        let chain = ready.prepared.chain();
        let known = chain.iter().take_while(|hash| seen.contains(hash)).count() as u64;
        let tokens = u64::from(ready.prepared.job.prompt_tokens);
        // An engine computes the last token in any case.
        let most = tokens.saturating_sub(1) / block_tokens;
        found += known.min(most) * block_tokens;
        asked += tokens;
        seen.extend(chain);
    }
    found as f64 / asked.max(1) as f64
}

/// The beginnings that would save most: each as deep as all its requests share it.
fn prefixes(all: &[Ready], counts: &FxHashMap<u64, u32>) -> Vec<Prefix> {
    let count = |key: u64| counts.get(&key).copied().unwrap_or(0);
    let mut found: FxHashMap<u64, Prefix> = FxHashMap::default();
    for ready in all {
        let mut below = 0;
        for (position, key) in places(&ready.prepared.prompt).rev() {
            let requests = count(key);
            // The deepest place that so many have in common.
            if requests > 1 && requests > below {
                found.entry(key).or_insert_with(|| Prefix {
                    hash: format!("{key:016x}"),
                    tokens: tokens(position),
                    requests: u64::from(requests),
                    excerpt: ready.excerpt.clone(),
                });
            }
            below = below.max(requests);
        }
    }
    let mut found: Vec<Prefix> = found.into_values().collect();
    let saved = |prefix: &Prefix| prefix.tokens * (prefix.requests - 1);
    found.sort_by(|a, b| (saved(b), &a.hash).cmp(&(saved(a), &b.hash)));
    found.truncate(PREFIXES);
    found
}
