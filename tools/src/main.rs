//! `prefix-router`: the command-line tool. Not here: what the commands do (the library's modules).

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tools::{
    bench, check, churn, demo, engine, explain, live, load, print, scale, setup, simulate, soak,
    turnover,
};

/// Prefix-aware routing for LLM engines behind Envoy: set up, try, measure, explain
#[derive(Parser)]
#[command(name = "prefix-router", version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure a real Envoy with and without the filter
    Bench(bench::BenchArgs),
    /// Say whether a filter configuration is valid, and what it means
    Check(check::CheckArgs),
    /// Let a host come and go under traffic, and count what fails and what moves
    Churn(churn::ChurnArgs),
    /// Show what routing by prefix brings: engines, Envoy with and without the filter, one load
    Demo(Box<demo::DemoArgs>),
    /// Run two fleets at the same time, with the filter and without, and a page to watch and change them
    Live(live::LiveArgs),
    /// Compare routing policies in virtual time
    Simulate(Box<simulate::SimulateArgs>),
    /// Run one simulated vLLM: its API, its scheduling and its prefix cache, but no model
    Engine(Box<engine::EngineArgs>),
    /// Say how a request is read and routed, where two differ, or what a log's prompts share
    Explain(Box<explain::ExplainArgs>),
    /// Add a host and remove one under a workload; count what moves and what the caches lose
    Scale(scale::ScaleArgs),
    /// Make this machine ready: a Rust for wasm, an Envoy, and the filter
    Setup(setup::SetupArgs),
    /// Send a workload to any URL, open loop, and measure what comes back
    Load(Box<load::LoadArgs>),
    /// Replace all hosts by new addresses, again and again, and watch that nothing grows
    Turnover(turnover::TurnoverArgs),
    /// Run a real Envoy and the filter through every way a request can end, and count
    Soak(soak::SoakArgs),
}

/// The exit code for arguments that are none, as clap has it.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let command = match Arguments::try_parse() {
        Ok(arguments) => arguments.command,
        Err(error) => return parsed_nothing(&error),
    };
    let result = match command {
        Command::Bench(args) => bench::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Churn(args) => churn::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Live(args) => live::run(&args),
        Command::Simulate(args) => simulate::run(*args),
        Command::Engine(args) => engine::run(*args),
        Command::Explain(args) => explain::run(&args),
        Command::Scale(args) => scale::run(&args),
        Command::Setup(args) => setup::run(&args),
        Command::Load(args) => load::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::Turnover(args) => turnover::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

fn failed(error: &anyhow::Error) -> ExitCode {
    print::remark(format_args!("prefix-router: {error:#}\n"));
    ExitCode::FAILURE
}

/// Prints what clap has instead of arguments: a help that was asked for, or what is wrong.
fn parsed_nothing(told: &clap::Error) -> ExitCode {
    let outcome = told.print();
    if told.use_stderr() {
        return ExitCode::from(USAGE);
    }
    match print::written(outcome) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}
