//! Pooling, classification, scoring and reranking (vLLM, TEI, Cohere): no affinity.
//!
//! What is compared with what makes no prefix; the texts count for the cost only.

use super::Family;
use super::node::Node;

pub(super) const FAMILY: Family = Family {
    api: "pooling",
    paths: &[
        "pooling", "classify", "score", "rerank", "embed", "encode", "predict", "reward",
    ],
    by_shape: false,
    affinity: false,
    member: |key| match key {
        b"input" | b"inputs" | b"texts" | b"text_1" | b"queries" | b"query" => Some(Node::Prompt),
        b"text_2" | b"documents" => Some(Node::Batch),
        b"messages" => Some(Node::Messages),
        _ => None,
    },
    ..Family::DEFAULT
};
