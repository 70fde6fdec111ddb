//! One fleet as the page shows it: what is in flight where, and what the last seconds were like.
//!
//! Guarantee: memory is bounded whatever the load. A figure is about the last [`WINDOW`]. Not here:
//! several fleets, notes, JSON's outer form (board.rs).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::load::client::Outcome;
use crate::load::stats::Times;

/// What "now" means: 200 requests at the live page's load, enough for a P99 that is not one value.
pub(super) const WINDOW: Duration = Duration::from_secs(10);

/// How far back prompts count as a host's: about six uses of a popular one at the page's load.
const PROMPTS_WINDOW: Duration = Duration::from_secs(30);

/// Values kept in a window: four times what the load generator can send in [`PROMPTS_WINDOW`] at
/// the page's highest rate. Beyond, the oldest go first.
const KEPT_MAX: usize = 16_384;

/// Points of the curves: five minutes, one every two seconds.
const POINTS_MAX: usize = 150;

/// Requests of one host that are drawn; the number beside them is right in any case.
const DRAWN_MAX: usize = 80;

/// Prompts of one host that are drawn: as many slivers as can be told apart.
const PROMPTS_DRAWN_MAX: usize = 160;

/// How far a fleet is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// It has not begun.
    #[default]
    Waiting,
    /// Caches are being filled; nothing counts.
    WarmUp,
    /// It works, and counts.
    Running,
    /// It is over, and shows its whole run.
    Finished,
}

/// What became of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HostState {
    /// It serves.
    #[default]
    Up,
    /// It finishes what it has, and gets nothing new.
    Draining,
    /// It is dead.
    Killed,
}

#[derive(Clone, Debug)]
struct Host {
    address: String,
    state: HostState,
    /// Prompts sent there: when, and which.
    prompts: VecDeque<(Instant, Option<u64>)>,
    /// What it answered: when, prompt tokens, cached ones of them.
    answers: VecDeque<(Instant, u64, u64)>,
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct Running {
    sent: Instant,
    prefix: Option<u64>,
    host: Option<usize>,
    answering: bool,
}

/// A point of the curves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Point {
    /// Seconds since the fleet began to count.
    t: f64,
    hits: Option<f64>,
    p50: Option<f64>,
}

/// One fleet.
#[derive(Clone, Debug, Default)]
pub(super) struct Fleet {
    pub(super) title: String,
    pub(super) filter: bool,
    pub(super) stage: Stage,
    /// Requests in flight per host above which the filter goes elsewhere.
    pub(super) limit: Option<u32>,
    speed: f64,
    since: Option<Instant>,
    hosts: Vec<Host>,
    running: BTreeMap<u64, Running>,
    next: u64,
    /// Milliseconds to the first token, in engine time.
    firsts: VecDeque<(Instant, f64)>,
    failures: VecDeque<Instant>,
    decisions: VecDeque<(Instant, BTreeMap<String, u64>)>,
    points: VecDeque<Point>,
    /// The figures of the whole run, once it is over.
    last: Option<Figures>,
}

/// The large figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Figures {
    /// Share of prompt tokens that were cached.
    pub(super) hits: Option<f64>,
    pub(super) p50: Option<f64>,
    pub(super) p99: Option<f64>,
    /// Requests a second that got their first token.
    pub(super) rate: f64,
    /// Failed requests.
    pub(super) failed: u64,
}

#[derive(Serialize)]
pub(super) struct FleetFrame<'a> {
    title: &'a str,
    filter: bool,
    stage: Stage,
    limit: Option<u32>,
    figures: Figures,
    in_flight: usize,
    hosts: Vec<HostFrame<'a>>,
    /// Of the last seconds, by kind.
    decisions: BTreeMap<String, u64>,
}

#[derive(Serialize)]
struct HostFrame<'a> {
    address: &'a str,
    state: HostState,
    in_flight: usize,
    hits: Option<f64>,
    /// Different prompts of late.
    prompts: usize,
    /// Number, prefix, whether it is being answered.
    running: Vec<(u64, Option<u64>, bool)>,
}

#[derive(Serialize)]
pub(super) struct FleetSeries<'a> {
    points: &'a VecDeque<Point>,
    /// Each host's prompts of late.
    prompts: Vec<Vec<u64>>,
}

impl Fleet {
    pub(super) fn new(title: &str, filter: bool) -> Self {
        Self {
            title: title.to_owned(),
            filter,
            speed: 1.0,
            ..Self::default()
        }
    }

    /// The hosts from now on. Those that were there before keep what is known of them.
    pub(super) fn set_hosts(&mut self, hosts: &[(String, HostState)]) {
        let before = std::mem::take(&mut self.hosts);
        self.hosts = hosts
            .iter()
            .map(|(address, state)| {
                let known = before.iter().find(|host| host.address == *address);
                let mut host = known.cloned().unwrap_or_else(|| Host {
                    address: address.clone(),
                    state: *state,
                    prompts: VecDeque::new(),
                    answers: VecDeque::new(),
                });
                if *state == HostState::Killed {
                    // Its cache is gone, and with it what it was said to hold.
                    host.prompts.clear();
                    host.answers.clear();
                }
                host.state = *state;
                host
            })
            .collect();
        // Hosts only ever come at the end, so what is running keeps its host's number.
    }

    /// Begins a stage; figures and curves start anew, except that the last stage keeps them.
    pub(super) fn set_stage(&mut self, stage: Stage, speed: f64, now: Instant) {
        (self.stage, self.speed) = (stage, speed);
        if stage == Stage::Finished {
            return;
        }
        self.since = Some(now);
        self.firsts.clear();
        self.failures.clear();
        self.points.clear();
        for host in &mut self.hosts {
            host.answers.clear();
            host.prompts.clear();
        }
    }

    /// Shows these figures from now on.
    pub(super) fn finish(&mut self, figures: Figures, decisions: BTreeMap<String, u64>) {
        self.last = Some(figures);
        self.decisions = VecDeque::from([(Instant::now(), decisions)]);
        self.running.clear();
    }

    pub(super) fn add_decisions(&mut self, totals: BTreeMap<String, u64>, now: Instant) {
        self.decisions.push_back((now, totals));
        // One reading a second: the oldest that is kept is the start of the window.
        while self.decisions.len() > WINDOW.as_secs() as usize + 1 {
            self.decisions.pop_front();
        }
    }

    pub(super) fn sent(&mut self, prefix: Option<u64>, now: Instant) -> u64 {
        let id = self.next;
        self.next += 1;
        let (host, answering) = (None, false);
        let running = Running {
            sent: now,
            prefix,
            host,
            answering,
        };
        self.running.insert(id, running);
        id
    }

    pub(super) fn served_by(&mut self, id: u64, address: &str, now: Instant) {
        let index = self.hosts.iter().position(|host| host.address == address);
        let Some(running) = self.running.get_mut(&id) else {
            return;
        };
        running.host = index;
        if let Some(host) = index.and_then(|index| self.hosts.get_mut(index)) {
            keep(&mut host.prompts, (now, running.prefix));
        }
    }

    pub(super) fn first(&mut self, id: u64, now: Instant) {
        let Some(running) = self.running.get_mut(&id) else {
            return;
        };
        running.answering = true;
        let ms = now.saturating_duration_since(running.sent).as_secs_f64() * 1000.0 * self.speed;
        keep(&mut self.firsts, (now, ms));
    }

    pub(super) fn ended(&mut self, id: u64, outcome: &Outcome, now: Instant) {
        if outcome.failure.is_some() {
            keep(&mut self.failures, now);
            return;
        }
        let host = self.running.get(&id).and_then(|running| running.host);
        let host = host.and_then(|index| self.hosts.get_mut(index));
        let usage = outcome.answer.usage;
        if let (Some(host), Some(usage)) = (host, usage)
            && let Some(cached) = usage.cached_tokens
        {
            keep(&mut host.answers, (now, usage.prompt_tokens, cached));
        }
    }

    /// A request was not even sent.
    pub(super) fn given_up(&mut self, now: Instant) {
        keep(&mut self.failures, now);
    }

    /// The request is over, however that came.
    pub(super) fn gone(&mut self, id: u64) {
        self.running.remove(&id);
    }

    /// Forgets what is older than its window.
    fn forget(&mut self, now: Instant) {
        let old = |at: &Instant, window| now.saturating_duration_since(*at) > window;
        while self.firsts.front().is_some_and(|(at, _)| old(at, WINDOW)) {
            self.firsts.pop_front();
        }
        while self.failures.front().is_some_and(|at| old(at, WINDOW)) {
            self.failures.pop_front();
        }
        for host in &mut self.hosts {
            let prompts = &mut host.prompts;
            while prompts
                .front()
                .is_some_and(|(at, _)| old(at, PROMPTS_WINDOW))
            {
                prompts.pop_front();
            }
            let answers = &mut host.answers;
            while answers.front().is_some_and(|(at, ..)| old(at, WINDOW)) {
                answers.pop_front();
            }
        }
    }

    fn figures(&self, now: Instant) -> Figures {
        if let Some(last) = self.last {
            return last;
        }
        let mut times = Times::default();
        for (_, ms) in &self.firsts {
            times.add(Duration::from_secs_f64(ms / 1000.0));
        }
        let percentiles = times.percentiles();
        let counted = self
            .since
            .map_or(WINDOW, |since| now.saturating_duration_since(since));
        let seconds = counted.min(WINDOW).as_secs_f64().max(1.0) * self.speed;
        Figures {
            hits: share(self.hosts.iter().flat_map(|host| &host.answers)),
            p50: percentiles.map(|all| all.p50),
            p99: percentiles.map(|all| all.p99),
            rate: self.firsts.len() as f64 / seconds,
            failed: self.failures.len() as u64,
        }
    }

    /// Adds a point to the curves, while the fleet counts.
    pub(super) fn sample(&mut self, now: Instant) {
        self.forget(now);
        let (Stage::Running, Some(since)) = (self.stage, self.since) else {
            return;
        };
        let Figures { hits, p50, .. } = self.figures(now);
        let t = now.saturating_duration_since(since).as_secs_f64() * self.speed;
        self.points.push_back(Point { t, hits, p50 });
        if self.points.len() > POINTS_MAX {
            self.points.pop_front();
        }
    }

    pub(super) fn frame(&mut self, now: Instant) -> FleetFrame<'_> {
        self.forget(now);
        let mut hosts: Vec<HostFrame<'_>> = self
            .hosts
            .iter()
            .map(|host| HostFrame {
                address: &host.address,
                state: host.state,
                in_flight: 0,
                hits: share(&host.answers),
                prompts: different(host).len(),
                running: Vec::new(),
            })
            .collect();
        for (id, running) in &self.running {
            let host = running.host.and_then(|index| hosts.get_mut(index));
            if let Some(host) = host {
                host.in_flight += 1;
                if host.running.len() < DRAWN_MAX {
                    let drawn = (*id, running.prefix, running.answering);
                    host.running.push(drawn);
                }
            }
        }
        FleetFrame {
            title: &self.title,
            filter: self.filter,
            stage: self.stage,
            limit: self.limit,
            figures: self.figures(now),
            in_flight: self.running.len(),
            hosts,
            decisions: self.recent_decisions(),
        }
    }

    pub(super) fn series(&self) -> FleetSeries<'_> {
        let prompts = self.hosts.iter().map(|host| {
            let known = different(host).into_iter().flatten();
            known.take(PROMPTS_DRAWN_MAX).collect()
        });
        FleetSeries {
            points: &self.points,
            prompts: prompts.collect(),
        }
    }

    fn recent_decisions(&self) -> BTreeMap<String, u64> {
        let (Some((_, first)), Some((_, last))) = (self.decisions.front(), self.decisions.back())
        else {
            return BTreeMap::new();
        };
        let alone = self.decisions.len() == 1 && self.last.is_some();
        let before = |kind: &String| {
            let before = first.get(kind).copied().unwrap_or(0);
            if alone { 0 } else { before }
        };
        let grown = last
            .iter()
            .map(|(kind, count)| (kind.clone(), count.saturating_sub(before(kind))));
        grown.filter(|(_, count)| *count > 0).collect()
    }
}

/// The share of prompt tokens that were cached.
fn share<'a>(answers: impl IntoIterator<Item = &'a (Instant, u64, u64)>) -> Option<f64> {
    let (prompt, cached) = answers
        .into_iter()
        .fold((0, 0), |(prompt, cached), answer| {
            (prompt + answer.1, cached + answer.2)
        });
    (prompt > 0).then(|| cached as f64 / prompt as f64)
}

/// The different prompts a host got of late; those that nobody shares count as one.
fn different(host: &Host) -> BTreeSet<Option<u64>> {
    host.prompts.iter().map(|(_, prefix)| *prefix).collect()
}

fn keep<T>(values: &mut VecDeque<T>, value: T) {
    if values.len() >= KEPT_MAX {
        values.pop_front();
    }
    values.push_back(value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::answer::Usage;
    use crate::load::client::Failure;

    fn fleet() -> (Fleet, Instant) {
        let now = Instant::now();
        let mut fleet = Fleet::new("least_request", false);
        let hosts = ["a:1", "b:2"].map(|host| (host.to_owned(), HostState::Up));
        fleet.set_hosts(&hosts);
        fleet.set_stage(Stage::Running, 1.0, now);
        (fleet, now)
    }

    fn outcome(cached: u64, failure: Option<Failure>) -> Outcome {
        let mut outcome = Outcome::failed(Failure::Cut);
        outcome.failure = failure;
        outcome.answer.usage = Some(Usage {
            prompt_tokens: 100,
            cached_tokens: Some(cached),
            completion_tokens: 8,
        });
        outcome
    }

    fn json(fleet: &mut Fleet, now: Instant) -> serde_json::Value {
        serde_json::to_value(fleet.frame(now)).unwrap()
    }

    #[test]
    fn a_request_is_seen_where_it_is_until_it_is_over() {
        let (mut fleet, now) = fleet();
        let id = fleet.sent(Some(7), now);
        assert_eq!(json(&mut fleet, now)["in_flight"], 1);
        fleet.served_by(id, "b:2", now);
        let frame = json(&mut fleet, now);
        assert_eq!(
            frame["hosts"][1]["running"],
            serde_json::json!([[0, 7, false]])
        );
        assert_eq!(frame["hosts"][1]["prompts"], 1);
        fleet.first(id, now + Duration::from_millis(250));
        fleet.ended(id, &outcome(80, None), now);
        fleet.gone(id);
        let frame = json(&mut fleet, now);
        assert_eq!(
            (&frame["in_flight"], &frame["hosts"][1]["in_flight"]),
            (&0.into(), &0.into())
        );
        assert_eq!(frame["figures"]["hits"], 0.8);
        assert_eq!(frame["hosts"][1]["hits"], 0.8);
        assert_eq!(frame["figures"]["p50"], 250.0);
    }

    #[test]
    fn figures_are_of_the_last_seconds() {
        let (mut fleet, now) = fleet();
        for (second, cached) in [(0, 0), (8, 100)] {
            let at = now + Duration::from_secs(second);
            let id = fleet.sent(Some(1), at);
            fleet.served_by(id, "a:1", at);
            fleet.first(id, at + Duration::from_millis(10 + second));
            fleet.ended(id, &outcome(cached, None), at);
            fleet.gone(id);
        }
        let hits = |fleet: &mut Fleet, second| {
            json(fleet, now + Duration::from_secs(second))["figures"]["hits"].clone()
        };
        assert_eq!(hits(&mut fleet, 9), 0.5);
        assert_eq!(hits(&mut fleet, 12), 1.0);
        assert_eq!(hits(&mut fleet, 30), serde_json::Value::Null);
    }

    #[test]
    fn failures_count_as_such_and_in_no_other_figure() {
        let (mut fleet, now) = fleet();
        let id = fleet.sent(Some(1), now);
        fleet.served_by(id, "a:1", now);
        fleet.ended(id, &outcome(100, Some(Failure::Cut)), now);
        fleet.gone(id);
        let frame = json(&mut fleet, now);
        assert_eq!(frame["figures"]["failed"], 1);
        assert!(frame["figures"]["hits"].is_null());
    }

    #[test]
    fn decisions_are_those_of_the_window() {
        let (mut fleet, now) = fleet();
        for second in 0..30_u64 {
            let totals = BTreeMap::from([("home".to_owned(), 5 * second)]);
            fleet.add_decisions(totals, now + Duration::from_secs(second));
        }
        assert_eq!(json(&mut fleet, now)["decisions"]["home"], 50);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let (mut fleet, now) = fleet();
        for _ in 0..2 * KEPT_MAX {
            let id = fleet.sent(None, now);
            fleet.served_by(id, "a:1", now);
            fleet.first(id, now);
            fleet.ended(id, &outcome(1, None), now);
            fleet.gone(id);
        }
        for second in 0..1000 {
            fleet.sample(now + Duration::from_millis(second));
        }
        assert!(fleet.firsts.len() <= KEPT_MAX && fleet.hosts[0].answers.len() <= KEPT_MAX);
        assert_eq!(fleet.points.len(), POINTS_MAX);
        assert!(fleet.running.is_empty());
    }
}
