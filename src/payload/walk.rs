//! JSON events → prompt parts: where in a body the prompt lies, for every family at once.
//!
//! Guarantee: constant memory: a bounded stack of [`Node`]s, one open string, one open value; the
//! order of a body's members changes nothing but their order inside a message or a value. Not
//! here: which member of which API means what (the family files), chains (prefix.rs), tokenizing
//! (json.rs).

use memchr::memchr;
use xxhash_rust::xxh64::{Xxh64, xxh64};

use super::FAMILIES;
use super::message;
use super::pointer::{Pointers, Target};
use crate::json::{Container, Handler, Visit};
use crate::prefix::{BYTES_PER_TOKEN, MODEL_BYTES_MAX, Part, Sink, mix};

/// What a JSON value means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    /// Nothing to us.
    Skip,
    /// An object whose members the families name.
    Body,
    /// On the way to what JSON pointers name: which of them, and how many segments are done.
    Pointed(u16, u8),
    /// A prompt without roles: text, token ids, a batch of either, or messages after all.
    Prompt,
    /// Messages, or one text that stands for the user's.
    Messages,
    /// A system prompt beside the conversation.
    System,
    /// The named tensors of an inference request.
    Tensors,
    /// One tensor.
    Tensor,
    /// The values of a tensor.
    TensorData,
    /// Texts that are counted and make no key.
    Batch,
    /// One prompt of a batch.
    BatchItem,
    /// One message.
    Message,
    /// A message's content: text, a block, or blocks.
    Content,
    /// One block of a content.
    Block,
    /// Plain text.
    Text,
    /// Text of the model's reasoning.
    Reasoning,
    /// Tool calls.
    Calls,
    /// One tool call or tool result.
    Call,
    /// A value that counts with all that is in it.
    Value,
    /// An image, a sound, a file: a value that counts as a whole.
    Media,
    /// Several of them.
    MediaList,
    /// The tools.
    Tools,
    /// A value that is mixed into the key.
    Seed(Seed),
    /// The model's name.
    Model,
    /// Whether the answer is streamed.
    Stream,
    /// A reference to state that one engine holds.
    EngineState,
    /// A message's role.
    Role,
    /// A message's type, where it has no role.
    Kind,
    /// A message's, call's or tensor's name.
    Name,
}

/// What is mixed into a key beside the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seed {
    /// A LoRA adapter beside the model.
    Adapter,
    /// `cache_salt`.
    Salt,
    /// `prompt_cache_key`.
    CacheKey,
    /// Documents that the template renders before the conversation.
    Documents,
    /// A chat template that replaces the model's.
    Template,
    /// Earlier turns, known to the engine or given as tokens.
    Context,
    /// Images that lie beside the prompt.
    Media,
    /// An input of the template, listed in the config.
    Input(u8),
}

/// JSON pointers to template inputs that are read.
pub(super) const INPUTS_MAX: usize = 8;

const SEEDS_MAX: usize = 7 + INPUTS_MAX;

impl Seed {
    pub(super) fn slot(self) -> usize {
        match self {
            Self::Adapter => 0,
            Self::Salt => 1,
            Self::CacheKey => 2,
            Self::Documents => 3,
            Self::Template => 4,
            Self::Context => 5,
            Self::Media => 6,
            Self::Input(input) => 7 + usize::from(input),
        }
    }
}

/// Values inside each other whose meaning differs: body, messages, message, content, block, and
/// tool results within each other. Deeper ones are passed over.
const STACK_MAX: usize = 16;

/// Places in one body where a prompt may lie. The preferred one counts.
const SECTIONS_MAX: usize = 8;

/// Roles are shown cut to this; they count whole.
pub(super) const ROLE_BYTES_MAX: usize = 32;

/// The longest text that is looked for at a prompt's start.
pub(super) const SKIP_BYTES_MAX: usize = 256;

/// Token ids are gathered to pieces of this size.
const TOKENS_BYTES: usize = 256;

// Marks inside a value's canonical bytes. None of them occurs in UTF-8.
const MARK_OBJECT: &[u8] = &[0xf8];
const MARK_ARRAY: &[u8] = &[0xf9];
const MARK_END: &[u8] = &[0xfa];
const MARK_KEY: &[u8] = &[0xfb];
const MARK_STRING: &[u8] = &[0xfc];
const MARK_LITERAL: &[u8] = &[0xfd];

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

/// What the string that is being read means.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Open {
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

/// What ends with a string.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    Part,
    Prompt,
    UserMessage,
    System,
}

/// A short string: its first bytes, and the hash of all.
#[derive(Clone)]
pub(super) struct Captured {
    pub(super) bytes: Vec<u8>,
    hash: Xxh64,
}

impl Captured {
    fn new() -> Self {
        Self {
            bytes: Vec::new(),
            hash: Xxh64::new(0),
        }
    }

    fn push(&mut self, piece: &[u8]) {
        self.hash.update(piece);
        let room = MODEL_BYTES_MAX.saturating_sub(self.bytes.len());
        self.bytes.extend(piece.iter().take(room));
    }

    pub(super) fn hash(&self) -> u64 {
        self.hash.digest()
    }
}

/// The value that is being read as a whole.
struct Value {
    node: Node,
    /// Containers open in it.
    depth: u32,
    hash: Xxh64,
    bytes: u64,
    /// The next member's value is left out.
    skip: bool,
}

/// See the module.
pub(super) struct Walker<S> {
    families: u32,
    pointers: Pointers,
    skip: Vec<Vec<u8>>,
    fixed: Option<u32>,
    media_bytes: u64,
    started: bool,
    stack: Vec<Frame>,
    pending: Node,
    open: Open,
    ends: Ends,
    value: Option<Value>,
    capture: Captured,
    lead: Vec<u8>,
    literal: Literal,
    number: Number,
    tokens: Vec<u8>,
    /// Whether token ids of a prompt are being read, and whether they are only counted.
    in_tokens: bool,
    tokens_counted: bool,
    role: Option<Captured>,
    kind: Option<Captured>,
    name: Option<Captured>,
    current: usize,
    pub(super) sections: Vec<Section<S>>,
    pub(super) claimed: bool,
    /// Bytes of text that lie in no section.
    pub(super) other_bytes: u64,
    pub(super) model: Option<Captured>,
    pub(super) tools: Option<(u64, u64)>,
    pub(super) seeds: [Option<u64>; SEEDS_MAX],
    pub(super) stream: Option<bool>,
    pub(super) engine_state: bool,
}

/// What the number or word that is being read means.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Literal {
    None,
    Skip,
    Value,
    Token,
}

/// A number as a token id.
#[derive(Clone, Copy, Default)]
struct Number {
    value: u64,
    digits: bool,
    odd: bool,
}

impl Number {
    fn push(&mut self, piece: &[u8]) {
        for &byte in piece {
            if byte.is_ascii_digit() {
                self.digits = true;
                self.value = self
                    .value
                    .wrapping_mul(10)
                    .wrapping_add(u64::from(byte - b'0'));
            } else {
                self.odd = true;
                self.value = self.value.wrapping_mul(31).wrapping_add(u64::from(byte));
            }
        }
    }

    /// Four bytes, so that ids keep their boundaries. What is no id of 32 bits still has four.
    fn bytes(self) -> [u8; 4] {
        match u32::try_from(self.value) {
            Ok(id) if !self.odd => id,
            _ => (mix(self.value, u64::from(self.odd)) >> 32) as u32,
        }
        .to_le_bytes()
    }
}

impl<S: Sink> Walker<S> {
    pub(super) fn new(
        families: u32,
        pointers: Pointers,
        skip: Vec<Vec<u8>>,
        fixed: Option<u32>,
        image_tokens: u32,
    ) -> Self {
        Self {
            families,
            pointers,
            skip,
            fixed,
            media_bytes: u64::from(image_tokens) * BYTES_PER_TOKEN,
            started: false,
            stack: Vec::new(),
            pending: Node::Skip,
            open: Open::Skip,
            ends: Ends::Part,
            value: None,
            capture: Captured::new(),
            lead: Vec::new(),
            literal: Literal::None,
            number: Number::default(),
            tokens: Vec::new(),
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
        self.flush_tokens();
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

    /// Starts the section of a slot; a member that comes twice counts as it came last.
    fn enter(&mut self, slot: u8, family: usize) -> bool {
        let section = Section {
            slot,
            family,
            sink: S::start(self.fixed),
            prompts: 0,
            rest_bytes: 0,
            complete: false,
        };
        if let Some(at) = self
            .sections
            .iter()
            .position(|section| section.slot == slot)
        {
            self.current = at;
            if let Some(place) = self.sections.get_mut(at) {
                *place = section;
            }
            return true;
        }
        if self.sections.len() == SECTIONS_MAX {
            return false;
        }
        self.current = self.sections.len();
        self.sections.push(section);
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
            Node::Batch => Node::Batch,
            Node::Pointed(set, depth) => self.pointed(set, depth, key),
            Node::Message => message::member(key),
            Node::System | Node::Content | Node::Block => message::block_member(key),
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
            let set = self.pointers.begin(key);
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
        let slots = super::SLOTS_OF_POINTERS..;
        for (order, (index, family)) in slots.zip(FAMILIES.iter().enumerate()) {
            if self.families >> index & 1 == 1
                && let Some(node) = (family.member)(key)
            {
                return self.opens(node, slot.unwrap_or(order), index);
            }
        }
        super::common::member(key)
    }

    /// Starts a section if a member's value is one.
    fn opens(&mut self, node: Node, slot: u8, family: usize) -> Node {
        let slot = match node {
            Node::Prompt | Node::Messages | Node::Tensors => slot,
            Node::System => SLOT_SYSTEM,
            _ => return node,
        };
        if self.enter(slot, family) {
            node
        } else {
            Node::Skip
        }
    }

    /// One step along JSON pointers.
    fn pointed(&mut self, set: u16, depth: u8, key: &[u8]) -> Node {
        let (target, rest) = self.pointers.step(set, depth, key);
        match target {
            Some(Target::Input(input)) => Node::Seed(Seed::Input(input)),
            Some(Target::Prompt(slot)) => match self.claim(key, Some(slot)) {
                node @ (Node::Prompt | Node::Messages | Node::Tensors) => node,
                _ => self.opens(Node::Prompt, slot, super::NATIVE),
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

    fn message_begin(&mut self) {
        self.role = None;
        self.kind = None;
        self.name = None;
    }

    fn message_end(&mut self) {
        let named = self.role.take().or(self.kind.take());
        let name = self.name.take().map_or(0, |name| name.hash());
        let hash = named.as_ref().map_or(0, Captured::hash);
        let role = named.map(|named| named.bytes).unwrap_or_default();
        self.end_message(&role, mix(hash, name));
    }

    fn end_message(&mut self, role: &[u8], label: u64) {
        let role = role.get(..ROLE_BYTES_MAX).unwrap_or(role);
        if let Some(sink) = self.sink() {
            sink.message_end(role, label);
        }
    }

    /// A prompt of a section begins; whether it is the one that makes the key.
    fn prompt_begin(&mut self) -> bool {
        self.claimed = true;
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
            Ends::UserMessage => self.end_message(b"user", mix(xxh64(b"user", 0), 0)),
            Ends::System => self.system_end(),
        }
    }

    /// A system prompt of which everything was skipped leaves no message.
    fn system_end(&mut self) {
        if self.sink().is_some_and(|sink| !sink.chain().is_empty()) {
            self.end_message(b"system", mix(xxh64(b"system", 0), 0));
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
            Node::Body if object => self.push(node, container),
            Node::Pointed(..) | Node::Content => self.push(node, container),
            Node::System => {
                self.claimed = true;
                self.push(node, container)
            }
            Node::Prompt | Node::Messages if object => self.push(Node::Body, container),
            Node::Prompt | Node::Messages | Node::Tensors if !object => {
                self.claimed = true;
                self.push(node, container)
            }
            Node::BatchItem | Node::Message if object => {
                self.claimed = true;
                self.message_begin();
                self.push(Node::Message, container)
            }
            Node::BatchItem | Node::Batch => self.push(node, container),
            Node::Tensor if object => {
                self.message_begin();
                self.push(node, container)
            }
            Node::TensorData | Node::MediaList | Node::Calls if !object => {
                self.push(node, container)
            }
            Node::Block | Node::Call if object => self.push(node, container),
            Node::Calls if object => self.push(Node::Call, container),
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

/// Values that count as a whole.
impl<S: Sink> Walker<S> {
    fn value_begin(&mut self, node: Node) {
        if node == Node::Value
            && let Some(sink) = self.sink()
        {
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

    fn value_bytes(&mut self, bytes: &[u8]) {
        let Some(value) = &mut self.value else {
            return;
        };
        if value.node == Node::Value {
            if let Some(sink) = self.sink() {
                sink.text(bytes);
            }
            return;
        }
        value.hash.update(bytes);
        value.bytes += bytes.len() as u64;
    }

    fn value_container(&mut self, container: Container) -> Visit {
        if self.value_skips() {
            return Visit::Over;
        }
        if let Some(value) = &mut self.value {
            value.depth += 1;
        }
        self.value_bytes(if container == Container::Object {
            MARK_OBJECT
        } else {
            MARK_ARRAY
        });
        Visit::Into
    }

    /// Whether the value that comes now, inside the open one, is left out.
    fn value_skips(&mut self) -> bool {
        self.value
            .as_mut()
            .is_some_and(|value| std::mem::replace(&mut value.skip, false))
    }

    fn value_key(&mut self, key: &[u8]) {
        if key == b"cache_control" {
            if let Some(value) = &mut self.value {
                value.skip = true;
            }
            return;
        }
        self.value_bytes(MARK_KEY);
        self.value_bytes(key);
    }

    fn value_container_end(&mut self) {
        self.value_bytes(MARK_END);
        let Some(value) = &mut self.value else {
            return;
        };
        value.depth -= 1;
        if value.depth == 0 {
            self.value_end();
        }
    }

    fn value_end(&mut self) {
        let Some(value) = self.value.take() else {
            return;
        };
        let hash = value.hash.digest();
        match value.node {
            Node::Value => {
                if let Some(sink) = self.sink() {
                    sink.close();
                }
            }
            Node::Media | Node::MediaList => {
                let bytes = self.media_bytes;
                if let Some(sink) = self.sink() {
                    sink.atom(Part::Media, hash, bytes);
                }
            }
            Node::Tools => self.tools = Some((hash, value.bytes)),
            Node::Seed(seed) => {
                if seed == Seed::Media {
                    self.other_bytes = self.other_bytes.saturating_add(self.media_bytes);
                }
                if let Some(slot) = self.seeds.get_mut(seed.slot()) {
                    *slot = Some(hash);
                }
            }
            _ => {}
        }
    }
}

/// Strings.
impl<S: Sink> Walker<S> {
    /// Opens the string that `node` means.
    fn open(&mut self, node: Node) -> Open {
        let (part, ends) = match node {
            Node::Text | Node::Content | Node::Block => (Part::Text, Ends::Part),
            Node::Reasoning => (Part::Reasoning, Ends::Part),
            Node::System => {
                self.claimed = true;
                (Part::Text, Ends::System)
            }
            Node::Prompt | Node::BatchItem | Node::TensorData => {
                if !self.prompt_begin() {
                    return Open::Counted;
                }
                (Part::Text, Ends::Prompt)
            }
            Node::Messages | Node::Message => {
                self.claimed = true;
                (Part::Text, Ends::UserMessage)
            }
            Node::Batch => return Open::Other,
            Node::Value | Node::Calls | Node::Call => {
                self.value_begin(Node::Value);
                self.value_bytes(MARK_STRING);
                return Open::Value;
            }
            Node::Media | Node::MediaList | Node::Tools | Node::Seed(_) => {
                self.value_begin(node);
                self.value_bytes(MARK_STRING);
                return Open::Value;
            }
            Node::Model | Node::Role | Node::Kind | Node::Name => {
                self.capture = Captured::new();
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
        let leads = !self.skip.is_empty() && part == Part::Text;
        let Some(sink) = self.sink() else {
            return Open::Skip;
        };
        if leads && sink.chain().is_empty() {
            self.lead.clear();
            return Open::Lead(part);
        }
        sink.open(part);
        Open::Part
    }

    /// The start of a prompt: gathered until it is known whether it is skipped.
    fn lead(&mut self, part: Part, piece: &[u8]) {
        let room = SKIP_BYTES_MAX.saturating_sub(self.lead.len());
        let (head, tail) = piece.split_at(room.min(piece.len()));
        self.lead.extend_from_slice(head);
        let lead = &self.lead;
        if self.skip.iter().any(|skip| lead.starts_with(skip)) {
            self.open = Open::Skipped(part);
            let lead = std::mem::take(&mut self.lead);
            self.text(&lead);
            self.text(tail);
        } else if !self.skip.iter().any(|skip| skip.starts_with(lead)) {
            self.lead_over(part);
            self.text(tail);
        }
    }

    /// The start of a prompt is not skipped.
    fn lead_over(&mut self, part: Part) {
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

    fn text(&mut self, piece: &[u8]) {
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
            Open::Other => self.other_bytes += piece.len() as u64,
            Open::Captured(_) => self.capture.push(piece),
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

    fn count(&mut self, bytes: u64) {
        if let Some(section) = self.sections.get_mut(self.current) {
            section.rest_bytes = section.rest_bytes.saturating_add(bytes);
        }
    }

    fn close(&mut self) {
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
            Open::Captured(node) => {
                let captured = std::mem::replace(&mut self.capture, Captured::new());
                match node {
                    Node::Model => self.model = Some(captured),
                    Node::Role => self.role = Some(captured),
                    Node::Kind => self.kind = Some(captured),
                    _ => self.name = Some(captured),
                }
            }
            Open::Value => {
                if self.value.as_ref().is_some_and(|value| value.depth == 0) {
                    self.value_end();
                }
            }
            Open::Lead(_) | Open::Counted | Open::Other | Open::Skip => {}
        }
    }
}

/// Numbers and words.
impl<S: Sink> Walker<S> {
    fn literal_begin(&mut self, piece: &[u8]) -> Literal {
        if let Some(value) = &self.value {
            debug_assert!(
                value.depth > 0,
                "a literal inside a value lies in a container"
            );
            if self.value_skips() {
                return Literal::Skip;
            }
            self.value_bytes(MARK_LITERAL);
            return Literal::Value;
        }
        let node = self.next_node();
        let null = piece.first() == Some(&b'n');
        match node {
            Node::BatchItem | Node::TensorData => {
                self.number = Number::default();
                Literal::Token
            }
            Node::Stream => {
                self.stream = Some(piece.first() == Some(&b't'));
                Literal::Skip
            }
            Node::Value | Node::Media | Node::Tools | Node::Seed(_) | Node::Call if !null => {
                self.value_begin(if node == Node::Call {
                    Node::Value
                } else {
                    node
                });
                self.value_bytes(MARK_LITERAL);
                Literal::Value
            }
            _ => Literal::Skip,
        }
    }

    fn literal_done(&mut self) {
        match std::mem::replace(&mut self.literal, Literal::None) {
            Literal::Value => {
                if self.value.as_ref().is_some_and(|value| value.depth == 0) {
                    self.value_end();
                }
            }
            Literal::Token => self.token(),
            Literal::Skip | Literal::None => {}
        }
    }

    /// A token id of the current prompt.
    fn token(&mut self) {
        if !self.in_tokens {
            self.in_tokens = true;
            self.tokens_counted = !self.prompt_begin();
            if !self.tokens_counted
                && let Some(sink) = self.sink()
            {
                sink.open(Part::Tokens);
            }
        }
        if self.tokens_counted {
            self.count(BYTES_PER_TOKEN);
            return;
        }
        self.tokens.extend_from_slice(&self.number.bytes());
        if self.tokens.len() >= TOKENS_BYTES {
            self.flush_tokens();
        }
    }

    fn flush_tokens(&mut self) {
        let mut tokens = std::mem::take(&mut self.tokens);
        if let Some(sink) = self.sink() {
            sink.text(&tokens);
        }
        tokens.clear();
        self.tokens = tokens;
    }

    fn tokens_end(&mut self) {
        if !std::mem::replace(&mut self.in_tokens, false) || self.tokens_counted {
            return;
        }
        self.flush_tokens();
        if let Some(sink) = self.sink() {
            sink.close();
        }
        self.ended(Ends::Prompt);
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
        if self.value.is_some() {
            self.open = if self.value_skips() {
                Open::Skip
            } else {
                Open::Value
            };
            if self.open == Open::Value {
                self.value_bytes(MARK_STRING);
            }
            return;
        }
        let node = self.next_node();
        self.open = self.open(node);
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
        match self.literal {
            Literal::Value => self.value_bytes(piece),
            Literal::Token => self.number.push(piece),
            Literal::Skip | Literal::None => {}
        }
    }

    fn literal_end(&mut self) {
        self.literal_done();
    }
}

/// Whether a tensor's strings are prompts. Names of other text inputs (stop words, say) are known
/// to servers that take them; a tensor whose data comes before its name is taken.
fn tensor_is_text(name: Option<&Captured>) -> bool {
    let Some(name) = name else {
        return true;
    };
    let name = name.bytes.to_ascii_lowercase();
    [&b"text"[..], b"prompt", b"input", b"query", b"message"]
        .iter()
        .any(|part| name.windows(part.len()).any(|window| window == *part))
        && !name.ends_with(b"_length")
        && !name.ends_with(b"_lengths")
}
