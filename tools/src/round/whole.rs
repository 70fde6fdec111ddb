//! A policy's turn on engines of any kind: a workload that waits for its answers, to its end.
//!
//! Guarantee: hits are what the answers' `usage` says, hosts what the gateway says in each answer,
//! and times the client's; the engines are asked for nothing. Not here: simulated engines, which
//! count by themselves and have clocks (mod.rs).

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use tokio::time::Instant;

use super::screen::Stage;
use super::{DRAIN, Gateways, POINTS, Round, Show, since};
use crate::harness::Envoy;
use crate::load::driver::{Driver, Phase, Record, Until, Watch};
use crate::load::stats::{Second, Tally};
use crate::page;
use crate::report::Run;

impl Round<'_> {
    /// Plays a driver's workload to its end: `requests` of them, unless some fail.
    pub(crate) async fn play_through(
        &self,
        driver: &mut Driver,
        requests: u64,
    ) -> anyhow::Result<Run> {
        self.stage(page::Stage::Running, 1.0);
        let before = self.gateways().await?;
        let title = format!("{:<14} measuring", self.policy.name());
        let mut seen = Seen {
            stage: Stage::new(title, format!(" of {requests}"), Tally::default()),
            hosts: BTreeMap::new(),
        };
        let phase = Phase {
            speed: 1.0,
            output_tokens: None,
            until: Until::End,
            drain: DRAIN,
        };
        let began = Instant::now();
        self.shown(driver.play(phase, &mut seen)).await;
        let took = began.elapsed();
        let run = self.seen(&seen, &before, took).await?;
        seen.stage.end(&format!(
            "{} requests in {:.0} s, hits {:.1} %, P50 TTFT {:.0} ms",
            run.requests,
            took.as_secs_f64(),
            run.hit_rate * 100.0,
            run.ttft(0.5).unwrap_or(0.0)
        ));
        if let Some(Show { board, place }) = &self.show {
            board.finish(*place, &run, took.as_secs_f64());
        }
        Ok(run)
    }

    /// What was seen in the time it took.
    async fn seen(&self, seen: &Seen, before: &Gateways, took: Duration) -> anyhow::Result<Run> {
        let tally = &seen.stage.tally;
        anyhow::ensure!(
            tally.requests > 0,
            "no request succeeded: {:?}; Envoy's log: {}",
            tally.errors,
            self.envoys.iter().map(Envoy::log).collect::<String>()
        );
        let after = self.gateways().await?;
        let seconds = took.as_secs_f64().max(1e-9);
        let share = |address: &String| {
            let count = seen.hosts.get(address).copied().unwrap_or(0);
            (address.clone(), count)
        };
        Ok(Run {
            policy: self.policy.name(),
            requests: tally.requests,
            errors: tally.errors.clone(),
            hit_rate: tally
                .hit_rate()
                .context("the answers do not say how many tokens were cached")?,
            ttft_ms: tally.ttft.sorted(),
            answer_ms: tally.total.sorted(),
            output_tokens_per_s: tally.output_tokens as f64 / seconds,
            requests_per_s: Some(tally.requests as f64 / seconds),
            shares: self.fleet.engines.addresses.iter().map(share).collect(),
            decision_us: after.decision_us_since(before),
            envoy_cpu_us: after.cpu_us_since(before),
            hits: hits(&tally.seconds),
            lag_p99_ms: tally.lag.percentiles().map_or(0.0, |lag| lag.p99),
            decisions: since(after.decisions, &before.decisions),
            ..Run::default()
        })
    }
}

/// A stage, and who served its requests.
struct Seen {
    stage: Stage,
    hosts: BTreeMap<String, u64>,
}

impl Watch for Seen {
    fn ended(&mut self, record: Record) {
        if record.outcome.failure.is_none()
            && let Some(host) = &record.outcome.host
        {
            *self.hosts.entry(host.clone()).or_default() += 1;
        }
        self.stage.ended(record);
    }

    fn tick(&mut self, sent: u64, in_flight: usize, elapsed: Duration) {
        self.stage.tick(sent, in_flight, elapsed);
    }
}

/// Hits over time: at most [`POINTS`] even steps, those without a prompt left out.
fn hits(seconds: &BTreeMap<u64, Second>) -> Vec<(f64, f64)> {
    let end = seconds.keys().max().map_or(1, |last| last + 1);
    let step = end.div_ceil(POINTS.into());
    let mut steps: BTreeMap<u64, Second> = BTreeMap::new();
    for (at, second) in seconds {
        let sum = steps.entry(at / step).or_default();
        sum.prompt_tokens += second.prompt_tokens;
        sum.cached_tokens += second.cached_tokens;
    }
    let points = steps.into_iter().filter(|(_, sum)| sum.prompt_tokens > 0);
    points
        .map(|(at, sum)| {
            let rate = sum.cached_tokens as f64 / sum.prompt_tokens as f64;
            (((at + 1) * step) as f64, rate)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_over_time_have_thirty_points_at_most() {
        let second = |prompt_tokens, cached_tokens| Second {
            prompt_tokens,
            cached_tokens,
        };
        let few = BTreeMap::from([(0, second(100, 0)), (2, second(100, 80))]);
        assert_eq!(hits(&few), [(1.0, 0.0), (3.0, 0.8)]);
        let many = (0..61).map(|at| (at, second(10, 5))).collect();
        let points = hits(&many);
        assert_eq!(
            (points.len(), points[0], points[20]),
            (21, (3.0, 0.5), (63.0, 0.5))
        );
        assert_eq!(hits(&BTreeMap::new()), []);
    }
}
