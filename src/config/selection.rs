//! What of the requests each pool takes, and whether the pools together make sense.
//!
//! Guarantee: a request's pool is certain: no pattern stands in two places, none is there that can
//! never count, every pool is led to, and the default is stated. Not here: the choice (select.rs).

use super::group::Group;
use super::options::{self as opt, Opt};
use super::pool::{HostSource, Pool, Routing};
use super::problem::{ConfigError, Problem};
use crate::hosts;
use crate::names;
use crate::payload::CacheKey;
use crate::select::{Matches, Pattern};
use std::collections::{BTreeMap, BTreeSet};

/// Different headers of all pools: each is looked for among those of every request.
const HEADERS_MAX: usize = 16;

/// Reads what a pool takes.
pub(super) fn parse(pool: &Group<'_>) -> Result<Matches, ConfigError> {
    let mut headers = Vec::new();
    let components = patterns(pool, &opt::COMPONENTS)?;
    if !components.is_empty() {
        headers.push((names::COMPONENT_HEADER.to_owned(), components));
    }
    for group in pool.items(&opt::HEADERS)? {
        let name = group.text(&opt::HEADER_NAME)?.unwrap_or_default();
        let name = name.to_ascii_lowercase();
        if name.starts_with(names::OWN_HEADERS) {
            let reason = "is a header of the filter's own, which no request can bring";
            return Err(group.contradiction(&opt::HEADER_NAME, reason));
        }
        headers.push((name, patterns(&group, &opt::HEADER_VALUES)?));
    }
    Ok(Matches {
        models: patterns(pool, &opt::MODELS)?,
        headers,
        paths: pool.texts(&opt::PATHS)?.unwrap_or_default(),
    })
}

fn patterns(group: &Group<'_>, option: &Opt) -> Result<Vec<Pattern>, ConfigError> {
    let texts = group.texts(option)?.unwrap_or_default();
    // Their form was checked with the list.
    Ok(texts
        .iter()
        .filter_map(|text| Pattern::parse(text))
        .collect())
}

/// Checks all pools together, which are read from these groups, and finds the default.
pub(super) fn settle(groups: &[Group<'_>], pools: &mut [Pool]) -> Result<(), ConfigError> {
    check_names(groups, pools)?;
    check_hosts(groups, pools)?;
    settle_default(groups, pools)?;
    check_patterns(groups, pools)?;
    check_models(groups, pools)?;
    check_headers(groups, pools)?;
    check_reading(groups, pools)
}

fn check_names(groups: &[Group<'_>], pools: &[Pool]) -> Result<(), ConfigError> {
    let (mut named, mut clusters) = (BTreeMap::new(), BTreeMap::new());
    for (group, pool) in groups.iter().zip(pools) {
        if let Some(other) = clusters.insert(&pool.cluster, group) {
            let at = other.pointer();
            let reason = format!("is the cluster of {at} too: expected one pool for each cluster");
            return Err(group.contradiction(&opt::CLUSTER, &reason));
        }
        if let Some(other) = named.insert(&pool.name, group) {
            let reason = format!("is the name of {} too", other.pointer());
            return Err(group.contradiction(&opt::NAME, &reason));
        }
        if pool.name == names::NO_POOL {
            let reason = "stands for no pool in metrics; expected another name";
            return Err(group.contradiction(&opt::NAME, reason));
        }
    }
    for (group, pool) in groups.iter().zip(pools) {
        if let HostSource::Admin { cluster, .. } = &pool.hosts
            && let Some(other) = clusters.get(cluster)
        {
            let at = other.pointer();
            let reason =
                format!("is the cluster of {at}; expected one that leads to Envoy's admin");
            let hosts = group.group(&opt::HOSTS)?;
            return Err(hosts.contradiction(&opt::ADMIN_CLUSTER, &reason));
        }
    }
    Ok(())
}

fn check_hosts(groups: &[Group<'_>], pools: &[Pool]) -> Result<(), ConfigError> {
    let mut known: BTreeSet<&str> = BTreeSet::new();
    for (group, pool) in groups.iter().zip(pools) {
        if let HostSource::Static(addresses) = &pool.hosts {
            known.extend(addresses.iter().map(String::as_str));
        }
        if known.len() > hosts::SLOTS_MAX {
            let most = hosts::SLOTS_MAX;
            let reason = format!("makes more than {most} different hosts in all pools together");
            return Err(group
                .group(&opt::HOSTS)?
                .contradiction(&opt::STATIC, &reason));
        }
    }
    Ok(())
}

fn settle_default(groups: &[Group<'_>], pools: &mut [Pool]) -> Result<(), ConfigError> {
    let mut default: Option<&Group<'_>> = None;
    let mut stated = pools.len() == 1;
    for (group, pool) in groups.iter().zip(pools.iter_mut()) {
        let is_default = group.bool(&opt::DEFAULT)?;
        stated |= is_default.is_some();
        pool.default = is_default.unwrap_or(groups.len() == 1);
        if let Some(other) = default.filter(|_| pool.default) {
            let at = other.pointer();
            let reason = format!("is {at} already: Envoy's own route leads to one cluster");
            return Err(group.contradiction(&opt::DEFAULT, &reason));
        }
        if pool.default {
            default = Some(group);
        } else if pool.matches.is_empty() {
            return Err(group.error(Problem::Wrong {
                expected: "models, components, headers or paths: only \"default\": true needs none"
                    .into(),
                found: "none: no request would be this pool's".into(),
            }));
        }
    }
    match groups.first() {
        Some(group) if !stated => Err(group.error(Problem::Wrong {
            expected: "\"default\": true in the pool whose cluster Envoy's own route leads to, or \
                       false in each if it leads to none of them"
                .into(),
            found: "no default in any pool".into(),
        })),
        _ => Ok(()),
    }
}

/// Refuses a pattern that stands in two places.
fn check_patterns(groups: &[Group<'_>], pools: &[Pool]) -> Result<(), ConfigError> {
    let mut seen: BTreeMap<(&str, Pattern), String> = BTreeMap::new();
    let mut check = |kind, pattern: &Pattern, place: String| match seen
        .insert((kind, pattern.clone()), place.clone())
    {
        None => Ok(()),
        Some(other) => {
            let reason = format!("is at {other} too; expected each in one place");
            Err(ConfigError::contradiction(place, &reason))
        }
    };
    for (group, pool) in groups.iter().zip(pools) {
        let at = |option: &Opt, index| format!("{}/{index}", group.join(option.name()));
        for (index, model) in pool.matches.models.iter().enumerate() {
            check("", model, at(&opt::MODELS, index))?;
        }
        for (index, path) in pool.matches.paths.iter().enumerate() {
            check("/", &Pattern::starting(path), at(&opt::PATHS, index))?;
        }
        let has_components = group.has(&opt::COMPONENTS);
        for (header, (name, values)) in pool.matches.headers.iter().enumerate() {
            for (index, value) in values.iter().enumerate() {
                let place = match header.checked_sub(usize::from(has_components)) {
                    None => at(&opt::COMPONENTS, index),
                    Some(header) => {
                        let values = opt::HEADER_VALUES.name();
                        format!("{}/{values}/{index}", at(&opt::HEADERS, header))
                    }
                };
                check(name, value, place)?;
            }
        }
    }
    Ok(())
}

/// Refuses models that no request is asked for.
fn check_models(groups: &[Group<'_>], pools: &[Pool]) -> Result<(), ConfigError> {
    let takes_every_path = |pool: &Pool| pool.matches.paths.iter().any(|path| path == "/");
    let greedy = groups
        .iter()
        .zip(pools)
        .find(|(_, pool)| takes_every_path(pool));
    let Some((greedy, _)) = greedy else {
        return Ok(());
    };
    match groups.iter().find(|group| group.has(&opt::MODELS)) {
        None => Ok(()),
        Some(group) => {
            let paths = greedy.join(opt::PATHS.name());
            let reason = format!("can never count: \"/\" in {paths} takes every request before");
            Err(group.contradiction(&opt::MODELS, &reason))
        }
    }
}

fn check_headers(groups: &[Group<'_>], pools: &[Pool]) -> Result<(), ConfigError> {
    let mut known: BTreeSet<&str> = BTreeSet::new();
    for (group, pool) in groups.iter().zip(pools) {
        let headers = pool.matches.headers.iter();
        known.extend(headers.map(|(name, _)| name.as_str()));
        if known.len() > HEADERS_MAX {
            let reason = format!("makes more than {HEADERS_MAX} different ones in all pools");
            return Err(group.contradiction(&opt::HEADERS, &reason));
        }
    }
    Ok(())
}

/// A body is read before its model is known, so for all pools that a model can lead to alike.
fn check_reading(groups: &[Group<'_>], pools: &[Pool]) -> Result<(), ConfigError> {
    let by_body = groups
        .iter()
        .zip(pools)
        .filter(|(_, pool)| pool.is_by_body());
    let mut first: Option<(&Group<'_>, u32)> = None;
    for (group, pool) in by_body {
        let Routing::Fixed { prefix_length } = pool.routing else {
            continue;
        };
        let (other, expected) = *first.get_or_insert((group, prefix_length));
        if expected != prefix_length {
            let reason = format!(
                "expected {expected} as in {}, got {prefix_length}: a body is read before its \
                 model is known; pools that headers or paths lead to may differ",
                other.pointer()
            );
            let option = match group.has(&opt::AWS) {
                true => group.group(&opt::AWS)?.join(opt::AWS_LENGTH.name()),
                false => group.join(opt::PREFIX_LENGTH.name()),
            };
            return Err(ConfigError::contradiction(option, &reason));
        }
    }
    Ok(())
}

/// What `prompt_cache_key` does in the pools that a model can lead to; `None` if their defaults
/// differ.
pub(super) fn cache_key(pools: &[Pool]) -> Option<CacheKey> {
    let mut by_body = pools.iter().filter(|pool| pool.is_by_body());
    let first = by_body.next().map_or(CacheKey::Hint, |pool| pool.cache_key);
    by_body.all(|pool| pool.cache_key == first).then_some(first)
}
