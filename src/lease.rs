//! Which of Envoy's VMs does what only one should do: poll a pool's hosts, repair their counters.
//!
//! Guarantee: at most one holder at a time as long as clocks agree within a lease, the youngest of
//! those that ask; when a holder stops, another takes over after the lease has run out. Not here:
//! what the holder does.
//!
//! The youngest, because a listener that is replaced drains for minutes, and what is left of it
//! must not go on to apply the configuration of before.

use crate::store::Store;

/// What the shared-data keys of leases begin with; the number is the layout's version.
const LEASE_KEY: &str = "prefix_router.1.lease";
/// The lease of what is kept once for all pools.
pub const OF_LOADS: &str = "loads";

/// The lease of what is kept for each pool.
#[must_use]
pub fn of_pool(pool: &str) -> String {
    format!("pool.{pool}")
}

/// Takes or renews the lease of this name for `owner` until `now_ms + lease_ms`; whether it is
/// held now.
///
/// An owner is a number that no other VM uses, and larger than those of older ones. A store that
/// fails grants nothing.
pub fn take(store: &impl Store, name: &str, owner: u64, now_ms: u64, lease_ms: u64) -> bool {
    let key = format!("{LEASE_KEY}.{name}");
    let Ok(seen) = store.read(&key) else {
        return false;
    };
    // The distance, not an end: with the clock set back, that could be hours away, and a holder
    // that stopped just then would be waited for.
    let is_held = |held: Held| now_ms.abs_diff(held.taken_ms) < held.lease_ms;
    let held = seen.value.as_deref().and_then(Held::decode);
    if held.is_some_and(|held| held.owner > owner && is_held(held)) {
        return false;
    }
    let held = Held {
        owner,
        taken_ms: now_ms,
        lease_ms,
    };
    store.write(&key, &held.encode(), Some(seen.cas)).is_ok()
}

/// Who has a lease since when, and for how long.
#[derive(Clone, Copy)]
struct Held {
    owner: u64,
    taken_ms: u64,
    lease_ms: u64,
}

impl Held {
    fn encode(self) -> Vec<u8> {
        let numbers = [self.owner, self.taken_ms, self.lease_ms];
        numbers.map(u64::to_le_bytes).concat()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut numbers = bytes.chunks_exact(8).map(|number| number.try_into().ok());
        let mut next = || numbers.next().flatten().map(u64::from_le_bytes);
        Some(Self {
            owner: next()?,
            taken_ms: next()?,
            lease_ms: next()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    const LEASE: u64 = 500;

    #[test]
    fn one_holder_at_a_time_and_another_when_it_stops() {
        let store = MemoryStore::new();
        let take = |owner, now_ms| take(&store, "pool.llm", owner, now_ms, LEASE);
        assert!(take(2, 1000));
        assert!(!take(1, 1400));
        assert!(take(2, 1400));
        assert!(!take(1, 1899));
        assert!(take(1, 1900));
    }

    #[test]
    fn a_younger_one_takes_over_at_once_and_keeps_it() {
        let store = MemoryStore::new();
        let take = |owner, now_ms| take(&store, "pool.llm", owner, now_ms, LEASE);
        assert!(take(1, 1000));
        assert!(take(2, 1001));
        assert!(!take(1, 1002));
        assert!(take(2, 1003));
    }

    #[test]
    fn each_pool_has_a_holder_of_its_own() {
        let store = MemoryStore::new();
        assert!(take(&store, &of_pool("llm"), 2, 1000, LEASE));
        assert!(take(&store, &of_pool("loads"), 1, 1000, LEASE));
        assert!(take(&store, OF_LOADS, 1, 1000, LEASE));
        assert!(!take(&store, &of_pool("llm"), 1, 1000, LEASE));
    }

    #[test]
    fn a_clock_that_is_set_back_makes_nobody_wait() {
        let store = MemoryStore::new();
        let take = |owner, now_ms| take(&store, "pool.llm", owner, now_ms, LEASE);
        assert!(take(2, 1_000_000));
        // The holder goes on; and where it stopped just then, it is not waited for.
        assert!(take(2, 1000));
        assert!(!take(1, 1499));
        assert!(take(2, 1_000_000));
        assert!(take(1, 1000));
    }

    #[test]
    fn a_lease_of_another_layout_is_taken_over() {
        let store = MemoryStore::new();
        let key = format!("{LEASE_KEY}.{OF_LOADS}");
        store.write(&key, b"short", None).unwrap();
        assert!(take(&store, OF_LOADS, 1, 1000, LEASE));
    }
}
