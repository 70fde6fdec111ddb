//! A gateway of one's own: the filter's router over loads that the command line gives.
//!
//! Guarantee: counts, key, costs and choice are the router's; looking changes nothing. Not here:
//! words.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use prefix_router::config::Pool;
use prefix_router::hosts::canonical;
use prefix_router::load::{self, Booking, Change, Ledger};
use prefix_router::placement;
use prefix_router::pool::{Router, View};
use prefix_router::prefix::Prompt;
use prefix_router::request::Request;
use prefix_router::route::Candidate;
use prefix_router::store::MemoryStore;
use serde::Serialize;

use super::pieces;
use crate::simulate::policy::ours;

/// Requests in flight that can be given to a host: each is booked by itself.
const IN_FLIGHT_MAX: u32 = 100_000;

pub(super) struct Gateway {
    router: Router,
    view: View,
    store: MemoryStore,
    ledger: Ledger,
}

/// A rung of the key's ladder: a place where the key may end.
#[derive(Debug, Serialize)]
pub(super) struct Rung {
    pub bytes: u64,
    pub tokens: u64,
    /// Recent requests that begin like this one up to here, this one included.
    pub seen: u32,
    pub is_hot: bool,
}

/// Where a request goes, and what that was based on.
#[derive(Debug, Serialize)]
pub(super) struct Route {
    pub key: String,
    /// Bytes and tokens of the prompt before the key's end.
    pub bytes: u64,
    pub tokens: u64,
    /// Recent requests, this one included, and the number above which a prefix is hot; none in
    /// `fixed` mode.
    pub requests: Option<u32>,
    pub hot_above: Option<u32>,
    pub rungs: Vec<Rung>,
    /// In the key's order.
    pub hosts: Vec<Host>,
    pub decision: &'static str,
    pub sent_to: Option<String>,
}

/// What a request would cost on a host.
#[derive(Debug, Serialize)]
pub(super) struct Host {
    pub host: String,
    pub in_flight: u32,
    pub pending: u32,
    /// Tokens of this prompt that it was sent before.
    pub known: f64,
    /// Tokens that it would compute.
    pub uncached: f64,
    /// None in `fixed` mode, which weighs no costs.
    pub cost: Option<f64>,
}

impl Gateway {
    /// A gateway that has seen nothing, with these loads on its hosts.
    pub(super) fn new(pool: &Pool, hosts: &[String], loads: &[String]) -> Result<Self> {
        let gateway = Self {
            router: Router::new(&pool.name, pool.rules()),
            view: ours::view(1, hosts, |_| Some(0)),
            store: MemoryStore::new(),
            ledger: Ledger::default(),
        };
        ours::take_seats(&gateway.view, &gateway.ledger, &gateway.store);
        for load in loads {
            gateway.load(load)?;
        }
        Ok(gateway)
    }

    fn load(&self, text: &str) -> Result<()> {
        let wrong =
            || format!("--load: expected HOST=REQUESTS or HOST=REQUESTS:TOKENS, got {text:?}");
        let (host, load) = text.split_once('=').with_context(wrong)?;
        let (requests, tokens) = load.split_once(':').unwrap_or((load, "0"));
        let requests: u32 = requests.parse().with_context(wrong)?;
        let tokens: u32 = tokens.parse().with_context(wrong)?;
        anyhow::ensure!(
            requests <= IN_FLIGHT_MAX && (requests > 0 || tokens == 0),
            "--load: expected 1 to {IN_FLIGHT_MAX} requests, got {text:?}"
        );
        // The hosts of an Envoy file may be names.
        let canonical = canonical(host).unwrap_or_else(|| host.to_owned());
        let seat = self.view.seat_of(&canonical);
        let seat = seat.with_context(|| format!("--load: {host} is none of the hosts"))?;
        for number in 0..requests {
            let pending = if number == 0 { tokens } else { 0 };
            let booking = Booking { seat, pending };
            self.ledger.apply(&self.store, Change::Book(booking));
        }
        Ok(())
    }

    /// Routes a request, and sees it end.
    pub(super) fn play(&self, prompt: &Prompt) {
        let hosts = self.view.candidates().len();
        let Some(plan) = self.router.plan(prompt, hosts, &self.store) else {
            return;
        };
        let mut request = Request::default();
        let (router, view) = (&self.router, &self.view);
        // The view never changes, so it is never out of date.
        let _ = router.place(&plan, view, &mut request, 0, &self.store, &self.ledger);
        for changes in [request.answered(), request.end()] {
            for change in changes.into_iter().flatten() {
                self.ledger.apply(&self.store, change);
            }
        }
    }

    /// Where a request would go now; `None` if there is nothing in it to go by.
    pub(super) fn look(&self, prompt: &Prompt) -> Option<Route> {
        // Of both, for the router counts in a copy of what is in the store.
        let (store, router) = (self.store.clone(), self.router.clone());
        let count = self.view.candidates().len();
        let plan = router.plan(prompt, count, &store)?;
        let heat = router.heat(prompt, count, &store);
        let loads = load::read(&store).ok()?;
        let costs = router.costs(&plan, &self.view, 0, &store, &loads);
        let costs: BTreeMap<u64, _> = costs
            .into_iter()
            .map(|offer| (offer.host.id.0, offer))
            .collect();
        let order = placement::order(plan.key(), self.view.candidates(), |host: &Candidate| {
            (host.id, host.weight)
        });
        let address = |host: &Candidate| self.view.address_of(host.seat).unwrap_or("").to_owned();
        let hosts = order.iter().map(|host| {
            let offer = costs.get(&host.id.0);
            let load = loads.of(host.seat);
            Host {
                host: address(host),
                in_flight: load.in_flight,
                pending: load.pending,
                known: offer.map_or(0.0, |offer| offer.known),
                uncached: offer.map_or(prompt.tokens() as f64, |offer| offer.uncached),
                cost: offer.map(|offer| offer.cost),
            }
        });
        let hosts = hosts.collect();
        let mut request = Request::default();
        let ledger = Ledger::default();
        let placed = self
            .router
            .place(&plan, &self.view, &mut request, 0, &store, &ledger);
        let placement = placed.ok()?.placement;
        let rungs = heat.iter().flat_map(|heat| {
            heat.rungs.iter().map(|&(rung, seen)| Rung {
                bytes: rung.position,
                tokens: pieces::tokens(rung.position),
                seen,
                is_hot: seen > heat.hot_above,
            })
        });
        Some(Route {
            key: format!("{:016x}", plan.key().0),
            bytes: plan.position(),
            tokens: pieces::tokens(plan.position()),
            requests: heat.as_ref().map(|heat| heat.requests),
            hot_above: heat.as_ref().map(|heat| heat.hot_above),
            rungs: rungs.collect(),
            hosts,
            decision: placement.decision.label(),
            sent_to: placement.hosts.first().map(address),
        })
    }
}
