//! Proves with small buffers in Envoy that the shipped route lets large prompts through, and that
//! without it the filter needs one refusal to learn.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::time::Duration;

use prefix_router::names::{BODY_REFUSED, UNREAD};
use serde_json::{Value, json};
use tools::harness::Plan;
use tools::testkit::{
    Gateway, GatewayPlan, MockEngine, Protocol, Request, chat, eventually, sha256, words,
};

const BOTH: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];
const SIZES: [usize; 5] = [31_000, 33_000, 65_000, 1_000_000, 8_000_000];

/// A connection buffer of 32 KiB and an HTTP/2 window of 64 KiB, as edge configs have them.
fn small_buffers(gateway: GatewayPlan) -> GatewayPlan {
    gateway.edit(|plan| {
        plan.edit(|envoy| {
            envoy["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] =
                json!(32 * 1024);
            Ok(())
        })
        .edit_http(|http| {
            http["http2_protocol_options"] = json!({"initial_stream_window_size": 64 * 1024});
            Ok(())
        })
    })
}

fn body_of(bytes: usize) -> Vec<u8> {
    let mut body = chat(&words(1, 2000), &words(2, bytes - 2500));
    body.resize(bytes, b' ');
    body
}

#[tokio::test]
async fn the_shipped_route_lets_large_prompts_through_small_buffers() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let gateway = small_buffers(Gateway::of(&engines)).start().await.unwrap();
    for protocol in BOTH {
        let client = gateway.client(protocol);
        for bytes in SIZES {
            let body = body_of(bytes);
            let answer = client.ok(Request::chat(body.clone())).await.unwrap();
            assert_eq!(
                answer.seen_sha256().unwrap(),
                sha256(&body),
                "{protocol:?} {bytes}"
            );
        }
    }
    assert_eq!(gateway.routed().await.unwrap(), 10.0);
    gateway.quiet().await.unwrap();
}

/// The route without what the shipped one has: Envoy's own limits are in force.
fn without_route_limit(gateway: GatewayPlan) -> GatewayPlan {
    gateway.edit(|plan| {
        plan.edit_http(|http| {
            let all = &mut http["route_config"]["virtual_hosts"][0];
            let removed = all
                .as_object_mut()
                .unwrap()
                .remove("request_body_buffer_limit");
            assert!(removed.is_some(), "the template has changed");
            Ok(())
        })
    })
}

#[tokio::test]
async fn without_the_route_limit_one_refusal_teaches_every_worker() {
    for protocol in BOTH {
        let engines = MockEngine::start_many(3).await.unwrap();
        let plan = without_route_limit(small_buffers(Gateway::of(&engines)));
        let gateway = plan.start().await.unwrap();
        let client = gateway.client(protocol);
        client.open(8).await.unwrap();
        let mut refused = 0;
        for (round, bytes) in (0..4).flat_map(|round| SIZES.map(|bytes| (round, bytes))) {
            let body = body_of(bytes);
            let whole = Request::chat(body.clone());
            let pieces = whole.clone().cut_every(10_000, Duration::ZERO, &[]);
            for request in [whole, pieces] {
                let answer = client.send(request).await.unwrap();
                if answer.status == 413 {
                    refused += 1;
                    continue;
                }
                assert_eq!(answer.status, 200, "{protocol:?} {bytes} in round {round}");
                assert_eq!(
                    answer.seen_sha256().unwrap(),
                    sha256(&body),
                    "{protocol:?} {bytes}"
                );
            }
        }
        assert_eq!(refused, 1, "{protocol:?}");
        let counted = gateway.metric(BODY_REFUSED, &[]).await.unwrap();
        assert_eq!(counted, 1.0, "{protocol:?}");
        let told = gateway.envoy().log_lines("request_body_buffer_limit");
        assert_eq!(told.len(), 1, "{protocol:?}: {told:?}");
        // Small bodies are read whole as before, and large ones still have homes of their own.
        for words_after in [10, 20_000] {
            let mut used = BTreeSet::new();
            // Not the prefix from above, which is hot by now and about to be split.
            for prompt in 100..130 {
                let body = chat(&words(prompt, 2000), &words(1, words_after));
                let mut hosts = Vec::new();
                for _ in 0..2 {
                    hosts.push(client.host(Request::chat(body.clone())).await.unwrap());
                }
                assert_eq!(hosts[0], hosts[1], "{protocol:?} prompt {prompt}");
                used.extend(hosts);
            }
            assert_eq!(used.len(), 3, "{protocol:?}: all went to {used:?}");
        }
        gateway.quiet().await.unwrap();
    }
}

#[tokio::test]
async fn with_a_raised_limit_and_a_new_configuration_bodies_are_read_whole_again() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let plan = without_route_limit(small_buffers(Gateway::of(&engines)));
    let gateway = plan.edit(Plan::listeners_from_file).start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let refused = client.send(Request::chat(body_of(65_000))).await.unwrap();
    assert_eq!(refused.status, 413);
    let raise = |listeners: &mut Value| {
        let http = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
        let http = listeners.pointer_mut(http).unwrap();
        http["route_config"]["virtual_hosts"][0]["request_body_buffer_limit"] = json!(10_485_760);
        let text = "/http_filters/0/typed_config/config/configuration/value";
        let text = http.pointer_mut(text).unwrap();
        let mut config: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
        config["debug_headers"] = json!("always");
        *text = Value::from(config.to_string());
        Ok(())
    };
    gateway.envoy().edit_listeners(raise).await.unwrap();
    // The workers take the new listener one after another.
    let newest = eventually(Duration::from_secs(20), async || {
        let mut is_newest = true;
        for _ in 0..8 {
            let client = gateway.client(Protocol::Http1);
            let answer = client.ok(Request::chat(body_of(3000))).await.unwrap();
            is_newest &= answer.header("x-prefix-router-decision").is_some();
        }
        is_newest
    });
    assert!(newest.await, "the old listener still serves");
    let cut = async || {
        let cut = gateway.metric(UNREAD, &[("reason", "truncated")]).await;
        cut.unwrap()
    };
    let cut_before = cut().await;
    for _ in 0..10 {
        let client = gateway.client(Protocol::Http1);
        client.ok(Request::chat(body_of(65_000))).await.unwrap();
    }
    gateway.quiet().await.unwrap();
    assert_eq!(cut().await, cut_before);
}
