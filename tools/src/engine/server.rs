//! The HTTP server over one engine: tokens go out as the engine's clock produces them.
//!
//! Guarantee: a client that leaves frees its place at once, in the queue or in the middle of its
//! answer; what a slow client has not read is not buffered, only counted. Not here: scheduling
//! (scheduler.rs), request shapes (api.rs).

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use clap::Args;
use futures_util::task::AtomicWaker;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use rustc_hash::FxHashMap;
use serde::Deserialize;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::{JoinHandle, JoinSet};

use crate::engine::api::{self, Api, ApiError, ReadLimits, Usage, Writer};
use crate::engine::clock::{Clock, SPEEDS};
use crate::engine::cost::EngineConfig;
use crate::engine::metrics::{Histogram, Page};
use crate::engine::render::Template;
use crate::engine::scheduler::{Counters, Engine, Job, JobId, Progress, Refused, Report};

/// Requests one engine holds, waiting or running: 64 × the sequences it runs at once; more is a
/// mistake of the one who sends them.
const REQUESTS_MAX: usize = 16_384;

/// Bytes of one write of a stream; the rest follows when the client has taken it.
const FRAME_BYTES_MAX: usize = 64 * 1024;

/// An engine that is this far behind its clock lets the lost time go: it could not catch up.
const LATE_MAX: Duration = Duration::from_millis(200);

/// The response header in which an engine says where it listens: what a gateway chose.
pub const HOST_HEADER: &str = "x-sim-host";

/// What an engine serves, and how.
#[derive(Args, Clone, Debug)]
pub struct ServerConfig {
    /// Sizes and constants.
    #[command(flatten)]
    pub engine: EngineConfig,
    /// A model name it serves; may be given several times; none: every name
    #[arg(long = "model")]
    pub models: Vec<String>,
    /// Speed of the engine's clock: 2 = twice as fast as the machine's
    #[arg(long, default_value_t = 1.0)]
    pub speed: f64,
    /// Tokens in one event of a stream but the first, which has one (vLLM: 1)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub tokens_per_event: u32,
    /// Tokens answered to a request that does not say
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub output_tokens_default: u32,
    /// Tokens of a prompt and its answer together (vLLM's max_model_len)
    #[arg(long, default_value_t = 131_072, value_parser = clap::value_parser!(u32).range(2..))]
    pub context_tokens_max: u32,
    /// Bytes of a request's body
    #[arg(long, default_value_t = 64 * 1024 * 1024)]
    pub body_bytes_max: usize,
    /// How the chat template renders a conversation's history
    #[arg(long, value_enum, default_value_t)]
    pub template: Template,
    /// Usage without cached tokens (vLLM without --enable-prompt-tokens-details)
    #[arg(long)]
    pub no_prompt_tokens_details: bool,
    /// Streams end with usage whether asked or not (vLLM's --enable-force-include-usage)
    #[arg(long)]
    pub force_include_usage: bool,
    /// Serve what routers ask that tokenise by the engine: /v1/chat/completions/render (vLLM's
    /// --enable-scale-out)
    #[arg(long)]
    pub enable_scale_out: bool,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            engine: EngineConfig::default(),
            models: Vec::new(),
            speed: 1.0,
            tokens_per_event: 1,
            output_tokens_default: 256,
            context_tokens_max: 131_072,
            body_bytes_max: 64 * 1024 * 1024,
            template: Template::AppendOnly,
            no_prompt_tokens_details: false,
            force_include_usage: false,
            enable_scale_out: false,
        }
    }
}

/// A running server; dropping it ends the server and cuts every connection.
#[derive(Debug)]
pub struct Handle {
    address: SocketAddr,
    shared: Arc<Shared>,
    tasks: Vec<JoinHandle<()>>,
}

/// What an engine is doing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Snapshot {
    /// Totals since the last reset.
    pub counters: Counters,
    /// Requests being computed.
    pub running: u32,
    /// Requests in the queue.
    pub waiting: u32,
    /// Cache blocks held by requests.
    pub pinned_blocks: u32,
    /// Cache blocks that hold something findable.
    pub cached_blocks: u32,
    /// Engine time let go because the machine was too slow, in nanoseconds.
    pub lost_ns: u64,
}

/// Serves an engine on `listener` until the handle is dropped.
pub fn spawn(config: ServerConfig, listener: TcpListener) -> anyhow::Result<Handle> {
    config.engine.check()?;
    anyhow::ensure!(
        SPEEDS.contains(&config.speed),
        "--speed: expected a number from {} to {}, got {}",
        SPEEDS.start(),
        SPEEDS.end(),
        config.speed
    );
    let address = listener
        .local_addr()
        .context("the listener has no address")?;
    let shared = Arc::new(Shared::new(config, address)?);
    let driver = tokio::spawn(drive(Arc::clone(&shared)));
    let acceptor = tokio::spawn(accept(listener, Arc::clone(&shared)));
    Ok(Handle {
        address,
        shared,
        tasks: vec![driver, acceptor],
    })
}

impl Handle {
    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it is doing.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.shared.lock().snapshot()
    }

    /// Empties its prefix cache.
    pub fn flush(&self) {
        self.shared.lock().engine.flush();
    }

    /// Starts all totals at zero.
    pub fn reset_counters(&self) {
        self.shared.lock().reset();
    }

    /// Changes its clock's speed, which must be within [`SPEEDS`].
    pub fn set_speed(&self, speed: f64) {
        self.shared.set_speed(speed);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

#[derive(Debug)]
struct Shared {
    config: ServerConfig,
    /// Where it listens.
    host: HeaderValue,
    limits: ReadLimits,
    state: Mutex<State>,
    /// There is work, or the clock has changed.
    wake: Notify,
    healthy: AtomicBool,
    next_id: AtomicU64,
}

#[derive(Debug)]
struct State {
    engine: Engine,
    clock: Clock,
    tickets: FxHashMap<JobId, Arc<Ticket>>,
    first_token: Histogram,
    whole: Histogram,
    lost_ns: u64,
}

impl State {
    fn snapshot(&self) -> Snapshot {
        Snapshot {
            counters: self.engine.counters(),
            running: self.engine.running(),
            waiting: self.engine.waiting(),
            pinned_blocks: self.engine.pool().pinned(),
            cached_blocks: self.engine.pool().cached(),
            lost_ns: self.lost_ns,
        }
    }

    fn reset(&mut self) {
        self.engine.reset_counters();
        self.first_token = Histogram::default();
        self.whole = Histogram::default();
        self.lost_ns = 0;
    }

    /// Ends the step at `end_ns` and tells those who wait for its tokens.
    fn finish(&mut self, end_ns: u64, progress: &mut Vec<Progress>) {
        progress.clear();
        self.engine.finish(progress);
        for step in progress.iter() {
            let Some(ticket) = self.tickets.get(&step.job) else {
                continue;
            };
            let stay_ns = end_ns.saturating_sub(ticket.arrived_ns);
            if step.generated == 1 {
                self.first_token.add(stay_ns);
            }
            ticket
                .cached_tokens
                .store(step.cached_tokens, Ordering::Relaxed);
            ticket.produced.store(step.generated, Ordering::Release);
            ticket.waker.wake();
            if step.finished {
                self.whole.add(stay_ns);
                self.tickets.remove(&step.job);
            }
        }
    }
}

/// What the engine tells the connection that waits for one request.
#[derive(Debug)]
struct Ticket {
    arrived_ns: u64,
    produced: AtomicU32,
    cached_tokens: AtomicU32,
    waker: AtomicWaker,
}

/// A request in the engine; dropping it takes it out.
#[derive(Debug)]
struct Place {
    shared: Arc<Shared>,
    ticket: Arc<Ticket>,
    job: JobId,
    prompt_tokens: u32,
    output_tokens: u32,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.engine.cancel(self.job);
        state.tickets.remove(&self.job);
    }
}

impl Place {
    fn usage(&self) -> Usage {
        let told = !self.shared.config.no_prompt_tokens_details;
        Usage {
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            cached_tokens: told.then(|| self.ticket.cached_tokens.load(Ordering::Relaxed)),
        }
    }

    fn poll_produced(&self, seen: u32, context: &mut Context<'_>) -> Poll<u32> {
        self.ticket.waker.register(context.waker());
        let produced = self.ticket.produced.load(Ordering::Acquire);
        if produced > seen {
            Poll::Ready(produced)
        } else {
            Poll::Pending
        }
    }
}

impl Shared {
    fn new(config: ServerConfig, address: SocketAddr) -> anyhow::Result<Self> {
        let limits = ReadLimits {
            models: config.models.clone(),
            output_tokens_default: config.output_tokens_default,
            context_tokens_max: config.context_tokens_max,
            template: config.template,
            block_tokens: config.engine.block_tokens,
        };
        let state = State {
            engine: Engine::new(config.engine.clone(), Report::Every),
            clock: Clock::new(config.speed),
            tickets: FxHashMap::default(),
            first_token: Histogram::default(),
            whole: Histogram::default(),
            lost_ns: 0,
        };
        Ok(Self {
            config,
            host: HeaderValue::try_from(address.to_string())?,
            limits,
            state: Mutex::new(state),
            wake: Notify::new(),
            healthy: AtomicBool::new(true),
            next_id: AtomicU64::new(1),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock; if it did, totals would be off, no more.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_speed(&self, speed: f64) {
        self.lock().clock.set_speed(speed);
        self.wake.notify_one();
    }

    fn enter(self: &Arc<Self>, request: &api::Request) -> Result<Place, ApiError> {
        let job = Job {
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens,
            chain: request.chain.as_slice().into(),
        };
        let mut state = self.lock();
        if state.tickets.len() >= REQUESTS_MAX {
            let message = format!("the engine holds {REQUESTS_MAX} requests already");
            return Err(ApiError::status(503, "ServiceUnavailableError", message));
        }
        let job = state.engine.submit(job).map_err(|refused| match refused {
            Refused::Empty => ApiError::bad("prompt: expected at least one token"),
            Refused::TooLong => ApiError::bad("prompt: larger than the engine's KV cache"),
        })?;
        let ticket = Arc::new(Ticket {
            arrived_ns: state.clock.now(),
            produced: AtomicU32::new(0),
            cached_tokens: AtomicU32::new(0),
            waker: AtomicWaker::new(),
        });
        state.tickets.insert(job, Arc::clone(&ticket));
        drop(state);
        self.wake.notify_one();
        Ok(Place {
            shared: Arc::clone(self),
            ticket,
            job,
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens,
        })
    }
}

/// Runs the engine's steps, each as long as its clock says.
async fn drive(shared: Arc<Shared>) {
    let mut progress = Vec::new();
    let mut start_ns = 0;
    loop {
        let begun = shared.lock().engine.begin();
        let Some(ns) = begun else {
            shared.wake.notified().await;
            start_ns = shared.lock().clock.now();
            continue;
        };
        let end_ns = start_ns + ns;
        wait_until(&shared, end_ns).await;
        let mut state = shared.lock();
        state.finish(end_ns, &mut progress);
        let late_ns = state.clock.now().saturating_sub(end_ns);
        start_ns = end_ns;
        if late_ns as f64 > LATE_MAX.as_nanos() as f64 * state.clock.speed() {
            state.lost_ns += late_ns;
            start_ns += late_ns;
        }
    }
}

async fn wait_until(shared: &Shared, end_ns: u64) {
    loop {
        let wall = shared.lock().clock.wall_of(end_ns);
        let left = wall.saturating_duration_since(std::time::Instant::now());
        if left.is_zero() {
            tokio::task::yield_now().await;
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(left) => return,
            // A new request waits for the next step; a new speed moves this one's end.
            () = shared.wake.notified() => {}
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    // Dropped with this task, which cuts the connections.
    let mut connections = JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Out of file descriptors, as a rule: others must end first.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        while connections.try_join_next().is_some() {}
        let _ = stream.set_nodelay(true);
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            let service = service_fn(|request| {
                let shared = Arc::clone(&shared);
                async move { Ok::<_, Infallible>(answer(&shared, request).await) }
            });
            let server = auto::Builder::new(TokioExecutor::new());
            // An error here is a client that left.
            let _ = server.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn answer(shared: &Arc<Shared>, request: Request<Incoming>) -> Response<Reply> {
    let mut response = serve(shared, request).await;
    let host = (HeaderName::from_static(HOST_HEADER), shared.host.clone());
    response.headers_mut().insert(host.0, host.1);
    response
}

async fn serve(shared: &Arc<Shared>, request: Request<Incoming>) -> Response<Reply> {
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let result = match (&method, path.as_str()) {
        (&Method::POST, "/v1/chat/completions") => infer(shared, Some(Api::Chat), request).await,
        (&Method::POST, "/v1/chat/completions/render") => render(shared, request).await,
        (&Method::POST, "/v1/completions") => infer(shared, Some(Api::Completion), request).await,
        (&Method::POST, "/generate") => infer(shared, Some(Api::Native), request).await,
        (&Method::POST, "/invocations") => infer(shared, None, request).await,
        (&Method::GET, "/health" | "/ping") => Ok(health(shared)),
        (&Method::GET, "/v1/models") => Ok(json_reply(&models(shared))),
        (&Method::GET, "/metrics") => Ok(metrics(shared)),
        (&Method::GET, "/sim/counters") => Ok(json_reply(&counters(shared))),
        (&Method::POST, path) if path.starts_with("/sim/") => {
            control(shared, path, request.into_body()).await
        }
        _ => Err(ApiError::not_found(format!(
            "{method} {path}: not served here"
        ))),
    };
    result.unwrap_or_else(|error| {
        let mut response = Response::new(Reply::whole(error.body()));
        let status = hyper::StatusCode::from_u16(error.status);
        *response.status_mut() = status.unwrap_or(hyper::StatusCode::INTERNAL_SERVER_ERROR);
        json_type(response)
    })
}

async fn infer(
    shared: &Arc<Shared>,
    api: Option<Api>,
    request: Request<Incoming>,
) -> Result<Response<Reply>, ApiError> {
    let body = collect(request.into_body(), shared.config.body_bytes_max).await?;
    let request = api::read(api, &body, &shared.limits)?;
    drop(body);
    let created_s = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let id = shared.next_id.fetch_add(1, Ordering::Relaxed);
    let writer = Writer::new(&request, id, created_s.as_secs());
    let place = shared.enter(&request)?;
    if !request.stream {
        let last = request.output_tokens - 1;
        std::future::poll_fn(|context| place.poll_produced(last, context)).await;
        let body = writer.whole(place.usage());
        return Ok(json_type(Response::new(Reply::whole(body))));
    }
    let stream = Stream {
        writer,
        tokens_per_event: shared.config.tokens_per_event,
        with_usage: request.include_usage || shared.config.force_include_usage,
        place,
        sent: 0,
    };
    let mut response = Response::new(Reply::Stream(Box::new(stream)));
    let value = HeaderValue::from_static("text/event-stream; charset=utf-8");
    response
        .headers_mut()
        .insert(hyper::header::CONTENT_TYPE, value);
    Ok(response)
}

async fn render(shared: &Shared, request: Request<Incoming>) -> Result<Response<Reply>, ApiError> {
    if !shared.config.enable_scale_out {
        let message = "served only with --enable-scale-out";
        return Err(ApiError::status(403, "ForbiddenError", message));
    }
    let body = collect(request.into_body(), shared.config.body_bytes_max).await?;
    Ok(json_type(Response::new(Reply::whole(api::render(
        &body,
        &shared.limits,
    )?))))
}

async fn collect(body: Incoming, bytes_max: usize) -> Result<Bytes, ApiError> {
    match Limited::new(body, bytes_max).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) => Err(ApiError::bad(format!("body: {error}"))),
    }
}

#[derive(Deserialize)]
struct Control {
    speed: Option<f64>,
    healthy: Option<bool>,
}

async fn control(shared: &Shared, path: &str, body: Incoming) -> Result<Response<Reply>, ApiError> {
    const CONTROL_BYTES_MAX: usize = 4096;
    let body = collect(body, CONTROL_BYTES_MAX).await?;
    let parse = || {
        serde_json::from_slice::<Control>(&body)
            .map_err(|error| ApiError::bad(format!("body: {error}")))
    };
    match path {
        "/sim/clock" => {
            let speed = parse()?.speed.filter(|speed| SPEEDS.contains(speed));
            let speed = speed.ok_or_else(|| {
                let (low, high) = (SPEEDS.start(), SPEEDS.end());
                ApiError::bad(format!(
                    "body /speed: expected a number from {low} to {high}"
                ))
            })?;
            shared.set_speed(speed);
        }
        "/sim/health" => {
            let healthy = parse()?.healthy;
            let healthy =
                healthy.ok_or_else(|| ApiError::bad("body /healthy: expected true or false"))?;
            shared.healthy.store(healthy, Ordering::Relaxed);
        }
        "/sim/reset-counters" => shared.lock().reset(),
        "/sim/flush" => shared.lock().engine.flush(),
        _ => return Err(ApiError::not_found(format!("POST {path}: not served here"))),
    }
    Ok(json_reply(&counters(shared)))
}

fn health(shared: &Shared) -> Response<Reply> {
    let mut response = Response::new(Reply::whole(Vec::new()));
    if !shared.healthy.load(Ordering::Relaxed) {
        *response.status_mut() = hyper::StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}

fn models(shared: &Shared) -> serde_json::Value {
    let models: Vec<_> = shared
        .config
        .models
        .iter()
        .map(|model| {
            json!({"id": model, "object": "model", "owned_by": "prefix-router",
                   "max_model_len": shared.config.context_tokens_max})
        })
        .collect();
    json!({"object": "list", "data": models})
}

fn counters(shared: &Shared) -> serde_json::Value {
    let state = shared.lock();
    let Snapshot {
        counters,
        running,
        waiting,
        pinned_blocks,
        cached_blocks,
        lost_ns,
    } = state.snapshot();
    json!({
        "submitted": counters.submitted, "finished": counters.finished,
        "cancelled": counters.cancelled, "preemptions": counters.preemptions,
        "queried_tokens": counters.queried_tokens, "hit_tokens": counters.hit_tokens,
        "prompt_tokens": counters.prompt_tokens, "generated_tokens": counters.generated_tokens,
        "computed_tokens": counters.computed_tokens, "steps": counters.steps,
        "busy_s": counters.busy_ns as f64 / 1e9, "running": running, "waiting": waiting,
        "pinned_blocks": pinned_blocks, "cached_blocks": cached_blocks,
        "lost_s": lost_ns as f64 / 1e9, "clock_s": state.clock.now() as f64 / 1e9,
        "speed": state.clock.speed(),
    })
}

fn metrics(shared: &Shared) -> Response<Reply> {
    let state = shared.lock();
    let model = shared.config.models.first().map_or("any", String::as_str);
    let mut page = Page::new(model);
    page.counters(&state.engine.counters());
    gauges(&state, &mut page);
    page.histogram(
        "vllm:time_to_first_token_seconds",
        "From a request's arrival to its first token, in the engine's time.",
        &state.first_token,
    );
    page.histogram(
        "vllm:e2e_request_latency_seconds",
        "From a request's arrival to its last token, in the engine's time.",
        &state.whole,
    );
    drop(state);
    let mut response = Response::new(Reply::whole(page.finish().into_bytes()));
    let value = HeaderValue::from_static("text/plain; version=0.0.4");
    response
        .headers_mut()
        .insert(hyper::header::CONTENT_TYPE, value);
    response
}

fn gauges(state: &State, page: &mut Page) {
    let seen = state.snapshot();
    let blocks = f64::from(state.engine.pool().len().max(1));
    let seconds = |ns: u64| ns as f64 / 1e9;
    for (name, help, value) in [
        (
            "vllm:num_requests_running",
            "Requests being computed.",
            f64::from(seen.running),
        ),
        (
            "vllm:num_requests_waiting",
            "Requests in the queue.",
            f64::from(seen.waiting),
        ),
        (
            "vllm:kv_cache_usage_perc",
            "Part of the KV cache in use, 1 is all.",
            f64::from(seen.pinned_blocks) / blocks,
        ),
        (
            "sim:busy_seconds",
            "Engine time spent in steps.",
            seconds(seen.counters.busy_ns),
        ),
        (
            "sim:lost_seconds",
            "Engine time let go: the machine is slow.",
            seconds(seen.lost_ns),
        ),
        (
            "sim:clock_speed",
            "Engine seconds per second.",
            state.clock.speed(),
        ),
    ] {
        page.gauge(name, help, value);
    }
}

fn json_reply(value: &serde_json::Value) -> Response<Reply> {
    json_type(Response::new(Reply::whole(value.to_string().into_bytes())))
}

fn json_type(mut response: Response<Reply>) -> Response<Reply> {
    let value = HeaderValue::from_static("application/json");
    response
        .headers_mut()
        .insert(hyper::header::CONTENT_TYPE, value);
    response
}

/// A response body.
#[derive(Debug)]
enum Reply {
    Whole(Option<Bytes>),
    Stream(Box<Stream>),
}

impl Reply {
    fn whole(bytes: Vec<u8>) -> Self {
        Self::Whole(Some(bytes.into()).filter(|bytes: &Bytes| !bytes.is_empty()))
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Stream(stream) => stream
                .poll_bytes(context)
                .map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Self::Whole(bytes) => {
                hyper::body::SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64))
            }
            Self::Stream(_) => hyper::body::SizeHint::default(),
        }
    }
}

/// An answer that is sent while it is produced.
#[derive(Debug)]
struct Stream {
    writer: Writer,
    tokens_per_event: u32,
    with_usage: bool,
    place: Place,
    sent: u32,
}

impl Stream {
    /// The first token comes alone: its time is what clients measure.
    fn next_event_end(&self) -> u32 {
        let tokens = if self.sent == 0 {
            1
        } else {
            self.tokens_per_event
        };
        (self.sent + tokens).min(self.place.output_tokens)
    }

    fn poll_bytes(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let all = self.place.output_tokens;
        if self.sent == all {
            return Poll::Ready(None);
        }
        let due = self.next_event_end();
        let produced = match self.place.poll_produced(due - 1, context) {
            Poll::Ready(produced) => produced,
            Poll::Pending => return Poll::Pending,
        };
        let mut bytes = Vec::with_capacity(512);
        if self.sent == 0 {
            self.writer.first(&mut bytes);
        }
        while self.sent < all && bytes.len() < FRAME_BYTES_MAX {
            let end = self.next_event_end();
            if end > produced {
                break;
            }
            self.writer.tokens(self.sent..end, &mut bytes);
            self.sent = end;
        }
        if self.sent == all {
            let usage = self.with_usage.then(|| self.place.usage());
            self.writer.end(usage, &mut bytes);
        }
        Poll::Ready(Some(bytes.into()))
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
