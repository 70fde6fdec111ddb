//! What is known of hosts: their addresses, and what a source says of their health.
//!
//! Guarantee: an address has one form, and the same answers give the same states on every gateway,
//! in whatever order hosts are listed. Not here: which slot a host has (fleet.rs), which host a
//! request goes to (placement.rs, route.rs), how many run (load.rs).

mod clusters;
mod source;

pub use clusters::{HostsError, clusters_path, parse_clusters};
pub use source::AdminSource;

use std::net::SocketAddr;

/// Hosts an Envoy can have in all pools together, those that are leaving included.
pub const SLOTS_MAX: usize = 1024;

/// `ip:port` as Envoy writes it: IPv6 in brackets and in its shortest form; `None` if it is none.
#[must_use]
pub fn canonical(address: &str) -> Option<String> {
    let parsed: SocketAddr = address.parse().ok()?;
    (parsed.port() != 0).then(|| parsed.to_string())
}

/// Characters of a zone's name that count; clouds' have 10 to 20.
const ZONE_CHARS_MAX: usize = 64;

/// A zone's name in one form, without spaces; empty if it has none.
#[must_use]
pub fn zone(name: &str) -> String {
    let one = |character: char| match character.is_whitespace() || character.is_control() {
        true => '_',
        false => character,
    };
    name.chars().take(ZONE_CHARS_MAX).map(one).collect()
}

/// A host's state in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Requests may be sent to it.
    Usable,
    /// It says of itself that it is not at its best: nothing is sent to it while the others of its
    /// priority suffice.
    Degraded,
    /// It fails its health checks or was ejected as an outlier.
    Failed,
    /// It answers its health checks, and requests no more (stall.rs).
    Stalled,
    /// It is leaving: no new requests.
    Draining,
    /// It belongs to a priority that is not in use.
    Standby,
}

impl State {
    /// Every state, for the metrics.
    pub const ALL: [Self; 6] = [
        Self::Usable,
        Self::Degraded,
        Self::Failed,
        Self::Stalled,
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
            Self::Stalled => "stalled",
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
        self == Self::Usable
    }
}

/// What a host source says of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostReport {
    /// Canonical `ip:port`.
    pub address: String,
    /// Its state in the pool.
    pub state: State,
    /// Whether it says of itself that it is not at its best, in use or not.
    pub degraded: bool,
    /// Its weight in placement, at least 1.
    pub weight: u32,
    /// Its zone, in the form of [`zone`]; empty if it is not known.
    pub zone: String,
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
            degraded: false,
            weight: 1,
            zone: String::new(),
            active: None,
        }
    }
}
