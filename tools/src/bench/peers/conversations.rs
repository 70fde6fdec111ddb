//! Chats behind few system prompts, through every router: who keeps them together, and who spreads
//! them.
//!
//! Guarantee: what `bench conversations` plays, on engines that answer in 30 ms whatever is cached,
//! so that nothing but the routers' own choice differs. Not here: judging (bench/conversations.rs).

use anyhow::Result;

use super::plays::{Part, plotted, quiet};
use super::router::{Router, Told};
use super::{Bench, Outcome, mock};
use crate::bench::conversations::{HOSTS, judge};
use crate::bench::live::Engines;
use crate::load::driver::Until;
use crate::workload::Workload;
use crate::workload::conversations::{Conversations, Rounds};
use crate::workload::sessions::Sessions;

/// System prompts and requests at once in each of the study's four columns.
const CELLS: [(u32, u32); 4] = [(1, 1), (1, 16), (10, 1), (10, 16)];

pub(super) const PART: Part = Part {
    name: "conversations",
    title: "Conversations that stay, and hosts that share",
    about: "50 conversations of 5 turns behind one system prompt of 3,000 tokens, or ten, over 4 \
        hosts that answer in 30 ms. Kept: of the 200 later turns, those served by the host of the \
        turn before. Share: requests of the host that got most, over the mean of all hosts; 4 is \
        everything on one host.",
    columns: &[
        plotted("kept", "kept of 200", 0),
        plotted("share", "share", 2),
        quiet("failed", "failed"),
    ],
    hosts: true,
};

/// Measures the part.
pub(super) async fn run(bench: &mut Bench) -> Result<()> {
    let engines = Engines::start(HOSTS, bench.engine_port, 1.0, &mock()).await?;
    for repeat in 1..=bench.repeats {
        for (systems, at_once) in CELLS {
            let prompts = if systems == 1 { "prompt" } else { "prompts" };
            let how = match at_once {
                1 => "in sequence".to_owned(),
                _ => format!("{at_once} at once"),
            };
            let cell = format!("{systems} system {prompts}, {how}");
            for contestant in bench.turn(repeat) {
                let slot = bench.slot(&PART, &cell, contestant.name, repeat);
                if bench.have(std::slice::from_ref(&slot)) {
                    continue;
                }
                engines.cool();
                let outcome = async {
                    let router = bench.open(contestant, &engines.addresses()).await?;
                    let seed = bench.seed_of(repeat);
                    play(&router, &engines, systems, at_once, seed).await
                };
                let outcome = outcome.await;
                bench.keep(slot, outcome)?;
            }
        }
    }
    Ok(())
}

async fn play(
    router: &Router,
    engines: &Engines,
    systems: u32,
    at_once: u32,
    seed: u64,
) -> Result<Outcome> {
    let rounds: Box<dyn Workload> =
        Box::new(Rounds::new(Conversations::new(systems, seed), at_once));
    let workload = match router.contestant.told {
        Told::Session => Box::new(Sessions(rounds)),
        Told::Nothing | Told::Tenant => rounds,
    };
    let records = engines
        .play_at(router.target()?, workload, Until::End)
        .await?;
    let seen = judge(&records)?;
    let failed: u32 = seen.failed.values().sum();
    let mut outcome = Outcome::default();
    outcome.figure("kept", f64::from(seen.stayed));
    outcome.figure("share", seen.share);
    outcome.figure("failed", f64::from(failed));
    outcome.hosts = engines
        .addresses()
        .iter()
        .map(|host| {
            seen.hosts
                .get(&host.to_string())
                .copied()
                .unwrap_or(0)
                .into()
        })
        .collect();
    Ok(outcome)
}
