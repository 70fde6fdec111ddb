//! `prefix-router load`: a workload against any URL, open loop, and what came of it.
//!
//! Guarantee: arrivals depend on the seed only, so that two runs ask the same at the same times.
//! Not here: the workloads (workload/), engines, Envoy.

pub mod answer;
pub mod client;
pub mod driver;
pub mod engines;
pub mod stats;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use anyhow::Context as _;
use hyper::header::HeaderMap;
use serde::Serialize;

use crate::numbers;
use crate::workload::{Form, WorkloadArgs};
use client::{Client, Target};
use driver::{Driver, Phase, Record, Until, Watch};
use engines::{Counters, Engines};
use stats::{Percentiles, Tally};

/// A request sent later than this was not sent when it was due: the figures then say what the
/// load generator could do, not what the engines can.
const LAG_WARN_MS: f64 = 20.0;

/// Options of `load`.
#[derive(Clone, Debug, clap::Args)]
pub struct LoadArgs {
    /// Where to send requests, e.g. `http://127.0.0.1:8080`.
    #[arg(long)]
    url: hyper::Uri,
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Seconds that are measured, in engine time; a trace is played to its end without it.
    #[arg(long, value_name = "SECONDS", value_parser = numbers::seconds)]
    duration: Option<f64>,
    /// Seconds before that which are not, in engine time.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0,
          value_parser = numbers::seconds_or_none)]
    warmup: f64,
    /// How many times faster than real time the engines' clock runs: requests come as much
    /// faster, and all times are given in engine time.
    #[arg(long, default_value_t = 1.0, value_parser = numbers::speed)]
    speed: f64,
    /// The API to use.
    #[arg(long, value_enum, default_value = "chat")]
    form: Form,
    /// The model's name in the requests.
    #[arg(long, default_value = "sim")]
    model: String,
    /// Ask for whole answers instead of streams: there is no TTFT then.
    #[arg(long)]
    no_stream: bool,
    /// A header to send, as `name: value`; repeatable.
    #[arg(long = "header", value_name = "HEADER")]
    headers: Vec<String>,
    /// An engine, `ip:port`, whose own counts of hits and requests are wanted too; repeatable.
    #[arg(long = "engine", value_name = "ADDRESS")]
    engines: Vec<String>,
    /// Seconds after which a request has failed, in real time.
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0,
          value_parser = numbers::seconds_or_none)]
    timeout: f64,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// What `load --json` prints.
#[derive(Clone, Debug, Serialize)]
struct Report {
    url: String,
    seed: u64,
    rate: f64,
    seconds: f64,
    requests: u64,
    errors: BTreeMap<String, u64>,
    hit_rate: Option<f64>,
    ttft_ms: Option<Percentiles>,
    total_ms: Option<Percentiles>,
    requests_per_s: f64,
    output_tokens_per_s: f64,
    lag_ms: Option<Percentiles>,
    engines: BTreeMap<String, Counters>,
}

/// Runs the command.
///
/// # Errors
/// If an option is out of range, or not one request succeeded.
pub fn run(args: &LoadArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(load(args))
}

async fn load(args: &LoadArgs) -> anyhow::Result<()> {
    let speed = args.speed;
    let warmup = Duration::from_secs_f64(args.warmup);
    let plan = args.workload.plan()?;
    let until = match args.duration {
        Some(duration) => Until::Elapsed(warmup + Duration::from_secs_f64(duration)),
        None if args.workload.trace.is_some() => Until::End,
        None => anyhow::bail!("--duration: needed, since only a trace has an end"),
    };
    let mut driver = Driver::new(Client::new(target(args)?)?, plan.open()?);
    let engines = Engines::new(args.engines.clone());
    let mut watch = Progress {
        tally: Tally::after(warmup),
        until,
    };
    let drain = Duration::from_secs_f64(args.timeout);
    let phase = Phase {
        speed,
        output_tokens: None,
        until,
        drain,
    };
    // What engines counted before the measured seconds is not theirs.
    let warm = async {
        tokio::time::sleep(warmup.div_f64(speed)).await;
        engines.counters().await
    };
    let ((), before) = tokio::join!(driver.play(phase, &mut watch), warm);
    let before = before?;
    watch.clear();
    let after = engines.counters().await?;
    let counted = after
        .iter()
        .zip(&before)
        .map(|(after, before)| after.since(before));
    let counted = args.engines.iter().cloned().zip(counted).collect();
    let report = report(args, plan.rate(), &watch.tally, counted);
    let text = if args.json {
        serde_json::to_string(&report)? + "\n"
    } else {
        table(&report)
    };
    crate::print::result(format_args!("{text}"))?;
    let first = || {
        report
            .errors
            .keys()
            .next()
            .cloned()
            .unwrap_or_else(|| "nothing sent".into())
    };
    anyhow::ensure!(
        report.requests > 0,
        "not one request to {} succeeded: {}",
        args.url,
        first()
    );
    Ok(())
}

fn target(args: &LoadArgs) -> anyhow::Result<Target> {
    let mut headers = HeaderMap::new();
    for text in &args.headers {
        let (name, value) = client::header(text).with_context(|| format!("--header {text:?}"))?;
        headers.append(name, value);
    }
    Ok(Target {
        base: args.url.clone(),
        form: args.form,
        model: args.model.clone(),
        stream: !args.no_stream,
        headers,
        prefix_header: None,
        timeout: Duration::from_secs_f64(args.timeout),
    })
}

fn report(
    args: &LoadArgs,
    rate: f64,
    tally: &Tally,
    engines: BTreeMap<String, Counters>,
) -> Report {
    // Tokens and requests of the window arrive until its last answer ends.
    let seconds = args
        .duration
        .unwrap_or(0.0)
        .max(tally.last_end.as_secs_f64())
        .max(1e-9);
    Report {
        url: args.url.to_string(),
        seed: args.workload.seed,
        rate,
        seconds,
        requests: tally.requests,
        errors: tally.errors.clone(),
        hit_rate: tally.hit_rate(),
        ttft_ms: tally.ttft.percentiles(),
        total_ms: tally.total.percentiles(),
        requests_per_s: tally.requests as f64 / seconds,
        output_tokens_per_s: tally.output_tokens as f64 / seconds,
        lag_ms: tally.lag.percentiles(),
        engines,
    }
}

fn table(report: &Report) -> String {
    let mut out = String::new();
    let times = |times: Option<Percentiles>| {
        times.map_or("not measured".into(), |all| {
            format!(
                "P50 {:.0}  P90 {:.0}  P99 {:.0}  mean {:.0}",
                all.p50, all.p90, all.p99, all.mean
            )
        })
    };
    let hits = report
        .hit_rate
        .map_or("not told by the engine".into(), |hit| {
            format!("{:.1} % of the prompt tokens", hit * 100.0)
        });
    let errors: Vec<String> = report
        .errors
        .iter()
        .map(|(kind, count)| format!("{kind} {count}"))
        .collect();
    let errors = if errors.is_empty() {
        "none".into()
    } else {
        errors.join(", ")
    };
    let rows = [
        (
            "requests",
            format!("{} in {:.1} s", report.requests, report.seconds),
        ),
        ("errors", errors),
        ("cache hits", hits),
        ("TTFT, ms", times(report.ttft_ms)),
        ("whole answer, ms", times(report.total_ms)),
        (
            "throughput",
            format!(
                "{:.1} requests/s, {:.0} output tokens/s",
                report.requests_per_s, report.output_tokens_per_s
            ),
        ),
        ("sent late by, ms", times(report.lag_ms)),
    ];
    for (name, value) in rows {
        let _ = writeln!(out, "{name:<18}{value}");
    }
    let all = Counters::sum(report.engines.values());
    for (address, one) in &report.engines {
        let share = one.requests as f64 / all.requests.max(1) as f64 * 100.0;
        let hit = one.hit_rate() * 100.0;
        let _ = writeln!(
            out,
            "{address:<18}{share:.1} % of the requests, {hit:.1} % hits"
        );
    }
    if report.lag_ms.is_some_and(|lag| lag.p99 > LAG_WARN_MS) {
        let _ = writeln!(
            out,
            "Attention: the load generator itself was late; TTFT contains its delay."
        );
    }
    out
}

/// A tally that says how far it is, on standard error.
struct Progress {
    tally: Tally,
    until: Until,
}

impl Progress {
    fn clear(&self) {
        crate::print::remark(format_args!("\r{:79}\r", ""));
    }
}

impl Watch for Progress {
    fn ended(&mut self, record: Record) {
        self.tally.ended(record);
    }

    fn tick(&mut self, sent: u64, in_flight: usize, elapsed: Duration) {
        self.tally.tick(sent, in_flight, elapsed);
        let of = match self.until {
            Until::Elapsed(length) => format!(" of {:.0}", length.as_secs_f64()),
            Until::Requests(_) | Until::End => String::new(),
        };
        let (now, errors) = (elapsed.as_secs_f64(), self.tally.failed());
        crate::print::remark(format_args!(
            "\r{now:.0}{of} s, {sent} sent, {in_flight} in flight, {errors} errors   "
        ));
    }
}
