//! What the engines' own counts teach: how far the index is right, who else warms the caches, how
//! many tokens a byte is.
//!
//! Guarantee: every figure stays within its bounds, whatever an engine reports; without reports the
//! figures of a study stand in. Not here: reading of usage (usage.rs), what follows (cost.rs).
//!
//! Source of the rules: ROUTING.md 6 and 6a.

use crate::cost::Belief;

/// EW: the weight of one report.
const WEIGHT: f64 = 0.02;
/// RHO_ON: surprise hits from which other gateways are taken to warm our hosts.
const SURPRISE_ON: f64 = 0.08;
/// RHO0: where that starts; form K balances new keys up to it.
const SURPRISE_START: f64 = 0.1;
/// PRESUME: what a home is presumed to hold when others warm it.
const PRESUME: f64 = 0.7;
/// What it is presumed to hold when engines report nothing (ROUTING.md 6, "no usage feedback").
const PRESUME_BLIND: f64 = 0.4;
/// Reports without cached tokens, and none with, after which engines are taken not to report.
const SILENT_REPORTS: u32 = 16;
/// Tokens by which a report may miss a checkpoint: engines cache whole blocks, and their chat
/// templates add some tokens that no body shows.
pub const MARGIN_TOKENS: f64 = 128.0;
/// An engine's tokens are between a thirtieth and four times the bytes' estimate.
const RATIO: std::ops::RangeInclusive<f64> = 0.03..=4.0;

/// What an answer's usage says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The prompt's tokens.
    pub prompt_tokens: Option<u64>,
    /// Of these, the ones that were in the cache.
    pub cached_tokens: Option<u64>,
}

/// What was expected of the host that answered, in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expectation {
    /// The prompt, as estimated.
    pub tokens: f64,
    /// What the index said the host holds, or all hosts do.
    pub known: f64,
    /// What all hosts were assumed to hold.
    pub floor: f64,
    /// The next checkpoint of the index above `known`: up to there a hit is no surprise.
    pub next: f64,
    /// Whether the host is the first in the key's rendezvous order.
    pub at_home: bool,
}

/// The learned figures of one pool in one worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Learned {
    surprise: f64,
    shared: f64,
    trust: f64,
    ratio: f64,
    reports: u32,
    silent: u32,
}

impl Default for Learned {
    fn default() -> Self {
        Self {
            surprise: SURPRISE_START,
            shared: 0.0,
            trust: 1.0,
            ratio: 1.0,
            reports: 0,
            silent: 0,
        }
    }
}

impl Learned {
    /// What to believe of the caches. `one_gateway`: form K may balance new keys.
    #[must_use]
    pub fn belief(&self, one_gateway: bool) -> Belief {
        let balances = one_gateway && self.surprise <= SURPRISE_START;
        if self.reports == 0 && self.silent >= SILENT_REPORTS {
            let (presumed, home_weight) = (PRESUME_BLIND, 1.0);
            return Belief {
                presumed,
                home_weight,
                trust: 1.0,
                shared: 0.0,
                balances,
            };
        }
        let home_weight = (self.surprise / SURPRISE_ON).clamp(0.0, 1.0);
        let (trust, shared) = (self.trust, self.shared);
        Belief {
            presumed: PRESUME * home_weight,
            home_weight,
            trust,
            shared,
            balances,
        }
    }

    /// An engine's tokens for this many bytes of text, or for any other estimate of them.
    #[must_use]
    pub fn tokens(&self, estimate: u64) -> f64 {
        estimate as f64 * self.ratio
    }

    /// Learns from one answer. Whether the index claimed more than the host held: then its claims
    /// above the reported tokens are to be forgotten.
    pub fn learn(&mut self, expected: &Expectation, report: Report) -> bool {
        self.learn_tokens(expected, report);
        let Some(prompt_tokens) = report.prompt_tokens.filter(|tokens| *tokens > 0) else {
            self.silent = self.silent.saturating_add(1);
            return false;
        };
        let prompt_tokens = prompt_tokens as f64;
        let Some(cached) = report.cached_tokens else {
            self.silent = self.silent.saturating_add(1);
            return false;
        };
        self.reports = self.reports.saturating_add(1);
        // In the expectation's units: its estimate of the tokens may be off by the ratio.
        let cached = cached as f64 * expected.tokens / prompt_tokens;
        self.learn_surprise(expected, cached);
        if expected.known <= expected.floor + MARGIN_TOKENS {
            return false;
        }
        let claimed = expected.known - expected.floor;
        let found = ((cached - expected.floor) / claimed).clamp(0.0, 1.0);
        self.trust += WEIGHT * (found - self.trust);
        cached + MARGIN_TOKENS < expected.known
    }

    /// Learns only how many tokens a byte is.
    pub fn learn_tokens(&mut self, expected: &Expectation, report: Report) {
        let Some(prompt_tokens) = report.prompt_tokens.filter(|tokens| *tokens > 0) else {
            return;
        };
        // The estimate was made with the ratio of then; the step is small enough not to matter.
        let ratio = (self.ratio * prompt_tokens as f64 / expected.tokens)
            .clamp(*RATIO.start(), *RATIO.end());
        self.ratio += WEIGHT * (ratio - self.ratio);
    }

    fn learn_surprise(&mut self, expected: &Expectation, cached: f64) {
        let room = expected.tokens - expected.next;
        if room <= MARGIN_TOKENS {
            return;
        }
        let surprise = ((cached - expected.next) / room).clamp(0.0, 1.0);
        if expected.at_home {
            self.surprise += WEIGHT * (surprise - self.surprise);
        } else if expected.known <= expected.floor {
            self.shared += WEIGHT * (surprise - self.shared);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expectation(known: f64, at_home: bool) -> Expectation {
        Expectation {
            tokens: 4000.0,
            known,
            floor: 0.0,
            next: known + 256.0,
            at_home,
        }
    }

    fn report(prompt_tokens: u64, cached_tokens: u64) -> Report {
        Report {
            prompt_tokens: Some(prompt_tokens),
            cached_tokens: Some(cached_tokens),
        }
    }

    fn after(times: u32, expected: &Expectation, report: Report) -> Learned {
        let mut learned = Learned::default();
        for _ in 0..times {
            learned.learn(expected, report);
        }
        learned
    }

    #[test]
    fn a_home_that_only_we_warm_is_not_presumed_to_hold_more_than_we_sent() {
        let learned = after(300, &expectation(0.0, true), report(4000, 0));
        assert!(learned.belief(false).presumed < 0.02, "{learned:?}");
        assert!(learned.belief(false).home_weight < 0.02);
    }

    #[test]
    fn a_home_that_others_warm_is_presumed_to_hold_the_prompt() {
        let learned = after(300, &expectation(0.0, true), report(4000, 3000));
        let belief = learned.belief(true);
        assert_eq!((belief.presumed, belief.home_weight), (0.7, 1.0));
        assert!(!belief.balances, "another gateway is at work");
    }

    #[test]
    fn hits_on_hosts_that_were_never_sent_a_prompt_show_a_shared_store() {
        let learned = after(300, &expectation(0.0, false), report(4000, 3900));
        assert!(learned.belief(false).shared > 0.9);
        let learned = after(300, &expectation(0.0, false), report(4000, 0));
        assert_eq!(learned.belief(false).shared, 0.0);
    }

    #[test]
    fn an_index_that_claims_too_much_is_trusted_less_and_told_to_forget() {
        let mut learned = Learned::default();
        assert!(learned.learn(&expectation(3000.0, true), report(4000, 500)));
        assert!(!learned.learn(&expectation(3000.0, true), report(4000, 2900)));
        assert!(!learned.learn(&expectation(3000.0, true), report(4000, 4000)));
        let learned = after(300, &expectation(3000.0, true), report(4000, 0));
        assert!(learned.belief(false).trust < 0.01);
    }

    #[test]
    fn without_cached_tokens_the_studys_fixed_presumption_stands_in() {
        let silent = Report {
            prompt_tokens: Some(4000),
            cached_tokens: None,
        };
        // Engines that report nothing at all are as silent as those that leave out the cached ones.
        for silent in [silent, Report::default()] {
            let belief = after(15, &expectation(0.0, true), silent).belief(false);
            assert_eq!((belief.presumed, belief.home_weight), (0.7, 1.0));
            let belief = after(16, &expectation(0.0, true), silent).belief(false);
            assert_eq!((belief.presumed, belief.home_weight), (0.4, 1.0));
        }
    }

    #[test]
    fn learns_how_many_tokens_a_byte_is() {
        let mut learned = Learned::default();
        for _ in 0..500 {
            let expected = Expectation {
                tokens: learned.tokens(1000),
                ..expectation(0.0, true)
            };
            learned.learn(&expected, report(1500, 0));
        }
        assert!(
            (learned.tokens(1000) - 1500.0).abs() < 10.0,
            "{}",
            learned.tokens(1000)
        );
    }

    #[test]
    fn nonsense_from_an_engine_keeps_every_figure_in_its_bounds() {
        let nonsense = [
            report(u64::MAX, u64::MAX),
            report(1, u64::MAX),
            report(0, 5),
        ];
        for report in nonsense {
            let learned = after(1000, &expectation(100.0, true), report);
            let belief = learned.belief(true);
            for figure in [
                belief.presumed,
                belief.home_weight,
                belief.trust,
                belief.shared,
            ] {
                assert!((0.0..=1.0).contains(&figure), "{report:?}: {belief:?}");
            }
            assert!(
                (1.0..=4000.0).contains(&learned.tokens(1000)),
                "{learned:?}"
            );
        }
    }
}
