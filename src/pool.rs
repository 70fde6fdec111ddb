//! One pool at work: from a prompt to a booked host.
//!
//! Guarantee: the same prompt, hosts and loads give the same placement in every worker and every
//! gateway. Not here: where the hosts come from (hosts.rs), the proxy (filter/).

use crate::hosts::State;
use crate::load::{Ledger, Loads, Seat};
use crate::placement::HostId;
use crate::popularity::{self, Heat};
use crate::prefix::{Key, Prompt, mix};
use crate::request::Request;
use crate::route::{self, Abstain, Bounds, Candidate, Placement};
use crate::store::Store;

/// A host as a worker knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// `ip:port`, as Envoy writes it.
    pub address: String,
    /// Its place in the loads.
    pub seat: Seat,
    /// Its identity in placement.
    pub id: HostId,
    /// Its state in the pool; `None` if it is not one of the pool's hosts, or no longer.
    pub state: Option<State>,
}

/// The hosts of a pool at one version of the host table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The host table's version; 0 before there is one.
    pub version: u32,
    /// Every host that is known, usable or not.
    pub hosts: Vec<Host>,
    candidates: Vec<Candidate>,
}

impl View {
    /// The view of these hosts.
    #[must_use]
    pub fn new(version: u32, hosts: Vec<Host>) -> Self {
        let usable = hosts
            .iter()
            .filter(|host| host.state.is_some_and(State::is_usable));
        let candidates = usable
            .map(|host| Candidate {
                seat: host.seat,
                id: host.id,
            })
            .collect();
        Self {
            version,
            hosts,
            candidates,
        }
    }

    /// Hosts that requests may be sent to.
    #[must_use]
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// The place of a host in the loads, by its address.
    #[must_use]
    pub fn seat_of(&self, address: &str) -> Option<Seat> {
        self.hosts
            .iter()
            .find(|host| host.address == address)
            .map(|host| host.seat)
    }

    /// The address of the host at a place in the loads.
    #[must_use]
    pub fn address_of(&self, seat: Seat) -> Option<&str> {
        self.hosts
            .iter()
            .find(|host| host.seat == seat)
            .map(|host| host.address.as_str())
    }
}

/// How a pool finds a prompt's key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeyRule {
    /// By the popularity of its prefixes.
    Adaptive(Heat),
    /// By its first characters, as the reader hashed them.
    Fixed,
}

/// A pool's rules.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// How the key is found.
    pub key: KeyRule,
    /// What a decision is bound by.
    pub bounds: Bounds,
    /// The shared-data key of the pool's popularity sketch.
    pub sketch: String,
}

impl Rules {
    /// Rules for the pool of this name.
    #[must_use]
    pub fn new(pool: &str, key: KeyRule, bounds: Bounds) -> Self {
        Self {
            key,
            bounds,
            sketch: format!("prefix_router.1.sketch.{pool}"),
        }
    }
}

/// Where a request was placed and by what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The decision and its hosts.
    pub placement: Placement,
    /// The key; `None` if the prompt has none.
    pub key: Option<Key>,
    /// Where in the prompt the key ends, in bytes of text.
    pub position: u64,
}

/// The hosts of a pool have changed since the view was taken: take a new one and try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outdated;

/// Finds the key of `prompt`. Counts it in the pool's sketch: once for each request.
pub fn key(rules: &Rules, hosts: usize, prompt: &Prompt, store: &impl Store) -> Option<(Key, u64)> {
    match rules.key {
        KeyRule::Fixed => {
            let fixed = prompt.fixed.map(|hash| (Key(mix(hash, prompt.seed)), 0));
            fixed.or_else(|| whole(prompt))
        }
        KeyRule::Adaptive(heat) => {
            let rungs = popularity::rungs(prompt);
            let hosts = u32::try_from(hosts).unwrap_or(u32::MAX);
            popularity::visit(store, &rules.sketch, &rungs, hosts, heat)
                .map(|found| (found.key, found.position))
        }
    }
}

fn whole(prompt: &Prompt) -> Option<(Key, u64)> {
    prompt
        .checkpoints
        .last()
        .map(|end| (prompt.key(end), end.position))
}

/// Places a request by its key and books it.
///
/// # Errors
/// [`Outdated`] if the host table has changed; nothing is booked then.
pub fn place(
    rules: &Rules,
    view: &View,
    key: Option<(Key, u64)>,
    request: &mut Request,
    store: &impl Store,
    ledger: &Ledger,
) -> Result<Placed, Outdated> {
    let Some((key, position)) = key else {
        let placement = Placement::abstain(Abstain::NoPrefix);
        return Ok(Placed {
            placement,
            key: None,
            position: 0,
        });
    };
    let decide = |loads: &Loads| {
        if loads.hosts_version() != view.version {
            return Err(Outdated);
        }
        Ok((
            route::decide(key, view.candidates(), loads, rules.bounds),
            0,
        ))
    };
    let placement = request.place(store, ledger, decide)?;
    Ok(Placed {
        placement,
        key: Some(key),
        position,
    })
}
