//! By how much our count of a host's requests is above the proxy's own, and since when: what gives
//! reason to ask the VMs.
//!
//! Guarantee: what is said to stand was there at each look of the last [`STANDS_MS`], and at
//! [`LOOKS_MIN`] of them; the number kept is bounded by the looks in that time. Not here: the two
//! counts (load.rs, hosts.rs), taking away (fleet.rs).

/// A request is in no count of the proxy's from our decision until it has a connection. With HTTP/1
/// each of a burst waits for one of its own, at most for the cluster's `connect_timeout`, which is 1 s
/// in the shipped files: by then it has one, has failed or is tried elsewhere. The rest is for polls
/// and workers that are late. Where clusters have a longer one, it only matters to hosts that let
/// connections wait for so long; the time is not longer, because the longer it is, the more often
/// a busy host's counts, which are not taken at the same moment, hide what was left there.
pub const STANDS_MS: u64 = 1500;
/// Where polls are rarer than that, a single one says nothing: it may have met a burst.
pub const LOOKS_MIN: u32 = 3;

/// So much has been there since then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Level {
    excess: u32,
    since_ms: u64,
    looks: u32,
}

/// One host's excess over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Excess {
    /// Higher ones have been there for a shorter time.
    levels: Vec<Level>,
}

impl Excess {
    /// Takes in what it is now; how much of it stands.
    pub fn see(&mut self, excess: u32, now_ms: u64) -> u32 {
        for level in &mut self.levels {
            // With the clock set back, the time begins anew.
            level.since_ms = level.since_ms.min(now_ms);
            level.looks = level.looks.saturating_add(1);
        }
        let mut newest = Level {
            excess,
            since_ms: now_ms,
            looks: 1,
        };
        // As much as now was there already when there was more.
        while let Some(above) = self.levels.pop_if(|level| level.excess >= excess) {
            newest = Level { excess, ..above };
        }
        if excess > 0 {
            self.levels.push(newest);
        }
        let stands = |level: &Level| {
            now_ms.saturating_sub(level.since_ms) >= STANDS_MS && level.looks >= LOOKS_MIN
        };
        let Some(highest) = self.levels.iter().rposition(stands) else {
            return 0;
        };
        // Lower ones have no more to say.
        self.levels.drain(..highest);
        self.levels.first().map_or(0, |level| level.excess)
    }

    /// So much of it was taken away.
    pub fn take(&mut self, excess: u32) {
        for level in &mut self.levels {
            level.excess = level.excess.saturating_sub(excess);
        }
        self.levels.retain(|level| level.excess > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    use proptest::prelude::*;

    /// A row: milliseconds since the last look, the excess, what stands.
    #[track_caller]
    fn check(rows: &[(u64, u32, u32)]) {
        let (mut excess, mut now_ms) = (Excess::default(), 1_000_000);
        for (n, (after_ms, seen, expected)) in rows.iter().enumerate() {
            now_ms += after_ms;
            assert_eq!(excess.see(*seen, now_ms), *expected, "look {n}");
        }
    }

    #[test]
    fn only_what_was_there_at_every_look_for_the_whole_time_stands() {
        // since the last look | excess | stands
        check(&[(0, 7, 0), (750, 7, 0), (749, 7, 0), (1, 7, 7)]);
        check(&[(0, 7, 0), (750, 3, 0), (750, 9, 3)]);
        check(&[(0, 7, 0), (750, 0, 0), (750, 9, 0), (1499, 9, 0), (1, 9, 9)]);
        // Rare looks have to be three.
        check(&[(0, 7, 0), (60_000, 7, 0), (60_000, 7, 7)]);
        // What is new counts from when it came, whatever stood before.
        check(&[
            (0, 1, 0),
            (1000, 5, 0),
            (500, 5, 1),
            (500, 5, 1),
            (500, 5, 5),
        ]);
    }

    #[test]
    fn a_burst_that_waits_for_connections_at_many_polls_stands_at_none() {
        let mut rows = vec![(100, 1000, 0); 15];
        rows.extend([(100, 0, 0), (100, 1000, 0)]);
        check(&rows);
    }

    #[test]
    fn what_was_taken_away_is_not_found_again() {
        let mut excess = Excess::default();
        for now_ms in [0, 750] {
            assert_eq!(excess.see(4, now_ms), 0);
        }
        assert_eq!(excess.see(6, 1500), 4);
        excess.take(4);
        assert_eq!(excess.see(2, 2250), 0);
        assert_eq!(excess.see(2, 3000), 2);
    }

    #[test]
    fn a_clock_that_is_set_back_makes_nothing_stand_at_once_and_nothing_wait_for_it() {
        let mut excess = Excess::default();
        for now_ms in [1_000_000, 1_000_100, 1000, 1100, 2499] {
            assert_eq!(excess.see(3, now_ms), 0, "at {now_ms}");
        }
        assert_eq!(excess.see(3, 2500), 3);
    }

    proptest! {
        #[test]
        fn what_stands_is_the_least_of_all_looks_in_the_time(
            looks in proptest::collection::vec((1..700_u64, 0..20_u32), 1..200)
        ) {
            let (mut excess, mut now_ms) = (Excess::default(), 0);
            let mut seen: VecDeque<(u64, u32)> = VecDeque::new();
            for (after_ms, now) in looks {
                now_ms += after_ms;
                seen.push_back((now_ms, now));
                // The looks of the last time, and the one at or before its start.
                while seen.get(1).is_some_and(|(at_ms, _)| now_ms - at_ms >= STANDS_MS) {
                    seen.pop_front();
                }
                let covers = now_ms - seen[0].0 >= STANDS_MS;
                let least = seen.iter().map(|(_, excess)| *excess).min().unwrap();
                let expected = if covers && seen.len() >= 3 { least } else { 0 };
                prop_assert_eq!(excess.see(now, now_ms), expected);
                prop_assert!(excess.levels.len() <= seen.len() + 1);
            }
        }
    }
}
