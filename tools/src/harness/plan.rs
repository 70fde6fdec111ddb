//! What to run: one of the project's Envoy files with the few values that a machine decides.
//!
//! Guarantee: nothing of the file changes but what a method here names, so that what is tested is
//! what users copy. An edit that finds nothing to change is an error.
//! Not here: the process (envoy.rs).

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

use super::envoy::Envoy;
use super::files;
use super::remote::Files;
use crate::setup;

/// The filter's name in the project's Envoy files.
const FILTER: &str = "prefix_router";

/// Filters that only serve ours, and go when it goes.
const COMPANIONS: [&str; 2] = ["envoy.filters.http.header_to_metadata", FILTER];

/// How deep a config may nest; Envoy's own files nest about 15 levels.
const DEPTH_MAX: u32 = 64;

/// Which policy of Envoy's own stands in for the filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Any host.
    Random,
    /// The less loaded of two random hosts.
    LeastRequest,
    /// One after the other.
    RoundRobin,
    /// By what the route hashes, with 1,024 points on the ring at least.
    RingHash,
}

impl Policy {
    /// The policy as a cluster's `load_balancing_policy`.
    #[must_use]
    pub fn config(self) -> Value {
        let (name, message) = match self {
            Self::Random => ("random", "random.v3.Random"),
            Self::LeastRequest => ("least_request", "least_request.v3.LeastRequest"),
            Self::RoundRobin => ("round_robin", "round_robin.v3.RoundRobin"),
            Self::RingHash => ("ring_hash", "ring_hash.v3.RingHash"),
        };
        let kind =
            format!("type.googleapis.com/envoy.extensions.load_balancing_policies.{message}");
        json!({"policies": [{"typed_extension_config": {
            "name": format!("envoy.load_balancing_policies.{name}"),
            "typed_config": {"@type": kind},
        }}]})
    }
}

/// An Envoy to be started.
#[derive(Debug)]
pub struct Plan {
    config: Value,
    pub(super) concurrency: u32,
    pub(super) log_level: String,
    pub(super) eds: Option<Vec<SocketAddr>>,
    pub(super) lds: bool,
    pub(super) drain_s: Option<u32>,
    port: u16,
    wasm: Option<PathBuf>,
    test_hooks: bool,
    /// The first edit that failed; told by `start`, so that edits can be chained.
    failed: Option<anyhow::Error>,
}

impl Plan {
    /// Loads a file of the project, e.g. `envoy/envoy.yaml`.
    pub fn load(file: &str) -> Result<Self> {
        Self::read(&setup::root()?.join(file))
    }

    /// Loads any Envoy file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("cannot read the Envoy config {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("in {}", path.display()))
    }

    /// Takes an Envoy config as YAML text.
    pub fn parse(yaml: &str) -> Result<Self> {
        let config: Value = serde_saphyr::from_str(yaml).map_err(|error| anyhow!("{error}"))?;
        Ok(Self {
            config,
            concurrency: 2,
            log_level: "info".to_owned(),
            eds: None,
            lds: false,
            drain_s: None,
            port: 0,
            wasm: None,
            test_hooks: false,
            failed: None,
        })
    }

    /// The worker threads; 2 unless said otherwise.
    #[must_use]
    pub fn concurrency(mut self, workers: u32) -> Self {
        self.concurrency = workers;
        self
    }

    /// The log level of all of Envoy, e.g. `warning`; `info` unless said otherwise.
    #[must_use]
    pub fn log_level(mut self, level: &str) -> Self {
        level.clone_into(&mut self.log_level);
        self
    }

    /// How long a listener that is replaced goes on with its connections; ten minutes unless said
    /// otherwise.
    #[must_use]
    pub fn drain(mut self, seconds: u32) -> Self {
        self.drain_s = Some(seconds);
        self
    }

    /// The port of the first listener; any free one unless said otherwise.
    #[must_use]
    pub fn port(mut self, port: u16) -> Self {
        self.port = port;
        self
    }

    /// Moves the listeners to a file that Envoy watches, so that
    /// [`Envoy::edit_listeners`] can change them while it runs.
    #[must_use]
    pub fn listeners_from_file(mut self) -> Self {
        self.lds = true;
        self
    }

    /// The filter file, instead of the one set-up builds.
    #[must_use]
    pub fn wasm(mut self, path: &Path) -> Self {
        self.wasm = Some(path.to_path_buf());
        self
    }

    /// Uses the filter with the feature `test-hooks`.
    #[must_use]
    pub fn test_hooks(mut self) -> Self {
        self.test_hooks = true;
        self
    }

    /// The hosts of a cluster: written into the file, or beside it when the cluster's hosts come
    /// from a file (EDS).
    #[must_use]
    pub fn hosts(mut self, cluster: &str, hosts: &[SocketAddr]) -> Self {
        let hosts = hosts.to_vec();
        let mut eds = None;
        self.try_edit(|config| {
            let found = find_cluster(config, cluster)?;
            if found.get("eds_cluster_config").is_some() {
                eds = Some(hosts);
            } else {
                let assignment = files::load_assignment(cluster, &hosts);
                put(found, "load_assignment", assignment)?;
            }
            Ok(())
        });
        if eds.is_some() {
            self.eds = eds;
        }
        self
    }

    /// The filter's configuration.
    #[must_use]
    pub fn filter_config(self, config: &Value) -> Self {
        self.filter_config_text(&config.to_string())
    }

    /// The filter's configuration as a text, which may be wrong on purpose.
    #[must_use]
    pub fn filter_config_text(mut self, text: &str) -> Self {
        self.try_edit(|config| set_filter_config(config, text));
        self
    }

    /// Takes the filter out and lets one of Envoy's own policies choose, for every cluster whose
    /// hosts the filter chose.
    #[must_use]
    pub fn without_filter(mut self, policy: Policy) -> Self {
        self.try_edit(|config| {
            let filters = find_filters(config)?;
            let before = filters.len();
            filters
                .retain(|filter| !name_of(filter).is_some_and(|name| COMPANIONS.contains(&name)));
            if filters.len() == before {
                bail!("the file has no filter {FILTER}");
            }
            for cluster in clusters(config)? {
                if cluster.get("load_balancing_policy").is_some() {
                    put(cluster, "load_balancing_policy", policy.config())?;
                }
            }
            Ok(())
        });
        self
    }

    /// Any other change. The closure sees the file as JSON.
    #[must_use]
    pub fn edit(mut self, edit: impl FnOnce(&mut Value) -> Result<()>) -> Self {
        self.try_edit(edit);
        self
    }

    /// Replaces what a JSON Pointer names, which has to be there.
    #[must_use]
    pub fn set(self, pointer: &str, value: Value) -> Self {
        self.edit(|config| {
            let found = config
                .pointer_mut(pointer)
                .ok_or_else(|| anyhow!("the file has nothing at {pointer}"))?;
            *found = value;
            Ok(())
        })
    }

    /// Changes a cluster of the file.
    #[must_use]
    pub fn edit_cluster(self, name: &str, edit: impl FnOnce(&mut Value) -> Result<()>) -> Self {
        self.edit(|config| edit(find_cluster(config, name)?))
    }

    /// Changes the HTTP connection manager of the first listener.
    #[must_use]
    pub fn edit_http(self, edit: impl FnOnce(&mut Value) -> Result<()>) -> Self {
        self.edit(|config| edit(find_http(config)?))
    }

    /// Changes the list of HTTP filters of the first listener.
    #[must_use]
    pub fn edit_filters(self, edit: impl FnOnce(&mut Vec<Value>) -> Result<()>) -> Self {
        self.edit(|config| edit(find_filters(config)?))
    }

    /// Lets every answer of the first listener say in this header which host served it.
    #[must_use]
    pub fn answers_name_host(self, header: &str) -> Self {
        self.edit_http(|http| {
            let pointer = "/route_config/virtual_hosts/0";
            let host = http
                .pointer_mut(pointer)
                .ok_or_else(|| anyhow!("the file has nothing at {pointer}"))?;
            let header = json!({"key": header, "value": "%UPSTREAM_REMOTE_ADDRESS%"});
            put(host, "response_headers_to_add", json!([{"header": header}]))
        })
    }

    /// Lets every route of the first listener hash this header, for [`Policy::RingHash`].
    #[must_use]
    pub fn hash_header(self, header: &str) -> Self {
        self.edit_http(|http| {
            let hosts = array(http, "/route_config/virtual_hosts")?;
            for host in hosts {
                for route in array(host, "/routes")? {
                    let route = route
                        .get_mut("route")
                        .ok_or_else(|| anyhow!("a route leads to no cluster"))?;
                    let policy = json!([{"header": {"header_name": header}}]);
                    put(route, "hash_policy", policy)?;
                }
            }
            Ok(())
        })
    }

    /// Starts it and waits until it serves.
    pub async fn start(self) -> Result<Envoy> {
        Envoy::start(self).await
    }

    /// Writes it, paths and addresses as they are, for an Envoy that somebody else starts; the
    /// hosts of every cluster that takes them from a file are in `dir` too.
    pub fn write(mut self, dir: &Path, cluster: &str, hosts: &[SocketAddr]) -> Result<Files> {
        self.try_edit(|config| watch_hosts(config, dir));
        if let Some(error) = self.failed.take() {
            return Err(error.context("cannot edit the Envoy config"));
        }
        Files::write(dir, self.config, cluster, hosts)
    }

    /// Lets Envoy judge the config without running it (`--mode validate`).
    pub async fn validate(self) -> Result<()> {
        Envoy::validate(self).await
    }

    fn try_edit(&mut self, edit: impl FnOnce(&mut Value) -> Result<()>) {
        if self.failed.is_none()
            && let Err(error) = edit(&mut self.config)
        {
            self.failed = Some(error);
        }
    }

    /// The config as it will run in `dir`, and the Envoy to run it.
    pub(super) async fn finish(mut self, dir: &Path) -> Result<(Finished, Self)> {
        if let Some(error) = self.failed.take() {
            return Err(error.context("cannot edit the Envoy config"));
        }
        let needs_wasm = mentions_wasm(&self.config);
        let (own_wasm, test_hooks) = (self.wasm.take(), self.test_hooks);
        // Set-up may fetch and build for minutes, so not on a thread that serves engines.
        let (envoy, wasm) =
            tokio::task::spawn_blocking(move || find(needs_wasm, own_wasm, test_hooks)).await??;
        if let Some(wasm) = &wasm
            && !wasm.is_file()
        {
            bail!(
                "there is no filter {}; `cargo pr setup` builds it",
                wasm.display()
            );
        }
        let admin = dir.join("admin.sock");
        self.localise(dir, &admin, wasm.as_deref())?;
        let config = std::mem::take(&mut self.config);
        Ok((
            Finished {
                envoy,
                config,
                admin,
            },
            self,
        ))
    }

    /// Ports, sockets and paths of this machine.
    fn localise(&mut self, dir: &Path, admin: &Path, wasm: Option<&Path>) -> Result<()> {
        let mut first = Some(self.port);
        for listener in array(&mut self.config, "/static_resources/listeners")? {
            let port = first.take().unwrap_or(0);
            let address = json!({"socket_address": {"address": "127.0.0.1", "port_value": port}});
            put(listener, "address", address)?;
        }
        let template_admin = self
            .config
            .pointer("/admin/address/pipe/path")
            .and_then(Value::as_str)
            .map(str::to_owned);
        let template_admin = template_admin.ok_or_else(|| {
            anyhow!("the file has no admin on a unix socket (/admin/address/pipe)")
        })?;
        // The harness asks for the listeners' ports; whoever copies the file does not.
        if let Some(allowed) = self.config.pointer_mut("/admin/allow_paths")
            && let Some(allowed) = allowed.as_array_mut()
        {
            allowed.push(json!({"prefix": "/listeners"}));
        }
        let admin = admin.to_string_lossy().into_owned();
        let wasm = wasm.map(|wasm| wasm.to_string_lossy().into_owned());
        for_each_text(&mut self.config, DEPTH_MAX, &mut |key, text| {
            if key == "path" && *text == template_admin {
                text.clone_from(&admin);
            } else if key == "filename"
                && text.ends_with(".wasm")
                && let Some(wasm) = &wasm
            {
                text.clone_from(wasm);
            }
        })?;
        watch_hosts(&mut self.config, dir)
    }
}

/// Lets every cluster that takes its hosts from a file take them from the one in `dir`.
fn watch_hosts(config: &mut Value, dir: &Path) -> Result<()> {
    let eds = files::eds_path(dir);
    for cluster in clusters(config)? {
        if cluster.get("eds_cluster_config").is_some() {
            let source = files::source(dir, &eds);
            let found = cluster
                .pointer_mut("/eds_cluster_config/eds_config")
                .ok_or_else(|| anyhow!("a cluster has no eds_config"))?;
            *found = source;
        }
    }
    Ok(())
}

/// Writes the filter's configuration into a config.
pub fn set_filter_config(config: &mut Value, text: &str) -> Result<()> {
    let filter = find_filters(config)?
        .iter_mut()
        .find(|filter| name_of(filter) == Some(FILTER))
        .ok_or_else(|| anyhow!("the file has no filter {FILTER}"))?;
    let value = filter
        .pointer_mut("/typed_config/config/configuration/value")
        .ok_or_else(|| anyhow!("the filter {FILTER} has no configuration"))?;
    *value = Value::from(text);
    Ok(())
}

/// What an Envoy is started with.
pub(super) struct Finished {
    pub(super) envoy: PathBuf,
    pub(super) config: Value,
    pub(super) admin: PathBuf,
}

fn find(
    needs_wasm: bool,
    own: Option<PathBuf>,
    test_hooks: bool,
) -> Result<(PathBuf, Option<PathBuf>)> {
    if !needs_wasm {
        return Ok((setup::ready_envoy()?, None));
    }
    if own.is_some() {
        return Ok((setup::ready_envoy()?, own));
    }
    let ready = if test_hooks {
        setup::ready_with_test_hooks()?
    } else {
        setup::ready()?
    };
    Ok((ready.envoy, Some(ready.wasm)))
}

fn mentions_wasm(config: &Value) -> bool {
    config.to_string().contains(".wasm\"")
}

fn array<'a>(config: &'a mut Value, pointer: &str) -> Result<&'a mut Vec<Value>> {
    config
        .pointer_mut(pointer)
        .and_then(Value::as_array_mut)
        .ok_or_else(|| anyhow!("the file has no list at {pointer}"))
}

fn clusters(config: &mut Value) -> Result<&mut Vec<Value>> {
    array(config, "/static_resources/clusters")
}

fn find_cluster<'a>(config: &'a mut Value, name: &str) -> Result<&'a mut Value> {
    clusters(config)?
        .iter_mut()
        .find(|cluster| name_of(cluster) == Some(name))
        .ok_or_else(|| anyhow!("the file has no cluster {name}"))
}

fn find_http(config: &mut Value) -> Result<&mut Value> {
    let pointer = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
    config
        .pointer_mut(pointer)
        .ok_or_else(|| anyhow!("the file has nothing at {pointer}"))
}

fn find_filters(config: &mut Value) -> Result<&mut Vec<Value>> {
    array(find_http(config)?, "/http_filters")
}

fn name_of(value: &Value) -> Option<&str> {
    value.get("name").and_then(Value::as_str)
}

fn put(object: &mut Value, key: &str, value: Value) -> Result<()> {
    let object = object
        .as_object_mut()
        .ok_or_else(|| anyhow!("no object to put {key} into"))?;
    object.insert(key.to_owned(), value);
    Ok(())
}

/// Calls `each` with every text in the config and the key it stands at.
fn for_each_text(
    value: &mut Value,
    depth: u32,
    each: &mut impl FnMut(&str, &mut String),
) -> Result<()> {
    let Some(depth) = depth.checked_sub(1) else {
        bail!("the config nests too deep")
    };
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                if let Value::String(text) = value {
                    each(key, text);
                } else {
                    for_each_text(value, depth, each)?;
                }
            }
        }
        Value::Array(values) => {
            for value in values {
                for_each_text(value, depth, each)?;
            }
        }
        _ => {}
    }
    Ok(())
}
