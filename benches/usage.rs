//! Measures answer bytes → usage: per event of a stream, as events arrive one by one, and per whole
//! answer.
//!
//! `cargo bench --bench usage`. Not here: what Envoy adds for handing out the bytes.

#![expect(clippy::print_stdout, reason = "a bench prints what it measured")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use prefix_router::usage::Reader;

/// Each figure is the best of this many rounds: what disturbs a machine only ever adds time.
const ROUNDS: u32 = 200;

/// A round repeats one call for about this long: shorter than a time slice of a busy machine.
const ROUND: Duration = Duration::from_micros(1000);

/// Events of a stream: some seconds of an answer.
const EVENTS: usize = 100;

fn main() {
    println!(
        "{:<12}{:>9}{:>9}{:>12}",
        "answer", "bytes", "windows", "us each"
    );
    for (name, events) in [
        ("openai", vec![OPENAI; EVENTS]),
        ("anthropic", vec![ANTHROPIC; EVENTS]),
        ("ollama", vec![OLLAMA; EVENTS]),
    ] {
        let windows: Vec<&[u8]> = events.iter().map(|event| event.as_bytes()).collect();
        show(name, &windows);
    }
    for size in [4 << 10, 32 << 10, 256 << 10] {
        let text = "Some words of an answer,\\nwith lines. ".repeat(size / 38);
        let body = format!(
            "{{\"id\":\"chatcmpl-1\",\"choices\":[{{\"index\":0,\"message\":{{\"role\":\
             \"assistant\",\"content\":\"{text}\"}}}}],\"usage\":{{\"prompt_tokens\":3011,\
             \"prompt_tokens_details\":{{\"cached_tokens\":3008}}}}}}"
        );
        show("whole", &[body.as_bytes()]);
    }
}

const OPENAI: &str = "data: {\"id\":\"chatcmpl-9f1c\",\"object\":\"chat.completion.chunk\",\
    \"created\":1700000000,\"model\":\"llama\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\
    \" token\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
const ANTHROPIC: &str = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\
    \"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\" token\"}}\n\n";
const OLLAMA: &str = "{\"model\":\"llama\",\"created_at\":\"2024-01-01T00:00:00Z\",\"message\":\
    {\"role\":\"assistant\",\"content\":\" token\"},\"done\":false}\n";

fn show(name: &str, windows: &[&[u8]]) {
    let bytes: usize = windows.iter().map(|window| window.len()).sum();
    let micros = micros(|| {
        let mut reader = Reader::new();
        for window in windows {
            reader.feed(window);
        }
        reader.finish()
    });
    println!(
        "{name:<12}{bytes:>9}{:>9}{:>12.3}",
        windows.len(),
        micros / windows.len() as f64
    );
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
