//! One run: engines, gateways and a workload in virtual time.
//!
//! Guarantee: the same cell gives the same records; every request that arrived is recorded, and is
//! either done or still in the system at the end. Not here: what is made of the records
//! (measure.rs), the choices (policy/).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use prefix_router::pool::Rules;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use rustc_hash::FxHashMap;

use crate::engine::cost::EngineConfig;
use crate::engine::scheduler::{Engine, JobId, Progress, Report};
use crate::simulate::policy::{Ask, Fleet, Kind, Policy, Scrape, Start, Usage};
use crate::simulate::prepare::{Prepared, Preparer};
use crate::workload::{Request, Workload};

/// How often engines' metrics are read, by those who read them (ROUTING.md 5).
const SCRAPE_NS: u64 = 50_000_000;
/// How often loads are looked at for the balance of requests in flight.
const SAMPLE_NS: u64 = 1_000_000_000;

/// Something that happens to the fleet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Happening {
    /// A host joins.
    Add,
    /// A host leaves; what runs on it ends there.
    Remove(u32),
    /// An engine restarts on its address: its cache is empty, its requests are lost.
    Restart(u32),
    /// A gateway restarts with nothing in memory.
    RestartGateway(u32),
}

/// What is run.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The policy of every gateway.
    pub policy: Kind,
    /// Gateways that share nothing; each request comes to any of them.
    pub gateways: u32,
    /// Worker threads of a gateway, any of which takes a request; our router knows them.
    pub workers: u32,
    /// Hosts at the start.
    pub hosts: u32,
    /// The hosts' addresses, on which placement depends; none: the study's.
    pub names: Vec<String>,
    /// Every engine.
    pub engine: EngineConfig,
    /// Seconds that are not measured.
    pub warmup_s: f64,
    /// Seconds that are.
    pub window_s: f64,
    /// Seconds that requests may take beyond.
    pub drain_s: f64,
    /// How late a gateway learns of first bytes and ends, in seconds.
    pub staleness_s: f64,
    /// Part of the requests that are answered in one piece.
    pub unstreamed: f64,
    /// What happens, by time in seconds.
    pub happenings: Vec<(f64, Happening)>,
    /// Seed of gateways, ties and streams.
    pub seed: u64,
    /// What our own policies go by instead of their defaults.
    pub rules: Option<Rules>,
}

/// One request's fate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Record {
    /// When it arrived.
    pub arrived_ns: u64,
    /// Where it went.
    pub host: u32,
    /// Which shared prefix it had.
    pub prefix: Option<u64>,
    /// Its chat, or itself.
    pub chat: u64,
    /// Its turn.
    pub turn: u32,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
    /// Tokens found in the cache.
    pub cached_tokens: u32,
    /// From its arrival to its first token; `None` if that had not come at the end.
    pub first_ns: Option<u64>,
    /// When it was done; `None` if it was not.
    pub done_ns: Option<u64>,
    /// Whether load led it away from home.
    pub diverted: bool,
    /// Whether its engine was lost under it.
    pub lost: bool,
}

/// All that was seen.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Every request, by arrival.
    pub records: Vec<Record>,
    /// Most over mean requests in flight, once a second in the window.
    pub balance: Vec<f64>,
    /// When the run ended.
    pub end_ns: u64,
    /// Tokens computed by all engines.
    pub computed_tokens: u64,
    /// Sequences computed again.
    pub preemptions: u64,
    /// Blocks still pinned when all was done; more than none while requests are in the system.
    pub pinned_blocks: u64,
}

/// Runs a cell.
///
/// # Errors
/// If the engine's sizes are refused.
pub fn run(
    setting: &Setting,
    workload: &mut dyn Workload,
    preparer: &Preparer,
) -> anyhow::Result<Outcome> {
    setting.engine.check()?;
    let mut world = World::new(setting, workload, preparer);
    world.start();
    // Bounded: arrivals stop at the window's end, and time at the drain's.
    while let Some(Reverse(due)) = world.queue.pop() {
        if due.at > world.end_ns {
            break;
        }
        world.now = due.at;
        world.happen(due.what);
    }
    Ok(world.outcome())
}

fn ns(seconds: f64) -> u64 {
    Duration::from_secs_f64(seconds.max(0.0)).as_nanos() as u64
}

enum What {
    /// The next arrival of the workload.
    Arrive(Request),
    /// A later turn.
    Follow(Request),
    /// A step of this engine ends; the number tells a restarted engine's steps apart.
    Step(u32, u32),
    /// A gateway learns that a first byte came.
    FirstByte(u64),
    /// A gateway learns that a request ended.
    Ended(u64, Option<Usage>),
    Scrape,
    Sample,
    Happening(Happening),
}

struct Due {
    at: u64,
    order: u64,
    what: What,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

struct Gateway {
    policy: Box<dyn Policy>,
    epoch: u32,
    in_flight: Vec<u32>,
}

/// A request in an engine or on its way back.
struct Flight {
    record: usize,
    gateway: usize,
    /// Which life of the gateway sent it.
    epoch: u32,
    host: u32,
    prepared: Arc<Prepared>,
    request: Request,
    streamed: bool,
}

struct World<'a> {
    setting: &'a Setting,
    workload: &'a mut dyn Workload,
    preparer: &'a Preparer,
    rng: ChaCha8Rng,
    now: u64,
    end_ns: u64,
    last_arrival_ns: u64,
    queue: BinaryHeap<Reverse<Due>>,
    order: u64,
    engines: Vec<Engine>,
    epochs: Vec<u32>,
    stepping: Vec<bool>,
    names: Vec<String>,
    hosts: Vec<u32>,
    scraped: Vec<Scrape>,
    gateways: Vec<Gateway>,
    jobs: FxHashMap<(u32, JobId), u64>,
    flights: FxHashMap<u64, Flight>,
    progress: Vec<Progress>,
    outcome: Outcome,
}

impl<'a> World<'a> {
    fn new(setting: &'a Setting, workload: &'a mut dyn Workload, preparer: &'a Preparer) -> Self {
        let added = setting
            .happenings
            .iter()
            .filter(|(_, what)| *what == Happening::Add)
            .count();
        let all = setting.hosts + added as u32;
        let engine = || Engine::new(setting.engine.clone(), Report::FirstAndLast);
        let window_end = setting.warmup_s + setting.window_s;
        let mut world = Self {
            setting,
            workload,
            preparer,
            rng: ChaCha8Rng::seed_from_u64(setting.seed),
            now: 0,
            end_ns: ns(window_end + setting.drain_s),
            last_arrival_ns: ns(window_end),
            queue: BinaryHeap::new(),
            order: 0,
            engines: (0..all).map(|_| engine()).collect(),
            epochs: vec![0; all as usize],
            stepping: vec![false; all as usize],
            names: (0..all)
                .map(|host| {
                    let given = setting.names.get(host as usize).cloned();
                    given.unwrap_or_else(|| format!("10.0.0.{}:8000", host + 1))
                })
                .collect(),
            hosts: (0..setting.hosts).collect(),
            scraped: vec![Scrape::default(); all as usize],
            gateways: Vec::new(),
            jobs: FxHashMap::default(),
            flights: FxHashMap::default(),
            progress: Vec::new(),
            outcome: Outcome::default(),
        };
        world.gateways = (0..setting.gateways.max(1))
            .map(|_| world.gateway())
            .collect();
        world
    }

    fn gateway(&self) -> Gateway {
        let start = Start {
            hosts: &self.hosts,
            names: &self.names,
            kv_blocks: self.setting.engine.blocks(),
            rules: self.setting.rules,
            workers: self.setting.workers,
        };
        Gateway {
            policy: self.setting.policy.start(&start),
            epoch: 0,
            in_flight: vec![0; self.names.len()],
        }
    }

    fn start(&mut self) {
        self.arrive_next();
        self.at(SCRAPE_NS, What::Scrape);
        self.at(ns(self.setting.warmup_s), What::Sample);
        for (at, what) in self.setting.happenings.clone() {
            self.at(ns(at), What::Happening(what));
        }
    }

    fn at(&mut self, at: u64, what: What) {
        self.order += 1;
        self.queue.push(Reverse(Due {
            at,
            order: self.order,
            what,
        }));
    }

    fn arrive_next(&mut self) {
        if let Some(request) = self.workload.next() {
            let at = request.at.as_nanos() as u64;
            if at < self.last_arrival_ns {
                self.at(at, What::Arrive(request));
            }
        }
    }

    fn happen(&mut self, what: What) {
        match what {
            What::Arrive(request) => {
                self.arrive_next();
                self.send(request);
            }
            What::Follow(request) => self.send(request),
            What::Step(host, epoch) => self.step_ends(host, epoch),
            What::FirstByte(id) => self.tell_first_byte(id),
            What::Ended(id, usage) => self.tell_ended(id, usage),
            What::Scrape => self.scrape(),
            What::Sample => self.sample(),
            What::Happening(happening) => self.fleet_changes(happening),
        }
    }

    fn send(&mut self, request: Request) {
        let prepared = self.preparer.prepare(&request);
        let gateway = self.rng.random_range(0..self.gateways.len());
        let streamed = !self
            .rng
            .random_bool(self.setting.unstreamed.clamp(0.0, 1.0));
        let id = self.outcome.records.len() as u64;
        let Some(Gateway {
            policy,
            epoch,
            in_flight,
        }) = self.gateways.get_mut(gateway)
        else {
            return;
        };
        let fleet = Fleet {
            hosts: &self.hosts,
            names: &self.names,
            in_flight,
            scraped: &self.scraped,
            engines: &self.engines,
        };
        let ask = Ask {
            id,
            prepared: &prepared,
            now_ns: self.now,
            streamed,
        };
        let chosen = policy.choose(&ask, &fleet, &mut self.rng);
        if let Some(count) = in_flight.get_mut(chosen.host as usize) {
            *count += 1;
        }
        self.outcome.records.push(Record {
            arrived_ns: self.now,
            host: chosen.host,
            prefix: request.prefix,
            chat: request.id,
            turn: request.turn,
            prompt_tokens: prepared.job.prompt_tokens,
            output_tokens: prepared.job.output_tokens,
            cached_tokens: 0,
            first_ns: None,
            done_ns: None,
            diverted: chosen.diverted,
            lost: false,
        });
        let record = self.outcome.records.len() - 1;
        let (host, epoch) = (chosen.host, *epoch);
        let job = prepared.job.clone();
        let flight = Flight {
            record,
            gateway,
            epoch,
            host,
            prepared,
            request,
            streamed,
        };
        self.flights.insert(id, flight);
        let engine = self.engines.get_mut(host as usize);
        match engine.and_then(|engine| engine.submit(job).ok()) {
            Some(job) => {
                self.jobs.insert((host, job), id);
                self.begin_step(host);
            }
            None => self.lose(id),
        }
    }

    fn begin_step(&mut self, host: u32) {
        let at = host as usize;
        let (Some(engine), Some(stepping), Some(&epoch)) = (
            self.engines.get_mut(at),
            self.stepping.get_mut(at),
            self.epochs.get(at),
        ) else {
            return;
        };
        if *stepping {
            return;
        }
        if let Some(step_ns) = engine.begin() {
            *stepping = true;
            self.at(self.now + step_ns, What::Step(host, epoch));
        }
    }

    fn step_ends(&mut self, host: u32, epoch: u32) {
        let at = host as usize;
        if self.epochs.get(at) != Some(&epoch) {
            return;
        }
        let mut progress = std::mem::take(&mut self.progress);
        progress.clear();
        if let Some(engine) = self.engines.get_mut(at) {
            engine.finish(&mut progress);
        }
        if let Some(stepping) = self.stepping.get_mut(at) {
            *stepping = false;
        }
        for step in &progress {
            self.progressed(host, step);
        }
        self.progress = progress;
        self.begin_step(host);
    }

    fn progressed(&mut self, host: u32, step: &Progress) {
        let Some(&id) = self.jobs.get(&(host, step.job)) else {
            return;
        };
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let Some(record) = self.outcome.records.get_mut(flight.record) else {
            return;
        };
        if step.generated == 1 {
            record.first_ns = Some(self.now - record.arrived_ns);
            record.cached_tokens = step.cached_tokens;
        }
        if step.finished {
            record.done_ns = Some(self.now);
        }
        let usage = Usage {
            prompt_tokens: record.prompt_tokens,
            cached_tokens: step.cached_tokens,
        };
        // An answer in one piece has its first byte at its end.
        let first_byte = if flight.streamed {
            step.generated == 1
        } else {
            step.finished
        };
        let late = self.now + ns(self.setting.staleness_s);
        if first_byte {
            self.at(late, What::FirstByte(id));
        }
        if step.finished {
            self.jobs.remove(&(host, step.job));
            self.at(late, What::Ended(id, Some(usage)));
            self.follow(id);
        }
    }

    /// The next turn, if the chat goes on and there is time for it.
    fn follow(&mut self, id: u64) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let answer = flight.prepared.answer.text();
        let ended = Duration::from_nanos(self.now);
        if let Some(next) = self.workload.follow(&flight.request, ended, &answer) {
            let at = next.at.as_nanos() as u64;
            if at < self.last_arrival_ns {
                self.at(at, What::Follow(next));
            }
        }
    }

    fn tell_first_byte(&mut self, id: u64) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        if let Some(gateway) = self.gateways.get_mut(flight.gateway)
            && gateway.epoch == flight.epoch
        {
            gateway.policy.first_byte(id, self.now);
        }
    }

    fn tell_ended(&mut self, id: u64, usage: Option<Usage>) {
        let Some(flight) = self.flights.remove(&id) else {
            return;
        };
        let gateway = self.gateways.get_mut(flight.gateway);
        let Some(gateway) = gateway.filter(|gateway| gateway.epoch == flight.epoch) else {
            return;
        };
        gateway.policy.ended(id, usage, self.now);
        if let Some(count) = gateway.in_flight.get_mut(flight.host as usize) {
            *count = count.saturating_sub(1);
        }
    }

    /// The engine went away under a request.
    fn lose(&mut self, id: u64) {
        let record = self.flights.get(&id).map(|flight| flight.record);
        if let Some(record) = record.and_then(|at| self.outcome.records.get_mut(at)) {
            record.lost = true;
        }
        self.at(self.now, What::Ended(id, None));
    }

    fn scrape(&mut self) {
        for (scrape, engine) in self.scraped.iter_mut().zip(&self.engines) {
            let pool = engine.pool();
            scrape.waiting = engine.waiting();
            scrape.kv_usage = f64::from(pool.pinned()) / f64::from(pool.len().max(1));
        }
        // When nothing else is due, nothing ever will be.
        if !self.queue.is_empty() {
            self.at(self.now + SCRAPE_NS, What::Scrape);
        }
    }

    fn sample(&mut self) {
        let jobs: Vec<u32> = self
            .hosts
            .iter()
            .filter_map(|&host| self.engines.get(host as usize))
            .map(|engine| engine.running() + engine.waiting())
            .collect();
        let total: u32 = jobs.iter().sum();
        let most = jobs.iter().max().copied().unwrap_or(0);
        if total > 0 {
            let mean = f64::from(total) / jobs.len() as f64;
            self.outcome.balance.push(f64::from(most) / mean);
        }
        if self.now + SAMPLE_NS < self.last_arrival_ns {
            self.at(self.now + SAMPLE_NS, What::Sample);
        }
    }

    fn fleet_changes(&mut self, happening: Happening) {
        match happening {
            Happening::Add => {
                let next = self.hosts.iter().max().map_or(0, |host| host + 1);
                self.hosts.push(next);
            }
            Happening::Remove(host) => self.hosts.retain(|&other| other != host),
            Happening::Restart(host) => return self.restart(host),
            Happening::RestartGateway(number) => {
                let mut fresh = self.gateway();
                if let Some(gateway) = self.gateways.get_mut(number as usize) {
                    fresh.epoch = gateway.epoch + 1;
                    *gateway = fresh;
                }
                return;
            }
        }
        for gateway in &mut self.gateways {
            gateway
                .policy
                .hosts_changed(&self.hosts, &self.names, self.now);
        }
    }

    fn restart(&mut self, host: u32) {
        let at = host as usize;
        let (Some(engine), Some(stepping), Some(epoch)) = (
            self.engines.get_mut(at),
            self.stepping.get_mut(at),
            self.epochs.get_mut(at),
        ) else {
            return;
        };
        *engine = Engine::new(self.setting.engine.clone(), Report::FirstAndLast);
        *stepping = false;
        *epoch += 1;
        let mut lost: Vec<u64> = Vec::new();
        self.jobs.retain(|&(other, _), id| {
            if other == host {
                lost.push(*id);
            }
            other != host
        });
        lost.sort_unstable();
        for id in lost {
            self.lose(id);
        }
    }

    fn outcome(self) -> Outcome {
        let mut outcome = self.outcome;
        outcome.end_ns = self.now;
        for engine in &self.engines {
            outcome.computed_tokens += engine.counters().computed_tokens;
            outcome.preemptions += engine.counters().preemptions;
            outcome.pinned_blocks += u64::from(engine.pool().pinned());
        }
        outcome
    }
}
