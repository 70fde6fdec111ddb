//! Which workload, of what size: command-line options and their defaults.
//!
//! Guarantee: the defaults are the study's workloads (their sizes and rates). Not here: how
//! requests are made of them.

use std::path::PathBuf;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng as _;

use super::Workload;
use super::agents::{AgentRequests, Agents};
use super::arrivals::Spread;
use super::chats::{ChatRequests, Chats};
use super::documents::{DocumentRequests, Documents};
use super::single::{Single, SingleRequests};
use super::text;
use super::trace::{Trace, TraceRequests};

/// The synthetic workloads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "upper")]
pub enum Kind {
    /// Single questions behind 2,600 prompts (650 in the demo without --full) of about 3,000 tokens,
    /// Zipf 0.55.
    #[default]
    #[value(alias = "w1")]
    W1,
    /// Chats of 5 to 10 turns in 200 apps of about 2,000 tokens of system prompt, Zipf 0.9.
    #[value(alias = "w2")]
    W2,
    /// Agents of 8 to 16 steps in 12 apps: 21,000 tokens that grow by 1,780 a step.
    #[value(alias = "w3")]
    W3,
    /// Questions about 4 of 1,500 documents of about 800 tokens, Zipf 0.9.
    #[value(alias = "w4")]
    W4,
    /// W1, and one prompt of 3,000 tokens has half the traffic.
    #[value(alias = "w5")]
    W5,
    /// No sharing: every prompt is unique.
    #[value(alias = "w6")]
    W6,
}

/// Options that choose a workload.
#[derive(Clone, Debug, clap::Args)]
pub struct WorkloadArgs {
    /// The workload.
    #[arg(long, value_enum, ignore_case = true, default_value = "W1")]
    pub workload: Kind,
    /// Play a trace in Mooncake's format instead.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Play only the first N requests of the trace.
    #[arg(long, value_name = "N", requires = "trace")]
    pub trace_requests: Option<usize>,
    /// Requests a second (W2: new chats a second), or how many times faster than recorded a trace
    /// arrives. Default: 80 % of what random routing can serve with seven engines.
    #[arg(long, value_parser = crate::numbers::rate)]
    pub rate: Option<f64>,
    /// Arrivals in bursts: twice the rate for about 10 s, half of it for 20 s.
    #[arg(long)]
    pub bursty: bool,
    /// The seed of everything random.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Shared prompts (W2: apps).
    #[arg(long, value_name = "N")]
    pub prompts: Option<u32>,
    /// Exponent of the prompts' popularity.
    #[arg(long)]
    pub zipf: Option<f64>,
    /// Mean tokens of a shared prompt.
    #[arg(long, value_name = "TOKENS")]
    pub prompt_tokens: Option<f64>,
    /// Tokens of a question.
    #[arg(long, value_name = "TOKENS")]
    pub question_tokens: Option<u32>,
    /// Mean tokens of an answer.
    #[arg(long, value_name = "TOKENS", conflicts_with = "trace")]
    pub output_tokens: Option<u32>,
    /// Share of a trace's recorded answer tokens that is asked for.
    #[arg(long, value_name = "SHARE", requires = "trace")]
    pub output_scale: Option<f64>,
}

/// A workload that can be opened as often as needed, always the same.
#[derive(Clone, Debug)]
pub enum Plan {
    /// W1, W5, W6.
    Single(Single),
    /// W2.
    Chats(Chats),
    /// W3.
    Agents(Agents),
    /// W4.
    Documents(Documents),
    /// A recorded one.
    Trace(Trace),
}

impl WorkloadArgs {
    /// The workload these options choose.
    ///
    /// # Errors
    /// If the trace cannot be read or a number is out of range.
    pub fn plan(&self) -> anyhow::Result<Plan> {
        if let Some(path) = &self.trace {
            let mut trace = Trace::read(path, self.trace_requests, self.seed)?;
            trace.speed = self.rate.unwrap_or(1.0);
            trace.output_scale = self.output_scale.unwrap_or(1.0);
            return Ok(Plan::Trace(trace));
        }
        Ok(match self.workload {
            Kind::W1 => Plan::Single(self.single(26.7)),
            Kind::W2 => Plan::Chats(self.chats(5.75)),
            Kind::W3 => Plan::Agents(self.agents(0.278)),
            Kind::W4 => Plan::Documents(self.documents(24.7)),
            Kind::W5 => Plan::Single(Single {
                viral: Some((3000, 0.5)),
                ..self.single(43.1)
            }),
            Kind::W6 => Plan::Single(Single {
                prompts: 0,
                ..self.single(21.4)
            }),
        })
    }

    fn spread(&self) -> Spread {
        if self.bursty {
            Spread::Bursty
        } else {
            Spread::Even
        }
    }

    fn single(&self, rate: f64) -> Single {
        Single {
            prompts: self.prompts.unwrap_or(2600),
            zipf: self.zipf.unwrap_or(0.55),
            prompt_tokens: self.prompt_tokens.unwrap_or(3000.0),
            sigma: 0.3,
            question_tokens: self.question_tokens.unwrap_or(120),
            output_tokens: self.output_tokens.unwrap_or(220),
            rate: self.rate.unwrap_or(rate),
            spread: self.spread(),
            viral: None,
            seed: self.seed,
        }
    }

    fn chats(&self, rate: f64) -> Chats {
        Chats {
            apps: self.prompts.unwrap_or(200),
            zipf: self.zipf.unwrap_or(0.9),
            system_tokens: self.prompt_tokens.unwrap_or(2000.0),
            sigma: 0.3,
            turns: (5, 10),
            question_tokens: self.question_tokens.unwrap_or(130),
            output_tokens: self.output_tokens.unwrap_or(260),
            think_min: 2.0,
            think_mean: 18.0,
            rate: self.rate.unwrap_or(rate),
            spread: self.spread(),
            seed: self.seed,
        }
    }

    fn agents(&self, rate: f64) -> Agents {
        Agents {
            apps: self.prompts.unwrap_or(12),
            zipf: self.zipf.unwrap_or(0.9),
            system_tokens: self.prompt_tokens.map_or(9000, |tokens| tokens as u32),
            task_tokens: 12_000,
            steps: (8, 16),
            result_tokens: self.question_tokens.unwrap_or(1600),
            output_tokens: self.output_tokens.unwrap_or(180),
            tool_min: 0.3,
            tool_mean: 2.5,
            rate: self.rate.unwrap_or(rate),
            spread: self.spread(),
            seed: self.seed,
        }
    }

    fn documents(&self, rate: f64) -> Documents {
        Documents {
            documents: self.prompts.unwrap_or(1500),
            zipf: self.zipf.unwrap_or(0.9),
            picked: 4,
            document_tokens: self.prompt_tokens.unwrap_or(800.0),
            sigma: 0.3,
            system_tokens: 320,
            question_tokens: self.question_tokens.unwrap_or(120),
            output_tokens: self.output_tokens.unwrap_or(220),
            rate: self.rate.unwrap_or(rate),
            spread: self.spread(),
            seed: self.seed,
        }
    }
}

impl Plan {
    /// Starts the workload from its beginning.
    ///
    /// # Errors
    /// If a parameter is out of range.
    pub fn open(&self) -> anyhow::Result<Box<dyn Workload>> {
        Ok(match self {
            Self::Single(plan) => Box::new(SingleRequests::new(plan.clone())?),
            Self::Chats(plan) => Box::new(ChatRequests::new(plan.clone())?),
            Self::Agents(plan) => Box::new(AgentRequests::new(plan.clone())?),
            Self::Documents(plan) => Box::new(DocumentRequests::new(plan.clone())?),
            Self::Trace(trace) => Box::new(TraceRequests::new(trace.clone())),
        })
    }

    /// The same workload at another rate (a trace: at another speed).
    #[must_use]
    pub fn at_rate(&self, rate: f64) -> Self {
        let mut plan = self.clone();
        match &mut plan {
            Self::Single(plan) => plan.rate = rate,
            Self::Chats(plan) => plan.rate = rate,
            Self::Agents(plan) => plan.rate = rate,
            Self::Documents(plan) => plan.rate = rate,
            Self::Trace(trace) => trace.speed = rate,
        }
        plan
    }

    /// Requests (W2: chats) a second, or a trace's speed.
    #[must_use]
    pub fn rate(&self) -> f64 {
        match self {
            Self::Single(plan) => plan.rate,
            Self::Chats(plan) => plan.rate,
            Self::Agents(plan) => plan.rate,
            Self::Documents(plan) => plan.rate,
            Self::Trace(trace) => trace.speed,
        }
    }
}

/// The random stream of one purpose: draws for one thing never shift those for another.
#[must_use]
pub fn stream(seed: u64, purpose: &str) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(text::id(purpose, seed, 0))
}
