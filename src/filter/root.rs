//! The root context of one VM: configuration, tick, gauges.
//!
//! Guarantee: a bad configuration is refused with one line that says why. Not here: where hosts
//! come from (polls.rs), single requests (http.rs).

use std::cell::RefCell;
use std::rc::Rc;

use log::{error, info, warn};
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{ContextType, LogLevel};

use super::hooks::POOL_GONE_MS;
use super::host::{self, Shared};
use super::http::Http;
use super::metrics::{self, Metrics};
use super::polls::Polls;
use super::pool::Pool;
use super::worker::Worker;
use crate::config::Config;
use crate::discovery;
use crate::fleet;
use crate::lease::{self, Lease, Owner};
use crate::leftovers::Leftovers;
use crate::load::{FAILURES_HALVE_MS, NO_CHANGES};
use crate::names;
use crate::pool;
use crate::prefix::HASH_FORMAT;
use crate::route::Abstain;
use crate::series;
use crate::turns::Turns;
use crate::watchdog::Overdue;

/// Time between ticks: the shortest poll, and short against the watchdog's bounds.
const TICK_MS: u64 = 100;
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
    /// The name of this VM, or of its part for one configuration.
    owner: u64,
    polls: RefCell<Polls>,
    leftovers: RefCell<Leftovers>,
    gauges: Turns,
    fades: Turns,
}

impl Root {
    fn new(id: u32) -> Self {
        // In 2^-8 µs, as a filter before this one named its VMs: they may still run, and are older.
        let owner = lease::name(&Shared, host::now_us() << 8);
        Self {
            id,
            worker: None,
            owner,
            polls: RefCell::new(Polls::new(owner)),
            leftovers: RefCell::new(Leftovers::new(POOL_GONE_MS)),
            gauges: Turns::default(),
            fades: Turns::since(host::now_ms()),
        }
    }

    fn release_overdue(&self, worker: &Worker, now_ms: u64) {
        let bounds = worker.watchdog_bounds();
        let overdue = worker.watchdog.borrow_mut().overdue(now_ms, bounds);
        for Overdue { request, pool } in overdue {
            if let Some(metrics) = worker.metrics(pool) {
                metrics.abstained(Abstain::Watchdog);
            }
            host::release(request, self.id);
        }
    }

    /// Takes back what stopped VMs left, forgets pools that are gone, and lets the failures of all
    /// pools fade, if this VM holds the lease and it is time.
    fn keep_loads(&self, worker: &Worker, now_ms: u64) {
        let own = Owner {
            id: self.owner,
            purpose: 0,
        };
        if lease::take(&Shared, lease::OF_LOADS, own, now_ms, LOADS_LEASE_MS) != Lease::Held {
            return;
        }
        for (pool, requests) in fleet::take_back(&Shared, &worker.ledger) {
            Metrics::repaired_in(&pool, requests);
            warn!("pool {pool}: {requests} requests in flight taken back that a stopped VM left");
        }
        for pool in self.leftovers.borrow_mut().find(&Shared, now_ms) {
            fleet::forget(&Shared, &worker.ledger, &pool);
            pool::forget(&Shared, &pool);
            discovery::forget(&Shared, &pool);
            metrics::zero_gauges(&pool, &series::labels(&Shared, &pool));
            info!("pool {pool}: forgotten, no configuration of this Envoy has it any more");
        }
        if self.fades.take(now_ms, FAILURES_HALVE_MS) {
            worker.ledger.transact(&Shared, |loads| {
                loads.halve_failures();
                ((), NO_CHANGES)
            });
        }
    }

    fn write_gauges(&self, worker: &Worker, held: &[&Pool], now_ms: u64) {
        if !self.gauges.take(now_ms, GAUGES_MS) {
            return;
        }
        for pool in held {
            let (view, metrics) = (pool.view(), &pool.metrics);
            for (state, count) in fleet::states(&view) {
                metrics.gauge(names::HOSTS, names::STATE, state, count);
            }
            let loads = fleet::loads(&Shared, &view);
            let labels_max = worker.config.host_series_max;
            for (address, load) in series::labelled(&Shared, &pool.config.name, &loads, labels_max)
            {
                let (in_flight, pending) = (u64::from(load.in_flight), u64::from(load.pending));
                metrics.gauge(names::IN_FLIGHT, names::UPSTREAM_HOST, &address, in_flight);
                metrics.gauge(
                    names::PENDING_TOKENS,
                    names::UPSTREAM_HOST,
                    &address,
                    pending,
                );
            }
        }
    }
}

impl Context for Root {
    fn on_http_call_response(&mut self, call: u32, headers: usize, body: usize, _trailers: usize) {
        let Some(worker) = self.worker.clone() else {
            return;
        };
        // Without headers the call was reset, and asking for one would panic (ENVOY.md 10).
        let status = (headers > 0)
            .then(host::call_status)
            .flatten()
            .unwrap_or_default();
        let answer = match status.as_slice() {
            b"200" => Ok(host::call_body(body)),
            _ => {
                let status = String::from_utf8_lossy(&status).into_owned();
                Err(format!("the admin answered {status:?}"))
            }
        };
        self.polls.borrow().answered(&worker, call, answer);
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
        log::set_max_level(config.log);
        let format = HASH_FORMAT.to_string();
        let labels = [
            (names::VERSION, env!("CARGO_PKG_VERSION")),
            (names::COMMIT, COMMIT),
            (names::FORMAT, &format),
        ];
        host::record(host::gauge(&names::metric(names::BUILD_INFO, &labels)), 1);
        let worker = Worker::new(config, self.owner);
        self.polls.borrow_mut().set(&worker);
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
        for pool in &worker.pools {
            pool.end_overdue(now_ms, &worker.ledger);
        }
        worker.refresh();
        worker.look_up_hold();
        self.keep_loads(&worker, now_ms);
        let polls = self.polls.borrow();
        let held = polls.held(&worker, now_ms);
        self.write_gauges(&worker, &held, now_ms);
        polls.keep(&worker, &held, now_ms);
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        let worker = self.worker.clone()?;
        Some(Box::new(Http::new(id, worker)))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}
