//! What a run's records say: hits, waiting, shares, and what an event did.
//!
//! Guarantee: only requests that arrived in the window count; one that still waited at the end
//! counts with the time it had waited until then, one that lost its engine has no time. Not here:
//! several seeds (summary.rs).

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::simulate::world::{Happening, Outcome, Record, Setting};

const NS_PER_S: f64 = 1e9;

/// Seconds before and after an event in which a key counts as seen (ROUTING.md 8).
const MOVED_WINDOW_S: f64 = 120.0;
/// Seconds of one bin of the hit rate around an event.
const BIN_S: f64 = 10.0;
/// Seconds after an event in which times to the first token count as its own.
const AFTER_S: f64 = 60.0;

/// Times to the first token, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// Half of the requests waited no longer.
    pub p50: f64,
    /// The mean.
    pub mean: f64,
    /// Nine of ten requests waited no longer.
    pub p90: f64,
    /// 99 of 100 requests waited no longer.
    pub p99: f64,
}

impl Times {
    /// Of these times, in any order.
    #[must_use]
    pub fn of(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let rank = (share * seconds.len() as f64).ceil().max(1.0) as usize;
            seconds.get(rank - 1).copied().unwrap_or(f64::NAN)
        };
        let mean = seconds.iter().sum::<f64>() / seconds.len().max(1) as f64;
        Self {
            p50: at(0.5),
            mean,
            p90: at(0.9),
            p99: at(0.99),
        }
    }
}

/// A run's figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Requests that arrived in the window.
    pub requests: u64,
    /// Of those, the ones that had no first token at the end, or lost their engine.
    pub unserved: u64,
    /// Part of the prompts' tokens that were found in the caches.
    pub hit_rate: f64,
    /// Times to the first token.
    pub ttft_s: Times,
    /// Prompt and answer tokens of requests done in the window, a second.
    pub tokens_per_s: f64,
    /// Of those, answer tokens.
    pub output_tokens_per_s: f64,
    /// Requests of the host that got most, over the mean.
    pub share_max_over_mean: f64,
    /// The same of requests in flight, once a second, the mean over the window.
    pub in_flight_max_over_mean: f64,
    /// Part of the requests that load led away from home.
    pub diverted: f64,
    /// Later turns of chats.
    pub later_turns: u64,
    /// Of those, the ones on the host of the turn before.
    pub turns_kept: u64,
    /// Sequences that were computed again.
    pub preemptions: u64,
    /// What events did.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<EventFigures>,
}

/// What one event did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EventFigures {
    /// When it was, in seconds.
    pub at_s: f64,
    /// What it was.
    pub event: String,
    /// Keys (shared prefixes, or chats) seen within 120 s before and after.
    pub keys: u64,
    /// Part of them that changed their host.
    pub moved: f64,
    /// Part of them that changed their host without having been on a host that left.
    pub moved_needlessly: f64,
    /// Part of the keys that changed their host at that time in the same run without events.
    pub churn: f64,
    /// The hit rate of the minute before.
    pub hit_before: f64,
    /// The lowest of ten seconds in the minute after.
    pub hit_dip: f64,
    /// The hit rate of the second minute after.
    pub hit_after: f64,
    /// Seconds until ten seconds in a row had 95 % of the hit rate before; `None` if none had.
    pub recovery_s: Option<f64>,
    /// 99 of 100 requests of the first minute waited no longer.
    pub ttft_p99_s: f64,
}

/// Draws the figures of a run.
#[must_use]
pub fn figures(setting: &Setting, outcome: &Outcome) -> Figures {
    let from = setting.warmup_s;
    let to = setting.warmup_s + setting.window_s;
    let window: Vec<&Record> = outcome
        .records
        .iter()
        .filter(|record| within(record.arrived_ns, from, to))
        .collect();
    let served = || window.iter().filter(|record| record.first_ns.is_some());
    let requests = window.len() as u64;
    let kept = turns(&window, &outcome.records);
    let done = outcome
        .records
        .iter()
        .filter(|record| record.done_ns.is_some_and(|done| within(done, from, to)));
    let (mut tokens, mut output_tokens) = (0, 0);
    for record in done {
        output_tokens += u64::from(record.output_tokens);
        tokens += u64::from(record.prompt_tokens) + u64::from(record.output_tokens);
    }
    // Conversations that wait for each other are over long before their window is.
    let last_done = outcome
        .records
        .iter()
        .filter_map(|record| record.done_ns)
        .max();
    let last_done_s = last_done.unwrap_or(0) as f64 / NS_PER_S;
    let window_s = (last_done_s.min(to) - from).max(1e-9);
    let balance = &outcome.balance;
    Figures {
        requests,
        unserved: requests - served().filter(|record| !record.lost).count() as u64,
        hit_rate: hit_rate(served().copied()),
        ttft_s: times(window.iter().copied(), outcome),
        tokens_per_s: tokens as f64 / window_s,
        output_tokens_per_s: output_tokens as f64 / window_s,
        share_max_over_mean: share(&window, setting.hosts),
        in_flight_max_over_mean: balance.iter().sum::<f64>() / balance.len().max(1) as f64,
        diverted: part(
            window.iter().filter(|record| record.diverted).count(),
            window.len(),
        ),
        later_turns: kept.1,
        turns_kept: kept.0,
        preemptions: outcome.preemptions,
        events: setting
            .happenings
            .iter()
            .map(|&(at_s, what)| event(at_s, what, 0.0, outcome))
            .collect(),
    }
}

fn within(at_ns: u64, from_s: f64, to_s: f64) -> bool {
    let at_s = at_ns as f64 / NS_PER_S;
    at_s >= from_s && at_s < to_s
}

fn times<'a>(records: impl Iterator<Item = &'a Record>, outcome: &Outcome) -> Times {
    // A client would ask again, and nobody knows when.
    let waits = records.filter(|record| !record.lost || record.first_ns.is_some());
    Times::of(waits.map(|record| waited_s(record, outcome)).collect())
}

fn waited_s(record: &Record, outcome: &Outcome) -> f64 {
    let until_end = outcome.end_ns.saturating_sub(record.arrived_ns);
    record.first_ns.unwrap_or(until_end) as f64 / NS_PER_S
}

fn part(some: usize, all: usize) -> f64 {
    some as f64 / all.max(1) as f64
}

fn hit_rate<'a>(records: impl Iterator<Item = &'a Record>) -> f64 {
    let (mut cached, mut all) = (0_u64, 0_u64);
    for record in records {
        cached += u64::from(record.cached_tokens);
        all += u64::from(record.prompt_tokens);
    }
    cached as f64 / all.max(1) as f64
}

fn share(window: &[&Record], hosts: u32) -> f64 {
    let mut shares: BTreeMap<u32, u32> = BTreeMap::new();
    for record in window {
        *shares.entry(record.host).or_insert(0) += 1;
    }
    let most = shares.values().max().copied().unwrap_or(0);
    let used = (shares.len() as u32).max(hosts);
    f64::from(most) * f64::from(used) / window.len().max(1) as f64
}

/// Later turns that stayed on the host of the turn before, and all later turns.
fn turns(window: &[&Record], all: &[Record]) -> (u64, u64) {
    let hosts: BTreeMap<(u64, u32), u32> = all
        .iter()
        .map(|record| ((record.chat, record.turn), record.host))
        .collect();
    let (mut kept, mut later) = (0, 0);
    for record in window.iter().filter(|record| record.turn > 0) {
        later += 1;
        kept += u64::from(hosts.get(&(record.chat, record.turn - 1)) == Some(&record.host));
    }
    (kept, later)
}

/// Each key's host at one side of an event.
fn hosts_of(records: &[Record], from_s: f64, to_s: f64, last: bool) -> BTreeMap<u64, u32> {
    let chats = records.iter().any(|record| record.turn > 0);
    let mut hosts = BTreeMap::new();
    for record in records
        .iter()
        .filter(|record| within(record.arrived_ns, from_s, to_s))
    {
        let key = if chats {
            record.chat
        } else {
            record.prefix.unwrap_or(record.chat)
        };
        if last {
            hosts.insert(key, record.host);
        } else {
            hosts.entry(key).or_insert(record.host);
        }
    }
    hosts
}

/// Notes in each event what moved at its time in a run without events.
pub fn set_churn(figures: &mut Figures, calm: &Outcome) {
    for event in &mut figures.events {
        event.churn = moved(&calm.records, event.at_s, 0.0, &BTreeSet::new()).0;
    }
}

/// The host before `at_s` of each key, and its host `settle_s` after.
fn pairs(records: &[Record], at_s: f64, settle_s: f64) -> Vec<(u32, u32)> {
    let settled_s = at_s + settle_s;
    let before = hosts_of(records, at_s - MOVED_WINDOW_S, at_s, true);
    let after = hosts_of(records, settled_s, settled_s + MOVED_WINDOW_S, false);
    let both = before
        .iter()
        .filter_map(|(key, host)| Some((*host, *after.get(key)?)));
    both.collect()
}

/// Part of the keys that are on another host after `at_s` than before, and those keys.
#[must_use]
fn moved(records: &[Record], at_s: f64, settle_s: f64, left: &BTreeSet<u32>) -> (f64, f64, u64) {
    let pairs = pairs(records, at_s, settle_s);
    let moved = || pairs.iter().filter(|(before, after)| before != after);
    let needless = moved().filter(|(before, _)| !left.contains(before)).count();
    let keys = pairs.len();
    (
        part(moved().count(), keys),
        part(needless, keys),
        keys as u64,
    )
}

/// Part of the keys that moved at `at_s` though neither their old nor their new host is `changed`.
#[must_use]
pub fn moved_between(records: &[Record], at_s: f64, settle_s: f64, changed: u32) -> f64 {
    let pairs = pairs(records, at_s, settle_s);
    let others = pairs
        .iter()
        .filter(|(before, after)| before != after && ![*before, *after].contains(&changed));
    part(others.count(), pairs.len())
}

/// The hit rate of the requests that arrived in these seconds.
#[must_use]
pub fn hits_of(records: &[Record], from_s: f64, to_s: f64) -> f64 {
    let served = records.iter().filter(|record| record.first_ns.is_some());
    hit_rate(served.filter(|record| within(record.arrived_ns, from_s, to_s)))
}

/// What an event did, whose effect on placement is complete after `settle_s`.
#[must_use]
pub fn event(at_s: f64, what: Happening, settle_s: f64, outcome: &Outcome) -> EventFigures {
    let (name, left) = match what {
        Happening::Add => ("add".to_owned(), BTreeSet::new()),
        Happening::Remove(host) => (format!("remove:{host}"), BTreeSet::from([host])),
        Happening::Restart(host) => (format!("restart:{host}"), BTreeSet::new()),
        Happening::RestartGateway(gateway) => {
            (format!("restart-gateway:{gateway}"), BTreeSet::new())
        }
    };
    let records = &outcome.records;
    let hits = |from: f64, to: f64| hits_of(records, from, to);
    let (moved, moved_needlessly, keys) = moved(records, at_s, settle_s, &left);
    let bin = |number: u32| at_s + f64::from(number) * BIN_S;
    let bins = || (0..12).map(|number| (number, hits(bin(number), bin(number + 1))));
    let hit_before = hits(at_s - AFTER_S, at_s);
    let dip = bins()
        .take(6)
        .map(|(_, rate)| rate)
        .fold(f64::INFINITY, f64::min);
    let low = bins().position(|(_, rate)| rate < 0.95 * hit_before);
    let recovery_s = match low {
        None => Some(0.0),
        Some(low) => bins()
            .skip(low)
            .find(|&(_, rate)| rate >= 0.95 * hit_before)
            .map(|(number, _)| f64::from(number) * BIN_S),
    };
    let first = records
        .iter()
        .filter(|record| within(record.arrived_ns, at_s, at_s + AFTER_S));
    EventFigures {
        at_s,
        event: name,
        keys,
        moved,
        moved_needlessly,
        churn: 0.0,
        hit_before,
        hit_dip: dip,
        hit_after: hits(at_s + AFTER_S, at_s + 2.0 * AFTER_S),
        recovery_s,
        ttft_p99_s: times(first, outcome).p99,
    }
}
