//! The files a running Envoy watches: the hosts of a cluster (EDS) and the listeners (LDS).
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
    write_assignment(dir, load_assignment(cluster, hosts))
}

/// The same; the closure sees each endpoint with its place in the list.
pub(super) fn write_eds_with(
    dir: &Path,
    cluster: &str,
    hosts: &[SocketAddr],
    mut change: impl FnMut(usize, &mut Value),
) -> Result<()> {
    let mut assignment = load_assignment(cluster, hosts);
    let endpoints = assignment.pointer_mut("/endpoints/0/lb_endpoints");
    let endpoints = endpoints.and_then(Value::as_array_mut);
    for (n, endpoint) in endpoints.into_iter().flatten().enumerate() {
        change(n, endpoint);
    }
    write_assignment(dir, assignment)
}

/// Writes what an EDS cluster consists of.
fn write_assignment(dir: &Path, mut assignment: Value) -> Result<()> {
    if let Some(fields) = assignment.as_object_mut() {
        let kind = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
        fields.insert("@type".to_owned(), Value::from(kind));
    }
    replace(
        &eds_path(dir),
        &json!({"resources": [assignment]}).to_string(),
    )
}

/// Where the listeners are listed.
fn lds_path(dir: &Path) -> PathBuf {
    dir.join("lds.json")
}

/// Writes the listeners of a config, which are all it needs to have.
pub(super) fn write_lds(dir: &Path, config: &Value) -> Result<()> {
    let listeners = config.pointer("/static_resources/listeners").cloned();
    let mut listeners = listeners.unwrap_or_default();
    for listener in listeners.as_array_mut().into_iter().flatten() {
        if let Some(fields) = listener.as_object_mut() {
            let kind = "type.googleapis.com/envoy.config.listener.v3.Listener";
            fields.insert("@type".to_owned(), Value::from(kind));
        }
    }
    replace(&lds_path(dir), &json!({"resources": listeners}).to_string())
}

/// Where Envoy finds a file of `dir`, and that it watches the folder.
pub(super) fn source(dir: &Path, path: &Path) -> Value {
    json!({"resource_api_version": "V3", "path_config_source": {
        "path": path.to_string_lossy(),
        "watched_directory": {"path": dir.to_string_lossy()},
    }})
}

/// Moves the listeners of a config into their file; returns a config that has only them.
pub(super) fn move_listeners(dir: &Path, config: &mut Value) -> Result<Value> {
    let statics = config
        .pointer_mut("/static_resources")
        .and_then(Value::as_object_mut);
    let listeners = statics.and_then(|statics| statics.remove("listeners"));
    let moved = json!({"static_resources": {"listeners": listeners}});
    write_lds(dir, &moved)?;
    let fields = config.as_object_mut().context("a config is an object")?;
    let lds = json!({"lds_config": source(dir, &lds_path(dir))});
    fields.insert("dynamic_resources".to_owned(), lds);
    Ok(moved)
}

/// Replaces a file in one step.
pub(super) fn replace(path: &Path, text: &str) -> Result<()> {
    let fresh = path.with_extension("new");
    fs::write(&fresh, text).with_context(|| format!("cannot write {}", fresh.display()))?;
    fs::rename(&fresh, path).with_context(|| format!("cannot replace {}", path.display()))
}
