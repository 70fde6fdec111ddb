//! Two requests: the first byte of their prompts that differs, and whether they meet on a host.
//!
//! Guarantee: what is compared is what is hashed, so it agrees with the checkpoints. Not here: the
//! parts of one (describe.rs).

use anyhow::Result;
use prefix_router::prefix::Prompt;
use serde::Serialize;

use super::gateway::Gateway;
use super::input::{Body, Setup};
use super::pieces::{self, Kind, Piece};
use super::show::{self, End, Page, count, number};
use super::{ExplainArgs, log};

/// Characters of an excerpt, and how many of them stand before the difference.
const EXCERPT: usize = 64;
const BEFORE: usize = 24;
/// Columns in front of an excerpt: at most 4 of margin, and 8 that say whose it is.
const IN_FRONT: usize = 12;

#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    pub left: String,
    pub right: String,
    /// What is mixed into the keys and differs: then they share no key at all.
    pub seeds: Vec<String>,
    /// Where the prompts differ first; none if they are the same.
    pub difference: Option<Difference>,
    /// Bytes and tokens of both prompts before that, and of each prompt.
    pub shared_bytes: u64,
    pub shared_tokens: u64,
    pub left_tokens: u64,
    pub right_tokens: u64,
    /// The deepest checkpoint with the same hash in both, in bytes; none if there is none.
    pub shared_checkpoint: Option<u64>,
    pub left_key: Option<String>,
    pub right_key: Option<String>,
    pub same_key: bool,
    pub left_home: Option<String>,
    pub right_home: Option<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Difference {
    /// In which part: message number and name, of either side.
    pub part: String,
    /// Bytes of that part before it.
    pub offset: u64,
    /// What differs, in words.
    pub what: String,
    pub left: String,
    pub right: String,
}

pub(super) fn compare(
    args: &ExplainArgs,
    setup: &Setup,
    left: &Body,
    right: &Body,
) -> Result<Comparison> {
    let (a, b) = (setup.explain(left), setup.explain(right));
    let (first, second) = (pieces::of(&a), pieces::of(&b));
    let found = first_difference(&first, &second, !args.no_text);
    let shared_bytes = match &found {
        Some((position, _)) => *position,
        None => a.prompt.bytes.min(b.prompt.bytes),
    };
    let gateway = Gateway::new(&setup.pool, &setup.hosts, &args.loads)?;
    if let Some(file) = &args.log {
        log::play(file, args, setup, &gateway)?;
    }
    for _ in 0..args.seen {
        gateway.play(&a.prompt);
        gateway.play(&b.prompt);
    }
    let (to_left, to_right) = (gateway.look(&a.prompt), gateway.look(&b.prompt));
    let key = |route: &Option<super::gateway::Route>| route.as_ref().map(|route| route.key.clone());
    let home = |route: &Option<super::gateway::Route>| {
        let home = route.as_ref().and_then(|route| route.hosts.first());
        home.map(|host| host.host.clone())
    };
    Ok(Comparison {
        left: left.name.clone(),
        right: right.name.clone(),
        seeds: differing(&a.seeds, &b.seeds),
        difference: found.map(|(_, difference)| difference),
        shared_bytes,
        shared_tokens: pieces::tokens(shared_bytes),
        left_tokens: a.prompt.tokens(),
        right_tokens: b.prompt.tokens(),
        shared_checkpoint: shared_checkpoint(&a.prompt, &b.prompt),
        same_key: to_left.is_some() && key(&to_left) == key(&to_right),
        left_key: key(&to_left),
        right_key: key(&to_right),
        left_home: home(&to_left),
        right_home: home(&to_right),
    })
}

/// The names of seeds that only one side has, or that differ.
pub(super) fn differing(left: &[(String, u64)], right: &[(String, u64)]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for (one, other) in [(left, right), (right, left)] {
        for seed in one.iter().filter(|seed| !other.contains(seed)) {
            if !names.contains(&seed.0) {
                names.push(seed.0.clone());
            }
        }
    }
    names
}

fn shared_checkpoint(left: &Prompt, right: &Prompt) -> Option<u64> {
    let meets = |at: &&prefix_router::prefix::Checkpoint| {
        let key = left.key(at);
        right
            .checkpoints
            .iter()
            .any(|other| right.key(other) == key)
    };
    let deepest = left.checkpoints.iter().rev().find(meets);
    deepest.map(|at| at.position)
}

/// The first place where two rows of pieces differ: bytes before it, and what it is.
pub(super) fn first_difference(
    left: &[Piece],
    right: &[Piece],
    with_text: bool,
) -> Option<(u64, Difference)> {
    let longest = left.len().max(right.len());
    for place in 0..longest {
        let (a, b) = (left.get(place), right.get(place));
        let (Some(a), Some(b)) = (a, b) else {
            let more = a.or(b)?;
            let side = if a.is_some() { "first" } else { "second" };
            let what = format!("only the {side} goes on");
            return Some((more.from, difference(a, b, 0, what, with_text)));
        };
        if let Some((at, what)) = differs(a, b) {
            return Some((
                a.from + at,
                difference(Some(a), Some(b), at, what, with_text),
            ));
        }
    }
    None
}

/// Where in two pieces the first difference is, and what it is.
fn differs(a: &Piece, b: &Piece) -> Option<(u64, String)> {
    if a.kind != b.kind || a.message != b.message {
        return Some((
            0,
            format!("{} on one side, {} on the other", a.name(), b.name()),
        ));
    }
    if a.hash != b.hash {
        return Some((0, "another content, known by its hash only".into()));
    }
    let equal = a.bytes.iter().zip(&b.bytes).take_while(|(a, b)| a == b);
    let equal = equal.count();
    if equal < a.bytes.len().max(b.bytes.len()) {
        let ends = equal == a.bytes.len() || equal == b.bytes.len();
        let what = if ends {
            "one goes on, the other ends"
        } else {
            "another text"
        };
        return Some((equal as u64, what.into()));
    }
    if a.label != b.label {
        let what = if a.label.is_some() && b.label.is_some() {
            "another role or name of the message"
        } else {
            "the message goes on in one of them"
        };
        return Some((a.len, what.into()));
    }
    None
}

fn difference(
    a: Option<&Piece>,
    b: Option<&Piece>,
    at: u64,
    what: String,
    with_text: bool,
) -> Difference {
    let part = |piece: &Piece| match piece.kind {
        Kind::Tools => "the tools".to_owned(),
        _ => format!("message {}, {}", piece.message, piece.name()),
    };
    let excerpt = |piece: Option<&Piece>| match piece {
        Some(piece) if with_text => {
            let from = (at as usize).saturating_sub(BEFORE);
            let from = char_start(&piece.bytes, from);
            let to = at as usize;
            let before = piece.bytes.get(from..to).unwrap_or_default();
            format!(
                "{}|{}",
                show::readable_inside(before),
                piece.excerpt(to, EXCERPT - BEFORE)
            )
        }
        _ => String::new(),
    };
    Difference {
        part: a.or(b).map_or_else(String::new, part),
        offset: at,
        what,
        left: excerpt(a),
        right: excerpt(b),
    }
}

/// The first byte of a character at or behind `from`.
fn char_start(bytes: &[u8], from: usize) -> usize {
    let rest = bytes.get(from..).unwrap_or_default();
    let skipped = rest.iter().take_while(|&&byte| byte & 0xc0 == 0x80);
    from + skipped.count().min(3)
}

pub(super) fn show(told: &Comparison, width: usize) -> String {
    let mut page = Page::new(width);
    page.head(&format!("First:  {}", told.left));
    page.line(&format!("Second: {}", told.right));
    match &told.difference {
        None => page.head("The prompts are the same"),
        Some(difference) => {
            page.head("The first difference of their prompts");
            page.say(&format!(
                "In {}, behind {} of it: {}.",
                difference.part,
                count(difference.offset, "byte"),
                difference.what
            ));
            for (side, text) in [("first", &difference.left), ("second", &difference.right)] {
                if !text.is_empty() {
                    let text = around(text, width.saturating_sub(IN_FRONT));
                    page.row(&[format!("{side:<7} ")], End::Excerpt(&text));
                }
            }
            if !difference.left.is_empty() || !difference.right.is_empty() {
                page.say("The mark | stands where they part.");
            }
        }
    }
    page.head("What they share");
    page.say(&format!(
        "{} from the start, about {}, of {} and {} tokens.",
        count(told.shared_bytes, "byte"),
        count(told.shared_tokens, "token"),
        number(told.left_tokens),
        number(told.right_tokens)
    ));
    if !told.seeds.is_empty() {
        page.say(&format!(
            "But they differ in {}, which is mixed into every key: they never count as alike.",
            told.seeds.join(", ")
        ));
    } else if told.difference.is_some() {
        page.say(&match told.shared_checkpoint {
            Some(bytes) => format!(
                "The last checkpoint (a place where the filter compares prompts) that is the same \
                 in both is behind {}, about {}.",
                count(bytes, "byte"),
                count(pieces::tokens(bytes), "token")
            ),
            None => "They differ before the first checkpoint (a place where the filter compares \
                     prompts)."
                .into(),
        });
    }
    where_to(&mut page, told);
    page.text
}

/// An excerpt that fits, its mark in the middle if not all of it does.
fn around(excerpt: &str, room: usize) -> String {
    let mark = excerpt.chars().take_while(|letter| *letter != '|').count();
    let skipped = match excerpt.chars().count() > room {
        true => mark.saturating_sub(room / 2),
        false => 0,
    };
    show::cut(&excerpt.chars().skip(skipped).collect::<String>(), room)
}

fn where_to(page: &mut Page, told: &Comparison) {
    page.head("Where they go");
    let key = |key: &Option<String>| key.clone().unwrap_or_else(|| "none".into());
    if told.same_key {
        page.say(&format!(
            "Both have the key {} (the part of a prompt that chooses its host), so they have the \
             same home.",
            key(&told.left_key)
        ));
    } else {
        page.say(&format!(
            "Their keys (the part of a prompt that chooses its host) differ: {} and {}.",
            key(&told.left_key),
            key(&told.right_key)
        ));
    }
    match (&told.left_home, &told.right_home) {
        (Some(left), Some(right)) if told.same_key => {
            debug_assert_eq!(left, right);
            page.say(&format!("It is {left}."));
        }
        (Some(left), Some(right)) if left == right => {
            page.say(&format!("Both keys happen to have the home {left}."));
        }
        (Some(left), Some(right)) => page.say(&format!("Their homes are {left} and {right}.")),
        _ => page.say("Name the hosts with --hosts to see which."),
    }
}
