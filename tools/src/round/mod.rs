//! One policy's turn: Envoys of its own, cold engines, a warm-up, and measured load.
//!
//! Guarantee: hits, tokens and shares come from the engines' own counts, TTFT from the client; the
//! opponents run the same Envoy file without the filter. Not here: which rounds are played (demo/,
//! bench/sixteen/), what is shown (report/).

pub(crate) mod fleet;
mod screen;
mod whole;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use hyper::HeaderMap;
use hyper::header::HeaderName;
use prefix_router::names;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, MissedTickBehavior, interval, interval_at};

use crate::harness::{self, Envoy};
use crate::load::client::{self, Client, Target};
use crate::load::driver::{Driver, Phase, Until};
use crate::load::engines::{Counters, Histogram};
use crate::load::stats::Tally;
use crate::page::{self, Board};
use crate::report::Run;
use crate::workload::{Form, Workload};
use fleet::Fleet;
use screen::Stage;

/// Points of the curve of hits over time.
const POINTS: u32 = 30;

/// What is in flight at the end gets this much real time to end.
const DRAIN: Duration = Duration::from_secs(60);

/// A request that takes longer has failed; in real time.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Envoy checks engines every 2 s, and the filter asks Envoy every second.
const HEALTH_LIMIT: Duration = Duration::from_secs(30);

/// vLLM's name for the histogram of times to the first token.
const ENGINE_TTFT: &str = "vllm:time_to_first_token_seconds";

/// Who chooses the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// Envoy's `random`.
    Random,
    /// Envoy's `least_request`.
    LeastRequest,
    /// Envoy's `ring_hash` on [`TENANT`], which clients then send.
    RingHash,
    /// Our filter.
    PrefixRouter,
}

/// The header that names a request's shared prefix to [`Policy::RingHash`]: the ideal key, which no
/// other policy is told.
const TENANT: HeaderName = HeaderName::from_static("x-tenant");

impl Policy {
    /// Those that need nothing of clients, in the order in which they are run.
    pub(crate) const ALL: [Self; 3] = [Self::Random, Self::LeastRequest, Self::PrefixRouter];

    /// The policy's name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::LeastRequest => "least_request",
            Self::RingHash => "ring_hash",
            Self::PrefixRouter => "prefix_router",
        }
    }

    fn plan(self, plan: harness::Plan) -> harness::Plan {
        match self {
            Self::Random => plan.without_filter(harness::Policy::Random),
            Self::LeastRequest => plan.without_filter(harness::Policy::LeastRequest),
            Self::RingHash => plan
                .without_filter(harness::Policy::RingHash)
                .hash_header(TENANT.as_str()),
            Self::PrefixRouter => plan,
        }
    }
}

/// A model that clients ask for.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    /// Its name in the bodies that name one.
    pub name: &'static str,
    /// What its requests carry besides.
    pub headers: HeaderMap,
    /// Its cluster in the Envoy file; every engine serves every model.
    pub cluster: &'static str,
}

impl Model {
    /// A model that needs no header.
    pub(crate) fn plain(name: &'static str, cluster: &'static str) -> Self {
        Self {
            name,
            headers: HeaderMap::new(),
            cluster,
        }
    }
}

/// What a round is played with.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// The Envoy file that users copy.
    pub file: &'static str,
    /// A change of it where it runs with the filter.
    pub with_filter: fn(harness::Plan) -> harness::Plan,
    /// A change of it where it runs without the filter.
    pub without_filter: fn(harness::Plan) -> harness::Plan,
    /// How many Envoys there are; they share nothing, and requests take them in turn.
    pub gateways: u16,
    /// The first one's port; 0 for any. All others take any.
    pub port: u16,
    /// The API.
    pub form: Form,
    /// Whether answers are streamed.
    pub stream: bool,
    /// The models; requests ask for them in turn.
    pub models: Vec<Model>,
    /// Whether answers say which host served: where engines do not count their requests.
    pub named: bool,
}

/// One stretch of measured load.
#[derive(Clone, Debug)]
pub(crate) struct Stretch {
    /// What it is called on the screen.
    pub title: &'static str,
    /// Engine time per real time.
    pub speed: f64,
    /// Engine time from its start that is not measured, until queues are what they will be.
    pub settle: Duration,
    /// The measured engine time.
    pub window: Duration,
    /// When its sending is over.
    pub until: Until,
}

/// Where a round is shown: the live page, and the round's place on it.
pub(crate) struct Show {
    pub(crate) board: Arc<Board>,
    pub(crate) place: usize,
}

impl Show {
    /// Tells the page once a second what the filter decided; never returns.
    async fn decisions(&self, envoys: &[Envoy]) -> Infallible {
        let mut looks = interval(Duration::from_secs(1));
        looks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            looks.tick().await;
            for envoy in envoys {
                // One missed look is no reason to end a round.
                if let Ok(samples) = envoy.metrics().await {
                    self.board
                        .add_decisions(self.place, harness::decisions(&samples));
                }
            }
        }
    }
}

/// A policy's Envoys, running before the engines.
pub(crate) struct Round<'a> {
    fleet: &'a Fleet,
    policy: Policy,
    show: Option<Show>,
    envoys: Vec<Envoy>,
    clients: Vec<Client>,
}

impl<'a> Round<'a> {
    /// Empties the engines' caches and starts the Envoys.
    pub(crate) async fn open(
        setup: &Setup,
        fleet: &'a Fleet,
        policy: Policy,
        show: Option<Show>,
    ) -> anyhow::Result<Self> {
        fleet.cool().await?;
        let mut round = Self {
            fleet,
            policy,
            show,
            envoys: Vec::new(),
            clients: Vec::new(),
        };
        for gateway in 0..setup.gateways {
            let port = if gateway == 0 { setup.port } else { 0 };
            let named = setup.named || round.show.is_some();
            let envoy = envoy(setup, fleet, policy, port, named).await?;
            round.envoys.push(envoy);
        }
        // Request n asks for model n mod models; every gateway gets every model.
        for envoy in &round.envoys {
            for model in &setup.models {
                let target = Target {
                    base: envoy.url("").parse()?,
                    form: setup.form,
                    model: model.name.into(),
                    stream: setup.stream,
                    headers: model.headers.clone(),
                    prefix_header: (policy == Policy::RingHash).then_some(TENANT),
                    timeout: TIMEOUT,
                };
                let mut client = Client::new(target)?;
                if let Some(Show { board, place }) = &round.show {
                    client = client.observed(board.observer(*place));
                }
                round.clients.push(client);
            }
        }
        Ok(round)
    }

    /// A driver that sends a workload to these Envoys.
    pub(crate) fn driver(&self, workload: Box<dyn Workload>) -> Driver {
        Driver::over(self.clients.clone(), workload)
    }

    /// Fills caches: `requests` with answers of one token, on a clock of this speed.
    pub(crate) async fn warm_up(
        &self,
        driver: &mut Driver,
        requests: u64,
        speed: f64,
    ) -> anyhow::Result<()> {
        self.stage(page::Stage::WarmUp, speed);
        self.fleet.clock(speed).await?;
        let title = format!("{:<14} warm-up ", self.policy.name());
        let mut stage = Stage::new(title, format!(" of {requests}"), Tally::default());
        let phase = Phase {
            speed,
            output_tokens: Some(1),
            until: Until::Requests(requests),
            drain: DRAIN,
        };
        driver.play(phase, &mut stage).await;
        let tally = &stage.tally;
        anyhow::ensure!(
            tally.requests > 0,
            "no request of the warm-up succeeded: {:?}",
            tally.errors
        );
        // A native stream tells no usage.
        let hits = tally.hit_rate().map_or(String::new(), |hits| {
            format!(", hits {:.0} %", hits * 100.0)
        });
        let result = format!(
            "{} requests, {} failed{hits}",
            tally.requests,
            tally.failed()
        );
        stage.end(&result);
        Ok(())
    }

    /// Plays a stretch and measures it.
    pub(crate) async fn measure(
        &self,
        driver: &mut Driver,
        stretch: &Stretch,
    ) -> anyhow::Result<Run> {
        self.stage(page::Stage::Running, stretch.speed);
        let run = self.shown(self.play(driver, stretch)).await?;
        if let Some(Show { board, place }) = &self.show {
            board.finish(*place, &run, stretch.window.as_secs_f64());
        }
        Ok(run)
    }

    /// What `work` comes to, while the live page, if there is one, is told what the filter decides.
    async fn shown<T>(&self, work: impl Future<Output = T>) -> T {
        let shown = async {
            match &self.show {
                Some(show) => show.decisions(&self.envoys).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            done = work => done,
            never = shown => match never {},
        }
    }

    async fn play(&self, driver: &mut Driver, stretch: &Stretch) -> anyhow::Result<Run> {
        self.fleet.clock(stretch.speed).await?;
        self.fleet.engines.post("/sim/reset-counters", "{}").await?;
        let before = self.gateways().await?;
        let mut stage = Stage::new(
            format!("{:<14} {}", self.policy.name(), stretch.title),
            String::new(),
            Tally::after(stretch.settle),
        );
        let phase = Phase {
            speed: stretch.speed,
            output_tokens: None,
            until: stretch.until,
            drain: DRAIN,
        };
        let mut samples = Samples::default();
        if stretch.settle.is_zero() {
            samples.one(0.0, self.fleet).await?;
        }
        let began = Instant::now();
        {
            let sampling = samples.take(stretch, self.fleet);
            tokio::select! {
                () = driver.play(phase, &mut stage) => {}
                error = sampling => return Err(error),
            }
        }
        let took = began.elapsed().as_secs_f64() * stretch.speed;
        let run = self
            .figures(stretch, &stage.tally, &samples, &before, took)
            .await?;
        let ttft = run.ttft(0.5).or_else(|| run.engine_ttft_ms(0.5));
        stage.end(&format!(
            "{} requests, hits {:.1} %, P50 TTFT {:.0} ms",
            run.requests,
            run.hit_rate * 100.0,
            ttft.unwrap_or(0.0)
        ));
        Ok(run)
    }

    /// What came of a stretch that took so many seconds of engine time.
    async fn figures(
        &self,
        stretch: &Stretch,
        tally: &Tally,
        samples: &Samples,
        before: &Gateways,
        took: f64,
    ) -> anyhow::Result<Run> {
        anyhow::ensure!(
            tally.requests > 0,
            "no request succeeded: {:?}; Envoy's log: {}",
            tally.errors,
            self.envoys.iter().map(Envoy::log).collect::<String>()
        );
        let engines = &self.fleet.engines;
        let counted = Samples::since(&engines.counters().await?, &samples.first);
        let after = self.gateways().await?;
        let total = Counters::sum(&counted);
        let window = stretch.window.as_secs_f64();
        let measured = took - stretch.settle.as_secs_f64();
        let lag_ms = tally.lag.percentiles().map_or(0.0, |lag| lag.p99);
        Ok(Run {
            policy: self.policy.name(),
            requests: tally.requests,
            errors: tally.errors.clone(),
            hit_rate: total.hit_rate(),
            ttft_ms: tally.ttft.sorted(),
            answer_ms: tally.total.sorted(),
            engine_ttft: engines
                .histogram(ENGINE_TTFT)
                .await?
                .since(&samples.engine_ttft),
            output_tokens_per_s: throughput(&samples.points, window, &total, measured),
            shares: engines
                .addresses
                .iter()
                .cloned()
                .zip(counted.iter().map(|one| one.requests))
                .collect(),
            decision_us: after.decision_us_since(before),
            envoy_cpu_us: after.cpu_us_since(before),
            hits: hits(&samples.points, window),
            // In engine time, as the times that contain it.
            lag_p99_ms: lag_ms * stretch.speed,
            lost: lost_share(self.fleet, took).await?,
            decisions: since(after.decisions, &before.decisions),
            requests_per_s: None,
        })
    }

    /// Tells the live page, if there is one.
    fn stage(&self, stage: page::Stage, speed: f64) {
        if let Some(Show { board, place }) = &self.show {
            board.set_stage(*place, stage, speed);
        }
    }

    /// Ends the Envoys.
    pub(crate) async fn close(self) -> anyhow::Result<()> {
        for envoy in self.envoys {
            let status = envoy.stop().await?;
            anyhow::ensure!(status.success(), "Envoy ended badly: {status}");
        }
        Ok(())
    }

    /// What the Envoys have counted so far, all together.
    async fn gateways(&self) -> anyhow::Result<Gateways> {
        let mut all = Gateways::default();
        for envoy in &self.envoys {
            all.add(envoy).await?;
        }
        Ok(all)
    }
}

async fn envoy(
    setup: &Setup,
    fleet: &Fleet,
    policy: Policy,
    port: u16,
    named: bool,
) -> anyhow::Result<Envoy> {
    let mut plan = policy.plan(harness::Plan::load(setup.file)?);
    if named {
        plan = plan.answers_name_host(client::SERVED_BY.as_str());
    }
    plan = if policy == Policy::PrefixRouter {
        (setup.with_filter)(plan)
    } else {
        (setup.without_filter)(plan)
    };
    for model in &setup.models {
        plan = plan.hosts(model.cluster, &fleet.addresses);
    }
    let envoy = plan.port(port).log_level("warning").start().await?;
    let clusters: Vec<&str> = setup.models.iter().map(|model| model.cluster).collect();
    let filtered = policy == Policy::PrefixRouter;
    wait_ready(&envoy, &clusters, fleet.addresses.len(), filtered).await?;
    Ok(envoy)
}

/// Waits until an Envoy finds all hosts of these clusters well, and its filter knows them.
pub(crate) async fn wait_ready(
    envoy: &Envoy,
    clusters: &[&str],
    hosts: usize,
    filtered: bool,
) -> anyhow::Result<()> {
    for cluster in clusters {
        let healthy = format!("cluster.{cluster}.membership_healthy");
        envoy
            .wait_until(&healthy, |now| now == hosts as u64, HEALTH_LIMIT)
            .await?;
    }
    if filtered {
        let known = |now| now as usize == hosts * clusters.len();
        let usable = [(names::STATE, "usable")];
        envoy
            .wait_until_metric(names::HOSTS, &usable, known, HEALTH_LIMIT)
            .await
            .context("the filter does not know the engines")?;
    }
    Ok(())
}

/// Counters of a round's Envoys.
#[derive(Debug, Default)]
struct Gateways {
    /// The filter's decisions by kind; none without the filter.
    decisions: BTreeMap<String, u64>,
    /// Its time for them: how many were timed, and µs in all.
    timed: (f64, f64),
    /// Requests that came.
    requests: u64,
    /// Processor time.
    cpu: Duration,
}

impl Gateways {
    async fn add(&mut self, envoy: &Envoy) -> anyhow::Result<()> {
        let (count, sum) = (
            format!("{}_count", names::DECISION_US),
            format!("{}_sum", names::DECISION_US),
        );
        let samples = envoy.metrics().await?;
        for (kind, count) in harness::decisions(&samples) {
            *self.decisions.entry(kind).or_default() += count;
        }
        for sample in samples {
            if sample.is(&count, &[]) {
                self.timed.0 += sample.value;
            } else if sample.is(&sum, &[]) {
                self.timed.1 += sample.value;
            }
        }
        let requests = envoy.stat("http.ingress.downstream_rq_total").await?;
        self.requests += requests.context("Envoy does not count its listener's requests")?;
        self.cpu += envoy.usage()?.cpu;
        Ok(())
    }

    /// The mean of the decisions timed in between, in µs. Envoy shows them up to 5 s late, so a few
    /// are of the time before.
    fn decision_us_since(&self, before: &Self) -> Option<f64> {
        let count = self.timed.0 - before.timed.0;
        (count > 0.0).then(|| (self.timed.1 - before.timed.1) / count)
    }

    /// Processor time for each request in between, in µs.
    fn cpu_us_since(&self, before: &Self) -> Option<f64> {
        let requests = self.requests.saturating_sub(before.requests);
        let cpu = self.cpu.saturating_sub(before.cpu);
        (requests > 0).then(|| cpu.as_secs_f64() * 1e6 / requests as f64)
    }
}

/// What the engines had counted at points of a stretch.
#[derive(Default)]
struct Samples {
    /// Each engine's counts at the start of the window.
    first: Vec<Counters>,
    /// Their times to the first token until then.
    engine_ttft: Histogram,
    /// Sums of the engines' counts, with the seconds since the start of the window.
    points: Vec<(f64, Counters)>,
}

impl Samples {
    /// Reads the engines at the start of the window, unless that was done, at [`POINTS`] even steps
    /// of it, and on at the same pace; returns only if an engine does not answer.
    async fn take(&mut self, stretch: &Stretch, fleet: &Fleet) -> anyhow::Error {
        let step = stretch.window.as_secs_f64() / f64::from(POINTS);
        let pace = Duration::from_secs_f64(step / stretch.speed);
        let first = u32::from(!self.first.is_empty());
        let start = Instant::now() + stretch.settle.div_f64(stretch.speed) + pace * first;
        let mut steps = interval_at(start, pace);
        // The window's points and as many again: a drain that is longer has nothing to show.
        for point in first..=2 * POINTS {
            steps.tick().await;
            if let Err(error) = self.one(step * f64::from(point), fleet).await {
                return error;
            }
        }
        std::future::pending().await
    }

    async fn one(&mut self, at: f64, fleet: &Fleet) -> anyhow::Result<()> {
        let all = fleet.engines.counters().await?;
        self.points.push((at, Counters::sum(&all)));
        if self.first.is_empty() {
            self.first = all;
            self.engine_ttft = fleet.engines.histogram(ENGINE_TTFT).await?;
        }
        Ok(())
    }

    fn since(after: &[Counters], before: &[Counters]) -> Vec<Counters> {
        let pairs = after.iter().zip(before);
        pairs.map(|(after, before)| after.since(before)).collect()
    }
}

/// Waits for a signal that asks to end. What a round has started ends when it is dropped.
pub(crate) async fn interrupted() -> &'static str {
    let kinds = [
        (SignalKind::interrupt(), "SIGINT"),
        (SignalKind::terminate(), "SIGTERM"),
        (SignalKind::hangup(), "SIGHUP"),
    ];
    let mut waiting = tokio::task::JoinSet::new();
    for (kind, name) in kinds {
        if let Ok(mut signal) = signal(kind) {
            waiting.spawn(async move {
                signal.recv().await;
                name
            });
        }
    }
    match waiting.join_next().await {
        Some(Ok(name)) => name,
        // No signal can be waited for: the system ends the process by itself.
        Some(Err(_)) | None => std::future::pending().await,
    }
}

/// The part of the engines' time that they let go because the machine was too slow.
async fn lost_share(fleet: &Fleet, took: f64) -> anyhow::Result<f64> {
    let lost = fleet.engines.values("sim:lost_seconds").await?;
    Ok(lost.iter().sum::<f64>() / (took * lost.len().max(1) as f64))
}

/// Tokens a second within the window: what all policies were asked for in the same time. If the
/// window's end was not sampled, tokens over the whole time.
fn throughput(samples: &[(f64, Counters)], window: f64, total: &Counters, took: f64) -> f64 {
    let end = samples.iter().find(|(at, _)| *at >= window - 1e-6);
    match (samples.first(), end) {
        (Some((_, first)), Some((at, last))) => last.since(first).output_tokens as f64 / at,
        _ => total.output_tokens as f64 / took.max(1e-9),
    }
}

/// The hit rate between samples, within the window.
fn hits(samples: &[(f64, Counters)], window: f64) -> Vec<(f64, f64)> {
    let pairs = samples.iter().zip(samples.iter().skip(1));
    pairs
        .filter(|(_, (at, _))| *at <= window + 1e-6)
        .map(|((_, before), (at, after))| (*at, after.since(before)))
        .filter(|(_, counted)| counted.queried_tokens > 0)
        .map(|(at, counted)| (at, counted.hit_rate()))
        .collect()
}

fn since(after: BTreeMap<String, u64>, before: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let grown = after.into_iter().map(|(kind, count)| {
        let count = count.saturating_sub(before.get(&kind).copied().unwrap_or(0));
        (kind, count)
    });
    grown.filter(|(_, count)| *count > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(
        seconds: f64,
        queried_tokens: u64,
        hit_tokens: u64,
        output_tokens: u64,
    ) -> (f64, Counters) {
        let counters = Counters {
            requests: 0,
            queried_tokens,
            hit_tokens,
            output_tokens,
        };
        (seconds, counters)
    }

    #[test]
    fn figures_of_the_window_leave_out_the_drain() {
        let samples = [
            at(0.0, 0, 0, 5),
            at(2.0, 100, 20, 105),
            at(4.0, 300, 180, 405),
            at(6.0, 400, 280, 705),
        ];
        assert_eq!(hits(&samples, 4.0), [(2.0, 0.2), (4.0, 0.8)]);
        let total = samples[3].1;
        assert_eq!(throughput(&samples, 4.0, &total, 6.0), 100.0);
        assert_eq!(throughput(&samples[..2], 4.0, &total, 7.05), 100.0);
    }

    #[test]
    fn decisions_are_counted_from_the_start_of_measuring() {
        let map = |pairs: &[(&str, u64)]| {
            pairs
                .iter()
                .map(|(kind, count)| ((*kind).to_owned(), *count))
                .collect::<BTreeMap<_, _>>()
        };
        let after = map(&[("home", 10), ("divert", 3), ("abstain", 2)]);
        let before = map(&[("home", 4), ("abstain", 2)]);
        assert_eq!(since(after, &before), map(&[("home", 6), ("divert", 3)]));
    }
}
