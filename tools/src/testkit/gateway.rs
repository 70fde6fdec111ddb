//! A real Envoy with the filter, in front of mock engines.
//!
//! Guarantee: when [`GatewayPlan::start`] returns, the filter knows every engine. Not here: the
//! Envoy process (harness), what the filter should do.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use prefix_router::names::{DECISIONS, HOSTS, IN_FLIGHT, PENDING_TOKENS};
use serde_json::{Value, json};

use super::{Client, MockEngine, Protocol, eventually};
use crate::harness::{Envoy, Plan, Sample};

/// The file that tests run unless they ask for another one.
const PLAIN: &str = "envoy/envoy.yaml";
/// The same with hosts that come from a file.
const EDS: &str = "envoy/envoy-eds.yaml";
/// The cluster of the engines in both.
const CLUSTER: &str = "engines";
/// The file with two pools, whose clusters are [`DEFAULT_POOL`] and [`OTHER_POOL`].
const POOLS: &str = "envoy/pools.yaml";
/// The pool whose cluster the file's last route leads to.
pub const DEFAULT_POOL: &str = "llama";
/// The pool that the header leads to.
pub const OTHER_POOL: &str = "qwen";
/// The filter's poll: as often as it may, so that tests wait little.
const POLL_MS: u64 = 100;
/// How often engines are asked for their health.
const CHECK_EVERY: &str = "0.25s";
/// The filter's first poll comes with its first tick; busy machines take longer.
const SETTLE_LIMIT: Duration = Duration::from_secs(20);

/// A pool of a gateway to be started.
struct PoolPlan {
    cluster: &'static str,
    hosts: Vec<SocketAddr>,
    options: Value,
}

impl PoolPlan {
    fn new(cluster: &'static str, hosts: Vec<SocketAddr>) -> Self {
        let options = json!({
            "cluster": cluster,
            "hosts": {"admin_cluster": "envoy_admin", "poll_ms": POLL_MS},
        });
        Self {
            cluster,
            hosts,
            options,
        }
    }
}

/// A gateway to be started.
pub struct GatewayPlan {
    pools: Vec<PoolPlan>,
    file: String,
    config: Value,
    edits: Vec<Box<dyn FnOnce(Plan) -> Plan>>,
}

impl GatewayPlan {
    /// Uses the Envoy file whose hosts come from a file.
    #[must_use]
    pub fn eds(mut self) -> Self {
        EDS.clone_into(&mut self.file);
        self
    }

    /// Uses this file of the project.
    #[must_use]
    pub fn file(mut self, file: &str) -> Self {
        file.clone_into(&mut self.file);
        self
    }

    /// Options of the filter's first pool, beside its cluster and host source.
    #[must_use]
    pub fn pool(self, options: Value) -> Self {
        self.pool_at(0, options)
    }

    /// The same of its second pool.
    #[must_use]
    pub fn other_pool(self, options: Value) -> Self {
        self.pool_at(1, options)
    }

    fn pool_at(mut self, place: usize, options: Value) -> Self {
        if let Some(pool) = self.pools.get_mut(place) {
            merge(&mut pool.options, options);
        }
        self
    }

    /// Asks this server for the hosts in place of Envoy's admin: see [`admin_page`].
    #[must_use]
    pub fn asking(self, source: &MockEngine) -> Self {
        let address = source.address();
        let hosts = json!({"admin_cluster": "source", "poll_ms": POLL_MS});
        self.pool(json!({"hosts": hosts})).edit(move |plan| {
            plan.edit(move |envoy| {
                let clusters = envoy.pointer_mut("/static_resources/clusters");
                let clusters = clusters.and_then(Value::as_array_mut);
                clusters
                    .context("the file has no clusters")?
                    .push(source_cluster(address));
                Ok(())
            })
        })
    }

    /// Options of the filter beside its pools.
    #[must_use]
    pub fn config(mut self, options: Value) -> Self {
        merge(&mut self.config, options);
        self
    }

    /// Changes what is run, after everything else.
    #[must_use]
    pub fn edit(mut self, edit: impl FnOnce(Plan) -> Plan + 'static) -> Self {
        self.edits.push(Box::new(edit));
        self
    }

    /// The filter's configuration, as it is given to Envoy.
    #[must_use]
    pub fn filter_config(&self) -> Value {
        let pools: Vec<&Value> = self.pools.iter().map(|pool| &pool.options).collect();
        let mut config = self.config.clone();
        merge(&mut config, json!({ "pools": pools }));
        config
    }

    /// Starts Envoy and waits until it serves, whatever the filter knows by then.
    pub async fn start_unsettled(self) -> Result<Gateway> {
        let config = self.filter_config();
        let mut plan = Plan::load(&self.file)?.filter_config(&config);
        for pool in &self.pools {
            plan = plan
                .hosts(pool.cluster, &pool.hosts)
                .edit_cluster(pool.cluster, check_often);
        }
        for edit in self.edits {
            plan = edit(plan);
        }
        Ok(Gateway {
            envoy: plan.start().await?,
        })
    }

    /// Starts Envoy and waits until the filter knows every engine.
    pub async fn start(self) -> Result<Gateway> {
        let count = self.pools.iter().map(|pool| pool.hosts.len()).sum();
        let gateway = self.start_unsettled().await?;
        gateway.wait_hosts("usable", count, SETTLE_LIMIT).await?;
        Ok(gateway)
    }
}

/// A running gateway.
pub struct Gateway {
    envoy: Envoy,
}

impl Gateway {
    /// A gateway in front of these engines, listed in this order.
    #[must_use]
    pub fn of<'a>(engines: impl IntoIterator<Item = &'a MockEngine>) -> GatewayPlan {
        Self::at(engines.into_iter().map(MockEngine::address))
    }

    /// A gateway in front of these addresses, listed in this order.
    #[must_use]
    pub fn at(hosts: impl IntoIterator<Item = SocketAddr>) -> GatewayPlan {
        let hosts = hosts.into_iter().collect();
        GatewayPlan {
            pools: vec![PoolPlan::new(CLUSTER, hosts)],
            file: PLAIN.to_owned(),
            config: json!({}),
            edits: Vec::new(),
        }
    }

    /// A gateway in front of the engines of two pools, the first of which is the default, with the
    /// models that the file gives them.
    #[must_use]
    pub fn of_two<'a>(
        first: impl IntoIterator<Item = &'a MockEngine>,
        second: impl IntoIterator<Item = &'a MockEngine>,
    ) -> GatewayPlan {
        let first = first.into_iter().map(MockEngine::address).collect();
        let second = second.into_iter().map(MockEngine::address).collect();
        let pools = vec![
            PoolPlan::new(DEFAULT_POOL, first),
            PoolPlan::new(OTHER_POOL, second),
        ];
        let plan = GatewayPlan {
            pools,
            file: POOLS.to_owned(),
            config: json!({}),
            edits: Vec::new(),
        };
        plan.pool(json!({
            "default": true,
            "models": ["llama-70b", "llama-70b-lora-*"],
            "components": ["llama-component"],
        }))
        .other_pool(json!({"models": ["qwen-*"], "components": ["qwen-component"]}))
    }

    /// The Envoy.
    #[must_use]
    pub fn envoy(&self) -> &Envoy {
        &self.envoy
    }

    /// Where clients connect.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.envoy.address()
    }

    /// A client of it.
    #[must_use]
    pub fn client(&self, protocol: Protocol) -> Arc<Client> {
        Arc::new(Client::new(self.address(), protocol))
    }

    /// The filter's metrics.
    pub async fn metrics(&self) -> Result<Vec<Sample>> {
        let mut metrics = self.envoy.metrics().await?;
        metrics.retain(|sample| sample.name.starts_with("prefix_router_"));
        Ok(metrics)
    }

    /// The sum of a metric over all series with these labels; 0 if there is none.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
        Ok(self.envoy.metric(name, labels).await?.unwrap_or_default())
    }

    /// One of Envoy's own counters or gauges; 0 if it does not exist.
    pub async fn stat(&self, name: &str) -> Result<u64> {
        Ok(self.envoy.stat(name).await?.unwrap_or_default())
    }

    /// Requests that the filter counts in flight on an engine.
    pub async fn in_flight(&self, engine: &str) -> Result<f64> {
        self.metric(IN_FLIGHT, &[("upstream_host", engine)]).await
    }

    /// Waits until the filter counts so many requests in flight on an engine.
    pub async fn wait_in_flight(&self, engine: &str, count: u64) -> Result<()> {
        let labels = [("upstream_host", engine)];
        let wanted = |found| found == count as f64;
        let waited = self
            .envoy
            .wait_until_metric(IN_FLIGHT, &labels, wanted, SETTLE_LIMIT);
        waited.await.map(drop)
    }

    /// Requests that the filter gave a host.
    pub async fn routed(&self) -> Result<f64> {
        let abstained = self.metric(DECISIONS, &[("decision", "abstain")]).await?;
        Ok(self.metric(DECISIONS, &[]).await? - abstained)
    }

    /// Waits until so many hosts are in this state.
    pub async fn wait_hosts(&self, state: &str, count: usize, limit: Duration) -> Result<()> {
        let labels = [("state", state)];
        let wanted = |found| found == count as f64;
        self.envoy
            .wait_until_metric(HOSTS, &labels, wanted, limit)
            .await
            .map(drop)
    }

    /// Waits until every host's counters are zero: nothing was leaked.
    pub async fn quiet(&self) -> Result<()> {
        let mut left = Vec::new();
        let quiet = eventually(SETTLE_LIMIT, async || {
            left = self.counted().await.unwrap_or_default();
            left.iter().all(|(_, value)| *value == 0.0) && !left.is_empty()
        });
        if quiet.await {
            return Ok(());
        }
        if left.is_empty() {
            bail!("the filter has no counters");
        }
        left.retain(|(_, value)| *value != 0.0);
        bail!("still counted after {SETTLE_LIMIT:?}: {left:?}")
    }

    /// Every host's counters.
    async fn counted(&self) -> Result<Vec<(String, f64)>> {
        let metrics = self.metrics().await?;
        let ours = metrics
            .iter()
            .filter(|sample| [IN_FLIGHT, PENDING_TOKENS].contains(&&*sample.name));
        Ok(ours
            .map(|sample| (format!("{}{:?}", sample.name, sample.labels), sample.value))
            .collect())
    }

    /// How many connections each worker thread has accepted.
    pub async fn connections_per_worker(&self) -> Result<Vec<u64>> {
        let stats = self.envoy.stats().await?;
        let of_worker = |(name, count): (&String, &u64)| {
            let ours = name.starts_with("listener.127.0.0.1_") && name.contains(".worker_");
            (ours && name.ends_with(".downstream_cx_total")).then_some(*count)
        };
        Ok(stats.iter().filter_map(of_worker).collect())
    }

    /// Replaces the hosts; only with [`GatewayPlan::eds`].
    pub async fn set_hosts<'a>(
        &self,
        engines: impl IntoIterator<Item = &'a MockEngine>,
    ) -> Result<()> {
        let hosts: Vec<SocketAddr> = engines.into_iter().map(MockEngine::address).collect();
        self.envoy
            .set_hosts(&hosts)
            .await
            .context("replacing the hosts")
    }
}

fn source_cluster(address: SocketAddr) -> Value {
    let port = json!({"address": address.ip().to_string(), "port_value": address.port()});
    let endpoint = json!({"endpoint": {"address": {"socket_address": port}}});
    let endpoints = json!([{"lb_endpoints": [endpoint]}]);
    json!({
        "name": "source", "type": "STATIC", "connect_timeout": "0.5s",
        "load_assignment": {"cluster_name": "source", "endpoints": endpoints},
    })
}

/// What Envoy's admin says when all these engines are well, for [`MockEngine::set_page`].
#[must_use]
pub fn admin_page(engines: &[MockEngine]) -> String {
    let status = |engine: &MockEngine| {
        let (ip, port) = (engine.address().ip().to_string(), engine.address().port());
        json!({
            "address": {"socket_address": {"address": ip, "port_value": port}},
            "stats": [{"type": "GAUGE", "name": "rq_active"}],
            "health_status": {"eds_health_status": "HEALTHY"},
            "weight": 1,
        })
    };
    let hosts: Vec<Value> = engines.iter().map(status).collect();
    json!({"cluster_statuses": [{"name": CLUSTER, "host_statuses": hosts}]}).to_string()
}

/// Looks at the engines' health more often than the file says. While Envoy compiles the filter, a
/// busy machine lets the first checks time out, and each test would wait for the second.
fn check_often(cluster: &mut Value) -> Result<()> {
    let checks = cluster
        .pointer_mut("/health_checks/0")
        .and_then(Value::as_object_mut);
    let checks = checks.context("the file has no health checks")?;
    for interval in [
        "interval",
        "no_traffic_interval",
        "no_traffic_healthy_interval",
    ] {
        checks.insert(interval.to_owned(), json!(CHECK_EVERY));
    }
    Ok(())
}

/// Puts the fields of `options` over those of `base`.
fn merge(base: &mut Value, options: Value) {
    if let (Some(base), Value::Object(options)) = (base.as_object_mut(), options) {
        base.extend(options);
    }
}
