//! Prompt parts → checkpoints: positions in the prompt with the chained hash of all before them.
//!
//! Guarantee: two prompts share every checkpoint up to where they differ. Not here: JSON
//! (payload/), hosts, load.

use xxhash_rust::xxh64::xxh64;

/// The version of everything that is hashed. A change of it makes every cache of a fleet cold.
pub const HASH_FORMAT: u32 = 1;

/// Bytes of text that count as one token until a ratio is learned (ROUTING.md 6: "bytes/4").
pub const BYTES_PER_TOKEN: u64 = 4;

/// What a checkpoint is for; a set of flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds(pub u8);

impl Kinds {
    /// A rung of the ladder that the popularity-adaptive key walks.
    pub const KEY: Self = Self(1);
    /// A rung of the ladder that the index keeps.
    pub const INDEX: Self = Self(2);
    /// The end of a message.
    pub const MESSAGE_END: Self = Self(4);
    /// The end of the first message.
    pub const FIRST_MESSAGE: Self = Self(8);
    /// The end of the whole prompt as far as it was seen.
    pub const END: Self = Self(16);

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
    /// The body could not be read as a prompt; its bytes stand in for one.
    Raw(RawReason),
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
    /// Ascending by position, bounded; the last one has [`Kinds::END`].
    pub checkpoints: Vec<Checkpoint>,
    /// Bytes of text in the prompt, tools included: divided by 4, the estimate of its tokens.
    pub bytes: u64,
    /// Messages seen.
    pub messages: u32,
    /// In `fixed` mode: the hash of the first `prefix_length` characters.
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

/// Two hashes to one, order-sensitive.
#[must_use]
pub fn mix(left: u64, right: u64) -> u64 {
    let mut bytes = [0; 16];
    let (head, tail) = bytes.split_at_mut(8);
    head.copy_from_slice(&left.to_le_bytes());
    tail.copy_from_slice(&right.to_le_bytes());
    xxh64(&bytes, u64::from(HASH_FORMAT))
}
