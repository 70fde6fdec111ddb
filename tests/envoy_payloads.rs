//! Proves in a real Envoy that every body reaches the engine byte for byte, encoded ones too, that
//! an encoded prompt goes where it goes unencoded, and that hostile bodies cost little.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, iter};

use serde_json::json;
use tools::testkit::{
    Body, Client, Gateway, Method, MockEngine, Protocol, Request, chat, eventually, sha256, words,
};

const BOTH: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];
const MIB: usize = 1024 * 1024;

/// A body and what is said about it.
struct Sent {
    name: String,
    path: String,
    content_encoding: &'static str,
    body: Vec<u8>,
}

impl Sent {
    fn chat(name: &str, content_encoding: &'static str, body: Vec<u8>) -> Self {
        Self {
            name: format!("{name}, content-encoding {content_encoding:?}"),
            path: "/v1/chat/completions".to_owned(),
            content_encoding,
            body,
        }
    }

    fn request(&self) -> Request {
        let request = Request::post(&self.path, self.body.clone());
        match self.content_encoding {
            "" => request,
            coding => request.header("content-encoding", coding),
        }
    }

    /// The same body as something that no prompt can be in.
    fn unread(&self) -> Request {
        Request::new(Method::POST, &self.path)
            .header("content-type", "multipart/form-data")
            .body(Body::Whole(self.body.clone().into()))
    }
}

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files
}

/// What tests/sdk/record.py recorded.
fn recorded() -> Vec<Sent> {
    let clients = files(&tests().join("sdk"));
    let all = clients
        .iter()
        .filter(|path| path.is_dir())
        .flat_map(|path| files(path));
    all.filter(|file| file.extension().is_some_and(|ending| ending == "http"))
        .map(|file| {
            let bytes = fs::read(&file).unwrap();
            let end = bytes
                .windows(4)
                .position(|four| four == b"\r\n\r\n")
                .unwrap();
            let line = std::str::from_utf8(&bytes[..end]).unwrap();
            Sent {
                name: file.display().to_string(),
                path: line.split(' ').nth(1).unwrap().to_owned(),
                content_encoding: "",
                body: bytes[end + 4..].to_vec(),
            }
        })
        .collect()
}

/// Every file of tests/decode as what it is, as what it is not, and without a word.
fn encoded() -> Vec<Sent> {
    let bodies = files(&tests().join("decode")).into_iter();
    bodies
        .flat_map(|file| {
            let body = fs::read(&file).unwrap();
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            ["", "gzip", "deflate", "zstd", "br", "gzip, br", "x-unknown"]
                .map(|coding| Sent::chat(&name, coding, body.clone()))
        })
        .collect()
}

/// The golden cases, their marks as they are: what they stand for is read elsewhere.
fn cases() -> Vec<Sent> {
    let folders = files(&tests().join("payloads"));
    let all = folders
        .iter()
        .filter(|path| path.is_dir())
        .flat_map(|path| files(path));
    all.map(|file| {
        let text = fs::read_to_string(&file).unwrap();
        let (input, _) = text.split_once("\n===\n").unwrap();
        let (head, body) = input.split_once("\n\n").unwrap();
        let path = head.lines().find_map(|line| line.strip_prefix("POST "));
        Sent {
            name: file.display().to_string(),
            path: path.unwrap().to_owned(),
            content_encoding: "",
            body: body.as_bytes().to_vec(),
        }
    })
    .collect()
}

/// What the fuzzer starts from: a path, a line end, a body.
fn odd() -> Vec<Sent> {
    let inputs = files(&tests().join("../fuzz/corpus/reader")).into_iter();
    inputs
        .map(|file| {
            let bytes = fs::read(&file).unwrap();
            let end = bytes.iter().position(|&byte| byte == b'\n').unwrap_or(0);
            Sent {
                name: file.display().to_string(),
                path: "/v1/chat/completions".to_owned(),
                content_encoding: "",
                body: bytes[end..].to_vec(),
            }
        })
        .collect()
}

/// Sends it and expects the engine to have seen exactly this, and to have answered.
async fn exact(client: &Client, sent: &Sent) -> String {
    let answer = client
        .send(sent.request())
        .await
        .unwrap_or_else(|error| panic!("{}: {error:#}", sent.name));
    assert_eq!(answer.status, 200, "{}", sent.name);
    let engine = answer.engine();
    let engine = engine.unwrap_or_else(|| panic!("{}: the proxy answered", sent.name));
    let seen = answer.seen_sha256();
    assert_eq!(
        seen,
        Some(sha256(&sent.body)),
        "{}: other bytes arrived",
        sent.name
    );
    engine
}

/// No VM panicked: nothing was answered by us, and every counter is back at zero.
async fn unharmed(gateway: &Gateway) {
    gateway.quiet().await.unwrap();
    for (name, count) in gateway.envoy().stats().await.unwrap() {
        assert!(!name.contains("vm_reload") || count == 0, "{name}: {count}");
    }
}

#[tokio::test]
async fn every_body_arrives_byte_for_byte() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let all: Vec<Sent> = iter::empty()
        .chain(recorded())
        .chain(cases())
        .chain(encoded())
        .chain(odd())
        .collect();
    assert!(all.len() >= 78 + 250 + 12 * 7 + 80, "{}", all.len());
    for protocol in BOTH {
        let client = gateway.client(protocol);
        for sent in &all {
            exact(&client, sent).await;
        }
    }
    let requests: u64 = engines.iter().map(MockEngine::total).sum();
    assert_eq!(requests, 2 * all.len() as u64);
    unharmed(&gateway).await;
}

fn gzip(body: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(body).unwrap();
    encoder.finish().unwrap()
}

fn zstd(body: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(body, ruzstd::encoding::CompressionLevel::Fastest)
}

#[tokio::test]
async fn an_encoded_prompt_goes_where_the_plain_one_goes() {
    let engines = MockEngine::start_many(5).await.unwrap();
    // `fixed` keys do not change when a prompt is sent often.
    let pool = json!({"routing": "fixed", "prefix_length": 4096, "limit": 1000});
    let gateway = Gateway::of(&engines).pool(pool).start().await.unwrap();
    let mut homes = Vec::new();
    for prompt in 0..10_u64 {
        let client = gateway.client(BOTH[prompt as usize % 2]);
        let turn = |user: &str| chat(&words(prompt, 200_000), user);
        let home = exact(&client, &Sent::chat("plain", "", turn("hello"))).await;
        for (name, coding, body) in [
            ("gzip", "gzip", gzip(&turn("hello"))),
            ("gzip, another turn", "gzip", gzip(&turn("and more"))),
            ("gzip, no header", "", gzip(&turn("third"))),
            ("zstd", "zstd", zstd(&turn("hello"))),
            (
                "zstd, another turn, no header",
                "",
                zstd(&turn("something else")),
            ),
        ] {
            let host = exact(&client, &Sent::chat(name, coding, body)).await;
            assert_eq!(host, home, "prompt {prompt}, {name}");
        }
        homes.push(home);
    }
    homes.sort();
    homes.dedup();
    assert!(homes.len() >= 3, "ten prompts on {} hosts", homes.len());
    unharmed(&gateway).await;
}

/// 1 GiB of zeros in each coding, and bodies that are all structure.
fn hostile() -> Vec<Sent> {
    let run = (((128 * 1024) << 3) | 2_u32).to_le_bytes();
    let block = [&run[..3], &[0]].concat();
    let zstd = [
        &[0x28, 0xb5, 0x2f, 0xfd, 0, 7 << 3][..],
        &block.repeat(8192),
    ]
    .concat();
    let mut deflate = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
    deflate.write_all(&vec![0; MIB]).unwrap();
    deflate.flush().unwrap();
    let deflate = deflate.get_ref().repeat(1024);
    let gzip = [&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff][..], &deflate].concat();
    let brotli = fs::read(tests().join("decode/bomb.br")).unwrap();
    vec![
        Sent::chat("gzip bomb", "gzip", gzip),
        Sent::chat("deflate bomb", "deflate", deflate),
        Sent::chat("zstd bomb", "", zstd),
        Sent::chat("brotli bomb", "br", brotli),
        Sent::chat("10 MB of [", "", vec![b'['; 10_000_000]),
        Sent::chat("64 MB of text", "", chat(&words(1, 64_000_000), "hello")),
        Sent::chat("64 MB of zeros", "", vec![0; 64_000_000]),
    ]
}

#[tokio::test]
async fn hostile_bodies_pass_and_leave_no_memory_behind() {
    let engines = MockEngine::start_many(2).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let (hostile, plain) = (hostile(), Sent::chat("plain", "", chat("s", "u")));
    let memory = || gateway.envoy().usage().unwrap().resident_bytes;
    // Envoy keeps the buffers of the largest bodies that it held at a time.
    let round = async || {
        for protocol in BOTH {
            let client = gateway.client(protocol);
            for sent in &hostile {
                exact(&client, sent).await;
                exact(&client, &plain).await;
            }
        }
    };
    let start = memory();
    round().await;
    let first = memory();
    for _ in 0..3 {
        round().await;
    }
    let settled = eventually(Duration::from_secs(10), async || {
        memory() < first + 32 * MIB as u64
    });
    println!(
        "{} MiB at first, {} after a round, {} after four",
        start >> 20,
        first >> 20,
        memory() >> 20
    );
    assert!(settled.await, "{} → {} bytes", first, memory());
    unharmed(&gateway).await;
}

#[tokio::test]
async fn hostile_bodies_take_little_time() {
    let engines = MockEngine::start_many(2).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let cpu = || gateway.envoy().usage().unwrap().cpu;
    for sent in hostile() {
        // Processor time, for others may use this machine, and the least of several, for Envoy's
        // own timers are in it. What is added is ours and Envoy's holding back of the body.
        let (mut read, mut unread) = (Duration::MAX, Duration::MAX);
        for _ in 0..9 {
            let before = cpu();
            client.ok(sent.unread()).await.unwrap();
            let between = cpu();
            client.ok(sent.request()).await.unwrap();
            unread = unread.min(between - before);
            read = read.min(cpu() - between);
        }
        println!("{}: {read:?} of which {unread:?} without us", sent.name);
        // 64 MB cost Envoy alone 40 ms, and that differs by several from one time to the next.
        let added_max = if sent.body.len() > 16 * MIB { 20 } else { 5 };
        let added = read.saturating_sub(unread);
        assert!(
            added <= Duration::from_millis(added_max),
            "{}: {added:?} added",
            sent.name
        );
    }
    unharmed(&gateway).await;
}
