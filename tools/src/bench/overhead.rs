//! `prefix-router bench overhead`: processor time that the filter adds to Envoy's, per request.
//!
//! Envoys of one worker each run from the same file, one without the filter, others with builds of it
//! that are to be compared. They get the same requests in turn, slice by slice; the added time is the
//! median of the differences of the slices of a round. Processor time is the kernel's count of what
//! Envoy's threads ran, so it includes the filter's polling and ticking. Not here: latency, which a
//! loaded machine drowns.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use serde::Serialize;

use super::http::{Load, Upstream, request, saturate};
use crate::harness::{Envoy, Plan, Policy};
use crate::print::{note, say};
use crate::{setup, testkit};

/// As many as the design's figures are for.
const HOSTS: usize = 7;

/// Bodies of a size: enough that prefixes recur and tails differ, few enough to keep in memory
/// (64 × 256 KB = 16 MB).
const PROMPTS: u64 = 64;

/// How many of them share a system prompt, which is half of the body.
const PROMPTS_PER_PREFIX: u64 = 4;

/// Body sizes in KB with their budgets in µs (DESIGN: added Envoy CPU per request).
const BUDGETS: [(usize, f64); 3] = [(4, 40.0), (32, 90.0), (256, 300.0)];

/// Their sizes, as `--only` names them.
const SIZES: [&str; 3] = ["4", "32", "256"];

/// Bytes sent per slice: a slice of 4 KB bodies then has 1,024 requests and takes a quarter of a
/// second, so that what else runs on the machine meets all slices of a round alike.
const SLICE_BYTES: usize = 4 << 20;

/// A slice of large bodies has at least this many requests.
const SLICE_REQUESTS_MIN: usize = 64;

/// Requests to each Envoy before the first that counts, of each size: V8 compiles what runs often
/// anew, and all 64 prompts have to be known.
const WARMUP_REQUESTS: usize = 2048;

/// Options of `prefix-router bench overhead`
#[derive(Args, Debug)]
pub(super) struct OverheadArgs {
    /// Slices per body size and Envoy
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Connections that send one request after the other
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    connections: u32,
    /// Another build of the filter, measured in the same rounds; may be repeated
    #[arg(long, value_name = "WASM")]
    against: Vec<PathBuf>,
    /// Only bodies of this size
    #[arg(long, value_name = "KB", value_parser = SIZES)]
    only: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    bodies: Vec<Row>,
    rounds: u32,
    connections: u32,
    commit: String,
}

/// What one size of body costs, in µs of processor time per request.
#[derive(Serialize)]
struct Row {
    body_bytes: usize,
    requests: usize,
    without_filter_us: f64,
    with_filter_us: f64,
    added_us: Spread,
    budget_us: f64,
    against: Vec<Other>,
}

/// Another build of the filter, on the same bodies.
#[derive(Serialize)]
struct Other {
    wasm: PathBuf,
    added_us: Spread,
    /// What the filter of these sources costs more, of the same rounds.
    ours_more_us: Spread,
}

/// Of the differences of the slices of a round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Spread {
    median: f64,
    /// A quarter of the differences is lower.
    p25: f64,
    /// A quarter of the differences is higher.
    p75: f64,
}

impl Spread {
    fn range(&self) -> String {
        format!("{:.1}..{:.1}", self.p25, self.p75)
    }
}

/// Runs it and prints the result.
pub(super) fn run(args: &OverheadArgs) -> Result<()> {
    let report = tokio::runtime::Runtime::new()?.block_on(measure(args))?;
    if args.json {
        say!("{}", serde_json::to_string(&report)?)?;
    } else {
        print(&report)?;
    }
    Ok(())
}

async fn measure(args: &OverheadArgs) -> Result<Report> {
    let mut upstreams = Vec::new();
    for _ in 0..HOSTS {
        upstreams.push(Upstream::start().await?);
    }
    let hosts: Vec<_> = upstreams.iter().map(|upstream| upstream.address).collect();
    let plan = || -> Result<Plan> {
        let plan = Plan::load("envoy/envoy.yaml")?.hosts("engines", &hosts);
        Ok(plan.concurrency(1).log_level("warning"))
    };
    let without = plan()?.without_filter(Policy::LeastRequest).start().await?;
    let mut envoys = vec![without, plan()?.start().await?];
    for wasm in &args.against {
        envoys.push(plan()?.wasm(wasm).start().await?);
    }
    let mut bodies = Vec::new();
    let asked = |kilobytes: usize| {
        let only = args.only.as_ref();
        only.is_none_or(|only| *only == kilobytes.to_string())
    };
    for (kilobytes, budget_us) in BUDGETS.into_iter().filter(|(size, _)| asked(*size)) {
        note!("bench: bodies of {kilobytes} KB, {} rounds …", args.rounds);
        let requests = requests(kilobytes * 1024)?;
        bodies.push(measure_size(args, &envoys, &requests, budget_us).await?);
    }
    for envoy in envoys.iter().skip(1) {
        routed(envoy).await?;
    }
    Ok(Report {
        bodies,
        rounds: args.rounds,
        connections: args.connections,
        commit: setup::commit(),
    })
}

/// That the filter has done its work: an Envoy that routes nothing would be cheap.
async fn routed(envoy: &Envoy) -> Result<()> {
    let metric = "prefix_router_decisions_total";
    let placed = envoy
        .metric(metric, &[("decision", "home")])
        .await?
        .unwrap_or(0.0);
    let matched = envoy
        .metric(metric, &[("decision", "match")])
        .await?
        .unwrap_or(0.0);
    if placed + matched > 0.0 {
        return Ok(());
    }
    Err(anyhow!(
        "the filter placed no request ({metric} has neither home nor match)"
    ))
}

/// Measures the Envoys: without the filter, with ours, with those that it is compared with.
async fn measure_size(
    args: &OverheadArgs,
    envoys: &[Envoy],
    requests: &[Vec<u8>],
    budget_us: f64,
) -> Result<Row> {
    let bytes = requests.first().map_or(0, Vec::len);
    let count = (SLICE_BYTES / bytes.max(1)).max(SLICE_REQUESTS_MIN);
    for envoy in envoys {
        slice(args, envoy, requests, WARMUP_REQUESTS).await?;
    }
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); envoys.len()];
    for round in 0..args.rounds as usize {
        // Another is the first each time: none always has the warmer caches.
        for turn in 0..envoys.len() {
            let turn = (round + turn) % envoys.len();
            let (Some(envoy), Some(times)) = (envoys.get(turn), times.get_mut(turn)) else {
                continue;
            };
            times.push(slice(args, envoy, requests, count).await?);
        }
    }
    let [without, with, others @ ..] = times.as_slice() else {
        bail!("two Envoys at least, not {}", times.len());
    };
    let against = args.against.iter().zip(others).map(|(wasm, other)| {
        Ok(Other {
            wasm: wasm.clone(),
            added_us: more(other, without)?,
            ours_more_us: more(with, other)?,
        })
    });
    Ok(Row {
        body_bytes: bytes,
        requests: count * args.rounds as usize,
        without_filter_us: spread(without.clone())?.median,
        with_filter_us: spread(with.clone())?.median,
        added_us: more(with, without)?,
        budget_us,
        against: against.collect::<Result<_>>()?,
    })
}

/// What the first took more than the second, round by round.
fn more(these: &[f64], those: &[f64]) -> Result<Spread> {
    spread(these.iter().zip(those).map(|(a, b)| a - b).collect())
}

/// Sends `count` requests over all connections; Envoy's processor time per request in µs.
async fn slice(
    args: &OverheadArgs,
    envoy: &Envoy,
    requests: &[Vec<u8>],
    count: usize,
) -> Result<f64> {
    let before = envoy.usage()?.cpu;
    let load = Load::Requests(count);
    let sent = saturate(envoy.address(), requests, args.connections as usize, load).await?;
    let used = envoy.usage()?.cpu.saturating_sub(before);
    Ok(micros(used) / sent as f64)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Chat requests of about `bytes`.
fn requests(bytes: usize) -> Result<Vec<Vec<u8>>> {
    let bodies = bodies(bytes)?;
    Ok(bodies.iter().map(|body| request(body)).collect())
}

/// Bodies of about `bytes`: groups share their first half, every tail differs.
pub(super) fn bodies(bytes: usize) -> Result<Vec<Vec<u8>>> {
    let half = bytes / 2;
    (0..PROMPTS)
        .map(|prompt| {
            let system = testkit::words(group(prompt), half);
            let user = testkit::words(1_000 + prompt, half);
            let body = testkit::chat(&system, &user);
            (!body.is_empty()).then_some(body).context("an empty body")
        })
        .collect()
}

/// Which system prompt a body has.
pub(super) fn group(prompt: u64) -> u64 {
    prompt / PROMPTS_PER_PREFIX
}

fn spread(mut values: Vec<f64>) -> Result<Spread> {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let last = values.len().saturating_sub(1) as f64;
        values
            .get((last * share).round() as usize)
            .copied()
            .context("no rounds")
    };
    Ok(Spread {
        median: at(0.5)?,
        p25: at(0.25)?,
        p75: at(0.75)?,
    })
}

fn print(report: &Report) -> Result<()> {
    say!("Envoy's processor time per request, one worker, {HOSTS} hosts, in µs")?;
    say!(
        "{:>9} {:>9} {:>9} {:>9} {:>15} {:>8}",
        "body",
        "without",
        "with",
        "added",
        "p25..p75",
        "budget"
    )?;
    for row in &report.bodies {
        let verdict = if row.added_us.median <= row.budget_us {
            ""
        } else {
            "  over"
        };
        say!(
            "{:>6} KB {:>9.1} {:>9.1} {:>9.1} {:>15} {:>8.0}{verdict}",
            row.body_bytes / 1024,
            row.without_filter_us,
            row.with_filter_us,
            row.added_us.median,
            row.added_us.range(),
            row.budget_us,
        )?;
        for other in &row.against {
            say!("     against {}:", other.wasm.display())?;
            say!(
                "{:>29} {:>9.1} {:>15}   ours costs {:+.1} ({})",
                "",
                other.added_us.median,
                other.added_us.range(),
                other.ours_more_us.median,
                other.ours_more_us.range(),
            )?;
        }
    }
    say!(
        "{} rounds, {} connections, commit {}",
        report.rounds,
        report.connections,
        report.commit
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_of_the_sorted_values() {
        let spread = spread(vec![5.0, 1.0, 4.0, 2.0, 3.0]).unwrap();
        assert_eq!(
            spread,
            Spread {
                median: 3.0,
                p25: 2.0,
                p75: 4.0
            }
        );
        assert!(super::spread(Vec::new()).is_err());
    }

    #[test]
    fn requests_have_the_size_asked_for_and_share_half() {
        let requests = requests(32 * 1024).unwrap();
        assert_eq!(requests.len(), PROMPTS as usize);
        for request in &requests {
            assert!(
                (32_000..35_000).contains(&request.len()),
                "{}",
                request.len()
            );
        }
        let body = |prompt: usize| {
            let request = &requests[prompt];
            let head = request
                .windows(4)
                .position(|bytes| bytes == b"\r\n\r\n")
                .unwrap();
            &request[head..]
        };
        let shared = |a: &[u8], b: &[u8]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        assert!(shared(body(0), body(1)) > 16_000);
        assert!(shared(body(0), body(4)) < 1_000);
    }
}
