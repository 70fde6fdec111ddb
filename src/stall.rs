//! Engines that take requests and answer none, though their health check is answered well.
//!
//! Guarantee: a host is only held against the rest of its pool: while the others answer no more
//! than it does, it is not stalled, so a pool that is slow as a whole loses nobody. A request whose
//! body has not ended is not pending (request.rs), so a client's slow upload is no silence. Not here: where
//! its prompts go instead (a stalled host is not usable, so to the next in their order).
//!
//! Its load alone does not empty such a host: what it holds in its cache is worth thousands of
//! tokens, and a prompt that is known there adds some hundred to its load, until the client leaves.

use std::collections::BTreeMap;

use crate::hosts::{HostReport, State};
use crate::load::{Loads, Slot};
use crate::pool::{Host, View};

/// A host that is waited for is silent for this long before it is stalled. An engine that computes
/// prompts gives a first byte every second; this leaves room for a long one.
const SILENT_MS: u64 = 5000;
/// The same where no prompt waits, but answers that come in one piece: 60 s is the time after which
/// many clients and proxies give up on one.
const SILENT_WHOLE_MS: u64 = 60_000;
/// Tokens that an engine computes in a millisecond at the least, while others of its pool answer:
/// its silence is excused for as long as what is pending on it may take.
const TOKENS_PER_MS: u64 = 4;
/// First bytes that each other host of the pool has given in the mean since it fell silent.
const OTHERS_ANSWERS: u64 = 4;

/// One host since it last answered, or since nothing was waited for.
#[derive(Clone, Copy, Debug)]
struct Silence {
    answers: u32,
    since_ms: u64,
    /// The pool's answers at that time.
    pool_answers: u64,
}

/// Who is silent in one pool. Kept by the VM that polls; a host that was stalled stays so for the
/// next VM, which takes that from the view.
#[derive(Debug, Default)]
pub struct Stalls {
    hosts: BTreeMap<(Slot, u16), Silence>,
    pool_answers: u64,
}

impl Stalls {
    /// Turns the reports of usable hosts that are stalled into such. A stalled host is usable again
    /// when it answers, or when nobody waits for it any more: the next prompt then tries it.
    pub fn mark(&mut self, loads: &Loads, view: &View, reports: &mut [HostReport], now_ms: u64) {
        let known = view.hosts.iter().map(|host| (host.address.as_str(), host));
        // Not collected: see Table::view.
        let mut hosts: BTreeMap<&str, &Host> = BTreeMap::new();
        hosts.extend(known);
        self.count_answers(loads, view);
        let usable = reports.iter().filter(|report| report.state.is_usable());
        let others = (usable.count() as u64).saturating_sub(1);
        let mut seen = BTreeMap::new();
        for report in reports.iter_mut().filter(|own| own.state.is_usable()) {
            let Some(host) = hosts.get(report.address.as_str()) else {
                continue;
            };
            let load = loads.of(host.seat);
            let fresh = Silence {
                answers: load.answers,
                since_ms: now_ms,
                pool_answers: self.pool_answers,
            };
            let name = (host.seat.slot, host.seat.generation);
            let was_stalled = host.state == Some(State::Stalled);
            let before = self.hosts.get(&name);
            let has_answered = before.is_some_and(|before| before.answers != load.answers);
            let waits = load.pending > 0;
            let silence = match before {
                _ if !waits || has_answered => fresh,
                // With the clock set back, the silence begins anew.
                Some(before) => Silence {
                    since_ms: before.since_ms.min(now_ms),
                    ..*before
                },
                None => fresh,
            };
            seen.insert(name, silence);
            // Of a request whose prompt should be computed one token is left pending.
            let excused_ms = match load.pending <= load.in_flight {
                true => SILENT_WHOLE_MS,
                false => SILENT_MS + u64::from(load.pending) / TOKENS_PER_MS,
            };
            let is_silent = now_ms.saturating_sub(silence.since_ms) >= excused_ms;
            let answers = self.pool_answers.saturating_sub(silence.pool_answers);
            let others_answer = others > 0 && answers >= OTHERS_ANSWERS * others;
            // Once it is found so, only an answer or an end of all waiting speaks for it.
            let stays_stalled = was_stalled && !has_answered;
            if waits && (stays_stalled || is_silent && others_answer) {
                report.state = State::Stalled;
            }
        }
        self.hosts = seen;
    }

    /// Adds what the pool's hosts have answered since the last time.
    fn count_answers(&mut self, loads: &Loads, view: &View) {
        for seat in view.hosts.iter().map(|host| host.seat) {
            if let Some(before) = self.hosts.get(&(seat.slot, seat.generation)) {
                let answers = loads.of(seat).answers.wrapping_sub(before.answers);
                self.pool_answers += u64::from(answers);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::fleet::{self, Fleet};
    use crate::index::HostRef;
    use crate::load::{self, Booking, Change, Ledger, Seat};
    use crate::placement::HostId;
    use crate::prefix::Key;
    use crate::request::Request;
    use crate::route::{self, Bounds, Candidate};
    use crate::store::MemoryStore;

    const HOSTS: [&str; 3] = ["a:1", "b:1", "c:1"];

    /// A pool that is polled.
    struct Pool {
        store: MemoryStore,
        ledger: Ledger,
        stalls: Stalls,
        now_ms: u64,
    }

    impl Pool {
        fn new() -> Self {
            let mut pool = Self {
                store: MemoryStore::new(),
                ledger: Ledger::default(),
                stalls: Stalls::default(),
                now_ms: 1_000_000,
            };
            pool.poll(0);
            pool
        }

        fn view(&self) -> View {
            fleet::view(&self.store, "llm").unwrap_or_default()
        }

        fn seat(&self, host: &str) -> Seat {
            self.view().seat_of(host).unwrap()
        }

        fn book(&self, host: &str, pending: u32) -> Booking {
            let seat = self.seat(host);
            let booking = Booking { seat, pending };
            self.ledger.apply(&self.store, Change::Book(booking));
            booking
        }

        fn answer(&self, host: &str) {
            let booking = self.book(host, 10);
            self.ledger.apply(&self.store, Change::Settle(booking));
            let release = Booking {
                pending: 0,
                ..booking
            };
            self.ledger.apply(&self.store, Change::Release(release));
        }

        /// Polls after so much time; the stalled hosts.
        fn poll(&mut self, after_ms: u64) -> Vec<String> {
            self.now_ms += after_ms;
            let mut reports: Vec<HostReport> =
                HOSTS.iter().map(|host| HostReport::usable(host)).collect();
            let loads = load::read(&self.store).unwrap();
            self.stalls
                .mark(&loads, &self.view(), &mut reports, self.now_ms);
            let fleet = Fleet::default();
            fleet.apply(&self.store, &self.ledger, "llm", &reports, self.now_ms);
            let stalled = reports.iter().filter(|own| own.state == State::Stalled);
            stalled.map(|own| own.address.clone()).collect()
        }

        /// The other two answer four requests each over the next `ms`, polled every half second.
        fn others_answer(&mut self, ms: u64) -> Vec<String> {
            let mut stalled = Vec::new();
            for step in 0..ms / 500 {
                if step < 4 {
                    self.answer("b:1");
                    self.answer("c:1");
                }
                stalled = self.poll(500);
            }
            stalled
        }
    }

    #[test]
    fn a_host_that_is_silent_while_the_others_answer_is_stalled_until_it_answers() {
        let mut pool = Pool::new();
        let booking = pool.book("a:1", 100);
        pool.poll(0);
        assert!(pool.others_answer(4500).is_empty(), "too early");
        assert_eq!(pool.others_answer(1000), ["a:1"]);
        assert_eq!(pool.others_answer(60_000), ["a:1"]);
        pool.ledger.apply(&pool.store, Change::Settle(booking));
        assert!(pool.poll(500).is_empty());
    }

    #[test]
    fn a_host_that_nobody_waits_for_any_more_is_tried_again() {
        let mut pool = Pool::new();
        let booking = pool.book("a:1", 100);
        pool.poll(0);
        assert_eq!(pool.others_answer(6000), ["a:1"]);
        pool.ledger.apply(&pool.store, Change::Release(booking));
        assert!(pool.poll(500).is_empty());
        pool.book("a:1", 100);
        assert!(pool.others_answer(4500).is_empty());
        assert_eq!(pool.others_answer(1000), ["a:1"]);
    }

    #[test]
    fn a_pool_that_is_slow_as_a_whole_loses_nobody() {
        let mut pool = Pool::new();
        for host in HOSTS {
            pool.book(host, 100);
        }
        for _ in 0..3 {
            pool.answer("b:1");
            pool.answer("c:1");
            assert!(pool.poll(20_000).is_empty());
        }
    }

    #[test]
    fn a_long_prompt_excuses_a_long_silence() {
        let mut pool = Pool::new();
        pool.book("a:1", 100_000);
        pool.poll(0);
        assert!(pool.others_answer(29_000).is_empty());
        assert_eq!(pool.others_answer(2000), ["a:1"]);
    }

    #[test]
    fn a_failure_is_no_answer_and_an_idle_host_is_not_silent() {
        let mut pool = Pool::new();
        pool.poll(0);
        assert!(pool.others_answer(20_000).is_empty(), "it was idle");
        pool.book("a:1", 100);
        for _ in 0..12 {
            let failed = pool.book("a:1", 100);
            pool.ledger.apply(&pool.store, Change::Fail(failed));
            pool.answer("b:1");
            pool.answer("c:1");
            pool.poll(500);
        }
        assert_eq!(pool.poll(0), ["a:1"]);
    }

    #[test]
    fn a_host_at_work_on_a_long_answer_in_one_piece_is_not_taken_for_one_that_hangs() {
        let mut pool = Pool::new();
        let booking = pool.book("a:1", 100);
        let computed = Booking {
            pending: 99,
            ..booking
        };
        pool.ledger.apply(&pool.store, Change::Computed(computed));
        pool.poll(0);
        assert!(pool.others_answer(59_000).is_empty());
        assert_eq!(pool.others_answer(2000), ["a:1"], "for so long, it is one");
    }

    #[test]
    fn a_request_is_waited_for_from_the_end_of_its_body_on() {
        let mut pool = Pool::new();
        let host = Candidate {
            seat: pool.seat("a:1"),
            id: HostId::of("a:1"),
            known_as: HostRef::new(pool.seat("a:1"), 0),
            weight: 1,
            far: false,
            joining: false,
        };
        let mut request = Request::default();
        request.still_uploads();
        let placed = request.place(&pool.store, &pool.ledger, true, |loads| {
            let bounds = Bounds {
                limit: None,
                panic_rule: false,
            };
            let placement = route::decide(Key(1), &[host], loads, bounds);
            Ok::<_, Infallible>((placement, 100, ()))
        });
        assert!(placed.is_ok());
        pool.poll(0);
        assert!(pool.others_answer(120_000).is_empty(), "it has not ended");
        let changes = request.uploaded();
        pool.ledger.transact(&pool.store, |_| ((), changes));
        pool.poll(0);
        assert!(pool.others_answer(4500).is_empty(), "too early");
        assert_eq!(pool.others_answer(1000), ["a:1"]);
    }

    #[test]
    fn a_clock_that_is_set_back_stalls_nobody_at_once_and_is_not_waited_for() {
        let mut pool = Pool::new();
        pool.book("a:1", 100);
        pool.poll(0);
        pool.now_ms = 1000;
        assert!(pool.others_answer(4500).is_empty(), "too early");
        assert_eq!(pool.others_answer(1500), ["a:1"]);
        pool.now_ms = 10;
        assert_eq!(
            pool.poll(0),
            ["a:1"],
            "it is stalled whatever the clock says"
        );
    }

    #[test]
    fn a_vm_that_takes_over_keeps_what_was_found() {
        let mut pool = Pool::new();
        let booking = pool.book("a:1", 100);
        pool.poll(0);
        assert_eq!(pool.others_answer(6000), ["a:1"]);
        pool.stalls = Stalls::default();
        assert_eq!(pool.poll(500), ["a:1"]);
        assert_eq!(pool.poll(500), ["a:1"]);
        pool.ledger.apply(&pool.store, Change::Settle(booking));
        assert!(pool.poll(500).is_empty());
    }
}
