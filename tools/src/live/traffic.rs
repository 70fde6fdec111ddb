//! The load: one stream of requests, each sent to both fleets at the same moment.
//!
//! Guarantee: open loop, seeded; what is in flight is bounded, and what cannot be sent is counted
//! as failed. Not here: what is shown of it (page/).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use super::gateway::{Gateway, PROMPT_ID};
use crate::load::client::{Client, Target};
use crate::page::Board;
use crate::workload::arrivals::Spread;
use crate::workload::single::{Single, SingleRequests};
use crate::workload::{Form, Workload as _};

/// Half of what least_request can serve, so that it is not overloaded from the start: a request
/// costs an engine 0.185 s there (demo/settings.rs), so seven serve 37.8 a second.
pub(super) const RATE: f64 = 20.0;

/// Rates a person may choose: from one that shows single requests to one that no fleet stands.
const RATES: std::ops::RangeInclusive<f64> = 1.0..=80.0;

/// As W1, but a third of the demo's prompts over a third of its caches: hit rates are the same,
/// and each host's own 30 prompts can be told apart on a screen.
pub(super) const PROMPTS: u32 = 210;
const PROMPT_TOKENS: u32 = 3000;

/// The share of the prompt that goes viral, as in W5.
const VIRAL_SHARE: f64 = 0.5;

/// In flight for each fleet: about 50 for each host; one that has more is lost anyway.
const IN_FLIGHT_MAX: usize = 350;

/// A person has left by then.
const TIMEOUT: Duration = Duration::from_secs(30);

/// What the load does, changed while it runs.
pub(super) struct Knobs {
    state: Mutex<Wanted>,
}

/// See [`Knobs`].
#[derive(Clone)]
pub(super) struct Wanted {
    /// Requests a second.
    pub(super) rate: f64,
    /// Whether one prompt has half of them.
    pub(super) viral: bool,
    /// Whether each has a prompt of its own.
    pub(super) unique: bool,
    clients: Vec<Client>,
}

impl Knobs {
    /// The load at its beginning.
    pub(super) fn new(
        rate: f64,
        gateways: &[Gateway],
        board: &Arc<Board>,
    ) -> anyhow::Result<Arc<Self>> {
        let clients = clients(gateways, board)?;
        let (viral, unique) = (false, false);
        Ok(Arc::new(Self {
            state: Mutex::new(Wanted {
                rate,
                viral,
                unique,
                clients,
            }),
        }))
    }

    /// What is wanted, to read or to change.
    pub(super) fn lock(&self) -> MutexGuard<'_, Wanted> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on over new connections: those there are may lead to a listener that is going.
    pub(super) fn reconnect(&self, gateways: &[Gateway], board: &Arc<Board>) -> anyhow::Result<()> {
        self.lock().clients = clients(gateways, board)?;
        Ok(())
    }
}

fn clients(gateways: &[Gateway], board: &Arc<Board>) -> anyhow::Result<Vec<Client>> {
    let client = |(fleet, gateway): (usize, &Gateway)| {
        let target = Target {
            base: gateway.url().parse()?,
            form: Form::Chat,
            model: "sim".into(),
            stream: true,
            headers: hyper::HeaderMap::new(),
            prefix_header: Some(PROMPT_ID),
            timeout: TIMEOUT,
        };
        Ok(Client::new(target)?.observed(board.observer(fleet)))
    };
    gateways.iter().enumerate().map(client).collect()
}

/// A rate that can be chosen.
pub(super) fn rate(text: &str) -> Result<f64, String> {
    let (low, high) = (RATES.start(), RATES.end());
    let rate = text.parse().ok().filter(|rate| RATES.contains(rate));
    rate.ok_or_else(|| format!("expected requests a second from {low} to {high}, got {text}"))
}

/// The stream of requests.
pub(super) struct Traffic {
    requests: SingleRequests,
    knobs: Arc<Knobs>,
    board: Arc<Board>,
    places: Vec<Arc<Semaphore>>,
}

impl Traffic {
    /// The stream at its beginning.
    pub(super) fn new(
        seed: u64,
        prompts: u32,
        knobs: Arc<Knobs>,
        board: Arc<Board>,
    ) -> anyhow::Result<Self> {
        let requests = SingleRequests::new(Single {
            prompts,
            zipf: 0.55,
            prompt_tokens: f64::from(PROMPT_TOKENS),
            sigma: 0.3,
            question_tokens: 120,
            output_tokens: 64,
            // Times are stretched by the rate that is wanted when they are due.
            rate: 1.0,
            spread: Spread::Even,
            viral: None,
            seed,
        })?;
        let fleets = knobs.lock().clients.len();
        Ok(Self {
            requests,
            knobs,
            board,
            places: (0..fleets)
                .map(|_| Arc::new(Semaphore::new(IN_FLIGHT_MAX)))
                .collect(),
        })
    }

    /// Sends requests until it is dropped.
    pub(super) async fn run(mut self) -> anyhow::Result<()> {
        let mut due = Instant::now();
        let mut before = Duration::ZERO;
        loop {
            let wanted = self.knobs.lock().clone();
            let viral = wanted.viral.then_some((PROMPT_TOKENS, VIRAL_SHARE));
            self.requests.go_viral(viral);
            self.requests.share_nothing(wanted.unique);
            let Some(request) = self.requests.next() else {
                anyhow::bail!("the load has come to an end");
            };
            let gap = request
                .at
                .saturating_sub(before)
                .div_f64(wanted.rate.max(*RATES.start()));
            before = request.at;
            // A machine that stood still does not make up for it with a burst.
            due = (due + gap).max(Instant::now().checked_sub(TIMEOUT / 30).unwrap_or(due));
            tokio::time::sleep_until(due.into()).await;
            let request = Arc::new(request);
            for (fleet, client) in wanted.clients.iter().enumerate() {
                let places = self.places.get(fleet).map(Arc::clone);
                let Some(Ok(place)) = places.map(Semaphore::try_acquire_owned) else {
                    self.board.given_up(fleet);
                    continue;
                };
                let (client, request) = (client.clone(), Arc::clone(&request));
                tokio::spawn(async move {
                    client.ask(&request, false).await;
                    drop(place);
                });
            }
        }
    }
}
