//! The adaptive choice: which host computes the fewest tokens again, counting those that wait.
//!
//! Guarantee: a pure function of its arguments, with the same result in every gateway that has the
//! same view of loads and index. Not here: the key (popularity.rs), what is learned (learned.rs).
//!
//! Source of the rules and constants: ROUTING.md 6 and 6a, the study behind this project.

use crate::load::Loads;
use crate::placement::order;
use crate::prefix::Key;
use crate::route::{Abstain, Bounds, Candidate, Decision, LIST_MAX, Placement};

/// The constants of the choice, in tokens where they have a unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// ALPHA: what an uncached token weighs against a waiting one. Flat between 1.5 and 3.
    pub affinity_weight: f64,
    /// STEP: tokens that an engine computes in one step; when every host has this many waiting,
    /// saving work weighs one more.
    pub step_tokens: f64,
    /// DELTA: what a request in flight weighs, in waiting tokens.
    pub in_flight_tokens: f64,
    /// What a recent failure weighs, in waiting tokens: a failing host loses new prompts to its
    /// neighbours, and a single bad prompt does not empty it.
    pub failure_tokens: f64,
    /// What a host in another zone costs more, in waiting tokens.
    pub zone_tokens: f64,
    /// SLACK: the home is kept while it costs no more than this part of the prompt above the best.
    pub slack: f64,
    /// STICK: a match is kept while it costs no more than this part of the prompt above the best; of
    /// several the first in the key's order, so that a prompt which two hosts hold stays on one.
    pub stick: f64,
    /// BAL: in form K a host gets no more than this part of its even share of new keys, by weight.
    pub balance: f64,
    /// IDLE: form K balances new keys while the mean in flight is below this.
    pub idle_in_flight: f64,
}

impl Default for Constants {
    fn default() -> Self {
        Self {
            affinity_weight: 2.0,
            step_tokens: 8192.0,
            in_flight_tokens: 50.0,
            failure_tokens: 500.0,
            zone_tokens: 0.0,
            slack: 0.5,
            stick: 0.25,
            balance: 1.15,
            idle_in_flight: 8.0,
        }
    }
}

/// What was learned of how caches behave here (learned.rs).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Belief {
    /// The part of a prompt that its home is presumed to hold though we did not send it there.
    pub presumed: f64,
    /// How much the home is preferred for its own sake, 0 to 1.
    pub home_weight: f64,
    /// The part of an index entry's claim that turns out true.
    pub trust: f64,
    /// The part of a prompt that any host turns out to hold: above 0 with a shared KV store.
    pub shared: f64,
    /// Whether new keys are balanced: form K, and no other gateway seems to warm our hosts.
    pub balances: bool,
}

/// One request to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// Its key.
    pub key: Key,
    /// The usable hosts.
    pub hosts: &'a [Candidate],
    /// For each host, up to which token the index says that it was sent this prompt; 0 if never.
    pub known: &'a [f64],
    /// The prompt's tokens.
    pub tokens: f64,
    /// Tokens up to which every host is assumed to hold it: its hot prefixes.
    pub floor: f64,
    /// False if no cache helps: least cost places it.
    pub affinity: bool,
    /// What was learned.
    pub belief: Belief,
    /// The limit.
    pub bounds: Bounds,
}

/// A placement and what it was based on.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The decision.
    pub placement: Placement,
    /// Tokens that the chosen host is expected to compute.
    pub pending: u32,
    /// Tokens that the chosen host was sent before, by the index.
    pub known: f64,
    /// Whether the chosen host is the first in the key's rendezvous order.
    pub at_home: bool,
    /// Whether any host was sent more of this prompt than all hold.
    pub is_bound: bool,
}

/// A host with what the request would cost there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offer {
    /// The host.
    pub host: Candidate,
    /// Tokens it holds, by the index and the floor.
    pub known: f64,
    /// Tokens it would compute.
    pub uncached: f64,
    /// What its load comes to.
    pub load: f64,
    /// What both come to.
    pub cost: f64,
    /// Whether it is at its limit.
    pub full: bool,
}

/// What each host would cost, the home first, then in the key's order: what [`decide`] chooses from.
#[must_use]
pub fn costs(query: &Query<'_>, loads: &Loads, constants: &Constants) -> Vec<Offer> {
    home(query, loads, constants)
        .map_or_else(Vec::new, |home| offers(query, loads, constants, &home))
}

/// Chooses the host. New keys that are balanced are counted in `loads`.
#[must_use]
pub fn decide(query: &Query<'_>, loads: &mut Loads, constants: &Constants) -> Choice {
    let Some(home) = home(query, loads, constants) else {
        return Choice {
            placement: Placement::abstain(Abstain::NoHosts),
            pending: 0,
            known: 0.0,
            at_home: false,
            is_bound: false,
        };
    };
    let offers = offers(query, loads, constants, &home);
    let all_full = offers.iter().all(|offer| offer.full);
    let chosen = if all_full {
        least(offers.iter().filter(|_| true), |offer| {
            in_flight(loads, offer)
        })
    } else {
        choose(query, constants, &home, &offers)
    };
    let chosen = chosen.or(offers.first()).copied();
    let Some(chosen) = chosen else {
        return decide(
            &Query {
                hosts: &[],
                ..*query
            },
            loads,
            constants,
        );
    };
    let at_home = chosen.host == home.first;
    let decision = match (all_full, at_home) {
        (true, _) => Decision::Saturated,
        (false, true) => Decision::Home,
        (false, false) if home.is_bound && chosen.known >= home.deepest => Decision::Match,
        (false, false) => Decision::Divert,
    };
    if query.belief.balances && !home.is_bound && query.affinity {
        loads.count_placed(chosen.host.seat, query.hosts.iter().map(|host| host.seat));
    }
    let presumed = if at_home { query.belief.presumed } else { 0.0 };
    Choice {
        // At least two, so that a request that waits always shows: one is what is left where only
        // the answer is to come (request.rs).
        pending: (chosen.uncached * (1.0 - presumed)).round().max(2.0) as u32,
        known: chosen.known,
        at_home: chosen.host == home.rendezvous,
        is_bound: home.is_bound,
        placement: Placement {
            decision,
            hosts: list(&chosen, &offers),
        },
    }
}

/// What the key says before load is looked at.
struct Home {
    /// The hosts in the key's order, the home first.
    order: Vec<usize>,
    /// The home: of form J the first in rendezvous order.
    first: Candidate,
    /// The first in rendezvous order.
    rendezvous: Candidate,
    /// The deepest token that any host was sent.
    deepest: f64,
    /// Whether that is deeper than what all hold.
    is_bound: bool,
}

fn home(query: &Query<'_>, loads: &Loads, constants: &Constants) -> Option<Home> {
    let places: Vec<(usize, Candidate)> = query.hosts.iter().copied().enumerate().collect();
    let mut order: Vec<(usize, Candidate)> =
        order(query.key, &places, |(_, host)| (host.id, host.weight));
    let rendezvous = order.first()?.1;
    let deepest = query
        .known
        .iter()
        .fold(query.floor, |deepest, known| deepest.max(*known));
    let is_bound = deepest > query.floor;
    if query.belief.balances && !is_bound && mean_in_flight(query, loads) < constants.idle_in_flight
    {
        let place = balanced(&order, loads, constants);
        if let Some(moved) = order.get(..=place).map(<[_]>::len) {
            order.get_mut(..moved)?.rotate_right(1);
        }
    }
    let first = order.first()?.1;
    let order = order.into_iter().map(|(place, _)| place).collect();
    Some(Home {
        order,
        first,
        rendezvous,
        deepest,
        is_bound,
    })
}

/// The place in `order` of the first host that has not got its share of new keys yet: of so many
/// hosts that weigh alike an even one, times BAL. A share below a whole key is rounded so that few
/// keys are spread evenly, of 12 to 3 hosts 4 to each: engines whose caches hold no more of them
/// lose all when they get one too many.
fn balanced(order: &[(usize, Candidate)], loads: &Loads, constants: &Constants) -> usize {
    let weight = |(_, host): &(usize, Candidate)| f64::from(host.weight);
    let weights: f64 = order.iter().map(weight).sum();
    let placed = |(_, host): &(usize, Candidate)| f64::from(loads.placed(host.seat));
    let total: f64 = order.iter().map(placed).sum();
    // Never are all closed: what is even for each comes to one more than was placed.
    let is_open = |host: &(usize, Candidate)| {
        let even = (total + 1.0) * weight(host) / weights;
        placed(host) < even.ceil().max((constants.balance * even).floor())
    };
    order.iter().position(is_open).unwrap_or(0)
}

fn mean_in_flight(query: &Query<'_>, loads: &Loads) -> f64 {
    let total: f64 = query
        .hosts
        .iter()
        .map(|host| f64::from(loads.of(host.seat).in_flight))
        .sum();
    total / query.hosts.len().max(1) as f64
}

/// What each host would cost, in the key's order.
fn offers(query: &Query<'_>, loads: &Loads, constants: &Constants, home: &Home) -> Vec<Offer> {
    let limit = query.bounds.limit_in_force(query.hosts, loads);
    let pending = |host: &Candidate| f64::from(loads.of(host.seat).pending);
    let waiting_least = query
        .hosts
        .iter()
        .map(pending)
        .fold(f64::INFINITY, f64::min);
    // When every host has a queue, saving work matters more than evening it out.
    let weight = constants.affinity_weight + waiting_least / constants.step_tokens;
    let belief = query.belief;
    let offer = |place: &usize| {
        let host = *query.hosts.get(*place)?;
        let known = query
            .known
            .get(*place)
            .copied()
            .unwrap_or(0.0)
            .max(query.floor);
        let trusted = query.floor + (known - query.floor) * belief.trust;
        let mut uncached = query.tokens - trusted.min(query.tokens - 1.0).max(0.0);
        let is_home = host == home.first;
        if !is_home && known <= query.floor {
            uncached *= 1.0 - belief.shared;
        }
        let counted = loads.of(host.seat);
        let mut load = f64::from(counted.pending)
            + constants.in_flight_tokens * f64::from(counted.in_flight)
            // One failure may be the request's own fault.
            + constants.failure_tokens * f64::from(counted.failures.saturating_sub(1));
        if host.far {
            load += constants.zone_tokens;
        }
        let mut cost = load + weight * uncached;
        if is_home && query.affinity {
            cost -= weight * uncached * belief.presumed;
        }
        let full = limit.is_some_and(|limit| counted.in_flight >= limit);
        Some(Offer {
            host,
            known,
            uncached,
            load,
            cost,
            full,
        })
    };
    home.order.iter().filter_map(offer).collect()
}

fn choose<'a>(
    query: &Query<'_>,
    constants: &Constants,
    home: &Home,
    offers: &'a [Offer],
) -> Option<&'a Offer> {
    let open = || offers.iter().filter(|offer| !offer.full);
    let best = least(open(), |offer| offer.cost)?;
    if !query.affinity {
        return Some(best);
    }
    if home.is_bound && home.deepest > query.tokens / 2.0 {
        let moves = |offer: &&Offer| moves_home(query, constants, home, offer, best);
        if let Some(offer) = offers.first().filter(moves) {
            return Some(offer);
        }
        let near = best.cost + constants.stick * query.tokens;
        let is_match = |offer: &&Offer| offer.known >= home.deepest && offer.cost <= near;
        if let Some(offer) = open().find(is_match) {
            return Some(offer);
        }
    }
    let slack = constants.slack * query.belief.home_weight * (query.tokens - query.floor).max(0.0);
    open().find(|offer| offer.cost <= best.cost + slack)
}

/// Whether a prompt that others hold moves to its home, which is joining. Without this a host that
/// comes back gets new prompts only, for a match elsewhere costs less. No more than one step of the
/// engine is computed again for it, so long sessions stay where they are; and the home's load
/// counts, so that a cold cache is not flooded.
fn moves_home(
    query: &Query<'_>,
    constants: &Constants,
    home: &Home,
    offer: &Offer,
    best: &Offer,
) -> bool {
    let again = home.deepest - offer.known;
    let has_room = !offer.full && offer.load <= best.load + constants.slack * query.tokens;
    offer.host.joining && again > 0.0 && again <= constants.step_tokens && has_room
}

/// The first of the least by `cost`, so that ties keep the key's order.
fn least<'a>(
    offers: impl Iterator<Item = &'a Offer>,
    cost: impl Fn(&Offer) -> f64,
) -> Option<&'a Offer> {
    offers.fold(None, |least: Option<&Offer>, offer| match least {
        Some(least) if cost(least) <= cost(offer) => Some(least),
        _ => Some(offer),
    })
}

fn in_flight(loads: &Loads, offer: &Offer) -> f64 {
    let load = loads.of(offer.host.seat);
    f64::from(load.in_flight + load.failures)
}

/// The chosen host, and those that a retry goes to: in the key's order, but full ones only as a last
/// resort.
fn list(chosen: &Offer, offers: &[Offer]) -> Vec<Candidate> {
    let others = |full| {
        let others = offers.iter().filter(move |offer| offer.full == full);
        let others = others.map(|offer| offer.host);
        others.filter(|host| *host != chosen.host)
    };
    std::iter::once(chosen.host)
        .chain(others(false))
        .chain(others(true))
        .take(LIST_MAX)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::HostRef;
    use crate::load::{Booking, Change, Ledger, NO_CHANGES, Seat, Slot, read};
    use crate::placement::HostId;
    use crate::store::MemoryStore;

    const KEY: Key = Key(42);
    const TOKENS: f64 = 1000.0;
    const BELIEF: Belief = Belief {
        presumed: 0.0,
        home_weight: 1.0,
        trust: 1.0,
        shared: 0.0,
        balances: false,
    };

    /// Hosts in the key's order, the home first; `n` is near, `f` far, `j` near and joining.
    fn fleet(zones: &str) -> Vec<Candidate> {
        let host = |n: u16| {
            let seat = Seat {
                slot: Slot(n),
                generation: 1,
            };
            Candidate {
                seat,
                id: HostId::of(&format!("10.0.0.{n}:8000")),
                known_as: HostRef::new(seat, 0),
                weight: 1,
                far: false,
                joining: false,
            }
        };
        let zones: Vec<&str> = zones.split_whitespace().collect();
        let hosts: Vec<Candidate> = (0..zones.len() as u16).map(host).collect();
        let mut hosts = order(KEY, &hosts, |host| (host.id, host.weight));
        for (host, zone) in hosts.iter_mut().zip(zones) {
            host.far = zone == "f";
            host.joining = zone == "j";
        }
        hosts
    }

    /// A row: zones, the home first | what a far host costs more | pending tokens | tokens of the
    /// prompt's 1,000 that each was sent | decision and the place of the host in the key's order.
    #[track_caller]
    fn check(row: &str) {
        check_with(row, Constants::default());
    }

    #[track_caller]
    fn check_with(row: &str, constants: Constants) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let numbers = |cell: &str| -> Vec<f64> {
            let words = cell.split_whitespace();
            words.map(|word| word.parse().unwrap()).collect()
        };
        let hosts = fleet(cells[0]);
        let (store, ledger) = (MemoryStore::new(), Ledger::default());
        for (host, pending) in hosts.iter().zip(numbers(cells[2])) {
            let (seat, pending) = (host.seat, pending as u32);
            ledger.transact(&store, |loads| (loads.seat(seat), NO_CHANGES));
            ledger.apply(&store, Change::Book(Booking { seat, pending }));
        }
        let query = Query {
            key: KEY,
            hosts: &hosts,
            known: &numbers(cells[3]),
            tokens: TOKENS,
            floor: 0.0,
            affinity: true,
            belief: BELIEF,
            bounds: Bounds {
                limit: None,
                panic_rule: true,
            },
        };
        let constants = Constants {
            zone_tokens: numbers(cells[1])[0],
            ..constants
        };
        let choice = decide(&query, &mut read(&store).unwrap(), &constants);
        let first = choice.placement.hosts[0];
        let place = hosts.iter().position(|host| *host == first).unwrap();
        let found = format!("{} {place}", choice.placement.decision.label());
        assert_eq!(found, cells[4], "row: {row}");
    }

    #[test]
    fn a_far_host_is_chosen_where_it_saves_more_than_it_costs() {
        // A cold host costs 2,000 here; the home is kept within 500 of the best, a match within 250.
        // zones | a far one costs | pending   | was sent   | decision
        check("f n n | 0               | 0 0 0     | 0 0 0      | home 0");
        check("f n n | 500             | 0 0 0     | 0 0 0      | home 0");
        check("f n n | 501             | 0 0 0     | 0 0 0      | divert 1");
        check("n f f | 501             | 0 0 0     | 0 0 0      | home 0");
        // Idle, where the near ones are busy.
        check("f n n | 1000            | 0 400 800 | 0 0 0      | divert 1");
        check("f n n | 1000            | 0 500 800 | 0 0 0      | home 0");
        // Warm, where the near ones are cold; and not by enough.
        check("n f n | 1000            | 0 0 0     | 0 900 0    | match 1");
        check("n f n | 2100            | 0 0 0     | 0 900 0    | home 0");
        // All are far, so all cost the same more.
        check("f f f | 5000            | 0 0 0     | 0 0 0      | home 0");
    }

    #[test]
    fn of_several_matches_the_first_in_the_keys_order_is_kept_while_it_costs_little_more() {
        // A match is kept within 250 of the best.
        // zones | a far one costs | pending   | was sent    | decision
        check("n n n | 0           | 0 0 0     | 900 900 0   | home 0");
        check("n n n | 0           | 150 0 0   | 900 900 0   | home 0");
        check("n n n | 0           | 300 0 0   | 900 900 0   | match 1");
        check("n n n | 0           | 0 150 0   | 0 900 900   | match 1");
        check("n n n | 0           | 0 300 0   | 0 900 900   | match 2");
        // Others hold less of it.
        check("n n n | 0           | 0 150 0   | 0 900 800   | match 1");
    }

    #[test]
    fn saving_work_weighs_more_when_every_host_has_tokens_waiting() {
        // 200 tokens that one host holds save 400 where any host is idle, and the home is kept within
        // 500; with 4,096 waiting on all, which is half a step, they save 500.
        // zones | a far one costs | pending        | was sent | decision
        check("n n n | 0           | 0 0 0          | 0 200 0  | home 0");
        check("n n n | 0           | 4096 4096 4096 | 0 200 0  | home 0");
        check("n n n | 0           | 4097 4097 4097 | 0 200 0  | match 1");
        // The least counts, also of a host that is too far.
        check("n n f | 9000        | 5000 5000 5000 | 0 200 0  | match 1");
        check("n n f | 9000        | 5000 5000 4000 | 0 200 0  | home 0");
    }

    /// How many of so many new prompts come to each of hosts of these weights, where new ones are
    /// balanced.
    fn balanced_over(weights: &[u32], prompts: u64) -> Vec<u32> {
        balanced_while(0, weights, prompts)
    }

    fn new_key(prompt: u64) -> Key {
        Key(crate::prefix::mix(prompt, 7))
    }

    /// The same while each has so many in flight.
    fn balanced_while(in_flight: u32, weights: &[u32], prompts: u64) -> Vec<u32> {
        let mut hosts = fleet(&"n ".repeat(weights.len()));
        hosts.sort_by_key(|host| host.seat.slot);
        for (host, weight) in hosts.iter_mut().zip(weights) {
            host.weight = *weight;
        }
        let (store, ledger) = (MemoryStore::new(), Ledger::default());
        let seats = hosts.iter().map(|host| host.seat);
        for seat in seats {
            ledger.transact(&store, |loads| (loads.seat(seat), NO_CHANGES));
            let booked = Change::Book(Booking { seat, pending: 0 });
            (0..in_flight).for_each(|_| ledger.apply(&store, booked));
        }
        let mut loads = read(&store).unwrap();
        for key in 0..prompts {
            let query = Query {
                key: new_key(key),
                hosts: &hosts,
                known: &[],
                tokens: TOKENS,
                floor: 0.0,
                affinity: true,
                belief: Belief {
                    balances: true,
                    ..BELIEF
                },
                bounds: Bounds {
                    limit: None,
                    panic_rule: true,
                },
            };
            let _ = decide(&query, &mut loads, &Constants::default());
        }
        hosts.iter().map(|host| loads.placed(host.seat)).collect()
    }

    #[test]
    fn few_new_prompts_are_spread_evenly_where_new_ones_are_balanced() {
        assert_eq!(balanced_over(&[1, 1, 1], 3), [1, 1, 1]);
        assert_eq!(balanced_over(&[1, 1, 1], 12), [4, 4, 4]);
        assert_eq!(balanced_over(&[1, 1, 1, 1], 8), [2, 2, 2, 2]);
    }

    #[test]
    fn new_prompts_are_balanced_only_while_hosts_have_few_requests() {
        let hosts = fleet("n n n");
        let mut homes = vec![0; 3];
        for prompt in 0..12 {
            let order = order(new_key(prompt), &hosts, |host| (host.id, host.weight));
            homes[usize::from(order[0].seat.slot.0)] += 1;
        }
        assert_ne!(homes, [4, 4, 4], "these say nothing");
        let weights = [1, 1, 1];
        assert_eq!(balanced_while(7, &weights, 12), [4, 4, 4]);
        assert_eq!(balanced_while(8, &weights, 12), homes);
    }

    #[test]
    fn new_prompts_are_balanced_by_weight() {
        let found = balanced_over(&[1, 3], 40);
        assert_eq!(found.iter().sum::<u32>(), 40);
        assert!((6..=11).contains(&found[0]), "{found:?}");
        // Even shares of 22, 11 and 11, times 1.15.
        let found = balanced_over(&[2, 1, 1], 44);
        assert!(found[0] >= 20 && found[0] <= 25, "{found:?}");
        assert!(found[1] <= 12 && found[2] <= 12, "{found:?}");
    }

    #[test]
    fn a_retry_goes_to_a_full_host_only_if_no_other_is_left() {
        let bounds = Bounds {
            limit: Some(1),
            panic_rule: false,
        };
        let hosts = fleet("n n n n");
        let (store, ledger) = (MemoryStore::new(), Ledger::default());
        let book = |place: usize| {
            let (seat, pending) = (hosts[place].seat, 1);
            ledger.apply(&store, Change::Book(Booking { seat, pending }));
        };
        for host in &hosts {
            ledger.transact(&store, |loads| (loads.seat(host.seat), NO_CHANGES));
        }
        // The places of the hosts that are listed while these are full.
        let listed = |full: &[usize]| -> Vec<usize> {
            full.iter().for_each(|place| book(*place));
            let query = Query {
                key: KEY,
                hosts: &hosts,
                known: &[0.0; 4],
                tokens: TOKENS,
                floor: 0.0,
                affinity: true,
                belief: BELIEF,
                bounds,
            };
            let choice = decide(&query, &mut read(&store).unwrap(), &Constants::default());
            let place = |host| hosts.iter().position(|other| other == host).unwrap();
            choice.placement.hosts.iter().map(place).collect()
        };
        assert_eq!(listed(&[]), [0, 1, 2]);
        assert_eq!(listed(&[0]), [1, 2, 3]);
        assert_eq!(listed(&[2]), [1, 3, 0]);
    }

    #[test]
    fn a_prompt_moves_to_its_joining_home_unless_that_is_busy_or_much_is_computed_again() {
        let again = |tokens| Constants {
            step_tokens: tokens,
            ..Constants::default()
        };
        // zones | a far one costs | pending | was sent    | decision
        check("n n n | 0           | 0 0 0   | 0 900 0     | match 1");
        check("j n n | 0           | 0 0 0   | 0 900 0     | home 0");
        check("n j n | 0           | 0 0 0   | 0 0 900     | match 2");
        // Once it was sent there, the least cost decides as ever.
        check("j n n | 0           | 600 0 0 | 900 900 0   | match 1");
        check("j n n | 0           | 0 600 0 | 900 900 0   | home 0");
        // Busier than the host that holds it by more than half the prompt.
        check("j n n | 0           | 500 0 0 | 0 900 0     | home 0");
        check("j n n | 0           | 501 0 0 | 0 900 0     | match 1");
        check_with(
            "j n n | 0      | 0 0 0   | 100 900 0   | home 0",
            again(800.0),
        );
        check_with(
            "j n n | 0      | 0 0 0   | 99 900 0    | match 1",
            again(800.0),
        );
    }
}
