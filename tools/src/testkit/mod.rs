//! What the tests against a real Envoy are made of: engines that do exactly what a test asks,
//! a client that can misbehave in every phase of a request, and prompts.
//!
//! Guarantee: nothing here waits blindly; every wait has an end and polls what it waits for.
//! Not here: Envoy itself (harness), a realistic engine (engine).

mod browser;
mod client;
mod engine;
mod gateway;
mod prompt;
mod traffic;

use std::time::{Duration, Instant};

pub use hyper::Method;

pub use browser::{Browser, Tab};
pub use client::{Answer, Body, Client, Connection, Piece, Protocol, Request, Running};
pub use engine::{Behaviour, ENGINE_HEADER, MockEngine, Recorded, SCRIPT_HEADER, SHA_HEADER};
pub use gateway::{DEFAULT_POOL, Gateway, GatewayPlan, OTHER_POOL, admin_page};
pub use prompt::{ask, chat, chat_turns, for_model, words};
pub use traffic::{Traffic, TrafficPlan, TrafficReport, prompt_of};

/// How often [`eventually`] looks: often enough that no test is slow because of it.
const POLL: Duration = Duration::from_millis(5);

/// Waits until `holds` does, at most `limit`; says whether it did.
pub async fn eventually(limit: Duration, mut holds: impl AsyncFnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if holds().await {
            return true;
        }
        if start.elapsed() > limit {
            return false;
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Says that a test checks nothing here, and why. Past the test runner, which keeps what a test that
/// passes has printed to itself.
pub fn skipped(why: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "\nSKIPPED: {why}");
}

/// Lower-case hexadecimal SHA-256.
#[must_use]
pub fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    hex(&sha2::Sha256::digest(bytes))
}

/// Lower-case hexadecimal.
fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
