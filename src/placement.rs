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

/// Sorts `hosts` into the rendezvous order of `key`, home first. `traits` gives a host's identity
/// and weight. Equal places (one in 2^64) fall back on the id, so that the order of the list never
/// matters.
#[must_use]
pub fn order<H: Copy>(key: Key, hosts: &[H], traits: impl Fn(&H) -> (HostId, u32)) -> Vec<H> {
    let first = hosts.first().map_or(1, |host| traits(host).1);
    let is_even = hosts.iter().all(|host| traits(host).1 == first);
    let place = |(number, host): (usize, &H)| {
        let (id, weight) = traits(host);
        let score = score(key, id);
        let distance = if is_even { 0 } else { distance(score, weight) };
        (distance, Reverse(score), id, number)
    };
    // Numbers and not the hosts: they are smaller, and sorted by the same code whatever a host is.
    let mut placed: Vec<(u64, Reverse<u64>, HostId, usize)> =
        hosts.iter().enumerate().map(place).collect();
    placed.sort_unstable();
    let host = |(_, _, _, number)| hosts.get(number).copied();
    placed.into_iter().filter_map(host).collect()
}

/// Weights above this are taken as this much: 2^20 leaves the arithmetic below its room.
pub const WEIGHT_MAX: u32 = 1 << 20;

/// How far a host of this weight is from a key: −log2(score / 2^64) ÷ weight. The host with the
/// least distance is home with a probability in proportion to its weight, and a weight that grows
/// moves keys to its host only (Schindelhauer and Schomaker, "Weighted distributed hash tables",
/// SPAA 2005). In integers, so that every gateway gets the same bits.
fn distance(score: u64, weight: u32) -> u64 {
    (negative_log2(score) << 32) / u64::from(weight.clamp(1, WEIGHT_MAX))
}

/// −log2(score / 2^64) in 2^-24, from 0 to 65.
fn negative_log2(score: u64) -> u64 {
    const FRACTION_BITS: u32 = 24;
    let score = score.max(1);
    let zeros = score.leading_zeros();
    // The leading 32 bits as a number from 1 to 2, in 2^-31; squaring it gives one bit of its
    // logarithm at a time.
    let mut mantissa = (score << zeros) >> 32;
    let mut fraction = 0;
    for bit in (0..FRACTION_BITS).rev() {
        mantissa = (mantissa * mantissa) >> 31;
        if mantissa >= 1 << 32 {
            mantissa >>= 1;
            fraction |= 1 << bit;
        }
    }
    (u64::from(zeros + 1) << FRACTION_BITS) - fraction
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
        order(Key(mix(key, 7)), hosts, |host| (host.1, 1))[0].0
    }

    #[test]
    fn the_order_of_the_list_changes_nothing() {
        let hosts = fleet(7);
        let mut reversed = hosts.clone();
        reversed.reverse();
        for key in 0..1000 {
            let key = Key(mix(key, 7));
            assert_eq!(
                order(key, &hosts, |h| (h.1, 1)),
                order(key, &reversed, |h| (h.1, 1))
            );
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

    /// Each host's share of keys in percent, for these weights.
    fn shares(weights: &[u32]) -> Vec<f64> {
        let hosts = fleet(u16::try_from(weights.len()).unwrap());
        let mut shares = vec![0.0; weights.len()];
        for key in 0..KEYS {
            let key = Key(mix(key, 7));
            let home = order(key, &hosts, |h| (h.1, weights[usize::from(h.0)]))[0];
            shares[usize::from(home.0)] += 100.0 / KEYS as f64;
        }
        shares
    }

    #[test]
    fn a_hosts_share_is_in_proportion_to_its_weight() {
        for (share, expected) in shares(&[1, 1, 2, 4]).iter().zip([12.5, 12.5, 25.0, 50.0]) {
            assert!(
                (share - expected).abs() < 1.0,
                "{share} % instead of {expected} %"
            );
        }
        let shares = shares(&[2560, 2560, 256]);
        assert!((shares[2] - 100.0 / 21.0).abs() < 0.6, "{shares:?}");
    }

    #[test]
    fn equal_weights_of_any_size_give_the_order_without_weights() {
        let hosts = fleet(7);
        for key in 0..1000 {
            let key = Key(mix(key, 7));
            let plain = order(key, &hosts, |h| (h.1, 1));
            assert_eq!(plain, order(key, &hosts, |h| (h.1, 977)));
            // Through the weighted arithmetic too, as far as it resolves.
            let mut weighted = hosts.clone();
            weighted.sort_by_key(|h| (distance(score(key, h.1), 5), Reverse(score(key, h.1))));
            assert_eq!(plain, weighted);
        }
    }

    #[test]
    fn a_weight_that_grows_moves_keys_to_its_host_only_and_none_twice() {
        let hosts = fleet(4);
        let home = |key: u64, weight: u32| {
            let key = Key(mix(key, 7));
            order(key, &hosts, |h| (h.1, if h.0 == 3 { weight } else { 256 }))[0].0
        };
        for key in 0..2000 {
            let homes: Vec<u16> = [1, 16, 64, 128, 200, 256].map(|w| home(key, w)).to_vec();
            let moves = homes.windows(2).filter(|pair| pair[0] != pair[1]).count();
            assert!(
                moves <= 1 && (moves == 0 || homes[5] == 3),
                "key {key}: {homes:?}"
            );
        }
    }

    #[test]
    fn the_logarithm_is_that_of_the_books() {
        for score in [1, 2, 3, 1 << 32, u64::MAX / 3, u64::MAX / 2, u64::MAX] {
            let exact = 64.0 - (score as f64).log2();
            let found = negative_log2(score) as f64 / f64::from(1 << 24);
            assert!(
                (found - exact).abs() < 1e-4,
                "{score}: {found} instead of {exact}"
            );
        }
    }
}
