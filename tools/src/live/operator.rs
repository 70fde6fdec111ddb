//! What the page's controls do: to the load, to the engines, to the Envoys.
//!
//! Guarantee: one command after another, each on both fleets; a command that fails changes nothing
//! that is shown. Not here: how a command comes (page/).

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::sync::mpsc::Receiver;
use tokio::time::{MissedTickBehavior, interval};

use super::engines::Engines;
use super::gateway::{Gateway, Opponent};
use super::traffic::{self, Knobs};
use super::{WITH, WITHOUT};
use crate::harness;
use crate::page::{Ask, Board, Command, Controls, HostState};

/// Between two looks at the filter's decisions; page/fleet.rs counts on it.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Limits that the filter takes.
const LIMITS: std::ops::RangeInclusive<u32> = 1..=1024;

/// Everything that can be changed.
pub(super) struct Operator {
    pub(super) board: Arc<Board>,
    pub(super) knobs: Arc<Knobs>,
    pub(super) engines: Engines,
    pub(super) gateways: [Gateway; 2],
    pub(super) opponent: Opponent,
    pub(super) limit: Option<u32>,
    /// The number of the prompt that goes viral: the one after all others.
    pub(super) viral_prefix: u64,
}

impl Operator {
    /// Does what is asked, until nobody can ask any more.
    pub(super) async fn run(mut self, asks: &mut Receiver<Ask>) -> Result<()> {
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        self.show();
        loop {
            tokio::select! {
                ask = asks.recv() => {
                    let Some((command, answer)) = ask else {
                        return Ok(());
                    };
                    let result = self.carry_out(command).await;
                    self.show();
                    let result = result.map(|note| self.board.note(&note));
                    // Nobody waits if the browser has left.
                    let _ = answer.send(result.map_err(|error| format!("{error:#}")));
                }
                _ = looks.tick() => {
                    // One missed look is no reason to end.
                    if let Some(gateway) = self.gateways.get(WITH)
                        && let Ok(samples) = gateway.metrics().await
                    {
                        self.board.add_decisions(WITH, harness::decisions(&samples));
                    }
                }
            }
        }
    }

    fn show(&self) {
        let wanted = self.knobs.lock().clone();
        for fleet in [WITHOUT, WITH] {
            self.board.set_hosts(fleet, &self.engines.states(fleet));
        }
        self.board.set_limit(WITH, self.limit);
        self.board.set_title(WITHOUT, self.opponent.title());
        self.board.set_controls(Controls {
            rate: wanted.rate,
            limit: self.limit,
            opponent: self.opponent.name().to_owned(),
            viral: wanted.viral,
            unique: wanted.unique,
            viral_prefix: self.viral_prefix,
            hosts_left: self.engines.left(),
        });
    }

    /// Does one command; says in words what it did.
    async fn carry_out(&mut self, command: Command) -> Result<String> {
        match command {
            Command::Viral { on } => {
                self.knobs.lock().viral = on;
                Ok(if on {
                    "One prompt went viral: it has half of the requests.".into()
                } else {
                    "The viral prompt is forgotten.".into()
                })
            }
            Command::Unique { on } => {
                self.knobs.lock().unique = on;
                Ok(if on {
                    "Every request has a prompt of its own now.".into()
                } else {
                    "Prompts are shared again.".into()
                })
            }
            Command::Rate { value } => {
                let rate = traffic::rate(&value.to_string()).map_err(anyhow::Error::msg)?;
                self.knobs.lock().rate = rate;
                Ok(format!("{rate} requests a second now."))
            }
            Command::Limit { value } => self.set_limit(value).await,
            Command::Opponent { value } => self.set_opponent(&value).await,
            Command::Add {} => {
                self.engines.add().await?;
                self.tell_hosts().await?;
                Ok(format!(
                    "Host {} was added.",
                    self.engines.addresses(WITH).len()
                ))
            }
            Command::Drain { host } => {
                self.spare(host)?;
                self.engines.drain(host);
                self.tell_hosts().await?;
                Ok(format!("Host {} drains.", host + 1))
            }
            Command::Kill { host } => {
                let state = self.engines.state(host)?;
                ensure!(
                    state != HostState::Killed,
                    "host {} is dead already",
                    host + 1
                );
                if state == HostState::Up {
                    self.spare(host)?;
                }
                self.engines.kill(host);
                self.tell_hosts().await?;
                Ok(format!("Host {} was killed.", host + 1))
            }
            Command::Restart { host } => {
                self.engines.state(host)?;
                self.engines.restart(host).await?;
                self.tell_hosts().await?;
                Ok(format!("Host {} started anew, its cache empty.", host + 1))
            }
        }
    }

    async fn set_limit(&mut self, limit: Option<u32>) -> Result<String> {
        ensure!(
            limit.is_none_or(|limit| LIMITS.contains(&limit)),
            "expected a limit from {} to {}",
            LIMITS.start(),
            LIMITS.end()
        );
        let gateway = self.gateways.get_mut(WITH).context("no such fleet")?;
        gateway.set_limit(limit).await?;
        self.limit = limit;
        self.knobs.reconnect(&self.gateways, &self.board)?;
        Ok(match limit {
            Some(limit) => format!("The limit is {limit} requests in flight per host."),
            None => "There is no limit any more.".to_owned(),
        })
    }

    async fn set_opponent(&mut self, name: &str) -> Result<String> {
        let opponent = Opponent::named(name).with_context(|| format!("no policy {name:?}"))?;
        let gateway = self.gateways.get_mut(WITHOUT).context("no such fleet")?;
        gateway.set_opponent(opponent).await?;
        self.opponent = opponent;
        self.knobs.reconnect(&self.gateways, &self.board)?;
        Ok(format!("Envoy alone uses {name} now."))
    }

    /// Refuses to take the last host away.
    fn spare(&self, host: usize) -> Result<()> {
        let state = self.engines.state(host)?;
        ensure!(
            state == HostState::Up,
            "host {} takes nothing new already",
            host + 1
        );
        ensure!(self.engines.up() > 1, "host {} is the last one", host + 1);
        Ok(())
    }

    async fn tell_hosts(&self) -> Result<()> {
        for (fleet, gateway) in self.gateways.iter().enumerate() {
            let hosts = self.engines.addresses(fleet);
            gateway
                .set_hosts(&hosts, &self.engines.draining(fleet))
                .await?;
        }
        Ok(())
    }
}
