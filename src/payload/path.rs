//! A request's path → the families that its body may belong to.
//!
//! Guarantee: query, trailing slash, doubled slashes and any prefix are tolerated; the longest
//! ending wins. Not here: bodies.

use memchr::memchr;

use super::{FAMILIES, NATIVE};

/// Segments of a path that are looked at: the longest ending has five.
const SEGMENTS_MAX: usize = 6;

/// What a path says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// One bit a family.
    pub(super) families: u32,
    /// Whether JSON pointers say where the prompt lies.
    pub(super) native: bool,
    /// The model, where it is part of the path.
    pub(super) model: Option<Vec<u8>>,
    /// Whether the path asks for a streamed answer.
    pub(super) streams: bool,
    /// Whether a cache helps what may come.
    pub(super) affinity: bool,
}

/// The families of a path; all that a shape can tell, if it says nothing.
pub(super) fn find(path: &[u8]) -> Found {
    let path = path
        .split(|byte| matches!(byte, b'?' | b'#'))
        .next()
        .unwrap_or_default();
    let mut segments = [&[][..]; SEGMENTS_MAX];
    let from_end = path
        .rsplit(|&byte| byte == b'/')
        .filter(|segment| !segment.is_empty());
    for (place, segment) in segments.iter_mut().zip(from_end) {
        *place = segment;
    }
    let last = segments.first().copied().unwrap_or_default();
    let method = last.contains(&b':');
    let mut found = Found::default();
    let mut length = 0;
    for (index, family) in FAMILIES.iter().enumerate() {
        for ending in family
            .paths
            .iter()
            .filter(|ending| may_end(last, method, ending))
        {
            let Some((segments, model)) = matches(&segments, ending) else {
                continue;
            };
            if segments > length {
                found = Found::default();
                length = segments;
            }
            if segments == length {
                found.families |= 1 << index;
                found.model = found.model.or(model);
            }
        }
    }
    let mut only = FAMILIES
        .iter()
        .enumerate()
        .filter(|(index, _)| found.families >> index & 1 == 1);
    if only.all(|(_, family)| family.any_shape) {
        for (index, family) in FAMILIES.iter().enumerate() {
            if family.by_shape {
                found.families |= 1 << index;
            }
        }
    }
    found.native = found.families >> NATIVE & 1 == 1;
    found.affinity = (0..)
        .zip(FAMILIES)
        .any(|(index, family)| found.families >> index & 1 == 1 && family.affinity);
    found.streams = streams(last);
    found
}

/// Whether a path's last segment asks for a streamed answer (`generate_stream`,
/// `converse-stream`, `model:streamGenerateContent`).
fn streams(segment: &[u8]) -> bool {
    segment
        .windows(STREAM.len())
        .any(|window| window.eq_ignore_ascii_case(STREAM))
}

const STREAM: &[u8] = b"stream";

/// A cheap test that passes over most endings: the last segments must be equal, or both have a
/// colon, which sets a method apart from the model.
fn may_end(last: &[u8], method: bool, ending: &str) -> bool {
    ending.as_bytes().ends_with(last) || (method && ending.contains(':'))
}

/// Whether a path, as segments from its end, has an ending: its length, and the model in it.
fn matches(segments: &[&[u8]], ending: &str) -> Option<(usize, Option<Vec<u8>>)> {
    let mut model = None;
    let mut length = 0;
    for (at, pattern) in ending.rsplit('/').enumerate() {
        let segment = segments.get(at)?;
        length = at + 1;
        if *segment == pattern.as_bytes() {
            continue;
        }
        // Most endings differ in their last segment: no search for a placeholder then.
        let opening = memchr(b'{', pattern.as_bytes())?;
        let (before, placeholder) = pattern.split_at_checked(opening)?;
        let Some(after) = placeholder.strip_prefix("{model}") else {
            continue;
        };
        let name = segment.strip_prefix(before.as_bytes())?;
        model = Some(decode(name.strip_suffix(after.as_bytes())?));
    }
    Some((length, model))
}

/// Percent-decodes a segment, tolerantly.
fn decode(segment: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(segment.len());
    let mut rest = segment;
    while let Some((&byte, tail)) = rest.split_first() {
        let escaped = match tail {
            [high, low, ..] if byte == b'%' => hex(*high).zip(hex(*low)),
            _ => None,
        };
        match escaped {
            Some((high, low)) => {
                decoded.push(high << 4 | low);
                rest = tail.get(2..).unwrap_or_default();
            }
            None => {
                decoded.push(byte);
                rest = tail;
            }
        }
    }
    decoded
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|digit| digit as u8)
}
