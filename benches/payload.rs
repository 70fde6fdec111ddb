//! Measures body bytes → prompt with its checkpoints, against `serde_json::Value` + FNV-1a over
//! the whole body in the same run.
//!
//! `cargo bench --bench payload`, or in WebAssembly as benches/wasm/README.md says. Not here: what
//! Envoy adds.

#![expect(clippy::print_stdout, reason = "a bench prints what it measured")]

use std::hash::Hasher;
use std::hint::black_box;
use std::time::{Duration, Instant};

use prefix_router::payload::{End, Head, Plan, ReadOptions, Reader};

/// The filter reads bodies in windows of this size.
const WINDOW_BYTES: usize = 64 * 1024;

/// Each figure is the best of this many rounds: what disturbs a machine only ever adds time.
const ROUNDS: u32 = 200;

/// A round repeats one call for about this long: shorter than a time slice of a busy machine.
const ROUND: Duration = Duration::from_micros(1000);

/// Issue B: "at least 2 × the throughput … at 4, 32 and 256 KB".
const SIZES: [usize; 3] = [4 << 10, 32 << 10, 256 << 10];

fn main() {
    println!(
        "{:<12}{:>9}{:>12}{:>12}{:>9}",
        "body", "bytes", "ours us", "serde us", "ratio"
    );
    let plan = Plan::new(&ReadOptions::default());
    for size in SIZES {
        for (name, path, body) in [
            ("chat", "/v1/chat/completions", chat(size, &prose())),
            ("code", "/v1/chat/completions", chat(size, CODE)),
            ("unicode", "/v1/chat/completions", chat(size, UNICODE)),
            ("turns", "/v1/chat/completions", turns(size)),
            ("native", "/generate", native(size)),
            ("tokens", "/v1/completions", tokens(size)),
        ] {
            let ours = micros(|| read(&plan, path.as_bytes(), &body));
            let theirs = micros(|| baseline(&body));
            println!(
                "{name:<12}{:>9}{ours:>12.2}{theirs:>12.2}{:>9.2}",
                body.len(),
                theirs / ours
            );
        }
    }
}

/// The time of one call in microseconds.
fn micros<T>(mut call: impl FnMut() -> T) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let mut calls = 0;
        while start.elapsed() < ROUND || calls == 0 {
            black_box(call());
            calls += 1;
        }
        best = best.min(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls));
    }
    best
}

fn read(plan: &Plan, path: &[u8], body: &[u8]) -> u64 {
    let head = Head {
        path,
        ..Head::default()
    };
    let mut reader = Reader::with(&head, plan);
    for window in body.chunks(WINDOW_BYTES) {
        reader.feed(window);
    }
    let prompt = reader.finish(End::Whole);
    prompt.checkpoints.last().map_or(0, |end| prompt.key(end).0)
}

fn baseline(body: &[u8]) -> u64 {
    let value: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    black_box(value.as_ref());
    let mut hash = fnv::FnvHasher::default();
    hash.write(body);
    hash.finish()
}

const CODE: &str = "fn main() {\\n    let text = \\\"a\\\\tb\\\";\\n\\n    for part in text.split('\\\\t') \
    {\\n        println!(\\\"{part}\\\");\\n    }\\n}\\n";

const UNICODE: &str = "\\u4f60\\u597d\\uff0c\\u4e16\\u754c \\ud83d\\ude00 caf\\u00e9 ";

/// Words with a line break about every 80 bytes.
fn prose() -> String {
    let words = [
        "prefix", "a", "of", "route", "the", "engine", "cache", "and", "request", "keeps",
    ];
    let mut text = String::new();
    for at in 0..400_usize {
        text.push_str(words[at * 7 % 10]);
        text.push_str(if at % 13 == 12 { "\\n" } else { " " });
    }
    text
}

/// A system prompt and a question: two messages.
fn chat(size: usize, text: &str) -> Vec<u8> {
    let text = text.repeat(size / text.len() + 1);
    let mut end = size * 9 / 10;
    while !text.is_char_boundary(end) || text[..end].ends_with('\\') {
        end -= 1;
    }
    // An escape may be cut; both parsers must take the body, so the cut is at a blank.
    let end = text[..end].rfind(' ').unwrap_or(end);
    format!(
        "{{\"messages\":[{{\"role\":\"system\",\"content\":\"{}\"}},{{\"role\":\"user\",\"content\":\
         \"What follows from this?\"}}],\"model\":\"llama\",\"temperature\":0.2,\"stream\":true}}",
        &text[..end]
    )
    .into_bytes()
}

/// A conversation of short messages with tool calls.
fn turns(size: usize) -> Vec<u8> {
    let mut body = String::from("{\"model\":\"llama\",\"messages\":[");
    let turn = "{\"role\":\"user\",\"content\":\"Please look at the next file and say what it does, \
        in two lines.\"},{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"call_1\",\
        \"type\":\"function\",\"function\":{\"name\":\"read\",\"arguments\":\"{\\\"path\\\":\
        \\\"src/lib.rs\\\"}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"call_1\",\"content\":\"//! A \
        library.\\n\\npub mod json;\\npub mod load;\\npub mod payload;\\n\"},";
    while body.len() + turn.len() < size {
        body.push_str(turn);
    }
    body.push_str("{\"role\":\"user\",\"content\":\"Thanks.\"}],\"stream\":true}");
    body.into_bytes()
}

fn native(size: usize) -> Vec<u8> {
    let text = prose().repeat(size / 2000 + 1);
    let end = text[..size].rfind(' ').unwrap_or(size);
    format!(
        "{{\"inputs\":\"{}\",\"parameters\":{{\"max_new_tokens\":64}}}}",
        &text[..end]
    )
    .into_bytes()
}

fn tokens(size: usize) -> Vec<u8> {
    let mut body = String::from("{\"model\":\"llama\",\"prompt\":[1");
    let mut id = 1_u32;
    while body.len() < size {
        id = id.wrapping_mul(1_103_515_245).wrapping_add(12_345);
        body.push_str(&format!(",{}", id % 128_000));
    }
    body.push_str("]}");
    body.into_bytes()
}
