//! Simulated engines in this process, and a real Envoy with the filter or any other gateway in front
//! of them, to play workloads through.
//!
//! Guarantee: every request that was played has a record, in the order of their ends; an Envoy is
//! fresh, and the engines' caches are empty when it starts. Not here: what is played, what is made
//! of it.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::json;
use tokio::net::TcpListener;

use crate::engine::server::{self, Handle, ServerConfig};
use crate::load::client::{Client, Target};
use crate::load::driver::{Driver, Phase, Record, Until, Watch};
use crate::testkit::Gateway;
use crate::workload::{Form, Workload};

/// What is in flight at the end gets this much real time to end.
const DRAIN: Duration = Duration::from_secs(60);

/// A request that takes longer has failed; in real time.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A port that is in use gets this much time to become free.
const RELEASE: Duration = Duration::from_secs(5);

/// Tokens in one event of an answer: the first one comes alone in time, and Envoy, the engines and
/// the client, which share a machine here, have a sixteenth of the events to pass on.
const TOKENS_PER_EVENT: u32 = 16;

/// Running engines.
pub(super) struct Engines {
    handles: Vec<Handle>,
    speed: f64,
}

/// An Envoy to play through.
#[derive(Clone, Copy, Debug)]
pub(super) struct Front {
    /// Worker threads.
    pub workers: u32,
    /// Whether the filter is told that it is the only gateway.
    pub one_gateway: bool,
}

impl Engines {
    /// Starts `count` engines at ports from `port` on, or at any free ones if that is 0. Where a
    /// prefix lives depends on the engines' addresses.
    pub(super) async fn start(
        count: u16,
        port: u16,
        speed: f64,
        config: &ServerConfig,
    ) -> Result<Self> {
        anyhow::ensure!(
            port == 0 || port.checked_add(count.saturating_sub(1)).is_some(),
            "--engine-port: expected {count} ports from it on to exist, got {port}"
        );
        let mut handles = Vec::new();
        for place in 0..count {
            let port = if port == 0 { 0 } else { port + place };
            let listener = listen(port).await?;
            let config = ServerConfig {
                speed,
                tokens_per_event: TOKENS_PER_EVENT,
                ..config.clone()
            };
            handles.push(server::spawn(config, listener)?);
        }
        Ok(Self { handles, speed })
    }

    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        self.handles.iter().map(Handle::address).collect()
    }

    /// Plays a workload through a fresh Envoy, on engines that have nothing cached.
    pub(super) async fn play(
        &self,
        front: Front,
        workload: Box<dyn Workload>,
        until: Until,
    ) -> Result<Vec<Record>> {
        self.cool();
        let gateways = if front.one_gateway { "one" } else { "many" };
        let gateway = Gateway::at(self.addresses())
            .pool(json!({ "gateways": gateways }))
            .edit(move |plan| plan.concurrency(front.workers).log_level("warning"))
            .start()
            .await?;
        self.play_at(target(&gateway)?, workload, until).await
    }

    /// Ends an engine at once, as a crash would: its connections are cut, and no new one is taken.
    pub(super) fn kill(&mut self, address: SocketAddr) {
        self.handles.retain(|engine| engine.address() != address);
    }

    /// Empties the caches, and starts all totals at zero.
    pub(super) fn cool(&self) {
        for engine in &self.handles {
            engine.flush();
            engine.reset_counters();
        }
    }

    /// Plays a workload through any gateway, on the engines as they are.
    pub(super) async fn play_at(
        &self,
        target: Target,
        workload: Box<dyn Workload>,
        until: Until,
    ) -> Result<Vec<Record>> {
        play(target, workload, self.speed, until).await
    }

    /// The part of the engines' time, in `elapsed` of real time, that they let go because the
    /// machine was too slow.
    pub(super) fn lost_share(&self, elapsed: Duration) -> f64 {
        let lost_ns: u64 = self.handles.iter().map(|h| h.snapshot().lost_ns).sum();
        let all_s = elapsed.as_secs_f64() * self.speed * self.handles.len() as f64;
        lost_ns as f64 / 1e9 / all_s.max(1e-9)
    }
}

/// Engines that were just dropped let go of their ports a moment later.
async fn listen(port: u16) -> Result<TcpListener> {
    let until = Instant::now() + RELEASE;
    loop {
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            failed => {
                return failed.with_context(|| {
                    format!("cannot listen on 127.0.0.1:{port}: choose others with --engine-port")
                });
            }
        }
    }
}

/// Where chats for streamed answers are sent to.
pub(super) fn target(gateway: &Gateway) -> Result<Target> {
    Ok(Target {
        base: gateway.envoy().url("").parse()?,
        form: Form::Chat,
        model: "sim".into(),
        stream: true,
        headers: hyper::HeaderMap::new(),
        timeout: TIMEOUT,
        prefix_header: None,
    })
}

/// Plays a workload at a URL, in the time of engines of this speed.
pub(super) async fn play(
    target: Target,
    workload: Box<dyn Workload>,
    speed: f64,
    until: Until,
) -> Result<Vec<Record>> {
    let phase = Phase {
        speed,
        output_tokens: None,
        until,
        drain: DRAIN,
    };
    let mut seen = Seen::default();
    Driver::new(Client::new(target)?, workload)
        .play(phase, &mut seen)
        .await;
    Ok(seen.records)
}

#[derive(Default)]
struct Seen {
    records: Vec<Record>,
}

impl Watch for Seen {
    fn ended(&mut self, record: Record) {
        self.records.push(record);
    }

    fn tick(&mut self, _sent: u64, _in_flight: usize, _elapsed: Duration) {}
}
