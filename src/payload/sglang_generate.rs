//! SGLang's own API: `text`, or `input_ids` in its place.

use super::Family;
use super::node::{Node, Seed};

pub(super) const FAMILY: Family = Family {
    api: "sglang_generate",
    paths: &["generate"],
    native: true,
    member: |key| match key {
        b"text" | b"input_ids" => Some(Node::Prompt),
        b"image_data" | b"audio_data" | b"video_data" => Some(Node::Seed(Seed::Media)),
        _ => None,
    },
    ..Family::DEFAULT
};
