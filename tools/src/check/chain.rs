//! The way of the filter's choice: from the HTTP filters it stands among to the cluster's policy.
//!
//! Guarantee: a loss is an error only where nothing in the file can undo it. Not here: which route
//! leads to the cluster (routes.rs).

use prefix_router::config::{Config, Mode, Pool};
use prefix_router::names;
use serde_json::Value;

use super::Problems;
use super::surroundings::{DEPTH_MAX, cluster, visit};

const ROUTER: &str = "http.router.v3.Router";
const HEADER_TO_METADATA: &str = "http.header_to_metadata.v3.Config";

/// The policy that obeys the filter.
const OVERRIDE_HOST: &str = "override_host.v3.OverrideHost";

/// Filters that write no metadata of their own accord. Any other may bring the choice to the policy.
const HARMLESS: [&str; 7] = [
    ROUTER,
    HEADER_TO_METADATA,
    "http.stateful_session.v3.StatefulSession",
    "http.buffer.v3.Buffer",
    "http.cors.v3.Cors",
    "http.fault.v3.HTTPFault",
    "http.local_ratelimit.v3.LocalRateLimit",
];

/// The HTTP filters of one listener, ours among them.
pub(super) struct Chain<'v> {
    /// Envoy's connection manager.
    pub manager: &'v Value,
    filters: &'v [Value],
    own: usize,
}

impl<'v> Chain<'v> {
    /// The chain that the filter at this place stands in, if the file has all of it.
    pub(super) fn around(document: &'v Value, place: &str) -> Option<Self> {
        let (manager, rest) = place.rsplit_once("/http_filters/")?;
        let own = rest.split('/').next()?.parse().ok()?;
        let manager = document.pointer(manager)?;
        is(manager, "HttpConnectionManager").then_some(())?;
        let filters = manager.get("http_filters")?.as_array()?;
        Some(Self {
            manager,
            filters,
            own,
        })
    }

    /// The filter as its listener has it: with its name, and whether it is off.
    pub(super) fn own(&self) -> &'v Value {
        self.filters.get(self.own).unwrap_or(&Value::Null)
    }

    fn router(&self) -> usize {
        let router = self.filters.iter().position(|filter| has(filter, ROUTER));
        router.unwrap_or(self.filters.len())
    }

    fn between(&self) -> impl Iterator<Item = &'v Value> {
        let between = self.filters.get(self.own + 1..self.router());
        between.unwrap_or_default().iter()
    }

    /// What stands behind the router: Envoy then does not start.
    pub(super) fn order(&self) -> Vec<String> {
        let router = self.router();
        let behind = |what: &str, index: usize, place: &str| {
            format!(
                "{what} (http_filters/{index}) stands behind the router (http_filters/{router}), so \
                 that Envoy does not start: put it {place}"
            )
        };
        let mut errors = Vec::new();
        if self.own > router {
            let place = "in front of header_to_metadata and the router";
            errors.push(behind("prefix_router", self.own, place));
        }
        let moves = |filter: &Value| has(filter, HEADER_TO_METADATA);
        if let Some(index) = self.filters.iter().rposition(moves)
            && index > router
        {
            let place = "between prefix_router and the router";
            errors.push(behind("header_to_metadata", index, place));
        }
        errors
    }

    /// Whether only filters follow that write what their configuration says.
    fn is_plain(&self) -> bool {
        self.between()
            .all(|filter| HARMLESS.iter().any(|kind| has(filter, kind)))
    }

    /// The rules that are obeyed between the filter and the router.
    fn rules(&self) -> Vec<&'v Value> {
        let mut configs = Vec::new();
        configs.extend(
            self.between()
                .filter(|filter| has(filter, HEADER_TO_METADATA))
                .filter_map(|filter| filter.get("typed_config")),
        );
        if !configs.is_empty() {
            // Routes can have rules of their own.
            let each = &mut |value, _: &str| {
                if is(value, HEADER_TO_METADATA) && !configs.contains(&value) {
                    configs.push(value);
                }
            };
            if let Some(routes) = self.manager.get("route_config") {
                visit(routes, &mut String::new(), DEPTH_MAX, each);
            }
        }
        let rules = configs.into_iter();
        let rules = rules.filter_map(|config| config.get("request_rules")?.as_array());
        rules.flatten().collect()
    }

    /// Why no rule moves the choice.
    fn unmoved(&self) -> String {
        let meant = |filter: &Value| {
            has(filter, HEADER_TO_METADATA) && filter.to_string().contains(names::ROUTE_HOST)
        };
        let stands = self.filters.iter().position(meant);
        if let Some(index) = stands.filter(|index| *index < self.own) {
            return format!(
                "the filter's choices are lost: header_to_metadata (http_filters/{index}) stands in \
                 front of prefix_router (http_filters/{}); put it behind",
                self.own
            );
        }
        let rules = self.rules();
        let mut headers = rules.iter().filter_map(|rule| rule.get("header")?.as_str());
        match headers.next() {
            Some(header) => format!(
                "the filter's choices are lost: header_to_metadata moves {header}; expected {} with \
                 on_header_present, as in envoy/envoy.yaml",
                names::ROUTE_HOST
            ),
            None => {
                "the filter's choices are lost: copy header_to_metadata from envoy/envoy.yaml, \
                     between prefix_router and the router"
                    .into()
            }
        }
    }
}

/// Whether an HTTP filter is of this kind.
fn has(filter: &Value, kind: &str) -> bool {
    filter
        .get("typed_config")
        .is_some_and(|config| is(config, kind))
}

fn is(config: &Value, kind: &str) -> bool {
    let found = config.get("@type").and_then(Value::as_str);
    found.is_some_and(|found| found.ends_with(kind))
}

/// Where the policy looks, or header_to_metadata writes.
#[derive(PartialEq, Eq)]
enum Spot {
    Header(String),
    Metadata(String),
}

impl Spot {
    fn name(&self) -> &str {
        let (Self::Header(name) | Self::Metadata(name)) = self;
        name
    }
}

/// What keeps the filter's choices from the policies of the pools' clusters: Envoy then starts, and
/// balances as if there were no filter.
pub(super) fn lost(chain: Option<&Chain<'_>>, document: &Value, config: &Config) -> Problems {
    let mut problems = Problems::default();
    for pool in &config.pools {
        let Some(why) = lost_by(chain, document, pool) else {
            continue;
        };
        // Who observes sends no choice; a first choice can go another way (strict-health.yaml).
        let certain = pool.mode == Mode::On && !pool.strict_health;
        if certain && chain.is_none_or(Chain::is_plain) {
            problems.errors.push(why);
        } else {
            problems.warnings.push(why);
        }
    }
    problems.errors.dedup();
    problems.warnings.dedup();
    problems
}

fn lost_by(chain: Option<&Chain<'_>>, document: &Value, pool: &Pool) -> Option<String> {
    let name = &pool.cluster;
    let cluster = cluster(document, name)?;
    let mut policy = None;
    if let Some(policies) = cluster.get("load_balancing_policy") {
        visit(policies, &mut String::new(), DEPTH_MAX, &mut |value, _| {
            if is(value, OVERRIDE_HOST) {
                policy = policy.or(Some(value));
            }
        });
    }
    let Some(policy) = policy else {
        return Some(format!(
            "cluster {name} ignores the filter's choices: copy load_balancing_policy from \
             envoy/envoy.yaml"
        ));
    };
    let chain = chain?;
    let sources = policy.get("override_host_sources");
    let sources = sources.and_then(Value::as_array).into_iter().flatten();
    let read: Vec<Spot> = sources.filter_map(spot_read).collect();
    let mut rules = chain.rules();
    rules.retain(|rule| is_of_choice(rule));
    let removes = |rule: &&Value| rule.get("remove") == Some(&Value::Bool(true));
    let by_header = Spot::Header(names::ROUTE_HOST.into());
    if read.contains(&by_header) && !rules.iter().any(removes) {
        return None;
    }
    let (right, wrong): (Vec<&Value>, Vec<&Value>) =
        rules.into_iter().partition(|rule| is_string(rule));
    let written: Vec<Spot> = right.into_iter().filter_map(spot_written).collect();
    if written.iter().any(|spot| read.contains(spot)) {
        return None;
    }
    let Some(written) = written.first() else {
        let kind = wrong.first().and_then(|rule| kind(rule));
        return Some(kind.map_or_else(
            || chain.unmoved(),
            |kind| {
                format!(
                    "the filter's choices are lost: header_to_metadata writes {} as type {kind}; \
                     expected STRING",
                    names::ROUTE_HOST
                )
            },
        ));
    };
    let read = read
        .first()
        .map_or_else(|| "nothing".into(), |read| read.name().to_owned());
    Some(format!(
        "cluster {name} does not get the filter's choices: its override_host reads {read}, but \
         header_to_metadata writes {}",
        written.name()
    ))
}

fn is_of_choice(rule: &Value) -> bool {
    let header = rule.get("header").and_then(Value::as_str);
    header.is_some_and(|header| header.eq_ignore_ascii_case(names::ROUTE_HOST))
        && rule.get("on_header_present").is_some()
}

fn kind(rule: &Value) -> Option<String> {
    let kind = rule.pointer("/on_header_present/type")?;
    Some(kind.as_str().map_or_else(|| kind.to_string(), Into::into))
}

/// Envoy's default is STRING, too.
fn is_string(rule: &Value) -> bool {
    kind(rule).is_none_or(|kind| kind == "STRING" || kind == "0")
}

fn spot_written(rule: &Value) -> Option<Spot> {
    let to = rule.get("on_header_present")?;
    let space = to.get("metadata_namespace").and_then(Value::as_str);
    // Envoy's default.
    let space = space.filter(|space| !space.is_empty());
    let space = space.unwrap_or("envoy.filters.http.header_to_metadata");
    let key = to.get("key")?.as_str()?;
    Some(Spot::Metadata(format!("{space}/{key}")))
}

fn spot_read(source: &Value) -> Option<Spot> {
    if let Some(header) = source.get("header").and_then(Value::as_str) {
        return Some(Spot::Header(header.to_ascii_lowercase()));
    }
    let metadata = source.get("metadata")?;
    let mut name = metadata.get("key")?.as_str()?.to_owned();
    for part in metadata.get("path")?.as_array()? {
        name.push('/');
        name.push_str(part.get("key")?.as_str()?);
    }
    Some(Spot::Metadata(name))
}
