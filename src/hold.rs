//! How much of a body may be held back while it is read.
//!
//! Guarantee: once the proxy has refused a body that we held, no worker holds one again that could
//! be refused, until there is a new configuration. Not here: reading bodies (payload/), letting them
//! go (request.rs).
//!
//! Envoy answers 413 when it has to buffer more than the connection, the HTTP/2 window or the
//! route allows (ENVOY.md 5), and tells nobody beforehand. The shipped route raises its limit; other
//! setups have 32 KiB. A body that is let go with its first bytes is never buffered, and one whose
//! declared length is well below a refused one never exceeds what may be buffered. Nobody tells of a
//! limit that was raised either, and to try would cost a client its request: what was learned holds
//! as long as the configuration, which whoever raises the limit can renew.

use crate::store::{self, Store, StoreError};

/// The shared-data key of what was learned for a pool; its number is the layout's version. Pools
/// are behind listeners with limits of their own.
#[must_use]
pub fn key(pool: &str) -> String {
    format!("prefix_router.1.hold.{pool}")
}

/// A refused body may have grown past the limit by one read of the socket, which is at most the
/// limit and 16 KiB: with limits from 8 KiB on, a quarter of it is below the limit.
const SAFE_PART: u64 = 4;
/// Envoy's limits are larger than this, so a body that is declared no longer is hardly ever refused:
/// for such it is enough to know what was learned up to the last tick.
pub const SMALL_BYTES: u64 = 8 * 1024;
/// Let go with whatever comes first.
const AT_ONCE: u64 = 1;
/// Attempts against other workers that learn the same.
const ATTEMPTS_MAX: u32 = 4;

/// The length up to which bodies may be held; `None` while the proxy has refused none.
#[must_use]
pub fn learned(store: &impl Store, key: &str) -> Option<u64> {
    decode(store.read(key).ok()?.value.as_deref())
}

/// The proxy refused a body of which it had `buffered` bytes. Says whether that is news.
pub fn learn(store: &impl Store, key: &str, buffered: u64) -> bool {
    let safe = buffered / SAFE_PART;
    for _ in 0..ATTEMPTS_MAX {
        let Ok(seen) = store.read(key) else {
            return false;
        };
        if decode(seen.value.as_deref()).is_some_and(|known| known <= safe) {
            return false;
        }
        match store.write(key, &safe.to_le_bytes(), Some(seen.cas)) {
            Ok(()) => return true,
            Err(StoreError::Stale) => {}
            Err(StoreError::Refused) => return false,
        }
    }
    false
}

/// There is a new configuration: the limits may be others.
pub fn forget(store: &impl Store, key: &str) {
    store::clear(store, key);
}

/// How many bytes of a body are waited for: what the configuration says, or less after a refusal.
#[must_use]
pub fn bytes_max(learned: Option<u64>, declared: Option<u64>, configured: u64) -> u64 {
    match (learned, declared) {
        (None, _) => configured,
        // Held to its end, which comes before the limit.
        (Some(safe), Some(length)) if length <= safe => configured,
        (Some(_), _) => AT_ONCE,
    }
}

/// The same, now that so much of the body is there. One that is let go at once is read as far as
/// it has come, or all large prompts would look alike; but no further than what may be held, so
/// that of a longer one always the same part counts, however it arrives.
#[must_use]
pub fn bytes_max_now(bytes_max: u64, buffered: u64, learned: impl Fn() -> Option<u64>) -> u64 {
    match bytes_max {
        AT_ONCE => buffered.min(learned().unwrap_or_default()).max(AT_ONCE),
        held => held,
    }
}

fn decode(value: Option<&[u8]>) -> Option<u64> {
    Some(u64::from_le_bytes(value?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    #[test]
    fn a_refusal_is_learned_once_and_only_downwards() {
        let store = MemoryStore::new();
        let (ours, other) = (key("llm"), key("chat"));
        assert_eq!(learned(&store, &ours), None);
        assert!(learn(&store, &ours, 40_000));
        assert_eq!(learned(&store, &ours), Some(10_000));
        assert!(!learn(&store, &ours, 40_000));
        assert!(!learn(&store, &ours, 90_000));
        assert!(learn(&store, &ours, 4_000));
        assert_eq!(learned(&store, &ours), Some(1_000));
        assert_eq!(learned(&store, &other), None);
    }

    #[test]
    fn what_was_learned_can_be_forgotten_and_learned_anew() {
        let (store, ours) = (MemoryStore::new(), key("llm"));
        forget(&store, &ours);
        assert!(learn(&store, &ours, 4_000));
        forget(&store, &ours);
        assert_eq!(learned(&store, &ours), None);
        assert!(learn(&store, &ours, 40_000));
        assert_eq!(learned(&store, &ours), Some(10_000));
    }

    #[test]
    fn what_is_let_go_at_once_is_read_as_far_as_it_has_come() {
        let at_once = bytes_max(Some(1_000), None, 8_000);
        let now = |bytes_max, buffered| bytes_max_now(bytes_max, buffered, || Some(1_000));
        //  buffered → read
        for (buffered, expected) in [(0, 1), (1, 1), (500, 500), (9_000, 1_000)] {
            assert_eq!(now(at_once, buffered), expected);
        }
        assert_eq!(now(8_000, 5_000), 8_000);
    }

    #[test]
    fn a_refused_length_bounds_what_is_held() {
        //         learned       | declared     | configured → waited for
        let rows = [
            (None, None, 8_000, 8_000),
            (None, Some(9_000), 8_000, 8_000),
            (Some(1_000), Some(1_000), 8_000, 8_000),
            (Some(1_000), Some(1_001), 8_000, 1),
            (Some(1_000), None, 8_000, 1),
            (Some(0), Some(1), 8_000, 1),
        ];
        for (learned, declared, configured, expected) in rows {
            assert_eq!(
                bytes_max(learned, declared, configured),
                expected,
                "{learned:?}"
            );
        }
    }
}
