//! W2: chats of several turns behind the system prompts of many apps.
//!
//! Guarantee: a chat's app, turns, texts and times to think depend on the seed and its number
//! only, however the turns of different chats interleave. Not here: single questions, traces.

use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution as _, Exp1, LogNormal, Zipf};

use super::arrivals::{Arrivals, Spread};
use super::lengths;
use super::options::stream;
use super::text::{self, Text};
use super::{Message, Request, Role, Workload};

/// A system prompt gets at least this many tokens, whatever the log-normal draws.
const SYSTEM_TOKENS_MIN: f64 = 64.0;
/// And at most this many times the mean.
const SYSTEM_TOKENS_MAX: f64 = 4.0;

/// What W2 is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Chats {
    /// Apps, each with a system prompt.
    pub apps: u32,
    /// Exponent of their popularity.
    pub zipf: f64,
    /// Mean tokens of a system prompt.
    pub system_tokens: f64,
    /// Standard deviation of a system prompt length's logarithm.
    pub sigma: f64,
    /// Fewest and most turns of a chat, all equally likely.
    pub turns: (u32, u32),
    /// Tokens of a user's message.
    pub question_tokens: u32,
    /// Mean tokens of an answer.
    pub output_tokens: u32,
    /// Seconds a user thinks at least, after the answer.
    pub think_min: f64,
    /// Mean seconds a user thinks beyond that (exponential).
    pub think_mean: f64,
    /// New chats a second.
    pub rate: f64,
    /// Even or bursty.
    pub spread: Spread,
    /// Seed of everything.
    pub seed: u64,
}

/// The requests of one [`Chats`].
pub struct ChatRequests {
    plan: Chats,
    arrivals: Arrivals,
    choice: ChaCha8Rng,
    zipf: Zipf<f64>,
    systems: Vec<u32>,
    started: u64,
}

impl ChatRequests {
    /// Starts the workload.
    ///
    /// # Errors
    /// If a parameter is out of what the distributions take.
    pub fn new(plan: Chats) -> anyhow::Result<Self> {
        let (fewest, most) = plan.turns;
        anyhow::ensure!(
            plan.apps > 0 && (1..=most).contains(&fewest),
            "chats need at least one app and one turn, got {} apps and {fewest} to {most} turns",
            plan.apps
        );
        let mean = plan.system_tokens.max(SYSTEM_TOKENS_MIN);
        let length = LogNormal::new(mean.ln() - plan.sigma.powi(2) / 2.0, plan.sigma)?;
        let mut rng = stream(plan.seed, "system lengths");
        let most_tokens = mean * SYSTEM_TOKENS_MAX;
        let systems = (0..plan.apps)
            .map(|_| {
                length
                    .sample(&mut rng)
                    .round()
                    .clamp(SYSTEM_TOKENS_MIN, most_tokens) as u32
            })
            .collect();
        Ok(Self {
            arrivals: Arrivals::new(stream(plan.seed, "chat arrivals"), plan.rate, plan.spread),
            choice: stream(plan.seed, "chat choice"),
            zipf: Zipf::new(f64::from(plan.apps), plan.zipf)?,
            systems,
            started: 0,
            plan,
        })
    }

    fn system(&self, app: u64) -> Option<Message> {
        let &tokens = self.systems.get(usize::try_from(app).ok()?)?;
        let id = text::id("system", self.plan.seed, app);
        Some(Message::new(Role::System, Text::Made { id, tokens }))
    }

    fn question(&self, chat: u64, turn: u32) -> Message {
        let id = text::id(
            "turn",
            self.plan.seed,
            text::id("chat", chat, u64::from(turn)),
        );
        Message::new(
            Role::User,
            Text::Made {
                id,
                tokens: self.plan.question_tokens,
            },
        )
    }
}

impl Workload for ChatRequests {
    fn next(&mut self) -> Option<Request> {
        let id = self.started;
        self.started += 1;
        let at = self.arrivals.next_at();
        let app = (self.zipf.sample(&mut self.choice) as u64).saturating_sub(1);
        let (fewest, most) = self.plan.turns;
        let turns = self.choice.random_range(fewest..=most);
        Some(Request {
            id,
            at,
            prefix: Some(app),
            turn: 0,
            turns_left: turns - 1,
            messages: Arc::new(vec![self.system(app)?, self.question(id, 0)]),
            output_tokens: lengths::answer(self.plan.output_tokens, self.plan.seed, id, 0),
        })
    }

    fn follow(&mut self, request: &Request, ended: Duration, answer: &str) -> Option<Request> {
        let turn = request.turn + 1;
        let next = request.next_turn(answer, self.question(request.id, turn))?;
        let thinking = text::id("thinking", request.id, u64::from(turn));
        let beyond: f64 = Exp1.sample(&mut stream(self.plan.seed ^ thinking, "thinking"));
        let think = self.plan.think_min + self.plan.think_mean * beyond;
        Some(Request {
            at: ended + Duration::from_secs_f64(think),
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
        let id = text::id("probe", self.plan.seed, index);
        let question = Text::Made {
            id,
            tokens: self.plan.question_tokens,
        };
        Some(Request {
            id: index,
            at: Duration::ZERO,
            prefix: Some(index),
            turn: 0,
            turns_left: 0,
            messages: Arc::new(vec![
                self.system(index)?,
                Message::new(Role::User, question),
            ]),
            output_tokens: self.plan.output_tokens,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn w2() -> Chats {
        Chats {
            apps: 200,
            zipf: 0.9,
            system_tokens: 2000.0,
            sigma: 0.3,
            turns: (5, 10),
            question_tokens: 130,
            output_tokens: 260,
            think_min: 2.0,
            think_mean: 18.0,
            rate: 5.0,
            spread: Spread::Even,
            seed: 3,
        }
    }

    fn chat(requests: &mut ChatRequests) -> Vec<Request> {
        let mut turns = vec![requests.next().unwrap()];
        while let Some(next) = {
            let last = turns.last().unwrap();
            requests.follow(last, last.at + Duration::from_secs(1), "the answer's text ")
        } {
            turns.push(next);
        }
        turns
    }

    #[test]
    fn a_later_turn_repeats_its_history_and_adds_the_answer() {
        let mut requests = ChatRequests::new(w2()).unwrap();
        let turns = chat(&mut requests);
        assert!((5..=10).contains(&turns.len()), "{} turns", turns.len());
        for pair in turns.windows(2) {
            let before = &pair[0].messages;
            let after = &pair[1].messages;
            assert_eq!(after[..before.len()], before[..]);
            assert_eq!(after.len(), before.len() + 2);
            let answer = Message::new(Role::Assistant, Text::Said("the answer's text ".into()));
            assert_eq!(after[before.len()], answer);
            assert!(
                pair[1].at >= pair[0].at + Duration::from_secs(3),
                "a second and two to think"
            );
        }
    }

    #[test]
    fn turns_and_thinking_have_the_study_s_means() {
        let mut requests = ChatRequests::new(w2()).unwrap();
        let (mut turns, mut think, mut thoughts) = (0, 0.0, 0);
        for _ in 0..2000 {
            let chat = chat(&mut requests);
            turns += chat.len();
            for pair in chat.windows(2) {
                think += (pair[1].at - pair[0].at).as_secs_f64() - 1.0;
                thoughts += 1;
            }
        }
        let (turns, think) = (turns as f64 / 2000.0, think / f64::from(thoughts));
        assert!((turns - 7.5).abs() < 0.15, "{turns} turns");
        assert!((think - 20.0).abs() < 0.6, "{think} s");
    }

    #[test]
    fn what_a_chat_says_does_not_depend_on_other_chats() {
        let mut alone = ChatRequests::new(w2()).unwrap();
        let first = chat(&mut alone);
        let mut mixed = ChatRequests::new(w2()).unwrap();
        let (one, two) = (mixed.next().unwrap(), mixed.next().unwrap());
        mixed.follow(&two, two.at + Duration::from_secs(9), "else");
        let next = mixed.follow(&one, one.at + Duration::from_secs(1), "the answer's text ");
        assert_eq!(next.as_ref(), first.get(1));
    }
}
