//! What the demo measured, as JSON, as a table for a terminal, and as a web page.
//!
//! Guarantee: all three show the same figures, and the page needs nothing but itself. Not here:
//! measuring (demo/, load/).

pub mod page;
pub mod plots;
pub mod table;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::load::engines::Histogram;

/// One policy's run.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// The policy's name.
    pub policy: &'static str,
    /// Requests that ended well.
    pub requests: u64,
    /// Failed ones, by kind.
    pub errors: BTreeMap<String, u64>,
    /// Share of the prompt tokens that the engines found in their caches, as they counted.
    pub hit_rate: f64,
    /// Milliseconds to the first token, ascending.
    pub ttft_ms: Vec<f64>,
    /// Milliseconds to the end of the answer, ascending.
    pub answer_ms: Vec<f64>,
    /// Times to the first token as the engines counted them, the way to them left out; for answers
    /// that come as a whole there is no other.
    pub engine_ttft: Histogram,
    /// Tokens a second that the engines produced.
    pub output_tokens_per_s: f64,
    /// Requests a second that ended well, where the load waits for answers; where it does not, it
    /// says nothing of the policy.
    pub requests_per_s: Option<f64>,
    /// Requests per host, as the hosts counted, or as answers say where they do not.
    pub shares: Vec<(String, u64)>,
    /// Requests per kind of decision, as the filter counted; empty without the filter.
    pub decisions: BTreeMap<String, u64>,
    /// Mean µs of the filter's decisions; `None` without the filter.
    pub decision_us: Option<f64>,
    /// Processor time of all Envoys for each request, in µs.
    pub envoy_cpu_us: Option<f64>,
    /// Hit rate over time: seconds from the start of measuring, share since the point before.
    pub hits: Vec<(f64, f64)>,
    /// 99 % of the requests were sent at most this late, in milliseconds of engine time.
    pub lag_p99_ms: f64,
    /// Engine time that was lost because the machine was too slow, as a share of all.
    pub lost: f64,
}

impl Run {
    /// The TTFT that so many of the requests (0 to 1) do not exceed, by nearest rank.
    #[must_use]
    pub fn ttft(&self, share: f64) -> Option<f64> {
        nearest(&self.ttft_ms, share)
    }

    /// The time to the whole answer that so many of the requests do not exceed.
    #[must_use]
    pub fn answer(&self, share: f64) -> Option<f64> {
        nearest(&self.answer_ms, share)
    }

    /// The TTFT within the engines, in milliseconds.
    #[must_use]
    pub fn engine_ttft_ms(&self, share: f64) -> Option<f64> {
        Some(self.engine_ttft.quantile(share)? * 1000.0)
    }

    /// The busiest host's requests by the mean's; 0 without requests.
    #[must_use]
    pub fn max_over_mean(&self) -> f64 {
        let total: u64 = self.shares.iter().map(|(_, requests)| requests).sum();
        let most = self
            .shares
            .iter()
            .map(|(_, requests)| *requests)
            .max()
            .unwrap_or(0);
        if total == 0 {
            return 0.0;
        }
        most as f64 * self.shares.len() as f64 / total as f64
    }

    /// The idlest host's requests by the mean's; 0 without requests.
    #[must_use]
    pub fn min_over_mean(&self) -> f64 {
        let requests = self.shares.iter().map(|(_, requests)| *requests);
        let total: u64 = requests.clone().sum();
        let least = requests.min().unwrap_or(0);
        if total == 0 {
            return 0.0;
        }
        least as f64 * self.shares.len() as f64 / total as f64
    }

    /// Failed requests.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.errors.values().sum()
    }

    /// What went wrong with measuring it, in sentences.
    #[must_use]
    pub fn doubts(&self) -> Vec<String> {
        let mut doubts = self.slowness();
        if self.failed() > 0 {
            let errors = self.errors.iter();
            let errors = errors.map(|(kind, count)| format!("{kind} {count}"));
            let errors: Vec<String> = errors.collect();
            let policy = self.policy;
            doubts.push(format!("{policy}: requests failed: {}.", errors.join(", ")));
        }
        doubts
    }

    /// Where the machine did not keep up, in sentences.
    #[must_use]
    pub fn slowness(&self) -> Vec<String> {
        let policy = self.policy;
        let mut doubts = Vec::new();
        if self.lag_p99_ms > LAG_DOUBT_MS {
            doubts.push(format!(
                "{policy}: 1 % of the requests left more than {:.0} ms late, because this machine \
                 was busy; TTFT contains that.",
                self.lag_p99_ms
            ));
        }
        if self.lost > LOST_DOUBT {
            doubts.push(format!(
                "{policy}: the engines lost {:.1} % of their time to a busy machine; all times \
                 are too long by about that.",
                self.lost * 100.0
            ));
        }
        doubts
    }
}

/// The value that a share of ascending values does not exceed, by nearest rank.
fn nearest(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (share * sorted.len() as f64).ceil().max(1.0) as usize;
    sorted.get(rank - 1).copied()
}

/// All runs, and what they have in common.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// What engines it was run on, for the title.
    pub engines: String,
    /// What was run, in words, e.g. the workload and the rate.
    pub conditions: Vec<String>,
    /// The seed.
    pub seed: u64,
    /// The commit of the sources.
    pub commit: String,
    /// The runs, in their order.
    pub runs: Vec<Run>,
}

#[derive(Serialize)]
struct JsonReport<'a> {
    runs: Vec<JsonRun<'a>>,
    seed: u64,
    commit: &'a str,
}

#[derive(Serialize)]
struct JsonRun<'a> {
    policy: &'a str,
    requests: u64,
    errors: u64,
    hit_rate: f64,
    ttft_ms: JsonTimes,
    output_tokens_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    requests_per_s: Option<f64>,
    share_max_over_mean: f64,
    shares: BTreeMap<&'a str, u64>,
    decisions: &'a BTreeMap<String, u64>,
}

#[derive(Serialize)]
struct JsonTimes {
    p50: Option<f64>,
    p90: Option<f64>,
    p99: Option<f64>,
}

impl Report {
    /// The report as one JSON object.
    ///
    /// # Errors
    /// If a figure is not a number.
    pub fn json(&self) -> anyhow::Result<String> {
        let runs = self.runs.iter().map(|run| JsonRun {
            policy: run.policy,
            requests: run.requests,
            errors: run.failed(),
            hit_rate: run.hit_rate,
            ttft_ms: JsonTimes {
                p50: run.ttft(0.5),
                p90: run.ttft(0.9),
                p99: run.ttft(0.99),
            },
            output_tokens_per_s: run.output_tokens_per_s,
            requests_per_s: run.requests_per_s,
            share_max_over_mean: run.max_over_mean(),
            shares: run
                .shares
                .iter()
                .map(|(host, count)| (host.as_str(), *count))
                .collect(),
            decisions: &run.decisions,
        });
        let report = JsonReport {
            runs: runs.collect(),
            seed: self.seed,
            commit: &self.commit,
        };
        Ok(serde_json::to_string(&report)?)
    }

    /// A run by its policy.
    #[must_use]
    pub fn run(&self, policy: &str) -> Option<&Run> {
        self.runs.iter().find(|run| run.policy == policy)
    }

    /// What went wrong with measuring, in sentences; empty if the figures can be believed.
    #[must_use]
    pub fn doubts(&self) -> Vec<String> {
        self.runs.iter().flat_map(Run::doubts).collect()
    }
}

/// A request sent this late distorts a P50 of some 35 ms.
const LAG_DOUBT_MS: f64 = 20.0;

/// More than this share of an engine's time lost shows in the figures.
const LOST_DOUBT: f64 = 0.01;

/// What was gained over a policy, in one sentence.
#[must_use]
pub fn gain(base: &Run, ours: &Run) -> Option<String> {
    let (before, after) = (base.ttft(0.5)?, ours.ttft(0.5)?);
    let hits = if base.hit_rate > 0.0 {
        format!(" ({:.1} times)", ours.hit_rate / base.hit_rate)
    } else {
        String::new()
    };
    let change = (after / before - 1.0) * 100.0;
    let sign = if change < 0.0 { "−" } else { "+" };
    Some(format!(
        "{} against {}: cache hits {:.1} % → {:.1} %{hits}, P50 TTFT {before:.0} → {after:.0} ms \
         ({sign}{:.0} %).",
        ours.policy,
        base.policy,
        base.hit_rate * 100.0,
        ours.hit_rate * 100.0,
        change.abs()
    ))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn report() -> Report {
        let run = |policy, hit_rate, ttft: f64| Run {
            policy,
            requests: 1400,
            hit_rate,
            ttft_ms: (1..=100)
                .map(|index| ttft * f64::from(index) / 50.0)
                .collect(),
            output_tokens_per_s: 1850.5,
            shares: (0..7)
                .map(|host| (format!("127.0.0.1:{}", 9000 + host), 180 + host * 7))
                .collect(),
            hits: (0..20)
                .map(|index| (f64::from(index) * 2.0, hit_rate))
                .collect(),
            lag_p99_ms: 1.0,
            ..Run::default()
        };
        let mut ours = run("prefix_router", 0.83, 36.0);
        ours.decisions = BTreeMap::from([("home".into(), 1300), ("divert".into(), 100)]);
        Report {
            engines: "simulated engines".into(),
            conditions: vec!["W1, 29 requests/s".into()],
            seed: 1,
            commit: "abc".into(),
            runs: vec![
                run("random", 0.24, 446.0),
                run("least_request", 0.245, 373.0),
                ours,
            ],
        }
    }

    #[test]
    fn json_has_the_promised_shape() {
        let json: serde_json::Value = serde_json::from_str(&report().json().unwrap()).unwrap();
        assert_eq!((&json["seed"], &json["commit"]), (&1.into(), &"abc".into()));
        let run = &json["runs"][2];
        assert_eq!(run["policy"], "prefix_router");
        assert_eq!(
            (&run["requests"], &run["errors"]),
            (&1400.into(), &0.into())
        );
        assert_eq!(run["ttft_ms"]["p50"], 36.0);
        assert_eq!(run["ttft_ms"]["p99"], 71.28);
        assert_eq!(run["shares"]["127.0.0.1:9006"], 222);
        assert_eq!(run["decisions"]["home"], 1300);
        assert_eq!(run["output_tokens_per_s"], 1850.5);
        let expected = 222.0 * 7.0 / (180.0 * 7.0 + 147.0);
        assert_eq!(run["share_max_over_mean"], expected);
    }

    #[test]
    fn figures_that_cannot_be_believed_are_said_so() {
        let mut report = report();
        assert!(report.doubts().is_empty());
        report.runs[0].lag_p99_ms = 25.0;
        report.runs[1].lost = 0.02;
        report.runs[2].errors.insert("http_503".into(), 3);
        let doubts = report.doubts().join("\n");
        for part in [
            "random: 1 %",
            "25 ms late",
            "lost 2.0 %",
            "prefix_router: requests failed: http_503 3",
        ] {
            assert!(doubts.contains(part), "{part:?} is not in {doubts:?}");
        }
    }

    #[test]
    fn the_gain_is_one_sentence() {
        let report = report();
        let gain = gain(&report.runs[0], &report.runs[2]).unwrap();
        assert_eq!(
            gain,
            "prefix_router against random: cache hits 24.0 % → 83.0 % (3.5 times), P50 TTFT 446 → \
             36 ms (−92 %)."
        );
    }
}
