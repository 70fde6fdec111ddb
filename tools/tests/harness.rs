//! Proves that the harness runs real Envoys side by side, from the files users copy, and tells in
//! one line why one does not start.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;
use tools::harness::{Plan, Policy};
use tools::testkit::{Client, MockEngine, Protocol, Request, eventually};

const PLAIN: &str = "envoy/envoy.yaml";
const SOON: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread")]
async fn two_envoys_serve_side_by_side_and_show_their_counters() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let addresses: Vec<_> = engines.iter().map(MockEngine::address).collect();
    let start = || {
        Plan::load(PLAIN)
            .unwrap()
            .hosts("engines", &addresses)
            .without_filter(Policy::RoundRobin)
            .concurrency(1)
            .start()
    };
    let (one, two) = tokio::join!(start(), start());
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_ne!(one.address(), two.address());
    let client = Client::new(one.address(), Protocol::Http1);
    for _ in 0..6 {
        assert_eq!(client.send(Request::chat("{}")).await.unwrap().status, 200);
    }
    let counts: Vec<u64> = engines.iter().map(MockEngine::total).collect();
    assert_eq!(counts, [2, 2, 2]);
    let name = "cluster.engines.upstream_rq_200";
    assert!(
        one.wait_until(name, |count| count >= 6, SOON)
            .await
            .unwrap()
            >= 6
    );
    let labels = [
        ("envoy_cluster_name", "engines"),
        ("envoy_response_code", "200"),
    ];
    let metric = one
        .metric("envoy_cluster_upstream_rq", &labels)
        .await
        .unwrap();
    assert!(metric.is_some_and(|count| count >= 6.0), "{metric:?}");
    assert_eq!(two.metric("no_such_metric", &[]).await.unwrap(), None);
    assert!(one.usage().unwrap().cpu > Duration::ZERO);
    assert!(
        one.wait_for_log("starting main dispatch loop", SOON)
            .await
            .is_ok()
    );
    assert!(one.stop().await.unwrap().success());
    assert!(two.stop().await.unwrap().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_from_a_file_can_be_changed_while_it_runs() {
    let engines = MockEngine::start_many(2).await.unwrap();
    let envoy = Plan::load("envoy/envoy-eds.yaml")
        .unwrap()
        .hosts("engines", &[engines[0].address()])
        .without_filter(Policy::Random)
        .start()
        .await
        .unwrap();
    let client = Client::new(envoy.address(), Protocol::Http1);
    assert_eq!(
        client.host(Request::chat("{}")).await.unwrap(),
        engines[0].name()
    );
    envoy.set_hosts(&[engines[1].address()]).await.unwrap();
    let started = Instant::now();
    while client.host(Request::chat("{}")).await.unwrap() != engines[1].name() {
        assert!(started.elapsed() < SOON, "the new host is never used");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_filter_tells_which_build_it_is() {
    let ready = tokio::task::spawn_blocking(tools::setup::ready)
        .await
        .unwrap()
        .unwrap();
    let envoy = Plan::load(PLAIN)
        .unwrap()
        .hosts("engines", &[])
        .start()
        .await
        .unwrap();
    let labels = [
        ("version", env!("CARGO_PKG_VERSION")),
        ("commit", ready.commit.as_str()),
    ];
    let wanted = |value| value == 1.0;
    envoy
        .wait_until_metric("prefix_router_build_info", &labels, wanted, SOON)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_filter_can_be_configured_anew_while_it_runs() {
    let engine = MockEngine::start().await.unwrap();
    let hosts = [engine.address()];
    let plan = Plan::load(PLAIN)
        .unwrap()
        .hosts("engines", &hosts)
        .listeners_from_file();
    let envoy = plan.start().await.unwrap();
    let client = Client::new(envoy.address(), Protocol::Http1);
    let shows = async || {
        let answer = client.ok(Request::chat("{}")).await.unwrap();
        answer.header("x-prefix-router-decision").is_some()
    };
    assert!(!shows().await);
    let config = |debug: &str| {
        let pool = json!({"cluster": "engines", "hosts": {"admin_cluster": "envoy_admin"}});
        json!({"pools": [pool], "debug_headers": debug})
    };
    envoy.set_filter_config(&config("always")).await.unwrap();
    // The old listener drains; a new connection meets the new one.
    assert!(
        eventually(SOON, async || {
            let client = Client::new(envoy.address(), Protocol::Http1);
            let answer = client.ok(Request::chat("{}")).await.unwrap();
            answer.header("x-prefix-router-decision").is_some()
        })
        .await
    );
    let refused = envoy
        .set_filter_config(&config("sometimes"))
        .await
        .unwrap_err();
    check_reason(&refused, "/debug_headers");
    let again = Client::new(envoy.address(), Protocol::Http1);
    assert_eq!(again.send(Request::chat("{}")).await.unwrap().status, 200);
}

#[track_caller]
fn check_reason(error: &anyhow::Error, expected: &str) {
    let text = format!("{error:#}");
    assert!(text.contains(expected), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_told() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let plan = Plan::load(PLAIN)
        .unwrap()
        .without_filter(Policy::Random)
        .port(port);
    check_reason(&plan.start().await.unwrap_err(), "Address already in use");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_config_envoy_refuses_is_told_in_one_line() {
    let wrong = || {
        Plan::load(PLAIN)
            .unwrap()
            .without_filter(Policy::Random)
            .edit_cluster("engines", |cluster| {
                cluster["no_such_field"] = json!(1);
                Ok(())
            })
    };
    check_reason(&wrong().start().await.unwrap_err(), "'no_such_field'");
    check_reason(&wrong().validate().await.unwrap_err(), "'no_such_field'");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_filter_is_told_with_what_to_do() {
    let plan = Plan::load(PLAIN).unwrap().wasm(Path::new("no/such.wasm"));
    check_reason(
        &plan.start().await.unwrap_err(),
        "no/such.wasm; `cargo pr setup` builds it",
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edit_that_changes_nothing_is_an_error() {
    let plan = Plan::load(PLAIN).unwrap().hosts("no-such-cluster", &[]);
    check_reason(
        &plan.start().await.unwrap_err(),
        "no cluster no-such-cluster",
    );
    let plan = Plan::load(PLAIN).unwrap().set("/no/such/place", json!(1));
    check_reason(
        &plan.start().await.unwrap_err(),
        "nothing at /no/such/place",
    );
}
