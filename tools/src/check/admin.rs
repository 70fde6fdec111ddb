//! Whether the filter's questions reach Envoy's admin, and are answered.
//!
//! Guarantee: the paths are those that the filter asks. Not here: what the answers say.

use std::collections::BTreeMap;
use std::net::IpAddr;

use prefix_router::config::{Config, HostSource};
use prefix_router::hosts::AdminSource;
use serde_json::Value;

use super::Problems;
use super::surroundings::{DEPTH_MAX, cluster, visit};

/// What keeps the filter from learning hosts.
pub(super) fn unheard(document: &Value, config: &Config) -> Problems {
    let mut problems = Problems::default();
    let mut asked: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for pool in &config.pools {
        if let HostSource::Admin { cluster, .. } = &pool.hosts {
            asked.entry(cluster).or_default().push(&pool.cluster);
        }
    }
    for (admin, clusters) in asked {
        let Some(admin) = cluster(document, admin) else {
            continue;
        };
        match led_astray(document, admin) {
            Some(Ok(warning)) => problems.warnings.push(warning),
            Some(Err(error)) => problems.errors.push(error),
            None => {}
        }
        let path = AdminSource::new(clusters.iter().copied()).ask(0);
        if !allows(document, &path) {
            problems.errors.push(
                "admin.allow_paths forbids /clusters?format=json, which the filter asks: it learns no \
                 host; add { prefix: /clusters } (Envoy compares the query, too)"
                    .into(),
            );
        }
        let has_gauges = clusters.iter().any(|name| {
            cluster(document, name).is_some_and(|found| found.get("track_cluster_stats").is_some())
        });
        if has_gauges && !allows(document, "/stats?filter=") {
            problems.warnings.push(
                "admin.allow_paths forbids /stats, which the filter asks with more than 200 hosts: \
                 add { prefix: /stats }"
                    .into(),
            );
        }
    }
    problems.errors.dedup();
    problems.warnings.dedup();
    problems
}

/// How the admin's cluster leads to something else: a warning, or an error.
fn led_astray(document: &Value, admin: &Value) -> Option<Result<String, String>> {
    let name = admin.get("name")?.as_str()?;
    let mut addresses = Vec::new();
    visit(admin, &mut String::new(), DEPTH_MAX, &mut |value, _| {
        addresses.extend(value.get("endpoint").and_then(|it| it.get("address")));
    });
    let Some(listens) = document.pointer("/admin/address") else {
        return Some(Ok(format!(
            "the file has no admin.address, to which cluster {name} is to lead: without it the \
             filter learns no host"
        )));
    };
    let listeners = document.pointer("/static_resources/listeners");
    let listeners = listeners.and_then(Value::as_array);
    // A listener may hand the questions on.
    let is_known = |address: &Value| {
        let listeners = listeners.into_iter().flatten();
        let mut own = listeners.filter_map(|listener| listener.get("address"));
        can_be(listens, address) || own.any(|own| can_be(own, address))
    };
    let wrong = addresses.into_iter().find(|address| !is_known(address))?;
    Some(Err(format!(
        "cluster {name} leads to {}, but the admin listens on {}: the filter learns no host; write \
         the same address in both",
        text(wrong),
        text(listens)
    )))
}

/// Whether who connects to `address` can reach what listens there.
fn can_be(listens: &Value, address: &Value) -> bool {
    let field = |value: &Value, path: &str| value.pointer(path).cloned();
    let pipe = "/pipe/path";
    if listens.get("pipe").is_some() || address.get("pipe").is_some() {
        return field(listens, pipe) == field(address, pipe);
    }
    let port = "/socket_address/port_value";
    if field(listens, port) != field(address, port) {
        return false;
    }
    let ip = |value: &Value| -> Option<IpAddr> {
        let ip = field(value, "/socket_address/address")?;
        ip.as_str()?.parse().ok()
    };
    match (ip(listens), ip(address)) {
        (Some(listens), Some(address)) => listens.is_unspecified() || listens == address,
        // A name can be any address.
        _ => true,
    }
}

fn text(address: &Value) -> String {
    if let Some(path) = address.pointer("/pipe/path").and_then(Value::as_str) {
        return path.to_owned();
    }
    let host = address.pointer("/socket_address/address");
    let port = address.pointer("/socket_address/port_value");
    match (host.and_then(Value::as_str), port) {
        (Some(host), Some(port)) => format!("{host}:{port}"),
        _ => address.to_string(),
    }
}

/// Whether the admin answers this path; Envoy compares it with its query.
fn allows(document: &Value, path: &str) -> bool {
    let rules = document.pointer("/admin/allow_paths");
    let rules = rules.and_then(Value::as_array).filter(|it| !it.is_empty());
    rules.is_none_or(|rules| rules.iter().any(|rule| matches(rule, path)))
}

fn matches(rule: &Value, path: &str) -> bool {
    let is_caseless = rule.get("ignore_case") == Some(&Value::Bool(true));
    let fold = |text: &str| match is_caseless {
        true => text.to_ascii_lowercase(),
        false => text.to_owned(),
    };
    let path = fold(path);
    let pattern = |field: &str| Some(fold(rule.get(field)?.as_str()?));
    if let Some(exact) = pattern("exact") {
        return path == exact;
    }
    if let Some(prefix) = pattern("prefix") {
        return path.starts_with(&prefix);
    }
    if let Some(suffix) = pattern("suffix") {
        return path.ends_with(&suffix);
    }
    // What is not understood here (a regular expression) may allow it.
    pattern("contains").is_none_or(|part| path.contains(&part))
}
