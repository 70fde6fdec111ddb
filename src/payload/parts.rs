//! A prompt's parts in readable form: for `explain` and for tests, never in the filter.
//!
//! Guarantee: the parts are those that the chain was made of, in its order. Not here: printing.

use super::{End, Head, Plan, Reading, Tools};
use crate::prefix::{Chain, Part, Prompt, Sink};

/// Where in a prompt a section lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The system prompt that lies beside the conversation.
    System,
    /// The conversation, or the prompt without roles.
    Conversation,
    /// The body's bytes, in place of a prompt.
    Raw,
}

/// Sees what a prompt is made of, at its end.
pub trait Witness<S> {
    /// A section, complete.
    fn section(&mut self, place: Place, sink: &S);
    /// Something that is mixed into the key beside the prompt.
    fn seed(&mut self, name: &str, hash: u64);
    /// The tools: where they are rendered, their hash, and their length in canonical bytes.
    fn tools(&mut self, tools: SeenTools);
}

/// Looks away.
impl<S> Witness<S> for () {
    fn section(&mut self, _: Place, _: &S) {}
    fn seed(&mut self, _: &str, _: u64) {}
    fn tools(&mut self, _: SeenTools) {}
}

/// A prompt's tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenTools {
    /// Where they are rendered; never [`Tools::ByModel`].
    pub place: Tools,
    /// The hash of their canonical bytes.
    pub hash: u64,
    /// How many these are.
    pub bytes: u64,
}

/// One part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// What it is.
    pub part: Part,
    /// Its bytes, cut to [`STRETCH_BYTES_MAX`]; nothing for what is known by its hash only.
    pub bytes: Vec<u8>,
    /// Its length in bytes of text.
    pub len: u64,
    /// The hash of what is known by it only.
    pub hash: Option<u64>,
}

/// One message: parts and, at its end, the role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// The role, cut; empty for a prompt without roles, `None` if the body ended before it.
    pub role: Option<Vec<u8>>,
    /// The hash of all that names it: its role and its name.
    pub label: u64,
    /// Its parts.
    pub parts: Vec<Stretch>,
}

/// Parts are kept up to this many bytes: as many as a body has that is held (`body_bytes_max`).
pub const STRETCH_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Collects a section's parts beside its chain.
#[derive(Clone)]
pub struct Parts {
    chain: Chain,
    /// The messages; the last one may be open.
    pub messages: Vec<Message>,
    ended: bool,
}

impl Parts {
    fn message(&mut self) -> Option<&mut Message> {
        if std::mem::replace(&mut self.ended, false) {
            self.messages.push(Message::default());
        }
        self.messages.last_mut()
    }

    fn add(&mut self, part: Part, len: u64, hash: Option<u64>) {
        if let Some(message) = self.message() {
            message.parts.push(Stretch {
                part,
                bytes: Vec::new(),
                len,
                hash,
            });
        }
    }
}

impl Sink for Parts {
    fn start(fixed: Option<u32>) -> Self {
        Self {
            chain: Chain::start(fixed),
            messages: Vec::new(),
            ended: true,
        }
    }

    fn open(&mut self, part: Part) {
        self.chain.open(part);
        self.add(part, 0, None);
    }

    fn text(&mut self, bytes: &[u8]) {
        self.chain.text(bytes);
        if let Some(stretch) = self.message().and_then(|message| message.parts.last_mut()) {
            let room = STRETCH_BYTES_MAX.saturating_sub(stretch.bytes.len());
            stretch.bytes.extend(bytes.iter().take(room));
            stretch.len += bytes.len() as u64;
        }
    }

    fn close(&mut self) {
        self.chain.close();
    }

    fn atom(&mut self, part: Part, hash: u64, bytes: u64) {
        self.chain.atom(part, hash, bytes);
        self.add(part, bytes, Some(hash));
    }

    fn message_end(&mut self, role: &[u8], label: u64) {
        self.chain.message_end(role, label);
        if let Some(message) = self.message() {
            message.role = Some(role.to_vec());
            message.label = label;
        }
        self.ended = true;
    }

    fn chain(&self) -> &Chain {
        &self.chain
    }

    fn into_chain(self) -> Chain {
        self.chain
    }
}

/// A prompt and what it is made of.
#[derive(Clone)]
pub struct Explained {
    /// The prompt.
    pub prompt: Prompt,
    /// Its sections, in its order.
    pub sections: Vec<(Place, Parts)>,
    /// What is mixed into its key beside them: names and hashes.
    pub seeds: Vec<(String, u64)>,
    /// The tools, if there are any.
    pub tools: Option<SeenTools>,
}

/// Reads a body and shows what its prompt is made of.
#[must_use]
pub fn explain(head: &Head<'_>, plan: &Plan, windows: &[&[u8]], end: End) -> Explained {
    let mut reading = Reading::<Parts>::with(head, plan);
    for window in windows {
        reading.feed(window);
    }
    let mut seen = Seen::default();
    let prompt = reading.finish_seen(end, &mut seen);
    Explained {
        prompt,
        sections: seen.sections,
        seeds: seen.seeds,
        tools: seen.tools,
    }
}

#[derive(Default)]
struct Seen {
    sections: Vec<(Place, Parts)>,
    seeds: Vec<(String, u64)>,
    tools: Option<SeenTools>,
}

impl Witness<Parts> for Seen {
    fn section(&mut self, place: Place, sink: &Parts) {
        self.sections.push((place, sink.clone()));
    }

    fn seed(&mut self, name: &str, hash: u64) {
        self.seeds.push((name.to_owned(), hash));
    }

    fn tools(&mut self, tools: SeenTools) {
        self.tools = Some(tools);
    }
}
