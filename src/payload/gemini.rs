//! Gemini's generateContent and its kin: `contents` of `parts`, the model in the path.

use super::Family;
use super::node::{Node, Seed};

pub(super) const FAMILY: Family = Family {
    api: "gemini",
    paths: &[
        "models/{model}:generateContent",
        "models/{model}:streamGenerateContent",
        "endpoints/{model}:generateContent",
        "endpoints/{model}:streamGenerateContent",
    ],
    member: |key| match key {
        b"contents" => Some(Node::Messages),
        b"systemInstruction" | b"system_instruction" => Some(Node::System),
        b"cachedContent" | b"cached_content" => Some(Node::Seed(Seed::Context)),
        _ => None,
    },
    ..Family::DEFAULT
};
