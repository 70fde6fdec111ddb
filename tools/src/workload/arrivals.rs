//! When requests arrive: a Poisson process, even or in bursts.
//!
//! Guarantee: times never go back, and the mean rate is the one asked for. Not here: what arrives.

use std::time::Duration;

use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution as _, Exp1};

/// A burst doubles the rate for 10 s in the mean …
const BURST_FACTOR: f64 = 2.0;
/// (see [`BURST_FACTOR`])
const BURST_SECONDS: f64 = 10.0;
/// … and half the rate follows for 20 s: (2 × 10 + 0.5 × 20) / 30 = 1, the mean rate.
const CALM_FACTOR: f64 = 0.5;
/// (see [`CALM_FACTOR`])
const CALM_SECONDS: f64 = 20.0;

/// How arrivals are spread over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spread {
    /// A Poisson process of constant rate.
    #[default]
    Even,
    /// A Markov-modulated one of two states: twice the rate for about 10 s, half of it for 20 s.
    Bursty,
}

/// Arrival times without end.
#[derive(Debug)]
pub struct Arrivals {
    rng: ChaCha8Rng,
    rate: f64,
    spread: Spread,
    now: f64,
    burst: bool,
    /// When the state changes next; never for an even spread.
    change: f64,
}

impl Arrivals {
    /// Arrivals at `rate` a second; a rate that is not above 0 gives no arrival within a year.
    #[must_use]
    pub fn new(mut rng: ChaCha8Rng, rate: f64, spread: Spread) -> Self {
        let burst = rng.random_bool(BURST_SECONDS / (BURST_SECONDS + CALM_SECONDS));
        let mut arrivals = Self {
            rng,
            rate: rate.max(1e-9),
            spread,
            now: 0.0,
            burst,
            change: f64::INFINITY,
        };
        if spread == Spread::Bursty {
            arrivals.change = arrivals.stay();
        }
        arrivals
    }

    /// The next time of arrival.
    pub fn next_at(&mut self) -> Duration {
        let mut work = self.exp();
        // One turn for each change of state before the arrival, and the arrival is exponential.
        while self.now + work / self.rate_now() > self.change {
            work -= (self.change - self.now) * self.rate_now();
            self.now = self.change;
            self.burst = !self.burst;
            self.change = self.now + self.stay();
        }
        self.now += work / self.rate_now();
        Duration::from_secs_f64(self.now)
    }

    fn rate_now(&self) -> f64 {
        match (self.spread, self.burst) {
            (Spread::Even, _) => self.rate,
            (Spread::Bursty, true) => self.rate * BURST_FACTOR,
            (Spread::Bursty, false) => self.rate * CALM_FACTOR,
        }
    }

    fn stay(&mut self) -> f64 {
        self.exp()
            * if self.burst {
                BURST_SECONDS
            } else {
                CALM_SECONDS
            }
    }

    fn exp(&mut self) -> f64 {
        Exp1.sample(&mut self.rng)
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::SeedableRng as _;

    use super::*;

    fn times(spread: Spread, rate: f64, count: usize) -> Vec<f64> {
        let mut arrivals = Arrivals::new(ChaCha8Rng::seed_from_u64(5), rate, spread);
        (0..count)
            .map(|_| arrivals.next_at().as_secs_f64())
            .collect()
    }

    #[test]
    fn the_mean_rate_is_the_one_asked_for() {
        for (spread, tolerance) in [(Spread::Even, 0.02), (Spread::Bursty, 0.06)] {
            // 400,000 arrivals are 444 bursts and calms of 30 s: their mean varies by 2 to 3 %.
            let last = times(spread, 30.0, 400_000).pop().unwrap();
            let rate = 400_000.0 / last;
            assert!(
                (rate / 30.0 - 1.0).abs() < tolerance,
                "{spread:?}: {rate} a second"
            );
        }
    }

    #[test]
    fn bursts_vary_more_than_an_even_spread() {
        let variance = |spread| {
            let mut bins = vec![0.0_f64; 1000];
            for at in times(spread, 30.0, 29_000) {
                if let Some(bin) = bins.get_mut(at as usize) {
                    *bin += 1.0;
                }
            }
            let bins: Vec<f64> = bins.into_iter().take(800).collect();
            let mean = bins.iter().sum::<f64>() / 800.0;
            bins.iter().map(|bin| (bin - mean).powi(2)).sum::<f64>() / 800.0 / mean
        };
        // A Poisson count's variance is its mean.
        assert!(
            (variance(Spread::Even) - 1.0).abs() < 0.2,
            "{}",
            variance(Spread::Even)
        );
        assert!(
            variance(Spread::Bursty) > 5.0,
            "{}",
            variance(Spread::Bursty)
        );
    }

    #[test]
    fn times_never_go_back() {
        assert!(times(Spread::Bursty, 100.0, 5000).is_sorted());
    }
}
