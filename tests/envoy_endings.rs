//! Proves in a real Envoy that a request counts on its host until it has ended, and no longer,
//! whatever ends it.

#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prefix_router::names::{COUNTER_REPAIRS, IN_FLIGHT, PENDING_TOKENS};
use serde_json::json;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tools::testkit::{
    Behaviour, Body, Connection, Gateway, MockEngine, Piece, Protocol, Request, ask, chat,
    eventually, words,
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

/// Listens at an address where at most so many connections wait to be accepted.
fn listen(address: SocketAddr, backlog: u32) -> TcpListener {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address).unwrap();
    socket.listen(backlog).unwrap()
}

/// Leads every connection to an engine.
async fn lead(door: TcpListener, engine: SocketAddr) {
    let mut connections = JoinSet::new();
    loop {
        let (mut outer, _) = door.accept().await.unwrap();
        connections.spawn(async move {
            let mut inner = TcpStream::connect(engine).await?;
            tokio::io::copy_bidirectional(&mut outer, &mut inner).await
        });
    }
}

#[tokio::test]
async fn a_burst_that_waits_for_connections_stays_counted_however_often_envoy_is_asked() {
    const BURST: u64 = 100;
    let engine = MockEngine::start().await.unwrap();
    engine.set(Behaviour::Hold);
    // Whoever connects has to try again after a second: one connection waits to be accepted, and
    // there is room for no other.
    let closed = listen("127.0.0.1:0".parse().unwrap(), 0);
    let address = closed.local_addr().unwrap();
    let _first = TcpStream::connect(address).await.unwrap();
    let gateway = Gateway::at([address])
        .edit(|plan| {
            plan.edit_cluster("engines", |cluster| {
                cluster["connect_timeout"] = json!("5s");
                // Checks would wait as well, and the host would seem to have failed.
                cluster["health_checks"] = json!([]);
                Ok(())
            })
        })
        .start()
        .await
        .unwrap();
    let client = gateway.client(Protocol::Http1);
    let mut running = JoinSet::new();
    for _ in 0..BURST {
        let client = Arc::clone(&client);
        running.spawn(async move { client.ok(request()).await.map(drop) });
    }
    let in_flight = async || gateway.metric(IN_FLIGHT, &[]).await.unwrap();
    let booked = eventually(SOON, async || in_flight().await == BURST as f64).await;
    assert_soon(booked, "all are booked");
    drop(closed);
    let door = tokio::spawn(lead(listen(address, 1024), engine.address()));
    assert_eq!(engine.total(), 0, "some had a connection at once");
    let arrived = eventually(SOON, async || engine.in_flight() == BURST).await;
    assert_soon(arrived, "all have a connection");
    assert_eq!(in_flight().await, BURST as f64);
    let repairs = gateway.metric(COUNTER_REPAIRS, &[]).await.unwrap();
    assert_eq!(repairs, 0.0, "living requests were taken away");
    engine.set(Behaviour::OK);
    engine.release();
    while let Some(answer) = running.join_next().await {
        answer.unwrap().unwrap();
    }
    gateway.quiet().await.unwrap();
    door.abort();
}

#[tokio::test]
async fn the_first_byte_of_a_stream_ends_what_is_pending_and_its_end_the_rest() {
    let (engines, gateway, _) = bed(3).await;
    let body = String::from_utf8(chat(&words(1, 8000), "hello")).unwrap();
    let streamed = body.replacen('{', r#"{"stream": true, "#, 1);
    let request = |behaviour| Request::chat(streamed.clone()).script(behaviour);
    let sum = async |name| gateway.metric(name, &[]).await.unwrap();
    let mut silent = Connection::open(gateway.address(), Protocol::Http1)
        .await
        .unwrap();
    let waits = async || {
        let waits = eventually(SOON, async || sum(PENDING_TOKENS).await > 100.0);
        assert_soon(waits.await, "tokens are pending");
    };
    tokio::select! {
        _ = silent.start(request(Behaviour::Hold)) => panic!("it was not held"),
        () = waits() => {}
    }
    drop(silent);
    gateway.quiet().await.unwrap();

    let mut connection = Connection::open(gateway.address(), Protocol::Http1)
        .await
        .unwrap();
    let held = request(Behaviour::HoldStream { events: 1 });
    let mut running = connection.start(held).await.unwrap();
    assert!(running.next().await.unwrap().is_some());
    let settled = eventually(SOON, async || {
        (sum(PENDING_TOKENS).await, sum(IN_FLIGHT).await) == (0.0, 1.0)
    });
    assert_soon(settled.await, "nothing is pending, one is in flight");
    engines.iter().for_each(MockEngine::release);
    running.finish().await.unwrap();
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn a_whole_answer_that_its_client_does_not_read_waits_for_no_prompt() {
    let (engines, gateway, _) = bed(3).await;
    // Of 2,000 tokens, and an answer of more than the client takes unread.
    let long = Request::chat(chat(&words(1, 8000), "hello"));
    let mut connection = Connection::open_narrow(gateway.address(), 10)
        .await
        .unwrap();
    let running = connection.start(long).await.unwrap();
    let engine = running.engine().unwrap();
    let pending = async || gateway.metric(PENDING_TOKENS, &[]).await.unwrap();
    gateway.wait_in_flight(&engine, 1).await.unwrap();
    let settled = eventually(SOON, async || pending().await == 0.0).await;
    assert_soon(settled, "nothing is pending");
    // It is in flight until it has ended: its end is still to be sent.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(gateway.in_flight(&engine).await.unwrap(), 1.0);
    let served = engines.iter().find(|own| own.name() == engine).unwrap();
    assert_eq!(served.in_flight(), 0);
    let answer = running.finish().await.unwrap();
    assert!(answer.body.len() > 10, "{} bytes", answer.body.len());
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn a_retry_that_waits_for_its_answer_takes_no_other_request_from_its_first_host() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let pool =
        json!({"routing": "fixed", "prefix_length": 1024, "limit": 1000, "slow_start_ms": 0});
    let gateway = Gateway::of(&engines).pool(pool).start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let host = client.host(request()).await.unwrap();
    let mut found = engines.iter();
    let home = found.find(|engine| engine.name() == host).unwrap();
    engines
        .iter()
        .for_each(|engine| engine.set(Behaviour::Hold));
    let start = || {
        let client = gateway.client(Protocol::Http1);
        tokio::spawn(async move { client.ok(request()).await.map(drop) })
    };

    home.crash().await.unwrap();
    let retried = start();
    let holds = |engine: &&MockEngine| engine.in_flight() == 1;
    let moved = eventually(SOON, async || engines.iter().any(|engine| holds(&engine))).await;
    assert_soon(moved, "it is tried again");
    let second = engines.iter().find(holds).unwrap();
    // Envoy has nothing on the first host for as long as any leftover would be taken back in.
    tokio::time::sleep(Duration::from_secs(9)).await;
    home.revive().unwrap();
    gateway.wait_hosts("usable", 3, SOON).await.unwrap();
    let next = start();
    let came = eventually(SOON, async || home.in_flight() == 1).await;
    assert_soon(came, "the first host has its prompts again");
    second.release();
    retried.await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(gateway.in_flight(home.name()).await.unwrap(), 1.0);
    assert_eq!(gateway.in_flight(second.name()).await.unwrap(), 0.0);
    home.release();
    next.await.unwrap().unwrap();
    gateway.wait_in_flight(home.name(), 0).await.unwrap();
    let repairs = gateway.metric(COUNTER_REPAIRS, &[]).await.unwrap();
    assert_eq!(repairs, 0.0, "a living request was taken away");
}
