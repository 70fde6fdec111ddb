//! Steady traffic in the background of a test, and what became of it.
//!
//! Guarantee: requests are sent at the stated rate as far as earlier ones end; each one is counted
//! as answered or failed. Not here: measurements of an engine's work (load).

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use tokio::task::JoinSet;

use super::{Behaviour, Client, Protocol, Request, chat, words};

/// Failures that are told in full.
const EXAMPLES_MAX: usize = 10;

/// What to send.
#[derive(Clone, Debug)]
pub struct TrafficPlan {
    /// Requests per second over all clients.
    pub per_second: f64,
    /// Clients; every other one speaks HTTP/2.
    pub clients: u64,
    /// Different prefixes, taken in turn.
    pub prefixes: u64,
    /// What the engines do.
    pub script: Behaviour,
}

impl Default for TrafficPlan {
    fn default() -> Self {
        let script = Behaviour::Answer {
            status: 200,
            after_ms: 5,
        };
        Self {
            per_second: 200.0,
            clients: 16,
            prefixes: 400,
            script,
        }
    }
}

/// What became of it.
#[derive(Clone, Debug, Default)]
pub struct TrafficReport {
    /// Requests sent.
    pub sent: u64,
    /// Those that were not answered with a whole 200.
    pub failed: u64,
    /// Some of the failures.
    pub failures: Vec<String>,
    /// The longest that an answer took.
    pub slowest: Duration,
    /// The engines that answered each prefix.
    pub hosts: BTreeMap<u64, BTreeSet<String>>,
}

/// Traffic that flows until it is stopped.
pub struct Traffic {
    stopped: Arc<AtomicBool>,
    lanes: JoinSet<TrafficReport>,
}

impl Traffic {
    /// Starts it.
    #[must_use]
    pub fn start(address: SocketAddr, plan: &TrafficPlan) -> Self {
        let stopped = Arc::new(AtomicBool::new(false));
        let mut lanes = JoinSet::new();
        for lane in 0..plan.clients {
            lanes.spawn(drive(address, plan.clone(), lane, Arc::clone(&stopped)));
        }
        Self { stopped, lanes }
    }

    /// Waits for the last answers and reports.
    pub async fn stop(mut self) -> Result<TrafficReport> {
        self.stopped.store(true, Ordering::Relaxed);
        let mut all = TrafficReport::default();
        while let Some(lane) = self.lanes.join_next().await {
            let lane = lane.context("a lane of the traffic stopped")?;
            all.sent += lane.sent;
            all.failed += lane.failed;
            all.failures.extend(lane.failures);
            all.slowest = all.slowest.max(lane.slowest);
            for (prefix, hosts) in lane.hosts {
                all.hosts.entry(prefix).or_default().extend(hosts);
            }
        }
        all.failures.truncate(EXAMPLES_MAX);
        Ok(all)
    }
}

/// The request of a prefix: the same prompt each time.
#[must_use]
pub fn prompt_of(prefix: u64) -> Request {
    Request::chat(chat(&words(prefix, 1200), "hello"))
}

async fn drive(
    address: SocketAddr,
    plan: TrafficPlan,
    lane: u64,
    stopped: Arc<AtomicBool>,
) -> TrafficReport {
    let protocol = if lane.is_multiple_of(2) {
        Protocol::Http1
    } else {
        Protocol::Http2
    };
    let client = Client::new(address, protocol);
    let every = Duration::from_secs_f64(plan.clients as f64 / plan.per_second);
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut report = TrafficReport::default();
    while !stopped.load(Ordering::Relaxed) {
        ticks.tick().await;
        let prefix = (report.sent * plan.clients + lane) % plan.prefixes.max(1);
        let started = Instant::now();
        let host = client.host(prompt_of(prefix).script(plan.script)).await;
        report.sent += 1;
        report.slowest = report.slowest.max(started.elapsed());
        match host {
            Ok(host) => {
                report.hosts.entry(prefix).or_default().insert(host);
            }
            Err(error) => {
                report.failed += 1;
                if report.failures.len() < EXAMPLES_MAX {
                    report.failures.push(format!("{error:#}"));
                }
            }
        }
    }
    report
}
