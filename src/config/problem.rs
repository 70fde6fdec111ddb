//! Why a configuration was refused, in one line.
//!
//! Guarantee: the line names the place, and the field that was probably meant if one is near. Not
//! here: what is refused (the other files of config/).

use super::options::{OPTIONS, Opt};
use super::tree;
use std::fmt;

/// Why a configuration was refused; its `Display` is one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Where, as a JSON Pointer; empty for the whole.
    pub pointer: String,
    /// What is wrong there.
    pub problem: Problem,
}

impl ConfigError {
    /// Names a number that was found as it was written: `1e3` and not 1000, which would be fine.
    pub(super) fn quoting(mut self, bytes: &[u8]) -> Self {
        if let Problem::Wrong { found, .. } = &mut self.problem
            && found.starts_with(|first: char| first == '-' || first.is_ascii_digit())
            && let Some(number) = tree::text_at(bytes, &self.pointer)
        {
            *found = shown(number);
        }
        self
    }

    /// What stands at `pointer` and another thing rule each other out.
    pub(super) fn contradiction(pointer: String, reason: &str) -> Self {
        Self {
            pointer,
            problem: Problem::Contradiction(reason.into()),
        }
    }
}

/// What is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// It is not JSON.
    Syntax(String),
    /// A field that is not declared.
    Unknown {
        /// The declared ones.
        known: Vec<&'static str>,
        /// The one that was probably meant.
        nearest: Option<&'static str>,
        /// Where a field of this name is declared.
        elsewhere: Option<&'static str>,
    },
    /// A field that is there twice.
    Duplicate,
    /// A value that the option does not take.
    Wrong {
        /// What it takes.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A value that another one rules out.
    Contradiction(String),
}

impl Problem {
    pub(super) fn unknown(name: &str, known: Vec<&'static str>) -> Self {
        let mut elsewhere = OPTIONS.iter().filter(|option| option.name() == name);
        Self::Unknown {
            nearest: nearest(name, &known),
            elsewhere: elsewhere.next().map(Opt::parent),
            known,
        }
    }
}

/// The field that was probably meant, if one is near enough for a suggestion to help.
fn nearest(name: &str, known: &[&'static str]) -> Option<&'static str> {
    // Two edits, or a third of the name.
    let edits_max = (name.chars().count() / 3).max(2);
    let (words, lower) = (sorted_words(name), name.to_ascii_lowercase());
    let edits = |&other: &&'static str| {
        if !lower.is_empty() && (other.starts_with(&lower) || words == sorted_words(other)) {
            return (0, other);
        }
        let other_lower = other.to_ascii_lowercase();
        (strsim::osa_distance(&lower, &other_lower), other)
    };
    let (edits, nearest) = known.iter().map(edits).min()?;
    (edits <= edits_max).then_some(nearest)
}

/// `max_body_bytes` and `body_bytes_max` are easily confused.
fn sorted_words(name: &str) -> Vec<String> {
    let mut words: Vec<_> = name
        .split(['_', '-'])
        .map(str::to_ascii_lowercase)
        .collect();
    words.sort();
    words
}

/// Digits of a number that are shown: as many as of a text.
fn shown(number: &str) -> String {
    match number.get(..tree::SHOWN_CHARS_MAX) {
        Some(start) if start.len() < number.len() => format!("{start}… ({} bytes)", number.len()),
        _ => number.to_owned(),
    }
}

/// Characters of a pointer that are shown; no declared field lies deeper.
const POINTER_CHARS_MAX: usize = 256;

/// Text from a configuration for one line of a log.
fn one_line(text: &str) -> String {
    let shown = text.chars().take(POINTER_CHARS_MAX);
    let mut line = String::new();
    for character in shown {
        if character.is_control() {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    if text.chars().nth(POINTER_CHARS_MAX).is_some() {
        line.push('…');
    }
    line
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("config")?;
        if !self.pointer.is_empty() {
            write!(f, " {}", one_line(&self.pointer))?;
        }
        match &self.problem {
            Problem::Syntax(found) => write!(f, ": expected JSON, got {found}"),
            Problem::Unknown {
                known,
                nearest,
                elsewhere,
            } => {
                f.write_str(": unknown field")?;
                match (nearest, elsewhere) {
                    (_, Some("")) => f.write_str(", it belongs at the top")?,
                    (_, Some(parent)) => write!(f, ", it belongs in {parent}")?,
                    (Some(nearest), None) => write!(f, ", did you mean {nearest}?")?,
                    (None, None) => {}
                }
                write!(f, "; known fields: {}", known.join(", "))
            }
            Problem::Duplicate => f.write_str(": expected this field once, got it twice"),
            Problem::Wrong { expected, found } => write!(f, ": expected {expected}, got {found}"),
            Problem::Contradiction(reason) => write!(f, ": {reason}"),
        }
    }
}

impl std::error::Error for ConfigError {}
