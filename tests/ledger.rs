//! Proves that the load counters equal a model of them at each step, whatever order the proxy's
//! callbacks come in, over several workers, lost races, refused writes, panics, VMs that are slow or
//! dead, host flaps, and pending tokens that end by time.
//! A failing case is printed and can be replayed by its seed.

#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::collections::BTreeSet;
use std::convert::Infallible;

use prefix_router::index::HostRef;
use prefix_router::load::{self, Changes, Ledger, STOPPED_MS, Seat, Slot};
use prefix_router::placement::HostId;
use prefix_router::prefill::{Due, Prefill};
use prefix_router::prefix::Key;
use prefix_router::request::Request;
use prefix_router::route::{self, Bounds, Candidate};
use prefix_router::store::{Cas, MemoryStore, Store, StoreError, Versioned};
use proptest::prelude::*;

const WORKERS: usize = 3;
const HOSTS: usize = 4;

/// Shared data that loses races and refuses writes when told to.
struct Flaky {
    inner: MemoryStore,
    stale: Cell<u32>,
    refused: Cell<u32>,
}

impl Store for Flaky {
    fn read(&self, key: &str) -> Result<Versioned, StoreError> {
        self.inner.read(key)
    }

    fn write(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), StoreError> {
        for (left, error) in [
            (&self.stale, StoreError::Stale),
            (&self.refused, StoreError::Refused),
        ] {
            if let Some(fewer) = left.get().checked_sub(1) {
                left.set(fewer);
                return Err(error);
            }
        }
        self.inner.write(key, value, cas)
    }
}

/// One callback or one event. Numbers choose among what is there, modulo how many there are.
#[derive(Clone, Debug)]
enum Step {
    /// A request is placed, perhaps before its body has ended.
    Place {
        worker: usize,
        key: u64,
        pending: u32,
        stream: bool,
        uploads: bool,
    },
    /// The body of a request ends.
    Uploaded { request: usize },
    /// Response headers name the host; `None` is a host that is not ours.
    ServedBy { request: usize, host: Option<usize> },
    /// The first byte of an answer.
    Answered { request: usize },
    /// A whole answer, which its end settles.
    Completed { request: usize },
    /// An answer that is an error.
    Failed { request: usize },
    /// The end of a request, also a second time.
    End { request: usize },
    /// A VM dies with all its requests; none of their callbacks comes any more. Debts die too.
    Panic { worker: usize },
    /// The proxy's own count shows what a panic left behind on a host.
    Repair { host: usize },
    /// A VM is replaced by one that knows nothing; its requests go on in the old one.
    Reload { worker: usize },
    /// The host leaves, its slot goes to another, and that one is new.
    Flap { host: usize },
    /// The next writes lose their race.
    LoseRaces { count: u32 },
    /// The next write is refused.
    Refuse,
    /// The worker's tick.
    Tick { worker: usize },
    /// Time passes.
    Pass { ms: u64 },
    /// Time passes in which only the VMs that are not slow say that they run; then what the others
    /// had in flight is taken back.
    TakeBack { slow: BTreeSet<usize> },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let any_request = || any::<usize>();
    let step = prop_oneof![
        8 => (0..WORKERS, 0..12_u64, 0..5000_u32, any::<bool>(), any::<bool>())
            .prop_map(|(worker, key, pending, stream, uploads)| {
                Step::Place { worker, key, pending, stream, uploads }
            }),
        4 => any_request().prop_map(|request| Step::Uploaded { request }),
        4 => (0..1000_u64).prop_map(|ms| Step::Pass { ms }),
        4 => (any_request(), proptest::option::weighted(0.9, 0..HOSTS))
            .prop_map(|(request, host)| Step::ServedBy { request, host }),
        4 => any_request().prop_map(|request| Step::Answered { request }),
        2 => any_request().prop_map(|request| Step::Completed { request }),
        2 => any_request().prop_map(|request| Step::Failed { request }),
        8 => any_request().prop_map(|request| Step::End { request }),
        1 => (0..WORKERS).prop_map(|worker| Step::Panic { worker }),
        1 => (0..HOSTS).prop_map(|host| Step::Repair { host }),
        1 => (0..WORKERS).prop_map(|worker| Step::Reload { worker }),
        1 => (0..HOSTS).prop_map(|host| Step::Flap { host }),
        2 => (1..20_u32).prop_map(|count| Step::LoseRaces { count }),
        1 => Just(Step::Refuse),
        4 => (0..WORKERS).prop_map(|worker| Step::Tick { worker }),
        2 => proptest::collection::btree_set(0..8_usize, 0..4)
            .prop_map(|slow| Step::TakeBack { slow }),
    ];
    proptest::collection::vec(step, 1..300)
}

/// What a request should count as: where, and how many pending tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Counted {
    seat: Seat,
    pending: u32,
}

struct Tracked {
    request: Request,
    /// `None` after its VM has died.
    ledger: Option<usize>,
    counted: Option<Counted>,
    /// What is pending once its body has ended.
    uploads: Option<u32>,
    complete: bool,
    /// Where its VM keeps its pending tokens, and until when, if the answer is not streamed.
    due: Option<(Due, u64)>,
    ended: bool,
}

/// A VM's hand, by a number that is its place among all.
fn ledger(number: usize, now_ms: u64) -> Ledger {
    Ledger::of(number as u64 + 1, now_ms)
}

struct World {
    store: Flaky,
    /// Grows by a reload: requests keep the ledger of their VM.
    ledgers: Vec<Ledger>,
    /// What each ledger's VM ends by time.
    prefills: Vec<Prefill>,
    /// Which ledger each worker uses now.
    current: [usize; WORKERS],
    requests: Vec<Tracked>,
    seats: [Seat; HOSTS],
    /// First bytes that each host has given.
    answers: [u32; HOSTS],
    /// What dead VMs have left on hosts.
    leaked: Vec<Counted>,
    /// Whether what each VM has in flight is known apart; otherwise the proxy's count repairs.
    apart: bool,
    /// Ledgers of dead VMs.
    dead: BTreeSet<usize>,
    /// Ledgers whose requests were taken back, and that have not written since.
    taken_back: BTreeSet<usize>,
    now_ms: u64,
    /// Hosts whose pending tokens are an estimate since a repair.
    estimated: [bool; HOSTS],
    bounds: Bounds,
}

impl World {
    fn new(limit: Option<u32>, apart: bool) -> Self {
        let seat = |slot| Seat {
            slot: Slot(slot),
            generation: 1,
        };
        let world = Self {
            store: Flaky {
                inner: MemoryStore::new(),
                stale: Cell::new(0),
                refused: Cell::new(0),
            },
            ledgers: (0..WORKERS).map(|worker| ledger(worker, 0)).collect(),
            prefills: (0..WORKERS).map(|_| Prefill::default()).collect(),
            current: std::array::from_fn(|worker| worker),
            requests: Vec::new(),
            seats: std::array::from_fn(|host| seat(host as u16)),
            answers: [0; HOSTS],
            leaked: Vec::new(),
            apart,
            dead: BTreeSet::new(),
            taken_back: BTreeSet::new(),
            now_ms: 0,
            estimated: [false; HOSTS],
            bounds: Bounds {
                limit,
                panic_rule: false,
            },
        };
        for seat in world.seats {
            world.take_seat(seat);
        }
        world
    }

    fn take_seat(&self, seat: Seat) {
        Ledger::default().transact(&self.store.inner, |loads| {
            loads.seat(seat);
            loads.set_apart(seat.slot, self.apart);
            ((), load::NO_CHANGES)
        });
    }

    /// Another VM's first ledger.
    fn add_ledger(&mut self) -> usize {
        self.ledgers.push(ledger(self.ledgers.len(), self.now_ms));
        self.prefills.push(Prefill::default());
        self.ledgers.len() - 1
    }

    fn candidates(&self) -> Vec<Candidate> {
        let candidate = |(n, seat): (usize, &Seat)| Candidate {
            seat: *seat,
            id: HostId::of(&format!("10.0.0.{n}:{}", seat.generation)),
            known_as: HostRef::new(*seat, 0),
            weight: 1,
            far: false,
            joining: false,
        };
        self.seats.iter().enumerate().map(candidate).collect()
    }

    fn chosen(&self, number: usize) -> Option<usize> {
        let len = self.requests.len();
        let chosen = number.checked_rem(len)?;
        self.requests[chosen].ledger.map(|_| chosen)
    }

    fn write(&mut self, ledger: usize, changes: Changes) {
        if changes.iter().any(Option::is_some) {
            self.taken_back.remove(&ledger);
            self.ledgers[ledger].transact(&self.store, |_| ((), changes));
        }
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Place {
                worker,
                key,
                pending,
                stream,
                uploads,
            } => self.place(worker, key, pending, stream, uploads),
            Step::Uploaded { request } => self.uploaded(request),
            Step::ServedBy { request, host } => self.served_by(request, host),
            Step::Answered { request } => {
                let Some(n) = self.chosen(request) else {
                    return;
                };
                self.give_back(n);
                let changes = self.requests[n].request.answered();
                self.write(self.requests[n].ledger.unwrap(), changes);
                self.settle(n);
            }
            Step::Completed { request } => {
                let Some(n) = self.chosen(request) else {
                    return;
                };
                self.give_back(n);
                let tracked = &mut self.requests[n];
                let prefill = &mut self.prefills[tracked.ledger.unwrap()];
                let due = prefill.settle_soon(&mut tracked.request, self.now_ms);
                // As soon as it may be: the tick comes later, or the end before.
                tracked.due = due.map(|due| (due, self.now_ms + 100));
                tracked.complete = true;
            }
            Step::Failed { request } => {
                let Some(n) = self.chosen(request) else {
                    return;
                };
                self.give_back(n);
                let changes = self.requests[n].request.failed();
                self.write(self.requests[n].ledger.unwrap(), changes);
                if let Some(counted) = &mut self.requests[n].counted {
                    counted.pending = 0;
                }
            }
            Step::End { request } => {
                let Some(n) = self.chosen(request) else {
                    return;
                };
                self.give_back(n);
                let changes = self.requests[n].request.end();
                self.write(self.requests[n].ledger.unwrap(), changes);
                if self.requests[n].complete {
                    self.settle(n);
                }
                self.requests[n].counted = None;
                self.requests[n].ended = true;
            }
            Step::Panic { worker } => self.panic(worker),
            Step::Repair { host } => self.repair(host),
            Step::Reload { worker } => {
                self.current[worker] = self.add_ledger();
            }
            Step::Flap { host } => {
                let seat = &mut self.seats[host];
                seat.generation += 1;
                let seat = *seat;
                self.take_seat(seat);
                self.estimated[host] = false;
                self.answers[host] = 0;
            }
            Step::LoseRaces { count } => self.store.stale.set(count),
            Step::Refuse => self.store.refused.set(1),
            Step::Tick { worker } => self.tick(self.current[worker]),
            Step::Pass { ms } => self.now_ms += ms,
            Step::TakeBack { slow } => self.take_back(&slow),
        }
    }

    /// Nothing of a request is pending any more, and its host has answered if something was.
    fn settle(&mut self, n: usize) {
        if let Some(counted) = &mut self.requests[n].counted {
            let waited = std::mem::take(&mut counted.pending) > 0;
            let host = self.seats.iter().position(|seat| *seat == counted.seat);
            if let Some(host) = host {
                self.answers[host] += u32::from(waited);
            }
        }
    }

    /// What is still pending of a request is its own again.
    fn give_back(&mut self, n: usize) {
        let tracked = &mut self.requests[n];
        let (Some((due, _)), ledger) = (tracked.due.take(), tracked.ledger.unwrap()) else {
            return;
        };
        if let Some(given) = self.prefills[ledger].give_back(due) {
            let changes = tracked.request.take_pending(given);
            self.write(ledger, changes);
        }
    }

    fn tick(&mut self, ledger: usize) {
        self.ledgers[ledger].pay(&self.store);
        while let Some(change) = self.prefills[ledger].overdue(self.now_ms) {
            self.write(ledger, [Some(change), None]);
        }
        for n in 0..self.requests.len() {
            let tracked = &mut self.requests[n];
            let is_due = tracked.due.is_some_and(|(_, at_ms)| at_ms <= self.now_ms);
            if !is_due || tracked.ledger != Some(ledger) {
                continue;
            }
            tracked.due = None;
            if tracked.complete {
                self.settle(n);
            } else if let Some(counted) = &mut tracked.counted {
                counted.pending = 1;
            }
        }
    }

    fn place(&mut self, worker: usize, key: u64, pending: u32, stream: bool, uploads: bool) {
        let ledger = self.current[worker];
        self.taken_back.remove(&ledger);
        let (hosts, bounds) = (self.candidates(), self.bounds);
        let mut request = Request::default();
        if uploads {
            request.still_uploads();
        }
        let placement = request.place(&self.store, &self.ledgers[ledger], true, |loads| {
            let placement = route::decide(Key(key), &hosts, loads, bounds);
            let waiting = loads.of(placement.hosts[0].seat).pending + pending;
            Ok::<_, Infallible>((placement, pending, waiting))
        });
        let Ok((placement, waiting)) = placement;
        let (seat, waiting) = (placement.hosts[0].seat, waiting.unwrap());
        let prefill = &mut self.prefills[ledger];
        let due = (!stream)
            .then(|| prefill.take_over(&mut request, waiting, self.now_ms))
            .flatten();
        // Nothing is learned here: five tokens in a millisecond.
        let at_ms = self.now_ms + u64::from(waiting.div_ceil(5));
        self.requests.push(Tracked {
            request,
            ledger: Some(ledger),
            counted: Some(Counted {
                seat,
                pending: if uploads { 0 } else { pending },
            }),
            uploads: uploads.then_some(pending),
            complete: false,
            due: due.map(|due| (due, at_ms)),
            ended: false,
        });
    }

    fn uploaded(&mut self, request: usize) {
        let Some(n) = self.chosen(request) else {
            return;
        };
        let tracked = &mut self.requests[n];
        let changes = tracked.request.uploaded();
        if let (Some(counted), Some(pending)) = (&mut tracked.counted, tracked.uploads.take())
            && pending > 0
        {
            counted.pending = pending;
        }
        let ledger = tracked.ledger.unwrap();
        self.write(ledger, changes);
    }

    fn served_by(&mut self, request: usize, host: Option<usize>) {
        let Some(n) = self.chosen(request) else {
            return;
        };
        self.give_back(n);
        let seat = host.map(|host| self.seats[host]);
        let tracked = &mut self.requests[n];
        let changes = tracked.request.served_by(seat);
        tracked.uploads = None;
        if !tracked.ended {
            let pending = tracked.counted.map_or(0, |counted| counted.pending);
            tracked.counted = seat.map(|seat| Counted { seat, pending });
        }
        let ledger = tracked.ledger.unwrap();
        self.write(ledger, changes);
    }

    /// What the VM owed was never written; what it had written stays for ever.
    fn panic(&mut self, worker: usize) {
        let ledger = self.current[worker];
        self.ledgers[ledger].pay(&self.store.inner);
        let is_counted = !self.taken_back.remove(&ledger);
        for tracked in self
            .requests
            .iter_mut()
            .filter(|own| own.ledger == Some(ledger))
        {
            tracked.ledger = None;
            let counted = tracked.counted.take();
            self.leaked.extend(counted.filter(|_| is_counted));
        }
        self.dead.insert(ledger);
        self.current[worker] = self.add_ledger();
    }

    /// Only the first of the ledgers is never slow: it takes back.
    fn take_back(&mut self, slow: &BTreeSet<usize>) {
        self.now_ms += STOPPED_MS;
        let is_slow = |ledger: usize| slow.iter().any(|slow| slow % 7 + 1 == ledger);
        for ledger in 0..self.ledgers.len() {
            let still = self.dead.contains(&ledger) || is_slow(ledger);
            if still && self.apart {
                self.taken_back.insert(ledger);
            } else if !still {
                self.ledgers[ledger].beat(&self.store.inner, self.now_ms);
                self.taken_back.remove(&ledger);
            }
        }
        let keeper = ledger(usize::MAX - 1, self.now_ms);
        let taken: u32 = keeper
            .take_back(&self.store.inner)
            .into_iter()
            .map(|(_, requests)| requests)
            .sum();
        if self.apart {
            self.leaked.clear();
        } else {
            assert_eq!(taken, 0, "the proxy's own count is there for that");
        }
    }

    /// All VMs that run say what they have, and the rest is what the dead left. How many tokens of a
    /// host's pending belonged to these nobody knows: from here on, until the host is idle, only its
    /// in-flight count is exact.
    fn repair(&mut self, host: usize) {
        if self.apart {
            return;
        }
        let seat = self.seats[host];
        let before = self.leaked.len();
        self.leaked.retain(|leak| leak.seat != seat);
        let excess = (before - self.leaked.len()) as u32;
        self.estimated[host] |= excess > 0;
        let keeper = Ledger::default();
        keeper.transact(&self.store.inner, |loads| {
            loads.doubt(seat);
            ((), load::NO_CHANGES)
        });
        self.now_ms += STOPPED_MS;
        for (number, ledger) in self.ledgers.iter().enumerate() {
            if !self.dead.contains(&number) {
                ledger.beat(&self.store.inner, self.now_ms);
            }
        }
        let unclaimed = keeper.transact(&self.store.inner, |loads| {
            let unclaimed = loads.unclaimed(seat);
            loads.forgive(seat, unclaimed.unwrap_or(0));
            loads.trust(seat);
            (unclaimed, load::NO_CHANGES)
        });
        assert_eq!(unclaimed, Some(excess), "what dead VMs left on host {host}");
    }

    /// Compares every host with the model. What is still owed is written first.
    fn check(&mut self) {
        for ledger in &self.ledgers {
            ledger.pay(&self.store.inner);
        }
        let loads = load::read(&self.store.inner).unwrap();
        for (host, seat) in self.seats.into_iter().enumerate() {
            let live = self.requests.iter().filter_map(|own| {
                let taken_back = self.taken_back.contains(&own.ledger?);
                own.counted.filter(|_| !taken_back)
            });
            let counted: Vec<Counted> = live
                .chain(self.leaked.iter().copied())
                .filter(|own| own.seat == seat)
                .collect();
            let found = loads.of(seat);
            assert_eq!(
                found.in_flight,
                counted.len() as u32,
                "in flight on host {host}"
            );
            assert_eq!(found.answers, self.answers[host], "answers of host {host}");
            self.estimated[host] &= !counted.is_empty();
            let pending: u32 = counted.iter().map(|own| own.pending).sum();
            if !self.estimated[host] {
                assert_eq!(found.pending, pending, "pending on host {host}");
            }
        }
    }

    /// Ends everything that can still end, and repairs what cannot.
    fn finish(&mut self) {
        for n in 0..self.requests.len() {
            if self.requests[n].ledger.is_some() {
                self.run(Step::End { request: n });
            }
        }
        (0..HOSTS).for_each(|host| self.repair(host));
        self.take_back(&BTreeSet::new());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn every_count_equals_the_model_at_each_step_and_ends_at_zero(
        limit in proptest::option::of(1..6_u32),
        apart in any::<bool>(),
        steps in steps(),
    ) {
        let mut world = World::new(limit, apart);
        for step in steps {
            world.run(step);
            world.check();
        }
        world.finish();
        world.check();
        let loads = load::read(&world.store.inner).unwrap();
        for seat in world.seats {
            let left = loads.of(seat);
            prop_assert_eq!((left.in_flight, left.pending), (0, 0));
        }
    }
}

/// With `panic_rule` off, a limit holds for requests that stay where they were placed.
#[test]
fn no_interleaving_of_workers_exceeds_the_limit_while_there_is_room() {
    let mut world = World::new(Some(2), false);
    for n in 0..HOSTS * 2 {
        world.store.stale.set(n as u32 % 5);
        world.run(Step::Place {
            worker: n % WORKERS,
            key: 7,
            pending: 10,
            stream: true,
            uploads: false,
        });
        world.check();
    }
    let loads = load::read(&world.store.inner).unwrap();
    for seat in world.seats {
        assert_eq!(loads.of(seat).in_flight, 2, "{seat:?}");
    }
}
