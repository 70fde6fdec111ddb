//! A log of requests: what their prompts share, what each way to choose would make of it, and what
//! to change.
//!
//! Not here: one request (describe.rs).

mod advice;
mod read;
mod ready;
mod replay;
mod sharing;
mod show;
mod spoilers;

use std::path::Path;

use anyhow::Result;
use serde::Serialize;

use super::ExplainArgs;
use super::gateway::Gateway;
use super::input::{Setup, name_of};
use ready::Requests;
use replay::{Arrivals, InFlight, Mode};
use sharing::Sharing;
use spoilers::Spoiler;

/// All that is told of a log.
#[derive(Debug, Serialize)]
pub(super) struct LogReport {
    file: String,
    /// Lines that could not be read, the first of them and what is wrong with it, and whether the
    /// log goes on behind what was read.
    unreadable: u64,
    first_unreadable: Option<String>,
    /// Requests of other pools, which are left out.
    others: u64,
    goes_on: bool,
    /// Whether the log's times, or a rate, say when requests come.
    timed: bool,
    sharing: Sharing,
    hosts: u32,
    kv_tokens: u64,
    modes: Vec<Mode>,
    spoilers: Vec<Spoiler>,
    compared: u64,
    in_flight: Option<InFlight>,
    advice: advice::Advice,
}

pub(super) fn render(args: &ExplainArgs, setup: &Setup, width: usize) -> Result<String> {
    let Some(file) = &args.log else {
        anyhow::bail!("expected a BODY or --log FILE");
    };
    args.engine.check()?;
    let report = report(file, args, setup)?;
    Ok(if args.json {
        serde_json::to_string(&report)? + "\n"
    } else {
        show::report(&report, width)
    })
}

fn report(file: &Path, args: &ExplainArgs, setup: &Setup) -> Result<LogReport> {
    let mut requests = Requests::read(file, args, setup)?;
    let sharing = sharing::sharing(&requests, u64::from(args.engine.block_tokens));
    let spoilers = spoilers::spoilers(&requests.sample, !args.no_text);
    let arrivals = Arrivals::of(&requests, args)?;
    let replay = replay::replay(&mut requests, &arrivals, args, setup)?;
    let in_flight = replay::in_flight(&requests, &arrivals, &replay);
    let advice = advice::advice(
        setup,
        args,
        &sharing,
        &replay,
        in_flight.as_ref().map_err(|why| *why),
        &spoilers,
    );
    Ok(LogReport {
        file: name_of(file),
        unreadable: requests.lines.unreadable,
        first_unreadable: requests.lines.first_unreadable.clone(),
        others: requests.others,
        goes_on: requests.lines.stopped,
        timed: arrivals.known,
        sharing,
        hosts: replay.hosts,
        kv_tokens: args.engine.kv_tokens,
        modes: replay.modes,
        spoilers,
        compared: requests.sample.len() as u64,
        in_flight: in_flight.ok(),
        advice,
    })
}

/// Routes all requests of a log that are of the pool, one after the other; how many there were.
pub(super) fn play(
    file: &Path,
    args: &ExplainArgs,
    setup: &Setup,
    gateway: &Gateway,
) -> Result<u64> {
    let mut played = 0;
    read::each(file, args, |entry| {
        if setup.is_served(&entry.body) {
            gateway.play(&setup.explain(&entry.body).prompt);
            played += 1;
        }
        true
    })?;
    Ok(played)
}
