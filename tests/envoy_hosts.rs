//! Proves in a real Envoy that hosts which fail are avoided, hosts which come back get their
//! prefixes back, and that scaling moves only what it must.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use prefix_router::names::{HOSTS, IN_FLIGHT};
use serde_json::json;
use tokio::task::JoinSet;
use tools::testkit::{
    Behaviour, Client, Connection, Gateway, GatewayPlan, MockEngine, Protocol, Request, chat,
    eventually, prompt_of, words,
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

/// Keys that depend on the prompt alone, and full shares at once: what moves is what placement
/// moves.
fn fixed() -> serde_json::Value {
    json!({"routing": "fixed", "prefix_length": 1024, "limit": 1000, "slow_start_ms": 0})
}

/// Full shares at once.
fn at_once() -> serde_json::Value {
    json!({"slow_start_ms": 0})
}

/// The host of each of these prefixes, sent by so many clients at once.
async fn homes(client: &Arc<Client>, prefixes: Range<u64>, at_once: usize) -> Vec<String> {
    let mut running = JoinSet::new();
    for lane in 0..at_once {
        let (client, prefixes) = (Arc::clone(client), prefixes.clone());
        running.spawn(async move {
            let mut found = Vec::new();
            for (n, prefix) in prefixes.enumerate().skip(lane).step_by(at_once) {
                let request = Request::chat(chat(&words(prefix, 1100), "hello"));
                found.push((n, client.host(request).await.unwrap()));
            }
            found
        });
    }
    let mut homes = vec![String::new(); prefixes.count()];
    while let Some(found) = running.join_next().await {
        for (n, host) in found.unwrap() {
            homes[n] = host;
        }
    }
    homes
}

/// How many prefixes moved; each of them must have moved from `from` or to `to`.
#[track_caller]
fn moved(before: &[String], after: &[String], from: Option<&str>, to: Option<&str>) -> usize {
    let pairs = before.iter().zip(after).enumerate();
    let moved: Vec<_> = pairs
        .filter(|(_, (before, after))| before != after)
        .collect();
    for (n, (before, after)) in &moved {
        let fair = from == Some(before.as_str()) || to == Some(after.as_str());
        assert!(fair, "prefix {n} moved from {before} to {after}");
    }
    moved.len()
}

#[tokio::test]
async fn the_prefixes_of_a_host_that_fails_its_checks_spread_evenly_and_come_back() {
    const PREFIXES: u64 = 240;
    let engines = MockEngine::start_many(4).await.unwrap();
    let gateway = fast_checks(Gateway::of(&engines).pool(fixed()))
        .start()
        .await
        .unwrap();
    let client = gateway.client(Protocol::Http1);
    let before = homes(&client, 0..PREFIXES, 16).await;
    let failed = engines[1].name();
    assert!(before.iter().any(|home| home == failed));

    engines[1].set_health(503);
    gateway.wait_hosts("usable", 3, SOON).await.unwrap();
    let during = homes(&client, 0..PREFIXES, 16).await;
    assert!(
        !during.iter().any(|host| host == failed),
        "it still got requests"
    );
    moved(&before, &during, Some(failed), None);
    let mut shelters: BTreeMap<&str, usize> = BTreeMap::new();
    let pairs = before.iter().zip(&during);
    for (_, now) in pairs.filter(|(home, _)| *home == failed) {
        *shelters.entry(now).or_default() += 1;
    }
    // A third of some 60 each; three standard deviations are 11.
    let even = shelters.values().all(|count| (8..=32).contains(count));
    assert!(even && shelters.len() == 3, "{shelters:?}");

    engines[1].set_health(200);
    gateway.wait_hosts("usable", 4, SOON).await.unwrap();
    assert_eq!(
        homes(&client, 0..PREFIXES, 16).await,
        before,
        "the prefixes did not come back"
    );
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn an_adaptive_gateway_avoids_a_failed_host_and_uses_it_again() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let gateway = fast_checks(Gateway::of(&engines).pool(at_once()))
        .start()
        .await
        .unwrap();
    let client = gateway.client(Protocol::Http1);
    let before = homes(&client, 0..60, 1).await;
    let failed = engines[1].name();
    engines[1].set_health(503);
    gateway.wait_hosts("usable", 3, SOON).await.unwrap();
    let during = homes(&client, 0..60, 1).await;
    assert!(
        !during.iter().any(|host| host == failed),
        "it still got requests"
    );
    moved(&before, &during, Some(failed), None);
    engines[1].set_health(200);
    gateway.wait_hosts("usable", 4, SOON).await.unwrap();
    let fresh = homes(&client, 1000..1200, 1).await;
    assert!(
        fresh.iter().any(|host| host == failed),
        "it gets no new prefixes"
    );
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn an_added_host_takes_its_share_and_a_removed_one_gives_only_its_own() {
    const PREFIXES: u64 = 2000;
    let engines = MockEngine::start_many(5).await.unwrap();
    let gateway = Gateway::of(&engines[..4])
        .eds()
        .pool(fixed())
        .start()
        .await
        .unwrap();
    let client = gateway.client(Protocol::Http1);
    let four = homes(&client, 0..PREFIXES, 16).await;

    gateway.set_hosts(&engines).await.unwrap();
    gateway.wait_hosts("usable", 5, SOON).await.unwrap();
    let five = homes(&client, 0..PREFIXES, 16).await;
    let share = moved(&four, &five, None, Some(engines[4].name())) as f64 / PREFIXES as f64;
    // A fifth, and two points for the luck of hashing.
    assert!(
        (0.18..=0.22).contains(&share),
        "{share} of the prefixes moved"
    );

    let removed = engines[1].name();
    let left = engines.iter().filter(|engine| engine.name() != removed);
    gateway.set_hosts(left).await.unwrap();
    gateway.wait_hosts("usable", 4, SOON).await.unwrap();
    let left = homes(&client, 0..PREFIXES, 16).await;
    assert!(
        !left.iter().any(|host| host == removed),
        "it still got requests"
    );
    moved(&five, &left, Some(removed), None);
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn hosts_that_nothing_lists_are_learned_from_answers_and_dropped_when_they_are_gone() {
    // Five seconds of requests that miss it, and what a busy machine takes for some requests.
    const LOST: Duration = Duration::from_secs(12);
    const PREFIXES: u64 = 60;
    // Two workers leave one request in 64 to Envoy, and each may be off in both rounds.
    const EXPLORED: usize = 6;
    let engines = MockEngine::start_many(4).await.unwrap();
    let gateway = Gateway::of(&engines)
        .eds()
        .pool(at_once())
        .pool(json!({"hosts": {}}))
        .start_unsettled()
        .await
        .unwrap();
    let client = gateway.client(Protocol::Http1);
    let usable = async || {
        let labels = [("state", "usable")];
        gateway.metric(HOSTS, &labels).await.unwrap()
    };
    assert_eq!(usable().await, 0.0);
    let knows = async |count: f64, limit: Duration| {
        let known = eventually(limit, async || {
            homes(&client, 0..10, 1).await;
            usable().await == count
        });
        assert!(known.await, "{} hosts, not {count}", usable().await);
    };
    knows(4.0, SOON).await;
    // Enough answers that bring no new host.
    homes(&client, 1000..1040, 1).await;
    let before = homes(&client, 0..PREFIXES, 1).await;
    let again = homes(&client, 0..PREFIXES, 1).await;
    let strayed = churn(&before, &again, None);
    assert!(strayed <= EXPLORED, "{strayed} prefixes did not stick");

    let removed = engines[1].name();
    let left = engines.iter().filter(|engine| engine.name() != removed);
    gateway.set_hosts(left).await.unwrap();
    let taken = eventually(SOON, async || {
        let hosts = homes(&client, 0..PREFIXES, 1).await;
        !hosts.iter().any(|host| host == removed)
    });
    assert!(taken.await, "Envoy still has it");
    knows(3.0, LOST).await;
    homes(&client, 1000..1040, 1).await;
    let after = homes(&client, 0..PREFIXES, 1).await;
    let moved = churn(&again, &after, Some(removed));
    assert!(moved <= EXPLORED, "{moved} prefixes of other hosts moved");

    gateway.set_hosts(&engines).await.unwrap();
    knows(4.0, SOON).await;
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn requests_count_on_a_host_that_another_worker_has_just_learned() {
    const WORKERS: u32 = 4;
    const STREAMS: usize = 32;
    // Who learns it first is chance: a round is one chance for each worker.
    for _ in 0..3 {
        let engines = MockEngine::start_many(2).await.unwrap();
        let gateway = Gateway::of(&engines)
            .pool(json!({"hosts": {}}))
            .edit(|plan| plan.concurrency(WORKERS))
            .start_unsettled()
            .await
            .unwrap();
        let mut opening = JoinSet::new();
        for prefix in 0..STREAMS as u64 {
            let address = gateway.address();
            opening.spawn(async move {
                let mut connection = Connection::open(address, Protocol::Http1).await.unwrap();
                let held = prompt_of(prefix).script(Behaviour::HoldStream { events: 1 });
                let mut stream = connection.start(held).await.unwrap();
                assert!(stream.next().await.unwrap().is_some());
                (connection, stream)
            });
        }
        let streams = opening.join_all().await;
        let counted = async || gateway.metric(IN_FLIGHT, &[]).await.unwrap();
        let all = eventually(SOON, async || counted().await == STREAMS as f64);
        assert!(all.await, "{} of {STREAMS} are counted", counted().await);
        engines.iter().for_each(MockEngine::release);
        for (_connection, stream) in streams {
            stream.finish().await.unwrap();
        }
        gateway.quiet().await.unwrap();
    }
}

/// How many prefixes moved between two hosts that both stayed.
fn churn(before: &[String], after: &[String], event: Option<&str>) -> usize {
    let pairs = before.iter().zip(after);
    let moved = pairs.filter(|(before, after)| before != after);
    moved
        .filter(|(before, after)| event != Some(before) && event != Some(after))
        .count()
}

#[tokio::test]
async fn an_adaptive_gateway_moves_hardly_more_than_placement_does() {
    const PREFIXES: u64 = 2000;
    // Half a point of the prefixes, over what moves without any event: what the table of placed
    // prefixes forgets goes home again.
    const CHURN: usize = 10;
    let engines = MockEngine::start_many(5).await.unwrap();
    let gateway = Gateway::of(&engines[..4])
        .eds()
        .pool(at_once())
        .start()
        .await
        .unwrap();
    let client = gateway.client(Protocol::Http1);
    let first = homes(&client, 0..PREFIXES, 1).await;
    let four = homes(&client, 0..PREFIXES, 1).await;
    let usual = churn(&first, &four, None);

    gateway.set_hosts(&engines).await.unwrap();
    gateway.wait_hosts("usable", 5, SOON).await.unwrap();
    let added = engines[4].name();
    let five = homes(&client, 0..PREFIXES, 1).await;
    // Prefixes that are known to be cached may stay where they are; new ones go by placement.
    let gained = four
        .iter()
        .zip(&five)
        .filter(|(before, after)| before != after && *after == added);
    let share = gained.count() as f64 / PREFIXES as f64;
    assert!(
        share <= 0.22,
        "{share} of the prefixes moved to the new host"
    );
    let moved = churn(&four, &five, Some(added));
    assert!(
        moved <= usual + CHURN,
        "{moved} prefixes moved elsewhere, {usual} without event"
    );
    let fresh = homes(&client, 5000..5400, 1).await;
    let taken = fresh.iter().filter(|host| *host == added).count() as f64 / fresh.len() as f64;
    // A fifth; three standard deviations of 400 draws are 0.06.
    assert!(
        (0.14..=0.26).contains(&taken),
        "the new host took {taken} of the new prefixes"
    );

    // The new prefixes took places in the table.
    let again = homes(&client, 0..PREFIXES, 1).await;
    let usual = usual + churn(&five, &again, None);
    let removed = engines[1].name();
    let left = engines.iter().filter(|engine| engine.name() != removed);
    gateway.set_hosts(left).await.unwrap();
    gateway.wait_hosts("usable", 4, SOON).await.unwrap();
    let left = homes(&client, 0..PREFIXES, 1).await;
    assert!(
        !left.iter().any(|host| host == removed),
        "it still got requests"
    );
    let moved = churn(&again, &left, Some(removed));
    assert!(
        moved <= usual + CHURN,
        "{moved} prefixes moved elsewhere, {usual} without event"
    );
    println!("moved: {usual} without event, {share} to the new host, {moved} at the removal");
    gateway.quiet().await.unwrap();
}
