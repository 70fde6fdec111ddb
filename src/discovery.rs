//! A pool's hosts learned from who answers, where no source lists them.
//!
//! Guarantee: a host that answers is known to all workers at once, one that is gone is dropped
//! within [`LOST_MS`] of requests to it, and some requests are always left to the proxy's own
//! policy, or a host that joins would never be seen. Not here: the table of hosts (fleet.rs).
//!
//! What it costs: until about [`ANSWERS_PER_HOST`] answers a host have come, and for one request in
//! [`EXPLORE_EVERY`] from then on, no prefix decides. Health, weight and zone are not known.

use std::cell::Cell;

use crate::fleet::{self, Summary};
use crate::hosts::{self, State};
use crate::load::Ledger;
use crate::pool::{Host, View};
use crate::store::{self, Store};

/// A host is dropped by the first request that misses it so long after another one did, if it
/// answered none in between: longer than the restart of an engine's listener, and short against
/// the time for which a prefix without its home is computed anew.
pub const LOST_MS: u64 = 5000;
/// Answers of the proxy's own choice, for each known host and one more, that must bring no new host
/// before prefixes decide. If one in so many hosts is still unseen, e^-4 = 2 % is the chance that
/// it goes unseen so long.
pub const ANSWERS_PER_HOST: u32 = 4;
/// After that one request in so many, of each worker, is left to the proxy's own policy: 1.6 %. A
/// host that joins seven others is found within 350 requests, on average.
pub const EXPLORE_EVERY: u32 = 64;

/// How a request ended, as far as it says something of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A host answered, whatever it said.
    Answered,
    /// No connection to the host came about.
    Unreachable,
    /// The proxy gave up for another reason.
    Other,
}

/// What one request showed.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    /// The host that we chose; `None` if the proxy's own policy did.
    pub chosen: Option<&'a str>,
    /// The host that the proxy tried last.
    pub reached: Option<&'a str>,
    /// What came of it.
    pub outcome: Outcome,
}

/// The shared-data key of a pool's answers since the last new host; its number is the layout's
/// version.
fn explored_key(pool: &str) -> String {
    format!("prefix_router.1.explored.{pool}")
}

/// Empties what is kept of a pool that is gone: should it come back, its hosts are looked for anew.
pub fn forget(store: &impl Store, pool: &str) {
    store::clear(store, &explored_key(pool));
}

/// One pool's learning of hosts in one worker.
#[derive(Debug)]
pub struct Discovery {
    pool: String,
    /// The shared-data key of the answers since the last new host.
    key: String,
    turn: Cell<u32>,
}

impl Discovery {
    /// Learning for the pool of this name.
    #[must_use]
    pub fn new(pool: &str) -> Self {
        Self {
            pool: pool.to_owned(),
            key: explored_key(pool),
            turn: Cell::new(0),
        }
    }

    /// Whether the next request is left to the proxy's own policy, of so many known hosts.
    pub fn explores(&self, store: &impl Store, hosts: usize) -> bool {
        let turn = self.turn.get().wrapping_add(1);
        self.turn.set(turn);
        turn.is_multiple_of(EXPLORE_EVERY) || self.explored(store) < enough(hosts)
    }

    /// Takes in what a request showed. `in_pool` says whether the proxy sent it to the pool's
    /// cluster; it is asked only before something is changed. What changed, if anything did.
    pub fn learn(
        &self,
        store: &impl Store,
        ledger: &Ledger,
        view: &View,
        evidence: Evidence<'_>,
        in_pool: impl Fn() -> bool,
        now_ms: u64,
    ) -> Option<Summary> {
        let reached = evidence.reached.and_then(hosts::canonical);
        let mut changed = None;
        if let (Outcome::Answered, Some(address)) = (evidence.outcome, &reached) {
            let known = known(view, address);
            if !known.is_some_and(is_well) {
                let change = || fleet::answered(store, ledger, &self.pool, address, now_ms);
                changed = in_pool().then(change).flatten();
                // A new host seldom comes alone.
                if known.is_none() && changed.is_some() {
                    let _ = store.write(&self.key, &0_u32.to_le_bytes(), None);
                }
            } else if evidence.chosen.is_none() {
                self.count(store, view.candidates().len());
            }
        }
        for host in missed(view, evidence, reached.as_deref(), now_ms) {
            if in_pool() {
                let (address, pool) = (&host.address, &self.pool);
                let missed = fleet::missed(store, ledger, pool, address, now_ms, LOST_MS);
                changed = missed.or(changed);
            }
        }
        changed
    }

    fn explored(&self, store: &impl Store) -> u32 {
        let seen = store.read(&self.key).unwrap_or_default();
        decode(seen.value.as_deref())
    }

    /// One more answer that brought no new host; not counted beyond what is enough. A count that is
    /// lost to another worker costs one more such request.
    fn count(&self, store: &impl Store, hosts: usize) {
        let Ok(seen) = store.read(&self.key) else {
            return;
        };
        let explored = decode(seen.value.as_deref());
        if explored < enough(hosts) {
            let _ = store.write(&self.key, &(explored + 1).to_le_bytes(), Some(seen.cas));
        }
    }
}

fn decode(bytes: Option<&[u8]>) -> u32 {
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, u32::from_le_bytes)
}

fn enough(hosts: usize) -> u32 {
    let hosts = u32::try_from(hosts).unwrap_or(u32::MAX);
    hosts.saturating_add(1).saturating_mul(ANSWERS_PER_HOST)
}

/// The host of this address, if it is one of the pool's.
fn known<'v>(view: &'v View, address: &str) -> Option<&'v Host> {
    let mut hosts = view.hosts.iter();
    hosts.find(|host| host.state.is_some() && host.address == address)
}

/// The hosts that the request did not reach, where that is news: the one that was chosen, if
/// another was tried after it, and the last one, if no connection to it came about.
fn missed<'v>(
    view: &'v View,
    evidence: Evidence<'_>,
    reached: Option<&str>,
    now_ms: u64,
) -> impl Iterator<Item = &'v Host> {
    let chosen = evidence
        .chosen
        .filter(|_| evidence.outcome != Outcome::Other);
    let passed_over = chosen.filter(|chosen| reached != Some(*chosen));
    let unreachable = reached.filter(|_| evidence.outcome == Outcome::Unreachable);
    let hosts = [passed_over, unreachable].into_iter().flatten();
    let is_news =
        move |host: &&Host| host.missing_ms == 0 || now_ms.abs_diff(host.missing_ms) >= LOST_MS;
    let hosts: Vec<&Host> = hosts.filter_map(|host| known(view, host)).collect();
    hosts.into_iter().filter(is_news)
}

fn is_well(host: &Host) -> bool {
    host.state.is_some_and(State::is_usable) && host.missing_ms == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    struct World {
        store: MemoryStore,
        ledger: Ledger,
        discovery: Discovery,
    }

    impl World {
        fn new() -> Self {
            Self {
                store: MemoryStore::new(),
                ledger: Ledger::default(),
                discovery: Discovery::new("llm"),
            }
        }

        fn view(&self) -> View {
            fleet::view(&self.store, "llm").unwrap_or_default()
        }

        fn hosts(&self) -> Vec<String> {
            let view = self.view();
            let seats = view.candidates().iter().map(|host| host.seat);
            seats
                .map(|seat| view.address_of(seat).unwrap().to_owned())
                .collect()
        }

        /// A row: the second | chosen or none | reached | what came of it.
        fn request(&self, row: &str) {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let host = |cell: &str| (cell != "-").then(|| format!("10.0.0.{cell}:80"));
            let (chosen, reached) = (host(cells[1]), host(cells[2]));
            let evidence = Evidence {
                chosen: chosen.as_deref(),
                reached: reached.as_deref(),
                outcome: match cells[3] {
                    "answered" => Outcome::Answered,
                    "unreachable" => Outcome::Unreachable,
                    _ => Outcome::Other,
                },
            };
            let now_ms = cells[0].parse::<u64>().unwrap() * 1000;
            let in_pool = || cells.get(4).is_none();
            let view = self.view();
            let (store, ledger) = (&self.store, &self.ledger);
            self.discovery
                .learn(store, ledger, &view, evidence, in_pool, now_ms);
        }

        #[track_caller]
        fn check(&self, rows: &[&str], expected: &[&str]) {
            rows.iter().for_each(|row| self.request(row));
            let expected: Vec<_> = expected.iter().map(|n| format!("10.0.0.{n}:80")).collect();
            assert_eq!(self.hosts(), expected, "after {rows:?}");
        }
    }

    #[test]
    fn a_host_that_answers_is_known_and_one_that_is_gone_is_dropped() {
        let world = World::new();
        // second | chosen | reached | what came of it
        world.check(&["1 | - | 1 | answered"], &["1"]);
        world.check(
            &["1 | - | 2 | answered", "1 | - | 3 | unreachable"],
            &["1", "2"],
        );
        world.check(&["1 | - | - | other", "1 | - | 4 | other"], &["1", "2"]);
        world.check(&["1 | - | 5 | answered | of another cluster"], &["1", "2"]);
        // One miss says nothing, nor do many within five seconds.
        world.check(
            &["10 | 1 | 2 | answered", "14 | 1 | 2 | answered"],
            &["1", "2"],
        );
        world.check(&["15 | 1 | 2 | answered"], &["2"]);
        // It is back as soon as it answers.
        world.check(&["16 | - | 1 | answered"], &["1", "2"]);
        // An answer in between clears what was.
        world.check(
            &["20 | 1 | 1 | unreachable", "24 | 1 | 1 | answered"],
            &["1", "2"],
        );
        world.check(&["26 | 1 | 1 | unreachable"], &["1", "2"]);
        world.check(&["31 | 1 | 1 | unreachable"], &["2"]);
        world.check(&["32 | 2 | 7 | answered | of another cluster"], &["2"]);
        world.check(&["38 | 2 | 7 | answered | of another cluster"], &["2"]);
        // A request that failed for another reason does not count against its host.
        world.check(&["40 | 2 | 2 | other", "50 | 2 | 2 | other"], &["2"]);
    }

    #[test]
    fn a_clock_that_is_set_back_drops_no_host_for_ever_or_at_once() {
        let world = World::new();
        world.check(
            &["1000 | - | 1 | answered", "1000 | 1 | 1 | unreachable"],
            &["1"],
        );
        // The first miss seems long ago, in either direction.
        world.check(
            &["10 | 1 | 1 | answered", "11 | 1 | 1 | unreachable"],
            &["1"],
        );
        world.check(&["16 | 1 | 1 | unreachable"], &[]);
    }

    #[test]
    fn prefixes_decide_once_enough_answers_brought_no_new_host() {
        let world = World::new();
        let explores = |hosts| world.discovery.explores(&world.store, hosts);
        world.request("1 | - | 1 | answered");
        world.request("1 | - | 2 | answered");
        for _ in 0..3 * ANSWERS_PER_HOST {
            assert!(explores(2));
            world.request("1 | - | 1 | answered");
        }
        assert!(!explores(2));
        // Answers of hosts that we chose say nothing of hosts that we do not know.
        world.request("2 | - | 3 | answered");
        for _ in 0..100 {
            world.request("2 | 3 | 3 | answered");
        }
        assert!(explores(3));
    }

    #[test]
    fn one_request_in_sixty_four_is_always_left_to_the_proxy() {
        let world = World::new();
        world.request("1 | - | 1 | answered");
        for _ in 0..100 {
            world.request("1 | - | 1 | answered");
        }
        let turns = (0..6400).filter(|_| world.discovery.explores(&world.store, 1));
        assert_eq!(turns.count(), 100);
    }
}
