//! `prefix-router bench sixteen`: the sixteen setups of AWS's announcement, against real Envoys.
//!
//! Guarantee: both policies of a cell meet the same requests at the same times; a row is kept when
//! it is complete, and taken again only if commit, seed and sizes are the same and the machine kept
//! up. Not here: one policy's turn (round/).

mod cells;
mod page;
mod row;
mod table;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::Args;

use super::store::{Key, Store};
use crate::print::note;
use crate::report::table::wrap;
use crate::round::fleet::{Fleet, Kind};
use crate::round::{Policy, Round, interrupted};
use crate::setup;
use cells::{Cell, HOSTS, KV_TOKENS, Part, Sizes};
use row::{Figures, Pair, Row};
use table::Results;

/// Options of `prefix-router bench sixteen`
#[derive(Args, Clone, Debug)]
pub(super) struct SixteenArgs {
    /// Only these cells, e.g. single-native-stream-1; several with commas. A wrong name lists all
    #[arg(long, value_name = "CELL", value_delimiter = ',')]
    only: Vec<String>,
    /// Take the rows that an earlier run with the same commit, seed and sizes has finished
    #[arg(long)]
    resume: bool,
    /// The seed of everything random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many times faster than real time the engines' clock runs while measuring
    #[arg(long, default_value_t = 3.0, value_parser = crate::numbers::speed)]
    speed: f64,
    /// Seconds of engine time for which long prompts are measured
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0,
          value_parser = crate::numbers::seconds)]
    window: f64,
    /// Requests that fill the caches before; by default three for each prompt
    #[arg(long, value_name = "REQUESTS")]
    warmup: Option<u64>,
    /// First of the ports on which the engines listen; where a prefix lives depends on them
    #[arg(long, value_name = "PORT", default_value_t = 19_201)]
    engine_port: u16,
    /// Folder for rows, table and plots [default: target/bench]
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Print one JSON object with all rows instead of tables
    #[arg(long)]
    json: bool,
}

#[cfg(test)]
impl Default for SixteenArgs {
    fn default() -> Self {
        #[derive(clap::Parser)]
        struct Arguments {
            #[command(flatten)]
            sixteen: SixteenArgs,
        }
        <Arguments as clap::Parser>::parse_from(["sixteen"]).sixteen
    }
}

/// Runs it, and prints and keeps the result.
pub(super) fn run(args: &SixteenArgs) -> Result<()> {
    let sizes = Sizes::new(args)?;
    let cells = Cell::named(&args.only)?;
    let last = args.engine_port.checked_add(HOSTS - 1);
    anyhow::ensure!(
        args.engine_port > 0 && last.is_some(),
        "--engine-port: expected {HOSTS} ports from it on to exist, got {}",
        args.engine_port
    );
    let ready = setup::ready()?;
    let folder = match &args.output {
        Some(folder) => folder.clone(),
        None => setup::results("bench")?,
    };
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    let key = Key {
        commit: setup::commit(),
        seed: args.seed,
        sizes: serde_json::to_string(&sizes)?,
    };
    let store = Store::open(folder.join("sixteen.jsonl"), args.resume)?;
    let mut results = Results {
        conditions: sizes.conditions(&ready.envoy_version),
        key,
        rows: Vec::new(),
    };
    // One thread: the load must leave the processors to the engines and Envoy.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        tokio::select! {
            done = all(args, &sizes, &cells, store, &mut results) => done,
            name = interrupted() => {
                note!();
                anyhow::bail!(
                    "stopped by {name}; finished cells are kept, --resume goes on after them"
                )
            }
        }
    })?;
    publish(&results, &folder, args.json)
}

async fn all(
    args: &SixteenArgs,
    sizes: &Sizes,
    cells: &[Cell],
    mut store: Store<Row>,
    results: &mut Results,
) -> Result<()> {
    for line in results.conditions.iter().flat_map(|text| wrap(text)) {
        note!("{line}");
    }
    let found: Vec<Option<Row>> = cells
        .iter()
        .map(|cell| store.find(&cell.name(), &results.key))
        .collect();
    let mut left: f64 = cells
        .iter()
        .zip(&found)
        .filter(|(_, found)| found.is_none())
        .map(|(cell, _)| sizes.cell_seconds(*cell))
        .sum();
    let ports: Vec<u16> = (args.engine_port..).take(HOSTS.into()).collect();
    let mut fleet = None;
    // How much longer cells take here than they were thought to.
    let mut pace = 1.0;
    for (number, (&cell, found)) in cells.iter().zip(found).enumerate() {
        let title = format!("[{}/{}] {}", number + 1, cells.len(), cell.name());
        if let Some(row) = found {
            note!("{title}: kept from an earlier run");
            results.rows.push(row);
            continue;
        }
        note!("{title}, about {:.0} min left", (left * pace / 60.0).ceil());
        let fleet = match &fleet {
            Some(fleet) => fleet,
            None => fleet
                .insert(Fleet::start(&ports, Kind::simulated(KV_TOKENS)?, &store.folder()).await?),
        };
        let began = Instant::now();
        let row = play(args.seed, sizes, cell, fleet, results.key.clone())
            .await
            .with_context(|| format!("cell {}", cell.name()))?;
        pace = began.elapsed().as_secs_f64() / sizes.cell_seconds(cell);
        left -= sizes.cell_seconds(cell);
        store.keep(&row)?;
        results.rows.push(row);
    }
    Ok(())
}

/// Runs one cell with both policies.
async fn play(seed: u64, sizes: &Sizes, cell: Cell, fleet: &Fleet, key: Key) -> Result<Row> {
    let mut figures = Vec::new();
    for policy in [Policy::Random, Policy::PrefixRouter] {
        let round = Round::open(&cell.setup(), fleet, policy, None).await?;
        let mut driver = round.driver(sizes.workload(cell, seed, None)?);
        round
            .warm_up(&mut driver, sizes.warmup, sizes.warmup_speed())
            .await?;
        for part in [Part::Long, Part::High, Part::Short] {
            let mut driver = round.driver(sizes.workload(cell, seed, Some(part))?);
            let run = round.measure(&mut driver, &sizes.stretch(part)).await?;
            figures.push(Figures::of(&run));
        }
        round.close().await?;
    }
    let [long, high, short, our_long, our_high, our_short] = <[Figures; 6]>::try_from(figures)
        .map_err(|_| anyhow::anyhow!("two policies have three parts each"))?;
    let pair = |random, prefix_router| Pair {
        random,
        prefix_router,
    };
    Ok(Row {
        cell: cell.name(),
        key,
        long: pair(long, our_long),
        high: pair(high, our_high),
        short: pair(short, our_short),
    })
}

fn publish(results: &Results, folder: &std::path::Path, json: bool) -> Result<()> {
    let (markdown, html) = (folder.join("sixteen.md"), folder.join("sixteen.html"));
    for (path, text) in [
        (&markdown, table::markdown(results)),
        (&html, page::render(results)?),
    ] {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let text = if json {
        results.json()? + "\n"
    } else {
        table::terminal(results)
    };
    crate::print::result(format_args!("{text}"))?;
    note!("\nTable: {}\nPlots: {}", markdown.display(), html.display());
    Ok(())
}
