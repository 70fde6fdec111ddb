//! Proves that the mock engine and the client do what the tests against Envoy rely on.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use tools::testkit::{
    Behaviour, Body, Client, Connection, MockEngine, Piece, Protocol, Request, eventually, sha256,
};

const SOON: Duration = Duration::from_secs(5);
const BOTH: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];

#[tokio::test]
async fn a_request_is_recorded_as_it_was_sent() {
    let engine = MockEngine::start().await.unwrap();
    let body = vec![0xfe_u8; 100_000];
    for protocol in BOTH {
        let client = Client::new(engine.address(), protocol);
        let request = Request::post("/v1/x?y=1", body.clone()).header("x-odd", b"\xff\xfe");
        let answer = client.ok(request).await.unwrap();
        assert_eq!(answer.engine().unwrap(), engine.name());
        assert_eq!(answer.seen_sha256().unwrap(), sha256(&body));
        let seen = engine.take_recorded();
        assert_eq!(seen.len(), 1);
        assert_eq!(
            (seen[0].method.as_str(), seen[0].body_bytes),
            ("POST", 100_000)
        );
        assert!(seen[0].path.ends_with("/v1/x?y=1"), "{}", seen[0].path);
        assert_eq!(seen[0].header("x-odd").unwrap(), b"\xff\xfe");
    }
}

#[tokio::test]
async fn pieces_and_trailers_arrive_whole() {
    let engine = MockEngine::start().await.unwrap();
    for protocol in BOTH {
        let client = Client::new(engine.address(), protocol);
        let request = Request::chat("0123456789").cut_every(3, Duration::ZERO, &[("x-t", "end")]);
        client.ok(request).await.unwrap();
        let seen = engine.take_recorded().remove(0);
        assert_eq!(seen.body_sha256, sha256(b"0123456789"));
        assert_eq!(
            seen.trailers,
            [("x-t".to_owned(), b"end".to_vec())],
            "{protocol:?}"
        );
        assert_eq!(seen.header("content-length"), None);
    }
}

#[tokio::test]
async fn held_requests_are_counted_until_released() {
    let engine = MockEngine::start().await.unwrap();
    engine.set(Behaviour::Hold);
    let client = Client::new(engine.address(), Protocol::Http1);
    let (first, second, _) = tokio::join!(
        client.ok(Request::chat("a")),
        client.ok(Request::chat("b")),
        async {
            assert!(eventually(SOON, async || engine.in_flight() == 2).await);
            engine.release();
        }
    );
    assert_eq!((first.unwrap().status, second.unwrap().status), (200, 200));
    assert_eq!(
        (engine.in_flight(), engine.in_flight_max(), engine.total()),
        (0, 2, 2)
    );
}

#[tokio::test]
async fn leaving_frees_the_engine_while_waiting_and_in_the_stream() {
    let engine = MockEngine::start().await.unwrap();
    for (protocol, behaviour) in BOTH.into_iter().flat_map(|p| {
        [
            (p, Behaviour::Hold),
            (p, Behaviour::HoldStream { events: 2 }),
        ]
    }) {
        engine.set(behaviour);
        let mut connection = Connection::open(engine.address(), protocol).await.unwrap();
        if behaviour == Behaviour::Hold {
            let waiting = connection.start(Request::chat("a"));
            let cut = tokio::time::timeout(Duration::from_millis(100), waiting).await;
            assert!(cut.is_err(), "it was not held");
        } else {
            let mut running = connection.start(Request::chat("a")).await.unwrap();
            assert!(running.next().await.unwrap().is_some());
            assert_eq!(engine.in_flight(), 1);
        }
        // HTTP/2 has left with its stream; HTTP/1.1 leaves with its connection.
        if protocol == Protocol::Http1 {
            drop(connection);
        }
        assert!(
            eventually(SOON, async || engine.in_flight() == 0).await,
            "{protocol:?} {behaviour:?}"
        );
    }
}

#[tokio::test]
async fn a_cut_stream_is_an_error_and_a_whole_one_is_not() {
    let engine = MockEngine::start().await.unwrap();
    for protocol in BOTH {
        let client = Client::new(engine.address(), protocol);
        let stream = Behaviour::Stream {
            events: 3,
            every_ms: 1,
        };
        let answer = client.ok(Request::chat("a").script(stream)).await.unwrap();
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        assert_eq!(text.matches("content").count(), 3, "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        let cut = Behaviour::Cut {
            events: 3,
            every_ms: 1,
        };
        let mut connection = Connection::open(engine.address(), protocol).await.unwrap();
        let running = connection
            .start(Request::chat("a").script(cut))
            .await
            .unwrap();
        assert_eq!(running.status, 200);
        assert!(running.finish().await.is_err());
        let reset = Request::chat("a").script(Behaviour::Reset { after_ms: 0 });
        assert!(client.send(reset).await.is_err());
        assert!(eventually(SOON, async || engine.in_flight() == 0).await);
    }
}

#[tokio::test]
async fn a_crashed_engine_refuses_and_comes_back_on_its_port() {
    let engine = MockEngine::start().await.unwrap();
    let client = Client::new(engine.address(), Protocol::Http1);
    client.ok(Request::get("/x")).await.unwrap();
    for _ in 0..3 {
        engine.crash().await.unwrap();
        let refused = eventually(SOON, async || {
            Connection::open(engine.address(), Protocol::Http1)
                .await
                .is_err()
        });
        assert!(refused.await, "still listening");
        engine.revive().unwrap();
        let fresh = Client::new(engine.address(), Protocol::Http1);
        fresh.ok(Request::get("/x")).await.unwrap();
    }
}

#[tokio::test]
async fn health_is_answered_as_set_and_not_recorded() {
    let engine = MockEngine::start().await.unwrap();
    let client = Client::new(engine.address(), Protocol::Http1);
    assert_eq!(
        client.send(Request::get("/health")).await.unwrap().status,
        200
    );
    engine.set_health(503);
    assert_eq!(
        client.send(Request::get("/health")).await.unwrap().status,
        503
    );
    assert_eq!((engine.health_checks(), engine.total()), (2, 0));
}

#[tokio::test]
async fn an_upload_that_never_ends_is_in_flight_until_the_client_leaves() {
    let engine = MockEngine::start().await.unwrap();
    let mut connection = Connection::open(engine.address(), Protocol::Http1)
        .await
        .unwrap();
    let piece = Piece {
        after: Duration::ZERO,
        bytes: "half".into(),
    };
    let request = Request::chat("").body(Body::Pieces {
        pieces: vec![piece],
        trailers: Vec::new(),
        never_ends: true,
    });
    let cut = tokio::time::timeout(Duration::from_millis(100), connection.start(request)).await;
    assert!(cut.is_err());
    assert_eq!(engine.in_flight(), 1);
    drop(connection);
    assert!(eventually(SOON, async || engine.in_flight() == 0).await);
    assert!(engine.take_recorded().is_empty());
}
