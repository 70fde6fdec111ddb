//! Ollama's chat API. It streams unless told otherwise.

use super::Family;
use super::node::Node;

pub(super) const FAMILY: Family = Family {
    api: "ollama_chat",
    paths: &["api/chat"],
    by_shape: false,
    stream: true,
    member: |key| match key {
        b"messages" => Some(Node::Messages),
        _ => None,
    },
    ..Family::DEFAULT
};
