//! Values that count as a whole: tools, seeds, media, and the structured parts of messages.
//!
//! A value counts in canonical bytes: marks for its structure, keys and strings unescaped, numbers
//! as they are written, members in their order. Not here: which values these are (node.rs).

use xxhash_rust::xxh64::Xxh64;

use super::super::node::{Node, Seed};
use super::strings::Open;
use super::{GATHER_BYTES, Walker};
use crate::json::{Container, Visit};
use crate::prefix::{Part, Sink};

// Marks inside a value's canonical bytes. None of them occurs in UTF-8.
const MARK_OBJECT: &[u8] = &[0xf8];
const MARK_ARRAY: &[u8] = &[0xf9];
const MARK_END: &[u8] = &[0xfa];
const MARK_KEY: &[u8] = &[0xfb];
const MARK_STRING: &[u8] = &[0xfc];
pub(super) const MARK_LITERAL: &[u8] = &[0xfd];

/// The value that is being read as a whole.
pub(super) struct Value {
    node: Node,
    /// Containers open in it.
    depth: u32,
    hash: Xxh64,
    bytes: u64,
    /// The next member's value is left out.
    skip: bool,
}

impl<S: Sink> Walker<S> {
    pub(super) fn value_begin(&mut self, node: Node) {
        if let (Node::Value, Some(sink)) = (node, self.sink()) {
            sink.open(Part::Value);
        }
        self.value = Some(Value {
            node,
            depth: 0,
            hash: Xxh64::new(0),
            bytes: 0,
            skip: false,
        });
    }

    /// The next canonical bytes of the open value.
    pub(super) fn value_bytes(&mut self, bytes: &[u8]) {
        if self.gather.len() + bytes.len() > GATHER_BYTES {
            self.flush();
            if bytes.len() >= GATHER_BYTES {
                self.gathered(bytes);
                return;
            }
        }
        self.gather.extend_from_slice(bytes);
    }

    /// Hands on what was gathered.
    pub(super) fn flush(&mut self) {
        if !self.gather.is_empty() {
            let mut gather = std::mem::take(&mut self.gather);
            self.gathered(&gather);
            gather.clear();
            self.gather = gather;
        }
    }

    fn gathered(&mut self, bytes: &[u8]) {
        match &mut self.value {
            Some(value) if value.node != Node::Value => {
                value.hash.update(bytes);
                value.bytes += bytes.len() as u64;
            }
            _ => {
                if let Some(sink) = self.sink() {
                    sink.text(bytes);
                }
            }
        }
    }

    pub(super) fn value_container(&mut self, container: Container) -> Visit {
        if self.value_skips() {
            return Visit::Over;
        }
        if let Some(value) = &mut self.value {
            value.depth += 1;
        }
        self.value_bytes(match container {
            Container::Object => MARK_OBJECT,
            Container::Array => MARK_ARRAY,
        });
        Visit::Into
    }

    pub(super) fn value_string(&mut self) -> Open {
        if self.value_skips() {
            return Open::Skip;
        }
        self.value_bytes(MARK_STRING);
        Open::Value
    }

    /// Whether the value that comes now, inside the open one, is left out.
    pub(super) fn value_skips(&mut self) -> bool {
        self.value
            .as_mut()
            .is_some_and(|value| std::mem::replace(&mut value.skip, false))
    }

    pub(super) fn value_key(&mut self, key: &[u8]) {
        if key == b"cache_control" {
            if let Some(value) = &mut self.value {
                value.skip = true;
            }
            return;
        }
        self.value_bytes(MARK_KEY);
        self.value_bytes(key);
    }

    pub(super) fn value_container_end(&mut self) {
        self.value_bytes(MARK_END);
        if let Some(value) = &mut self.value {
            value.depth -= 1;
        }
        self.value_part_done();
    }

    /// Something inside the open value is complete; the value itself, if nothing is open in it.
    pub(super) fn value_part_done(&mut self) {
        if self.value.as_ref().is_some_and(|value| value.depth == 0) {
            self.value_end();
        }
    }

    fn value_end(&mut self) {
        self.flush();
        let Some(value) = self.value.take() else {
            return;
        };
        let media_bytes = self.plan.media_bytes;
        match value.node {
            Node::Value => {
                if let Some(sink) = self.sink() {
                    sink.close();
                }
            }
            Node::Media | Node::MediaList => {
                if let Some(sink) = self.sink() {
                    sink.atom(Part::Media, value.hash.digest(), media_bytes);
                }
            }
            Node::Tools => self.tools = Some((value.hash.digest(), value.bytes)),
            Node::Seed(seed) => {
                if seed == Seed::Media {
                    self.other_bytes = self.other_bytes.saturating_add(media_bytes);
                }
                if let Some(slot) = self.seeds.get_mut(seed.slot()) {
                    *slot = Some(value.hash.digest());
                }
            }
            _ => {}
        }
    }
}
