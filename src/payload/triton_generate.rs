//! The generate extension of Triton and KServe v2, as TensorRT-LLM and vLLM backends serve it.

use super::Family;
use super::node::{Node, Seed};

pub(super) const FAMILY: Family = Family {
    api: "triton_generate",
    paths: &[
        "v2/models/{model}/generate",
        "v2/models/{model}/generate_stream",
        "v2/models/{model}/versions/{version}/generate",
        "v2/models/{model}/versions/{version}/generate_stream",
    ],
    native: true,
    member: |key| match key {
        b"text_input" | b"prompt" => Some(Node::Prompt),
        b"image_input" | b"image" => Some(Node::Seed(Seed::Media)),
        _ => None,
    },
    ..Family::DEFAULT
};
