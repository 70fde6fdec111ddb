//! OpenAI chat completions, as vLLM, SGLang, TGI and TensorRT-LLM serve them.

use super::Family;
use super::node::Node;

pub(super) const FAMILY: Family = Family {
    api: "openai_chat",
    paths: &["chat/completions"],
    member: |key| match key {
        b"messages" => Some(Node::Messages),
        _ => None,
    },
    ..Family::DEFAULT
};
