//! What docker-compose.yaml and what it mounts say, compared with what the code says.

use std::collections::BTreeSet;
use std::fs;

use prefix_router::names::{METRICS, MetricKind};
use serde_json::Value;

use crate::setup;

fn read(file: &str) -> String {
    let path = setup::root().unwrap().join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn yaml(file: &str) -> Value {
    serde_saphyr::from_str(&read(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// The base image of this variable, which both files have to name alike.
fn image(variable: &str) -> String {
    let compose = read("docker-compose.yaml");
    let (_, rest) = compose.split_once(&format!("${{{variable}:-")).unwrap();
    let name = rest.split('}').next().unwrap().to_owned();
    let dockerfile = read("envoy/Dockerfile");
    assert!(
        dockerfile.contains(&format!("ARG {variable}={name}\n")),
        "{variable}: {name}"
    );
    name
}

#[test]
fn the_images_are_of_the_versions_that_the_tool_uses() {
    let envoy = setup::ENVOY_FETCHED;
    assert_eq!(image("ENVOY_IMAGE"), format!("envoyproxy/envoy:v{envoy}"));
    let rust = image("RUST_IMAGE");
    let minor = |version: &str| version.split('.').nth(1).unwrap().parse::<u32>().unwrap();
    let version = rust.strip_prefix("rust:").unwrap();
    assert!(
        minor(version) >= minor(env!("CARGO_PKG_RUST_VERSION")),
        "{rust}"
    );
    // What is built there runs here: one Debian for both.
    let runtime = image("RUNTIME_IMAGE");
    let debian = runtime.strip_prefix("debian:").unwrap();
    assert!(
        rust.ends_with(debian.trim_end_matches("-slim")),
        "{rust}, {runtime}"
    );
}

#[test]
fn compose_publishes_ports_on_this_machine_only_and_runs_nothing_with_privileges() {
    let compose = yaml("docker-compose.yaml");
    let services = compose["services"].as_object().unwrap();
    assert_eq!(services.len(), 5);
    for (name, service) in services {
        for port in service["ports"].as_array().into_iter().flatten() {
            let port = port.as_str().unwrap();
            assert!(port.starts_with("127.0.0.1:"), "{name}: {port}");
        }
        assert_eq!(service["cap_drop"][0], "ALL", "{name}");
        assert!(service["healthcheck"]["test"].is_array(), "{name}");
        assert!(service["stop_grace_period"].is_string(), "{name}");
        for volume in service["volumes"].as_array().into_iter().flatten() {
            let source = volume.as_str().unwrap().split(':').next().unwrap();
            if source.starts_with("./") {
                read(source);
            }
        }
    }
}

#[test]
fn prometheus_asks_every_engine_that_live_starts_and_both_envoys() {
    let scrape = yaml("envoy/observe/prometheus.yaml");
    let mut targets: Vec<String> = Vec::new();
    for job in scrape["scrape_configs"].as_array().unwrap() {
        for group in job["static_configs"].as_array().unwrap() {
            let all = group["targets"].as_array().unwrap().iter();
            targets.extend(all.map(|target| target.as_str().unwrap().to_owned()));
        }
    }
    let mut expected = vec![
        "envoy-with:9901".to_owned(),
        "envoy-without:9901".to_owned(),
    ];
    for fleet in [0, super::engines::PORTS_APART] {
        expected.extend((0..7).map(|host| format!("demo:{}", super::ENGINE_PORT + fleet + host)));
    }
    assert_eq!(targets, expected);
}

/// The names of metrics in a query.
fn names(query: &str) -> BTreeSet<String> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = query.split(|c: char| !word(c));
    let metrics = words.filter(|word| {
        ["prefix_router_", "vllm:", "envoy_"]
            .iter()
            .any(|start| word.starts_with(start))
    });
    metrics.map(str::to_owned).collect()
}

#[test]
fn dashboard_and_alerts_name_metrics_that_exist() {
    let own = METRICS.iter().flat_map(|metric| match metric.kind {
        MetricKind::Histogram => vec![format!("{}_bucket", metric.name)],
        MetricKind::Counter | MetricKind::Gauge => vec![metric.name.to_owned()],
    });
    let mut known: BTreeSet<String> = own.collect();
    let others = [
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
        "vllm:time_to_first_token_seconds_bucket",
        "envoy_cluster_upstream_rq_total",
        "envoy_cluster_name",
        "envoy_wasm_prefix_router_vm_reload_success",
    ];
    known.extend(others.map(str::to_owned));
    let dashboard = yaml("envoy/observe/prefix-router.json");
    let panels = dashboard["panels"].as_array().unwrap();
    let queries = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().unwrap());
    let alerts = yaml("envoy/observe/alerts.yaml");
    let rules = alerts["groups"][0]["rules"].as_array().unwrap();
    let mut seen = 0;
    for query in queries.chain(rules) {
        let query = query["expr"].as_str().unwrap();
        for name in names(query) {
            assert!(known.contains(&name), "{name} in {query}");
            seen += 1;
        }
    }
    assert!(seen >= 20, "only {seen} names were found");
}

/// Whether a rule says of a metric what the README does behind the metric's name.
fn says(rule: &str, metric: &str, readme: &str) -> bool {
    let over_time = ["rate", "increase"].map(|of| format!("{of}({metric}["));
    let over_time = over_time.iter().any(|of| rule.contains(of));
    match readme.trim().split_once(' ') {
        Some((">", bound)) => is_bound(rule, metric, &format!("> {bound}")),
        Some(("=", bound)) => is_bound(rule, metric, &format!("== {bound}")),
        _ if readme.contains("grows") => over_time,
        _ => rule.contains(metric),
    }
}

/// Whether a rule is this bound on a metric as it stands, or on its sum.
fn is_bound(rule: &str, metric: &str, bound: &str) -> bool {
    let left = rule.strip_suffix(bound).map(str::trim_end);
    left.is_some_and(|left| {
        let is_sum = left.starts_with("sum by (") && left.ends_with(&format!(") ({metric})"));
        left == metric || is_sum
    })
}

#[test]
fn every_alert_of_the_readme_is_in_the_file() {
    let readme = read("README.md");
    let (_, rest) = readme.split_once("| Alert on |").unwrap();
    let table = rest.split("\n\n").next().unwrap();
    let alerts = yaml("envoy/observe/alerts.yaml");
    let rules = alerts["groups"][0]["rules"].as_array().unwrap();
    let mut bounds = 0;
    for row in table.lines().skip(2) {
        let first = row.split('|').nth(1).unwrap();
        let parts: Vec<&str> = first.split('`').skip(1).collect();
        for said in parts.chunks(2) {
            let [metric, rest] = said else {
                panic!("{first}");
            };
            // Requests without a host are the alert on hosts, counted otherwise.
            if metric.starts_with("prefix_router_abstain_total") {
                continue;
            }
            let rules = rules.iter().map(|rule| rule["expr"].as_str().unwrap());
            let found = rules.filter(|rule| says(rule, metric, rest)).count();
            assert!(found > 0, "no alert says `{metric}`{rest}");
            bounds += usize::from(rest.contains(['>', '=']));
        }
    }
    assert_eq!(bounds, 4, "rows with a bound");
}
