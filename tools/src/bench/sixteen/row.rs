//! One cell's figures.
//!
//! Guarantee: a row that says where the machine did not keep up is not believed. Not here:
//! measuring (mod.rs), tables, the file that keeps rows (store.rs).

use serde::{Deserialize, Serialize};

use crate::bench::store::{Kept, Key};
use crate::report::Run;

/// One policy's figures in one stretch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Figures {
    /// Requests that ended well.
    pub requests: u64,
    /// Those that did not.
    pub errors: u64,
    /// Share of the prompt tokens that the engines found in their caches.
    pub hit_rate: f64,
    /// Milliseconds to the first token: P50 and P90.
    pub ttft_ms: Option<(f64, f64)>,
    /// Whether they are the engines' own, since the client saw no first token of a whole answer.
    pub ttft_of_engines: bool,
    /// Milliseconds to the end of the answer: P50 and P90.
    pub answer_ms: Option<(f64, f64)>,
    /// Tokens a second that the engines produced.
    pub output_tokens_per_s: f64,
    /// Requests of the host that got fewest and of the one that got most, by the mean's.
    pub shares: (f64, f64),
    /// Mean µs of the filter's decisions.
    pub decision_us: Option<f64>,
    /// Processor time of the Envoys for each request, in µs.
    pub envoy_cpu_us: Option<f64>,
    /// Where the machine did not keep up, so that these figures are not to be believed.
    pub doubts: Vec<String>,
}

impl Figures {
    pub(super) fn of(run: &Run) -> Self {
        let both = |at: &dyn Fn(f64) -> Option<f64>| Some((at(0.5)?, at(0.9)?));
        let seen = both(&|share| run.ttft(share));
        Self {
            requests: run.requests,
            errors: run.failed(),
            hit_rate: run.hit_rate,
            ttft_of_engines: seen.is_none(),
            ttft_ms: seen.or_else(|| both(&|share| run.engine_ttft_ms(share))),
            answer_ms: both(&|share| run.answer(share)),
            output_tokens_per_s: run.output_tokens_per_s,
            shares: (run.min_over_mean(), run.max_over_mean()),
            decision_us: run.decision_us,
            envoy_cpu_us: run.envoy_cpu_us,
            doubts: run.slowness(),
        }
    }

    /// The share of requests that ended well.
    pub(super) fn success(&self) -> f64 {
        self.requests as f64 / (self.requests + self.errors).max(1) as f64
    }
}

/// Both policies in one stretch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Pair {
    /// The same Envoys without the filter.
    pub random: Figures,
    /// Ours.
    pub prefix_router: Figures,
}

impl Pair {
    /// How much more tokens a second ours brought, e.g. 0.16.
    pub(super) fn throughput_gain(&self) -> f64 {
        let base = self.random.output_tokens_per_s;
        if base > 0.0 {
            self.prefix_router.output_tokens_per_s / base - 1.0
        } else {
            0.0
        }
    }
}

/// One cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Row {
    /// The cell's name.
    pub cell: String,
    /// What it is of.
    pub key: Key,
    /// Long prompts, 80 % load.
    pub long: Pair,
    /// Long prompts, 117 % load.
    pub high: Pair,
    /// Short prompts.
    pub short: Pair,
}

impl Row {
    /// The stretches, with their names.
    pub(super) fn pairs(&self) -> [(&'static str, &Pair); 3] {
        [
            ("long", &self.long),
            ("117 %", &self.high),
            ("short", &self.short),
        ]
    }

    /// Why its figures are not to be believed; empty if they are.
    pub(super) fn doubts(&self) -> Vec<String> {
        let of = |(name, pair): (&'static str, &Pair)| {
            let both = [&pair.random, &pair.prefix_router];
            let doubts = both.into_iter().flat_map(|figures| figures.doubts.clone());
            doubts
                .map(|doubt| format!("{}, {name}: {doubt}", self.cell))
                .collect::<Vec<_>>()
        };
        self.pairs().into_iter().flat_map(of).collect()
    }

    /// The least share of requests that ended well.
    pub(super) fn success(&self) -> f64 {
        let all = self.pairs().map(|(_, pair)| pair.prefix_router.success());
        all.into_iter().fold(1.0, f64::min)
    }
}

impl Kept for Row {
    /// 60 whole runs, about 3 MB.
    const ROWS_MAX: usize = 1000;

    fn name(&self) -> String {
        self.cell.clone()
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn believed(&self) -> bool {
        self.doubts().is_empty()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn row(cell: &str, hits: f64) -> Row {
        let figures = |hit_rate, ttft, tokens| Figures {
            requests: 700,
            hit_rate,
            ttft_ms: Some((ttft, ttft * 4.0)),
            answer_ms: Some((ttft + 1000.0, ttft + 2000.0)),
            output_tokens_per_s: tokens,
            shares: (0.934, 1.081),
            envoy_cpu_us: Some(700.0),
            ..Figures::default()
        };
        let pair = |random_hits, hits| {
            let mut ours = figures(hits, 40.0, 1080.0);
            ours.decision_us = Some(14.6);
            Pair {
                random: figures(random_hits, 1400.0, 900.0),
                prefix_router: ours,
            }
        };
        Row {
            cell: cell.to_owned(),
            key: key(1),
            long: pair(0.25, hits),
            high: pair(0.25, hits),
            short: pair(0.0, 0.0),
        }
    }

    pub(in super::super) fn key(seed: u64) -> Key {
        Key {
            commit: "abc".to_owned(),
            seed,
            sizes: "{}".to_owned(),
        }
    }

    #[test]
    fn a_row_of_a_machine_that_did_not_keep_up_is_not_believed() {
        let mut doubtful = row("one", 0.9);
        assert!(doubtful.believed());
        doubtful.high.random.doubts.push("late".to_owned());
        assert!(!doubtful.believed());
    }
}
