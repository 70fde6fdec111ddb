//! The engines of both fleets, in this process, each with an address of its own.
//!
//! Guarantee: a dead engine refuses connections and has lost its cache; one that starts anew has
//! its old address. Not here: what an engine does (engine/).

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::net::TcpListener;

use crate::engine::server::{self, Handle, ServerConfig};
use crate::page::HostState;

/// Hosts of a fleet at most: more do not fit the page.
pub(super) const HOSTS_MAX: usize = 10;

/// A third of the demo's, as the page's prompts are (traffic.rs): 30 prompts and what is in flight.
pub(super) const KV_TOKENS: u64 = 100_000;

/// Between the ports of the two fleets.
pub(super) const PORTS_APART: u16 = 100;

/// A port whose engine has just died is free in a moment.
const BIND_LIMIT: Duration = Duration::from_secs(5);

struct Slot {
    address: SocketAddr,
    state: HostState,
    handle: Option<Handle>,
}

impl Slot {
    async fn start(address: SocketAddr, kv_tokens: u64) -> anyhow::Result<Self> {
        let handle = Some(spawn(address, kv_tokens).await?);
        let state = HostState::Up;
        Ok(Self {
            address,
            state,
            handle,
        })
    }
}

/// Both fleets' engines: the host with a number has the same part in both.
pub(super) struct Engines {
    ip: IpAddr,
    first_port: u16,
    kv_tokens: u64,
    fleets: [Vec<Slot>; 2],
}

impl Engines {
    /// Starts `hosts` engines for each fleet.
    pub(super) async fn start(
        ip: IpAddr,
        first_port: u16,
        hosts: usize,
        kv_tokens: u64,
    ) -> anyhow::Result<Self> {
        let mut engines = Self {
            ip,
            first_port,
            kv_tokens,
            fleets: [Vec::new(), Vec::new()],
        };
        for _ in 0..hosts.min(HOSTS_MAX) {
            engines.add().await?;
        }
        Ok(engines)
    }

    /// Starts one more host in each fleet.
    pub(super) async fn add(&mut self) -> anyhow::Result<()> {
        let mut base = self.first_port;
        for fleet in &mut self.fleets {
            anyhow::ensure!(
                fleet.len() < HOSTS_MAX,
                "there are {HOSTS_MAX} hosts already"
            );
            let port = base + fleet.len() as u16;
            fleet.push(Slot::start((self.ip, port).into(), self.kv_tokens).await?);
            base += PORTS_APART;
        }
        Ok(())
    }

    /// How many more hosts there can be.
    pub(super) fn left(&self) -> usize {
        let hosts = self.fleets.iter().map(Vec::len).max().unwrap_or(0);
        HOSTS_MAX.saturating_sub(hosts)
    }

    /// A fleet's addresses.
    pub(super) fn addresses(&self, fleet: usize) -> Vec<SocketAddr> {
        let slots = self.fleets.get(fleet).into_iter().flatten();
        slots.map(|slot| slot.address).collect()
    }

    /// Those of a fleet that get nothing new.
    pub(super) fn draining(&self, fleet: usize) -> Vec<SocketAddr> {
        let slots = self.fleets.get(fleet).into_iter().flatten();
        let draining = slots.filter(|slot| slot.state == HostState::Draining);
        draining.map(|slot| slot.address).collect()
    }

    /// A fleet's addresses and states, for the page.
    pub(super) fn states(&self, fleet: usize) -> Vec<(String, HostState)> {
        let slots = self.fleets.get(fleet).into_iter().flatten();
        slots
            .map(|slot| (slot.address.to_string(), slot.state))
            .collect()
    }

    /// What became of a host; an error if there is none of this number.
    pub(super) fn state(&self, host: usize) -> anyhow::Result<HostState> {
        let slot = self.fleets.first().and_then(|fleet| fleet.get(host));
        let slot = slot.with_context(|| format!("there is no host {}", host.saturating_add(1)))?;
        Ok(slot.state)
    }

    /// How many hosts take new requests.
    pub(super) fn up(&self) -> usize {
        let slots = self.fleets.first().into_iter().flatten();
        slots.filter(|slot| slot.state == HostState::Up).count()
    }

    /// A host gets nothing new.
    pub(super) fn drain(&mut self, host: usize) {
        for slot in self.both(host) {
            slot.state = HostState::Draining;
        }
    }

    /// A host dies in the middle of what it does.
    pub(super) fn kill(&mut self, host: usize) {
        for slot in self.both(host) {
            slot.handle = None;
            slot.state = HostState::Killed;
        }
    }

    /// A host starts anew, with nothing in its cache.
    pub(super) async fn restart(&mut self, host: usize) -> anyhow::Result<()> {
        let kv_tokens = self.kv_tokens;
        for slot in self.both(host) {
            slot.handle = None;
            slot.handle = Some(spawn(slot.address, kv_tokens).await?);
            slot.state = HostState::Up;
        }
        Ok(())
    }

    fn both(&mut self, host: usize) -> impl Iterator<Item = &mut Slot> {
        self.fleets
            .iter_mut()
            .filter_map(move |fleet| fleet.get_mut(host))
    }
}

async fn spawn(address: SocketAddr, kv_tokens: u64) -> anyhow::Result<Handle> {
    let mut config = ServerConfig::default();
    config.engine.kv_tokens = kv_tokens;
    let began = Instant::now();
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return server::spawn(config, listener),
            Err(error) if began.elapsed() > BIND_LIMIT => {
                return Err(error).with_context(|| {
                    format!("an engine cannot listen on {address}; --engine-port chooses others")
                });
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}
