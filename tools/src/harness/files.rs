//! The files a running Envoy watches: the hosts of a cluster (EDS).
//!
//! Guarantee: a file is replaced as a whole, so Envoy never reads half of one. Not here: when.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// Where the hosts of the EDS cluster are listed.
pub(super) fn eds_path(dir: &Path) -> PathBuf {
    dir.join("eds.json")
}

/// The hosts of a cluster as Envoy's config lists them.
pub(super) fn load_assignment(cluster: &str, hosts: &[SocketAddr]) -> Value {
    let endpoints: Vec<Value> = hosts
        .iter()
        .map(|host| {
            let address = json!({"address": host.ip().to_string(), "port_value": host.port()});
            json!({"endpoint": {"address": {"socket_address": address}}})
        })
        .collect();
    json!({"cluster_name": cluster, "endpoints": [{"lb_endpoints": endpoints}]})
}

/// Writes the hosts of an EDS cluster.
pub(super) fn write_eds(dir: &Path, cluster: &str, hosts: &[SocketAddr]) -> Result<()> {
    let mut assignment = load_assignment(cluster, hosts);
    if let Some(fields) = assignment.as_object_mut() {
        let kind = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
        fields.insert("@type".to_owned(), Value::from(kind));
    }
    replace(
        &eds_path(dir),
        &json!({"resources": [assignment]}).to_string(),
    )
}

/// Replaces a file in one step.
pub(super) fn replace(path: &Path, text: &str) -> Result<()> {
    let fresh = path.with_extension("new");
    fs::write(&fresh, text).with_context(|| format!("cannot write {}", fresh.display()))?;
    fs::rename(&fresh, path).with_context(|| format!("cannot replace {}", path.display()))
}
