//! What to run: workloads, their loads, and the lists on the command line → cells.
//!
//! Guarantee: a load of 1 is the highest rate at which random routing was stable on seven hosts
//! (ROUTING.md 3). Not here: how a cell is run (world.rs).

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum;

use crate::simulate::policy;
use crate::workload::conversations::{Conversations, Rounds};
use crate::workload::trace::Trace;
use crate::workload::{self, Plan, Workload, WorkloadArgs};

/// Where `--traces` looks if it is not given: in the folder that a command is started in.
pub const TRACES: &str = "traces";

/// Where the traces are published.
const TRACES_SOURCE: &str =
    "https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces";

/// A workload of the study.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[value(rename_all = "verbatim")]
pub enum Name {
    /// Single questions behind 2,600 prompts
    W1,
    /// Chats of several turns in 200 apps
    W2,
    /// Agents of many steps in 12 apps
    W3,
    /// Questions about 4 of 1,500 documents
    W4,
    /// W1, and one prompt has half the traffic
    W5,
    /// No sharing
    W6,
    /// Mooncake's trace of a chat service
    W7,
    /// Mooncake's synthetic trace
    W7s,
    /// 50 conversations of 5 turns behind one system prompt; its load is how many run at once
    C1,
    /// The same behind ten system prompts
    C10,
}

impl Name {
    /// The name in rows.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::W1 => "W1",
            Self::W2 => "W2",
            Self::W3 => "W3",
            Self::W4 => "W4",
            Self::W5 => "W5",
            Self::W6 => "W6",
            Self::W7 => "W7",
            Self::W7s => "W7s",
            Self::C1 => "C1",
            Self::C10 => "C10",
        }
    }

    /// The rate of load 1: requests, or chats, a second; for traces times their recorded speed.
    #[must_use]
    pub fn rate(self) -> f64 {
        match self {
            Self::W1 => 33.4,
            Self::W2 => 7.19,
            Self::W3 => 0.348,
            Self::W4 => 30.9,
            Self::W5 => 53.9,
            Self::W6 => 26.7,
            Self::W7 => 1.295,
            Self::W7s => 0.859,
            Self::C1 | Self::C10 => 1.0,
        }
    }

    /// The trace that it plays, if it is not made.
    fn recorded(self) -> Option<Recorded> {
        match self {
            Self::W7 => Some(Recorded {
                published: "conversation_trace.jsonl",
                ours: "mooncake_conversation.jsonl",
                what: "Mooncake's trace of a chat service",
            }),
            Self::W7s => Some(Recorded {
                published: "synthetic_trace.jsonl",
                ours: "mooncake_synthetic.jsonl",
                what: "Mooncake's synthetic trace",
            }),
            _ => None,
        }
    }

    /// Whether all is there that it needs: for a trace, its file.
    #[must_use]
    pub fn is_there(self, traces: &Path) -> bool {
        self.recorded()
            .is_none_or(|recorded| recorded.path(traces).is_file())
    }

    /// Whether requests wait for each other: no warm-up, no rate.
    #[must_use]
    pub fn is_closed(self) -> bool {
        matches!(self, Self::C1 | Self::C10)
    }
}

/// How arrivals are spread.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Arrival {
    /// At a constant rate, independent of each other
    Poisson,
    /// Twice the rate for about 10 s, half of it for about 20 s
    Bursty,
}

impl Arrival {
    /// The name in rows.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Poisson => "poisson",
            Self::Bursty => "bursty",
        }
    }
}

/// One run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// The workload.
    pub workload: Name,
    /// Times its rate.
    pub load: f64,
    /// How arrivals are spread.
    pub arrival: Arrival,
    /// Gateways.
    pub gateways: u32,
    /// The policy.
    pub policy: policy::Kind,
    /// The seed of the workload and of everything else.
    pub seed: u64,
}

/// Sizes of the synthetic workloads that differ from the study's; as `load` and `demo` name them.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Sizes {
    /// Requests (W2, W3: chats) a second, instead of loads
    #[arg(long, value_parser = crate::numbers::rate)]
    pub rate: Option<f64>,
    /// Shared prompts (W2, W3: apps; W4: documents)
    #[arg(long, value_name = "N")]
    pub prompts: Option<u32>,
    /// Exponent of the prompts' popularity
    #[arg(long)]
    pub zipf: Option<f64>,
    /// Mean tokens of a shared prompt
    #[arg(long, value_name = "TOKENS")]
    pub prompt_tokens: Option<f64>,
    /// Tokens of a question (W3: of a tool's result)
    #[arg(long, value_name = "TOKENS")]
    pub question_tokens: Option<u32>,
    /// Mean tokens of an answer
    #[arg(long, value_name = "TOKENS")]
    pub output_tokens: Option<u32>,
    /// Play only the first N requests of a trace
    #[arg(long, value_name = "N")]
    pub trace_requests: Option<usize>,
    /// Share of a trace's recorded answer tokens that is asked for
    #[arg(long, value_name = "SHARE")]
    pub output_scale: Option<f64>,
}

/// Workloads ready to be opened, by name and seed.
#[derive(Clone, Debug)]
pub enum Source {
    /// Open loop.
    Open(Plan),
    /// Closed loop.
    Closed(Conversations),
}

impl Source {
    /// The source of a workload; traces are read from `traces`.
    ///
    /// # Errors
    /// If a trace cannot be read.
    pub fn new(
        name: Name,
        seed: u64,
        arrival: Arrival,
        traces: &Path,
        sizes: &Sizes,
    ) -> anyhow::Result<Self> {
        let kind = match name {
            Name::W1 => workload::options::Kind::W1,
            Name::W2 => workload::options::Kind::W2,
            Name::W3 => workload::options::Kind::W3,
            Name::W4 => workload::options::Kind::W4,
            Name::W5 => workload::options::Kind::W5,
            Name::W6 => workload::options::Kind::W6,
            Name::W7 | Name::W7s => return trace(name, traces, seed, sizes),
            Name::C1 => return Ok(Self::Closed(Conversations::new(1, seed))),
            Name::C10 => return Ok(Self::Closed(Conversations::new(10, seed))),
        };
        let args = WorkloadArgs {
            workload: kind,
            trace: None,
            trace_requests: None,
            rate: None,
            bursty: arrival == Arrival::Bursty,
            seed,
            prompts: sizes.prompts,
            zipf: sizes.zipf,
            prompt_tokens: sizes.prompt_tokens,
            question_tokens: sizes.question_tokens,
            output_tokens: sizes.output_tokens,
            output_scale: None,
        };
        Ok(Self::Open(args.plan()?))
    }

    /// Starts it.
    ///
    /// # Errors
    /// If a parameter is out of range.
    pub fn open(&self, cell: &Cell, sizes: &Sizes) -> anyhow::Result<Box<dyn Workload>> {
        let rate = sizes.rate.unwrap_or(cell.workload.rate() * cell.load);
        match self {
            Self::Open(plan) => plan.at_rate(rate).open(),
            Self::Closed(plan) => Ok(Box::new(Rounds::new(*plan, cell.load.max(1.0) as u32))),
        }
    }
}

/// A trace's file.
struct Recorded {
    /// Its name where it is published.
    published: &'static str,
    /// Its name beside other services' traces.
    ours: &'static str,
    what: &'static str,
}

impl Recorded {
    /// The one of both names that is there.
    fn path(&self, traces: &Path) -> PathBuf {
        let ours = traces.join(self.ours);
        match ours.is_file() {
            true => ours,
            false => traces.join(self.published),
        }
    }
}

fn trace(name: Name, traces: &Path, seed: u64, sizes: &Sizes) -> anyhow::Result<Source> {
    let recorded = name.recorded().context("no trace")?;
    let path = recorded.path(traces);
    let Recorded {
        published, what, ..
    } = recorded;
    anyhow::ensure!(
        path.is_file(),
        "{} plays {what}, which is not part of this project, and {} is no file: fetch {published} \
         from {TRACES_SOURCE}, and name the folder that it is in with --traces FOLDER",
        name.label(),
        path.display()
    );
    let mut trace = Trace::read(&path, sizes.trace_requests, seed)?;
    trace.output_scale = sizes.output_scale.unwrap_or(1.0);
    Ok(Source::Open(Plan::Trace(trace)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_that_is_missing_is_named_with_its_source_and_its_flag() {
        let folder = tempfile::tempdir().unwrap();
        let open = |name| {
            let sizes = Sizes::default();
            Source::new(name, 1, Arrival::Poisson, folder.path(), &sizes)
        };
        for (name, file) in [
            (Name::W7, "conversation_trace.jsonl"),
            (Name::W7s, "synthetic_trace.jsonl"),
        ] {
            let error = format!("{:#}", open(name).unwrap_err());
            for part in [name.label(), file, "kvcache-ai/Mooncake", "--traces FOLDER"] {
                assert!(error.contains(part), "{part:?} is not in {error:?}");
            }
        }
        // By the published name and by ours.
        let line = r#"{"timestamp":0,"input_length":9,"output_length":1,"hash_ids":[1]}"#;
        std::fs::write(folder.path().join("conversation_trace.jsonl"), line).unwrap();
        std::fs::write(folder.path().join("mooncake_synthetic.jsonl"), line).unwrap();
        for name in [Name::W7, Name::W7s] {
            assert!(name.is_there(folder.path()) && open(name).is_ok());
        }
    }
}
