//! Proves in a real Envoy that a limit holds under a burst over four workers.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use prefix_router::names::DECISIONS;
use serde_json::json;
use tokio::task::JoinSet;
use tools::testkit::{
    Answer, Behaviour, Client, Gateway, MockEngine, Protocol, Request, ask, eventually,
};

const SOON: Duration = Duration::from_secs(20);
const HOSTS: usize = 7;
const LIMIT: u64 = 10;
/// As many as the hosts take together.
const ROOM: u64 = HOSTS as u64 * LIMIT;

async fn bed(pool: serde_json::Value) -> (Vec<MockEngine>, Gateway, Arc<Client>) {
    let engines = MockEngine::start_many(HOSTS).await.unwrap();
    engines
        .iter()
        .for_each(|engine| engine.set(Behaviour::Hold));
    let gateway = Gateway::of(&engines)
        .pool(json!({"limit": LIMIT, "panic_rule": false}))
        .pool(pool)
        .edit(|plan| plan.concurrency(4))
        .start()
        .await
        .unwrap();
    let client = gateway.client(Protocol::Http1);
    (engines, gateway, client)
}

/// Sends equal prompts, all at once.
fn burst(client: &Arc<Client>, running: &mut JoinSet<Answer>, count: u64) {
    for _ in 0..count {
        let client = Arc::clone(client);
        running.spawn(async move { client.send(Request::chat(ask("hello"))).await.unwrap() });
    }
}

fn in_flight(engines: &[MockEngine]) -> Vec<u64> {
    engines.iter().map(MockEngine::in_flight).collect()
}

async fn release_all(engines: &[MockEngine], running: &mut JoinSet<Answer>) -> Vec<Answer> {
    let mut answers = Vec::new();
    engines.iter().for_each(|engine| engine.set(Behaviour::OK));
    while let Some(answer) = {
        engines.iter().for_each(MockEngine::release);
        running.join_next().await
    } {
        answers.push(answer.unwrap());
    }
    answers
}

#[tokio::test]
async fn no_host_is_over_its_limit_while_another_has_room() {
    let (engines, gateway, client) = bed(json!({})).await;
    let mut running = JoinSet::new();
    burst(&client, &mut running, ROOM);
    let full = eventually(SOON, async || {
        in_flight(&engines).iter().sum::<u64>() == ROOM
    })
    .await;
    assert!(full, "{:?}", in_flight(&engines));
    for engine in &engines {
        assert_eq!(engine.in_flight_max(), LIMIT, "{:?}", in_flight(&engines));
    }
    // Beyond that every host is full, and each further one goes to the least loaded.
    burst(&client, &mut running, 200 - ROOM);
    let all = eventually(SOON, async || {
        in_flight(&engines).iter().sum::<u64>() == 200
    })
    .await;
    assert!(all, "{:?}", in_flight(&engines));
    let counts = in_flight(&engines);
    let spread = counts.iter().max().unwrap() - counts.iter().min().unwrap();
    assert!(spread <= 1, "the excess is uneven: {counts:?}");
    let saturated = [("decision", "saturated")];
    let found = gateway.metric(DECISIONS, &saturated).await.unwrap();
    assert_eq!(found, (200 - ROOM) as f64);
    let answers = release_all(&engines, &mut running).await;
    assert!(answers.iter().all(|answer| answer.status == 200));
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn with_reject_exactly_the_excess_is_told_to_come_back() {
    let (engines, gateway, client) = bed(json!({"on_saturated": "reject"})).await;
    let mut running = JoinSet::new();
    burst(&client, &mut running, 200);
    let mut refused = Vec::new();
    while refused.len() < (200 - ROOM) as usize {
        let answer = tokio::time::timeout(SOON, running.join_next()).await;
        refused.push(
            answer
                .expect("the excess was not refused")
                .unwrap()
                .unwrap(),
        );
    }
    for answer in &refused {
        assert_eq!(answer.status, 429);
        assert!(
            answer
                .header("retry-after")
                .unwrap()
                .parse::<u32>()
                .unwrap()
                >= 1
        );
        assert_eq!(
            answer.header("x-prefix-router-reason").unwrap(),
            "saturated"
        );
        let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(body["error"]["type"], "rate_limit_error");
        assert_eq!(answer.engine(), None);
    }
    assert_eq!(in_flight(&engines), [LIMIT; HOSTS]);
    let answers = release_all(&engines, &mut running).await;
    assert_eq!(answers.len(), ROOM as usize);
    assert!(answers.iter().all(|answer| answer.status == 200));
    for engine in &engines {
        assert_eq!(engine.in_flight_max(), LIMIT);
    }
    // A refusal is no state: the next one is served.
    gateway.quiet().await.unwrap();
    assert_eq!(
        client
            .send(Request::chat(ask("hello")))
            .await
            .unwrap()
            .status,
        200
    );
}
