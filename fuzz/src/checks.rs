//! What must hold for any bytes from outside: one function per fuzz target.
//!
//! The targets (fuzz/targets) call these with what the fuzzer makes up, tests/corpus.rs with what
//! is kept in fuzz/corpus. They panic when something does not hold. To look for new inputs:
//!
//! ```text
//! cargo install cargo-fuzz
//! cargo +nightly fuzz run reader target/fuzz/reader fuzz/corpus/reader -- \
//!     -dict=fuzz/json.dict -max_len=8192 -malloc_limit_mb=64 -timeout=5
//! ```
//!
//! An input that broke something goes to fuzz/corpus under the name of the behaviour.

use prefix_router::config::Config;
use prefix_router::hosts::{SLOTS_MAX, canonical, parse_clusters};
use prefix_router::json::{Container, Handler, KEY_BYTES_MAX, Progress, Tokenizer, Visit};
use prefix_router::payload::decode::{
    DETECT_BYTES, DecodeError, Decoder, Encoding, Limits, OUTPUT_BYTES_MAX,
};
use prefix_router::payload::{End, Head, ReadOptions, Reader};
use prefix_router::prefix::{CHECKPOINTS_MAX, Kinds, Prompt};
use prefix_router::usage;
use serde_json::Value;

/// Window sizes that every body is cut into, beside whole.
const CUTS: [usize; 3] = [1, 3, 64];

/// The JSON tokenizer says the same in any cut, says no more than it was given, and says what
/// serde_json says of every body that serde_json accepts.
pub fn json(bytes: &[u8]) {
    let (whole, progress) = tokenize(bytes, bytes.len().max(1));
    assert!(whole.said <= bytes.len(), "more text than there were bytes");
    for cut in CUTS {
        let (cut, cut_progress) = tokenize(bytes, cut);
        assert_eq!(cut_progress, progress);
        assert_eq!(cut.events, whole.events);
    }
    if let Ok(expected) = serde_json::from_slice::<Value>(bytes) {
        assert_eq!(progress, Progress::Done);
        if !whole.long_key {
            let mut events = whole.events.into_iter();
            assert_eq!(rebuild(&mut events), Some(expected));
            assert_eq!(events.next(), None);
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Event {
    Begin(Container),
    End,
    Key(Vec<u8>),
    Text(Vec<u8>),
    Literal(Vec<u8>),
}

#[derive(Default)]
struct Events {
    events: Vec<Event>,
    open: Vec<u8>,
    said: usize,
    long_key: bool,
}

impl Handler for Events {
    fn begin(&mut self, container: Container) -> Visit {
        self.events.push(Event::Begin(container));
        Visit::Into
    }

    fn end(&mut self) {
        self.events.push(Event::End);
    }

    fn key(&mut self, key: &[u8]) {
        assert!(key.len() <= KEY_BYTES_MAX);
        // A key may be longer by the rest of a character that did not fit.
        self.long_key |= key.len() + 4 > KEY_BYTES_MAX;
        self.said += key.len();
        self.events.push(Event::Key(key.to_vec()));
    }

    fn string_begin(&mut self) {
        assert!(self.open.is_empty());
    }

    fn string(&mut self, piece: &[u8]) {
        self.said += piece.len();
        self.open.extend_from_slice(piece);
    }

    fn string_end(&mut self) {
        self.events
            .push(Event::Text(std::mem::take(&mut self.open)));
    }

    fn literal(&mut self, piece: &[u8]) {
        self.said += piece.len();
        self.open.extend_from_slice(piece);
    }

    fn literal_end(&mut self) {
        self.events
            .push(Event::Literal(std::mem::take(&mut self.open)));
    }
}

fn tokenize(bytes: &[u8], cut: usize) -> (Events, Progress) {
    let (mut tokenizer, mut events) = (Tokenizer::default(), Events::default());
    for window in bytes.chunks(cut) {
        tokenizer.feed(window, &mut events);
    }
    let progress = tokenizer.finish(&mut events);
    (events, progress)
}

/// The value that the events tell; of equal keys the last one, as serde_json has it.
fn rebuild(events: &mut impl Iterator<Item = Event>) -> Option<Value> {
    value(events.next()?, events)
}

fn value(first: Event, events: &mut impl Iterator<Item = Event>) -> Option<Value> {
    match first {
        Event::Text(text) => Some(Value::String(String::from_utf8(text).ok()?)),
        Event::Literal(literal) => serde_json::from_slice(&literal).ok(),
        Event::End | Event::Key(_) => None,
        Event::Begin(Container::Array) => {
            let mut items = Vec::new();
            loop {
                match events.next()? {
                    Event::End => return Some(Value::Array(items)),
                    event => items.push(value(event, events)?),
                }
            }
        }
        Event::Begin(Container::Object) => {
            let mut members = serde_json::Map::new();
            loop {
                match events.next()? {
                    Event::End => return Some(Value::Object(members)),
                    Event::Key(key) => {
                        let member = rebuild(events)?;
                        members.insert(String::from_utf8(key).ok()?, member);
                    }
                    _ => return None,
                }
            }
        }
    }
}

/// Reading a body gives the same prompt in any cut, with checkpoints in order and in bounds.
///
/// The first line of the input is `path content-encoding`, the rest is the body.
pub fn reader(bytes: &[u8]) {
    let end = bytes
        .iter()
        .position(|&byte| byte == b'\n')
        .unwrap_or(bytes.len());
    let (line, body) = bytes.split_at(end);
    let body = body.get(1..).unwrap_or_default();
    let mut words = line.splitn(2, |&byte| byte == b' ');
    let head = Head {
        path: words.next().unwrap_or_default(),
        content_type: b"application/json",
        content_encoding: words.next().unwrap_or_default(),
        tenant: None,
    };
    let fixed = ReadOptions {
        prefix_length: Some(16),
        ..ReadOptions::default()
    };
    for options in [ReadOptions::default(), fixed] {
        for end in [End::Whole, End::Cut] {
            let whole = read(&head, &options, body, body.len().max(1), end);
            in_bounds(&whole, body.len() as u64, &options);
            for cut in CUTS {
                assert_eq!(read(&head, &options, body, cut, end), whole);
            }
        }
    }
}

fn read(head: &Head<'_>, options: &ReadOptions, body: &[u8], cut: usize, end: End) -> Prompt {
    let mut reader = Reader::new(head, options);
    for window in body.chunks(cut) {
        reader.feed(window);
    }
    reader.finish(end)
}

fn in_bounds(prompt: &Prompt, body_bytes: u64, options: &ReadOptions) {
    let checkpoints = &prompt.checkpoints;
    assert!(checkpoints.len() <= CHECKPOINTS_MAX);
    assert!(checkpoints.is_sorted_by(|a, b| a.position < b.position));
    assert!(
        checkpoints
            .last()
            .is_some_and(|last| last.kinds.has(Kinds::END))
    );
    let ends = checkpoints
        .iter()
        .filter(|checkpoint| checkpoint.kinds.has(Kinds::END));
    assert_eq!(ends.count(), 1);
    // No image is smaller than the two bytes that it takes to write an empty one, and encoded
    // bodies are longer inside.
    let image_bytes = u64::from(options.image_tokens) * 4;
    let most = Limits::default().output_bytes_max.max(body_bytes) * image_bytes;
    assert!(prompt.bytes <= most, "{} bytes", prompt.bytes);
    assert!(
        prompt
            .model
            .as_ref()
            .is_none_or(|model| model.len() <= 1024)
    );
    assert!(prompt.tokens() >= 1);
}

/// An answer's usage is the same in any cut, and no more is cached than there is.
pub fn usage(bytes: &[u8]) {
    let read = |cut: usize| {
        let mut reader = usage::Reader::new();
        for window in bytes.chunks(cut) {
            reader.feed(window);
        }
        reader.finish()
    };
    let whole = read(bytes.len().max(1));
    for cut in CUTS {
        assert_eq!(read(cut), whole);
    }
    assert!(whole.cached_tokens <= whole.prompt_tokens);
}

/// A decoder gives the same output and error in any cut, within its limits.
///
/// The first byte of the input chooses the encoding, the rest is the body.
pub fn decode(bytes: &[u8]) {
    let Some((&choice, body)) = bytes.split_first() else {
        return;
    };
    let first = body.get(..DETECT_BYTES).unwrap_or(body);
    let encoding = match choice {
        b'g' => Encoding::Gzip,
        b'd' => Encoding::Deflate,
        b'z' => Encoding::Zstd,
        b'b' => Encoding::Brotli,
        _ => Encoding::detect(first, first).unwrap_or(Encoding::Unsupported),
    };
    let limits = Limits {
        input_bytes_max: 64 << 10,
        output_bytes_max: 1 << 20,
        ratio_max: 100,
        ratio_free_bytes: 64 << 10,
        window_bytes_max: 1 << 20,
    };
    let whole = decoded(encoding, limits, body, body.len().max(1));
    for cut in [1, 1021] {
        assert!(decoded(encoding, limits, body, cut) == whole);
    }
    if encoding == Encoding::Unsupported && !body.is_empty() {
        assert_eq!(whole, (Vec::new(), Err(DecodeError::Unsupported)));
    }
}

fn decoded(
    encoding: Encoding,
    limits: Limits,
    body: &[u8],
    cut: usize,
) -> (Vec<u8>, Result<(), DecodeError>) {
    let mut output = Vec::new();
    let mut out = |piece: &[u8]| {
        assert!(piece.len() <= OUTPUT_BYTES_MAX);
        output.extend_from_slice(piece);
    };
    let mut decoder = Decoder::new(encoding, limits);
    let mut result = Ok(());
    for window in body.chunks(cut) {
        result = decoder.feed(window, &mut out);
        if result.is_err() {
            break;
        }
    }
    let end = decoder.finish(&mut out);
    assert!(output.len() as u64 <= limits.output_bytes_max);
    // An error in the middle stays to the end.
    assert!(result.is_ok() || result == end);
    (output, end)
}

/// A config is refused with one short line, or read the same way twice.
pub fn config(bytes: &[u8]) {
    match Config::parse(bytes) {
        Ok(config) => assert!(Config::parse(bytes).is_ok_and(|again| again == config)),
        Err(error) => {
            let line = error.to_string();
            assert!(!line.contains('\n'), "{line}");
            assert!(line.len() <= 4096, "{} bytes", line.len());
        }
    }
}

/// Envoy's cluster list gives hosts with addresses in their one form, or an error.
pub fn hosts(bytes: &[u8]) {
    let found = parse_clusters(bytes, &["engines"]).unwrap_or_default();
    let Some(Ok(hosts)) = found.first() else {
        return;
    };
    assert!(hosts.len() <= SLOTS_MAX, "{} hosts", hosts.len());
    for host in hosts {
        assert_eq!(canonical(&host.address).as_ref(), Some(&host.address));
    }
    let mut addresses: Vec<_> = hosts.iter().map(|host| &host.address).collect();
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses.len(), hosts.len(), "an address came twice");
}
