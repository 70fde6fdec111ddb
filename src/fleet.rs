//! The hosts of all pools, kept for all workers in one shared value; and the repair of their loads.
//!
//! Guarantee: a slot belongs to one host as long as requests run on it; a host that leaves and
//! returns finds its running requests again; a host of another address never inherits any. Not
//! here: what makes a host usable (hosts.rs), counting (load.rs).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::excess::{Excess, LOOKS_MIN};
use crate::hosts::{HostReport, SLOTS_MAX, State};
use crate::load::{self, Ledger, Load, Loads, NO_CHANGES, STOPPED_MS, Seat, Slot};
use crate::placement::HostId;
use crate::pool::{Host, View};
use crate::store::{Store, StoreError};

/// The shared-data key of the table; its number is the layout's version.
const TABLE_KEY: &str = "prefix_router.2.hosts";
/// Attempts against another worker that applies a report at the same time.
const ATTEMPTS_MAX: u32 = 8;
/// Slots whose host is gone are kept for its return, up to so many: pods restart in groups.
const GONE_MAX: usize = 64;

/// One address's place in the loads.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tenant {
    address: String,
    generation: u16,
    /// Grows whenever the host comes back: what it had cached is gone.
    epoch: u16,
    /// The table's version at which its last pool dropped it; 0 while it has one.
    gone_since: u32,
}

/// A host's state in one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    pool: String,
    slot: Slot,
    state: State,
    weight: u32,
    /// When it last became usable, in milliseconds since 1970.
    since_ms: u64,
    /// When a request first missed it since it last answered one; 0 if none did. Only of hosts
    /// that are learned.
    missing_ms: u64,
    /// Whether Envoy's own count of its requests is known.
    counted: bool,
    /// Empty if it is not known.
    zone: String,
}

/// All hosts, by slot, and their states in each pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Table {
    version: u32,
    tenants: BTreeMap<Slot, Tenant>,
    members: Vec<Member>,
}

impl Table {
    fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut lines = text.lines();
        let mut table = Self {
            version: lines.next()?.parse().ok()?,
            ..Self::default()
        };
        for line in lines {
            let mut words = line.splitn(9, ' ');
            let kind = words.next()?;
            let slot = Slot(words.next()?.parse().ok()?);
            match kind {
                "host" => {
                    let generation = words.next()?.parse().ok()?;
                    let epoch = words.next()?.parse().ok()?;
                    let gone_since = words.next()?.parse().ok()?;
                    let address = words.next()?.to_owned();
                    let tenant = Tenant {
                        address,
                        generation,
                        epoch,
                        gone_since,
                    };
                    table.tenants.insert(slot, tenant);
                }
                "member" => {
                    let state = State::from_label(words.next()?)?;
                    let weight = words.next()?.parse().ok()?;
                    let since_ms = words.next()?.parse().ok()?;
                    let missing_ms = words.next()?.parse().ok()?;
                    let counted = words.next()?.parse().ok()?;
                    let zone = words.next()?.to_owned();
                    let pool = words.next()?.to_owned();
                    table.members.push(Member {
                        pool,
                        slot,
                        state,
                        weight,
                        since_ms,
                        missing_ms,
                        counted,
                        zone,
                    });
                }
                _ => return None,
            }
        }
        Some(table)
    }

    fn encode(&self) -> Vec<u8> {
        let mut text = format!("{}\n", self.version);
        for (slot, tenant) in &self.tenants {
            let Tenant {
                address,
                generation,
                epoch,
                gone_since,
            } = tenant;
            text.push_str(&format!(
                "host {} {generation} {epoch} {gone_since} {address}\n",
                slot.0
            ));
        }
        for Member {
            pool,
            slot,
            state,
            weight,
            since_ms,
            missing_ms,
            counted,
            zone,
        } in &self.members
        {
            text.push_str(&format!(
                "member {} {} {weight} {since_ms} {missing_ms} {counted} {zone} {pool}\n",
                slot.0,
                state.label()
            ));
        }
        text.into_bytes()
    }

    fn slot_of(&self, address: &str) -> Option<Slot> {
        self.tenants
            .iter()
            .find(|(_, tenant)| tenant.address == address)
            .map(|(slot, _)| *slot)
    }

    /// The slot of a host, a new one if it has none; `None` if all are taken.
    fn slot_for(&mut self, address: &str, loads: &Loads) -> Option<Slot> {
        if let Some(slot) = self.slot_of(address) {
            return Some(slot);
        }
        let is_gone = |tenant: &Tenant| tenant.gone_since > 0;
        let gone = self
            .tenants
            .values()
            .filter(|tenant| is_gone(tenant))
            .count();
        let full = self.tenants.len() >= SLOTS_MAX;
        let reusable = self
            .tenants
            .iter()
            // What a stopped VM left behind on a host that is gone is never taken back, so when
            // all slots are taken a count does not keep one: the next generation ignores it.
            .filter(|(slot, tenant)| is_gone(tenant) && (full || loads.in_flight(**slot) == 0))
            .min_by_key(|(slot, tenant)| (loads.in_flight(**slot) > 0, tenant.gone_since))
            .filter(|_| full || gone >= GONE_MAX)
            .map(|(slot, tenant)| (*slot, tenant.generation));
        let (slot, generation) = match reusable {
            Some(reused) => reused,
            None if full => return None,
            None => (self.unused()?, 0),
        };
        let generation = generation.wrapping_add(1).max(1);
        let address = address.to_owned();
        self.tenants.insert(
            slot,
            Tenant {
                address,
                generation,
                epoch: 0,
                gone_since: 0,
            },
        );
        Some(slot)
    }

    /// Whether a slot has another host than before, while requests run there: never, as long as there
    /// are other slots.
    fn takes_busy_slot(&self, before: &Self, loads: &Loads) -> bool {
        let is_full = before.tenants.len() >= SLOTS_MAX;
        let mut tenants = self.tenants.iter().filter(|_| !is_full);
        tenants.any(|(slot, tenant)| {
            let earlier = before.tenants.get(slot);
            let is_taken = earlier.is_some_and(|earlier| earlier.generation != tenant.generation);
            is_taken && loads.in_flight(*slot) > 0
        })
    }

    fn unused(&self) -> Option<Slot> {
        let slots = 0..u16::try_from(SLOTS_MAX).unwrap_or(u16::MAX);
        slots
            .map(Slot)
            .find(|slot| !self.tenants.contains_key(slot))
    }

    /// Replaces a pool's members by what was reported.
    fn set_members(&mut self, pool: &str, reports: &[HostReport], loads: &Loads, now_ms: u64) {
        let (old, others): (Vec<Member>, Vec<Member>) = std::mem::take(&mut self.members)
            .into_iter()
            .partition(|member| member.pool == pool);
        self.members = others;
        for report in reports {
            let Some(slot) = self.slot_for(&report.address, loads) else {
                continue;
            };
            let before = old.iter().find(|member| member.slot == slot);
            // A degraded host runs, and a stalled one does as soon as it answers: each still has what
            // it had cached. One that is restarted loses its connections and fails its checks.
            let paused = |state: State| matches!(state, State::Degraded | State::Stalled);
            let ran = |state: State| state.is_usable() || paused(state);
            let was_usable = before.is_some_and(|member| ran(member.state));
            let came_back = report.state.is_usable() && !was_usable;
            if let Some(tenant) = self.tenants.get_mut(&slot) {
                // At once, or a new host further down the list would be given this slot too.
                tenant.gone_since = 0;
                tenant.epoch = tenant.epoch.wrapping_add(u16::from(came_back));
            }
            let since_ms = match before {
                Some(before) if !came_back => before.since_ms,
                _ => now_ms,
            };
            let (pool, state, weight) = (pool.to_owned(), report.state, report.weight);
            self.members.push(Member {
                pool,
                slot,
                state,
                weight,
                since_ms,
                missing_ms: before.map_or(0, |before| before.missing_ms),
                counted: report.active.is_some(),
                zone: report.zone.clone(),
            });
        }
        self.members
            .sort_by(|a, b| (&a.pool, a.slot).cmp(&(&b.pool, b.slot)));
        let version = self.version.wrapping_add(1).max(1);
        for (slot, tenant) in &mut self.tenants {
            let is_member = self.members.iter().any(|member| member.slot == *slot);
            match (is_member, tenant.gone_since) {
                (true, _) => tenant.gone_since = 0,
                (false, 0) => tenant.gone_since = version,
                (false, _) => {}
            }
        }
    }

    /// The member of a pool at this address.
    fn member_mut(&mut self, pool: &str, address: &str) -> Option<&mut Member> {
        let slot = self.slot_of(address)?;
        let mut members = self.members.iter_mut();
        members.find(|member| member.slot == slot && member.pool == pool)
    }

    /// A pool's members as if a source had reported them.
    fn reports(&self, pool: &str) -> Vec<HostReport> {
        let members = self.members.iter().filter(|member| member.pool == pool);
        let report = |member: &Member| {
            Some(HostReport {
                state: member.state,
                weight: member.weight,
                ..HostReport::usable(&self.tenants.get(&member.slot)?.address)
            })
        };
        members.filter_map(report).collect()
    }

    /// For each slot of a pool's host, whether requests there have to be counted by VM: some of them
    /// are not in any count of Envoy's that is known.
    fn apart(&self) -> impl Iterator<Item = (Slot, bool)> {
        let mut apart = BTreeMap::new();
        for member in &self.members {
            *apart.entry(member.slot).or_default() |= !member.counted;
        }
        apart.into_iter()
    }

    /// A pool's view: all hosts, with their states in it.
    fn view(&self, pool: &str) -> View {
        let of_pool = self.members.iter().filter(|member| member.pool == pool);
        // Maps are extended, not collected: that sorts, with 8 KB of code for each kind of map.
        let mut members: BTreeMap<Slot, &Member> = BTreeMap::new();
        members.extend(of_pool.map(|member| (member.slot, member)));
        let host = |(slot, tenant): (&Slot, &Tenant)| {
            let member = members.get(slot);
            Host {
                address: tenant.address.clone(),
                seat: Seat {
                    slot: *slot,
                    generation: tenant.generation,
                },
                id: HostId::of(&tenant.address),
                epoch: tenant.epoch,
                weight: member.map_or(1, |member| member.weight),
                since_ms: member.map_or(0, |member| member.since_ms),
                missing_ms: member.map_or(0, |member| member.missing_ms),
                zone: member.map_or_else(String::new, |member| member.zone.clone()),
                state: member.map(|member| member.state),
            }
        };
        View::new(self.version, self.tenants.iter().map(host).collect())
    }

    fn seats(&self) -> impl Iterator<Item = Seat> {
        self.tenants.iter().map(|(slot, tenant)| Seat {
            slot: *slot,
            generation: tenant.generation,
        })
    }
}

/// What one report changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Hosts of the pool.
    pub hosts: usize,
    /// Of these, usable ones.
    pub usable: usize,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} hosts, {} of them usable", self.hosts, self.usable)
    }
}

/// Applies reports to the table and repairs the loads; one VM at a time does (lease.rs).
#[derive(Debug, Default)]
pub struct Fleet {
    doubts: BTreeMap<(Slot, u16), Doubt>,
}

/// Whether a host's count is right.
#[derive(Debug, Default)]
struct Doubt {
    /// By how much our count has been above Envoy's.
    excess: Excess,
    /// Since when all VMs have been asked what they have there, and how many looks ago.
    asked: Option<(u64, u32)>,
}

impl Doubt {
    /// Whether all VMs that run have been asked for so long that they must have answered.
    fn has_waited(&mut self, now_ms: u64) -> bool {
        // With the clock set back, the time begins anew.
        let (since_ms, looks) = self.asked.unwrap_or((now_ms, 0));
        let (since_ms, looks) = (since_ms.min(now_ms), looks.saturating_add(1));
        self.asked = Some((since_ms, looks));
        now_ms - since_ms >= STOPPED_MS && looks >= LOOKS_MIN
    }
}

impl Fleet {
    /// Makes the reported hosts the pool's hosts, for all workers. What changed, if anything did.
    pub fn apply(
        &self,
        store: &impl Store,
        ledger: &Ledger,
        pool: &str,
        reports: &[HostReport],
        now_ms: u64,
    ) -> Option<Summary> {
        change(store, ledger, pool, |table, loads| {
            table.set_members(pool, reports, loads, now_ms);
        })
    }

    /// Takes away requests that stopped VMs have left: Envoy does not count them, and no VM that runs
    /// says it has them. Envoy alone is not believed: a request that is tried again elsewhere, or
    /// that another filter holds, is ours and in no count of Envoy's where we count it. VMs are asked
    /// only about hosts with an excess that stands, for what they say makes every change dearer; and
    /// about hosts that are in other pools than these as well, whose requests no poll has all of.
    /// `polled` are pools and what one poll said of them; how many were taken away, for each.
    pub fn repair(
        &mut self,
        store: &impl Store,
        ledger: &Ledger,
        polled: &[(&str, &[HostReport])],
        now_ms: u64,
    ) -> Vec<u32> {
        let mut repaired = vec![0; polled.len()];
        let Ok(loads) = load::read(store) else {
            return repaired;
        };
        let mut seen = BTreeMap::new();
        for Counted { seat, active, pool } in read_table(store).counted(polled) {
            let name = (seat.slot, seat.generation);
            let mut doubt = self.doubts.remove(&name).unwrap_or_default();
            let ours = loads.of(seat).in_flight;
            let excess = match active {
                Some(active) => doubt.excess.see(ours.saturating_sub(active), now_ms),
                None => ours,
            };
            let unclaimed = loads.unclaimed(seat);
            if unclaimed.is_none() {
                doubt.asked = None;
            }
            if active.is_some() && excess == 0 {
                doubt.asked = None;
                if unclaimed.is_some() {
                    edit(store, ledger, |loads| loads.trust(seat));
                }
            } else if doubt.has_waited(now_ms) {
                let left = |loads: &Loads| loads.unclaimed(seat).unwrap_or(0).min(excess);
                let taken = match left(&loads) {
                    0 => 0,
                    _ => edit(store, ledger, |loads| {
                        let left = left(loads);
                        loads.forgive(seat, left);
                        left
                    }),
                };
                doubt.excess.take(taken);
                if let Some(repaired) = repaired.get_mut(pool) {
                    *repaired += taken;
                }
            } else if unclaimed.is_none() {
                edit(store, ledger, |loads| loads.doubt(seat));
            }
            seen.insert(name, doubt);
        }
        self.doubts = seen;
        repaired
    }
}

/// Edits the loads; of the last attempt, what `edit` gave.
fn edit<T>(store: &impl Store, ledger: &Ledger, mut edit: impl FnMut(&mut Loads) -> T) -> T {
    ledger.transact(store, |loads| (edit(loads), NO_CHANGES))
}

/// How many requests Envoy has on a host, in all clusters; `None` if not all of them were polled.
struct Counted {
    seat: Seat,
    active: Option<u32>,
    /// The first of the polled pools that has it.
    pool: usize,
}

impl Table {
    /// The hosts of these pools that Envoy counts, with its count if they are in no other pools.
    fn counted(&self, polled: &[(&str, &[HostReport])]) -> Vec<Counted> {
        let tenants = self.tenants.iter();
        let mut slots: BTreeMap<&str, (Slot, u16)> = BTreeMap::new();
        slots.extend(
            tenants.map(|(slot, tenant)| (tenant.address.as_str(), (*slot, tenant.generation))),
        );
        let mut unseen: BTreeMap<Slot, usize> = BTreeMap::new();
        for member in &self.members {
            *unseen.entry(member.slot).or_default() += 1;
        }
        let mut counted: BTreeMap<Slot, Counted> = BTreeMap::new();
        for (pool, (_, reports)) in polled.iter().enumerate() {
            for report in *reports {
                let slot = slots.get(report.address.as_str());
                let (Some(&(slot, generation)), Some(active)) = (slot, report.active) else {
                    continue;
                };
                let host = counted.entry(slot).or_insert(Counted {
                    seat: Seat { slot, generation },
                    active: Some(0),
                    pool,
                });
                host.active = host.active.map(|sum| sum.saturating_add(active));
                if let Some(unseen) = unseen.get_mut(&slot) {
                    *unseen = unseen.saturating_sub(1);
                }
            }
        }
        for (slot, host) in &mut counted {
            host.active = host.active.filter(|_| unseen.get(slot) == Some(&0));
        }
        counted.into_values().collect()
    }
}

/// Changes the table, for all workers; all again if another worker changed it in between. What
/// changed in the pool, if anything did.
fn change(
    store: &impl Store,
    ledger: &Ledger,
    pool: &str,
    edit: impl Fn(&mut Table, &Loads),
) -> Option<Summary> {
    for _ in 0..ATTEMPTS_MAX {
        let seen = store.read(TABLE_KEY).ok()?;
        let before = seen
            .value
            .as_deref()
            .and_then(Table::decode)
            .unwrap_or_default();
        let loads = load::read(store).ok()?;
        let mut table = before.clone();
        edit(&mut table, &loads);
        // Loads of a new layout have no seats yet, whatever table a filter of before left.
        let is_seated = before.version > 0 && loads.hosts_version() > 0;
        if table == before && is_seated {
            // Two that changed it at the same time may have said so in the wrong order.
            announce(store, ledger, before.version);
            return None;
        }
        // Above both: a table that had to be started anew is news too.
        let last = before.version.max(loads.hosts_version());
        table.version = last.wrapping_add(1).max(1);
        // Seats first: a worker that sees the new table can book at once.
        let seated = ledger.transact(store, |loads| {
            // A slot was free when the loads were read, but its host may be back since, and have
            // requests: the table has changed then, too.
            if table.takes_busy_slot(&before, loads) {
                return (false, NO_CHANGES);
            }
            table.seats().for_each(|seat| loads.seat(seat));
            let apart = table.apart();
            apart.for_each(|(slot, apart)| loads.set_apart(slot, apart));
            (true, NO_CHANGES)
        });
        if !seated {
            continue;
        }
        match store.write(TABLE_KEY, &table.encode(), Some(seen.cas)) {
            Err(StoreError::Stale) => continue,
            Err(StoreError::Refused) => return None,
            Ok(()) => {}
        }
        announce(store, ledger, table.version);
        let members = || table.members.iter().filter(|member| member.pool == pool);
        return Some(Summary {
            hosts: members().count(),
            usable: members().filter(|member| member.state.is_usable()).count(),
        });
    }
    None
}

/// A host of a pool without a source answered: it is one of the pool's hosts, and well. What
/// changed, if anything did.
pub fn answered(
    store: &impl Store,
    ledger: &Ledger,
    pool: &str,
    address: &str,
    now_ms: u64,
) -> Option<Summary> {
    change(store, ledger, pool, |table, loads| {
        let mut reports = table.reports(pool);
        reports.retain(|report| report.address != address);
        reports.push(HostReport::usable(address));
        table.set_members(pool, &reports, loads, now_ms);
        if let Some(member) = table.member_mut(pool, address) {
            member.missing_ms = 0;
        }
    })
}

/// A request for a host of a pool without a source did not reach it. The host is dropped if
/// another one missed it `lost_ms` ago or earlier, and none was answered since. What changed, if
/// anything did.
pub fn missed(
    store: &impl Store,
    ledger: &Ledger,
    pool: &str,
    address: &str,
    now_ms: u64,
    lost_ms: u64,
) -> Option<Summary> {
    change(store, ledger, pool, |table, loads| {
        let Some(member) = table.member_mut(pool, address) else {
            return;
        };
        match member.missing_ms {
            0 => member.missing_ms = now_ms,
            first_ms if now_ms.abs_diff(first_ms) < lost_ms => {}
            _ => {
                let mut reports = table.reports(pool);
                reports.retain(|report| report.address != address);
                table.set_members(pool, &reports, loads, now_ms);
            }
        }
    })
}

/// Of a pool without a source, says which hosts are stalled: those that are marked so, and no others.
/// What changed, if anything did.
pub fn set_stalled(
    store: &impl Store,
    ledger: &Ledger,
    pool: &str,
    marked: &[HostReport],
    now_ms: u64,
) -> Option<Summary> {
    change(store, ledger, pool, |table, loads| {
        let mut reports = table.reports(pool);
        for report in &mut reports {
            // Not all that was marked need be there by now, nor all that is there be marked.
            let mut marked = marked.iter();
            if let Some(marked) = marked.find(|marked| marked.address == report.address) {
                report.state = marked.state;
            }
        }
        table.set_members(pool, &reports, loads, now_ms);
    })
}

/// The pools that have hosts.
pub fn pools(store: &impl Store) -> BTreeSet<String> {
    let members = read_table(store).members.into_iter();
    let mut pools = BTreeSet::new();
    pools.extend(members.map(|member| member.pool));
    pools
}

/// Forgets a pool: its hosts are other pools' alone from now on, or have left. What runs on them
/// counts there until it ends.
pub fn forget(store: &impl Store, ledger: &Ledger, pool: &str) -> Option<Summary> {
    change(store, ledger, pool, |table, loads| {
        table.set_members(pool, &[], loads, 0);
    })
}

/// Takes back what stopped VMs have left in flight, on hosts where what each VM has is known apart:
/// how many requests, by pool. One VM at a time does (lease.rs).
pub fn take_back(store: &impl Store, ledger: &Ledger) -> BTreeMap<String, u32> {
    let mut repaired = BTreeMap::new();
    let left = ledger.take_back(store);
    if left.is_empty() {
        return repaired;
    }
    let table = read_table(store);
    for (slot, requests) in left {
        // A host that has left the pool has no name to be counted under.
        let mut members = table.members.iter();
        if let Some(member) = members.find(|member| member.slot == slot) {
            *repaired.entry(member.pool.clone()).or_default() += requests;
        }
    }
    repaired
}

/// The table; an empty one if there is none.
fn read_table(store: &impl Store) -> Table {
    let seen = store.read(TABLE_KEY).ok().and_then(|seen| seen.value);
    seen.as_deref().and_then(Table::decode).unwrap_or_default()
}

/// Tells all workers that there is this host table, unless they know of a newer one.
fn announce(store: &impl Store, ledger: &Ledger, version: u32) {
    ledger.transact(store, |loads| {
        if loads.hosts_version() < version {
            loads.set_hosts_version(version);
        }
        ((), NO_CHANGES)
    });
}

/// The hosts of a pool as the table has them now; `None` if there is no table.
#[must_use]
pub fn view(store: &impl Store, pool: &str) -> Option<View> {
    views(store, [pool])?.pop()
}

/// The hosts of each of these pools, in one version of the table; `None` if there is none.
pub fn views<'p>(
    store: &impl Store,
    pools: impl IntoIterator<Item = &'p str>,
) -> Option<Vec<View>> {
    let table = Table::decode(&store.read(TABLE_KEY).ok()?.value?)?;
    Some(pools.into_iter().map(|pool| table.view(pool)).collect())
}

/// What a host carries, as a pool shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostLoad {
    /// Where it is.
    pub address: String,
    /// What it carries.
    pub load: Load,
    /// Whether it has left all pools, of which this need not have been one.
    pub has_left: bool,
}

/// What each host of the view carries, those of the pool first, then those that have left; not
/// those that are only in other pools.
pub fn loads(store: &impl Store, view: &View) -> Vec<HostLoad> {
    let Ok(loads) = load::read(store) else {
        return Vec::new();
    };
    let table = read_table(store);
    let is_elsewhere = |host: &&Host| {
        let mut members = table.members.iter();
        host.state.is_none() && members.any(|member| member.slot == host.seat.slot)
    };
    let hosts = view.hosts.iter().filter(|host| !is_elsewhere(host));
    let (left, hosts): (Vec<&Host>, Vec<&Host>) = hosts.partition(|host| host.state.is_none());
    let load = |host: &Host| HostLoad {
        address: host.address.clone(),
        load: loads.of(host.seat),
        has_left: host.state.is_none(),
    };
    hosts.into_iter().chain(left).map(load).collect()
}

/// How many hosts of the pool are in each state.
#[must_use]
pub fn states(view: &View) -> Vec<(&'static str, u64)> {
    let count = |state: State| {
        let hosts = view.hosts.iter().filter(|host| host.state == Some(state));
        (state.label(), hosts.count() as u64)
    };
    State::ALL.into_iter().map(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Booking, Change};
    use crate::request::Request;
    use crate::store::{Cas, MemoryStore, Versioned};
    use std::cell::RefCell;

    struct Proxy {
        store: MemoryStore,
        ledger: Ledger,
        fleet: Fleet,
    }

    impl Proxy {
        fn new() -> Self {
            Self {
                store: MemoryStore::new(),
                ledger: Ledger::of(7, 0),
                fleet: Fleet::default(),
            }
        }

        fn report(&mut self, reports: &[HostReport]) -> View {
            self.fleet
                .apply(&self.store, &self.ledger, "llm", reports, 1000);
            view(&self.store, "llm").unwrap()
        }

        fn book(&self, seat: Seat) -> Booking {
            let booking = Booking { seat, pending: 10 };
            self.ledger.apply(&self.store, Change::Book(booking));
            booking
        }

        /// A VM that has stopped since had so many requests there.
        fn leave(&self, seat: Seat, requests: u32) {
            let dead = Ledger::of(9, 0);
            for _ in 0..requests {
                let booking = Booking { seat, pending: 10 };
                dead.apply(&self.store, Change::Book(booking));
            }
        }

        /// What one poll takes away, of each pool.
        fn repair(&mut self, polled: &[(&str, &[HostReport])], now_ms: u64) -> Vec<u32> {
            self.ledger.beat(&self.store, now_ms);
            self.fleet.repair(&self.store, &self.ledger, polled, now_ms)
        }

        /// What polls that all say the same take away in 20 s.
        fn repair_long(&mut self, polled: &[(&str, &[HostReport])], from_ms: u64) -> u32 {
            let polls = (0..40).map(|poll| self.repair(polled, from_ms + poll * 500));
            polls.map(|repaired| repaired.iter().sum::<u32>()).sum()
        }

        fn in_flight(&self, seat: Seat) -> u32 {
            load::read(&self.store).unwrap().of(seat).in_flight
        }
    }

    fn hosts(names: &[&str]) -> Vec<HostReport> {
        names.iter().map(|name| HostReport::usable(name)).collect()
    }

    /// Hosts of which Envoy counts the requests, and has none.
    fn counted(names: &[&str]) -> Vec<HostReport> {
        let mut reports = hosts(names);
        for report in &mut reports {
            report.active = Some(0);
        }
        reports
    }

    #[test]
    fn a_host_of_a_zone_that_is_known_to_be_another_is_far() {
        let mut proxy = Proxy::new();
        let mut reports = hosts(&["a:1", "b:1", "c:1"]);
        reports[0].zone = "z1".into();
        reports[1].zone = "z2".into();
        let view = proxy.report(&reports);
        // zone of the gateway | which of the three are far
        for (zone, expected) in [
            ("z1", [false, true, false]),
            ("z2", [true, false, false]),
            ("z3", [true, true, false]),
            ("", [false; 3]),
        ] {
            let view = view.clone().seen_from(zone);
            let far: Vec<bool> = view.candidates().iter().map(|host| host.far).collect();
            assert_eq!(far, expected, "from {zone:?}");
        }
    }

    /// Lets another worker act before the second look at the loads.
    struct Between<'s, F> {
        store: &'s MemoryStore,
        looks: std::cell::Cell<u32>,
        act: F,
    }

    impl<F: Fn()> Store for Between<'_, F> {
        fn read(&self, key: &str) -> Result<Versioned, StoreError> {
            if key == load::LOADS_KEY {
                self.looks.set(self.looks.get() + 1);
                if self.looks.get() == 2 {
                    (self.act)();
                }
            }
            self.store.read(key)
        }

        fn write(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), StoreError> {
            self.store.write(key, value, cas)
        }
    }

    #[test]
    fn a_host_that_is_back_before_its_slot_is_given_away_keeps_what_runs_on_it() {
        let (store, ledger, fleet) = (MemoryStore::new(), Ledger::default(), Fleet::default());
        let many: Vec<String> = (0..70).map(|n| format!("10.0.0.{n}:80")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        // More than are remembered come and go: the next host gets the slot of the first.
        fleet.apply(&store, &ledger, "a", &hosts(&many), 1000);
        fleet.apply(&store, &ledger, "a", &hosts(&["b:80"]), 2000);
        let back = || {
            fleet.apply(&store, &ledger, "a", &hosts(&["b:80", many[0]]), 3000);
            let seat = view(&store, "a").unwrap().seat_of(many[0]).unwrap();
            for _ in 0..3 {
                ledger.apply(&store, Change::Book(Booking { seat, pending: 5 }));
            }
        };
        let between = Between {
            store: &store,
            looks: std::cell::Cell::default(),
            act: back,
        };
        fleet.apply(&between, &ledger, "c", &hosts(&["c:80"]), 3000);
        let found = view(&store, "a").unwrap();
        let (old, new) = (found.seat_of(many[0]), found.seat_of("c:80"));
        let loads = load::read(&store).unwrap();
        assert_eq!(loads.of(old.unwrap()).in_flight, 3);
        assert_ne!(old.unwrap().slot, new.unwrap().slot);
    }

    fn usable(view: &View) -> Vec<&str> {
        let seats = view.candidates().iter();
        seats
            .map(|host| view.address_of(host.seat).unwrap())
            .collect()
    }

    #[test]
    fn reported_hosts_are_the_pools_hosts_and_only_usable_ones_are_chosen() {
        let mut proxy = Proxy::new();
        let mut reports = hosts(&["10.0.0.1:80", "10.0.0.2:80", "[fd00::1]:80"]);
        reports[1].state = State::Failed;
        let view = proxy.report(&reports);
        assert_eq!(usable(&view), ["10.0.0.1:80", "[fd00::1]:80"]);
        assert!(view.seat_of("10.0.0.2:80").is_some());
        assert_eq!(
            states(&view)[..3],
            [("usable", 2), ("degraded", 0), ("failed", 1)]
        );
        let loads = load::read(&proxy.store).unwrap();
        assert_eq!(loads.hosts_version(), view.version);
    }

    #[test]
    fn an_unchanged_report_changes_nothing() {
        let mut proxy = Proxy::new();
        let first = proxy.report(&hosts(&["a:1", "b:1"]));
        let reports = hosts(&["b:1", "a:1"]);
        assert_eq!(
            proxy
                .fleet
                .apply(&proxy.store, &proxy.ledger, "llm", &reports, 1000),
            None
        );
        assert_eq!(view(&proxy.store, "llm").unwrap(), first);
    }

    #[test]
    fn a_host_keeps_what_it_has_cached_unless_it_failed() {
        let mut proxy = Proxy::new();
        let mut reports = hosts(&["a:1", "b:1"]);
        proxy.report(&reports);
        // state | the host's epoch once it is usable again
        for (state, expected) in [
            (State::Stalled, 1),
            (State::Degraded, 1),
            (State::Failed, 2),
        ] {
            reports[0].state = state;
            proxy.report(&reports);
            reports[0].state = State::Usable;
            let view = proxy.report(&reports);
            let mut found = view.hosts.iter();
            let host = found.find(|host| host.address == "a:1").unwrap();
            assert_eq!(host.epoch, expected, "{state:?}");
        }
    }

    #[test]
    fn a_host_that_returns_finds_its_running_requests() {
        let mut proxy = Proxy::new();
        let before = proxy
            .report(&hosts(&["a:1", "b:1"]))
            .seat_of("b:1")
            .unwrap();
        let booking = proxy.book(before);
        let without = proxy.report(&hosts(&["a:1"]));
        assert_eq!(usable(&without), ["a:1"]);
        let after = proxy
            .report(&hosts(&["a:1", "b:1"]))
            .seat_of("b:1")
            .unwrap();
        assert_eq!(proxy.in_flight(after), 1);
        proxy.ledger.apply(&proxy.store, Change::Release(booking));
        assert_eq!(proxy.in_flight(after), 0);
    }

    #[test]
    fn twenty_thousand_addresses_take_a_bounded_number_of_slots() {
        let mut proxy = Proxy::new();
        let mut running = Vec::new();
        for round in 0..2000 {
            let names: Vec<String> = (0..10).map(|n| format!("10.{round}.0.{n}:80")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let view = proxy.report(&hosts(&names));
            assert_eq!(usable(&view).len(), 10);
            for host in view.candidates() {
                assert_eq!(proxy.in_flight(host.seat), 0, "a new host starts at zero");
            }
            // One request of each round runs on for 50 rounds.
            running.push(proxy.book(view.candidates()[0].seat));
            if round >= 50 {
                proxy
                    .ledger
                    .apply(&proxy.store, Change::Release(running.remove(0)));
            }
        }
        let view = view(&proxy.store, "llm").unwrap();
        assert!(
            view.hosts.len() <= 10 + GONE_MAX + 51 + 10,
            "{} slots",
            view.hosts.len()
        );
        let total: u32 = view
            .hosts
            .iter()
            .map(|host| proxy.in_flight(host.seat))
            .sum();
        assert_eq!(total, 50);
    }

    #[test]
    fn a_pools_hosts_do_not_mix_with_anothers_but_share_their_load() {
        let mut proxy = Proxy::new();
        proxy.report(&hosts(&["a:1", "b:1"]));
        proxy.fleet.apply(
            &proxy.store,
            &proxy.ledger,
            "other",
            &hosts(&["b:1", "c:1"]),
            1000,
        );
        let (llm, other) = (
            view(&proxy.store, "llm").unwrap(),
            view(&proxy.store, "other").unwrap(),
        );
        assert_eq!(
            (usable(&llm), usable(&other)),
            (vec!["a:1", "b:1"], vec!["b:1", "c:1"])
        );
        proxy.book(llm.seat_of("b:1").unwrap());
        assert_eq!(proxy.in_flight(other.seat_of("b:1").unwrap()), 1);
        let shown = |view: &View| -> Vec<(String, u32)> {
            let loads = loads(&proxy.store, view).into_iter();
            loads
                .map(|host| (host.address, host.load.in_flight))
                .collect()
        };
        assert_eq!(shown(&llm), [("a:1".into(), 0), ("b:1".into(), 1)]);
        assert_eq!(shown(&other), [("b:1".into(), 1), ("c:1".into(), 0)]);
    }

    #[test]
    fn only_an_excess_that_stands_and_that_no_vm_has_is_taken_away() {
        let mut proxy = Proxy::new();
        let mut reports = counted(&["a:1"]);
        let view = proxy.report(&reports);
        let seat = view.seat_of("a:1").unwrap();
        proxy.leave(seat, 2);
        for _ in 0..3 {
            proxy.book(seat);
        }
        let mut poll = |now_ms: u64, active: u32| {
            reports[0].active = Some(active);
            let polled = [("llm", &reports[..])];
            proxy.repair(&polled, now_ms)[0]
        };
        // Envoy has 3 of our 5, then 4, then 2: one was there all the time, and VMs are asked.
        assert_eq!([poll(0, 3), poll(750, 4), poll(1500, 2)], [0, 0, 0]);
        assert_eq!([poll(3000, 4), poll(6499, 4), poll(6500, 4)], [0, 0, 1]);
        // Of the 4 left, Envoy has 4: nothing is missing any more.
        let later = [poll(7250, 4), poll(8000, 4), poll(8750, 9)];
        assert_eq!(later, [0, 0, 0]);
        // It has none, for another filter holds them: what a VM has stays.
        let later: u32 = (0..40).map(|n| poll(9000 + n * 500, 0)).sum();
        assert_eq!(later, 1);
        assert_eq!(proxy.in_flight(seat), 3);
    }

    #[test]
    fn a_request_that_is_tried_again_elsewhere_is_released_once_where_it_was() {
        let mut proxy = Proxy::new();
        let mut reports = counted(&["a:1", "b:1"]);
        let view = proxy.report(&reports);
        let [a, b] = ["a:1", "b:1"].map(|host| view.seat_of(host).unwrap());
        let [mut retried, mut next] = [(); 2].map(|()| Request::default());
        let write = |proxy: &Proxy, changes| {
            proxy.ledger.transact(&proxy.store, |_| ((), changes));
        };
        write(&proxy, retried.served_by(Some(a)));
        proxy.leave(a, 1);
        // The connection to the first was refused; on the second one it waits for its first byte.
        reports[1].active = Some(1);
        assert_eq!(proxy.repair_long(&[("llm", &reports)], 0), 1);
        assert_eq!([a, b].map(|seat| proxy.in_flight(seat)), [1, 0]);
        write(&proxy, next.served_by(Some(a)));
        write(&proxy, retried.served_by(Some(b)));
        assert_eq!([a, b].map(|seat| proxy.in_flight(seat)), [1, 1]);
        // Nobody is asked any more, and what ends is released once.
        reports[0].active = Some(1);
        assert_eq!(proxy.repair_long(&[("llm", &reports)], 30_000), 0);
        let loads = load::read(&proxy.store).unwrap();
        assert_eq!(loads.unclaimed(a), None);
        write(&proxy, retried.end());
        write(&proxy, next.end());
        assert_eq!([a, b].map(|seat| proxy.in_flight(seat)), [0, 0]);
    }

    #[test]
    fn what_a_stopped_vm_left_on_a_host_of_two_listeners_is_taken_back_once() {
        let mut proxy = Proxy::new();
        let host = counted(&["a:1"]);
        let seat = proxy.report(&host).seat_of("a:1").unwrap();
        let mut other = Fleet::default();
        other.apply(&proxy.store, &proxy.ledger, "other", &host, 1000);
        proxy.leave(seat, 3);
        // The requests that go on are the other listener's, so this one's cluster has none of them.
        let running = [(); 2].map(|()| proxy.book(seat));
        let mut repaired = 0;
        for poll in 0..100 {
            let now_ms = poll * 500;
            repaired += proxy.repair(&[("llm", &host)], now_ms)[0];
            let by_other = [("other", &host[..])];
            repaired += other.repair(&proxy.store, &proxy.ledger, &by_other, now_ms)[0];
            repaired += take_back(&proxy.store, &proxy.ledger).len() as u32;
        }
        assert_eq!((repaired, proxy.in_flight(seat)), (3, 2));
        for booking in running {
            proxy.ledger.apply(&proxy.store, Change::Release(booking));
        }
        assert_eq!(proxy.in_flight(seat), 0);
        // One that stops later has said what it has.
        proxy.leave(seat, 3);
        proxy.ledger.beat(&proxy.store, STOPPED_MS);
        let taken = take_back(&proxy.store, &proxy.ledger);
        assert_eq!(taken.into_values().sum::<u32>(), 3);
        assert_eq!(proxy.in_flight(seat), 0);
    }

    #[test]
    fn a_burst_that_waits_for_connections_loses_none_however_often_envoy_is_asked() {
        const BURST: u32 = 1000;
        let mut proxy = Proxy::new();
        let mut reports = counted(&["a:1"]);
        let view = proxy.report(&reports);
        let seat = view.seat_of("a:1").unwrap();
        // A request that goes on, and a burst that has no connection for 1.4 s.
        for _ in 0..=BURST {
            proxy.book(seat);
        }
        for poll in 0..100 {
            reports[0].active = Some(if poll < 15 { 1 } else { BURST + 1 });
            let polled = [("llm", &reports[..])];
            assert_eq!(proxy.repair(&polled, poll * 100), [0], "poll {poll}");
        }
        assert_eq!(proxy.in_flight(seat), BURST + 1);
    }

    #[test]
    fn requests_of_another_cluster_on_a_shared_host_are_not_taken_away() {
        let mut proxy = Proxy::new();
        let reports = counted(&["a:1"]);
        proxy
            .fleet
            .apply(&proxy.store, &proxy.ledger, "other", &reports, 1000);
        let view = proxy.report(&reports);
        let seat = view.seat_of("a:1").unwrap();
        proxy.book(seat);
        // The request is the other pool's, so this pool's cluster does not have it.
        assert_eq!(proxy.repair_long(&[("llm", &reports)], 0), 0);
        assert_eq!(proxy.in_flight(seat), 1);
    }

    #[test]
    fn a_pool_that_is_forgotten_keeps_no_host_from_being_repaired_and_takes_no_count_along() {
        let mut proxy = Proxy::new();
        let mut reports = counted(&["a:1", "b:1"]);
        proxy.report(&reports);
        let renamed = |proxy: &Proxy| view(&proxy.store, "renamed").unwrap();
        proxy
            .fleet
            .apply(&proxy.store, &proxy.ledger, "renamed", &reports[..1], 1000);
        let [a, b] = ["a:1", "b:1"].map(|host| renamed(&proxy).seat_of(host).unwrap());
        let running = proxy.book(b);
        for _ in 0..3 {
            proxy.book(a);
        }
        reports[0].active = Some(2);
        let polls =
            |proxy: &mut Proxy, from_ms| proxy.repair_long(&[("renamed", &reports[..1])], from_ms);
        assert_eq!(
            polls(&mut proxy, 0),
            0,
            "the old pool may have the third one"
        );
        proxy.leave(a, 1);

        assert_eq!(
            pools(&proxy.store),
            ["llm", "renamed"].map(str::to_owned).into()
        );
        let summary = forget(&proxy.store, &proxy.ledger, "llm");
        assert_eq!(
            summary,
            Some(Summary {
                hosts: 0,
                usable: 0
            })
        );
        assert_eq!(pools(&proxy.store), ["renamed".to_owned()].into());
        assert_eq!(usable(&view(&proxy.store, "llm").unwrap()), [""; 0]);
        assert_eq!(usable(&renamed(&proxy)), ["a:1"]);
        proxy.ledger.beat(&proxy.store, 30_000);
        let left = take_back(&proxy.store, &proxy.ledger);
        assert_eq!(left, [("renamed".to_owned(), 1)].into());
        assert_eq!(polls(&mut proxy, 30_000), 0);
        let loads = load::read(&proxy.store).unwrap();
        assert_eq!(loads.unclaimed(a), Some(0), "one more than Envoy has");
        reports[0].active = Some(3);
        assert_eq!(proxy.repair_long(&[("renamed", &reports[..1])], 60_000), 0);
        let loads = load::read(&proxy.store).unwrap();
        assert_eq!(loads.unclaimed(a), None, "nobody is asked any more");
        assert_eq!(proxy.in_flight(a), 3);
        // What runs on a host that no pool has any more ends as ever.
        assert_eq!(proxy.in_flight(b), 1);
        proxy.ledger.apply(&proxy.store, Change::Release(running));
        assert_eq!(proxy.in_flight(b), 0);
        assert_eq!(forget(&proxy.store, &proxy.ledger, "llm"), None);
    }

    #[test]
    fn marking_stalled_hosts_drops_none_that_was_learned_meanwhile() {
        let proxy = Proxy::new();
        let learn = |host| answered(&proxy.store, &proxy.ledger, "llm", host, 1000);
        let states = || -> Vec<(String, State)> {
            let hosts = view(&proxy.store, "llm").unwrap().hosts.into_iter();
            let hosts = hosts.filter_map(|host| Some((host.address, host.state?)));
            hosts.collect()
        };
        let [a, b] = ["a:1", "b:1"].map(str::to_owned);
        learn(&a);
        let mut marked = view(&proxy.store, "llm").unwrap().members();
        learn(&b);
        let mut mark = |state| {
            marked[0].state = state;
            set_stalled(&proxy.store, &proxy.ledger, "llm", &marked, 1000)
        };
        assert!(mark(State::Stalled).is_some());
        let expected = [(a.clone(), State::Stalled), (b.clone(), State::Usable)];
        assert_eq!(states(), expected);
        assert!(mark(State::Stalled).is_none(), "nothing is new");
        assert!(mark(State::Usable).is_some());
        let expected = [(a, State::Usable), (b, State::Usable)];
        assert_eq!(states(), expected);
    }

    #[test]
    fn a_host_of_several_pools_is_compared_with_the_sum_of_their_clusters() {
        let mut proxy = Proxy::new();
        let (mut llm, mut other) = (counted(&["a:1"]), counted(&["b:1", "a:1"]));
        proxy
            .fleet
            .apply(&proxy.store, &proxy.ledger, "other", &other, 1000);
        let seat = proxy.report(&llm).seat_of("a:1").unwrap();
        proxy.leave(seat, 5);
        let mut now_ms = 0;
        let mut poll = |by_llm, by_other| {
            now_ms += 2500;
            llm[0].active = Some(by_llm);
            other[1].active = Some(by_other);
            let polled = [("other", &other[..]), ("llm", &llm[..])];
            proxy.repair(&polled, now_ms)
        };
        assert_eq!([poll(2, 3), poll(1, 4), poll(5, 0)].concat(), [0; 6]);
        assert_eq!(
            [poll(1, 2), poll(2, 1), poll(0, 3), poll(2, 1), poll(1, 2)].concat(),
            [0, 0, 0, 0, 0, 0, 0, 0, 2, 0]
        );
        assert_eq!(proxy.in_flight(seat), 3);
    }

    #[test]
    fn counts_that_nobody_will_take_back_do_not_use_up_the_slots() {
        let mut proxy = Proxy::new();
        const AT_ONCE: usize = 200;
        for round in 0..2 * SLOTS_MAX / AT_ONCE {
            let names: Vec<String> = (0..AT_ONCE)
                .map(|n| format!("10.0.{round}.{n}:80"))
                .collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let view = proxy.report(&hosts(&names));
            assert_eq!(usable(&view).len(), AT_ONCE, "round {round}");
            // Their VM is stopped, and the hosts leave.
            for host in view.candidates() {
                proxy.book(host.seat);
            }
        }
    }

    #[test]
    fn a_table_that_cannot_be_read_is_started_anew() {
        let mut proxy = Proxy::new();
        for _ in 0..2 {
            proxy.report(&hosts(&["b:1"]));
            proxy.report(&hosts(&["c:1"]));
            proxy.store.write(TABLE_KEY, b"not a table", None).unwrap();
            let view = proxy.report(&hosts(&["a:1"]));
            assert_eq!(usable(&view), ["a:1"]);
            let loads = load::read(&proxy.store).unwrap();
            assert_eq!(loads.hosts_version(), view.version);
        }
    }

    #[test]
    fn loads_that_cannot_be_read_are_started_anew_and_count() {
        let mut proxy = Proxy::new();
        let before = proxy.report(&hosts(&["a:1"]));
        let lost = b"not loads";
        proxy.store.write(load::LOADS_KEY, lost, None).unwrap();
        let view = proxy.report(&hosts(&["a:1"]));
        assert_eq!(view.seat_of("a:1"), before.seat_of("a:1"));
        proxy.book(view.seat_of("a:1").unwrap());
        assert_eq!(proxy.in_flight(view.seat_of("a:1").unwrap()), 1);
        let loads = load::read(&proxy.store).unwrap();
        assert_eq!(loads.hosts_version(), view.version);
    }

    /// A store in which another worker's step comes between two of this one's.
    struct Interrupted<'s> {
        store: &'s MemoryStore,
        other: RefCell<Option<Box<dyn FnOnce() + 's>>>,
    }

    impl Store for Interrupted<'_> {
        fn read(&self, key: &str) -> Result<Versioned, StoreError> {
            self.store.read(key)
        }

        fn write(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), StoreError> {
            let written = self.store.write(key, value, cas);
            if key == TABLE_KEY
                && let Some(other) = self.other.take()
            {
                other();
            }
            written
        }
    }

    #[test]
    fn two_pools_that_are_reported_at_once_are_both_known_to_all_workers() {
        let store = MemoryStore::new();
        let ledger = Ledger::default();
        let report = |store: &MemoryStore| {
            let hosts = hosts(&["b:1"]);
            Fleet::default().apply(store, &ledger, "other", &hosts, 1000);
        };
        let interrupted = Interrupted {
            store: &store,
            other: RefCell::new(Some(Box::new(|| report(&store)))),
        };
        Fleet::default().apply(&interrupted, &ledger, "llm", &hosts(&["a:1"]), 1000);
        let version = load::read(&store).unwrap().hosts_version();
        for (pool, host) in [("llm", "a:1"), ("other", "b:1")] {
            let view = view(&store, pool).unwrap();
            assert_eq!((view.version, usable(&view)), (version, vec![host]));
        }
    }
}
