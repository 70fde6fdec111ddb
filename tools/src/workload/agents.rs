//! W3: agents that call tools in many steps, each repeating all that came before.
//!
//! Guarantee: an agent's app, steps, texts and times depend on the seed and its number only,
//! however the steps of different agents interleave. Not here: chats of people (chats.rs).

use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution as _, Exp1, Zipf};

use super::arrivals::{Arrivals, Spread};
use super::lengths;
use super::options::stream;
use super::text::{self, Text};
use super::{Message, Request, Role, Workload};

/// What W3 is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Agents {
    /// Apps, each with its instructions and tools.
    pub apps: u32,
    /// Exponent of their popularity.
    pub zipf: f64,
    /// Tokens of an app's instructions and tools.
    pub system_tokens: u32,
    /// Tokens of a task's context: the files, the ticket.
    pub task_tokens: u32,
    /// Fewest and most steps of a task, all equally likely.
    pub steps: (u32, u32),
    /// Tokens a tool gives back.
    pub result_tokens: u32,
    /// Mean tokens of an answer: the next tool call.
    pub output_tokens: u32,
    /// Seconds a tool takes at least, after the answer.
    pub tool_min: f64,
    /// Mean seconds a tool takes beyond that (exponential).
    pub tool_mean: f64,
    /// New tasks a second.
    pub rate: f64,
    /// Even or bursty.
    pub spread: Spread,
    /// Seed of everything.
    pub seed: u64,
}

/// The requests of one [`Agents`].
pub struct AgentRequests {
    plan: Agents,
    arrivals: Arrivals,
    choice: ChaCha8Rng,
    zipf: Zipf<f64>,
    started: u64,
}

impl AgentRequests {
    /// Starts the workload.
    ///
    /// # Errors
    /// If a parameter is out of what the distributions take.
    pub fn new(plan: Agents) -> anyhow::Result<Self> {
        let (fewest, most) = plan.steps;
        anyhow::ensure!(
            plan.apps > 0 && (1..=most).contains(&fewest),
            "agents need at least one app and one step, got {} apps and {fewest} to {most} steps",
            plan.apps
        );
        Ok(Self {
            arrivals: Arrivals::new(stream(plan.seed, "task arrivals"), plan.rate, plan.spread),
            choice: stream(plan.seed, "task choice"),
            zipf: Zipf::new(f64::from(plan.apps), plan.zipf)?,
            started: 0,
            plan,
        })
    }

    fn message(&self, role: Role, purpose: &str, which: u64, tokens: u32) -> Message {
        let id = text::id(purpose, self.plan.seed, which);
        Message::new(role, Text::Made { id, tokens })
    }

    fn first(&self, id: u64, at: Duration, app: u64, steps: u32, task: &str) -> Request {
        Request {
            id,
            at,
            prefix: Some(app),
            turn: 0,
            turns_left: steps - 1,
            messages: Arc::new(vec![
                self.message(Role::System, "app", app, self.plan.system_tokens),
                self.message(Role::User, task, id, self.plan.task_tokens),
            ]),
            output_tokens: lengths::answer(self.plan.output_tokens, self.plan.seed, id, 0),
        }
    }
}

impl Workload for AgentRequests {
    fn next(&mut self) -> Option<Request> {
        let id = self.started;
        self.started += 1;
        let at = self.arrivals.next_at();
        let app = (self.zipf.sample(&mut self.choice) as u64).saturating_sub(1);
        let (fewest, most) = self.plan.steps;
        let steps = self.choice.random_range(fewest..=most);
        Some(self.first(id, at, app, steps, "task"))
    }

    fn follow(&mut self, request: &Request, ended: Duration, answer: &str) -> Option<Request> {
        let turn = request.turn + 1;
        let step = text::id("step", request.id, u64::from(turn));
        let result = self.message(Role::User, "result", step, self.plan.result_tokens);
        let next = request.next_turn(answer, result)?;
        let beyond: f64 = Exp1.sample(&mut stream(self.plan.seed ^ step, "tool time"));
        let wait = self.plan.tool_min + self.plan.tool_mean * beyond;
        Some(Request {
            at: ended + Duration::from_secs_f64(wait),
            output_tokens: lengths::answer(
                self.plan.output_tokens,
                self.plan.seed,
                request.id,
                turn,
            ),
            ..next
        })
    }

    fn prefixes(&self) -> Option<u64> {
        Some(u64::from(self.plan.apps))
    }

    fn probe(&self, index: u64) -> Option<Request> {
        let known = index < u64::from(self.plan.apps);
        known.then(|| self.first(index, Duration::ZERO, index, 1, "probe"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_grows_by_its_answers_and_results() {
        let plan = Agents {
            apps: 12,
            zipf: 0.9,
            system_tokens: 9000,
            task_tokens: 12_000,
            steps: (8, 16),
            result_tokens: 1600,
            output_tokens: 180,
            tool_min: 0.3,
            tool_mean: 2.5,
            rate: 1.0,
            spread: Spread::Even,
            seed: 4,
        };
        let answer = "x".repeat(720);
        let mut agents = AgentRequests::new(plan).unwrap();
        let (mut steps, mut waits) = (0, 0.0);
        for task in 0..300 {
            let mut request = agents.next().unwrap();
            let length = request.turns_left + 1;
            assert!((8..=16).contains(&length));
            assert_eq!((request.id, request.prompt_tokens()), (task, 21_000));
            while let Some(next) =
                agents.follow(&request, request.at + Duration::from_secs(1), &answer)
            {
                assert_eq!(next.prompt_tokens(), request.prompt_tokens() + 1_780);
                assert_eq!(
                    next.messages[..request.messages.len()],
                    request.messages[..]
                );
                waits += (next.at - request.at).as_secs_f64() - 1.0;
                request = next;
                steps += 1;
            }
            assert_eq!(request.turn + 1, length);
        }
        let wait = waits / f64::from(steps);
        assert!((wait - 2.8).abs() < 0.15, "{wait} s");
    }
}
