//! Members of a body that mean the same in every family.
//!
//! Not here: members that hold a prompt (the family files).

use super::node::{Node, Seed};

/// Sampling fields, `user`, `metadata` and the like do not change what is rendered; grammars
/// (`response_format`, `guided_*`) do not either.
pub(super) fn member(key: &[u8]) -> Node {
    match key {
        b"model" => Node::Model,
        b"stream" => Node::Stream,
        b"tools" | b"functions" => Node::Tools,
        b"cache_salt" => Node::Seed(Seed::Salt),
        b"prompt_cache_key" => Node::Seed(Seed::CacheKey),
        b"lora_path" | b"lora_adapter" | b"adapter_id" | b"lora_request" => {
            Node::Seed(Seed::Adapter)
        }
        b"chat_template" => Node::Seed(Seed::Template),
        b"documents" => Node::Seed(Seed::Documents),
        b"previous_response_id" | b"conversation" => Node::EngineState,
        b"parameters" => Node::Parameters,
        _ => Node::Skip,
    }
}

/// What may lie in `parameters`: TGI's and Vertex's hold `adapter_id`, Triton's `stream`,
/// DashScope's `tools`. No server takes a prompt or a model from there.
pub(super) fn parameter(key: &[u8]) -> Node {
    match member(key) {
        node @ (Node::Stream | Node::Tools | Node::Seed(_)) => node,
        _ => Node::Skip,
    }
}
