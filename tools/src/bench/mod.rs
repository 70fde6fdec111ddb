//! Measurements of a real Envoy with the filter, against the budgets the design sets.
//!
//! Guarantee: what a busy machine disturbs is compared inside one run, or shown with its median.
//! Not here: the quality of routing (load, simulate).

mod decision;
mod http;
mod overhead;

use anyhow::Result;
use clap::{Args, Subcommand};

/// `prefix-router bench`
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Time that the choice of a host takes, for fleets of 7 to 500 hosts
    Decision(decision::DecisionArgs),
    /// Processor time that the filter adds to Envoy's per request, for several sizes of body
    Overhead(overhead::OverheadArgs),
}

/// Runs `prefix-router bench`.
pub fn run(args: &BenchArgs) -> Result<()> {
    match &args.what {
        What::Decision(args) => decision::run(args),
        What::Overhead(args) => overhead::run(args),
    }
}
