//! Proves in a real Envoy that hosts get what they can take: by weight, by priority, slowly when
//! they are new, less when they fail fast, nothing when Envoy has thrown them out or they hang.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prefix_router::names::HOSTS;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tools::harness::Plan;
use tools::testkit::{
    Behaviour, Body, Client, Connection, Gateway, GatewayPlan, MockEngine, Piece, Protocol,
    Request, admin_page, chat, eventually, prompt_of, words,
};

const SOON: Duration = Duration::from_secs(20);

/// Keys that depend on the prompt alone, and shares that are full at once.
fn fixed() -> Value {
    json!({"routing": "fixed", "prefix_length": 1024, "limit": 1000, "slow_start_ms": 0})
}

async fn homes(client: &Arc<Client>, prefixes: std::ops::Range<u64>) -> Vec<String> {
    let mut homes = Vec::new();
    for prefix in prefixes {
        homes.push(client.host(prompt_of(prefix)).await.unwrap());
    }
    homes
}

fn share(homes: &[String], host: &str) -> f64 {
    homes.iter().filter(|home| *home == host).count() as f64 / homes.len() as f64
}

/// Changes each endpoint of the engines' cluster; the closure gets its place in the list.
fn each_endpoint(
    gateway: GatewayPlan,
    change: impl Fn(usize, &mut Value) + 'static,
) -> GatewayPlan {
    gateway.edit(move |plan| {
        plan.edit_cluster("engines", |cluster| {
            let endpoints = cluster.pointer_mut("/load_assignment/endpoints/0/lb_endpoints");
            for (n, endpoint) in endpoints
                .unwrap()
                .as_array_mut()
                .unwrap()
                .iter_mut()
                .enumerate()
            {
                change(n, endpoint);
            }
            Ok(())
        })
    })
}

#[tokio::test]
async fn a_host_of_three_times_the_weight_gets_three_times_the_prefixes() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let gateway = each_endpoint(Gateway::of(&engines).pool(fixed()), |n, endpoint| {
        endpoint["load_balancing_weight"] = json!(if n == 2 { 3 } else { 1 });
    });
    let gateway = gateway.start().await.unwrap();
    let found = homes(&gateway.client(Protocol::Http1), 0..600).await;
    // 3 of 6 parts; three standard deviations of 600 draws are 6 points.
    let heavy = share(&found, engines[2].name());
    assert!((0.43..=0.57).contains(&heavy), "the heavy host has {heavy}");
    for light in [0, 1, 3] {
        let light = share(&found, engines[light].name());
        assert!((0.11..=0.23).contains(&light), "a light host has {light}");
    }
}

#[tokio::test]
async fn hosts_of_a_lower_priority_serve_only_when_none_above_is_left() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let spare: Vec<Value> = engines[2..]
        .iter()
        .map(|engine| {
            let (ip, port) = (engine.address().ip().to_string(), engine.address().port());
            json!({"endpoint": {"address": {"socket_address": {"address": ip, "port_value": port}}}})
        })
        .collect();
    let gateway = Gateway::of(&engines[..2]).pool(fixed()).edit(move |plan| {
        plan.edit_cluster("engines", |cluster| {
            let levels = cluster["load_assignment"]["endpoints"]
                .as_array_mut()
                .unwrap();
            levels.push(json!({"priority": 1, "lb_endpoints": spare}));
            Ok(())
        })
    });
    let gateway = gateway.start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let first: BTreeSet<String> = homes(&client, 0..40).await.into_iter().collect();
    let names = |of: &[MockEngine]| of.iter().map(|own| own.name().to_owned()).collect();
    assert_eq!(first, names(&engines[..2]));

    engines[..2]
        .iter()
        .for_each(|engine| engine.set_health(503));
    gateway.wait_hosts("failed", 2, SOON).await.unwrap();
    let second: BTreeSet<String> = homes(&client, 0..40).await.into_iter().collect();
    assert_eq!(second, names(&engines[2..]));
}

/// Tells Envoy's cluster of the health of each engine, in their order.
async fn set_health(gateway: &Gateway, engines: &[MockEngine], health: &[&str]) {
    let hosts: Vec<_> = engines.iter().map(MockEngine::address).collect();
    let tell = |n: usize, endpoint: &mut Value| endpoint["health_status"] = json!(health[n]);
    gateway.envoy().set_hosts_with(&hosts, tell).await.unwrap();
}

#[tokio::test]
async fn a_draining_host_finishes_what_runs_gets_nothing_new_and_gets_its_prefixes_back() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let gateway = Gateway::of(&engines).eds().pool(fixed());
    let gateway = gateway.start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let before = homes(&client, 0..40).await;
    let leaving = before[0].clone();
    let mut connection = Connection::open(gateway.address(), Protocol::Http1)
        .await
        .unwrap();
    let held = prompt_of(0).script(Behaviour::HoldStream { events: 1 });
    let mut stream = connection.start(held).await.unwrap();
    assert!(stream.next().await.unwrap().is_some());

    let health = |of: &MockEngine| match of.name() == leaving {
        true => "DRAINING",
        false => "HEALTHY",
    };
    let states: Vec<&str> = engines.iter().map(health).collect();
    set_health(&gateway, &engines, &states).await;
    gateway.wait_hosts("draining", 1, SOON).await.unwrap();
    assert_eq!(share(&homes(&client, 0..40).await, &leaving), 0.0);
    gateway.wait_in_flight(&leaving, 1).await.unwrap();
    engines.iter().for_each(MockEngine::release);
    stream.finish().await.unwrap();

    set_health(&gateway, &engines, &["HEALTHY"; 3]).await;
    gateway.wait_hosts("usable", 3, SOON).await.unwrap();
    assert_eq!(homes(&client, 0..40).await, before);
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn degraded_hosts_get_nothing_while_the_healthy_suffice_and_then_what_envoy_gives_them() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let gateway = Gateway::of(&engines).eds().pool(fixed());
    let gateway = gateway.start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let before = homes(&client, 0..60).await;
    let mut health = ["DEGRADED", "HEALTHY", "HEALTHY", "HEALTHY"];
    set_health(&gateway, &engines, &health).await;
    gateway.wait_hosts("degraded", 1, SOON).await.unwrap();
    let spared = homes(&client, 0..60).await;
    assert_eq!(share(&spared, engines[0].name()), 0.0);
    for (home, now) in before.iter().zip(&spared) {
        assert!(home == engines[0].name() || home == now);
    }

    health = ["HEALTHY", "DEGRADED", "DEGRADED", "DEGRADED"];
    set_health(&gateway, &engines, &health).await;
    let shifted = eventually(SOON, async || {
        share(&homes(&client, 0..60).await, engines[0].name()) > 0.0
    });
    assert!(shifted.await, "the only healthy host gets nothing");
    let healthy = share(&homes(&client, 0..400).await, engines[0].name());
    // 35 %; three standard deviations of 400 draws are 7 points.
    assert!((0.28..=0.42).contains(&healthy), "it has {healthy}");

    set_health(&gateway, &engines, &["HEALTHY"; 4]).await;
    let back = eventually(SOON, async || homes(&client, 0..60).await == before);
    assert!(back.await, "the prefixes did not come back");
    gateway.quiet().await.unwrap();
}

/// Hosts of the own zone are preferred until they are busier than the others are far.
async fn prefers_its_zone(own: Value, locality: Value) {
    let engines = MockEngine::start_many(4).await.unwrap();
    let local = |zone: &str, engines: &[MockEngine]| {
        let endpoint = |engine: &MockEngine| {
            let (ip, port) = (engine.address().ip().to_string(), engine.address().port());
            json!({"endpoint": {"address": {"socket_address": {"address": ip, "port_value": port}}}})
        };
        let endpoints: Vec<Value> = engines.iter().map(endpoint).collect();
        json!({"locality": {"zone": zone}, "lb_endpoints": endpoints})
    };
    let zones = json!([local("z1", &engines[..2]), local("z2", &engines[2..])]);
    // Two requests more in flight weigh as much as the way to the other zone.
    let weights = json!({"zone_tokens": 20_000, "expert": {"in_flight_tokens": 10_000}});
    let gateway = Gateway::of(&engines)
        .pool(json!({"slow_start_ms": 0}))
        .pool(weights)
        .pool(own)
        .edit(move |plan| {
            let plan = plan.set(
                "/node",
                json!({"id": "one", "cluster": "one", "locality": locality}),
            );
            plan.edit_cluster("engines", |cluster| {
                cluster["load_assignment"]["endpoints"] = zones;
                Ok(())
            })
        })
        .start()
        .await
        .unwrap();
    let near: BTreeSet<&str> = engines[..2].iter().map(MockEngine::name).collect();
    let found = homes(&gateway.client(Protocol::Http1), 0..40).await;
    assert!(found.iter().all(|host| near.contains(host.as_str())));
    assert!(near.iter().all(|host| share(&found, host) > 0.0));

    let mut streams = Vec::new();
    let mut is_near = Vec::new();
    for prefix in 100..112 {
        let mut connection = Connection::open(gateway.address(), Protocol::Http1)
            .await
            .unwrap();
        let held = prompt_of(prefix).script(Behaviour::HoldStream { events: 1 });
        let mut stream = connection.start(held).await.unwrap();
        assert!(stream.next().await.unwrap().is_some());
        is_near.push(near.contains(stream.engine().unwrap().as_str()));
        streams.push((connection, stream));
    }
    assert_eq!(is_near[..2], [true; 2], "{is_near:?}");
    let far = is_near.iter().filter(|near| !**near).count();
    // Level at two more for each near host: 4 of 12 far.
    assert!((3..=5).contains(&far), "{is_near:?}");
    engines.iter().for_each(MockEngine::release);
    for (_, stream) in streams {
        stream.finish().await.unwrap();
    }
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn hosts_of_the_zone_in_the_config_are_preferred_unless_the_others_are_idle_enough() {
    prefers_its_zone(json!({"zone": "z1"}), json!({})).await;
}

#[tokio::test]
async fn the_zone_is_envoys_own_unless_the_config_says_another() {
    prefers_its_zone(json!({}), json!({"zone": "z1"})).await;
}

/// Hosts that appear within ten seconds of the first start together with it, at full weight; what is
/// shown of a host that comes later has to come after that.
async fn start_is_over(started: Instant) {
    tokio::time::sleep(Duration::from_secs(11).saturating_sub(started.elapsed())).await;
}

#[tokio::test]
async fn a_new_host_takes_its_share_slowly_and_no_prefix_moves_twice() {
    const PREFIXES: u64 = 300;
    let engines = MockEngine::start_many(4).await.unwrap();
    let slow = json!({"slow_start_ms": 12_000});
    let gateway = Gateway::of(&engines[..3]).eds().pool(fixed()).pool(slow);
    let gateway = gateway.start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let started = Instant::now();
    let mut homes_now = homes(&client, 0..PREFIXES).await;
    start_is_over(started).await;

    gateway.set_hosts(&engines).await.unwrap();
    gateway.wait_hosts("usable", 4, SOON).await.unwrap();
    let added = engines[3].name();
    let mut shares = Vec::new();
    let complete = eventually(Duration::from_secs(40), async || {
        let next = homes(&client, 0..PREFIXES).await;
        for (n, (before, after)) in homes_now.iter().zip(&next).enumerate() {
            assert!(
                before == after || after == added,
                "prefix {n} went {before} to {after}"
            );
        }
        homes_now = next;
        shares.push(share(&homes_now, added));
        // A quarter, less three standard deviations of 300 draws.
        shares.last().is_some_and(|last| *last >= 0.175)
    });
    assert!(complete.await, "it never got its share: {shares:?}");
    assert!(shares[0] < 0.12, "it got its share at once: {shares:?}");
    assert!(shares.iter().all(|share| *share <= 0.325), "{shares:?}");
}

#[tokio::test]
async fn a_host_that_comes_back_gets_its_prefixes_back_though_others_hold_them() {
    const PREFIXES: u64 = 120;
    let engines = MockEngine::start_many(4).await.unwrap();
    let gateway = Gateway::of(&engines).eds();
    let gateway = gateway.pool(json!({"slow_start_ms": 4000}));
    let gateway = gateway.start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let started = Instant::now();
    let at_first = homes(&client, 0..PREFIXES).await;
    start_is_over(started).await;

    gateway.set_hosts(&engines[..3]).await.unwrap();
    gateway.wait_hosts("usable", 3, SOON).await.unwrap();
    let gone = engines[3].name();
    for (before, meanwhile) in at_first.iter().zip(homes(&client, 0..PREFIXES).await) {
        assert!(*before == meanwhile || before == gone);
    }
    gateway.set_hosts(&engines).await.unwrap();
    gateway.wait_hosts("usable", 4, SOON).await.unwrap();
    let mut last = Vec::new();
    let back = eventually(Duration::from_secs(14), async || {
        last = homes(&client, 0..PREFIXES).await;
        last == at_first
    });
    let is_back = back.await;
    let elsewhere = at_first.iter().zip(&last).filter(|(a, b)| a != b).count();
    assert!(is_back, "{elsewhere} of {PREFIXES} prefixes are elsewhere");
    assert!(share(&at_first, gone) > 0.1);
}

#[tokio::test]
async fn an_engine_that_fails_fast_does_not_look_idle() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    engines[1].set(Behaviour::Answer {
        status: 500,
        after_ms: 0,
    });
    let mut failed = 0;
    for prefix in 0..400 {
        let answer = client.send(prompt_of(prefix)).await.unwrap();
        failed += u32::from(answer.status == 500);
    }
    // Its even share would be 100. It is tried again, for its failures fade.
    assert!(
        (1..50).contains(&failed),
        "{failed} of 400 requests went to an engine that fails"
    );
    engines[1].set(Behaviour::OK);
    let back = eventually(Duration::from_secs(60), async || {
        let fresh = rand_prefix();
        client.host(prompt_of(fresh)).await.unwrap() == engines[1].name()
    });
    assert!(back.await, "it gets nothing although it is well again");
    gateway.quiet().await.unwrap();
}

/// A prefix that was not used before.
fn rand_prefix() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(1_000_000);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// 6,000 tokens that are worth keeping: a cold host costs as much as 200 requests that wait.
fn long_prompt(prefix: u64) -> Request {
    let mut body: Value = serde_json::from_slice(&chat(&words(prefix, 24_000), "hello")).unwrap();
    body["stream"] = json!(true);
    Request::chat(body.to_string())
}

/// Of 40 prompts, so many may be left to Envoy's own policy, which does not know who hangs.
#[expect(
    clippy::print_stdout,
    reason = "the test runner keeps it for a failure"
)]
async fn an_engine_that_hangs_loses_its_prompts(hosts: Value, left_to_envoy: u64) {
    const PREFIXES: u64 = 40;
    let engines = MockEngine::start_many(4).await.unwrap();
    let pool = json!({"slow_start_ms": 0, "hosts": hosts});
    let gateway = Gateway::of(&engines).pool(pool).start_unsettled();
    let gateway = gateway.await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let known = eventually(SOON, async || {
        client.host(prompt_of(rand_prefix())).await.unwrap();
        gateway.metric(HOSTS, &[("state", "usable")]).await.unwrap() == 4.0
    });
    assert!(known.await, "not all hosts are known");
    let mut homes = Vec::new();
    for prefix in 0..PREFIXES {
        homes.push(client.host(long_prompt(prefix)).await.unwrap());
    }
    let hung = engines.iter().find(|engine| engine.name() == homes[0]);
    let hung = hung.unwrap();
    hung.set(Behaviour::Hold);
    // Clients do not leave: what it was sent waits there.
    let (started, mut waiting) = (Instant::now(), JoinSet::new());
    let stalled = eventually(SOON, async || {
        let prefix = waiting.len() as u64 % PREFIXES;
        let client = Arc::clone(&client);
        waiting.spawn(async move { client.ok(long_prompt(prefix)).await.map(drop) });
        tokio::time::sleep(Duration::from_millis(20)).await;
        let stalled = [("state", "stalled")];
        gateway.metric(HOSTS, &stalled).await.unwrap() == 1.0
    });
    assert!(stalled.await, "it was not found to hang");
    let (took, lost) = (started.elapsed(), hung.in_flight());
    println!("{lost} requests wait on the engine that hangs, found after {took:?}");
    let total = hung.total();
    for prefix in 0..PREFIXES {
        let answer = client.host(long_prompt(prefix));
        let in_time = tokio::time::timeout(Duration::from_secs(5), answer).await;
        assert!(in_time.is_err() || in_time.unwrap().unwrap() != hung.name());
    }
    let more = hung.total() - total;
    assert!(more <= left_to_envoy, "it still gets requests: {more}");

    hung.set(Behaviour::OK);
    hung.release();
    while let Some(answer) = waiting.join_next().await {
        answer.unwrap().unwrap();
    }
    gateway.wait_hosts("usable", 4, SOON).await.unwrap();
    let back = eventually(SOON, async || {
        client.host(prompt_of(rand_prefix())).await.unwrap() == hung.name()
    });
    assert!(back.await, "it gets nothing although it is well again");
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn an_engine_that_hangs_behind_healthy_checks_loses_even_the_prompts_it_has_cached() {
    let polled = json!({"admin_cluster": "envoy_admin", "poll_ms": 100});
    an_engine_that_hangs_loses_its_prompts(polled, 0).await;
}

#[tokio::test]
async fn an_engine_that_hangs_loses_its_prompts_where_hosts_are_learned_too() {
    // One of 64 requests of each of two workers.
    an_engine_that_hangs_loses_its_prompts(json!({}), 2).await;
}

#[tokio::test]
async fn a_host_that_envoy_has_ejected_gets_nothing() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let gateway = Gateway::of(&engines).pool(fixed()).edit(|plan| {
        plan.edit_cluster("engines", |cluster| {
            cluster["outlier_detection"] = json!({
                "consecutive_5xx": 3,
                "max_ejection_percent": 50,
                "interval": "0.2s",
                "base_ejection_time": "60s",
                // Its health check goes on being answered well.
                "successful_active_health_check_uneject_host": false,
            });
            Ok(())
        })
    });
    let gateway = gateway.start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let before = homes(&client, 0..60).await;
    let bad = before[0].clone();
    let engine = engines.iter().find(|engine| engine.name() == bad).unwrap();
    engine.set(Behaviour::Answer {
        status: 500,
        after_ms: 0,
    });
    for _ in 0..3 {
        assert_eq!(client.send(prompt_of(0)).await.unwrap().status, 500);
    }
    gateway.wait_hosts("usable", 3, SOON).await.unwrap();
    let after = homes(&client, 0..60).await;
    assert_eq!(share(&after, &bad), 0.0);
    for (home, now) in before.iter().zip(&after) {
        assert!(
            *home == bad || home == now,
            "a prefix of {home}, which is well, moved to {now}"
        );
    }
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn strict_health_avoids_a_failed_host_before_the_filter_knows_and_leaks_no_header() {
    let engines = MockEngine::start_many(4).await.unwrap();
    // The filter hears that all are well, whatever Envoy knows.
    let source = MockEngine::start().await.unwrap();
    source.set_page(admin_page(&engines));
    let gateway = Gateway::of(&engines)
        .file("envoy/strict-health.yaml")
        .pool(fixed())
        .pool(json!({"strict_health": true}))
        .asking(&source)
        .edit(|plan| {
            plan.edit_cluster("engines", |cluster| {
                cluster["health_checks"][0]["unhealthy_threshold"] = json!(1);
                cluster["health_checks"][0]["unhealthy_edge_interval"] = json!("0.1s");
                Ok(())
            })
        });
    let gateway = gateway.start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let before = homes(&client, 0..40).await;
    assert_eq!(homes(&client, 0..40).await, before);
    let bad = before[0].clone();
    let engine = engines.iter().find(|engine| engine.name() == bad).unwrap();
    engine.set_health(503);
    let noticed = eventually(SOON, async || {
        gateway
            .stat("cluster.engines.membership_healthy")
            .await
            .unwrap()
            == 3
    });
    assert!(noticed.await, "Envoy did not notice");
    let usable = [("state", "usable")];
    let known = gateway
        .metric(prefix_router::names::HOSTS, &usable)
        .await
        .unwrap();
    assert_eq!(
        known, 4.0,
        "the filter knows already: the test proves nothing"
    );
    let after = homes(&client, 0..40).await;
    assert_eq!(share(&after, &bad), 0.0, "a failed host was used");
    for (home, now) in before.iter().zip(&after) {
        assert!(
            *home == bad || home == now,
            "a prefix of {home}, which is well, moved to {now}"
        );
    }
    let answer = client.ok(prompt_of(0)).await.unwrap();
    let leaked = answer
        .headers
        .keys()
        .find(|name| name.as_str().starts_with("x-prefix-route"));
    assert_eq!(leaked, None, "in the answer");
    for request in engines.iter().flat_map(MockEngine::take_recorded) {
        let names = request.headers.iter().map(|(name, _)| name);
        assert_eq!(
            names
                .filter(|name| name.starts_with("x-prefix-route"))
                .count(),
            0
        );
    }
    gateway.quiet().await.unwrap();
}

/// As the shipped file says, where the kit's gateways ask more often.
#[tokio::test]
async fn before_any_traffic_a_dead_engine_is_checked_four_times_as_often_as_one_that_is_well() {
    let engines = MockEngine::start_many(2).await.unwrap();
    engines[0].set_health(503);
    let hosts: Vec<_> = engines.iter().map(MockEngine::address).collect();
    let plan = Plan::load("envoy/envoy.yaml").unwrap();
    let envoy = plan.hosts("engines", &hosts).start().await.unwrap();
    let checks = || engines.iter().map(MockEngine::health_checks);
    let before: Vec<u64> = checks().collect();
    tokio::time::sleep(Duration::from_secs(8)).await;
    let made: Vec<u64> = checks().zip(before).map(|(now, old)| now - old).collect();
    // 16 and 4, less what busy cores delay.
    assert!((11..=17).contains(&made[0]), "{made:?}");
    assert!((2..=5).contains(&made[1]), "{made:?}");
    envoy.stop().await.unwrap();
}

#[tokio::test]
async fn a_client_that_uploads_slowly_costs_no_host_its_place() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let config = json!({"request": {"body_idle_ms": 1000}});
    let gateway = Gateway::of(&engines).config(config).start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let begin = br#"{"stream":true,"messages":[{"role":"user","content":"hello"#;
    // The second piece comes too late to be waited for: the request is placed by the first.
    let slow = Body::Pieces {
        pieces: [(0, &begin[..]), (1500, b"b")]
            .map(|(ms, bytes)| Piece {
                after: Duration::from_millis(ms),
                bytes: bytes.to_vec().into(),
            })
            .into(),
        trailers: Vec::new(),
        never_ends: true,
    };
    let address = gateway.address();
    let upload = tokio::spawn(async move {
        let mut connection = Connection::open(address, Protocol::Http1).await.unwrap();
        let _ = connection.start(Request::chat("").body(slow)).await;
    });
    let has_it = |engine: &&MockEngine| engine.in_flight() == 1;
    assert!(eventually(SOON, async || engines.iter().any(|own| has_it(&own))).await);
    let victim = engines.iter().find(has_it).unwrap().name();
    let mut others = Vec::new();
    for prefix in 0..60 {
        if client.host(prompt_of(prefix)).await.unwrap() != victim {
            others.push(prefix);
        }
    }
    // Silent for longer than the 5 s and a quarter of a millisecond a token that an engine may be.
    let started = Instant::now();
    for prefix in others.iter().cycle() {
        client.host(prompt_of(*prefix)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        let stalled = gateway
            .metric(HOSTS, &[("state", "stalled")])
            .await
            .unwrap();
        assert_eq!(stalled, 0.0, "after {:?}", started.elapsed());
        if started.elapsed() > Duration::from_secs(9) {
            break;
        }
    }
    upload.abort();
}
