//! Tells on stderr what set-up does, and how long each step took.
//!
//! Guarantee: long work is announced before it starts. Not here: the work.

use crate::print::note;
use std::time::Instant;

/// The running account of one set-up.
pub(super) struct Steps {
    started: Instant,
    /// Whether steps that only find something are told as well.
    all: bool,
}

impl Steps {
    /// Tells every step: for a person who asked for set-up.
    pub(super) fn all() -> Self {
        Self {
            started: Instant::now(),
            all: true,
        }
    }

    /// Tells only work that takes time: for tests and commands that need things to be ready.
    pub(super) fn working_only() -> Self {
        Self {
            started: Instant::now(),
            all: false,
        }
    }

    /// Something was found as it should be.
    pub(super) fn found(&self, what: &str, since: Instant) {
        if self.all {
            note!("setup: {what} ({:.2} s)", since.elapsed().as_secs_f64());
        }
    }

    /// Work with a name: announced before, timed after. An error is the caller's to tell.
    pub(super) fn work<T, E>(
        &self,
        what: &str,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        note!("setup: {what} …");
        let started = Instant::now();
        let result = work();
        let verdict = if result.is_ok() { "done" } else { "failed" };
        note!(
            "setup: {what}: {verdict} ({:.1} s)",
            started.elapsed().as_secs_f64()
        );
        result
    }

    /// A remark.
    pub(super) fn say(&self, what: &str) {
        note!("setup: {what}");
    }

    /// The end of it all.
    pub(super) fn total(&self) {
        if self.all {
            note!(
                "setup: ready after {:.1} s",
                self.started.elapsed().as_secs_f64()
            );
        }
    }
}
