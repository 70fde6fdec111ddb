//! Rendezvous order: which host a key belongs to, and which come next.
//!
//! Guarantee: removing a host moves only its own keys, adding one moves keys only to it, and the
//! order of the host list changes nothing. Not here: load, health, popularity.

use crate::prefix::{Key, mix};

/// A host's identity in placement: the hash of its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u64);

impl HostId {
    /// The id of `ip:port`. FNV-1a, then finalised: its high bits are poor on short input.
    #[must_use]
    pub fn of(address: &str) -> Self {
        use std::hash::Hasher;
        let mut hasher = fnv::FnvHasher::default();
        hasher.write(address.as_bytes());
        Self(mix(hasher.finish(), address.len() as u64))
    }
}

/// The score of a host for a key; the highest score is home.
#[must_use]
pub fn score(key: Key, host: HostId) -> u64 {
    mix(key.0, host.0)
}
