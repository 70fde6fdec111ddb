//! An answer as it comes in: lines of server-sent events, or one JSON body, in any cut.
//!
//! Guarantee: what is found does not depend on where the network cut the bytes; memory is bounded.
//! Not here: the connection, the clock: the caller asks after each piece whether content came.

use std::borrow::Cow;

use memchr::{memchr, memmem};
use serde::Deserialize;

/// A line of an event stream, or a whole unstreamed body, at most: a model's answer of 100,000
/// tokens is below 1 MiB.
const HELD_BYTES_MAX: usize = 4 << 20;

/// What an answer said so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Whether any content came.
    pub content: bool,
    /// Events with content; the tokens, where no usage comes.
    pub events: u64,
    /// Its last usage block.
    pub usage: Option<Usage>,
    /// Whether it said that it is complete.
    pub done: bool,
    /// Whether it said that it failed, or could not be read.
    pub failed: bool,
    /// The content, if it was asked for.
    pub text: String,
}

/// Tokens as the engine counted them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Of these, found in the cache; `None` if the engine does not say.
    pub cached_tokens: Option<u64>,
    /// Tokens of the answer.
    pub completion_tokens: u64,
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    /// The native form's token.
    #[serde(borrow)]
    token: Option<Native<'a>>,
    #[serde(borrow)]
    generated_text: Option<Cow<'a, str>>,
    usage: Option<UsageBlock>,
    error: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow, alias = "message")]
    delta: Option<Delta<'a>>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow)]
    content: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Native<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct UsageBlock {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

/// Reads one answer.
#[derive(Debug)]
pub struct Reader {
    answer: Answer,
    /// An unfinished line, or the body so far.
    held: Vec<u8>,
    stream: bool,
    keep_text: bool,
}

impl Reader {
    /// A reader for a stream of events or for one body; `keep_text` to have the content too.
    #[must_use]
    pub fn new(stream: bool, keep_text: bool) -> Self {
        Self {
            answer: Answer::default(),
            held: Vec::new(),
            stream,
            keep_text,
        }
    }

    /// The next bytes.
    pub fn feed(&mut self, mut bytes: &[u8]) {
        if !self.stream {
            return self.hold(bytes);
        }
        while let Some(end) = memchr(b'\n', bytes) {
            let (line, rest) = bytes.split_at(end);
            bytes = rest.get(1..).unwrap_or_default();
            if self.held.is_empty() {
                self.line(line);
            } else {
                self.hold(line);
                let line = std::mem::take(&mut self.held);
                self.line(&line);
            }
        }
        self.hold(bytes);
    }

    /// Whether content has come.
    #[must_use]
    pub fn content(&self) -> bool {
        self.answer.content
    }

    /// The answer, after its last byte.
    #[must_use]
    pub fn finish(mut self) -> Answer {
        let held = std::mem::take(&mut self.held);
        if self.stream {
            self.line(&held);
        } else {
            self.event(&held);
            self.answer.done = !self.answer.failed;
        }
        self.answer
    }

    fn hold(&mut self, bytes: &[u8]) {
        if self.held.len() + bytes.len() > HELD_BYTES_MAX {
            self.answer.failed = true;
            self.held.clear();
        } else {
            self.held.extend_from_slice(bytes);
        }
    }

    fn line(&mut self, line: &[u8]) {
        let Some(data) = line.strip_prefix(b"data:") else {
            return;
        };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.answer.done = true;
        } else if !self.answer.content || self.keep_text || interesting(data) {
            self.event(data);
        } else {
            // Thousands of content events a second: only the first and the odd ones are parsed.
            self.answer.events += 1;
        }
    }

    fn event(&mut self, data: &[u8]) {
        let Ok(event) = serde_json::from_slice::<Event<'_>>(data) else {
            self.answer.failed = true;
            return;
        };
        self.answer.failed |= event.error.is_some();
        if let Some(usage) = event.usage {
            self.answer.usage = Some(Usage {
                prompt_tokens: usage.prompt_tokens,
                cached_tokens: usage
                    .prompt_tokens_details
                    .and_then(|said| said.cached_tokens),
                completion_tokens: usage.completion_tokens,
            });
        }
        let choices = event.choices.into_iter();
        let said = choices
            .flat_map(|choice| [choice.text, choice.delta.and_then(|delta| delta.content)])
            .chain([
                event.token.and_then(|token| token.text),
                event.generated_text,
            ])
            .flatten();
        let mut content = false;
        for text in said {
            content |= !text.is_empty();
            if self.keep_text {
                self.answer.text.push_str(&text);
            }
        }
        self.answer.content |= content;
        self.answer.events += u64::from(content);
    }
}

/// Whether an event says more than content: its usage, or an error.
fn interesting(data: &[u8]) -> bool {
    let block = |name: &[u8]| {
        memmem::find(data, name).is_some_and(|at| {
            let after = data
                .get(at + name.len()..)
                .unwrap_or_default()
                .trim_ascii_start();
            after
                .strip_prefix(b":")
                .is_some_and(|value| value.trim_ascii_start().starts_with(b"{"))
        })
    };
    block(b"\"usage\"") || data.starts_with(b"{\"error\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAT: &str = concat!(
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        ": a comment\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"H\\u00e9l\"}}],\"usage\":null}\r\n\r\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"lo\"}}],\"usage\":null}\n\n",
        "data: {\"choices\":[],\"usage\": {\"prompt_tokens\":30,\"completion_tokens\":2,",
        "\"prompt_tokens_details\":{\"cached_tokens\":16}}}\n\n",
        "data: [DONE]\n\n",
    );

    fn read(stream: bool, keep_text: bool, body: &str, cut: usize) -> Answer {
        let mut reader = Reader::new(stream, keep_text);
        for piece in body.as_bytes().chunks(cut) {
            reader.feed(piece);
        }
        reader.finish()
    }

    fn chat(text: &str) -> Answer {
        let usage = Usage {
            prompt_tokens: 30,
            cached_tokens: Some(16),
            completion_tokens: 2,
        };
        Answer {
            content: true,
            events: 2,
            usage: Some(usage),
            done: true,
            failed: false,
            text: text.to_owned(),
        }
    }

    #[test]
    fn every_cut_of_a_stream_reads_the_same() {
        for cut in [1, 2, 3, 7, 64, 10_000] {
            assert_eq!(read(true, false, CHAT, cut), chat(""), "pieces of {cut}");
            assert_eq!(
                read(true, true, CHAT, cut),
                chat("Héllo"),
                "pieces of {cut}"
            );
        }
    }

    #[test]
    fn content_comes_with_the_first_text_not_with_the_role() {
        let mut reader = Reader::new(true, false);
        let mut events = CHAT.split_inclusive("\n\n");
        reader.feed(events.next().unwrap().as_bytes());
        assert!(!reader.content(), "a role is no content");
        reader.feed(events.next().unwrap().as_bytes());
        assert!(reader.content());
    }

    #[test]
    fn a_stream_that_is_cut_is_not_done() {
        let cut = CHAT.split("data: [DONE]").next().unwrap();
        assert!(!read(true, false, cut, 9).done);
    }

    #[test]
    fn an_error_in_the_stream_is_one() {
        let body =
            "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"error\":{\"message\":\"x\"}}\n\n";
        let answer = read(true, false, body, 5);
        assert!(answer.failed && answer.content && !answer.done);
        assert!(read(true, false, "data: {broken\n", 99).failed);
    }

    #[test]
    fn unstreamed_and_native_bodies_are_read_whole() {
        let body = r#"{"choices":[{"message":{"content":"Hi"}}],
            "usage":{"prompt_tokens":3,"completion_tokens":1}}"#;
        let answer = read(false, true, body, 4);
        assert_eq!((answer.text.as_str(), answer.done), ("Hi", true));
        let usage = Usage {
            prompt_tokens: 3,
            cached_tokens: None,
            completion_tokens: 1,
        };
        assert_eq!(answer.usage, Some(usage));
        assert_eq!(
            read(false, true, r#"{"generated_text":"Yo"}"#, 5).text,
            "Yo"
        );
        let native = "data: {\"token\":{\"text\":\"a\"}}\n\ndata: {\"token\":{\"text\":\"b\"}}\n\n";
        assert_eq!(read(true, true, native, 5).text, "ab");
    }

    #[test]
    fn a_line_without_end_is_given_up() {
        let mut reader = Reader::new(true, false);
        for _ in 0..80 {
            reader.feed(&[b'x'; 65_536]);
        }
        assert!(reader.held.len() <= HELD_BYTES_MAX);
        assert!(reader.finish().failed);
    }
}
