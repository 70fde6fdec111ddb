//! `prefix-router bench vllm`: real vLLM replicas on processor cores, behind every router of `bench
//! peers`.
//!
//! Guarantee: nothing large is fetched unless that was allowed, and what a run costs is told before.
//! Not part of the tests: it fetches gigabytes, and needs the machine for itself. Not here: the
//! replicas (real/vllm.rs), measuring (peers/).

use anyhow::Result;
use clap::Args;

use super::peers::{self, RunArgs};
use crate::print::note;
use crate::real::vllm::{FETCHED, Vllm};
use crate::report::table::wrap;

/// Options of `prefix-router bench vllm`
#[derive(Args, Clone, Debug)]
pub(super) struct VllmArgs {
    /// Fetch what is not there yet: 3 GB of Python packages, 6 GB unpacked below target/setup
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    run: RunArgs,
}

/// Runs it, and prints and keeps the result.
pub(super) fn run(args: &VllmArgs) -> Result<()> {
    let fetched = Vllm::fetched()?;
    anyhow::ensure!(
        fetched || args.yes,
        "this fetches {FETCHED} into target/setup and takes 5 to 30 minutes for it; `--yes` lets it"
    );
    let cost = "Starts three vLLM replicas for each of two loads (1 to 3 minutes, 7 GB of memory), and \
         plays each load with each router, about a minute each on two idle cores. --routers and \
         --repeats make it shorter; a stopped run goes on with --resume.";
    for line in wrap(cost) {
        note!("{line}");
    }
    peers::run_vllm(&args.run)
}
