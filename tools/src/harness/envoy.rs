//! A running Envoy.
//!
//! Guarantee: it serves when `start` returns, and it ends with this value or with this process,
//! whichever ends first, and however. Not here: what it runs (plan.rs).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use hyper::Method;
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::Mutex;
use tokio::time::sleep;

use super::admin::{Sample, ask, parse_prometheus, parse_stats};
use super::plan::{self, Finished, Plan};
use super::process::Process;
use super::usage::Usage;
use super::{files, log};

/// Starting takes about a second; machines that compile at the same time take longer.
const START_LIMIT: Duration = Duration::from_secs(60);

/// How often things that take a moment are looked at.
const POLL: Duration = Duration::from_millis(20);

/// How long an Envoy may take to end by itself before it is killed.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// How much of the log a failing test shows.
const TAIL_LINES: usize = 40;

/// A running Envoy.
#[derive(Debug)]
pub struct Envoy {
    process: Process,
    /// Holds config, admin socket and log; goes with the Envoy.
    dir: TempDir,
    admin: PathBuf,
    listeners: Vec<(String, SocketAddr)>,
    eds_cluster: Option<String>,
    /// The listeners as their file has them.
    lds: Mutex<Option<Value>>,
}

impl Envoy {
    pub(super) async fn start(plan: Plan) -> Result<Self> {
        let dir = new_dir()?;
        let (mut finished, plan) = plan.finish(dir.path()).await?;
        let lds = if plan.lds {
            Some(files::move_listeners(dir.path(), &mut finished.config)?)
        } else {
            None
        };
        let eds_cluster = eds_cluster(&finished.config);
        if let Some(cluster) = &eds_cluster {
            files::write_eds(dir.path(), cluster, plan.eds.as_deref().unwrap_or_default())?;
        }
        let mut command = command(&finished, dir.path())?;
        command.args([
            "--disable-hot-restart",
            "--concurrency",
            &plan.concurrency.to_string(),
        ]);
        command.args(["-l", &plan.log_level]);
        if let Some(seconds) = plan.drain_s {
            command.args(["--drain-time-s", &seconds.to_string()]);
        }
        let process = Process::start(&mut command, &log_path(dir.path()))?;
        let mut envoy = Self {
            process,
            dir,
            admin: finished.admin,
            listeners: Vec::new(),
            eds_cluster,
            lds: Mutex::new(lds),
        };
        envoy.wait_ready().await?;
        envoy.listeners = envoy.read_listeners().await?;
        Ok(envoy)
    }

    pub(super) async fn validate(plan: Plan) -> Result<()> {
        let dir = new_dir()?;
        let (finished, plan) = plan.finish(dir.path()).await?;
        if let Some(cluster) = eds_cluster(&finished.config) {
            files::write_eds(
                dir.path(),
                &cluster,
                plan.eds.as_deref().unwrap_or_default(),
            )?;
        }
        let log = log_path(dir.path());
        let file = File::create(&log)?;
        let mut command = tokio::process::Command::from(command(&finished, dir.path())?);
        command.args(["--mode", "validate", "-l", &plan.log_level]);
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .kill_on_drop(true);
        let status = tokio::time::timeout(START_LIMIT, command.status())
            .await
            .map_err(|_| anyhow!("Envoy does not end its validation"))??;
        if !status.success() {
            bail!(
                "Envoy refuses the config: {}",
                log::reason(&log::read(&log))
            );
        }
        Ok(())
    }

    /// Where the first listener serves.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        let none = SocketAddr::from(([127, 0, 0, 1], 0));
        self.listeners.first().map_or(none, |(_, address)| *address)
    }

    /// Where a listener serves, by its name.
    #[must_use]
    pub fn listener(&self, name: &str) -> Option<SocketAddr> {
        self.listeners
            .iter()
            .find(|(found, _)| found == name)
            .map(|(_, address)| *address)
    }

    /// The URL of a path on the first listener.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address())
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Processor time and memory so far.
    pub fn usage(&self) -> Result<Usage> {
        self.process.usage()
    }

    /// The admin's unix socket.
    #[must_use]
    pub fn admin_socket(&self) -> &Path {
        &self.admin
    }

    /// What the admin answers to a GET.
    pub async fn admin(&self, path: &str) -> Result<String> {
        ask(&self.admin, Method::GET, path).await
    }

    /// What the admin answers to a POST.
    pub async fn admin_post(&self, path: &str) -> Result<String> {
        ask(&self.admin, Method::POST, path).await
    }

    /// All counters and gauges by their full names.
    pub async fn stats(&self) -> Result<BTreeMap<String, u64>> {
        Ok(parse_stats(&self.admin("/stats").await?))
    }

    /// One counter or gauge by its full name; `None` while it does not exist.
    pub async fn stat(&self, name: &str) -> Result<Option<u64>> {
        Ok(self.stats().await?.get(name).copied())
    }

    /// All metrics as Prometheus sees them.
    pub async fn metrics(&self) -> Result<Vec<Sample>> {
        Ok(parse_prometheus(&self.admin("/stats/prometheus").await?))
    }

    /// The sum of a metric over all series with these labels; `None` while there is none.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> Result<Option<f64>> {
        let samples = self.metrics().await?;
        let mut values = samples
            .iter()
            .filter(|sample| sample.is(name, labels))
            .peekable();
        Ok(values
            .peek()
            .is_some()
            .then(|| values.map(|sample| sample.value).sum()))
    }

    /// Waits until a counter or gauge (absent: 0) is as wanted, and returns it.
    pub async fn wait_until(
        &self,
        name: &str,
        wanted: impl Fn(u64) -> bool,
        limit: Duration,
    ) -> Result<u64> {
        let started = Instant::now();
        loop {
            let value = self.stat(name).await?.unwrap_or(0);
            if wanted(value) {
                return Ok(value);
            }
            if started.elapsed() > limit {
                bail!(
                    "{name} is {value}, not as wanted, after {} s",
                    limit.as_secs_f64()
                );
            }
            sleep(POLL).await;
        }
    }

    /// As [`Envoy::wait_until`], for a metric with labels.
    pub async fn wait_until_metric(
        &self,
        name: &str,
        labels: &[(&str, &str)],
        wanted: impl Fn(f64) -> bool,
        limit: Duration,
    ) -> Result<f64> {
        let started = Instant::now();
        loop {
            let value = self.metric(name, labels).await?.unwrap_or(0.0);
            if wanted(value) {
                return Ok(value);
            }
            if started.elapsed() > limit {
                bail!(
                    "{name}{labels:?} is {value}, not as wanted, after {} s",
                    limit.as_secs_f64()
                );
            }
            sleep(POLL).await;
        }
    }

    /// The log so far.
    #[must_use]
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// The lines of the log that contain a text.
    #[must_use]
    pub fn log_lines(&self, text: &str) -> Vec<String> {
        self.log()
            .lines()
            .filter(|line| line.contains(text))
            .map(str::to_owned)
            .collect()
    }

    /// Waits until a line of the log contains a text, and returns the first such line.
    pub async fn wait_for_log(&self, text: &str, limit: Duration) -> Result<String> {
        let started = Instant::now();
        loop {
            if let Some(line) = self.log_lines(text).into_iter().next() {
                return Ok(line);
            }
            if started.elapsed() > limit {
                bail!(
                    "no line of Envoy's log has {text:?} after {} s",
                    limit.as_secs_f64()
                );
            }
            sleep(POLL).await;
        }
    }

    /// Replaces the hosts of the cluster whose hosts come from a file, and waits until Envoy has
    /// taken them.
    pub async fn set_hosts(&self, hosts: &[SocketAddr]) -> Result<()> {
        self.set_hosts_with(hosts, |_, _| ()).await
    }

    /// The same; the closure sees each endpoint with its place in the list.
    pub async fn set_hosts_with(
        &self,
        hosts: &[SocketAddr],
        change: impl FnMut(usize, &mut Value),
    ) -> Result<()> {
        let cluster = self
            .eds_cluster
            .as_deref()
            .ok_or_else(|| anyhow!("no cluster takes its hosts from a file"))?;
        let name = format!("cluster.{cluster}.update_success");
        let before = self.stat(&name).await?.unwrap_or(0);
        files::write_eds_with(self.dir.path(), cluster, hosts, change)?;
        self.wait_until(&name, |now| now > before, START_LIMIT)
            .await?;
        Ok(())
    }

    /// Gives the filter another configuration while Envoy runs; an error when it refuses it.
    pub async fn set_filter_config(&self, config: &Value) -> Result<()> {
        let text = config.to_string();
        self.edit_listeners(|listeners| plan::set_filter_config(listeners, &text))
            .await
    }

    /// Changes the listeners while Envoy runs, and waits until it has taken them; an error when it
    /// refuses them. The closure sees a config that has only them. For a plan with
    /// [`Plan::listeners_from_file`].
    pub async fn edit_listeners(&self, edit: impl FnOnce(&mut Value) -> Result<()>) -> Result<()> {
        let mut lds = self.lds.lock().await;
        let now = lds
            .as_mut()
            .ok_or_else(|| anyhow!("the listeners do not come from a file"))?;
        let mut next = now.clone();
        edit(&mut next)?;
        let log_before = self.log().len();
        let (taken, refused) = self.listener_updates().await?;
        files::write_lds(self.dir.path(), &next)?;
        let started = Instant::now();
        while started.elapsed() < START_LIMIT {
            let updates = self.listener_updates().await?;
            if updates.1 > refused {
                let log = self.log();
                bail!(
                    "Envoy refuses the listeners: {}",
                    log::reason(log.get(log_before..).unwrap_or_default())
                );
            }
            if updates.0 > taken {
                *now = next;
                return Ok(());
            }
            sleep(POLL).await;
        }
        bail!("Envoy does not read its listeners' file again")
    }

    /// How often Envoy took, and how often it refused, what the listeners' file says.
    async fn listener_updates(&self) -> Result<(u64, u64)> {
        let stats = self.stats().await?;
        let stat = |name: &str| stats.get(name).copied().unwrap_or(0);
        let prefix = "listener_manager.lds.update";
        Ok((
            stat(&format!("{prefix}_success")),
            stat(&format!("{prefix}_rejected")),
        ))
    }

    /// Whether the process still runs.
    pub fn running(&mut self) -> Result<bool> {
        Ok(self.process.ended()?.is_none())
    }

    /// Asks it to end, waits, and returns how it ended.
    pub async fn stop(mut self) -> Result<ExitStatus> {
        if let Some(status) = self.process.stop(STOP_LIMIT).await? {
            return Ok(status);
        }
        bail!(
            "Envoy did not end within {} s and was killed",
            STOP_LIMIT.as_secs()
        )
    }

    async fn wait_ready(&mut self) -> Result<()> {
        let started = Instant::now();
        while started.elapsed() < START_LIMIT {
            if let Some(status) = self.process.ended()? {
                bail!(
                    "Envoy did not start ({status}): {}",
                    log::reason(&self.log())
                );
            }
            if ask(&self.admin, Method::GET, "/ready").await.is_ok() {
                return Ok(());
            }
            sleep(POLL).await;
        }
        bail!(
            "Envoy is not ready after {} s; the end of its log:\n{}",
            START_LIMIT.as_secs(),
            self.log_tail()
        )
    }

    async fn read_listeners(&self) -> Result<Vec<(String, SocketAddr)>> {
        let text = self.admin("/listeners?format=json").await?;
        let json: Value = serde_json::from_str(&text)?;
        let statuses = json.get("listener_statuses").and_then(Value::as_array);
        let mut listeners = Vec::new();
        for status in statuses.into_iter().flatten() {
            let name = status
                .get("name")
                .and_then(Value::as_str)
                .unwrap_or_default();
            let address = status.pointer("/local_address/socket_address");
            let ip = address
                .and_then(|address| address.get("address"))
                .and_then(Value::as_str);
            let port = address
                .and_then(|address| address.get("port_value"))
                .and_then(Value::as_u64);
            let (Some(ip), Some(port)) = (ip, port) else {
                continue;
            };
            listeners.push((
                name.to_owned(),
                SocketAddr::new(ip.parse()?, port.try_into()?),
            ));
        }
        if listeners.is_empty() {
            bail!(
                "Envoy has no listener; the end of its log:\n{}",
                self.log_tail()
            );
        }
        Ok(listeners)
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines
            .get(lines.len().saturating_sub(TAIL_LINES)..)
            .unwrap_or_default()
            .join("\n")
    }
}

impl Drop for Envoy {
    #[expect(
        clippy::print_stderr,
        reason = "a test that fails: the test runner shows it with the rest of what it said"
    )]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the end of Envoy's log:\n{}", self.log_tail());
        }
    }
}

/// A folder whose name is short: the path of a unix socket has at most 107 bytes.
fn new_dir() -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix("pr-")
        .tempdir()
        .context("cannot create a temporary folder")
}

fn log_path(dir: &Path) -> PathBuf {
    dir.join("envoy.log")
}

/// The Envoy with its config written; JSON is YAML, too.
fn command(finished: &Finished, dir: &Path) -> Result<Command> {
    let config = dir.join("envoy.json");
    fs::write(&config, serde_json::to_vec_pretty(&finished.config)?)?;
    let mut command = Command::new(&finished.envoy);
    command.arg("-c").arg(&config);
    Ok(command)
}

fn eds_cluster(config: &Value) -> Option<String> {
    let clusters = config.pointer("/static_resources/clusters")?.as_array()?;
    let cluster = clusters
        .iter()
        .find(|cluster| cluster.get("eds_cluster_config").is_some())?;
    // Envoy asks for `service_name` where it is given.
    let service = cluster.pointer("/eds_cluster_config/service_name");
    service
        .or_else(|| cluster.get("name"))?
        .as_str()
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::Policy;

    /// When a process dies in whatever way, the system closes its end of the guard's pipe.
    #[tokio::test]
    async fn ends_when_the_process_that_started_it_is_gone() {
        let plan = Plan::load("envoy/envoy.yaml")
            .unwrap()
            .without_filter(Policy::Random);
        let mut envoy = plan.start().await.unwrap();
        assert!(envoy.running().unwrap());
        drop(envoy.process.guard.stdin.take());
        let started = Instant::now();
        while envoy.running().unwrap() {
            assert!(started.elapsed() < START_LIMIT, "Envoy is still there");
            sleep(POLL).await;
        }
    }
}
