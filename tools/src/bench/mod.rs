//! Measurements of a real Envoy with the filter, against the budgets the design sets.
//!
//! Guarantee: every figure is a comparison inside one run, with and without the filter in turn, so
//! that a busy machine disturbs both alike. Not here: the quality of routing (load, simulate).

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
    /// Processor time that the filter adds to Envoy's per request, for several sizes of body
    Overhead(overhead::OverheadArgs),
}

/// Runs `prefix-router bench`.
pub fn run(args: &BenchArgs) -> Result<()> {
    match &args.what {
        What::Overhead(args) => overhead::run(args),
    }
}
