//! Prompt parts → checkpoints: positions in the prompt with the chained hash of all before them.
//!
//! Guarantee: two prompts share every checkpoint up to where they differ, inside a part too,
//! however their bytes were cut; memory is bounded. A part opens with its kind and closes with its
//! length, a message closes with its role: nothing known only at the end of something enters
//! before that end. Not here: JSON (payload/), hosts, load.

use xxhash_rust::xxh64::{Xxh64, xxh64};

/// The version of everything that is hashed: gateways of two formats disagree about some prompts at
/// least.
pub const HASH_FORMAT: u32 = 2;

/// The last format in which every hash changed. It is their seed: a text and the same text in a
/// format before it never meet, and a change of it makes every cache of a fleet cold.
const HASH_SEED: u64 = 1;

/// Bytes of text that count as one token until a ratio is learned (ROUTING.md 6: "bytes/4").
pub const BYTES_PER_TOKEN: u64 = 4;

/// What a checkpoint is for; a set of flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds(pub u8);

impl Kinds {
    /// Where the popularity-adaptive key may stop: a rung of its ladder, the end of the first and
    /// the second of several messages, the end of the prompt.
    pub const KEY: Self = Self(1);
    /// What the index keeps: a rung of its ladder, the end of the first message, the end of the
    /// prompt. What it looks up: these and every [`Kinds::MESSAGE_END`].
    pub const INDEX: Self = Self(2);
    /// The end of a message: the first two and the last eight are given.
    pub const MESSAGE_END: Self = Self(4);
    /// The end of the first message.
    pub const FIRST_MESSAGE: Self = Self(8);
    /// The end of the whole prompt as far as it was seen.
    pub const END: Self = Self(16);
    /// The end of the second message.
    pub const SECOND_MESSAGE: Self = Self(32);

    /// Whether any flag of `other` is set.
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Both sets.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// This set without the flags of `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// A position in the prompt and the chained hash of everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Bytes of text from the prompt's start; a token id counts as [`BYTES_PER_TOKEN`] of them.
    pub position: u64,
    /// The chained hash; seeds are not in it (see [`Prompt::key`]).
    pub hash: u64,
    /// What it is for.
    pub kinds: Kinds,
}

/// A checkpoint's hash with the prompt's seeds mixed in: what places a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub u64);

/// How much of the body stands behind a [`Prompt`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// The body was read to its end.
    Whole,
    /// The body was longer than the filter reads, or ended early.
    Truncated,
    /// The body stopped being JSON after its prompt began; what came before counts.
    Malformed,
    /// The body could not be read as a prompt; its bytes stand in for one.
    Raw(RawReason),
}

impl Coverage {
    /// The metric label of a body that was not read whole.
    #[must_use]
    pub fn label(self) -> Option<&'static str> {
        match self {
            Self::Whole => None,
            Self::Truncated => Some("truncated"),
            Self::Malformed => Some("malformed"),
            Self::Raw(reason) => Some(reason.label()),
        }
    }
}

/// Why a body's raw bytes were used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RawReason {
    /// Not JSON.
    NotJson,
    /// JSON, but of no shape that holds a prompt.
    UnknownShape,
    /// Encoded in a way that was not decoded.
    Encoded,
}

impl RawReason {
    /// The metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::NotJson => "not_json",
            Self::UnknownShape => "unknown_shape",
            Self::Encoded => "encoded",
        }
    }
}

/// What one request body says about where it should go.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// The API family's metric label, e.g. `openai_chat`.
    pub api: &'static str,
    /// How much of the body this stands for.
    pub coverage: Coverage,
    /// False for requests that no cache helps (embeddings, scoring): least cost places them.
    pub affinity: bool,
    /// Model, adapter, salts, tools and listed template inputs, hashed.
    pub seed: u64,
    /// The model's name as the body gives it, at most [`MODEL_BYTES_MAX`] bytes of it.
    pub model: Option<String>,
    /// Ascending by position, at most [`CHECKPOINTS_MAX`]; the last one has [`Kinds::END`].
    pub checkpoints: Vec<Checkpoint>,
    /// Bytes of text in the prompt, tools included: divided by 4, the estimate of its tokens.
    /// Of a batch, the sum over its prompts; 0 if nothing is computed of it (token counts).
    pub bytes: u64,
    /// Messages seen.
    pub messages: u32,
    /// Prompts in the body: 1, or the length of a batch. Its first one makes the checkpoints.
    pub prompts: u32,
    /// In `fixed` mode: the hash of the first `prefix_length` characters; `None` if there are none,
    /// and the whole prompt is the key.
    pub fixed: Option<u64>,
    /// `prompt_cache_key`, hashed.
    pub cache_key: Option<u64>,
    /// Whether the client asked for a streamed answer.
    pub stream: bool,
    /// Whether the prompt continues state that only one engine holds (`previous_response_id`).
    pub engine_state: bool,
}

/// Model names longer than this are cut: they choose a pool, and none of ours is longer.
pub const MODEL_BYTES_MAX: usize = 256;

impl Prompt {
    /// The key of one of this prompt's checkpoints.
    #[must_use]
    pub fn key(&self, checkpoint: &Checkpoint) -> Key {
        Key(mix(checkpoint.hash, self.seed))
    }

    /// The prompt's estimated tokens, at least one.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        (self.bytes / BYTES_PER_TOKEN).max(1)
    }
}

/// What a stretch of the prompt is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text as the reader of the prompt sees it.
    Text,
    /// What the model thought before it answered.
    Reasoning,
    /// A structured value, in canonical bytes: a tool call, a tool's structured result.
    Value,
    /// An image, a sound or a file.
    Media,
    /// Token ids, [`BYTES_PER_TOKEN`] bytes each.
    Tokens,
    /// A body that could not be read as a prompt.
    Raw,
}

impl Part {
    fn tag(self) -> u64 {
        match self {
            Self::Text => 1,
            Self::Reasoning => 2,
            Self::Value => 3,
            Self::Media => 4,
            Self::Tokens => 5,
            Self::Raw => 6,
        }
    }
}

/// Receives a prompt's parts in their order.
pub trait Sink: Sized {
    /// An empty section. `fixed`: the characters whose hash `fixed` mode wants.
    fn start(fixed: Option<u32>) -> Self;
    /// A part opens.
    fn open(&mut self, part: Part);
    /// The next bytes of the open part.
    fn text(&mut self, bytes: &[u8]);
    /// The open part is complete.
    fn close(&mut self);
    /// A part that is known only as a whole: its hash, and the bytes of text it counts as.
    fn atom(&mut self, part: Part, hash: u64, bytes: u64);
    /// The message is complete. `role` may be cut; `label` is the hash of all that names it.
    fn message_end(&mut self, role: &[u8], label: u64);
    /// The chain behind this sink.
    fn chain(&self) -> &Chain;
    /// The chain behind this sink, to end it.
    fn into_chain(self) -> Chain;
}

/// The first rung of both ladders, in tokens (ROUTING.md 6: K0 = 256 tokens, 1 KiB).
const RUNG_TOKENS_MIN: u64 = 256;

/// Rungs of one ladder. KEY: 8 + 56 steps of ×1.25 reach 8 KiB × 1.25^56 = 2 GiB; INDEX: 64 steps
/// of ×1.41 reach beyond. Both lie past every body that is read.
const RUNGS_MAX: u32 = 64;

/// Rungs of both ladders up to 16 KiB: most prompts have no more.
const RUNGS_USUAL: usize = 20;

/// Message ends kept for the index to look up (ROUTING.md 6: "the last 8 message ends").
const RECENT_MAX: usize = 8;

/// Checkpoints of one chain: two ladders, the first two and the last 8 message ends, the end.
const CHAIN_CHECKPOINTS_MAX: usize = 2 * RUNGS_MAX as usize + 2 + RECENT_MAX + 1;

/// Checkpoints of a prompt: those of its system section and of its conversation, 278.
pub const CHECKPOINTS_MAX: usize = 2 * CHAIN_CHECKPOINTS_MAX;

/// The positions, in bytes of text, at which a ladder has its rungs.
#[derive(Clone, Copy, Debug)]
struct Ladder {
    /// The next rung in tokens.
    tokens: u64,
    /// Rungs passed.
    count: u32,
}

impl Ladder {
    fn new() -> Self {
        Self {
            tokens: RUNG_TOKENS_MIN,
            count: 0,
        }
    }

    fn next(self) -> u64 {
        if self.count == RUNGS_MAX {
            u64::MAX
        } else {
            self.tokens * BYTES_PER_TOKEN
        }
    }

    /// KEY: 256, 512, … 2,048 tokens, then ×1.25 rounded up to 64 tokens.
    fn step_key(&mut self) {
        self.count += 1;
        self.tokens = if self.tokens < 8 * RUNG_TOKENS_MIN {
            self.tokens + RUNG_TOKENS_MIN
        } else {
            (self.tokens * 5).div_ceil(4).next_multiple_of(64)
        };
    }

    /// INDEX: 256 tokens, then ×1.41 rounded down to a token.
    fn step_index(&mut self) {
        self.count += 1;
        self.tokens = self.tokens * 141 / 100;
    }
}

/// The chained hash of one section of a prompt, and its checkpoints.
#[derive(Clone)]
pub struct Chain {
    /// The hash of everything before the open part.
    before: u64,
    /// The open part, seeded with `before` and its kind.
    open: Option<Xxh64>,
    part: Part,
    /// Where the open part began.
    part_start: u64,
    position: u64,
    next_rung: u64,
    key: Ladder,
    index: Ladder,
    rungs: Vec<Checkpoint>,
    /// The ends of the first two messages.
    first: [Option<Checkpoint>; 2],
    /// The ends of the last messages, as a ring.
    recent: [Option<Checkpoint>; RECENT_MAX],
    messages: u32,
    /// Whether the first message is one that a system prompt can be.
    system_first: bool,
    fixed: Option<Fixed>,
}

/// Steps of the prefix at which its hash is kept: a conversation does not know yet how much of the
/// prefix a system prompt leaves, which may come behind it. 32 × 8 bytes a section, and a step of 32
/// characters of the least prefix, 1024.
const FIXED_STEPS: u32 = 32;

/// The first characters of the prompt, for `fixed` mode: of its text, its token ids and its media.
#[derive(Clone)]
struct Fixed {
    hash: Xxh64,
    length: u32,
    left: u32,
    /// The hash at the end of each step that something came behind.
    steps: Vec<u64>,
    /// What is left at the end of the next one.
    step_end: u32,
    /// What follows the last character has been seen.
    done: bool,
    /// Nothing has come.
    empty: bool,
}

impl Fixed {
    fn new(length: u32) -> Self {
        let mut fixed = Self {
            hash: Xxh64::new(HASH_SEED),
            length,
            left: length,
            steps: Vec::new(),
            step_end: length,
            done: false,
            empty: true,
        };
        fixed.step_end = length.saturating_sub(fixed.step());
        fixed
    }

    fn step(&self) -> u32 {
        (self.length / FIXED_STEPS).max(1)
    }

    /// Keeps the hash for every step that has been come to, before what begins there. An image ends
    /// all the steps that it fills.
    fn steps_end(&mut self) {
        while self.left <= self.step_end && self.step_end > 0 {
            self.steps.push(self.hash.digest());
            self.step_end = self.step_end.saturating_sub(self.step());
        }
    }

    /// The hash of all that counts if it fits into `room`, else of as many steps as do.
    fn within(&self, room: u32) -> Option<u64> {
        let all = self.hash.digest();
        if self.length.saturating_sub(self.left) <= room {
            return Some(all);
        }
        let last = (room / self.step()).checked_sub(1)?;
        Some(self.steps.get(last as usize).copied().unwrap_or(all))
    }

    /// A character of text is counted at its first byte: the bytes that continue one come along.
    /// Of token ids, and of a body that is no text to us, every byte counts.
    fn text(&mut self, bytes: &[u8], part: Part) {
        if self.done {
            return;
        }
        let (mut from, mut end) = (0, bytes.len());
        for (at, byte) in bytes.iter().enumerate() {
            if part != Part::Text || byte & 0xc0 != 0x80 {
                if self.left == 0 {
                    self.done = true;
                    end = at;
                    break;
                }
                if self.left <= self.step_end {
                    self.update(bytes.get(from..at));
                    self.steps_end();
                    from = at;
                }
                self.left -= 1;
            }
        }
        self.update(bytes.get(from..end));
    }

    fn update(&mut self, bytes: Option<&[u8]>) {
        if let Some(bytes) = bytes {
            self.hash.update(bytes);
            self.empty &= bytes.is_empty();
        }
    }

    /// What begins in front of the prefix's end is in it as a whole, and counts as it does in
    /// positions.
    fn atom(&mut self, hash: u64, bytes: u64) {
        self.done |= self.left == 0;
        if !self.done {
            self.steps_end();
            self.update(Some(&hash.to_le_bytes()));
            self.left = self
                .left
                .saturating_sub(u32::try_from(bytes).unwrap_or(u32::MAX));
            self.done = self.left == 0;
        }
    }
}

impl Chain {
    /// An empty chain. `fixed`: the characters whose hash `fixed` mode wants.
    #[must_use]
    pub fn new(fixed: Option<u32>) -> Self {
        Self {
            before: HASH_SEED,
            open: None,
            part: Part::Text,
            part_start: 0,
            position: 0,
            next_rung: Ladder::new().next(),
            key: Ladder::new(),
            index: Ladder::new(),
            rungs: Vec::new(),
            first: [None; 2],
            recent: [None; RECENT_MAX],
            messages: 0,
            system_first: false,
            fixed: fixed.map(Fixed::new),
        }
    }

    /// Bytes of text so far.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Messages so far.
    #[must_use]
    pub fn messages(&self) -> u32 {
        self.messages
    }

    /// Whether nothing has come.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.before == HASH_SEED && self.open.is_none()
    }

    /// The hash of everything so far.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.open.as_ref().map_or(self.before, Xxh64::digest)
    }

    /// In `fixed` mode: the hash of the first characters, and how many were missing.
    #[must_use]
    pub fn fixed(&self) -> Option<(u64, u32)> {
        let fixed = self.fixed.as_ref()?;
        Some((fixed.hash.digest(), fixed.left))
    }

    /// In `fixed` mode, behind a system prompt that leaves `room` characters of the prefix: the hash
    /// of what is in them. `None` if they are too few.
    #[must_use]
    pub fn fixed_within(&self, room: u32) -> Option<u64> {
        self.fixed.as_ref()?.within(room)
    }

    /// Whether nothing has come that `fixed` mode counts: tool calls and reasoning are not.
    #[must_use]
    pub fn fixed_is_empty(&self) -> bool {
        self.fixed.as_ref().is_none_or(|fixed| fixed.empty)
    }

    /// Where the first message ends, if it has a system prompt's role.
    #[must_use]
    pub fn system_end(&self) -> Option<u64> {
        let [first, _] = self.first;
        first
            .filter(|_| self.system_first)
            .map(|first| first.position)
    }

    /// The checkpoints, ascending; of two at one position the one with more before it stands.
    #[must_use]
    pub fn checkpoints(&self) -> Vec<Checkpoint> {
        let mut all = Vec::with_capacity(self.rungs.len() + 2 + RECENT_MAX + 1);
        all.extend_from_slice(&self.rungs);
        all.extend(self.first.iter().flatten());
        let oldest = self.messages as usize % RECENT_MAX;
        let (newer, older) = self.recent.split_at(oldest);
        all.extend(older.iter().chain(newer).flatten());
        all.push(Checkpoint {
            position: self.position,
            hash: self.hash(),
            kinds: Kinds::END,
        });
        merge(&mut all);
        all
    }

    /// A checkpoint at every rung that the position has come to. Rungs inside an image meet at its
    /// end.
    fn rung(&mut self) {
        let mut kinds = Kinds::default();
        while self.key.next() <= self.position {
            self.key.step_key();
            kinds = kinds.with(Kinds::KEY);
        }
        while self.index.next() <= self.position {
            self.index.step_index();
            kinds = kinds.with(Kinds::INDEX);
        }
        self.next_rung = self.key.next().min(self.index.next());
        if self.rungs.is_empty() {
            self.rungs.reserve(RUNGS_USUAL);
        }
        self.rungs.push(Checkpoint {
            position: self.position,
            hash: self.hash(),
            kinds,
        });
    }
}

impl Sink for Chain {
    fn start(fixed: Option<u32>) -> Self {
        Self::new(fixed)
    }

    fn open(&mut self, part: Part) {
        self.part = part;
        self.part_start = self.position;
        self.open = Some(Xxh64::new(mix(self.before, part.tag())));
    }

    fn text(&mut self, bytes: &[u8]) {
        if let (Some(fixed), Part::Text | Part::Raw | Part::Tokens) = (&mut self.fixed, self.part) {
            fixed.text(bytes, self.part);
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let room = usize::try_from(self.next_rung - self.position).unwrap_or(usize::MAX);
            let (head, tail) = rest.split_at(room.min(rest.len()));
            if let Some(open) = &mut self.open {
                open.update(head);
            }
            self.position += head.len() as u64;
            if head.len() == room {
                self.rung();
            }
            rest = tail;
        }
    }

    fn close(&mut self) {
        if let Some(open) = self.open.take() {
            self.before = mix(open.digest(), self.position - self.part_start);
        }
    }

    fn atom(&mut self, part: Part, hash: u64, bytes: u64) {
        self.before = mix(mix(self.before, part.tag()), hash);
        if let Some(fixed) = &mut self.fixed {
            fixed.atom(hash, bytes);
        }
        self.position = self.position.saturating_add(bytes);
        if self.position >= self.next_rung {
            self.rung();
        }
    }

    fn message_end(&mut self, role: &[u8], label: u64) {
        self.before = mix(self.before, label);
        let kinds = Kinds::MESSAGE_END.with(match self.messages {
            0 => Kinds::FIRST_MESSAGE,
            1 => Kinds::SECOND_MESSAGE,
            _ => Kinds::default(),
        });
        if self.messages == 0 {
            self.system_first = matches!(role, b"system" | b"developer");
        }
        let end = Checkpoint {
            position: self.position,
            hash: self.before,
            kinds,
        };
        if let Some(first) = self.first.get_mut(self.messages as usize) {
            *first = Some(end);
        }
        if let Some(slot) = self.recent.get_mut(self.messages as usize % RECENT_MAX) {
            *slot = Some(end);
        }
        self.messages = self.messages.saturating_add(1);
    }

    fn chain(&self) -> &Chain {
        self
    }

    fn into_chain(self) -> Chain {
        self
    }
}

/// Sorts checkpoints by position. Of several at one position the last one stands, for all of them:
/// it has the most before it. (Stable: rungs come before message ends, and those in their order.)
pub(crate) fn merge(checkpoints: &mut Vec<Checkpoint>) {
    checkpoints.sort_by_key(|checkpoint| checkpoint.position);
    checkpoints.dedup_by(|later, earlier| {
        let same = later.position == earlier.position;
        if same {
            earlier.hash = later.hash;
            earlier.kinds = earlier.kinds.with(later.kinds);
        }
        same
    });
}

/// Two hashes to one, order-sensitive.
#[must_use]
pub fn mix(left: u64, right: u64) -> u64 {
    let mut bytes = [0; 16];
    let (head, tail) = bytes.split_at_mut(8);
    head.copy_from_slice(&left.to_le_bytes());
    tail.copy_from_slice(&right.to_le_bytes());
    xxh64(&bytes, HASH_SEED)
}
