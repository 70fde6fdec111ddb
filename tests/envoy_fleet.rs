//! Proves in a real Envoy what happens to requests when much of the fleet, or the knowledge of it,
//! is gone, and that odd and many addresses are hosts like others.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use prefix_router::names::{ABSTAIN, DECISION_US, HOST_SOURCE_ERRORS};
use serde_json::json;
use tools::testkit::{
    Gateway, MockEngine, Protocol, Request, admin_page, chat, eventually, prompt_of, words,
};
use tools::turnover::{TurnoverArgs, turnover};

const SOON: Duration = Duration::from_secs(20);

async fn abstentions(gateway: &Gateway, reason: &str) -> f64 {
    gateway
        .metric(ABSTAIN, &[("reason", reason)])
        .await
        .unwrap()
}

#[tokio::test]
async fn with_most_hosts_down_the_rest_serves_and_with_all_down_envoy_decides() {
    let engines = MockEngine::start_many(5).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    engines[..3]
        .iter()
        .for_each(|engine| engine.set_health(503));
    gateway.wait_hosts("usable", 2, SOON).await.unwrap();
    let left: BTreeSet<&str> = engines[3..].iter().map(MockEngine::name).collect();
    // Envoy itself is in panic mode now and would use all five.
    for prefix in 0..60 {
        let host = client.host(prompt_of(prefix)).await.unwrap();
        assert!(
            left.contains(host.as_str()),
            "prefix {prefix} went to {host}, which is down"
        );
    }
    assert_eq!(abstentions(&gateway, "no_hosts").await, 0.0);

    engines.iter().for_each(|engine| engine.set_health(503));
    gateway.wait_hosts("usable", 0, SOON).await.unwrap();
    // Nobody knows better: Envoy's panic mode takes any, and these do answer.
    for prefix in 0..20 {
        client.host(prompt_of(prefix)).await.unwrap();
    }
    assert_eq!(abstentions(&gateway, "no_hosts").await, 20.0);

    engines.iter().for_each(|engine| engine.set_health(200));
    gateway.wait_hosts("usable", 5, SOON).await.unwrap();
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn an_empty_cluster_is_a_503_at_once_until_a_host_comes() {
    let engines = MockEngine::start_many(1).await.unwrap();
    let gateway = Gateway::of([]).eds().start_unsettled().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let started = Instant::now();
    assert_eq!(client.send(prompt_of(1)).await.unwrap().status, 503);
    assert!(
        started.elapsed() < Duration::from_secs(2),
        "it took {:?}",
        started.elapsed()
    );
    gateway.set_hosts(&engines).await.unwrap();
    gateway.wait_hosts("usable", 1, SOON).await.unwrap();
    assert_eq!(client.host(prompt_of(1)).await.unwrap(), engines[0].name());
    gateway.set_hosts([]).await.unwrap();
    gateway.wait_hosts("usable", 0, SOON).await.unwrap();
    assert_eq!(client.send(prompt_of(1)).await.unwrap().status, 503);
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn a_lost_host_source_is_told_once_and_the_last_list_goes_on() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let source = MockEngine::start().await.unwrap();
    source.set_page(admin_page(&engines));
    let gateway = Gateway::of(&engines).asking(&source).start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let mut homes = Vec::new();
    for prefix in 0..40 {
        homes.push(client.host(prompt_of(prefix)).await.unwrap());
    }
    source.crash().await.unwrap();
    let counted = eventually(SOON, async || {
        gateway.metric(HOST_SOURCE_ERRORS, &[]).await.unwrap() >= 5.0
    });
    assert!(counted.await, "the loss was not counted");
    for (prefix, home) in homes.iter().enumerate() {
        assert_eq!(client.host(prompt_of(prefix as u64)).await.unwrap(), *home);
    }
    assert_eq!(gateway.envoy().log_lines("host source lost").len(), 1);

    // A source that answers nonsense is lost as well; one that is back is news.
    source.set_page("{\"cluster_statuses\": 7".to_owned());
    source.revive().unwrap();
    let before = gateway.metric(HOST_SOURCE_ERRORS, &[]).await.unwrap();
    let counted = eventually(SOON, async || {
        gateway.metric(HOST_SOURCE_ERRORS, &[]).await.unwrap() >= before + 3.0
    });
    assert!(counted.await, "nonsense was not counted");
    assert_eq!(client.host(prompt_of(0)).await.unwrap(), homes[0]);
    source.set_page(admin_page(&engines[..2]));
    gateway.wait_hosts("usable", 2, SOON).await.unwrap();
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn a_host_source_that_does_not_exist_stops_no_traffic() {
    let engines = MockEngine::start_many(2).await.unwrap();
    let hosts = json!({"admin_cluster": "nowhere", "poll_ms": 100});
    let plan = Gateway::of(&engines).pool(json!({"hosts": hosts}));
    let gateway = plan.start_unsettled().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    for prefix in 0..10 {
        client.host(prompt_of(prefix)).await.unwrap();
    }
    assert_eq!(abstentions(&gateway, "no_hosts").await, 10.0);
    let told = gateway.envoy().wait_for_log("host source lost", SOON).await;
    assert!(told.is_ok(), "nobody was told");
    assert!(gateway.metric(HOST_SOURCE_ERRORS, &[]).await.unwrap() >= 1.0);
}

#[tokio::test]
async fn hosts_that_the_cluster_does_not_have_are_passed_over() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let source = MockEngine::start().await.unwrap();
    // The source lists four, the cluster has two.
    source.set_page(admin_page(&engines));
    let plan = Gateway::of(&engines[..2]).asking(&source);
    let gateway = plan.start_unsettled().await.unwrap();
    gateway.wait_hosts("usable", 4, SOON).await.unwrap();
    let client = gateway.client(Protocol::Http1);
    for prefix in 0..40 {
        let host = client.host(prompt_of(prefix)).await.unwrap();
        assert!(engines[..2].iter().any(|engine| engine.name() == host));
    }
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn a_static_list_serves_from_the_first_request_on() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let names: Vec<&str> = engines.iter().map(MockEngine::name).collect();
    let plan = Gateway::of(&engines).pool(json!({"hosts": {"static": names}}));
    let gateway = plan.start_unsettled().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let mut homes = Vec::new();
    for prefix in 0..40 {
        homes.push(client.host(prompt_of(prefix)).await.unwrap());
    }
    for (prefix, home) in homes.iter().enumerate() {
        assert_eq!(client.host(prompt_of(prefix as u64)).await.unwrap(), *home);
    }
    assert_eq!(gateway.routed().await.unwrap(), 80.0);
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn ipv6_hosts_and_several_ports_of_one_address_are_hosts_like_others() {
    let mut engines = MockEngine::start_many(2).await.unwrap();
    for _ in 0..2 {
        engines.push(
            MockEngine::start_at(IpAddr::from(Ipv6Addr::LOCALHOST))
                .await
                .unwrap(),
        );
    }
    assert!(
        engines[3].name().starts_with("[::1]:"),
        "{}",
        engines[3].name()
    );
    let config = json!({"debug_headers": "always"});
    let gateway = Gateway::of(&engines).config(config).start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let mut used = BTreeSet::new();
    for prefix in 0..60 {
        let first = client.ok(prompt_of(prefix)).await.unwrap();
        assert_eq!(first.header("x-prefix-router-host"), first.engine());
        let again = client.host(prompt_of(prefix)).await.unwrap();
        assert_eq!(Some(again.clone()), first.engine(), "prefix {prefix}");
        used.insert(again);
    }
    assert_eq!(used.len(), 4, "{used:?}");
    let gauges = gateway.metrics().await.unwrap();
    for engine in &engines {
        let shown = |label: Option<&String>| label.is_some_and(|label| label == engine.name());
        let gauge = gauges
            .iter()
            .find(|own| shown(own.labels.get("upstream_host")));
        assert!(gauge.is_some(), "no metric of {}", engine.name());
    }
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn hosts_that_dns_names_are_hosts_like_others() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let gateway = Gateway::of(&engines).edit(|plan| {
        plan.edit_cluster("engines", |cluster| {
            cluster["type"] = json!("STRICT_DNS");
            cluster["dns_lookup_family"] = json!("V4_ONLY");
            let endpoints = cluster.pointer_mut("/load_assignment/endpoints/0/lb_endpoints");
            for endpoint in endpoints.unwrap().as_array_mut().unwrap() {
                endpoint["endpoint"]["address"]["socket_address"]["address"] = json!("localhost");
            }
            Ok(())
        })
    });
    let gateway = gateway.start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let mut used = BTreeSet::new();
    for prefix in 0..40 {
        let host = client.host(prompt_of(prefix)).await.unwrap();
        assert_eq!(client.host(prompt_of(prefix)).await.unwrap(), host);
        used.insert(host);
    }
    assert_eq!(used.len(), 3, "{used:?}");
    assert_eq!(gateway.routed().await.unwrap(), 80.0);
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn five_hundred_hosts_are_all_used_and_each_prefix_keeps_its_own() {
    const HOSTS: u16 = 500;
    // One engine that listens on every address of the loopback network.
    let engine = MockEngine::start_at(IpAddr::from(Ipv4Addr::UNSPECIFIED))
        .await
        .unwrap();
    let port = engine.address().port();
    let address = |n: u16| {
        let (high, low) = (n / 250 + 1, n % 250 + 1);
        SocketAddr::from(([127, 1, high as u8, low as u8], port))
    };
    let hosts = (0..HOSTS).map(address);
    let gateway = Gateway::at(hosts)
        .config(json!({"debug_headers": "always"}))
        .pool(json!({"hosts": {"admin_cluster": "envoy_admin", "poll_ms": 500}}))
        .edit(|plan| {
            plan.edit_cluster("engines", |cluster| {
                let checks = &mut cluster["health_checks"][0];
                for interval in [
                    "interval",
                    "no_traffic_interval",
                    "no_traffic_healthy_interval",
                ] {
                    checks[interval] = json!("5s");
                }
                checks["timeout"] = json!("4s");
                Ok(())
            })
        })
        .start()
        .await
        .unwrap();
    let client = gateway.client(Protocol::Http1);
    let mut homes = Vec::new();
    for round in 0..2 {
        for prefix in 0..300 {
            let request = Request::chat(chat(&words(prefix, 1200), "hello"));
            let answer = client.ok(request).await.unwrap();
            let host = answer.header("x-prefix-router-host").unwrap();
            if round == 0 {
                homes.push(host);
            } else {
                assert_eq!(homes[prefix as usize], host, "prefix {prefix}");
            }
        }
    }
    // 300 draws from 500 hosts meet 226 different ones in the mean.
    let used: BTreeSet<&String> = homes.iter().collect();
    assert!(used.len() > 190, "only {} hosts were used", used.len());
    let shown = eventually(SOON, async || {
        let count = format!("{DECISION_US}_count");
        gateway.metric(&count, &[]).await.unwrap() >= 600.0
    });
    assert!(shown.await, "the decisions were not measured");
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn hosts_that_are_always_new_leave_nothing_behind_that_grows() {
    let args = TurnoverArgs {
        addresses: 2000,
        hosts: 100,
        json: false,
    };
    let report = turnover(&args).await.unwrap();
    println!("{report}");
    assert!(report.faults().is_empty(), "{report}");
    assert!(report.hosts_with_series > 200, "{report}");
}
