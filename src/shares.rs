//! What each VM has in flight on which host: of hosts whose requests nobody else counts, or on which
//! there seem to be more than there are, so that what a stopped VM leaves behind can be taken back.
//!
//! Guarantee: a share is what its VM said last, and is written with the counts, in one value. Not
//! here: the counts (load.rs).

use crate::load::Slot;

/// VMs with requests in flight: twice the workers of the largest machines, for the old and the new
/// configuration of a listener. What further ones leave behind is not taken back.
const VMS_MAX: usize = 512;
/// Pairs of a VM and a host with requests in flight: 32 workers with 250 hosts each, 160 KiB. What
/// is beyond is counted, but not taken back.
const PARTS_MAX: usize = 8192;
/// Owner and beat, 8 bytes each.
const VM_BYTES: usize = 16;
/// Owner (8 bytes), slot and nothing (2 each), in flight and pending (4 each).
const PART_BYTES: usize = 20;

/// A VM that takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Vm {
    owner: u64,
    /// When it last said that it runs, in milliseconds since 1970.
    beat_ms: u64,
}

/// What one VM has in flight on one host; never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The VM.
    pub owner: u64,
    /// The host's slot.
    pub slot: Slot,
    /// Its requests there.
    pub in_flight: u32,
    /// Their pending tokens.
    pub pending: u32,
}

/// The VMs that take part, and their shares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    vms: Vec<Vm>,
    parts: Vec<Part>,
}

impl Shares {
    /// Takes the shares off the end of `bytes`, where so many VMs and parts are; `None` if there
    /// are not so many bytes.
    pub fn split_off(bytes: &mut Vec<u8>, vms: u32, parts: u32) -> Option<Self> {
        let vms_bytes = usize::try_from(vms).ok()?.checked_mul(VM_BYTES)?;
        let parts_bytes = usize::try_from(parts).ok()?.checked_mul(PART_BYTES)?;
        let at = bytes
            .len()
            .checked_sub(vms_bytes.checked_add(parts_bytes)?)?;
        let tail = bytes.split_off(at);
        let (vms, parts) = tail.split_at_checked(vms_bytes)?;
        let vm = |bytes: &[u8]| Vm {
            owner: number(bytes, 0, 8),
            beat_ms: number(bytes, 8, 8),
        };
        let part = |bytes: &[u8]| Part {
            owner: number(bytes, 0, 8),
            // Exact: each is written from a number of this size.
            slot: Slot(number(bytes, 8, 2) as u16),
            in_flight: number(bytes, 12, 4) as u32,
            pending: number(bytes, 16, 4) as u32,
        };
        Some(Self {
            vms: vms.chunks_exact(VM_BYTES).map(vm).collect(),
            parts: parts.chunks_exact(PART_BYTES).map(part).collect(),
        })
    }

    /// Appends the shares to `bytes`.
    pub fn append_to(&self, bytes: &mut Vec<u8>) {
        for vm in &self.vms {
            bytes.extend(vm.owner.to_le_bytes());
            bytes.extend(vm.beat_ms.to_le_bytes());
        }
        for part in &self.parts {
            bytes.extend(part.owner.to_le_bytes());
            bytes.extend(u32::from(part.slot.0).to_le_bytes());
            bytes.extend(part.in_flight.to_le_bytes());
            bytes.extend(part.pending.to_le_bytes());
        }
    }

    /// How many VMs and how many parts there are.
    #[must_use]
    pub fn counts(&self) -> [u32; 2] {
        [self.vms.len(), self.parts.len()].map(|count| u32::try_from(count).unwrap_or(u32::MAX))
    }

    /// Whether a VM takes part.
    #[must_use]
    pub fn has(&self, owner: u64) -> bool {
        self.vms.iter().any(|vm| vm.owner == owner)
    }

    /// The VM runs: it takes part from now on, if there is room.
    pub fn beat(&mut self, owner: u64, now_ms: u64) {
        if let Some(vm) = self.vms.iter_mut().find(|vm| vm.owner == owner) {
            vm.beat_ms = now_ms;
        } else if self.vms.len() < VMS_MAX {
            self.vms.push(Vm {
                owner,
                beat_ms: now_ms,
            });
        }
    }

    /// The VM has nothing in flight any more.
    pub fn leave(&mut self, owner: u64) {
        self.vms.retain(|vm| vm.owner != owner);
        self.parts.retain(|part| part.owner != owner);
    }

    /// One VM's parts.
    pub fn of(&self, owner: u64) -> impl Iterator<Item = Part> {
        let parts = self.parts.iter().copied();
        parts.filter(move |part| part.owner == owner)
    }

    /// These are all of a VM's parts from now on, as far as there is room. Whether they are others
    /// than before.
    pub fn replace(&mut self, owner: u64, parts: Vec<Part>, now_ms: u64) -> bool {
        if self.of(owner).eq(parts.iter().copied()) {
            return false;
        }
        if !self.has(owner) {
            self.beat(owner, now_ms);
        }
        self.parts.retain(|part| part.owner != owner);
        if self.has(owner) {
            let room = PARTS_MAX.saturating_sub(self.parts.len());
            self.parts.extend(parts.into_iter().take(room));
        }
        true
    }

    /// Whether one more VM could say what it has on one more host.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.vms.len() < VMS_MAX && self.parts.len() < PARTS_MAX
    }

    /// Requests in flight and pending tokens in a slot, of all VMs.
    #[must_use]
    pub fn total(&self, slot: Slot) -> [u32; 2] {
        let parts = self.parts.iter().filter(|part| part.slot == slot);
        parts.fold([0, 0], |[in_flight, pending]: [u32; 2], part| {
            let in_flight = in_flight.saturating_add(part.in_flight);
            [in_flight, pending.saturating_add(part.pending)]
        })
    }

    /// The slot has another tenant, or its requests are counted by somebody else now.
    pub fn forget(&mut self, slot: Slot) {
        self.parts.retain(|part| part.slot != slot);
    }

    /// Takes out every VM but `own` that has not beaten for so long, with its parts. After a clock
    /// was set, in either direction, this may take out VMs that run: they come back.
    pub fn take_out(&mut self, own: u64, now_ms: u64, stopped_ms: u64) -> Vec<Part> {
        let vms = self.vms.iter();
        let stopped: Vec<u64> = vms
            .filter(|vm| vm.owner != own && now_ms.abs_diff(vm.beat_ms) >= stopped_ms)
            .map(|vm| vm.owner)
            .collect();
        let parts = self.parts.iter().copied();
        let parts = parts.filter(|part| stopped.contains(&part.owner)).collect();
        stopped.into_iter().for_each(|owner| self.leave(owner));
        parts
    }
}

/// The number in so many bytes of `bytes`, the least significant first.
fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    let bytes = bytes.get(at..at + len).unwrap_or_default();
    let digits = bytes.iter().rev();
    digits.fold(0, |number, digit| number << 8 | u64::from(*digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(owner: u64, slot: u16, in_flight: u32, pending: u32) -> Part {
        let slot = Slot(slot);
        Part {
            owner,
            slot,
            in_flight,
            pending,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let mut shares = Shares::default();
        shares.replace(u64::MAX, vec![part(u64::MAX, 1023, 2, u32::MAX)], 1 << 40);
        shares.replace(7, vec![part(7, 0, 1, 0)], 3);
        let mut bytes = b"before".to_vec();
        shares.append_to(&mut bytes);
        let [vms, parts] = shares.counts();
        assert_eq!(Shares::split_off(&mut bytes.clone(), vms, parts + 1), None);
        assert_eq!(Shares::split_off(&mut bytes, vms, parts), Some(shares));
        assert_eq!(bytes, b"before");
        assert_eq!(Shares::split_off(&mut bytes, u32::MAX, u32::MAX), None);
    }

    #[test]
    fn so_many_vms_take_part_and_no_more() {
        let mut shares = Shares::default();
        for owner in 0..2 * VMS_MAX as u64 {
            shares.replace(owner, vec![part(owner, 0, 1, 1)], 0);
        }
        assert_eq!(shares.counts(), [VMS_MAX as u32; 2]);
        assert!(!shares.has_room());
        shares.leave(0);
        assert!(shares.has_room());
        let parts = (0..PARTS_MAX as u16).map(|slot| part(9999, slot, 1, 1));
        shares.replace(9999, parts.collect(), 0);
        assert!(shares.has(9999));
        assert_eq!(shares.counts()[1], PARTS_MAX as u32);
        assert!(!shares.has_room());
    }

    #[test]
    fn what_a_vm_says_replaces_what_it_said() {
        let mut shares = Shares::default();
        assert!(shares.replace(1, vec![part(1, 0, 2, 5), part(1, 3, 1, 7)], 0));
        assert!(!shares.replace(1, vec![part(1, 0, 2, 5), part(1, 3, 1, 7)], 9));
        assert!(shares.replace(2, vec![part(2, 3, 4, 1)], 0));
        assert_eq!(shares.total(Slot(3)), [5, 8]);
        assert!(shares.replace(1, vec![part(1, 3, 1, 0)], 0));
        let totals = [0, 1, 2, 3].map(|slot| shares.total(Slot(slot)));
        assert_eq!(totals, [[0, 0], [0, 0], [0, 0], [5, 1]]);
        assert!(!shares.replace(9, Vec::new(), 0));
        assert_eq!(shares.counts(), [2, 2]);
    }

    #[test]
    fn only_a_vm_that_has_stood_still_is_taken_out() {
        let mut shares = Shares::default();
        for (owner, beat_ms) in [(1, 0), (2, 5000), (3, 6000), (4, 20_000)] {
            shares.replace(owner, vec![part(owner, 0, 1, 1)], beat_ms);
        }
        // The fourth beat before the clock was set back.
        let out = shares.take_out(1, 10_000, 5000);
        assert_eq!(out, [part(2, 0, 1, 1), part(4, 0, 1, 1)]);
        assert_eq!(shares.counts(), [2, 2]);
        assert!(shares.has(1) && shares.has(3));
    }
}
