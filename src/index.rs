//! Which hosts were sent which prefixes, in a table of fixed size.
//!
//! Guarantee: constant size, no text, tolerant of lost races: a lost entry costs an estimate,
//! never a wrong host. Not here: what a match is worth (route.rs), the checkpoints (prefix.rs).
//!
//! A request needs one page of the table: all its checkpoints lie in the page of its key, because
//! two prompts that share a checkpoint deeper than the key share the key too. So a look-up is one
//! read and an insertion one compare-and-swap, whatever the prompt's length.

use crate::load::{Seat, Slot};
use crate::prefix::Key;
use crate::store::{self, Cas, Store, StoreError};

/// Pages: a power of two. 32 pages × 32 sets × 8 ways = 8,192 entries (ROUTING.md 6).
const PAGES: u64 = 32;
const SETS: usize = 32;
const WAYS: usize = 8;
/// Hosts in an entry, the last one sent first; ROUTING.md 6: R = 4.
const HOSTS: usize = 4;
/// A tag of 4 bytes and the hosts, 2 bytes each.
const ENTRY_BYTES: usize = 4 + 2 * HOSTS;
const SET_BYTES: usize = WAYS * ENTRY_BYTES;
/// Layout version.
const HEADER_BYTES: usize = 4;
const LAYOUT: u32 = 1;
/// 4 + 32 × 8 × 12 = 3,076 bytes; the whole table of a pool is 96 KiB.
const PAGE_BYTES: usize = HEADER_BYTES + SETS * SET_BYTES;
/// Attempts against other workers. What is lost is one request's memory of where it went.
const ATTEMPTS_MAX: u32 = 3;
/// Bits of a host reference that name the slot; the rest name its epoch.
const SLOT_BITS: u32 = 10;

/// A host in the index: its slot and what it has become there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRef(u16);

impl HostRef {
    /// The reference to a host. A host that came back with an empty cache has a new epoch, so what
    /// was known of it no longer matches.
    #[must_use]
    pub fn new(seat: Seat, epoch: u16) -> Self {
        // All ones is "no host": slot 1023 in the last epoch is never reached, for its generation
        // and epoch are folded into 6 bits of which 63 is skipped.
        let life = u32::from(epoch).wrapping_add(u32::from(seat.generation) * 7) % 63;
        let slot = u32::from(seat.slot.0) % (1 << SLOT_BITS);
        Self(u16::try_from(life << SLOT_BITS | slot).unwrap_or(NO_HOST))
    }

    /// The slot it names.
    #[must_use]
    pub fn slot(self) -> Slot {
        Slot(self.0 & ((1 << SLOT_BITS) - 1))
    }
}

const NO_HOST: u16 = u16::MAX;

/// A page as it was read, to be looked up in and written back. It is read for each request: a chat's
/// next turn may come to another worker as soon as its answer ended, and has to find its host there.
/// With copies of 20 ms, of 200 later turns of chats that are answered at once 186 to 195 stayed
/// instead of 196 and more.
#[derive(Debug)]
pub struct Page {
    name: String,
    cas: Cas,
    bytes: Vec<u8>,
}

/// Empties every page of the index `name`.
pub fn clear(store: &impl Store, name: &str) {
    (0..PAGES).for_each(|page| store::clear(store, &page_key(name, page)));
}

fn page_key(name: &str, page: u64) -> String {
    format!("{name}.{page}")
}

impl Page {
    /// The page of a key in the index `name`; an empty one if shared data cannot be read.
    #[must_use]
    pub fn read(store: &impl Store, name: &str, key: Key) -> Self {
        let number = key.0 >> 32 & (PAGES - 1);
        Self::read_named(store, page_key(name, number))
    }

    fn read_named(store: &impl Store, name: String) -> Self {
        let seen = store.read(&name).unwrap_or_default();
        let mut bytes = seen.value.unwrap_or_default();
        let is_ours = bytes.len() == PAGE_BYTES && bytes.starts_with(&LAYOUT.to_le_bytes());
        if !is_ours {
            bytes = vec![0xff; PAGE_BYTES];
            if let Some(header) = bytes.get_mut(..HEADER_BYTES) {
                header.copy_from_slice(&LAYOUT.to_le_bytes());
            }
        }
        Self {
            name,
            cas: seen.cas,
            bytes,
        }
    }

    /// The hosts that were sent these checkpoints, each host once, with what is said of the first of
    /// its checkpoints. Those of one checkpoint come the latest first.
    #[must_use]
    pub fn hosts<T: Copy>(&self, checkpoints: impl Iterator<Item = (Key, T)>) -> Vec<(HostRef, T)> {
        let mut found: Vec<(HostRef, T)> = Vec::new();
        for (checkpoint, said) in checkpoints {
            for host in self.hosts_sent(checkpoint) {
                if !found.iter().any(|(other, _)| *other == host) {
                    found.push((host, said));
                }
            }
        }
        found
    }

    fn hosts_sent(&self, checkpoint: Key) -> impl Iterator<Item = HostRef> + '_ {
        let entry = self.set(checkpoint).and_then(|set| {
            set.chunks_exact(ENTRY_BYTES)
                .find(|entry| entry.starts_with(&tag(checkpoint)))
        });
        entry.into_iter().flat_map(hosts_of)
    }

    /// Notes that `host` was sent these checkpoints.
    pub fn insert(self, store: &impl Store, checkpoints: &[Key], host: HostRef) {
        self.write(store, checkpoints, |page, one| page.insert_one(one, host));
    }

    /// Forgets that `host` was sent these checkpoints.
    pub fn forget(self, store: &impl Store, checkpoints: &[Key], host: HostRef) {
        self.write(store, checkpoints, |page, one| page.forget_one(one, host));
    }

    /// Changes what is said of these checkpoints, and writes the page if that changes it.
    fn write(
        mut self,
        store: &impl Store,
        checkpoints: &[Key],
        change: impl Fn(&mut Self, Key) -> bool,
    ) {
        for _ in 0..ATTEMPTS_MAX {
            // All have to be changed.
            let changes = checkpoints.iter().filter(|one| change(&mut self, **one));
            if changes.count() == 0 {
                return;
            }
            match store.write(&self.name, &self.bytes, Some(self.cas)) {
                Err(StoreError::Stale) => self = Self::read_named(store, self.name),
                Ok(()) | Err(StoreError::Refused) => return,
            }
        }
    }

    fn set(&self, checkpoint: Key) -> Option<&[u8]> {
        self.bytes
            .get(set_start(checkpoint)..set_start(checkpoint) + SET_BYTES)
    }

    /// Puts the checkpoint's entry in front of its set, with the host in front of its hosts; whether
    /// that changes anything. The entry that was used longest ago drops out. One that says the same
    /// already stays where it is in the front half, so that a prompt that recurs costs no write.
    fn insert_one(&mut self, checkpoint: Key, host: HostRef) -> bool {
        let start = set_start(checkpoint);
        let Some(set) = self.bytes.get_mut(start..start + SET_BYTES) else {
            return false;
        };
        let tag = tag(checkpoint);
        let mut entries = set.chunks_exact(ENTRY_BYTES);
        let found = entries.position(|entry| entry.starts_with(&tag));
        let known = found.filter(|way| *way < WAYS / 2);
        let known = known.and_then(|way| set.chunks_exact(ENTRY_BYTES).nth(way));
        if known.is_some_and(|entry| hosts_of(entry).next() == Some(host)) {
            return false;
        }
        let way = found.unwrap_or(WAYS - 1);
        let mut hosts = [NO_HOST; HOSTS];
        if let Some(entry) = found.and_then(|way| set.chunks_exact(ENTRY_BYTES).nth(way)) {
            let others = hosts_of(entry).filter(|other| *other != host);
            for (place, other) in hosts.iter_mut().skip(1).zip(others) {
                *place = other.0;
            }
        }
        if let Some(first) = hosts.first_mut() {
            *first = host.0;
        }
        set.copy_within(0..way * ENTRY_BYTES, ENTRY_BYTES);
        write_entry(set, tag, hosts);
        true
    }

    /// Takes the host out of the checkpoint's entry; whether it was there.
    fn forget_one(&mut self, checkpoint: Key, host: HostRef) -> bool {
        let start = set_start(checkpoint);
        let Some(set) = self.bytes.get_mut(start..start + SET_BYTES) else {
            return false;
        };
        let tag = tag(checkpoint);
        let mut entries = set.chunks_exact_mut(ENTRY_BYTES);
        let Some(entry) = entries.find(|entry| entry.starts_with(&tag)) else {
            return false;
        };
        if !hosts_of(entry).any(|other| other == host) {
            return false;
        }
        let mut hosts = [NO_HOST; HOSTS];
        let kept = hosts_of(entry).filter(|other| *other != host);
        for (place, other) in hosts.iter_mut().zip(kept) {
            *place = other.0;
        }
        write_entry(entry, tag, hosts);
        true
    }
}

fn write_entry(bytes: &mut [u8], tag: [u8; 4], hosts: [u16; HOSTS]) {
    let fields = tag
        .into_iter()
        .chain(hosts.into_iter().flat_map(u16::to_le_bytes));
    for (byte, value) in bytes.iter_mut().zip(fields) {
        *byte = value;
    }
}

fn hosts_of(entry: &[u8]) -> impl Iterator<Item = HostRef> + '_ {
    let hosts = entry.get(4..).unwrap_or_default().chunks_exact(2);
    let hosts = hosts.filter_map(|bytes| Some(u16::from_le_bytes(bytes.try_into().ok()?)));
    hosts.filter(|host| *host != NO_HOST).map(HostRef)
}

fn tag(checkpoint: Key) -> [u8; 4] {
    // An empty entry is all ones; a tag never is.
    ((checkpoint.0 as u32) & 0x7fff_ffff).to_le_bytes()
}

fn set_start(checkpoint: Key) -> usize {
    HEADER_BYTES + (checkpoint.0 >> 48) as usize % SETS * SET_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::mix;
    use crate::store::MemoryStore;

    const KEY: Key = Key(0x0123_4567_89ab_cdef);

    fn host(slot: u16) -> HostRef {
        HostRef::new(
            Seat {
                slot: Slot(slot),
                generation: 1,
            },
            1,
        )
    }

    fn checkpoint(n: u64) -> Key {
        Key(mix(n, 99))
    }

    fn keys(checkpoints: &[u64]) -> Vec<Key> {
        checkpoints.iter().map(|&n| checkpoint(n)).collect()
    }

    fn page(store: &MemoryStore) -> Page {
        Page::read(store, "index", KEY)
    }

    fn insert(store: &MemoryStore, checkpoints: &[u64], slot: u16) {
        page(store).insert(store, &keys(checkpoints), host(slot));
    }

    #[track_caller]
    fn check(store: &MemoryStore, n: u64, expected: &[u16]) {
        let found = page(store).hosts([(checkpoint(n), ())].into_iter());
        let found: Vec<u16> = found.iter().map(|(host, ())| host.slot().0).collect();
        assert_eq!(found, expected, "hosts of checkpoint {n}");
    }

    #[test]
    fn what_another_notes_between_a_look_and_the_writing_is_not_lost() {
        let store = MemoryStore::new();
        insert(&store, &[1], 3);
        let busy = page(&store);
        insert(&store, &[1], 7);
        busy.insert(&store, &keys(&[1, 2]), host(8));
        check(&store, 1, &[8, 7, 3]);
        check(&store, 2, &[8]);
    }

    #[test]
    fn a_prompt_that_recurs_is_not_written_again_but_is_not_dropped_either() {
        let store = MemoryStore::new();
        let cas = || store.read(&page(&store).name).unwrap().cas;
        insert(&store, &[1, 2], 3);
        let before = cas();
        insert(&store, &[1, 2], 3);
        assert_eq!(cas(), before);
        insert(&store, &[1, 2], 4);
        assert!(cas() > before);
    }

    #[test]
    fn remembers_the_last_four_hosts_of_a_checkpoint_latest_first() {
        let store = MemoryStore::new();
        check(&store, 1, &[]);
        for slot in [3, 5, 3, 7, 8] {
            insert(&store, &[1], slot);
        }
        check(&store, 1, &[8, 7, 3, 5]);
        insert(&store, &[1], 9);
        check(&store, 1, &[9, 8, 7, 3]);
        check(&store, 2, &[]);
    }

    #[test]
    fn forgets_a_host_that_did_not_have_what_was_thought() {
        let store = MemoryStore::new();
        insert(&store, &[1, 2, 3], 4);
        insert(&store, &[2], 5);
        page(&store).forget(&store, &keys(&[2, 3]), host(4));
        check(&store, 1, &[4]);
        check(&store, 2, &[5]);
        check(&store, 3, &[]);
    }

    #[test]
    fn a_host_that_came_back_is_another_host() {
        let seat = Seat {
            slot: Slot(4),
            generation: 1,
        };
        assert_ne!(HostRef::new(seat, 1), HostRef::new(seat, 2));
        assert_ne!(
            HostRef::new(seat, 1),
            HostRef::new(
                Seat {
                    generation: 2,
                    ..seat
                },
                1
            )
        );
        assert_eq!(HostRef::new(seat, 1).slot(), Slot(4));
        for epoch in 0..=u16::MAX {
            let last = Seat {
                slot: Slot(1023),
                generation: 1,
            };
            assert_ne!(HostRef::new(last, epoch).0, NO_HOST);
        }
    }

    #[test]
    fn a_full_set_drops_what_was_used_longest_ago_and_the_page_keeps_its_size() {
        let store = MemoryStore::new();
        insert(&store, &[1], 1);
        for n in 2..10_000 {
            insert(&store, &[n], 2);
            insert(&store, &[1], 1);
        }
        check(&store, 1, &[1]);
        check(&store, 9_999, &[2]);
        check(&store, 2, &[]);
        let page = page(&store);
        assert_eq!(page.bytes.len(), 3076);
        let named = |n: &u64| page.hosts_sent(checkpoint(*n)).next().is_some();
        let kept = (1..10_000).filter(named).count();
        assert!(
            (200..=SETS * WAYS).contains(&kept),
            "{kept} entries kept of 256"
        );
    }

    #[test]
    fn a_page_of_another_layout_is_started_anew() {
        let store = MemoryStore::new();
        let name = page(&store).name;
        store.write(&name, &[9; PAGE_BYTES], None).unwrap();
        check(&store, 1, &[]);
        insert(&store, &[1], 6);
        check(&store, 1, &[6]);
    }
}
