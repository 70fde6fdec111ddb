//! Bedrock's Converse: the model in the path, tools in `toolConfig`.

use super::Family;
use super::node::Node;

pub(super) const FAMILY: Family = Family {
    api: "bedrock_converse",
    paths: &["model/{model}/converse", "model/{model}/converse-stream"],
    by_shape: false,
    member: |key| match key {
        b"system" => Some(Node::System),
        b"messages" => Some(Node::Messages),
        b"toolConfig" => Some(Node::Parameters),
        _ => None,
    },
    ..Family::DEFAULT
};
