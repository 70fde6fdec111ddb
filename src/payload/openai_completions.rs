//! OpenAI completions: a text, token ids, or a batch of either.

use super::Family;
use super::node::Node;

pub(super) const FAMILY: Family = Family {
    api: "openai_completions",
    paths: &["completions"],
    member: |key| match key {
        b"prompt" => Some(Node::Prompt),
        _ => None,
    },
    ..Family::DEFAULT
};
