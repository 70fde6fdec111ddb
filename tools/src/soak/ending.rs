//! The ways a request of the soak ends.
//!
//! Guarantee: each ending says what must come back, and `run` says what did. Not here: what
//! excuses another end (report.rs).

use std::time::Duration;

use rand::{Rng, RngExt as _};
use serde::Serialize;

use super::TIMEOUT_HEADER;
use crate::testkit::{
    Behaviour, Body, Connection, Method, Piece, Protocol, Request, chat, sha256, words,
};

/// Different prefixes in the mix: few enough that they meet, enough that hosts differ.
const PREFIXES: u64 = 200;
/// Milliseconds: an answer that is slower than any client waits who means to leave.
const LATE_MS: u64 = 2000;
/// Milliseconds: an answer that Envoy does not wait for. A busy machine may keep Envoy from looking
/// at its timers for seconds, and an answer that has come by then is passed on.
const NEVER_MS: u64 = 20_000;

/// How a request ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// A complete answer.
    Answered,
    /// A complete event stream.
    Streamed,
    /// A request without a prompt, answered.
    NoPrompt,
    /// The client leaves before the answer.
    LeftWaiting,
    /// The client leaves in the stream.
    LeftStream,
    /// The client leaves in its upload.
    LeftUpload,
    /// The engine answers with an error.
    EngineError,
    /// The engine cuts the connection instead of an answer.
    EngineReset,
    /// The engine cuts the connection in its stream.
    EngineCut,
    /// Envoy gives up waiting.
    TimedOut,
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// What was meant to.
    Meant,
    /// Something else; the text says what.
    Odd(String),
}

impl Ending {
    /// One of them at random: six of ten end well.
    pub fn draw(rng: &mut impl Rng) -> Self {
        match rng.random_range(0..100) {
            0..42 => Self::Answered,
            42..57 => Self::Streamed,
            57..62 => Self::NoPrompt,
            62..72 => Self::LeftWaiting,
            72..80 => Self::LeftStream,
            80..85 => Self::LeftUpload,
            85..90 => Self::EngineError,
            90..94 => Self::EngineReset,
            94..98 => Self::EngineCut,
            _ => Self::TimedOut,
        }
    }

    /// A request that will end so.
    pub fn request(self, rng: &mut impl Rng) -> Request {
        let script = self.script(rng);
        if self == Self::NoPrompt {
            let method = if rng.random_bool(0.5) {
                Method::GET
            } else {
                Method::DELETE
            };
            return Request::new(method, "/v1/models").script(script);
        }
        let bytes = if rng.random_bool(0.01) {
            300_000
        } else {
            rng.random_range(50..3000)
        };
        // Squared, so that a few prefixes are hot.
        let popular: f64 = rng.random();
        let prefix = (popular * popular * PREFIXES as f64) as u64;
        let body = chat(&words(prefix, 1500), &words(rng.random(), bytes));
        let mut request = Request::chat(body).script(script);
        if self == Self::TimedOut {
            request = request.header(TIMEOUT_HEADER, "1");
        }
        match rng.random_range(0..4) {
            0 => request.cut_every(700, Duration::ZERO, &[]),
            1 => request.cut_every(4000, Duration::from_millis(1), &[("x-t", "1")]),
            _ => request,
        }
    }

    fn script(self, rng: &mut impl Rng) -> Behaviour {
        let events = rng.random_range(1..6);
        let every_ms = rng.random_range(0..4);
        let after_ms = rng.random_range(0..15);
        match self {
            Self::Answered | Self::NoPrompt | Self::LeftUpload => Behaviour::Answer {
                status: 200,
                after_ms,
            },
            Self::LeftWaiting => Behaviour::Answer {
                status: 200,
                after_ms: LATE_MS,
            },
            Self::TimedOut => Behaviour::Answer {
                status: 200,
                after_ms: NEVER_MS,
            },
            Self::Streamed => Behaviour::Stream { events, every_ms },
            Self::LeftStream => Behaviour::HoldStream { events },
            Self::EngineError => Behaviour::Answer {
                status: 500,
                after_ms,
            },
            Self::EngineReset => Behaviour::Reset { after_ms },
            Self::EngineCut => Behaviour::Cut { events, every_ms },
        }
    }

    /// Sends the request and sees to its end.
    pub async fn run(
        self,
        connection: &mut Connection,
        request: Request,
        rng: &mut impl Rng,
    ) -> Fate {
        match self {
            Self::Answered | Self::Streamed | Self::NoPrompt => whole(connection, request).await,
            Self::EngineError => status(connection, request, 500).await,
            Self::EngineReset => status(connection, request, 503).await,
            Self::TimedOut => status(connection, request, 504).await,
            Self::LeftWaiting => {
                let patience = Duration::from_millis(rng.random_range(0..40));
                leave(connection, request, patience).await
            }
            Self::LeftUpload => {
                let patience = Duration::from_millis(rng.random_range(0..20));
                leave(connection, half(request), patience).await
            }
            Self::LeftStream | Self::EngineCut => {
                let mut running = match connection.start(request).await {
                    Ok(running) if running.status == 200 => running,
                    Ok(other) => return Fate::Odd(format!("status {}", other.status)),
                    Err(error) => return Fate::Odd(format!("{error:#}")),
                };
                if self == Self::EngineCut {
                    return match running.finish().await {
                        Ok(_) => Fate::Odd("a cut answer came whole".to_owned()),
                        Err(_) => Fate::Meant,
                    };
                }
                match running.next().await {
                    Ok(Some(_)) => Fate::Meant,
                    other => Fate::Odd(format!("the stream gave {other:?}")),
                }
            }
        }
    }

    /// Whether the next request needs a new connection.
    pub fn leaves_connection_unusable(self, protocol: Protocol, fate: &Fate) -> bool {
        let left = matches!(
            self,
            Self::LeftWaiting | Self::LeftStream | Self::LeftUpload
        );
        let whole = matches!(self, Self::Answered | Self::Streamed | Self::NoPrompt);
        match protocol {
            Protocol::Http1 => left || !whole || *fate != Fate::Meant,
            Protocol::Http2 => *fate != Fate::Meant,
        }
    }
}

async fn whole(connection: &mut Connection, request: Request) -> Fate {
    let digest = match &request.body {
        Body::None => sha256(b""),
        Body::Whole(bytes) => sha256(bytes),
        Body::Pieces { pieces, .. } => {
            let bytes: Vec<u8> = pieces
                .iter()
                .flat_map(|piece| piece.bytes.to_vec())
                .collect();
            sha256(&bytes)
        }
    };
    match connection.send(request).await {
        Ok(answer) if answer.status != 200 => {
            let text = String::from_utf8_lossy(&answer.body).into_owned();
            Fate::Odd(format!("status {}: {text}", answer.status))
        }
        Ok(answer) if answer.seen_sha256() != Some(digest) => {
            Fate::Odd("the engine saw other bytes".to_owned())
        }
        Ok(answer) if !String::from_utf8_lossy(&answer.body).contains("usage") => {
            Fate::Odd("the answer is not whole".to_owned())
        }
        Ok(_) => Fate::Meant,
        Err(error) => Fate::Odd(format!("{error:#}")),
    }
}

async fn status(connection: &mut Connection, request: Request, expected: u16) -> Fate {
    match connection.send(request).await {
        Ok(answer) if answer.status == expected => Fate::Meant,
        Ok(answer) => Fate::Odd(format!("status {} instead of {expected}", answer.status)),
        Err(error) => Fate::Odd(format!("{error:#}")),
    }
}

/// Gives up after a while; whatever came until then is fine.
async fn leave(connection: &mut Connection, request: Request, patience: Duration) -> Fate {
    let _ = tokio::time::timeout(patience, connection.start(request)).await;
    Fate::Meant
}

/// The same request, of which only the first half is ever sent.
fn half(request: Request) -> Request {
    let bytes = match &request.body {
        Body::Whole(bytes) => bytes.slice(..bytes.len() / 2),
        Body::None | Body::Pieces { .. } => "{\"messages\":[".into(),
    };
    let pieces = vec![Piece {
        after: Duration::ZERO,
        bytes,
    }];
    request.body(Body::Pieces {
        pieces,
        trailers: Vec::new(),
        never_ends: true,
    })
}
