//! What a soak found.
//!
//! Guarantee: every request is in exactly one count. Not here: how requests end (ending.rs).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::ending::{Ending, Fate};

/// A crash also meets requests that were sent over a connection that was just then going away.
const CRASH_REACH: Duration = Duration::from_millis(100);
/// A panic's VM is built again with the next request, after a back-off of at least a second; a
/// second attempt waits longer.
const PANIC_REACH: Duration = Duration::from_millis(3000);
/// What a panic at the end of the run left has to stand for 1.5 s, and is taken back when no VM has
/// claimed it for 5 s more. One poll of the filter, its answer and the next writing of the gauges take
/// 0.8 s; the rest is for a busy machine.
const EVEN_WITHIN: Duration = Duration::from_millis(9500);
/// A crash takes all that is in flight on one engine with it, so two runs differ by some engines'.
const CRASH_LUCK: u64 = 30;
/// Odd ends that are told in full.
const EXAMPLES_MAX: usize = 10;

/// When engines crashed and VMs panicked.
#[derive(Default)]
pub(super) struct Clock {
    crashes: Mutex<Vec<Instant>>,
    panics: Mutex<Vec<Instant>>,
}

impl Clock {
    pub fn crashed(&self) {
        lock(&self.crashes).push(Instant::now());
    }

    pub fn panicked(&self) {
        lock(&self.panics).push(Instant::now());
    }

    pub fn crashes(&self) -> usize {
        lock(&self.crashes).len()
    }

    pub fn panics(&self) -> usize {
        lock(&self.panics).len()
    }

    /// What explains that a request of this time did not end as meant.
    fn excuse(&self, started: Instant, ended: Instant) -> Option<Excuse> {
        let met = |at: &Instant, reach| started <= *at + reach && *at <= ended;
        if lock(&self.panics).iter().any(|at| met(at, PANIC_REACH)) {
            return Some(Excuse::Panic);
        }
        let crashed = lock(&self.crashes).iter().any(|at| met(at, CRASH_REACH));
        crashed.then_some(Excuse::Crash)
    }
}

/// What explains an end that was not meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Excuse {
    /// An engine crashed under it.
    Crash,
    /// A VM panicked under it or was being built again.
    Panic,
}

/// How the requests of one ending ended.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Count {
    /// As meant.
    pub meant: u64,
    /// Not so, because an engine crashed.
    pub crash: u64,
    /// Not so, because a VM panicked.
    pub panic: u64,
    /// Not so, for no reason we know.
    pub lost: u64,
}

/// Counts while lanes run.
#[derive(Default)]
pub(super) struct Tally {
    endings: Mutex<BTreeMap<Ending, Count>>,
    odd: Mutex<Vec<String>>,
}

impl Tally {
    pub fn add(&self, ending: Ending, fate: Fate, started: Instant, clock: &Clock) {
        let ended = Instant::now();
        let mut endings = lock(&self.endings);
        let count = endings.entry(ending).or_default();
        let Fate::Odd(what) = fate else {
            count.meant += 1;
            return;
        };
        match clock.excuse(started, ended) {
            Some(Excuse::Crash) => count.crash += 1,
            Some(Excuse::Panic) => count.panic += 1,
            None => {
                count.lost += 1;
                let mut odd = lock(&self.odd);
                if odd.len() < EXAMPLES_MAX {
                    let waited = (ended - started).as_millis();
                    odd.push(format!("{ending:?} after {waited} ms: {what}"));
                }
            }
        }
    }

    pub fn endings(&self) -> BTreeMap<Ending, Count> {
        lock(&self.endings).clone()
    }

    pub fn lost(&self) -> u64 {
        lock(&self.endings).values().map(|count| count.lost).sum()
    }

    pub fn odd(&self) -> Vec<String> {
        lock(&self.odd).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a soak found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What the mix followed from.
    pub seed: u64,
    /// The sources' commit.
    pub commit: String,
    /// Requests sent.
    pub requests: u64,
    /// How long that took.
    pub seconds: f64,
    /// How long after the last request all counters were zero.
    pub even_after_s: f64,
    /// Which were not.
    pub uneven: Option<String>,
    /// Whether the engines were done.
    pub engines_idle: bool,
    /// What Envoy itself still counted.
    pub envoy_active: u64,
    /// Panics injected.
    pub panics: usize,
    /// Engines crashed.
    pub crashes: usize,
    /// VMs that Envoy built again.
    pub vm_reloads: u64,
    /// Requests that the filter took from its counters because Envoy did not know them.
    pub repairs: u64,
    /// Decisions for another host than the first.
    pub diverted: u64,
    /// How requests ended, by what they were meant to do.
    pub endings: BTreeMap<Ending, Count>,
    /// How the same requests ended without the filter, if that was tried.
    pub without_filter: Option<BTreeMap<Ending, Count>>,
    /// Requests whose end nothing explains.
    pub lost: u64,
    /// Some of those.
    pub odd: Vec<String>,
    /// What Envoy complained about, and how often.
    pub envoy_errors: BTreeMap<String, u64>,
}

impl Report {
    /// What crashes cost with the filter and without, if that was tried.
    fn crash_losses(&self) -> Option<(u64, u64)> {
        let without = self.without_filter.as_ref()?.values();
        let with = self.endings.values().map(|count| count.crash).sum();
        // There it does not matter what explains a loss: the filter has no part in any.
        Some((with, without.map(|count| count.crash + count.lost).sum()))
    }

    /// What must not be; empty if all is well.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.lost > 0 {
            faults.push(format!(
                "{} requests were lost: {}",
                self.lost,
                self.odd.join(" | ")
            ));
        }
        if let Some(uneven) = &self.uneven {
            faults.push(format!("counters did not come out even: {uneven}"));
        }
        if self.even_after_s > EVEN_WITHIN.as_secs_f64() {
            faults.push(format!(
                "counters took {:.1} s to come out even",
                self.even_after_s
            ));
        }
        if self.repairs == 0 && self.panics > 0 {
            faults.push("panics left nothing to repair".to_owned());
        }
        if let Some((with, without)) = self.crash_losses()
            && with > without + without / 2 + CRASH_LUCK
        {
            faults.push(format!(
                "crashes cost {with} requests, {without} without the filter"
            ));
        }
        if !self.engines_idle {
            faults.push("engines still have requests".to_owned());
        }
        if self.envoy_active > 0 {
            faults.push(format!("Envoy still counts {} requests", self.envoy_active));
        }
        if (self.vm_reloads > 0) != (self.panics > 0) {
            faults.push(format!(
                "{} panics, {} reloads",
                self.panics, self.vm_reloads
            ));
        }
        faults
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = self.requests as f64 / self.seconds;
        writeln!(
            f,
            "{} requests in {:.0} s ({rate:.0}/s), seed {}, commit {}",
            self.requests, self.seconds, self.seed, self.commit
        )?;
        write!(
            f,
            "{:16} {:>9} {:>9} {:>9} {:>9}",
            "ending", "as meant", "crash", "panic", "lost"
        )?;
        let compared = self.without_filter.is_some();
        writeln!(
            f,
            "{}",
            if compared {
                "  crash without filter"
            } else {
                ""
            }
        )?;
        for (ending, count) in &self.endings {
            let name = format!("{ending:?}");
            let Count {
                meant,
                crash,
                panic,
                lost,
            } = count;
            write!(f, "{name:16} {meant:>9} {crash:>9} {panic:>9} {lost:>9}")?;
            match &self.without_filter {
                None => writeln!(f)?,
                Some(endings) => {
                    let without = endings
                        .get(ending)
                        .map_or(0, |count| count.crash + count.lost);
                    writeln!(f, "  {without:>20}")?;
                }
            }
        }
        writeln!(
            f,
            "{} engine crashes, {} VM panics ({} reloads), {} diverted, {} repaired",
            self.crashes, self.panics, self.vm_reloads, self.diverted, self.repairs
        )?;
        for (error, count) in &self.envoy_errors {
            writeln!(f, "Envoy, {count} times: {error}")?;
        }
        match &self.uneven {
            None => writeln!(
                f,
                "all counters zero {:.1} s after the last request",
                self.even_after_s
            ),
            Some(uneven) => writeln!(f, "counters are NOT zero: {uneven}"),
        }?;
        match self.faults().as_slice() {
            [] => writeln!(
                f,
                "PASSED: no request lost that the trouble does not explain, no count left over"
            ),
            faults => writeln!(f, "FAILED: {}", faults.join("; ")),
        }
    }
}
