//! Every option of the config, declared once: the parser, its errors, the README's table and the
//! `check` command all read this table.
//!
//! Guarantee: a field that is not declared here is refused. Not here: what options mean together
//! (config.rs).

use std::fmt;

/// One option.
#[derive(Clone, Copy, Debug)]
pub struct Opt {
    /// JSON Pointer; `*` stands for any item of a list.
    pub path: &'static str,
    /// What values it takes.
    pub kind: Kind,
    /// What its absence means.
    pub absent: Absent,
    /// What it does, for the README.
    pub doc: &'static str,
}

impl Opt {
    /// The pointer of the object that the option is in.
    #[must_use]
    pub fn parent(&self) -> &'static str {
        self.path.rsplit_once('/').map_or("", |(parent, _)| parent)
    }

    /// The field's name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.path.rsplit_once('/').map_or("", |(_, name)| name)
    }
}

/// The values an option takes. Its `Display` completes "expected …".
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// An object with options of its own.
    Object,
    /// A list of such objects.
    Objects {
        /// How many at least.
        min: usize,
        /// How many at most.
        max: usize,
        /// What they are.
        unit: &'static str,
    },
    /// A number without fraction.
    Integer {
        /// The smallest value.
        min: u64,
        /// The largest value.
        max: u64,
        /// What is counted.
        unit: &'static str,
    },
    /// A number, with or without fraction.
    Decimal {
        /// The smallest value.
        min: f64,
        /// The largest value.
        max: f64,
        /// What is counted.
        unit: &'static str,
    },
    /// `true` or `false`.
    Bool,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A text of this form.
    Text(Form),
    /// The same, or `null` for none.
    TextOrNull(Form),
    /// A list of texts of this form.
    Texts {
        /// What each one is.
        form: Form,
        /// How many at least.
        min: usize,
        /// How many at most.
        max: usize,
    },
    /// A text, or an integer of 64 bits.
    Seed,
}

/// What a text stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The name of something; becomes a metric label.
    Name,
    /// The name of a header.
    Header,
    /// A JSON Pointer.
    Pointer,
    /// `ip:port`.
    Address,
    /// A model or another name, with at most one `*`.
    Pattern,
    /// What a path starts with.
    Path,
    /// Any text but the empty one.
    Free,
}

/// No text of the config is longer: it is a name, a pointer or the start of a prompt.
pub const TEXT_BYTES_MAX: usize = 1024;

/// Names become metric labels.
pub const NAME_BYTES_MAX: usize = 256;

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Object => f.write_str("an object"),
            Self::Objects { min, max, unit } if min == max => {
                write!(f, "a list of exactly {min} {unit}")
            }
            Self::Objects { min, max, unit } => write!(f, "a list of {min}..={max} {unit}"),
            Self::Integer { min, max, unit } => {
                write!(f, "an integer in {min}..={max} ({unit})")
            }
            Self::Decimal { min, max, unit } => write!(f, "a number in {min}..={max} ({unit})"),
            Self::Bool => f.write_str("true or false"),
            Self::Choice(words) => {
                let quoted: Vec<_> = words.iter().map(|word| format!("{word:?}")).collect();
                f.write_str(&quoted.join(" or "))
            }
            Self::Text(form) => form.fmt(f),
            Self::TextOrNull(form) => write!(f, "{form}, or null"),
            Self::Texts { form, min, max } => {
                write!(f, "a list of {min}..={max}, each {form}")
            }
            Self::Seed => write!(f, "a text or an integer in 0..={}", u64::MAX),
        }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name => write!(
                f,
                "a name (1..={NAME_BYTES_MAX} bytes, printable, trimmed, without \".=\")"
            ),
            Self::Header => f.write_str("a header name"),
            Self::Pointer => f.write_str("a JSON Pointer that starts with \"/\""),
            Self::Address => f.write_str("\"ip:port\", or \"[ip]:port\" for IPv6"),
            Self::Pattern => write!(
                f,
                "a text of 1..={NAME_BYTES_MAX} bytes, trimmed, with at most one \"*\""
            ),
            Self::Path => f.write_str("a path that starts with \"/\", without a query"),
            Self::Free => write!(f, "a text of 1..={TEXT_BYTES_MAX} bytes"),
        }
    }
}

/// What the absence of an option means.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Absent {
    /// It is an error.
    Required,
    /// What the text says.
    Means(&'static str),
    /// This number.
    Integer(u64),
    /// This number.
    Decimal(f64),
    /// This value.
    Bool(bool),
    /// This word or text.
    Text(&'static str),
    /// These texts.
    Texts(&'static [&'static str]),
}

/// Declares options as constants and collects them into [`OPTIONS`], in this order.
macro_rules! options {
    ($($name:ident: $path:literal, $kind:expr, $absent:expr, $doc:literal;)+) => {
        $(pub(super) const $name: Opt = Opt {
            path: $path,
            kind: $kind,
            absent: $absent,
            doc: $doc,
        };)+

        /// Every option, in the order of the README's table.
        pub const OPTIONS: &[Opt] = &[$($name),+];
    };
}

/// One fleet-wide host table has this many slots (hosts.rs).
const HOSTS_MAX: usize = crate::hosts::SLOTS_MAX;

/// A pool has 0.12 MiB of shared data, so 64 have 7.5 MiB; more models than that behind one
/// listener are better served by several.
pub const POOLS_MAX: usize = 64;

/// Patterns of one list. All pools' are looked through for a request: 4,096 in some 20 µs.
const MATCHES_MAX: usize = 64;

/// Headers of one pool; each that any pool names is looked for in every request.
const HEADERS_MAX: usize = 4;

options! {
    POOLS: "/pools", Kind::Objects { min: 1, max: POOLS_MAX, unit: "pools" }, Absent::Required,
        "The models behind this listener.";
    CLUSTER: "/pools/*/cluster", Kind::Text(Form::Name), Absent::Required,
        "The Envoy cluster of the model's hosts.";
    NAME: "/pools/*/name", Kind::Text(Form::Name), Absent::Means("the cluster's name"),
        "The pool's name in metrics and debug headers, and in the header that routes read.";
    DEFAULT: "/pools/*/default", Kind::Bool, Absent::Means("`true` for the only pool"),
        "Of several pools: `true` for the one whose cluster Envoy's own route leads to, `false` \
         for all if it leads to none of them. The default takes what no other pool does, but for \
         models that it does not list when it lists some.";
    MODELS: "/pools/*/models", Kind::Texts { form: Form::Pattern, min: 1, max: MATCHES_MAX },
        Absent::Means("none; any for the default"),
        "The models that the pool serves, adapters included: `\"llama\"`, `\"llama-lora-*\"`. \
         Of several patterns that fit, the one with the most letters counts.";
    COMPONENTS: "/pools/*/components",
        Kind::Texts { form: Form::Pattern, min: 1, max: MATCHES_MAX }, Absent::Means("none"),
        "The inference components that the pool serves, by the header \
         `X-Amzn-SageMaker-Inference-Component`. A header counts before the path, and that \
         before the model.";
    HEADERS: "/pools/*/headers", Kind::Objects { min: 1, max: HEADERS_MAX, unit: "headers" },
        Absent::Means("none"),
        "Requests with one of these headers are the pool's.";
    HEADER_NAME: "/pools/*/headers/*/name", Kind::Text(Form::Header), Absent::Required,
        "The header. Of several that lead to different pools, the component's counts, then the \
         first in the alphabet.";
    HEADER_VALUES: "/pools/*/headers/*/values",
        Kind::Texts { form: Form::Pattern, min: 1, max: MATCHES_MAX }, Absent::Required,
        "The values that lead to the pool.";
    PATHS: "/pools/*/paths", Kind::Texts { form: Form::Path, min: 1, max: MATCHES_MAX },
        Absent::Means("none"),
        "Requests whose path starts with one of these are the pool's. The longest counts.";
    MODE: "/pools/*/mode", Kind::Choice(&["on", "observe"]), Absent::Text("on"),
        "`observe` decides, predicts and counts, and leaves the host to Envoy.";
    SHARE: "/pools/*/share", Kind::Decimal { min: 0.0, max: 1.0, unit: "of keys" },
        Absent::Decimal(1.0),
        "This part of all keys is routed, the same ones on every gateway. The host of the other \
         requests is left to Envoy.";
    HOSTS: "/pools/*/hosts", Kind::Object, Absent::Means("learned from answers"),
        "Where the list of hosts comes from: `admin_cluster` or `static`. With neither, hosts are \
         learned from who answers.";
    ADMIN_CLUSTER: "/pools/*/hosts/admin_cluster", Kind::Text(Form::Name),
        Absent::Means("not polled"),
        "The Envoy cluster that leads to Envoy's own admin. The filter reads hosts, health and \
         load there.";
    POLL_MS: "/pools/*/hosts/poll_ms",
        Kind::Integer { min: 100, max: 60_000, unit: "milliseconds" }, Absent::Integer(500),
        "Time between two polls of the admin, over all workers together.";
    STATIC: "/pools/*/hosts/static",
        Kind::Texts { form: Form::Address, min: 1, max: HOSTS_MAX }, Absent::Means("no list"),
        "The hosts as Envoy's cluster has them, instead of polling. Their health is not known \
         then.";
    ROUTING: "/pools/*/routing", Kind::Choice(&["adaptive", "fixed"]),
        Absent::Means("`adaptive`; `fixed` beside `PrefixAwareRoutingConfig`"),
        "`adaptive` finds the length of shared prefixes by itself. `fixed` takes \
         `prefix_length` of every prompt.";
    PREFIX_LENGTH: "/pools/*/prefix_length",
        Kind::Integer { min: 1024, max: 65_536, unit: "characters" },
        Absent::Means("required in `fixed`"),
        "In `fixed`: how much of the prompt is its prefix. Counted in bytes for native bodies; a \
         token id counts as 4 characters, an image as 4 for each of `image_tokens`. Beside a \
         shorter system prompt (Anthropic, Responses, Gemini, Ollama) the conversation fills what \
         is left, in whole 32nds.";
    CONCURRENCY_THRESHOLD: "/pools/*/concurrency_threshold",
        Kind::Integer { min: 1, max: 1024, unit: "requests" },
        Absent::Means("`limit`"),
        "In `fixed`: another name of `limit`.";
    AWS: "/pools/*/PrefixAwareRoutingConfig", Kind::Object, Absent::Means("not used"),
        "SageMaker's own block, accepted as it is. Means `fixed`.";
    AWS_LENGTH: "/pools/*/PrefixAwareRoutingConfig/PrefixLength", PREFIX_LENGTH.kind,
        Absent::Required, "`prefix_length`.";
    AWS_THRESHOLD: "/pools/*/PrefixAwareRoutingConfig/ConcurrencyThreshold",
        CONCURRENCY_THRESHOLD.kind, Absent::Required, "`concurrency_threshold`.";
    LIMIT: "/pools/*/limit", Kind::Integer { min: 1, max: 65_535, unit: "requests" },
        Absent::Means("off in `adaptive`, required in `fixed`"),
        "Requests in flight per host and gateway above which new ones go to the next host of \
         their order.";
    PANIC_RULE: "/pools/*/panic_rule", Kind::Bool, Absent::Bool(true),
        "Ignore `limit` while the mean in flight is at least half of it: spilling would then \
         only spread every prefix over every cache. `false` makes the limit hard.";
    ON_SATURATED: "/pools/*/on_saturated", Kind::Choice(&["least_loaded", "reject"]),
        Absent::Text("least_loaded"),
        "When every host is at its `limit`: send to the least loaded, or answer 429 with \
         `Retry-After`; the latter needs `panic_rule` to be `false`.";
    SLOW_START_MS: "/pools/*/slow_start_ms",
        Kind::Integer { min: 0, max: 3_600_000, unit: "milliseconds" }, Absent::Integer(30_000),
        "Time over which a host that comes later than the others, or comes back, takes its share \
         of prefixes.";
    ZONE_TOKENS: "/pools/*/zone_tokens",
        Kind::Decimal { min: 0.0, max: 1e6, unit: "tokens" }, Absent::Decimal(0.0),
        "In `adaptive`: what a host in another zone costs more, in waiting tokens, so that it gets \
         what it saves more of by being warm or idle. A home in another zone is kept up to half of \
         the prompt. Needs `admin_cluster`. `0`: zones do not matter.";
    ZONE: "/pools/*/zone", Kind::Text(Form::Name),
        Absent::Means("Envoy's own, `node.locality.zone`"),
        "This gateway's zone, as the hosts' `locality.zone` names it.";
    STRICT_HEALTH: "/pools/*/strict_health", Kind::Bool, Absent::Bool(false),
        "Let Envoy check the first choice's health once more when it sends the request. Needs the \
         filters of envoy/strict-health.yaml.";
    GATEWAYS: "/pools/*/gateways", Kind::Choice(&["many", "one"]), Absent::Text("many"),
        "In `adaptive`: `many` gateways, none of which knows of the others, choose alike. If this \
         is the only `one`, it spreads new prompts evenly, by the hosts' weights, when there is \
         little load.";
    EXPERT: "/pools/*/expert", Kind::Object, Absent::Means("all defaults"),
        "In `adaptive`: the constants of the choice. None needs to be set; ARCHITECTURE.md says \
         where they come from.";
    AFFINITY_WEIGHT: "/pools/*/expert/affinity_weight",
        Kind::Decimal { min: 0.0, max: 10.0, unit: "waiting tokens for an uncached one" },
        Absent::Decimal(2.0),
        "1 prefers short waits, 3 prefers cache hits.";
    HOT_SHARE: "/pools/*/expert/hot_share",
        Kind::Decimal { min: 0.05, max: 10.0, unit: "of a host's even share" },
        Absent::Decimal(0.5),
        "A prefix with more of the recent requests than this is split by what follows it.";
    COUNT_MIN: "/pools/*/expert/count_min",
        Kind::Integer { min: 1, max: 1000, unit: "requests" }, Absent::Integer(4),
        "A prefix seen no more often than this is never split; with 50 hosts twice as often, up to six \
         times with 150.";
    HALVE_REQUESTS: "/pools/*/expert/halve_requests",
        Kind::Integer { min: 100, max: 1_000_000, unit: "requests" }, Absent::Integer(2000),
        "After so many requests, or 100 a host if that is more, all counts are halved: how soon \
         popularity is forgotten.";
    STEP_TOKENS: "/pools/*/expert/step_tokens",
        Kind::Decimal { min: 1.0, max: 1e6, unit: "tokens" }, Absent::Decimal(8192.0),
        "What an engine computes in one step. With so many waiting on every host, saved work \
         weighs one more.";
    IN_FLIGHT_TOKENS: "/pools/*/expert/in_flight_tokens",
        Kind::Decimal { min: 0.0, max: 1e5, unit: "tokens" }, Absent::Decimal(50.0),
        "What a request in flight weighs, in waiting tokens.";
    FAILURE_TOKENS: "/pools/*/expert/failure_tokens",
        Kind::Decimal { min: 0.0, max: 1e5, unit: "tokens" }, Absent::Decimal(500.0),
        "What an answer with status 5xx weighs, in waiting tokens; it halves every 5 s, and 32 \
         count at most.";
    SLACK: "/pools/*/expert/slack",
        Kind::Decimal { min: 0.0, max: 10.0, unit: "of the prompt" }, Absent::Decimal(0.5),
        "The home is kept while it costs no more than this above the best.";
    STICK: "/pools/*/expert/stick",
        Kind::Decimal { min: 0.0, max: 10.0, unit: "of the prompt" }, Absent::Decimal(0.25),
        "A match is kept while it costs no more than this above the best.";
    BALANCE: "/pools/*/expert/balance",
        Kind::Decimal { min: 1.0, max: 10.0, unit: "of an even share" }, Absent::Decimal(1.15),
        "With `gateways` `one`: the most new prompts that a host gets, in whole prompts, but an \
         even share at least.";
    IDLE_IN_FLIGHT: "/pools/*/expert/idle_in_flight",
        Kind::Decimal { min: 0.0, max: 1000.0, unit: "requests per host" }, Absent::Decimal(8.0),
        "With `gateways` `one`: the load above which new prompts are no longer balanced.";
    SEED: "/seed", Kind::Seed, Absent::Integer(0),
        "Mixed into every key, so that outsiders cannot aim at a host. The same on all gateways.";
    REQUEST: "/request", Kind::Object, Absent::Means("all defaults"),
        "How requests are read.";
    BODY_BYTES_MAX: "/request/body_bytes_max",
        Kind::Integer { min: 1024, max: 64 * 1024 * 1024, unit: "bytes" },
        Absent::Integer(8 * 1024 * 1024),
        "How much of a body is held and read. A longer one is placed by what was read. Envoy's \
         `request_body_buffer_limit` must exceed it by 1 MiB.";
    BODY_WAIT_MS: "/request/body_wait_ms",
        Kind::Integer { min: 100, max: 60_000, unit: "milliseconds" }, Absent::Integer(500),
        "Until a first body has ever come: a request whose body does not begin in this time is \
         released unrouted, for Envoy may be holding it back.";
    BODY_IDLE_MS: "/request/body_idle_ms",
        Kind::Integer { min: 1000, max: 3_600_000, unit: "milliseconds" },
        Absent::Integer(30_000),
        "A request whose body stands still for this long is placed by what came, with the next \
         bytes.";
    TENANT_HEADER: "/request/tenant_header", Kind::TextOrNull(Form::Header),
        Absent::Text("x-amzn-sagemaker-prefix-aware-id"),
        "Requests with different values of this header share no key. Let your authentication \
         set it. `null`: none is read.";
    POINTERS: "/request/pointers", Kind::Texts { form: Form::Pointer, min: 0, max: 16 },
        Absent::Texts(&["/inputs", "/prompt", "/messages", "/instances/0"]),
        "Where the prompt is in bodies of no known API; the first that is there counts.";
    TEMPLATE_INPUTS: "/request/template_inputs",
        Kind::Texts { form: Form::Pointer, min: 0, max: 16 },
        Absent::Texts(&["/reasoning_effort", "/chat_template_kwargs"]),
        "Fields that change how the engine renders the prompt: other values, other key.";
    SKIP: "/request/skip", Kind::Texts { form: Form::Free, min: 0, max: 16 },
        Absent::Texts(&["x-anthropic-billing-header:"]),
        "Leading system blocks that start with one of these texts are left out of the key.";
    IMAGE_TOKENS: "/request/image_tokens",
        Kind::Integer { min: 1, max: 100_000, unit: "tokens" }, Absent::Integer(1000),
        "What an image counts as in the estimate of a prompt's length.";
    TOOLS: "/request/tools",
        Kind::Choice(&["by_model", "before_system", "after_system", "before_last_user"]),
        Absent::Text("by_model"),
        "Where the engine's chat template renders the tools. `by_model` knows the usual models.";
    PROMPT_CACHE_KEY: "/request/prompt_cache_key", Kind::Choice(&["hint", "seed", "ignore"]),
        Absent::Means("`hint`; `seed` in `fixed`"),
        "`hint` splits a prefix that is too hot. `seed` separates whatever differs in it, as \
         SageMaker does. `ignore` does not read it.";
    LEARNING: "/learning", Kind::Object, Absent::Means("all defaults"),
        "What is learned from answers.";
    SAMPLE: "/learning/sample", Kind::Integer { min: 0, max: 1024, unit: "answers" },
        Absent::Integer(8),
        "One answer in so many is read for the engine's own counts of prompt tokens and cached \
         tokens. Reading delays and changes nothing. `0` reads none.";
    DEBUG_HEADERS: "/debug_headers", Kind::Choice(&["off", "on_request", "always"]),
        Absent::Text("off"),
        "Response headers that say where a request went and why. `on_request`: when the request \
         has `x-prefix-router-debug` and comes from inside.";
    LOG: "/log", Kind::Choice(&["error", "warn", "info", "debug"]), Absent::Text("info"),
        "What is logged; never prompt text. `debug` logs every request.";
    HOST_SERIES_MAX: "/host_series_max",
        Kind::Integer { min: 0, max: 10_000, unit: "addresses" }, Absent::Integer(256),
        "How many addresses get metrics of their own. Envoy never forgets a metric, so with \
         changing addresses this bounds them; later addresses share the label `other`.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_declared_once_under_a_declared_parent() {
        for (index, option) in OPTIONS.iter().enumerate() {
            let before = &OPTIONS[..index];
            assert!(
                before.iter().all(|other| other.path != option.path),
                "{} is declared twice",
                option.path
            );
            let parent = option.parent().trim_end_matches("/*");
            let declared = before.iter().any(|other| other.path == parent);
            assert!(
                declared || parent.is_empty(),
                "{} has no parent",
                option.path
            );
        }
    }

    #[test]
    fn every_default_is_a_value_the_option_takes() {
        for option in OPTIONS {
            let fits = match (option.kind, option.absent) {
                (Kind::Integer { min, max, .. }, Absent::Integer(value)) => {
                    (min..=max).contains(&value)
                }
                (Kind::Decimal { min, max, .. }, Absent::Decimal(value)) => {
                    (min..=max).contains(&value)
                }
                (Kind::Choice(words), Absent::Text(word)) => words.contains(&word),
                (Kind::Bool, Absent::Bool(_))
                | (Kind::Seed, Absent::Integer(_))
                | (Kind::TextOrNull(_), Absent::Text(_))
                | (_, Absent::Required | Absent::Means(_)) => true,
                (Kind::Texts { max, .. }, Absent::Texts(texts)) => texts.len() <= max,
                _ => false,
            };
            assert!(fits, "{}", option.path);
        }
    }
}
