//! What an engine says about a prompt it has answered: tokens in all, and tokens found cached.
//!
//! Guarantee: one pass over the answer in any cut, constant memory, and only members in the places
//! where engines put their counts are read, so nothing that a model writes is ever taken for one.
//! Reads JSON, JSON lines, a JSON array of answers, and server-sent events; of other bytes (binary
//! event streams, encoded bodies) it says nothing, nor of one with a count that cannot be. Not here:
//! getting the bytes (filter/), what is learned from them.

use memchr::memchr;

use crate::json::{Container, Handler, Progress, Tokenizer, Visit};

/// More tokens than any prompt or answer has: those of the largest body that can be configured, 64 MiB
/// at 4 bytes a token. The longest contexts that are offered have 10 million (Llama 4 Scout). An answer
/// with a larger count says nothing: one such number would outweigh all that were ever added up.
pub const TOKENS_MAX: u64 = 1 << 24;

/// What one answer said, at most [`TOKENS_MAX`] each. Counts that it gave more than once never fall, so the largest is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: Option<u64>,
    /// Tokens of it that were in the engine's cache, at most all of them; never without
    /// `prompt_tokens`.
    pub cached_tokens: Option<u64>,
    /// Tokens of the answer.
    pub output_tokens: Option<u64>,
}

/// How much one answer said; the label of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The prompt's tokens and the cached ones.
    Ok,
    /// The prompt's tokens only.
    NoDetails,
    /// Nothing that could be read, or that can be.
    Absent,
}

impl State {
    /// All of them, for the metric.
    pub const ALL: [Self; 3] = [Self::Ok, Self::NoDetails, Self::Absent];

    /// The metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::NoDetails => "no_details",
            Self::Absent => "absent",
        }
    }
}

impl Usage {
    /// How much it says.
    #[must_use]
    pub fn state(&self) -> State {
        match (self.prompt_tokens, self.cached_tokens) {
            (Some(_), Some(_)) => State::Ok,
            (Some(_), None) => State::NoDetails,
            (None, _) => State::Absent,
        }
    }
}

/// API families whose engines gave details; there are fewer families than this.
const DETAILED_MAX: usize = 32;

/// Which API families of a pool report cached tokens.
///
/// vLLM and SGLang leave the details out when nothing was cached, even if they are told to give
/// them. So once a family has given details, their absence means zero: taking it for "not told"
/// would learn from hits alone.
#[derive(Clone, Debug, Default)]
pub struct Reporting {
    detailed: Vec<&'static str>,
}

impl Reporting {
    /// What an answer of the API family `api` means, given what others of it have said.
    pub fn read(&mut self, api: &'static str, usage: Usage) -> Usage {
        let known = self.detailed.contains(&api);
        match usage.state() {
            State::Ok if !known && self.detailed.len() < DETAILED_MAX => self.detailed.push(api),
            State::NoDetails if known => {
                return Usage {
                    cached_tokens: Some(0),
                    ..usage
                };
            }
            State::Ok | State::NoDetails | State::Absent => {}
        }
        usage
    }
}

/// Chooses the answers that are read: the first, then one in `one_in` without any rhythm, for
/// requests that come in turns would otherwise be sampled from one client only.
#[derive(Clone, Copy, Debug)]
pub struct Sampler {
    one_in: u32,
    seen: u64,
}

impl Sampler {
    /// One answer in `one_in`; none if it is 0.
    #[must_use]
    pub fn new(one_in: u32) -> Self {
        Self { one_in, seen: 0 }
    }

    /// Whether the next answer is read.
    pub fn take(&mut self) -> bool {
        let seen = self.seen;
        self.seen = seen.wrapping_add(1);
        if self.one_in == 0 {
            return false;
        }
        seen == 0 || scatter(seen).is_multiple_of(u64::from(self.one_in))
    }
}

/// A bijection that leaves no pattern of its argument: the finaliser of splitmix64 (Steele et al.,
/// "Fast splittable pseudorandom number generators", 2014).
fn scatter(number: u64) -> u64 {
    let mut z = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// How an answer's documents are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    /// Nothing but white space and a byte-order mark so far.
    Unknown,
    /// One document, or one a line.
    Json,
    /// Server-sent events: their `data` lines are documents.
    Events(Line),
}

/// Where in a line of an event stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// After this many bytes of `data:`.
    Name(u8),
    /// After `data:`.
    Data,
    /// In a line of no interest: a comment, or another field.
    Other,
}

const DATA: &[u8; 5] = b"data:";

/// Reads one answer.
#[derive(Debug)]
pub struct Reader {
    framing: Framing,
    tokenizer: Tokenizer,
    walker: Walker,
}

impl Default for Reader {
    fn default() -> Self {
        Self {
            framing: Framing::Unknown,
            tokenizer: Tokenizer::default(),
            walker: Walker::default(),
        }
    }
}

impl Reader {
    /// A reader at the start of an answer's body.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The next bytes, in any cut.
    pub fn feed(&mut self, window: &[u8]) {
        let mut rest = window;
        while let (Framing::Unknown, Some((&byte, tail))) = (self.framing, rest.split_first()) {
            match byte {
                // White space, or the bytes of a byte-order mark.
                b' ' | b'\t' | b'\r' | b'\n' | 0xef | 0xbb | 0xbf => rest = tail,
                b'{' | b'[' => self.framing = Framing::Json,
                _ => self.framing = Framing::Events(Line::Name(0)),
            }
        }
        // Ends: each turn takes at least one byte.
        while !rest.is_empty() {
            rest = match self.framing {
                Framing::Events(line) => self.event_bytes(line, rest),
                Framing::Unknown | Framing::Json => self.json_line(rest),
            };
        }
    }

    /// What the answer said. One that is cut off says what its complete numbers say.
    #[must_use]
    pub fn finish(self) -> Usage {
        self.walker.counts.usage()
    }

    /// A line of JSON, or what is there of it. Text holds no raw line ends, so a document that is
    /// complete at one is followed by another.
    fn json_line<'a>(&mut self, rest: &'a [u8]) -> &'a [u8] {
        let (line, tail) = split_line(rest);
        self.tokenizer.feed(line, &mut self.walker);
        if line.ends_with(b"\n") && self.tokenizer.progress() == Progress::Done {
            self.next_document();
        }
        tail
    }

    fn event_bytes<'a>(&mut self, line: Line, rest: &'a [u8]) -> &'a [u8] {
        match line {
            Line::Name(seen) => self.name_byte(seen, rest),
            Line::Data => {
                let (data, tail) = split_line(rest);
                self.tokenizer.feed(data, &mut self.walker);
                if data.ends_with(b"\n") {
                    // What is not complete goes on in the event's next data line.
                    if self.tokenizer.progress() == Progress::Done {
                        self.next_document();
                    }
                    self.framing = Framing::Events(Line::Name(0));
                }
                tail
            }
            Line::Other => {
                let (other, tail) = split_line(rest);
                if other.ends_with(b"\n") {
                    self.framing = Framing::Events(Line::Name(0));
                }
                tail
            }
        }
    }

    fn name_byte<'a>(&mut self, seen: u8, rest: &'a [u8]) -> &'a [u8] {
        let Some((&byte, tail)) = rest.split_first() else {
            return rest;
        };
        let line = match byte {
            b'\n' if seen == 0 => {
                // An empty line ends the event, whatever it held.
                self.next_document();
                Line::Name(0)
            }
            b'\n' => Line::Name(0),
            b'\r' if seen == 0 => Line::Name(0),
            _ if DATA.get(usize::from(seen)) != Some(&byte) => Line::Other,
            _ if usize::from(seen) + 1 == DATA.len() => Line::Data,
            _ => Line::Name(seen + 1),
        };
        self.framing = Framing::Events(line);
        tail
    }

    fn next_document(&mut self) {
        self.tokenizer = Tokenizer::default();
        self.walker.next_document();
    }
}

/// Up to and with the next line end, and what follows it.
fn split_line(rest: &[u8]) -> (&[u8], &[u8]) {
    let end = memchr(b'\n', rest).map_or(rest.len(), |at| at + 1);
    rest.split_at(end)
}

/// An object that holds counts, or leads to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    /// An array of answers: Gemini's stream without server-sent events, SGLang's batches.
    Answers,
    /// An answer, or an event of one.
    Answer,
    /// An answer inside an event: OpenAI's `response`, Anthropic's `message`, Cohere's `delta`.
    Inner,
    /// `usage` by whatever name.
    Usage,
    /// `…_tokens_details`.
    Details,
    /// Cohere's `tokens`: as rendered, unlike `billed_units`.
    Tokens,
    /// llama.cpp's `timings`.
    Timings,
    /// TGI's `details`.
    Generation,
}

/// A number that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Count {
    /// Of the prompt, cached tokens included.
    Prompt,
    /// Of the prompt, without what the next two count, if they are there.
    Input,
    /// Of the prompt, read from the cache (Anthropic, Bedrock).
    CacheRead,
    /// Of the prompt, written to the cache (Anthropic, Bedrock).
    CacheWrite,
    /// Of the prompt, found cached.
    Cached,
    /// llama.cpp: found cached.
    Reused,
    /// llama.cpp: computed.
    Computed,
    /// Of the answer.
    Output,
}

/// What a member's value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Member {
    Enter(Node),
    Number(Count),
    Other,
}

fn member(node: Node, key: &[u8]) -> Member {
    use Count::{CacheRead, CacheWrite, Cached, Computed, Input, Output, Prompt, Reused};
    use Member::{Enter, Number};
    match (node, key) {
        (Node::Answer | Node::Inner, b"usage" | b"usageMetadata") => Enter(Node::Usage),
        (Node::Answer, b"meta_info") => Enter(Node::Usage),
        (Node::Answer, b"response" | b"message" | b"delta") => Enter(Node::Inner),
        (Node::Answer, b"timings") => Enter(Node::Timings),
        (Node::Answer, b"details") => Enter(Node::Generation),
        // Ollama.
        (Node::Answer, b"prompt_eval_count") => Number(Prompt),
        (Node::Answer, b"eval_count") => Number(Output),
        (Node::Usage, b"prompt_tokens" | b"promptTokenCount") => Number(Prompt),
        (Node::Usage | Node::Tokens, b"input_tokens") => Number(Input),
        (Node::Usage, b"inputTokens") => Number(Input),
        (Node::Usage, b"cache_read_input_tokens" | b"cacheReadInputTokens") => Number(CacheRead),
        (Node::Usage, b"cache_creation_input_tokens" | b"cacheWriteInputTokens") => {
            Number(CacheWrite)
        }
        (Node::Usage, b"prompt_tokens_details" | b"input_tokens_details") => Enter(Node::Details),
        (Node::Usage, b"tokens") => Enter(Node::Tokens),
        // SGLang and Cohere; DeepSeek; Gemini.
        (
            Node::Usage,
            b"cached_tokens" | b"prompt_cache_hit_tokens" | b"cachedContentTokenCount",
        ) => Number(Cached),
        (Node::Usage | Node::Tokens, b"output_tokens") => Number(Output),
        (Node::Usage, b"completion_tokens" | b"outputTokens" | b"candidatesTokenCount") => {
            Number(Output)
        }
        (Node::Details, b"cached_tokens") => Number(Cached),
        (Node::Timings, b"cache_n") => Number(Reused),
        (Node::Timings, b"prompt_n") => Number(Computed),
        (Node::Timings, b"predicted_n") => Number(Output),
        (Node::Generation, b"input_length") => Number(Prompt),
        (Node::Generation, b"generated_tokens") => Number(Output),
        _ => Member::Other,
    }
}

/// Every count that was seen.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    prompt: Option<u64>,
    input: Option<u64>,
    cache_read: Option<u64>,
    cache_write: Option<u64>,
    cached: Option<u64>,
    reused: Option<u64>,
    computed: Option<u64>,
    output: Option<u64>,
}

impl Counts {
    fn keep(&mut self, count: Count, value: u64) {
        let kept = match count {
            Count::Prompt => &mut self.prompt,
            Count::Input => &mut self.input,
            Count::CacheRead => &mut self.cache_read,
            Count::CacheWrite => &mut self.cache_write,
            Count::Cached => &mut self.cached,
            Count::Reused => &mut self.reused,
            Count::Computed => &mut self.computed,
            Count::Output => &mut self.output,
        };
        *kept = Some(kept.map_or(value, |kept| kept.max(value)));
    }

    fn usage(&self) -> Usage {
        let input = self.input.map(|input| {
            let cache = self.cache_read.unwrap_or(0);
            let cache = cache.saturating_add(self.cache_write.unwrap_or(0));
            input.saturating_add(cache)
        });
        // Older llama.cpp has `prompt_n` alone, which is then not the whole prompt.
        let timed = match (self.reused, self.computed) {
            (Some(reused), Some(computed)) => Some(reused.saturating_add(computed)),
            _ => None,
        };
        let prompt_tokens = self.prompt.or(input).or(timed);
        let cached = self.cached.or(self.cache_read).or(self.reused);
        let said = [prompt_tokens, cached, self.output];
        if said.into_iter().flatten().any(|tokens| tokens > TOKENS_MAX) {
            return Usage::default();
        }
        let capped = |prompt: u64| cached.map(|cached| cached.min(prompt));
        Usage {
            prompt_tokens,
            cached_tokens: prompt_tokens.and_then(capped),
            output_tokens: self.output,
        }
    }
}

/// A number being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    /// Its digits so far.
    Whole(u64),
    /// After its point: a fraction does not count.
    Fraction(u64),
    /// Not a count: negative, a word, an exponent.
    None,
}

impl Number {
    fn byte(self, byte: u8) -> Self {
        match (self, byte) {
            (Self::Whole(value), b'0'..=b'9') => {
                let digit = u64::from(byte - b'0');
                Self::Whole(value.saturating_mul(10).saturating_add(digit))
            }
            (Self::Whole(value), b'.') | (Self::Fraction(value), b'0'..=b'9') => {
                Self::Fraction(value)
            }
            _ => Self::None,
        }
    }
}

/// Follows a document to its counts.
#[derive(Debug)]
struct Walker {
    /// The containers that are open; their nesting is that of [`member`], so there are few.
    open: Vec<Node>,
    /// What the next value is.
    next: Member,
    number: Number,
    counts: Counts,
}

impl Default for Walker {
    fn default() -> Self {
        Self {
            open: Vec::new(),
            next: Member::Enter(Node::Answer),
            number: Number::Whole(0),
            counts: Counts::default(),
        }
    }
}

impl Walker {
    fn next_document(&mut self) {
        self.open.clear();
        self.next = Member::Enter(Node::Answer);
        self.number = Number::Whole(0);
    }
}

impl Handler for Walker {
    fn begin(&mut self, container: Container) -> Visit {
        let node = match (self.next, container) {
            (Member::Enter(node), Container::Object) => node,
            (_, Container::Array) if self.open.is_empty() => Node::Answers,
            _ => return Visit::Over,
        };
        self.open.push(node);
        if node != Node::Answers {
            self.next = Member::Other;
        }
        Visit::Into
    }

    fn end(&mut self) {
        self.open.pop();
        self.next = match self.open.last() {
            Some(Node::Answers) => Member::Enter(Node::Answer),
            _ => Member::Other,
        };
    }

    fn key(&mut self, key: &[u8]) {
        let node = self.open.last();
        self.next = node.map_or(Member::Other, |node| member(*node, key));
        self.number = Number::Whole(0);
    }

    fn string_begin(&mut self) {}

    fn string(&mut self, _piece: &[u8]) {}

    fn string_end(&mut self) {}

    fn literal(&mut self, piece: &[u8]) {
        if let Member::Number(_) = self.next {
            self.number = piece
                .iter()
                .fold(self.number, |number, byte| number.byte(*byte));
        }
    }

    fn literal_end(&mut self) {
        if let (Member::Number(count), Number::Whole(value) | Number::Fraction(value)) =
            (self.next, self.number)
        {
            self.counts.keep(count, value);
        }
    }
}
