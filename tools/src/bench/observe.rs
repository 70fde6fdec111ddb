//! `prefix-router bench observe`: what `mode: observe` predicts against what `adaptive` then finds.
//!
//! Guarantee: both modes get the same requests (the same workload and seed) on the same engines,
//! whose caches are empty at the start; what is predicted are the filter's own metrics, what is
//! found is what the engines say. Not here: `share`, and the change from one mode to the other
//! under load (tests/envoy_pools.rs).

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use prefix_router::names::{PREDICTED_CACHED_TOKENS, PROMPT_TOKENS};
use serde::Serialize;
use serde_json::{Value, json};

use super::live::{Engines, target};
use crate::engine::cost::EngineConfig;
use crate::engine::server::ServerConfig;
use crate::load::driver::{Record, Until};
use crate::print::{note, say};
use crate::simulate::cells::{Arrival, Cell, Name, Sizes, Source};
use crate::simulate::policy;
use crate::testkit::{Gateway, GatewayPlan};
use crate::{numbers, setup};

/// The two may differ by so many points of hits.
const POINTS_MAX: f64 = 3.0;
/// A quarter of the study's prompts and cache, so that caches fill within the run.
const SINGLE_PROMPTS: u32 = 650;
const SINGLE_KV_TOKENS: u64 = 300_000;
/// As the study's fleet, whose loads the workloads' rates are.
const HOSTS: u16 = 7;

/// Options of `prefix-router bench observe`
#[derive(Args, Clone, Debug)]
pub(super) struct ObserveArgs {
    /// Workloads
    #[arg(
        long,
        value_enum,
        ignore_case = true,
        value_delimiter = ',',
        default_value = "W1,W2,W3,W5"
    )]
    workload: Vec<Name>,
    /// Load: 1 is the highest rate at which random routing is stable
    #[arg(long, default_value_t = 0.5, value_parser = numbers::load)]
    load: f64,
    /// Envoy's worker threads
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// The seed of the workloads
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds of engine time for which each is played
    #[arg(long, default_value_t = 120.0, value_parser = numbers::seconds)]
    window: f64,
    /// How many times faster than real time the engines' clock runs
    #[arg(long, default_value_t = 3.0, value_parser = numbers::speed)]
    speed: f64,
    /// First of the ports on which the engines listen, or 0 for any; placement depends on them
    #[arg(long, default_value_t = 19_301)]
    engine_port: u16,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    rows: Vec<Row>,
    load: f64,
    seed: u64,
    window_s: f64,
    speed: f64,
    commit: String,
}

/// One workload in both modes, in parts of the prompts' tokens.
#[derive(Debug, Serialize)]
struct Row {
    workload: &'static str,
    requests: usize,
    /// By the filter, which only looks on.
    predicted: f64,
    /// By the engines, while Envoy chooses.
    observed: f64,
    /// By the engines, while the filter chooses.
    adaptive: f64,
}

impl Row {
    fn points(&self) -> f64 {
        (self.predicted - self.adaptive) * 100.0
    }

    fn is_close(&self) -> bool {
        self.points().abs() <= POINTS_MAX
    }
}

/// Runs it and prints the result.
pub(super) fn run(args: &ObserveArgs) -> Result<()> {
    let report = tokio::runtime::Runtime::new()?.block_on(measure(args))?;
    if args.json {
        say!("{}", serde_json::to_string(&report)?)?;
    } else {
        print(&report)?;
    }
    let far = report.rows.iter().find(|row| !row.is_close());
    match far {
        Some(row) => anyhow::bail!("{}: {:+.1} points apart", row.workload, row.points()),
        None => Ok(()),
    }
}

async fn measure(args: &ObserveArgs) -> Result<Report> {
    let mut rows = Vec::new();
    for &workload in &args.workload {
        rows.push(row(args, workload).await?);
    }
    Ok(Report {
        rows,
        load: args.load,
        seed: args.seed,
        window_s: args.window,
        speed: args.speed,
        commit: setup::commit(),
    })
}

async fn row(args: &ObserveArgs, workload: Name) -> Result<Row> {
    anyhow::ensure!(
        matches!(
            workload,
            Name::W1 | Name::W2 | Name::W3 | Name::W4 | Name::W5 | Name::W6
        ),
        "--workload: expected W1 to W6, got {}",
        workload.label()
    );
    let single = matches!(workload, Name::W1 | Name::W5);
    let sizes = Sizes {
        prompts: single.then_some(SINGLE_PROMPTS),
        ..Sizes::default()
    };
    let mut engine = EngineConfig::default();
    if single {
        engine.kv_tokens = SINGLE_KV_TOKENS;
    }
    let config = ServerConfig {
        engine,
        ..ServerConfig::default()
    };
    let source = Source::new(workload, args.seed, Arrival::Poisson, Path::new(""), &sizes)?;
    let engines = Engines::start(HOSTS, args.engine_port, args.speed, &config).await?;
    let play = async |mode: Value| {
        let cell = Cell {
            workload,
            load: args.load,
            arrival: Arrival::Poisson,
            gateways: 1,
            policy: policy::Kind::PrefixRouter,
            seed: args.seed,
        };
        note!(
            "bench: {} in {mode}, {:.0} s …",
            workload.label(),
            args.window / args.speed
        );
        engines.cool();
        let gateway = plan(args, &engines, &mode).start().await?;
        let until = Until::Elapsed(Duration::from_secs_f64(args.window));
        let requests = source.open(&cell, &sizes)?;
        let records = engines.play_at(target(&gateway)?, requests, until).await?;
        let tokens = async |name| gateway.metric(name, &[]).await;
        let predicted = tokens(PREDICTED_CACHED_TOKENS).await? / tokens(PROMPT_TOKENS).await?;
        anyhow::Ok((predicted, hit_rate(&records)?, records.len()))
    };
    let (predicted, observed, requests) = play(json!("observe")).await?;
    let (_, adaptive, _) = play(json!("on")).await?;
    Ok(Row {
        workload: workload.label(),
        requests,
        predicted,
        observed,
        adaptive,
    })
}

fn plan(args: &ObserveArgs, engines: &Engines, mode: &Value) -> GatewayPlan {
    let workers = args.workers;
    Gateway::at(engines.addresses())
        .pool(json!({ "mode": mode }))
        // Every answer is read, so that the two are told apart by routing and not by a sample.
        .config(json!({"learning": {"sample": 1}}))
        .edit(move |plan| plan.concurrency(workers).log_level("warning"))
}

fn hit_rate(records: &[Record]) -> Result<f64> {
    let (mut prompt, mut cached) = (0_u64, 0_u64);
    for record in records {
        if let Some(failure) = record.outcome.failure {
            anyhow::bail!("a request failed: {}", failure.name());
        }
        let usage = record
            .outcome
            .answer
            .usage
            .context("an answer has no usage")?;
        prompt += usage.prompt_tokens;
        cached += usage.cached_tokens.unwrap_or(0);
    }
    Ok(cached as f64 / prompt.max(1) as f64)
}

fn print(report: &Report) -> Result<()> {
    say!("Cache hits from a cold start, % of prompt tokens")?;
    say!(
        "{:<9} {:>8} {:>12} {:>18} {:>9} {:>7}",
        "",
        "requests",
        "Envoy's own",
        "observe predicts",
        "adaptive",
        "points"
    )?;
    for row in &report.rows {
        say!(
            "{:<9} {:>8} {:>12.1} {:>18.1} {:>9.1} {:>+7.1}{}",
            row.workload,
            row.requests,
            row.observed * 100.0,
            row.predicted * 100.0,
            row.adaptive * 100.0,
            row.points(),
            if row.is_close() { "" } else { " !" }
        )?;
    }
    say!(
        "seed {}, load {:.0} %, {:.0} s at {} times real time, commit {}",
        report.seed,
        report.load * 100.0,
        report.window_s,
        report.speed,
        report.commit
    )?;
    Ok(())
}
