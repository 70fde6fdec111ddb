//! A log played on simulated engines, once for each way to choose a host.
//!
//! Guarantee: routing is the filter's own code, engines and their caches are the simulator's. Not
//! here: what is advised (advice.rs).

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde::Serialize;

use super::ready::Requests;
use crate::engine::cost::{EngineConfig, NS_PER_S};
use crate::explain::ExplainArgs;
use crate::explain::input::Setup;
use crate::print::note;
use crate::simulate::measure::{self, Figures};
use crate::simulate::policy::Kind;
use crate::simulate::prepare::{Prepared, Preparer};
use crate::simulate::world::{self, Outcome, Setting};
use crate::workload::{Request, Workload};

/// Seconds that requests may take beyond the last arrival: a day, as good as for ever.
const DRAIN_S: f64 = 86_400.0;

/// Seconds between the end of a request and the next, where they wait for each other.
const PAUSE_S: f64 = 0.1;

/// Seconds that a log's times may span: a month, which takes minutes to play. Most often a log
/// that spans more does not count seconds.
const SPAN_MAX_S: f64 = 31.0 * DAY_S;
const DAY_S: f64 = 86_400.0;

/// No time in seconds: in the year 5138, while milliseconds since 1970 are 17 times as many.
const TIME_MAX_S: f64 = 1e11;

/// One way to choose, and what came of it.
#[derive(Debug, Serialize)]
pub(super) struct Mode {
    pub name: String,
    /// Part of the prompt tokens found in caches.
    pub hit_rate: f64,
    /// Seconds to the first token.
    pub ttft_p50_s: f64,
    pub ttft_p90_s: f64,
    /// Requests of the host that got most, over the mean.
    pub share_max_over_mean: f64,
    /// Requests that no engine could take: too long for its cache.
    pub unserved: u64,
}

/// All modes, and the run that tells how many requests are in flight.
pub(super) struct Replay {
    pub modes: Vec<Mode>,
    pub outcome: Outcome,
    pub hosts: u32,
}

/// When each request arrives, in seconds; and whether that says anything about load.
pub(super) struct Arrivals {
    pub at_s: Vec<f64>,
    pub known: bool,
}

impl Arrivals {
    /// # Errors
    /// If the log's times cannot be seconds.
    pub(super) fn of(requests: &Requests, args: &ExplainArgs) -> Result<Self> {
        let all = &requests.all;
        if requests.has_times() {
            let time = |index: usize| all.get(index).and_then(|ready| ready.time).unwrap_or(0.0);
            let (first, last) = (time(0), time(all.len().saturating_sub(1)));
            let days = (last - first) / DAY_S;
            ensure!(
                last < TIME_MAX_S && last - first <= SPAN_MAX_S,
                "--log: its times go from {first:?} to {last:?}, which is {}: expected seconds, \
                 and 31 days at most",
                span(days)
            );
            return Ok(Self {
                at_s: (0..all.len()).map(|index| time(index) - first).collect(),
                known: true,
            });
        }
        if let Some(rate) = args.rate {
            ensure!(
                all.len() as f64 / rate <= SPAN_MAX_S,
                "--rate: expected one at which {} requests come within 31 days, got {rate}",
                all.len()
            );
            return Ok(Self {
                at_s: (0..all.len()).map(|index| index as f64 / rate).collect(),
                known: true,
            });
        }
        let mut at = 0.0;
        let each = all.iter().map(|ready| {
            let now = at;
            at += alone_s(&args.engine, &ready.prepared) + PAUSE_S;
            now
        });
        Ok(Self {
            at_s: each.collect(),
            known: false,
        })
    }
}

/// Days in words, with no more digits than say something.
fn span(days: f64) -> String {
    match days < 1e6 {
        true => format!("{days:.0} days"),
        false => format!("{days:.0e} days"),
    }
}

/// How long a request takes at most on an engine that does nothing else.
fn alone_s(engine: &EngineConfig, prepared: &Prepared) -> f64 {
    let (prompt, output) = (prepared.job.prompt_tokens, prepared.job.output_tokens);
    let (prompt, output) = (f64::from(prompt), f64::from(output));
    let context = 1.0 + prompt / engine.attention_tokens;
    let steps = prompt / f64::from(engine.step_tokens_max) + 1.0 + output;
    let decode_ms = engine.decode_us / 1e3 + (prompt + output) * engine.decode_context_ns / 1e6;
    prompt * context / engine.prefill_tokens_per_s
        + steps * engine.step_base_ms / 1e3
        + output * decode_ms / 1e3
}

pub(super) fn replay(
    requests: &mut Requests,
    arrivals: &Arrivals,
    args: &ExplainArgs,
    setup: &Setup,
) -> Result<Replay> {
    let mut modes = Vec::new();
    let hosts = match setup.hosts.len() {
        0 => args.hosts_count,
        named => u32::try_from(named).unwrap_or(u32::MAX),
    };
    let mut setting = Setting {
        policy: Kind::Random,
        gateways: 1,
        workers: 1,
        names: Vec::new(),
        hosts,
        engine: args.engine.clone(),
        warmup_s: 0.0,
        window_s: arrivals.at_s.last().copied().unwrap_or(0.0) + 1.0,
        drain_s: DRAIN_S,
        staleness_s: 0.0,
        unstreamed: 0.0,
        happenings: Vec::new(),
        seed: 1,
        rules: None,
    };
    let own = setup.config.read.prefix_length;
    for (policy, name) in [
        (Kind::Random, "random"),
        (Kind::LeastRequest, "least_request"),
    ] {
        setting.policy = policy;
        modes.push(play(requests, arrivals, &setting, name)?.0);
    }
    for (place, length) in requests.lengths.clone().into_iter().enumerate() {
        set_fixed(requests, place);
        setting.policy = Kind::PrefixRouterFixed;
        setting.rules = (own == Some(length)).then(|| setup.pool.rules());
        let name = match own == Some(length) {
            true => format!("fixed, {length} (configured)"),
            false => format!("fixed, {length} characters"),
        };
        modes.push(play(requests, arrivals, &setting, &name)?.0);
    }
    setting.policy = Kind::PrefixRouter;
    setting.rules = own.is_none().then(|| setup.pool.rules());
    let (mode, outcome) = play(requests, arrivals, &setting, "adaptive")?;
    modes.push(mode);
    (setting.policy, setting.rules) = (Kind::Oracle, None);
    modes.push(play(requests, arrivals, &setting, "oracle")?.0);
    Ok(Replay {
        modes,
        outcome,
        hosts,
    })
}

/// Gives every prompt the hash of its beginning of one length.
fn set_fixed(requests: &mut Requests, place: usize) {
    for ready in &mut requests.all {
        let fixed = ready.fixed.get(place).copied().flatten();
        // Nobody else has it now: preparers are dropped after each run.
        if let Some(prepared) = Arc::get_mut(&mut ready.prepared) {
            prepared.prompt.fixed = fixed;
        }
    }
}

fn play(
    requests: &Requests,
    arrivals: &Arrivals,
    setting: &Setting,
    name: &str,
) -> Result<(Mode, Outcome)> {
    let prepared: Vec<Arc<Prepared>> = requests
        .all
        .iter()
        .map(|ready| Arc::clone(&ready.prepared))
        .collect();
    let mut recorded = Recorded {
        requests,
        at_s: &arrivals.at_s,
        sent: 0,
    };
    let outcome = world::run(setting, &mut recorded, &Preparer::ready(&prepared))?;
    let figures: Figures = measure::figures(setting, &outcome);
    note!("played: {name}, hits {:.1} %", figures.hit_rate * 100.0);
    let mode = Mode {
        name: name.to_owned(),
        hit_rate: figures.hit_rate,
        ttft_p50_s: figures.ttft_s.p50,
        ttft_p90_s: figures.ttft_s.p90,
        share_max_over_mean: figures.share_max_over_mean,
        unserved: figures.unserved,
    };
    Ok((mode, outcome))
}

/// The log as a workload. Texts are not needed: every request is ready.
struct Recorded<'a> {
    requests: &'a Requests,
    at_s: &'a [f64],
    sent: usize,
}

impl Workload for Recorded<'_> {
    fn next(&mut self) -> Option<Request> {
        let ready = self.requests.all.get(self.sent)?;
        let at_s = self.at_s.get(self.sent)?;
        let id = self.sent as u64;
        self.sent += 1;
        Some(Request {
            id,
            at: Duration::from_secs_f64(at_s.max(0.0)),
            prefix: None,
            turn: 0,
            turns_left: 0,
            messages: Arc::default(),
            output_tokens: ready.prepared.job.output_tokens,
        })
    }

    fn follow(&mut self, _: &Request, _: Duration, _: &str) -> Option<Request> {
        None
    }

    fn prefixes(&self) -> Option<u64> {
        None
    }

    fn probe(&self, _: u64) -> Option<Request> {
        None
    }
}

/// How many requests are in flight.
#[derive(Debug, Serialize)]
pub(super) struct InFlight {
    pub requests_per_s: f64,
    /// Seconds that a request takes, and whether the log says so or the simulation.
    pub seconds: f64,
    pub measured: bool,
    /// The product of both: on all hosts, and on each of them.
    pub total: f64,
    pub per_host: f64,
    /// 99 of 100 requests find no more than this many on their host, themselves included.
    pub peak: u32,
}

/// By Little's law, and by the hosts that the requests were sent to; or why that is not known.
pub(super) fn in_flight(
    requests: &Requests,
    arrivals: &Arrivals,
    replay: &Replay,
) -> Result<InFlight, &'static str> {
    let records = &replay.outcome.records;
    let span = arrivals.at_s.last().copied().unwrap_or(0.0);
    if !arrivals.known {
        return Err(
            "not every line of the log has a time. Give each line its \"time\" (in seconds), or \
             --rate.",
        );
    }
    if records.len() < 2 || span <= 0.0 {
        return Err("that takes two requests at different times.");
    }
    let measured = requests.all.iter().all(|ready| ready.duration.is_some());
    let times = records.iter().zip(&requests.all).map(|(record, ready)| {
        let from = record.arrived_ns as f64 / NS_PER_S;
        let done = record.done_ns.unwrap_or(replay.outcome.end_ns) as f64 / NS_PER_S;
        let to = match ready.duration {
            Some(duration) if measured => from + duration,
            _ => done,
        };
        (record.host, from, to)
    });
    let times: Vec<(u32, f64, f64)> = times.collect();
    let seconds = times.iter().map(|(_, from, to)| to - from).sum::<f64>() / times.len() as f64;
    let requests_per_s = (times.len() - 1) as f64 / span;
    let total = requests_per_s * seconds;
    Ok(InFlight {
        requests_per_s,
        seconds,
        measured,
        total,
        per_host: total / f64::from(replay.hosts.max(1)),
        peak: peak(&times),
    })
}

/// What 99 of 100 requests find at most on their host when they come, with themselves.
fn peak(times: &[(u32, f64, f64)]) -> u32 {
    let mut events: Vec<(f64, bool, u32)> = Vec::with_capacity(2 * times.len());
    for &(host, from, to) in times {
        events.push((from, true, host));
        events.push((to, false, host));
    }
    // Ends before arrivals at the same time.
    events.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut counts: std::collections::BTreeMap<u32, u32> = std::collections::BTreeMap::new();
    let mut found = Vec::with_capacity(times.len());
    for (_, begins, host) in events {
        let count = counts.entry(host).or_insert(0);
        if begins {
            *count += 1;
            found.push(*count);
        } else {
            *count = count.saturating_sub(1);
        }
    }
    found.sort_unstable();
    let rank = (found.len() as f64 * 0.99).ceil().max(1.0) as usize;
    found.get(rank - 1).copied().unwrap_or(0)
}
