//! Proves with a real Envoy that what the Kubernetes files patch into a gateway's configuration is
//! valid there and routes by prompt.
//!
//! The patches are applied here, as data, to what their control planes generate in short. Not here:
//! those control planes, and the settings that have fields of their own in their policies.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use prefix_router::names::{DECISIONS, HOSTS};
use serde_json::{Value, json};
use tools::harness::Plan;
use tools::testkit::{Client, MockEngine, Protocol, chat, prompt_of};

const SOON: Duration = Duration::from_secs(20);
const GATEWAY: &str = "default/eg/http";
const HTTP: &str = "envoy.filters.network.http_connection_manager";

/// Any YAML, read as [`Plan`] reads Envoy's.
fn yaml(text: &str) -> Value {
    let mut read = Value::Null;
    let plan = Plan::parse(text).unwrap();
    let _ = plan.edit(|value| {
        read = value.clone();
        Ok(())
    });
    read
}

/// The documents of one of the project's files.
fn documents(file: &str) -> Vec<Value> {
    let path = tools::setup::root().unwrap().join("envoy").join(file);
    let text = std::fs::read_to_string(path).unwrap();
    text.split("\n---\n").map(yaml).collect()
}

fn of_kind<'a>(documents: &'a [Value], kind: &str) -> &'a Value {
    let found = documents.iter().find(|document| document["kind"] == kind);
    found.unwrap_or_else(|| panic!("no {kind}"))
}

/// What a control plane makes of a route to engines, as far as the patches look at it.
fn generated(chain: Value, cluster: &str) -> Value {
    let pipe = json!({"pipe": {"path": "/run/envoy/admin.sock"}});
    let admin = json!([{"lb_endpoints": [{"endpoint": {"address": pipe}}]}]);
    // The least that either of them lets a gateway hold back.
    let buffer = 32_768;
    let mut listener =
        json!({"name": GATEWAY, "address": {}, "per_connection_buffer_limit_bytes": buffer});
    listener
        .as_object_mut()
        .unwrap()
        .extend(chain.as_object().unwrap().clone());
    json!({
        "node": {"id": "gateway", "cluster": "gateway"},
        "admin": {"address": pipe},
        "static_resources": {"listeners": [listener], "clusters": [
            {
                "name": cluster, "type": "STATIC", "connect_timeout": "10s",
                "lb_policy": "LEAST_REQUEST", "common_lb_config": {},
                "circuit_breakers": {"thresholds": [{"max_retries": 1024}]},
            },
            {
                "name": "prometheus_stats", "type": "STATIC", "connect_timeout": "1s",
                "load_assignment": {"cluster_name": "prometheus_stats", "endpoints": admin},
            },
        ]},
    })
}

fn filters(cluster: &str) -> Value {
    let kind = "type.googleapis.com/envoy.extensions.filters";
    json!([{"name": HTTP, "typed_config": {
        "@type": format!("{kind}.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "http",
        "http_filters": [{
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": format!("{kind}.http.router.v3.Router")},
        }],
        "route_config": {"name": GATEWAY, "virtual_hosts": [{
            "name": "all", "domains": ["*"],
            "routes": [{"match": {"prefix": "/"}, "route": {"cluster": cluster}}],
        }]},
    }}])
}

/// The `add` of a JSON Patch.
fn add(target: &mut Value, path: &str, value: &Value) {
    let (parent, last) = path.rsplit_once('/').unwrap();
    let parent = target.pointer_mut(parent);
    match parent.unwrap_or_else(|| panic!("nothing at {path}")) {
        Value::Array(items) => items.insert(last.parse().unwrap(), value.clone()),
        parent => parent[last] = value.clone(),
    }
}

/// What protobuf does: objects are merged, lists get longer, everything else is replaced.
fn merge(target: &mut Value, value: &Value) {
    match (target, value) {
        (Value::Object(target), Value::Object(fields)) => {
            for (name, value) in fields {
                merge(target.entry(name).or_insert(Value::Null), value);
            }
        }
        (Value::Array(target), Value::Array(items)) => target.extend(items.iter().cloned()),
        (target, value) => *target = value.clone(),
    }
}

fn named<'a>(list: &'a mut Value, name: &Value) -> &'a mut Value {
    let mut items = list.as_array_mut().unwrap().iter_mut();
    let found = items.find(|item| item["name"] == *name);
    found.unwrap_or_else(|| panic!("nothing is named {name}"))
}

fn envoy_gateway() -> (Value, &'static str) {
    let cluster = "httproute/default/engines/rule/0";
    let chain = json!({"default_filter_chain": {"filters": filters(cluster)}});
    let mut envoy = generated(chain, cluster);
    let documents = documents("envoy-gateway.yaml");
    let bootstrap = of_kind(&documents, "EnvoyProxy")["spec"]["bootstrap"]["value"].as_str();
    merge(&mut envoy, &yaml(bootstrap.unwrap()));
    let patches = &of_kind(&documents, "EnvoyPatchPolicy")["spec"]["jsonPatches"];
    for patch in patches.as_array().unwrap() {
        let resources = &mut envoy["static_resources"];
        let kind = patch["type"].as_str().unwrap().rsplit_once('.').unwrap().1;
        let target = match kind {
            "Cluster" => named(&mut resources["clusters"], &patch["name"]),
            _ => named(&mut resources["listeners"], &patch["name"]),
        };
        let target = match kind {
            "RouteConfiguration" => target
                .pointer_mut("/default_filter_chain/filters/0/typed_config/route_config")
                .unwrap(),
            _ => target,
        };
        let operation = &patch["operation"];
        assert_eq!(operation["op"], "add");
        add(
            target,
            operation["path"].as_str().unwrap(),
            &operation["value"],
        );
    }
    (envoy, cluster)
}

fn istio() -> (Value, &'static str) {
    let cluster = "outbound|8000||engines.default.svc.cluster.local";
    let chain = json!({"filter_chains": [{"filters": filters(cluster)}]});
    let mut envoy = generated(chain, cluster);
    let documents = documents("istio.yaml");
    let patches = &of_kind(&documents, "EnvoyFilter")["spec"]["configPatches"];
    for patch in patches.as_array().unwrap() {
        let (operation, value) = (&patch["patch"]["operation"], &patch["patch"]["value"]);
        let http = "/static_resources/listeners/0/filter_chains/0/filters/0";
        let target = match patch["applyTo"].as_str().unwrap() {
            "BOOTSTRAP" => &mut envoy,
            "NETWORK_FILTER" => envoy.pointer_mut(http).unwrap(),
            "HTTP_FILTER" => {
                assert_eq!(operation, "INSERT_BEFORE");
                let all = envoy.pointer_mut(&format!("{http}/typed_config/http_filters"));
                let all = all.unwrap().as_array_mut().unwrap();
                // The router is the last.
                all.insert(all.len() - 1, value.clone());
                continue;
            }
            "VIRTUAL_HOST" => envoy
                .pointer_mut(&format!("{http}/typed_config/route_config/virtual_hosts/0"))
                .unwrap(),
            "CLUSTER" => named(&mut envoy["static_resources"]["clusters"], &json!(cluster)),
            other => panic!("this test knows no patches of {other}"),
        };
        assert_eq!(operation, "MERGE");
        merge(target, value);
    }
    (envoy, cluster)
}

/// Starts Envoy with it; a prompt sent twice has to go to one engine, by the filter's choice.
async fn check((envoy, cluster): (Value, &str)) {
    let engines = MockEngine::start_many(3).await.unwrap();
    let hosts: Vec<_> = engines.iter().map(MockEngine::address).collect();
    let plan = || {
        Plan::parse(&envoy.to_string())
            .unwrap()
            .hosts(cluster, &hosts)
    };
    plan().validate().await.unwrap();
    let envoy = plan().start().await.unwrap();
    let usable = [("pool", "engines"), ("state", "usable")];
    let all = |found| found == 3.0;
    envoy
        .wait_until_metric(HOSTS, &usable, all, SOON)
        .await
        .unwrap();

    let client = Client::new(envoy.address(), Protocol::Http1);
    let first = client.host(prompt_of(1)).await.unwrap();
    assert_eq!(client.host(prompt_of(1)).await.unwrap(), first);
    let home = [("pool", "engines"), ("decision", "home")];
    let both = |found| found == 2.0;
    envoy
        .wait_until_metric(DECISIONS, &home, both, SOON)
        .await
        .unwrap();
    // Nobody outside chooses, and no engine sees what the filter chose.
    let other = engines
        .iter()
        .find(|engine| engine.name() != first)
        .unwrap();
    let spoofed = prompt_of(1).header("x-prefix-route-host", other.name());
    assert_eq!(client.host(spoofed).await.unwrap(), first);
    // Longer than Envoy holds back unless it is told.
    let long = tools::testkit::Request::chat(chat("Be brief.", &"long ".repeat(1_000_000)));
    client.ok(long).await.unwrap();
    for request in engines.iter().flat_map(MockEngine::take_recorded) {
        let mut headers = request.headers.iter();
        let leaked = headers.find(|(name, _)| name.starts_with("x-prefix-route"));
        assert_eq!(leaked, None);
    }
    envoy.stop().await.unwrap();
}

#[tokio::test]
async fn the_patches_for_envoy_gateway_route_by_prompt() {
    check(envoy_gateway()).await;
}

#[tokio::test]
async fn the_patches_for_istio_route_by_prompt() {
    check(istio()).await;
}
