//! Requests that are held for their body, and when to let them go unread.
//!
//! Guarantee: a request whose body does not begin is held no longer than its bound, and one whose
//! body stood still that long goes on with the next bytes. Not here: how a request is let go
//! (filter/).
//!
//! Without `allow_on_headers_stop_iteration` Envoy takes "pause" in the header callback for "stop
//! everything": the body callback never comes and the request would hang (ENVOY.md 10). Nothing
//! tells the filter whether the flag is set, but two things differ: with the flag, some body
//! callback comes before long; without it, the held-back body follows at once when a request is
//! let go. A slow client's may do so once by chance, so several in a row have to.
//!
//! A body that has begun is let go only in a body callback, never from outside: Envoy 1.40 then
//! sends the bytes it has buffered twice, if the route may retry.

use std::collections::BTreeMap;

/// How long a body may keep a request. All in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Until the first body callback, as long as none has ever come to this worker.
    pub first_body_ms: u64,
    /// Between two body callbacks.
    pub body_idle_ms: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            first_body_ms: 500,
            body_idle_ms: 30_000,
        }
    }
}

/// A body that arrives this soon after its request was let go had been held back by the proxy. It
/// is handed over in the same call; a slow client's comes when it comes.
const HELD_BACK_MS: u64 = 20;
/// So many requests in a row whose body followed at once, and none whose body came otherwise, show
/// that the flag is not set. One client in 20 ms of a half second's wait is 4 %; three are 0.006 %.
const HELD_BACK_MIN: u32 = 3;
/// After the flag was found unset, one request in this time is held again: it may have been set.
const PROBE_MS: u64 = 60_000;
/// Requests remembered after being let go.
const SUSPECTS_MAX: usize = 64;

/// What a body callback means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The request is held.
    Held,
    /// The request is held, but its body stood still for too long: place it by what there is.
    Late,
    /// The request was let go before.
    LetGo,
    /// It was, and its body had been held back: `allow_on_headers_stop_iteration` is not set. Said
    /// once until it is found to be set.
    FlagUnset,
}

/// A request that is held.
#[derive(Clone, Copy, Debug)]
struct Held {
    last_ms: u64,
    begun: bool,
    pool: Option<usize>,
}

/// A request that was held for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overdue {
    /// The proxy's number for it.
    pub request: u32,
    /// The place of its pool, if that was known before its body.
    pub pool: Option<usize>,
}

/// One worker's held requests, by the proxy's number for them.
#[derive(Debug, Default)]
pub struct Watchdog {
    held: BTreeMap<u32, Held>,
    suspects: BTreeMap<u32, u64>,
    flag_seen: bool,
    /// Requests in a row whose body had been held back, as far as that tells.
    held_back: u32,
    probe_at: Option<u64>,
}

impl Watchdog {
    /// Whether a request may be held now.
    pub fn may_hold(&mut self, now_ms: u64) -> bool {
        match self.probe_at {
            // A probe further away than one is of a time before the clock was set back.
            Some(at) if now_ms < at && at - now_ms <= PROBE_MS => false,
            Some(_) => {
                self.probe_at = Some(now_ms + PROBE_MS);
                true
            }
            None => true,
        }
    }

    /// A request is held from now on. `pool` is the place of its pool, if that is known.
    pub fn hold(&mut self, request: u32, pool: Option<usize>, now_ms: u64) {
        let held = Held {
            last_ms: now_ms,
            begun: false,
            pool,
        };
        self.held.insert(request, held);
    }

    /// A body callback came.
    pub fn body(&mut self, request: u32, now_ms: u64, bounds: Bounds) -> Verdict {
        if let Some(held) = self.held.get_mut(&request) {
            let idle_ms = now_ms.saturating_sub(held.last_ms);
            let late = held.begun && idle_ms >= bounds.body_idle_ms;
            held.last_ms = now_ms;
            held.begun = true;
            self.flag_seen = true;
            self.held_back = 0;
            self.probe_at = None;
            return if late { Verdict::Late } else { Verdict::Held };
        }
        let Some(let_go_ms) = self.suspects.remove(&request) else {
            return Verdict::LetGo;
        };
        if self.flag_seen || now_ms.abs_diff(let_go_ms) > HELD_BACK_MS {
            self.held_back = 0;
            return Verdict::LetGo;
        }
        self.held_back = self.held_back.saturating_add(1);
        if self.held_back < HELD_BACK_MIN {
            return Verdict::LetGo;
        }
        let known = self.probe_at.is_some_and(|at| now_ms < at);
        self.probe_at = Some(now_ms + PROBE_MS);
        if known {
            Verdict::LetGo
        } else {
            Verdict::FlagUnset
        }
    }

    /// The request is no longer held, or has ended.
    pub fn done(&mut self, request: u32) {
        self.held.remove(&request);
        self.suspects.remove(&request);
    }

    /// The requests whose body did not begin in time; they are no longer held.
    pub fn overdue(&mut self, now_ms: u64, bounds: Bounds) -> Vec<Overdue> {
        let bound = if self.flag_seen {
            bounds.body_idle_ms
        } else {
            bounds.first_body_ms
        };
        let mut over = Vec::new();
        for (request, held) in &mut self.held {
            // With the clock set back, the time begins anew: nobody waits until it is there again.
            held.last_ms = held.last_ms.min(now_ms);
            if !held.begun && now_ms - held.last_ms >= bound {
                over.push(Overdue {
                    request: *request,
                    pool: held.pool,
                });
            }
        }
        for Overdue { request, .. } in &over {
            self.held.remove(request);
            if self.suspects.len() < SUSPECTS_MAX {
                self.suspects.insert(*request, now_ms);
            }
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds {
        first_body_ms: 500,
        body_idle_ms: 30_000,
    };

    fn overdue(watchdog: &mut Watchdog, now_ms: u64) -> Vec<u32> {
        let over = watchdog.overdue(now_ms, BOUNDS).into_iter();
        over.map(|over| over.request).collect()
    }

    #[test]
    fn lets_a_request_go_whose_body_never_comes() {
        let mut watchdog = Watchdog::default();
        watchdog.hold(7, None, 1000);
        assert!(overdue(&mut watchdog, 1499).is_empty());
        assert_eq!(overdue(&mut watchdog, 1500), [7]);
        assert!(overdue(&mut watchdog, 9999).is_empty());
    }

    #[test]
    fn a_request_that_is_let_go_is_told_with_the_pool_that_was_known_of_it() {
        let mut watchdog = Watchdog::default();
        watchdog.hold(7, Some(1), 1000);
        watchdog.hold(8, None, 1000);
        let over = [(7, Some(1)), (8, None)].map(|(request, pool)| Overdue { request, pool });
        assert_eq!(watchdog.overdue(1500, BOUNDS), over);
    }

    #[test]
    fn a_clock_that_is_set_back_lets_nobody_wait_and_nobody_go_at_once() {
        let mut watchdog = Watchdog::default();
        watchdog.hold(7, None, 1_000_000);
        assert!(overdue(&mut watchdog, 1000).is_empty());
        assert!(overdue(&mut watchdog, 1499).is_empty());
        assert_eq!(overdue(&mut watchdog, 1500), [7]);

        let found = held_back(&mut watchdog, &[5, 6, 8], 1_000_000);
        assert_eq!(found, Verdict::FlagUnset);
        assert!(!watchdog.may_hold(1_000_002));
        // The next probe, and the one after it.
        assert!(watchdog.may_hold(2000));
        assert!(!watchdog.may_hold(61_999));
        assert!(watchdog.may_hold(62_000));
    }

    /// Requests whose bodies follow as soon as they are let go, at this time; what the last means.
    fn held_back(watchdog: &mut Watchdog, requests: &[u32], at_ms: u64) -> Verdict {
        let hold = |request: &u32| watchdog.hold(*request, None, at_ms - 500);
        requests.iter().for_each(hold);
        assert_eq!(overdue(watchdog, at_ms), requests);
        let verdicts = requests
            .iter()
            .map(|&n| watchdog.body(n, at_ms + 1, BOUNDS));
        verdicts.last().unwrap()
    }

    #[test]
    fn stops_holding_when_held_back_bodies_follow_at_once() {
        let mut watchdog = Watchdog::default();
        assert_eq!(held_back(&mut watchdog, &[5], 500), Verdict::LetGo);
        assert_eq!(held_back(&mut watchdog, &[6], 1000), Verdict::LetGo);
        assert!(watchdog.may_hold(1002));
        assert_eq!(held_back(&mut watchdog, &[7], 1500), Verdict::FlagUnset);
        assert!(!watchdog.may_hold(1502));
        // One probe a minute; if its body comes by itself, all is well again.
        assert!(watchdog.may_hold(61_501));
        assert!(!watchdog.may_hold(61_502));
        watchdog.hold(8, None, 61_501);
        assert_eq!(watchdog.body(8, 61_510, BOUNDS), Verdict::Held);
        assert!(watchdog.may_hold(61_511));
    }

    #[test]
    fn a_slow_first_client_is_not_taken_for_an_unset_flag() {
        let mut watchdog = Watchdog::default();
        watchdog.hold(7, None, 1000);
        overdue(&mut watchdog, 1500);
        assert_eq!(watchdog.body(7, 1800, BOUNDS), Verdict::LetGo);
        assert!(watchdog.may_hold(1801));
    }

    #[test]
    fn clients_whose_bodies_begin_just_then_are_not_taken_for_an_unset_flag() {
        let mut watchdog = Watchdog::default();
        for round in 1..20 {
            let at_ms = round * 10_000;
            // Two by chance; the third is as slow, and comes when it comes.
            assert_eq!(held_back(&mut watchdog, &[1, 2], at_ms), Verdict::LetGo);
            watchdog.hold(3, None, at_ms + 10);
            assert_eq!(overdue(&mut watchdog, at_ms + 510), [3]);
            assert_eq!(watchdog.body(3, at_ms + 600, BOUNDS), Verdict::LetGo);
            assert!(watchdog.may_hold(at_ms + 601));
        }
    }

    #[test]
    fn says_once_that_bodies_are_held_back() {
        let mut watchdog = Watchdog::default();
        assert_eq!(
            held_back(&mut watchdog, &[5, 6, 7], 1500),
            Verdict::FlagUnset
        );
        assert_eq!(held_back(&mut watchdog, &[8], 1500), Verdict::LetGo);
        assert!(watchdog.may_hold(61_501));
        assert_eq!(held_back(&mut watchdog, &[9], 62_001), Verdict::LetGo);
        assert!(!watchdog.may_hold(62_003));
    }

    #[test]
    fn a_body_that_stood_still_goes_on_with_its_next_bytes_and_not_before() {
        let mut watchdog = Watchdog::default();
        watchdog.hold(2, None, 1000);
        assert_eq!(watchdog.body(2, 1010, BOUNDS), Verdict::Held);
        assert_eq!(watchdog.body(2, 31_009, BOUNDS), Verdict::Held);
        assert!(overdue(&mut watchdog, 99_000).is_empty());
        assert_eq!(watchdog.body(2, 99_000, BOUNDS), Verdict::Late);
    }

    #[test]
    fn once_a_body_came_a_slow_client_has_its_full_time_to_begin() {
        let mut watchdog = Watchdog::default();
        watchdog.hold(1, None, 0);
        watchdog.body(1, 10, BOUNDS);
        watchdog.done(1);
        watchdog.hold(2, None, 1000);
        assert!(overdue(&mut watchdog, 30_999).is_empty());
        assert_eq!(overdue(&mut watchdog, 31_000), [2]);
        assert_eq!(watchdog.body(2, 31_001, BOUNDS), Verdict::LetGo);
    }
}
