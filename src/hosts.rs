//! Hosts: addresses, lists, and the table that all workers share.
//!
//! Guarantee: a slot belongs to one host as long as requests run on it. Not here: which host a
//! request goes to (placement.rs, route.rs), how many run (load.rs).

use std::net::SocketAddr;

/// Hosts an Envoy can have in all pools together, those that are leaving included.
pub const SLOTS_MAX: usize = 1024;

/// `ip:port` as Envoy writes it: IPv6 in brackets and in its shortest form; `None` if it is none.
#[must_use]
pub fn canonical(address: &str) -> Option<String> {
    let parsed: SocketAddr = address.parse().ok()?;
    (parsed.port() != 0).then(|| parsed.to_string())
}
