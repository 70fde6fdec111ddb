//! Which of Envoy's VMs does what only one should do: poll the hosts, repair the counters.
//!
//! Guarantee: at most one holder at a time as long as clocks agree within a lease; when a holder
//! stops, another takes over after the lease has run out. Not here: what the holder does.

use crate::store::Store;

/// The shared-data key of the lease; its number is the layout's version.
pub const LEASE_KEY: &str = "prefix_router.1.lease";

/// Takes or renews the lease for `owner` until `now_ms + lease_ms`; whether it is held now.
///
/// An owner is any number that no other VM uses. A store that fails grants nothing.
pub fn take(store: &impl Store, owner: u64, now_ms: u64, lease_ms: u64) -> bool {
    let Ok(seen) = store.read(LEASE_KEY) else {
        return false;
    };
    let held = seen.value.as_deref().and_then(decode);
    if held.is_some_and(|(holder, until_ms)| holder != owner && now_ms < until_ms) {
        return false;
    }
    let mut bytes = [0; 16];
    let (left, right) = bytes.split_at_mut(8);
    left.copy_from_slice(&owner.to_le_bytes());
    right.copy_from_slice(&now_ms.saturating_add(lease_ms).to_le_bytes());
    store.write(LEASE_KEY, &bytes, Some(seen.cas)).is_ok()
}

fn decode(bytes: &[u8]) -> Option<(u64, u64)> {
    let (owner, until) = bytes.split_at_checked(8)?;
    Some((
        u64::from_le_bytes(owner.try_into().ok()?),
        u64::from_le_bytes(until.try_into().ok()?),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    #[test]
    fn one_holder_at_a_time_and_another_when_it_stops() {
        let store = MemoryStore::new();
        assert!(take(&store, 1, 1000, 500));
        assert!(!take(&store, 2, 1400, 500));
        assert!(take(&store, 1, 1400, 500));
        assert!(!take(&store, 2, 1899, 500));
        assert!(take(&store, 2, 1900, 500));
        assert!(!take(&store, 1, 1901, 500));
    }

    #[test]
    fn a_lease_of_another_layout_is_taken_over() {
        let store = MemoryStore::new();
        store.write(LEASE_KEY, b"short", None).unwrap();
        assert!(take(&store, 1, 1000, 500));
    }
}
