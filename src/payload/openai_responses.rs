//! OpenAI responses: `input` as a text or as items, `instructions` beside it.
//!
//! `previous_response_id` and `conversation` name state that one engine holds (common.rs).

use super::Family;
use super::node::Node;

pub(super) const FAMILY: Family = Family {
    api: "openai_responses",
    paths: &["responses", "responses/compact"],
    member: |key| match key {
        b"instructions" => Some(Node::System),
        b"input" => Some(Node::Messages),
        _ => None,
    },
    ..Family::DEFAULT
};
