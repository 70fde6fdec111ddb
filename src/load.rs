//! In-flight requests and pending tokens per host, kept in the proxy's shared data.
//!
//! Guarantee: a booking adds one request to one host and takes it away exactly once, by whichever
//! worker, in whatever order; no count goes below zero; a change that could not be written is owed
//! and written later. Not here: what a full host means (route.rs), which request is where
//! (request.rs).
//!
//! All hosts' loads are one value: a decision reads every host anyway, and one compare-and-swap
//! then both sees the loads and books, so two workers can never take the same last place.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};

use crate::shares::{Part, Shares};
use crate::store::{Store, StoreError};

/// The shared-data key of the loads; its number is the layout's version.
pub const LOADS_KEY: &str = "prefix_router.3.loads";
/// Attempts of one change against other workers. Each attempt fails only if another worker wrote
/// in the few microseconds between; 64 failures in a row mean that something else is wrong.
const ATTEMPTS_MAX: u32 = 64;
/// Changes that a worker may owe; past that the oldest is forgotten and left to the repair.
const DEBTS_MAX: usize = 4096;
/// Layout version, version of the host table, how many VMs and how many shares there are behind the
/// records, 4 bytes each.
const HEADER_BYTES: usize = 16;
const LAYOUT: u32 = 3;
/// Generation and failures (2 bytes each), in flight, pending, placed, answers (4 bytes
/// each).
const RECORD_BYTES: usize = 20;
/// In a record's failures: what each VM has in flight here is known apart, for nobody else counts it.
const APART: u32 = 1 << 31;
/// The same, for as long as there seems to be more than there is.
const DOUBTED: u32 = 1 << 30;
const FLAGS: u32 = APART | DOUBTED;

/// Time between two beats of a VM that has requests in flight.
const BEAT_MS: u64 = 1000;
/// A VM that has not beaten for so long is taken for stopped. Long against a tick that a busy
/// machine delays; one that was only slow takes part again with its next step, at no loss.
pub const STOPPED_MS: u64 = 5000;

/// Time after which a failure counts half. An engine that answers errors at once has nothing in
/// flight and would look idle; a client whose prompts fail must not drive all others away for long.
pub const FAILURES_HALVE_MS: u64 = 5000;
/// Failures that count at most.
const FAILURES_MAX: u32 = 32;

/// ROUTING.md 6a: "when sum(rec) > 32*N halve all".
const PLACED_MEAN_MAX: u64 = 32;

/// A host's place in the tables. Slots are reused, so a slot alone does not name a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u16);

/// A slot at one time of its life: what a booking holds on to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// The slot.
    pub slot: Slot,
    /// Which tenant of the slot: it changes when the slot is given to another host.
    pub generation: u16,
}

/// One request's share in a host's load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Booking {
    /// Where it counts.
    pub seat: Seat,
    /// Estimated tokens that the host has yet to compute for it.
    pub pending: u32,
}

/// A change of the loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// One more request in flight, with its pending tokens.
    Book(Booking),
    /// The first byte of the answer came: the pending tokens are computed.
    Settle(Booking),
    /// The pending tokens should be computed by now; the answer is still to come.
    Computed(Booking),
    /// The request ended; what is still pending goes with it.
    Release(Booking),
    /// The host failed a request: nothing of it is pending any more.
    Fail(Booking),
}

impl Change {
    /// What it is about.
    #[must_use]
    pub fn booking(self) -> Booking {
        let (Self::Book(booking)
        | Self::Settle(booking)
        | Self::Computed(booking)
        | Self::Release(booking)
        | Self::Fail(booking)) = self;
        booking
    }
}

/// The changes of one step: a retry leaves one host and books another.
pub type Changes = [Option<Change>; 2];

/// Nothing changes.
pub const NO_CHANGES: Changes = [None, None];

/// What one host carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests sent and not ended.
    pub in_flight: u32,
    /// Estimated uncached prompt tokens that it has yet to compute.
    pub pending: u32,
    /// Requests that it failed lately, halved every [`FAILURES_HALVE_MS`].
    pub failures: u32,
    /// First bytes that it has given, counted round and round.
    pub answers: u32,
}

/// All hosts' loads, as the bytes that shared data holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loads {
    /// Header and records.
    bytes: Vec<u8>,
    /// What each VM has of them, on hosts where that is known apart.
    shares: Shares,
}

/// Who changes the loads, and when.
#[derive(Clone, Copy, Debug, Default)]
struct Hand {
    /// The VM; 0 if it has no name, and no share.
    owner: u64,
    now_ms: u64,
}

/// What a VM has in flight on a host, as it wrote it last; never empty.
#[derive(Clone, Copy, Debug)]
struct Own {
    seat: Seat,
    in_flight: u32,
    pending: u32,
}

/// Takes a change into what a VM has in flight.
fn count(own: &mut Vec<Own>, change: Change) {
    let booking = change.booking();
    let place = own.iter().position(|own| own.seat == booking.seat);
    let found = place.and_then(|place| own.get_mut(place));
    match (change, found) {
        (Change::Book(_), Some(own)) => {
            own.in_flight = own.in_flight.saturating_add(1);
            own.pending = own.pending.saturating_add(booking.pending);
        }
        (Change::Book(_), None) => own.push(Own {
            seat: booking.seat,
            in_flight: 1,
            pending: booking.pending,
        }),
        (_, Some(own)) => {
            own.pending = own.pending.saturating_sub(booking.pending);
            own.in_flight -= u32::from(matches!(change, Change::Release(_)));
        }
        (_, None) => {}
    }
    own.retain(|own| own.in_flight > 0);
}

impl Loads {
    fn from_bytes(bytes: Option<Vec<u8>>) -> Self {
        let mut loads = Self {
            bytes: bytes.unwrap_or_default(),
            shares: Shares::default(),
        };
        if loads.bytes.len() >= HEADER_BYTES && loads.word(0) == LAYOUT {
            let [vms, parts] = [8, 12].map(|at| loads.word(at));
            if let Some(shares) = Shares::split_off(&mut loads.bytes, vms, parts) {
                loads.shares = shares;
                loads.set_word(8, 0);
                loads.set_word(12, 0);
                return loads;
            }
        }
        loads.bytes = vec![0; HEADER_BYTES];
        loads.set_word(0, LAYOUT);
        loads
    }

    fn to_bytes(&self) -> Cow<'_, [u8]> {
        let [vms, parts] = self.shares.counts();
        if vms == 0 && parts == 0 {
            return Cow::Borrowed(&self.bytes);
        }
        let mut loads = Self {
            bytes: self.bytes.clone(),
            shares: Shares::default(),
        };
        loads.set_word(8, vms);
        loads.set_word(12, parts);
        self.shares.append_to(&mut loads.bytes);
        Cow::Owned(loads.bytes)
    }

    /// What a host carries now; nothing if the slot has another tenant.
    #[must_use]
    pub fn of(&self, seat: Seat) -> Load {
        let at = record(seat.slot);
        if self.word(at) & 0xffff != u32::from(seat.generation) {
            return Load::default();
        }
        Load {
            in_flight: self.word(at + 4),
            pending: self.word(at + 8),
            failures: (self.word(at) & !FLAGS) >> 16,
            answers: self.word(at + 16),
        }
    }

    /// Requests in flight in a slot, whoever its tenant is: a slot is free to be reused at zero.
    #[must_use]
    pub fn in_flight(&self, slot: Slot) -> u32 {
        self.word(record(slot) + 4)
    }

    /// The version of the host table that these loads go with.
    #[must_use]
    pub fn hosts_version(&self) -> u32 {
        self.word(4)
    }

    /// Tells all workers that there is a new host table.
    pub fn set_hosts_version(&mut self, version: u32) {
        self.set_word(4, version);
    }

    /// Gives a slot to a host: its loads start at zero and late changes of the former tenant are
    /// ignored. Does nothing if the host has the slot already.
    pub fn seat(&mut self, seat: Seat) {
        let at = record(seat.slot);
        if self.word(at) & 0xffff == u32::from(seat.generation) && at < self.bytes.len() {
            return;
        }
        if self.bytes.len() < at + RECORD_BYTES {
            self.bytes.resize(at + RECORD_BYTES, 0);
        }
        self.set_word(at, u32::from(seat.generation));
        for field in [4, 8, 12, 16] {
            self.set_word(at + field, 0);
        }
        self.shares.forget(seat.slot);
    }

    /// Whether each VM's requests in this slot are counted apart, from now on.
    pub fn set_apart(&mut self, slot: Slot, apart: bool) {
        self.set_flag(slot, APART, apart);
    }

    /// Asks all VMs what they have in flight on a host: each says so with its next change or beat.
    pub fn doubt(&mut self, seat: Seat) {
        if self.is_there(seat) {
            self.set_flag(seat.slot, DOUBTED, true);
        }
    }

    /// What is counted on a host is right: nobody needs to say more.
    pub fn trust(&mut self, seat: Seat) {
        if self.is_there(seat) {
            self.set_flag(seat.slot, DOUBTED, false);
        }
    }

    /// How many requests on a host no VM says it has; `None` if they were not asked.
    #[must_use]
    pub fn unclaimed(&self, seat: Seat) -> Option<u32> {
        if !self.is_there(seat) || self.word(record(seat.slot)) & DOUBTED == 0 {
            return None;
        }
        // Where there is no room to say so, silence says nothing.
        let claimed = match self.shares.has_room() {
            true => {
                let [in_flight, _] = self.shares.total(seat.slot);
                in_flight
            }
            false => u32::MAX,
        };
        Some(self.in_flight(seat.slot).saturating_sub(claimed))
    }

    fn set_flag(&mut self, slot: Slot, flag: u32, on: bool) {
        let word = self.word(record(slot));
        let flags = if on { word | flag } else { word & !flag };
        if flags == word {
            return;
        }
        self.set_word(record(slot), flags);
        if flags & FLAGS == 0 {
            self.shares.forget(slot);
        }
    }

    /// Whether the slot is still that host's.
    fn is_there(&self, seat: Seat) -> bool {
        self.word(record(seat.slot)) & 0xffff == u32::from(seat.generation)
    }

    /// Applies a change; one that belongs to a former tenant changes nothing.
    fn apply(&mut self, change: Change) {
        let booking = change.booking();
        let at = record(booking.seat.slot);
        if self.word(at) & 0xffff != u32::from(booking.seat.generation) {
            return;
        }
        match change {
            Change::Fail(_) => self.fail(booking.seat),
            Change::Settle(_) => self.set_word(at + 16, self.word(at + 16).wrapping_add(1)),
            Change::Book(_) | Change::Computed(_) | Change::Release(_) => {}
        }
        let load = self.of(booking.seat);
        let (in_flight, pending) = match change {
            Change::Book(_) => (
                load.in_flight.saturating_add(1),
                load.pending.saturating_add(booking.pending),
            ),
            Change::Settle(_) | Change::Computed(_) | Change::Fail(_) => {
                (load.in_flight, load.pending.saturating_sub(booking.pending))
            }
            Change::Release(_) => (
                load.in_flight.saturating_sub(1),
                load.pending.saturating_sub(booking.pending),
            ),
        };
        self.set_word(at + 4, in_flight);
        // An idle host computes nothing: whatever an estimate left behind ends here.
        self.set_word(at + 8, if in_flight == 0 { 0 } else { pending });
    }

    /// The VM says what it has in flight, where it is asked. If it was taken for stopped, or was
    /// late to say so, that counts again.
    fn claim(&mut self, hand: Hand, own: &[Own]) {
        if hand.owner == 0 {
            return;
        }
        let is_asked = |own: &&Own| {
            let asked = self.word(record(own.seat.slot)) & FLAGS != 0;
            asked && self.is_there(own.seat)
        };
        let part = |own: &Own| Part {
            owner: hand.owner,
            slot: own.seat.slot,
            in_flight: own.in_flight,
            pending: own.pending,
        };
        let parts: Vec<Part> = own.iter().filter(is_asked).map(part).collect();
        let slots: Vec<Slot> = parts.iter().map(|part| part.slot).collect();
        if !self.shares.replace(hand.owner, parts, hand.now_ms) {
            return;
        }
        for slot in slots {
            let at = record(slot);
            for (field, claimed) in [4, 8].into_iter().zip(self.shares.total(slot)) {
                self.set_word(at + field, self.word(at + field).max(claimed));
            }
        }
    }

    /// Takes back what VMs have in flight that do not run any more: where, and how many requests.
    fn take_back(&mut self, hand: Hand) -> Vec<(Slot, u32)> {
        let left = self.shares.take_out(hand.owner, hand.now_ms, STOPPED_MS);
        for part in &left {
            let at = record(part.slot);
            let in_flight = self.word(at + 4).saturating_sub(part.in_flight);
            let pending = self.word(at + 8).saturating_sub(part.pending);
            self.set_word(at + 4, in_flight);
            self.set_word(at + 8, if in_flight == 0 { 0 } else { pending });
        }
        left.into_iter()
            .map(|part| (part.slot, part.in_flight))
            .collect()
    }

    fn fail(&mut self, seat: Seat) {
        let at = record(seat.slot);
        if self.word(at) & 0xffff == u32::from(seat.generation) && at < self.bytes.len() {
            let failures = (self.of(seat).failures + 1).min(FAILURES_MAX);
            let flags = self.word(at) & FLAGS;
            self.set_word(at, flags | failures << 16 | u32::from(seat.generation));
        }
    }

    /// Halves every host's failures.
    pub fn halve_failures(&mut self) {
        let mut at = HEADER_BYTES;
        while at < self.bytes.len() {
            let word = self.word(at);
            let failures = (word & !FLAGS) >> 17;
            self.set_word(at, word & FLAGS | failures << 16 | word & 0xffff);
            at += RECORD_BYTES;
        }
    }

    /// New keys that this gateway placed on a host, halved now and then.
    #[must_use]
    pub fn placed(&self, seat: Seat) -> u32 {
        let at = record(seat.slot);
        if self.word(at) & 0xffff == u32::from(seat.generation) {
            self.word(at + 12)
        } else {
            0
        }
    }

    /// Counts a new key placed on a host; all of the pool's are halved when their mean reaches
    /// [`PLACED_MEAN_MAX`], so that what counts is the recent past.
    pub fn count_placed(&mut self, seat: Seat, pool: impl Iterator<Item = Seat> + Clone) {
        self.set_word(record(seat.slot) + 12, self.placed(seat).saturating_add(1));
        let (total, hosts) = pool.clone().fold((0_u64, 0_u64), |(total, hosts), seat| {
            (total + u64::from(self.placed(seat)), hosts + 1)
        });
        if total > PLACED_MEAN_MAX * hosts {
            for seat in pool {
                self.set_word(record(seat.slot) + 12, self.placed(seat) / 2);
            }
        }
    }

    /// Takes away requests that nobody has: a stopped VM's bookings. Their part of
    /// the pending tokens is not known and taken to be the mean.
    pub fn forgive(&mut self, seat: Seat, in_flight: u32) {
        let load = self.of(seat);
        if load.in_flight == 0 {
            return;
        }
        let left = load.in_flight.saturating_sub(in_flight);
        let kept = u64::from(load.pending) * u64::from(left) / u64::from(load.in_flight);
        let at = record(seat.slot);
        self.set_word(at + 4, left);
        // Not above `load.pending`, for `left` is not above `load.in_flight`.
        self.set_word(at + 8, u32::try_from(kept).unwrap_or(load.pending));
    }

    fn word(&self, at: usize) -> u32 {
        let bytes = self.bytes.get(at..at + 4);
        bytes
            .and_then(|bytes| bytes.try_into().ok())
            .map_or(0, u32::from_le_bytes)
    }

    fn set_word(&mut self, at: usize, value: u32) {
        if let Some(bytes) = self.bytes.get_mut(at..at + 4) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
    }
}

fn record(slot: Slot) -> usize {
    HEADER_BYTES + usize::from(slot.0) * RECORD_BYTES
}

/// Reads the loads without changing them.
pub fn read(store: &impl Store) -> Result<Loads, StoreError> {
    Ok(Loads::from_bytes(store.read(LOADS_KEY)?.value))
}

/// One worker's hand in the loads: writes changes, and remembers those it could not write.
#[derive(Debug, Default)]
pub struct Ledger {
    hand: Cell<Hand>,
    debts: RefCell<Vec<Change>>,
    /// What this VM has in flight, as it was last written; of a VM without a name, nothing.
    own: RefCell<Vec<Own>>,
    /// When it last said that it runs.
    beat_ms: Cell<u64>,
    /// Whether it is known to run.
    takes_part: Cell<bool>,
}

impl Ledger {
    /// The hand of a VM with a name, a number that no other VM has and that is not 0: what it has
    /// in flight can be taken back when it stops.
    #[must_use]
    pub fn of(owner: u64, now_ms: u64) -> Self {
        let ledger = Self::default();
        ledger.hand.set(Hand { owner, now_ms });
        ledger
    }

    /// The VM's tick: says that it runs, if anybody is to know, and it is time.
    pub fn beat(&self, store: &impl Store, now_ms: u64) {
        let hand = Hand {
            now_ms,
            ..self.hand.get()
        };
        self.hand.set(hand);
        let is_idle = self.own.borrow().is_empty() && !self.takes_part.get();
        if is_idle || now_ms.abs_diff(self.beat_ms.get()) < BEAT_MS {
            return;
        }
        self.beat_ms.set(now_ms);
        self.transact(store, |loads| {
            if loads.shares.of(hand.owner).next().is_some() {
                loads.shares.beat(hand.owner, now_ms);
            } else {
                loads.shares.leave(hand.owner);
            }
            ((), NO_CHANGES)
        });
    }

    /// Takes back what stopped VMs have left in flight: where, and how many requests. One VM at a
    /// time does.
    pub fn take_back(&self, store: &impl Store) -> Vec<(Slot, u32)> {
        let hand = self.hand.get();
        self.transact(store, |loads| (loads.take_back(hand), NO_CHANGES))
    }

    /// Runs `step` on the current loads, applies the changes it asks for and writes the result;
    /// all again if another worker wrote in between. The changes are owed if nothing could be
    /// written.
    pub fn transact<T>(
        &self,
        store: &impl Store,
        mut step: impl FnMut(&mut Loads) -> (T, Changes),
    ) -> T {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let seen = store.read(LOADS_KEY);
            let cas = seen.as_ref().ok().map(|seen| seen.cas);
            let mut loads = Loads::from_bytes(seen.ok().and_then(|seen| seen.value));
            let (before, hand) = (loads.clone(), self.hand.get());
            let mut own = self.own.borrow().clone();
            loads.claim(hand, &own);
            let mut apply = |loads: &mut Loads, change: &Change| {
                loads.apply(*change);
                if hand.owner != 0 {
                    count(&mut own, *change);
                }
            };
            let debts = self.debts.borrow();
            debts.iter().for_each(|debt| apply(&mut loads, debt));
            drop(debts);
            let (result, changes) = step(&mut loads);
            let changed = changes.iter().flatten();
            changed.for_each(|change| apply(&mut loads, change));
            loads.claim(hand, &own);
            if loads == before && self.debts.borrow().is_empty() {
                self.own.replace(own);
                return result;
            }
            let written = match cas {
                Some(cas) => store.write(LOADS_KEY, &loads.to_bytes(), Some(cas)),
                None => Err(StoreError::Refused),
            };
            match written {
                Ok(()) => {
                    self.debts.borrow_mut().clear();
                    self.own.replace(own);
                    self.takes_part.set(loads.shares.has(hand.owner));
                    return result;
                }
                Err(StoreError::Stale) if attempts < ATTEMPTS_MAX => {}
                Err(_) => {
                    self.owe(changes);
                    return result;
                }
            }
        }
    }

    /// Applies one change.
    pub fn apply(&self, store: &impl Store, change: Change) {
        self.transact(store, |_| ((), [Some(change), None]));
    }

    /// Writes what is owed, if anything is.
    pub fn pay(&self, store: &impl Store) {
        if !self.debts.borrow().is_empty() {
            self.transact(store, |_| ((), NO_CHANGES));
        }
    }

    fn owe(&self, changes: Changes) {
        let mut debts = self.debts.borrow_mut();
        for change in changes.into_iter().flatten() {
            if debts.len() == DEBTS_MAX {
                // Never written, but true of what this VM has.
                count(&mut self.own.borrow_mut(), debts.remove(0));
            }
            debts.push(change);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Cas, MemoryStore, Versioned};
    use std::cell::Cell;

    fn seat(slot: u16, generation: u16) -> Seat {
        Seat {
            slot: Slot(slot),
            generation,
        }
    }

    fn booking(slot: u16, generation: u16, pending: u32) -> Booking {
        Booking {
            seat: seat(slot, generation),
            pending,
        }
    }

    fn seated(store: &MemoryStore, seats: &[Seat]) -> Ledger {
        let ledger = Ledger::default();
        ledger.transact(store, |loads| {
            seats.iter().for_each(|seat| loads.seat(*seat));
            ((), NO_CHANGES)
        });
        ledger
    }

    #[track_caller]
    fn check(store: &MemoryStore, seat: Seat, in_flight: u32, pending: u32) {
        let load = read(store).unwrap().of(seat);
        assert_eq!((load.in_flight, load.pending), (in_flight, pending));
    }

    #[test]
    fn a_booking_counts_until_it_is_released() {
        let store = MemoryStore::new();
        let ledger = seated(&store, &[seat(0, 1), seat(3, 1)]);
        ledger.apply(&store, Change::Book(booking(3, 1, 700)));
        ledger.apply(&store, Change::Book(booking(3, 1, 300)));
        check(&store, seat(3, 1), 2, 1000);
        ledger.apply(&store, Change::Settle(booking(3, 1, 700)));
        check(&store, seat(3, 1), 2, 300);
        ledger.apply(&store, Change::Release(booking(3, 1, 0)));
        ledger.apply(&store, Change::Release(booking(3, 1, 300)));
        check(&store, seat(3, 1), 0, 0);
        check(&store, seat(0, 1), 0, 0);
    }

    #[test]
    fn counts_never_go_below_zero() {
        let store = MemoryStore::new();
        let ledger = seated(&store, &[seat(0, 1)]);
        ledger.apply(&store, Change::Release(booking(0, 1, 50)));
        check(&store, seat(0, 1), 0, 0);
    }

    #[test]
    fn a_late_release_of_a_former_tenant_changes_nothing() {
        let store = MemoryStore::new();
        let ledger = seated(&store, &[seat(0, 1)]);
        ledger.apply(&store, Change::Book(booking(0, 1, 10)));
        seated(&store, &[seat(0, 2)]);
        check(&store, seat(0, 2), 0, 0);
        ledger.apply(&store, Change::Book(booking(0, 2, 5)));
        ledger.apply(&store, Change::Release(booking(0, 1, 10)));
        check(&store, seat(0, 2), 1, 5);
    }

    #[test]
    fn seating_a_host_again_keeps_its_load() {
        let store = MemoryStore::new();
        let ledger = seated(&store, &[seat(0, 1)]);
        ledger.apply(&store, Change::Book(booking(0, 1, 10)));
        seated(&store, &[seat(0, 1)]);
        check(&store, seat(0, 1), 1, 10);
    }

    #[test]
    fn failures_count_for_a_while_and_no_more_than_so_many() {
        let store = MemoryStore::new();
        let ledger = seated(&store, &[seat(0, 1), seat(1, 1)]);
        let failures = |slot| read(&store).unwrap().of(seat(slot, 1)).failures;
        for _ in 0..100 {
            ledger.apply(&store, Change::Fail(booking(1, 1, 0)));
        }
        ledger.apply(&store, Change::Fail(booking(1, 9, 0)));
        assert_eq!((failures(0), failures(1)), (0, 32));
        for expected in [16, 8, 4, 2, 1, 0, 0] {
            ledger.transact(&store, |loads| (loads.halve_failures(), NO_CHANGES));
            assert_eq!(failures(1), expected);
        }
        ledger.apply(&store, Change::Book(booking(1, 1, 7)));
        check(&store, seat(1, 1), 1, 7);
    }

    #[test]
    fn forgiving_takes_away_no_more_than_there_is() {
        let store = MemoryStore::new();
        let ledger = seated(&store, &[seat(0, 1)]);
        ledger.apply(&store, Change::Book(booking(0, 1, 10)));
        ledger.transact(&store, |loads| {
            loads.forgive(seat(0, 1), 3);
            ((), NO_CHANGES)
        });
        check(&store, seat(0, 1), 0, 0);
    }

    /// Fails the next `failures` writes.
    struct Flaky {
        inner: MemoryStore,
        failures: Cell<u32>,
        error: StoreError,
    }

    impl Store for Flaky {
        fn read(&self, key: &str) -> Result<Versioned, StoreError> {
            self.inner.read(key)
        }

        fn write(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), StoreError> {
            let failures = self.failures.get();
            if failures > 0 {
                self.failures.set(failures - 1);
                return Err(self.error);
            }
            self.inner.write(key, value, cas)
        }
    }

    #[test]
    fn a_lost_race_is_run_again_on_fresh_loads() {
        let inner = MemoryStore::new();
        seated(&inner, &[seat(0, 1)]);
        let store = Flaky {
            inner,
            failures: Cell::new(5),
            error: StoreError::Stale,
        };
        Ledger::default().apply(&store, Change::Book(booking(0, 1, 9)));
        check(&store.inner, seat(0, 1), 1, 9);
    }

    #[test]
    fn a_change_that_could_not_be_written_is_written_later_and_once() {
        let inner = MemoryStore::new();
        seated(&inner, &[seat(0, 1)]);
        let store = Flaky {
            inner,
            failures: Cell::new(2),
            error: StoreError::Refused,
        };
        let ledger = Ledger::default();
        ledger.apply(&store, Change::Book(booking(0, 1, 9)));
        ledger.apply(&store, Change::Book(booking(0, 1, 9)));
        check(&store.inner, seat(0, 1), 0, 0);
        ledger.pay(&store);
        check(&store.inner, seat(0, 1), 2, 18);
        ledger.pay(&store);
        check(&store.inner, seat(0, 1), 2, 18);
    }

    #[test]
    fn what_a_vm_has_counts_though_it_was_late_to_say_so() {
        let store = MemoryStore::new();
        seated(&store, &[seat(0, 1)]);
        let (own, dead) = (Ledger::of(1, 0), Ledger::of(2, 0));
        own.apply(&store, Change::Book(booking(0, 1, 30)));
        own.apply(&store, Change::Book(booking(0, 1, 30)));
        dead.apply(&store, Change::Book(booking(0, 1, 30)));
        let unclaimed = || read(&store).unwrap().unclaimed(seat(0, 1));
        assert_eq!(unclaimed(), None);
        let edit = |edit: fn(&mut Loads)| {
            Ledger::default().transact(&store, |loads| (edit(loads), NO_CHANGES));
        };
        edit(|loads| loads.doubt(seat(0, 1)));
        assert_eq!(unclaimed(), Some(3));
        own.beat(&store, 1000);
        assert_eq!(unclaimed(), Some(1));
        // All was taken away; what the VM goes on with is there again.
        edit(|loads| {
            loads.trust(seat(0, 1));
            loads.doubt(seat(0, 1));
            loads.forgive(seat(0, 1), 3);
        });
        check(&store, seat(0, 1), 0, 0);
        own.apply(&store, Change::Release(booking(0, 1, 30)));
        check(&store, seat(0, 1), 1, 30);
        own.apply(&store, Change::Release(booking(0, 1, 30)));
        check(&store, seat(0, 1), 0, 0);
        assert_eq!(unclaimed(), Some(0));
    }
}
