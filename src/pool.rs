//! One pool at work: from a prompt to a booked host.
//!
//! Guarantee: the same prompt, hosts, loads and learned figures give the same placement in every
//! worker and every gateway. Not here: where the hosts come from (fleet.rs), the proxy (filter/).

use std::borrow::Cow;
use std::cell::RefCell;

use crate::cost::{self, Constants, Offer, Query};
use crate::hosts::{HostReport, State};
use crate::index::{self, HostRef, Page};
use crate::learned::{Expectation, Learned, MARGIN_TOKENS, Report};
use crate::load::{Changes, Ledger, Loads, NO_CHANGES, Seat};
use crate::placement::{HostId, WEIGHT_MAX};
use crate::popularity::{self, Heat, Popularity, Rung};
use crate::prefill::{Due, Prefill};
use crate::prefix::{BYTES_PER_TOKEN, Key, Kinds, Prompt, mix};
use crate::request::Request;
use crate::route::{self, Abstain, Bounds, Candidate, Decision, Placement};
use crate::store::{self, Store};

/// What a host of weight 1 weighs in placement: a slow start has so many steps.
const WEIGHT_UNIT: u32 = 256;
/// Hosts that become usable within this time start together, at full weight: their caches are
/// equally cold, and gateways that start one after another agree.
const TOGETHER_MS: u64 = 10_000;
/// A host is joining for so many slow starts: long enough for most prompts to be asked again, of
/// which each then moves once.
const JOINING: u64 = 4;

/// A host as a worker knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// `ip:port`, as Envoy writes it.
    pub address: String,
    /// Its place in the loads.
    pub seat: Seat,
    /// Its identity in placement.
    pub id: HostId,
    /// Grows whenever it comes back: what it had cached is gone.
    pub epoch: u16,
    /// Its weight in placement, at least 1.
    pub weight: u32,
    /// When it last became usable, in milliseconds since 1970.
    pub since_ms: u64,
    /// When a request first missed it since it last answered one; 0 if none did, or if its source
    /// says how it is.
    pub missing_ms: u64,
    /// Its zone; empty if it is not known.
    pub zone: String,
    /// Its state in the pool; `None` if it is not one of the pool's hosts, or no longer.
    pub state: Option<State>,
}

/// The hosts of a pool at one version of the host table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The host table's version; 0 before there is one.
    pub version: u32,
    /// Every host that is known, usable or not.
    pub hosts: Vec<Host>,
    candidates: Vec<Candidate>,
}

impl View {
    /// The view of these hosts.
    #[must_use]
    pub fn new(version: u32, hosts: Vec<Host>) -> Self {
        let usable = hosts
            .iter()
            .filter(|host| host.state.is_some_and(State::is_usable));
        let heaviest = usable.clone().map(|host| host.weight).max().unwrap_or(1);
        let candidates = usable
            .map(|host| Candidate {
                seat: host.seat,
                id: host.id,
                known_as: HostRef::new(host.seat, host.epoch),
                weight: weight_of(host.weight, heaviest),
                far: false,
                joining: false,
            })
            .collect();
        Self {
            version,
            hosts,
            candidates,
        }
    }

    /// The same from a gateway of this zone, which is empty if it is not known: hosts that are known
    /// to be in another are far.
    #[must_use]
    pub fn seen_from(mut self, zone: &str) -> Self {
        let hosts = self.hosts.iter();
        let usable = hosts.filter(|host| host.state.is_some_and(State::is_usable));
        for (candidate, host) in self.candidates.iter_mut().zip(usable) {
            candidate.far = !zone.is_empty() && !host.zone.is_empty() && host.zone != zone;
        }
        self
    }

    /// Hosts that requests may be sent to.
    #[must_use]
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// The same as of this moment: a host that came later than the others grows to its full weight
    /// over `slow_start_ms`, so that its cold cache takes its share of prefixes bit by bit. A
    /// growing weight moves prefixes to that host only, and each once. For [`JOINING`] times as
    /// long it is joining.
    #[must_use]
    pub fn candidates_at(&self, now_ms: u64, slow_start_ms: u64) -> Cow<'_, [Candidate]> {
        let usable = || {
            let usable = |host: &&Host| host.state.is_some_and(State::is_usable);
            self.hosts.iter().filter(usable)
        };
        let first_ms = usable().map(|host| host.since_ms).min().unwrap_or(0);
        let joining_ms = slow_start_ms.saturating_mul(JOINING);
        let is_joining = |host: &Host| {
            let is_late = host.since_ms > first_ms.saturating_add(TOGETHER_MS);
            // Not before it came either: the clock may have been set back.
            let until_ms = host.since_ms.saturating_add(joining_ms);
            is_late && (host.since_ms..until_ms).contains(&now_ms)
        };
        if !usable().any(is_joining) {
            return Cow::Borrowed(&self.candidates);
        }
        let mut candidates = self.candidates.clone();
        for (candidate, host) in candidates.iter_mut().zip(usable()) {
            candidate.joining = is_joining(host);
            let age_ms = now_ms.saturating_sub(host.since_ms);
            if candidate.joining && age_ms < slow_start_ms {
                let part = u64::from(candidate.weight) * age_ms / slow_start_ms;
                candidate.weight = u32::try_from(part).unwrap_or(u32::MAX).max(1);
            }
        }
        Cow::Owned(candidates)
    }

    /// The pool's hosts as if a source had reported them now, where none does: those that are known
    /// to run, stalled or not.
    #[must_use]
    pub fn members(&self) -> Vec<HostReport> {
        let runs = |host: &&Host| matches!(host.state, Some(State::Usable | State::Stalled));
        let hosts = self.hosts.iter().filter(runs);
        hosts
            .map(|host| HostReport::usable(&host.address))
            .collect()
    }

    /// The place of a host in the loads, by its address.
    #[must_use]
    pub fn seat_of(&self, address: &str) -> Option<Seat> {
        self.hosts
            .iter()
            .find(|host| host.address == address)
            .map(|host| host.seat)
    }

    /// The address of the host at a place in the loads.
    #[must_use]
    pub fn address_of(&self, seat: Seat) -> Option<&str> {
        self.hosts
            .iter()
            .find(|host| host.seat == seat)
            .map(|host| host.address.as_str())
    }
}

/// A host's weight in placement: its own in steps of a slow start; of a pool whose weights are too
/// large for the arithmetic, in proportion to the heaviest.
fn weight_of(own: u32, heaviest: u32) -> u32 {
    let unit = u64::from(WEIGHT_UNIT);
    let scaled = match u64::from(heaviest) * unit {
        most if most <= u64::from(WEIGHT_MAX) => u64::from(own) * unit,
        _ => u64::from(own) * u64::from(WEIGHT_MAX) / u64::from(heaviest),
    };
    u32::try_from(scaled).unwrap_or(WEIGHT_MAX).max(1)
}

/// How a pool chooses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// By popularity, cost and what was learned.
    Adaptive {
        /// What decides how deep the key goes.
        heat: Heat,
        /// What the choice weighs.
        constants: Constants,
        /// Form K: this gateway is the only one.
        one_gateway: bool,
    },
    /// By the prompt's first characters, as the reader hashed them, and the limit.
    Fixed,
}

/// A request's key, and the checkpoints that the index knows it by.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    key: Key,
    position: u64,
    /// Estimated tokens: of the prompt, and of its hot prefixes.
    tokens: f64,
    floor: f64,
    /// Deeper than the floor, shallow to deep.
    trail: Vec<Step>,
    affinity: bool,
    /// Whether the answer is streamed.
    stream: bool,
}

/// A checkpoint in the index.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    key: Key,
    tokens: f64,
    /// Whether it is kept; the others are only looked up.
    kept: bool,
    /// Whether a message ends there.
    message_end: bool,
}

/// Where a request was placed and by what.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// The decision and its hosts.
    pub placement: Placement,
    /// The key; `None` if the prompt has none.
    pub key: Option<Key>,
    /// Where in the prompt the key ends, in bytes of text.
    pub position: u64,
    /// What the engine's answer can be compared with; `None` in `fixed` mode.
    pub expected: Option<Expected>,
    /// What is known of the time that its prompt takes; `None` if it is not booked.
    pub sent: Option<Sent>,
}

/// A request on its way to its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    at_ms: u64,
    seat: Seat,
    /// Pending tokens of its host, its own among them.
    waiting: u32,
    stream: bool,
    /// Where its pending tokens are, if it does not have them itself.
    due: Option<Due>,
}

impl Placed {
    /// A request that was not placed.
    #[must_use]
    pub fn abstain(why: Abstain) -> Self {
        Self {
            placement: Placement::abstain(why),
            key: None,
            position: 0,
            expected: None,
            sent: None,
        }
    }
}

/// What is expected of the host that was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// The figures.
    pub figures: Expectation,
    /// Tokens in its cache, the answer that it wrote itself included.
    cached: f64,
    host: Candidate,
    trail: Vec<Step>,
}

impl Expected {
    /// Prompt tokens that should be in the host's cache.
    #[must_use]
    pub fn cached_tokens(&self) -> f64 {
        self.cached.min(self.figures.tokens)
    }

    /// The share of the prompt that should be in the host's cache, in 0..=1: unlike the tokens, it
    /// does not depend on how well they were estimated.
    #[must_use]
    pub fn cached_share(&self) -> f64 {
        (self.cached_tokens() / self.figures.tokens.max(1.0)).clamp(0.0, 1.0)
    }
}

/// The hosts of a pool have changed since the view was taken: take a new one and try again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outdated;

/// A pool's rules.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// How it chooses.
    pub rule: Rule,
    /// What load may do to the choice.
    pub bounds: Bounds,
    /// Whether a request that finds every host at its limit is refused.
    pub rejects: bool,
    /// Time over which a host that comes later takes its share; 0: at once.
    pub slow_start_ms: u64,
    /// The part of keys that are routed.
    pub share: f64,
    /// Whether decisions are only told, and the proxy's own choice serves.
    pub observes: bool,
}

/// Mixed into a key before it is compared with the share. A key's place among the hosts comes from
/// its mix with theirs, so this says nothing of it: the share takes the same part of each host.
const SHARE_SEED: u64 = 0x0073_6861_7265; // "share"
/// A key has one of so many places on the way from 0 to 1: 2^32.
const PLACES: f64 = 4_294_967_296.0;

/// The shared-data key of a pool's sketch; its number is the layout's version.
fn sketch_key(pool: &str) -> String {
    format!("prefix_router.3.sketch.{pool}")
}

/// What the shared-data keys of a pool's index begin with.
fn index_key(pool: &str) -> String {
    format!("prefix_router.1.index.{pool}")
}

/// Empties what is kept in shared data of a pool that is gone: 100 KiB. Its keys stay, since none can
/// be deleted.
pub fn forget(store: &impl Store, pool: &str) {
    store::clear(store, &sketch_key(pool));
    index::clear(store, &index_key(pool));
}

/// One pool's routing in one worker.
#[derive(Clone, Debug)]
pub struct Router {
    rules: Rules,
    /// `None` in `fixed` mode, which looks at no popularity.
    popularity: Option<Popularity>,
    index: String,
    learned: RefCell<Learned>,
    prefill: RefCell<Prefill>,
}

impl Router {
    /// Routing for the pool of this name.
    #[must_use]
    pub fn new(pool: &str, rules: Rules) -> Self {
        let popularity = match rules.rule {
            Rule::Fixed => None,
            Rule::Adaptive { heat, .. } => Some(Popularity::new(sketch_key(pool), heat)),
        };
        Self {
            rules,
            popularity,
            index: index_key(pool),
            learned: RefCell::default(),
            prefill: RefCell::default(),
        }
    }

    /// Finds the key of `prompt`; `None` if it has none. Counts it in the pool's sketch: once for
    /// each request.
    pub fn plan(&self, prompt: &Prompt, hosts: usize, store: &impl Store) -> Option<Plan> {
        let whole = prompt.checkpoints.last();
        let whole = whole.map(|end| (prompt.key(end), end.position));
        let popularity = match &self.popularity {
            None => {
                let fixed = prompt.fixed.map(|hash| (Key(mix(hash, prompt.seed)), 0));
                return fixed
                    .or(whole)
                    .map(|(key, position)| self.bare(prompt, key, position));
            }
            Some(_) if !prompt.affinity => {
                return whole.map(|(key, position)| self.bare(prompt, key, position));
            }
            Some(popularity) => popularity,
        };
        let rungs = popularity::rungs(prompt);
        let hosts = u32::try_from(hosts).unwrap_or(u32::MAX);
        let found = popularity.visit(store, &rungs, hosts)?;
        let key = match prompt.cache_key {
            Some(cache_key) if found.is_hot => Key(mix(found.key.0, cache_key)),
            _ => found.key,
        };
        let trail = self.trail(prompt, found.floor);
        let floor = self.tokens(found.floor);
        Some(Plan {
            floor,
            trail,
            ..self.bare(prompt, key, found.position)
        })
    }

    fn bare(&self, prompt: &Prompt, key: Key, position: u64) -> Plan {
        let tokens = self.tokens(prompt.bytes).max(1.0);
        let affinity = prompt.affinity;
        Plan {
            key,
            position,
            tokens,
            floor: 0.0,
            trail: Vec::new(),
            affinity,
            stream: prompt.stream,
        }
    }

    fn tokens(&self, bytes: u64) -> f64 {
        self.learned.borrow().tokens(bytes) / BYTES_PER_TOKEN as f64
    }

    fn trail(&self, prompt: &Prompt, floor: u64) -> Vec<Step> {
        let kinds = Kinds::INDEX.with(Kinds::MESSAGE_END);
        let known = prompt.checkpoints.iter();
        let known = known.filter(|at| at.position > floor && at.kinds.has(kinds));
        known
            .map(|at| Step {
                key: prompt.key(at),
                tokens: self.tokens(at.position),
                kept: at.kinds.has(Kinds::INDEX),
                message_end: at.kinds.has(Kinds::MESSAGE_END),
            })
            .collect()
    }

    /// Whether a request of this plan is routed: by its key alone, so alike on every gateway.
    #[must_use]
    pub fn routes(&self, plan: &Plan) -> bool {
        // The upper half, which is exact in a float.
        let place = (mix(plan.key.0, SHARE_SEED) >> 32) as f64;
        place < self.rules.share * PLACES
    }

    /// Chooses a host by `plan`, books it, and notes in the index what it was sent.
    ///
    /// # Errors
    /// [`Outdated`] if the host table has changed; nothing is booked then.
    pub fn place(
        &self,
        plan: &Plan,
        view: &View,
        request: &mut Request,
        now_ms: u64,
        store: &impl Store,
        ledger: &Ledger,
    ) -> Result<Placed, Outdated> {
        let Rule::Adaptive { constants, .. } = self.rules.rule else {
            return self.place_fixed(plan, view, request, now_ms, store, ledger);
        };
        let hosts = view.candidates_at(now_ms, self.rules.slow_start_ms);
        let (page, known) = self.known(plan, &hosts, store);
        let query = self.query(plan, &hosts, &known);
        self.end_overdue(now_ms, store, ledger);
        let (placement, choice) = request.place(store, ledger, !self.rules.observes, |loads| {
            check(loads, view)?;
            let choice = cost::decide(&query, loads, &constants);
            let waiting = waiting(loads, &choice.placement, choice.pending);
            Ok((
                self.or_reject(choice.placement.clone()),
                choice.pending,
                (choice, waiting),
            ))
        })?;
        let waiting = choice.as_ref().map_or(0, |(_, waiting)| *waiting);
        let expected = match (choice, placement.hosts.first()) {
            (Some((choice, _)), Some(host)) => {
                let kept = plan.trail.iter().filter(|step| step.kept);
                let kept: Vec<Key> = kept.map(|step| step.key).collect();
                if let Some(page) = page {
                    page.insert(store, &kept, host.known_as);
                }
                plan.affinity.then(|| plan.expected(&choice, *host))
            }
            _ => None,
        };
        Ok(Placed {
            placement,
            key: Some(plan.key),
            position: plan.position,
            expected,
            sent: self.sent(plan.stream, request, waiting, now_ms),
        })
    }

    /// Ends the pending tokens of an answer in one piece by time.
    fn sent(&self, stream: bool, request: &mut Request, waiting: u32, at_ms: u64) -> Option<Sent> {
        let seat = request.seat()?;
        let mut prefill = self.prefill.borrow_mut();
        let due = match stream {
            true => None,
            false => prefill.take_over(request, waiting, at_ms),
        };
        Some(Sent {
            at_ms,
            seat,
            waiting,
            stream,
            due,
        })
    }

    /// The body of a placed request ended. If it had not when it was placed, its prompt's time
    /// begins now.
    pub fn uploaded(
        &self,
        placed: &mut Placed,
        request: &mut Request,
        now_ms: impl FnOnce() -> u64,
    ) -> Changes {
        let changes = request.uploaded();
        if let Some(sent) = placed.sent
            && changes != NO_CHANGES
        {
            placed.sent = self.sent(sent.stream, request, sent.waiting, now_ms());
        }
        changes
    }

    /// The answer to a placed request comes, or its end: what is still pending of it is its own
    /// again.
    pub fn give_back(&self, placed: &Placed, request: &mut Request) -> Changes {
        let due = placed.sent.and_then(|sent| sent.due);
        let given = due.and_then(|due| self.prefill.borrow_mut().give_back(due));
        given.map_or(NO_CHANGES, |given| request.take_pending(given))
    }

    /// The first byte of the answer to a placed request came; `well` if it is no error.
    pub fn answered(
        &self,
        placed: &Placed,
        request: &mut Request,
        well: bool,
        now_ms: impl FnOnce() -> u64,
    ) -> Changes {
        let changes = request.answered();
        if let Some(sent) = &placed.sent
            && well
            && sent.stream
            && changes != NO_CHANGES
            && request.seat() == Some(sent.seat)
        {
            let ms = now_ms().saturating_sub(sent.at_ms);
            self.prefill.borrow_mut().learn(sent.waiting, ms);
        }
        changes
    }

    /// The whole answer to a placed request passes at once, and its end should follow: what is pending
    /// ends with it, or soon if it does not.
    pub fn completed(&self, placed: &mut Placed, request: &mut Request, now_ms: u64) {
        match &mut placed.sent {
            Some(sent) => sent.due = self.prefill.borrow_mut().settle_soon(request, now_ms),
            None => request.completed(),
        }
    }

    /// Ends what is pending of requests whose prompts should have been computed by now, or whose
    /// answers passed a while ago.
    pub fn end_overdue(&self, now_ms: u64, store: &impl Store, ledger: &Ledger) {
        // Ends: each turn takes one or two of a bounded number away.
        loop {
            let mut prefill = self.prefill.borrow_mut();
            let changes = [prefill.overdue(now_ms), prefill.overdue(now_ms)];
            drop(prefill);
            if changes == NO_CHANGES {
                return;
            }
            ledger.transact(store, |_| ((), changes));
        }
    }

    /// The plan's page of the index, and for each host the deepest token of the plan that it says the
    /// host was sent; 0 if none.
    fn known(
        &self,
        plan: &Plan,
        hosts: &[Candidate],
        store: &impl Store,
    ) -> (Option<Page>, Vec<f64>) {
        if plan.trail.is_empty() {
            return (None, Vec::new());
        }
        let page = Page::read(store, &self.index, plan.key);
        let deepest = plan.trail.iter().rev().map(|step| (step.key, step.tokens));
        let sent = page.hosts(deepest);
        let known = |host: &Candidate| {
            let found = sent.iter().find(|(sent, _)| *sent == host.known_as);
            found.map_or(0.0, |(_, tokens)| *tokens)
        };
        let known = hosts.iter().map(known).collect();
        (Some(page), known)
    }

    fn query<'a>(&self, plan: &Plan, hosts: &'a [Candidate], known: &'a [f64]) -> Query<'a> {
        let one_gateway = matches!(
            self.rules.rule,
            Rule::Adaptive {
                one_gateway: true,
                ..
            }
        );
        Query {
            key: plan.key,
            hosts,
            known,
            tokens: plan.tokens,
            floor: plan.floor,
            affinity: plan.affinity,
            belief: self.learned.borrow().belief(one_gateway),
            bounds: self.rules.bounds,
        }
    }

    fn place_fixed(
        &self,
        plan: &Plan,
        view: &View,
        request: &mut Request,
        now_ms: u64,
        store: &impl Store,
        ledger: &Ledger,
    ) -> Result<Placed, Outdated> {
        let hosts = view.candidates_at(now_ms, self.rules.slow_start_ms);
        let pending = plan.tokens as u32;
        self.end_overdue(now_ms, store, ledger);
        let (placement, waiting) = request.place(store, ledger, !self.rules.observes, |loads| {
            check(loads, view)?;
            let placement = route::decide(plan.key, &hosts, loads, self.rules.bounds);
            let waiting = waiting(loads, &placement, pending);
            Ok((self.or_reject(placement), pending, waiting))
        })?;
        let sent = self.sent(plan.stream, request, waiting.unwrap_or_default(), now_ms);
        Ok(Placed {
            placement,
            key: Some(plan.key),
            position: plan.position,
            expected: None,
            sent,
        })
    }

    fn or_reject(&self, placement: Placement) -> Placement {
        match placement.decision {
            Decision::Saturated if self.rules.rejects => Placement::reject(),
            _ => placement,
        }
    }

    /// Learns from the answer to a request that was placed here, and served by the host that was
    /// chosen; or by any other where decisions are only told: then it says nothing of our caches.
    pub fn learn(&self, placed: &Placed, report: Report, store: &impl Store) {
        let (Some(key), Some(expected)) = (placed.key, &placed.expected) else {
            return;
        };
        if self.rules.observes {
            let mut learned = self.learned.borrow_mut();
            return learned.learn_tokens(&expected.figures, report);
        }
        let claimed_too_much = self.learned.borrow_mut().learn(&expected.figures, report);
        let (Some(prompt), Some(cached)) = (report.prompt_tokens, report.cached_tokens) else {
            return;
        };
        if !claimed_too_much {
            return;
        }
        let cached = cached as f64 * expected.figures.tokens / prompt.max(1) as f64;
        let steps = expected.trail.iter();
        let wrong = steps.filter(|step| {
            step.tokens > cached + MARGIN_TOKENS && step.tokens <= expected.figures.known
        });
        let wrong: Vec<Key> = wrong.map(|step| step.key).collect();
        let host = expected.host.known_as;
        Page::read(store, &self.index, key).forget(store, &wrong, host);
    }
}

/// How hot a prompt's beginnings are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// The rungs that the key is looked for on, each with how often it was counted.
    pub rungs: Vec<(Rung, u32)>,
    /// The count above which one is hot.
    pub hot_above: u32,
    /// Requests of late.
    pub requests: u32,
}

/// One look at what a choice is made of, for those who explain it; it changes nothing.
impl Router {
    /// How hot a prompt's beginnings are now; nothing in `fixed` mode.
    #[must_use]
    pub fn heat(&self, prompt: &Prompt, hosts: usize, store: &impl Store) -> Option<Counted> {
        let Rule::Adaptive { heat, .. } = self.rules.rule else {
            return None;
        };
        let rungs = popularity::rungs(prompt);
        let popularity = self.popularity.as_ref()?;
        let (counts, total) = popularity.counts(store, &rungs);
        let hosts = u32::try_from(hosts).unwrap_or(u32::MAX);
        Some(Counted {
            rungs: rungs.into_iter().zip(counts).collect(),
            hot_above: heat.count_max(total, hosts),
            requests: total,
        })
    }

    /// What each host would cost with these loads, the home first, then in the key's order.
    /// Nothing in `fixed` mode, which weighs no costs.
    #[must_use]
    pub fn costs(
        &self,
        plan: &Plan,
        view: &View,
        now_ms: u64,
        store: &impl Store,
        loads: &Loads,
    ) -> Vec<Offer> {
        let Rule::Adaptive { constants, .. } = self.rules.rule else {
            return Vec::new();
        };
        let hosts = view.candidates_at(now_ms, self.rules.slow_start_ms);
        let (_, known) = self.known(plan, &hosts, store);
        cost::costs(&self.query(plan, &hosts, &known), loads, &constants)
    }
}

impl Plan {
    /// What places the request.
    #[must_use]
    pub fn key(&self) -> Key {
        self.key
    }

    /// Where in the prompt the key ends, in bytes of text; 0 in `fixed` mode.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    fn expected(&self, choice: &cost::Choice, host: Candidate) -> Expected {
        let kept = self
            .trail
            .iter()
            .filter(|step| step.kept && step.tokens > choice.known);
        let next = kept.map(|step| step.tokens).next().unwrap_or(self.tokens);
        let cached = self.with_answer(choice.known);
        let figures = Expectation {
            tokens: self.tokens,
            known: choice.known,
            floor: self.floor,
            next,
            at_home: choice.at_home,
        };
        Expected {
            figures,
            cached,
            host,
            trail: self.trail.clone(),
        }
    }

    /// Tokens in the cache of a host that was sent this prompt up to `known`. If that is the end of
    /// the turn before, the host wrote the answer that follows it, and holds that too: an engine
    /// keeps what it generates.
    fn with_answer(&self, known: f64) -> f64 {
        let mut ends = self.trail.iter().rev().filter(|step| step.message_end);
        let (_asked, answer, before) = (ends.next(), ends.next(), ends.next());
        match (before, answer) {
            (Some(before), Some(answer)) if before.tokens == known => answer.tokens,
            _ => known,
        }
    }
}

/// What will be pending on the first host of a placement, with so much of the request's own.
fn waiting(loads: &Loads, placement: &Placement, own: u32) -> u32 {
    let first = placement.hosts.first();
    first.map_or(own, |host| loads.of(host.seat).pending.saturating_add(own))
}

fn check(loads: &Loads, view: &View) -> Result<(), Outdated> {
    // A view may be ahead: hosts get their places before a table is written, and are told of after.
    if loads.hosts_version() <= view.version {
        Ok(())
    } else {
        Err(Outdated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Slot;

    fn view(hosts: &[(u32, u64)]) -> View {
        let host = |(n, &(weight, since_ms)): (u16, &(u32, u64))| Host {
            address: format!("10.0.0.{n}:80"),
            seat: Seat {
                slot: Slot(n),
                generation: 1,
            },
            id: HostId::of(&format!("10.0.0.{n}:80")),
            epoch: 0,
            weight,
            since_ms,
            missing_ms: 0,
            zone: String::new(),
            state: Some(State::Usable),
        };
        View::new(1, (0..).zip(hosts).map(host).collect())
    }

    #[track_caller]
    fn check(weights: &[u32], expected: &[u32]) {
        let hosts: Vec<(u32, u64)> = weights.iter().map(|weight| (*weight, 0)).collect();
        let view = view(&hosts);
        let found: Vec<u32> = view.candidates().iter().map(|host| host.weight).collect();
        assert_eq!(found, expected, "weights {weights:?}");
    }

    #[test]
    fn weights_of_any_size_keep_their_proportion() {
        check(&[1, 2, 4], &[256, 512, 1024]);
        check(&[1, 4096], &[256, 1 << 20]);
        check(&[40_000, 80_000, 1], &[1 << 19, 1 << 20, 13]);
        check(&[1, u32::MAX], &[1, 1 << 20]);
    }

    #[test]
    fn a_late_host_grows_to_its_weight_and_keeps_it_when_the_clock_is_set_back() {
        let view = view(&[(1, 1000), (1, 100_000)]);
        let weight_at = |now_ms| view.candidates_at(now_ms, 30_000)[1].weight;
        let found = [99_999, 100_000, 115_000, 130_000].map(weight_at);
        assert_eq!(found, [256, 1, 128, 256]);
    }

    #[test]
    fn a_late_host_is_joining_for_four_times_its_slow_start() {
        let view = view(&[(1, 1000), (1, 100_000)]);
        let joining_at = |now_ms| {
            view.candidates_at(now_ms, 30_000)
                .iter()
                .map(|host| host.joining)
                .collect::<Vec<_>>()
        };
        for (now_ms, expected) in [
            (99_999, false),
            (100_000, true),
            (219_999, true),
            (220_000, false),
        ] {
            assert_eq!(joining_at(now_ms), [false, expected], "at {now_ms}");
        }
    }
}
