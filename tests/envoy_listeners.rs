//! Proves in a real Envoy that listeners with configurations of their own live side by side in one
//! VM, and that what is left of a replaced one does not go on to apply what it said.

#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::time::Duration;

use prefix_router::names::{COUNTER_REPAIRS, DECISIONS, HOST_SOURCE_ERRORS, HOSTS, IN_FLIGHT};
use serde_json::{Value, json};
use tools::harness::Plan;
use tools::testkit::{
    Behaviour, Client, Connection, Gateway, MockEngine, Protocol, Request, ask, eventually,
};

const SOON: Duration = Duration::from_secs(20);
/// Ten applications of a list in the config.
const TEN_TURNS: Duration = Duration::from_secs(10);

/// An Envoy with a second listener, in front of the engines from `second` on; the first has those
/// before `first`. What is said of its pool is said of the other's too.
async fn two_listeners(
    engines: &[MockEngine],
    first: usize,
    second: usize,
    pool: Value,
) -> (Gateway, SocketAddr) {
    let others: Vec<SocketAddr> = engines[second..].iter().map(MockEngine::address).collect();
    let gateway = Gateway::of(&engines[..first])
        .pool(pool)
        .edit(move |plan| {
            plan.edit(move |envoy| {
                add_listener(envoy, &others);
                Ok(())
            })
        })
        .start_unsettled()
        .await
        .unwrap();
    let address = gateway.envoy().listener("second").unwrap();
    (gateway, address)
}

/// The second listener: the first with its words for the cluster and the port replaced.
fn add_listener(envoy: &mut Value, hosts: &[SocketAddr]) {
    let named = |text: String| text.replace("engines", "second");
    let copy = |value: &Value| serde_json::from_str(&named(value.to_string())).unwrap();
    let mut listener: Value = copy(&envoy["static_resources"]["listeners"][0]);
    listener["name"] = json!("second");
    let mut cluster: Value = envoy["static_resources"]["clusters"]
        .as_array()
        .unwrap()
        .iter()
        .find(|cluster| cluster["name"] == "engines")
        .map(copy)
        .unwrap();
    let endpoint = |host: &SocketAddr| {
        let (ip, port) = (host.ip().to_string(), host.port());
        let address = json!({"socket_address": {"address": ip, "port_value": port}});
        json!({"endpoint": {"address": address}})
    };
    let endpoints: Vec<Value> = hosts.iter().map(endpoint).collect();
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = json!(endpoints);
    let resources = &mut envoy["static_resources"];
    resources["listeners"]
        .as_array_mut()
        .unwrap()
        .push(listener);
    resources["clusters"].as_array_mut().unwrap().push(cluster);
}

#[tokio::test]
async fn two_listeners_with_pools_of_their_own_both_find_their_hosts_and_keep_their_counts() {
    let engines = MockEngine::start_many(5).await.unwrap();
    // The third engine is in both pools.
    let (gateway, address) = two_listeners(&engines, 3, 2, json!({})).await;
    for pool in ["engines", "second"] {
        let labels = [("pool", pool), ("state", "usable")];
        gateway
            .envoy()
            .wait_until_metric(HOSTS, &labels, |found| found == 3.0, SOON)
            .await
            .unwrap();
    }
    let clients = [
        gateway.client(Protocol::Http1),
        Client::new(address, Protocol::Http1).into(),
    ];
    for n in 0..40 {
        for client in &clients {
            let request = || Request::chat(ask(&format!("question {n}")));
            let home = client.host(request()).await.unwrap();
            assert_eq!(client.host(request()).await.unwrap(), home);
        }
    }
    assert_eq!(gateway.routed().await.unwrap(), 160.0);
    // Both clusters' requests on the shared engine count, and neither poll takes away the other's.
    let shared = &engines[2];
    let mut streams = Vec::new();
    for n in 0..40 {
        for address in [gateway.address(), address] {
            let mut connection = Connection::open(address, Protocol::Http1).await.unwrap();
            let held = Request::chat(ask(&format!("question {n}")))
                .script(Behaviour::HoldStream { events: 1 });
            let mut stream = connection.start(held).await.unwrap();
            assert!(stream.next().await.unwrap().is_some());
            streams.push((connection, stream));
        }
    }
    let shared_by = streams
        .iter()
        .filter(|(_, stream)| stream.engine().as_deref() == Some(shared.name()))
        .count();
    assert!(shared_by >= 4, "{shared_by} of 80 on the shared one");
    tokio::time::sleep(Duration::from_secs(2)).await;
    for pool in ["engines", "second"] {
        let labels = [("pool", pool), ("upstream_host", shared.name())];
        let found = gateway.metric("prefix_router_in_flight", &labels).await;
        assert_eq!(found.unwrap(), shared_by as f64);
    }
    for engine in &engines {
        engine.release();
    }
    for (_, stream) in streams {
        stream.finish().await.unwrap();
    }
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn one_name_for_two_clusters_is_said_and_counted_and_no_request_meets_the_wrong_one() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let (gateway, address) = two_listeners(&engines, 2, 2, json!({"name": "llm"})).await;
    let line = gateway.envoy().wait_for_log("different names", SOON).await;
    assert!(line.unwrap().contains("pool llm"));
    let labels = [("pool", "llm")];
    let counted = gateway.envoy();
    counted
        .wait_until_metric(HOST_SOURCE_ERRORS, &labels, |found| found >= 2.0, SOON)
        .await
        .unwrap();
    for (address, own) in [(gateway.address(), &engines[..2]), (address, &engines[2..])] {
        let client = Client::new(address, Protocol::Http1);
        for n in 0..20 {
            let request = Request::chat(ask(&format!("question {n}")));
            let host = client.host(request).await.unwrap();
            assert!(own.iter().any(|engine| engine.name() == host), "{host}");
        }
    }
}

#[tokio::test]
async fn a_host_list_that_was_replaced_stays_replaced_while_its_listener_drains() {
    let engines = MockEngine::start_many(2).await.unwrap();
    let hosts = |engine: &MockEngine| json!({"hosts": {"static": [engine.name()]}});
    let gateway = Gateway::of(&engines)
        .pool(hosts(&engines[0]))
        .edit(Plan::listeners_from_file)
        .start_unsettled()
        .await
        .unwrap();
    let goes_to = async |engine: &MockEngine| {
        let client = gateway.client(Protocol::Http1);
        client.host(Request::chat(ask("hello"))).await.unwrap() == engine.name()
    };
    assert!(eventually(SOON, async || goes_to(&engines[0]).await).await);
    // Keeps the old listener draining.
    let mut connection = Connection::open(gateway.address(), Protocol::Http1)
        .await
        .unwrap();
    let held = Request::chat(ask("held")).script(Behaviour::HoldStream { events: 1 });
    let mut stream = connection.start(held).await.unwrap();
    assert!(stream.next().await.unwrap().is_some());

    let pool = json!({"cluster": "engines", "hosts": {"static": [engines[1].name()]}});
    let config = json!({"pools": [pool]});
    gateway.envoy().set_filter_config(&config).await.unwrap();
    assert!(eventually(SOON, async || goes_to(&engines[1]).await).await);
    let left = eventually(TEN_TURNS, async || !goes_to(&engines[1]).await).await;
    assert!(!left, "the old list is back");
    engines.iter().for_each(MockEngine::release);
    stream.finish().await.unwrap();
}

#[tokio::test]
async fn a_pool_that_is_renamed_is_forgotten_and_keeps_no_host_from_being_repaired() {
    let engines = MockEngine::start_many(2).await.unwrap();
    let gateway = Gateway::of(&engines)
        .pool(json!({"name": "old"}))
        .edit(|plan| plan.listeners_from_file().test_hooks().drain(1))
        .start()
        .await
        .unwrap();
    let prompt = |n: u64| Request::chat(ask(&format!("question {n}")));
    let client = gateway.client(Protocol::Http1);
    for n in 0..20 {
        client.host(prompt(n)).await.unwrap();
    }
    let plan = Gateway::of(&engines).pool(json!({"name": "new"}));
    let config = plan.filter_config();
    gateway.envoy().set_filter_config(&config).await.unwrap();
    let usable = async |pool: &str, count: f64| {
        let labels = [("pool", pool), ("state", "usable")];
        let envoy = gateway.envoy();
        let found = envoy.wait_until_metric(HOSTS, &labels, |found| found == count, SOON);
        found.await.unwrap();
    };
    usable("new", 2.0).await;
    let labels = [("pool", "old"), ("state", "usable")];
    let shown = gateway.metric(HOSTS, &labels).await.unwrap();
    assert_eq!(shown, 2.0, "it is forgotten while its listener drains");
    usable("old", 0.0).await;
    let line = gateway.envoy().wait_for_log("pool old: forgotten", SOON);
    line.await.unwrap();

    // A VM stops with streams in flight: what it leaves is found by Envoy's own count.
    let mut streams = Vec::new();
    let mut connection = Connection::open(gateway.address(), Protocol::Http2)
        .await
        .unwrap();
    for n in 0..10 {
        let held = prompt(n).script(Behaviour::HoldStream { events: 1 });
        let mut stream = connection.start(held).await.unwrap();
        assert!(stream.next().await.unwrap().is_some());
        streams.push(stream);
    }
    let counted = async |count: f64| {
        let labels = [("pool", "new")];
        let found =
            gateway
                .envoy()
                .wait_until_metric(IN_FLIGHT, &labels, |found| found == count, SOON);
        found.await.unwrap();
    };
    counted(10.0).await;
    let deadly = prompt(99).header("x-prefix-router-panic", "request_headers");
    let _ = connection.start(deadly).await;
    engines.iter().for_each(MockEngine::release);
    for stream in streams {
        assert!(stream.finish().await.is_err(), "the VM goes on");
    }
    counted(0.0).await;
    let repaired = gateway.metric(COUNTER_REPAIRS, &[("pool", "new")]).await;
    assert_eq!(repaired.unwrap(), 10.0);
    let left = gateway.metric(IN_FLIGHT, &[("pool", "old")]).await.unwrap();
    assert_eq!(left, 0.0);
    // Only its gauges are there still, at 0.
    let labels = [("pool", "old"), ("decision", "home")];
    assert!(gateway.metric(DECISIONS, &labels).await.unwrap() > 0.0);
    let served = eventually(SOON, async || client.ok(prompt(1)).await.is_ok());
    assert!(served.await, "no VM serves any more");
}
