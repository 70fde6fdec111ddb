//! A mock engine: an HTTP server in the test's own process that does what the test scripts.
//!
//! Guarantee: every complete request is recorded as it arrived (names, raw header values, digest
//! of the body, trailers); the in-flight count covers a request from its headers until the last
//! byte is handed over or the connection is gone, so it never counts more than the proxy sent.
//! Not here: an engine's timing or cache (engine).

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};

/// Every answer names the engine it came from here, as `ip:port`.
pub const ENGINE_HEADER: &str = "x-engine";

/// Every answer to a complete request has the SHA-256 of the request's body here.
pub const SHA_HEADER: &str = "x-body-sha256";

/// A request may bring its own [`Behaviour`] here, as JSON.
pub const SCRIPT_HEADER: &str = "x-script";

/// Requests kept for inspection; older ones are forgotten. A soak sends 200,000 of them at about
/// 1 KiB each, a test looks at 2,000 at most.
const RECORDED_MAX: usize = 10_000;

/// Pending connections of a listener: a burst of 200 has to fit.
const BACKLOG: u32 = 1024;

/// The content type of complete answers.
const JSON: &str = "application/json";

type AnswerBody = UnsyncBoxBody<Bytes, io::Error>;

/// What an engine does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Behaviour {
    /// One complete JSON answer with usage.
    Answer {
        /// Its HTTP status.
        status: u16,
        /// Milliseconds until it begins.
        after_ms: u64,
    },
    /// An event stream that ends well, with usage at the end.
    Stream {
        /// How many content events.
        events: u32,
        /// Milliseconds between them.
        every_ms: u64,
    },
    /// Nothing until [`MockEngine::release`], then a complete answer.
    Hold,
    /// Headers and events at once, the end only after [`MockEngine::release`].
    HoldStream {
        /// How many content events.
        events: u32,
    },
    /// The connection goes away before the answer's headers.
    Reset {
        /// Milliseconds until it does.
        after_ms: u64,
    },
    /// An event stream whose connection goes away in the middle.
    Cut {
        /// How many content events come before that.
        events: u32,
        /// Milliseconds between them.
        every_ms: u64,
    },
}

impl Behaviour {
    /// A 200 at once.
    pub const OK: Self = Self::Answer {
        status: 200,
        after_ms: 0,
    };
}

/// A complete request as the engine saw it.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The method.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Names in lower case, values as bytes, in order of arrival.
    pub headers: Vec<(String, Vec<u8>)>,
    /// Lower-case hexadecimal digest of the body.
    pub body_sha256: String,
    /// The body's length in bytes.
    pub body_bytes: u64,
    /// Trailers, as the headers.
    pub trailers: Vec<(String, Vec<u8>)>,
}

impl Recorded {
    /// The first value of a header.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        let found = self.headers.iter().find(|(own, _)| own == name);
        found.map(|(_, value)| value.as_slice())
    }
}

/// An engine on a loopback port of its own; it ends when dropped.
pub struct MockEngine {
    shared: Arc<Shared>,
    address: SocketAddr,
    door: Mutex<Door>,
}

/// What stands at the engine's port.
enum Door {
    /// Connections are accepted by this task.
    Open(JoinHandle<()>),
    /// The port is ours, but nobody listens: connections are refused. The socket is only held.
    Closed { _port: TcpSocket },
}

/// What the connections of one engine share.
struct Shared {
    name: String,
    behaviour: Mutex<Behaviour>,
    health_status: AtomicU16,
    health_checks: AtomicU64,
    counts: Mutex<Counts>,
    recorded: Mutex<VecDeque<Recorded>>,
    /// What every request is answered with, if anything, in place of an engine's answer.
    page: Mutex<Option<String>>,
    connections: Mutex<Vec<AbortHandle>>,
    /// Held requests carry a ticket; all tickets up to this number are free to go.
    released: watch::Sender<u64>,
    tickets: AtomicU64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    in_flight: u64,
    in_flight_max: u64,
    total: u64,
}

/// One request in flight.
struct InFlight(Arc<Shared>);

impl InFlight {
    fn enter(shared: &Arc<Shared>) -> Self {
        let mut counts = lock(&shared.counts);
        counts.total += 1;
        counts.in_flight += 1;
        counts.in_flight_max = counts.in_flight_max.max(counts.in_flight);
        drop(counts);
        Self(Arc::clone(shared))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        lock(&self.0.counts).in_flight -= 1;
    }
}

impl MockEngine {
    /// Starts an engine that answers 200 at once.
    pub async fn start() -> Result<Self> {
        Self::start_at(IpAddr::from([127, 0, 0, 1])).await
    }

    /// Starts one on any port of this address. An unspecified address means all of the machine's.
    pub async fn start_at(ip: IpAddr) -> Result<Self> {
        let listener = claim(SocketAddr::new(ip, 0))?.listen(BACKLOG)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            name: address.to_string(),
            behaviour: Mutex::new(Behaviour::OK),
            health_status: AtomicU16::new(200),
            health_checks: AtomicU64::new(0),
            counts: Mutex::default(),
            recorded: Mutex::default(),
            page: Mutex::default(),
            connections: Mutex::default(),
            released: watch::Sender::new(0),
            tickets: AtomicU64::new(0),
        });
        let door = Mutex::new(open(listener, &shared));
        Ok(Self {
            shared,
            address,
            door,
        })
    }

    /// Starts `count` engines.
    pub async fn start_many(count: usize) -> Result<Vec<Self>> {
        let mut engines = Vec::with_capacity(count);
        for _ in 0..count {
            engines.push(Self::start().await?);
        }
        Ok(engines)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it listens, as Envoy and the filter write it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// What it does with requests from now on.
    pub fn set(&self, behaviour: Behaviour) {
        *lock(&self.shared.behaviour) = behaviour;
    }

    /// Answers every request with this JSON from now on.
    pub fn set_page(&self, json: String) {
        *lock(&self.shared.page) = Some(json);
    }

    /// The status of `/health` from now on.
    pub fn set_health(&self, status: u16) {
        self.shared.health_status.store(status, Ordering::Relaxed);
    }

    /// How many health checks it has answered.
    #[must_use]
    pub fn health_checks(&self) -> u64 {
        self.shared.health_checks.load(Ordering::Relaxed)
    }

    /// Lets go what is held now; later requests are held again.
    pub fn release(&self) {
        let tickets = self.shared.tickets.load(Ordering::SeqCst);
        self.shared.released.send_replace(tickets);
    }

    /// Requests in flight now.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        lock(&self.shared.counts).in_flight
    }

    /// The most requests that were ever in flight at once.
    #[must_use]
    pub fn in_flight_max(&self) -> u64 {
        lock(&self.shared.counts).in_flight_max
    }

    /// Requests that reached it, complete or not, without health checks.
    #[must_use]
    pub fn total(&self) -> u64 {
        lock(&self.shared.counts).total
    }

    /// The complete requests recorded since the last call.
    #[must_use]
    pub fn take_recorded(&self) -> Vec<Recorded> {
        lock(&self.shared.recorded).drain(..).collect()
    }

    /// Dies: every connection is cut, new ones are refused. The port stays its own.
    pub async fn crash(&self) -> Result<()> {
        let closed = Door::Closed {
            _port: claim(self.address)?,
        };
        let open = std::mem::replace(&mut *lock(&self.door), closed);
        if let Door::Open(accept) = open {
            accept.abort();
            // The listener is gone when its task is.
            let _ = accept.await;
            self.cut_connections();
        }
        Ok(())
    }

    /// Cuts every connection and goes on listening.
    pub fn cut_connections(&self) {
        for connection in lock(&self.shared.connections).drain(..) {
            connection.abort();
        }
    }

    /// Listens again on the same port after [`Self::crash`].
    pub fn revive(&self) -> Result<()> {
        let mut door = lock(&self.door);
        if matches!(&*door, Door::Closed { .. }) {
            let listener = claim(self.address)?.listen(BACKLOG);
            *door = open(listener.context("listening again")?, &self.shared);
        }
        Ok(())
    }
}

impl Drop for MockEngine {
    fn drop(&mut self) {
        if let Door::Open(accept) = &*lock(&self.door) {
            accept.abort();
        }
        self.cut_connections();
    }
}

/// A socket on the port that does not listen.
fn claim(address: SocketAddr) -> Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(true)?;
    socket
        .bind(address)
        .with_context(|| format!("claiming {address}"))?;
    Ok(socket)
}

fn open(listener: TcpListener, shared: &Arc<Shared>) -> Door {
    Door::Open(tokio::spawn(accept(listener, Arc::clone(shared))))
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        let connection = tokio::spawn(serve(stream, Arc::clone(&shared))).abort_handle();
        let mut connections = lock(&shared.connections);
        connections.retain(|known| !known.is_finished());
        connections.push(connection);
    }
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    // Answers are small and a test waits for each of them.
    let _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(|request| handle(request, Arc::clone(&shared)));
    // An error here is a connection that went away, which is what many tests are about.
    let _ = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new())
        .serve_connection_with_upgrades(TokioIo::new(stream), service)
        .await;
}

async fn handle(
    request: Request<Incoming>,
    shared: Arc<Shared>,
) -> Result<Response<AnswerBody>, io::Error> {
    if request.uri().path() == "/health" {
        shared.health_checks.fetch_add(1, Ordering::Relaxed);
        let status = shared.health_status.load(Ordering::Relaxed);
        return respond(&shared, status, "text/plain", whole(Bytes::new()));
    }
    let page = lock(&shared.page).clone();
    if let Some(page) = page {
        return respond(&shared, 200, JSON, whole(page.into()));
    }
    let guard = InFlight::enter(&shared);
    if request.headers().contains_key("upgrade") {
        return upgrade(request, guard, &shared);
    }
    let scripted = request.headers().get(SCRIPT_HEADER);
    let behaviour = scripted
        .and_then(|script| serde_json::from_slice(script.as_bytes()).ok())
        .unwrap_or_else(|| *lock(&shared.behaviour));
    let recorded = record(request).await?;
    let digest = recorded.body_sha256.clone();
    keep(&shared, recorded);
    let mut response = act(behaviour, guard, &shared).await?;
    if let Ok(digest) = digest.parse() {
        response.headers_mut().insert(SHA_HEADER, digest);
    }
    Ok(response)
}

/// Switches protocols and echoes every byte until the other side has had enough.
fn upgrade(
    request: Request<Incoming>,
    guard: InFlight,
    shared: &Arc<Shared>,
) -> Result<Response<AnswerBody>, io::Error> {
    let headers = pairs(request.headers());
    let wanted = request.headers().get("upgrade").cloned();
    tokio::spawn(async move {
        let _guard = guard;
        if let Ok(upgraded) = hyper::upgrade::on(request).await {
            let (mut from, mut to) = tokio::io::split(TokioIo::new(upgraded));
            let _ = tokio::io::copy(&mut from, &mut to).await;
        }
    });
    keep(
        shared,
        Recorded {
            method: "UPGRADE".to_owned(),
            path: String::new(),
            headers,
            body_sha256: super::sha256(b""),
            body_bytes: 0,
            trailers: Vec::new(),
        },
    );
    let mut response = respond(shared, 101, "text/plain", whole(Bytes::new()))?;
    let headers = response.headers_mut();
    headers.remove("content-type");
    headers.insert(
        "connection",
        hyper::header::HeaderValue::from_static("upgrade"),
    );
    if let Some(wanted) = wanted {
        headers.insert("upgrade", wanted);
    }
    Ok(response)
}

/// Reads a request to its end.
async fn record(request: Request<Incoming>) -> Result<Recorded, io::Error> {
    let (head, mut body) = request.into_parts();
    let mut digest = Sha256::new();
    let (mut body_bytes, mut trailers) = (0, Vec::new());
    while let Some(frame) = body.frame().await {
        match frame.map_err(io::Error::other)?.into_data() {
            Ok(data) => {
                digest.update(&data);
                body_bytes += data.len() as u64;
            }
            Err(frame) => trailers = frame.trailers_ref().map(pairs).unwrap_or_default(),
        }
    }
    let path = head.uri.path_and_query();
    Ok(Recorded {
        method: head.method.to_string(),
        path: path.map_or_else(|| head.uri.to_string(), ToString::to_string),
        headers: pairs(&head.headers),
        body_sha256: super::hex(&digest.finalize()),
        body_bytes,
        trailers,
    })
}

fn keep(shared: &Shared, recorded: Recorded) {
    let mut kept = lock(&shared.recorded);
    if kept.len() == RECORDED_MAX {
        kept.pop_front();
    }
    kept.push_back(recorded);
}

fn pairs(headers: &HeaderMap) -> Vec<(String, Vec<u8>)> {
    let pair = |(name, value): (&hyper::header::HeaderName, &hyper::header::HeaderValue)| {
        (name.to_string(), value.as_bytes().to_vec())
    };
    headers.iter().map(pair).collect()
}

/// Does to one request what its behaviour says.
async fn act(
    behaviour: Behaviour,
    guard: InFlight,
    shared: &Arc<Shared>,
) -> Result<Response<AnswerBody>, io::Error> {
    let ms = Duration::from_millis;
    match behaviour {
        Behaviour::Answer { status, after_ms } => {
            tokio::time::sleep(ms(after_ms)).await;
            drop(guard);
            respond(shared, status, JSON, whole(answer_text()))
        }
        Behaviour::Hold => {
            held(shared).await;
            drop(guard);
            respond(shared, 200, JSON, whole(answer_text()))
        }
        Behaviour::Reset { after_ms } => {
            tokio::time::sleep(ms(after_ms)).await;
            Err(io::Error::other("scripted reset"))
        }
        Behaviour::Stream { events, every_ms } => {
            stream_events(shared, guard, events, ms(every_ms), End::Well)
        }
        Behaviour::HoldStream { events } => {
            stream_events(shared, guard, events, Duration::ZERO, End::Held)
        }
        Behaviour::Cut { events, every_ms } => {
            stream_events(shared, guard, events, ms(every_ms), End::Cut)
        }
    }
}

/// Waits until this request's ticket is released.
async fn held(shared: &Shared) {
    // Subscribe first: a release between the two lines must not be missed.
    let mut released = shared.released.subscribe();
    let ticket = shared.tickets.fetch_add(1, Ordering::SeqCst) + 1;
    // The sender lives in `shared`, which outlives this borrow: the wait cannot fail.
    let _ = released.wait_for(|free| *free >= ticket).await;
}

/// How an event stream ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Well,
    Held,
    Cut,
}

/// An event stream in progress.
struct Events {
    shared: Arc<Shared>,
    guard: Option<InFlight>,
    sent: u32,
    events: u32,
    every: Duration,
    end: End,
}

fn stream_events(
    shared: &Arc<Shared>,
    guard: InFlight,
    events: u32,
    every: Duration,
    end: End,
) -> Result<Response<AnswerBody>, io::Error> {
    let shared = Arc::clone(shared);
    let name = Arc::clone(&shared);
    let state = Events {
        shared,
        guard: Some(guard),
        sent: 0,
        events,
        every,
        end,
    };
    let body = StreamBody::new(stream::unfold(state, next_event)).boxed_unsync();
    respond(&name, 200, "text/event-stream", body)
}

async fn next_event(mut state: Events) -> Option<(Result<Frame<Bytes>, io::Error>, Events)> {
    if state.sent < state.events {
        if state.sent > 0 {
            tokio::time::sleep(state.every).await;
        }
        state.sent += 1;
        let event = format!(
            "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"t{}\"}}}}]}}\n\n",
            state.sent
        );
        return Some((Ok(Frame::data(event.into())), state));
    }
    state.guard.as_ref()?;
    if state.end == End::Cut {
        tokio::time::sleep(state.every).await;
        state.guard = None;
        return Some((Err(io::Error::other("scripted cut")), state));
    }
    if state.end == End::Held {
        held(&state.shared).await;
    }
    state.guard = None;
    let last = format!("data: {{\"choices\":[],{USAGE}}}\n\ndata: [DONE]\n\n");
    Some((Ok(Frame::data(last.into())), state))
}

/// The usage that every complete answer reports: 100 tokens of prompt, 64 of them cached.
const USAGE: &str = "\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":1,\
    \"total_tokens\":101,\"prompt_tokens_details\":{\"cached_tokens\":64}}";

fn answer_text() -> Bytes {
    let message = "{\"role\":\"assistant\",\"content\":\"t1\"}";
    format!("{{\"choices\":[{{\"index\":0,\"message\":{message}}}],{USAGE}}}").into()
}

fn whole(text: Bytes) -> AnswerBody {
    Full::new(text)
        .map_err(|never: Infallible| match never {})
        .boxed_unsync()
}

fn respond(
    shared: &Shared,
    status: u16,
    content_type: &str,
    body: AnswerBody,
) -> Result<Response<AnswerBody>, io::Error> {
    Response::builder()
        .status(status)
        .header("content-type", content_type)
        .header(ENGINE_HEADER, &shared.name)
        .body(body)
        .map_err(io::Error::other)
}

/// A panicking test must not hide its message behind a poisoned lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
