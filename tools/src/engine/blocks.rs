//! The KV cache of one simulated engine: a pool of blocks, found by the hash of all text up to
//! their end, evicted least recently used first.
//!
//! Guarantee: a pinned block is never evicted; a block that is found has every block before it in
//! its chain in the cache too. Not here: which blocks a sequence needs (scheduler.rs).

#![expect(
    clippy::indexing_slicing,
    reason = "slots and blocks are numbers this module gave out itself and never takes back"
)]

use rustc_hash::FxHashMap;

/// No block: the end of the free list.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Block {
    hash: Option<u64>,
    pins: u32,
    // Neighbours in the free list, where the block is while nobody pins it.
    previous: u32,
    next: u32,
}

/// A fixed number of blocks.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    by_hash: FxHashMap<u64, u32>,
    // Evicted from the front.
    front: u32,
    back: u32,
    free: u32,
}

impl BlockPool {
    /// A pool of `count` empty blocks.
    #[must_use]
    pub fn new(count: u32) -> Self {
        let blocks = (0..count)
            .map(|index| Block {
                hash: None,
                pins: 0,
                previous: index.checked_sub(1).unwrap_or(NONE),
                next: if index + 1 < count { index + 1 } else { NONE },
            })
            .collect();
        Self {
            blocks,
            by_hash: FxHashMap::default(),
            front: if count == 0 { NONE } else { 0 },
            back: count.checked_sub(1).unwrap_or(NONE),
            free: count,
        }
    }

    /// Blocks that nobody pins: what can be allocated, whether it holds something or not.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Blocks that sequences hold.
    #[must_use]
    pub fn pinned(&self) -> u32 {
        self.len() - self.free
    }

    /// All blocks.
    #[must_use]
    pub fn len(&self) -> u32 {
        u32::try_from(self.blocks.len()).unwrap_or(NONE)
    }

    /// Whether the pool has no block at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks that can be found by their hash.
    #[must_use]
    pub fn cached(&self) -> u32 {
        u32::try_from(self.by_hash.len()).unwrap_or(NONE)
    }

    /// How many of the chain's leading blocks are cached, and how many of those nobody pins.
    #[must_use]
    pub fn find(&self, chain: &[u64]) -> (u32, u32) {
        let mut found = 0;
        let mut unpinned = 0;
        for hash in chain {
            let Some(&index) = self.by_hash.get(hash) else {
                break;
            };
            found += 1;
            unpinned += u32::from(self.blocks[index as usize].pins == 0);
        }
        (found, unpinned)
    }

    /// [`Self::find`]'s first figure, with a number of look-ups logarithmic in the chain's length:
    /// for those who ask every engine about every prompt. Exact, because the cache is closed
    /// under "the block before".
    #[must_use]
    pub fn depth(&self, chain: &[u64]) -> u32 {
        let depth = chain.partition_point(|hash| self.by_hash.contains_key(hash));
        u32::try_from(depth).unwrap_or(NONE)
    }

    /// Pins the chain's leading cached blocks and appends them to `held`.
    pub fn pin(&mut self, chain: &[u64], held: &mut Vec<u32>) {
        for hash in chain {
            let Some(&index) = self.by_hash.get(hash) else {
                return;
            };
            self.pin_one(index);
            held.push(index);
        }
    }

    /// Takes the block that was unused for longest; what it held is forgotten.
    pub fn allocate(&mut self) -> Option<u32> {
        if self.front == NONE {
            return None;
        }
        let index = self.front;
        if let Some(hash) = self.blocks[index as usize].hash.take() {
            self.by_hash.remove(&hash);
        }
        self.pin_one(index);
        Some(index)
    }

    /// Makes a held block findable. If another one holds the same text, that one is pinned in its
    /// place, so that a chain's blocks always share one fate. Returns the block now held.
    pub fn publish(&mut self, index: u32, hash: u64) -> u32 {
        if let Some(&other) = self.by_hash.get(&hash) {
            if other != index {
                self.pin_one(other);
                self.release(&[index]);
            }
            return other;
        }
        self.by_hash.insert(hash, index);
        self.blocks[index as usize].hash = Some(hash);
        index
    }

    /// Lets go of a sequence's blocks, the last one first, so that a chain is evicted from its end.
    pub fn release(&mut self, held: &[u32]) {
        for &index in held.iter().rev() {
            let block = &mut self.blocks[index as usize];
            debug_assert!(block.pins > 0, "a block is released once per pin");
            block.pins = block.pins.saturating_sub(1);
            if block.pins > 0 {
                continue;
            }
            // What cannot be found again is the first to be reused.
            if block.hash.is_some() {
                self.push_back(index);
            } else {
                self.push_front(index);
            }
        }
    }

    /// Forgets everything; held blocks stay held but are not found any more.
    pub fn flush(&mut self) {
        for index in self.by_hash.values() {
            self.blocks[*index as usize].hash = None;
        }
        self.by_hash.clear();
    }

    fn pin_one(&mut self, index: u32) {
        if self.blocks[index as usize].pins == 0 {
            self.unlink(index);
        }
        self.blocks[index as usize].pins += 1;
    }

    fn unlink(&mut self, index: u32) {
        let Block { previous, next, .. } = self.blocks[index as usize];
        if previous == NONE {
            self.front = next;
        } else {
            self.blocks[previous as usize].next = next;
        }
        if next == NONE {
            self.back = previous;
        } else {
            self.blocks[next as usize].previous = previous;
        }
        self.free -= 1;
    }

    fn push_back(&mut self, index: u32) {
        let back = std::mem::replace(&mut self.back, index);
        self.blocks[index as usize].previous = back;
        self.blocks[index as usize].next = NONE;
        if back == NONE {
            self.front = index;
        } else {
            self.blocks[back as usize].next = index;
        }
        self.free += 1;
    }

    fn push_front(&mut self, index: u32) {
        let front = std::mem::replace(&mut self.front, index);
        self.blocks[index as usize].next = front;
        self.blocks[index as usize].previous = NONE;
        if front == NONE {
            self.back = index;
        } else {
            self.blocks[front as usize].previous = index;
        }
        self.free += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(pool: &mut BlockPool, chain: &[u64]) -> Vec<u32> {
        let mut held = Vec::new();
        pool.pin(chain, &mut held);
        for &hash in &chain[held.len()..] {
            let index = pool.allocate().unwrap();
            held.push(pool.publish(index, hash));
        }
        held
    }

    #[test]
    fn the_end_of_the_chain_unused_for_longest_goes_first() {
        let mut pool = BlockPool::new(4);
        let first = hold(&mut pool, &[1, 2]);
        let second = hold(&mut pool, &[3, 4]);
        pool.release(&first);
        pool.release(&second);
        pool.allocate().unwrap();
        assert_eq!(pool.find(&[1, 2]), (1, 1));
        assert_eq!(pool.find(&[3, 4]), (2, 2));
        pool.allocate().unwrap();
        assert_eq!(pool.depth(&[1, 2]), 0);
        assert_eq!(pool.depth(&[3, 4]), 2);
    }

    #[test]
    fn pinned_blocks_are_never_evicted() {
        let mut pool = BlockPool::new(2);
        let held = hold(&mut pool, &[1]);
        let again = hold(&mut pool, &[1]);
        assert_eq!(held, again);
        assert!(pool.allocate().is_some());
        assert_eq!(pool.allocate(), None);
        pool.release(&held);
        assert_eq!(pool.allocate(), None);
        pool.release(&again);
        assert_eq!(pool.find(&[1]), (1, 1));
        assert!(pool.allocate().is_some());
        assert_eq!(pool.find(&[1]), (0, 0));
    }

    #[test]
    fn the_same_text_computed_twice_is_kept_once() {
        let mut pool = BlockPool::new(4);
        let one = pool.allocate().unwrap();
        let two = pool.allocate().unwrap();
        assert_eq!(pool.publish(one, 7), one);
        assert_eq!(pool.publish(two, 7), one);
        assert_eq!(pool.pinned(), 1);
        pool.release(&[one, one]);
        assert_eq!((pool.pinned(), pool.cached()), (0, 1));
    }

    #[test]
    fn a_flush_forgets_held_blocks_too() {
        let mut pool = BlockPool::new(4);
        let held = hold(&mut pool, &[1, 2]);
        pool.flush();
        assert_eq!(pool.find(&[1, 2]), (0, 0));
        assert_eq!(pool.pinned(), 2);
        pool.release(&held);
        assert_eq!((pool.pinned(), pool.cached()), (0, 0));
    }
}
