//! Whether Envoy's routes lead each pool's requests to its cluster, and other requests past the
//! filter.
//!
//! Guarantee: a route that names no cluster is taken to lead anywhere. Not here: what the filter's
//! choice does in the cluster (chain.rs).

use prefix_router::config::{Config, Pool};
use prefix_router::names;
use serde_json::Value;

use super::Problems;
use super::chain::Chain;
use super::surroundings::{DEPTH_MAX, visit};

/// A route of the file.
struct Way<'v> {
    found: &'v Value,
    /// Nothing if Envoy answers by itself.
    to: Option<&'v Value>,
    /// Whether one before it takes all requests.
    covered: bool,
    /// Whether the filter sees its requests.
    filtered: bool,
}

impl<'v> Way<'v> {
    /// The clusters that it names; nothing if it may lead to any.
    fn clusters(&self) -> Option<Vec<&'v str>> {
        let to = self.to?;
        if let Some(cluster) = to.get("cluster") {
            return Some(cluster.as_str().into_iter().collect());
        }
        let weighted = to.pointer("/weighted_clusters/clusters")?.as_array()?;
        let named = weighted.iter().map(|cluster| cluster.get("name")?.as_str());
        named.collect()
    }

    fn headers(&self, name: &str) -> impl Iterator<Item = &'v Value> {
        let headers = self.found.get("headers").and_then(Value::as_array);
        let headers = headers.into_iter().flatten();
        headers.filter(move |header| header.get("name").and_then(Value::as_str) == Some(name))
    }

    fn is_of_header(&self) -> bool {
        self.headers(names::ROUTE_POOL).next().is_some()
    }

    /// Whether a request with a body of JSON can come here.
    fn may_carry_a_prompt(&self) -> bool {
        let is_other = |header: &Value| {
            let exact = header.pointer("/string_match/exact");
            exact
                .and_then(Value::as_str)
                .is_some_and(|method| !matches!(method, "POST" | "PUT" | "PATCH"))
        };
        !self.headers(":method").any(is_other)
            && self.found.get("grpc").is_none()
            && self.found.get("connect_matcher").is_none()
    }
}

/// What the routes do to the pools' requests; nothing if the file has none.
pub(super) fn problems(chain: Option<&Chain<'_>>, document: &Value, config: &Config) -> Problems {
    let mut problems = Problems::default();
    let Some(ways) = ways(chain, document).filter(|ways| !ways.is_empty()) else {
        return problems;
    };
    let named = config.pools.iter().filter(|pool| !pool.default);
    problems
        .errors
        .extend(named.filter_map(|pool| lost(&ways, pool)).next());
    let Some(default) = config.pools.iter().find(|pool| pool.default) else {
        return problems;
    };
    match lost_default(&ways, default) {
        Some(error) => problems.errors.push(error),
        None => {
            // Without it, other listeners' routes are among these.
            if let Some(chain) = chain {
                let own = chain.own().get("name").and_then(Value::as_str);
                problems.warnings = foreign(&ways, config, default, own);
            }
        }
    }
    problems
}

/// The routes that the filter's requests take; `None` if the file does not say.
fn ways<'v>(chain: Option<&Chain<'v>>, document: &'v Value) -> Option<Vec<Way<'v>>> {
    let scope = chain.map_or(document, |chain| chain.manager);
    let own = chain.map(Chain::own);
    let mut ways = Vec::new();
    let mut is_told = true;
    let everything = serde_json::json!({ "prefix": "/" });
    visit(scope, &mut String::new(), DEPTH_MAX, &mut |config, _| {
        let hosts = config.get("virtual_hosts").and_then(Value::as_array);
        for host in hosts.into_iter().flatten() {
            is_told &= host.get("matcher").is_none();
            let routes = host.get("routes").and_then(Value::as_array);
            // Envoy takes the first route that matches.
            let mut covered = false;
            for route in routes.into_iter().flatten() {
                let Some(found) = route.get("match") else {
                    continue;
                };
                ways.push(Way {
                    found,
                    to: route.get("route"),
                    covered,
                    filtered: own.is_none_or(|own| is_on(own, [route, host, config])),
                });
                covered |= *found == everything;
            }
        }
    });
    is_told.then_some(ways)
}

/// Whether a filter is on for a route: the first of these levels that says so decides.
fn is_on(filter: &Value, levels: [&Value; 3]) -> bool {
    let is_off = |value: &Value| value.get("disabled") == Some(&Value::Bool(true));
    let name = filter.get("name").and_then(Value::as_str);
    let told = levels
        .into_iter()
        .find_map(|level| level.get("typed_per_filter_config")?.get(name?));
    !is_off(told.unwrap_or(filter))
}

/// Why requests of a pool that the header leads to do not reach its cluster.
fn lost(ways: &[Way<'_>], pool: &Pool) -> Option<String> {
    let (name, cluster) = (pool.name.as_str(), pool.cluster.as_str());
    let leads = |header: &Value| {
        let exact = header
            .pointer("/string_match/exact")
            .and_then(Value::as_str);
        exact == Some(name) || header.get("present_match") == Some(&Value::Bool(true))
    };
    let matching = ways.iter();
    let matching =
        matching.filter(|way| way.to.is_some() && way.headers(names::ROUTE_POOL).any(leads));
    // One that is looked at, if there is one.
    let Some(way) = matching.min_by_key(|way| way.covered) else {
        return Some(format!(
            "no route leads to pool {name}: add one that matches {}: {name} exactly, to cluster \
             {cluster}, as in envoy/pools.yaml",
            names::ROUTE_POOL
        ));
    };
    if way.covered {
        return Some(format!(
            "the route of pool {name} comes behind one that takes every request, so that Envoy \
             never looks at it: put it in front"
        ));
    }
    let to = way.to.and_then(|to| to.get("cluster")?.as_str());
    // Without a cluster of its own, by the header itself.
    let reached = to.unwrap_or(name);
    (reached != cluster)
        .then(|| format!("the route of pool {name} leads to cluster {reached}; expected {cluster}"))
}

/// The same of the default pool, to which routes without the header lead.
fn lost_default(ways: &[Way<'_>], pool: &Pool) -> Option<String> {
    let mut others = Vec::new();
    let open = ways.iter().filter(|way| !way.covered && way.filtered);
    for way in open.filter(|way| way.to.is_some() && !way.is_of_header()) {
        let clusters = way.clusters()?;
        if clusters.contains(&pool.cluster.as_str()) {
            return None;
        }
        others.extend(clusters);
    }
    let (name, cluster) = (&pool.name, &pool.cluster);
    Some(match others.last() {
        Some(other) => format!(
            "no route leads to the default pool {name}: without {} requests go to cluster {other}; \
             expected {cluster}",
            names::ROUTE_POOL
        ),
        None => format!(
            "no route leads to the default pool {name}: add one for requests without {}, to cluster \
             {cluster}",
            names::ROUTE_POOL
        ),
    })
}

/// Clusters of no pool whose requests the filter holds and counts all the same.
fn foreign(ways: &[Way<'_>], config: &Config, pool: &Pool, own: Option<&str>) -> Vec<String> {
    let mut clusters = Vec::new();
    let open = ways.iter().filter(|way| !way.covered && way.filtered);
    let open = open.filter(|way| !way.is_of_header() && way.may_carry_a_prompt());
    for cluster in open.filter_map(Way::clusters).flatten() {
        let is_ours = config.pools.iter().any(|pool| pool.cluster == cluster);
        if !is_ours && !clusters.contains(&cluster) {
            clusters.push(cluster);
        }
    }
    let told = |cluster: &str| {
        format!(
            "cluster {cluster} is in no pool, but requests to it are held, read and counted as \
             prompts of pool {}: switch the filter off on their route with \
             typed_per_filter_config: {{ {}: {{ \"@type\": \
             type.googleapis.com/envoy.config.route.v3.FilterConfig, disabled: true }} }}",
            pool.name,
            own.unwrap_or("prefix_router")
        )
    };
    clusters.into_iter().map(told).collect()
}
