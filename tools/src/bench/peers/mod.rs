//! `prefix-router bench peers`: other routers beside this one, over the same engines and requests.
//!
//! Guarantee: every router of a cell meets the same engines, cold, and the same requests; they take
//! turns, and each repetition begins with another one. A router that cannot be installed or started
//! is named, and the others are measured. Not here: policies of others written again (simulate).

mod conversations;
mod cpu;
mod findings;
mod fleet;
mod install;
mod page;
mod plays;
mod published;
mod router;
mod scaling;
mod table;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};

use super::store::{Key, Store};
use crate::engine::cost::EngineConfig;
use crate::engine::server::ServerConfig;
use crate::print::note;
use crate::report::table::{WIDTH, wrap_to};
use crate::round::interrupted;
use crate::setup;
use install::{Installed, Package};
use plays::{Part, Play, Row};
use router::{Contestant, Engines, MODEL, Router};

/// What can be measured.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Chats behind few system prompts: turns that stay on their host, and the hosts' shares.
    Conversations,
    /// A host joins, one leaves, one dies: what moves, and what clients see.
    Scaling,
    /// Processor time of the gateway for each request at saturation, and memory.
    Cpu,
    /// Real llama.cpp engines under tenants' conversations: hits, times, requests a second.
    Fleet,
    /// The same engines where there is little to gain: small caches, unique prompts, short ones.
    Bad,
    /// Real vLLM replicas: `bench vllm`, since they are fetched in gigabytes.
    #[value(skip)]
    Vllm,
}

impl What {
    fn part(self) -> &'static Part {
        match self {
            Self::Conversations => &conversations::PART,
            Self::Scaling => &scaling::PART,
            Self::Cpu => &cpu::PART,
            Self::Fleet => &fleet::PART,
            Self::Bad => &fleet::BAD,
            Self::Vllm => &fleet::VLLM,
        }
    }
}

/// Options of `prefix-router bench peers`
#[derive(Args, Clone, Debug)]
pub(super) struct PeersArgs {
    /// Only these parts, with commas
    #[arg(long, value_enum, value_name = "PART", value_delimiter = ',')]
    only: Vec<What>,
    #[command(flatten)]
    run: RunArgs,
}

/// How routers are compared
#[derive(Args, Clone, Debug)]
pub(super) struct RunArgs {
    /// Only these routers, with commas; a wrong name lists all
    #[arg(long, value_name = "ROUTER", value_delimiter = ',')]
    routers: Vec<String>,
    /// How often each router plays each cell
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Take the plays that an earlier run with the same commit, seed and sizes has finished
    #[arg(long)]
    resume: bool,
    /// The first repetition's seed; the others have the ones after it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Envoy's worker threads; by default as many as there are processors, as the others do
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    workers: Option<u32>,
    /// First of the ports on which engines listen, or 0 for any free ones where engines are
    /// simulated; where a prefix lives depends on them
    #[arg(long, value_name = "PORT", default_value_t = 19_301)]
    engine_port: u16,
    /// Folder for plays, tables, plots and logs [default: target/bench]
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Print one JSON object with all rows instead of tables
    #[arg(long)]
    json: bool,
}

/// Runs it, and prints and keeps the result.
pub(super) fn run(args: &PeersArgs) -> Result<()> {
    let parts = match args.only.as_slice() {
        [] => What::value_variants(),
        only => only,
    };
    measure(&args.run, parts, &PEERS)
}

/// The same over real vLLM replicas, with files of its own.
pub(super) fn run_vllm(args: &RunArgs) -> Result<()> {
    measure(args, &[What::Vllm], &VLLM)
}

/// The files in which a result is kept.
struct Files {
    plays: &'static str,
    markdown: &'static str,
    page: &'static str,
}

const PEERS: Files = Files {
    plays: "peers.jsonl",
    markdown: "peers.md",
    page: "report.html",
};

const VLLM: Files = Files {
    plays: "vllm.jsonl",
    markdown: "vllm.md",
    page: "vllm.html",
};

fn measure(args: &RunArgs, parts: &[What], files: &Files) -> Result<()> {
    let mut bench = Bench::new(args, files)?;
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        tokio::select! {
            () = all(parts, &mut bench) => Ok(()),
            name = interrupted() => {
                note!();
                bail!("stopped by {name}; finished plays are kept, --resume goes on")
            }
        }
    })?;
    let folder = bench.store.folder();
    let results = bench.results(parts);
    publish(&results, &folder, files, args.json)?;
    match results.faults().len() {
        0 => Ok(()),
        count => bail!("measurements that are missing, as named above: {count}"),
    }
}

async fn all(parts: &[What], bench: &mut Bench) {
    for what in parts {
        let began = Instant::now();
        let part = what.part();
        note!("bench: {}", part.title);
        let done = match what {
            What::Conversations => conversations::run(bench).await,
            What::Scaling => scaling::run(bench).await,
            What::Cpu => cpu::run(bench).await,
            What::Fleet => fleet::run(bench, &fleet::PART, &fleet::LOADS).await,
            What::Bad => fleet::run(bench, &fleet::BAD, &fleet::BAD_LOADS).await,
            What::Vllm => fleet::run(bench, &fleet::VLLM, &fleet::VLLM_LOADS).await,
        };
        if let Err(error) = done {
            // What the other parts measure is worth having.
            let missing = format!("{} could not be measured: {error:#}", part.name);
            note!("bench: {missing}");
            bench.missing.push(missing);
        }
        let minutes = began.elapsed().as_secs_f64() / 60.0;
        note!("bench: {} took {minutes:.1} min", part.name);
    }
}

/// What was measured, and what it holds for.
struct Results {
    parts: Vec<&'static Part>,
    contestants: Vec<Contestant>,
    plays: Vec<Play>,
    conditions: Vec<String>,
    /// What could not be installed or run, in sentences.
    missing: Vec<String>,
    envoy_version: String,
    key: Key,
}

impl Results {
    fn rows(&self, part: &Part) -> Vec<Row> {
        plays::rows(part, &self.plays)
    }

    /// Which release of a router played.
    fn version(&self, contestant: &Contestant) -> String {
        match contestant.package() {
            Some(package) => format!("{} {}", package.name(), package.version()),
            None => format!("Envoy {}", self.envoy_version),
        }
    }

    /// What the rows say together, in sentences: where ours is behind as well.
    fn findings(&self) -> Vec<String> {
        findings::of(self)
    }

    /// What went wrong, in sentences.
    fn faults(&self) -> Vec<String> {
        let of = |play: &Play| {
            let at = format!("{}, {}, {}", play.part, play.cell, play.router);
            let faults = play.faults.iter();
            faults
                .map(move |fault| format!("{at}: {fault}"))
                .collect::<Vec<_>>()
        };
        let plays = self.plays.iter().flat_map(of);
        self.missing.iter().cloned().chain(plays).collect()
    }
}

fn publish(results: &Results, folder: &Path, files: &Files, json: bool) -> Result<()> {
    // What an earlier run has found stays.
    anyhow::ensure!(
        results.plays.iter().any(|play| !play.figures.is_empty()),
        "nothing could be measured: {}",
        results.faults().join("; ")
    );
    let (markdown, html) = (folder.join(files.markdown), folder.join(files.page));
    for (path, text) in [
        (&markdown, table::markdown(results)),
        (&html, page::render(results)?),
    ] {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let text = if json {
        table::json(results)? + "\n"
    } else {
        table::terminal(results)
    };
    crate::print::result(format_args!("{text}"))?;
    note!(
        "\nTables: {}\nPlots: {}",
        markdown.display(),
        html.display()
    );
    Ok(())
}

/// Engines that answer in 30 ms, whatever is cached: 60 tokens in steps of half a millisecond.
fn mock() -> ServerConfig {
    ServerConfig {
        engine: EngineConfig {
            step_base_ms: 0.5,
            prefill_tokens_per_s: 1e9,
            decode_us: 0.0,
            decode_context_ns: 0.0,
            ..EngineConfig::default()
        },
        models: vec![MODEL.to_owned()],
        // Without, vLLM's router would silently not look at prompts.
        enable_scale_out: true,
        ..ServerConfig::default()
    }
}

/// What one play brought.
#[derive(Default)]
struct Outcome {
    figures: Vec<(&'static str, f64)>,
    hosts: Vec<u64>,
}

impl Outcome {
    fn figure(&mut self, name: &'static str, value: f64) {
        self.figures.push((name, value));
    }
}

/// A play that is to be made.
struct Slot {
    part: &'static Part,
    cell: String,
    router: String,
    repeat: u32,
}

/// A run: who takes part, and what has been measured.
struct Bench {
    contestants: Vec<Contestant>,
    installed: Installed,
    /// What could not be installed or run, in sentences.
    missing: Vec<String>,
    store: Store<Play>,
    plays: Vec<Play>,
    key: Key,
    seed: u64,
    repeats: u32,
    workers: u32,
    engine_port: u16,
    envoy_version: String,
    command: String,
}

impl Bench {
    fn new(args: &RunArgs, files: &Files) -> Result<Self> {
        let mut contestants = Contestant::named(&args.routers)?;
        let folder = match &args.output {
            Some(folder) => folder.clone(),
            None => setup::results("bench")?,
        };
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create the folder {}", folder.display()))?;
        let store = Store::open(folder.join(files.plays), args.resume)?;
        let ready = setup::ready()?;
        let (installed, missing) = Installed::new(&contestants);
        for line in &missing {
            note!("bench: {line}");
        }
        contestants.retain(|one| installed.has(one));
        ensure!(!contestants.is_empty(), "none of the routers can be run");
        let workers = args.workers.unwrap_or_else(processors);
        let key = Key {
            commit: setup::commit(),
            seed: args.seed,
            sizes: format!("workers {workers}, engines from port {}", args.engine_port),
        };
        Ok(Self {
            contestants,
            installed,
            missing,
            store,
            plays: Vec::new(),
            key,
            seed: args.seed,
            repeats: args.repeats,
            workers,
            engine_port: args.engine_port,
            envoy_version: ready.envoy_version,
            command: command(),
        })
    }

    /// The routers in the order of a repetition: each begins with another one.
    fn turn(&self, repeat: u32) -> Vec<Contestant> {
        let mut turn = self.contestants.clone();
        let first = (repeat as usize - 1) % turn.len().max(1);
        turn.rotate_left(first);
        turn
    }

    fn seed_of(&self, repeat: u32) -> u64 {
        self.seed.wrapping_add(u64::from(repeat) - 1)
    }

    /// Starts a router.
    async fn open(&self, contestant: Contestant, hosts: &[SocketAddr]) -> Result<Router> {
        self.open_with(contestant, Engines::plain(hosts), self.workers)
            .await
    }

    /// The same before any engines, and with so many workers if it is an Envoy.
    async fn open_with(
        &self,
        contestant: Contestant,
        engines: Engines<'_>,
        workers: u32,
    ) -> Result<Router> {
        let folder = self.store.folder();
        Router::open(contestant, engines, workers, &self.installed, &folder).await
    }

    fn slot(&self, part: &'static Part, cell: &str, router: &str, repeat: u32) -> Slot {
        Slot {
            part,
            cell: cell.to_owned(),
            router: router.to_owned(),
            repeat,
        }
    }

    /// Whether all these plays were made by an earlier run, and are taken from there.
    fn have(&mut self, slots: &[Slot]) -> bool {
        let name = |slot: &Slot| plays::name(slot.part.name, &slot.cell, &slot.router, slot.repeat);
        let found = slots
            .iter()
            .map(|slot| self.store.find(&name(slot), &self.key));
        let Some(found) = found.collect::<Option<Vec<Play>>>() else {
            return false;
        };
        self.plays.extend(found);
        true
    }

    /// Keeps what a play brought, or why it failed.
    fn keep(&mut self, slot: Slot, outcome: Result<Outcome>) -> Result<()> {
        let Slot {
            part,
            cell,
            router,
            repeat,
        } = slot;
        let mut play = Play {
            part: part.name.to_owned(),
            cell,
            router,
            repeat,
            key: self.key.clone(),
            ..Play::default()
        };
        match outcome {
            Ok(outcome) => {
                let figures = outcome.figures.into_iter();
                play.figures = figures
                    .map(|(name, value)| (name.to_owned(), value))
                    .collect();
                play.hosts = outcome.hosts;
            }
            Err(error) => play.faults.push(format!("{error:#}")),
        }
        note!("{}", told(&play, part));
        self.store.keep(&play)?;
        self.plays.push(play);
        Ok(())
    }

    fn results(self, parts: &[What]) -> Results {
        let once = match self.repeats {
            1 => "once".to_owned(),
            repeats => format!("{repeats} times"),
        };
        let conditions = vec![
            format!(
                "Each router played each cell {once}, in turn; medians, with the least and the \
                 largest. Seeds from {} on, the same for all.",
                self.seed
            ),
            format!(
                "Envoy {} with {} worker threads; {} All on {}, which the engines and the load \
                 share with the router.",
                self.envoy_version,
                self.workers,
                packages(&self.contestants),
                machine()
            ),
            format!("Command: {}", self.command),
            format!("Commit {}.", self.key.commit),
        ];
        Results {
            parts: parts.iter().map(|what| what.part()).collect(),
            contestants: self.contestants,
            plays: self.plays,
            conditions,
            missing: self.missing,
            envoy_version: self.envoy_version,
            key: self.key,
        }
    }
}

/// What a play brought, or why it failed, in lines of at most 80 characters.
fn told(play: &Play, part: &Part) -> String {
    let columns = part.columns.iter();
    let figures = columns.filter_map(|column| {
        let value = *play.figures.get(column.figure)?;
        let digits = column.digits;
        // No line ends within a figure.
        let figure = format!("{} {value:.digits$}", column.head).replace(' ', "\u{a0}");
        (value > 0.0 || !column.quiet).then_some(figure)
    });
    let said: Vec<String> = figures.chain(play.faults.iter().cloned()).collect();
    let Play {
        cell,
        router,
        repeat,
        ..
    } = play;
    let text = format!("{cell}, round {repeat}, {router}: {}", said.join(", "));
    let lines = wrap_to(&text, WIDTH - PREFIX.len());
    let indent = " ".repeat(PREFIX.len());
    PREFIX.to_owned() + &lines.join(&format!("\n{indent}"))
}

/// Before what is told while it runs.
const PREFIX: &str = "bench: ";

/// How this program was called, as one would type it.
fn command() -> String {
    // A file's name need not be text.
    let arguments: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    format!("cargo pr {}", arguments.join(" "))
}

/// The packages that took part, in a sentence.
fn packages(contestants: &[Contestant]) -> String {
    let named = |package: &Package| {
        let plays = contestants
            .iter()
            .any(|one| one.package() == Some(*package));
        plays.then(|| format!("{} {}", package.name(), package.version()))
    };
    let named: Vec<String> = Package::ALL.iter().filter_map(named).collect();
    if named.is_empty() {
        return "no other packages.".to_owned();
    }
    format!("{} from the Python package index.", named.join(", "))
}

/// The machine in words, e.g. `2 processors (AMD EPYC 7B13)`.
fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("unknown", |rest| rest.trim_start_matches([' ', '\t', ':']));
    format!("{} processors ({model})", processors())
}

/// The machine's processors, as far as this process may use them.
fn processors() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| count.get() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_of_a_play_fits_a_terminal_of_80_columns() {
        let figures = [
            ("hits", 72.25),
            ("p50", 219.4),
            ("p99", 856.0),
            ("good", 35.0),
            ("failed", 0.0),
        ];
        let play = Play {
            cell: "caches too small: 12 slots for 24 conversations of 4 turns".to_owned(),
            router: "sglang-cache_aware-tuned".to_owned(),
            repeat: 2,
            figures: figures.map(|(name, value)| (name.to_owned(), value)).into(),
            ..Play::default()
        };
        assert_eq!(
            told(&play, &fleet::BAD),
            "bench: caches too small: 12 slots for 24 conversations of 4 turns, round 2,\n       \
             sglang-cache_aware-tuned: hits % 72.2, TTFT P50 219, P99 ms 856,\n       good % 35"
        );
        let failed = Play {
            faults: vec!["smg did not start".to_owned()],
            figures: [("hits".to_owned(), 72.25), ("failed".to_owned(), 3.0)].into(),
            ..play
        };
        let text = told(&failed, &fleet::BAD);
        assert!(
            text.ends_with("hits % 72.2, failed 3, smg did not start"),
            "{text}"
        );
    }
}
