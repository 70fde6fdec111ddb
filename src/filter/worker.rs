//! What the requests of one VM share: configuration, host view, ledger, watchdog, metrics.
//!
//! Guarantee: nothing here is borrowed while the proxy is called back. Not here: callbacks.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use log::{error, info, warn};

use super::host::{self, Shared};
use super::metrics::Metrics;
use crate::config::{Config, HostSource, Pool};
use crate::discovery::{Discovery, Evidence, Outcome};
use crate::fleet;
use crate::hold;
use crate::hosts;
use crate::learned::Report;
use crate::load::{self, Changes, Ledger, NO_CHANGES, Seat};
use crate::names;
use crate::payload::Plan as ReadPlan;
use crate::pool::{Expected, Outdated, Placed, Plan, Router, View};
use crate::prefix::Prompt;
use crate::request::Request;
use crate::route::{Abstain, Candidate};
use crate::usage::{Reporting, Sampler, Usage};
use crate::watchdog::{Bounds, Watchdog};

/// A view is taken anew at most this often for one request; each time it is the newest there is.
const VIEWS_MAX: u32 = 3;

/// Envoy's reason for an answer that a host gave.
const VIA_UPSTREAM: &[u8] = b"via_upstream";
/// Envoy's flag UF: no connection to the host came about (ENVOY.md 4).
const CONNECTION_FAILURE: u64 = 0x20;

/// What the requests of one VM share.
pub struct Worker {
    /// The filter's configuration.
    pub config: Config,
    /// How bodies are read, made ready.
    pub plan: ReadPlan,
    /// The pool's metrics.
    pub metrics: Metrics,
    /// The requests that are held.
    pub watchdog: RefCell<Watchdog>,
    /// This VM's hand in the loads.
    pub ledger: Ledger,
    router: Router,
    /// Learning of hosts, if nothing lists them.
    discovery: Option<Discovery>,
    /// This gateway's zone; empty if it is not known or does not matter.
    zone: String,
    /// Where it is kept how much may be held.
    hold_key: String,
    view: RefCell<Rc<View>>,
    sampler: Cell<Sampler>,
    reporting: RefCell<Reporting>,
}

impl Worker {
    /// A worker for this configuration's pool, in the VM of this name.
    pub fn new(config: Config, pool: &Pool, owner: u64) -> Self {
        Self {
            metrics: Metrics::new(&pool.name),
            watchdog: RefCell::default(),
            ledger: Ledger::of(owner, host::now_ms()),
            router: Router::new(&pool.name, pool.rules()),
            discovery: (pool.hosts == HostSource::Learned).then(|| Discovery::new(&pool.name)),
            zone: zone_of(pool),
            hold_key: hold::key(&pool.name),
            view: RefCell::default(),
            plan: ReadPlan::new(&config.read),
            sampler: Cell::new(Sampler::new(config.learning.sample)),
            reporting: RefCell::default(),
            config,
        }
    }

    /// Places a request by its prompt and books it.
    pub fn place(&self, prompt: &Prompt, request: &mut Request) -> Placed {
        let started_us = host::now_us();
        let hosts = self.view().candidates().len();
        let placed = match self.router.plan(prompt, hosts, &Shared) {
            None => Placed::abstain(Abstain::NoPrefix),
            Some(_) if self.explores(hosts) => Placed::abstain(Abstain::Exploring),
            Some(plan) => self.place_by(&plan, request),
        };
        let took_us = host::now_us().saturating_sub(started_us);
        self.metrics.decided(placed.placement.decision, took_us);
        self.metrics.payload(prompt.api);
        if let Some(reason) = prompt.coverage.label() {
            self.metrics.unread(reason);
        }
        placed
    }

    /// Whether this request is left to the proxy, which may know hosts that we do not.
    fn explores(&self, hosts: usize) -> bool {
        let discovery = self.discovery.as_ref().filter(|_| hosts > 0);
        discovery.is_some_and(|discovery| discovery.explores(&Shared, hosts))
    }

    /// Takes in where a request went and what came of it, if nothing lists the hosts.
    pub fn learn_host(&self, placed: Option<&Placed>, reached: Option<&str>) {
        let Some(discovery) = &self.discovery else {
            return;
        };
        let view = self.view();
        let chosen = placed.and_then(|placed| placed.placement.hosts.first());
        let evidence = Evidence {
            chosen: chosen.and_then(|host| view.address_of(host.seat)),
            reached,
            outcome: outcome(),
        };
        let cluster = self
            .config
            .pools
            .first()
            .map(|pool| pool.cluster.as_bytes());
        let in_pool = || host::property(&["xds", "cluster_name"]).as_deref() == cluster;
        let now_ms = host::now_ms();
        let learned = discovery.learn(&Shared, &self.ledger, &view, evidence, in_pool, now_ms);
        let Some(summary) = learned else {
            return;
        };
        if summary.usable != view.candidates().len() {
            info!("pool {}: {summary}", self.pool_name());
        }
        self.refresh();
    }

    fn place_by(&self, plan: &Plan, request: &mut Request) -> Placed {
        let now_ms = host::now_ms();
        for _ in 0..VIEWS_MAX {
            let view = self.view();
            match self
                .router
                .place(plan, &view, request, now_ms, &Shared, &self.ledger)
            {
                Ok(placed) => return placed,
                Err(Outdated) => self.refresh(),
            }
        }
        Placed::abstain(Abstain::NoHosts)
    }

    /// Whether the next answer is read for its usage.
    pub fn samples(&self) -> bool {
        let mut sampler = self.sampler.get();
        let taken = sampler.take();
        self.sampler.set(sampler);
        taken
    }

    /// Takes in what the answer to a placed request said, from the host that was chosen for it.
    pub fn learn(&self, placed: &Placed, api: &'static str, usage: Usage) {
        let usage = self.reporting.borrow_mut().read(api, usage);
        let expected = placed.expected.as_ref();
        self.metrics
            .used(usage, expected.map(Expected::cached_share));
        let report = Report {
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
        };
        self.router.learn(placed, report, &Shared);
    }

    /// The headers that name these hosts.
    pub fn route_headers(&self, hosts: &[Candidate]) -> Vec<(&'static str, String)> {
        let view = self.view();
        let mut addresses: Vec<&str> = hosts
            .iter()
            .filter_map(|host| view.address_of(host.seat))
            .collect();
        let mut headers = Vec::new();
        if self.strict_health() && !addresses.is_empty() {
            let first = addresses.remove(0);
            headers.push((names::ROUTE_FIRST, BASE64_STANDARD.encode(first)));
        }
        if !addresses.is_empty() {
            headers.push((names::ROUTE_HOST, addresses.join(",")));
        }
        headers
    }

    /// Whether the first choice goes out by itself.
    pub fn strict_health(&self) -> bool {
        self.config.pools.iter().any(|pool| pool.strict_health)
    }

    /// The place of a host in the loads.
    pub fn seat_of(&self, address: &str) -> Option<Seat> {
        self.view().seat_of(address)
    }

    /// Writes a request's changes.
    pub fn write(&self, changes: Changes) {
        if changes != NO_CHANGES {
            self.ledger.transact(&Shared, |_| ((), changes));
        }
    }

    /// How long bodies may keep requests.
    pub fn watchdog_bounds(&self) -> Bounds {
        Bounds {
            first_body_ms: u64::from(self.config.request.body_wait_ms),
            body_idle_ms: u64::from(self.config.request.body_idle_ms),
        }
    }

    /// The hosts as this VM knows them.
    pub fn view(&self) -> Rc<View> {
        Rc::clone(&self.view.borrow())
    }

    /// How much of a body of this declared length is waited for.
    pub fn bytes_max(&self, declared: Option<u64>) -> u64 {
        let configured = u64::from(self.config.request.body_bytes_max);
        hold::bytes_max(hold::learned(&Shared, &self.hold_key), declared, configured)
    }

    /// The same, now that so much of it is there.
    pub fn bytes_max_now(&self, bytes_max: u64, buffered: u64) -> u64 {
        let learned = || hold::learned(&Shared, &self.hold_key);
        hold::bytes_max_now(bytes_max, buffered, learned)
    }

    /// Envoy refused a body that was held, when it had this much of it.
    pub fn body_refused(&self, buffered: u64) {
        self.metrics.body_refused();
        if hold::learn(&Shared, &self.hold_key, buffered) {
            error!(
                "Envoy refuses bodies that are held to be read (413, at {buffered} bytes): set \
                 request_body_buffer_limit of the virtual host above body_bytes_max; until then \
                 large bodies are placed by their first bytes"
            );
        }
    }

    /// The pool's name.
    pub fn pool_name(&self) -> &str {
        let pool = self.config.pools.first();
        pool.map_or("", |pool| pool.name.as_str())
    }

    /// Takes a new view if the loads say that there is a newer host table.
    pub fn refresh(&self) {
        let newest = load::read(&Shared).map_or(0, |loads| loads.hosts_version());
        if newest == self.view().version {
            return;
        }
        if let Some(view) = fleet::view(&Shared, self.pool_name()) {
            *self.view.borrow_mut() = Rc::new(view.seen_from(&self.zone));
        }
    }
}

/// The zone that this gateway is in, if zones matter to the pool.
fn zone_of(pool: &Pool) -> String {
    if !pool.routing.weighs_zones() {
        return String::new();
    }
    let own = || {
        let zone = host::property(&["xds", "node", "locality", "zone"]).unwrap_or_default();
        String::from_utf8_lossy(&zone).into_owned()
    };
    let zone = hosts::zone(&pool.zone.clone().unwrap_or_else(own));
    if zone.is_empty() {
        warn!(
            "pool {}: zone_tokens has no effect: set zone, or node.locality.zone of this Envoy",
            pool.name
        );
    }
    zone
}

/// What came of the request whose answer passes now.
fn outcome() -> Outcome {
    if host::property(&["response", "code_details"]).as_deref() == Some(VIA_UPSTREAM) {
        return Outcome::Answered;
    }
    let flags = host::property(&["response", "flags"]);
    let flags = flags.and_then(|flags| flags.try_into().ok());
    match flags.map_or(0, u64::from_le_bytes) & CONNECTION_FAILURE {
        0 => Outcome::Other,
        _ => Outcome::Unreachable,
    }
}
