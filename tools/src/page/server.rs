//! The page over HTTP: its files, a stream of what happens, and the commands of its controls.
//!
//! Guarantee: connections are bounded, and one that does not read misses frames instead of holding
//! them. A command has to come from the page itself: another site's page in the same browser can
//! neither send one nor read the stream. Not here: what is shown (board.rs), what a command does.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::stream;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, Limited, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, HeaderName, HeaderValue,
};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, broadcast, mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval};

use super::Board;

/// Browser windows at the same time, several connections each. One beyond waits.
const CONNECTIONS_MAX: usize = 64;

/// Between two frames: movement looks smooth, and a frame of two fleets costs about 0.1 ms.
const FRAME_EVERY: Duration = Duration::from_millis(250);

/// Frames between two points of the curves.
const POINT_EVERY: u32 = 8;

/// Frames between two sendings of the curves.
const SERIES_EVERY: u32 = 4;

/// Frames kept for a browser that reads late; it misses what is older.
const FRAMES_KEPT: usize = 8;

/// A command is about 30 bytes.
const COMMAND_BYTES_MAX: usize = 4096;

/// A request's headers come within this.
const HEADERS_LIMIT: Duration = Duration::from_secs(10);

/// Nothing from elsewhere, no inline script, in no other site's frame.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; \
     connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; \
     frame-ancestors 'none'",
);

/// The page's files: path, media type, content.
const FILES: [(&str, &str, &str); 6] = [
    ("/", "text/html; charset=utf-8", include_str!("index.html")),
    (
        "/page.css",
        "text/css; charset=utf-8",
        include_str!("page.css"),
    ),
    (
        "/page.js",
        "text/javascript; charset=utf-8",
        include_str!("page.js"),
    ),
    (
        "/uplot.js",
        "text/javascript; charset=utf-8",
        include_str!("vendor/uPlot.iife.min.js"),
    ),
    (
        "/uplot.css",
        "text/css; charset=utf-8",
        include_str!("vendor/uPlot.min.css"),
    ),
    ("/icon.svg", "image/svg+xml", include_str!("icon.svg")),
];

/// What a control of the page asks for.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum Command {
    /// One prompt gets half of the requests, or no longer.
    Viral {
        /// Whether it does.
        on: bool,
    },
    /// Every request has a prompt of its own, or no longer.
    Unique {
        /// Whether it has.
        on: bool,
    },
    /// Requests a second.
    Rate {
        /// How many.
        value: f64,
    },
    /// Requests in flight per host.
    Limit {
        /// How many; none: no limit.
        value: Option<u32>,
    },
    /// Envoy's policy where the filter is not.
    Opponent {
        /// Its name.
        value: String,
    },
    /// One more host.
    Add {},
    /// A host gets nothing new.
    Drain {
        /// Its number, from 0.
        host: usize,
    },
    /// A host dies.
    Kill {
        /// Its number, from 0.
        host: usize,
    },
    /// A host that drains or is dead starts anew, with an empty cache.
    Restart {
        /// Its number, from 0.
        host: usize,
    },
}

/// A command, and where its answer goes: nothing, or why not.
pub type Ask = (Command, oneshot::Sender<Result<(), String>>);

/// A page that is served; dropping it ends it.
pub struct Page {
    address: SocketAddr,
    tasks: Vec<JoinHandle<()>>,
}

struct Shared {
    board: Arc<Board>,
    commands: Option<mpsc::Sender<Ask>>,
    events: broadcast::Sender<Bytes>,
}

type Reply = Response<BoxBody<Bytes, Infallible>>;

impl Page {
    /// Serves `board` on `address`; commands go to `commands`, or are refused without it.
    ///
    /// # Errors
    /// If it cannot listen there.
    pub async fn serve(
        board: Arc<Board>,
        address: SocketAddr,
        commands: Option<mpsc::Sender<Ask>>,
    ) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot show the page on {address}"))?;
        let address = listener.local_addr()?;
        let (events, _) = broadcast::channel(FRAMES_KEPT);
        let shared = Arc::new(Shared {
            board,
            commands,
            events,
        });
        let tasks = vec![
            tokio::spawn(tell(Arc::clone(&shared))),
            tokio::spawn(accept(listener, shared)),
        ];
        Ok(Self { address, tasks })
    }

    /// Where it is to be seen on this machine, and whether other machines see it too.
    #[must_use]
    pub fn seen_at(&self) -> String {
        seen_at(self.address)
    }
}

/// All addresses together are none to open: the machine's own stands for them.
fn seen_at(address: SocketAddr) -> String {
    if !address.ip().is_unspecified() {
        return format!("http://{address}/");
    }
    let own: IpAddr = match address.ip() {
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    let own = SocketAddr::new(own, address.port());
    format!("http://{own}/ (it listens on all addresses of this machine, {address})")
}

impl Drop for Page {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Writes frames and curves for everybody who looks.
async fn tell(shared: Arc<Shared>) {
    let mut frames = interval(FRAME_EVERY);
    frames.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut count = 0_u32;
    loop {
        frames.tick().await;
        if count.is_multiple_of(POINT_EVERY) {
            shared.board.sample();
        }
        if shared.events.receiver_count() > 0 {
            if count.is_multiple_of(SERIES_EVERY) {
                let _ = shared.events.send(event("series", &shared.board.series()));
            }
            let _ = shared.events.send(event("frame", &shared.board.frame()));
        }
        count = count.wrapping_add(1);
    }
}

fn event(name: &str, json: &str) -> Bytes {
    format!("event: {name}\ndata: {json}\n\n").into()
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    // Dropped with this task, which cuts the connections.
    let mut connections = JoinSet::new();
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        let Ok((stream, _)) = listener.accept().await else {
            // Out of file descriptors, as a rule: others must end first.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        while connections.try_join_next().is_some() {}
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            let service = service_fn(|request| {
                let shared = Arc::clone(&shared);
                async move { Ok::<_, Infallible>(answer(&shared, request).await) }
            });
            // An error here is a browser that left.
            let _ = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADERS_LIMIT)
                .serve_connection(TokioIo::new(stream), service)
                .await;
            drop(place);
        });
    }
}

async fn answer(shared: &Shared, request: Request<Incoming>) -> Reply {
    if !own_name(&request) {
        return text(StatusCode::FORBIDDEN, "this page has no such name");
    }
    let path = request.uri().path();
    match (request.method(), path) {
        (&Method::GET, "/events") => events(shared),
        (&Method::GET, "/state") => whole("application/json", shared.board.frame()),
        (&Method::GET, _) => FILES.iter().find(|(name, ..)| *name == path).map_or_else(
            || text(StatusCode::NOT_FOUND, "nothing here"),
            |(_, kind, content)| whole(kind, *content),
        ),
        (&Method::POST, "/control") => control(shared, request).await,
        _ => text(StatusCode::METHOD_NOT_ALLOWED, "only GET"),
    }
}

/// Whether the browser asked for an address, or for this machine: a foreign name that was made to
/// lead here would make the page a foreign site's own.
fn own_name(request: &Request<Incoming>) -> bool {
    let host = request
        .headers()
        .get(HOST)
        .and_then(|host| host.to_str().ok());
    let authority = host.and_then(|host| host.parse::<hyper::http::uri::Authority>().ok());
    authority.is_some_and(|authority| {
        let name = authority.host();
        let bare = name.trim_start_matches('[').trim_end_matches(']');
        name == "localhost" || bare.parse::<std::net::IpAddr>().is_ok()
    })
}

fn events(shared: &Shared) -> Reply {
    let receiver = shared.events.subscribe();
    // Who comes sees something at once.
    let first = [
        event("series", &shared.board.series()),
        event("frame", &shared.board.frame()),
    ];
    let first = stream::iter(first.map(|bytes| Ok(Frame::data(bytes))));
    let later = stream::unfold(receiver, |mut receiver| async {
        loop {
            match receiver.recv().await {
                Ok(bytes) => return Some((Ok(Frame::data(bytes)), receiver)),
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    });
    let body = StreamBody::new(futures_util::StreamExt::chain(first, later));
    reply("text/event-stream", BoxBody::new(body))
}

async fn control(shared: &Shared, request: Request<Incoming>) -> Reply {
    // Another site's script cannot send JSON here without asking first, which is not answered.
    let kind = request.headers().get(CONTENT_TYPE);
    if kind.is_none_or(|kind| kind.as_bytes() != b"application/json") {
        return text(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "expected application/json",
        );
    }
    let Some(commands) = &shared.commands else {
        return text(
            StatusCode::CONFLICT,
            "nothing can be changed while rounds are measured",
        );
    };
    let body = Limited::new(request.into_body(), COMMAND_BYTES_MAX)
        .collect()
        .await;
    let Ok(body) = body else {
        return text(
            StatusCode::PAYLOAD_TOO_LARGE,
            "no command is as long as this",
        );
    };
    let command = match serde_json::from_slice::<Command>(&body.to_bytes()) {
        Ok(command) => command,
        Err(error) => return text(StatusCode::BAD_REQUEST, &error.to_string()),
    };
    let (answer, answered) = oneshot::channel();
    if commands.send((command, answer)).await.is_err() {
        return text(StatusCode::CONFLICT, "the demo is over");
    }
    match answered.await {
        Ok(Ok(())) => text(StatusCode::OK, ""),
        Ok(Err(why)) => text(StatusCode::CONFLICT, &why),
        Err(_) => text(StatusCode::CONFLICT, "the demo is over"),
    }
}

fn text(status: StatusCode, text: &str) -> Reply {
    let mut reply = whole("text/plain; charset=utf-8", text.to_owned());
    *reply.status_mut() = status;
    reply
}

fn whole(kind: &'static str, content: impl Into<Bytes>) -> Reply {
    reply(kind, BoxBody::new(Full::new(content.into())))
}

fn reply(kind: &'static str, body: BoxBody<Bytes, Infallible>) -> Reply {
    let mut reply = Response::new(body);
    let headers = reply.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(CONTENT_SECURITY_POLICY, POLICY);
    let nosniff = HeaderName::from_static("x-content-type-options");
    headers.insert(nosniff, HeaderValue::from_static("nosniff"));
    reply
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::Mode;
    use crate::testkit::{self, Client, Protocol};

    async fn page(commands: Option<mpsc::Sender<Ask>>) -> (Page, Arc<Client>) {
        let board = Board::new(Mode::Live, vec!["Simulated.".into()]);
        let page = Page::serve(board, ([127, 0, 0, 1], 0).into(), commands);
        let page = page.await.unwrap();
        let client = Client::new(page.address, Protocol::Http1);
        (page, Arc::new(client))
    }

    #[test]
    fn an_address_that_can_be_opened_is_printed() {
        for (listens, seen) in [
            ("127.0.0.1:8090", "http://127.0.0.1:8090/"),
            ("[2001:db8::7]:80", "http://[2001:db8::7]:80/"),
            (
                "0.0.0.0:8090",
                "http://127.0.0.1:8090/ (it listens on all addresses of this machine, 0.0.0.0:8090)",
            ),
            (
                "[::]:8090",
                "http://[::1]:8090/ (it listens on all addresses of this machine, [::]:8090)",
            ),
        ] {
            assert_eq!(seen_at(listens.parse().unwrap()), seen);
        }
    }

    #[tokio::test]
    async fn every_file_is_served_and_needs_nothing_from_elsewhere() {
        let (_page, client) = page(None).await;
        for (path, kind, content) in FILES {
            let answer = client.send(testkit::Request::get(path)).await.unwrap();
            assert_eq!(
                (answer.status, answer.header("content-type")),
                (200, Some(kind.into()))
            );
            assert_eq!(answer.body, content.as_bytes());
            let policy = answer.header("content-security-policy").unwrap();
            assert!(policy.starts_with("default-src 'none'"));
        }
        let (_, _, html) = FILES[0];
        for name in ["page.css", "page.js", "uplot.js", "uplot.css", "icon.svg"] {
            assert!(html.contains(&format!("\"{name}\"")), "{name}");
        }
        assert!(!html.contains("//"), "something is loaded from elsewhere");
    }

    #[tokio::test]
    async fn a_command_must_come_from_the_page_itself() {
        let (sender, mut receiver) = mpsc::channel::<Ask>(1);
        let (page, client) = page(Some(sender)).await;
        let serve = tokio::spawn(async move {
            let (command, answer) = receiver.recv().await.unwrap();
            answer.send(Ok(())).unwrap();
            command
        });
        let send = async |request| client.send(request).await.unwrap().status;
        let json = |body: &str| testkit::Request::post("/control", body.to_owned());
        let good = r#"{"do":"kill","host":3}"#;
        let mut form = json(good);
        form.headers = vec![("content-type".into(), b"text/plain".to_vec())];
        assert_eq!(send(form).await, 415);
        assert_eq!(send(json(r#"{"do":"explode"}"#)).await, 400);
        assert_eq!(send(json(&"x".repeat(5000))).await, 413);
        assert_eq!(status_for_host(&page, "evil.example").await, "403");
        assert_eq!(status_for_host(&page, "localhost:8090").await, "200");
        assert_eq!(send(json(good)).await, 200);
        assert_eq!(serve.await.unwrap(), Command::Kill { host: 3 });
        assert_eq!(send(json(good)).await, 409, "nobody listens any more");
    }

    async fn status_for_host(page: &Page, host: &str) -> String {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let mut stream = tokio::net::TcpStream::connect(page.address).await.unwrap();
        let head = format!("GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    }

    #[tokio::test]
    async fn without_controls_commands_are_refused() {
        let (_page, client) = page(None).await;
        let request = testkit::Request::post("/control", r#"{"do":"add"}"#);
        assert_eq!(client.send(request).await.unwrap().status, 409);
    }

    #[test]
    fn the_vendored_library_is_the_one_its_readme_names() {
        let readme = include_str!("vendor/README.md");
        let version = readme
            .strip_prefix("uPlot ")
            .and_then(|rest| rest.split(' ').next());
        let head = format!("(v{})", version.unwrap());
        assert!(include_str!("vendor/uPlot.iife.min.js").contains(&head));
    }
}
