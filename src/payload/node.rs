//! What JSON values mean: the words in which the families describe their bodies.
//!
//! Not here: who means what (the family files), what follows from it (walk).

/// What a JSON value means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    /// Nothing to us.
    Skip,
    /// An object whose members the families name.
    Body,
    /// An object beside the prompt, of which only what goes with a prompt is read: no prompt, no
    /// model.
    Parameters,
    /// On the way to what JSON pointers name: which of them, and how many segments are done.
    Pointed(u32, u8),
    /// A prompt without roles: text, token ids, a batch of either, or messages after all.
    Prompt,
    /// Messages, or one text that stands for the user's.
    Messages,
    /// A system prompt beside the conversation.
    System,
    /// The named tensors of an inference request.
    Tensors,
    /// One tensor.
    Tensor,
    /// The values of a tensor.
    TensorData,
    /// Texts that are counted and make no key.
    Batch,
    /// One prompt of a batch.
    BatchItem,
    /// One message.
    Message,
    /// A message's content: text, a block, or blocks.
    Content,
    /// One block of a content.
    Block,
    /// Plain text.
    Text,
    /// Text of the model's reasoning.
    Reasoning,
    /// A block of the model's reasoning.
    ReasoningBlock,
    /// Tool calls.
    Calls,
    /// One tool call or tool result.
    Call,
    /// A value that counts with all that is in it.
    Value,
    /// An image, a sound, a file: a value that counts as a whole.
    Media,
    /// Several of them.
    MediaList,
    /// The tools.
    Tools,
    /// A value that is mixed into the key.
    Seed(Seed),
    /// The model's name.
    Model,
    /// Whether the answer is streamed.
    Stream,
    /// A reference to state that one engine holds.
    EngineState,
    /// A message's role.
    Role,
    /// A message's type, where it has no role.
    Kind,
    /// A message's, call's or tensor's name.
    Name,
}

/// What is mixed into a key beside the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seed {
    /// A LoRA adapter beside the model.
    Adapter,
    /// `cache_salt`.
    Salt,
    /// `prompt_cache_key`.
    CacheKey,
    /// Documents that the template renders before the conversation.
    Documents,
    /// A chat template that replaces the model's.
    Template,
    /// Earlier turns, known to the engine or given as tokens.
    Context,
    /// Images that lie beside the prompt.
    Media,
    /// An input of the template, listed in the config.
    Input(u8),
}

/// JSON pointers to template inputs that are read.
pub(super) const INPUTS_MAX: usize = 16;

/// Places for seeds: the kinds above, and the template inputs.
pub(super) const SEEDS_MAX: usize = 7 + INPUTS_MAX;

impl Seed {
    /// Its place. The order is part of the hash format.
    pub(super) fn slot(self) -> usize {
        match self {
            Self::Adapter => 0,
            Self::Salt => 1,
            Self::CacheKey => 2,
            Self::Documents => 3,
            Self::Template => 4,
            Self::Context => 5,
            Self::Media => 6,
            Self::Input(input) => 7 + usize::from(input),
        }
    }
}
