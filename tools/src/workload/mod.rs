//! Workloads: who asks what, and when, as requests of deterministic text.
//!
//! Guarantee: the same options and seed give the same requests, byte for byte, whatever answers
//! come and in whatever order. Not here: I/O, clocks, routing; `load` sends these requests over
//! HTTP, `simulate` sends the same ones in virtual time.

pub mod agents;
pub mod arrivals;
pub mod body;
pub mod chats;
pub mod conversations;
pub mod documents;
pub mod lengths;
pub mod options;
pub mod sessions;
pub mod several;
pub mod single;
pub mod text;
pub mod trace;
pub mod visits;

use std::sync::Arc;
use std::time::Duration;

pub use body::Form;
pub use options::{Plan, WorkloadArgs};
pub use text::Text;

/// Who says a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The operator's instructions.
    System,
    /// The one who asks.
    User,
    /// An earlier answer.
    Assistant,
}

impl Role {
    /// The role as OpenAI's API writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// One message of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// What is said: texts in order, without anything between them.
    pub texts: Vec<Text>,
}

impl Message {
    /// A message of one text.
    #[must_use]
    pub fn new(role: Role, text: Text) -> Self {
        Self {
            role,
            texts: vec![text],
        }
    }

    /// Tokens of the content, at 4 bytes a token.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.texts.iter().map(Text::tokens).sum()
    }

    /// Appends the content to `out`.
    pub fn write(&self, out: &mut String) {
        for text in &self.texts {
            text.write(out);
        }
    }
}

/// One request, due at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The request's number: arrivals count up from 0, later turns carry their chat's number.
    pub id: u64,
    /// When it is due, from the workload's start, in engine time.
    pub at: Duration,
    /// Which shared prefix it opens with; `None` if it shares nothing on purpose.
    pub prefix: Option<u64>,
    /// The turn of its chat, from 0; always 0 where there are no chats.
    pub turn: u32,
    /// Turns that follow this one.
    pub turns_left: u32,
    /// What is asked. Shared, because turns repeat their history.
    pub messages: Arc<Vec<Message>>,
    /// Tokens to answer with.
    pub output_tokens: u32,
}

impl Request {
    /// Tokens of all contents; a chat template adds its own to them.
    #[must_use]
    pub fn prompt_tokens(&self) -> u64 {
        self.messages.iter().map(Message::tokens).sum()
    }

    /// The next turn of the same chat, due at the same time: all that was said, the answer, and a
    /// new message. `None` if this was the last turn.
    #[must_use]
    pub fn next_turn(&self, answer: &str, message: Message) -> Option<Self> {
        let turns_left = self.turns_left.checked_sub(1)?;
        let mut messages = Vec::with_capacity(self.messages.len() + 2);
        messages.extend(self.messages.iter().cloned());
        messages.push(Message::new(Role::Assistant, Text::Said(Arc::from(answer))));
        messages.push(message);
        Some(Self {
            turn: self.turn + 1,
            turns_left,
            messages: Arc::new(messages),
            ..self.clone()
        })
    }
}

/// A source of requests.
///
/// Arrivals are open-loop: `next` never waits for an answer. Later turns are what people do after
/// an answer, and come from `follow`.
pub trait Workload: Send {
    /// The next arrival in order of time; `None` at the end of a finite workload.
    fn next(&mut self) -> Option<Request>;

    /// The turn after `request`, whose answer ended at `ended` and read `answer`; `None` if the
    /// chat is over. Its time is `ended` plus the time to think.
    fn follow(&mut self, request: &Request, ended: Duration, answer: &str) -> Option<Request>;

    /// What takes the place of a request that failed at `at`; nothing where arrivals wait for no
    /// answer. Its chat is over.
    fn failed(&mut self, _request: &Request, _at: Duration) -> Option<Request> {
        None
    }

    /// How many shared prefixes there are, for those who want to see each of them; `None` if the
    /// number is not known beforehand.
    fn prefixes(&self) -> Option<u64>;

    /// One request that holds the prefix `index` and nothing else of interest, for warming caches
    /// and for asking where a prefix lives. `None` beyond the last prefix.
    fn probe(&self, index: u64) -> Option<Request>;
}
