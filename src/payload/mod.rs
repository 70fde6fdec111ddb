//! Request body bytes → prompt, one file per API family.
//!
//! Guarantee: any bytes give a [`Prompt`], in one pass, with bounded memory, however they are cut
//! into windows. Not here: the ladders and the chain (prefix.rs), hosts.

pub mod decode;

use crate::prefix::Prompt;

/// What of the request's head decides how its body is read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Head<'a> {
    /// `:path`, with its query.
    pub path: &'a [u8],
    /// `content-type`.
    pub content_type: &'a [u8],
    /// `content-encoding`.
    pub content_encoding: &'a [u8],
    /// The tenant header's value, if the request has it.
    pub tenant: Option<&'a [u8]>,
}

/// What `prompt_cache_key` does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheKey {
    /// It splits a prefix that is too hot, and nothing else.
    #[default]
    Hint,
    /// It is a seed: AWS's meaning.
    Seed,
    /// It is not read.
    Ignore,
}

/// Where a chat template renders the tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tools {
    /// By a table of model-name patterns.
    #[default]
    ByModel,
    /// In front of the system message.
    BeforeSystem,
    /// Behind the system message.
    AfterSystem,
    /// Before the last user message: left out of the key.
    BeforeLastUser,
}

/// How bodies are read; from the filter's config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadOptions {
    /// Mixed into every key, so that outsiders cannot aim at a host.
    pub seed: u64,
    /// `fixed` mode's `prefix_length`, in characters (native bodies: bytes).
    pub prefix_length: Option<u32>,
    /// JSON pointers tried in order on native bodies.
    pub pointers: Vec<String>,
    /// JSON pointers to template inputs that are seeds.
    pub template_inputs: Vec<String>,
    /// What `prompt_cache_key` does.
    pub cache_key: CacheKey,
    /// Where tools are rendered.
    pub tools: Tools,
    /// Tokens an image counts as.
    pub image_tokens: u32,
    /// Leading system blocks that start with one of these texts are skipped.
    pub skip: Vec<String>,
}

impl Default for ReadOptions {
    fn default() -> Self {
        let list = |items: &[&str]| items.iter().map(|&item| item.to_owned()).collect();
        Self {
            seed: 0,
            prefix_length: None,
            pointers: list(&["/inputs", "/prompt", "/messages", "/instances/0"]),
            template_inputs: list(&["/reasoning_effort", "/chat_template_kwargs"]),
            cache_key: CacheKey::Hint,
            tools: Tools::ByModel,
            image_tokens: 1000,
            skip: list(&["x-anthropic-billing-header:"]),
        }
    }
}

/// Whether a body was fed to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All of it.
    Whole,
    /// It goes on beyond what the filter reads.
    Cut,
}

/// Reads one body.
pub struct Reader {
    // Owned by the payload work: see the functions for the contract.
}

impl Reader {
    /// A reader for the body that follows `head`.
    #[must_use]
    pub fn new(_head: &Head<'_>, _options: &ReadOptions) -> Self {
        Self {}
    }

    /// The next bytes, in any cut.
    pub fn feed(&mut self, _window: &[u8]) {}

    /// The prompt.
    #[must_use]
    pub fn finish(self, _end: End) -> Prompt {
        Prompt {
            api: "raw",
            coverage: crate::prefix::Coverage::Whole,
            affinity: true,
            seed: 0,
            model: None,
            checkpoints: Vec::new(),
            bytes: 0,
            messages: 0,
            fixed: None,
            cache_key: None,
            stream: false,
            engine_state: false,
        }
    }
}
