//! `prefix-router bench agreement`: what `simulate` says against engines and Envoy in real time.
//!
//! Guarantee: both get the same requests (the same workload and seed), engines of the same sizes
//! at the same addresses, and start cold; the same stretch of time is measured. In real time the
//! engines' clock may run faster, and all times are given in engine time. Not here: the simulator,
//! the engines.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use serde::Serialize;

use super::live::{Engines, Front};
use crate::engine::cost::EngineConfig;
use crate::engine::render::Template;
use crate::engine::server::ServerConfig;
use crate::load::driver::{Record, Until};
use crate::print::{note, say};
use crate::simulate::cells::{Arrival, Cell, Name, Sizes, Source, TRACES};
use crate::simulate::measure::{self, Times};
use crate::simulate::prepare::Preparer;
use crate::simulate::world::{self, Setting};
use crate::simulate::{PREFIX_LENGTH, policy};
use crate::{numbers, setup};

/// The hit rates may differ by this part of the simulated one, or with several workers …
const HIT_PART_MAX: f64 = 0.10;
/// … by so much,
const HIT_POINTS_MAX: f64 = 0.02;
/// and the medians of the time to the first token by this part of the simulated one.
const P50_PART_MAX: f64 = 0.20;

/// What is compared if nothing is named; W7 only where its trace is.
const WORKLOADS: [Name; 5] = [Name::W1, Name::W2, Name::W3, Name::W5, Name::W7];

/// Hosts of the study's fleet.
const FLEET_HOSTS: f64 = 7.0;
/// Prompts of W1 and W5, a quarter of the study's, and with as much less cache …
const SINGLE_PROMPTS: u32 = 650;
/// … so that caches are full after a minute.
const SINGLE_KV_TOKENS: u64 = 300_000;

/// Options of `prefix-router bench agreement`
#[derive(Args, Clone, Debug)]
pub struct AgreementArgs {
    /// Workloads; W7 is the trace of a chat service [default:
    /// W1,W2,W3,W5, and W7 if its trace is in --traces]
    #[arg(
        long,
        value_enum,
        ignore_case = true,
        value_delimiter = ',',
        value_name = "NAME,…"
    )]
    pub workload: Vec<Name>,
    /// Loads: 1 is the highest rate at which random routing is stable
    #[arg(long, value_delimiter = ',', value_name = "LOAD,…", default_value = "0.8",
          value_parser = numbers::load)]
    pub load: Vec<f64>,
    /// Envoy's worker threads
    #[arg(long, value_delimiter = ',', value_name = "N,…", default_value = "1,4",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub workers: Vec<u32>,
    /// The seed of the workloads
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Engines
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub hosts: u16,
    /// Seconds of engine time that are not measured
    #[arg(long, default_value_t = 60.0, value_parser = numbers::seconds_or_none)]
    pub warmup: f64,
    /// Seconds of engine time that are
    #[arg(long, default_value_t = 90.0, value_parser = numbers::seconds)]
    pub window: f64,
    /// How many times faster than real time the engines' clock runs: the machine's own time,
    /// a millisecond or two for each request, counts as much more
    #[arg(long, default_value_t = 2.0, value_parser = numbers::speed)]
    pub speed: f64,
    /// First of the ports on which the engines listen, or 0 for any; placement depends on them
    #[arg(long, default_value_t = 19_301)]
    pub engine_port: u16,
    /// Folder with Mooncake's conversation_trace.jsonl (W7) and synthetic_trace.jsonl (W7s), also
    /// as mooncake_conversation.jsonl and mooncake_synthetic.jsonl; CONTRIBUTING.md says where they
    /// are published
    #[arg(long, value_name = "FOLDER", default_value = TRACES)]
    pub traces: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// What was seen.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// One for each workload, load and number of workers.
    pub rows: Vec<Row>,
    /// The seed of the workloads.
    pub seed: u64,
    /// Seconds that were not measured.
    pub warmup_s: f64,
    /// Seconds that were.
    pub window_s: f64,
    /// The engines' clock against real time.
    pub speed: f64,
    /// The project's commit.
    pub commit: String,
}

/// One workload, simulated and real.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The workload.
    pub workload: &'static str,
    /// Times the rate at which random routing is just stable.
    pub load: f64,
    /// Envoy's worker threads.
    pub workers: u32,
    /// In virtual time.
    pub simulated: Side,
    /// In real time.
    pub real: Side,
    /// 99 of 100 requests were sent no later than this, in milliseconds of real time.
    pub lag_p99_ms: f64,
    /// Part of the engines' time that they let go because the machine was too slow.
    pub lost: f64,
}

/// One side's figures.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Side {
    /// Requests measured.
    pub requests: u64,
    /// Part of the prompts' tokens that were found in the caches.
    pub hit_rate: f64,
    /// Times to the first token, in seconds of engine time.
    pub ttft_s: Times,
    /// Requests of the host that got most, over the mean.
    pub share_max_over_mean: f64,
}

impl Row {
    /// How far the hit rates are apart.
    #[must_use]
    pub fn hit_points(&self) -> f64 {
        self.real.hit_rate - self.simulated.hit_rate
    }

    /// How far the medians are apart, as a part of the simulated one.
    #[must_use]
    pub fn p50_part(&self) -> f64 {
        self.real.ttft_s.p50 / self.simulated.ttft_s.p50 - 1.0
    }

    /// What does not agree, if anything.
    #[must_use]
    pub fn broken(&self) -> Option<&'static str> {
        let apart = self.hit_points().abs();
        let too_far = apart > HIT_PART_MAX * self.simulated.hit_rate;
        if too_far || (self.workers > 1 && apart > HIT_POINTS_MAX) {
            return Some("hits differ");
        }
        (self.p50_part().abs() > P50_PART_MAX).then_some("P50 differs")
    }
}

/// Runs it and prints the result.
///
/// # Errors
/// If something could not be started, or a request failed.
pub fn run(args: &AgreementArgs) -> Result<()> {
    let report = tokio::runtime::Runtime::new()?.block_on(measure(args))?;
    if args.json {
        say!("{}", serde_json::to_string(&report)?)?;
    } else {
        print(&report)?;
    }
    Ok(())
}

/// Measures every workload in both ways.
///
/// # Errors
/// If something could not be started, or a request failed.
pub async fn measure(args: &AgreementArgs) -> Result<Report> {
    let mut rows = Vec::new();
    for trial in trials(args)? {
        let engines = Engines::start(args.hosts, args.engine_port, args.speed, &trial.server);
        let engines = engines.await?;
        for &load in &args.load {
            for &workers in &args.workers {
                rows.push(trial.row(&engines, load, workers).await?);
            }
        }
    }
    Ok(Report {
        rows,
        seed: args.seed,
        warmup_s: args.warmup,
        window_s: args.window,
        speed: args.speed,
        commit: setup::commit(),
    })
}

/// All workloads: whatever one of them lacks is told before the first one is played.
fn trials(args: &AgreementArgs) -> Result<Vec<Trial<'_>>> {
    let (workloads, left_out) = workloads(args);
    let trials = workloads.into_iter().map(|name| Trial::new(args, name));
    let trials = trials.collect::<Result<_>>()?;
    if let Some(left_out) = left_out {
        note!("{left_out}");
    }
    Ok(trials)
}

/// The workloads that were asked for, or the usual ones that are there; and which are not.
fn workloads(args: &AgreementArgs) -> (Vec<Name>, Option<String>) {
    if !args.workload.is_empty() {
        return (args.workload.clone(), None);
    }
    let (there, missing): (Vec<Name>, Vec<Name>) = WORKLOADS
        .into_iter()
        .partition(|name| name.is_there(&args.traces));
    let left_out = missing.first().map(|name| {
        format!(
            "bench: without {0}, whose trace is not in {1}; --workload {0} says where to get it",
            name.label(),
            args.traces.display()
        )
    });
    (there, left_out)
}

/// One workload with what it is run on.
struct Trial<'a> {
    args: &'a AgreementArgs,
    workload: Name,
    sizes: Sizes,
    source: Source,
    server: ServerConfig,
}

impl<'a> Trial<'a> {
    fn new(args: &'a AgreementArgs, workload: Name) -> Result<Self> {
        anyhow::ensure!(
            !workload.is_closed(),
            "--workload: {} has no rate; see bench conversations",
            workload.label()
        );
        let single = matches!(workload, Name::W1 | Name::W5);
        let prompts = f64::from(SINGLE_PROMPTS) * fleet_share(args);
        let sizes = Sizes {
            prompts: single.then_some(prompts.round() as u32),
            ..Sizes::default()
        };
        let mut engine = EngineConfig::default();
        if single {
            engine.kv_tokens = SINGLE_KV_TOKENS;
        }
        let server = ServerConfig {
            engine,
            ..ServerConfig::default()
        };
        let source = Source::new(workload, args.seed, Arrival::Poisson, &args.traces, &sizes)?;
        Ok(Self {
            args,
            workload,
            sizes,
            source,
            server,
        })
    }

    fn cell(&self, load: f64) -> Cell {
        Cell {
            workload: self.workload,
            load: load * fleet_share(self.args),
            arrival: Arrival::Poisson,
            gateways: 1,
            policy: policy::Kind::PrefixRouter,
            seed: self.args.seed,
        }
    }

    async fn row(&self, engines: &Engines, load: f64, workers: u32) -> Result<Row> {
        let name = self.workload.label();
        note!(
            "bench: {name} at {:.0} %, {workers} workers: simulating …",
            load * 100.0
        );
        let names = engines
            .addresses()
            .iter()
            .map(ToString::to_string)
            .collect();
        let simulated = self.simulate(names, load, workers)?;
        let length = self.args.warmup + self.args.window;
        note!("bench: playing it in {:.0} s …", length / self.args.speed);
        let began = Instant::now();
        let front = Front {
            workers,
            one_gateway: false,
        };
        let workload = self.source.open(&self.cell(load), &self.sizes)?;
        let until = Until::Elapsed(Duration::from_secs_f64(length));
        let records = engines.play(front, workload, until).await?;
        let lost = engines.lost_share(began.elapsed());
        let measured: Vec<&Record> = records
            .iter()
            .filter(|record| record.due.as_secs_f64() >= self.args.warmup)
            .collect();
        let lags = measured.iter().map(|record| record.lag.as_secs_f64() * 1e3);
        Ok(Row {
            workload: name,
            load,
            workers,
            simulated,
            real: side(&measured, self.args.hosts)?,
            lag_p99_ms: Times::of(lags.collect()).p99,
            lost,
        })
    }

    fn simulate(&self, names: Vec<String>, load: f64, workers: u32) -> Result<Side> {
        let setting = Setting {
            policy: policy::Kind::PrefixRouter,
            gateways: 1,
            workers,
            hosts: u32::from(self.args.hosts),
            names,
            engine: self.server.engine.clone(),
            warmup_s: self.args.warmup,
            window_s: self.args.window,
            drain_s: 600.0,
            staleness_s: 0.0,
            unstreamed: 0.0,
            happenings: Vec::new(),
            rules: None,
            seed: self.args.seed,
        };
        let template = Template::default();
        let preparer = Preparer::new(template, setting.engine.block_tokens, PREFIX_LENGTH);
        let mut workload = self.source.open(&self.cell(load), &self.sizes)?;
        let outcome = world::run(&setting, workload.as_mut(), &preparer)?;
        let figures = measure::figures(&setting, &outcome);
        Ok(Side {
            requests: figures.requests,
            hit_rate: figures.hit_rate,
            ttft_s: figures.ttft_s,
            share_max_over_mean: figures.share_max_over_mean,
        })
    }
}

/// Loads and sizes are those of the study's fleet.
fn fleet_share(args: &AgreementArgs) -> f64 {
    f64::from(args.hosts) / FLEET_HOSTS
}

fn side(records: &[&Record], hosts: u16) -> Result<Side> {
    let (mut prompt, mut cached) = (0_u64, 0_u64);
    let mut times = Vec::with_capacity(records.len());
    let mut shares = std::collections::BTreeMap::<&str, u32>::new();
    for record in records {
        if let Some(failure) = record.outcome.failure {
            anyhow::bail!("a request failed: {}", failure.name());
        }
        let usage = record.outcome.answer.usage;
        let usage = usage.context("an answer has no usage")?;
        prompt += usage.prompt_tokens;
        cached += usage.cached_tokens.unwrap_or(0);
        let first = record.ttft.context("an answer has no content")?;
        times.push(first.as_secs_f64());
        let host = record.outcome.host.as_deref().unwrap_or_default();
        *shares.entry(host).or_insert(0) += 1;
    }
    let most = shares.values().max().copied().unwrap_or(0);
    Ok(Side {
        requests: records.len() as u64,
        hit_rate: cached as f64 / prompt.max(1) as f64,
        ttft_s: Times::of(times),
        share_max_over_mean: f64::from(most) * f64::from(hosts) / records.len().max(1) as f64,
    })
}

fn print(report: &Report) -> Result<()> {
    say!("simulated / in real time; TTFT in ms of engine time")?;
    say!(
        "{:<8} {:>7} {:>5} {:>13} {:>6} {:>11} {:>6} {:>11} {:>5}",
        "",
        "workers",
        "sent",
        "hits %",
        "points",
        "P50",
        "%",
        "mean",
        "lost"
    )?;
    for row in &report.rows {
        let (simulated, real) = (&row.simulated, &row.real);
        let ms = |of: fn(&Times) -> f64| {
            let [simulated, real] = [simulated, real].map(|side| of(&side.ttft_s) * 1e3);
            format!("{simulated:.0} / {real:.0}")
        };
        say!(
            "{:<8} {:>7} {:>5} {:>13} {:>+6.1} {:>11} {:>+6.0} {:>11} {:>4.1}%  {}",
            format!("{} {:.0}%", row.workload, row.load * 100.0),
            row.workers,
            real.requests,
            format!(
                "{:.1} / {:.1}",
                simulated.hit_rate * 100.0,
                real.hit_rate * 100.0
            ),
            row.hit_points() * 100.0,
            ms(|times| times.p50),
            row.p50_part() * 100.0,
            ms(|times| times.mean),
            row.lost * 100.0,
            row.broken().unwrap_or("")
        )?;
    }
    say!(
        "seed {}, {:.0} s after {:.0} s of warm-up, engine clock {} times real time, commit {}",
        report.seed,
        report.window_s,
        report.warmup_s,
        report.speed,
        report.commit
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Arguments {
        #[command(flatten)]
        agreement: AgreementArgs,
    }

    fn args(line: &[&str]) -> AgreementArgs {
        let words = std::iter::once("agreement").chain(line.iter().copied());
        Arguments::try_parse_from(words).unwrap().agreement
    }

    #[test]
    fn the_trace_is_played_by_default_only_where_it_is_and_that_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let args = args(&["--traces", folder.path().to_str().unwrap()]);
        let (names, left_out) = workloads(&args);
        assert_eq!(names, [Name::W1, Name::W2, Name::W3, Name::W5]);
        let left_out = left_out.unwrap();
        assert!(
            left_out.starts_with("bench: without W7, whose trace is not in "),
            "{left_out}"
        );
        std::fs::write(folder.path().join("conversation_trace.jsonl"), "").unwrap();
        assert_eq!(workloads(&args), (WORKLOADS.to_vec(), None));
    }

    #[test]
    fn a_trace_that_is_missing_is_told_before_anything_is_played() {
        let args = args(&["--workload", "W1,W7", "--traces", "/nowhere"]);
        let error = trials(&args).err().unwrap().to_string();
        assert!(error.starts_with("W7 plays Mooncake's trace"), "{error}");
    }
}
