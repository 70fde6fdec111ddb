//! TGI's own API.

use super::Family;
use super::node::Node;

pub(super) const FAMILY: Family = Family {
    api: "tgi_generate",
    paths: &["generate", "generate_stream"],
    native: true,
    member: |key| match key {
        b"inputs" => Some(Node::Prompt),
        _ => None,
    },
    ..Family::DEFAULT
};
