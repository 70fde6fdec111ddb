//! Rendezvous order: which host a key belongs to, and which hosts come next.
//!
//! Guarantee: removing a host moves only that host's keys, adding one moves keys only to it, and
//! the order of the host list changes nothing. Not here: load, health, popularity.
//!
//! Algorithm: highest random weight, Thaler and Ravishankar, "Using name-based mappings to
//! increase hit rates", IEEE/ACM Transactions on Networking 6(1), 1998.

use std::cmp::Reverse;
use std::hash::Hasher;

use crate::prefix::{Key, mix};

/// A host's identity in placement: the hash of its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u64);

impl HostId {
    /// The id of `ip:port`. FNV-1a, then finalised: its high bits are poor on short input.
    #[must_use]
    pub fn of(address: &str) -> Self {
        let mut hasher = fnv::FnvHasher::default();
        hasher.write(address.as_bytes());
        Self(mix(hasher.finish(), address.len() as u64))
    }
}

/// The score of a host for a key; the host with the highest score is the key's home.
#[must_use]
pub fn score(key: Key, host: HostId) -> u64 {
    mix(key.0, host.0)
}

/// Sorts `hosts` into the rendezvous order of `key`, home first. Equal scores (one in 2^64) fall
/// back on the id, so that the order of the list never matters.
#[must_use]
pub fn order<H: Copy>(key: Key, hosts: &[H], id: impl Fn(&H) -> HostId) -> Vec<H> {
    let mut scored: Vec<(u64, HostId, H)> = hosts
        .iter()
        .map(|host| {
            let id = id(host);
            (score(key, id), id, *host)
        })
        .collect();
    scored.sort_unstable_by_key(|&(score, id, _)| Reverse((score, id)));
    scored.into_iter().map(|(_, _, host)| host).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: u64 = 20_000;

    fn fleet(count: u16) -> Vec<(u16, HostId)> {
        (0..count)
            .map(|n| (n, HostId::of(&format!("10.0.0.{n}:8000"))))
            .collect()
    }

    fn home(key: u64, hosts: &[(u16, HostId)]) -> u16 {
        order(Key(mix(key, 7)), hosts, |host| host.1)[0].0
    }

    #[test]
    fn the_order_of_the_list_changes_nothing() {
        let hosts = fleet(7);
        let mut reversed = hosts.clone();
        reversed.reverse();
        for key in 0..1000 {
            let key = Key(mix(key, 7));
            assert_eq!(order(key, &hosts, |h| h.1), order(key, &reversed, |h| h.1));
        }
    }

    #[test]
    fn a_removed_host_moves_only_its_own_keys() {
        let hosts = fleet(8);
        for key in 0..KEYS {
            let before = home(key, &hosts);
            let after = home(key, &hosts[..7]);
            assert!(
                before == after || before == 7,
                "key {key} moved from {before} to {after}"
            );
        }
    }

    #[test]
    fn an_added_host_takes_its_share_and_no_other_host_gains() {
        let (before, after) = (fleet(7), fleet(8));
        let mut moved = 0_u32;
        for key in 0..KEYS {
            let (from, to) = (home(key, &before), home(key, &after));
            if from != to {
                assert_eq!(to, 7, "key {key} moved between hosts that stayed");
                moved += 1;
            }
        }
        let share = f64::from(moved) / KEYS as f64;
        assert!(
            (share - 0.125).abs() < 0.01,
            "1/8 of the keys should move, {share} did"
        );
    }

    #[test]
    fn a_thousand_prefixes_spread_over_seven_hosts_within_a_quarter_of_the_mean() {
        let hosts = fleet(7);
        let mut share = [0_u32; 7];
        for key in 0..1000 {
            share[usize::from(home(key, &hosts))] += 1;
        }
        let most = f64::from(*share.iter().max().unwrap());
        assert!(most / (1000.0 / 7.0) <= 1.25, "shares {share:?}");
    }

    #[test]
    fn addresses_that_run_together_are_different_hosts() {
        assert_ne!(HostId::of("10.0.0.1:1"), HostId::of("10.0.0.11:"));
        assert_ne!(HostId::of("10.0.0.1:80"), HostId::of("10.0.0.1:8"));
    }
}
