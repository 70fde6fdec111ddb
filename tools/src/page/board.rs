//! What the page shows: several fleets, what can be changed, and what was.
//!
//! Guarantee: whoever reports to it never waits for a browser. Not here: HTTP (server.rs), one
//! fleet's figures (fleet.rs).

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde::Serialize;

use super::fleet::{Figures, Fleet, FleetFrame, FleetSeries, HostState, Stage};
use crate::load::client::{Observed, Observer, Outcome};
use crate::report::Run;
use crate::workload::Request;

/// Notes that are kept: more than a page shows, few enough to send each second.
const NOTES_MAX: usize = 30;

/// How the fleets relate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// They run at the same time under the same load, which can be changed.
    Live,
    /// They run one after another, and nothing can be changed.
    Rounds,
}

/// What can be changed on a live page, as it is now.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Controls {
    /// Requests a second.
    pub rate: f64,
    /// Requests in flight per host; `None`: no limit.
    pub limit: Option<u32>,
    /// Envoy's policy where the filter is not.
    pub opponent: String,
    /// Whether one prompt has half of the requests.
    pub viral: bool,
    /// Whether every request has a prompt of its own.
    pub unique: bool,
    /// The number of the prompt that can go viral.
    pub viral_prefix: u64,
    /// Hosts that can still be added.
    pub hosts_left: usize,
}

/// Something that was changed.
#[derive(Clone, Debug, Serialize)]
struct Note {
    /// Seconds since the fleets began.
    t: f64,
    text: String,
}

/// Everything on the page.
pub struct Board {
    state: Mutex<State>,
}

struct State {
    mode: Mode,
    about: Vec<String>,
    began: Instant,
    fleets: Vec<Fleet>,
    controls: Option<Controls>,
    notes: VecDeque<Note>,
}

#[derive(Serialize)]
struct Frame<'a> {
    mode: Mode,
    about: &'a [String],
    fleets: Vec<FleetFrame<'a>>,
    controls: &'a Option<Controls>,
    notes: &'a VecDeque<Note>,
}

#[derive(Serialize)]
struct Series<'a> {
    fleets: Vec<FleetSeries<'a>>,
}

impl Board {
    /// An empty board; `about` says in sentences what is run.
    #[must_use]
    pub fn new(mode: Mode, about: Vec<String>) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                mode,
                about,
                began: Instant::now(),
                fleets: Vec::new(),
                controls: None,
                notes: VecDeque::new(),
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock; if it did, a figure would be off, no more.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, fleet: usize, change: impl FnOnce(&mut Fleet)) {
        if let Some(fleet) = self.lock().fleets.get_mut(fleet) {
            change(fleet);
        }
    }

    /// Adds a fleet, and returns its number.
    pub fn add_fleet(&self, title: &str, filter: bool, hosts: &[(String, HostState)]) -> usize {
        let mut fleet = Fleet::new(title, filter);
        fleet.set_hosts(hosts);
        let mut state = self.lock();
        state.fleets.push(fleet);
        state.fleets.len() - 1
    }

    /// A fleet enters a stage, its engines' clock at `speed` times real time.
    pub fn set_stage(&self, fleet: usize, stage: Stage, speed: f64) {
        self.change(fleet, |fleet| fleet.set_stage(stage, speed, Instant::now()));
    }

    /// A fleet is over; its whole run is shown from now on.
    pub fn finish(&self, fleet: usize, run: &Run, seconds: f64) {
        let figures = Figures {
            hits: Some(run.hit_rate),
            p50: run.ttft(0.5),
            p99: run.ttft(0.99),
            rate: run.requests as f64 / seconds.max(1e-9),
            failed: run.failed(),
        };
        self.change(fleet, |fleet| {
            fleet.set_stage(Stage::Finished, 1.0, Instant::now());
            fleet.finish(figures, run.decisions.clone());
        });
    }

    /// A fleet's hosts from now on.
    pub fn set_hosts(&self, fleet: usize, hosts: &[(String, HostState)]) {
        self.change(fleet, |fleet| fleet.set_hosts(hosts));
    }

    /// A fleet's name from now on.
    pub fn set_title(&self, fleet: usize, title: &str) {
        self.change(fleet, |fleet| title.clone_into(&mut fleet.title));
    }

    /// The limit of a fleet's filter from now on.
    pub fn set_limit(&self, fleet: usize, limit: Option<u32>) {
        self.change(fleet, |fleet| fleet.limit = limit);
    }

    /// The filter's totals by kind of decision; once a second.
    pub fn add_decisions(&self, fleet: usize, totals: BTreeMap<String, u64>) {
        self.change(fleet, |fleet| fleet.add_decisions(totals, Instant::now()));
    }

    /// A request was not even sent: too many were in flight.
    pub fn given_up(&self, fleet: usize) {
        self.change(fleet, |fleet| fleet.given_up(Instant::now()));
    }

    /// What can be changed, as it is now.
    pub fn set_controls(&self, controls: Controls) {
        self.lock().controls = Some(controls);
    }

    /// Something was changed.
    pub fn note(&self, text: &str) {
        let mut state = self.lock();
        let t = state.began.elapsed().as_secs_f64();
        let text = text.to_owned();
        state.notes.push_back(Note { t, text });
        if state.notes.len() > NOTES_MAX {
            state.notes.pop_front();
        }
    }

    /// The time of notes and the curves' time begin now.
    pub fn begin(&self) {
        self.lock().began = Instant::now();
    }

    /// Adds a point to every fleet's curves; every two seconds.
    pub fn sample(&self) {
        let now = Instant::now();
        for fleet in &mut self.lock().fleets {
            fleet.sample(now);
        }
    }

    /// One look at everything that changes fast, as JSON.
    #[must_use]
    pub fn frame(&self) -> String {
        let now = Instant::now();
        let mut state = self.lock();
        let State {
            mode,
            about,
            fleets,
            controls,
            notes,
            ..
        } = &mut *state;
        let frame = Frame {
            mode: *mode,
            about,
            fleets: fleets.iter_mut().map(|fleet| fleet.frame(now)).collect(),
            controls,
            notes,
        };
        // Texts and numbers always serialise.
        serde_json::to_string(&frame).unwrap_or_default()
    }

    /// The curves and the hosts' prompts, as JSON.
    #[must_use]
    pub fn series(&self) -> String {
        let state = self.lock();
        let fleets = state.fleets.iter().map(Fleet::series).collect();
        serde_json::to_string(&Series { fleets }).unwrap_or_default()
    }

    /// Somebody who tells the board of a fleet's requests.
    #[must_use]
    pub fn observer(self: &Arc<Self>, fleet: usize) -> Arc<dyn Observer> {
        let board = Arc::clone(self);
        Arc::new(FleetObserver { board, fleet })
    }
}

struct FleetObserver {
    board: Arc<Board>,
    fleet: usize,
}

impl Observer for FleetObserver {
    fn sent(&self, request: &Request) -> Box<dyn Observed> {
        let mut id = 0;
        self.board.change(self.fleet, |fleet| {
            id = fleet.sent(request.prefix, Instant::now());
        });
        Box::new(OneRequest {
            board: Arc::clone(&self.board),
            fleet: self.fleet,
            id,
        })
    }
}

struct OneRequest {
    board: Arc<Board>,
    fleet: usize,
    id: u64,
}

impl OneRequest {
    fn change(&self, change: impl FnOnce(&mut Fleet, u64)) {
        self.board
            .change(self.fleet, |fleet| change(fleet, self.id));
    }
}

impl Observed for OneRequest {
    fn served_by(&mut self, host: &str) {
        self.change(|fleet, id| fleet.served_by(id, host, Instant::now()));
    }

    fn first(&mut self) {
        self.change(|fleet, id| fleet.first(id, Instant::now()));
    }

    fn ended(&mut self, outcome: &Outcome) {
        self.change(|fleet, id| fleet.ended(id, outcome, Instant::now()));
    }
}

impl Drop for OneRequest {
    fn drop(&mut self) {
        self.change(Fleet::gone);
    }
}
