//! Which of Envoy's VMs does what only one should do: poll a pool's hosts, repair their counters.
//!
//! Guarantee: at most one holder at a time as long as clocks agree within a lease, the youngest of
//! those that ask; when a holder stops, another takes over after the lease has run out. Not here:
//! what the holder does.
//!
//! The youngest, because a listener that is replaced drains for minutes, and what is left of it
//! must not go on to apply the configuration of before.

use crate::store::{Store, StoreError};

/// What the shared-data keys of leases begin with; the number is the layout's version.
const LEASE_KEY: &str = "prefix_router.2.lease";
/// The lease of what is kept once for all pools.
pub const OF_LOADS: &str = "loads";
/// The shared-data key of the last VM's name; its number is the layout's version.
const NAME_KEY: &str = "prefix_router.1.vm";
/// Attempts against other VMs that start at the same time; as many as there can be workers.
const NAMINGS_MAX: u32 = 1024;

/// The lease of what is kept for each pool.
#[must_use]
pub fn of_pool(pool: &str) -> String {
    format!("pool.{pool}")
}

/// A name for a VM that starts now: one that no other has, and larger than those before it, though
/// workers start at the same time and a clock may be set back. `now` is in any unit, but always the
/// same one. Where shared data fails it is the time alone.
#[must_use]
pub fn name(store: &impl Store, now: u64) -> u64 {
    for _ in 0..NAMINGS_MAX {
        let Ok(seen) = store.read(NAME_KEY) else {
            break;
        };
        let last = seen.value.and_then(|value| value.try_into().ok());
        let last = last.map_or(0, u64::from_le_bytes);
        let name = now.max(last.saturating_add(1));
        match store.write(NAME_KEY, &name.to_le_bytes(), Some(seen.cas)) {
            Ok(()) => return name,
            Err(StoreError::Stale) => {}
            Err(StoreError::Refused) => break,
        }
    }
    now
}

/// Who asks for a lease.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// A number that no other VM uses, and larger than those of older ones.
    pub id: u64,
    /// What it would do with the lease, as a number; equal for all VMs of one configuration.
    pub purpose: u64,
}

/// What came of asking for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lease {
    /// It is held until `now_ms + lease_ms`.
    Held,
    /// Another VM does what this one would.
    Elsewhere,
    /// A younger VM does something else under this name.
    Rivalled,
}

/// Takes or renews the lease of this name until `now_ms + lease_ms`. A store that fails grants
/// nothing.
pub fn take(store: &impl Store, name: &str, own: Owner, now_ms: u64, lease_ms: u64) -> Lease {
    let key = format!("{LEASE_KEY}.{name}");
    let Ok(seen) = store.read(&key) else {
        return Lease::Elsewhere;
    };
    // The distance, not an end: with the clock set back, that could be hours away, and a holder
    // that stopped just then would be waited for.
    let is_held = |held: Held| now_ms.abs_diff(held.taken_ms) < held.lease_ms;
    let held = seen.value.as_deref().and_then(Held::decode);
    if let Some(held) = held.filter(|held| held.owner > own.id && is_held(*held)) {
        return match held.purpose == own.purpose {
            true => Lease::Elsewhere,
            false => Lease::Rivalled,
        };
    }
    let held = Held {
        owner: own.id,
        purpose: own.purpose,
        taken_ms: now_ms,
        lease_ms,
    };
    match store.write(&key, &held.encode(), Some(seen.cas)) {
        Ok(()) => Lease::Held,
        Err(_) => Lease::Elsewhere,
    }
}

/// When the lease of this name was last taken or renewed; `None` if never.
///
/// # Errors
/// If the store cannot be read.
pub fn renewed_ms(store: &impl Store, name: &str) -> Result<Option<u64>, StoreError> {
    let seen = store.read(&format!("{LEASE_KEY}.{name}"))?;
    let held = seen.value.as_deref().and_then(Held::decode);
    Ok(held.map(|held| held.taken_ms))
}

/// Who has a lease since when, and for how long.
#[derive(Clone, Copy)]
struct Held {
    owner: u64,
    purpose: u64,
    taken_ms: u64,
    lease_ms: u64,
}

impl Held {
    fn encode(self) -> Vec<u8> {
        let numbers = [self.owner, self.purpose, self.taken_ms, self.lease_ms];
        numbers.map(u64::to_le_bytes).concat()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut numbers = bytes.chunks_exact(8).map(|number| number.try_into().ok());
        let mut next = || numbers.next().flatten().map(u64::from_le_bytes);
        Some(Self {
            owner: next()?,
            purpose: next()?,
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
    fn vms_that_start_at_once_have_names_of_their_own_and_younger_ones_larger_names() {
        let store = MemoryStore::new();
        let names = [1000, 1000, 1000, 500, 2000].map(|now| name(&store, now));
        assert_eq!(names, [1000, 1001, 1002, 1003, 2000]);
    }

    fn takes(store: &MemoryStore, name: &str, id: u64, now_ms: u64) -> bool {
        let own = Owner { id, purpose: 7 };
        take(store, name, own, now_ms, LEASE) == Lease::Held
    }

    #[test]
    fn one_holder_at_a_time_and_another_when_it_stops() {
        let store = MemoryStore::new();
        let take = |id, now_ms| takes(&store, "pool.llm", id, now_ms);
        assert!(take(2, 1000));
        assert!(!take(1, 1400));
        assert!(take(2, 1400));
        assert!(!take(1, 1899));
        assert!(take(1, 1900));
    }

    #[test]
    fn a_younger_one_takes_over_at_once_and_keeps_it() {
        let store = MemoryStore::new();
        let take = |id, now_ms| takes(&store, "pool.llm", id, now_ms);
        assert!(take(1, 1000));
        assert!(take(2, 1001));
        assert!(!take(1, 1002));
        assert!(take(2, 1003));
    }

    #[test]
    fn each_pool_has_a_holder_of_its_own() {
        let store = MemoryStore::new();
        assert!(takes(&store, &of_pool("llm"), 2, 1000));
        assert!(takes(&store, &of_pool("loads"), 1, 1000));
        assert!(takes(&store, OF_LOADS, 1, 1000));
        assert!(!takes(&store, &of_pool("llm"), 1, 1000));
    }

    #[test]
    fn who_wants_it_for_something_else_is_told_so_by_the_younger_one() {
        let store = MemoryStore::new();
        let take = |id, purpose, now_ms| {
            let own = Owner { id, purpose };
            take(&store, "pool.llm", own, now_ms, LEASE)
        };
        assert_eq!(take(1, 7, 1000), Lease::Held);
        assert_eq!(take(2, 8, 1001), Lease::Held);
        assert_eq!(take(1, 7, 1002), Lease::Rivalled);
        assert_eq!(take(1, 8, 1003), Lease::Elsewhere);
        assert_eq!(take(1, 7, 1600), Lease::Held);
    }

    #[test]
    fn a_clock_that_is_set_back_makes_nobody_wait() {
        let store = MemoryStore::new();
        let take = |id, now_ms| takes(&store, "pool.llm", id, now_ms);
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
        assert!(takes(&store, OF_LOADS, 1, 1000));
    }
}
