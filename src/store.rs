//! The port to the proxy's shared data, and an in-memory stand-in with the same semantics.
//!
//! Guarantee: `MemoryStore` behaves as Envoy's shared data was measured to behave: a key cannot be
//! deleted, a compare-and-swap on an absent key succeeds unless it asks for [`CREATE`].
//! Not here: what the keys mean (hosts.rs, load.rs, popularity.rs).

use std::cell::RefCell;
use std::collections::BTreeMap;

/// The version of a value, as handed out by [`Store::read`].
pub type Cas = u32;

/// "Create only if absent": Envoy checks no version on creation, except this one.
pub const CREATE: Cas = u32::MAX;

/// Why a write did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreError {
    /// Another worker wrote in between; read again.
    Stale,
    /// The proxy refused the call.
    Refused,
}

/// A value and the version that a compare-and-swap of it needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versioned {
    /// The bytes; `None` if the key has never been written.
    pub value: Option<Vec<u8>>,
    /// Pass this to [`Store::write`] to replace exactly what was read.
    pub cas: Cas,
}

/// Shared data: every worker of one Envoy sees the same values.
pub trait Store {
    /// Reads a key. An absent key reads as `None` with the version [`CREATE`].
    fn read(&self, key: &str) -> Result<Versioned, StoreError>;

    /// Writes a key. With `cas`, only if the value is still the one that was read with it.
    fn write(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), StoreError>;
}

/// Empties a value, which is then read as one that was never written; its key stays.
pub fn clear(store: &impl Store, key: &str) {
    let seen = store.read(key).unwrap_or_default();
    if seen.value.is_some_and(|value| !value.is_empty()) {
        // Refused, or news by another worker: then it stays as it is.
        let _ = store.write(key, &[], Some(seen.cas));
    }
}

/// Shared data for tests and for the simulator.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    entries: RefCell<BTreeMap<String, (Vec<u8>, Cas)>>,
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl Store for MemoryStore {
    fn read(&self, key: &str) -> Result<Versioned, StoreError> {
        let entries = self.entries.borrow();
        Ok(match entries.get(key) {
            None => Versioned {
                value: None,
                cas: CREATE,
            },
            Some((value, cas)) => Versioned {
                value: Some(value.clone()),
                cas: *cas,
            },
        })
    }

    fn write(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), StoreError> {
        let mut entries = self.entries.borrow_mut();
        match entries.get_mut(key) {
            None => {
                entries.insert(key.to_owned(), (value.to_vec(), 1));
                Ok(())
            }
            Some((_, seen)) if cas.is_some_and(|cas| cas != *seen) => Err(StoreError::Stale),
            Some((stored, seen)) => {
                stored.clear();
                stored.extend_from_slice(value);
                *seen = seen.wrapping_add(1).clamp(1, CREATE - 1);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_key_is_created_once() {
        let store = MemoryStore::new();
        let absent = store.read("k").unwrap();
        assert_eq!(
            absent,
            Versioned {
                value: None,
                cas: CREATE
            }
        );
        assert_eq!(store.write("k", b"one", Some(absent.cas)), Ok(()));
        assert_eq!(
            store.write("k", b"two", Some(absent.cas)),
            Err(StoreError::Stale)
        );
        assert_eq!(store.read("k").unwrap().value.as_deref(), Some(&b"one"[..]));
    }

    #[test]
    fn a_stale_version_writes_nothing() {
        let store = MemoryStore::new();
        store.write("k", b"one", None).unwrap();
        let seen = store.read("k").unwrap().cas;
        store.write("k", b"two", Some(seen)).unwrap();
        assert_eq!(
            store.write("k", b"three", Some(seen)),
            Err(StoreError::Stale)
        );
        assert_eq!(store.read("k").unwrap().value.as_deref(), Some(&b"two"[..]));
    }
}
