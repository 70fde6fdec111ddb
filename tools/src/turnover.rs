//! `prefix-router turnover`: hosts that are replaced by others of new addresses, again and again, in
//! a real Envoy, and what grows with the addresses: nothing may.
//!
//! Guarantee: every step waits until the filter knows its hosts and sends prompts to them; memory is
//! compared with that of an Envoy without the filter that saw the same hosts. Not here: requests
//! under hosts that flap (churn), how slots are reused (the filter's fleet.rs).

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::Args;
use prefix_router::names::{IN_FLIGHT, PENDING_TOKENS};
use serde::Serialize;
use serde_json::json;

use crate::harness::Policy;
use crate::print::say;
use crate::testkit::{Gateway, GatewayPlan, MockEngine, Protocol, prompt_of};

/// How long the filter may take to know a step's hosts: a poll is 0.1 s.
const STEP_LIMIT: Duration = Duration::from_secs(30);
/// Prompts sent at each step.
const PROMPTS: u64 = 20;
/// Steps after which memory is first read: code is compiled, buffers have their size.
const WARM_STEPS: u64 = 5;
/// Addresses that the loopback network is asked for at most: 3 × 250 × 250.
const ADDRESSES_MAX: u64 = 187_500;
/// What one more address may cost in memory, at most: a host's entry in the table and its load are
/// 80 bytes, so anything that is kept for each address shows.
const BYTES_PER_ADDRESS_MAX: f64 = 400.0;
/// Memory that an allocator takes and gives back as it likes.
const SLACK_BYTES: f64 = 4.0 * 1024.0 * 1024.0;
/// Hosts with metrics of their own: the default of `host_series_max`.
const SERIES_MAX: u64 = 256;

/// `prefix-router turnover`
#[derive(Args, Clone, Debug)]
pub struct TurnoverArgs {
    /// Addresses in all
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..=ADDRESSES_MAX))]
    pub addresses: u64,
    /// Hosts at a time
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(2..=500))]
    pub hosts: u64,
    /// Print the result as one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// What a turnover left.
#[derive(Clone, Debug, Serialize)]
pub struct TurnoverReport {
    /// The sources' commit.
    pub commit: String,
    /// Addresses seen.
    pub addresses: u64,
    /// Hosts at a time.
    pub hosts: u64,
    /// Requests sent, all of which were answered.
    pub requests: u64,
    /// Hosts that were named as having answered.
    pub used: u64,
    /// Series of the filter's metrics, after the warm-up and at the end.
    pub series: [u64; 2],
    /// Hosts with series of their own at the end.
    pub hosts_with_series: u64,
    /// Memory of Envoy with the filter, after the warm-up and at the end.
    pub bytes: [u64; 2],
    /// The same without the filter.
    pub bytes_without_filter: [u64; 2],
}

impl TurnoverReport {
    /// Bytes that each address after the warm-up has cost, beyond what it costs Envoy itself.
    fn bytes_grown(&self) -> f64 {
        let grown = |[first, last]: [u64; 2]| last as f64 - first as f64;
        grown(self.bytes) - grown(self.bytes_without_filter).max(0.0)
    }

    fn bytes_max(&self) -> f64 {
        SLACK_BYTES + BYTES_PER_ADDRESS_MAX * self.addresses as f64
    }

    /// What must not be; empty if all is well.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        // Two gauges a host; one more name stands for all hosts without their own.
        if self.hosts_with_series > SERIES_MAX + 1 {
            faults.push(format!("{} hosts have series", self.hosts_with_series));
        }
        if self.bytes_grown() > self.bytes_max() {
            let grown = self.bytes_grown() / 1024.0 / 1024.0;
            faults.push(format!("memory grew by {grown:.1} MiB"));
        }
        if self.used < self.addresses / self.hosts {
            faults.push(format!("only {} hosts were used", self.used));
        }
        faults
    }
}

impl fmt::Display for TurnoverReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / 1024.0 / 1024.0;
        let row = |[first, last]: [u64; 2]| format!("{:.1} -> {:.1} MiB", mib(first), mib(last));
        writeln!(
            f,
            "{} addresses, {} at a time; {} requests, all answered, by {} hosts",
            self.addresses, self.hosts, self.requests, self.used
        )?;
        let [first, last] = self.series;
        writeln!(
            f,
            "metric series   {first} -> {last}, of {} hosts (at most {SERIES_MAX} and one for the rest)",
            self.hosts_with_series
        )?;
        writeln!(f, "memory          {}", row(self.bytes))?;
        writeln!(f, "without filter  {}", row(self.bytes_without_filter))?;
        writeln!(f, "commit {}", self.commit)?;
        match self.faults().as_slice() {
            [] => writeln!(f, "PASSED: nothing grows with the addresses"),
            faults => writeln!(f, "FAILED: {}", faults.join("; ")),
        }
    }
}

/// Runs `prefix-router turnover`; an error if anything grew.
pub fn run(args: &TurnoverArgs) -> Result<()> {
    let report = tokio::runtime::Runtime::new()?.block_on(turnover(args))?;
    if args.json {
        say!("{}", serde_json::to_string(&report)?)?;
    } else {
        crate::print::result(format_args!("{report}"))?;
    }
    match report.faults().len() {
        0 => Ok(()),
        count => bail!("the turnover found {count} faults"),
    }
}

/// Replaces all hosts again and again and reports, whatever came out.
pub async fn turnover(args: &TurnoverArgs) -> Result<TurnoverReport> {
    let steps = args.addresses / args.hosts;
    ensure!(
        steps > WARM_STEPS,
        "a turnover needs more than {WARM_STEPS} steps: more addresses, or fewer hosts at a time"
    );
    // One engine that listens on every address of the loopback network.
    let engine = MockEngine::start_at(IpAddr::from(Ipv4Addr::UNSPECIFIED)).await?;
    let port = engine.address().port();
    let without = plan(args, port)?
        .edit(|plan| plan.without_filter(Policy::LeastRequest))
        .start_unsettled()
        .await?;
    let without = drive(args, &without, port, false).await?;
    let with = plan(args, port)?.start().await?;
    let with = drive(args, &with, port, true).await?;
    Ok(TurnoverReport {
        commit: crate::setup::commit(),
        addresses: args.addresses,
        hosts: args.hosts,
        requests: steps * PROMPTS,
        used: with.used,
        series: with.series,
        hosts_with_series: with.hosts_with_series,
        bytes: with.bytes,
        bytes_without_filter: without.bytes,
    })
}

/// Envoy's file with hosts from a file, without health checks: the hosts go before their first.
fn plan(args: &TurnoverArgs, port: u16) -> Result<GatewayPlan> {
    let config = json!({"debug_headers": "always"});
    Ok(Gateway::at(hosts(args, 0, port)?)
        .eds()
        .config(config)
        .edit(|plan| {
            plan.log_level("warning")
                .edit_cluster("engines", |cluster| {
                    cluster
                        .as_object_mut()
                        .map(|own| own.remove("health_checks"));
                    Ok(())
                })
        }))
}

/// The hosts of a step. Every other step has one more, so that a new list can be seen to be known.
fn hosts(args: &TurnoverArgs, step: u64, port: u16) -> Result<Vec<SocketAddr>> {
    let first = step * args.hosts;
    let count = args.hosts + step % 2;
    (first..first + count).map(|n| address(n, port)).collect()
}

fn address(n: u64, port: u16) -> Result<SocketAddr> {
    let part = |n: u64| u8::try_from(n % 250 + 1);
    let high = u8::try_from(n / 62_500 + 1)?;
    Ok(SocketAddr::from((
        [127, high, part(n / 250)?, part(n)?],
        port,
    )))
}

/// What one Envoy was seen to do.
struct Driven {
    used: u64,
    series: [u64; 2],
    hosts_with_series: u64,
    bytes: [u64; 2],
}

async fn drive(args: &TurnoverArgs, gateway: &Gateway, port: u16, filter: bool) -> Result<Driven> {
    let client = gateway.client(Protocol::Http1);
    let mut used = BTreeSet::new();
    let (mut series, mut bytes) = ([0; 2], [0; 2]);
    for step in 0..args.addresses / args.hosts {
        let now = hosts(args, step, port)?;
        if step > 0 {
            gateway.envoy().set_hosts(&now).await?;
        }
        if filter {
            gateway.wait_hosts("usable", now.len(), STEP_LIMIT).await?;
        }
        for prefix in 0..PROMPTS {
            let answer = client.ok(prompt_of(prefix)).await?;
            used.extend(answer.header(prefix_router::names::DEBUG_HOST));
        }
        let reading = gateway.envoy().usage()?.resident_bytes;
        let shown = gateway.metrics().await?.len() as u64;
        if step <= WARM_STEPS {
            (bytes, series) = ([reading; 2], [shown; 2]);
        }
        (bytes, series) = ([bytes[0], reading], [series[0], shown]);
    }
    let metrics = gateway.metrics().await?;
    let of_hosts = metrics
        .iter()
        .filter(|sample| [IN_FLIGHT, PENDING_TOKENS].contains(&&*sample.name));
    let named: BTreeSet<&String> = of_hosts
        .filter_map(|sample| sample.labels.get("upstream_host"))
        .collect();
    Ok(Driven {
        used: used.len() as u64,
        series,
        hosts_with_series: named.len() as u64,
        bytes,
    })
}
