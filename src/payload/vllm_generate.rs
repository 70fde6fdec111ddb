//! vLLM's own APIs: `/generate` with a text, `/inference/v1/generate` with token ids.

use super::Family;
use super::node::Node;

pub(super) const FAMILY: Family = Family {
    api: "vllm_generate",
    paths: &["generate", "inference/v1/generate"],
    native: true,
    member: |key| match key {
        b"prompt" | b"token_ids" | b"prompt_token_ids" => Some(Node::Prompt),
        _ => None,
    },
    ..Family::DEFAULT
};
