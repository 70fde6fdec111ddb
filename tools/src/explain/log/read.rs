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
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::explain::ExplainArgs;
use crate::explain::input::Body;
use crate::explain::show;
use crate::print::note;
use crate::workload::trace::{Trace, TraceRequests};
use crate::workload::{Form, Workload as _, body};

/// A line's bytes: the largest body that is held, with its escapes.
const LINE_BYTES_MAX: u64 = 128 * 1024 * 1024;

/// Characters shown of a value that is not what was expected.
const FOUND: usize = 40;

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

/// The fields of a line that has the body in it.
type Fields<'a> = BTreeMap<String, &'a RawValue>;

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
            note!("{name}: {} MB, {} requests", bytes / 1_000_000, lines.read);
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
    let fields: Fields<'_> =
        serde_json::from_slice(text).map_err(|_| "expected a JSON object".to_owned())?;
    let Some(body) = fields.get("body").filter(|body| body.get() != "null") else {
        // The line is the body; what its fields mean is the body's affair.
        return Ok(Entry {
            body: Body {
                name: String::new(),
                path: args.path.clone(),
                bytes: text.to_vec(),
                headers: Vec::new(),
            },
            time: None,
            output_tokens: None,
            duration: None,
        });
    };
    // A body that was written down as a text.
    let bytes = match serde_json::from_str::<String>(body.get()) {
        Ok(body) => body.into_bytes(),
        Err(_) => body.get().as_bytes().to_vec(),
    };
    let headers: Option<BTreeMap<String, String>> = field(&fields, "headers", "names and values")?;
    let headers = headers.unwrap_or_default().into_iter();
    let output_tokens: Option<u32> = field(&fields, "output_tokens", "a number of tokens")?;
    Ok(Entry {
        body: Body {
            name: String::new(),
            path: field(&fields, "path", "a text")?.unwrap_or_else(|| args.path.clone()),
            bytes,
            headers: headers
                .map(|(name, value)| (name.to_ascii_lowercase(), value))
                .collect(),
        },
        time: seconds(&fields, "time")?,
        output_tokens: output_tokens.filter(|tokens| *tokens > 0),
        duration: seconds(&fields, "duration")?,
    })
}

fn seconds(fields: &Fields<'_>, name: &str) -> Result<Option<f64>, String> {
    let expected = "seconds as a number of 0 or more";
    match field::<f64>(fields, name, expected)? {
        Some(value) if !value.is_finite() || value < 0.0 => Err(wrong(fields, name, expected)),
        value => Ok(value),
    }
}

fn field<T: DeserializeOwned>(
    fields: &Fields<'_>,
    name: &str,
    expected: &str,
) -> Result<Option<T>, String> {
    let Some(raw) = fields.get(name) else {
        return Ok(None);
    };
    serde_json::from_str(raw.get()).map_err(|_| wrong(fields, name, expected))
}

fn wrong(fields: &Fields<'_>, name: &str, expected: &str) -> String {
    let found = fields.get(name).map_or("", |raw| raw.get());
    // Headers may hold what nobody else is to see.
    let found = match name {
        "headers" => "something else".to_owned(),
        _ => show::cut(found, FOUND),
    };
    format!("\"{name}\": expected {expected}, got {found}")
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
