//! JSON events → prompt parts: where in a body the prompt lies, for every family at once.
//!
//! Guarantee: constant memory: a bounded stack of [`Node`]s, one open string, one open value; the
//! order of a body's members changes nothing but their order inside a message or a value. Not
//! here: which member of which API means what (the family files), chains (prefix.rs), tokenizing
//! (json.rs).

mod numbers;
mod strings;
mod values;

use std::sync::Arc;

use xxhash_rust::xxh64::xxh64;

use super::message;
use super::node::{Node, SEEDS_MAX, Seed};
use super::plan::Compiled;
use super::pointer::Target;
use super::{FAMILIES, NATIVE, SLOTS_OF_POINTERS, common};
use crate::json::{Container, Handler, Visit};
use crate::prefix::{MODEL_BYTES_MAX, Sink, mix};
use numbers::{Literal, Number};
use strings::{Ends, Open};
use values::Value;

/// Values inside each other whose meaning differs: body, messages, message, content, block, and
/// tool results within each other. Deeper ones are passed over.
const STACK_MAX: usize = 16;

/// Places in one body where a prompt may lie. The preferred one counts.
const SECTIONS_MAX: usize = 8;

/// Names of messages and tensors are looked at cut to this; they count with
/// [`MODEL_BYTES_MAX`] bytes and their length.
const NAME_BYTES_MAX: usize = 32;

/// Small pieces of a value, and token ids, are gathered to pieces of this size.
const GATHER_BYTES: usize = 512;

#[derive(Clone, Copy)]
struct Frame {
    node: Node,
    object: bool,
    /// Elements seen, in an array.
    index: u32,
}

/// One place where a prompt lies.
pub(super) struct Section<S> {
    /// The smaller, the more it is preferred.
    pub(super) slot: u8,
    /// Index of the family that names this place.
    pub(super) family: usize,
    pub(super) sink: S,
    /// Prompts in it.
    pub(super) prompts: u32,
    /// Bytes of text in those prompts of a batch that are not the first.
    pub(super) rest_bytes: u64,
    /// Whether its end was seen.
    pub(super) complete: bool,
}

/// The slot of the system section.
pub(super) const SLOT_SYSTEM: u8 = u8::MAX;

/// A short string.
#[derive(Clone, Copy)]
struct Name {
    bytes: [u8; NAME_BYTES_MAX],
    len: usize,
    hash: u64,
}

impl Name {
    fn shown(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

/// See the module.
pub(super) struct Walker<S> {
    families: u32,
    /// Whether prompts are looked for where JSON pointers say.
    native: bool,
    plan: Arc<Compiled>,
    started: bool,
    stack: Vec<Frame>,
    /// What the value of the member means whose key came last.
    pending: Node,
    /// The section that starts with that value: slot and family.
    pending_section: Option<(u8, usize)>,
    open: Open,
    ends: Ends,
    /// The start of a prompt, before it is known whether it is skipped.
    lead: Vec<u8>,
    /// The short string that is being read, cut, and its length.
    capture: Vec<u8>,
    capture_len: u64,
    value: Option<Value>,
    gather: Vec<u8>,
    literal: Literal,
    number: Number,
    /// Whether token ids of a prompt are being read, and whether they are only counted.
    in_tokens: bool,
    tokens_counted: bool,
    role: Option<Name>,
    kind: Option<Name>,
    name: Option<Name>,
    current: usize,
    /// The places where a prompt was found.
    pub(super) sections: Vec<Section<S>>,
    /// Whether there is any.
    pub(super) claimed: bool,
    /// Bytes of text that lie in no section.
    pub(super) other_bytes: u64,
    pub(super) model: Option<Vec<u8>>,
    /// The tools' hash and length.
    pub(super) tools: Option<(u64, u64)>,
    pub(super) seeds: [Option<u64>; SEEDS_MAX],
    pub(super) stream: Option<bool>,
    pub(super) engine_state: bool,
}

impl<S: Sink> Walker<S> {
    pub(super) fn new(families: u32, native: bool, plan: Arc<Compiled>) -> Self {
        Self {
            families,
            native,
            plan,
            started: false,
            stack: Vec::with_capacity(STACK_MAX),
            pending: Node::Skip,
            pending_section: None,
            open: Open::Skip,
            ends: Ends::Part,
            lead: Vec::new(),
            capture: Vec::new(),
            capture_len: 0,
            value: None,
            gather: Vec::new(),
            literal: Literal::None,
            number: Number::default(),
            in_tokens: false,
            tokens_counted: false,
            role: None,
            kind: None,
            name: None,
            current: 0,
            sections: Vec::new(),
            claimed: false,
            other_bytes: 0,
            model: None,
            tools: None,
            seeds: [None; SEEDS_MAX],
            stream: None,
            engine_state: false,
        }
    }

    /// The input is over: what waits for more bytes goes out.
    pub(super) fn finish(&mut self) {
        self.flush();
        if let Open::Lead(part) = self.open {
            self.lead_over(part);
        }
    }

    pub(super) fn seed(&self, seed: Seed) -> Option<u64> {
        self.seeds.get(seed.slot()).copied().flatten()
    }

    fn sink(&mut self) -> Option<&mut S> {
        self.sections
            .get_mut(self.current)
            .map(|section| &mut section.sink)
    }

    /// Starts the section that the value which comes now is; a member that comes twice counts as
    /// it came last. False: there are too many.
    fn enter(&mut self) -> bool {
        let Some((slot, family)) = self.pending_section.take() else {
            return true;
        };
        self.claimed = true;
        let section = Section {
            slot,
            family,
            sink: S::start(self.plan.fixed),
            prompts: 0,
            rest_bytes: 0,
            complete: false,
        };
        let known = self.sections.iter().position(|known| known.slot == slot);
        self.current = known.unwrap_or(self.sections.len());
        if let Some(place) = self.sections.get_mut(self.current) {
            *place = section;
        } else if self.sections.len() < SECTIONS_MAX {
            self.sections.push(section);
        } else {
            return false;
        }
        true
    }

    /// What the value that comes now means.
    fn next_node(&mut self) -> Node {
        let Some(frame) = self.stack.last_mut() else {
            let first = !self.started;
            self.started = true;
            return if first { Node::Body } else { Node::Skip };
        };
        if frame.object {
            return std::mem::replace(&mut self.pending, Node::Skip);
        }
        let index = frame.index;
        frame.index = index.saturating_add(1);
        match frame.node {
            Node::Prompt => Node::BatchItem,
            Node::Messages => Node::Message,
            Node::Tensors => Node::Tensor,
            Node::System | Node::Content => Node::Content,
            Node::Calls => Node::Call,
            Node::MediaList => Node::Media,
            Node::Pointed(set, depth) => self.pointed(set, depth, index.to_string().as_bytes()),
            node @ (Node::BatchItem | Node::TensorData | Node::Batch) => node,
            _ => Node::Skip,
        }
    }

    /// What a member means.
    fn member(&mut self, key: &[u8]) -> Node {
        let Some(frame) = self.stack.last() else {
            return Node::Skip;
        };
        match frame.node {
            Node::Body => self.body_member(key),
            Node::Parameters => common::parameter(key),
            Node::Batch => Node::Batch,
            Node::Pointed(set, depth) => self.pointed(set, depth, key),
            Node::Message => message::member(key),
            Node::System | Node::Content | Node::Block => message::block_member(key),
            Node::ReasoningBlock => message::reasoning_member(key),
            Node::Call => message::call_member(key),
            Node::Tensor => match key {
                b"name" => Node::Name,
                b"data" if tensor_is_text(self.name.as_ref()) => Node::TensorData,
                _ => Node::Skip,
            },
            _ => Node::Skip,
        }
    }

    fn body_member(&mut self, key: &[u8]) -> Node {
        if self.stack.len() == 1 {
            let set = self.plan.pointers.begin(key, self.native);
            if set != 0 {
                let node = self.pointed(set, 0, key);
                if node != Node::Skip {
                    return node;
                }
            }
        }
        self.claim(key, None)
    }

    /// The meaning that the first family which knows a member gives it.
    fn claim(&mut self, key: &[u8], slot: Option<u8>) -> Node {
        let slots = SLOTS_OF_POINTERS..;
        for (order, (index, family)) in slots.zip(FAMILIES.iter().enumerate()) {
            if self.families >> index & 1 == 1
                && let Some(node) = (family.member)(key)
            {
                return self.opens(node, slot.unwrap_or(order), index);
            }
        }
        common::member(key)
    }

    /// Notes the section that a member's value starts, if it is one.
    fn opens(&mut self, node: Node, slot: u8, family: usize) -> Node {
        self.pending_section = match node {
            Node::Prompt | Node::Messages | Node::Tensors => Some((slot, family)),
            Node::System => Some((SLOT_SYSTEM, family)),
            _ => None,
        };
        node
    }

    /// One step along JSON pointers.
    fn pointed(&mut self, set: u32, depth: u8, key: &[u8]) -> Node {
        let (target, rest) = self.plan.pointers.step(set, depth, key);
        match target {
            Some(Target::Input(input)) => Node::Seed(Seed::Input(input)),
            Some(Target::Prompt(slot)) => match self.claim(key, Some(slot)) {
                node @ (Node::Prompt | Node::Messages | Node::Tensors) => node,
                _ => self.opens(Node::Prompt, slot, NATIVE),
            },
            None if rest != 0 => Node::Pointed(rest, depth + 1),
            None => Node::Skip,
        }
    }

    fn push(&mut self, node: Node, container: Container) -> Visit {
        if self.stack.len() == STACK_MAX {
            return Visit::Over;
        }
        let object = container == Container::Object;
        self.stack.push(Frame {
            node,
            object,
            index: 0,
        });
        Visit::Into
    }

    fn unname(&mut self) {
        self.role = None;
        self.kind = None;
        self.name = None;
    }

    fn message_end(&mut self) {
        let named = self.role.take().or(self.kind.take());
        let name = self.name.take().map_or(0, |name| name.hash);
        let label = mix(named.map_or(0, |named| named.hash), name);
        if let Some(sink) = self.sink() {
            sink.message_end(named.as_ref().map_or(b"", Name::shown), label);
        }
    }

    fn end_message(&mut self, role: &[u8], label: u64) {
        if let Some(sink) = self.sink() {
            sink.message_end(role, label);
        }
    }

    fn captured(&mut self) -> Name {
        let mut bytes = [0; NAME_BYTES_MAX];
        for (to, from) in bytes.iter_mut().zip(&self.capture) {
            *to = *from;
        }
        Name {
            bytes,
            len: self.capture.len().min(NAME_BYTES_MAX),
            hash: name_hash(&self.capture, self.capture_len),
        }
    }

    /// A prompt of a section begins; whether it is the one that makes the key.
    fn prompt_begin(&mut self) -> bool {
        let Some(section) = self.sections.get_mut(self.current) else {
            return false;
        };
        section.prompts = section.prompts.saturating_add(1);
        section.prompts == 1
    }

    fn ended(&mut self, ends: Ends) {
        match ends {
            Ends::Part => {}
            Ends::Prompt => self.end_message(b"", 0),
            Ends::UserMessage => self.end_message(b"user", role_label(b"user")),
            Ends::System => self.system_end(),
        }
    }

    /// A system prompt of which everything was skipped leaves no message.
    fn system_end(&mut self) {
        if self.sink().is_some_and(|sink| !sink.chain().is_empty()) {
            self.end_message(b"system", role_label(b"system"));
        }
        if let Some(section) = self.sections.get_mut(self.current) {
            section.complete = true;
        }
    }
}

/// The containers of a body.
impl<S: Sink> Walker<S> {
    fn container(&mut self, node: Node, container: Container) -> Visit {
        let object = container == Container::Object;
        match node {
            Node::Prompt | Node::Messages if object => {
                self.pending_section = None;
                self.push(Node::Body, container)
            }
            Node::Prompt | Node::Messages | Node::Tensors | Node::System => {
                if (node == Node::Tensors && object) || !self.enter() {
                    return Visit::Over;
                }
                self.push(node, container)
            }
            Node::BatchItem | Node::Message if object => {
                self.unname();
                self.push(Node::Message, container)
            }
            Node::Tensor if object => {
                self.unname();
                self.push(node, container)
            }
            Node::Body | Node::Parameters | Node::Block | Node::ReasoningBlock | Node::Call
                if object =>
            {
                self.push(node, container)
            }
            Node::Calls if object => self.push(Node::Call, container),
            Node::TensorData | Node::MediaList | Node::Calls if !object => {
                self.push(node, container)
            }
            Node::Pointed(..) | Node::Content | Node::BatchItem | Node::Batch => {
                self.push(node, container)
            }
            Node::Value | Node::Media | Node::MediaList | Node::Tools | Node::Seed(_) => {
                self.value_begin(node);
                self.value_container(container)
            }
            Node::EngineState => {
                self.engine_state = true;
                Visit::Over
            }
            _ => Visit::Over,
        }
    }

    fn container_end(&mut self) {
        let Some(frame) = self.stack.pop() else {
            return;
        };
        match frame.node {
            Node::Message => self.message_end(),
            Node::System => self.system_end(),
            Node::Prompt | Node::BatchItem | Node::TensorData => self.tokens_end(),
            _ => {}
        }
    }
}

impl<S: Sink> Handler for Walker<S> {
    fn begin(&mut self, container: Container) -> Visit {
        if self.value.is_some() {
            return self.value_container(container);
        }
        let node = self.next_node();
        self.container(node, container)
    }

    fn end(&mut self) {
        if self.value.is_some() {
            self.value_container_end();
        } else {
            self.container_end();
        }
    }

    fn key(&mut self, key: &[u8]) {
        if self.value.is_some() {
            self.value_key(key);
        } else {
            self.pending = self.member(key);
        }
    }

    fn string_begin(&mut self) {
        self.open = if self.value.is_some() {
            self.value_string()
        } else {
            let node = self.next_node();
            self.open(node)
        };
    }

    fn string(&mut self, piece: &[u8]) {
        self.text(piece);
    }

    fn string_end(&mut self) {
        self.close();
    }

    fn literal(&mut self, piece: &[u8]) {
        if self.literal == Literal::None {
            self.literal = self.literal_begin(piece);
        }
        self.literal_piece(piece);
    }

    fn literal_end(&mut self) {
        self.literal_done();
    }

    fn literal_whole(&mut self, whole: &[u8]) {
        if !self.token_whole(whole) {
            self.literal(whole);
            self.literal_done();
        }
    }
}

/// The label of a message that has this role and no name.
fn role_label(role: &[u8]) -> u64 {
    mix(name_hash(role, role.len() as u64), 0)
}

/// The hash of a short string that is kept cut.
fn name_hash(kept: &[u8], len: u64) -> u64 {
    xxh64(kept, len)
}

/// Whether a tensor's strings are prompts. Names of other text inputs (stop words, say) are known
/// to servers that take them; a tensor whose data comes before its name is taken.
fn tensor_is_text(name: Option<&Name>) -> bool {
    const TEXTS: [&[u8]; 5] = [b"text", b"prompt", b"input", b"query", b"message"];
    let Some(name) = name else {
        return true;
    };
    let name = name.shown().to_ascii_lowercase();
    let has = |part: &[u8]| name.windows(part.len()).any(|window| window == part);
    TEXTS.iter().any(|part| has(part)) && !has(b"length")
}
