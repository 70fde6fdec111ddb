//! A prompt as one row of pieces, in the order in which the engine sees them.
//!
//! Guarantee: positions are those of the checkpoints. Not here: what is found out with them.

use prefix_router::payload::Tools;
use prefix_router::payload::parts::{Explained, Message, Parts, Place};
use prefix_router::prefix::{BYTES_PER_TOKEN, Part, Prompt};

use super::show;

/// What a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Tools,
    /// A message without content.
    Empty,
    Part(Part),
}

/// One part of the prompt, with where it stands.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub kind: Kind,
    /// The number of its message, from 1; 0 for tools.
    pub message: usize,
    pub role: String,
    /// Bytes of text before it.
    pub from: u64,
    pub len: u64,
    /// Its bytes, where they are known.
    pub bytes: Vec<u8>,
    /// Its hash, where only that is known.
    pub hash: Option<u64>,
    /// The hash of its message's role and name, on the message's last piece.
    pub label: Option<u64>,
}

impl Piece {
    /// What it is, in words.
    pub(super) fn name(&self) -> String {
        let what = match self.kind {
            Kind::Tools => return "tools".into(),
            Kind::Empty => "nothing",
            Kind::Part(Part::Text) => "text",
            Kind::Part(Part::Reasoning) => "reasoning",
            Kind::Part(Part::Value) => "tool data",
            Kind::Part(Part::Media) => "image or file",
            Kind::Part(Part::Tokens) => "token ids",
            Kind::Part(Part::Raw) => return "the body's bytes".into(),
        };
        match self.role.as_str() {
            "" => what.into(),
            role => format!("{role}: {what}"),
        }
    }

    /// An excerpt of its bytes around `at`, of at most `width` characters.
    pub(super) fn excerpt(&self, at: usize, width: usize) -> String {
        match self.kind {
            Kind::Part(Part::Tokens) => {
                let bytes = self.bytes.get(at / 4 * 4..).unwrap_or_default();
                let ids = bytes.chunks(BYTES_PER_TOKEN as usize).take(width / 2);
                let id = |id: &[u8]| id.try_into().map_or(0, u32::from_le_bytes).to_string();
                show::cut(&ids.map(id).collect::<Vec<_>>().join(" "), width)
            }
            Kind::Part(_) if self.hash.is_none() => {
                let bytes = self.bytes.get(at..).unwrap_or_default();
                // A character has four bytes at most.
                let bytes = bytes.get(..width * 4).unwrap_or(bytes);
                show::cut(&show::readable(bytes), width)
            }
            _ => String::new(),
        }
    }
}

/// All pieces. Tools that are left out of the key are not among them.
pub(super) fn of(explained: &Explained) -> Vec<Piece> {
    let mut row = Row::default();
    let tools = explained.tools;
    let at = |place| tools.filter(|tools| tools.place == place);
    if at(Tools::BeforeSystem).is_some() {
        row.tools(explained);
    }
    let has_system = explained.sections.iter().any(|(place, parts)| {
        *place == Place::System
            && parts
                .messages
                .iter()
                .any(|message| !message.parts.is_empty())
    });
    let mut waits = at(Tools::AfterSystem).is_some();
    for (place, parts) in &explained.sections {
        if waits && !has_system && !begins_with_system(parts) {
            row.tools(explained);
            waits = false;
        }
        for (index, message) in parts.messages.iter().enumerate() {
            row.message(message);
            let system = match place {
                Place::System => index + 1 == parts.messages.len(),
                _ => !has_system && index == 0,
            };
            if waits && system {
                row.tools(explained);
                waits = false;
            }
        }
    }
    row.pieces
}

fn begins_with_system(parts: &Parts) -> bool {
    let first = parts
        .messages
        .first()
        .and_then(|first| first.role.as_deref());
    matches!(first, Some(b"system" | b"developer"))
}

#[derive(Default)]
struct Row {
    pieces: Vec<Piece>,
    position: u64,
    messages: usize,
}

impl Row {
    fn tools(&mut self, explained: &Explained) {
        let Some(tools) = explained.tools else {
            return;
        };
        self.pieces.push(Piece {
            kind: Kind::Tools,
            message: 0,
            role: String::new(),
            from: self.position,
            len: tools.bytes,
            bytes: Vec::new(),
            hash: Some(tools.hash),
            label: None,
        });
        self.position += tools.bytes;
    }

    fn message(&mut self, message: &Message) {
        self.messages += 1;
        let role = message.role.as_deref().unwrap_or_default();
        let role = String::from_utf8_lossy(role).into_owned();
        let piece = |kind, from, len, bytes, hash| Piece {
            kind,
            message: self.messages,
            role: role.clone(),
            from,
            len,
            bytes,
            hash,
            label: None,
        };
        let first = self.pieces.len();
        for part in &message.parts {
            let bytes = part.bytes.clone();
            let from = self.position;
            self.pieces.push(piece(
                Kind::Part(part.part),
                from,
                part.len,
                bytes,
                part.hash,
            ));
            self.position += part.len;
        }
        if self.pieces.len() == first {
            self.pieces
                .push(piece(Kind::Empty, self.position, 0, Vec::new(), None));
        }
        if let (Some(last), true) = (self.pieces.last_mut(), message.role.is_some()) {
            last.label = Some(message.label);
        }
    }
}

/// Tokens by the filter's estimate.
pub(super) fn tokens(bytes: u64) -> u64 {
    bytes / BYTES_PER_TOKEN
}

/// The checkpoint's hash with what is mixed into it, as 16 hexadecimal digits.
pub(super) fn hash_of(prompt: &Prompt, at: &prefix_router::prefix::Checkpoint) -> String {
    format!("{:016x}", prompt.key(at).0)
}
