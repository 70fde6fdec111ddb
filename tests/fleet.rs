//! Proves that hosts that come, go, fail and return, in two pools that share some, never lose or
//! share a slot wrongly: every count equals a model of the running requests at each step.
//! A failing case is printed and can be replayed by its seed.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use prefix_router::fleet::{self, Fleet};
use prefix_router::hosts::{HostReport, State};
use prefix_router::load::{self, Booking, Change, Ledger, NO_CHANGES, Seat};
use prefix_router::pool::View;
use prefix_router::store::MemoryStore;
use proptest::prelude::*;

const POOLS: [&str; 2] = ["llm", "chat"];

/// More than the slots that are kept for a return, so that slots are also given away.
const ADDRESSES: usize = 90;

#[derive(Clone, Debug)]
enum Step {
    /// A source reports `count` hosts from `first` on, every third from `failed` on unfit.
    Report {
        pool: usize,
        first: usize,
        count: usize,
        failed: usize,
    },
    /// A worker, which may know only an old table, books a request on one of its hosts.
    Book {
        pool: usize,
        host: usize,
        stale: bool,
    },
    /// A request ends.
    End { request: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pool = 0..POOLS.len();
    let step = prop_oneof![
        2 => (pool.clone(), 0..ADDRESSES, 0..40_usize, 0..9_usize).prop_map(
            |(pool, first, count, failed)| Step::Report { pool, first, count, failed }
        ),
        3 => (pool, any::<usize>(), any::<bool>())
            .prop_map(|(pool, host, stale)| Step::Book { pool, host, stale }),
        2 => any::<usize>().prop_map(|request| Step::End { request }),
    ];
    proptest::collection::vec(step, 0..120)
}

fn address(index: usize) -> String {
    format!("10.0.0.{}:8000", index % ADDRESSES)
}

fn reports(first: usize, count: usize, failed: usize) -> Vec<HostReport> {
    let report = |index: usize| HostReport {
        state: if index >= failed && index.is_multiple_of(3) {
            State::Failed
        } else {
            State::Usable
        },
        ..HostReport::usable(&address(index))
    };
    (first..first + count).map(report).collect()
}

/// What should be: who runs where, by address and not by slot.
#[derive(Default)]
struct Model {
    reported: [BTreeMap<String, State>; POOLS.len()],
    running: Vec<(String, Booking)>,
}

struct Proxy {
    store: MemoryStore,
    ledger: Ledger,
    fleet: Fleet,
    /// What workers know that have not looked lately.
    stale: [View; POOLS.len()],
    model: Model,
}

impl Proxy {
    fn new() -> Self {
        Self {
            store: MemoryStore::new(),
            ledger: Ledger::default(),
            fleet: Fleet::default(),
            stale: <[View; POOLS.len()]>::default(),
            model: Model::default(),
        }
    }

    fn view(&self, pool: usize) -> View {
        fleet::view(&self.store, POOLS[pool]).unwrap_or_default()
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Report {
                pool,
                first,
                count,
                failed,
            } => {
                self.stale[pool] = self.view(pool);
                let reports = reports(first, count, failed);
                self.fleet
                    .apply(&self.store, &self.ledger, POOLS[pool], &reports, 1000);
                let states = reports.into_iter();
                self.model.reported[pool] = states
                    .map(|report| (report.address, report.state))
                    .collect();
            }
            Step::Book { pool, host, stale } => self.book(pool, host, stale),
            Step::End { request } => {
                if self.model.running.is_empty() {
                    return;
                }
                let request = request % self.model.running.len();
                let (_, booking) = self.model.running.swap_remove(request);
                self.ledger.apply(&self.store, Change::Release(booking));
            }
        }
    }

    fn book(&mut self, pool: usize, host: usize, stale: bool) {
        let view = match stale {
            true => self.stale[pool].clone(),
            false => self.view(pool),
        };
        let hosts = view.candidates();
        if hosts.is_empty() {
            return;
        }
        let seat = hosts[host % hosts.len()].seat;
        let booking = Booking { seat, pending: 7 };
        // As a worker does it: nothing is booked by a table that is no longer in force.
        let booked = self.ledger.transact(&self.store, |loads| {
            if loads.hosts_version() == view.version {
                (true, [Some(Change::Book(booking)), None])
            } else {
                (false, NO_CHANGES)
            }
        });
        if booked {
            let address = view.address_of(seat).unwrap().to_owned();
            self.model.running.push((address, booking));
        }
    }

    fn check(&self) {
        let loads = load::read(&self.store).unwrap();
        for (pool, name) in POOLS.iter().enumerate() {
            let view = self.view(pool);
            let members: BTreeMap<_, _> = view
                .hosts
                .iter()
                .filter_map(|host| Some((host.address.clone(), host.state?)))
                .collect();
            assert_eq!(members, self.model.reported[pool], "hosts of {name}");
            let mut seats: Vec<Seat> = view.hosts.iter().map(|host| host.seat).collect();
            seats.sort_by_key(|seat| seat.slot);
            seats.dedup_by_key(|seat| seat.slot);
            assert_eq!(seats.len(), view.hosts.len(), "two hosts share a slot");
            for (address, booking) in &self.model.running {
                assert_eq!(
                    view.seat_of(address),
                    Some(booking.seat),
                    "{address} lost its slot while a request runs on it"
                );
            }
            for host in &view.hosts {
                let running = self.model.running.iter();
                let running = running
                    .filter(|(address, _)| *address == host.address)
                    .count();
                let load = loads.of(host.seat);
                assert_eq!(load.in_flight as usize, running, "{}", host.address);
                assert_eq!(load.pending as usize, running * 7, "{}", host.address);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn flaps_never_lose_or_share_a_slot_wrongly(steps in steps()) {
        let mut proxy = Proxy::new();
        for step in &steps {
            proxy.step(step);
            proxy.check();
        }
        for (_, booking) in std::mem::take(&mut proxy.model.running) {
            proxy.ledger.apply(&proxy.store, Change::Release(booking));
        }
        proxy.check();
    }
}
