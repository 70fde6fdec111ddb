//! Pools that no configuration of this Envoy has any more, as after a rename: nobody reports their
//! hosts again, so what is kept of them would stay until Envoy ends.
//!
//! Guarantee: a pool whose lease some VM renews is never told; one whose lease nobody does is told
//! once that has been found twice. Not here: leases (lease.rs), what is then taken away (fleet.rs,
//! series.rs, pool.rs).

use std::collections::BTreeMap;

use crate::fleet;
use crate::lease;
use crate::store::Store;
use crate::turns::Turns;

/// A pool whose lease nobody renewed for so long is gone. VMs renew with each tick, ten times a
/// second; those of a listener that drains too, so that a pool is there as long as any request can
/// use it.
pub const GONE_MS: u64 = 60_000;
/// Time between two looks. A clock that was set, or a machine that slept, makes all leases look old
/// at once: by the next look every VM has renewed its own.
const LOOK_MS: u64 = 5000;

/// The search, in the VM that holds the lease of the loads.
#[derive(Debug)]
pub struct Leftovers {
    gone_ms: u64,
    looks: Turns,
    /// Pools that seemed gone at the last look, and when their lease was last renewed.
    suspects: BTreeMap<String, Option<u64>>,
}

impl Leftovers {
    /// A pool is gone when nobody renewed its lease for so long.
    #[must_use]
    pub fn new(gone_ms: u64) -> Self {
        Self {
            gone_ms,
            looks: Turns::default(),
            suspects: BTreeMap::new(),
        }
    }

    /// The pools that are gone, if it is time to look.
    pub fn find(&mut self, store: &impl Store, now_ms: u64) -> Vec<String> {
        if !self.looks.take(now_ms, LOOK_MS) {
            return Vec::new();
        }
        let before = std::mem::take(&mut self.suspects);
        let mut gone = Vec::new();
        for pool in fleet::pools(store) {
            let Ok(renewed_ms) = lease::renewed_ms(store, &lease::of_pool(&pool)) else {
                continue;
            };
            if renewed_ms.is_some_and(|at_ms| now_ms.abs_diff(at_ms) < self.gone_ms) {
                continue;
            }
            if before.get(&pool) == Some(&renewed_ms) {
                gone.push(pool);
            } else {
                self.suspects.insert(pool, renewed_ms);
            }
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Fleet;
    use crate::hosts::HostReport;
    use crate::lease::Owner;
    use crate::load::Ledger;
    use crate::store::MemoryStore;

    /// Pools with a host each, in an Envoy whose clock says `now_ms`.
    struct World {
        store: MemoryStore,
        leftovers: Leftovers,
        now_ms: u64,
    }

    impl World {
        fn new(pools: &[&str]) -> Self {
            let world = Self {
                store: MemoryStore::new(),
                leftovers: Leftovers::new(GONE_MS),
                now_ms: 1_000_000,
            };
            for pool in pools {
                let hosts = [HostReport::usable("a:1")];
                let ledger = Ledger::default();
                Fleet::default().apply(&world.store, &ledger, pool, &hosts, 1000);
            }
            world
        }

        /// So much time passes, in which these pools' VMs tick; the pools found gone meanwhile.
        fn pass(&mut self, ms: u64, alive: &[&str]) -> Vec<String> {
            let mut gone = Vec::new();
            for _ in 0..ms / 500 {
                self.now_ms += 500;
                for pool in alive {
                    let own = Owner { id: 1, purpose: 7 };
                    lease::take(&self.store, &lease::of_pool(pool), own, self.now_ms, 1000);
                }
                gone.extend(self.leftovers.find(&self.store, self.now_ms));
            }
            gone
        }
    }

    #[test]
    fn a_pool_whose_lease_nobody_renews_for_a_minute_is_gone_and_the_others_are_not() {
        let mut world = World::new(&["old", "new"]);
        assert!(world.pass(120_000, &["old", "new"]).is_empty());
        assert!(world.pass(59_500, &["new"]).is_empty());
        assert_eq!(world.pass(15_000, &["new"]), ["old"]);
        fleet::forget(&world.store, &Ledger::default(), "old");
        assert!(world.pass(120_000, &["new"]).is_empty());
    }

    #[test]
    fn one_that_comes_back_between_two_looks_stays() {
        let mut world = World::new(&["llm"]);
        world.pass(1000, &["llm"]);
        assert!(world.pass(66_000, &[]).is_empty());
        assert!(!world.leftovers.suspects.is_empty(), "it was not suspected");
        assert!(world.pass(120_000, &["llm"]).is_empty());
    }

    #[test]
    fn a_clock_that_is_set_and_a_machine_that_slept_cost_no_pool() {
        for set_to_ms in [10, 900_000_000] {
            let mut world = World::new(&["llm"]);
            world.pass(10_000, &["llm"]);
            world.now_ms = set_to_ms;
            // The first look comes before any VM's tick.
            assert!(world.leftovers.find(&world.store, set_to_ms).is_empty());
            assert!(!world.leftovers.suspects.is_empty(), "it was not suspected");
            assert!(
                world.pass(120_000, &["llm"]).is_empty(),
                "set to {set_to_ms}"
            );
        }
    }

    #[test]
    fn a_pool_that_never_had_a_lease_is_gone_at_the_second_look() {
        let mut world = World::new(&["llm"]);
        assert!(world.leftovers.find(&world.store, 1_000_000).is_empty());
        assert_eq!(world.leftovers.find(&world.store, 1_005_000), ["llm"]);
    }
}
