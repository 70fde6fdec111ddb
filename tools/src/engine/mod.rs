//! One simulated vLLM: its scheduler and prefix cache without a clock, and an HTTP server over it.
//!
//! Guarantee: `simulate` (virtual time) and `prefix-router engine` (real or scaled time) run the
//! same scheduler and cache. Not here: routing, workloads.

pub mod api;
pub mod blocks;
pub mod clock;
pub mod cost;
pub mod metrics;
pub mod render;
pub mod scheduler;
pub mod server;

use std::net::{IpAddr, Ipv4Addr};

use crate::print::say;
use anyhow::Context;
use tokio::net::TcpListener;

/// Run one simulated vLLM: its HTTP API, its scheduling and its prefix cache, but no model
#[derive(clap::Args, Debug)]
pub struct EngineArgs {
    /// Port to listen on; 0 takes a free one and prints it
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Address to listen on
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    #[command(flatten)]
    server: server::ServerConfig,
}

/// Serves until the process is interrupted.
pub fn run(args: EngineArgs) -> anyhow::Result<()> {
    // One thread: a machine that runs seven engines has fewer cores than that.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the event loop")?;
    runtime.block_on(async {
        let (host, port) = (args.host, args.port);
        let listener = TcpListener::bind((host, port)).await.with_context(|| {
            format!("cannot listen on {host}:{port}; is it in use? Choose another with --port")
        })?;
        let handle = server::spawn(args.server, listener)?;
        say!("engine listening on http://{}", handle.address())?;
        let mut terminate =
            tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
                .context("cannot wait for signals")?;
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
        Ok(())
    })
}
