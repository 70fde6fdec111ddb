//! The reader of one body that is not encoded: the tokenizer, the walker, and the raw bytes in
//! case neither helps.
//!
//! Guarantee: [`Plain::finish`] always gives a prompt. What was not seen is never a seed.
//! Not here: what members mean (the family files, walk.rs), encodings (encoded.rs).

use std::sync::Arc;

use xxhash_rust::xxh64::xxh64;

use super::node::{SEEDS_MAX, Seed};
use super::parts::{Place, SeenTools, Witness};
use super::plan::{Compiled, Plan};
use super::walk::{SLOT_SYSTEM, Section, Walker};
use super::{CacheKey, End, FAMILIES, Family, Head, RAW, Tools, path, tools};
use crate::json::{Progress, Tokenizer};
use crate::prefix::{
    Chain, Checkpoint, Coverage, Kinds, MODEL_BYTES_MAX, Part, Prompt, RawReason, Sink, merge, mix,
};

/// Reads one body, part by part into a sink.
pub(super) struct Plain<S> {
    tokenizer: Tokenizer,
    walker: Walker<S>,
    /// The body's bytes, as long as no prompt is found in them.
    raw: Option<S>,
    /// The body's first bytes, in `fixed` mode.
    raw_fixed: Option<Chain>,
    plan: Arc<Compiled>,
    tenant: Option<u64>,
    path_model: Option<Vec<u8>>,
    path_streams: bool,
    path_affinity: bool,
}

impl<S: Sink> Plain<S> {
    pub(super) fn with(head: &Head<'_>, plan: &Plan) -> Self {
        let plan = Arc::clone(&plan.0);
        let found = path::find(head.path);
        let mut raw = S::start(plan.fixed);
        raw.open(Part::Raw);
        let raw_fixed = plan.fixed.map(|length| {
            let mut chain = Chain::start(Some(length));
            chain.open(Part::Raw);
            chain
        });
        Self {
            tokenizer: Tokenizer::default(),
            walker: Walker::new(found.families, found.native, Arc::clone(&plan)),
            plan,
            raw: Some(raw),
            raw_fixed,
            tenant: head.tenant.map(|tenant| xxh64(tenant, 0)),
            path_model: found.model,
            path_streams: found.streams,
            path_affinity: found.affinity,
        }
    }

    /// The next bytes, in any cut.
    pub(super) fn feed(&mut self, window: &[u8]) {
        self.tokenizer.feed(window, &mut self.walker);
        if let Some(raw) = &mut self.raw_fixed {
            raw.text(window);
        }
        if self.walker.claimed {
            self.raw = None;
        } else if let Some(raw) = &mut self.raw {
            raw.text(window);
        }
    }

    /// An empty sink for the bytes of a body whose content is read here.
    pub(super) fn sibling(&self) -> S {
        let mut bytes = S::start(self.plan.fixed);
        bytes.open(Part::Raw);
        bytes
    }

    /// Whether a prompt was found.
    pub(super) fn claimed(&self) -> bool {
        self.walker.claimed
    }

    /// The prompt of a body that could not be decoded: its bytes.
    pub(super) fn undecoded(&mut self, bytes: S, witness: &mut impl Witness<S>) -> Prompt {
        self.raw = Some(bytes);
        self.raw_prompt(RawReason::Encoded, witness)
    }

    /// The prompt.
    pub(super) fn finish(&mut self, end: End, witness: &mut impl Witness<S>) -> Prompt {
        let progress = match end {
            End::Whole => self.tokenizer.finish(&mut self.walker),
            End::Cut => self.tokenizer.progress(),
        };
        self.walker.finish();
        if !self.walker.claimed {
            let reason = match progress {
                Progress::Broken => RawReason::NotJson,
                _ => RawReason::UnknownShape,
            };
            return self.raw_prompt(reason, witness);
        }
        let coverage = match progress {
            _ if end == End::Cut => Coverage::Truncated,
            Progress::Done => Coverage::Whole,
            Progress::Open => Coverage::Truncated,
            Progress::Broken => Coverage::Malformed,
        };
        self.prompt(coverage, witness)
    }

    fn raw_prompt(&mut self, reason: RawReason, witness: &mut impl Witness<S>) -> Prompt {
        let seed = self.seeds(&[self.tenant], witness);
        if let Some(raw) = &self.raw {
            witness.section(Place::Raw, raw);
        }
        let raw = self
            .raw
            .take()
            .map_or_else(|| Chain::start(None), Sink::into_chain);
        let mut checkpoints = raw.checkpoints();
        key_ends(&mut checkpoints, 0);
        Prompt {
            api: RAW,
            coverage: Coverage::Raw(reason),
            affinity: self.path_affinity && raw.position() > 0,
            seed,
            model: None,
            checkpoints,
            bytes: raw.position(),
            messages: 0,
            prompts: 1,
            fixed: raw.fixed().map(|(hash, _)| hash),
            cache_key: None,
            stream: false,
            engine_state: false,
        }
    }

    fn prompt(&mut self, coverage: Coverage, witness: &mut impl Witness<S>) -> Prompt {
        let sections = std::mem::take(&mut self.walker.sections);
        let (system, conversation) = choose(sections);
        let model = self.path_model.take().or(self.walker.model.take());
        let family = system
            .as_ref()
            .or(conversation.as_ref())
            .and_then(|section| FAMILIES.get(section.family).copied())
            .unwrap_or(&Family::DEFAULT);
        let (prompts, rest_bytes) = conversation.as_ref().map_or((1, 0), |section| {
            (section.prompts.max(1), section.rest_bytes)
        });
        let place = match self.walker.tools {
            Some(_) => tools::place(self.plan.options.tools, model.as_deref()),
            None => Tools::BeforeSystem,
        };
        if let Some((hash, bytes)) = self.walker.tools {
            witness.tools(SeenTools { place, hash, bytes });
        }
        for (place, section) in [
            (Place::System, &system),
            (Place::Conversation, &conversation),
        ] {
            if let Some(section) = section {
                witness.section(place, &section.sink);
            }
        }
        let rendered = Rendered {
            tools: self.walker.tools.take(),
            place,
            system: system
                .map(|section| (section.complete, section.sink.into_chain()))
                .filter(|(_, chain)| !chain.is_empty()),
            conversation: conversation.map(|section| section.sink.into_chain()),
        };
        let fixed = match &self.raw_fixed {
            Some(raw) if family.native => raw.fixed().map(|(hash, _)| hash),
            _ => rendered.fixed(),
        };
        let tools_bytes = rendered.tools.map_or(0, |(_, bytes)| bytes);
        let text_bytes = rendered.text_bytes();
        Prompt {
            api: family.api,
            coverage,
            affinity: family.affinity && text_bytes > 0,
            seed: self.seeds(&self.all_seeds(model.as_deref(), &rendered), witness),
            model: model.map(|mut model| {
                model.truncate(MODEL_BYTES_MAX);
                String::from_utf8(model)
                    .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
            }),
            checkpoints: rendered.checkpoints(),
            bytes: match family.prefills {
                true => [tools_bytes, rest_bytes, self.walker.other_bytes]
                    .into_iter()
                    .fold(text_bytes, u64::saturating_add),
                false => 0,
            },
            messages: rendered.messages(),
            prompts,
            fixed,
            cache_key: match self.plan.options.cache_key {
                CacheKey::Hint => self.walker.seed(Seed::CacheKey),
                CacheKey::Seed | CacheKey::Ignore => None,
            },
            stream: self
                .walker
                .stream
                .unwrap_or(family.stream || self.path_streams),
            engine_state: self.walker.engine_state,
        }
    }

    /// What is mixed into the key, each in its place (see [`SEED_NAMES`]).
    fn all_seeds(&self, model: Option<&[u8]>, rendered: &Rendered) -> [Option<u64>; PLACES] {
        let mut seeds = [None; PLACES];
        let tools = rendered
            .tools
            .filter(|_| rendered.place == Tools::BeforeSystem)
            .map(|(hash, _)| hash);
        let named = [self.tenant, model.map(|model| xxh64(model, 0)), tools];
        for (place, seed) in seeds.iter_mut().zip(named.iter().chain(&self.walker.seeds)) {
            *place = *seed;
        }
        if self.plan.options.cache_key != CacheKey::Seed
            && let Some(place) = seeds.get_mut(named.len() + Seed::CacheKey.slot())
        {
            *place = None;
        }
        seeds
    }

    /// Folds seeds into one. What is absent leaves no trace, what is empty does.
    fn seeds(&self, seeds: &[Option<u64>], witness: &mut impl Witness<S>) -> u64 {
        let mut folded = self.plan.options.seed;
        for (place, (name, seed)) in (1..).zip(SEED_NAMES.iter().zip(seeds)) {
            if let Some(seed) = seed {
                folded = mix(folded, mix(place, *seed));
                witness.seed(name, *seed);
            }
        }
        folded
    }
}

/// Places of seeds: the tenant, the model, the tools, and what the body has beside its prompt.
const PLACES: usize = 3 + SEEDS_MAX;

/// Their names. The order is part of the hash format, as it is in node.rs.
const SEED_NAMES: [&str; PLACES] = [
    "tenant",
    "model",
    "tools",
    "adapter",
    "cache_salt",
    "prompt_cache_key",
    "documents",
    "chat_template",
    "context",
    "media",
    "template_inputs/0",
    "template_inputs/1",
    "template_inputs/2",
    "template_inputs/3",
    "template_inputs/4",
    "template_inputs/5",
    "template_inputs/6",
    "template_inputs/7",
    "template_inputs/8",
    "template_inputs/9",
    "template_inputs/10",
    "template_inputs/11",
    "template_inputs/12",
    "template_inputs/13",
    "template_inputs/14",
    "template_inputs/15",
];

/// The system section and the preferred one of the others that is not empty.
fn choose<S: Sink>(sections: Vec<Section<S>>) -> (Option<Section<S>>, Option<Section<S>>) {
    let mut system = None;
    let mut conversation: Option<Section<S>> = None;
    for section in sections {
        if section.slot == SLOT_SYSTEM {
            system = Some(section);
            continue;
        }
        let better = conversation.as_ref().is_none_or(|best| {
            let empty = (section.sink.chain().is_empty(), section.slot);
            empty < (best.sink.chain().is_empty(), best.slot)
        });
        if better {
            conversation = Some(section);
        }
    }
    (system, conversation)
}

/// The sections of a prompt in the order in which a template renders them.
struct Rendered {
    tools: Option<(u64, u64)>,
    place: Tools,
    /// Whether it is complete, and its chain.
    system: Option<(bool, Chain)>,
    conversation: Option<Chain>,
}

impl Rendered {
    /// Bytes of text without the tools.
    fn text_bytes(&self) -> u64 {
        let system = self
            .system
            .as_ref()
            .map_or(0, |(_, chain)| chain.position());
        let conversation = self.conversation.as_ref().map_or(0, Chain::position);
        system.saturating_add(conversation)
    }

    fn messages(&self) -> u32 {
        let system = self
            .system
            .as_ref()
            .map_or(0, |(_, chain)| chain.messages());
        let conversation = self.conversation.as_ref().map_or(0, Chain::messages);
        system.saturating_add(conversation)
    }

    /// The system prompt in front; if it is shorter than the prefix, the conversation follows.
    /// `None` if neither has anything that counts.
    fn fixed(&self) -> Option<u64> {
        let system = self.system.as_ref().map(|(_, chain)| chain);
        let mut chains = system.into_iter().chain(&self.conversation);
        if chains.all(Chain::fixed_is_empty) {
            return None;
        }
        let system = self.system.as_ref().and_then(|(_, chain)| chain.fixed());
        let conversation = self.conversation.as_ref();
        match system {
            None => conversation.and_then(Chain::fixed).map(|(hash, _)| hash),
            Some((system, 0)) => Some(system),
            Some((system, left)) => {
                let conversation = conversation.and_then(|chain| chain.fixed_within(left));
                Some(conversation.map_or(system, |conversation| mix(system, conversation)))
            }
        }
    }

    /// All checkpoints, each with everything that is rendered before it.
    fn checkpoints(&self) -> Vec<Checkpoint> {
        let mut all = Vec::new();
        let (mut base, mut before) = (0, None);
        let tools = self.tools.filter(|_| self.place != Tools::BeforeLastUser);
        if let (Some((_, bytes)), Tools::BeforeSystem) = (tools, self.place) {
            base = bytes;
        }
        let mut behind = tools.filter(|_| self.place == Tools::AfterSystem);
        let system = self.system.as_ref().filter(|(complete, _)| {
            *complete || self.conversation.as_ref().is_none_or(Chain::is_empty)
        });
        if let Some((_, system)) = system {
            all.extend(system.checkpoints().into_iter().map(|mut checkpoint| {
                checkpoint.position += base;
                checkpoint
            }));
            base += system.position();
            before = Some(system.hash());
        }
        let Some(conversation) = self.conversation.as_ref().filter(|chain| !chain.is_empty())
        else {
            if all.is_empty() {
                all = Chain::new(None).checkpoints();
            }
            key_ends(&mut all, self.messages());
            return all;
        };
        if let (Some((hash, bytes)), true) = (behind, before.is_some()) {
            base += bytes;
            before = before.map(|before| mix(before, hash));
            behind = None;
        }
        // Tools behind a system message that lies in the conversation, or that is not there.
        let behind_from = conversation.system_end();
        let all_behind = behind_from.is_none();
        let mut checkpoints = conversation.checkpoints();
        for checkpoint in &mut checkpoints {
            if let Some(before) = before {
                checkpoint.hash = mix(before, checkpoint.hash);
            }
            if let Some((hash, bytes)) = behind
                && (all_behind || behind_from.is_some_and(|end| checkpoint.position > end))
            {
                checkpoint.hash = mix(checkpoint.hash, hash);
                checkpoint.position += bytes;
            }
            checkpoint.position += base;
        }
        if all.is_empty() {
            all = checkpoints;
        } else {
            all.append(&mut checkpoints);
            one_prompt(&mut all);
        }
        key_ends(&mut all, self.messages());
        all
    }
}

/// Joins the checkpoints of a system section and of the conversation behind it: one first message,
/// one end.
fn one_prompt(all: &mut Vec<Checkpoint>) {
    let mut in_system = true;
    for checkpoint in all.iter_mut() {
        let kinds = checkpoint.kinds;
        if in_system {
            in_system = !kinds.has(Kinds::END);
            checkpoint.kinds = kinds.without(Kinds::END);
            continue;
        }
        // The system prompt is the first message, so the conversation's first one is the second.
        checkpoint.kinds = match kinds.has(Kinds::FIRST_MESSAGE) {
            true => kinds
                .without(Kinds::FIRST_MESSAGE)
                .with(Kinds::SECOND_MESSAGE),
            false => kinds.without(Kinds::SECOND_MESSAGE),
        };
    }
    merge(all);
}

/// The ends that the key may stop at, and those that the index keeps.
fn key_ends(all: &mut [Checkpoint], messages: u32) {
    for checkpoint in all {
        let kinds = &mut checkpoint.kinds;
        let early = kinds.has(Kinds::FIRST_MESSAGE.with(Kinds::SECOND_MESSAGE));
        if kinds.has(Kinds::END) || (early && messages > 1) {
            *kinds = kinds.with(Kinds::KEY);
        }
        if kinds.has(Kinds::FIRST_MESSAGE.with(Kinds::END)) {
            *kinds = kinds.with(Kinds::INDEX);
        }
    }
}
