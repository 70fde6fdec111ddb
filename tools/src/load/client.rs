//! One request over HTTP/1.1, timed.
//!
//! Guarantee: every request ends in an [`Outcome`], whatever happens to it; none outlives its
//! timeout. Not here: when requests are sent (driver.rs), what is made of outcomes (stats.rs).

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use prefix_router::names;

use super::answer::{Answer, Reader};
use crate::engine::server::HOST_HEADER;
use crate::workload::{Form, Request, body};

/// Idle connections are closed before the usual server's minute is over.
const IDLE: Duration = Duration::from_secs(30);

/// A connection is made within this, or the request has failed.
const CONNECT: Duration = Duration::from_secs(5);

/// Where requests go, and in which form.
#[derive(Clone, Debug)]
pub struct Target {
    /// Scheme, address and port, e.g. `http://127.0.0.1:8080`.
    pub base: Uri,
    /// The API.
    pub form: Form,
    /// The model's name.
    pub model: String,
    /// Whether answers are streamed.
    pub stream: bool,
    /// Headers sent besides `content-type`.
    pub headers: HeaderMap,
    /// A header that names the request's shared prefix, for gateways that need to be told; none
    /// is sent for `None`.
    pub prefix_header: Option<HeaderName>,
    /// A request that takes longer has failed.
    pub timeout: Duration,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Failure {
    /// No connection.
    Connect,
    /// A status that is not 200.
    Status(u16),
    /// The connection ended before the answer did.
    Cut,
    /// The answer says that it failed, or is none.
    Answer,
    /// It took too long.
    Timeout,
    /// It was still running when the load had to end.
    Unfinished,
    /// It was never sent: too many were in flight.
    Overflow,
}

impl Failure {
    /// A short name, for tables and JSON.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Connect => "connect".into(),
            Self::Status(status) => format!("http_{status}"),
            Self::Cut => "cut".into(),
            Self::Answer => "bad_answer".into(),
            Self::Timeout => "timeout".into(),
            Self::Unfinished => "unfinished".into(),
            Self::Overflow => "overflow".into(),
        }
    }
}

/// How one request went, in real time.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// When it was sent.
    pub sent: Instant,
    /// From sending to the first content; `None` without any, or without a stream.
    pub first: Option<Duration>,
    /// From sending to the end.
    pub total: Duration,
    /// The host that answered, if the filter tells it (`debug_headers`).
    pub served_by: Option<String>,
    /// The engine that answered: by the word of a simulated one, else of a gateway that was asked to
    /// say it ([`SERVED_BY`]).
    pub host: Option<String>,
    /// What came back.
    pub answer: Answer,
    /// Why it failed, if it did.
    pub failure: Option<Failure>,
}

impl Outcome {
    /// A request that failed without having been sent to its end.
    #[must_use]
    pub fn failed(failure: Failure) -> Self {
        Self {
            sent: Instant::now(),
            first: None,
            total: Duration::ZERO,
            served_by: None,
            host: None,
            answer: Answer::default(),
            failure: Some(failure),
        }
    }
}

/// The response header in which a gateway that was asked to says which host served.
pub const SERVED_BY: HeaderName = HeaderName::from_static("x-served-by");

/// Somebody who looks on while requests run.
pub trait Observer: Send + Sync {
    /// A request is being sent; what becomes of it is told to the value that is returned.
    fn sent(&self, request: &Request) -> Box<dyn Observed>;
}

/// One request that is looked at. It is dropped when the request is over, however that came.
pub trait Observed: Send {
    /// The answer's headers came, and [`SERVED_BY`] among them.
    fn served_by(&mut self, host: &str);

    /// The first content came.
    fn first(&mut self);

    /// The answer ended, or the request failed.
    fn ended(&mut self, outcome: &Outcome);
}

/// A client that keeps its connections.
#[derive(Clone)]
pub struct Client {
    pool: Pool<HttpConnector, Full<Bytes>>,
    target: Target,
    uri: Uri,
    observer: Option<Arc<dyn Observer>>,
}

impl Client {
    /// A client for `target`.
    ///
    /// # Errors
    /// If the target's URL is not one this client can use.
    pub fn new(target: Target) -> anyhow::Result<Self> {
        let scheme = target.base.scheme_str().unwrap_or("none");
        anyhow::ensure!(
            scheme == "http" && target.base.authority().is_some(),
            "{}: expected http://address:port, got the scheme {scheme:?}",
            target.base
        );
        let mut parts = target.base.clone().into_parts();
        let path = target.base.path().trim_end_matches('/');
        let path = format!("{path}{}", target.form.path());
        parts.path_and_query = Some(path.parse().context("the URL's path")?);
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT));
        let pool = Pool::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .build(connector);
        Ok(Self {
            pool,
            uri: Uri::from_parts(parts)?,
            target,
            observer: None,
        })
    }

    /// The same client, with somebody who looks on.
    #[must_use]
    pub fn observed(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// Sends one request and reads its answer; `keep_text` to have the content too.
    pub async fn ask(&self, request: &Request, keep_text: bool) -> Outcome {
        let sent = Instant::now();
        let mut outcome = Outcome {
            sent,
            first: None,
            total: Duration::ZERO,
            served_by: None,
            host: None,
            answer: Answer::default(),
            failure: None,
        };
        let mut observed = self.observer.as_ref().map(|all| all.sent(request));
        let work = self.exchange(request, keep_text, &mut outcome, &mut observed);
        let ended = tokio::time::timeout(self.target.timeout, work).await;
        outcome.failure = ended.unwrap_or(Err(Failure::Timeout)).err();
        outcome.total = sent.elapsed();
        if let Some(mut observed) = observed {
            observed.ended(&outcome);
        }
        outcome
    }

    async fn exchange(
        &self,
        request: &Request,
        keep_text: bool,
        outcome: &mut Outcome,
        observed: &mut Option<Box<dyn Observed>>,
    ) -> Result<(), Failure> {
        let response = self.send(request).await?;
        if let Some(observed) = observed
            && let Some(host) = response.headers().get(SERVED_BY)
        {
            observed.served_by(host.to_str().unwrap_or_default());
        }
        if response.status() != StatusCode::OK {
            let status = response.status().as_u16();
            // Read to its end, so that the connection can be used again.
            let _ = http_body_util::Limited::new(response.into_body(), 1 << 20)
                .collect()
                .await;
            return Err(Failure::Status(status));
        }
        let served_by = response.headers().get(names::DEBUG_HOST);
        outcome.served_by = served_by
            .and_then(|host| host.to_str().ok())
            .map(str::to_owned);
        let host = response.headers().get(HOST_HEADER);
        let host = host.or_else(|| response.headers().get(SERVED_BY));
        outcome.host = host.and_then(|host| host.to_str().ok()).map(str::to_owned);
        let content_type = response
            .headers()
            .get(CONTENT_TYPE)
            .map(HeaderValue::as_bytes);
        let stream = content_type.is_some_and(|value| value.starts_with(b"text/event-stream"));
        let mut reader = Reader::new(stream, keep_text);
        let mut body = response.into_body();
        let mut ended = Ok(());
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else {
                ended = Err(Failure::Cut);
                break;
            };
            let Some(bytes) = frame.data_ref() else {
                continue;
            };
            reader.feed(bytes);
            if outcome.first.is_none() && reader.content() {
                outcome.first = Some(outcome.sent.elapsed());
                if let Some(observed) = observed {
                    observed.first();
                }
            }
        }
        outcome.answer = reader.finish();
        ended?;
        match (outcome.answer.failed, outcome.answer.done, self.target.form) {
            (true, ..) => Err(Failure::Answer),
            // The native form has no end mark.
            (false, false, Form::Chat | Form::Completions) => Err(Failure::Cut),
            _ => Ok(()),
        }
    }

    async fn send(&self, request: &Request) -> Result<Response<Incoming>, Failure> {
        let Target {
            form,
            model,
            stream,
            headers,
            ..
        } = &self.target;
        let ask = body::Ask {
            form: *form,
            model,
            stream: *stream,
        };
        let body = Bytes::from(body::render(request, &ask));
        let mut message = hyper::Request::new(Full::new(body));
        *message.method_mut() = Method::POST;
        *message.uri_mut() = self.uri.clone();
        *message.headers_mut() = headers.clone();
        let json = HeaderValue::from_static("application/json");
        message.headers_mut().insert(CONTENT_TYPE, json);
        if let Some(name) = &self.target.prefix_header {
            // Who shares nothing is told apart by the request's own number.
            let value = match request.prefix {
                Some(prefix) => format!("prefix-{prefix}"),
                None => format!("request-{}", request.id),
            };
            if let Ok(value) = HeaderValue::from_str(&value) {
                message.headers_mut().insert(name.clone(), value);
            }
        }
        self.pool.request(message).await.map_err(|error| {
            if error.is_connect() {
                Failure::Connect
            } else {
                Failure::Cut
            }
        })
    }
}

/// A header given as `name: value`.
///
/// # Errors
/// If it is no header.
pub fn header(text: &str) -> anyhow::Result<(HeaderName, HeaderValue)> {
    let (name, value) = text.split_once(':').context("expected `name: value`")?;
    Ok((name.trim().parse()?, value.trim().parse()?))
}
