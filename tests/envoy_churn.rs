//! Proves in a real Envoy under load that hosts may come and go, and that config and filter may be
//! replaced, without a failed request and with counters that go on.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use prefix_router::names::DECISIONS;
use serde_json::{Value, json};
use tools::churn::{ChurnArgs, churn};
use tools::setup;
use tools::testkit::{
    Behaviour, Connection, Gateway, MockEngine, Protocol, Request, Traffic, TrafficPlan,
    TrafficReport, ask,
};

const SOON: Duration = Duration::from_secs(20);
/// How long the traffic of a test flows. The long form is `cargo pr churn`.
const UNDER_LOAD: Duration = Duration::from_secs(6);
/// An answer takes 5 ms; anything near this was held up by something.
const HUNG: Duration = Duration::from_secs(5);

#[track_caller]
fn assert_unharmed(report: &TrafficReport) {
    assert_eq!(
        report.failed, 0,
        "of {}: {:?}",
        report.sent, report.failures
    );
    assert!(report.slowest < HUNG, "a request took {:?}", report.slowest);
    assert!(report.sent > 100, "only {} requests were sent", report.sent);
}

#[tokio::test]
async fn a_host_that_comes_and_goes_every_second_harms_no_request_and_moves_only_its_own() {
    let args = ChurnArgs {
        seconds: UNDER_LOAD.as_secs(),
        flaps_per_second: 1.0,
        engines: 8,
        workers: 2,
        rate: 200.0,
        prefixes: 400,
        json: false,
    };
    let report = churn(&args).await.unwrap();
    println!("{report}");
    assert!(report.faults().is_empty(), "{:?}", report.faults());
    assert!(report.flaps >= 2, "{report}");
    assert!(report.requests > 200, "{report}");
    // An eighth, two points, and the luck of 400 draws: three standard deviations are 5 points.
    assert!(report.share_of_host <= 0.125 + 0.02 + 0.05, "{report}");
}

#[tokio::test]
async fn a_host_whose_health_flaps_harms_no_request() {
    let engines = MockEngine::start_many(5).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let traffic = Traffic::start(gateway.address(), &TrafficPlan::default());
    let started = Instant::now();
    while started.elapsed() < UNDER_LOAD {
        engines[0].set_health(503);
        tokio::time::sleep(Duration::from_millis(600)).await;
        engines[0].set_health(200);
        tokio::time::sleep(Duration::from_millis(400)).await;
    }
    assert_unharmed(&traffic.stop().await.unwrap());
    gateway.wait_hosts("usable", 5, SOON).await.unwrap();
    gateway.quiet().await.unwrap();
}

/// The filter's part of a running Envoy's listeners.
fn filter_of(listeners: &mut Value) -> &mut Value {
    let http = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
    let http = listeners.pointer_mut(http).unwrap();
    http.pointer_mut("/http_filters/0/typed_config/config")
        .unwrap()
}

#[tokio::test]
async fn config_and_filter_are_replaced_under_load_without_a_failed_request() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let gateway = Gateway::of(&engines)
        .edit(tools::harness::Plan::listeners_from_file)
        .start()
        .await
        .unwrap();
    let first = setup::ready().unwrap().wasm;
    let second = setup::ready_with_test_hooks().unwrap().wasm;

    // Streams that are there before, during and after all replacements.
    let mut streams = Vec::new();
    let mut connections = Vec::new();
    for _ in 0..5 {
        let mut connection = Connection::open(gateway.address(), Protocol::Http1)
            .await
            .unwrap();
        let held = Request::chat(ask("held")).script(Behaviour::HoldStream { events: 1 });
        let mut stream = connection.start(held).await.unwrap();
        assert!(stream.next().await.unwrap().is_some());
        streams.push(stream);
        connections.push(connection);
    }
    let host = streams[0].engine().unwrap();

    let traffic = Traffic::start(gateway.address(), &TrafficPlan::default());
    let mut decided = 0.0;
    for turn in 0..4 {
        let (wasm, headers) = match turn % 2 {
            0 => (&second, "always"),
            _ => (&first, "off"),
        };
        let (wasm, headers) = (wasm.to_str().unwrap().to_owned(), headers.to_owned());
        let swap = move |listeners: &mut Value| {
            let filter = filter_of(listeners);
            // A new config alone at first, then new code as well.
            let value = filter.pointer_mut("/configuration/value").unwrap();
            let mut config: Value = serde_json::from_str(value.as_str().unwrap()).unwrap();
            config["debug_headers"] = json!(headers);
            *value = Value::from(config.to_string());
            if turn > 0 {
                *filter
                    .pointer_mut("/vm_config/code/local/filename")
                    .unwrap() = Value::from(wasm);
            }
            Ok(())
        };
        gateway.envoy().edit_listeners(swap).await.unwrap();
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let now = gateway.metric(DECISIONS, &[]).await.unwrap();
        assert!(
            now > decided,
            "turn {turn}: decisions went from {decided} to {now}"
        );
        decided = now;
    }
    assert_unharmed(&traffic.stop().await.unwrap());
    let counted: Vec<_> = streams
        .iter()
        .filter(|own| own.engine().unwrap() == host)
        .collect();
    gateway
        .wait_in_flight(&host, counted.len() as u64)
        .await
        .unwrap();
    engines.iter().for_each(MockEngine::release);
    for stream in streams {
        stream.finish().await.unwrap();
    }
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn a_bad_config_is_refused_while_the_old_one_goes_on() {
    let engines = MockEngine::start_many(2).await.unwrap();
    let gateway = Gateway::of(&engines)
        .edit(tools::harness::Plan::listeners_from_file)
        .start()
        .await
        .unwrap();
    let client = gateway.client(Protocol::Http1);
    let home = client.host(Request::chat(ask("hello"))).await.unwrap();
    let refused = gateway
        .envoy()
        .set_filter_config(&json!({"pools": []}))
        .await;
    let message = format!("{:#}", refused.unwrap_err());
    assert!(message.contains("/pools: expected"), "{message}");
    for _ in 0..10 {
        assert_eq!(
            client.host(Request::chat(ask("hello"))).await.unwrap(),
            home
        );
    }
    gateway.quiet().await.unwrap();
}
