//! `prefix-router live`: two fleets of simulated engines under the same load at the same time, one
//! behind Envoy with the filter, one behind Envoy without, and a page to watch and change them.
//!
//! Guarantee: both fleets get the same requests at the same moments, and every change is made to
//! both; no process outlives this one. Not here: figures that are measured one fleet at a time, on
//! a machine of their own (demo/); the page itself (page/).

#[cfg(test)]
mod compose_tests;
mod engines;
mod gateway;
mod operator;
mod traffic;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::mpsc;

use crate::page::{Board, Mode, Page, Stage};
use crate::print::{note, say};
use crate::round::interrupted;
use crate::setup;
use engines::Engines;
use gateway::{Gateway, Opponent};
use operator::Operator;
use traffic::{Knobs, Traffic};

/// envoy/observe/prometheus.yaml has these ports too.
const ENGINE_PORT: u16 = 19_301;

/// Options of `live`.
#[derive(Clone, Debug, clap::Args)]
pub struct LiveArgs {
    /// Address on which the page is shown.
    #[arg(long, default_value = "127.0.0.1:8090")]
    page: SocketAddr,
    /// Engines in each fleet.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u16).range(2..=10))]
    hosts: u16,
    /// Requests a second that each fleet gets.
    #[arg(long, default_value_t = traffic::RATE, value_parser = traffic::rate)]
    rate: f64,
    /// Prompts that requests share.
    #[arg(long, default_value_t = traffic::PROMPTS, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    prompts: u32,
    /// Tokens of KV cache in each engine.
    #[arg(long, value_name = "TOKENS", default_value_t = engines::KV_TOKENS,
          value_parser = clap::value_parser!(u64).range(10_000..))]
    kv_tokens: u64,
    /// Requests in flight per host above which the filter goes elsewhere.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    limit: u32,
    /// Seed of the load.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds after which it ends by itself; without this, it runs until it is stopped.
    #[arg(long, value_name = "SECONDS", value_parser = crate::numbers::seconds_or_none)]
    seconds: Option<f64>,
    /// Name or address of this machine on which the engines listen.
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    engine_host: String,
    /// First of the engines' ports: the fleet without the filter has this one and those after it,
    /// the fleet with the filter those 100 higher.
    #[arg(long, value_name = "PORT", default_value_t = ENGINE_PORT,
          value_parser = clap::value_parser!(u16).range(1..=65_000))]
    engine_port: u16,
    /// Start no Envoy, but write what two of them need into this folder: `with/envoy.json` and
    /// `without/envoy.json`, and what these lead to.
    #[arg(long, value_name = "FOLDER", requires_all = ["with", "without"])]
    envoys: Option<PathBuf>,
    /// The name of the machine or container where the Envoy with the filter runs.
    #[arg(long, value_name = "HOST", requires = "envoys")]
    with: Option<String>,
    /// The same for the Envoy without the filter.
    #[arg(long, value_name = "HOST", requires = "envoys")]
    without: Option<String>,
}

/// The fleets' numbers on the page and everywhere here: without the filter, with it.
const WITHOUT: usize = 0;
const WITH: usize = 1;

/// Commands that wait for the one before; a person clicks slower.
const COMMANDS_MAX: usize = 16;

/// Runs the command.
///
/// # Errors
/// If something it needs is missing or does not start.
pub fn run(args: &LiveArgs) -> anyhow::Result<()> {
    if args.envoys.is_none() {
        setup::ready()?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let end = async {
            match args.seconds.map(Duration::from_secs_f64) {
                Some(length) => tokio::time::sleep(length).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            result = live(args) => result,
            name = interrupted() => {
                note!("stopped by {name}");
                Ok(())
            }
            () = end => Ok(()),
        }
    })
}

async fn live(args: &LiveArgs) -> anyhow::Result<()> {
    let ip = resolve(&args.engine_host)?;
    let engines = Engines::start(ip, args.engine_port, args.hosts.into(), args.kv_tokens).await?;
    let about = format!(
        "The engines are simulated ({} in each fleet, with the timing of a 70B model on 8 × H100); \
         Envoy, the filter and every request are real. Both fleets get the same requests at the \
         same moments.",
        args.hosts
    );
    let board = Board::new(Mode::Live, vec![about]);
    board.add_fleet(
        Opponent::LeastRequest.title(),
        false,
        &engines.states(WITHOUT),
    );
    board.add_fleet("Envoy with prefix-router", true, &engines.states(WITH));
    board.set_limit(WITH, Some(args.limit));
    let (sender, mut commands) = mpsc::channel(COMMANDS_MAX);
    let page = Page::serve(Arc::clone(&board), args.page, Some(sender)).await?;
    say!("Live page: {}", page.seen_at())?;

    let mut gateways = start(args, &engines).await?;
    for (fleet, gateway) in gateways.iter_mut().enumerate() {
        gateway.wait_ready(engines.addresses(fleet).len()).await?;
    }
    let knobs = Knobs::new(args.rate, &gateways, &board)?;
    let traffic = Traffic::new(
        args.seed,
        args.prompts,
        Arc::clone(&knobs),
        Arc::clone(&board),
    )?;
    board.begin();
    for fleet in [WITHOUT, WITH] {
        board.set_stage(fleet, Stage::Running, 1.0);
    }
    let operator = Operator {
        board,
        knobs,
        engines,
        gateways,
        opponent: Opponent::LeastRequest,
        limit: Some(args.limit),
        viral_prefix: args.prompts.into(),
    };
    tokio::select! {
        result = traffic.run() => result,
        result = operator.run(&mut commands) => result,
    }
}

async fn start(args: &LiveArgs, engines: &Engines) -> anyhow::Result<[Gateway; 2]> {
    let remote = match (&args.envoys, &args.without, &args.with) {
        (Some(folder), Some(without), Some(with)) => Some((folder, without, with)),
        _ => None,
    };
    let without = gateway::without_filter(engines.addresses(WITHOUT))?;
    let with = gateway::with_filter(engines.addresses(WITH), Some(args.limit))?;
    match remote {
        Some((folder, without_host, with_host)) => Ok([
            Gateway::elsewhere(
                without,
                &folder.join("without"),
                without_host,
                engines.addresses(WITHOUT),
            )?,
            Gateway::elsewhere(
                with,
                &folder.join("with"),
                with_host,
                engines.addresses(WITH),
            )?,
        ]),
        None => Ok([Gateway::here(without).await?, Gateway::here(with).await?]),
    }
}

/// The address that a name of this machine stands for.
fn resolve(host: &str) -> anyhow::Result<IpAddr> {
    let mut found = (host, 0)
        .to_socket_addrs()
        .with_context(|| format!("--engine-host {host}: no such name"))?
        .map(|address| address.ip());
    let first = found.next();
    let four = found.find(IpAddr::is_ipv4);
    let best = first.filter(IpAddr::is_ipv4).or(four).or(first);
    Ok(best.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)))
}
