//! The routers that are compared, and one of them running in front of engines.
//!
//! Guarantee: each is started as its own documentation says; what differs from its defaults is in
//! its name and its `setting`. All log warnings only. A router ends with its value. Not here: what
//! is sent through it.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use hyper::HeaderMap;
use hyper::header::HeaderName;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::install::{Installed, Package};
use crate::harness::{Envoy, Plan, Policy, Process, Usage};
use crate::load::client::Target;
use crate::round;
use crate::testkit::{Answer, Client, Protocol, Request};
use crate::workload::Form;

/// The model that simulated engines serve.
pub(super) const MODEL: &str = "sim";

/// Hosts come from a file that can be replaced, in every Envoy: scaling needs it.
const ENVOY_FILE: &str = "envoy/envoy-eds.yaml";
/// The cluster in it.
const CLUSTER: &str = "engines";

/// A router is up in a second; one that checks new hosts in turn takes some more on a busy machine.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// How often is looked.
const POLL: Duration = Duration::from_millis(50);
/// A request that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(120);

/// What clients tell a router of what a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// Nothing: the router finds it in the prompt, or does not care.
    Nothing,
    /// The tenant, i.e. who owns the system prompt.
    Tenant,
    /// The conversation.
    Session,
}

impl Told {
    /// The header that says it.
    pub(super) fn header(self) -> Option<HeaderName> {
        match self {
            Self::Nothing => None,
            Self::Tenant => Some(HeaderName::from_static("x-tenant-id")),
            Self::Session => Some(HeaderName::from_static("x-session-id")),
        }
    }
}

/// A router with its settings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Contestant {
    /// In tables, and on the command line.
    pub name: &'static str,
    /// What is not at its default.
    pub setting: &'static str,
    /// What clients have to tell it.
    pub told: Told,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Envoy without the filter.
    Envoy(Policy),
    /// Envoy with it.
    Ours { one_gateway: bool },
    /// A program of others.
    Peer {
        package: Package,
        arguments: &'static [&'static str],
    },
}

const fn envoy(name: &'static str, policy: Policy, told: Told) -> Contestant {
    Contestant {
        name,
        setting: "",
        told,
        kind: Kind::Envoy(policy),
    }
}

const fn ours(name: &'static str, one_gateway: bool, setting: &'static str) -> Contestant {
    Contestant {
        name,
        setting,
        told: Told::Nothing,
        kind: Kind::Ours { one_gateway },
    }
}

const fn peer(
    name: &'static str,
    package: Package,
    arguments: &'static [&'static str],
    setting: &'static str,
) -> Contestant {
    Contestant {
        name,
        setting,
        told: Told::Nothing,
        kind: Kind::Peer { package, arguments },
    }
}

const CACHE_AWARE: &[&str] = &["--policy", "cache_aware"];
const PREFIX_HASH: &[&str] = &["--policy", "prefix_hash"];
/// Spreads from a difference of four requests on, instead of 64: at few requests in flight the
/// defaults never spread.
const CACHE_AWARE_TUNED: &[&str] = &[
    "--policy",
    "cache_aware",
    "--balance-abs-threshold",
    "4",
    "--balance-rel-threshold",
    "1.1",
];

/// All of them, in the tables' order.
pub(super) const ALL: [Contestant; 13] = [
    ours("prefix_router", false, ""),
    ours("prefix_router-one", true, "gateways: one"),
    envoy("envoy-random", Policy::Random, Told::Nothing),
    envoy("envoy-least_request", Policy::LeastRequest, Told::Nothing),
    envoy("envoy-ring_hash", Policy::RingHash, Told::Tenant),
    peer("sglang-cache_aware", Package::Sglang, CACHE_AWARE, ""),
    peer(
        "sglang-cache_aware-tuned",
        Package::Sglang,
        CACHE_AWARE_TUNED,
        "balance thresholds: abs 4, rel 1.1",
    ),
    peer("smg-cache_aware", Package::Smg, CACHE_AWARE, ""),
    peer("smg-prefix_hash", Package::Smg, PREFIX_HASH, ""),
    peer(
        "smg-prefix_hash-tuned",
        Package::Smg,
        &[
            "--policy",
            "prefix_hash",
            "--prefix-hash-balance-abs-threshold",
            "2",
        ],
        "balance threshold: abs 2",
    ),
    peer("vllm-cache_aware", Package::Vllm, CACHE_AWARE, ""),
    peer(
        "vllm-cache_aware-tuned",
        Package::Vllm,
        CACHE_AWARE_TUNED,
        "balance thresholds: abs 4, rel 1.1",
    ),
    Contestant {
        told: Told::Session,
        ..peer(
            "vllm-consistent_hash",
            Package::Vllm,
            &["--policy", "consistent_hash"],
            "",
        )
    },
];

/// A router's place in tables; those of other names come last.
pub(super) fn place(name: &str) -> usize {
    let found = ALL.iter().position(|one| one.name == name);
    found.unwrap_or(ALL.len())
}

impl Contestant {
    /// Those of these names, in their own order; all for none.
    pub(super) fn named(names: &[String]) -> Result<Vec<Self>> {
        let all = ALL.iter().map(|one| one.name).collect::<Vec<_>>();
        for name in names {
            ensure!(
                all.contains(&name.as_str()),
                "--routers: expected some of {}, got {name}",
                all.join(", ")
            );
        }
        let wanted = |one: &&Self| names.is_empty() || names.iter().any(|name| name == one.name);
        Ok(ALL.iter().filter(wanted).copied().collect())
    }

    /// The package it comes in; none for what set-up has anyway.
    pub(super) fn package(&self) -> Option<Package> {
        match self.kind {
            Kind::Peer { package, .. } => Some(package),
            Kind::Envoy(_) | Kind::Ours { .. } => None,
        }
    }

    /// Whether it is ours.
    pub(super) fn is_ours(&self) -> bool {
        matches!(self.kind, Kind::Ours { .. })
    }

    /// Whether it looks into prompts, as ours does.
    pub(super) fn reads_prompts(&self) -> bool {
        self.told == Told::Nothing && !matches!(self.kind, Kind::Envoy(_))
    }
}

/// What stands behind a router.
#[derive(Clone, Copy, Debug)]
pub(super) struct Engines<'a> {
    /// Where they listen.
    pub hosts: &'a [SocketAddr],
    /// The model that they serve.
    pub model: &'static str,
    /// What Envoy's file needs for them.
    pub plan: fn(Plan) -> Plan,
}

impl<'a> Engines<'a> {
    /// Engines that need nothing special.
    pub(super) fn plain(hosts: &'a [SocketAddr]) -> Self {
        Self {
            hosts,
            model: MODEL,
            plan: |plan| plan,
        }
    }
}

/// A running router.
pub(super) struct Router {
    pub(super) contestant: Contestant,
    running: Running,
    hosts: Vec<SocketAddr>,
    model: &'static str,
}

enum Running {
    Envoy(Envoy),
    Peer {
        process: Process,
        client: Client,
        package: Package,
    },
}

impl Router {
    /// Starts it in front of these engines and waits until it knows all of them. `workers` are
    /// Envoy's threads; others take as many as there are processors. Logs go to `folder`.
    pub(super) async fn open(
        contestant: Contestant,
        engines: Engines<'_>,
        workers: u32,
        installed: &Installed,
        folder: &Path,
    ) -> Result<Self> {
        let hosts = engines.hosts;
        let running = match contestant.kind {
            Kind::Envoy(policy) => {
                let plan = Plan::load(ENVOY_FILE)?.without_filter(policy);
                let plan = (engines.plan)(plan);
                Running::Envoy(
                    plan_of(plan, contestant.told, hosts, workers)
                        .start()
                        .await?,
                )
            }
            Kind::Ours { one_gateway } => {
                let plan = Plan::load(ENVOY_FILE)?.filter_config(&filter_config(one_gateway));
                let plan = (engines.plan)(plan);
                Running::Envoy(
                    plan_of(plan, contestant.told, hosts, workers)
                        .start()
                        .await?,
                )
            }
            Kind::Peer { package, arguments } => {
                let log = folder.join(format!("{}.log", contestant.name));
                let program = installed.program(package)?;
                start(package, &program, arguments, hosts, &log)?
            }
        };
        let mut router = Self {
            contestant,
            running,
            hosts: hosts.to_vec(),
            model: engines.model,
        };
        router
            .ready()
            .await
            .with_context(|| format!("{} does not start", contestant.name))?;
        Ok(router)
    }

    /// Where clients connect.
    pub(super) fn address(&self) -> SocketAddr {
        match &self.running {
            Running::Envoy(envoy) => envoy.address(),
            Running::Peer { client, .. } => client.address(),
        }
    }

    /// Processor time and memory of the whole gateway.
    pub(super) fn usage(&self) -> Result<Usage> {
        match &self.running {
            Running::Envoy(envoy) => envoy.usage(),
            Running::Peer { process, .. } => process.usage(),
        }
    }

    /// The Envoy, if it is one.
    pub(super) fn envoy(&self) -> Option<&Envoy> {
        match &self.running {
            Running::Envoy(envoy) => Some(envoy),
            Running::Peer { .. } => None,
        }
    }

    /// How a client asks it for streamed chats.
    pub(super) fn target(&self) -> Result<Target> {
        Ok(Target {
            base: format!("http://{}", self.address()).parse()?,
            form: Form::Chat,
            model: self.model.into(),
            stream: true,
            headers: HeaderMap::new(),
            prefix_header: self.contestant.told.header(),
            timeout: TIMEOUT,
        })
    }

    /// Replaces the hosts, each router in its own way, and waits until it knows the new ones.
    pub(super) async fn set_hosts(&mut self, hosts: &[SocketAddr]) -> Result<()> {
        let came = hosts.iter().filter(|host| !self.hosts.contains(host));
        let went = self.hosts.iter().filter(|host| !hosts.contains(host));
        match &self.running {
            Running::Envoy(envoy) => envoy.set_hosts(hosts).await?,
            Running::Peer {
                client, package, ..
            } => {
                for host in came {
                    package.add(client, *host).await?;
                }
                for host in went {
                    package.remove(client, *host).await?;
                }
            }
        }
        self.hosts = hosts.to_vec();
        let name = self.contestant.name;
        let ready = self.ready().await;
        ready.with_context(|| format!("{name} does not take its new hosts"))
    }

    async fn ready(&mut self) -> Result<()> {
        let hosts = self.hosts.len();
        let filtered = self.contestant.is_ours();
        match &mut self.running {
            Running::Envoy(envoy) => round::wait_ready(envoy, &[CLUSTER], hosts, filtered).await,
            Running::Peer {
                process, client, ..
            } => peer_ready(process, client, hosts).await,
        }
    }
}

fn filter_config(one_gateway: bool) -> Value {
    let hosts = json!({"admin_cluster": "envoy_admin"});
    // What is at its default is not said: it is the defaults that are compared.
    let pool = if one_gateway {
        json!({"cluster": CLUSTER, "hosts": hosts, "gateways": "one"})
    } else {
        json!({"cluster": CLUSTER, "hosts": hosts})
    };
    json!({ "pools": [pool] })
}

fn plan_of(plan: Plan, told: Told, hosts: &[SocketAddr], workers: u32) -> Plan {
    let plan = plan.hosts(CLUSTER, hosts);
    let plan = plan.concurrency(workers).log_level("warning");
    let Some(header) = told.header() else {
        return plan;
    };
    plan.edit_http(move |http| {
        let pointer = "/route_config/virtual_hosts/0/routes/0/route";
        let route = http.pointer_mut(pointer).and_then(Value::as_object_mut);
        let route = route.with_context(|| format!("the file has nothing at {pointer}"))?;
        let policy = json!([{"header": {"header_name": header.as_str()}}]);
        route.insert("hash_policy".to_owned(), policy);
        Ok(())
    })
}

fn start(
    package: Package,
    program: &Path,
    arguments: &[&str],
    hosts: &[SocketAddr],
    log: &Path,
) -> Result<Running> {
    let (port, metrics) = (free_port()?, free_port()?);
    let mut command = Command::new(program);
    command.args(package.launch());
    command.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
    command.args(["--prometheus-host", "127.0.0.1"]);
    command.args(["--prometheus-port", &metrics.to_string()]);
    command.args(["--log-level", package.warnings()]);
    // vllm-router logs every request all the same, which costs it a fifth of its processor time.
    command.env("RUST_LOG", "warn");
    command.args(arguments).arg("--worker-urls");
    command.args(hosts.iter().map(|host| format!("http://{host}")));
    Ok(Running::Peer {
        process: Process::start(&mut command, log)?,
        client: Client::new((Ipv4Addr::LOCALHOST, port).into(), Protocol::Http1),
        package,
    })
}

/// A port that was free a moment ago: these routers take none of the system's choosing.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

/// Waits until a peer says that all its hosts are well.
async fn peer_ready(process: &mut Process, client: &Client, hosts: usize) -> Result<()> {
    let began = Instant::now();
    let mut said = String::new();
    while began.elapsed() < READY_LIMIT {
        if let Some(status) = process.ended()? {
            bail!("it ended ({status}): {}", last_lines(&process.log()));
        }
        match client.send(Request::get("/readiness")).await {
            Ok(answer) if knows(&answer, hosts) => return Ok(()),
            Ok(answer) => said = String::from_utf8_lossy(&answer.body).into_owned(),
            Err(error) => said = error.to_string(),
        }
        sleep(POLL).await;
    }
    bail!(
        "after {} s it does not say that {hosts} hosts are well: {said}; its log ends:\n{}",
        READY_LIMIT.as_secs(),
        last_lines(&process.log())
    )
}

fn knows(answer: &Answer, hosts: usize) -> bool {
    let said: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let count = |name: &str| said.get(name).and_then(Value::as_u64);
    answer.status == 200
        && count("healthy_workers") == Some(hosts as u64)
        && count("total_workers") == Some(hosts as u64)
}

/// Enough of a log to show why something did not start.
fn last_lines(log: &str) -> String {
    const LINES: usize = 8;
    let lines: Vec<&str> = log.lines().collect();
    let from = lines.len().saturating_sub(LINES);
    lines.get(from..).unwrap_or_default().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routers_are_taken_by_name_in_their_own_order() {
        let names = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            Contestant::named(&names).map(|found| found.iter().map(|one| one.name).collect())
        };
        let all: Vec<&str> = names(&[]).unwrap();
        assert_eq!(all.len(), ALL.len());
        assert_eq!(
            names(&["smg-cache_aware", "prefix_router"]).unwrap(),
            ["prefix_router", "smg-cache_aware"]
        );
        let error = names(&["smg"]).unwrap_err().to_string();
        assert!(error.contains("smg-prefix_hash-tuned, vllm"), "{error}");
        assert!(error.ends_with("got smg"), "{error}");
    }

    #[test]
    fn only_those_that_hash_a_header_need_one_from_the_client() {
        let told: Vec<&str> = ALL
            .iter()
            .filter(|one| one.told != Told::Nothing)
            .map(|one| one.name)
            .collect();
        assert_eq!(told, ["envoy-ring_hash", "vllm-consistent_hash"]);
    }
}
