//! What keeps prompts from sharing more: found by comparing requests that otherwise agree.
//!
//! Guarantee: only what was seen to differ between two requests of the log is named. Not here: how
//! much is shared as it is (sharing.rs).

use std::collections::{BTreeMap, BTreeSet};

use prefix_router::prefix::Part;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::ready::Sampled;
use crate::explain::compare::differing;
use crate::explain::pieces::{Kind, Piece};
use crate::explain::show;

/// Prompts agree if so many bytes are the same behind what differs: 256 tokens, the first rung.
const AGREE_BYTES: u64 = 1024;

/// What differs is no longer than this: longer, it is another text.
const VALUE_BYTES_MAX: usize = 160;

/// Part of the compared requests below which a culprit is not worth a line.
const SHARE_MIN: f64 = 0.1;

/// A text that differs spoils little while many requests have the same one: applications with a
/// beginning of their own and a common end are no fault. Distinct values for each request that has
/// one, at least.
const VALUES_MIN: f64 = 0.25;

/// Characters shown of a value.
const EXCERPT: usize = 40;

/// What differs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub(super) enum Cause {
    /// A short text inside a message.
    Text {
        /// The message's number, from 1, and its role.
        message: usize,
        role: String,
        /// Like a time, an id, a number.
        looks_like: &'static str,
    },
    /// Something mixed into the key: a salt, an adapter.
    Seed { name: String },
    /// The same tools in another order.
    ToolsOrder,
    /// The same tools, with the members of their schemas in another order.
    ToolsMembers,
}

/// One culprit.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Spoiler {
    #[serde(flatten)]
    pub cause: Cause,
    /// Bytes of its message before it, at least and at most.
    pub offset_min: u64,
    pub offset_max: u64,
    /// Requests of those compared in which it differs.
    pub requests: u64,
    pub compared: u64,
    /// Tokens behind it that are the same and cannot be used again, in the mean.
    pub lost_tokens: u64,
    /// Two of its values.
    pub examples: Vec<String>,
}

/// One pair of requests that would share more without one thing.
struct Finding {
    cause: Cause,
    offset: u64,
    lost_bytes: u64,
    values: [String; 2],
}

/// What the pairs with one cause have shown.
struct Gathered {
    spoiler: Spoiler,
    requests: BTreeSet<usize>,
    values: BTreeSet<String>,
    pairs: u64,
}

impl Gathered {
    fn is_worth_a_line(&self) -> bool {
        let requests = self.requests.len() as f64;
        let is_rare = requests < SHARE_MIN * self.spoiler.compared as f64;
        let is_text = matches!(self.spoiler.cause, Cause::Text { .. });
        let is_common = is_text && (self.values.len() as f64) < VALUES_MIN * requests;
        !is_rare && !is_common
    }
}

pub(super) fn spoilers(sample: &[Sampled], with_text: bool) -> Vec<Spoiler> {
    let mut found: BTreeMap<Cause, Gathered> = BTreeMap::new();
    for (first, one) in sample.iter().enumerate() {
        for (second, other) in sample.iter().enumerate().skip(first + 1) {
            let Some(finding) = compare(one, other) else {
                continue;
            };
            let gathered = found
                .entry(finding.cause.clone())
                .or_insert_with(|| begin(&finding, sample.len(), with_text));
            let spoiler = &mut gathered.spoiler;
            spoiler.offset_min = spoiler.offset_min.min(finding.offset);
            spoiler.offset_max = spoiler.offset_max.max(finding.offset);
            spoiler.lost_tokens += finding.lost_bytes / 4;
            gathered.requests.extend([first, second]);
            gathered.values.extend(finding.values);
            gathered.pairs += 1;
        }
    }
    let mut spoilers: Vec<Spoiler> = Vec::new();
    for gathered in found.into_values().filter(Gathered::is_worth_a_line) {
        let mut spoiler = gathered.spoiler;
        spoiler.requests = gathered.requests.len() as u64;
        spoiler.lost_tokens /= gathered.pairs.max(1);
        spoiler.examples.retain(|value| !value.is_empty());
        spoilers.push(spoiler);
    }
    let weight = |spoiler: &Spoiler| spoiler.requests * spoiler.lost_tokens;
    spoilers.sort_by_key(|spoiler| std::cmp::Reverse(weight(spoiler)));
    spoilers
}

fn begin(finding: &Finding, compared: usize, with_text: bool) -> Gathered {
    let examples = match with_text {
        true => finding.values.to_vec(),
        false => Vec::new(),
    };
    Gathered {
        spoiler: Spoiler {
            cause: finding.cause.clone(),
            offset_min: u64::MAX,
            offset_max: 0,
            requests: 0,
            compared: compared as u64,
            lost_tokens: 0,
            examples,
        },
        requests: BTreeSet::new(),
        values: BTreeSet::new(),
        pairs: 0,
    }
}

fn compare(one: &Sampled, other: &Sampled) -> Option<Finding> {
    let seeds = differing(&one.seeds, &other.seeds);
    if seeds.iter().any(|name| name == "model") {
        return None;
    }
    if let Some(cause) = same_tools(one, other) {
        let shared = agreement(&text_only(&one.pieces), &text_only(&other.pieces));
        let tools = one.pieces.iter().filter(|piece| piece.kind == Kind::Tools);
        let lost_bytes = shared + tools.map(|piece| piece.len).sum::<u64>();
        return (lost_bytes >= AGREE_BYTES).then(|| Finding {
            cause,
            offset: 0,
            lost_bytes,
            values: Default::default(),
        });
    }
    if let [name] = seeds.as_slice() {
        let lost_bytes = agreement(&refs(&one.pieces), &refs(&other.pieces));
        return (name != "tools" && lost_bytes >= AGREE_BYTES).then(|| Finding {
            cause: Cause::Seed { name: name.clone() },
            offset: 0,
            lost_bytes,
            values: Default::default(),
        });
    }
    if !seeds.is_empty() {
        return None;
    }
    inside_text(&one.pieces, &other.pieces)
}

fn refs(pieces: &[Piece]) -> Vec<&Piece> {
    pieces.iter().collect()
}

fn text_only(pieces: &[Piece]) -> Vec<&Piece> {
    pieces
        .iter()
        .filter(|piece| piece.kind != Kind::Tools)
        .collect()
}

/// Bytes that two rows of pieces have in common from their start.
fn agreement(one: &[&Piece], other: &[&Piece]) -> u64 {
    let mut shared = 0;
    for (a, b) in one.iter().zip(other) {
        if a.kind != b.kind || a.hash != b.hash || a.bytes != b.bytes {
            return shared + equal(&a.bytes, &b.bytes) as u64;
        }
        shared += a.len;
    }
    shared
}

fn equal(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Whether two requests have the same tools, written otherwise.
fn same_tools(one: &Sampled, other: &Sampled) -> Option<Cause> {
    let (a, b) = (one.tools.as_ref()?, other.tools.as_ref()?);
    if a.get() == b.get() {
        return None;
    }
    let list = |raw: &RawValue| serde_json::from_str::<Vec<Box<RawValue>>>(raw.get()).ok();
    let (a, b) = (list(a)?, list(b)?);
    let texts = |tools: &[Box<RawValue>]| {
        let mut texts: Vec<String> = tools.iter().map(|tool| tool.get().to_owned()).collect();
        texts.sort_unstable();
        texts
    };
    if texts(&a) == texts(&b) {
        return Some(Cause::ToolsOrder);
    }
    // Values know no order of members.
    let values = |tools: &[Box<RawValue>]| {
        let values = tools.iter().map(|tool| serde_json::from_str(tool.get()));
        values.collect::<Result<Vec<Value>, _>>().ok()
    };
    let compact = |tools: &[Box<RawValue>]| -> Vec<String> {
        tools
            .iter()
            .map(|tool| tool.get().split_whitespace().collect())
            .collect()
    };
    (values(&a)? == values(&b)? && compact(&a) != compact(&b)).then_some(Cause::ToolsMembers)
}

/// A short text that differs, with much that agrees behind it.
fn inside_text(one: &[Piece], other: &[Piece]) -> Option<Finding> {
    let place = one
        .iter()
        .zip(other)
        .position(|(a, b)| a.bytes != b.bytes || a.hash != b.hash || a.kind != b.kind)?;
    let (a, b) = (one.get(place)?, other.get(place)?);
    let is_text = |piece: &Piece| matches!(piece.kind, Kind::Part(Part::Text | Part::Raw));
    if !is_text(a) || !is_text(b) {
        return None;
    }
    let before = equal(&a.bytes, &b.bytes);
    let rest =
        |piece: &Piece| -> Vec<u8> { piece.bytes.iter().skip(before).rev().copied().collect() };
    let behind = equal(&rest(a), &rest(b));
    let middle = |piece: &Piece| piece.bytes.len() - before - behind;
    if middle(a).max(middle(b)) > VALUE_BYTES_MAX {
        return None;
    }
    let following =
        |pieces: &'_ [Piece]| pieces.iter().skip(place + 1).cloned().collect::<Vec<_>>();
    let (next_a, next_b) = (following(one), following(other));
    let lost_bytes = behind as u64 + agreement(&refs(&next_a), &refs(&next_b));
    if lost_bytes < AGREE_BYTES {
        return None;
    }
    let (from, value_a) = value(&a.bytes, before, behind);
    let (_, value_b) = value(&b.bytes, before, behind);
    let looks_like = looks_like(&value_a, &value_b);
    Some(Finding {
        cause: Cause::Text {
            message: a.message,
            role: a.role.clone(),
            looks_like,
        },
        offset: from as u64,
        lost_bytes,
        values: [value_a, value_b]
            .map(|value| show::cut(&show::readable(value.as_bytes()), EXCERPT)),
    })
}

/// The words that hold what differs, and where they begin. A date in front of a time belongs to it.
fn value(bytes: &[u8], before: usize, behind: usize) -> (usize, String) {
    let is_space = |at: usize| bytes.get(at).is_none_or(u8::is_ascii_whitespace);
    let mut from = before;
    while from > 0 && before - from < VALUE_BYTES_MAX && !is_space(from - 1) {
        from -= 1;
    }
    let mut date = from.saturating_sub(1);
    while date > 0 && !is_space(date - 1) && from - date < VALUE_BYTES_MAX {
        date -= 1;
    }
    let word = bytes.get(date..from).unwrap_or_default();
    let digits = word.iter().filter(|byte| byte.is_ascii_digit()).count();
    let only = |byte: &u8| byte.is_ascii_digit() || b"-/.,:T ".contains(byte);
    if digits >= 4 && word.iter().all(only) {
        from = date;
    }
    let mut to = bytes.len() - behind;
    let end = to + VALUE_BYTES_MAX;
    while to < bytes.len() && to < end && !is_space(to) {
        to += 1;
    }
    let text = bytes.get(from..to).unwrap_or_default();
    (from, String::from_utf8_lossy(text).into_owned())
}

/// What two values of a changing text look like.
fn looks_like(one: &str, other: &str) -> &'static str {
    let kinds = [one, other].map(kind);
    match kinds {
        [a, b] if a == b => a,
        _ => "a text",
    }
}

fn kind(value: &str) -> &'static str {
    let value = value.trim_matches(|letter: char| !letter.is_alphanumeric());
    let digits = value.bytes().filter(u8::is_ascii_digit).count();
    let shape: String = value
        .chars()
        .map(|letter| if letter.is_ascii_digit() { '0' } else { letter })
        .collect();
    let has = |part: &str| shape.contains(part);
    let hex = value.bytes().filter(u8::is_ascii_hexdigit).count();
    let is_epoch = digits == value.len() && [10, 13].contains(&digits) && value.starts_with('1');
    if is_epoch || has("0000-00-00") || has("00:00") || has("00/00/00") || has("00.00.00") {
        "a date or time"
    } else if value.len() >= 36 && hex >= 32 && value.matches('-').count() == 4 {
        "a random id"
    } else if digits == value.len() && digits > 0 {
        "a number"
    } else if value.len() >= 12 && digits >= 2 && !value.contains(' ') {
        "a random id"
    } else {
        "a text"
    }
}
