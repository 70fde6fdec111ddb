//! Hosts: addresses, lists, and the table that all workers share.
//!
//! Guarantee: a slot belongs to one host as long as requests run on it. Not here: which host a
//! request goes to (placement.rs, route.rs), how many run (load.rs).

use serde_json::Value;
use std::net::SocketAddr;

/// Hosts an Envoy can have in all pools together, those that are leaving included.
pub const SLOTS_MAX: usize = 1024;

/// `ip:port` as Envoy writes it: IPv6 in brackets and in its shortest form; `None` if it is none.
#[must_use]
pub fn canonical(address: &str) -> Option<String> {
    let parsed: SocketAddr = address.parse().ok()?;
    (parsed.port() != 0).then(|| parsed.to_string())
}

/// A host's state in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Requests may be sent to it.
    Usable,
    /// Likewise, though it says of itself that it is not at its best.
    Degraded,
    /// It fails its health checks or was ejected as an outlier.
    Failed,
    /// It is leaving: no new requests.
    Draining,
    /// It belongs to a priority that is not in use.
    Standby,
}

impl State {
    /// Every state, for the metrics.
    pub const ALL: [Self; 5] = [
        Self::Usable,
        Self::Degraded,
        Self::Failed,
        Self::Draining,
        Self::Standby,
    ];

    /// The metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Usable => "usable",
            Self::Degraded => "degraded",
            Self::Failed => "failed",
            Self::Draining => "draining",
            Self::Standby => "standby",
        }
    }

    /// The state of this label.
    #[must_use]
    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.label() == label)
    }

    /// Whether requests may be sent to a host in this state.
    #[must_use]
    pub fn is_usable(self) -> bool {
        matches!(self, Self::Usable | Self::Degraded)
    }
}

/// What a host source says of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostReport {
    /// Canonical `ip:port`.
    pub address: String,
    /// Its state in the pool.
    pub state: State,
    /// Its weight in placement, at least 1.
    pub weight: u32,
    /// Envoy's own count of its requests (`rq_active`), where it is known.
    pub active: Option<u32>,
}

impl HostReport {
    /// A host of a static list.
    #[must_use]
    pub fn usable(address: &str) -> Self {
        Self {
            address: address.to_owned(),
            state: State::Usable,
            weight: 1,
            active: None,
        }
    }
}

/// The admin's answer is not a list of clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostsError;

impl std::fmt::Display for HostsError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the admin's answer is not a list of clusters")
    }
}

/// The hosts of a cluster in Envoy's `/clusters?format=json`.
///
/// # Errors
/// If `bytes` is not JSON.
pub fn parse_clusters(bytes: &[u8], cluster: &str) -> Result<Vec<HostReport>, HostsError> {
    let root: Value = serde_json::from_slice(bytes).map_err(|_| HostsError)?;
    let clusters = list(&root, "cluster_statuses");
    let ours = clusters
        .iter()
        .filter(|entry| entry.get("name").is_some_and(|n| n == cluster));
    let hosts = ours.flat_map(|entry| list(entry, "host_statuses"));
    Ok(hosts.filter_map(parse_host).collect())
}

fn parse_host(host: &Value) -> Option<HostReport> {
    let socket = host.pointer("/address/socket_address")?;
    let ip = socket.get("address")?.as_str()?;
    let port = socket.get("port_value")?.as_u64()?;
    let bracketed = if ip.contains(':') {
        format!("[{ip}]:{port}")
    } else {
        format!("{ip}:{port}")
    };
    let health = host.get("health_status")?;
    let flag = |name: &str| health.get(name).is_some_and(|flag| *flag == true);
    let failed = [
        "failed_active_health_check",
        "failed_outlier_check",
        "pending_dynamic_removal",
    ];
    let state = if failed.into_iter().any(flag) {
        State::Failed
    } else {
        State::Usable
    };
    let active = list(host, "stats")
        .iter()
        .find(|stat| stat.get("name").is_some_and(|name| name == "rq_active"))
        .map(|stat| {
            stat.get("value")
                .and_then(Value::as_str)
                .unwrap_or("0")
                .parse()
                .unwrap_or(0)
        });
    Some(HostReport {
        address: canonical(&bracketed)?,
        state,
        weight: 1,
        active,
    })
}

fn list<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value
        .get(field)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}
