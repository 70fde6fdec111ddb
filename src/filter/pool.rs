//! One pool in one VM: its router, its metrics, and its hosts as this VM knows them.
//!
//! Guarantee: what pools learn, count and keep never mixes; nothing here is borrowed while the proxy
//! is called back. Not here: which pool serves a request (worker.rs).

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use log::{error, info, warn};

use super::host::{self, Shared};
use super::metrics::Metrics;
use crate::config::{self, Config, HostSource, Mode};
use crate::discovery::{Discovery, Evidence, Outcome};
use crate::elsewhere::Elsewhere;
use crate::hosts;
use crate::learned::Report;
use crate::load::{Changes, Ledger};
use crate::names;
use crate::payload::Plan as ReadPlan;
use crate::pool::{Expected, Outdated, Placed, Plan, Router, View};
use crate::prefix::Prompt;
use crate::request::Request;
use crate::route::{Abstain, Candidate, Decision};
use crate::stall::Stalls;
use crate::usage::{Reporting, Usage};

/// A view is taken anew at most this often for one request; each time it is the newest there is.
const VIEWS_MAX: u32 = 3;

/// Envoy's reason for an answer that a host gave.
const VIA_UPSTREAM: &[u8] = b"via_upstream";
/// Envoy's flag UF: no connection to the host came about (ENVOY.md 4).
const CONNECTION_FAILURE: u64 = 0x20;

/// One pool in one VM.
pub struct Pool {
    /// Its configuration.
    pub config: config::Pool,
    /// Its metrics.
    pub metrics: Metrics,
    /// How bodies are read whose head leads to it.
    pub plan: ReadPlan,
    router: Router,
    /// Learning of hosts, if nothing lists them.
    discovery: Option<Discovery>,
    /// This gateway's zone; empty if it is not known or does not matter.
    zone: String,
    /// Its engines that are silent, while this VM polls for them.
    pub stalls: RefCell<Stalls>,
    /// Whether a younger configuration means another cluster by the pool's name.
    pub is_rivalled: Cell<bool>,
    view: RefCell<Rc<View>>,
    reporting: RefCell<Reporting>,
    elsewhere: Cell<Elsewhere>,
}

impl Pool {
    /// A pool of this configuration.
    pub fn new(pool: &config::Pool, config: &Config) -> Self {
        Self {
            metrics: Metrics::new(&pool.name),
            plan: ReadPlan::new(&config.read_for(pool)),
            router: Router::new(&pool.name, pool.rules()),
            discovery: (pool.hosts == HostSource::Learned).then(|| Discovery::new(&pool.name)),
            zone: zone_of(pool),
            stalls: RefCell::default(),
            is_rivalled: Cell::default(),
            view: RefCell::default(),
            reporting: RefCell::default(),
            elsewhere: Cell::default(),
            config: pool.clone(),
        }
    }

    /// The body of a placed request ended.
    pub fn uploaded(&self, placed: &mut Placed, request: &mut Request) -> Changes {
        self.router.uploaded(placed, request, host::now_ms)
    }

    /// The answer to a placed request comes, or its end.
    pub fn give_back(&self, placed: &Placed, request: &mut Request) -> Changes {
        self.router.give_back(placed, request)
    }

    /// The first byte of the answer to a placed request came; `well` if it is no error.
    pub fn answered(&self, placed: &Placed, request: &mut Request, well: bool) -> Changes {
        self.router.answered(placed, request, well, host::now_ms)
    }

    /// The whole answer to a placed request passes at once.
    pub fn completed(&self, placed: &mut Placed, request: &mut Request) {
        self.router.completed(placed, request, host::now_ms());
    }

    /// The tick: ends what is pending of requests whose prompts should have been computed by now.
    pub fn end_overdue(&self, now_ms: u64, ledger: &Ledger) {
        self.router.end_overdue(now_ms, &Shared, ledger);
    }

    /// A host answered a request that was routed; `obeyed` if it is the chosen one. Counts and tells
    /// if the proxy does not do what it is told.
    pub fn served(&self, obeyed: bool) {
        if !obeyed {
            self.metrics.served_elsewhere();
        }
        let mut seen = self.elsewhere.get();
        let lost = seen.see(!obeyed);
        self.elsewhere.set(seen);
        if let Some((elsewhere, answers)) = lost {
            error!(
                "pool {}: of the last {answers} routed requests, {elsewhere} were answered by \
                 other hosts than the chosen ones: unless that many are retried, Envoy does not \
                 see the choice, or their route leads to another cluster; `prefix-router check` \
                 on Envoy's file says why",
                self.config.name
            );
        }
    }

    /// Whether decisions are only told, and the proxy's own choice serves.
    pub fn observes(&self) -> bool {
        self.config.mode == Mode::Observe
    }

    /// The hosts as this VM knows them.
    pub fn view(&self) -> Rc<View> {
        Rc::clone(&self.view.borrow())
    }

    /// Takes a new view.
    pub fn set_view(&self, view: View) {
        *self.view.borrow_mut() = Rc::new(view.seen_from(&self.zone));
    }

    /// Places a request by its prompt and books it. `refresh` takes new views of the hosts.
    pub fn place(
        &self,
        prompt: &Prompt,
        request: &mut Request,
        ledger: &Ledger,
        refresh: impl Fn(),
    ) -> Placed {
        let started_us = host::now_us();
        let hosts = self.view().candidates().len();
        let now_ms = started_us / 1000;
        let placed = match self.router.plan(prompt, hosts, &Shared) {
            None => Placed::abstain(Abstain::NoPrefix),
            Some(_) if self.explores(hosts) => Placed::abstain(Abstain::Exploring),
            Some(plan) if !self.router.routes(&plan) => Placed::abstain(Abstain::Share),
            Some(plan) => self.place_by(&plan, request, now_ms, ledger, refresh),
        };
        let took_us = host::now_us().saturating_sub(started_us);
        self.metrics.decided(placed.placement.decision, took_us);
        placed
    }

    /// Whether this request is left to the proxy, which may know hosts that we do not.
    fn explores(&self, hosts: usize) -> bool {
        let discovery = self.discovery.as_ref().filter(|_| hosts > 0);
        discovery.is_some_and(|discovery| discovery.explores(&Shared, hosts))
    }

    /// Takes in where a request went and what came of it, if nothing lists the hosts; whether that
    /// changed them.
    pub fn learn_host(
        &self,
        placed: Option<&Placed>,
        reached: Option<&str>,
        ledger: &Ledger,
    ) -> bool {
        let Some(discovery) = &self.discovery else {
            return false;
        };
        let view = self.view();
        let placed = placed.filter(|_| !self.observes());
        let chosen = placed.and_then(|placed| placed.placement.hosts.first());
        let evidence = Evidence {
            chosen: chosen.and_then(|host| view.address_of(host.seat)),
            reached,
            outcome: outcome(),
        };
        let cluster = self.config.cluster.as_bytes();
        let in_pool = || host::property(&["xds", "cluster_name"]).as_deref() == Some(cluster);
        let now_ms = host::now_ms();
        let learned = discovery.learn(&Shared, ledger, &view, evidence, in_pool, now_ms);
        let Some(summary) = learned else {
            return false;
        };
        if summary.usable != view.candidates().len() {
            info!("pool {}: {summary}", self.config.name);
        }
        true
    }

    fn place_by(
        &self,
        plan: &Plan,
        request: &mut Request,
        now_ms: u64,
        ledger: &Ledger,
        refresh: impl Fn(),
    ) -> Placed {
        for _ in 0..VIEWS_MAX {
            let view = self.view();
            match self
                .router
                .place(plan, &view, request, now_ms, &Shared, ledger)
            {
                Ok(placed) => return placed,
                Err(Outdated) => refresh(),
            }
        }
        Placed::abstain(Abstain::NoHosts)
    }

    /// Whether a decision is that the request is answered by us.
    pub fn refuses(&self, placed: &Placed) -> bool {
        placed.placement.decision == Decision::Reject && !self.observes()
    }

    /// Takes in what the answer to a placed request said, from the host that was chosen for it; or
    /// from any, where decisions are only told.
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

    /// The headers that name these hosts; none where decisions are only told.
    pub fn route_headers(&self, hosts: &[Candidate]) -> Vec<(&'static str, String)> {
        let mut headers = Vec::new();
        if self.observes() {
            return headers;
        }
        let view = self.view();
        let mut addresses: Vec<&str> = hosts
            .iter()
            .filter_map(|host| view.address_of(host.seat))
            .collect();
        if self.config.strict_health && !addresses.is_empty() {
            let first = addresses.remove(0);
            headers.push((names::ROUTE_FIRST, BASE64_STANDARD.encode(first)));
        }
        if !addresses.is_empty() {
            headers.push((names::ROUTE_HOST, addresses.join(",")));
        }
        headers
    }
}

/// The zone that this gateway is in, if zones matter to the pool.
fn zone_of(pool: &config::Pool) -> String {
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
