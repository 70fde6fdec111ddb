//! The filter's configuration: strict JSON → [`Config`].
//!
//! Guarantee: a `Config` that exists is valid, and nothing of what was written was ignored; every
//! refusal names the path, what was expected and what was found. Not here: what each option is
//! called and takes (config/options.rs), what routing does with it (route.rs).

mod group;
mod options;
mod pool;
mod problem;
mod selection;
mod tree;

pub use options::{Absent, Form, Kind, NAME_BYTES_MAX, OPTIONS, Opt, TEXT_BYTES_MAX};
pub use pool::{HostSource, Mode, Pool, Routing};
pub use problem::{ConfigError, Problem};

use crate::names;
use crate::payload::{CacheKey, ReadOptions, Tools};
use group::Group;
use options as opt;
use tree::Node;

/// A valid configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The models behind this listener, at least one, with names and clusters of their own.
    pub pools: Vec<Pool>,
    /// How request bodies become prompts, as long as only the body says which pool takes them.
    pub read: ReadOptions,
    /// How requests are held and recognised.
    pub request: Request,
    /// What is learned from answers.
    pub learning: Learning,
    /// When the debug response headers are sent.
    pub debug_headers: DebugHeaders,
    /// What is logged.
    pub log: log::LevelFilter,
    /// How many addresses get metrics of their own.
    pub host_series_max: u32,
}

/// How requests are held and recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Bytes of a body that are held and read at most.
    pub body_bytes_max: u32,
    /// Until a first body has ever come: how long a request waits for its own.
    pub body_wait_ms: u32,
    /// How long a body may stand still before its request is placed by what has come.
    pub body_idle_ms: u32,
    /// The header that separates tenants, in lower case.
    pub tenant_header: Option<String>,
}

/// What is learned from answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Learning {
    /// One answer in so many is read for its usage; none if it is 0.
    pub sample: u32,
}

/// When the debug response headers are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DebugHeaders {
    /// Never.
    Off,
    /// When a trusted request asks.
    OnRequest,
    /// With every response.
    Always,
}

/// A configuration is a page of text; this is a thousand pages, and still parsed in milliseconds.
pub const CONFIG_BYTES_MAX: usize = 4 * 1024 * 1024;

impl Config {
    /// Parses the filter's configuration.
    ///
    /// # Errors
    /// The first thing in `bytes` that is not as declared in [`OPTIONS`], or contradicts another.
    pub fn parse(bytes: &[u8]) -> Result<Self, ConfigError> {
        let tree = read_tree(bytes)?;
        Self::of(&tree).map_err(|error| error.quoting(bytes))
    }

    fn of(tree: &Node) -> Result<Self, ConfigError> {
        let root = Group::open(tree, String::new(), "")?;
        let request = root.group(&opt::REQUEST)?;
        let cache_key = parse_cache_key(&request)?;
        let groups = root.items(&opt::POOLS)?;
        let mut pools = groups
            .iter()
            .map(|group| pool::parse(group, cache_key))
            .collect::<Result<Vec<_>, _>>()?;
        selection::settle(&groups, &mut pools)?;
        let learning = root.group(&opt::LEARNING)?;
        Ok(Self {
            read: parse_read(&root, &request, &pools)?,
            request: parse_request(&request)?,
            learning: Learning {
                sample: learning.integer(&opt::SAMPLE)?.unwrap_or_default(),
            },
            debug_headers: match root.text(&opt::DEBUG_HEADERS)?.as_deref() {
                Some("always") => DebugHeaders::Always,
                Some("on_request") => DebugHeaders::OnRequest,
                _ => DebugHeaders::Off,
            },
            log: match root.text(&opt::LOG)?.as_deref() {
                Some("error") => log::LevelFilter::Error,
                Some("warn") => log::LevelFilter::Warn,
                Some("debug") => log::LevelFilter::Debug,
                _ => log::LevelFilter::Info,
            },
            host_series_max: root.integer(&opt::HOST_SERIES_MAX)?.unwrap_or_default(),
            pools,
        })
    }

    /// How the bodies of a pool's requests are read when the request's head leads to it.
    #[must_use]
    pub fn read_for(&self, pool: &Pool) -> ReadOptions {
        ReadOptions {
            prefix_length: pool.routing.prefix_length(),
            cache_key: pool.cache_key,
            ..self.read.clone()
        }
    }
}

fn read_tree(bytes: &[u8]) -> Result<Node, ConfigError> {
    let syntax = |found: String| ConfigError {
        pointer: String::new(),
        problem: Problem::Syntax(found),
    };
    if bytes.is_empty() {
        return Err(syntax("nothing (is it given as a StringValue?)".into()));
    }
    if bytes.len() > CONFIG_BYTES_MAX {
        return Err(syntax(format!("more than {CONFIG_BYTES_MAX} bytes")));
    }
    serde_json::from_slice(bytes).map_err(|error| match bytes.first() {
        // A protobuf Struct begins with the tag of its `fields`.
        Some(0x0a)
            if bytes
                .get(1)
                .is_some_and(|&next| !next.is_ascii_whitespace()) =>
        {
            syntax("a protobuf Struct (give it as a StringValue)".into())
        }
        _ => syntax(error.to_string()),
    })
}

/// What is stated of `prompt_cache_key`.
fn parse_cache_key(request: &Group<'_>) -> Result<Option<CacheKey>, ConfigError> {
    Ok(match request.text(&opt::PROMPT_CACHE_KEY)?.as_deref() {
        Some("hint") => Some(CacheKey::Hint),
        Some("seed") => Some(CacheKey::Seed),
        Some("ignore") => Some(CacheKey::Ignore),
        _ => None,
    })
}

fn parse_read(
    root: &Group<'_>,
    request: &Group<'_>,
    pools: &[Pool],
) -> Result<ReadOptions, ConfigError> {
    let by_body = pools.iter().filter(|pool| pool.is_by_body());
    let prefix_length = by_body
        .filter_map(|pool| pool.routing.prefix_length())
        .next();
    // Not if it is stated.
    let Some(cache_key) = selection::cache_key(pools) else {
        let reason = "expected \"hint\", \"seed\" or \"ignore\", got nothing: what it usually does \
                      is not the same in all pools that a model can lead to";
        return Err(request.contradiction(&opt::PROMPT_CACHE_KEY, reason));
    };
    Ok(ReadOptions {
        seed: root.seed(&opt::SEED)?,
        prefix_length,
        pointers: request.texts(&opt::POINTERS)?.unwrap_or_default(),
        template_inputs: request.texts(&opt::TEMPLATE_INPUTS)?.unwrap_or_default(),
        cache_key,
        tools: match request.text(&opt::TOOLS)?.as_deref() {
            Some("before_system") => Tools::BeforeSystem,
            Some("after_system") => Tools::AfterSystem,
            Some("before_last_user") => Tools::BeforeLastUser,
            _ => Tools::ByModel,
        },
        image_tokens: request.integer(&opt::IMAGE_TOKENS)?.unwrap_or_default(),
        skip: request.texts(&opt::SKIP)?.unwrap_or_default(),
    })
}

fn parse_request(group: &Group<'_>) -> Result<Request, ConfigError> {
    let tenant_header = group
        .text(&opt::TENANT_HEADER)?
        .map(|name| name.to_ascii_lowercase());
    if let Some(name) = tenant_header.as_deref()
        && name.starts_with(names::OWN_HEADERS)
    {
        let reason = "is a header of the filter's own, which no request can bring";
        return Err(group.contradiction(&opt::TENANT_HEADER, reason));
    }
    Ok(Request {
        body_bytes_max: group.integer(&opt::BODY_BYTES_MAX)?.unwrap_or_default(),
        body_wait_ms: group.integer(&opt::BODY_WAIT_MS)?.unwrap_or_default(),
        body_idle_ms: group.integer(&opt::BODY_IDLE_MS)?.unwrap_or_default(),
        tenant_header,
    })
}
