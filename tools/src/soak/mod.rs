//! `prefix-router soak`: a real Envoy with the filter under requests that end in every way there
//! is, with engines that crash and VMs that panic, and counters that have to come out even.
//!
//! Guarantee: a request counts as lost unless something that was done to it on purpose, and that
//! an Envoy without the filter could not have survived either, explains its end; a panic's
//! streams and back-off are counted apart. Not here: what a request does (ending.rs).

mod ending;
mod report;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use prefix_router::names;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use tokio::task::JoinSet;

use crate::harness::Policy;
use crate::print::say;
use crate::testkit::{Connection, Gateway, MockEngine, Protocol, Request, ask, eventually};
use ending::{Ending, Fate};
pub use report::Report;
use report::{Clock, Count, Tally};

/// How long an engine that crashed stays away.
pub(super) const DOWN: Duration = Duration::from_millis(300);
/// Requests between two crashes: at 1,500 requests per second, one every two seconds.
const CRASH_EVERY: u64 = 3000;
/// Tells a filter with test hooks to panic in the named callback.
const PANIC_HEADER: &str = "x-prefix-router-panic";
/// The callbacks that panics are injected into, in turn.
const PANIC_PHASES: [&str; 4] = ["request_headers", "request_body", "response_headers", "log"];
/// Requests with this header have [`ROUTE_TIMEOUT`] to be answered.
pub(super) const TIMEOUT_HEADER: &str = "x-soak-timeout";
const ROUTE_TIMEOUT: &str = "0.1s";
/// Different complaints of Envoy that are told.
const ERRORS_MAX: usize = 20;
/// The filter's poll, as in a deployment.
const POLL_MS: u64 = 500;
/// How long counters may take to come out even; more than this is a failure of its own.
const EVEN_LIMIT: Duration = Duration::from_secs(20);

/// `prefix-router soak`
#[derive(Args, Clone, Debug)]
pub struct SoakArgs {
    /// How many requests in all
    #[arg(long, default_value_t = 200_000)]
    pub requests: u64,
    /// Envoy's worker threads
    #[arg(long, default_value_t = 4)]
    pub workers: u32,
    /// How many engines
    #[arg(long, default_value_t = 4)]
    pub engines: usize,
    /// How many requests at once
    #[arg(long, default_value_t = 64)]
    pub clients: u64,
    /// How many VM panics are injected, evenly over the run
    #[arg(long, default_value_t = 5)]
    pub panics: u64,
    /// Requests in flight per engine above which the filter diverts
    #[arg(long, default_value_t = 12)]
    pub limit: u32,
    /// What the mix of requests follows from
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// First send the same requests through an Envoy without the filter, and show what crashes of
    /// engines cost there
    #[arg(long)]
    pub compare: bool,
    /// Print the result as one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// Runs `prefix-router soak`; an error if anything was lost or left.
pub fn run(args: &SoakArgs) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    let report = runtime.block_on(soak(args))?;
    if args.json {
        say!("{}", serde_json::to_string(&report)?)?;
    } else {
        crate::print::result(format_args!("{report}"))?;
    }
    match report.faults().len() {
        0 => Ok(()),
        count => bail!("the soak found {count} faults"),
    }
}

/// What the lanes share.
struct World {
    args: SoakArgs,
    gateway: Gateway,
    engines: Vec<MockEngine>,
    sent: AtomicU64,
    clock: Clock,
    tally: Tally,
}

/// Runs a soak and reports it, whatever came out.
pub async fn soak(args: &SoakArgs) -> Result<Report> {
    let without_filter = if args.compare {
        Some(endings_without_filter(args).await?)
    } else {
        None
    };
    let engines = MockEngine::start_many(args.engines).await?;
    let gateway = start(args, &engines).await?;
    let (world, took) = send(args.clone(), gateway, engines).await?;
    let report = finish(&world, took).await?;
    Ok(Report {
        without_filter,
        ..report
    })
}

/// How the same requests end under the same crashes when Envoy alone chooses; there is no VM that
/// could panic.
async fn endings_without_filter(args: &SoakArgs) -> Result<BTreeMap<Ending, Count>> {
    let engines = MockEngine::start_many(args.engines).await?;
    let workers = args.workers;
    let gateway = Gateway::of(&engines).edit(move |plan| {
        plan.concurrency(workers)
            .log_level("warning")
            .without_filter(Policy::LeastRequest)
            .edit_http(add_timeout_route)
    });
    let gateway = gateway.start_unsettled().await?;
    let healthy = args.engines as u64;
    let envoy = gateway.envoy();
    envoy
        .wait_until(
            "cluster.engines.membership_healthy",
            |found| found == healthy,
            EVEN_LIMIT,
        )
        .await?;
    let args = SoakArgs {
        panics: 0,
        ..args.clone()
    };
    let (world, _) = send(args, gateway, engines).await?;
    Ok(world.tally.endings())
}

/// Sends all requests, under crashes and panics; how long that took.
async fn send(
    args: SoakArgs,
    gateway: Gateway,
    engines: Vec<MockEngine>,
) -> Result<(Arc<World>, Duration)> {
    let clients = args.clients.max(1);
    let world = Arc::new(World {
        args,
        gateway,
        engines,
        sent: AtomicU64::new(0),
        clock: Clock::default(),
        tally: Tally::default(),
    });
    let started = Instant::now();
    let mut running = JoinSet::new();
    for lane in 0..clients {
        running.spawn(drive(Arc::clone(&world), lane));
    }
    let trouble = tokio::spawn(make_trouble(Arc::clone(&world)));
    while let Some(lane) = running.join_next().await {
        lane.context("a lane of the soak stopped")?;
    }
    trouble.await.context("the trouble stopped")??;
    Ok((world, started.elapsed()))
}

async fn start(args: &SoakArgs, engines: &[MockEngine]) -> Result<Gateway> {
    let pool = json!({
        "hosts": {"admin_cluster": "envoy_admin", "poll_ms": POLL_MS},
        "limit": args.limit,
        "panic_rule": false,
    });
    let (workers, hooks) = (args.workers, args.panics > 0);
    let plan = Gateway::of(engines).pool(pool).edit(move |plan| {
        let plan = plan
            .concurrency(workers)
            .log_level("warning")
            .edit_http(add_timeout_route);
        if hooks { plan.test_hooks() } else { plan }
    });
    plan.start().await
}

/// A copy of the shipped route, in front of it, for the requests that are to time out.
fn add_timeout_route(http: &mut serde_json::Value) -> Result<()> {
    let routes = http
        .pointer_mut("/route_config/virtual_hosts/0/routes")
        .and_then(serde_json::Value::as_array_mut)
        .context("the file has no routes")?;
    let mut route = routes.last().context("the file has no route")?.clone();
    let put = |value: &mut serde_json::Value, pointer: &str, new| {
        let found = value
            .pointer_mut(pointer)
            .context("the route has another form")?;
        *found = new;
        anyhow::Ok(())
    };
    let header = json!({"name": TIMEOUT_HEADER, "present_match": true});
    put(
        &mut route,
        "/match",
        json!({"prefix": "/", "headers": [header]}),
    )?;
    put(&mut route, "/route/timeout", json!(ROUTE_TIMEOUT))?;
    routes.insert(0, route);
    Ok(())
}

/// One client: one request after the other, each with an ending of its own.
async fn drive(world: Arc<World>, lane: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(world.args.seed.wrapping_mul(1_000_003) ^ lane);
    let protocol = if lane.is_multiple_of(2) {
        Protocol::Http1
    } else {
        Protocol::Http2
    };
    let mut connection = None;
    while world.sent.fetch_add(1, Ordering::Relaxed) < world.args.requests {
        let ending = Ending::draw(&mut rng);
        let request = ending.request(&mut rng);
        let started = Instant::now();
        let fate = match take(&mut connection, &world, protocol).await {
            Ok(open) => ending.run(open, request, &mut rng).await,
            Err(error) => Fate::Odd(format!("no connection: {error:#}")),
        };
        if ending.leaves_connection_unusable(protocol, &fate) {
            connection = None;
        }
        world.tally.add(ending, fate, started, &world.clock);
    }
}

/// The lane's connection, or a new one.
async fn take<'a>(
    connection: &'a mut Option<Connection>,
    world: &World,
    protocol: Protocol,
) -> Result<&'a mut Connection> {
    if let Some(open) = connection
        && !open.is_ready().await
    {
        *connection = None;
    }
    match connection {
        Some(open) => Ok(open),
        none => Ok(none.insert(Connection::open(world.gateway.address(), protocol).await?)),
    }
}

/// Crashes engines and panics VMs while the lanes run.
async fn make_trouble(world: Arc<World>) -> Result<()> {
    let mut rng = ChaCha8Rng::seed_from_u64(world.args.seed ^ 0x7472_6f75);
    let panic_every = world.args.requests / (world.args.panics + 1);
    let (mut crashes, mut panics) = (0, 0);
    loop {
        let sent = world.sent.load(Ordering::Relaxed);
        if sent >= world.args.requests {
            return Ok(());
        }
        if panics < world.args.panics && sent >= panic_every * (panics + 1) {
            let phase = PANIC_PHASES.iter().cycle().nth(usize::try_from(panics)?);
            world.clock.panicked();
            provoke(&world, phase.copied().unwrap_or_default()).await;
            panics += 1;
        } else if sent / CRASH_EVERY > crashes {
            crashes = sent / CRASH_EVERY;
            let chosen = rng.random_range(0..world.engines.len());
            if let Some(engine) = world.engines.get(chosen) {
                world.clock.crashed();
                engine.crash().await?;
                tokio::time::sleep(DOWN).await;
                engine.revive()?;
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Makes one VM panic. The answer does not matter: it is usually a 503.
async fn provoke(world: &World, phase: &str) {
    let request = Request::chat(ask("panic")).header(PANIC_HEADER, phase);
    if let Ok(mut connection) = Connection::open(world.gateway.address(), Protocol::Http1).await {
        let _ = connection.send(request).await;
    }
}

/// What Envoy complained about, without the time and thread of each line.
fn errors_of(log: &str) -> BTreeMap<String, u64> {
    let mut errors = BTreeMap::new();
    let complaints = log
        .lines()
        .filter(|line| line.contains("[error]") || line.contains("[critical]"));
    for line in complaints {
        let text = line.split_once("] ").map_or(line, |(_, text)| text);
        if errors.len() < ERRORS_MAX || errors.contains_key(text) {
            *errors.entry(text.to_owned()).or_insert(0) += 1;
        }
    }
    errors
}

/// Waits for the counters to come out even and reports.
async fn finish(world: &World, took: Duration) -> Result<Report> {
    let done = Instant::now();
    let idle = eventually(EVEN_LIMIT, async || {
        world.engines.iter().all(|engine| engine.in_flight() == 0)
    });
    let engines_idle = idle.await;
    let even = world
        .gateway
        .quiet()
        .await
        .err()
        .map(|error| format!("{error:#}"));
    let even_after = done.elapsed();
    let active = world
        .gateway
        .stat("cluster.engines.upstream_rq_active")
        .await?;
    let repairs = world.gateway.metric(names::COUNTER_REPAIRS, &[]).await?;
    let reloads = world
        .gateway
        .stat("wasm.prefix_router.vm_reload_success")
        .await?;
    let diverted = world
        .gateway
        .metric(names::DECISIONS, &[("decision", "divert")])
        .await?;
    Ok(Report {
        seed: world.args.seed,
        commit: crate::setup::commit(),
        requests: world.args.requests,
        seconds: took.as_secs_f64(),
        even_after_s: even_after.as_secs_f64(),
        uneven: even,
        engines_idle,
        envoy_active: active,
        panics: world.clock.panics(),
        crashes: world.clock.crashes(),
        vm_reloads: reloads,
        repairs: repairs as u64,
        diverted: diverted as u64,
        endings: world.tally.endings(),
        without_filter: None,
        lost: world.tally.lost(),
        envoy_errors: errors_of(&world.gateway.envoy().log()),
        odd: world.tally.odd(),
    })
}
