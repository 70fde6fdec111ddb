//! How fast hosts compute prompts, and until when a request that is answered in one piece counts
//! as one whose prompt waits.
//!
//! The first byte of such an answer comes after all its tokens, long after its prompt was computed.
//! So its pending tokens end when the host should have computed all that waited there when it was
//! sent, at the pace that streamed answers show, and with the answer's headers at the latest.
//!
//! A small answer passes in one piece with its end, and one write then settles and ends its request.
//! But a client that does not read keeps the request from ending, so its pending tokens have a time
//! as well, a short one.
//!
//! Guarantee: pending tokens that are taken over from a request end once, in full, by their time or
//! by the request, whichever comes first; the number kept is bounded. Not here: clocks, how loads are
//! counted (load.rs).

use std::collections::BTreeMap;

use crate::load::{Booking, Change};
use crate::request::Request;

/// Tokens a host computes in a millisecond before any streamed answer has shown it: well below the
/// 12 to 14 of a 70B model on eight H100 (ROUTING.md 2), for a pace that is too high forgets work
/// that is still to do.
const START_TOKENS: f64 = 5.0;
/// The weight of one answer.
const WEIGHT: f64 = 0.05;
/// Fewer tokens than this say nothing of the pace: a step takes some 14 ms whatever is in it, in
/// which a host computes 200 of them.
const TOKENS_MIN: u32 = 512;
/// Tokens in a millisecond, whatever an answer shows: from a small host without a GPU to more than
/// any has.
const PACE: std::ops::RangeInclusive<f64> = 0.05..=500.0;
/// Bookings kept at most, 32 bytes each; those of requests beyond count until their answers come, or
/// until they end.
const BOOKINGS_MAX: usize = 4096;
/// A request ends this soon after its whole answer has passed, unless its client does not read: one
/// tick, while most end in the same turn of the proxy's loop.
const ENDS_WITHIN_MS: u64 = 100;

/// A booking taken over from a request; to be taken back by whoever sees its answer first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Due {
    at_ms: u64,
    number: u64,
}

/// The pace of one pool's hosts, and what one worker has taken over.
#[derive(Clone, Debug)]
pub struct Prefill {
    /// Decaying means: tokens that waited when a request was sent, and the time to its first byte.
    tokens: f64,
    ms: f64,
    /// What is done with each booking at its time.
    ends: BTreeMap<Due, Change>,
    taken: u64,
}

impl Default for Prefill {
    fn default() -> Self {
        let ms = 200.0;
        Self {
            tokens: START_TOKENS * ms,
            ms,
            ends: BTreeMap::new(),
            taken: 0,
        }
    }
}

impl Prefill {
    /// Tokens that a host computes in a millisecond.
    #[must_use]
    pub fn pace(&self) -> f64 {
        (self.tokens / self.ms).clamp(*PACE.start(), *PACE.end())
    }

    /// The first byte of a streamed answer came so long after its request was sent, to a host
    /// where so many tokens waited then, its own among them.
    pub fn learn(&mut self, tokens: u32, ms: u64) {
        if tokens < TOKENS_MIN {
            return;
        }
        self.tokens += WEIGHT * (f64::from(tokens) - self.tokens);
        // A first byte within the millisecond took some time all the same.
        self.ms += WEIGHT * (ms.max(1) as f64 - self.ms);
    }

    /// Takes over the pending tokens of a request that was sent now, to a host where `waiting`
    /// tokens wait, its own among them. `None` if it has none, or there is no room.
    pub fn take_over(&mut self, request: &mut Request, waiting: u32, now_ms: u64) -> Option<Due> {
        if self.is_full() {
            return None;
        }
        let booking = request.give_pending()?;
        let ms = f64::from(waiting) / self.pace();
        Some(self.end_after(ms.ceil() as u64, Change::Computed(booking), now_ms))
    }

    /// Takes over the pending tokens of a request whose whole answer has passed now: if it has not
    /// ended soon, its client does not read. `None` as above; they then end with it.
    pub fn settle_soon(&mut self, request: &mut Request, now_ms: u64) -> Option<Due> {
        request.completed();
        if self.is_full() {
            return None;
        }
        let booking = request.give_all()?;
        Some(self.end_after(ENDS_WITHIN_MS, Change::Settle(booking), now_ms))
    }

    fn is_full(&self) -> bool {
        self.ends.len() >= BOOKINGS_MAX
    }

    fn end_after(&mut self, ms: u64, change: Change, now_ms: u64) -> Due {
        self.taken += 1;
        let due = Due {
            at_ms: now_ms.saturating_add(ms),
            number: self.taken,
        };
        self.ends.insert(due, change);
        due
    }

    /// The answer comes, or will not, or the request ends: gives back what was taken over, unless its
    /// time has come.
    pub fn give_back(&mut self, due: Due) -> Option<Booking> {
        self.ends.remove(&due).map(Change::booking)
    }

    /// Ends the first booking whose time has come.
    pub fn overdue(&mut self, now_ms: u64) -> Option<Change> {
        let first = self.ends.first_entry()?;
        (first.key().at_ms <= now_ms).then(|| first.remove())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learns_the_pace_from_answers_to_prompts_that_took_some_computing() {
        let mut prefill = Prefill::default();
        assert_eq!(prefill.pace(), 5.0);
        for _ in 0..200 {
            prefill.learn(2800, 200);
            prefill.learn(100, 30);
        }
        assert!((prefill.pace() - 14.0).abs() < 0.1, "{}", prefill.pace());
    }

    #[test]
    fn no_answer_makes_a_pace_that_no_host_has() {
        for (tokens, ms) in [(u32::MAX, 0), (512, u64::MAX)] {
            let mut prefill = Prefill::default();
            for _ in 0..1000 {
                prefill.learn(tokens, ms);
            }
            assert!(PACE.contains(&prefill.pace()), "{tokens} in {ms} ms");
        }
    }
}
