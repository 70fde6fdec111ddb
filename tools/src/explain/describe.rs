//! All that can be said of one request: its API, its prompt, its key, its hosts.
//!
//! Guarantee: every figure comes from the filter's code. Not here: the words (show.rs).

use anyhow::Result;
use prefix_router::payload::parts::Explained;
use prefix_router::payload::{Plan, ReadOptions, Tools, apis, apis_at};
use prefix_router::prefix::{Kinds, Part, Prompt};
use serde::Serialize;

use super::gateway::{Gateway, Route};
use super::input::{Body, Setup};
use super::left_out::{self, Field};
use super::pieces::{self, Kind};
use super::{ExplainArgs, log};

/// Characters of an excerpt.
const EXCERPT: usize = 40;

#[derive(Debug, Serialize)]
pub(super) struct Description {
    pub body: String,
    pub bytes: u64,
    pub api: &'static str,
    /// The path that was given, and the APIs whose requests it takes.
    pub path: String,
    pub path_apis: Vec<&'static str>,
    /// The field whose presence told the API.
    pub api_field: Option<String>,
    /// Why the body was not read as a prompt, or not to its end.
    pub unread: Option<&'static str>,
    /// What is wrong with it if it is not JSON.
    pub not_json: Option<String>,
    pub model: Option<String>,
    /// The pool and why it is this one, if there are several.
    pub pool: Option<(String, &'static str)>,
    pub tenant: Option<String>,
    /// Bytes of text in the prompt, and the filter's estimate of its tokens.
    pub prompt_bytes: u64,
    pub prompt_tokens: u64,
    /// Prompts in the body.
    pub prompts: u32,
    /// Whether a cache can help such a request.
    pub affinity: bool,
    pub stream: bool,
    pub engine_state: bool,
    pub parts: Vec<PartShown>,
    /// Whether there are images or files among them, and what each counts as.
    pub has_media: bool,
    pub image_tokens: u32,
    /// A leading line that the configuration lets be skipped.
    pub skipped: Option<String>,
    /// Why the fields could not be tried out.
    pub fields_unknown: Option<String>,
    pub fields: Vec<Field>,
    /// Whether the tools are left out of the key.
    pub tools_left_out: bool,
    /// What is mixed into the key beside the prompt.
    pub seeds: Vec<String>,
    pub config_seed: bool,
    pub checkpoints: Vec<CheckpointShown>,
    pub routing: RoutingShown,
    /// Where it goes.
    pub route: Option<Route>,
    /// How often it, or requests of the log, came before.
    pub seen: u32,
    pub log_requests: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(super) struct PartShown {
    pub from: u64,
    pub bytes: u64,
    pub message: usize,
    pub what: String,
    pub text: String,
}

#[derive(Debug, Serialize)]
pub(super) struct CheckpointShown {
    pub bytes: u64,
    pub tokens: u64,
    pub hash: String,
    pub uses: Vec<&'static str>,
}

/// The configuration's way to choose.
#[derive(Debug, Serialize)]
pub(super) struct RoutingShown {
    pub mode: &'static str,
    pub prefix_length: Option<u32>,
    pub limit: Option<u32>,
    /// The share of a host above which a prefix is hot, and the count that never is.
    pub hot_share: f64,
    pub count_min: u32,
}

impl RoutingShown {
    pub(super) fn of(setup: &Setup) -> Self {
        use prefix_router::config::Routing;
        let limit = setup.pool.bounds.limit;
        match setup.pool.routing {
            Routing::Adaptive { heat, .. } => Self {
                mode: "adaptive",
                prefix_length: None,
                limit,
                hot_share: heat.hot_share,
                count_min: heat.count_min,
            },
            Routing::Fixed { prefix_length } => Self {
                mode: "fixed",
                prefix_length: Some(prefix_length),
                limit,
                hot_share: 0.0,
                count_min: 0,
            },
        }
    }
}

pub(super) fn describe(args: &ExplainArgs, setup: &Setup, body: &Body) -> Result<Description> {
    let explained = setup.explain(body);
    let prompt = &explained.prompt;
    let gateway = Gateway::new(&setup.pool, &setup.hosts, &args.loads)?;
    let log_requests = match &args.log {
        None => None,
        Some(file) => Some(log::play(file, args, setup, &gateway)?),
    };
    for _ in 0..args.seen {
        gateway.play(prompt);
    }
    let (fields, fields_unknown) = match left_out::fields(setup, body) {
        Ok(fields) => (fields, None),
        Err(why) => (Vec::new(), Some(why)),
    };
    let mut path_apis = apis_at(body.path.as_bytes());
    if path_apis.len() >= apis().len() / 2 {
        // The path says nothing.
        path_apis.clear();
    }
    let left_out = explained.tools.map(|tools| tools.place) == Some(Tools::BeforeLastUser);
    Ok(Description {
        body: body.name.clone(),
        bytes: body.bytes.len() as u64,
        api: prompt.api,
        path: body.path.clone(),
        path_apis,
        api_field: fields
            .iter()
            .find(|field| field.decides_api)
            .map(|field| field.field.clone()),
        unread: prompt.coverage.label(),
        not_json: left_out::not_json(body),
        model: prompt.model.clone(),
        pool: setup.pool_of(body),
        tenant: setup
            .head(body)
            .tenant
            .map(|tenant| String::from_utf8_lossy(tenant).into_owned()),
        prompt_bytes: prompt.bytes,
        prompt_tokens: prompt.tokens(),
        prompts: prompt.prompts,
        affinity: prompt.affinity,
        stream: prompt.stream,
        engine_state: prompt.engine_state,
        parts: parts(args, &explained),
        has_media: pieces::of(&explained)
            .iter()
            .any(|piece| piece.kind == Kind::Part(Part::Media)),
        image_tokens: setup.config.read.image_tokens,
        skipped: skipped(args, setup, body, &explained),
        fields,
        fields_unknown,
        tools_left_out: left_out,
        seeds: seeds(setup, &explained),
        config_seed: setup.config.read.seed != 0,
        checkpoints: checkpoints(prompt),
        routing: RoutingShown::of(setup),
        route: gateway.look(prompt),
        seen: args.seen,
        log_requests,
    })
}

fn parts(args: &ExplainArgs, explained: &Explained) -> Vec<PartShown> {
    let shown = |piece: &pieces::Piece| PartShown {
        from: piece.from,
        bytes: piece.len,
        message: piece.message,
        what: piece.name(),
        text: match args.no_text {
            true => String::new(),
            false => piece.excerpt(0, EXCERPT),
        },
    };
    pieces::of(explained).iter().map(shown).collect()
}

/// The leading line that is left out because the configuration says so.
fn skipped(
    args: &ExplainArgs,
    setup: &Setup,
    body: &Body,
    explained: &Explained,
) -> Option<String> {
    let all = Plan::new(&ReadOptions {
        skip: Vec::new(),
        ..setup.config.read.clone()
    });
    let all = setup.explain_by(body, &all);
    if all.prompt.bytes == explained.prompt.bytes {
        return None;
    }
    let pieces = pieces::of(&all);
    let first = pieces.iter().find(|piece| !piece.bytes.is_empty())?;
    let text = String::from_utf8_lossy(&first.bytes);
    let mut patterns = setup.config.read.skip.iter();
    let pattern = patterns.find(|skip| text.starts_with(skip.as_str()))?;
    Some(match args.no_text {
        true => pattern.clone(),
        false => first.excerpt(0, EXCERPT),
    })
}

/// The names of what is mixed in; template inputs by the pointers that lead to them.
fn seeds(setup: &Setup, explained: &Explained) -> Vec<String> {
    let inputs = &setup.config.read.template_inputs;
    let named = |(name, _): &(String, u64)| {
        let input = name.strip_prefix("template_inputs/");
        let input = input.and_then(|place| inputs.get(place.parse::<usize>().ok()?));
        input.unwrap_or(name).clone()
    };
    explained.seeds.iter().map(named).collect()
}

fn checkpoints(prompt: &Prompt) -> Vec<CheckpointShown> {
    const USES: [(Kinds, &str); 6] = [
        (Kinds::KEY, "key"),
        (Kinds::INDEX, "index"),
        (Kinds::FIRST_MESSAGE, "first message ends"),
        (Kinds::SECOND_MESSAGE, "second message ends"),
        (Kinds::MESSAGE_END, "message ends"),
        (Kinds::END, "prompt ends"),
    ];
    let shown = |at: &prefix_router::prefix::Checkpoint| {
        // The prompt's end is its last message's end, and the first two have names of their own.
        let named = Kinds::FIRST_MESSAGE.with(Kinds::SECOND_MESSAGE);
        let hidden = |kind: Kinds| {
            let ends = kind == Kinds::MESSAGE_END || named.has(kind);
            (ends && at.kinds.has(Kinds::END))
                || (kind == Kinds::MESSAGE_END && at.kinds.has(named))
        };
        let uses = USES
            .iter()
            .filter(|(kind, _)| at.kinds.has(*kind) && !hidden(*kind));
        let uses = uses.map(|(_, name)| *name).collect();
        CheckpointShown {
            bytes: at.position,
            tokens: pieces::tokens(at.position),
            hash: pieces::hash_of(prompt, at),
            uses,
        }
    };
    prompt.checkpoints.iter().map(shown).collect()
}
