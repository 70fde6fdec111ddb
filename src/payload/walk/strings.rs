//! Strings: texts of the prompt, the lines at its start that are skipped, names, parts of values.
//!
//! Not here: unescaping (json.rs).

use memchr::memchr;

use super::super::node::Node;
use super::super::plan::SKIP_BYTES_MAX;
use super::{MODEL_BYTES_MAX, Walker};
use crate::prefix::{Part, Sink};

/// What the string that is being read means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Open {
    /// Nothing to us.
    Skip,
    /// Text of the current section. At its end, the message may end too.
    Part,
    /// The same, before it is known whether its start is skipped.
    Lead(Part),
    /// The same, in the line that is skipped.
    Skipped(Part),
    /// The same, behind that line.
    Behind(Part),
    /// A prompt of a batch that is not the first.
    Counted,
    /// A text beside the prompt that only counts.
    Other,
    /// A short name.
    Captured(Node),
    /// Part of a value.
    Value,
}

/// What ends with a text.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ends {
    /// A part of a message.
    Part,
    /// A prompt without roles.
    Prompt,
    /// A message of the user's that is given as its text.
    UserMessage,
    /// The system prompt.
    System,
}

impl<S: Sink> Walker<S> {
    /// Opens the string that `node` means.
    pub(super) fn open(&mut self, node: Node) -> Open {
        let (part, ends) = match node {
            Node::Text | Node::Content | Node::Block => (Part::Text, Ends::Part),
            Node::Reasoning => (Part::Reasoning, Ends::Part),
            Node::System | Node::Prompt | Node::Messages if !self.enter() => return Open::Skip,
            Node::System => (Part::Text, Ends::System),
            Node::Messages | Node::Message => (Part::Text, Ends::UserMessage),
            Node::Prompt | Node::BatchItem | Node::TensorData => {
                if !self.prompt_begin() {
                    return Open::Counted;
                }
                (Part::Text, Ends::Prompt)
            }
            Node::Batch => return Open::Other,
            Node::Value | Node::Calls | Node::Call => {
                self.value_begin(Node::Value);
                return self.value_string();
            }
            Node::Media | Node::MediaList | Node::Tools | Node::Seed(_) => {
                self.value_begin(node);
                return self.value_string();
            }
            Node::Model | Node::Role | Node::Kind | Node::Name => {
                self.capture.clear();
                self.capture_len = 0;
                return Open::Captured(node);
            }
            Node::EngineState => {
                self.engine_state = true;
                return Open::Skip;
            }
            _ => return Open::Skip,
        };
        self.ends = ends;
        self.open_part(part)
    }

    fn open_part(&mut self, part: Part) -> Open {
        let may_skip = part == Part::Text && !self.plan.skip.is_empty();
        let Some(sink) = self.sink() else {
            return Open::Skip;
        };
        if may_skip && sink.chain().is_empty() {
            self.lead.clear();
            return Open::Lead(part);
        }
        sink.open(part);
        Open::Part
    }

    /// The next bytes of the open string.
    pub(super) fn text(&mut self, piece: &[u8]) {
        if piece.is_empty() {
            return;
        }
        match self.open {
            Open::Part => {
                if let Some(sink) = self.sink() {
                    sink.text(piece);
                }
            }
            Open::Value => self.value_bytes(piece),
            Open::Counted => self.count(piece.len() as u64),
            Open::Other => self.other_bytes = self.other_bytes.saturating_add(piece.len() as u64),
            Open::Captured(_) => {
                let room = MODEL_BYTES_MAX.saturating_sub(self.capture.len());
                let kept = piece.get(..room.min(piece.len())).unwrap_or_default();
                self.capture.extend_from_slice(kept);
                self.capture_len += piece.len() as u64;
            }
            Open::Lead(part) => self.lead(part, piece),
            Open::Skipped(part) => self.skipped(part, piece),
            Open::Behind(part) => {
                if let Some(sink) = self.sink() {
                    sink.open(part);
                    sink.text(piece);
                }
                self.open = Open::Part;
            }
            Open::Skip => {}
        }
    }

    /// The start of a prompt: gathered until it is known whether it is skipped.
    fn lead(&mut self, part: Part, piece: &[u8]) {
        let room = SKIP_BYTES_MAX.saturating_sub(self.lead.len());
        let (head, tail) = piece.split_at(room.min(piece.len()));
        self.lead.extend_from_slice(head);
        let (lead, skip) = (&self.lead, &self.plan.skip);
        if skip.iter().any(|skip| lead.starts_with(skip)) {
            self.open = Open::Skipped(part);
            let lead = std::mem::take(&mut self.lead);
            self.text(&lead);
            self.text(tail);
        } else if !skip.iter().any(|skip| skip.starts_with(lead)) {
            self.lead_over(part);
            self.text(tail);
        }
    }

    /// The start of a prompt is not skipped.
    pub(super) fn lead_over(&mut self, part: Part) {
        let lead = std::mem::take(&mut self.lead);
        if let Some(sink) = self.sink() {
            sink.open(part);
            sink.text(&lead);
        }
        self.open = Open::Part;
    }

    /// The rest of a skipped line; the text goes on behind it.
    fn skipped(&mut self, part: Part, piece: &[u8]) {
        let Some(at) = memchr(b'\n', piece) else {
            return;
        };
        self.open = Open::Behind(part);
        self.text(piece.get(at + 1..).unwrap_or_default());
    }

    pub(super) fn count(&mut self, bytes: u64) {
        if let Some(section) = self.sections.get_mut(self.current) {
            section.rest_bytes = section.rest_bytes.saturating_add(bytes);
        }
    }

    /// The open string is complete.
    pub(super) fn close(&mut self) {
        if let Open::Lead(part) = self.open {
            self.lead_over(part);
        }
        match std::mem::replace(&mut self.open, Open::Skip) {
            Open::Part => {
                if let Some(sink) = self.sink() {
                    sink.close();
                }
                self.ended(self.ends);
            }
            Open::Skipped(_) | Open::Behind(_) => self.ended(self.ends),
            Open::Captured(Node::Model) => {
                // A body inside the body names the model only if the outer one does not.
                if self.stack.len() == 1 || self.model.is_none() {
                    self.model = Some(self.capture.clone());
                }
            }
            Open::Captured(Node::Role) => self.role = Some(self.captured()),
            Open::Captured(Node::Kind) => self.kind = Some(self.captured()),
            Open::Captured(_) => self.name = Some(self.captured()),
            Open::Value => self.value_part_done(),
            Open::Lead(_) | Open::Counted | Open::Other | Open::Skip => {}
        }
    }
}
