//! What the requests of one VM share: configuration, pools, ledger, watchdog.
//!
//! Guarantee: nothing here is borrowed while the proxy is called back. Not here: callbacks, what a
//! pool has for itself (pool.rs).

use std::cell::{Cell, RefCell};

use log::error;

use super::host::{self, Shared};
use super::metrics::Metrics;
use super::pool::Pool;
use crate::config::Config;
use crate::fleet;
use crate::hold;
use crate::load::{self, Changes, Ledger, NO_CHANGES, Seat};
use crate::names;
use crate::payload::Plan as ReadPlan;
use crate::pool::{Placed, View};
use crate::select::Selector;
use crate::usage::Sampler;
use crate::watchdog::{Bounds, Watchdog};

/// What the requests of one VM share.
pub struct Worker {
    /// The filter's configuration.
    pub config: Config,
    /// How bodies are read as long as only they say which pool takes them.
    pub plan: ReadPlan,
    /// Its pools, in its order.
    pub pools: Vec<Pool>,
    /// Which of them serves a request.
    pub selector: Selector,
    /// The metrics of requests that no pool serves, if not one of the pools has them.
    no_pool: Option<Metrics>,
    /// The requests that are held.
    pub watchdog: RefCell<Watchdog>,
    /// This VM's hand in the loads.
    pub ledger: Ledger,
    /// Where it is kept how much may be held. Bodies are held before their pool is known, so it is
    /// one place for all pools: the first one's.
    hold_key: String,
    /// The same as it was at the last tick.
    hold_seen: Cell<Option<u64>>,
    hosts_version: Cell<u32>,
    sampler: Cell<Sampler>,
}

impl Worker {
    /// A worker for this configuration, in the VM of this name.
    pub fn new(config: Config, owner: u64) -> Self {
        let default = config.pools.iter().position(|pool| pool.default);
        let first = config.pools.first().map_or("", |pool| pool.name.as_str());
        let hold_key = hold::key(first);
        hold::forget(&Shared, &hold_key);
        Self {
            pools: config
                .pools
                .iter()
                .map(|pool| Pool::new(pool, &config))
                .collect(),
            selector: Selector::new(config.pools.iter().map(|pool| &pool.matches), default),
            no_pool: default.is_none().then(|| Metrics::new(names::NO_POOL)),
            watchdog: RefCell::default(),
            ledger: Ledger::of(owner, host::now_ms()),
            hold_seen: Cell::default(),
            hold_key,
            hosts_version: Cell::new(0),
            plan: ReadPlan::new(&config.read),
            sampler: Cell::new(Sampler::new(config.learning.sample)),
            config,
        }
    }

    /// The pool of this place in the configuration.
    pub fn pool(&self, pool: Option<usize>) -> Option<&Pool> {
        self.pools.get(pool?)
    }

    /// The metrics that count a request of this pool, or of none. A request that no pool serves
    /// goes where the default pool is, and is counted there.
    pub fn metrics(&self, pool: Option<usize>) -> Option<&Metrics> {
        let pool = self.pool(pool.or(self.selector.own_pool()));
        pool.map(|pool| &pool.metrics).or(self.no_pool.as_ref())
    }

    /// Whether the next answer is read for its usage.
    pub fn samples(&self) -> bool {
        let mut sampler = self.sampler.get();
        let taken = sampler.take();
        self.sampler.set(sampler);
        taken
    }

    /// Whether the first choice goes out by itself, in any pool.
    pub fn strict_health(&self) -> bool {
        self.config.pools.iter().any(|pool| pool.strict_health)
    }

    /// The place of a host in the loads, whichever pools it is in.
    pub fn seat_of(&self, address: &str) -> Option<Seat> {
        // Every view has all hosts.
        let known = || self.pools.first()?.view().seat_of(address);
        known().or_else(|| {
            // Another worker may have made it known since the last tick.
            self.refresh();
            known()
        })
    }

    /// Takes in where a request went and what came of it, for pools whose hosts nothing lists.
    pub fn learn_host(&self, pool: Option<usize>, placed: Option<&Placed>, reached: Option<&str>) {
        let pool = self.pool(pool.or(self.selector.own_pool()));
        if pool.is_some_and(|pool| pool.learn_host(placed, reached, &self.ledger)) {
            self.refresh();
        }
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

    /// How much of a body of this declared length is waited for.
    pub fn bytes_max(&self, declared: Option<u64>) -> u64 {
        let configured = u64::from(self.config.request.body_bytes_max);
        let learned = match declared {
            Some(..=hold::SMALL_BYTES) => self.hold_seen.get(),
            _ => hold::learned(&Shared, &self.hold_key),
        };
        hold::bytes_max(learned, declared, configured)
    }

    /// The tick: looks up what other workers have learned of the bodies that may be held.
    pub fn look_up_hold(&self) {
        self.hold_seen.set(hold::learned(&Shared, &self.hold_key));
    }

    /// The same, now that so much of it is there.
    pub fn bytes_max_now(&self, bytes_max: u64, buffered: u64) -> u64 {
        let learned = || hold::learned(&Shared, &self.hold_key);
        hold::bytes_max_now(bytes_max, buffered, learned)
    }

    /// Envoy refused a body that was held, when it had this much of it.
    pub fn body_refused(&self, pool: Option<usize>, buffered: u64) {
        if let Some(metrics) = self.metrics(pool) {
            metrics.body_refused();
        }
        let is_news = hold::learn(&Shared, &self.hold_key, buffered);
        self.look_up_hold();
        if is_news {
            error!(
                "Envoy refuses bodies that are held to be read (413, at {buffered} bytes): set \
                 request_body_buffer_limit of the virtual host above body_bytes_max; large bodies \
                 are placed by their first bytes until Envoy restarts or the filter gets another \
                 configuration"
            );
        }
    }

    /// Takes new views if the loads say that there is a newer host table.
    pub fn refresh(&self) {
        let newest = load::read(&Shared).map_or(0, |loads| loads.hosts_version());
        if newest == self.hosts_version.get() {
            return;
        }
        let names = self.config.pools.iter().map(|pool| pool.name.as_str());
        let Some(views) = fleet::views(&Shared, names) else {
            return;
        };
        self.hosts_version
            .set(views.first().map_or(0, |view: &View| view.version));
        for (pool, view) in self.pools.iter().zip(views) {
            pool.set_view(view);
        }
    }
}
