//! Request body bytes → prompt, one file per API family.
//!
//! Guarantee: any bytes give a `Prompt`, in one pass, with bounded memory, however they are cut
//! into windows. To add a family: one file with its [`Family`], its name among the modules and in
//! [`FAMILIES`], one folder of cases in tests/payloads, one line in README.md. Not here: the ladders
//! and the chain (prefix.rs), hosts.

mod anthropic_messages;
mod bedrock_converse;
mod cohere_chat;
mod common;
pub mod decode;
mod encoded;
mod gemini;
mod message;
mod native;
mod node;
mod ollama_chat;
mod ollama_generate;
mod openai_chat;
mod openai_completions;
mod openai_embeddings;
mod openai_responses;
pub mod parts;
mod path;
mod plan;
mod pointer;
mod pooling;
mod reader;
mod sglang_generate;
mod tgi_generate;
mod token_count;
mod tools;
mod triton_generate;
mod triton_infer;
mod vllm_generate;
mod walk;

pub use encoded::{Reader, Reading};
pub use plan::Plan;

use node::Node;

/// One API: where it is found, and what its members mean.
struct Family {
    /// The metric label.
    api: &'static str,
    /// Path endings, `/` between segments; `{model}` stands for a segment or the rest of one.
    paths: &'static [&'static str],
    /// Members of the body that mean something else than they do in all families (common.rs).
    member: fn(&[u8]) -> Option<Node>,
    /// `fixed` mode counts the body's bytes, not the characters of its text.
    native: bool,
    /// Its paths say nothing: any family's shape may come.
    any_shape: bool,
    /// Its shape can be told from the body where the path says nothing.
    by_shape: bool,
    /// A cache helps it.
    affinity: bool,
    /// An engine computes what its prompts say.
    prefills: bool,
    /// Answers are streamed unless the body says otherwise.
    stream: bool,
}

impl Family {
    const DEFAULT: Self = Self {
        api: "",
        paths: &[],
        member: |_| None,
        native: false,
        any_shape: false,
        by_shape: true,
        affinity: true,
        prefills: true,
        stream: false,
    };
}

/// All families. Where a body's shape decides, an earlier one is preferred.
const FAMILIES: &[&Family] = &[
    &native::FAMILY,
    &openai_chat::FAMILY,
    &openai_completions::FAMILY,
    &anthropic_messages::FAMILY,
    &openai_responses::FAMILY,
    &gemini::FAMILY,
    &tgi_generate::FAMILY,
    &sglang_generate::FAMILY,
    &vllm_generate::FAMILY,
    &triton_generate::FAMILY,
    &triton_infer::FAMILY,
    &ollama_chat::FAMILY,
    &ollama_generate::FAMILY,
    &bedrock_converse::FAMILY,
    &cohere_chat::FAMILY,
    &openai_embeddings::FAMILY,
    &pooling::FAMILY,
    &token_count::FAMILY,
];

/// A set of families is a `u32`.
const _: () = assert!(FAMILIES.len() <= 32);

/// The metric labels of all families; a body that is none of theirs has [`RAW`].
#[must_use]
pub fn apis() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.api).collect()
}

/// The labels of the families whose bodies may come to a path.
#[must_use]
pub fn apis_at(path: &[u8]) -> Vec<&'static str> {
    let families = path::find(path).families;
    let of_path = (0..)
        .zip(FAMILIES)
        .filter(|(index, _)| families >> index & 1 == 1);
    of_path.map(|(_, family)| family.api).collect()
}

/// The metric label of a body whose bytes stand in for a prompt.
pub const RAW: &str = "raw";

/// The index of the family whose prompts JSON pointers name.
const NATIVE: usize = 0;

/// Slots below this belong to JSON pointers, in their order; the families' follow.
const SLOTS_OF_POINTERS: u8 = pointer::POINTERS_MAX as u8;

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
