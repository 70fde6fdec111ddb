//! Our router: the filter's own code over an in-memory stand-in for the proxy's shared data.
//!
//! Guarantee: key, index, cost, booking, release and learning are the filter's (pool.rs,
//! request.rs and what they call); nothing of them is repeated here. Not here: Envoy, so no
//! retries and no lost races.

use std::borrow::Cow;

use prefix_router::cost::Constants;
use prefix_router::hosts::State;
use prefix_router::learned::Report;
use prefix_router::load::{Changes, Ledger, NO_CHANGES, Seat, Slot};
use prefix_router::placement::HostId;
use prefix_router::pool::{Host, Placed, Router, Rule, Rules, View};
use prefix_router::popularity::Heat;
use prefix_router::request::Request;
use prefix_router::route::{Bounds, Decision};
use prefix_router::store::{Cas, MemoryStore, Store, StoreError, Versioned};
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use rustc_hash::FxHashMap;

use super::{Ask, Chosen, Fleet, Policy, Start, Usage, load};

/// One answer in so many is learned from: the filter's default.
const LEARN_EVERY: u64 = 8;
/// The filter's default.
const SLOW_START_MS: u64 = 30_000;
/// Virtual time is in nanoseconds, the filter's in milliseconds.
const NS_PER_MS: u64 = 1_000_000;

pub(super) struct Ours {
    workers: Vec<Worker>,
    view: View,
    store: MemoryStore,
    ledger: Ledger,
    requests: FxHashMap<u64, Sent>,
    /// Since when each usable host is one.
    since_ms: FxHashMap<u32, u64>,
}

/// One of Envoy's threads: what it learns is its own.
struct Worker {
    router: Router,
    /// Its own index, where there is no shared one.
    index: Option<MemoryStore>,
}

/// A request on its way.
struct Sent {
    request: Request,
    placed: Option<Placed>,
    worker: usize,
}

/// The proxy's shared data as one worker sees it.
struct Seen<'a> {
    shared: &'a MemoryStore,
    index: Option<&'a MemoryStore>,
}

impl Seen<'_> {
    fn of(&self, key: &str) -> &MemoryStore {
        match self.index {
            Some(index) if key.contains(".index.") => index,
            _ => self.shared,
        }
    }
}

impl Store for Seen<'_> {
    fn read(&self, key: &str) -> Result<Versioned, StoreError> {
        self.of(key).read(key)
    }

    fn write(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), StoreError> {
        self.of(key).write(key, value, cas)
    }
}

impl Ours {
    pub(super) fn adaptive(start: &Start<'_>, one_gateway: bool) -> Self {
        let rule = Rule::Adaptive {
            heat: Heat::default(),
            constants: Constants::default(),
            one_gateway,
        };
        Self::new(start, rule, None)
    }

    /// The same with an index in each worker.
    pub(super) fn with_local_index(start: &Start<'_>) -> Self {
        let mut ours = Self::adaptive(start, false);
        for worker in &mut ours.workers {
            worker.index = Some(MemoryStore::new());
        }
        ours
    }

    pub(super) fn fixed(start: &Start<'_>, limit: u32) -> Self {
        Self::new(start, Rule::Fixed, Some(limit))
    }

    fn new(start: &Start<'_>, rule: Rule, limit: Option<u32>) -> Self {
        let bounds = Bounds {
            limit,
            panic_rule: true,
        };
        let rules = Rules {
            rule,
            bounds,
            rejects: false,
            slow_start_ms: SLOW_START_MS,
            share: 1.0,
            observes: false,
        };
        let rules = start.rules.unwrap_or(rules);
        let worker = |_| Worker {
            router: Router::new("pool", rules),
            index: None,
        };
        let mut ours = Self {
            workers: (0..start.workers.max(1)).map(worker).collect(),
            view: View::default(),
            store: MemoryStore::new(),
            ledger: Ledger::default(),
            requests: FxHashMap::default(),
            since_ms: FxHashMap::default(),
        };
        ours.hosts_changed(start.hosts, start.names, 0);
        ours
    }

    fn apply(&self, changes: Changes) {
        for change in changes.into_iter().flatten() {
            self.ledger.apply(&self.store, change);
        }
    }

    fn seen<'a>(&'a self, worker: &'a Worker) -> Seen<'a> {
        Seen {
            shared: &self.store,
            index: worker.index.as_ref(),
        }
    }

    fn place(&self, ask: &Ask<'_>, worker: usize, request: &mut Request) -> Option<Placed> {
        let worker = self.workers.get(worker)?;
        let hosts = self.view.candidates().len();
        let mut prompt = Cow::Borrowed(&ask.prepared.prompt);
        if !ask.streamed {
            prompt.to_mut().stream = false;
        }
        let store = self.seen(worker);
        let now_ms = ask.now_ns / NS_PER_MS;
        let plan = worker.router.plan(&prompt, hosts, &store)?;
        let (view, ledger) = (&self.view, &self.ledger);
        let placed = worker
            .router
            .place(&plan, view, request, now_ms, &store, ledger);
        placed.ok()
    }
}

/// A host's number is its slot: hosts of a run are never replaced by others.
fn seat(host: u32) -> Seat {
    Seat {
        slot: Slot(host as u16),
        generation: 1,
    }
}

impl Policy for Ours {
    fn choose(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>, rng: &mut ChaCha8Rng) -> Chosen {
        let mut request = Request::default();
        let worker = match self.workers.len() {
            1 => 0,
            workers => rng.random_range(0..workers),
        };
        let placed = self.place(ask, worker, &mut request);
        let placement = placed.as_ref().map(|placed| &placed.placement);
        let first = placement.and_then(|placement| placement.hosts.first());
        let chosen = match first {
            Some(host) => Chosen {
                host: u32::from(host.seat.slot.0),
                diverted: placement.is_some_and(|placement| {
                    !matches!(placement.decision, Decision::Home | Decision::Match)
                }),
            },
            None => {
                // Left to the proxy, whose own policy is least request.
                let host = load::least_loaded(fleet, rng);
                self.apply(request.served_by(Some(seat(host))));
                Chosen::at(host)
            }
        };
        let sent = Sent {
            request,
            placed,
            worker,
        };
        self.requests.insert(ask.id, sent);
        chosen
    }

    fn first_byte(&mut self, id: u64, now_ns: u64) {
        let Some(sent) = self.requests.get_mut(&id) else {
            return;
        };
        let worker = self.workers.get(sent.worker);
        let changes = match (worker, &sent.placed) {
            (Some(worker), Some(placed)) => {
                let router = &worker.router;
                let [given, _] = router.give_back(placed, &mut sent.request);
                let now_ms = || now_ns / NS_PER_MS;
                let [answered, _] = router.answered(placed, &mut sent.request, true, now_ms);
                [given, answered]
            }
            _ => sent.request.answered(),
        };
        self.apply(changes);
    }

    fn ended(&mut self, id: u64, usage: Option<Usage>, _now_ns: u64) {
        let Some(mut sent) = self.requests.remove(&id) else {
            return;
        };
        if let (Some(worker), Some(placed)) = (self.workers.get(sent.worker), &sent.placed) {
            self.apply(worker.router.give_back(placed, &mut sent.request));
        }
        self.apply(sent.request.end());
        if let (Some(usage), Some(placed)) = (usage, sent.placed)
            && id.is_multiple_of(LEARN_EVERY)
            && let Some(worker) = self.workers.get(sent.worker)
        {
            let report = Report {
                prompt_tokens: Some(u64::from(usage.prompt_tokens)),
                cached_tokens: Some(u64::from(usage.cached_tokens)),
            };
            worker.router.learn(&placed, report, &self.seen(worker));
        }
    }

    fn hosts_changed(&mut self, hosts: &[u32], names: &[String], now_ns: u64) {
        let version = self.view.version + 1;
        self.since_ms.retain(|host, _| hosts.contains(host));
        for &host in hosts {
            self.since_ms.entry(host).or_insert(now_ns / NS_PER_MS);
        }
        self.view = view(version, names, |host| self.since_ms.get(&host).copied());
        take_seats(&self.view, &self.ledger, &self.store);
    }
}

/// The hosts of these names as a worker sees them, all of weight 1, with the time since when each is
/// usable, if it is.
pub(crate) fn view(
    version: u32,
    names: &[String],
    usable_since_ms: impl Fn(u32) -> Option<u64>,
) -> View {
    let known = names.iter().zip(0..).map(|(name, number)| Host {
        address: name.clone(),
        seat: seat(number),
        id: HostId::of(name),
        epoch: 0,
        weight: 1,
        since_ms: usable_since_ms(number).unwrap_or_default(),
        missing_ms: 0,
        zone: String::new(),
        state: usable_since_ms(number).map(|_| State::Usable),
    });
    View::new(version, known.collect())
}

/// Gives the hosts of a view their places in the loads.
pub(crate) fn take_seats(view: &View, ledger: &Ledger, store: &MemoryStore) {
    ledger.transact(store, |loads| {
        view.hosts.iter().for_each(|host| loads.seat(host.seat));
        loads.set_hosts_version(view.version);
        ((), NO_CHANGES)
    });
}
