//! Our router: the filter's own code over an in-memory stand-in for the proxy's shared data.
//!
//! Guarantee: key, index, cost, booking, release and learning are the filter's (pool.rs,
//! request.rs and what they call); nothing of them is repeated here. Not here: Envoy, so no
//! retries and no lost races.

use prefix_router::cost::Constants;
use prefix_router::hosts::State;
use prefix_router::learned::Report;
use prefix_router::load::{Changes, Ledger, NO_CHANGES, Seat, Slot};
use prefix_router::placement::HostId;
use prefix_router::pool::{Host, Placed, Router, Rule, Rules, View};
use prefix_router::popularity::Heat;
use prefix_router::request::Request;
use prefix_router::route::{Bounds, Decision};
use prefix_router::store::MemoryStore;
use rand_chacha::ChaCha8Rng;
use rustc_hash::FxHashMap;

use super::{Ask, Chosen, Fleet, Policy, Start, Usage, load};

/// One answer in so many is learned from: the filter's default.
const LEARN_EVERY: u64 = 8;

pub(super) struct Ours {
    router: Router,
    view: View,
    store: MemoryStore,
    ledger: Ledger,
    requests: FxHashMap<u64, (Request, Option<Placed>)>,
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
            // The study's hosts take their share at once.
            slow_start_ms: 0,
            share: 1.0,
            observes: false,
        };
        let mut ours = Self {
            router: Router::new("pool", start.rules.unwrap_or(rules)),
            view: View::default(),
            store: MemoryStore::new(),
            ledger: Ledger::default(),
            requests: FxHashMap::default(),
        };
        ours.hosts_changed(start.hosts, start.names);
        ours
    }

    fn apply(&self, changes: Changes) {
        for change in changes.into_iter().flatten() {
            self.ledger.apply(&self.store, change);
        }
    }

    fn place(&self, ask: &Ask<'_>, request: &mut Request) -> Option<Placed> {
        let hosts = self.view.candidates().len();
        let prompt = &ask.prepared.prompt;
        let plan = self.router.plan(prompt, hosts, &self.store)?;
        let (view, ledger) = (&self.view, &self.ledger);
        let placed = self
            .router
            .place(&plan, view, request, 0, &self.store, ledger);
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
        let placed = self.place(ask, &mut request);
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
        self.requests.insert(ask.id, (request, placed));
        chosen
    }

    fn first_byte(&mut self, id: u64, _now_ns: u64) {
        let found = self.requests.get_mut(&id);
        let changes = found.map_or(NO_CHANGES, |(request, _)| request.answered());
        self.apply(changes);
    }

    fn ended(&mut self, id: u64, usage: Option<Usage>, _now_ns: u64) {
        let Some((mut request, placed)) = self.requests.remove(&id) else {
            return;
        };
        self.apply(request.end());
        if let (Some(usage), Some(placed)) = (usage, placed)
            && id.is_multiple_of(LEARN_EVERY)
        {
            let report = Report {
                prompt_tokens: Some(u64::from(usage.prompt_tokens)),
                cached_tokens: Some(u64::from(usage.cached_tokens)),
            };
            self.router.learn(&placed, report, &self.store);
        }
    }

    fn hosts_changed(&mut self, hosts: &[u32], names: &[String]) {
        let version = self.view.version + 1;
        self.view = view(version, names, |number| hosts.contains(&number));
        take_seats(&self.view, &self.ledger, &self.store);
    }
}

/// The hosts of these names as a worker sees them, all of weight 1.
pub(crate) fn view(version: u32, names: &[String], is_usable: impl Fn(u32) -> bool) -> View {
    let known = names.iter().zip(0..).map(|(name, number)| Host {
        address: name.clone(),
        seat: seat(number),
        id: HostId::of(name),
        epoch: 0,
        weight: 1,
        since_ms: 0,
        missing_ms: 0,
        zone: String::new(),
        state: is_usable(number).then_some(State::Usable),
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
