//! `prefix-router scale`: a fleet that gains a host and loses one, under a workload through a real
//! Envoy, and what that does to prefixes and hits.
//!
//! Guarantee: the figures of an event are those that `simulate` gives for one, of the hosts that
//! really answered and the tokens that the engines found in their caches. Not here: requests that
//! fail while hosts flap (churn).

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use hyper::header::HeaderMap;
use serde::Serialize;
use serde_json::json;
use tokio::net::TcpListener;

use crate::engine::server::{self, Handle, ServerConfig};
use crate::load::client::{Client, Target};
use crate::load::driver::{self, Driver, Phase, Until, Watch};
use crate::print::{note, say};
use crate::simulate::measure::{self, EventFigures};
use crate::simulate::world::{Happening, Outcome, Record};
use crate::testkit::Gateway;
use crate::workload::{Form, WorkloadArgs};

/// Engine time before the first event, between the events, and after the second: an event's figures
/// are of two minutes on each side, and of the slow start between them.
const BEFORE: Duration = Duration::from_secs(120);
const BETWEEN: Duration = Duration::from_secs(180);
const AFTER: Duration = Duration::from_secs(120);
/// Engine time over which the new host takes its share: the filter's default.
const SLOW_START_S: f64 = 30.0;
/// How fast engines run while their caches are filled: one token of answer is enough for that.
const WARM_SPEED: f64 = 10.0;
/// How often each prompt is asked for, in the mean, before anything is measured.
const WARM_ROUNDS: u64 = 2;
/// Tokens in one event of a stream, so that events do not cost more than requests.
const TOKENS_PER_EVENT: u32 = 16;
/// Real time that requests may take beyond the end.
const DRAIN: Duration = Duration::from_secs(60);
/// Engine seconds of one bin of the hit rate.
const BIN_S: f64 = 10.0;

/// ROUTING.md 1: prefixes that may move beyond the changed host's share, the dip, the recovery.
const MOVED_OVER_SHARE: f64 = 0.02;
/// DESIGN: between hosts that stay, no more than moves without the event and so much more.
const MOVED_OVER_CHURN: f64 = 0.005;
const DIP_MAX: f64 = 0.10;
const RECOVERY_MAX_S: f64 = 70.0;

/// `prefix-router scale`
#[derive(Args, Clone, Debug)]
pub struct ScaleArgs {
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Engines before the new one comes
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=64))]
    engines: u32,
    /// How many times faster than real time the engines' clock runs
    #[arg(long, default_value_t = 2.0, value_parser = crate::numbers::speed)]
    speed: f64,
    /// Print the result as one JSON object on stdout
    #[arg(long)]
    json: bool,
}

/// What scaling did.
#[derive(Clone, Debug, Serialize)]
pub struct ScaleReport {
    /// The sources' commit.
    pub commit: String,
    /// What the workload follows from.
    pub seed: u64,
    /// Requests a second, in engine time.
    pub rate: f64,
    /// Engines before and after.
    pub engines: u32,
    /// Requests of the measured time.
    pub requests: u64,
    /// Those that failed.
    pub failed: u64,
    /// The 99th percentile of how late requests were sent, in milliseconds of real time.
    pub lag_p99_ms: f64,
    /// The new host, then the removed one.
    pub events: Vec<Event>,
    /// The hit rate of each ten seconds of engine time.
    pub hits: Vec<f64>,
}

/// One event.
#[derive(Clone, Debug, Serialize)]
pub struct Event {
    /// The figures that `simulate` gives too.
    #[serde(flatten)]
    pub figures: EventFigures,
    /// An even share of the prefixes: the new host's, or the removed one's.
    pub share: f64,
    /// Part of the keys that moved from one staying host to another.
    pub moved_between_others: f64,
}

impl Event {
    /// A load that leads single requests elsewhere does so without the event too.
    fn moved_max(&self) -> f64 {
        self.share + MOVED_OVER_SHARE + self.figures.churn
    }

    fn faults(&self) -> Vec<String> {
        let figures = &self.figures;
        let mut faults = Vec::new();
        let mut fault = |found: bool, text: String| {
            if found {
                faults.push(format!("{}: {text}", figures.event));
            }
        };
        let moved = figures.moved * 100.0;
        fault(
            figures.moved > self.moved_max(),
            format!("{moved:.1} % of the prefixes moved"),
        );
        let others = self.moved_between_others * 100.0;
        fault(
            self.moved_between_others > figures.churn + MOVED_OVER_CHURN,
            format!("{others:.1} % moved between hosts that stayed"),
        );
        let dip = (figures.hit_before - figures.hit_dip) * 100.0;
        fault(
            figures.hit_before - figures.hit_dip > DIP_MAX,
            format!("hits fell by {dip:.1} points"),
        );
        let recovered = figures.recovery_s.is_some_and(|s| s <= RECOVERY_MAX_S);
        fault(!recovered, format!("recovery {}", recovery(figures)));
        faults
    }
}

fn recovery(figures: &EventFigures) -> String {
    let seconds = figures.recovery_s;
    seconds.map_or("never".to_owned(), |s| format!("{s:.0} s"))
}

impl ScaleReport {
    /// What is over its budget; empty if all is well.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut faults: Vec<String> = self.events.iter().flat_map(Event::faults).collect();
        if self.failed > 0 {
            faults.push(format!("{} requests failed", self.failed));
        }
        faults
    }
}

impl fmt::Display for ScaleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} requests at {:.1}/s over {} -> {} -> {} engines, {} failed, seed {}",
            self.requests,
            self.rate,
            self.engines,
            self.engines + 1,
            self.engines,
            self.failed,
            self.seed
        )?;
        writeln!(
            f,
            "{:9} {:>5} {:>7} {:>7} {:>6} {:>6} {:>20} {:>8} {:>6}",
            "event", "keys", "moved", "at most", "others", "calm", "hits, %", "recovery", "P99"
        )?;
        for event in &self.events {
            let figures = &event.figures;
            let hits = [figures.hit_before, figures.hit_dip, figures.hit_after];
            let hits = hits.map(|rate| format!("{:.1}", rate * 100.0)).join(" -> ");
            writeln!(
                f,
                "{:9} {:>5} {:>5.1} % {:>5.1} % {:>4.1} % {:>4.1} % {hits:>20} {:>8} {:>4.1} s",
                figures.event,
                figures.keys,
                figures.moved * 100.0,
                event.moved_max() * 100.0,
                event.moved_between_others * 100.0,
                figures.churn * 100.0,
                recovery(figures),
                figures.ttft_p99_s,
            )?;
        }
        writeln!(
            f,
            "others: moved between hosts that stayed; calm: moved before the first event"
        )?;
        writeln!(f, "hits of each ten seconds, %:")?;
        for (row, bins) in self.hits.chunks(12).enumerate() {
            let bins = bins.iter().map(|rate| format!(" {:>4.0}", rate * 100.0));
            writeln!(f, "{:>5} s{}", row * 120, bins.collect::<String>())?;
        }
        writeln!(
            f,
            "sent late by {:.0} ms at P99, commit {}",
            self.lag_p99_ms, self.commit
        )?;
        match self.faults().as_slice() {
            [] => writeln!(f, "PASSED: all within their budgets"),
            faults => writeln!(f, "FAILED: {}", faults.join("; ")),
        }
    }
}

/// Runs `prefix-router scale`; an error if anything is over its budget.
pub fn run(args: &ScaleArgs) -> Result<()> {
    let report = tokio::runtime::Runtime::new()?.block_on(scale(args))?;
    if args.json {
        say!("{}", serde_json::to_string(&report)?)?;
    } else {
        crate::print::result(format_args!("{report}"))?;
    }
    match report.faults().len() {
        0 => Ok(()),
        count => bail!("{count} figures are over their budgets"),
    }
}

/// The engines and the Envoy before them.
struct World {
    engines: Vec<Handle>,
    addresses: Vec<SocketAddr>,
    gateway: Gateway,
}

/// Scales a fleet and reports, whatever came out.
pub async fn scale(args: &ScaleArgs) -> Result<ScaleReport> {
    ensure!(
        args.speed.is_finite() && args.speed > 0.0,
        "--speed: expected above 0, got {}",
        args.speed
    );
    let world = start(args).await?;
    let plan = args.workload.plan()?;
    let workload = plan.open()?;
    let prompts = workload.prefixes().unwrap_or_default();
    let mut driver = Driver::new(Client::new(target(&world)?)?, workload);

    note!("scale: filling the caches …");
    world.set_speed(WARM_SPEED);
    let mut seen = Seen::new(&world.addresses);
    let phase = Phase {
        speed: WARM_SPEED,
        output_tokens: Some(1),
        until: Until::Requests((prompts * WARM_ROUNDS).max(1)),
        drain: DRAIN,
    };
    driver.play(phase, &mut seen).await;

    world.set_speed(args.speed);
    let length = BEFORE + BETWEEN + AFTER;
    let seconds = length.as_secs_f64() / args.speed;
    note!("scale: measuring for {seconds:.0} s …");
    let phase = Phase {
        speed: args.speed,
        output_tokens: None,
        until: Until::Elapsed(length),
        drain: DRAIN,
    };
    let mut seen = Seen::new(&world.addresses);
    let ((), at) = tokio::join!(driver.play(phase, &mut seen), events(args, &world));
    Ok(report(args, plan.rate(), at?, seen))
}

async fn start(args: &ScaleArgs) -> Result<World> {
    let mut engines = Vec::new();
    for _ in 0..=args.engines {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let config = ServerConfig {
            tokens_per_event: TOKENS_PER_EVENT,
            ..ServerConfig::default()
        };
        engines.push(server::spawn(config, listener)?);
    }
    let addresses: Vec<SocketAddr> = engines.iter().map(Handle::address).collect();
    let first = addresses.get(1..).unwrap_or_default();
    let slow_start_ms = (SLOW_START_S * 1000.0 / args.speed) as u64;
    let gateway = Gateway::at(first.iter().copied())
        .eds()
        .config(json!({"debug_headers": "always"}))
        .pool(json!({"slow_start_ms": slow_start_ms}))
        .edit(|plan| plan.log_level("warning"));
    let gateway = gateway.start().await?;
    Ok(World {
        engines,
        addresses,
        gateway,
    })
}

impl World {
    fn set_speed(&self, speed: f64) {
        for engine in &self.engines {
            engine.set_speed(speed);
        }
    }
}

fn target(world: &World) -> Result<Target> {
    Ok(Target {
        base: format!("http://{}", world.gateway.address()).parse()?,
        form: Form::Chat,
        model: "sim".to_owned(),
        stream: true,
        headers: HeaderMap::new(),
        prefix_header: None,
        timeout: DRAIN,
    })
}

/// Adds the first engine, later removes the last; when, in seconds of engine time.
async fn events(args: &ScaleArgs, world: &World) -> Result<[f64; 2]> {
    let began = Instant::now();
    let now = || began.elapsed().as_secs_f64() * args.speed;
    let last = world.addresses.len().saturating_sub(1);
    tokio::time::sleep(BEFORE.div_f64(args.speed)).await;
    let added = now();
    world.gateway.envoy().set_hosts(&world.addresses).await?;
    let left = (BEFORE + BETWEEN).div_f64(args.speed);
    tokio::time::sleep(left.saturating_sub(began.elapsed())).await;
    let removed = now();
    let staying = world.addresses.get(..last).context("no hosts")?;
    world.gateway.envoy().set_hosts(staying).await?;
    Ok([added, removed])
}

/// The requests so far, as `simulate` records them.
struct Seen {
    hosts: Vec<String>,
    records: Vec<Record>,
    lags: Vec<f64>,
    failed: u64,
}

impl Seen {
    fn new(addresses: &[SocketAddr]) -> Self {
        Self {
            hosts: addresses.iter().map(ToString::to_string).collect(),
            records: Vec::new(),
            lags: Vec::new(),
            failed: 0,
        }
    }
}

impl Watch for Seen {
    fn ended(&mut self, record: driver::Record) {
        let outcome = &record.outcome;
        self.lags.push(record.lag.as_secs_f64() * 1000.0);
        let host = outcome.served_by.as_ref();
        let host = host.and_then(|served| self.hosts.iter().position(|host| host == served));
        let (Some(host), None, Some(usage)) = (host, outcome.failure, outcome.answer.usage) else {
            self.failed += 1;
            return;
        };
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let tokens = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        self.records.push(Record {
            arrived_ns: nanos(record.due),
            host: host as u32,
            prefix: record.prefix,
            // Every request of a chat has the chat's prefix; one without is alone.
            chat: u64::MAX - self.records.len() as u64,
            turn: 0,
            prompt_tokens: tokens(usage.prompt_tokens),
            output_tokens: tokens(usage.completion_tokens),
            cached_tokens: tokens(usage.cached_tokens.unwrap_or(0)),
            first_ns: record.ttft.map(nanos),
            done_ns: Some(nanos(record.due + record.total)),
            diverted: false,
            lost: false,
        });
    }

    fn tick(&mut self, _sent: u64, _in_flight: usize, _elapsed: Duration) {}
}

fn report(args: &ScaleArgs, rate: f64, at: [f64; 2], mut seen: Seen) -> ScaleReport {
    seen.records.sort_by_key(|record| record.arrived_ns);
    let outcome = Outcome {
        records: seen.records,
        ..Outcome::default()
    };
    let [added, removed] = at;
    let (new, gone) = (0, args.engines);
    // Nothing happens in the middle of the time before: what differs there is churn.
    let calm_s = BEFORE.as_secs_f64() / 2.0;
    let before = outcome.records.iter();
    let before = before.filter(|record| (record.arrived_ns as f64) < added * 1e9);
    let before: Vec<Record> = before.cloned().collect();
    let churn = measure::moved_between(&before, calm_s, 0.0, new);
    let event = |at_s, what, settle_s, host| {
        let figures = EventFigures {
            churn,
            ..measure::event(at_s, what, settle_s, &outcome)
        };
        let others = measure::moved_between(&outcome.records, at_s, settle_s, host);
        Event {
            figures,
            share: 1.0 / f64::from(args.engines + 1),
            moved_between_others: others,
        }
    };
    let length = (BEFORE + BETWEEN + AFTER).as_secs_f64();
    let bins = (0..(length / BIN_S) as u32).map(|bin| f64::from(bin) * BIN_S);
    seen.lags.sort_by(f64::total_cmp);
    let last = seen.lags.len().saturating_sub(1) as f64;
    ScaleReport {
        commit: crate::setup::commit(),
        seed: args.workload.seed,
        rate,
        engines: args.engines,
        requests: outcome.records.len() as u64 + seen.failed,
        failed: seen.failed,
        lag_p99_ms: seen
            .lags
            .get((last * 0.99) as usize)
            .copied()
            .unwrap_or(0.0),
        events: vec![
            event(added, Happening::Add, SLOW_START_S, new),
            event(removed, Happening::Remove(gone), 0.0, gone),
        ],
        hits: bins
            .map(|from| measure::hits_of(&outcome.records, from, from + BIN_S))
            .collect(),
    }
}
