//! Messages → tokens → chained block hashes, and the text a simulated engine answers with.
//!
//! Guarantee: an answer quoted in the next turn renders to the tokens that were generated, unless
//! the template says otherwise; two prompts share every block up to where they differ. Not here:
//! request shapes (api.rs), what is cached (blocks.rs).
//!
//! Four bytes are one token. Every part of a prompt starts at a token's start (its last token may
//! be short), as a real tokeniser keeps special tokens apart.

use clap::ValueEnum;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Bytes of text in a token.
pub const TOKEN_BYTES: usize = 4;

/// What an image costs in tokens: a usual size at a usual resolution (DESIGN.md "Hashing").
const IMAGE_TOKENS: usize = 1_000;

/// What a reasoning engine opens and closes its thoughts with: two tokens each.
const THINK_OPEN: &str = "<think>\n";
const THINK_CLOSE: &str = "</think>";

/// How an engine's chat template renders a conversation's history.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Template {
    /// Every turn's rendering begins with the one before it
    #[default]
    AppendOnly,
    /// Answers begin with reasoning, which is left out of the history
    ReasoningStripped,
    /// Tools are rendered before the last user message, so they move with every turn
    ToolsLast,
}

/// One message as a template sees it.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// `system`, `user`, `assistant`, `tool`.
    pub role: &'a str,
    /// Its parts, in order.
    pub parts: &'a [Part<'a>],
}

/// A piece of a message.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    /// Text.
    Text(&'a str),
    /// Text or token ids, four bytes a token, as they are.
    Bytes(&'a [u8]),
    /// Anything that is not text; its bytes decide its identity, not its length.
    Image(&'a [u8]),
}

/// A rendered prompt, and then its answer, as padded tokens.
#[derive(Clone, Debug, Default)]
pub struct Rendered {
    bytes: Vec<u8>,
}

/// Special tokens; text cannot contain their first byte.
#[derive(Clone, Copy)]
enum Special {
    Begin = 1,
    Role = 2,
    End = 3,
    Tools = 4,
    Image = 5,
}

impl Rendered {
    /// A chat prompt, up to where the answer begins.
    #[must_use]
    pub fn chat(template: Template, tools: &[u8], messages: &[Message<'_>]) -> Self {
        let mut rendered = Self::default();
        rendered.special(Special::Begin);
        let last_user = messages.iter().rposition(|message| message.role == "user");
        if template != Template::ToolsLast || last_user.is_none() {
            rendered.tools(tools);
        }
        for (at, message) in messages.iter().enumerate() {
            if template == Template::ToolsLast && last_user == Some(at) {
                rendered.tools(tools);
            }
            rendered.special(Special::Role);
            rendered.text(message.role.as_bytes());
            for part in message.parts {
                match *part {
                    Part::Text(text) => rendered.text(history(template, message.role, text)),
                    Part::Bytes(bytes) => rendered.text(bytes),
                    Part::Image(bytes) => rendered.image(bytes),
                }
            }
            rendered.special(Special::End);
        }
        rendered.special(Special::Role);
        rendered.text(b"assistant");
        rendered
    }

    /// A plain prompt.
    #[must_use]
    pub fn plain(text: &[u8]) -> Self {
        let mut rendered = Self::default();
        rendered.special(Special::Begin);
        rendered.text(text);
        rendered
    }

    /// A prompt of token ids.
    #[must_use]
    pub fn ids(ids: &[u32]) -> Self {
        let bytes = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        Self { bytes }
    }

    /// Tokens so far.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        u32::try_from(self.bytes.len() / TOKEN_BYTES).unwrap_or(u32::MAX)
    }

    /// The tokens' ids, as a tokeniser would number them: equal texts have equal ids.
    #[must_use]
    pub fn token_ids(&self) -> Vec<u32> {
        let (tokens, _) = self.bytes.as_chunks::<TOKEN_BYTES>();
        tokens.iter().copied().map(u32::from_le_bytes).collect()
    }

    /// What the answer to this prompt depends on.
    #[must_use]
    pub fn digest(&self) -> u64 {
        xxh3_64(&self.bytes)
    }

    /// Appends the answer, so that [`Self::chain`] covers it too.
    pub fn push_answer(&mut self, answer: &Answer) {
        let mut text = Vec::with_capacity(answer.tokens as usize * TOKEN_BYTES);
        answer.write(0..answer.tokens, &mut text);
        self.bytes.extend_from_slice(&text);
    }

    /// The chained hashes of all full blocks; `seed` stands for model, adapter and cache salt.
    #[must_use]
    pub fn chain(&self, seed: u64, block_tokens: u32) -> Vec<u64> {
        let block_bytes = block_tokens as usize * TOKEN_BYTES;
        let mut before = seed;
        self.bytes
            .chunks_exact(block_bytes)
            .map(|block| {
                before = xxh3_64_with_seed(block, before);
                before
            })
            .collect()
    }

    fn text(&mut self, text: &[u8]) {
        self.bytes.extend_from_slice(text);
        let padded = self.bytes.len().next_multiple_of(TOKEN_BYTES);
        self.bytes.resize(padded, 0);
    }

    fn special(&mut self, token: Special) {
        self.bytes.extend_from_slice(&[0xFF, token as u8, 0, 0]);
    }

    fn tools(&mut self, tools: &[u8]) {
        if !tools.is_empty() {
            self.special(Special::Tools);
            self.text(tools);
        }
    }

    fn image(&mut self, bytes: &[u8]) {
        let identity = xxh3_64(bytes).to_le_bytes();
        self.special(Special::Image);
        for _ in 0..IMAGE_TOKENS * TOKEN_BYTES / identity.len() {
            self.bytes.extend_from_slice(&identity);
        }
    }
}

/// What the template keeps of a message's text.
fn history<'a>(template: Template, role: &str, text: &'a str) -> &'a [u8] {
    let stripped = match template {
        Template::ReasoningStripped if role == "assistant" => text
            .strip_prefix(THINK_OPEN)
            .and_then(|thought| thought.split_once(THINK_CLOSE))
            .map(|(_, answer)| answer),
        _ => None,
    };
    stripped.unwrap_or(text).as_bytes()
}

/// An answer: text that looks random and depends only on the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    seed: u64,
    tokens: u32,
    reasoning: u32,
}

impl Answer {
    /// `tokens` tokens; a reasoning engine thinks for half of them.
    #[must_use]
    pub fn new(template: Template, digest: u64, tokens: u32) -> Self {
        // Both marks and a token inside.
        const REASONING_MIN: u32 = 5;
        let reasoning = match template {
            Template::ReasoningStripped if tokens / 2 >= REASONING_MIN => tokens / 2,
            _ => 0,
        };
        Self {
            seed: digest,
            tokens,
            reasoning,
        }
    }

    /// Appends the text of some of its tokens, exactly four bytes each.
    pub fn write(&self, tokens: std::ops::Range<u32>, text: &mut Vec<u8>) {
        for at in tokens {
            text.extend_from_slice(&self.token(at));
        }
    }

    /// The whole text.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = Vec::with_capacity(self.tokens as usize * TOKEN_BYTES);
        self.write(0..self.tokens, &mut text);
        String::from_utf8(text).unwrap_or_default()
    }

    fn token(&self, at: u32) -> [u8; TOKEN_BYTES] {
        let mark = |mark: &str, half: u32| {
            let mut token = [b' '; TOKEN_BYTES];
            let from = half as usize * TOKEN_BYTES;
            for (to, from) in token.iter_mut().zip(mark.bytes().skip(from)) {
                *to = from;
            }
            token
        };
        if self.reasoning > 0 && at < 2 {
            return mark(THINK_OPEN, at);
        }
        if self.reasoning > 0 && (self.reasoning - 2..self.reasoning).contains(&at) {
            return mark(THINK_CLOSE, at + 2 - self.reasoning);
        }
        let mut bits = xxh3_64_with_seed(&at.to_le_bytes(), self.seed);
        let mut token = [b' '; TOKEN_BYTES];
        for (place, letter) in token.iter_mut().enumerate() {
            // Words of three letters; the space is never at an answer's end, where clients trim.
            if place == 1 && at % 2 == 1 {
                continue;
            }
            *letter = b'a' + (bits % 26) as u8;
            bits /= 26;
        }
        token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u32 = 16;

    /// Renders turns of `(role, text)`.
    fn render(template: Template, turns: &[(&str, String)]) -> Rendered {
        let parts: Vec<[Part<'_>; 1]> = turns.iter().map(|(_, t)| [Part::Text(t)]).collect();
        let messages: Vec<Message<'_>> = turns
            .iter()
            .zip(&parts)
            .map(|((role, _), parts)| Message { role, parts })
            .collect();
        Rendered::chat(template, b"{\"name\":\"search\"}", &messages)
    }

    fn shared(left: &[u64], right: &[u64]) -> usize {
        left.iter().zip(right).take_while(|(l, r)| l == r).count()
    }

    /// Two turns; how many of the first turn's tokens, answer included, the second one shares.
    fn shared_tokens(template: Template) -> (usize, usize, usize) {
        let mut turns = vec![("system", "s".repeat(4_001)), ("user", "u".repeat(402))];
        let mut first = render(template, &turns);
        let prompt = first.tokens() as usize;
        let answer = Answer::new(template, first.digest(), 200);
        first.push_answer(&answer);
        turns.push(("assistant", answer.text()));
        turns.push(("user", "v".repeat(99)));
        let second = render(template, &turns).chain(1, BLOCK);
        let first = first.chain(1, BLOCK);
        (
            shared(&first, &second) * BLOCK as usize,
            prompt,
            prompt + 200,
        )
    }

    #[test]
    fn templates_keep_what_they_say() {
        let (kept, _, all) = shared_tokens(Template::AppendOnly);
        assert!(kept <= all && kept + 16 > all, "{kept} of {all}");
        let (kept, prompt, _) = shared_tokens(Template::ReasoningStripped);
        assert!(kept <= prompt && kept + 16 > prompt, "{kept} of {prompt}");
        // System message: begin, role, "system" in 2 tokens, 1001 of text, end.
        let (kept, ..) = shared_tokens(Template::ToolsLast);
        assert!(kept <= 1_006 && kept + 16 > 1_006, "{kept}");
    }

    #[test]
    fn an_answer_is_four_printable_bytes_a_token() {
        for template in [Template::AppendOnly, Template::ReasoningStripped] {
            for tokens in [1, 2, 3, 9, 10, 11, 220] {
                let text = Answer::new(template, 5, tokens).text();
                assert_eq!(text.len(), 4 * tokens as usize);
                assert!(
                    text.bytes()
                        .all(|byte| byte == b'\n' || (32..127).contains(&byte))
                );
                assert_eq!(text.trim(), text);
            }
        }
        assert_ne!(
            Answer::new(Template::AppendOnly, 5, 9).text(),
            Answer::new(Template::AppendOnly, 6, 9).text()
        );
    }

    #[test]
    fn the_chain_depends_on_the_seed_and_on_all_before() {
        let chain = |text: &str, seed| Rendered::plain(text.as_bytes()).chain(seed, BLOCK);
        let text = "x".repeat(640);
        assert_eq!(shared(&chain(&text, 1), &chain(&text, 2)), 0);
        let other = format!("{}y{}", &text[..300], &text[301..]);
        // Begin, then 300 bytes: byte 304 is in block 4.
        assert_eq!(shared(&chain(&text, 1), &chain(&other, 1)), 4);
        assert_eq!(chain(&text, 1).len(), 10);
    }

    #[test]
    fn an_image_costs_the_same_whatever_its_bytes() {
        let image = |bytes: &[u8]| {
            let parts = [Part::Text("what is this"), Part::Image(bytes)];
            let message = Message {
                role: "user",
                parts: &parts,
            };
            Rendered::chat(Template::AppendOnly, b"", &[message])
        };
        let (small, large) = (image(b"1"), image(&[7; 100_000]));
        assert_eq!(small.tokens(), large.tokens());
        assert_ne!(small.digest(), large.digest());
        assert!(small.tokens() > 1_000);
    }
}
