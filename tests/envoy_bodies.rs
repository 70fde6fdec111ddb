//! Proves in a real Envoy that every byte passes as it was sent, however it was cut, and that
//! requests without a prompt are not held.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use prefix_router::names::ABSTAIN;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tools::testkit::{
    Answer, Body, Client, Gateway, GatewayPlan, Method, MockEngine, Piece, Protocol, Request, chat,
    eventually, sha256, words,
};

const BOTH: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];
const MIB: usize = 1024 * 1024;

/// A chat body of at least `bytes` bytes.
fn body_of(seed: u64, bytes: usize) -> Vec<u8> {
    chat(&words(seed, 2000), &words(seed + 1, bytes))
}

/// Sends and expects the engine to have seen exactly `body`.
async fn exact(client: &Client, request: Request, body: &[u8]) -> Answer {
    let shape = format!("{:?}", request.headers);
    let answer = client
        .ok(request)
        .await
        .unwrap_or_else(|error| panic!("{shape}: {error:#}"));
    assert_eq!(
        answer.seen_sha256().unwrap(),
        sha256(body),
        "{shape}: other bytes arrived"
    );
    answer
}

#[tokio::test]
async fn four_megabytes_arrive_byte_for_byte() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    for (n, protocol) in BOTH.into_iter().enumerate() {
        let body = body_of(n as u64, 4 * MIB);
        let client = gateway.client(protocol);
        let whole = exact(&client, Request::chat(body.clone()), &body).await;
        for bytes in [4096, 65_536, MIB] {
            let pieces = Request::chat(body.clone()).cut_every(bytes, Duration::ZERO, &[]);
            let cut = exact(&client, pieces, &body).await;
            assert_eq!(
                cut.engine(),
                whole.engine(),
                "{protocol:?} in pieces of {bytes}"
            );
        }
    }
    assert_eq!(gateway.routed().await.unwrap(), 8.0);
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn a_body_means_the_same_however_it_is_cut() {
    let engines = MockEngine::start_many(5).await.unwrap();
    // A prompt that is sent this often becomes hot; `fixed` keys do not change with that.
    let pool = json!({"routing": "fixed", "prefix_length": 1024, "limit": 1000});
    let gateway = Gateway::of(&engines).pool(pool).start().await.unwrap();
    for (prompt, protocol) in (0..4).flat_map(|prompt| BOTH.map(|protocol| (prompt, protocol))) {
        let client = gateway.client(protocol);
        let body = body_of(10 * prompt, 1000);
        let whole = exact(&client, Request::chat(body.clone()), &body).await;
        for (bytes, after_ms) in [(1, 0), (7, 0), (1024, 3), (100_000, 20)] {
            let after = Duration::from_millis(after_ms);
            let pieces = Request::chat(body.clone()).cut_every(bytes, after, &[]);
            let cut = exact(&client, pieces, &body).await;
            assert_eq!(
                cut.engine(),
                whole.engine(),
                "{protocol:?} in pieces of {bytes}"
            );
        }
    }
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn http2_trailers_end_a_body_and_the_request_is_placed() {
    let engines = MockEngine::start_many(5).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let client = gateway.client(Protocol::Http2);
    for (prompt, bytes) in [(0, 100), (10, 5000), (20, MIB)] {
        let body = body_of(prompt, bytes);
        let whole = exact(&client, Request::chat(body.clone()), &body).await;
        let request = Request::chat(body.clone());
        let with = request.cut_every(3000, Duration::ZERO, &[("x-checksum", "1")]);
        let start = Instant::now();
        let trailed = exact(&client, with, &body).await;
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "it was held until a timeout"
        );
        assert_eq!(trailed.engine(), whole.engine());
    }
    assert_eq!(gateway.routed().await.unwrap(), 6.0);
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn a_body_longer_than_what_is_read_streams_on_untouched() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let config = json!({"request": {"body_bytes_max": 65_536}});
    let gateway = Gateway::of(&engines).config(config).start().await.unwrap();
    for protocol in BOTH {
        let client = gateway.client(protocol);
        for bytes in [65_535, 65_536, 65_537, 3 * MIB, 12 * MIB] {
            let mut body = body_of(1, bytes);
            body.resize(bytes, b' ');
            exact(&client, Request::chat(body.clone()), &body).await;
            let pieces = Request::chat(body.clone()).cut_every(30_000, Duration::ZERO, &[]);
            exact(&client, pieces, &body).await;
        }
    }
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn requests_without_a_body_pass_untouched() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let abstained = async |reason| {
        let count = gateway.metric(ABSTAIN, &[("reason", reason)]).await;
        count.unwrap()
    };
    let before = abstained("not_a_prompt").await;
    for protocol in BOTH {
        let client = gateway.client(protocol);
        for method in [
            Method::GET,
            Method::HEAD,
            Method::POST,
            Method::OPTIONS,
            Method::DELETE,
        ] {
            let start = Instant::now();
            let answer = client
                .ok(Request::new(method.clone(), "/v1/models"))
                .await
                .unwrap();
            assert!(answer.engine().is_some());
            assert!(
                start.elapsed() < Duration::from_millis(700),
                "{method} {protocol:?} was held"
            );
        }
        let empty = Request::post("/v1/chat/completions", "");
        exact(&client, empty, b"").await;
    }
    let seen: Vec<_> = engines.iter().flat_map(MockEngine::take_recorded).collect();
    assert_eq!(seen.len(), 12);
    assert!(seen.iter().all(|request| request.body_bytes == 0));
    // One that is held and let go by the watchdog passes too, half a second later.
    assert_eq!(abstained("watchdog").await, 0.0);
    assert_eq!(abstained("not_a_prompt").await - before, 12.0);
    gateway.quiet().await.unwrap();
}

/// Lets the template's connection manager pass WebSockets on.
fn allow_upgrades(gateway: GatewayPlan) -> GatewayPlan {
    gateway.edit(|plan| {
        plan.edit_http(|http| {
            http["upgrade_configs"] = json!([{"upgrade_type": "websocket"}]);
            Ok(())
        })
    })
}

async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut text = Vec::new();
    while !String::from_utf8_lossy(&text).contains(end) {
        let mut buffer = [0; 4096];
        let read = tokio::time::timeout(Duration::from_secs(10), stream.read(&mut buffer));
        let count = read
            .await
            .unwrap_or_else(|_| panic!("only {text:?} came"))
            .unwrap();
        assert_ne!(
            count,
            0,
            "closed after {:?}",
            String::from_utf8_lossy(&text)
        );
        text.extend_from_slice(&buffer[..count]);
    }
    String::from_utf8_lossy(&text).into_owned()
}

#[tokio::test]
async fn a_websocket_is_not_held() {
    let engines = MockEngine::start_many(2).await.unwrap();
    let gateway = allow_upgrades(Gateway::of(&engines)).start().await.unwrap();
    // A GET is never held; that one which upgrades is not either shows with another method.
    for method in ["GET", "POST"] {
        let mut stream = TcpStream::connect(gateway.address()).await.unwrap();
        let head = format!(
            "{method} /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\n\
             upgrade: websocket\r\nsec-websocket-version: 13\r\n\
             sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let answer = read_until(&mut stream, "\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 101"), "{method}: {answer}");
        for frame in ["first-frame", "second-frame"] {
            stream.write_all(frame.as_bytes()).await.unwrap();
            assert_eq!(read_until(&mut stream, frame).await, frame);
        }
    }
    let held = gateway.metric(ABSTAIN, &[("reason", "watchdog")]).await;
    assert_eq!(held.unwrap(), 0.0);
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn an_upload_that_waits_to_be_continued_is_told_to() {
    let engines = MockEngine::start_many(2).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let body = body_of(1, 3000);
    let mut stream = TcpStream::connect(gateway.address()).await.unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = read_until(&mut stream, "\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 100"), "{answer}");
    stream.write_all(&body).await.unwrap();
    let answer = read_until(&mut stream, "usage").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains(&sha256(&body)), "{answer}");
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn bytes_that_are_no_text_harm_nothing() {
    let engines = MockEngine::start_many(5).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let mut text = chat(&words(1, 2000), "MARK");
    let mark = text.windows(4).position(|four| four == b"MARK").unwrap();
    text[mark..mark + 4].copy_from_slice(b"\xff\xfe\xc3\x28");
    let bodies: [&[u8]; 5] = [
        &text,
        b"\xff\xfe\xfd",
        b"{\"messages\": [\xff",
        b"\0\0\0\0",
        br#"{"prompt":"\ud83d"}"#,
    ];
    for protocol in BOTH {
        let client = gateway.client(protocol);
        for body in bodies {
            let request = Request::chat(body.to_vec())
                .header("x", b"\xff\xfe")
                .header("user-agent", b"\xc3\x28")
                .header("x-amzn-sagemaker-prefix-aware-id", b"\xfe\xff");
            let first = exact(&client, request.clone(), body).await;
            let again = exact(&client, request, body).await;
            assert_eq!(first.engine(), again.engine(), "{body:?}");
        }
    }
    // A name that is none never reaches the filter, which could not read it.
    let mut stream = TcpStream::connect(gateway.address()).await.unwrap();
    let head =
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-\xff\xfe: 1\r\ncontent-length: 2\r\n\r\n{}";
    stream.write_all(head).await.unwrap();
    assert!(
        read_until(&mut stream, "\r\n")
            .await
            .starts_with("HTTP/1.1 400")
    );
    for request in engines.iter().flat_map(MockEngine::take_recorded) {
        assert_eq!(request.header("x").unwrap(), b"\xff\xfe");
        assert_eq!(request.header("user-agent").unwrap(), b"\xc3\x28");
    }
    // A VM that panicked would have been reloaded, and its requests answered 503.
    assert_eq!(
        gateway
            .stat("wasm.prefix_router.vm_reload_success")
            .await
            .unwrap(),
        0
    );
    gateway.quiet().await.unwrap();
}

/// Envoy's own buffering filter, at this place of the chain (0 is in front of ours).
fn buffer_at(place: usize, gateway: GatewayPlan) -> GatewayPlan {
    let proto = "type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer";
    let config = json!({"@type": proto, "max_request_bytes": 8 * MIB});
    let buffer = json!({"name": "buffer", "typed_config": config});
    gateway.edit(move |plan| {
        plan.edit_filters(|filters| {
            filters.insert(place, buffer);
            Ok(())
        })
    })
}

#[tokio::test]
async fn another_filter_that_holds_bodies_may_stand_in_front_or_behind() {
    for place in [0, 1] {
        let engines = MockEngine::start_many(5).await.unwrap();
        let gateway = buffer_at(place, Gateway::of(&engines))
            .start()
            .await
            .unwrap();
        for (n, bytes) in [4000, 6300, 33_000, 65_537, MIB].into_iter().enumerate() {
            let body = body_of(n as u64, bytes);
            let mut hosts = Vec::new();
            for protocol in BOTH {
                let client = gateway.client(protocol);
                let whole = exact(&client, Request::chat(body.clone()), &body).await;
                let pieces = Request::chat(body.clone()).cut_every(5000, Duration::ZERO, &[]);
                let cut = exact(&client, pieces, &body).await;
                hosts.extend([whole.engine(), cut.engine()]);
            }
            assert!(
                hosts.windows(2).all(|pair| pair[0] == pair[1]),
                "place {place}: {hosts:?}"
            );
        }
        assert_eq!(gateway.routed().await.unwrap(), 20.0, "place {place}");
        gateway.quiet().await.unwrap();
    }
}

#[tokio::test]
async fn an_upload_that_stood_still_is_placed_by_what_came_and_arrives_byte_for_byte() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let config = json!({"request": {"body_idle_ms": 1000}});
    let gateway = Gateway::of(&engines).config(config).start().await.unwrap();
    let body = body_of(1, 6000);
    for protocol in BOTH {
        let client = gateway.client(protocol);
        let piece = |ms, range: std::ops::Range<usize>| Piece {
            after: Duration::from_millis(ms),
            bytes: body[range].to_vec().into(),
        };
        // The last piece comes so late that the request is seen to go on without it.
        let pieces = vec![
            piece(0, 0..4000),
            piece(1500, 4000..4100),
            piece(1500, 4100..body.len()),
        ];
        let slow = Body::Pieces {
            pieces,
            trailers: Vec::new(),
            never_ends: false,
        };
        let sent = tokio::spawn({
            let client = std::sync::Arc::clone(&client);
            async move { client.ok(Request::chat("").body(slow)).await }
        });
        let seen = eventually(Duration::from_millis(2500), async || {
            engines.iter().any(|engine| engine.in_flight() == 1)
        });
        assert!(seen.await, "{protocol:?}: the upload was held to its end");
        let answer = sent.await.unwrap().unwrap();
        assert_eq!(answer.seen_sha256().unwrap(), sha256(&body), "{protocol:?}");
    }
    assert_eq!(gateway.routed().await.unwrap(), 2.0);
    gateway.quiet().await.unwrap();
}
