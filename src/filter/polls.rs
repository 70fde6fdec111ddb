//! Where this VM learns the pools' hosts: from Envoy's admin, one poll for all pools that share one,
//! or from lists in the config.
//!
//! Guarantee: only the VM that holds a pool's lease applies its hosts; losing a source keeps the
//! last list. Not here: which hosts are usable (hosts.rs), the tick (root.rs).

use std::cell::{Cell, RefCell};

use log::{error, info, warn};
use xxhash_rust::xxh64::xxh64;

use super::host::{self, Shared};
use super::pool::Pool;
use super::worker::Worker;
use crate::config::HostSource;
use crate::fleet::{self, Fleet};
use crate::hosts::{AdminSource, HostReport};
use crate::lease::{self, Lease, Owner};
use crate::load;
use crate::turns::{Question, Turns};

/// An answer of the admin later than this is a lost one.
const POLL_TIMEOUT_MS: u64 = 2000;
/// An answer that is missing for so long is not waited for any more, should Envoy never tell.
const POLL_LOST_MS: u64 = 2 * POLL_TIMEOUT_MS;
/// The lease outlives this many polls, so that a slow one does not cost it.
const LEASE_POLLS: u64 = 4;
/// Time between two applications of a list from the config.
const LIST_MS: u64 = 1000;

/// The sources of all pools.
pub struct Polls {
    /// This VM's name in the leases.
    owner: u64,
    admins: Vec<Admin>,
    fleet: Fleet,
    lists: Turns,
}

/// One admin and the pools whose hosts it tells.
struct Admin {
    /// The cluster that leads to it.
    cluster: String,
    /// Places of its pools in the config.
    pools: Vec<usize>,
    poll_ms: u64,
    source: RefCell<AdminSource>,
    fleet: RefCell<Fleet>,
    question: Question,
    lost: Cell<bool>,
}

impl Polls {
    /// No sources yet.
    pub fn new(owner: u64) -> Self {
        Self {
            owner,
            admins: Vec::new(),
            fleet: Fleet::default(),
            lists: Turns::default(),
        }
    }

    /// The sources of this worker's pools.
    pub fn set(&mut self, worker: &Worker) {
        self.admins.clear();
        for (place, pool) in worker.pools.iter().enumerate() {
            let HostSource::Admin { cluster, poll_ms } = &pool.config.hosts else {
                continue;
            };
            let poll_ms = u64::from(*poll_ms);
            match self
                .admins
                .iter_mut()
                .find(|admin| admin.cluster == *cluster)
            {
                Some(admin) => {
                    admin.pools.push(place);
                    admin.poll_ms = admin.poll_ms.min(poll_ms);
                }
                None => self.admins.push(Admin {
                    cluster: cluster.clone(),
                    pools: vec![place],
                    poll_ms,
                    source: RefCell::new(AdminSource::new([])),
                    fleet: RefCell::default(),
                    question: Question::default(),
                    lost: Cell::new(false),
                }),
            }
        }
        for admin in &self.admins {
            let pools = admin.pools(worker);
            let clusters = pools.map(|pool| pool.config.cluster.as_str());
            admin.source.replace(AdminSource::new(clusters));
        }
        // At once, or an older VM, whose listener drains, could apply its list until the first tick.
        self.held(worker, host::now_ms());
        // A static list is there from the first request on; every VM applies the same.
        worker
            .pools
            .iter()
            .for_each(|pool| self.apply_list(worker, pool));
        worker.refresh();
    }

    /// Takes or renews the leases of all pools; the ones that this VM holds.
    pub fn held<'w>(&self, worker: &'w Worker, now_ms: u64) -> Vec<&'w Pool> {
        let pools = worker.pools.iter();
        pools.filter(|pool| self.holds(pool, now_ms)).collect()
    }

    fn holds(&self, pool: &Pool, now_ms: u64) -> bool {
        let poll_ms = match &pool.config.hosts {
            HostSource::Admin { poll_ms, .. } => u64::from(*poll_ms),
            HostSource::Static(_) | HostSource::Learned => LIST_MS,
        };
        let own = Owner {
            id: self.owner,
            purpose: xxh64(pool.config.cluster.as_bytes(), 0),
        };
        let name = lease::of_pool(&pool.config.name);
        let lease = lease::take(&Shared, &name, own, now_ms, poll_ms * LEASE_POLLS);
        let was_rivalled = pool.is_rivalled.replace(lease == Lease::Rivalled);
        if lease == Lease::Rivalled && !was_rivalled {
            let (name, cluster) = (&pool.config.name, &pool.config.cluster);
            error!(
                "pool {name}: a younger configuration in this Envoy gives this name to another \
                 cluster than {cluster}, and its hosts count; pools of different clusters need \
                 different names"
            );
        }
        lease == Lease::Held
    }

    /// Polls and applies what is due of the pools that this VM holds.
    pub fn keep(&self, worker: &Worker, held: &[&Pool], now_ms: u64) {
        if self.lists.take(now_ms, LIST_MS) {
            held.iter().for_each(|pool| self.apply_list(worker, pool));
            let rivalled = worker.pools.iter().filter(|pool| pool.is_rivalled.get());
            rivalled.for_each(|pool| pool.metrics.source_error());
        }
        for admin in &self.admins {
            let is_held = |pool: &Pool| held.iter().any(|held| std::ptr::eq(*held, pool));
            if admin.pools(worker).any(is_held) && admin.is_due(now_ms) {
                admin.ask(worker, now_ms);
            }
        }
    }

    fn apply_list(&self, worker: &Worker, pool: &Pool) {
        match &pool.config.hosts {
            HostSource::Static(addresses) => {
                let reports = addresses.iter().map(|address| HostReport::usable(address));
                apply(&self.fleet, worker, pool, reports.collect());
            }
            HostSource::Learned => watch_learned(worker, pool),
            HostSource::Admin { .. } => return,
        }
        worker.refresh();
    }

    /// The answer to a call of this VM: its body if its status is 200, else what was wrong.
    pub fn answered(&self, worker: &Worker, call: u32, answer: Result<Vec<u8>, String>) {
        let is_asked = |admin: &&Admin| admin.question.answered(call);
        let Some(admin) = self.admins.iter().find(is_asked) else {
            return;
        };
        let answer = answer.and_then(|body| {
            let answer = admin.source.borrow_mut().answer(&body);
            answer.map_err(|why| why.to_string())
        });
        let reports = match answer {
            Ok(reports) => reports,
            Err(why) => return admin.failed(worker, &why),
        };
        let now_ms = host::now_ms();
        let mut applied: Vec<(&Pool, Vec<HostReport>)> = Vec::new();
        let mut missing = None;
        for (pool, reports) in admin.pools(worker).zip(reports) {
            if !self.holds(pool, now_ms) {
                continue; // A younger VM has taken over since this one asked.
            }
            match reports {
                Ok(reports) => {
                    apply(&admin.fleet.borrow(), worker, pool, reports.clone());
                    applied.push((pool, reports));
                }
                Err(why) => {
                    pool.metrics.source_error();
                    missing = Some(format!("{why}: {}", pool.config.cluster));
                }
            }
        }
        if applied.is_empty() && missing.is_none() {
            return;
        }
        admin.tell(worker, missing.as_deref());
        worker.refresh();
        admin.repair(worker, &applied, now_ms);
    }
}

impl Admin {
    fn pools<'w>(&self, worker: &'w Worker) -> impl Iterator<Item = &'w Pool> {
        self.pools
            .iter()
            .filter_map(|place| worker.pools.get(*place))
    }

    fn is_due(&self, now_ms: u64) -> bool {
        self.question.is_due(now_ms, self.poll_ms, POLL_LOST_MS)
    }

    fn ask(&self, worker: &Worker, now_ms: u64) {
        let path = self.source.borrow_mut().ask(now_ms);
        let call = host::call(&self.cluster, &path, POLL_TIMEOUT_MS);
        self.question.asked(call.ok(), now_ms);
        if call.is_err() {
            self.failed(worker, "the admin cluster is unknown or empty");
        }
    }

    fn failed(&self, worker: &Worker, why: &str) {
        self.pools(worker)
            .for_each(|pool| pool.metrics.source_error());
        self.tell(worker, Some(why));
    }

    /// Once per cause: the counter goes on.
    fn tell(&self, worker: &Worker, lost: Option<&str>) {
        let was_lost = self.lost.replace(lost.is_some());
        match lost {
            Some(why) if !was_lost => {
                worker.refresh();
                let mut pools = self.pools(worker);
                let has_list = pools.any(|pool| !pool.view().hosts.is_empty());
                warn!("host source lost, {}: {why}", until_back(has_list));
            }
            None if was_lost => info!("host source is back"),
            _ => {}
        }
    }

    fn repair(&self, worker: &Worker, applied: &[(&Pool, Vec<HostReport>)], now_ms: u64) {
        let polled: Vec<(&str, &[HostReport])> = applied
            .iter()
            .map(|(pool, reports)| (pool.config.name.as_str(), reports.as_slice()))
            .collect();
        let mut fleet = self.fleet.borrow_mut();
        let repaired = fleet.repair(&Shared, &worker.ledger, &polled, now_ms);
        for ((pool, _), repaired) in applied.iter().zip(repaired) {
            if repaired > 0 {
                pool.metrics.repaired(repaired);
                warn!(
                    "pool {}: {repaired} requests in flight taken back that Envoy no longer has",
                    pool.config.name
                );
            }
        }
    }
}

/// What the pools of a lost source go by.
fn until_back(has_list: bool) -> &'static str {
    match has_list {
        true => "keeping the last list",
        false => "no hosts known yet",
    }
}

/// Looks which of the hosts that answers made known have become silent.
fn watch_learned(worker: &Worker, pool: &Pool) {
    let now_ms = host::now_ms();
    worker.refresh();
    let mut reports = pool.view().members();
    mark_stalled(pool, &mut reports, now_ms);
    let name = &pool.config.name;
    let marked = fleet::set_stalled(&Shared, &worker.ledger, name, &reports, now_ms);
    if let Some(summary) = marked {
        info!("pool {name}: {summary}");
    }
}

fn mark_stalled(pool: &Pool, reports: &mut [HostReport], now_ms: u64) {
    if let Ok(loads) = load::read(&Shared) {
        let mut stalls = pool.stalls.borrow_mut();
        stalls.mark(&loads, &pool.view(), reports, now_ms);
    }
}

fn apply(fleet: &Fleet, worker: &Worker, pool: &Pool, mut reports: Vec<HostReport>) {
    let now_ms = host::now_ms();
    worker.refresh();
    mark_stalled(pool, &mut reports, now_ms);
    let name = &pool.config.name;
    if let Some(summary) = fleet.apply(&Shared, &worker.ledger, name, &reports, now_ms) {
        info!("pool {name}: {summary}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_source_that_never_told_hosts_has_no_last_list() {
        assert_eq!(until_back(false), "no hosts known yet");
        assert_eq!(until_back(true), "keeping the last list");
    }
}
