//! `prefix-router churn`: steady traffic through a real Envoy while a host comes and goes.
//!
//! Guarantee: every request is counted as answered or failed, and every prefix that was answered by
//! a host which is not one of its two homes is counted as moved. Not here: hit rates over such
//! events, which the simulator reports (simulate).

use std::collections::BTreeSet;
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use clap::Args;
use serde::Serialize;
use serde_json::json;

use crate::numbers;
use crate::print::say;
use crate::testkit::{Gateway, MockEngine, Protocol, Traffic, TrafficPlan, prompt_of};

/// An answer takes 5 ms; one that takes this long was held up by something.
const HUNG: Duration = Duration::from_secs(5);
/// How long the filter may take to know a change of hosts.
const SETTLE_LIMIT: Duration = Duration::from_secs(20);

/// `prefix-router churn`
#[derive(Args, Clone, Debug)]
pub struct ChurnArgs {
    /// How long the traffic flows
    #[arg(long, default_value_t = 120)]
    pub seconds: u64,
    /// How often per second the last host leaves and comes back
    #[arg(long, default_value_t = 1.0, value_parser = numbers::within(0.001, 1000.0, "flaps a second"))]
    pub flaps_per_second: f64,
    /// How many engines, with the one that flaps
    #[arg(long, default_value_t = 8)]
    pub engines: usize,
    /// Envoy's worker threads
    #[arg(long, default_value_t = 4)]
    pub workers: u32,
    /// Requests per second
    #[arg(long, default_value_t = 200.0, value_parser = numbers::rate)]
    pub rate: f64,
    /// Different prefixes in the traffic
    #[arg(long, default_value_t = 400)]
    pub prefixes: u64,
    /// Print the result as one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// What churn did.
#[derive(Clone, Debug, Serialize)]
pub struct ChurnReport {
    /// The sources' commit.
    pub commit: String,
    /// Times that the host left and came back.
    pub flaps: u64,
    /// Requests sent while it did.
    pub requests: u64,
    /// Those without a whole answer.
    pub failed: u64,
    /// Some of them.
    pub failures: Vec<String>,
    /// The longest that an answer took.
    pub slowest_ms: u64,
    /// The share of prefixes whose home changes when the host leaves.
    pub share_of_host: f64,
    /// Prefixes that were answered by a host that is home in neither state.
    pub moved_elsewhere: usize,
    /// Counters that were not zero at the end.
    pub uneven: Option<String>,
}

impl ChurnReport {
    /// What must not be; empty if all is well.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.failed > 0 {
            faults.push(format!(
                "{} requests failed: {:?}",
                self.failed, self.failures
            ));
        }
        if u128::from(self.slowest_ms) >= HUNG.as_millis() {
            faults.push(format!("a request took {} ms", self.slowest_ms));
        }
        if self.moved_elsewhere > 0 {
            faults.push(format!(
                "{} prefixes moved between other hosts",
                self.moved_elsewhere
            ));
        }
        if let Some(uneven) = &self.uneven {
            faults.push(format!("counters did not come out even: {uneven}"));
        }
        faults
    }
}

impl fmt::Display for ChurnReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} flaps under {} requests: {} failed, the slowest took {} ms (commit {})",
            self.flaps, self.requests, self.failed, self.slowest_ms, self.commit
        )?;
        writeln!(
            f,
            "{:.1} % of the prefixes are the flapping host's; {} moved between other hosts",
            self.share_of_host * 100.0,
            self.moved_elsewhere
        )?;
        match &self.uneven {
            None => writeln!(f, "all counters zero at the end"),
            Some(uneven) => writeln!(f, "counters are NOT zero: {uneven}"),
        }
    }
}

/// Runs `prefix-router churn`; an error if anything failed or moved that should not.
pub fn run(args: &ChurnArgs) -> Result<()> {
    let report = tokio::runtime::Runtime::new()?.block_on(churn(args))?;
    if args.json {
        say!("{}", serde_json::to_string(&report)?)?;
    } else {
        crate::print::result(format_args!("{report}"))?;
    }
    match report.faults().as_slice() {
        [] => Ok(()),
        faults => bail!("{}", faults.join("; ")),
    }
}

/// Flaps a host under traffic and reports, whatever came out.
pub async fn churn(args: &ChurnArgs) -> Result<ChurnReport> {
    ensure!(
        args.engines >= 2,
        "churn needs two engines: one that flaps and one that stays"
    );
    ensure!(
        args.flaps_per_second > 0.0,
        "a host that never flaps is no churn"
    );
    let engines = MockEngine::start_many(args.engines).await?;
    let staying = engines.get(..args.engines - 1).unwrap_or_default();
    let gateway = start(args, &engines).await?;
    let with = homes(&gateway, args.prefixes).await?;
    gateway.set_hosts(staying).await?;
    gateway
        .wait_hosts("usable", staying.len(), SETTLE_LIMIT)
        .await?;
    let without = homes(&gateway, args.prefixes).await?;

    let plan = TrafficPlan {
        per_second: args.rate,
        prefixes: args.prefixes,
        ..TrafficPlan::default()
    };
    let traffic = Traffic::start(gateway.address(), &plan);
    let flaps = flap(args, &gateway, &engines, staying).await?;
    let report = traffic.stop().await?;
    let pairs = || with.iter().zip(&without);
    let share = pairs().filter(|(with, without)| with != without).count();
    let moved_elsewhere = report
        .hosts
        .values()
        .zip(pairs())
        .filter(|(hosts, (with, without))| {
            let homes: BTreeSet<&String> = [*with, *without].into();
            hosts.iter().any(|host| !homes.contains(host))
        })
        .count();
    Ok(ChurnReport {
        commit: crate::setup::commit(),
        flaps,
        requests: report.sent,
        failed: report.failed,
        failures: report.failures,
        slowest_ms: u64::try_from(report.slowest.as_millis())?,
        share_of_host: share as f64 / with.len().max(1) as f64,
        moved_elsewhere,
        uneven: gateway
            .quiet()
            .await
            .err()
            .map(|error| format!("{error:#}")),
    })
}

/// Keys that depend on the prompt alone and full shares at once, so that what moves is what
/// placement moves.
async fn start(args: &ChurnArgs, engines: &[MockEngine]) -> Result<Gateway> {
    let workers = args.workers;
    let pool =
        json!({"routing": "fixed", "prefix_length": 1024, "limit": 1000, "slow_start_ms": 0});
    let plan = Gateway::of(engines).eds().pool(pool);
    plan.edit(move |plan| plan.concurrency(workers).log_level("warning"))
        .start()
        .await
}

/// Each prefix's host while nothing changes.
async fn homes(gateway: &Gateway, prefixes: u64) -> Result<Vec<String>> {
    let client = gateway.client(Protocol::Http1);
    let mut homes = Vec::new();
    for prefix in 0..prefixes {
        homes.push(client.host(prompt_of(prefix)).await?);
    }
    Ok(homes)
}

/// Lets the last host come and go; says how often.
async fn flap(
    args: &ChurnArgs,
    gateway: &Gateway,
    all: &[MockEngine],
    staying: &[MockEngine],
) -> Result<u64> {
    let half = Duration::from_secs_f64(0.5 / args.flaps_per_second);
    let (started, mut flaps) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_secs(args.seconds) {
        gateway.set_hosts(all).await?;
        tokio::time::sleep(half).await;
        gateway.set_hosts(staying).await?;
        tokio::time::sleep(half).await;
        flaps += 1;
    }
    Ok(flaps)
}
