//! What to ask Envoy's admin next, and what its answers add up to.
//!
//! Guarantee: whatever was asked, an answer gives the whole list of each cluster's hosts or an error.
//! Not here: the asking (filter/), the form of the list (hosts/clusters.rs).
//!
//! Envoy makes the list on its main thread: 50 ms for 1,000 hosts (ENVOY.md 2.1). Its gauges of
//! single hosts cost a fifth, but say only who is healthy and how busy. So a large cluster is listed
//! now and then, and at once when the gauges show a change.

use super::{HostReport, HostsError, State, clusters_path, parse_clusters};
use crate::turns::Turns;
use std::collections::BTreeMap;

/// Up to here the list costs 3 ms at most; 0.6 % of a thread at two polls a second.
const LISTED_HOSTS_MAX: usize = 200;

/// How often a larger cluster is listed though nothing seems to change: what only the list shows
/// (weights, zones, a host that starts to drain) is at most so old.
const LIST_EVERY_MS: u64 = 10_000;

/// The hosts of some clusters, as one Envoy's admin tells them.
#[derive(Debug)]
pub struct AdminSource {
    clusters: Vec<Cluster>,
    /// When it was listed last; `None` if it is to be listed at once.
    lists: Option<Turns>,
    asked: Question,
}

#[derive(Debug)]
struct Cluster {
    name: String,
    known: Vec<HostReport>,
    /// Whether Envoy has gauges of single hosts: `track_cluster_stats` in the cluster's config.
    has_gauges: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    List,
    Gauges,
}

impl AdminSource {
    /// The hosts of the clusters of these names.
    #[must_use]
    pub fn new<'n>(clusters: impl IntoIterator<Item = &'n str>) -> Self {
        let cluster = |name: &str| Cluster {
            name: name.to_owned(),
            known: Vec::new(),
            has_gauges: true,
        };
        Self {
            clusters: clusters.into_iter().map(cluster).collect(),
            lists: None,
            asked: Question::List,
        }
    }

    /// The path of the next question.
    pub fn ask(&mut self, now_ms: u64) -> String {
        let hosts: usize = self
            .clusters
            .iter()
            .map(|cluster| cluster.known.len())
            .sum();
        let has_gauges = self.clusters.iter().all(|cluster| cluster.has_gauges);
        let lists = self.lists.as_ref();
        let is_fresh = lists.is_some_and(|lists| !lists.take(now_ms, LIST_EVERY_MS));
        self.asked = if hosts > LISTED_HOSTS_MAX && has_gauges && is_fresh {
            Question::Gauges
        } else {
            self.lists = Some(Turns::since(now_ms));
            Question::List
        };
        match self.asked {
            Question::List => clusters_path(&self.names()),
            Question::Gauges => gauges_path(&self.names()),
        }
    }

    fn names(&self) -> Vec<&str> {
        self.clusters
            .iter()
            .map(|cluster| cluster.name.as_str())
            .collect()
    }

    /// The hosts of each cluster after the answer to the last question. A cluster of which it says
    /// nothing is an error of its own; what was known of it stays known.
    ///
    /// # Errors
    /// If the answer cannot be read.
    pub fn answer(
        &mut self,
        bytes: &[u8],
    ) -> Result<Vec<Result<Vec<HostReport>, HostsError>>, HostsError> {
        if self.asked == Question::List {
            let found = parse_clusters(bytes, &self.names())?;
            for (cluster, found) in self.clusters.iter_mut().zip(&found) {
                if let Ok(found) = found {
                    cluster.known.clone_from(found);
                }
            }
            return Ok(found);
        }
        let unreadable = |_| HostsError::Unreadable("statistics that are not text".into());
        let text = std::str::from_utf8(bytes).map_err(unreadable)?;
        for cluster in &mut self.clusters {
            if cluster.read_gauges(text) {
                self.lists = None;
            }
        }
        let known = self.clusters.iter();
        Ok(known.map(|cluster| Ok(cluster.known.clone())).collect())
    }
}

impl Cluster {
    /// Takes in the gauges; whether the list is due.
    fn read_gauges(&mut self, text: &str) -> bool {
        let gauges = gauges_of(&self.name, text);
        if gauges.is_empty() && !self.known.is_empty() {
            // Not an error: this Envoy keeps no such gauges, so its list has to do.
            self.has_gauges = false;
            return true;
        }
        let mut changed = gauges.len() != self.known.len();
        for host in &mut self.known {
            let Some(gauge) = gauges.get(in_stats(&host.address).as_str()) else {
                changed |= host.state != State::Failed;
                host.state = State::Failed;
                continue;
            };
            host.active = Some(gauge.active);
            match (host.state, gauge.healthy) {
                // The gauge is 0 for it whether it serves or not.
                _ if host.degraded => {}
                // Whether its priority is in use only the list says.
                (State::Failed, true) => changed = true,
                (State::Usable | State::Standby, false) => {
                    changed = true;
                    host.state = State::Failed;
                }
                _ => {}
            }
        }
        changed
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Gauges {
    /// Neither degraded nor draining, too.
    healthy: bool,
    active: u32,
}

/// By address as statistics write it.
fn gauges_of<'t>(cluster: &str, text: &'t str) -> BTreeMap<&'t str, Gauges> {
    let prefix = format!("cluster.{}.endpoint.", in_stats(cluster));
    let mut hosts: BTreeMap<&str, Gauges> = BTreeMap::new();
    for line in text.lines() {
        let gauge = line
            .strip_prefix(&prefix)
            .and_then(|line| line.split_once(": "))
            .and_then(|(name, value)| Some((name.rsplit_once('.')?, value.trim().parse().ok()?)));
        let Some(((address, name), value)): Option<(_, u32)> = gauge else {
            continue;
        };
        match name {
            "healthy" => hosts.entry(address).or_default().healthy = value > 0,
            "rq_active" => hosts.entry(address).or_default().active = value,
            _ => {}
        }
    }
    hosts
}

/// Envoy's statistics have no colons in their names.
fn in_stats(name: &str) -> String {
    name.replace(':', "_")
}

fn gauges_path(clusters: &[&str]) -> String {
    let mut path = String::from("/stats?filter=%5Ecluster%5C.");
    let names: Vec<String> = clusters.iter().map(|name| in_stats(name)).collect();
    super::clusters::push_any(&mut path, names.iter().map(String::as_str));
    path.push_str("%5C.endpoint%5C..*%5C.(healthy%7Crq_active)%24");
    path
}
