//! Proves in a real Envoy that hosts which fail are avoided, hosts which come back get their
//! prefixes back, and that scaling moves only what it must.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use serde_json::json;
use tools::testkit::{
    Client, Gateway, GatewayPlan, MockEngine, Protocol, Request, chat, eventually, words,
};

const SOON: Duration = Duration::from_secs(15);

/// Checks that take a fifth of a second to notice, for a test that waits for them.
fn fast_checks(gateway: GatewayPlan) -> GatewayPlan {
    let check = json!({
        "timeout": "0.5s", "interval": "0.2s", "no_traffic_interval": "0.2s",
        "unhealthy_threshold": 1, "healthy_threshold": 1,
        "http_health_check": {"path": "/health"}
    });
    gateway.edit(move |plan| {
        plan.edit_cluster("engines", |cluster| {
            cluster["health_checks"] = json!([check]);
            Ok(())
        })
    })
}

/// The host of each of `count` prefixes, sent by 16 clients at once.
async fn homes(client: &std::sync::Arc<Client>, count: u64) -> Vec<String> {
    const AT_ONCE: u64 = 16;
    let mut running = tokio::task::JoinSet::new();
    for lane in 0..AT_ONCE {
        let client = std::sync::Arc::clone(client);
        running.spawn(async move {
            let mut found = Vec::new();
            for n in (lane..count).step_by(AT_ONCE as usize) {
                let request = Request::chat(chat(&words(n, 1100), "hello"));
                found.push((n as usize, client.host(request).await.unwrap()));
            }
            found
        });
    }
    let mut homes = vec![String::new(); count as usize];
    while let Some(found) = running.join_next().await {
        for (n, host) in found.unwrap() {
            homes[n] = host;
        }
    }
    homes
}

#[tokio::test]
async fn a_host_that_fails_its_checks_is_avoided_and_gets_its_prefixes_back() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let gateway = fast_checks(Gateway::of(&engines)).start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let before = homes(&client, 60).await;
    let failed = engines[1].name();
    assert!(before.iter().any(|home| home == failed));

    engines[1].set_health(503);
    gateway.wait_hosts("usable", 3, SOON).await.unwrap();
    let during = homes(&client, 60).await;
    for (n, (home, now)) in before.iter().zip(&during).enumerate() {
        assert_ne!(
            now, failed,
            "prefix {n} was sent to a host that fails its checks"
        );
        assert!(
            home == failed || home == now,
            "prefix {n} moved from {home}, which is well"
        );
    }
    let refugees: std::collections::BTreeSet<_> = before
        .iter()
        .zip(&during)
        .filter(|(home, _)| *home == failed)
        .map(|(_, now)| now)
        .collect();
    assert!(
        refugees.len() > 1,
        "all prefixes of the failed host went to {refugees:?}"
    );

    engines[1].set_health(200);
    gateway.wait_hosts("usable", 4, SOON).await.unwrap();
    let back = eventually(SOON, async || homes(&client, 60).await == before);
    assert!(back.await, "the prefixes did not come back");
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn an_added_host_takes_its_share_and_a_removed_one_gives_only_its_own() {
    const PREFIXES: u64 = 2000;
    let engines = MockEngine::start_many(5).await.unwrap();
    let gateway = Gateway::of(&engines[..4]).eds().start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let four = homes(&client, PREFIXES).await;

    gateway.set_hosts(&engines).await.unwrap();
    gateway.wait_hosts("usable", 5, SOON).await.unwrap();
    let added = engines[4].name();
    let five = homes(&client, PREFIXES).await;
    let mut moved = 0;
    for (n, (before, after)) in four.iter().zip(&five).enumerate() {
        if before != after {
            assert_eq!(after, added, "prefix {n} moved between hosts that stayed");
            moved += 1;
        }
    }
    let share = f64::from(moved) / PREFIXES as f64;
    assert!(
        (0.05..=1.0 / 5.0 + 0.02).contains(&share),
        "{share} of the prefixes moved"
    );

    let removed = engines[1].name();
    let left = engines.iter().filter(|engine| engine.name() != removed);
    gateway.set_hosts(left).await.unwrap();
    gateway.wait_hosts("usable", 4, SOON).await.unwrap();
    let left = homes(&client, PREFIXES).await;
    for (n, (before, after)) in five.iter().zip(&left).enumerate() {
        assert_ne!(after, removed, "prefix {n} was sent to a host that is gone");
        assert!(
            before == removed || before == after,
            "prefix {n} moved from {before}"
        );
    }
    gateway.quiet().await.unwrap();
}
