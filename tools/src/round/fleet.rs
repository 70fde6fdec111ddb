//! A round's engines: child processes, simulated ones or real.
//!
//! Guarantee: they end with the fleet, and with this process however that ends; a fleet that was
//! cooled has nothing cached. Not here: what an engine does (engine/), what a real one is made of
//! (real/).

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::Signal;
use tokio::sync::Mutex;
use tokio::time::sleep;

use crate::harness::Process;
use crate::load::engines::Engines;

/// An engine is up in a tenth of a second; a machine that compiles takes longer.
const START_LIMIT: Duration = Duration::from_secs(30);

/// How often processes that start or end are looked at.
const POLL: Duration = Duration::from_millis(50);

/// How much of its log a dead engine shows.
const TAIL_LINES: usize = 20;

/// How an engine listens on a port.
type Start = Box<dyn Fn(u16) -> Command + Send + Sync>;

/// How engines are run.
pub(crate) struct Kind {
    /// What listens on a port.
    pub start: Start,
    /// Whether it starts processes itself.
    pub family: bool,
    /// It is up within this.
    pub start_limit: Duration,
    /// Asked to end, it has ended within this.
    pub stop_limit: Duration,
    /// How its caches are emptied.
    pub cooling: Cooling,
}

/// How an engine's caches are emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cooling {
    /// A simulated engine does it when it is told to, and sets its counters back.
    Simulated,
    /// The process is started anew.
    Restart,
    /// A POST to this path.
    Post(&'static str),
}

/// Whether an engine that was asked to end did so: in its own way, or because it has none.
fn ended_as_asked(status: ExitStatus) -> bool {
    status.success() || status.signal() == Some(Signal::TERM.as_raw())
}

impl Kind {
    /// Simulated engines: this very program.
    ///
    /// # Errors
    /// If this program's own file cannot be found.
    pub(crate) fn simulated(kv_tokens: u64) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        Ok(Self {
            start: Box::new(move |port| {
                let mut command = Command::new(&program);
                command.args(["engine", "--port", &port.to_string()]);
                command.args(["--kv-tokens", &kv_tokens.to_string()]);
                command
            }),
            family: false,
            start_limit: START_LIMIT,
            // Nothing is lost with them: they may be killed at once.
            stop_limit: Duration::ZERO,
            cooling: Cooling::Simulated,
        })
    }
}

/// Running engines.
pub(crate) struct Fleet {
    /// Their pages.
    pub engines: Engines,
    /// Where they listen.
    pub addresses: Vec<SocketAddr>,
    kind: Kind,
    folder: PathBuf,
    processes: Mutex<Vec<Process>>,
}

impl Fleet {
    /// Starts the engines, with logs in `folder`, and waits until all of them are well.
    pub(crate) async fn start(ports: &[u16], kind: Kind, folder: &Path) -> anyhow::Result<Self> {
        let addresses: Vec<SocketAddr> = ports
            .iter()
            .map(|&port| (Ipv4Addr::LOCALHOST, port).into())
            .collect();
        let names = addresses.iter().map(ToString::to_string).collect();
        let fleet = Self {
            engines: Engines::new(names),
            addresses,
            kind,
            folder: folder.to_path_buf(),
            processes: Mutex::new(Vec::new()),
        };
        fleet.up().await?;
        Ok(fleet)
    }

    /// Starts the processes.
    async fn up(&self) -> anyhow::Result<()> {
        for address in &self.addresses {
            free(address, "--engine-port")?;
        }
        let mut processes = self.processes.lock().await;
        for address in &self.addresses {
            let port = address.port();
            let log = self.folder.join(format!("engine-{port}.log"));
            let mut command = (self.kind.start)(port);
            processes.push(if self.kind.family {
                Process::start_family(&mut command, &log)?
            } else {
                Process::start(&mut command, &log)?
            });
        }
        let began = Instant::now();
        while !self.engines.healthy().await {
            for (process, address) in processes.iter_mut().zip(&self.addresses) {
                if let Some(status) = process.ended()? {
                    let said = tail(&process.log());
                    bail!("the engine on {address} ended ({status}): {said}");
                }
            }
            let limit = self.kind.start_limit;
            if began.elapsed() > limit {
                bail!("the engines are not up after {} s", limit.as_secs());
            }
            sleep(POLL).await;
        }
        Ok(())
    }

    /// Ends the processes: by asking them, unless nothing is lost with them.
    pub(crate) async fn down(&self) -> anyhow::Result<()> {
        let mut processes = std::mem::take(&mut *self.processes.lock().await);
        if self.kind.stop_limit.is_zero() {
            return Ok(());
        }
        for process in &processes {
            process.terminate()?;
        }
        for (process, address) in processes.iter_mut().zip(&self.addresses) {
            let limit = self.kind.stop_limit;
            match process.wait(limit).await? {
                Some(status) if ended_as_asked(status) => {}
                Some(status) => bail!("the engine on {address} ended badly: {status}"),
                None => bail!(
                    "the engine on {address} did not end within {} s",
                    limit.as_secs()
                ),
            }
        }
        Ok(())
    }

    /// Empties caches, and simulated engines' counters: the next policy starts as the first one did.
    pub(crate) async fn cool(&self) -> anyhow::Result<()> {
        match self.kind.cooling {
            Cooling::Simulated => {
                self.engines.post("/sim/flush", "{}").await?;
                self.engines.post("/sim/reset-counters", "{}").await
            }
            Cooling::Restart => {
                self.down().await?;
                self.up().await
            }
            Cooling::Post(path) => self.engines.post(path, "").await,
        }
    }

    /// Sets the speed of all clocks of simulated engines.
    pub(crate) async fn clock(&self, speed: f64) -> anyhow::Result<()> {
        let body = format!("{{\"speed\": {speed}}}");
        self.engines.post("/sim/clock", &body).await
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        let processes = self.processes.get_mut();
        let limit = Instant::now() + self.kind.stop_limit;
        if !self.kind.stop_limit.is_zero() {
            for process in processes.iter() {
                let _ = process.terminate();
            }
        }
        for process in processes.iter_mut() {
            while Instant::now() < limit && matches!(process.ended(), Ok(None)) {
                std::thread::sleep(POLL);
            }
        }
        // What still runs is killed as it is dropped.
    }
}

/// The last lines of what an engine said.
fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.trim().lines().collect();
    let from = lines.len().saturating_sub(TAIL_LINES);
    lines.get(from..).unwrap_or_default().join("\n")
}

/// Refuses a port that somebody listens on; `flag` chooses another.
pub(crate) fn free(address: &SocketAddr, flag: &str) -> anyhow::Result<()> {
    TcpListener::bind(address).map(drop).with_context(|| {
        format!(
            "cannot listen on {address}: if another demo runs, wait for it or stop it; if another \
             program has the port, choose another with {flag}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_in_use_is_named_with_what_to_do() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = taken.local_addr().unwrap();
        let error = format!("{:#}", free(&address, "--engine-port").unwrap_err());
        for part in [&address.to_string(), "--engine-port", "in use"] {
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
        drop(taken);
        free(&address, "--engine-port").unwrap();
    }

    #[test]
    fn an_engine_may_end_by_the_signal_that_asks_it_to_and_by_no_other() {
        for (status, expected) in [(0, true), (15, true), (9, false), (1 << 8, false)] {
            let status = ExitStatus::from_raw(status);
            assert_eq!(ended_as_asked(status), expected, "{status}");
        }
    }
}
