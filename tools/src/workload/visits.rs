//! Every shared prompt once a pass, each time with another question: to see where prompts live.
//!
//! Guarantee: the prompts and questions are those of the conversations' first turns; so many
//! requests run at once, whatever became of the ones before. Not here: later turns.

use std::ops::Range;
use std::time::Duration;

use super::conversations::Conversations;
use super::{Request, Workload};

/// Some passes over the prompts of `plan`.
#[derive(Debug)]
pub struct Visits {
    plan: Conversations,
    left: Range<u32>,
    at_once: u32,
    started: u32,
}

impl Visits {
    /// Passes `passes` (numbered from 0) over all prompts, `at_once` requests at any time.
    #[must_use]
    pub fn new(plan: Conversations, passes: Range<u32>, at_once: u32) -> Self {
        let number = |pass: u32| pass.saturating_mul(plan.systems);
        Self {
            plan,
            left: number(passes.start)..number(passes.end),
            at_once,
            started: 0,
        }
    }

    fn take(&mut self, at: Duration) -> Option<Request> {
        let first = self.plan.first(self.left.next()?);
        Some(Request { at, ..first })
    }
}

impl Workload for Visits {
    fn next(&mut self) -> Option<Request> {
        if self.started == self.at_once {
            return None;
        }
        self.started += 1;
        self.take(Duration::ZERO)
    }

    fn follow(&mut self, _request: &Request, ended: Duration, _answer: &str) -> Option<Request> {
        self.take(ended)
    }

    fn failed(&mut self, _request: &Request, at: Duration) -> Option<Request> {
        self.take(at)
    }

    fn prefixes(&self) -> Option<u64> {
        Some(u64::from(self.plan.systems))
    }

    fn probe(&self, _index: u64) -> Option<Request> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pass_asks_each_prompt_something_else() {
        let plan = Conversations {
            turns: 1,
            ..Conversations::new(3, 1)
        };
        let mut visits = Visits::new(plan, 1..3, 2);
        let mut seen = vec![visits.next().unwrap(), visits.next().unwrap()];
        assert!(visits.next().is_none(), "two at once");
        while let Some(next) = visits.follow(&seen[0].clone(), Duration::from_secs(1), "") {
            assert_eq!(next.at, Duration::from_secs(1));
            seen.push(next);
        }
        let prefixes: Vec<_> = seen.iter().map(|one| one.prefix.unwrap()).collect();
        assert_eq!(prefixes, [0, 1, 2, 0, 1, 2]);
        assert_eq!(seen[0].messages[0], seen[3].messages[0]);
        assert_ne!(seen[0].messages[1], seen[3].messages[1]);
    }
}
