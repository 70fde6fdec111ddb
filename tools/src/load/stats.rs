//! What a load saw, summed up.
//!
//! Guarantee: a percentile is a value that occurred (nearest rank); failed requests count as
//! errors and in no other figure. Not here: sending (driver.rs), drawing.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::driver::{Record, Watch};

/// Milliseconds at three percentiles, and the mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Half of the values are at most this.
    pub p50: f64,
    /// 90 % are.
    pub p90: f64,
    /// 99 % are.
    pub p99: f64,
    /// Their mean.
    pub mean: f64,
}

/// Values in milliseconds.
#[derive(Clone, Debug, Default)]
pub struct Times(Vec<f64>);

impl Times {
    /// Adds one.
    pub fn add(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64() * 1000.0);
    }

    /// The values in ascending order.
    #[must_use]
    pub fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }

    /// Their percentiles; `None` if there are no values.
    #[must_use]
    pub fn percentiles(&self) -> Option<Percentiles> {
        let sorted = self.sorted();
        let at = |share: f64| {
            let rank = (share * sorted.len() as f64).ceil().max(1.0) as usize;
            sorted.get(rank - 1).copied()
        };
        Some(Percentiles {
            p50: at(0.5)?,
            p90: at(0.9)?,
            p99: at(0.99)?,
            mean: sorted.iter().sum::<f64>() / sorted.len() as f64,
        })
    }
}

/// Prompt and cached tokens of the requests that were due within one second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Second {
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Of these, cached.
    pub cached_tokens: u64,
}

/// The window's requests.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Requests due before this are left out.
    pub warmup: Duration,
    /// Requests that ended well.
    pub requests: u64,
    /// Failed ones, by kind.
    pub errors: BTreeMap<String, u64>,
    /// From due to the first content.
    pub ttft: Times,
    /// From due to the end.
    pub total: Times,
    /// How late requests were sent.
    pub lag: Times,
    /// Prompt tokens, as engines counted them.
    pub prompt_tokens: u64,
    /// Cached ones of them; `None` if no engine said.
    pub cached_tokens: Option<u64>,
    /// Answered tokens.
    pub output_tokens: u64,
    /// Hits over time.
    pub seconds: BTreeMap<u64, Second>,
    /// When the last answer ended.
    pub last_end: Duration,
    /// The last report of progress: sent, in flight, engine time.
    pub progress: (u64, usize, Duration),
}

impl Tally {
    /// An empty tally that leaves out what is due before `warmup`.
    #[must_use]
    pub fn after(warmup: Duration) -> Self {
        Self {
            warmup,
            ..Self::default()
        }
    }

    /// Adds one request.
    pub fn add(&mut self, record: &Record) {
        let Some(due) = record.due.checked_sub(self.warmup) else {
            return;
        };
        self.lag.add(record.lag);
        if let Some(failure) = record.outcome.failure {
            *self.errors.entry(failure.name()).or_default() += 1;
            return;
        }
        self.requests += 1;
        self.total.add(record.total);
        if let Some(ttft) = record.ttft {
            self.ttft.add(ttft);
        }
        self.last_end = self.last_end.max(due + record.total);
        let Some(usage) = record.outcome.answer.usage else {
            self.output_tokens += record.outcome.answer.events;
            return;
        };
        self.output_tokens += usage.completion_tokens;
        self.prompt_tokens += usage.prompt_tokens;
        let second = self.seconds.entry(due.as_secs()).or_default();
        second.prompt_tokens += usage.prompt_tokens;
        if let Some(cached) = usage.cached_tokens {
            *self.cached_tokens.get_or_insert(0) += cached;
            second.cached_tokens += cached;
        }
    }

    /// The share of prompt tokens that were cached; `None` if no engine said.
    #[must_use]
    pub fn hit_rate(&self) -> Option<f64> {
        (self.prompt_tokens > 0).then_some(self.cached_tokens? as f64 / self.prompt_tokens as f64)
    }

    /// Failed requests.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.errors.values().sum()
    }
}

impl Watch for Tally {
    fn ended(&mut self, record: Record) {
        self.add(&record);
    }

    fn tick(&mut self, sent: u64, in_flight: usize, elapsed: Duration) {
        self.progress = (sent, in_flight, elapsed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::answer::Usage;
    use crate::load::client::{Failure, Outcome};

    #[test]
    fn percentiles_are_values_that_occurred() {
        let mut times = Times::default();
        assert_eq!(times.percentiles(), None);
        (1..=200)
            .rev()
            .for_each(|ms| times.add(Duration::from_millis(ms)));
        let expected = Percentiles {
            p50: 100.0,
            p90: 180.0,
            p99: 198.0,
            mean: 100.5,
        };
        assert_eq!(times.percentiles(), Some(expected));
        let mut one = Times::default();
        one.add(Duration::from_millis(7));
        assert_eq!(
            one.percentiles().map(|all| (all.p50, all.p99)),
            Some((7.0, 7.0))
        );
    }

    fn record(due_ms: u64, failure: Option<Failure>) -> Record {
        let mut outcome = Outcome::failed(Failure::Cut);
        outcome.failure = failure;
        outcome.answer.usage = Some(Usage {
            prompt_tokens: 100,
            cached_tokens: Some(25),
            completion_tokens: 8,
        });
        Record {
            due: Duration::from_millis(due_ms),
            lag: Duration::ZERO,
            ttft: Some(Duration::from_millis(30)),
            total: Duration::from_millis(90),
            prefix: None,
            chat: 0,
            turn: 0,
            outcome,
        }
    }

    #[test]
    fn warm_up_is_left_out_and_failures_are_counted_by_kind_only() {
        let mut tally = Tally::after(Duration::from_secs(1));
        tally.add(&record(999, None));
        tally.add(&record(1000, None));
        tally.add(&record(2500, None));
        tally.add(&record(2500, Some(Failure::Status(503))));
        assert_eq!(
            (tally.requests, tally.failed(), tally.output_tokens),
            (2, 1, 16)
        );
        assert_eq!(tally.errors, BTreeMap::from([("http_503".to_owned(), 1)]));
        assert_eq!(tally.hit_rate(), Some(0.25));
        assert_eq!(tally.seconds.keys().copied().collect::<Vec<_>>(), [0, 1]);
        assert_eq!(tally.last_end, Duration::from_millis(1590));
    }
}
