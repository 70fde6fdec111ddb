//! `prefix-router simulate`: workloads, engines and gateways in virtual time, over the filter's
//! own routing code and over its peers' rules.
//!
//! Guarantee: engines schedule and cache as `prefix-router engine` does (the same code); the same
//! flags give the same figures on any machine and number of threads. Not here: sockets, Envoy.

pub mod cells;
pub(crate) mod measure;
mod output;
pub mod policy;
pub(crate) mod prepare;
mod summary;
pub(crate) mod world;

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::Context as _;
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser};
use serde::Serialize;

use crate::engine::cost::EngineConfig;
use crate::engine::render::Template;
use crate::print::{note, say};
use crate::report::table::wrap;
use crate::{numbers, setup};
use cells::{Arrival, Cell, Name, Sizes, Source};
use measure::Figures;
use prepare::Preparer;
use summary::{Line, Relative, Row};
use world::{Happening, Setting};

/// Characters of AWS's rule and of our `fixed` mode here.
pub(crate) const PREFIX_LENGTH: u32 = 4096;

/// Hosts of C1 and C10 (ROUTING.md 6a).
const CONVERSATION_HOSTS: u32 = 4;

/// Ten times what random routing can serve: beyond, only the queue's length grows.
const LOAD_MAX: f64 = 10.0;

/// Requests at once of C1 and C10, whose load that is.
const AT_ONCE_MAX: f64 = 1000.0;

/// The longest warm-up, window and drain, three weeks: a later event would never come.
const EVENT_MAX_S: f64 = 3.0 * 604_800.0;

/// Compare routing policies in virtual time: the same workloads and engines, our production code
/// beside its peers' rules
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = AFTER_HELP)]
pub struct SimulateArgs {
    /// Workloads
    #[arg(
        long,
        value_enum,
        ignore_case = true,
        value_delimiter = ',',
        value_name = "NAME,…",
        default_value = "W1"
    )]
    workload: Vec<Name>,
    /// Loads: 1 is the highest rate at which random routing is stable (C1, C10: requests at once)
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LOAD,…",
        default_value = "0.8",
        value_parser = numbers::within(0.01, AT_ONCE_MAX, "a load")
    )]
    load: Vec<f64>,
    /// How arrivals are spread
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "ARRIVAL,…",
        default_value = "poisson"
    )]
    arrival: Vec<Arrival>,
    /// Gateways that share nothing
    #[arg(long, value_delimiter = ',', value_name = "N,…", default_value = "1",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    gateways: Vec<u32>,
    /// Worker threads of each gateway
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: u32,
    /// Policies
    #[arg(
        long,
        ignore_case = true,
        value_parser = policy_names(),
        value_delimiter = ',',
        value_name = "POLICY,…",
        default_value = "prefix_router,least_request,random,oracle"
    )]
    policy: Vec<String>,
    /// Seeds
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "SEED,…",
        default_value = "1"
    )]
    seed: Vec<u64>,
    /// Hosts [default: 7; C1 and C10: 4]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    hosts: Option<u32>,
    /// Seconds that are not measured
    #[arg(long, default_value_t = 240.0, value_parser = numbers::seconds_or_none)]
    warmup: f64,
    /// Seconds that are
    #[arg(long, default_value_t = 480.0, value_parser = numbers::seconds)]
    window: f64,
    /// Seconds that requests may take beyond
    #[arg(long, default_value_t = 60.0, value_parser = numbers::seconds_or_none)]
    drain: f64,
    /// Milliseconds until a gateway's state shows what an answer told
    #[arg(long, default_value_t = 0.0,
          value_parser = numbers::within(0.0, 3_600_000.0, "milliseconds"))]
    staleness_ms: f64,
    /// Part of the requests that are answered in one piece
    #[arg(long, default_value_t = 0.0, value_parser = numbers::within(0.0, 1.0, "a part"))]
    unstreamed: f64,
    /// Events: SECONDS:add, SECONDS:remove:HOST, SECONDS:restart:HOST, SECONDS:restart-gateway:N
    #[arg(long, value_delimiter = ',', value_name = "EVENT,…", value_parser = event)]
    event: Vec<(f64, Happening)>,
    /// How the engines' chat template renders history
    #[arg(long, value_enum, default_value_t)]
    template: Template,
    /// Folder with Mooncake's conversation_trace.jsonl (W7) and synthetic_trace.jsonl (W7s), also
    /// as mooncake_conversation.jsonl and mooncake_synthetic.jsonl; CONTRIBUTING.md says where they
    /// are published
    #[arg(long, value_name = "FOLDER", default_value = cells::TRACES)]
    traces: PathBuf,
    /// Runs at once [default: one per core]
    #[arg(long)]
    jobs: Option<usize>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Write a plot, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    sizes: Sizes,
    #[command(flatten)]
    engine: EngineConfig,
}

const AFTER_HELP: &str = "\
A value that ends in ,… may be several, with commas between them; every combination is run:
  prefix-router simulate --workload W1,W2 --load 0.5,0.8 --policy prefix_router,oracle";

/// Every policy by its name, and all of them together.
fn policy_names() -> PossibleValuesParser {
    let kinds = <policy::Kind as ValueEnum>::value_variants().iter();
    let names = kinds.filter_map(ValueEnum::to_possible_value);
    let all = PossibleValue::new("all").help("Every one of them");
    PossibleValuesParser::new(names.chain([all]))
}

fn event(text: &str) -> Result<(f64, Happening), String> {
    let wrong = || {
        format!(
            "expected SECONDS:add, SECONDS:remove:HOST, SECONDS:restart:HOST or \
             SECONDS:restart-gateway:N, got {text:?}"
        )
    };
    let mut parts = text.split(':');
    let at: f64 = parts
        .next()
        .and_then(|at| at.parse().ok())
        .ok_or_else(wrong)?;
    let kind = parts.next().ok_or_else(wrong)?;
    let number = parts
        .next()
        .map(|number| number.parse::<u32>().map_err(|_| wrong()));
    let happening = match (kind, number.transpose()?) {
        ("add", None) => Happening::Add,
        ("remove", Some(host)) => Happening::Remove(host),
        ("restart", Some(host)) => Happening::Restart(host),
        ("restart-gateway", Some(gateway)) => Happening::RestartGateway(gateway),
        _ => return Err(wrong()),
    };
    if parts.next().is_some() {
        return Err(wrong());
    }
    if !(0.0..=EVENT_MAX_S).contains(&at) {
        return Err(format!("expected SECONDS from 0 to {EVENT_MAX_S}"));
    }
    Ok((at, happening))
}

#[derive(Serialize)]
struct Output<'a> {
    rows: &'a [Row],
    summary: &'a [Line],
    relative_to_oracle: &'a [Relative],
    hosts: Option<u32>,
    workers: u32,
    warmup_s: f64,
    window_s: f64,
    staleness_ms: f64,
    unstreamed: f64,
    template: String,
    engine: String,
    commit: String,
}

/// Runs all cells and prints what came out.
///
/// # Errors
/// If a flag's value cannot be used, or a file cannot be read or written.
pub fn run(args: SimulateArgs) -> anyhow::Result<()> {
    args.engine.check()?;
    let open = args.workload.iter().find(|workload| !workload.is_closed());
    if let Some(workload) = open {
        let refused = args.load.iter().find(|load| **load > LOAD_MAX);
        anyhow::ensure!(
            refused.is_none(),
            "--load: expected loads from 0.01 to {LOAD_MAX} for {}, got {}",
            workload.label(),
            refused.copied().unwrap_or_default()
        );
    }
    let cells = cells(&args)?;
    // What a later cell needs is looked for before the first one is run.
    for workload in &args.workload {
        let first = cells.iter().find(|cell| cell.workload == *workload);
        first.map(|cell| source(&args, cell)).transpose()?;
    }
    let runs = run_all(&args, &cells)?;
    let rows: Vec<Row> = runs
        .iter()
        .map(|(cell, figures, took_s)| Row::new(cell, figures.clone(), *took_s))
        .collect();
    let runs: Vec<(Cell, Figures)> = runs
        .into_iter()
        .map(|(cell, figures, _)| (cell, figures))
        .collect();
    let lines = summary::lines(&runs);
    let relative = summary::relative(&lines, policy::Kind::Oracle);
    if let Some(path) = &args.plot {
        let svg = output::plot(&lines)?;
        std::fs::write(path, svg)
            .with_context(|| format!("--plot {}: cannot be written", path.display()))?;
    }
    if args.json {
        let output = Output {
            rows: &rows,
            summary: &lines,
            relative_to_oracle: &relative,
            hosts: args.hosts,
            workers: args.workers,
            warmup_s: args.warmup,
            window_s: args.window,
            staleness_ms: args.staleness_ms,
            unstreamed: args.unstreamed,
            template: format!("{:?}", args.template),
            engine: format!("{:?}", args.engine),
            commit: setup::commit(),
        };
        say!("{}", serde_json::to_string(&output)?)?;
        return Ok(());
    }
    let is_terminal = std::io::stdout().is_terminal();
    let table = match is_terminal {
        true => output::screen(&lines),
        false => output::table(&lines),
    };
    crate::print::result(format_args!("{table}"))?;
    if relative.len() > 1 {
        crate::print::result(format_args!("{}", output::relative_table(&relative)))?;
    }
    for event in told_events(&rows) {
        match is_terminal {
            true => say!("{}", wrap(&event).join("\n"))?,
            false => say!("{event}")?,
        }
    }
    say!("\ncommit {}, seeds {:?}", setup::commit(), args.seed)?;
    Ok(())
}

fn told_events(rows: &[Row]) -> Vec<String> {
    let mut told = Vec::new();
    for row in rows {
        for event in &row.figures.events {
            let recovery = event
                .recovery_s
                .map_or("never".to_owned(), |s| format!("{s:.0} s"));
            told.push(format!(
                "{} {:.0} % {} seed {}: {} at {:.0} s: moved {:.1} % of {} keys ({:.1} % not from \
                 a host that left; {:.1} % without the event), hits {:.1} -> {:.1} -> {:.1} %, recovery {recovery}, P99 of \
                 the first minute {:.2} s",
                row.workload,
                row.load * 100.0,
                row.policy,
                row.seed,
                event.event,
                event.at_s,
                event.moved * 100.0,
                event.keys,
                event.moved_needlessly * 100.0,
                event.churn * 100.0,
                event.hit_before * 100.0,
                event.hit_dip * 100.0,
                event.hit_after * 100.0,
                event.ttft_p99_s,
            ));
        }
    }
    told
}

/// Every combination, those that share prepared requests beside each other.
fn cells(args: &SimulateArgs) -> anyhow::Result<Vec<Cell>> {
    let mut policies: Vec<policy::Kind> = Vec::new();
    for name in &args.policy {
        match <policy::Kind as ValueEnum>::from_str(name, true) {
            Ok(kind) => policies.push(kind),
            // The only other name that is accepted means every one.
            Err(_) => policies.extend(<policy::Kind as ValueEnum>::value_variants()),
        }
    }
    let mut cells = Vec::new();
    for &workload in &args.workload {
        for &seed in &args.seed {
            for &arrival in &args.arrival {
                for &load in &args.load {
                    for &gateways in &args.gateways {
                        cells.extend(policies.iter().map(|&policy| Cell {
                            workload,
                            load,
                            arrival,
                            gateways,
                            policy,
                            seed,
                        }));
                    }
                }
            }
        }
    }
    Ok(cells)
}

/// What all cells of one workload and seed share; made when the first needs it, dropped after the
/// last.
struct Shared {
    source: Source,
    preparer: Preparer,
}

type SharedKey = (Name, u64, Arrival);

#[derive(Default)]
struct SharedPool {
    shared: BTreeMap<SharedKey, (Arc<Shared>, usize)>,
}

type Finished = (Cell, Figures, f64);

fn run_all(args: &SimulateArgs, cells: &[Cell]) -> anyhow::Result<Vec<Finished>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = args.jobs.unwrap_or(cores).clamp(1, cells.len().max(1));
    let next = AtomicUsize::new(0);
    let pool = Mutex::new(SharedPool::default());
    let done: Mutex<Vec<(usize, Finished)>> = Mutex::default();
    let failed: Mutex<Option<anyhow::Error>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(cell) = cells.get(at) else {
                        return;
                    };
                    let started = Instant::now();
                    match run_cell(args, cells, cell, &pool) {
                        Ok(figures) => {
                            let took_s = started.elapsed().as_secs_f64();
                            let mut done = lock(&done);
                            done.push((at, (*cell, figures.clone(), took_s)));
                            progress(done.len(), cells.len(), cell, &figures, took_s);
                        }
                        Err(error) => {
                            *lock(&failed) = Some(error);
                            next.store(cells.len(), Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    if let Some(error) = lock(&failed).take() {
        return Err(error);
    }
    let mut done = std::mem::take(&mut *lock(&done));
    done.sort_by_key(|(at, _)| *at);
    Ok(done.into_iter().map(|(_, run)| run).collect())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn progress(done: usize, all: usize, cell: &Cell, figures: &Figures, took_s: f64) {
    note!(
        "[{done}/{all}] {} {:.0} % {} G{} {} seed {}: hits {:.1} %, P50 {:.3} s ({took_s:.1} s)",
        cell.workload.label(),
        cell.load * 100.0,
        cell.arrival.label(),
        cell.gateways,
        cell.policy.name(),
        cell.seed,
        figures.hit_rate * 100.0,
        figures.ttft_s.p50,
    );
}

fn run_cell(
    args: &SimulateArgs,
    cells: &[Cell],
    cell: &Cell,
    pool: &Mutex<SharedPool>,
) -> anyhow::Result<Figures> {
    let shared = share(args, cells, cell, pool)?;
    let setting = setting(args, cell);
    let mut workload = shared.source.open(cell, &args.sizes)?;
    let outcome = world::run(&setting, workload.as_mut(), &shared.preparer)?;
    let mut figures = measure::figures(&setting, &outcome);
    if !setting.happenings.is_empty() {
        // What moves without any event is not the events' doing.
        let calm = Setting {
            happenings: Vec::new(),
            ..setting
        };
        let mut workload = shared.source.open(cell, &args.sizes)?;
        let outcome = world::run(&calm, workload.as_mut(), &shared.preparer)?;
        measure::set_churn(&mut figures, &outcome);
    }
    drop(shared);
    release(cell, pool);
    Ok(figures)
}

fn share(
    args: &SimulateArgs,
    cells: &[Cell],
    cell: &Cell,
    pool: &Mutex<SharedPool>,
) -> anyhow::Result<Arc<Shared>> {
    let key = (cell.workload, cell.seed, cell.arrival);
    let mut pool = lock(pool);
    if let Some((shared, _)) = pool.shared.get(&key) {
        return Ok(Arc::clone(shared));
    }
    let users = cells
        .iter()
        .filter(|other| (other.workload, other.seed, other.arrival) == key)
        .count();
    let source = source(args, cell)?;
    let preparer = Preparer::new(args.template, args.engine.block_tokens, PREFIX_LENGTH);
    let shared = Arc::new(Shared { source, preparer });
    pool.shared.insert(key, (Arc::clone(&shared), users));
    Ok(shared)
}

fn source(args: &SimulateArgs, cell: &Cell) -> anyhow::Result<Source> {
    let (traces, sizes) = (&args.traces, &args.sizes);
    Source::new(cell.workload, cell.seed, cell.arrival, traces, sizes)
}

fn release(cell: &Cell, pool: &Mutex<SharedPool>) {
    let key = (cell.workload, cell.seed, cell.arrival);
    let mut pool = lock(pool);
    if let Some((_, users)) = pool.shared.get_mut(&key) {
        *users -= 1;
        if *users == 0 {
            pool.shared.remove(&key);
        }
    }
}

fn setting(args: &SimulateArgs, cell: &Cell) -> Setting {
    let closed = cell.workload.is_closed();
    let hosts = if closed { CONVERSATION_HOSTS } else { 7 };
    Setting {
        policy: cell.policy,
        gateways: cell.gateways,
        workers: args.workers,
        names: Vec::new(),
        hosts: args.hosts.unwrap_or(hosts),
        engine: args.engine.clone(),
        warmup_s: if closed { 0.0 } else { args.warmup },
        window_s: args.window,
        drain_s: args.drain,
        staleness_s: args.staleness_ms / 1000.0,
        unstreamed: args.unstreamed,
        happenings: args.event.clone(),
        seed: cell.seed,
        rules: None,
    }
}

#[cfg(test)]
#[path = "simulate_tests.rs"]
mod tests;
