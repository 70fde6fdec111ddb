//! One policy's turn: an Envoy of its own, cold engines, a warm-up, and the measured load.
//!
//! Guarantee: hits, tokens and shares come from the engines' own counts, TTFT from the client; the
//! opponents run the same Envoy file without the filter. Not here: what is shown (report/).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use prefix_router::names;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::fleet::Fleet;
use super::screen::Stage;
use super::settings::Settings;
use crate::harness::{self, Envoy};
use crate::load::client::{self, Client, Target};
use crate::load::driver::{Driver, Phase, Until};
use crate::load::engines::Counters;
use crate::page::{self, Board};
use crate::report::Run;
use crate::workload::Form;

/// The Envoy file that users copy.
const FILE: &str = "envoy/envoy.yaml";

/// The engines' cluster in it.
const CLUSTER: &str = "engines";

/// Points of the curve of hits over time.
const POINTS: u32 = 30;

/// What is in flight at the end gets this much real time to end.
const DRAIN: Duration = Duration::from_secs(60);

/// A request that takes longer has failed; in real time.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Envoy checks engines every 2 s, and the filter asks Envoy every second.
const HEALTH_LIMIT: Duration = Duration::from_secs(30);

/// Who chooses the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    /// Envoy's `random`.
    Random,
    /// Envoy's `least_request`.
    LeastRequest,
    /// Our filter.
    PrefixRouter,
}

impl Policy {
    /// In the order in which they are run.
    pub(super) const ALL: [Self; 3] = [Self::Random, Self::LeastRequest, Self::PrefixRouter];

    /// The policy's name in reports.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::LeastRequest => "least_request",
            Self::PrefixRouter => "prefix_router",
        }
    }

    async fn envoy(
        self,
        settings: &Settings,
        fleet: &Fleet,
        show: Option<&Show>,
    ) -> anyhow::Result<Envoy> {
        let plan = harness::Plan::load(FILE)?
            .port(settings.port)
            .hosts(CLUSTER, &fleet.addresses)
            .log_level("warning");
        let plan = match show {
            Some(_) => plan.answers_name_host(client::SERVED_BY.as_str()),
            None => plan,
        };
        let plan = match self {
            Self::Random => plan.without_filter(harness::Policy::Random),
            Self::LeastRequest => plan.without_filter(harness::Policy::LeastRequest),
            Self::PrefixRouter => plan,
        };
        let envoy = plan.start().await?;
        let hosts = fleet.addresses.len() as u64;
        let healthy = format!("cluster.{CLUSTER}.membership_healthy");
        envoy
            .wait_until(&healthy, |now| now == hosts, HEALTH_LIMIT)
            .await?;
        if self == Self::PrefixRouter {
            let known = |now| now as u64 == hosts;
            let usable = [(names::STATE, "usable")];
            envoy
                .wait_until_metric(names::HOSTS, &usable, known, HEALTH_LIMIT)
                .await
                .context("the filter does not know the engines")?;
        }
        Ok(envoy)
    }
}

/// Where a round is shown: the live page, and the round's place on it.
pub(super) struct Show {
    pub(super) board: Arc<Board>,
    pub(super) place: usize,
}

impl Show {
    /// Tells the page once a second what the filter decided; never returns.
    async fn decisions(&self, envoy: &Envoy) -> Infallible {
        let mut looks = interval(Duration::from_secs(1));
        looks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            looks.tick().await;
            // One missed look is no reason to end a round.
            if let Ok(samples) = envoy.metrics().await {
                self.board
                    .add_decisions(self.place, harness::decisions(&samples));
            }
        }
    }
}

/// Runs one policy.
pub(super) async fn play(
    settings: &Settings,
    fleet: &Fleet,
    policy: Policy,
    show: Option<&Show>,
) -> anyhow::Result<Run> {
    fleet.cool().await?;
    let envoy = policy.envoy(settings, fleet, show).await?;
    let target = Target {
        base: envoy.url("").parse()?,
        form: Form::Chat,
        model: "sim".into(),
        stream: true,
        headers: hyper::HeaderMap::new(),
        prefix_header: None,
        timeout: TIMEOUT,
    };
    let mut client = Client::new(target)?;
    if let Some(Show { board, place }) = show {
        client = client.observed(board.observer(*place));
    }
    let mut driver = Driver::new(client, settings.plan.open()?);
    if settings.warmup > 0 {
        if let Some(Show { board, place }) = show {
            board.set_stage(*place, page::Stage::WarmUp, settings.warmup_speed);
        }
        warm_up(settings, fleet, policy, &mut driver).await?;
    }
    if let Some(Show { board, place }) = show {
        board.set_stage(*place, page::Stage::Running, settings.speed);
    }
    let shown = async {
        match show {
            Some(show) => show.decisions(&envoy).await,
            None => std::future::pending().await,
        }
    };
    let run = tokio::select! {
        run = measure(settings, fleet, policy, &mut driver, &envoy) => run?,
        never = shown => match never {},
    };
    if let Some(Show { board, place }) = show {
        board.finish(*place, &run, settings.window.as_secs_f64());
    }
    let status = envoy.stop().await?;
    anyhow::ensure!(status.success(), "Envoy ended badly: {status}");
    Ok(run)
}

async fn warm_up(
    settings: &Settings,
    fleet: &Fleet,
    policy: Policy,
    driver: &mut Driver,
) -> anyhow::Result<()> {
    fleet.clock(settings.warmup_speed).await?;
    let title = format!("{:<14} warm-up ", policy.name());
    let mut stage = Stage::new(title, format!(" of {}", settings.warmup));
    let phase = Phase {
        speed: settings.warmup_speed,
        output_tokens: Some(1),
        until: Until::Requests(settings.warmup),
        drain: DRAIN,
    };
    driver.play(phase, &mut stage).await;
    let tally = &stage.tally;
    anyhow::ensure!(
        tally.requests > 0,
        "no request of the warm-up succeeded: {:?}",
        tally.errors
    );
    let hits = tally.hit_rate().unwrap_or(0.0) * 100.0;
    let result = format!(
        "{} requests, {} failed, hits {hits:.0} %",
        tally.requests,
        tally.failed()
    );
    stage.end(&result);
    Ok(())
}

async fn measure(
    settings: &Settings,
    fleet: &Fleet,
    policy: Policy,
    driver: &mut Driver,
    envoy: &Envoy,
) -> anyhow::Result<Run> {
    fleet.clock(settings.speed).await?;
    fleet.engines.post("/sim/reset-counters", "{}").await?;
    let before = fleet.engines.counters().await?;
    let decisions_before = harness::decisions(&envoy.metrics().await?);
    let mut stage = Stage::new(format!("{:<14} measuring", policy.name()), String::new());
    let phase = Phase {
        speed: settings.speed,
        output_tokens: None,
        until: settings.until,
        drain: DRAIN,
    };
    let began = Instant::now();
    let mut samples = vec![(0.0, Counters::sum(&before))];
    {
        let sampling = sample(settings, fleet, &mut samples);
        tokio::select! {
            () = driver.play(phase, &mut stage) => {}
            error = sampling => return Err(error),
        }
    }
    let took = began.elapsed().as_secs_f64() * settings.speed;
    let after = fleet.engines.counters().await?;
    let counted: Vec<Counters> = after
        .iter()
        .zip(&before)
        .map(|(after, before)| after.since(before))
        .collect();
    let total = Counters::sum(&counted);
    let tally = &stage.tally;
    anyhow::ensure!(
        tally.requests > 0,
        "no request succeeded: {:?}; Envoy's log: {}",
        tally.errors,
        envoy.log()
    );
    let run = Run {
        policy: policy.name(),
        requests: tally.requests,
        errors: tally.errors.clone(),
        hit_rate: total.hit_rate(),
        ttft_ms: tally.ttft.sorted(),
        output_tokens_per_s: throughput(&samples, settings.window.as_secs_f64(), &total, took),
        shares: fleet
            .engines
            .addresses
            .iter()
            .cloned()
            .zip(counted.iter().map(|one| one.requests))
            .collect(),
        decisions: since(
            harness::decisions(&envoy.metrics().await?),
            &decisions_before,
        ),
        hits: hits(&samples, settings.window.as_secs_f64()),
        lag_p99_ms: tally.lag.percentiles().map_or(0.0, |lag| lag.p99),
        lost: lost_share(fleet, took).await?,
    };
    stage.end(&format!(
        "{} requests, hits {:.1} %, P50 TTFT {:.0} ms",
        run.requests,
        run.hit_rate * 100.0,
        run.ttft(0.5).unwrap_or(0.0)
    ));
    Ok(run)
}

/// The part of the engines' time that they let go because the machine was too slow.
async fn lost_share(fleet: &Fleet, took: f64) -> anyhow::Result<f64> {
    let lost = fleet.engines.values("sim:lost_seconds").await?;
    Ok(lost.iter().sum::<f64>() / (took * lost.len().max(1) as f64))
}

/// Reads the engines' counters at [`POINTS`] even steps of the window, and on at the same pace;
/// returns only if an engine does not answer.
async fn sample(
    settings: &Settings,
    fleet: &Fleet,
    samples: &mut Vec<(f64, Counters)>,
) -> anyhow::Error {
    let step = settings.window.as_secs_f64() / f64::from(POINTS);
    let mut steps = interval(Duration::from_secs_f64(step / settings.speed));
    steps.tick().await;
    // The window's points and as many again: a drain that is longer has nothing to show.
    for point in 1..=2 * POINTS {
        steps.tick().await;
        match fleet.engines.counters().await {
            Ok(all) => samples.push((step * f64::from(point), Counters::sum(&all))),
            Err(error) => return error,
        }
    }
    std::future::pending().await
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
