//! A request's path → the families that its body may belong to.
//!
//! Guarantee: query, trailing slash, doubled slashes and any prefix are tolerated; the longest
//! ending wins. Not here: bodies.

use super::{FAMILIES, Family};

/// Segments of a path that are looked at: the longest ending has five.
const SEGMENTS_MAX: usize = 6;

/// What a path says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// One bit a family.
    pub(super) families: u32,
    /// The model, where it is part of the path.
    pub(super) model: Option<Vec<u8>>,
}

/// The families of a path; all that a shape can tell, if it says nothing.
pub(super) fn find(path: &[u8]) -> Found {
    let path = path
        .split(|byte| matches!(byte, b'?' | b'#'))
        .next()
        .unwrap_or_default();
    let segments: Vec<&[u8]> = path
        .rsplit(|&byte| byte == b'/')
        .filter(|segment| !segment.is_empty())
        .take(SEGMENTS_MAX)
        .collect();
    let mut found = Found::default();
    let mut length = 0;
    for (index, family) in FAMILIES.iter().enumerate() {
        for ending in family.paths {
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
    let any_shape = |family: &&Family| family.any_shape;
    let only = FAMILIES
        .iter()
        .enumerate()
        .filter(|(index, _)| found.families >> index & 1 == 1);
    if only.clone().all(|(_, family)| any_shape(family)) {
        for (index, family) in FAMILIES.iter().enumerate() {
            if family.by_shape {
                found.families |= 1 << index;
            }
        }
    }
    found
}

/// Whether a path asks for a streamed answer (`/generate_stream`, `:streamGenerateContent`).
pub(super) fn streams(path: &[u8]) -> bool {
    let path = path
        .split(|byte| matches!(byte, b'?' | b'#'))
        .next()
        .unwrap_or_default();
    let last = path
        .rsplit(|&byte| byte == b'/')
        .find(|segment| !segment.is_empty());
    last.is_some_and(|segment| {
        segment
            .to_ascii_lowercase()
            .windows(6)
            .any(|part| part == b"stream")
    })
}

/// Whether a path, as segments from its end, has an ending: its length, and the model in it.
fn matches(segments: &[&[u8]], ending: &str) -> Option<(usize, Option<Vec<u8>>)> {
    let mut model = None;
    let mut length = 0;
    for (at, pattern) in ending.rsplit('/').enumerate() {
        let segment = segments.get(at)?;
        match pattern.split_once("{model}") {
            None if *segment == pattern.as_bytes() => {}
            None if pattern.starts_with('{') => {}
            None => return None,
            Some((before, after)) => {
                let name = segment.strip_prefix(before.as_bytes())?;
                let name = name.strip_suffix(after.as_bytes())?;
                model = Some(decode(name));
            }
        }
        length = at + 1;
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
