//! The filter's configuration: strict JSON → [`Config`].
//!
//! Guarantee: a `Config` that exists is valid, and nothing of what was written was ignored; every
//! refusal names the path, what was expected and what was found. Not here: what each option is
//! called and takes (config/options.rs), what routing does with it (route.rs).

mod options;
mod tree;

pub use options::{Absent, Form, Kind, NAME_BYTES_MAX, OPTIONS, Opt, TEXT_BYTES_MAX};

use crate::cost::Constants;
use crate::hosts;
use crate::names;
use crate::payload::{CacheKey, ReadOptions, Tools};
use crate::pool::Rule;
use crate::popularity::Heat;
use crate::route::Bounds;
use options as opt;
use std::fmt;
use tree::Node;

/// A valid configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The models behind this listener, at least one, with names of their own.
    pub pools: Vec<Pool>,
    /// How request bodies become prompts.
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

/// The hosts that serve one model, and how they are chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// The label in metrics and debug headers.
    pub name: String,
    /// The Envoy cluster.
    pub cluster: String,
    /// Where the host list comes from.
    pub hosts: HostSource,
    /// How a prompt's key is found.
    pub routing: Routing,
    /// What load may do to the choice.
    pub bounds: Bounds,
    /// Whether a request that finds every host at its limit is answered 429.
    pub rejects: bool,
    /// Time over which a host that comes later takes its share, in milliseconds.
    pub slow_start_ms: u32,
    /// Whether the first choice goes out by itself, for Envoy to check its health.
    pub strict_health: bool,
}

/// Where a pool's host list comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostSource {
    /// Envoy's admin, polled through a cluster that leads to it.
    Admin {
        /// That cluster.
        cluster: String,
        /// Time between two polls.
        poll_ms: u32,
    },
    /// The config: canonical `ip:port`, none twice.
    Static(Vec<String>),
}

/// How a prompt's key is found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Routing {
    /// By how popular its prefixes are.
    Adaptive {
        /// What decides how deep the key goes.
        heat: Heat,
        /// What the choice weighs.
        constants: Constants,
        /// Whether no other gateway sends to these hosts.
        one_gateway: bool,
    },
    /// By this many characters of it.
    Fixed {
        /// Characters, or bytes of a native body.
        prefix_length: u32,
    },
}

impl Routing {
    /// What the pool's router does.
    #[must_use]
    pub fn rule(self) -> Rule {
        match self {
            Self::Adaptive {
                heat,
                constants,
                one_gateway,
            } => Rule::Adaptive {
                heat,
                constants,
                one_gateway,
            },
            Self::Fixed { .. } => Rule::Fixed,
        }
    }
}

/// How requests are held and recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Bytes of a body that are held and read at most.
    pub body_bytes_max: u32,
    /// Until a first body has ever come: how long a request waits for its own.
    pub body_wait_ms: u32,
    /// How long a body may stand still before its request is released unrouted.
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
        let root = Group::open(&tree, String::new(), "")?;
        let pools = root
            .items(&opt::POOLS)?
            .iter()
            .map(parse_pool)
            .collect::<Result<Vec<_>, _>>()?;
        let request = root.group(&opt::REQUEST)?;
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

fn parse_pool(pool: &Group<'_>) -> Result<Pool, ConfigError> {
    let cluster = pool.text(&opt::CLUSTER)?.unwrap_or_default();
    let name = pool.text(&opt::NAME)?.unwrap_or_else(|| cluster.clone());
    let hosts = parse_hosts(&pool.group(&opt::HOSTS)?, &cluster)?;
    let (routing, threshold) = parse_routing(pool)?;
    let limit = pool.integer(&opt::LIMIT)?;
    let limit = match (threshold, limit) {
        (Some(_), Some(_)) => {
            let other = match pool.has(&opt::AWS) {
                true => opt::AWS_THRESHOLD.name(),
                false => opt::CONCURRENCY_THRESHOLD.name(),
            };
            let reason = format!("contradicts {other}: they are the same, give one of them");
            return Err(pool.contradiction(&opt::LIMIT, &reason));
        }
        (None, None) if matches!(routing, Routing::Fixed { .. }) => {
            return Err(pool.missing(&opt::CONCURRENCY_THRESHOLD));
        }
        (threshold, limit) => threshold.or(limit),
    };
    if limit.is_none() && pool.has(&opt::PANIC_RULE) {
        let reason = "has no effect without limit";
        return Err(pool.contradiction(&opt::PANIC_RULE, reason));
    }
    let rejects = pool.text(&opt::ON_SATURATED)?.as_deref() == Some("reject");
    if limit.is_none() && rejects {
        let reason = "reject has no effect without limit";
        return Err(pool.contradiction(&opt::ON_SATURATED, reason));
    }
    let panic_rule = pool.bool(&opt::PANIC_RULE)?.unwrap_or_default();
    if panic_rule && rejects {
        // When every host is at its limit, their mean is above half of it.
        let reason = "reject has no effect without \"panic_rule\": false";
        return Err(pool.contradiction(&opt::ON_SATURATED, reason));
    }
    Ok(Pool {
        name,
        cluster,
        hosts,
        routing,
        bounds: Bounds { limit, panic_rule },
        rejects,
        slow_start_ms: pool.integer(&opt::SLOW_START_MS)?.unwrap_or_default(),
        strict_health: pool.bool(&opt::STRICT_HEALTH)?.unwrap_or_default(),
    })
}

fn parse_hosts(group: &Group<'_>, pool_cluster: &str) -> Result<HostSource, ConfigError> {
    let admin = group.text(&opt::ADMIN_CLUSTER)?;
    let list = group.texts(&opt::STATIC)?;
    let (cluster, list) = match (admin, list) {
        (Some(_), Some(_)) => {
            let reason = "contradicts admin_cluster: hosts come from one of them";
            return Err(group.contradiction(&opt::STATIC, reason));
        }
        (None, None) => {
            return Err(group.error(Problem::Wrong {
                expected: "admin_cluster (poll Envoy's admin) or static (a list of ip:port)".into(),
                found: "neither".into(),
            }));
        }
        (cluster, list) => (cluster, list),
    };
    if let Some(cluster) = cluster {
        if cluster == pool_cluster {
            let reason = "is the pool's own cluster; expected one that leads to Envoy's admin";
            return Err(group.contradiction(&opt::ADMIN_CLUSTER, reason));
        }
        let poll_ms = group.integer(&opt::POLL_MS)?.unwrap_or_default();
        return Ok(HostSource::Admin { cluster, poll_ms });
    }
    if group.has(&opt::POLL_MS) {
        let reason = "contradicts static: a list in the config is not polled";
        return Err(group.contradiction(&opt::POLL_MS, reason));
    }
    let mut hosts: Vec<String> = Vec::new();
    for (index, text) in list.unwrap_or_default().iter().enumerate() {
        // The form was checked with the list.
        let address = hosts::canonical(text).unwrap_or_default();
        if let Some(first) = hosts.iter().position(|host| *host == address) {
            let reason = format!("is the address of item {first} again");
            let mut error = group.contradiction(&opt::STATIC, &reason);
            error.pointer = format!("{}/{index}", error.pointer);
            return Err(error);
        }
        hosts.push(address);
    }
    Ok(HostSource::Static(hosts))
}

/// The routing, and the threshold if the options of `fixed` give one.
fn parse_routing(pool: &Group<'_>) -> Result<(Routing, Option<u32>), ConfigError> {
    let own = [&opt::PREFIX_LENGTH, &opt::CONCURRENCY_THRESHOLD];
    let given = own.into_iter().find(|option| pool.has(option));
    let routing = pool.text(&opt::ROUTING)?;
    if pool.has(&opt::AWS) {
        if let Some(option) = given {
            let reason = "contradicts PrefixAwareRoutingConfig: give one of them";
            return Err(pool.contradiction(option, reason));
        }
        if routing.as_deref() == Some("adaptive") {
            let reason = "contradicts PrefixAwareRoutingConfig: expected \"fixed\"";
            return Err(pool.contradiction(&opt::ROUTING, reason));
        }
        refuse_adaptive_options(pool)?;
        let block = pool.group(&opt::AWS)?;
        let prefix_length = block.integer(&opt::AWS_LENGTH)?.unwrap_or_default();
        let threshold = block.integer(&opt::AWS_THRESHOLD)?;
        return Ok((Routing::Fixed { prefix_length }, threshold));
    }
    if routing.as_deref() == Some("fixed") {
        refuse_adaptive_options(pool)?;
        let Some(prefix_length) = pool.integer(&opt::PREFIX_LENGTH)? else {
            return Err(pool.missing(&opt::PREFIX_LENGTH));
        };
        let threshold = pool.integer(&opt::CONCURRENCY_THRESHOLD)?;
        return Ok((Routing::Fixed { prefix_length }, threshold));
    }
    match given {
        Some(option) => {
            let reason = "has no effect without \"routing\": \"fixed\"";
            Err(pool.contradiction(option, reason))
        }
        None => Ok((parse_adaptive(pool)?, None)),
    }
}

fn parse_adaptive(pool: &Group<'_>) -> Result<Routing, ConfigError> {
    let expert = pool.group(&opt::EXPERT)?;
    let decimal = |option| Ok(expert.decimal(option)?.unwrap_or_default());
    Ok(Routing::Adaptive {
        heat: Heat {
            hot_share: decimal(&opt::HOT_SHARE)?,
            count_min: expert.integer(&opt::COUNT_MIN)?.unwrap_or_default(),
            halve_requests: expert.integer(&opt::HALVE_REQUESTS)?.unwrap_or_default(),
        },
        constants: Constants {
            affinity_weight: decimal(&opt::AFFINITY_WEIGHT)?,
            step_tokens: decimal(&opt::STEP_TOKENS)?,
            in_flight_tokens: decimal(&opt::IN_FLIGHT_TOKENS)?,
            failure_tokens: decimal(&opt::FAILURE_TOKENS)?,
            slack: decimal(&opt::SLACK)?,
            stick: decimal(&opt::STICK)?,
            balance: decimal(&opt::BALANCE)?,
            idle_in_flight: decimal(&opt::IDLE_IN_FLIGHT)?,
        },
        one_gateway: pool.text(&opt::GATEWAYS)?.as_deref() == Some("one"),
    })
}

/// In `fixed` nothing is weighed.
fn refuse_adaptive_options(pool: &Group<'_>) -> Result<(), ConfigError> {
    for option in [&opt::GATEWAYS, &opt::EXPERT] {
        if pool.has(option) {
            return Err(pool.contradiction(option, "has no effect in fixed routing"));
        }
    }
    Ok(())
}

fn parse_read(
    root: &Group<'_>,
    request: &Group<'_>,
    pools: &[Pool],
) -> Result<ReadOptions, ConfigError> {
    // Bodies are read before their pool is known; with one pool its routing says how.
    let prefix_length = pools.iter().find_map(|pool| match pool.routing {
        Routing::Adaptive { .. } => None,
        Routing::Fixed { prefix_length } => Some(prefix_length),
    });
    let cache_key = match request.text(&opt::PROMPT_CACHE_KEY)?.as_deref() {
        Some("hint") => CacheKey::Hint,
        Some("seed") => CacheKey::Seed,
        Some("ignore") => CacheKey::Ignore,
        _ if prefix_length.is_some() => CacheKey::Seed,
        _ => CacheKey::Hint,
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
        && [names::ROUTE_HOST, names::ROUTE_FIRST, names::ROUTE_POOL].contains(&name)
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

/// One object of the config, with the part of the option table that it may hold.
struct Group<'t> {
    fields: &'t [(String, Node)],
    /// Where it stands in the config.
    pointer: String,
    /// Where it stands in the table.
    path: &'static str,
}

impl<'t> Group<'t> {
    /// The object's fields, if each is declared and none is there twice.
    fn open(node: &'t Node, pointer: String, path: &'static str) -> Result<Self, ConfigError> {
        let Node::Object(fields) = node else {
            return Err(wrong(pointer, Kind::Object, node));
        };
        let group = Self {
            fields,
            pointer,
            path,
        };
        for (index, (name, _)) in fields.iter().enumerate() {
            if !group.options().any(|option| option.name() == name) {
                return Err(ConfigError {
                    problem: Problem::unknown(name, group.options().map(Opt::name).collect()),
                    pointer: group.join(name),
                });
            }
            if fields.iter().take(index).any(|(other, _)| other == name) {
                return Err(ConfigError {
                    pointer: group.join(name),
                    problem: Problem::Duplicate,
                });
            }
        }
        Ok(group)
    }

    fn options(&self) -> impl Iterator<Item = &'static Opt> {
        let path = self.path;
        OPTIONS.iter().filter(move |option| option.parent() == path)
    }

    /// The pointer of a field, escaped as JSON Pointer asks.
    fn join(&self, name: &str) -> String {
        let name = name.replace('~', "~0").replace('/', "~1");
        format!("{}/{name}", self.pointer)
    }

    fn node(&self, option: &Opt) -> Option<&'t Node> {
        let mut fields = self.fields.iter();
        fields
            .find(|(name, _)| name == option.name())
            .map(|(_, node)| node)
    }

    fn has(&self, option: &Opt) -> bool {
        self.node(option).is_some()
    }

    fn wrong(&self, option: &Opt, found: &Node) -> ConfigError {
        wrong(self.join(option.name()), option.kind, found)
    }

    fn error(&self, problem: Problem) -> ConfigError {
        ConfigError {
            pointer: self.pointer.clone(),
            problem,
        }
    }

    fn missing(&self, option: &Opt) -> ConfigError {
        ConfigError {
            pointer: self.join(option.name()),
            problem: Problem::Wrong {
                expected: option.kind.to_string(),
                found: "nothing".into(),
            },
        }
    }

    fn contradiction(&self, option: &Opt, reason: &str) -> ConfigError {
        ConfigError {
            pointer: self.join(option.name()),
            problem: Problem::Contradiction(reason.into()),
        }
    }

    /// Fails for a required option that is not there.
    fn given(&self, option: &Opt) -> Result<Option<&'t Node>, ConfigError> {
        match self.node(option) {
            None if option.absent == Absent::Required => Err(self.missing(option)),
            node => Ok(node),
        }
    }

    /// An object; an absent one is read as empty.
    fn group(&self, option: &Opt) -> Result<Group<'t>, ConfigError> {
        let pointer = self.join(option.name());
        match self.given(option)? {
            Some(node) => Group::open(node, pointer, option.path),
            None => Ok(Group {
                fields: &[],
                pointer,
                path: option.path,
            }),
        }
    }

    /// A list of objects.
    fn items(&self, option: &Opt) -> Result<Vec<Group<'t>>, ConfigError> {
        let (Some(node), Kind::Objects { min, max, .. }) = (self.given(option)?, option.kind)
        else {
            return Ok(Vec::new());
        };
        let Node::List(items) = node else {
            return Err(self.wrong(option, node));
        };
        if items.len() < min || items.len() > max {
            return Err(self.wrong(option, node));
        }
        let path = OPTIONS
            .iter()
            .map(Opt::parent)
            .find(|parent| parent.strip_suffix("/*") == Some(option.path));
        let pointer = self.join(option.name());
        let open = |(index, item)| {
            Group::open(item, format!("{pointer}/{index}"), path.unwrap_or_default())
        };
        items.iter().enumerate().map(open).collect()
    }

    fn integer(&self, option: &Opt) -> Result<Option<u32>, ConfigError> {
        let value = match (self.given(option)?, option.kind, option.absent) {
            (Some(Node::Integer(value)), Kind::Integer { min, max, .. }, _)
                if (i128::from(min)..=i128::from(max)).contains(value) =>
            {
                u32::try_from(*value).ok()
            }
            (Some(node), ..) => return Err(self.wrong(option, node)),
            (None, _, Absent::Integer(value)) => u32::try_from(value).ok(),
            (None, ..) => None,
        };
        Ok(value)
    }

    fn decimal(&self, option: &Opt) -> Result<Option<f64>, ConfigError> {
        let value = match (self.given(option)?, option.absent) {
            // Exact: integers of this size fit.
            (Some(Node::Integer(value)), _) => *value as f64,
            (Some(Node::Float(value)), _) => *value,
            (Some(node), _) => return Err(self.wrong(option, node)),
            (None, Absent::Decimal(value)) => return Ok(Some(value)),
            (None, _) => return Ok(None),
        };
        match (option.kind, self.node(option)) {
            (Kind::Decimal { min, max, .. }, _) if (min..=max).contains(&value) => Ok(Some(value)),
            (_, Some(node)) => Err(self.wrong(option, node)),
            (_, None) => Ok(None),
        }
    }

    fn bool(&self, option: &Opt) -> Result<Option<bool>, ConfigError> {
        match (self.given(option)?, option.absent) {
            (Some(Node::Bool(value)), _) => Ok(Some(*value)),
            (Some(node), _) => Err(self.wrong(option, node)),
            (None, Absent::Bool(value)) => Ok(Some(value)),
            (None, _) => Ok(None),
        }
    }

    fn text(&self, option: &Opt) -> Result<Option<String>, ConfigError> {
        let fits = |text: &str| match option.kind {
            Kind::Choice(words) => words.contains(&text),
            Kind::Text(form) | Kind::TextOrNull(form) => has_form(text, form),
            _ => false,
        };
        match (self.given(option)?, option.absent) {
            (Some(Node::Text(text)), _) if fits(text) => Ok(Some(text.clone())),
            (Some(Node::Null), _) if matches!(option.kind, Kind::TextOrNull(_)) => Ok(None),
            (Some(node), _) => Err(self.wrong(option, node)),
            (None, Absent::Text(text)) => Ok(Some(text.to_owned())),
            (None, _) => Ok(None),
        }
    }

    fn texts(&self, option: &Opt) -> Result<Option<Vec<String>>, ConfigError> {
        let (items, form) = match (self.given(option)?, option.kind, option.absent) {
            (Some(Node::List(items)), Kind::Texts { form, min, max }, _)
                if (min..=max).contains(&items.len()) =>
            {
                (items, form)
            }
            (Some(node), ..) => return Err(self.wrong(option, node)),
            (None, _, Absent::Texts(texts)) => {
                return Ok(Some(texts.iter().map(|&text| text.to_owned()).collect()));
            }
            (None, ..) => return Ok(None),
        };
        let pointer = self.join(option.name());
        let text = |(index, item): (usize, &Node)| match item {
            Node::Text(text) if has_form(text, form) => Ok(text.clone()),
            _ => Err(wrong(format!("{pointer}/{index}"), form, item)),
        };
        let texts: Result<_, _> = items.iter().enumerate().map(text).collect();
        texts.map(Some)
    }

    fn seed(&self, option: &Opt) -> Result<u64, ConfigError> {
        match self.given(option)? {
            None => Ok(0),
            Some(Node::Text(text)) if has_form(text, Form::Free) => {
                Ok(xxhash_rust::xxh64::xxh64(text.as_bytes(), 0))
            }
            Some(node @ Node::Integer(value)) => {
                u64::try_from(*value).map_err(|_| self.wrong(option, node))
            }
            Some(node) => Err(self.wrong(option, node)),
        }
    }
}

fn has_form(text: &str, form: Form) -> bool {
    if text.is_empty() || text.len() > TEXT_BYTES_MAX {
        return false;
    }
    match form {
        Form::Name => {
            text.len() <= NAME_BYTES_MAX
                && !text.contains(char::is_control)
                && !text.contains(names::LABEL_END)
        }
        Form::Header => text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.!#$%&'*+^`|~".contains(&byte)),
        Form::Pointer => text.starts_with('/'),
        Form::Address => hosts::canonical(text).is_some(),
        Form::Free => true,
    }
}

fn wrong(pointer: String, expected: impl fmt::Display, found: &Node) -> ConfigError {
    ConfigError {
        pointer,
        problem: Problem::Wrong {
            expected: expected.to_string(),
            found: found.to_string(),
        },
    }
}

/// Why a configuration was refused; its `Display` is one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Where, as a JSON Pointer; empty for the whole.
    pub pointer: String,
    /// What is wrong there.
    pub problem: Problem,
}

/// What is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// It is not JSON.
    Syntax(String),
    /// A field that is not declared.
    Unknown {
        /// The declared ones.
        known: Vec<&'static str>,
        /// The one that was probably meant.
        nearest: Option<&'static str>,
        /// Where a field of this name is declared.
        elsewhere: Option<&'static str>,
    },
    /// A field that is there twice.
    Duplicate,
    /// A value that the option does not take.
    Wrong {
        /// What it takes.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A value that another one rules out.
    Contradiction(String),
}

impl Problem {
    fn unknown(name: &str, known: Vec<&'static str>) -> Self {
        let mut elsewhere = OPTIONS.iter().filter(|option| option.name() == name);
        Self::Unknown {
            nearest: nearest(name, &known),
            elsewhere: elsewhere.next().map(Opt::parent),
            known,
        }
    }
}

/// The field that was probably meant, if one is near enough for a suggestion to help.
fn nearest(name: &str, known: &[&'static str]) -> Option<&'static str> {
    // Two edits, or a third of the name.
    let edits_max = (name.chars().count() / 3).max(2);
    let (words, lower) = (sorted_words(name), name.to_ascii_lowercase());
    let edits = |&other: &&'static str| {
        if !lower.is_empty() && (other.starts_with(&lower) || words == sorted_words(other)) {
            return (0, other);
        }
        let other_lower = other.to_ascii_lowercase();
        (strsim::osa_distance(&lower, &other_lower), other)
    };
    let (edits, nearest) = known.iter().map(edits).min()?;
    (edits <= edits_max).then_some(nearest)
}

/// `max_body_bytes` and `body_bytes_max` are easily confused.
fn sorted_words(name: &str) -> Vec<String> {
    let mut words: Vec<_> = name
        .split(['_', '-'])
        .map(str::to_ascii_lowercase)
        .collect();
    words.sort();
    words
}

/// Characters of a pointer that are shown; no declared field lies deeper.
const POINTER_CHARS_MAX: usize = 256;

/// Text from a configuration for one line of a log.
fn one_line(text: &str) -> String {
    let shown = text.chars().take(POINTER_CHARS_MAX);
    let mut line = String::new();
    for character in shown {
        if character.is_control() {
            line.extend(character.escape_default());
        } else {
            line.push(character);
        }
    }
    if text.chars().nth(POINTER_CHARS_MAX).is_some() {
        line.push('…');
    }
    line
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("config")?;
        if !self.pointer.is_empty() {
            write!(f, " {}", one_line(&self.pointer))?;
        }
        match &self.problem {
            Problem::Syntax(found) => write!(f, ": expected JSON, got {found}"),
            Problem::Unknown {
                known,
                nearest,
                elsewhere,
            } => {
                f.write_str(": unknown field")?;
                match (nearest, elsewhere) {
                    (_, Some("")) => f.write_str(", it belongs at the top")?,
                    (_, Some(parent)) => write!(f, ", it belongs in {parent}")?,
                    (Some(nearest), None) => write!(f, ", did you mean {nearest}?")?,
                    (None, None) => {}
                }
                write!(f, "; known fields: {}", known.join(", "))
            }
            Problem::Duplicate => f.write_str(": expected this field once, got it twice"),
            Problem::Wrong { expected, found } => write!(f, ": expected {expected}, got {found}"),
            Problem::Contradiction(reason) => write!(f, ": {reason}"),
        }
    }
}

impl std::error::Error for ConfigError {}
