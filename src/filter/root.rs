//! The root context of one VM: configuration, tick, host polling.
//!
//! Guarantee: a bad configuration is refused with one line that says why; losing the host source
//! keeps the last list. Not here: which hosts are usable (hosts.rs), single requests (http.rs).

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use log::{error, info, warn};
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{ContextType, LogLevel};

use super::host::{self, Shared};
use super::http::Http;
use super::metrics::Metrics;
use super::worker::Worker;
use crate::config::{Config, HostSource, Pool};
use crate::fleet::{self, Fleet};
use crate::hosts::{AdminSource, HostReport};
use crate::lease;
use crate::load::{self, FAILURES_HALVE_MS, NO_CHANGES};
use crate::names;
use crate::prefix::HASH_FORMAT;
use crate::route::Abstain;
use crate::series;
use crate::stall::Stalls;

/// Time between ticks: a quarter of the shortest poll, and short against the watchdog's bounds.
const TICK_MS: u64 = 100;
/// An answer of the admin later than this is a lost one.
const POLL_TIMEOUT_MS: u64 = 2000;
/// The lease outlives this many polls, so that a slow one does not cost it.
const LEASE_POLLS: u64 = 4;
/// The lease on the fading of failures: ten ticks.
const LOADS_LEASE_MS: u64 = 1000;
/// Time between two writings of the per-host gauges.
const GAUGES_MS: u64 = 250;

/// The commit the filter is built from: `prefix-router setup` sets it; so can any other build.
const COMMIT: &str = match option_env!("PREFIX_ROUTER_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};

/// Registers the filter with the SDK.
pub fn start() {
    proxy_wasm::set_log_level(LogLevel::Trace); // the configuration sets the real level
    proxy_wasm::set_root_context(|id| Box::new(Root::new(id)));
}

struct Root {
    id: u32,
    worker: Option<Rc<Worker>>,
    /// This VM's name in the leases, larger than those of older ones: no two VMs start their
    /// contexts in the same microsecond with the same number.
    owner: u64,
    fleet: RefCell<Fleet>,
    stalls: RefCell<Stalls>,
    source: RefCell<AdminSource>,
    polled_ms: Cell<u64>,
    poll_pending: Cell<bool>,
    gauges_ms: Cell<u64>,
    faded_ms: Cell<u64>,
    source_lost: Cell<bool>,
}

impl Root {
    fn new(id: u32) -> Self {
        Self {
            id,
            worker: None,
            owner: host::now_us() << 8 | u64::from(id) & 0xff,
            fleet: RefCell::default(),
            stalls: RefCell::default(),
            source: RefCell::new(AdminSource::new("")),
            polled_ms: Cell::new(0),
            poll_pending: Cell::new(false),
            gauges_ms: Cell::new(0),
            faded_ms: Cell::new(host::now_ms()),
            source_lost: Cell::new(false),
        }
    }

    fn release_overdue(&self, worker: &Worker, now_ms: u64) {
        let bounds = worker.watchdog_bounds();
        let overdue = worker.watchdog.borrow_mut().overdue(now_ms, bounds);
        for request in overdue {
            worker.metrics.abstained(Abstain::Watchdog);
            host::release(request, self.id);
        }
    }

    /// Takes back what stopped VMs left, and lets the failures of all pools fade, if this VM holds
    /// the lease and it is time.
    fn keep_loads(&self, worker: &Worker, now_ms: u64) {
        if !lease::take(&Shared, lease::OF_LOADS, self.owner, now_ms, LOADS_LEASE_MS) {
            return;
        }
        for (pool, requests) in fleet::take_back(&Shared, &worker.ledger) {
            Metrics::repaired_in(&pool, requests);
            warn!("pool {pool}: {requests} requests in flight taken back that a stopped VM left");
        }
        if now_ms.abs_diff(self.faded_ms.get()) < FAILURES_HALVE_MS {
            return;
        }
        self.faded_ms.set(now_ms);
        worker.ledger.transact(&Shared, |loads| {
            loads.halve_failures();
            ((), NO_CHANGES)
        });
    }

    /// Polls or applies the host source, if this VM holds the lease and it is time.
    fn keep_hosts(&self, worker: &Worker, now_ms: u64) {
        let Some(pool) = worker.config.pools.first() else {
            return;
        };
        if !self.holds(pool, now_ms) {
            return;
        }
        let poll_ms = poll_ms(pool);
        self.write_gauges(worker, now_ms);
        // Not `saturating_sub`: a clock that is set back must not stop the polls until it is there.
        let since_ms = now_ms.abs_diff(self.polled_ms.get());
        let lost = self.poll_pending.get() && since_ms > POLL_TIMEOUT_MS * 2;
        if since_ms < poll_ms || (self.poll_pending.get() && !lost) {
            return;
        }
        self.polled_ms.set(now_ms);
        match &pool.hosts {
            HostSource::Static(addresses) => {
                self.apply(worker, reports_of(addresses), false);
            }
            // Each answered request teaches its host.
            HostSource::Learned => {}
            HostSource::Admin { cluster, .. } => {
                let path = self.source.borrow_mut().ask(now_ms);
                self.poll_pending.set(true);
                if host::call(cluster, &path, POLL_TIMEOUT_MS).is_err() {
                    self.poll_pending.set(false);
                    self.source_failed(worker, "the admin cluster is unknown or empty");
                }
            }
        }
    }

    /// Takes or renews the lease of the pool's hosts; whether this VM has it.
    fn holds(&self, pool: &Pool, now_ms: u64) -> bool {
        let lease = lease::of_pool(&pool.name);
        let lease_ms = poll_ms(pool) * LEASE_POLLS;
        lease::take(&Shared, &lease, self.owner, now_ms, lease_ms)
    }

    fn apply(&self, worker: &Worker, mut reports: Vec<HostReport>, counted: bool) {
        let Some(pool) = worker.config.pools.first() else {
            return;
        };
        let now_ms = host::now_ms();
        worker.refresh();
        if let Ok(loads) = load::read(&Shared) {
            let mut stalls = self.stalls.borrow_mut();
            stalls.mark(&loads, &worker.view(), &mut reports, now_ms);
        }
        let mut fleet = self.fleet.borrow_mut();
        let applied = fleet.apply(&Shared, &worker.ledger, &pool.name, &reports, now_ms);
        if let Some(summary) = applied {
            info!("pool {}: {summary}", pool.name);
        }
        worker.refresh();
        if counted {
            let repaired = fleet.repair(&Shared, &worker.ledger, &worker.view(), &reports);
            if repaired > 0 {
                worker.metrics.repaired(repaired);
                warn!(
                    "pool {}: {repaired} requests in flight taken back that Envoy no longer has",
                    pool.name
                );
            }
        }
    }

    fn source_failed(&self, worker: &Worker, why: &str) {
        worker.metrics.source_error();
        // Once per cause: the counter goes on.
        if !self.source_lost.replace(true) {
            warn!("host source lost, keeping the last list: {why}");
        }
    }

    fn write_gauges(&self, worker: &Worker, now_ms: u64) {
        if now_ms.abs_diff(self.gauges_ms.get()) < GAUGES_MS {
            return;
        }
        self.gauges_ms.set(now_ms);
        let view = worker.view();
        for (state, count) in fleet::states(&view) {
            worker
                .metrics
                .gauge(names::HOSTS, names::STATE, state, count);
        }
        let loads = fleet::loads(&Shared, &view);
        let labels_max = worker.config.host_series_max;
        for (address, load) in series::labelled(&Shared, worker.pool_name(), &loads, labels_max) {
            let (in_flight, pending) = (u64::from(load.in_flight), u64::from(load.pending));
            worker
                .metrics
                .gauge(names::IN_FLIGHT, names::UPSTREAM_HOST, &address, in_flight);
            worker.metrics.gauge(
                names::PENDING_TOKENS,
                names::UPSTREAM_HOST,
                &address,
                pending,
            );
        }
    }
}

fn poll_ms(pool: &Pool) -> u64 {
    match &pool.hosts {
        HostSource::Admin { poll_ms, .. } => u64::from(*poll_ms),
        HostSource::Static(_) | HostSource::Learned => 1000,
    }
}

fn reports_of(addresses: &[String]) -> Vec<HostReport> {
    addresses
        .iter()
        .map(|address| HostReport::usable(address))
        .collect()
}

impl Context for Root {
    fn on_http_call_response(
        &mut self,
        _token: u32,
        headers: usize,
        body: usize,
        _trailers: usize,
    ) {
        self.poll_pending.set(false);
        let Some(worker) = self.worker.clone() else {
            return;
        };
        // Without headers the call was reset, and asking for one would panic (ENVOY.md 10).
        let status = (headers > 0)
            .then(host::call_status)
            .flatten()
            .unwrap_or_default();
        if status != b"200" {
            let status = String::from_utf8_lossy(&status).into_owned();
            return self.source_failed(&worker, &format!("the admin answered {status:?}"));
        }
        let answer = self.source.borrow_mut().answer(&host::call_body(body));
        match answer {
            Err(why) => self.source_failed(&worker, &why.to_string()),
            Ok(reports) => {
                let pool = worker.config.pools.first();
                if !pool.is_some_and(|pool| self.holds(pool, host::now_ms())) {
                    return; // A younger VM has taken over since this one asked.
                }
                if self.source_lost.replace(false) {
                    info!("host source is back");
                }
                self.apply(&worker, reports, true);
            }
        }
    }
}

impl RootContext for Root {
    fn on_configure(&mut self, size: usize) -> bool {
        let config = match Config::parse(&host::configuration(size)) {
            Ok(config) => config,
            Err(why) => {
                error!("prefix_router: {why}");
                return false;
            }
        };
        let Some(pool) = config.pools.first().cloned() else {
            return false;
        };
        log::set_max_level(config.log);
        self.source.replace(AdminSource::new(&pool.cluster));
        let format = HASH_FORMAT.to_string();
        let labels = [
            (names::VERSION, env!("CARGO_PKG_VERSION")),
            (names::COMMIT, COMMIT),
            (names::FORMAT, &format),
        ];
        host::record(host::gauge(&names::metric(names::BUILD_INFO, &labels)), 1);
        let worker = Worker::new(config, &pool, self.owner);
        // At once, or an older VM, whose listener drains, could apply its list until the first tick.
        self.holds(&pool, host::now_ms());
        // A static list is there from the first request on; every VM applies the same.
        if let HostSource::Static(addresses) = &pool.hosts {
            self.apply(&worker, reports_of(addresses), false);
        }
        worker.refresh();
        self.worker = Some(Rc::new(worker));
        host::tick_every(TICK_MS);
        true
    }

    fn on_tick(&mut self) {
        let Some(worker) = self.worker.clone() else {
            return;
        };
        let now_ms = host::now_ms();
        self.release_overdue(&worker, now_ms);
        worker.ledger.pay(&Shared);
        worker.ledger.beat(&Shared, now_ms);
        worker.refresh();
        self.keep_loads(&worker, now_ms);
        self.keep_hosts(&worker, now_ms);
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        let worker = self.worker.clone()?;
        Some(Box::new(Http::new(id, worker)))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}
