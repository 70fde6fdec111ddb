//! The filter inside an Envoy file, and what around it keeps it from working as meant.
//!
//! Guarantee: a warning names what to write; a file of Kubernetes resources, which holds only parts
//! of Envoy's config, is not warned of what other parts may hold. Not here: the configuration
//! itself.

use prefix_router::config::{Config, HostSource};
use prefix_router::names;
use serde_json::Value;

use super::chain::{self, Chain};
use super::{Problems, admin, routes};

/// What the filter is called in `root_id` and `name`.
const FILTER: &str = "prefix_router";

/// Envoy's files nest about 20 levels.
pub(super) const DEPTH_MAX: usize = 64;

/// The filter must be able to hold a body and a last read of the socket (1 MiB).
const READ_BYTES: u64 = 1024 * 1024;

/// A wasm filter of ours in an Envoy file.
pub(super) struct Found<'v> {
    /// Its JSON Pointer.
    pub place: String,
    /// Envoy's config of it.
    pub filter: &'v Value,
    /// Its own configuration, or why it will not arrive as JSON.
    pub configuration: Result<&'v str, String>,
}

/// Whether a JSON document is an Envoy file and not a filter configuration.
pub(super) fn is_envoy(document: &Value) -> bool {
    ["static_resources", "resources", "kind"]
        .iter()
        .any(|field| document.get(field).is_some())
        || !filters(document).is_empty()
}

/// Every wasm filter of ours in a document.
pub(super) fn filters(document: &Value) -> Vec<Found<'_>> {
    let mut found = Vec::new();
    visit(
        document,
        &mut String::new(),
        DEPTH_MAX,
        &mut |value, place| {
            let ours = ["root_id", "name"]
                .iter()
                .any(|field| value.get(field).and_then(Value::as_str) == Some(FILTER));
            if ours && value.get("vm_config").is_some() {
                found.push(Found {
                    place: place.to_owned(),
                    filter: value,
                    configuration: configuration(value),
                });
            }
        },
    );
    found
}

/// Why nothing could be checked: what was found instead of a filter of ours.
pub(super) fn unfound(documents: &[Value]) -> String {
    let mut others = Vec::new();
    let mut fields = Vec::new();
    for document in documents {
        visit(
            document,
            &mut String::new(),
            DEPTH_MAX,
            &mut |value, place| {
                if value.get("vm_config").is_some() {
                    let called = |field| match value.get(field).and_then(Value::as_str) {
                        Some(text) => format!("{field}: {text}"),
                        None => format!("no {field}"),
                    };
                    let (name, root) = (called("name"), called("root_id"));
                    others.push(format!("a wasm filter with {name} and {root} at {place}"));
                }
            },
        );
        fields.extend(document.as_object().into_iter().flat_map(|all| all.keys()));
    }
    if !others.is_empty() {
        return format!(
            "expected a wasm filter with name: {FILTER} or root_id: {FILTER}, found {}",
            others.join(", ")
        );
    }
    let found = match fields.as_slice() {
        [] if documents.iter().all(Value::is_null) => "an empty file".into(),
        [] => "a text without fields".into(),
        [field, ..] if documents.iter().any(is_envoy) => {
            format!("a file that begins with {field} and has no wasm filter")
        }
        [field, ..] => format!("the field {field}"),
    };
    format!(
        "expected a filter configuration in JSON, or an Envoy file with a wasm filter {FILTER}, \
         found {found}"
    )
}

fn configuration(filter: &Value) -> Result<&str, String> {
    let Some(configuration) = filter.get("configuration") else {
        return Err("the filter has no configuration".into());
    };
    let kind = configuration.get("@type").and_then(Value::as_str);
    match (kind, configuration.get("value")) {
        (Some(kind), Some(Value::String(text)))
            if kind.ends_with("/google.protobuf.StringValue") =>
        {
            Ok(text)
        }
        (kind, _) => Err(format!(
            "configuration: expected a type.googleapis.com/google.protobuf.StringValue whose value \
             is the JSON text, got {}: that does not arrive as JSON",
            kind.unwrap_or("no @type")
        )),
    }
}

pub(super) fn visit<'v>(
    value: &'v Value,
    place: &mut String,
    depth: usize,
    each: &mut impl FnMut(&'v Value, &str),
) {
    if depth == 0 {
        return;
    }
    each(value, place);
    let children: Vec<(String, &Value)> = match value {
        Value::Object(fields) => fields
            .iter()
            .map(|(name, child)| (name.replace('~', "~0").replace('/', "~1"), child))
            .collect(),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .map(|(index, child)| (index.to_string(), child))
            .collect(),
        _ => Vec::new(),
    };
    for (name, child) in children {
        let length = place.len();
        place.push('/');
        place.push_str(&name);
        visit(child, place, depth - 1, each);
        place.truncate(length);
    }
}

/// What in Envoy's file keeps the filter from working as meant.
pub(super) fn problems(document: &Value, place: &str, filter: &Value, config: &Config) -> Problems {
    let mut problems = Problems {
        warnings: own_warnings(filter),
        ..Problems::default()
    };
    let chain = Chain::around(document, place);
    let order = chain.as_ref().map(Chain::order).unwrap_or_default();
    let starts = order.is_empty();
    problems.errors.extend(order);
    if document.get("static_resources").is_none() {
        return problems;
    }
    problems.errors.extend(missing_clusters(document, config));
    if starts {
        problems.add(chain::lost(chain.as_ref(), document, config));
    }
    problems.errors.extend(nameless_hosts(document, config));
    problems.add(routes::problems(chain.as_ref(), document, config));
    problems.add(admin::unheard(document, config));
    problems
        .warnings
        .extend(bootstrap_warnings(document, config));
    problems
}

fn own_warnings(filter: &Value) -> Vec<String> {
    let mut warnings = Vec::new();
    if filter.get("allow_on_headers_stop_iteration") != Some(&Value::Bool(true)) {
        warnings.push(
            "without allow_on_headers_stop_iteration: true every request passes unrouted".into(),
        );
    }
    if filter.get("failure_policy").and_then(Value::as_str) != Some("FAIL_RELOAD") {
        warnings.push(
            "without failure_policy: FAIL_RELOAD a worker answers 503 for ever after one panic"
                .into(),
        );
    }
    let vm_id = filter.pointer("/vm_config/vm_id").and_then(Value::as_str);
    if vm_id.is_none_or(str::is_empty) {
        warnings.push(
            "without vm_config.vm_id counters are shared with every other filter that has none"
                .into(),
        );
    }
    warnings
}

/// The cluster of that name in the file.
pub(super) fn cluster<'v>(document: &'v Value, name: &str) -> Option<&'v Value> {
    let clusters = document.pointer("/static_resources/clusters")?.as_array()?;
    let named = |cluster: &&Value| cluster.get("name").and_then(Value::as_str) == Some(name);
    clusters.iter().find(named)
}

/// The addresses that an Envoy file gives the cluster of each of a configuration's pools.
pub(super) fn hosts(document: &Value, configuration: &str) -> Vec<Vec<String>> {
    let Ok(config) = Config::parse(configuration.as_bytes()) else {
        return Vec::new();
    };
    let clusters = config.pools.iter().map(|pool| &pool.cluster);
    clusters.map(|name| addresses(document, name)).collect()
}

/// The addresses that an Envoy file gives this cluster.
fn addresses(document: &Value, name: &str) -> Vec<String> {
    let mut hosts = Vec::new();
    let Some(cluster) = cluster(document, name) else {
        return hosts;
    };
    visit(cluster, &mut String::new(), DEPTH_MAX, &mut |value, _| {
        let Some(socket) = value.get("socket_address") else {
            return;
        };
        let address = socket.get("address").and_then(Value::as_str);
        let port = socket.get("port_value").and_then(Value::as_u64);
        if let (Some(address), Some(port)) = (address, port) {
            hosts.push(format!("{address}:{port}"));
        }
    });
    hosts
}

fn missing_clusters(document: &Value, config: &Config) -> Vec<String> {
    // Clusters may also come from a management server.
    if document.pointer("/dynamic_resources/cds_config").is_some() {
        return Vec::new();
    }
    let is_missing = |name: &str| cluster(document, name).is_none();
    let mut errors = Vec::new();
    for pool in &config.pools {
        let (name, wanted) = (&pool.name, &pool.cluster);
        if is_missing(wanted) {
            errors.push(format!(
                "the file has no cluster {wanted}, so that pool {name} routes nothing"
            ));
        }
        if let HostSource::Admin { cluster, .. } = &pool.hosts
            && is_missing(cluster)
        {
            errors.push(format!(
                "the file has no cluster {cluster}, so that pool {name} learns no host"
            ));
        }
    }
    errors
}

/// Clusters whose single hosts have no address by which the policy knows them.
fn nameless_hosts(document: &Value, config: &Config) -> Vec<String> {
    let mut errors = Vec::new();
    for pool in &config.pools {
        let name = &pool.cluster;
        let Some(cluster) = cluster(document, name) else {
            continue;
        };
        let field = |path| cluster.pointer(path).and_then(Value::as_str);
        let kind = field("/type").or_else(|| field("/cluster_type/name"));
        let kind = kind.unwrap_or_default();
        let what = match kind {
            "LOGICAL_DNS" | "envoy.clusters.logical_dns" => {
                "is one host to Envoy, however many addresses the name has: use STRICT_DNS"
            }
            "ORIGINAL_DST" | "envoy.cluster.original_dst" | "envoy.clusters.original_dst" => {
                "lists no hosts among which to choose: use STATIC, STRICT_DNS or EDS"
            }
            _ => continue,
        };
        errors.push(format!("cluster {name} is of type {kind}, which {what}"));
    }
    errors
}

fn bootstrap_warnings(document: &Value, config: &Config) -> Vec<String> {
    let mut warnings = Vec::new();
    let body_bytes_max = u64::from(config.request.body_bytes_max);
    let mut limit = None;
    let mut removed = Vec::new();
    let mut tags = Vec::new();
    visit(document, &mut String::new(), DEPTH_MAX, &mut |value, _| {
        let bytes = value
            .get("request_body_buffer_limit")
            .and_then(Value::as_u64);
        limit = limit.max(bytes);
        removed.extend(value.get("remove").and_then(Value::as_str));
        tags.extend(value.get("tag_name").and_then(Value::as_str));
    });
    if limit.is_none_or(|limit| limit < body_bytes_max + READ_BYTES) {
        warnings.push(format!(
            "larger bodies than Envoy holds are answered 413: set request_body_buffer_limit: {} \
             on the virtual host",
            body_bytes_max + 2 * READ_BYTES
        ));
    }
    for header in [names::ROUTE_HOST, names::ROUTE_POOL] {
        if !removed.contains(&header) {
            warnings.push(format!(
                "clients can choose hosts: remove {header} in early_header_mutation_extensions"
            ));
        }
    }
    let strict = config.pools.iter().any(|pool| pool.strict_health);
    if strict
        && !document
            .to_string()
            .contains("stateful_session.v3.StatefulSession")
    {
        warnings.push(
            "strict_health without the filter stateful_session: no first choice is obeyed".into(),
        );
    }
    if !tags.contains(&names::POOL) {
        warnings.push("metrics have no labels: copy stats_config from envoy/envoy.yaml".into());
    }
    warnings
}
