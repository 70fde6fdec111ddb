//! OpenAI embeddings: no cache helps them, so they get no affinity.

use super::Family;
use super::node::Node;

pub(super) const FAMILY: Family = Family {
    api: "openai_embeddings",
    paths: &["embeddings"],
    by_shape: false,
    affinity: false,
    member: |key| match key {
        b"input" => Some(Node::Prompt),
        b"messages" => Some(Node::Messages),
        _ => None,
    },
    ..Family::DEFAULT
};
