//! A log's requests, made ready to be counted and played: checkpoints, and the blocks that an
//! engine's cache would keep.
//!
//! Guarantee: memory is bounded by the constants here; what does not fit is left out and told. Not
//! here: what follows from them.

use std::sync::Arc;

use anyhow::Result;
use prefix_router::payload::parts::{Explained, Place};
use prefix_router::payload::{Plan, ReadOptions, Reader, Tools};
use prefix_router::prefix::{Part as PromptPart, Prompt};
use prefix_router::request::WINDOW_BYTES;
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::read::{self, Entry, Lines};
use crate::engine::render::{Message, Part, Rendered, Template};
use crate::explain::ExplainArgs;
use crate::explain::input::{Body, Setup};
use crate::explain::pieces::{self, Piece};
use crate::simulate::prepare::Prepared;
use crate::workload::options::stream;

/// Requests kept at most: each has some kilobytes of checkpoints and blocks.
const REQUESTS_MAX: usize = 200_000;

/// Blocks of all prompts kept at most: 16 Mi × 8 bytes are 128 MiB, and stand for 1 GiB of text.
const BLOCKS_MAX: usize = 16 * 1024 * 1024;

/// Requests whose texts are kept, to be compared with each other.
const SAMPLE: usize = 96;

/// Bytes of text kept of each of them.
const SAMPLE_BYTES_MAX: u64 = 256 * 1024;

/// Characters kept of every prompt's beginning.
const EXCERPT: usize = 44;

/// Prefix lengths that `fixed` is tried with.
const LENGTHS: [u32; 3] = [1024, 4096, 16_384];

/// One request, as far as it is kept.
pub(super) struct Ready {
    pub prepared: Arc<Prepared>,
    pub time: Option<f64>,
    pub duration: Option<f64>,
    pub excerpt: String,
    /// In `fixed` mode: the hash of its beginning, by the place in [`Requests::lengths`].
    pub fixed: Vec<Option<u64>>,
}

/// One request whose text is kept.
pub(super) struct Sampled {
    pub pieces: Vec<Piece>,
    pub seeds: Vec<(String, u64)>,
    pub tools: Option<Box<RawValue>>,
}

/// All that is kept of a log.
pub(super) struct Requests {
    pub all: Vec<Ready>,
    pub sample: Vec<Sampled>,
    pub lengths: Vec<u32>,
    pub lines: Lines,
    /// Requests that other pools serve.
    pub others: u64,
    blocks: usize,
    plans: Vec<Plan>,
    choice: ChaCha8Rng,
}

impl Requests {
    pub(super) fn read(file: &std::path::Path, args: &ExplainArgs, setup: &Setup) -> Result<Self> {
        let mut lengths = LENGTHS.to_vec();
        lengths.extend(setup.config.read.prefix_length);
        lengths.sort_unstable();
        lengths.dedup();
        let plan = |&length: &u32| {
            Plan::new(&ReadOptions {
                prefix_length: Some(length),
                ..setup.config.read.clone()
            })
        };
        let mut requests = Self {
            all: Vec::new(),
            sample: Vec::new(),
            plans: lengths.iter().map(plan).collect(),
            lengths,
            lines: Lines::default(),
            others: 0,
            blocks: 0,
            choice: stream(1, "sampled requests"),
        };
        let lines = read::each(file, args, |entry| {
            if setup.is_served(&entry.body) {
                requests.add(args, setup, &entry);
            } else {
                requests.others += 1;
            }
            requests.all.len() < REQUESTS_MAX && requests.blocks < BLOCKS_MAX
        })?;
        anyhow::ensure!(
            !requests.all.is_empty(),
            "{}: pool {} serves none of its requests",
            file.display(),
            setup.pool.name
        );
        requests.lines = lines;
        // Arrivals may have been written down as they ended.
        if requests.has_times() {
            let time = |ready: &Ready| ready.time.unwrap_or(0.0);
            requests.all.sort_by(|a, b| time(a).total_cmp(&time(b)));
        }
        Ok(requests)
    }

    pub(super) fn has_times(&self) -> bool {
        self.all.iter().all(|ready| ready.time.is_some())
    }

    fn add(&mut self, args: &ExplainArgs, setup: &Setup, entry: &Entry) {
        let explained = setup.explain(&entry.body);
        let tools = tools(&entry.body);
        let rendered = render(&explained, tools.as_deref());
        let prepared = Prepared::recorded(
            explained.prompt.clone(),
            &rendered,
            cache_seed(&explained),
            args.engine.block_tokens,
            entry.output_tokens.unwrap_or(args.output_tokens),
        );
        self.blocks += prepared.chain().len();
        let pieces = pieces::of(&explained);
        let excerpt = match args.no_text {
            true => String::new(),
            false => excerpt(&pieces),
        };
        let fixed = self
            .plans
            .iter()
            .map(|plan| fixed(setup, plan, &entry.body));
        let fixed = fixed.collect();
        self.all.push(Ready {
            prepared: Arc::new(prepared),
            time: entry.time,
            duration: entry.duration,
            excerpt,
            fixed,
        });
        self.sample(explained, pieces, tools);
    }

    /// Keeps every request's text with the same probability.
    fn sample(
        &mut self,
        explained: Explained,
        mut pieces: Vec<Piece>,
        tools: Option<Box<RawValue>>,
    ) {
        let place = match self.sample.len() {
            some if some < SAMPLE => some,
            _ => self.choice.random_range(0..self.all.len()),
        };
        if place >= SAMPLE {
            return;
        }
        pieces.retain(|piece| piece.from < SAMPLE_BYTES_MAX);
        for piece in &mut pieces {
            piece.bytes.truncate(SAMPLE_BYTES_MAX as usize);
        }
        let sampled = Sampled {
            pieces,
            seeds: explained.seeds,
            tools,
        };
        match self.sample.get_mut(place) {
            Some(kept) => *kept = sampled,
            None => self.sample.push(sampled),
        }
    }
}

fn excerpt(pieces: &[Piece]) -> String {
    let text = pieces.iter().find(|piece| !piece.bytes.is_empty());
    text.map_or_else(String::new, |piece| piece.excerpt(0, EXCERPT))
}

/// The hash of a prompt's beginning in `fixed` mode.
fn fixed(setup: &Setup, plan: &Plan, body: &Body) -> Option<u64> {
    let mut reader = Reader::with(&setup.head(body), plan);
    for window in body.bytes.chunks(WINDOW_BYTES as usize) {
        reader.feed(window);
    }
    reader.finish(prefix_router::payload::End::Whole).fixed
}

/// The tools as they stand in a body.
fn tools(body: &Body) -> Option<Box<RawValue>> {
    #[derive(Deserialize)]
    struct Tools {
        #[serde(alias = "functions")]
        tools: Option<Box<RawValue>>,
    }
    let body: Tools = serde_json::from_slice(&body.bytes).ok()?;
    body.tools
}

/// What keeps engines' cache entries apart. Tools are rendered; a tenant header and a cache key are
/// for the router only.
fn cache_seed(explained: &Explained) -> u64 {
    let apart = |name: &str| !matches!(name, "tools" | "tenant" | "prompt_cache_key");
    let seeds = explained.seeds.iter().filter(|(name, _)| apart(name));
    seeds.fold(1, |seed, (name, hash)| {
        xxh3_64_with_seed(
            &hash.to_le_bytes(),
            xxh3_64_with_seed(name.as_bytes(), seed),
        )
    })
}

/// The prompt as an engine tokenises it, by the simulated engines' own rules.
fn render(explained: &Explained, tools: Option<&RawValue>) -> Rendered {
    let tools = match (explained.tools, tools) {
        (None, _) => None,
        (Some(_), Some(raw)) => Some(raw.get().as_bytes().to_vec()),
        (Some(seen), None) => {
            let hash = seen.hash.to_le_bytes();
            let bytes = hash.iter().copied().cycle().take(seen.bytes as usize);
            Some(bytes.collect())
        }
    };
    let place = explained.tools.map(|tools| tools.place);
    let tools = tools.unwrap_or_default();
    let hashes: Vec<[u8; 8]> = explained
        .sections
        .iter()
        .flat_map(|(_, parts)| &parts.messages)
        .flat_map(|message| &message.parts)
        .map(|part| part.hash.unwrap_or(0).to_le_bytes())
        .collect();
    let mut hashes = hashes.iter();
    let mut messages: Vec<(String, Vec<Part<'_>>)> = Vec::new();
    let mut behind_system = place == Some(Tools::AfterSystem);
    for (section, parts) in &explained.sections {
        for message in &parts.messages {
            let role = message.role.as_deref().unwrap_or_default();
            let role = String::from_utf8_lossy(role).into_owned();
            let mut rendered = Vec::with_capacity(message.parts.len());
            for part in &message.parts {
                let hash = hashes.next();
                rendered.push(match (part.part, hash) {
                    (PromptPart::Media, Some(hash)) => Part::Image(hash),
                    _ => Part::Bytes(&part.bytes),
                });
            }
            if behind_system && (*section == Place::System || messages.is_empty()) {
                rendered.push(Part::Bytes(&tools));
                behind_system = false;
            }
            messages.push((role, rendered));
        }
    }
    let messages: Vec<Message<'_>> = messages
        .iter()
        .map(|(role, parts)| Message { role, parts })
        .collect();
    let template = match place {
        Some(Tools::BeforeLastUser) => Template::ToolsLast,
        _ => Template::AppendOnly,
    };
    let in_front: &[u8] = match place {
        Some(Tools::AfterSystem) => b"",
        _ => &tools,
    };
    Rendered::chat(template, in_front, &messages)
}

/// The places where a prompt is compared with others: positions in bytes, and keys.
pub(super) fn places(prompt: &Prompt) -> impl DoubleEndedIterator<Item = (u64, u64)> + '_ {
    let places = prompt.checkpoints.iter();
    places.map(|at| (at.position, prompt.key(at).0))
}
