//! How hot each prefix is, and the key that follows from it.
//!
//! Guarantee: the sketch has a fixed size, whatever passes through it; the adaptive key is the
//! shallowest checkpoint that no host would be overrun by. Not here: hosts, placement, load.
//!
//! All workers count in one sketch, each request at once: chats agree on their key only so. It is
//! read and written with each request, so its size is what it costs.

use std::cell::{RefCell, RefMut};

use crate::prefix::{Checkpoint, Key, Kinds, Prompt};
use crate::store::{Store, StoreError};

/// Counters in a row, at least and at most; always a power of two. `ROUTING.md` 6a gives 2 × 2,048 to
/// 4,096, with each count added to all its counters; as it is done here ([`Sketch::add`]), a quarter
/// of that is as exact, for fleets of up to 25 hosts.
const WIDTHS: std::ops::RangeInclusive<usize> = 1024..=32_768;
/// Counters in a row for each request that a hot prefix of one host may have before it is hot. All
/// counters rise to some level with prompts that come once: with 40 rungs each, 2,000 requests to a
/// halving and 1,024 counters a row to 25. So this keeps that level at a third of what is hot.
const COUNTERS_PER_HOT: f64 = 20.0;
/// Rows of the sketch.
const ROWS: usize = 2;
/// Layout version, requests since the last halving, total: 4 bytes each.
const HEADER_BYTES: usize = 12;
/// Requests between two halvings for each host at least: of fewer, a chat of some turns would be more
/// than a hot prefix's part.
const REQUESTS_PER_HOST: u32 = 100;
/// Hosts for which [`Heat::count_min`] is meant; for twice as many it is twice as much, …
const HOSTS_USUAL: u32 = 25;
/// … and at most so many times: 24 of the default, half of what is hot once counters are full.
const LEAST_TIMES_MAX: u32 = 6;
/// Bytes of a counter.
const COUNTER_BYTES: usize = 2;
/// Changes with the meaning of the bytes; a sketch with another version is started anew.
const LAYOUT: u32 = 3;
/// Attempts against other workers; a lost count changes no placement that matters.
const ATTEMPTS_MAX: u32 = 4;
/// Rungs looked at: 8 + 31 ladder steps up to 8 MiB, two message ends, the prompt's end.
pub const RUNGS_MAX: usize = 48;

/// What decides how deep the key goes. Sources: ROUTING.md 6a.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heat {
    /// THETA: a prefix is hot when its share of recent requests is above this part of a host.
    pub hot_share: f64,
    /// MINC: counts up to this are never hot; in a large fleet more.
    pub count_min: u32,
    /// HALVE: all counters are halved after this many requests, or more in a large fleet.
    pub halve_requests: u32,
}

impl Default for Heat {
    fn default() -> Self {
        Self {
            hot_share: 0.5,
            count_min: 4,
            halve_requests: 2000,
        }
    }
}

impl Heat {
    /// The count above which a prefix is hot on `hosts` hosts, with `total` recent requests. Counters
    /// hold no more than 65,535, so what has that many is hot.
    #[must_use]
    pub fn count_max(self, total: u32, hosts: u32) -> u32 {
        let share = self.hot_share / f64::from(hosts.max(1)) * f64::from(total);
        let hottest = u32::from(u16::MAX) - 1;
        self.least(hosts).max(share as u32).min(hottest)
    }

    /// The count up to which nothing is hot: of the first requests to a large fleet a host's part is so
    /// small that a chat of some turns would exceed it.
    fn least(self, hosts: u32) -> u32 {
        let times = (hosts / HOSTS_USUAL).clamp(1, LEAST_TIMES_MAX);
        self.count_min.saturating_mul(times)
    }

    /// Requests after which all counters are halved: more in a large fleet, which also gets more.
    fn window(self, hosts: u32) -> u32 {
        let least = hosts.saturating_mul(REQUESTS_PER_HOST);
        self.halve_requests.max(least)
    }

    /// Counters in a row that it takes to tell what is hot on `hosts` hosts: the more hosts, the fewer
    /// requests make a prefix hot, and the less may other prompts add to its counters.
    fn width(self, hosts: u32) -> usize {
        let parts = f64::from(hosts.max(1)) / self.hot_share;
        let most = 2.0 * f64::from(self.window(hosts)) / f64::from(self.least(hosts).max(1));
        let width = (parts.min(most) * COUNTERS_PER_HOT) as usize;
        let (least, most) = WIDTHS.into_inner();
        width.clamp(least, most).next_power_of_two()
    }
}

/// A rung of the ladder that the key walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rung {
    /// Bytes of text before it.
    pub position: u64,
    /// Its checkpoint with the prompt's seeds mixed in.
    pub key: Key,
}

/// The key of a request and how it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdaptiveKey {
    /// What places the request.
    pub key: Key,
    /// Where in the prompt it ends, in bytes of text.
    pub position: u64,
    /// Where the last hot prefix ends: every host is assumed to hold it. 0 if none is hot.
    pub floor: u64,
    /// Whether it is hot itself: the whole prompt is.
    pub is_hot: bool,
}

/// The rungs of a prompt, shallow to deep, equal ones once; the last is the whole prompt.
#[must_use]
pub fn rungs(prompt: &Prompt) -> Vec<Rung> {
    let mut rungs: Vec<Rung> = Vec::with_capacity(RUNGS_MAX);
    for checkpoint in &prompt.checkpoints {
        if !checkpoint.kinds.has(Kinds::KEY.with(Kinds::END)) {
            continue;
        }
        let rung = rung_of(prompt, checkpoint);
        if rungs.iter().any(|seen| seen.key == rung.key) {
            continue;
        }
        if rungs.len() == RUNGS_MAX {
            rungs.pop();
        }
        rungs.push(rung);
    }
    rungs
}

fn rung_of(prompt: &Prompt, checkpoint: &Checkpoint) -> Rung {
    Rung {
        position: checkpoint.position,
        key: prompt.key(checkpoint),
    }
}

/// A pool's sketch as one worker counts in it.
#[derive(Clone, Debug)]
pub struct Popularity {
    /// The shared-data key.
    name: String,
    heat: Heat,
    /// What it has counted while shared data could not be read.
    alone: RefCell<Option<Sketch>>,
}

impl Popularity {
    /// Counts in the sketch of this name.
    #[must_use]
    pub fn new(name: String, heat: Heat) -> Self {
        Self {
            name,
            heat,
            alone: RefCell::default(),
        }
    }

    /// Counts a request's rungs and finds its key.
    ///
    /// `None` if the prompt has no rung. A worker that cannot reach shared data counts for itself.
    pub fn visit(&self, store: &impl Store, rungs: &[Rung], hosts: u32) -> Option<AdaptiveKey> {
        let (counts, total) = self.count(store, rungs, hosts);
        choose(rungs, &counts, self.heat.count_max(total, hosts))
    }

    /// How often each of these rungs was counted, and the requests of late, as far as this worker
    /// knows; nothing is counted.
    #[must_use]
    pub fn counts(&self, store: &impl Store, rungs: &[Rung]) -> (Vec<u32>, u32) {
        let sketch = match store.read(&self.name) {
            Ok(seen) => Sketch::from_bytes(seen.value, *WIDTHS.start()),
            Err(_) => self.alone(*WIDTHS.start()).clone(),
        };
        (sketch.counts(rungs), sketch.total())
    }

    fn alone(&self, width: usize) -> RefMut<'_, Sketch> {
        RefMut::map(self.alone.borrow_mut(), |alone| {
            let sketch = alone.get_or_insert_with(|| Sketch::from_bytes(None, width));
            sketch.widen(width);
            sketch
        })
    }

    /// The counts of these rungs with this request, and the requests of late.
    fn count(&self, store: &impl Store, rungs: &[Rung], hosts: u32) -> (Vec<u32>, u32) {
        let (width, window) = (self.heat.width(hosts), self.heat.window(hosts));
        let mut attempts = 0;
        loop {
            attempts += 1;
            let Ok(seen) = store.read(&self.name) else {
                let mut sketch = self.alone(width);
                return (sketch.add(rungs, window), sketch.total());
            };
            let mut sketch = Sketch::from_bytes(seen.value, width);
            let counts = sketch.add(rungs, window);
            let written = store.write(&self.name, &sketch.bytes, Some(seen.cas));
            // Also after lost races the counts are good: they lack a few requests of another worker.
            if written != Err(StoreError::Stale) || attempts == ATTEMPTS_MAX {
                return (counts, sketch.total());
            }
        }
    }
}

/// The shallowest rung whose count is not above `count_max`; the last one if all are.
fn choose(rungs: &[Rung], counts: &[u32], count_max: u32) -> Option<AdaptiveKey> {
    let mut floor = 0;
    let mut found = None;
    for (rung, count) in rungs.iter().zip(counts.iter().chain(std::iter::repeat(&0))) {
        let is_hot = *count > count_max;
        found = Some(AdaptiveKey {
            key: rung.key,
            position: rung.position,
            floor,
            is_hot,
        });
        if !is_hot {
            break;
        }
        floor = rung.position;
    }
    found
}

/// Counters of two bytes, in rows, behind a header; kept as the bytes that shared data holds.
#[derive(Clone, Debug)]
struct Sketch {
    bytes: Vec<u8>,
}

impl Sketch {
    /// The sketch that these bytes are, with rows of `width` counters at least; an empty one if they
    /// are none.
    fn from_bytes(bytes: Option<Vec<u8>>, width: usize) -> Self {
        let mut sketch = Self {
            bytes: bytes.unwrap_or_default(),
        };
        let found = sketch.width();
        let is_whole = found.is_power_of_two() && sketch.bytes.len() == bytes_of(found);
        if !is_whole || !WIDTHS.contains(&found) || sketch.header(0) != LAYOUT {
            sketch.bytes = vec![0; bytes_of(width)];
            sketch.set_header(0, LAYOUT);
        }
        sketch.widen(width);
        sketch
    }

    /// Counters in a row.
    fn width(&self) -> usize {
        self.bytes.len().saturating_sub(HEADER_BYTES) / (ROWS * COUNTER_BYTES)
    }

    /// Makes rows wider that are narrower than this. Each counter's keys go on in several, and each of
    /// those begins with what was counted for all: no count is lost. Rows never get narrower, so that
    /// workers that see fewer hosts for a moment change nothing.
    fn widen(&mut self, width: usize) {
        let found = self.width();
        if found == 0 || width <= found {
            return;
        }
        let (header, rows) = self.bytes.split_at(HEADER_BYTES);
        let rows = rows.chunks_exact(found * COUNTER_BYTES);
        let rows = rows.flat_map(|row| row.repeat(width / found));
        self.bytes = header.iter().copied().chain(rows).collect();
    }

    /// Adds one request with these rungs, shallow to deep; the counts after it, rung by rung. Only
    /// those of a rung's counters are raised that are below its new count (Estan and Varghese's
    /// conservative update of a count-min sketch, 2002).
    fn add(&mut self, rungs: &[Rung], halve_requests: u32) -> Vec<u32> {
        self.set_header(1, self.header(1).saturating_add(1));
        self.set_header(2, self.header(2).saturating_add(1));
        if self.header(1) >= halve_requests {
            self.halve();
        }
        let mut counts = self.counts(rungs);
        for (rung, count) in rungs.iter().zip(&mut counts) {
            *count = count.saturating_add(1);
            for cell in self.cells(rung.key) {
                self.raise(cell, *count);
            }
        }
        counts
    }

    /// How often each of a prompt's rungs was counted. A rung is in no request without those above
    /// it, so it counts no more than they do: what a new prompt's deep rungs share counters with does
    /// not show.
    fn counts(&self, rungs: &[Rung]) -> Vec<u32> {
        let counts = rungs.iter().scan(u32::MAX, |above, rung| {
            *above = self.count(rung.key).min(*above);
            Some(*above)
        });
        counts.collect()
    }

    fn total(&self) -> u32 {
        self.header(2)
    }

    fn halve(&mut self) {
        self.set_header(1, 0);
        self.set_header(2, self.total() / 2);
        let (_, counters) = self.bytes.split_at_mut(HEADER_BYTES);
        for counter in counters.chunks_exact_mut(COUNTER_BYTES) {
            if let [low, high] = counter {
                [*low, *high] = (u16::from_le_bytes([*low, *high]) / 2).to_le_bytes();
            }
        }
    }

    fn count(&self, key: Key) -> u32 {
        let counter = |cell: usize| {
            let bytes = self.bytes.get(cell..cell + 2)?;
            bytes.try_into().ok().map(u16::from_le_bytes)
        };
        let counters = self.cells(key).into_iter().filter_map(counter);
        counters.min().map_or(0, u32::from)
    }

    /// Byte offsets of a key's counters, one a row. A key is a finished hash, so disjoint bits of it
    /// are independent.
    fn cells(&self, key: Key) -> [usize; ROWS] {
        let width = self.width().max(1);
        let cell = |row: usize| {
            let column = (key.0 >> (row * 16)) % width as u64;
            HEADER_BYTES + (row * width + column as usize) * COUNTER_BYTES
        };
        [cell(0), cell(1)]
    }

    fn raise(&mut self, cell: usize, count: u32) {
        let Some([low, high]) = self.bytes.get_mut(cell..cell + 2) else {
            return;
        };
        let known = u16::from_le_bytes([*low, *high]);
        let count = u16::try_from(count).unwrap_or(u16::MAX);
        [*low, *high] = known.max(count).to_le_bytes();
    }

    fn header(&self, field: usize) -> u32 {
        let bytes = self.bytes.get(field * 4..field * 4 + 4);
        bytes
            .and_then(|bytes| bytes.try_into().ok())
            .map_or(0, u32::from_le_bytes)
    }

    fn set_header(&mut self, field: usize, value: u32) {
        if let Some(bytes) = self.bytes.get_mut(field * 4..field * 4 + 4) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
    }
}

/// Bytes of a sketch with rows of so many counters.
fn bytes_of(width: usize) -> usize {
    HEADER_BYTES + ROWS * width * COUNTER_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::mix;
    use crate::store::{Cas, MemoryStore, Versioned};

    fn ladder(ids: &[u64]) -> Vec<Rung> {
        let rung = |(n, &id): (usize, &u64)| Rung {
            position: (n as u64 + 1) * 1024,
            key: Key(mix(id, 1)),
        };
        ids.iter().enumerate().map(rung).collect()
    }

    fn visits(store: &MemoryStore, ids: &[u64], times: u32) -> AdaptiveKey {
        let rungs = ladder(ids);
        let visit_once = || worker().visit(store, &rungs, 7).unwrap();
        for _ in 1..times {
            visit_once();
        }
        visit_once()
    }

    /// A worker that knows nothing yet.
    fn worker() -> Popularity {
        Popularity::new("sketch".to_owned(), Heat::default())
    }

    #[test]
    fn a_worker_without_shared_data_counts_for_itself() {
        /// Refuses everything.
        struct Gone;
        impl Store for Gone {
            fn read(&self, _key: &str) -> Result<Versioned, StoreError> {
                Err(StoreError::Refused)
            }
            fn write(&self, _: &str, _: &[u8], _: Option<Cas>) -> Result<(), StoreError> {
                Err(StoreError::Refused)
            }
        }
        let (worker, rungs) = (worker(), ladder(&[1, 2]));
        let key = worker.visit(&Gone, &rungs, 7).unwrap();
        assert_eq!(key.position, 1024);
        worker.visit(&Gone, &rungs, 7);
        assert_eq!(worker.counts(&Gone, &rungs), (vec![2, 2], 2));
    }

    #[test]
    fn a_prefix_that_few_requests_share_is_the_key() {
        let key = visits(&MemoryStore::new(), &[1, 2, 3], 4);
        assert_eq!((key.position, key.floor), (1024, 0));
    }

    #[test]
    fn a_prefix_that_all_requests_share_is_passed_over() {
        // 100 requests share the first two rungs, each has a third rung of its own. The limit is
        // 0.5 / 7 × 100 = 7.
        let store = MemoryStore::new();
        let mut last = None;
        for id in 0..100 {
            last = Some(visits(&store, &[1, 2, 1000 + id], 1));
        }
        let last = last.unwrap();
        assert_eq!((last.position, last.floor), (3072, 2048));
        assert_eq!(last.key, Key(mix(1099, 1)));
    }

    #[test]
    fn when_all_rungs_are_hot_the_whole_prompt_is_the_key() {
        let key = visits(&MemoryStore::new(), &[1, 2], 100);
        assert_eq!((key.position, key.floor), (2048, 1024));
    }

    #[test]
    fn counts_are_halved_so_that_a_prefix_cools_down() {
        let store = MemoryStore::new();
        visits(&store, &[1, 2], 500);
        for id in 0..12_000 {
            visits(&store, &[10_000 + id], 1);
        }
        assert_eq!(visits(&store, &[1, 2], 1).position, 1024);
    }

    #[test]
    fn a_sketch_of_another_layout_is_started_anew() {
        let store = MemoryStore::new();
        store
            .write("sketch", &vec![0xff; bytes_of(1024)], None)
            .unwrap();
        assert_eq!(visits(&store, &[1, 2], 1).position, 1024);
        assert_eq!(
            store.read("sketch").unwrap().value.unwrap().len(),
            bytes_of(1024)
        );
    }

    #[test]
    fn a_sketch_that_gets_wider_with_its_fleet_loses_no_count() {
        let store = MemoryStore::new();
        let rungs = ladder(&[1, 2]);
        let bytes = || store.read("sketch").unwrap().value.unwrap().len();
        visits(&store, &[1, 2], 30);
        assert_eq!(bytes(), bytes_of(1024));
        for (hosts, width) in [(26, 2048), (200, 8192), (1024, 32_768), (7, 32_768)] {
            let before = worker().counts(&store, &rungs);
            worker().visit(&store, &rungs, hosts);
            let (counts, total) = worker().counts(&store, &rungs);
            assert_eq!(counts, [before.0[0] + 1, before.0[1] + 1], "{hosts} hosts");
            assert_eq!(
                (total, bytes()),
                (before.1 + 1, bytes_of(width)),
                "{hosts} hosts"
            );
        }
    }

    #[test]
    fn what_every_request_begins_with_is_hot_however_much_is_counted() {
        let heat = Heat {
            halve_requests: 1_000_000,
            ..Heat::default()
        };
        let (popularity, store) = (
            Popularity::new("sketch".to_owned(), heat),
            MemoryStore::new(),
        );
        for id in 0..200_000 {
            let rungs = ladder(&[1, 10_000 + id]);
            let key = popularity.visit(&store, &rungs, 2).unwrap();
            assert!(id < 10 || key.floor == 1024, "request {id}");
        }
    }

    #[test]
    fn looking_at_counts_counts_nothing() {
        let store = MemoryStore::new();
        visits(&store, &[1, 2], 3);
        for _ in 0..2 {
            let seen = worker().counts(&store, &ladder(&[1, 2, 3]));
            assert_eq!(seen, (vec![3, 3, 0], 3));
        }
    }

    #[test]
    fn the_sketch_keeps_its_size() {
        let store = MemoryStore::new();
        for id in 0..5000 {
            visits(&store, &[id, id + 1, id + 2], 1);
        }
        assert_eq!(store.read("sketch").unwrap().value.unwrap().len(), 4_108);
    }

    #[test]
    fn prompts_that_come_once_are_hot_in_no_fleet() {
        // 40 rungs each, of which counters in use rise to some level together.
        for hosts in [1, 7, 25, 64, 128, 204, 400, 1024] {
            let store = MemoryStore::new();
            for id in 1..=4000 {
                let own: Vec<u64> = (0..40).map(|rung| 1_000 * id + rung).collect();
                let key = worker().visit(&store, &ladder(&own), hosts).unwrap();
                assert_eq!(key.position, 1024, "prompt {id} on {hosts} hosts");
            }
        }
    }

    #[test]
    fn prompts_that_share_nothing_add_little_to_the_counts_of_others() {
        // 4,000 prompts of 20 rungs each: 80,000 counts in 1,024 counters a row, of which the
        // halving keeps about half. Added to all counters, each would have some 40 by then.
        let store = MemoryStore::new();
        let own = |id: u64| -> Vec<u64> { (0..20).map(|rung| 1_000 * id + rung).collect() };
        for id in 1..=4000 {
            visits(&store, &own(id), 1);
        }
        let counts = worker().counts(&store, &ladder(&own(5000))).0;
        assert!(counts.iter().all(|count| *count <= 24), "{counts:?}");
        // Counted all the same: one that comes again and again.
        let ids = own(6000);
        visits(&store, &ids, 30);
        let counts = worker().counts(&store, &ladder(&ids)).0;
        assert!(
            counts.iter().all(|count| (30..=54).contains(count)),
            "{counts:?}"
        );
    }

    #[test]
    fn a_rung_counts_no_more_than_the_ones_above_it() {
        let store = MemoryStore::new();
        visits(&store, &[1, 2], 9);
        // 2 below 3, which is new: it was counted as a rung of others.
        assert_eq!(worker().counts(&store, &ladder(&[1, 2])).0, [9, 9]);
        assert_eq!(worker().counts(&store, &ladder(&[3, 2])).0, [0, 0]);
        visits(&store, &[3, 2], 1);
        assert_eq!(worker().counts(&store, &ladder(&[3, 2])).0, [1, 1]);
        assert_eq!(worker().counts(&store, &ladder(&[1, 2])).0, [9, 9]);
    }
}
