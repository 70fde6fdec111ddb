//! Measurements of a real Envoy with the filter, against what the design promises.
//!
//! Guarantee: what a busy machine disturbs is compared inside one run, or shown with its median.
//! Not here: many policies, long runs (simulate).

pub mod agreement;
pub mod conversations;
mod decision;
mod http;
mod live;
mod observe;
mod overhead;
mod peers;
mod sixteen;
mod store;
mod vllm;

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
    /// Chats behind few system prompts: turns that stay on their host, and the hosts' shares
    Conversations(conversations::ConversationsArgs),
    /// What `simulate` says against engines and Envoy in real time, for the same requests
    Agreement(agreement::AgreementArgs),
    /// What `mode: observe` predicts against what `adaptive` then finds
    Observe(observe::ObserveArgs),
    /// Other routers beside this one, over the same engines and the same requests
    Peers(Box<peers::PeersArgs>),
    /// The sixteen setups of AWS's announcement, each with random routing and with the filter
    Sixteen(Box<sixteen::SixteenArgs>),
    /// The same routers over three real vLLM replicas, which it fetches (3 GB)
    Vllm(Box<vllm::VllmArgs>),
}

/// Runs `prefix-router bench`.
pub fn run(args: &BenchArgs) -> Result<()> {
    match &args.what {
        What::Decision(args) => decision::run(args),
        What::Overhead(args) => overhead::run(args),
        What::Conversations(args) => conversations::run(args),
        What::Agreement(args) => agreement::run(args),
        What::Observe(args) => observe::run(args),
        What::Peers(args) => peers::run(args),
        What::Sixteen(args) => sixteen::run(args),
        What::Vllm(args) => vllm::run(args),
    }
}
