//! One pool of the configuration: its hosts, its routing and what bounds it.
//!
//! Guarantee: options that contradict each other or have no effect beside others are refused. Not
//! here: what pools mean together (config.rs).

use super::group::Group;
use super::options as opt;
use super::problem::ConfigError;
use super::selection;
use crate::cost::Constants;
use crate::hosts;
use crate::payload::CacheKey;
use crate::pool::{Rule, Rules};
use crate::popularity::Heat;
use crate::route::Bounds;
use crate::select::Matches;

/// The hosts that serve one model, and how they are chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// The label in metrics and debug headers.
    pub name: String,
    /// The Envoy cluster.
    pub cluster: String,
    /// Whether Envoy's own route leads to the cluster.
    pub default: bool,
    /// The requests that it takes.
    pub matches: Matches,
    /// Whether hosts are chosen, or only what would have been chosen is told.
    pub mode: Mode,
    /// The part of keys that are routed, in 0..=1.
    pub share: f64,
    /// Where the host list comes from.
    pub hosts: HostSource,
    /// What `prompt_cache_key` does.
    pub cache_key: CacheKey,
    /// How a prompt's key is found.
    pub routing: Routing,
    /// What load may do to the choice.
    pub bounds: Bounds,
    /// Whether a request that finds every host at its limit is answered 429.
    pub rejects: bool,
    /// Time over which a host that comes later takes its share, in milliseconds.
    pub slow_start_ms: u32,
    /// This gateway's zone; `None` if Envoy's own is meant.
    pub zone: Option<String>,
    /// Whether the first choice goes out by itself, for Envoy to check its health.
    pub strict_health: bool,
}

impl Pool {
    /// Whether what the body says can lead to it.
    #[must_use]
    pub fn is_by_body(&self) -> bool {
        self.default || !self.matches.models.is_empty()
    }

    /// What its router goes by.
    #[must_use]
    pub fn rules(&self) -> Rules {
        Rules {
            rule: self.routing.rule(),
            bounds: self.bounds,
            rejects: self.rejects,
            slow_start_ms: u64::from(self.slow_start_ms),
            share: self.share,
            observes: self.mode == Mode::Observe,
        }
    }
}

/// What becomes of a pool's decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They go out.
    On,
    /// They are counted and told; the host is the proxy's own choice.
    Observe,
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
    /// Nothing lists them: they are learned from who answers.
    Learned,
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
    /// Whether hosts of other zones cost more.
    #[must_use]
    pub fn weighs_zones(&self) -> bool {
        matches!(self, Self::Adaptive { constants, .. } if constants.zone_tokens > 0.0)
    }

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

    /// In `fixed`, how much of a prompt is its prefix.
    #[must_use]
    pub fn prefix_length(self) -> Option<u32> {
        match self {
            Self::Adaptive { .. } => None,
            Self::Fixed { prefix_length } => Some(prefix_length),
        }
    }
}

/// Reads one item of `/pools`. `cache_key`: what `prompt_cache_key` does, if it is stated.
pub(super) fn parse(pool: &Group<'_>, cache_key: Option<CacheKey>) -> Result<Pool, ConfigError> {
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
    let zone = pool.text(&opt::ZONE)?;
    let weighs_zones = routing.weighs_zones();
    if weighs_zones && !matches!(hosts, HostSource::Admin { .. }) {
        let reason = "has no effect without admin_cluster: nothing else tells the hosts' zones";
        return Err(pool.contradiction(&opt::ZONE_TOKENS, reason));
    }
    if zone.is_some() && !weighs_zones {
        return Err(pool.contradiction(&opt::ZONE, "has no effect without zone_tokens"));
    }
    let usual_cache_key = match routing {
        Routing::Adaptive { .. } => CacheKey::Hint,
        Routing::Fixed { .. } => CacheKey::Seed,
    };
    Ok(Pool {
        name,
        cluster,
        // Known when all pools are.
        default: false,
        matches: selection::parse(pool)?,
        mode: match pool.text(&opt::MODE)?.as_deref() {
            Some("observe") => Mode::Observe,
            _ => Mode::On,
        },
        share: pool.decimal(&opt::SHARE)?.unwrap_or_default(),
        hosts,
        cache_key: cache_key.unwrap_or(usual_cache_key),
        routing,
        bounds: Bounds { limit, panic_rule },
        rejects,
        slow_start_ms: pool.integer(&opt::SLOW_START_MS)?.unwrap_or_default(),
        zone,
        strict_health: pool.bool(&opt::STRICT_HEALTH)?.unwrap_or_default(),
    })
}

fn parse_hosts(group: &Group<'_>, pool_cluster: &str) -> Result<HostSource, ConfigError> {
    let admin = group.text(&opt::ADMIN_CLUSTER)?;
    let list = group.texts(&opt::STATIC)?;
    if admin.is_some() && list.is_some() {
        let reason = "contradicts admin_cluster: hosts come from one of them";
        return Err(group.contradiction(&opt::STATIC, reason));
    }
    if let Some(cluster) = admin {
        if cluster == pool_cluster {
            let reason = "is the pool's own cluster; expected one that leads to Envoy's admin";
            return Err(group.contradiction(&opt::ADMIN_CLUSTER, reason));
        }
        let poll_ms = group.integer(&opt::POLL_MS)?.unwrap_or_default();
        return Ok(HostSource::Admin { cluster, poll_ms });
    }
    if group.has(&opt::POLL_MS) {
        let reason = match list {
            Some(_) => "contradicts static: a list in the config is not polled",
            None => "has no effect without admin_cluster",
        };
        return Err(group.contradiction(&opt::POLL_MS, reason));
    }
    let Some(list) = list else {
        return Ok(HostSource::Learned);
    };
    let mut hosts: Vec<String> = Vec::new();
    for (index, text) in list.iter().enumerate() {
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
            zone_tokens: pool.decimal(&opt::ZONE_TOKENS)?.unwrap_or_default(),
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
    for option in [&opt::GATEWAYS, &opt::EXPERT, &opt::ZONE_TOKENS] {
        if pool.has(option) {
            return Err(pool.contradiction(option, "has no effect in fixed routing"));
        }
    }
    Ok(())
}
