//! A log's lines → requests, one at a time.
//!
//! Guarantee: no more than one line is in memory, whatever the log's size. Not here: what is kept
//! of them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read as _};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::explain::ExplainArgs;
use crate::explain::input::Body;
use crate::workload::trace::{Trace, TraceRequests};
use crate::workload::{Form, Workload as _, body};

/// A line's bytes: the largest body that is held, with its escapes.
const LINE_BYTES_MAX: u64 = 128 * 1024 * 1024;

/// How often progress is told.
const PROGRESS: Duration = Duration::from_secs(2);

/// One request of a log.
pub(super) struct Entry {
    pub body: Body,
    /// Seconds, from whatever the log counts.
    pub time: Option<f64>,
    pub output_tokens: Option<u32>,
    /// Seconds that it took.
    pub duration: Option<f64>,
}

/// What became of the lines.
#[derive(Clone, Debug, Default)]
pub(super) struct Lines {
    pub read: u64,
    /// Not a JSON object, or with a field of another type: passed over.
    pub unreadable: u64,
    /// The first of these, and what is wrong with it.
    pub first_unreadable: Option<String>,
    /// Whether reading stopped before the end.
    pub stopped: bool,
}

/// Whether a line is an object with the body in it.
#[derive(Deserialize)]
struct Wrapped<'a> {
    #[serde(borrow)]
    body: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    body: Option<&'a RawValue>,
    path: Option<String>,
    headers: Option<BTreeMap<String, String>>,
    time: Option<f64>,
    output_tokens: Option<u32>,
    duration: Option<f64>,
}

/// A line of a trace in Mooncake's format.
#[derive(Deserialize)]
#[expect(dead_code, reason = "only whether the fields are there is of interest")]
struct TraceLine {
    timestamp: u64,
    input_length: u32,
    hash_ids: Vec<u64>,
}

/// Hands out every request of a log until `each` has enough and says false.
pub(super) fn each(
    file: &Path,
    args: &ExplainArgs,
    mut each: impl FnMut(Entry) -> bool,
) -> Result<Lines> {
    let name = file.display();
    let mut input: Box<dyn BufRead> = if file.as_os_str() == "-" {
        Box::new(std::io::stdin().lock())
    } else {
        let opened = File::open(file).with_context(|| format!("--log {name}: cannot be opened"))?;
        Box::new(BufReader::with_capacity(1 << 20, opened))
    };
    let mut lines = Lines::default();
    let mut line = Vec::new();
    let (mut bytes, mut number, mut told) = (0, 0_u64, Instant::now());
    loop {
        line.clear();
        let count = (&mut input)
            .take(LINE_BYTES_MAX)
            .read_until(b'\n', &mut line)
            .with_context(|| format!("--log {name}: cannot be read"))?;
        if count == 0 {
            break;
        }
        bytes += count as u64;
        number += 1;
        let text = line.trim_ascii();
        if text.is_empty() {
            continue;
        }
        if lines.read == 0 && file.as_os_str() != "-" && is_trace(text) {
            return trace(file, each);
        }
        lines.read += 1;
        match entry(text, args) {
            Err(wrong) => {
                lines.unreadable += 1;
                let told = || format!("line {number}: {wrong}");
                lines.first_unreadable.get_or_insert_with(told);
            }
            Ok(entry) => {
                if !each(entry) {
                    lines.stopped = true;
                    break;
                }
            }
        }
        if told.elapsed() > PROGRESS {
            told = Instant::now();
            eprintln!("{name}: {} MB, {} requests", bytes / 1_000_000, lines.read);
        }
    }
    anyhow::ensure!(
        lines.read > lines.unreadable,
        "--log {name}: no line of it can be read; {}",
        lines.first_unreadable.as_deref().unwrap_or("it is empty")
    );
    Ok(lines)
}

fn is_trace(text: &[u8]) -> bool {
    serde_json::from_slice::<TraceLine>(text).is_ok()
}

fn entry(text: &[u8], args: &ExplainArgs) -> Result<Entry, String> {
    let Ok(Wrapped { body }) = serde_json::from_slice(text) else {
        return Err("expected a JSON object".into());
    };
    let line: Line<'_> = match body {
        Some(_) => serde_json::from_slice(text).map_err(|wrong| wrong.to_string())?,
        // The line is the body; what its fields mean is the body's affair.
        None => Line::default(),
    };
    let bytes = match line.body {
        None => text.to_vec(),
        // A body that was written down as a text.
        Some(raw) => match serde_json::from_str::<String>(raw.get()) {
            Ok(body) => body.into_bytes(),
            Err(_) => raw.get().as_bytes().to_vec(),
        },
    };
    let seconds = |value: Option<f64>| value.filter(|value| value.is_finite() && *value >= 0.0);
    let headers = line.headers.unwrap_or_default();
    Ok(Entry {
        body: Body {
            name: String::new(),
            path: line.path.unwrap_or_else(|| args.path.clone()),
            bytes,
            headers: headers
                .into_iter()
                .map(|(name, value)| (name.to_ascii_lowercase(), value))
                .collect(),
        },
        time: seconds(line.time),
        output_tokens: line.output_tokens.filter(|tokens| *tokens > 0),
        duration: seconds(line.duration),
    })
}

/// The texts of a trace's blocks are made up: equal ids, equal text.
const TRACE_SEED: u64 = 1;

fn trace(file: &Path, mut each: impl FnMut(Entry) -> bool) -> Result<Lines> {
    let trace = Trace::read(file, None, TRACE_SEED)?;
    let mut requests = TraceRequests::new(trace);
    let mut lines = Lines::default();
    let ask = body::Ask {
        form: Form::Chat,
        model: "model",
        stream: true,
    };
    while let Some(request) = requests.next() {
        lines.read += 1;
        let entry = Entry {
            body: Body {
                name: String::new(),
                path: ask.form.path().into(),
                bytes: body::render(&request, &ask),
                headers: Vec::new(),
            },
            time: Some(request.at.as_secs_f64()),
            output_tokens: Some(request.output_tokens),
            duration: None,
        };
        if !each(entry) {
            lines.stopped = true;
            break;
        }
    }
    Ok(lines)
}
