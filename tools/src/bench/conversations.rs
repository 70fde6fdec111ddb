//! `prefix-router bench conversations`: chats behind few system prompts, through a real Envoy.
//!
//! Fifty chats of five turns share one system prompt of 3,000 tokens, or ten, over four cold hosts
//! (C1 and C10 of the study). Guarantee: which host served a turn is the engine's own word; every
//! cell and seed has a fresh Envoy and empty caches. Not here: the rules that keep chats together
//! and spread them.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::live::{Engines, Front};
use crate::engine::server::ServerConfig;
use crate::load::driver::{Record, Until};
use crate::print::{note, say};
use crate::setup;
use crate::workload::conversations::{Conversations, Rounds};

/// Hosts of the study's figures.
pub(super) const HOSTS: u16 = 4;
/// Of 200 later turns so many have to stay.
const KEPT_MIN: u32 = 196;
/// The largest host's share over the mean, averaged over seeds, with `gateways` `one`.
const SHARE_MAX: f64 = 1.3;

/// The pool's option `gateways`.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// New prompts are balanced.
    One,
    /// Any number of gateways agree.
    Many,
}

/// Options of `prefix-router bench conversations`
#[derive(Args, Clone, Debug)]
pub struct ConversationsArgs {
    /// Seeds, from 1 on
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub seeds: u64,
    /// System prompts
    #[arg(long, value_delimiter = ',', default_value = "1,10",
          value_parser = clap::value_parser!(u32).range(1..=50))]
    pub systems: Vec<u32>,
    /// Requests at once
    #[arg(long, value_delimiter = ',', default_value = "1,16",
          value_parser = clap::value_parser!(u32).range(1..=50))]
    pub at_once: Vec<u32>,
    /// The pool's option `gateways`
    #[arg(long, value_enum, value_delimiter = ',', default_value = "one,many")]
    pub gateways: Vec<Form>,
    /// Envoy's worker threads
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub workers: u32,
    /// How many times faster than real time the engines' clock runs
    #[arg(long, default_value_t = 100.0, value_parser = crate::numbers::speed)]
    pub speed: f64,
    /// First of the ports on which the engines listen, or 0 for any; placement depends on them
    #[arg(long, default_value_t = 19_201)]
    pub engine_port: u16,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// What was seen.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// One for each cell.
    pub rows: Vec<Row>,
    /// Seeds 1 to this.
    pub seeds: u64,
    /// Envoy's worker threads.
    pub workers: u32,
    /// The engines' clock against real time.
    pub speed: f64,
    /// The project's commit.
    pub commit: String,
}

/// One cell, over all seeds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `one` or `many`.
    pub gateways: String,
    /// System prompts.
    pub systems: u32,
    /// Requests at once.
    pub at_once: u32,
    /// Of 200 later turns, how many stayed on the host of the turn before, in the mean.
    pub kept_mean: f64,
    /// The same of the worst seed.
    pub kept_min: u32,
    /// Requests of the host that got most over the mean of all hosts, in the mean over seeds.
    pub share_mean: f64,
    /// The same of the worst seed.
    pub share_max: f64,
}

impl Row {
    /// What the row breaks of what is promised, if anything.
    #[must_use]
    pub fn broken(&self) -> Option<&'static str> {
        // What a seed loses is lost by a chat that had to move: each seed has to keep its turns.
        if self.kept_min < KEPT_MIN {
            return Some("too few stay");
        }
        (self.gateways == "one" && self.share_mean > SHARE_MAX).then_some("too uneven")
    }
}

/// Runs it and prints the result.
///
/// # Errors
/// If something could not be started, or a request failed.
pub fn run(args: &ConversationsArgs) -> Result<()> {
    let report = tokio::runtime::Runtime::new()?.block_on(measure(args))?;
    if args.json {
        say!("{}", serde_json::to_string(&report)?)?;
    } else {
        print(&report)?;
    }
    Ok(())
}

/// Measures every cell.
///
/// # Errors
/// If something could not be started, or a request failed.
pub async fn measure(args: &ConversationsArgs) -> Result<Report> {
    let config = ServerConfig::default();
    let engines = Engines::start(HOSTS, args.engine_port, args.speed, &config).await?;
    let mut rows = Vec::new();
    for &gateways in &args.gateways {
        for &systems in &args.systems {
            for &at_once in &args.at_once {
                rows.push(cell(args, &engines, gateways, systems, at_once).await?);
            }
        }
    }
    Ok(Report {
        rows,
        seeds: args.seeds,
        workers: args.workers,
        speed: args.speed,
        commit: setup::commit(),
    })
}

async fn cell(
    args: &ConversationsArgs,
    engines: &Engines,
    gateways: Form,
    systems: u32,
    at_once: u32,
) -> Result<Row> {
    let name = gateways.to_possible_value();
    let name = name.map_or_else(String::new, |value| value.get_name().to_owned());
    let (mut kept, mut shares) = (Vec::new(), Vec::new());
    for seed in 1..=args.seeds {
        let plan = Conversations::new(systems, seed);
        let front = Front {
            workers: args.workers,
            one_gateway: gateways == Form::One,
        };
        let rounds = Box::new(Rounds::new(plan, at_once));
        let records = engines.play(front, rounds, Until::End).await?;
        let expected = (plan.count * plan.turns) as usize;
        anyhow::ensure!(
            records.len() == expected,
            "{} of {expected} requests were sent",
            records.len()
        );
        let Seen {
            stayed,
            share,
            failed,
            ..
        } = judge(&records)?;
        anyhow::ensure!(failed.is_empty(), "requests failed: {failed:?}");
        note!(
            "bench: gateways {name}, {systems} system prompts, {at_once} at once, seed {seed} of \
             {}: {stayed} stayed, share {share:.2}",
            args.seeds
        );
        kept.push(stayed);
        shares.push(share);
    }
    let seeds = args.seeds as f64;
    Ok(Row {
        gateways: name,
        systems,
        at_once,
        kept_mean: kept.iter().copied().map(f64::from).sum::<f64>() / seeds,
        kept_min: kept.iter().min().copied().unwrap_or(0),
        share_mean: shares.iter().sum::<f64>() / seeds,
        share_max: shares.iter().copied().fold(0.0, f64::max),
    })
}

/// What became of the conversations.
pub(super) struct Seen {
    /// Later turns that stayed on the host of the turn before.
    pub stayed: u32,
    /// The largest share of a host over the mean.
    pub share: f64,
    /// Requests of each host, by its address; of those that got none, nothing.
    pub hosts: BTreeMap<String, u32>,
    /// Requests that failed, by kind.
    pub failed: BTreeMap<String, u32>,
}

/// Sees who served what; a turn behind one that failed has not stayed.
pub(super) fn judge(records: &[Record]) -> Result<Seen> {
    let mut served: BTreeMap<(u64, u32), &str> = BTreeMap::new();
    let mut hosts: BTreeMap<String, u32> = BTreeMap::new();
    let mut failed: BTreeMap<String, u32> = BTreeMap::new();
    for record in records {
        if let Some(failure) = record.outcome.failure {
            *failed.entry(failure.name()).or_insert(0) += 1;
            continue;
        }
        let host = record.outcome.host.as_deref();
        let host = host.context("an answer does not say which engine gave it")?;
        served.insert((record.chat, record.turn), host);
        *hosts.entry(host.to_owned()).or_insert(0) += 1;
    }
    let stayed = served.iter().filter(|((chat, turn), host)| {
        let before = turn.checked_sub(1);
        before.and_then(|before| served.get(&(*chat, before))) == Some(*host)
    });
    let most = hosts.values().max().copied().unwrap_or(0);
    Ok(Seen {
        stayed: stayed.count() as u32,
        share: f64::from(most) * f64::from(HOSTS) / served.len().max(1) as f64,
        hosts,
        failed,
    })
}

fn print(report: &Report) -> Result<()> {
    say!(
        "50 chats of 5 turns over {HOSTS} hosts, through Envoy with {} workers",
        report.workers
    )?;
    say!("share: requests of the host that got most, over the mean of all hosts")?;
    say!(
        "{:<9} {:>7} {:>8} {:>10} {:>7} {:>7} {:>7}",
        "gateways",
        "systems",
        "at once",
        "kept/200",
        "worst",
        "share",
        "worst"
    )?;
    for row in &report.rows {
        say!(
            "{:<9} {:>7} {:>8} {:>10.1} {:>7} {:>7.2} {:>7.2}  {}",
            row.gateways,
            row.systems,
            row.at_once,
            row.kept_mean,
            row.kept_min,
            row.share_mean,
            row.share_max,
            row.broken().unwrap_or("")
        )?;
    }
    say!(
        "seeds 1 to {}, engine clock {} times real time, commit {}",
        report.seeds,
        report.speed,
        report.commit
    )?;
    Ok(())
}
