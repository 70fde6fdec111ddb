//! Deterministic text: an id and a length → printable ASCII words, 4 bytes a token.
//!
//! Guarantee: a shorter text is a prefix of a longer one of the same id, and texts of different
//! ids differ within their first two tokens but for one pair in 2^35. Not here: what is said to
//! whom.

use std::sync::Arc;

/// Bytes of one token, in the engines and here.
pub const TOKEN_BYTES: usize = 4;

/// A word with its space: two tokens.
const WORD_BYTES: usize = 8;

/// Thirty-two letters, so that five bits pick one; common letters come twice.
const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyzaeinst";

/// A piece of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Text {
    /// Text made from its id.
    Made {
        /// What the text is made from: see [`id`].
        id: u64,
        /// Its length in tokens.
        tokens: u32,
    },
    /// Text that came from outside: an engine's answer.
    Said(Arc<str>),
}

impl Text {
    /// Its length in tokens; a broken last token counts.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        match self {
            Self::Made { tokens, .. } => u64::from(*tokens),
            Self::Said(said) => said.len().div_ceil(TOKEN_BYTES) as u64,
        }
    }

    /// Appends the text to `out`.
    pub fn write(&self, out: &mut String) {
        match self {
            Self::Made { id, tokens } => write_made(*id, *tokens, out),
            Self::Said(said) => out.push_str(said),
        }
    }
}

/// The id of a text: what kind it is (`domain`), of which seed, and which of its kind.
#[must_use]
pub fn id(domain: &str, seed: u64, index: u64) -> u64 {
    let domain = domain
        .bytes()
        .fold(0, |sum, byte| scramble(sum ^ u64::from(byte)));
    scramble(scramble(domain ^ scramble(seed)) ^ index)
}

fn write_made(id: u64, tokens: u32, out: &mut String) {
    let bytes = tokens as usize * TOKEN_BYTES;
    out.reserve(bytes);
    for index in 0..bytes.div_ceil(WORD_BYTES) {
        let word = word(id, index as u64);
        let length = WORD_BYTES.min(bytes - index * WORD_BYTES);
        out.extend(word.iter().take(length).map(|&byte| char::from(byte)));
    }
}

/// Seven letters and a space. The first word comes from the id's own bits alone, so that two ids
/// that differ in them never share it.
fn word(id: u64, index: u64) -> [u8; WORD_BYTES] {
    let mut bits = if index == 0 { id } else { scramble(id ^ index) };
    let mut word = [b' '; WORD_BYTES];
    for letter in word.iter_mut().take(WORD_BYTES - 1) {
        *letter = LETTERS.get((bits & 31) as usize).copied().unwrap_or(b'x');
        bits >>= 5;
    }
    word
}

/// The finaliser of splitmix64: every input bit reaches every output bit.
fn scramble(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn made(id: u64, tokens: u32) -> String {
        let mut out = String::new();
        Text::Made { id, tokens }.write(&mut out);
        out
    }

    #[test]
    fn a_token_is_four_bytes_of_printable_ascii() {
        for tokens in [0, 1, 2, 3, 120, 3001] {
            let text = made(7, tokens);
            assert_eq!(text.len(), tokens as usize * 4);
            assert!(
                text.bytes()
                    .all(|byte| byte == b' ' || byte.is_ascii_lowercase()),
                "{text}"
            );
        }
    }

    #[test]
    fn a_shorter_text_is_a_prefix_of_a_longer_one() {
        assert!(made(9, 3000).starts_with(&made(9, 333)));
    }

    #[test]
    fn texts_of_different_ids_differ_within_two_tokens() {
        let starts: BTreeSet<String> = (0..20_000)
            .map(|index| made(id("prompt", 1, index), 2))
            .chain((0..20_000).map(|index| made(id("question", 1, index), 2)))
            .chain((0..20_000).map(|index| made(id("prompt", 2, index), 2)))
            .collect();
        // 60,000 texts have 1.8e9 pairs; 32 letters, six of them twice, meet in 1 pair of 1.2e10.
        assert!(
            starts.len() >= 59_998,
            "{} of 60000 starts differ",
            starts.len()
        );
    }

    #[test]
    fn words_of_one_text_do_not_repeat() {
        let text = made(3, 8192);
        let words: BTreeSet<&str> = text.split_ascii_whitespace().collect();
        assert_eq!(words.len(), 4096);
    }
}
