//! What is done every so often, by a clock that may be set meanwhile.
//!
//! Guarantee: nothing is done twice within its time while the clock goes on as it should; when the
//! clock is set, in whichever direction, the next turn comes within twice its time, not when the
//! clock is there again. Not here: the clock, and what is done.

use std::cell::Cell;

/// When something was done last.
#[derive(Clone, Debug, Default)]
pub struct Turns {
    last_ms: Cell<u64>,
}

impl Turns {
    /// It counts as done at this time.
    #[must_use]
    pub fn since(now_ms: u64) -> Self {
        Self {
            last_ms: Cell::new(now_ms),
        }
    }

    /// Whether it is time; if it is, it counts as done.
    pub fn take(&self, now_ms: u64, every_ms: u64) -> bool {
        let is_due = self.age_ms(now_ms) >= every_ms;
        if is_due {
            self.last_ms.set(now_ms);
        }
        is_due
    }

    fn age_ms(&self, now_ms: u64) -> u64 {
        // Not `saturating_sub`: a clock that is set back must not stop it until it is there again.
        now_ms.abs_diff(self.last_ms.get())
    }
}

/// A question that is asked every so often, one at a time.
#[derive(Clone, Debug, Default)]
pub struct Question {
    turns: Turns,
    /// The number of the call that is not answered yet.
    open: Cell<Option<u32>>,
}

impl Question {
    /// Whether to ask now: it is time, and the last one is answered or will not be any more, since
    /// no answer takes so long as `lost_ms`.
    #[must_use]
    pub fn is_due(&self, now_ms: u64, every_ms: u64, lost_ms: u64) -> bool {
        let age_ms = self.turns.age_ms(now_ms);
        age_ms >= every_ms && (self.open.get().is_none() || age_ms > lost_ms)
    }

    /// It was asked, by this call if that could be made.
    pub fn asked(&self, call: Option<u32>, now_ms: u64) {
        self.turns.last_ms.set(now_ms);
        self.open.set(call);
    }

    /// An answer to this call came: whether it is the one that is waited for, once.
    pub fn answered(&self, call: u32) -> bool {
        let is_open = self.open.get() == Some(call);
        if is_open {
            self.open.set(None);
        }
        is_open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_comes_when_its_time_is_over() {
        let turns = Turns::default();
        let taken = [1000, 1499, 1500, 1501, 3000].map(|now_ms| turns.take(now_ms, 500));
        assert_eq!(taken, [true, false, true, false, true]);
        let turns = Turns::since(1000);
        assert_eq!(
            [1499, 1500].map(|now_ms| turns.take(now_ms, 500)),
            [false, true]
        );
    }

    #[test]
    fn a_clock_that_is_set_delays_no_turn_by_more_than_its_time() {
        // set to, of 1,000,000 | milliseconds from then until the next turn
        for (set_to_ms, expected) in [
            (10, 0),
            (999_500, 0),
            (999_501, 999),
            (999_900, 600),
            (1_000_100, 400),
            (1_000_500, 0),
            (9_000_000, 0),
        ] {
            let turns = Turns::since(1_000_000);
            let mut waited_ms = 0;
            while !turns.take(set_to_ms + waited_ms, 500) {
                waited_ms += 1;
            }
            assert_eq!(waited_ms, expected, "set to {set_to_ms}");
        }
    }

    #[test]
    fn a_question_is_asked_again_when_it_is_answered_and_time_or_its_answer_is_lost() {
        let question = Question::default();
        let is_due = |now_ms| question.is_due(now_ms, 500, 4000);
        assert!(is_due(1000));
        question.asked(Some(1), 1000);
        assert!(!is_due(1500));
        assert!(question.answered(1));
        assert!(!question.answered(1), "only once");
        assert_eq!([1499, 1500].map(is_due), [false, true]);
        question.asked(Some(2), 1500);
        assert_eq!([5500, 5501].map(is_due), [false, true]);
        question.asked(Some(3), 5501);
        assert!(!question.answered(2), "it was given up");
        assert!(question.answered(3));
        // One that could not be asked is not waited for.
        question.asked(None, 6001);
        assert_eq!([6500, 6501].map(is_due), [false, true]);
    }

    #[test]
    fn with_the_clock_set_back_hosts_are_polled_at_once_and_no_open_question_is_waited_for() {
        let question = Question::default();
        question.asked(Some(1), 1_000_000);
        assert!(question.is_due(10, 500, 4000));
        question.asked(Some(2), 10);
        assert!(!question.answered(1));
        assert!(question.answered(2));
        assert_eq!(
            [509, 510].map(|now_ms| question.is_due(now_ms, 500, 4000)),
            [false, true]
        );
    }
}
