//! The two Envoys: started here, or somewhere else from files that are written here.
//!
//! Guarantee: both come from the file that users copy, with the few edits below. Not here: when
//! something is changed (operator.rs).

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use hyper::header::HeaderName;
use serde_json::{Value, json};

use crate::harness::{self, Envoy, Files, Plan, Policy, Sample};
use crate::load::client::SERVED_BY;
use crate::load::engines::Engines as Pages;

/// The Envoy file that users copy, for hosts that come and go.
const FILE: &str = include_str!("../../../envoy/envoy-eds.yaml");

/// The engines' cluster in it.
const CLUSTER: &str = "engines";

/// Its listener of metrics is the second, and its ports are these.
const PORT: u16 = 8080;
const METRICS_PORT: u16 = 9901;

/// In which the client names its prompt, for ring_hash.
pub(super) const PROMPT_ID: HeaderName = HeaderName::from_static("x-prompt-id");

/// Envoys elsewhere may have to be pulled and started first.
const READY_LIMIT: Duration = Duration::from_secs(300);

/// A change of listeners takes a moment; machines that compile take longer.
const TAKEN_LIMIT: Duration = Duration::from_secs(20);

const POLL: Duration = Duration::from_millis(100);

/// Envoy's own policy where the filter is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opponent {
    /// The less loaded of two random hosts.
    LeastRequest,
    /// Any host.
    Random,
    /// By the header in which the client names its prompt.
    RingHash,
}

impl Opponent {
    const ALL: [Self; 3] = [Self::LeastRequest, Self::Random, Self::RingHash];

    /// The policy of this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }

    /// Envoy's name of it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::LeastRequest => "least_request",
            Self::Random => "random",
            Self::RingHash => "ring_hash",
        }
    }

    /// For the page.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::LeastRequest => "Envoy alone: least_request",
            Self::Random => "Envoy alone: random",
            Self::RingHash => "Envoy alone: ring_hash on a header",
        }
    }

    /// The cluster of this policy: all three have the same hosts.
    fn cluster(self) -> String {
        match self {
            Self::LeastRequest => CLUSTER.to_owned(),
            other => format!("{CLUSTER}_{}", other.name()),
        }
    }

    fn policy(self) -> Policy {
        match self {
            Self::LeastRequest => Policy::LeastRequest,
            Self::Random => Policy::Random,
            Self::RingHash => Policy::RingHash,
        }
    }
}

/// What both have in common: the answer says who served, for the page.
fn plan(hosts: &[SocketAddr]) -> Result<Plan> {
    let plan = Plan::parse(FILE)?
        .listeners_from_file()
        .log_level("warning")
        .hosts(CLUSTER, hosts)
        .answers_name_host(SERVED_BY.as_str());
    Ok(plan)
}

/// Envoy with the filter.
pub(super) fn with_filter(hosts: Vec<SocketAddr>, limit: Option<u32>) -> Result<Plan> {
    Ok(plan(&hosts)?.filter_config(&filter_config(limit)))
}

/// Envoy without the filter, with a cluster for each opponent.
pub(super) fn without_filter(hosts: Vec<SocketAddr>) -> Result<Plan> {
    let plan = plan(&hosts)?
        .without_filter(Policy::LeastRequest)
        .hash_header(PROMPT_ID.as_str())
        .edit(|config| {
            let clusters = config.pointer_mut("/static_resources/clusters");
            let clusters = clusters.and_then(Value::as_array_mut);
            let clusters = clusters.context("the file has no clusters")?;
            let engines = clusters.iter().find(|one| one["name"] == CLUSTER).cloned();
            let engines = engines.with_context(|| format!("the file has no cluster {CLUSTER}"))?;
            for other in [Opponent::Random, Opponent::RingHash] {
                let mut copy = engines.clone();
                put(&mut copy, "name", json!(other.cluster()))?;
                put(&mut copy, "load_balancing_policy", other.policy().config())?;
                let eds = copy.pointer_mut("/eds_cluster_config");
                put(
                    eds.context("no eds_cluster_config")?,
                    "service_name",
                    json!(CLUSTER),
                )?;
                clusters.push(copy);
            }
            Ok(())
        });
    Ok(plan)
}

fn filter_config(limit: Option<u32>) -> Value {
    let mut pool = json!({"cluster": CLUSTER, "hosts": {"admin_cluster": "envoy_admin"}});
    if let (Some(limit), Some(pool)) = (limit, pool.as_object_mut()) {
        pool.insert("limit".to_owned(), json!(limit));
        // Hard, so that what the page shows of it is what it says.
        pool.insert("panic_rule".to_owned(), json!(false));
    }
    json!({"pools": [pool]})
}

/// Something in the first listener's connection manager.
fn at<'a>(config: &'a mut Value, pointer: &str) -> Result<&'a mut Value> {
    let http = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
    let whole = format!("{http}{pointer}");
    config
        .pointer_mut(&whole)
        .with_context(|| format!("the file has nothing at {whole}"))
}

fn put(object: &mut Value, key: &str, value: Value) -> Result<()> {
    let object = object
        .as_object_mut()
        .with_context(|| format!("no object to put {key} into"))?;
    object.insert(key.to_owned(), value);
    Ok(())
}

/// A running Envoy.
pub(super) enum Gateway {
    /// A process of ours.
    Here(Envoy),
    /// Somebody else's.
    Elsewhere {
        /// What it reads.
        files: Files,
        /// Where it serves.
        host: String,
        /// Asks it for its metrics.
        pages: Box<Pages>,
    },
}

impl Gateway {
    /// Starts an Envoy.
    pub(super) async fn here(plan: Plan) -> Result<Self> {
        Ok(Self::Here(plan.start().await?))
    }

    /// Writes what an Envoy on `host` is started from.
    pub(super) fn elsewhere(
        plan: Plan,
        folder: &Path,
        host: &str,
        hosts: Vec<SocketAddr>,
    ) -> Result<Self> {
        // Whoever scrapes it is in another container.
        let address = json!({"socket_address": {"address": "0.0.0.0", "port_value": METRICS_PORT}});
        let plan = plan.set("/static_resources/listeners/1/address", address);
        Ok(Self::Elsewhere {
            files: plan.write(folder, CLUSTER, &hosts)?,
            host: host.to_owned(),
            pages: Box::new(Pages::new(Vec::new())),
        })
    }

    /// Where it serves.
    pub(super) fn url(&self) -> String {
        match self {
            Self::Here(envoy) => envoy.url(""),
            Self::Elsewhere { host, .. } => format!("http://{host}:{PORT}"),
        }
    }

    /// Its metrics.
    pub(super) async fn metrics(&self) -> Result<Vec<Sample>> {
        match self {
            Self::Here(envoy) => envoy.metrics().await,
            Self::Elsewhere { host, pages, .. } => {
                let address = format!("{host}:{METRICS_PORT}");
                let page = pages.page(&address, "/stats/prometheus").await?;
                Ok(harness::parse_prometheus(&page))
            }
        }
    }

    /// The sum of a metric's series; 0 where there is none.
    async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
        let samples = self.metrics().await?;
        let found = samples.iter().filter(|sample| sample.is(name, labels));
        Ok(found.map(|sample| sample.value).sum())
    }

    /// Waits until it serves and has found `hosts` healthy hosts.
    pub(super) async fn wait_ready(&mut self, hosts: usize) -> Result<()> {
        let began = Instant::now();
        let cluster = [("envoy_cluster_name", CLUSTER)];
        loop {
            let healthy = self
                .metric("envoy_cluster_membership_healthy", &cluster)
                .await;
            if healthy
                .as_ref()
                .is_ok_and(|healthy| *healthy as usize >= hosts)
            {
                return Ok(());
            }
            if began.elapsed() > READY_LIMIT {
                bail!("the Envoy at {} is not ready: {healthy:?}", self.url());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Replaces the hosts; those in `draining` too get nothing new.
    pub(super) async fn set_hosts(
        &self,
        hosts: &[SocketAddr],
        draining: &[SocketAddr],
    ) -> Result<()> {
        let mark = |place: usize, endpoint: &mut Value| {
            let drains = hosts.get(place).is_some_and(|host| draining.contains(host));
            if let (true, Some(fields)) = (drains, endpoint.as_object_mut()) {
                fields.insert("health_status".to_owned(), json!("DRAINING"));
            }
        };
        match self {
            Self::Here(envoy) => envoy.set_hosts_with(hosts, mark).await,
            Self::Elsewhere { files, .. } => files.set_hosts_with(hosts, mark),
        }
    }

    /// Another limit of the filter.
    pub(super) async fn set_limit(&mut self, limit: Option<u32>) -> Result<()> {
        let text = filter_config(limit).to_string();
        self.edit_listeners(|listeners| harness::set_filter_config(listeners, &text))
            .await
    }

    /// Another policy of Envoy's own.
    pub(super) async fn set_opponent(&mut self, opponent: Opponent) -> Result<()> {
        self.edit_listeners(|listeners| {
            let route = at(listeners, "/route_config/virtual_hosts/0/routes/0/route")?;
            put(route, "cluster", json!(opponent.cluster()))
        })
        .await
    }

    async fn edit_listeners(&mut self, edit: impl FnOnce(&mut Value) -> Result<()>) -> Result<()> {
        const TAKEN: &str = "envoy_listener_manager_lds_update_success";
        const REFUSED: &str = "envoy_listener_manager_lds_update_rejected";
        if let Self::Here(envoy) = self {
            return envoy.edit_listeners(edit).await;
        }
        let taken = self.metric(TAKEN, &[]).await?;
        let refused = self.metric(REFUSED, &[]).await?;
        if let Self::Elsewhere { files, .. } = self {
            files.edit_listeners(edit)?;
        }
        let began = Instant::now();
        while self.metric(TAKEN, &[]).await? <= taken {
            if self.metric(REFUSED, &[]).await? > refused {
                bail!("Envoy refuses its new listeners");
            }
            if began.elapsed() > TAKEN_LIMIT {
                bail!("Envoy does not read its listeners' file again");
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }
}
