//! Ollama's generate API: `context` and `system` come before `prompt`. It streams unless told
//! otherwise.

use super::Family;
use super::node::{Node, Seed};

pub(super) const FAMILY: Family = Family {
    api: "ollama_generate",
    paths: &["api/generate"],
    by_shape: false,
    stream: true,
    member: |key| match key {
        b"system" => Some(Node::System),
        b"prompt" => Some(Node::Prompt),
        // The tokens of earlier turns: all or nothing of them is the same.
        b"context" => Some(Node::Seed(Seed::Context)),
        b"template" => Some(Node::Seed(Seed::Template)),
        b"images" => Some(Node::Seed(Seed::Media)),
        _ => None,
    },
    ..Family::DEFAULT
};
