//! A round's engines: child processes of this very program.
//!
//! Guarantee: they end with the fleet, and with this process however that ends. Not here: what an
//! engine does (engine/).

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use tokio::time::sleep;

use crate::load::engines::Engines;

/// An engine is up in a tenth of a second; a machine that compiles takes longer.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Reads its standard input until this process has ended, then ends the engines.
const GUARD: &str = "read -r _; kill -TERM \"$@\" 2>/dev/null";

/// Running engines.
pub(crate) struct Fleet {
    /// Their pages.
    pub engines: Engines,
    /// Where they listen.
    pub addresses: Vec<SocketAddr>,
    children: Vec<Child>,
    guard: Option<Child>,
}

impl Fleet {
    /// Starts the engines, with logs in `folder`, and waits until all of them are well.
    pub(crate) async fn start(
        ports: &[u16],
        kv_tokens: u64,
        folder: &Path,
    ) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let addresses: Vec<SocketAddr> = ports
            .iter()
            .map(|&port| (Ipv4Addr::LOCALHOST, port).into())
            .collect();
        for address in &addresses {
            free(address, "--engine-port")?;
        }
        let names = addresses.iter().map(ToString::to_string).collect();
        let mut fleet = Self {
            engines: Engines::new(names),
            addresses: addresses.clone(),
            children: Vec::new(),
            guard: None,
        };
        for address in addresses {
            let port = address.port().to_string();
            let log = folder.join(format!("engine-{port}.log"));
            let file =
                File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
            let child = Command::new(&program)
                .args(["engine", "--port", &port, "--kv-tokens"])
                .arg(kv_tokens.to_string())
                .stdin(Stdio::null())
                .stdout(file.try_clone()?)
                .stderr(file)
                .spawn()
                .context("cannot start an engine")?;
            fleet.children.push(child);
        }
        fleet.guard = Some(guard(&fleet.children)?);
        fleet.wait(folder).await?;
        Ok(fleet)
    }

    async fn wait(&mut self, folder: &Path) -> anyhow::Result<()> {
        let began = Instant::now();
        while !self.engines.healthy().await {
            for (child, address) in self.children.iter_mut().zip(&self.addresses) {
                if let Some(status) = child.try_wait()? {
                    let log = folder.join(format!("engine-{}.log", address.port()));
                    let said = std::fs::read_to_string(log).unwrap_or_default();
                    bail!("the engine on {address} ended ({status}): {}", said.trim());
                }
            }
            if began.elapsed() > START_LIMIT {
                bail!("the engines are not up after {} s", START_LIMIT.as_secs());
            }
            sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Empties caches and counters: the next policy starts as the first one did.
    pub(crate) async fn cool(&self) -> anyhow::Result<()> {
        self.engines.post("/sim/flush", "{}").await?;
        self.engines.post("/sim/reset-counters", "{}").await
    }

    /// Sets the speed of all clocks.
    pub(crate) async fn clock(&self, speed: f64) -> anyhow::Result<()> {
        let body = format!("{{\"speed\": {speed}}}");
        self.engines.post("/sim/clock", &body).await
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        // The guard first: it would otherwise end whoever gets these process ids next.
        if let Some(guard) = &mut self.guard {
            let _ = guard.kill();
            let _ = guard.wait();
        }
        for child in &mut self.children {
            let _ = child.kill();
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
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

fn guard(children: &[Child]) -> anyhow::Result<Child> {
    Command::new("sh")
        .args(["-c", GUARD, "guard"])
        .args(children.iter().map(|child| child.id().to_string()))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot start sh, which ends the engines when this process ends")
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
}
