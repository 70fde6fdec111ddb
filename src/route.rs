//! Which host a request goes to, and why.
//!
//! Guarantee: a pure function of its arguments; every decision says what kind it is. Not here:
//! parsing, state, the booking of the request.

use crate::index::HostRef;
use crate::load::{Loads, Seat};
use crate::placement::{HostId, order};
use crate::prefix::Key;

/// Hosts in the list that goes out: the choice and two more for retries (ENVOY.md 1.6).
pub const LIST_MAX: usize = 3;

/// A host that may be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Where its load is kept.
    pub seat: Seat,
    /// Its identity in placement.
    pub id: HostId,
    /// Its name in the index.
    pub known_as: HostRef,
    /// Its weight in placement; only the ratio to the others' counts.
    pub weight: u32,
    /// Whether it is in another zone than this gateway.
    pub far: bool,
    /// Whether it came, or came back, a short while ago: the prefixes it is the home of may move to
    /// it from where they were sent meanwhile.
    pub joining: bool,
}

/// What a decision is bound by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Requests in flight at which a host is full.
    pub limit: Option<u32>,
    /// Whether the limit is ignored while the mean in flight is at least half of it. Without this
    /// rule a fleet that starts cold never recovers (ROUTING.md 0.3).
    pub panic_rule: bool,
}

/// Why a request was left to the proxy's own policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abstain {
    /// No usable host is known.
    NoHosts,
    /// The prompt has no prefix to go by.
    NoPrefix,
    /// The request is not one that carries a prompt: no body, another method, an upgrade.
    NotAPrompt,
    /// The body did not come in time.
    Watchdog,
    /// It is left to the proxy so that hosts are found which nothing else tells of.
    Exploring,
    /// No pool serves it.
    NoPool,
    /// Its key is not in the share that is routed.
    Share,
}

impl Abstain {
    /// Every reason, for the metrics.
    pub const ALL: [Self; 7] = [
        Self::NoHosts,
        Self::NoPrefix,
        Self::NotAPrompt,
        Self::Watchdog,
        Self::Exploring,
        Self::NoPool,
        Self::Share,
    ];

    /// The metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::NoHosts => "no_hosts",
            Self::NoPrefix => "no_prefix",
            Self::NotAPrompt => "not_a_prompt",
            Self::Watchdog => "watchdog",
            Self::Exploring => "exploring",
            Self::NoPool => "no_pool",
            Self::Share => "share",
        }
    }
}

/// What kind of choice was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The first host in the key's rendezvous order.
    Home,
    /// A host that was sent more of this prompt before.
    Match,
    /// Another host because of load.
    Divert,
    /// Every host is at its limit: the one with the least in flight.
    Saturated,
    /// Every host is at its limit and the pool refuses such requests.
    Reject,
    /// No choice of ours.
    Abstain(Abstain),
}

impl Decision {
    /// The metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Home => "home",
            Self::Match => "match",
            Self::Divert => "divert",
            Self::Saturated => "saturated",
            Self::Reject => "reject",
            Self::Abstain(_) => "abstain",
        }
    }

    /// The label, and the reason of an abstention behind it.
    #[must_use]
    pub fn describe(self) -> String {
        match self {
            Self::Abstain(why) => format!("abstain ({})", why.label()),
            other => other.label().to_owned(),
        }
    }
}

/// A decision and the hosts it names, the choice first, then those that a retry tries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// What kind of choice this is.
    pub decision: Decision,
    /// At most [`LIST_MAX`] hosts, none twice; empty if we abstain.
    pub hosts: Vec<Candidate>,
}

impl Placement {
    /// No choice of ours.
    #[must_use]
    pub fn abstain(why: Abstain) -> Self {
        Self {
            decision: Decision::Abstain(why),
            hosts: Vec::new(),
        }
    }
}

impl Placement {
    /// The request is refused.
    #[must_use]
    pub fn reject() -> Self {
        Self {
            decision: Decision::Reject,
            hosts: Vec::new(),
        }
    }
}

/// Places a key on one of `hosts`.
#[must_use]
pub fn decide(key: Key, hosts: &[Candidate], loads: &Loads, bounds: Bounds) -> Placement {
    let mut order = order(key, hosts, |host| (host.id, host.weight));
    let limit = bounds.limit_in_force(hosts, loads);
    let has_room =
        |host: &Candidate| limit.is_none_or(|limit| loads.of(host.seat).in_flight < limit);
    let Some(chosen) = order.iter().position(has_room) else {
        return saturated(order, loads);
    };
    let decision = if chosen == 0 {
        Decision::Home
    } else {
        Decision::Divert
    };
    // The choice to the front; hosts that were passed over for load stay last resorts of a retry.
    order.rotate_left(chosen);
    order.truncate(LIST_MAX);
    Placement {
        decision,
        hosts: order,
    }
}

fn saturated(mut order: Vec<Candidate>, loads: &Loads) -> Placement {
    if order.is_empty() {
        return Placement::abstain(Abstain::NoHosts);
    }
    // Stable: ties keep the key's order. Failures count, for a host that fails at once is idle.
    order.sort_by_key(|host| {
        let load = loads.of(host.seat);
        load.in_flight + load.failures
    });
    order.truncate(LIST_MAX);
    Placement {
        decision: Decision::Saturated,
        hosts: order,
    }
}

impl Bounds {
    /// The limit, unless the panic rule sets it aside now.
    #[must_use]
    pub fn limit_in_force(self, hosts: &[Candidate], loads: &Loads) -> Option<u32> {
        let limit = self.limit?;
        let total: u64 = hosts
            .iter()
            .map(|host| u64::from(loads.of(host.seat).in_flight))
            .sum();
        let panic = total * 2 >= u64::from(limit) * hosts.len() as u64;
        (!(self.panic_rule && panic)).then_some(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Booking, Change, Ledger, NO_CHANGES, Slot, read};
    use crate::prefix::mix;
    use crate::store::MemoryStore;

    const KEY: Key = Key(42);

    fn fleet(count: u16) -> Vec<Candidate> {
        let host = |n: u16| Candidate {
            seat: Seat {
                slot: Slot(n),
                generation: 1,
            },
            id: HostId::of(&format!("10.0.0.{n}:8000")),
            known_as: HostRef::new(
                Seat {
                    slot: Slot(n),
                    generation: 1,
                },
                0,
            ),
            weight: 1,
            far: false,
            joining: false,
        };
        (0..count).map(host).collect()
    }

    fn loads(seats_in_flight: &[(Seat, u32)]) -> Loads {
        let store = MemoryStore::new();
        let ledger = Ledger::default();
        for &(seat, in_flight) in seats_in_flight {
            ledger.transact(&store, |loads| (loads.seat(seat), NO_CHANGES));
            for _ in 0..in_flight {
                ledger.apply(&store, Change::Book(Booking { seat, pending: 0 }));
            }
        }
        read(&store).unwrap()
    }

    /// A row: in flight of the hosts in the key's order | limit | panic rule | decision and the
    /// places, in the key's order, of the listed hosts.
    #[track_caller]
    fn check(row: &str) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let in_flight: Vec<u32> = cells[0]
            .split_whitespace()
            .map(|n| n.parse().unwrap())
            .collect();
        let bounds = Bounds {
            limit: cells[1].parse().ok(),
            panic_rule: cells[2] == "on",
        };
        let hosts = fleet(in_flight.len() as u16);
        let by_key = order(KEY, &hosts, |host| (host.id, host.weight));
        let busy: Vec<(Seat, u32)> = by_key
            .iter()
            .zip(&in_flight)
            .map(|(host, &n)| (host.seat, n))
            .collect();
        let placement = decide(KEY, &hosts, &loads(&busy), bounds);
        let mut found = placement.decision.label().to_owned();
        for host in &placement.hosts {
            let place = by_key.iter().position(|other| other == host).unwrap();
            found.push_str(&format!(" {place}"));
        }
        assert_eq!(found, cells[3], "row: {row}");
    }

    #[test]
    fn diverts_to_the_next_host_with_room() {
        //     in flight, in the key's order | limit | panic rule | decision
        check("0 0 0                         | off   | on         | home 0 1 2");
        check("9 0 0                         | off   | on         | home 0 1 2");
        check("1 0 0                         | 2     | off        | home 0 1 2");
        check("2 0 0                         | 2     | off        | divert 1 2 0");
        check("2 2 0 0                       | 2     | off        | divert 2 3 0");
        check("3 2 1 2                       | 2     | off        | divert 2 3 0");
        check("2 2 2                         | 2     | off        | saturated 0 1 2");
        check("4 3 2 5                       | 2     | off        | saturated 2 1 0");
        check("1                             | 1     | off        | saturated 0");
    }

    #[test]
    fn ignores_the_limit_while_the_fleet_is_half_full() {
        // The limit is ignored from a mean of half the limit on: 4 hosts × 10 / 2 = 20 in flight.
        check("10 9 0 0                      | 10    | on         | divert 1 2 3");
        check("10 9 1 0                      | 10    | on         | home 0 1 2");
        check("10 9 1 0                      | 10    | off        | divert 1 2 3");
        check("10 10 10 10                   | 10    | on         | home 0 1 2");
    }

    #[test]
    fn abstains_without_hosts() {
        let bounds = Bounds {
            limit: None,
            panic_rule: true,
        };
        let placement = decide(KEY, &[], &loads(&[]), bounds);
        assert_eq!(placement, Placement::abstain(Abstain::NoHosts));
        let bounds = Bounds {
            limit: Some(1),
            panic_rule: true,
        };
        assert_eq!(decide(KEY, &[], &loads(&[]), bounds), placement);
    }

    #[test]
    fn every_host_gets_traffic_from_ten_thousand_prefixes() {
        let hosts = fleet(7);
        let bounds = Bounds {
            limit: None,
            panic_rule: true,
        };
        let mut share = [0_u32; 7];
        for key in 0..10_000 {
            let placement = decide(Key(mix(key, 3)), &hosts, &loads(&[]), bounds);
            share[usize::from(placement.hosts[0].seat.slot.0)] += 1;
        }
        assert!(share.iter().all(|&count| count > 1200), "shares {share:?}");
    }
}
