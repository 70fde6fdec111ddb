//! Numbers and words: token ids, `stream`, and the literals inside values.
//!
//! Not here: strings (strings.rs), containers (the module above).

use super::super::node::Node;
use super::strings::Ends;
use super::values::MARK_LITERAL;
use super::{GATHER_BYTES, Walker};
use crate::prefix::{BYTES_PER_TOKEN, Part, Sink, mix};

/// What the number or word that is being read means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Literal {
    /// None is being read.
    None,
    /// Nothing to us.
    Skip,
    /// Part of a value.
    Value,
    /// A token id.
    Token,
}

/// A number as a token id.
#[derive(Clone, Copy, Default)]
pub(super) struct Number {
    value: u64,
    odd: bool,
}

impl Number {
    fn push(&mut self, piece: &[u8]) {
        for &byte in piece {
            let digit = byte.wrapping_sub(b'0');
            self.odd |= digit > 9;
            self.value = self.value.wrapping_mul(10).wrapping_add(u64::from(digit));
        }
    }

    /// Four bytes, so that ids keep their boundaries. What is no id of 32 bits still has four.
    fn bytes(self) -> [u8; 4] {
        match u32::try_from(self.value) {
            Ok(id) if !self.odd => id,
            _ => mix(self.value, u64::from(self.odd)) as u32,
        }
        .to_le_bytes()
    }
}

impl<S: Sink> Walker<S> {
    pub(super) fn literal_begin(&mut self, piece: &[u8]) -> Literal {
        if self.value.is_some() {
            if self.value_skips() {
                return Literal::Skip;
            }
            self.value_bytes(MARK_LITERAL);
            return Literal::Value;
        }
        let null = piece.first() == Some(&b'n');
        match self.next_node() {
            Node::BatchItem | Node::TensorData => {
                self.number = Number::default();
                Literal::Token
            }
            Node::Stream => {
                self.stream = Some(piece.first() == Some(&b't'));
                Literal::Skip
            }
            node @ (Node::Value | Node::Media | Node::Tools | Node::Seed(_)) if !null => {
                self.value_begin(node);
                self.value_bytes(MARK_LITERAL);
                Literal::Value
            }
            Node::Call if !null => {
                self.value_begin(Node::Value);
                self.value_bytes(MARK_LITERAL);
                Literal::Value
            }
            _ => Literal::Skip,
        }
    }

    pub(super) fn literal_piece(&mut self, piece: &[u8]) {
        match self.literal {
            Literal::Value => self.value_bytes(piece),
            Literal::Token => self.number.push(piece),
            Literal::Skip | Literal::None => {}
        }
    }

    pub(super) fn literal_done(&mut self) {
        match std::mem::replace(&mut self.literal, Literal::None) {
            Literal::Value => self.value_part_done(),
            Literal::Token => self.token(),
            Literal::Skip | Literal::None => {}
        }
    }

    /// One more token id, in one step; false if this is none. Bodies with ids consist of nothing
    /// else.
    pub(super) fn token_whole(&mut self, whole: &[u8]) -> bool {
        // Not every number behind a token id is one: an object may stand among them.
        let among_tokens = self.value.is_none()
            && self.stack.last().is_some_and(|frame| {
                let node = matches!(
                    frame.node,
                    Node::Prompt | Node::BatchItem | Node::TensorData
                );
                node && !frame.object
            });
        if !self.in_tokens
            || !among_tokens
            || self.tokens_counted
            || self.gather.len() + 4 > GATHER_BYTES
        {
            return false;
        }
        self.number = Number::default();
        self.number.push(whole);
        self.gather.extend_from_slice(&self.number.bytes());
        true
    }

    /// A token id of the current prompt.
    fn token(&mut self) {
        if !self.in_tokens {
            self.in_tokens = true;
            self.tokens_counted = !self.prompt_begin();
            if let (false, Some(sink)) = (self.tokens_counted, self.sink()) {
                sink.open(Part::Tokens);
            }
        }
        if self.tokens_counted {
            self.count(BYTES_PER_TOKEN);
            return;
        }
        if self.gather.len() + 4 > GATHER_BYTES {
            self.flush();
        }
        self.gather.extend_from_slice(&self.number.bytes());
    }

    pub(super) fn tokens_end(&mut self) {
        if !std::mem::replace(&mut self.in_tokens, false) || self.tokens_counted {
            return;
        }
        self.flush();
        if let Some(sink) = self.sink() {
            sink.close();
        }
        self.ended(Ends::Prompt);
    }
}
