//! Processor time and memory of every router for each request, at saturation.
//!
//! Guarantee: all routers run at the same time and are measured in turn, slice by slice, each round
//! beginning with another one, so that what disturbs the machine disturbs all alike. Processor time
//! is the whole process's, user and system, by its own clock; what engines and clients use is
//! not in it. Not here: time to the first token, which a loaded machine drowns.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::plays::{Part, column, plotted};
use super::router::{Contestant, Engines, Router, Told};
use super::{Bench, Outcome};
use crate::bench::http::{Load, Upstream, request_with, saturate};
use crate::bench::overhead::{bodies, group};

const HOSTS: usize = 4;
/// Connections that send one request after the other.
const CONNECTIONS: usize = 16;
/// Body sizes in KB.
const SIZES: [usize; 3] = [4, 32, 256];
/// Envoy's workers beside the default: its wasm VMs share one lock.
const WORKERS: [u32; 3] = [1, 2, 8];
/// A slice: long enough for thousands of requests, short enough that all routers have one before
/// the machine's load changes.
const SLICE: Load = Load::Time(Duration::from_millis(700));
/// Before the first slice.
const WARM_UP: Load = Load::Time(Duration::from_millis(1500));
/// Slices of each router and size in one repetition.
const ROUNDS: u32 = 5;

pub(super) const PART: Part = Part {
    name: "cpu",
    title: "Processor time and memory of the gateway",
    about: "16 connections send 64 distinct chat bodies, four of which share each first half, to 4 \
        hosts that answer at once: µs of processor time of the whole gateway process per request, \
        requests a second, and memory in RAM at the end. Envoy also with 1, 2 and 8 workers, named \
        behind a slash: the filter's workers share one lock.",
    columns: &[
        plotted("us", "µs", 1),
        column("rate", "requests/s", 0),
        column("mb", "MB", 0),
    ],
    hosts: false,
};

/// Measures the part.
pub(super) async fn run(bench: &mut Bench) -> Result<()> {
    let mut upstreams = Vec::new();
    for _ in 0..HOSTS {
        upstreams.push(Upstream::start().await?);
    }
    let hosts: Vec<_> = upstreams.iter().map(|upstream| upstream.address).collect();
    for kilobytes in SIZES {
        let cell = format!("{kilobytes} KB");
        let rounds = bench.repeats * ROUNDS;
        let mut left = Vec::new();
        for (contestant, workers) in everyone(bench) {
            let name = name(&contestant, workers);
            let slots: Vec<_> = (1..=rounds)
                .map(|round| bench.slot(&PART, &cell, &name, round))
                .collect();
            if !bench.have(&slots) {
                left.push((contestant, workers, name));
            }
        }
        let mut routers = Vec::new();
        for (contestant, workers, name) in left {
            let count = workers.unwrap_or(bench.workers);
            let engines = Engines::plain(&hosts);
            match bench.open_with(contestant, engines, count).await {
                Ok(router) => routers.push((router, name)),
                Err(error) => {
                    let slot = bench.slot(&PART, &cell, &name, 1);
                    bench.keep(slot, Err(error))?;
                }
            }
        }
        size(bench, &cell, kilobytes * 1024, routers, rounds).await?;
    }
    Ok(())
}

/// Everyone who takes part, and Envoys of other numbers of workers than the default.
fn everyone(bench: &Bench) -> Vec<(Contestant, Option<u32>)> {
    let mut all: Vec<_> = bench.contestants.iter().map(|one| (*one, None)).collect();
    let few = ["prefix_router", "envoy-least_request"];
    let scaled = bench
        .contestants
        .iter()
        .filter(|one| few.contains(&one.name));
    for one in scaled {
        let others = WORKERS.iter().filter(|count| **count != bench.workers);
        all.extend(others.map(|count| (*one, Some(*count))));
    }
    all
}

fn name(contestant: &Contestant, workers: Option<u32>) -> String {
    match workers {
        Some(workers) => format!("{}/{workers}", contestant.name),
        None => contestant.name.to_owned(),
    }
}

async fn size(
    bench: &mut Bench,
    cell: &str,
    bytes: usize,
    mut routers: Vec<(Router, String)>,
    rounds: u32,
) -> Result<()> {
    let bodies = bodies(bytes)?;
    for (router, _) in &routers {
        // Fills the pools of connections, compiled code, and what a router remembers of prompts.
        let requests = requests(router.contestant.told, &bodies);
        saturate(router.address(), &requests, CONNECTIONS, WARM_UP)
            .await
            .with_context(|| router.contestant.name.to_owned())?;
    }
    for round in 1..=rounds {
        for (router, name) in &routers {
            let requests = requests(router.contestant.told, &bodies);
            let outcome = slice(router, &requests).await;
            let slot = bench.slot(&PART, cell, name, round);
            bench.keep(slot, outcome)?;
        }
        routers.rotate_left(1);
    }
    for (router, name) in &routers {
        routed(router).await.with_context(|| name.clone())?;
    }
    Ok(())
}

/// The bodies as requests, with the header that a router wants to be told.
fn requests(told: Told, bodies: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let header = told.header();
    (0..)
        .zip(bodies)
        .map(|(prompt, body)| {
            let value = match told {
                Told::Tenant => group(prompt),
                Told::Session | Told::Nothing => prompt,
            };
            let value = format!("{value}");
            let header = header.as_ref().map(|name| (name.as_str(), value.as_str()));
            request_with(body, header)
        })
        .collect()
}

async fn slice(router: &Router, requests: &[Vec<u8>]) -> Result<Outcome> {
    let before = router.usage()?.cpu;
    let began = Instant::now();
    let sent = saturate(router.address(), requests, CONNECTIONS, SLICE).await?;
    let took = began.elapsed();
    let after = router.usage()?;
    let used = after.cpu.saturating_sub(before);
    let mut outcome = Outcome::default();
    outcome.figure("us", micros(used) / sent as f64);
    outcome.figure("rate", sent as f64 / took.as_secs_f64());
    outcome.figure("mb", after.resident_bytes as f64 / 1e6);
    Ok(outcome)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// That ours has done its work: an Envoy that routes nothing would be cheap.
async fn routed(router: &Router) -> Result<()> {
    let Some(envoy) = router.envoy().filter(|_| router.contestant.is_ours()) else {
        return Ok(());
    };
    let decisions = crate::harness::decisions(&envoy.metrics().await?);
    let of = |kind: &str| decisions.get(kind).copied().unwrap_or(0);
    let all: u64 = decisions.values().sum();
    anyhow::ensure!(
        (of("home") + of("match")) * 10 >= all * 9 && all > 0,
        "the filter placed too few requests: {decisions:?}"
    );
    Ok(())
}
