//! Proves in a real Envoy that the engines' counts are read from a sample of answers, however they
//! are cut, and that no byte of an answer is changed or delayed by it.

#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use prefix_router::names::{CACHED_TOKENS, PREDICTED_CACHED_TOKENS, PROMPT_TOKENS, USAGE};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tools::testkit::{
    Client, Connection, Gateway, Protocol, Request, ask, chat, eventually, words,
};

const SOON: Duration = Duration::from_secs(10);
/// Long enough for Envoy to take one piece before the next comes, mostly.
const GAP: Duration = Duration::from_millis(3);

/// What the engine answers from now on.
#[derive(Clone)]
struct Answer {
    status: u16,
    headers: &'static str,
    body: Vec<u8>,
    /// Every piece is a chunk and a segment of its own; 0: the length is declared.
    piece_bytes: usize,
    /// After the first piece, the engine waits for a notification.
    gate: Option<Arc<Notify>>,
    /// The connection goes away before the end.
    cut: bool,
}

impl Answer {
    fn of(body: impl Into<Vec<u8>>) -> Self {
        Self {
            status: 200,
            headers: "content-type: application/json\r\n",
            body: body.into(),
            piece_bytes: 0,
            gate: None,
            cut: false,
        }
    }

    fn pieces(self, piece_bytes: usize) -> Self {
        Self {
            piece_bytes,
            headers: "content-type: text/event-stream\r\n",
            ..self
        }
    }
}

/// An engine that sends its answers' bytes exactly as a test cuts them.
struct Engine {
    address: SocketAddr,
    answer: Arc<Mutex<Answer>>,
}

impl Engine {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let answer = Arc::new(Mutex::new(Answer::of("{}")));
        let shared = Arc::clone(&answer);
        // Ends with the test's runtime.
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&shared)));
            }
        });
        Self { address, answer }
    }

    fn set(&self, answer: Answer) {
        *self.answer.lock().unwrap() = answer;
    }
}

/// Serves requests until the peer or a cut answer ends the connection.
async fn serve(mut stream: TcpStream, answer: Arc<Mutex<Answer>>) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut seen = Vec::new();
    loop {
        let path = read_request(&mut stream, &mut seen).await?;
        if path == "/health" {
            let head = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
            stream.write_all(head.as_bytes()).await?;
            continue;
        }
        let answer = answer.lock().unwrap().clone();
        write_answer(&mut stream, &answer).await?;
        if answer.cut {
            return Ok(());
        }
    }
}

/// Reads one request to its end; its path. `seen` keeps what came behind it.
async fn read_request(stream: &mut TcpStream, seen: &mut Vec<u8>) -> std::io::Result<String> {
    loop {
        let end = seen.windows(4).position(|four| four == b"\r\n\r\n");
        if let Some(end) = end {
            let head = String::from_utf8_lossy(&seen[..end]).to_lowercase();
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "))
                .map_or(0, |length| length.parse::<usize>().unwrap());
            let all = end + 4 + length;
            if seen.len() >= all {
                seen.drain(..all);
                return Ok(head.split(' ').nth(1).unwrap().to_owned());
            }
        }
        if stream.read_buf(seen).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
}

async fn write_answer(stream: &mut TcpStream, answer: &Answer) -> std::io::Result<()> {
    let Answer { headers, body, .. } = answer;
    let length = match answer.piece_bytes {
        0 => format!("content-length: {}", body.len()),
        _ => "transfer-encoding: chunked".to_owned(),
    };
    let head = format!("HTTP/1.1 {} X\r\n{headers}{length}\r\n\r\n", answer.status);
    stream.write_all(head.as_bytes()).await?;
    if answer.piece_bytes == 0 {
        return stream.write_all(body).await;
    }
    for (n, piece) in body.chunks(answer.piece_bytes).enumerate() {
        if let (1, Some(gate)) = (n, &answer.gate) {
            gate.notified().await;
        }
        let mut chunk = format!("{:x}\r\n", piece.len()).into_bytes();
        chunk.extend_from_slice(piece);
        chunk.extend_from_slice(b"\r\n");
        stream.write_all(&chunk).await?;
        tokio::time::sleep(GAP).await;
    }
    match answer.cut {
        true => Ok(()),
        false => stream.write_all(b"0\r\n\r\n").await,
    }
}

struct Bed {
    engine: Engine,
    gateway: Gateway,
    client: Arc<Client>,
}

/// One engine behind a gateway that reads one answer in `sample`.
async fn bed(sample: u32) -> Bed {
    let engine = Engine::start().await;
    let gateway = Gateway::at([engine.address])
        .config(json!({"learning": {"sample": sample}}))
        .start()
        .await
        .unwrap();
    let client = gateway.client(Protocol::Http1);
    Bed {
        engine,
        gateway,
        client,
    }
}

impl Bed {
    /// Prompt tokens, cached tokens; answers that said both, only the first, nothing.
    async fn counts(&self) -> [u64; 5] {
        let metric = async |name, labels: &[(&str, &str)]| {
            self.gateway.metric(name, labels).await.unwrap() as u64
        };
        let state = async |state| metric(USAGE, &[("pool", "engines"), ("state", state)]).await;
        [
            metric(PROMPT_TOKENS, &[("pool", "engines")]).await,
            metric(CACHED_TOKENS, &[("pool", "engines")]).await,
            state("ok").await,
            state("no_details").await,
            state("absent").await,
        ]
    }

    /// Waits for these counts: an answer ends at the client a moment before it ends in the proxy.
    #[track_caller]
    fn wait_counts(&self, expected: [u64; 5]) -> impl Future<Output = ()> {
        let caller = std::panic::Location::caller();
        async move {
            let mut found = [0; 5];
            let wait = eventually(SOON, async || {
                found = self.counts().await;
                found == expected
            });
            assert!(wait.await, "{caller}: {found:?}, not {expected:?}");
        }
    }

    /// Sends a prompt; the answer must come as the engine sent it.
    async fn exchange(&self, path: &str, answer: Answer) {
        let (status, body) = (answer.status, answer.body.clone());
        self.engine.set(answer);
        let request = Request::post(path, ask("hello"));
        let found = self.client.send(request).await.unwrap();
        assert_eq!(found.status, status);
        assert!(found.body == body, "the answer was changed");
    }
}

const CHAT: &str = "/v1/chat/completions";

fn events(usage: &str) -> String {
    let words = (0..5).map(|n| {
        let event = json!({"choices": [{"delta": {"content": format!("\"w{n}\": {{\"usage\"")}}]});
        format!("data: {event}\n\n")
    });
    words.collect::<String>() + &format!("data: {{\"choices\":[],{usage}}}\n\ndata: [DONE]\n\n")
}

#[tokio::test]
async fn counts_are_read_however_an_answer_is_cut() {
    let bed = bed(1).await;
    let usage = r#""usage":{"prompt_tokens":12345,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":12288}}"#;
    let stream = events(usage);
    // Every way to cut the last event's two numbers and their keys.
    for piece_bytes in [3, 7, 50, 100_000] {
        bed.exchange(CHAT, Answer::of(stream.clone()).pieces(piece_bytes))
            .await;
    }
    bed.wait_counts([4 * 12_345, 4 * 12_288, 4, 0, 0]).await;
    // Declared length, and longer than one window: 300 KB of text before the counts.
    let text = "\\\"{\"usage\":".repeat(30_000);
    let long = json!({"choices": [{"message": {"content": text}}], "id": 1}).to_string();
    let long = format!("{},{usage}}}", &long[..long.len() - 1]);
    bed.exchange(CHAT, Answer::of(long)).await;
    bed.wait_counts([5 * 12_345, 5 * 12_288, 5, 0, 0]).await;
    let message = r#"{"type":"message","content":[],"usage":{"input_tokens":5,"cache_read_input_tokens":1000}}"#;
    bed.exchange("/v1/messages", Answer::of(message)).await;
    let (prompt, cached) = (5 * 12_345 + 1005, 5 * 12_288 + 1000);
    bed.wait_counts([prompt, cached, 6, 0, 0]).await;
    bed.gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn answers_without_counts_are_told_apart() {
    let bed = bed(1).await;
    let plain = r#"{"usage":{"prompt_tokens":100,"prompt_tokens_details":null}}"#;
    bed.exchange(CHAT, Answer::of(plain)).await;
    bed.wait_counts([0, 0, 0, 1, 0]).await;
    bed.exchange(CHAT, Answer::of(events("\"id\":1")).pieces(64))
        .await;
    bed.wait_counts([0, 0, 0, 1, 1]).await;
    // An encoded answer passes as it is.
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(plain.as_bytes()).unwrap();
    let encoded = Answer {
        headers: "content-type: application/json\r\ncontent-encoding: gzip\r\n",
        ..Answer::of(gzip.finish().unwrap())
    };
    bed.exchange(CHAT, encoded).await;
    bed.wait_counts([0, 0, 0, 1, 2]).await;
    // Nor is anything of it added up where a count cannot be.
    let absurd = r#"{"usage":{"prompt_tokens":4294967296,"cached_tokens":4294967295}}"#;
    bed.exchange(CHAT, Answer::of(absurd)).await;
    bed.wait_counts([0, 0, 0, 1, 3]).await;
    // An engine that gives details leaves them out when they are zero.
    let detailed =
        r#"{"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64}}}"#;
    bed.exchange(CHAT, Answer::of(detailed)).await;
    bed.wait_counts([100, 64, 1, 1, 3]).await;
}

#[tokio::test]
async fn what_is_no_answer_to_a_placed_prompt_does_not_count() {
    let bed = bed(1).await;
    let usage = r#"{"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64}}}"#;
    let failed = Answer {
        status: 400,
        ..Answer::of(usage)
    };
    bed.exchange(CHAT, failed).await;
    bed.engine.set(Answer::of(usage));
    bed.client.ok(Request::get("/v1/models")).await.unwrap();
    // Cut off before its counts.
    let cut = Answer {
        cut: true,
        ..Answer::of(events("\"id\":1")).pieces(40)
    };
    bed.engine.set(cut);
    let request = Request::chat(ask("hello"));
    assert!(bed.client.send(request).await.is_err());
    bed.exchange(CHAT, Answer::of(usage)).await;
    bed.wait_counts([100, 64, 1, 0, 0]).await;
    bed.gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn an_event_passes_before_the_next_one_comes() {
    let bed = bed(1).await;
    let gate = Arc::new(Notify::new());
    let body = events(r#""usage":{"prompt_tokens":7}"#);
    // The first piece ends inside an event.
    bed.engine.set(Answer {
        gate: Some(Arc::clone(&gate)),
        ..Answer::of(body.clone()).pieces(30)
    });
    let mut connection = Connection::open(bed.gateway.address(), Protocol::Http1)
        .await
        .unwrap();
    let request = Request::chat(ask("hello"));
    let mut running = connection.start(request).await.unwrap();
    let mut found = running.next().await.unwrap().unwrap().to_vec();
    assert_eq!(found, &body.as_bytes()[..30]);
    gate.notify_one();
    found.extend_from_slice(&running.finish().await.unwrap().body);
    assert!(found == body.as_bytes());
    bed.wait_counts([0, 0, 0, 1, 0]).await;
}

#[tokio::test]
async fn a_sample_is_read_the_first_answer_always() {
    let bed = bed(8).await;
    let usage = r#"{"usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":1}}}"#;
    bed.exchange(CHAT, Answer::of(usage)).await;
    bed.wait_counts([1, 1, 1, 0, 0]).await;
    for _ in 0..399 {
        bed.exchange(CHAT, Answer::of(usage)).await;
    }
    // The sampler has no clock and no chance: 400 answers on one connection, so in one worker,
    // always give the same number, which is near 50.
    let [_, _, read, ..] = bed.counts().await;
    assert!((30..=70).contains(&read), "{read} of 400");
}

#[tokio::test]
async fn what_was_expected_is_counted_beside_what_was_found() {
    let bed = bed(1).await;
    let usage = r#"{"usage":{"prompt_tokens":5000,"prompt_tokens_details":{"cached_tokens":0}}}"#;
    bed.engine.set(Answer::of(usage));
    let send = async || {
        let request = Request::chat(chat(&words(1, 20_000), "hello"));
        bed.client.ok(request).await.unwrap();
    };
    send().await;
    bed.wait_counts([5000, 0, 1, 0, 0]).await;
    let predicted = async || {
        let labels = [("pool", "engines")];
        let found = bed.gateway.metric(PREDICTED_CACHED_TOKENS, &labels);
        found.await.unwrap()
    };
    assert_eq!(predicted().await, 0.0, "a prompt that was never sent");
    send().await;
    bed.wait_counts([10_000, 0, 2, 0, 0]).await;
    // All of it but what stands behind the last checkpoint.
    let second = predicted().await;
    assert!((4000.0..=5000.0).contains(&second), "{second}");
}

#[tokio::test]
async fn nothing_is_read_if_the_sample_is_zero() {
    let bed = bed(0).await;
    let usage = r#"{"usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":1}}}"#;
    for _ in 0..20 {
        bed.exchange(CHAT, Answer::of(usage)).await;
    }
    bed.gateway.quiet().await.unwrap();
    assert_eq!(bed.counts().await, [0; 5]);
}
