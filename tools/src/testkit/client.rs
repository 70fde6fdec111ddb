//! A client of a proxy or an engine: HTTP/1.1 and HTTP/2, whole or piecewise bodies, trailers,
//! and leaving in any phase.
//!
//! Guarantee: dropping a [`Connection`] or a [`Running`] answer ends it towards the peer at once.
//! Not here: load that is timed or counted (load).

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Empty, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::client::conn::{http1, http2};
use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::engine::{ENGINE_HEADER, SCRIPT_HEADER, SHA_HEADER};
use super::{Behaviour, sha256};

/// No test waits longer for one answer; a paused request would otherwise hang it for ever.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

type SentBody = UnsyncBoxBody<Bytes, Infallible>;

/// Which HTTP a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1 with keep-alive.
    Http1,
    /// HTTP/2 with prior knowledge.
    Http2,
}

/// A part of a body and how long to wait before it.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The wait.
    pub after: Duration,
    /// The bytes.
    pub bytes: Bytes,
}

/// A request's body.
#[derive(Clone, Debug)]
pub enum Body {
    /// None: the request ends with its headers.
    None,
    /// All at once, with its length declared.
    Whole(Bytes),
    /// Piece by piece without a declared length: chunks in HTTP/1.1.
    Pieces {
        /// The parts; each is sent as one.
        pieces: Vec<Piece>,
        /// Sent after the last part.
        trailers: Vec<(String, Vec<u8>)>,
        /// After the parts nothing comes, not even an end.
        never_ends: bool,
    },
}

/// A request to send.
#[derive(Clone, Debug)]
pub struct Request {
    /// The method.
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// Names and raw values, beside those that HTTP itself needs.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The body.
    pub body: Body,
}

impl Request {
    /// A request without a body.
    #[must_use]
    pub fn new(method: Method, path: &str) -> Self {
        Self {
            method,
            path: path.to_owned(),
            headers: Vec::new(),
            body: Body::None,
        }
    }

    /// A GET.
    #[must_use]
    pub fn get(path: &str) -> Self {
        Self::new(Method::GET, path)
    }

    /// A POST of JSON with its length declared.
    #[must_use]
    pub fn post(path: &str, body: impl Into<Bytes>) -> Self {
        Self::new(Method::POST, path)
            .header("content-type", "application/json")
            .body(Body::Whole(body.into()))
    }

    /// A chat completion.
    #[must_use]
    pub fn chat(body: impl Into<Bytes>) -> Self {
        Self::post("/v1/chat/completions", body)
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers
            .push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// Tells a mock engine what to do with this request.
    #[must_use]
    pub fn script(self, behaviour: Behaviour) -> Self {
        let script = serde_json::to_string(&behaviour).unwrap_or_default();
        self.header(SCRIPT_HEADER, script)
    }

    /// Replaces the body.
    #[must_use]
    pub fn body(mut self, body: Body) -> Self {
        self.body = body;
        self
    }

    /// Sends the body it has in pieces of `bytes` bytes, each `after` the one before.
    #[must_use]
    pub fn cut_every(self, bytes: usize, after: Duration, trailers: &[(&str, &str)]) -> Self {
        let whole = match &self.body {
            Body::Whole(whole) => whole.clone(),
            Body::None | Body::Pieces { .. } => Bytes::new(),
        };
        let piece = |part: &[u8]| Piece {
            after,
            bytes: whole.slice_ref(part),
        };
        let pieces = whole.chunks(bytes.max(1)).map(piece).collect();
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), value.as_bytes().to_vec());
        let trailers = trailers.iter().map(owned).collect();
        self.body(Body::Pieces {
            pieces,
            trailers,
            never_ends: false,
        })
    }
}

/// A complete answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
    /// The trailers, if any.
    pub trailers: Option<HeaderMap>,
}

impl Answer {
    /// A header as text; bytes that are not UTF-8 are replaced.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<String> {
        text(&self.headers, name)
    }

    /// The engine that answered; none if the proxy did.
    #[must_use]
    pub fn engine(&self) -> Option<String> {
        self.header(ENGINE_HEADER)
    }

    /// The digest of the request's body as the engine saw it.
    #[must_use]
    pub fn seen_sha256(&self) -> Option<String> {
        self.header(SHA_HEADER)
    }

    /// The digest of this answer's body.
    #[must_use]
    pub fn sha256(&self) -> String {
        sha256(&self.body)
    }
}

/// An answer whose headers have come.
pub struct Running {
    /// The HTTP status.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
    body: Incoming,
    trailers: Option<HeaderMap>,
}

impl Running {
    /// The engine that answers; none if the proxy does.
    #[must_use]
    pub fn engine(&self) -> Option<String> {
        text(&self.headers, ENGINE_HEADER)
    }

    /// The next bytes of the body; `None` at its end.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            let frame = tokio::time::timeout(ANSWER_LIMIT, self.body.frame())
                .await
                .context("the answer's body stopped")?;
            let Some(frame) = frame.transpose()? else {
                return Ok(None);
            };
            match frame.into_data() {
                Ok(data) => return Ok(Some(data)),
                Err(frame) => self.trailers = frame.into_trailers().ok(),
            }
        }
    }

    /// Reads the rest; an error if the answer is cut.
    pub async fn finish(mut self) -> Result<Answer> {
        let mut body = Vec::new();
        while let Some(data) = self.next().await? {
            body.extend_from_slice(&data);
        }
        let Self {
            status,
            headers,
            trailers,
            ..
        } = self;
        Ok(Answer {
            status,
            headers,
            body: body.into(),
            trailers,
        })
    }
}

enum Sender {
    Http1(http1::SendRequest<SentBody>),
    Http2(http2::SendRequest<SentBody>),
}

/// One connection; dropping it closes it.
pub struct Connection {
    sender: Sender,
    driver: JoinHandle<()>,
    authority: String,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Connection {
    /// Connects.
    pub async fn open(address: SocketAddr, protocol: Protocol) -> Result<Self> {
        if protocol == Protocol::Http2 {
            return Self::open_http2(address, &http2::Builder::new(TokioExecutor::new())).await;
        }
        let (sender, connection) = http1::handshake(connect(address).await?).await?;
        Ok(Self {
            sender: Sender::Http1(sender),
            driver: tokio::spawn(async { drop(connection.await) }),
            authority: address.to_string(),
        })
    }

    /// Connects by HTTP/2 and lets the peer send so many bytes of each answer before they are read.
    pub async fn open_narrow(address: SocketAddr, bytes: u32) -> Result<Self> {
        let mut settings = http2::Builder::new(TokioExecutor::new());
        settings.initial_stream_window_size(bytes);
        Self::open_http2(address, &settings).await
    }

    async fn open_http2(
        address: SocketAddr,
        settings: &http2::Builder<TokioExecutor>,
    ) -> Result<Self> {
        let (sender, connection) = settings.handshake(connect(address).await?).await?;
        Ok(Self {
            sender: Sender::Http2(sender),
            driver: tokio::spawn(async { drop(connection.await) }),
            authority: address.to_string(),
        })
    }

    /// Sends a request and waits for the answer's headers. Dropping the future aborts the
    /// request: with HTTP/2 its stream alone, with HTTP/1.1 when the connection is dropped too.
    pub async fn start(&mut self, request: Request) -> Result<Running> {
        let request = self.build(request)?;
        let answer = async {
            match &mut self.sender {
                Sender::Http1(sender) => sender.send_request(request).await,
                Sender::Http2(sender) => sender.send_request(request).await,
            }
        };
        let answer = tokio::time::timeout(ANSWER_LIMIT, answer)
            .await
            .context("no answer")??;
        Ok(running(answer))
    }

    /// Sends a request and waits for the whole answer.
    pub async fn send(&mut self, request: Request) -> Result<Answer> {
        self.start(request).await?.finish().await
    }

    /// Whether it can take another request.
    pub async fn is_ready(&mut self) -> bool {
        let ready = async {
            match &mut self.sender {
                Sender::Http1(sender) => sender.ready().await,
                Sender::Http2(sender) => sender.ready().await,
            }
        };
        matches!(tokio::time::timeout(ANSWER_LIMIT, ready).await, Ok(Ok(())))
    }

    fn build(&self, request: Request) -> Result<hyper::Request<SentBody>> {
        let mut head = hyper::Request::builder().method(request.method);
        head = match &self.sender {
            Sender::Http1(_) => head.uri(&request.path).header("host", &self.authority),
            Sender::Http2(_) => head.uri(format!("http://{}{}", self.authority, request.path)),
        };
        if let Body::Pieces { trailers, .. } = &request.body {
            // HTTP/1.1 sends only trailers that were announced.
            for (name, _) in trailers {
                head = head.header("trailer", name);
            }
        }
        for (name, value) in &request.headers {
            head = head.header(name, HeaderValue::from_bytes(value)?);
        }
        Ok(head.body(sent(request.body)?)?)
    }
}

async fn connect(address: SocketAddr) -> Result<TokioIo<TcpStream>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(TokioIo::new(stream))
}

fn running(answer: Response<Incoming>) -> Running {
    let (head, body) = answer.into_parts();
    Running {
        status: head.status.as_u16(),
        headers: head.headers,
        body,
        trailers: None,
    }
}

fn sent(body: Body) -> Result<SentBody> {
    let (pieces, trailers, never_ends) = match body {
        Body::None => return Ok(Empty::new().boxed_unsync()),
        Body::Whole(bytes) => return Ok(Full::new(bytes).boxed_unsync()),
        Body::Pieces {
            pieces,
            trailers,
            never_ends,
        } => (pieces, trailers, never_ends),
    };
    let mut map = HeaderMap::new();
    for (name, value) in trailers {
        map.append(
            name.parse::<HeaderName>()?,
            HeaderValue::from_bytes(&value)?,
        );
    }
    let mut frames: Vec<(Duration, Frame<Bytes>)> = pieces
        .into_iter()
        .map(|piece| (piece.after, Frame::data(piece.bytes)))
        .collect();
    if !map.is_empty() {
        frames.push((Duration::ZERO, Frame::trailers(map)));
    }
    let frames = stream::unfold(frames.into_iter(), move |mut left| async move {
        let Some((after, frame)) = left.next() else {
            if never_ends {
                std::future::pending::<()>().await;
            }
            return None;
        };
        tokio::time::sleep(after).await;
        Some((Ok::<_, Infallible>(frame), left))
    });
    Ok(StreamBody::new(frames).boxed_unsync())
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers
        .get(name)
        .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
}

/// Many connections to one address, reused when idle.
pub struct Client {
    address: SocketAddr,
    protocol: Protocol,
    idle: Mutex<Vec<Connection>>,
}

impl Client {
    /// A client without connections yet.
    #[must_use]
    pub fn new(address: SocketAddr, protocol: Protocol) -> Self {
        Self {
            address,
            protocol,
            idle: Mutex::default(),
        }
    }

    /// Where it sends to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sends over an idle connection, or a new one if there is none.
    pub async fn send(&self, request: Request) -> Result<Answer> {
        let mut connection = self.connection().await?;
        let answer = connection.send(request).await?;
        self.idle().push(connection);
        Ok(answer)
    }

    /// Sends and expects a 200; the error shows the status and the body.
    pub async fn ok(&self, request: Request) -> Result<Answer> {
        let answer = self.send(request).await?;
        if answer.status != 200 {
            bail!(
                "status {}: {}",
                answer.status,
                String::from_utf8_lossy(&answer.body)
            );
        }
        Ok(answer)
    }

    /// Sends and expects a 200 from an engine; says which.
    pub async fn host(&self, request: Request) -> Result<String> {
        self.ok(request)
            .await?
            .engine()
            .context("no engine answered")
    }

    /// Opens `count` idle connections, so that every worker of the proxy gets some.
    pub async fn open(&self, count: usize) -> Result<()> {
        let mut opened = Vec::with_capacity(count);
        for _ in 0..count {
            opened.push(Connection::open(self.address, self.protocol).await?);
        }
        self.idle().extend(opened);
        ensure!(self.idle().len() >= count, "connections were lost");
        Ok(())
    }

    async fn connection(&self) -> Result<Connection> {
        loop {
            // The oldest first, so that requests in a row use every connection in turn.
            let idle = {
                let mut idle = self.idle();
                (!idle.is_empty()).then(|| idle.remove(0))
            };
            let Some(mut connection) = idle else {
                return Connection::open(self.address, self.protocol).await;
            };
            if connection.is_ready().await {
                return Ok(connection);
            }
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
