//! The filter's metrics: defined once for each VM, counted in all.
//!
//! Guarantee: labels come from the config and from fixed lists, never from a request, so the number
//! of series is bounded. Not here: when something is counted.

use std::cell::RefCell;

use super::host::{self, Metric};
use crate::hosts;
use crate::names;
use crate::route::{Abstain, Decision};
use crate::usage::{State, Usage};

/// API families and raw reasons are fixed lists; this only bounds the search.
const LABELS_MAX: usize = 64;

/// One pool's metrics.
pub struct Metrics {
    pool: String,
    decisions: [Option<Metric>; 6],
    abstentions: [Option<Metric>; Abstain::ALL.len()],
    decision_us: Option<Metric>,
    flag_unset: Option<Metric>,
    body_refused: Option<Metric>,
    source_errors: Option<Metric>,
    repairs: Option<Metric>,
    served_elsewhere: Option<Metric>,
    usage: [Option<Metric>; State::ALL.len()],
    prompt_tokens: Option<Metric>,
    cached_tokens: Option<Metric>,
    predicted_cached_tokens: Option<Metric>,
    /// Counters by their name and label, made when first needed.
    labelled: RefCell<Vec<(&'static str, &'static str, Option<Metric>)>>,
}

impl Metrics {
    /// Defines the metrics of a pool.
    pub fn new(pool: &str) -> Self {
        let counter = |name: &str, label: &str, value: &str| {
            host::counter(&names::metric(name, &[(names::POOL, pool), (label, value)]))
        };
        let plain = |name: &str| host::counter(&names::metric(name, &[(names::POOL, pool)]));
        Self {
            pool: pool.to_owned(),
            decisions: ["home", "match", "divert", "saturated", "reject", "abstain"]
                .map(|kind| counter(names::DECISIONS, names::DECISION, kind)),
            abstentions: Abstain::ALL
                .map(|why| counter(names::ABSTAIN, names::REASON, why.label())),
            decision_us: host::histogram(&names::metric(
                names::DECISION_US,
                &[(names::POOL, pool)],
            )),
            flag_unset: plain(names::FLAG_UNSET),
            body_refused: plain(names::BODY_REFUSED),
            source_errors: plain(names::HOST_SOURCE_ERRORS),
            repairs: plain(names::COUNTER_REPAIRS),
            served_elsewhere: plain(names::SERVED_ELSEWHERE),
            usage: State::ALL.map(|state| counter(names::USAGE, names::STATE, state.label())),
            prompt_tokens: plain(names::PROMPT_TOKENS),
            cached_tokens: plain(names::CACHED_TOKENS),
            predicted_cached_tokens: plain(names::PREDICTED_CACHED_TOKENS),
            labelled: RefCell::new(Vec::new()),
        }
    }

    /// A decision was made, in this time.
    pub fn decided(&self, decision: Decision, us: u64) {
        let [home, matched, divert, saturated, reject, abstain] = self.decisions;
        let metric = match decision {
            Decision::Home => home,
            Decision::Match => matched,
            Decision::Divert => divert,
            Decision::Saturated => saturated,
            Decision::Reject => reject,
            Decision::Abstain(why) => {
                self.count_abstention(why);
                abstain
            }
        };
        host::increment(metric, 1);
        host::record(self.decision_us, us);
    }

    /// A request was left to the proxy's own policy before any decision.
    pub fn abstained(&self, why: Abstain) {
        let [.., abstain] = self.decisions;
        host::increment(abstain, 1);
        self.count_abstention(why);
    }

    fn count_abstention(&self, why: Abstain) {
        let known = Abstain::ALL.iter().zip(&self.abstentions);
        for (_, metric) in known.filter(|(reason, _)| **reason == why) {
            host::increment(*metric, 1);
        }
    }

    /// A body of this API family was read.
    pub fn payload(&self, api: &'static str) {
        self.labelled(names::PAYLOAD, names::API, api);
    }

    /// A body could not be read as a prompt, or not to its end.
    pub fn unread(&self, reason: &'static str) {
        self.labelled(names::UNREAD, names::REASON, reason);
    }

    fn labelled(&self, name: &'static str, label: &'static str, value: &'static str) {
        let mut labelled = self.labelled.borrow_mut();
        let known = labelled.iter().find(|(n, v, _)| *n == name && *v == value);
        let metric = match known {
            Some((_, _, metric)) => *metric,
            None if labelled.len() == LABELS_MAX => return,
            None => {
                let labels = [(names::POOL, self.pool.as_str()), (label, value)];
                let metric = host::counter(&names::metric(name, &labels));
                labelled.push((name, value, metric));
                metric
            }
        };
        host::increment(metric, 1);
    }

    /// A sampled answer said this, of a prompt that was expected to be cached to this share.
    pub fn used(&self, usage: Usage, expected_share: Option<f64>) {
        let state = usage.state();
        let known = State::ALL.iter().zip(&self.usage);
        for (_, metric) in known.filter(|(known, _)| **known == state) {
            host::increment(*metric, 1);
        }
        // All of the same answers, so that one over the other is a rate.
        if let (Some(prompt), Some(cached)) = (usage.prompt_tokens, usage.cached_tokens) {
            host::increment(self.prompt_tokens, tokens(prompt));
            host::increment(self.cached_tokens, tokens(cached));
            let predicted = prompt as f64 * expected_share.unwrap_or_default();
            host::increment(self.predicted_cached_tokens, tokens(predicted as u64));
        }
    }

    /// The proxy was found to hold back bodies.
    pub fn flag_unset(&self) {
        host::increment(self.flag_unset, 1);
    }

    /// The proxy refused a body that was held.
    pub fn body_refused(&self) {
        host::increment(self.body_refused, 1);
    }

    /// The host source failed.
    pub fn source_error(&self) {
        host::increment(self.source_errors, 1);
    }

    /// Another host answered than the chosen one.
    pub fn served_elsewhere(&self) {
        host::increment(self.served_elsewhere, 1);
    }

    /// Requests that nobody will end were taken from the counters.
    pub fn repaired(&self, requests: u32) {
        host::increment(self.repairs, requests);
    }

    /// The same of any pool: what a stopped VM left is found by one that may serve others.
    pub fn repaired_in(pool: &str, requests: u32) {
        let repairs = names::metric(names::COUNTER_REPAIRS, &[(names::POOL, pool)]);
        host::increment(host::counter(&repairs), requests);
    }

    /// Sets a gauge of this pool: from the one VM that holds the lease.
    pub fn gauge(&self, name: &str, label: &str, value: &str, count: u64) {
        gauge(&self.pool, name, label, value, count);
    }
}

/// Sets the gauges of a pool that is gone to 0. Envoy cannot forget them, and as they were they would
/// tell of hosts and requests that nobody counts any more.
pub fn zero_gauges(pool: &str, hosts: &[String]) {
    for state in hosts::State::ALL {
        gauge(pool, names::HOSTS, names::STATE, state.label(), 0);
    }
    for name in [names::IN_FLIGHT, names::PENDING_TOKENS] {
        let zero = |host: &String| gauge(pool, name, names::UPSTREAM_HOST, host, 0);
        hosts.iter().for_each(zero);
    }
}

fn gauge(pool: &str, name: &str, label: &str, value: &str, count: u64) {
    let labels = [(names::POOL, pool), (label, value)];
    host::record(host::gauge(&names::metric(name, &labels)), count);
}

/// A count for a metric; what is read is at most `usage::TOKENS_MAX`.
fn tokens(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
