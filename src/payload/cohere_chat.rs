//! Cohere's chat API, version 2; `documents` are rendered before the conversation (common.rs).

use super::Family;
use super::node::Node;

pub(super) const FAMILY: Family = Family {
    api: "cohere_chat",
    paths: &["v2/chat"],
    by_shape: false,
    member: |key| match key {
        b"messages" => Some(Node::Messages),
        _ => None,
    },
    ..Family::DEFAULT
};
