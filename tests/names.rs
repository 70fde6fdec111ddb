//! Proves that the public names are the ones that dashboards and alerts were written for, and that
//! the shipped Envoy configs turn them into labels.
//!
//! `UPDATE=1 cargo test --test names` rewrites the golden list: a change of it breaks dashboards
//! and belongs in the changelog.

#![allow(clippy::unwrap_used)]

use prefix_router::names::{self, METRICS};
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every public name, one a line.
fn listing() -> String {
    let mut lines: Vec<String> = METRICS
        .iter()
        .map(|metric| {
            let labels = metric.labels.join(",");
            format!("{:?} {}{{{labels}}}", metric.kind, metric.name).to_lowercase()
        })
        .collect();
    for header in [
        names::ROUTE_HOST,
        names::ROUTE_FIRST,
        names::ROUTE_POOL,
        names::DEBUG_REQUEST,
    ] {
        lines.push(format!("request header {header}"));
    }
    for header in [
        names::DEBUG_HOST,
        names::DEBUG_DECISION,
        names::DEBUG_POOL,
        names::DEBUG_KEY,
        names::DEBUG_CHECKPOINT,
        names::REASON_HEADER,
    ] {
        lines.push(format!("response header {header}"));
    }
    lines.join("\n") + "\n"
}

#[test]
fn public_names_are_stable() {
    let golden = root().join("tests/names/golden.txt");
    if std::env::var_os("UPDATE").is_some() {
        assert!(
            std::env::var_os("CI").is_none(),
            "UPDATE is for people: CI only compares"
        );
        std::fs::write(&golden, listing()).unwrap();
    }
    assert_eq!(listing(), std::fs::read_to_string(golden).unwrap());
}

#[test]
fn every_metric_of_the_filter_is_in_the_table() {
    let source = std::fs::read_to_string(root().join("src/names.rs")).unwrap();
    let declared: Vec<&str> = source
        .lines()
        .filter_map(|line| line.split_once("&str = \"prefix_router_"))
        .map(|(_, rest)| rest.trim_end_matches("\";"))
        .collect();
    assert!(declared.len() >= 12, "{declared:?}");
    for name in declared {
        let name = format!("prefix_router_{name}");
        assert!(
            METRICS.iter().any(|metric| metric.name == name),
            "{name} is not in METRICS"
        );
    }
}

#[test]
fn names_follow_the_conventions_of_prometheus() {
    for metric in METRICS {
        let is_counter = metric.kind == names::MetricKind::Counter;
        assert_eq!(
            metric.name.ends_with("_total"),
            is_counter,
            "{}",
            metric.name
        );
    }
}

#[test]
fn labels_stand_in_the_stat_as_the_stats_tags_expect() {
    let labels = [("pool", "a b"), ("upstream_host", "[fd00::1]:8000")];
    assert_eq!(
        names::metric("m_total", &labels),
        "m_total.pool.=.a b.=.upstream_host.=.[fd00::1]:8000.="
    );
}

/// The shipped files that configure a whole Envoy or patch its bootstrap.
fn shipped() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join("envoy")).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| {
        std::fs::read_to_string(file).is_ok_and(|text| text.contains("stats_tags:"))
    });
    files
}

#[test]
fn every_shipped_config_makes_labels_of_every_label() {
    let files = shipped();
    assert!(files.len() >= 2, "{files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for label in METRICS.iter().flat_map(|metric| metric.labels) {
            let rule = format!("tag_name: {label}, regex: '(\\.{label}\\.=\\.(.+?)\\.=)'");
            assert!(text.contains(&rule), "{} lacks {rule}", file.display());
        }
        // Only a listener that obeys this header has to strip it.
        let obeys = text.contains(&format!("name: {}", names::ROUTE_FIRST));
        let strips = text.contains(&format!("- remove: {}\n", names::ROUTE_FIRST));
        assert_eq!(obeys, strips, "{}", file.display());
    }
}

#[test]
fn every_shipped_listener_strips_the_headers_of_the_filter() {
    for file in shipped() {
        let text = std::fs::read_to_string(&file).unwrap();
        for header in [names::ROUTE_HOST, names::ROUTE_POOL] {
            let rule = format!("- remove: {header}\n");
            assert!(text.contains(&rule), "{} lacks {rule}", file.display());
        }
        // Only a listener that obeys this header has to strip it.
        let obeys = text.contains(&format!("name: {}", names::ROUTE_FIRST));
        let strips = text.contains(&format!("- remove: {}\n", names::ROUTE_FIRST));
        assert_eq!(obeys, strips, "{}", file.display());
    }
}
