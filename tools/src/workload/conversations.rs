//! Conversations behind shared system prompts, so many at once: C1 and C10, fifty of five turns
//! behind one system prompt or ten, and tenants, each with a system prompt and a few conversations.
//!
//! Guarantee: all conversations have the same number of turns, and as many of them share each
//! system prompt, so that shares of hosts can be compared; the study has C1 and C10 in sequence and
//! 16 at once (ROUTING.md 6a). Not here: chats by popularity (chats.rs).

use std::sync::Arc;
use std::time::Duration;

use super::text::{self, Text};
use super::{Message, Request, Role, Workload};

/// What the conversations are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conversations {
    /// System prompts, used in turn.
    pub systems: u32,
    /// Conversations.
    pub count: u32,
    /// Turns of each.
    pub turns: u32,
    /// Tokens of a system prompt.
    pub system_tokens: u32,
    /// Tokens of a user's message.
    pub question_tokens: u32,
    /// Tokens of an answer.
    pub output_tokens: u32,
    /// Seed of all texts.
    pub seed: u64,
}

impl Conversations {
    /// C1 with one system prompt of 3,000 tokens, C10 with ten.
    #[must_use]
    pub fn new(systems: u32, seed: u64) -> Self {
        Self {
            systems,
            count: 50,
            turns: 5,
            system_tokens: 3000,
            question_tokens: 60,
            output_tokens: 60,
            seed,
        }
    }

    /// So many tenants with a system prompt each, and conversations of each of them.
    ///
    /// Real engines on two cores serve these: where a token is 2.2 bytes of this text (a vocabulary
    /// of 8,192), a prompt has 1,700 tokens in the first turn and 100 more with each further one.
    #[must_use]
    pub fn of_tenants(tenants: u32, each: u32, turns: u32, seed: u64) -> Self {
        Self {
            systems: tenants,
            count: tenants.saturating_mul(each),
            turns,
            system_tokens: 880,
            question_tokens: 36,
            output_tokens: 32,
            seed,
        }
    }

    /// Requests of all conversations.
    #[must_use]
    pub fn requests(&self) -> u64 {
        u64::from(self.count) * u64::from(self.turns)
    }

    /// The first turn of a conversation.
    #[must_use]
    pub fn first(&self, conversation: u32) -> Request {
        let system = conversation % self.systems.max(1);
        let id = text::id("system", self.seed, u64::from(system));
        let tokens = self.system_tokens;
        Request {
            id: u64::from(conversation),
            at: Duration::ZERO,
            prefix: Some(u64::from(system)),
            turn: 0,
            turns_left: self.turns.saturating_sub(1),
            messages: Arc::new(vec![
                Message::new(Role::System, Text::Made { id, tokens }),
                self.question(u64::from(conversation), 0),
            ]),
            output_tokens: self.output_tokens,
        }
    }

    /// The turn after this one; `None` if it was the last.
    #[must_use]
    pub fn follow(&self, request: &Request, answer: &str) -> Option<Request> {
        request.next_turn(answer, self.question(request.id, request.turn + 1))
    }

    fn question(&self, conversation: u64, turn: u32) -> Message {
        let which = text::id("turn", conversation, u64::from(turn));
        let id = text::id("question", self.seed, which);
        let tokens = self.question_tokens;
        Message::new(Role::User, Text::Made { id, tokens })
    }
}

/// Conversations turn by turn: all first turns, then all second ones, so many at once.
#[derive(Debug)]
pub struct Rounds {
    plan: Conversations,
    at_once: u32,
    started: u32,
    /// Each conversation's next turn, once the one before has been answered.
    ready: Vec<Option<Request>>,
}

impl Rounds {
    /// All of `plan`'s conversations, `at_once` requests at any time.
    #[must_use]
    pub fn new(plan: Conversations, at_once: u32) -> Self {
        let ready = (0..plan.count)
            .map(|number| Some(plan.first(number)))
            .collect();
        Self {
            plan,
            at_once,
            started: 0,
            ready,
        }
    }

    /// The earliest turn that is ready.
    fn take(&mut self) -> Option<Request> {
        let turn = |request: &&mut Option<Request>| {
            request.as_ref().map_or(u32::MAX, |request| request.turn)
        };
        self.ready.iter_mut().min_by_key(turn)?.take()
    }
}

impl Workload for Rounds {
    fn next(&mut self) -> Option<Request> {
        if self.started == self.at_once {
            return None;
        }
        self.started += 1;
        self.take()
    }

    fn follow(&mut self, request: &Request, ended: Duration, answer: &str) -> Option<Request> {
        if let Some(next) = self.plan.follow(request, answer) {
            let place = usize::try_from(request.id).ok();
            if let Some(ready) = place.and_then(|place| self.ready.get_mut(place)) {
                *ready = Some(next);
            }
        }
        self.take().map(|next| Request { at: ended, ..next })
    }

    fn failed(&mut self, _request: &Request, at: Duration) -> Option<Request> {
        // Its conversation is over; another one takes its place.
        self.take().map(|next| Request { at, ..next })
    }

    fn prefixes(&self) -> Option<u64> {
        Some(u64::from(self.plan.systems))
    }

    fn probe(&self, _index: u64) -> Option<Request> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_turns_and_each_system_prompt_as_often() {
        let plan = Conversations::new(10, 1);
        for conversation in [0, 10, 49] {
            let mut turn = plan.first(conversation);
            assert_eq!(turn.prefix, Some(u64::from(conversation % 10)));
            assert_eq!(turn.messages[0], plan.first(conversation % 10).messages[0]);
            assert_ne!(turn.messages[1], plan.first(conversation + 1).messages[1]);
            for number in 1..5 {
                let next = plan.follow(&turn, "answer").unwrap();
                assert_eq!(
                    (next.turn, next.messages.len()),
                    (number, 2 + 2 * number as usize)
                );
                turn = next;
            }
            assert_eq!(plan.follow(&turn, "answer"), None);
        }
    }

    #[test]
    fn tenants_have_a_system_prompt_each_and_conversations_of_their_own() {
        let plan = Conversations::of_tenants(12, 2, 8, 1);
        assert_eq!((plan.count, plan.requests()), (24, 192));
        let (one, other) = (plan.first(3), plan.first(15));
        assert_eq!((one.prefix, other.prefix), (Some(3), Some(3)));
        assert_eq!(one.messages[0], other.messages[0]);
        assert_ne!(one.messages[1], other.messages[1]);
        assert_ne!(one.messages[0], plan.first(4).messages[0]);
        assert_ne!(one, Conversations::of_tenants(12, 2, 8, 2).first(3));
    }

    #[test]
    fn a_turn_that_failed_ends_its_conversation_and_no_other() {
        let plan = Conversations::of_tenants(2, 1, 2, 1);
        let mut rounds = Rounds::new(plan, 1);
        let first = rounds.next().unwrap();
        assert_eq!(rounds.next(), None, "one at once");
        let at = Duration::from_secs(3);
        let second = rounds.failed(&first, at).unwrap();
        assert_eq!((second.id, second.turn, second.at), (1, 0, at));
        let third = rounds.follow(&second, at, "answer").unwrap();
        assert_eq!((third.id, third.turn), (1, 1));
        assert_eq!(rounds.follow(&third, at, "answer"), None);
    }
}
