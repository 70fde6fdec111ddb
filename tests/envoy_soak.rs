//! Proves in a short soak that no request is lost and no counter leaks, whatever ends the requests,
//! and that the hook which makes VMs panic is not in the filter that ships. The long form is
//! `cargo pr soak`.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use prefix_router::load::STOPPED_MS;
use prefix_router::names::{COUNTER_REPAIRS, IN_FLIGHT};
use serde_json::{Value, json};
use tools::harness::Plan;
use tools::setup;
use tools::soak::{SoakArgs, soak};
use tools::testkit::{
    Behaviour, Connection, Gateway, MockEngine, Protocol, Running, eventually, prompt_of,
};

const SOON: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_and_counters_end_at_zero_whatever_ends_the_requests() {
    let args = SoakArgs {
        requests: 5000,
        workers: 2,
        engines: 4,
        clients: 32,
        panics: 2,
        limit: 6,
        seed: 7,
        compare: false,
        json: false,
    };
    let report = soak(&args).await.unwrap();
    println!("{report}");
    assert!(
        report.faults().is_empty(),
        "{:?}\n{report}",
        report.faults()
    );
    assert!(report.diverted > 0, "the limit was never reached");
    assert!(report.crashes > 0);
    let meant: u64 = report.endings.values().map(|count| count.meant).sum();
    assert!(
        meant > args.requests * 8 / 10,
        "the trouble met too many requests: {report}"
    );
}

/// A connection with this many streams that go on.
async fn streaming(gateway: &Gateway, streams: std::ops::Range<u64>) -> (Connection, Vec<Running>) {
    let mut connection = Connection::open(gateway.address(), Protocol::Http2)
        .await
        .unwrap();
    let mut running = Vec::new();
    for prefix in streams {
        let held = prompt_of(prefix).script(Behaviour::HoldStream { events: 1 });
        let mut stream = connection.start(held).await.unwrap();
        assert!(stream.next().await.unwrap().is_some());
        running.push(stream);
    }
    (connection, running)
}

/// A VM stops with streams in flight, and nothing tells the filter what Envoy still has.
async fn a_vm_stops(hosts: impl Fn(&[MockEngine]) -> Value) {
    let engines = MockEngine::start_many(3).await.unwrap();
    let gateway = Gateway::of(&engines)
        .pool(json!({"hosts": hosts(&engines)}))
        .edit(Plan::test_hooks)
        .start_unsettled()
        .await
        .unwrap();
    let (mut stopped, first) = streaming(&gateway, 0..5).await;
    let (_others, second) = streaming(&gateway, 5..10).await;
    let counted = async |count: f64| {
        eventually(SOON, async || {
            gateway.metric(IN_FLIGHT, &[]).await.unwrap() == count
        })
        .await
    };
    assert!(counted(10.0).await, "not all were counted");

    let deadly = prompt_of(99).header("x-prefix-router-panic", "request_headers");
    let started = Instant::now();
    let _ = stopped.start(deadly).await;
    // Envoy cuts a stream of the VM when its next bytes come.
    engines.iter().for_each(MockEngine::release);
    let mut cut = 0.0;
    for stream in first.into_iter().chain(second) {
        cut += f64::from(u8::from(stream.finish().await.is_err()));
    }
    assert!(cut >= 5.0, "the VM goes on: {cut} streams were cut");
    let mut later = Vec::new();
    let served = eventually(SOON, async || {
        let held = prompt_of(20).script(Behaviour::HoldStream { events: 1 });
        let mut connection = Connection::open(gateway.address(), Protocol::Http2)
            .await
            .unwrap();
        let running = connection.start(held).await;
        later.extend(running.ok().filter(|running| running.status == 200));
        later.len() >= 3
    });
    assert!(served.await, "no VM serves any more");
    assert!(counted(3.0).await, "what it left still counts");
    // Its last beat may be as old as its first missing one.
    assert!(started.elapsed() >= Duration::from_millis(STOPPED_MS - 1500));
    let repaired = gateway.metric(COUNTER_REPAIRS, &[]).await.unwrap();
    assert_eq!(repaired, cut);
    engines.iter().for_each(MockEngine::release);
    for running in later {
        running.finish().await.unwrap();
    }
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn what_a_stopped_vm_left_on_listed_hosts_is_taken_back_and_nothing_else() {
    let listed = |engines: &[MockEngine]| {
        let names: Vec<&str> = engines.iter().map(MockEngine::name).collect();
        json!({"static": names})
    };
    a_vm_stops(listed).await;
}

#[tokio::test]
async fn what_a_stopped_vm_left_on_learned_hosts_is_taken_back_and_nothing_else() {
    a_vm_stops(|_| json!({})).await;
}

#[test]
fn the_filter_that_ships_has_no_hook_to_panic() {
    const HOOK: &[u8] = b"x-prefix-router-panic";
    let has_hook = |wasm: &std::path::Path| {
        let bytes = std::fs::read(wasm).unwrap();
        bytes.windows(HOOK.len()).any(|window| window == HOOK)
    };
    assert!(
        has_hook(&setup::ready_with_test_hooks().unwrap().wasm),
        "the hook has another name"
    );
    assert!(
        !has_hook(&setup::ready().unwrap().wasm),
        "the hook is in the release build"
    );
}
