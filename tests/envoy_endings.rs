//! Proves in a real Envoy that a request counts on its host until it has ended, and no longer,
//! whatever ends it.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use tools::testkit::{
    Behaviour, Body, Connection, Gateway, MockEngine, Piece, Protocol, Request, ask, eventually,
};

const SOON: Duration = Duration::from_secs(10);
const BOTH: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];

/// Always the same short prompt, which has one home.
fn request() -> Request {
    Request::chat(ask("hello"))
}

/// Engines, their gateway, and the engine that `request()` goes to.
async fn bed(count: usize) -> (Vec<MockEngine>, Gateway, usize) {
    let engines = MockEngine::start_many(count).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let host = gateway
        .client(Protocol::Http1)
        .host(request())
        .await
        .unwrap();
    let home = engines
        .iter()
        .position(|engine| engine.name() == host)
        .unwrap();
    (engines, gateway, home)
}

#[track_caller]
fn assert_soon(holds: bool, what: &str) {
    assert!(holds, "{what}: not within {SOON:?}");
}

async fn wait_counted(gateway: &Gateway, engine: &MockEngine, count: u64) {
    let arrived = eventually(SOON, async || engine.in_flight() == count).await;
    assert_soon(arrived, &format!("{count} in flight on {}", engine.name()));
    gateway.wait_in_flight(engine.name(), count).await.unwrap();
}

#[tokio::test]
async fn a_client_that_leaves_while_waiting_frees_its_place() {
    let (engines, gateway, home) = bed(3).await;
    engines[home].set(Behaviour::Hold);
    for protocol in BOTH {
        let mut connection = Connection::open(gateway.address(), protocol).await.unwrap();
        {
            let waiting = connection.start(request());
            tokio::select! {
                _ = waiting => panic!("it was not held"),
                () = wait_counted(&gateway, &engines[home], 1) => {}
            }
        }
        if protocol == Protocol::Http1 {
            drop(connection);
        }
        gateway.quiet().await.unwrap();
        assert_soon(
            eventually(SOON, async || engines[home].in_flight() == 0).await,
            "freed",
        );
    }
}

#[tokio::test]
async fn a_client_that_leaves_in_the_stream_frees_its_place() {
    let (engines, gateway, home) = bed(3).await;
    engines[home].set(Behaviour::HoldStream { events: 3 });
    for protocol in BOTH {
        let mut connection = Connection::open(gateway.address(), protocol).await.unwrap();
        let mut running = connection.start(request()).await.unwrap();
        assert!(running.next().await.unwrap().is_some());
        // The headers are long gone: a stream counts to its end.
        wait_counted(&gateway, &engines[home], 1).await;
        drop(running);
        if protocol == Protocol::Http1 {
            drop(connection);
        }
        gateway.quiet().await.unwrap();
        assert_soon(
            eventually(SOON, async || engines[home].in_flight() == 0).await,
            "freed",
        );
    }
}

#[tokio::test]
async fn a_client_that_leaves_in_its_upload_was_never_counted() {
    let (engines, gateway, home) = bed(3).await;
    let served = engines[home].total();
    for protocol in BOTH {
        let mut connection = Connection::open(gateway.address(), protocol).await.unwrap();
        let piece = Piece {
            after: Duration::ZERO,
            bytes: ask("hello")[..20].to_vec().into(),
        };
        let half = Body::Pieces {
            pieces: vec![piece],
            trailers: Vec::new(),
            never_ends: true,
        };
        let waiting = connection.start(request().body(half));
        assert!(
            tokio::time::timeout(Duration::from_millis(300), waiting)
                .await
                .is_err()
        );
        drop(connection);
        gateway.quiet().await.unwrap();
    }
    assert_eq!(engines[home].total(), served, "half a request was sent on");
}

#[tokio::test]
async fn an_engine_that_dies_in_the_stream_frees_its_place_and_the_client_sees_the_cut() {
    for protocol in BOTH {
        // An engine that was away has failed health checks for a while: one fleet each.
        let (engines, gateway, home) = bed(3).await;
        let mut connection = Connection::open(gateway.address(), protocol).await.unwrap();
        let cut = Behaviour::Cut {
            events: 3,
            every_ms: 5,
        };
        let running = connection.start(request().script(cut)).await.unwrap();
        assert_eq!(running.status, 200);
        assert!(
            running.finish().await.is_err(),
            "the cut was hidden from the client"
        );
        gateway.quiet().await.unwrap();

        engines[home].set(Behaviour::HoldStream { events: 3 });
        let mut connection = Connection::open(gateway.address(), protocol).await.unwrap();
        let mut running = connection.start(request()).await.unwrap();
        assert!(running.next().await.unwrap().is_some());
        wait_counted(&gateway, &engines[home], 1).await;
        engines[home].crash().await.unwrap();
        assert!(
            running.finish().await.is_err(),
            "the crash was hidden from the client"
        );
        gateway.quiet().await.unwrap();
    }
}

#[tokio::test]
async fn a_prompt_that_kills_its_engine_kills_only_one() {
    let (engines, gateway, _) = bed(3).await;
    let before: u64 = engines.iter().map(MockEngine::total).sum();
    let client = gateway.client(Protocol::Http1);
    let deadly = request().script(Behaviour::Reset { after_ms: 0 });
    let answer = client.send(deadly).await.unwrap();
    assert_eq!(answer.status, 503);
    let reached: u64 = engines.iter().map(MockEngine::total).sum::<u64>() - before;
    assert_eq!(reached, 1, "the request was sent to {reached} engines");
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn errors_of_an_engine_pass_as_they_are_and_free_its_place() {
    let (engines, gateway, home) = bed(3).await;
    let client = gateway.client(Protocol::Http1);
    // The first 5xx comes last: a host that fails weighs more from then on.
    for status in [400, 404, 429, 500] {
        let script = Behaviour::Answer {
            status,
            after_ms: 5,
        };
        let answer = client.send(request().script(script)).await.unwrap();
        assert_eq!(answer.status, status);
        assert_eq!(answer.engine().unwrap(), engines[home].name());
    }
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn a_refused_connection_is_retried_on_the_second_host_and_counts_there() {
    let (engines, gateway, home) = bed(3).await;
    engines[home].crash().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let second = client.host(request()).await.unwrap();
    let second = engines
        .iter()
        .position(|engine| engine.name() == second)
        .unwrap();
    assert_ne!(second, home);
    // The second of the list, every time, before the poll has seen the failure and after it.
    for _ in 0..10 {
        assert_eq!(
            client.host(request()).await.unwrap(),
            engines[second].name()
        );
    }
    engines[second].set(Behaviour::HoldStream { events: 1 });
    let mut connection = Connection::open(gateway.address(), Protocol::Http1)
        .await
        .unwrap();
    let mut running = connection.start(request()).await.unwrap();
    assert_eq!(running.engine().unwrap(), engines[second].name());
    assert!(running.next().await.unwrap().is_some());
    wait_counted(&gateway, &engines[second], 1).await;
    gateway
        .wait_in_flight(engines[home].name(), 0)
        .await
        .unwrap();
    engines[second].release();
    running.finish().await.unwrap();
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn no_engine_listening_is_a_503_and_nothing_stays_counted() {
    let (engines, gateway, _) = bed(3).await;
    for engine in &engines {
        engine.crash().await.unwrap();
    }
    let answer = gateway
        .client(Protocol::Http1)
        .send(request())
        .await
        .unwrap();
    assert_eq!(answer.status, 503);
    gateway.quiet().await.unwrap();
}
