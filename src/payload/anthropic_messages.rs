//! Anthropic messages: `system` lies beside the messages.

use super::Family;
use super::node::Node;

pub(super) const FAMILY: Family = Family {
    api: "anthropic_messages",
    paths: &["messages"],
    member: |key| match key {
        b"system" => Some(Node::System),
        b"messages" => Some(Node::Messages),
        _ => None,
    },
    ..Family::DEFAULT
};
