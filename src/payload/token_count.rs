//! Token counts and tokenizers (Anthropic, OpenAI, Gemini, vLLM, TGI, llama.cpp, Cohere): nothing is
//! computed of what they name, so no cache helps and none of it counts as work.

use super::Family;
use super::node::Node;

pub(super) const FAMILY: Family = Family {
    api: "token_count",
    paths: &[
        "messages/count_tokens",
        "responses/input_tokens",
        "models/{model}:countTokens",
        "tokenize",
        "detokenize",
    ],
    by_shape: false,
    affinity: false,
    prefills: false,
    member: |key| match key {
        b"system" | b"instructions" => Some(Node::System),
        b"messages" | b"contents" => Some(Node::Messages),
        b"input" | b"inputs" | b"prompt" | b"content" | b"text" | b"tokens" => Some(Node::Prompt),
        b"generateContentRequest" => Some(Node::Body),
        _ => None,
    },
    ..Family::DEFAULT
};
