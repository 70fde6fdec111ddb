//! A workload's request, made ready once for all policies: the body as the filter reads it, and
//! the prompt as the engine tokenises it.
//!
//! Guarantee: what a policy sees of a prompt comes from the bytes a client would send; the same
//! request is made ready once however many cells ask for it. Not here: time, choices.

use std::sync::{Arc, Mutex, PoisonError};

use prefix_router::payload::{End, Head, ReadOptions, Reader};
use prefix_router::prefix::Prompt;
use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::xxh3_64;

use crate::engine::render::{Answer, Message, Part, Rendered, Template};
use crate::engine::scheduler::Job;
use crate::workload::{self, Form, Request, body};

/// The model all simulated requests name.
const MODEL: &str = "model";

/// Lengths, in characters of all messages' text, of the fixed prefixes that policies hash.
pub const HEADS: [usize; 3] = [256, 1024, 4096];

/// A request, ready to be routed and computed.
#[derive(Debug)]
pub struct Prepared {
    /// What the engine computes; its chain covers the answer too.
    pub job: Job,
    /// What the filter makes of the body.
    pub prompt: Prompt,
    /// The answer.
    pub answer: Answer,
    /// The hashes of the text's first [`HEADS`] characters.
    heads: [u64; HEADS.len()],
    prompt_blocks: usize,
}

impl Prepared {
    /// A recorded request: what the filter made of its body, and its prompt as an engine sees it.
    /// What was answered is not known, so no later prompt finds it in a cache.
    pub(crate) fn recorded(
        prompt: Prompt,
        rendered: &Rendered,
        seed: u64,
        block_tokens: u32,
        output_tokens: u32,
    ) -> Self {
        let chain = rendered.chain(seed, block_tokens);
        Self {
            prompt_blocks: chain.len(),
            job: Job {
                prompt_tokens: rendered.tokens().max(1),
                output_tokens,
                chain: chain.into(),
            },
            prompt,
            answer: Answer::new(Template::AppendOnly, 0, output_tokens),
            heads: [0; HEADS.len()],
        }
    }

    /// The hashes of the prompt's full blocks.
    #[must_use]
    pub fn chain(&self) -> &[u64] {
        self.job
            .chain
            .get(..self.prompt_blocks)
            .unwrap_or(&self.job.chain)
    }

    /// The hash of the text's first characters, by the place in [`HEADS`].
    #[must_use]
    pub fn head(&self, place: usize) -> u64 {
        self.heads.get(place).copied().unwrap_or(0)
    }
}

/// Makes requests ready, each once.
#[derive(Debug)]
pub struct Preparer {
    template: Template,
    block_tokens: u32,
    options: ReadOptions,
    done: Mutex<FxHashMap<(u64, u32), Arc<Prepared>>>,
}

impl Preparer {
    /// A preparer for one workload and seed: what it has made ready is kept until it is dropped.
    #[must_use]
    pub fn new(template: Template, block_tokens: u32, prefix_length: u32) -> Self {
        let options = ReadOptions {
            prefix_length: Some(prefix_length),
            ..ReadOptions::default()
        };
        Self {
            template,
            block_tokens,
            options,
            done: Mutex::default(),
        }
    }

    /// A preparer whose requests are ready, by their numbers.
    pub(crate) fn ready(requests: &[Arc<Prepared>]) -> Self {
        let numbered = (0..).map(|id| (id, 0)).zip(requests.iter().cloned());
        Self {
            done: Mutex::new(numbered.collect()),
            ..Self::new(Template::AppendOnly, 1, 0)
        }
    }

    /// Makes a request ready.
    pub fn prepare(&self, request: &Request) -> Arc<Prepared> {
        let key = (request.id, request.turn);
        let lock = || self.done.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(prepared) = lock().get(&key) {
            return Arc::clone(prepared);
        }
        let prepared = Arc::new(self.make(request));
        lock().insert(key, Arc::clone(&prepared));
        prepared
    }

    fn make(&self, request: &Request) -> Prepared {
        let contents: Vec<String> = request.messages.iter().map(content).collect();
        let mut rendered = render(self.template, request, &contents);
        let prompt_tokens = rendered.tokens();
        let answer = Answer::new(self.template, rendered.digest(), request.output_tokens);
        rendered.push_answer(&answer);
        let chain = rendered.chain(1, self.block_tokens);
        Prepared {
            job: Job {
                prompt_tokens,
                output_tokens: request.output_tokens,
                chain: chain.into(),
            },
            prompt: self.read(request),
            answer,
            heads: heads(&contents),
            prompt_blocks: (prompt_tokens / self.block_tokens) as usize,
        }
    }

    /// The way of a real request: written as a client writes it, read in the filter's windows.
    fn read(&self, request: &Request) -> Prompt {
        let form = Form::Chat;
        let ask = body::Ask {
            form,
            model: MODEL,
            stream: true,
        };
        let bytes = body::render(request, &ask);
        let head = Head {
            path: form.path().as_bytes(),
            content_type: b"application/json",
            ..Head::default()
        };
        let mut reader = Reader::new(&head, &self.options);
        for window in bytes.chunks(prefix_router::request::WINDOW_BYTES as usize) {
            reader.feed(window);
        }
        reader.finish(End::Whole)
    }
}

fn content(message: &workload::Message) -> String {
    let mut content = String::new();
    message.write(&mut content);
    content
}

fn render(template: Template, request: &Request, contents: &[String]) -> Rendered {
    let parts: Vec<[Part<'_>; 1]> = contents.iter().map(|text| [Part::Text(text)]).collect();
    let messages: Vec<Message<'_>> = request
        .messages
        .iter()
        .zip(&parts)
        .map(|(message, parts)| Message {
            role: message.role.name(),
            parts,
        })
        .collect();
    Rendered::chat(template, b"", &messages)
}

fn heads(contents: &[String]) -> [u64; HEADS.len()] {
    let most = HEADS.iter().copied().max().unwrap_or(0);
    let mut text = Vec::with_capacity(most);
    for content in contents {
        let room = most - text.len();
        text.extend(content.bytes().take(room));
    }
    HEADS.map(|length| xxh3_64(text.get(..length).unwrap_or(&text)))
}
