//! Traces of real services in Mooncake's format: when, how long, and which blocks were shared.
//!
//! Guarantee: block id → the same 512 tokens of text wherever it stands; a file that is not such a
//! trace is refused with its line. Not here: what the texts said (the traces do not tell either).

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use serde::Deserialize;

use super::text::{self, Text};
use super::{Message, Request, Role, Workload};

/// Tokens a block id of a trace stands for.
pub const BLOCK_TOKENS: u32 = 512;

/// Requests read at most: the largest public trace of this format has 23,608.
const REQUESTS_MAX: usize = 1_000_000;

/// A month, as of a log; at the lowest rate it is 31,000 months, which a clock's nanoseconds hold.
const SPAN_MAX_MS: u64 = 31 * 86_400_000;

/// Blocks of one request at most: 1,048,576 tokens, more than a model takes.
const BLOCKS_MAX: usize = 2048;

/// One line of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Line {
    /// Milliseconds from the trace's start.
    timestamp: u64,
    /// Tokens of the prompt.
    input_length: u32,
    /// Tokens of the answer.
    output_length: u32,
    /// One id per block of 512 tokens; the last block may be partial.
    hash_ids: Vec<u64>,
}

/// A trace, ready to be played as often as needed.
#[derive(Clone, Debug)]
pub struct Trace {
    lines: Arc<Vec<Line>>,
    /// How many times faster than recorded requests arrive.
    pub speed: f64,
    /// Answers get this share of their recorded tokens.
    pub output_scale: f64,
    /// Seed of the texts.
    pub seed: u64,
}

impl Trace {
    /// Reads the first `requests` requests of a file, at its recorded speed.
    ///
    /// # Errors
    /// If the file cannot be read, or a line is no request of a trace.
    pub fn read(path: &Path, requests: Option<usize>, seed: u64) -> anyhow::Result<Self> {
        let file = std::fs::File::open(path)
            .with_context(|| format!("trace {}: cannot be opened", path.display()))?;
        let requests = requests.unwrap_or(REQUESTS_MAX).min(REQUESTS_MAX);
        let mut lines = Vec::new();
        for (index, line) in BufReader::new(file).lines().take(requests).enumerate() {
            let at = || format!("trace {}, line {}", path.display(), index + 1);
            lines.push(parse(&line.with_context(at)?).with_context(at)?);
        }
        anyhow::ensure!(
            !lines.is_empty(),
            "trace {}: no request in it",
            path.display()
        );
        lines.sort_by_key(|line: &Line| line.timestamp);
        let timestamp = |line: Option<&Line>| line.map_or(0, |line| line.timestamp);
        let (first, last) = (timestamp(lines.first()), timestamp(lines.last()));
        anyhow::ensure!(
            last - first <= SPAN_MAX_MS,
            "trace {}: its timestamps go from {first} to {last}: expected milliseconds, and 31 \
             days at most",
            path.display()
        );
        Ok(Self {
            lines: Arc::new(lines),
            speed: 1.0,
            output_scale: 1.0,
            seed,
        })
    }

    /// Requests of the trace.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.lines.len()
    }

    /// From the first arrival to the last, at the trace's speed.
    #[must_use]
    pub fn length(&self) -> Duration {
        self.lines
            .last()
            .map_or(Duration::ZERO, |line| self.at(line))
    }

    fn at(&self, line: &Line) -> Duration {
        let first = self.lines.first().map_or(0, |first| first.timestamp);
        let ms = line.timestamp.saturating_sub(first) as f64;
        Duration::from_secs_f64(ms / 1000.0 / self.speed.max(1e-6))
    }

    fn request(&self, index: usize) -> Option<Request> {
        let line = self.lines.get(index)?;
        let mut left = line.input_length;
        let texts = line
            .hash_ids
            .iter()
            .map(|&block| {
                let tokens = left.min(BLOCK_TOKENS);
                left -= tokens;
                Text::Made {
                    id: text::id("block", self.seed, block),
                    tokens,
                }
            })
            .collect();
        Some(Request {
            id: index as u64,
            at: self.at(line),
            prefix: None,
            turn: 0,
            turns_left: 0,
            messages: Arc::new(vec![Message {
                role: Role::User,
                texts,
            }]),
            output_tokens: (f64::from(line.output_length) * self.output_scale)
                .ceil()
                .max(1.0) as u32,
        })
    }
}

fn parse(line: &str) -> anyhow::Result<Line> {
    let line: Line = serde_json::from_str(line).context(
        "expected an object with timestamp, input_length, output_length and hash_ids (integers)",
    )?;
    let blocks = line.input_length.div_ceil(BLOCK_TOKENS) as usize;
    anyhow::ensure!(
        blocks <= BLOCKS_MAX && line.hash_ids.len() == blocks,
        "{} tokens need {blocks} block ids (at most {BLOCKS_MAX}), got {}",
        line.input_length,
        line.hash_ids.len()
    );
    Ok(line)
}

/// The requests of one [`Trace`].
pub struct TraceRequests {
    trace: Trace,
    sent: usize,
}

impl TraceRequests {
    /// Starts the trace.
    #[must_use]
    pub fn new(trace: Trace) -> Self {
        Self { trace, sent: 0 }
    }
}

impl Workload for TraceRequests {
    fn next(&mut self) -> Option<Request> {
        let request = self.trace.request(self.sent)?;
        self.sent += 1;
        Some(request)
    }

    fn follow(&mut self, _request: &Request, _ended: Duration, _answer: &str) -> Option<Request> {
        None
    }

    fn prefixes(&self) -> Option<u64> {
        None
    }

    fn probe(&self, _index: u64) -> Option<Request> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(lines: &[&str]) -> anyhow::Result<Trace> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.jsonl");
        std::fs::write(&path, lines.join("\n")).unwrap();
        Trace::read(&path, None, 1)
    }

    const ONE: &str =
        r#"{"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 5, 6]}"#;
    const TWO: &str =
        r#"{"timestamp": 4000, "input_length": 1030, "output_length": 9, "hash_ids": [0, 5, 7]}"#;

    fn content(request: &Request) -> String {
        let mut out = String::new();
        request.messages[0].write(&mut out);
        out
    }

    #[test]
    fn equal_ids_are_equal_text_and_the_last_block_is_cut() {
        let mut requests = TraceRequests::new(trace(&[ONE, TWO]).unwrap());
        let (one, two) = (requests.next().unwrap(), requests.next().unwrap());
        assert_eq!(requests.next(), None);
        let (a, b) = (content(&one), content(&two));
        assert_eq!((a.len(), b.len()), (1100 * 4, 1030 * 4));
        let shared = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
        assert!(
            (1024 * 4..1024 * 4 + 8).contains(&shared),
            "{shared} bytes are shared"
        );
        assert_eq!((one.output_tokens, two.output_tokens), (7, 9));
    }

    #[test]
    fn arrivals_are_scaled_from_the_first() {
        let mut trace = trace(&[TWO, ONE]).unwrap();
        trace.speed = 2.0;
        assert_eq!(trace.length(), Duration::from_millis(1500));
        let mut requests = TraceRequests::new(trace);
        assert_eq!(requests.next().unwrap().at, Duration::ZERO);
        assert_eq!(requests.next().unwrap().at, Duration::from_millis(1500));
    }

    #[test]
    fn what_is_no_trace_is_refused_with_its_line() {
        #[track_caller]
        fn refused(lines: &[&str], expected: &[&str]) {
            let error = format!("{:#}", trace(lines).unwrap_err());
            for part in expected {
                assert!(error.contains(part), "{part:?} is not in {error:?}");
            }
        }
        refused(&[ONE, "{}"], &["line 2", "missing field `timestamp`"]);
        refused(&[], &["no request in it"]);
        let late = ONE.replace("1000", "18446744073709551615");
        refused(&[&late, TWO], &["expected milliseconds, and 31 days"]);
        let short = r#"{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1]}"#;
        refused(
            &[short],
            &["line 1", "600 tokens need 2 block ids", "got 1"],
        );
    }
}
