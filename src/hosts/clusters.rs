//! The answer of Envoy's admin to `/clusters?format=json` → what it says of some clusters' hosts.
//!
//! Guarantee: any bytes give reports or an error; each address is reported once. Not here: who
//! asks and when (filter/). Up to about 200 hosts this is the cheapest source (ENVOY.md 2.1).

use super::{HostReport, State, canonical, zone};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::net::{IpAddr, SocketAddr};

/// Why an answer says nothing of a cluster's hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostsError {
    /// It is not what Envoy answers.
    Unreadable(String),
    /// Envoy has no such cluster.
    NoCluster,
}

impl fmt::Display for HostsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(why) => write!(f, "the admin's answer cannot be read: {why}"),
            Self::NoCluster => f.write_str("the admin knows no cluster of this name"),
        }
    }
}

impl std::error::Error for HostsError {}

/// Envoy takes requests with 60 KiB of headers; a path is well below that, or asks for all.
const PATH_BYTES_MAX: usize = 16 * 1024;

/// The path to poll for these clusters. Envoy before 1.38 ignores the filter and answers all.
#[must_use]
pub fn clusters_path(clusters: &[&str]) -> String {
    const ALL: &str = "/clusters?format=json";
    let mut path = format!("{ALL}&filter=%5E");
    push_any(&mut path, clusters.iter().copied());
    path.push_str("%24");
    match path.len() {
        0..=PATH_BYTES_MAX => path,
        _ => ALL.to_owned(),
    }
}

/// A regular expression in a query for any of these texts.
pub(super) fn push_any<'t>(path: &mut String, texts: impl ExactSizeIterator<Item = &'t str>) {
    let several = texts.len() > 1;
    path.push_str(if several { "(" } else { "" });
    for (index, text) in texts.enumerate() {
        path.push_str(if index > 0 { "%7C" } else { "" });
        push_literal(path, text);
    }
    path.push_str(if several { ")" } else { "" });
}

/// A text that stands for itself in a regular expression in a query.
fn push_literal(path: &mut String, text: &str) {
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' => path.push(char::from(byte)),
            // Escaped for the regular expression, then for the query.
            b' '..=b'~' => push_escaped(path, &[b'\\', byte]),
            _ => push_escaped(path, &[byte]),
        }
    }
}

fn push_escaped(path: &mut String, bytes: &[u8]) {
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = write!(path, "%{byte:02X}");
    }
}

/// Reads the answer's hosts of each of these clusters, by address. A cluster that is not in it is
/// an error of its own; one without hosts is none.
///
/// # Errors
/// If the bytes are not such an answer.
pub fn parse_clusters(
    bytes: &[u8],
    clusters: &[&str],
) -> Result<Vec<Result<Vec<HostReport>, HostsError>>, HostsError> {
    let answer: Answer<'_> = serde_json::from_slice(bytes).map_err(unreadable)?;
    let hosts = |cluster: &&str| {
        let mut statuses = answer.cluster_statuses.iter();
        let found = statuses.find(|status| status.name == *cluster);
        found.ok_or(HostsError::NoCluster)?.hosts()
    };
    Ok(clusters.iter().map(hosts).collect())
}

fn unreadable(error: serde_json::Error) -> HostsError {
    HostsError::Unreadable(error.to_string())
}

impl ClusterStatus<'_> {
    fn hosts(&self) -> Result<Vec<HostReport>, HostsError> {
        let Some(hosts) = self.host_statuses else {
            return Ok(Vec::new());
        };
        let hosts: Vec<HostStatus<'_>> = serde_json::from_str(hosts.get()).map_err(unreadable)?;
        let mut found: BTreeMap<String, Found> = BTreeMap::new();
        for (address, host) in hosts.iter().filter_map(HostStatus::found) {
            match found.get_mut(&address) {
                Some(other) => other.merge(host),
                None => {
                    found.insert(address, host);
                }
            }
        }
        Ok(reports(found))
    }
}

/// What the answer says of one host.
struct Found {
    state: State,
    /// 0 is the best.
    priority: u32,
    weight: u32,
    zone: String,
    active: u32,
}

impl Found {
    /// A host that is replaced by one at the same address is listed twice for a while.
    fn merge(&mut self, mut other: Self) {
        let active = self.active.saturating_add(other.active);
        if (other.state, other.priority) < (self.state, self.priority) {
            std::mem::swap(self, &mut other);
        }
        self.active = active;
    }
}

/// Of several priorities only the best with a healthy host counts, or with a degraded one if none
/// is healthy; `override_host` would send to any.
fn reports(found: BTreeMap<String, Found>) -> Vec<HostReport> {
    let of = |state| found.values().filter(move |host| host.state == state);
    let best = |state| of(state).map(|host| host.priority).min();
    let best = best(State::Usable).or(best(State::Degraded));
    let in_best = |state| {
        let hosts = of(state).filter(|host| Some(host.priority) == best);
        hosts.count() as u64
    };
    let all = found.values().filter(|host| Some(host.priority) == best);
    let factor = factor_of_degraded(
        in_best(State::Usable),
        in_best(State::Degraded),
        all.count() as u64,
    );
    let report = |(address, host): (String, Found)| {
        let degraded = host.state == State::Degraded;
        let is_best = Some(host.priority) == best;
        let (state, factor) = match (host.state, factor) {
            (State::Usable, _) if !is_best => (State::Standby, 1),
            (State::Usable, Some(_)) => (State::Usable, FACTOR_ONE),
            (State::Degraded, Some(factor)) if is_best => (State::Usable, factor),
            (state, _) => (state, 1),
        };
        HostReport {
            address,
            state,
            degraded,
            weight: host.weight.saturating_mul(factor),
            zone: host.zone,
            active: Some(host.active),
        }
    };
    found.into_iter().map(report).collect()
}

/// What a healthy host's weight is multiplied by where degraded ones are in use: a percent.
const FACTOR_ONE: u32 = 100;

/// What the weights of degraded hosts are multiplied by while a healthy one's are by
/// [`FACTOR_ONE`]; `None` if they get nothing. As Envoy's own policies do it: the healthy hosts
/// of a priority take 140 % of their part of all, the degraded ones what is left of 100, up to 140 %
/// of theirs. So three healthy of four suffice, and one of four is not buried.
fn factor_of_degraded(healthy: u64, degraded: u64, all: u64) -> Option<u32> {
    let available = |hosts: u64| (140 * hosts / all.max(1)).min(100);
    if healthy == 0 {
        return Some(1);
    }
    let healthy_load = available(healthy);
    let degraded_load = available(degraded).min(100 - healthy_load);
    if degraded_load == 0 {
        return None;
    }
    let share = degraded_load * healthy * u64::from(FACTOR_ONE);
    let factor = share / (healthy_load * degraded).max(1);
    Some(u32::try_from(factor).unwrap_or(FACTOR_ONE).max(1))
}

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow, default)]
    cluster_statuses: Vec<ClusterStatus<'a>>,
}

#[derive(Deserialize)]
struct ClusterStatus<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    /// Not looked into unless it is the cluster that is asked for.
    #[serde(borrow)]
    host_statuses: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct HostStatus<'a> {
    #[serde(borrow)]
    address: Address<'a>,
    #[serde(borrow, default)]
    stats: Vec<Stat<'a>>,
    #[serde(borrow, default)]
    health_status: Health<'a>,
    weight: Option<u32>,
    #[serde(default)]
    priority: u32,
    #[serde(borrow, default)]
    locality: Locality<'a>,
}

#[derive(Default, Deserialize)]
struct Locality<'a> {
    #[serde(borrow, default)]
    zone: Cow<'a, str>,
}

#[derive(Deserialize)]
struct Address<'a> {
    /// Hosts behind pipes and internal listeners have none, and cannot be chosen by address.
    #[serde(borrow)]
    socket_address: Option<SocketAddress<'a>>,
}

#[derive(Deserialize)]
struct SocketAddress<'a> {
    #[serde(borrow)]
    address: Cow<'a, str>,
    #[serde(default)]
    port_value: u16,
}

/// One of a host's numbers: written as text, and left out when it is 0.
#[derive(Deserialize)]
struct Stat<'a> {
    #[serde(borrow, default)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    value: Cow<'a, str>,
}

/// Flags are only there when they are set.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Health<'a> {
    #[serde(borrow)]
    eds_health_status: Cow<'a, str>,
    failed_active_health_check: bool,
    failed_outlier_check: bool,
    failed_active_degraded_check: bool,
    pending_dynamic_removal: bool,
    pending_active_hc: bool,
    excluded_via_immediate_hc_fail: bool,
    active_hc_timeout: bool,
}

impl HostStatus<'_> {
    /// Its address and the rest; `None` if it has no address to be chosen by.
    fn found(&self) -> Option<(String, Found)> {
        let socket = self.address.socket_address.as_ref()?;
        let ip: IpAddr = socket.address.parse().ok()?;
        let address = canonical(&SocketAddr::new(ip, socket.port_value).to_string())?;
        let mut stats = self.stats.iter();
        let active = stats.find(|stat| stat.name == "rq_active");
        let found = Found {
            state: self.health_status.state(),
            priority: self.priority,
            weight: self.weight.unwrap_or(1).max(1),
            zone: zone(&self.locality.zone),
            active: active
                .and_then(|stat| stat.value.parse().ok())
                .unwrap_or_default(),
        };
        Some((address, found))
    }
}

impl Health<'_> {
    fn state(&self) -> State {
        let failed = self.failed_active_health_check
            || self.failed_outlier_check
            || self.pending_active_hc
            || self.excluded_via_immediate_hc_fail
            || self.active_hc_timeout;
        match &*self.eds_health_status {
            "UNHEALTHY" | "TIMEOUT" => State::Failed,
            _ if failed => State::Failed,
            "DRAINING" => State::Draining,
            _ if self.pending_dynamic_removal => State::Draining,
            "DEGRADED" => State::Degraded,
            _ if self.failed_active_degraded_check => State::Degraded,
            _ => State::Usable,
        }
    }
}
