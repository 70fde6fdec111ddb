//! Which hosts have metrics of their own.
//!
//! Guarantee: over all time and all workers at most so many addresses of a pool get a label, since
//! Envoy never forgets a metric; the others are summed under one; a host that has left reads zero.
//! Not here: the metrics themselves (filter/metrics.rs), what is counted (load.rs).

use crate::fleet::HostLoad;
use crate::load::Load;
use crate::names;
use crate::store::Store;
use std::collections::BTreeMap;

/// What each label of a pool shows now: addresses, and at last [`names::OTHER`] if it was ever
/// needed. `loads` are the pool's hosts, each once.
pub fn labelled(
    store: &impl Store,
    pool: &str,
    loads: &[HostLoad],
    labels_max: u32,
) -> Vec<(String, Load)> {
    let key = format!("prefix_router.1.series.{pool}");
    let seen = store.read(&key).unwrap_or_default();
    let text = seen.value.unwrap_or_default();
    let text = String::from_utf8(text).unwrap_or_default();
    let lines = text.lines();
    // Not collected: see Table::view in fleet.rs.
    let mut labels: BTreeMap<String, Load> = BTreeMap::new();
    labels.extend(lines.map(|label| (label.to_owned(), Load::default())));
    let known = labels.len();
    let mut other = labels.remove(names::OTHER);
    for HostLoad {
        address,
        load,
        has_left,
    } in loads
    {
        let full = u32::try_from(labels.len()).is_ok_and(|count| count >= labels_max);
        match labels.get_mut(address) {
            Some(shown) => *shown = *load,
            // While there is room, every host of the pool has a label: this was another pool's.
            None if *has_left && !full => {}
            None if full => other = Some(sum(other.unwrap_or_default(), *load)),
            None => {
                labels.insert(address.clone(), *load);
            }
        }
    }
    let mut shown: Vec<_> = labels.into_iter().collect();
    shown.extend(other.map(|load| (names::OTHER.to_owned(), load)));
    if shown.len() > known {
        let lines: Vec<&str> = shown.iter().map(|(label, _)| label.as_str()).collect();
        let written = store.write(&key, lines.join("\n").as_bytes(), Some(seen.cas));
        if written.is_err() {
            // Another worker was faster: what it has chosen counts, from the next time on.
            return Vec::new();
        }
    }
    shown
}

/// Every label that a pool has been given, [`names::OTHER`] among them. It keeps them when the pool is
/// gone: Envoy keeps the metrics, and the bound holds for the pool's return too.
pub fn labels(store: &impl Store, pool: &str) -> Vec<String> {
    let labelled = labelled(store, pool, &[], 0).into_iter();
    labelled.map(|(label, _)| label).collect()
}

fn sum(one: Load, other: Load) -> Load {
    Load {
        in_flight: one.in_flight.saturating_add(other.in_flight),
        pending: one.pending.saturating_add(other.pending),
        failures: one.failures.max(other.failures),
        answers: one.answers.wrapping_add(other.answers),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    fn load(in_flight: u32) -> Load {
        Load {
            in_flight,
            pending: in_flight * 10,
            ..Load::default()
        }
    }

    fn shown(labels: &[(&str, u32)]) -> Vec<(String, Load)> {
        let labels = labels.iter();
        labels
            .map(|&(label, in_flight)| (label.to_owned(), load(in_flight)))
            .collect()
    }

    fn loads(hosts: &[(&str, u32)], has_left: bool) -> Vec<HostLoad> {
        let hosts = hosts.iter();
        let load = |&(host, in_flight): &(&str, u32)| HostLoad {
            address: host.to_owned(),
            load: load(in_flight),
            has_left,
        };
        hosts.map(load).collect()
    }

    #[track_caller]
    fn check(store: &MemoryStore, now: &[(&str, u32)], expected: &[(&str, u32)]) {
        let found = labelled(store, "llm", &loads(now, false), 2);
        assert_eq!(found, shown(expected));
    }

    #[test]
    fn a_host_that_left_another_pool_gets_no_label_in_this_one() {
        let store = MemoryStore::new();
        check(&store, &[("a:1", 3)], &[("a:1", 3)]);
        let left = loads(&[("a:1", 2), ("b:1", 1)], true);
        assert_eq!(labelled(&store, "llm", &left, 2), shown(&[("a:1", 2)]));
        // Where there is no room, one cannot be told from a host whose label is the others'.
        check(&store, &[("a:1", 0), ("c:1", 1)], &[("a:1", 0), ("c:1", 1)]);
        let expected = [("a:1", 2), ("c:1", 0), ("other", 1)];
        assert_eq!(labelled(&store, "llm", &left, 2), shown(&expected));
    }

    #[test]
    fn so_many_addresses_have_labels_and_the_others_share_one() {
        let store = MemoryStore::new();
        // labels_max is 2 | hosts now | what the labels show
        check(&store, &[], &[]);
        check(&store, &[("a:1", 3)], &[("a:1", 3)]);
        check(&store, &[("a:1", 1), ("b:1", 2)], &[("a:1", 1), ("b:1", 2)]);
        let three = [("a:1", 1), ("b:1", 2), ("c:1", 4)];
        check(&store, &three, &[("a:1", 1), ("b:1", 2), ("other", 4)]);
        let moved = [("c:1", 4), ("d:1", 5)];
        check(&store, &moved, &[("a:1", 0), ("b:1", 0), ("other", 9)]);
        check(&store, &[], &[("a:1", 0), ("b:1", 0), ("other", 0)]);
        check(
            &store,
            &[("b:1", 7)],
            &[("a:1", 0), ("b:1", 7), ("other", 0)],
        );
    }

    #[test]
    fn a_pool_that_is_gone_has_its_labels_still() {
        let store = MemoryStore::new();
        let three = [("a:1", 1), ("b:1", 2), ("c:1", 4)];
        labelled(&store, "llm", &loads(&three, false), 2);
        assert_eq!(labels(&store, "llm"), ["a:1", "b:1", "other"]);
        assert_eq!(labels(&store, "llm"), ["a:1", "b:1", "other"]);
        assert_eq!(labels(&store, "another"), [""; 0]);
    }

    #[test]
    fn with_none_allowed_all_share_one() {
        let store = MemoryStore::new();
        let found = labelled(&store, "llm", &loads(&[("a:1", 1), ("b:1", 2)], false), 0);
        assert_eq!(found, shown(&[("other", 3)]));
    }

    #[test]
    fn pools_have_labels_of_their_own() {
        let store = MemoryStore::new();
        labelled(&store, "llm", &loads(&[("a:1", 1)], false), 1);
        let found = labelled(&store, "chat", &loads(&[("b:1", 2)], false), 1);
        assert_eq!(found, shown(&[("b:1", 2)]));
    }
}
