//! KServe v2 inference: named tensors, of which those with text or token ids are the prompt.

use super::Family;
use super::node::Node;

pub(super) const FAMILY: Family = Family {
    api: "triton_infer",
    paths: &[
        "v2/models/{model}/infer",
        "v2/models/{model}/versions/{version}/infer",
    ],
    native: true,
    by_shape: false,
    member: |key| match key {
        b"inputs" => Some(Node::Tensors),
        _ => None,
    },
    ..Family::DEFAULT
};
