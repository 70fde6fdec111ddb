//! W1, W5 and W6: one question each, behind a prefix that many share, or behind one of its own.
//!
//! Guarantee: which prefix a request has, and every text, depend on the seed and the request's
//! number only. Not here: chats, traces.

use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution as _, LogNormal, Zipf};

use super::arrivals::{Arrivals, Spread};
use super::lengths;
use super::options::stream;
use super::text::{self, Text};
use super::{Message, Request, Role, Workload};

/// Prompts get at least this many tokens, whatever the log-normal draws.
const PROMPT_TOKENS_MIN: f64 = 64.0;
/// And at most this many times the mean: one prompt must not fill a host.
const PROMPT_TOKENS_MAX: f64 = 4.0;

/// What W1, W5 and W6 are made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Single {
    /// Shared prompts; 0: every request has a prompt of its own.
    pub prompts: u32,
    /// Exponent of their popularity.
    pub zipf: f64,
    /// Mean tokens of a prompt.
    pub prompt_tokens: f64,
    /// Standard deviation of a prompt length's logarithm.
    pub sigma: f64,
    /// Tokens of the question behind the prompt, unique to the request.
    pub question_tokens: u32,
    /// Mean tokens of an answer.
    pub output_tokens: u32,
    /// Requests a second.
    pub rate: f64,
    /// Even or bursty.
    pub spread: Spread,
    /// A prompt that goes viral: its tokens, and its share of the requests.
    pub viral: Option<(u32, f64)>,
    /// Seed of everything.
    pub seed: u64,
}

/// The requests of one [`Single`].
pub struct SingleRequests {
    plan: Single,
    arrivals: Arrivals,
    choice: ChaCha8Rng,
    zipf: Option<Zipf<f64>>,
    lengths: Vec<u32>,
    length: LogNormal<f64>,
    sent: u64,
    unique: bool,
}

impl SingleRequests {
    /// Starts the workload.
    ///
    /// # Errors
    /// If a parameter is out of what the distributions take.
    pub fn new(plan: Single) -> anyhow::Result<Self> {
        let mean = plan.prompt_tokens.max(PROMPT_TOKENS_MIN);
        // A log-normal's mean is exp(mu + sigma²/2).
        let length = LogNormal::new(mean.ln() - plan.sigma.powi(2) / 2.0, plan.sigma)?;
        let mut rng = stream(plan.seed, "prompt lengths");
        let lengths = (0..plan.prompts)
            .map(|_| tokens(&length, mean, &mut rng))
            .collect();
        let zipf = match plan.prompts {
            0 => None,
            prompts => Some(Zipf::new(f64::from(prompts), plan.zipf)?),
        };
        Ok(Self {
            arrivals: Arrivals::new(stream(plan.seed, "arrivals"), plan.rate, plan.spread),
            choice: stream(plan.seed, "choice"),
            zipf,
            lengths,
            length,
            sent: 0,
            unique: false,
            plan,
        })
    }

    /// From now on, a prompt of so many tokens has this share of the requests, or none has.
    pub fn go_viral(&mut self, viral: Option<(u32, f64)>) {
        self.plan.viral = viral;
    }

    /// From now on, every request has a prompt of its own, or prompts are shared again.
    pub fn share_nothing(&mut self, unique: bool) {
        self.unique = unique;
    }

    /// Prefixes are numbered by popularity, from 0; the viral one comes last.
    fn pick(&mut self) -> Option<u64> {
        // Both draws are made always, so that W5 asks what W1 asks but for the viral requests.
        let rank = self.zipf.map(|zipf| zipf.sample(&mut self.choice));
        let viral = self.choice.random::<f64>();
        if self.unique {
            return None;
        }
        match self.plan.viral {
            Some((_, share)) if viral < share => Some(u64::from(self.plan.prompts)),
            _ => rank.map(|rank| (rank as u64).saturating_sub(1)),
        }
    }

    fn prefix_tokens(&self, prefix: u64) -> Option<u32> {
        let length = usize::try_from(prefix)
            .ok()
            .and_then(|index| self.lengths.get(index));
        match (length, self.plan.viral) {
            (Some(&tokens), _) => Some(tokens),
            (None, Some((tokens, _))) if prefix == u64::from(self.plan.prompts) => Some(tokens),
            _ => None,
        }
    }

    fn request(&self, id: u64, at: Duration, prefix: Option<u64>, question: Text) -> Request {
        let seed = self.plan.seed;
        let prompt = match prefix.and_then(|prefix| Some((prefix, self.prefix_tokens(prefix)?))) {
            Some((prefix, tokens)) => Text::Made {
                id: text::id("prompt", seed, prefix),
                tokens,
            },
            None => {
                let mut rng = stream(text::id("own length", seed, id), "own length");
                let tokens = tokens(&self.length, self.plan.prompt_tokens, &mut rng);
                Text::Made {
                    id: text::id("own prompt", seed, id),
                    tokens,
                }
            }
        };
        Request {
            id,
            at,
            prefix,
            turn: 0,
            turns_left: 0,
            messages: Arc::new(vec![
                Message::new(Role::System, prompt),
                Message::new(Role::User, question),
            ]),
            output_tokens: lengths::answer(self.plan.output_tokens, seed, id, 0),
        }
    }
}

fn tokens(length: &LogNormal<f64>, mean: f64, rng: &mut ChaCha8Rng) -> u32 {
    length
        .sample(rng)
        .round()
        .clamp(PROMPT_TOKENS_MIN, mean * PROMPT_TOKENS_MAX) as u32
}

impl Workload for SingleRequests {
    fn next(&mut self) -> Option<Request> {
        let id = self.sent;
        self.sent += 1;
        let at = self.arrivals.next_at();
        let prefix = self.pick();
        let question = Text::Made {
            id: text::id("question", self.plan.seed, id),
            tokens: self.plan.question_tokens,
        };
        Some(self.request(id, at, prefix, question))
    }

    fn follow(&mut self, _request: &Request, _ended: Duration, _answer: &str) -> Option<Request> {
        None
    }

    fn prefixes(&self) -> Option<u64> {
        Some(u64::from(self.plan.prompts) + u64::from(self.plan.viral.is_some()))
    }

    fn probe(&self, index: u64) -> Option<Request> {
        self.prefix_tokens(index)?;
        let question = Text::Made {
            id: text::id("probe", self.plan.seed, index),
            tokens: self.plan.question_tokens,
        };
        Some(self.request(index, Duration::ZERO, Some(index), question))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn w1() -> Single {
        Single {
            prompts: 2600,
            zipf: 0.55,
            prompt_tokens: 3000.0,
            sigma: 0.3,
            question_tokens: 120,
            output_tokens: 220,
            rate: 26.7,
            spread: Spread::Even,
            viral: None,
            seed: 1,
        }
    }

    fn requests(plan: Single, count: usize) -> Vec<Request> {
        let mut requests = SingleRequests::new(plan).unwrap();
        (0..count).map(|_| requests.next().unwrap()).collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_requests() {
        assert_eq!(requests(w1(), 500), requests(w1(), 500));
        let other = Single { seed: 2, ..w1() };
        assert_ne!(
            requests(w1(), 1)[0].messages,
            requests(other, 1)[0].messages
        );
    }

    #[test]
    fn w1_has_the_study_s_lengths_and_popularity() {
        let requests = requests(w1(), 20_000);
        let mean = requests.iter().map(Request::prompt_tokens).sum::<u64>() as f64 / 20_000.0;
        assert!((mean / 3120.0 - 1.0).abs() < 0.02, "{mean} tokens");
        // Zipf 0.55 of 2600: rank 1 has 1 / sum(k^-0.55) = 1/75.2 of the requests.
        let first = requests
            .iter()
            .filter(|request| request.prefix == Some(0))
            .count();
        assert!(
            (first as f64 / 20_000.0 - 1.0 / 75.2).abs() < 0.003,
            "{first} of 20000"
        );
        assert!(
            requests
                .iter()
                .all(|request| request.prefix.is_some_and(|prefix| prefix < 2600))
        );
    }

    #[test]
    fn equal_prefixes_are_equal_texts_and_questions_are_unique() {
        let requests = requests(w1(), 2000);
        let (one, two) = requests
            .iter()
            .enumerate()
            .find_map(|(index, one)| {
                let two = requests[index + 1..]
                    .iter()
                    .find(|two| two.prefix == one.prefix)?;
                Some((one, two))
            })
            .unwrap();
        assert_eq!(one.messages[0], two.messages[0]);
        assert_ne!(one.messages[1], two.messages[1]);
    }

    #[test]
    fn half_of_w5_is_the_viral_prompt_and_the_rest_is_w1() {
        let w5 = requests(
            Single {
                viral: Some((3000, 0.5)),
                ..w1()
            },
            4000,
        );
        let viral = w5
            .iter()
            .filter(|request| request.prefix == Some(2600))
            .count();
        assert!((1880..=2120).contains(&viral), "{viral} of 4000");
        let w1 = requests(w1(), 4000);
        let same = w5
            .iter()
            .zip(&w1)
            .filter(|(five, one)| five.prefix == one.prefix)
            .count();
        assert_eq!(same, 4000 - viral);
    }

    #[test]
    fn what_is_shared_can_change_on_the_way() {
        let mut requests = SingleRequests::new(w1()).unwrap();
        let prefixes = |all: &mut SingleRequests| -> Vec<Option<u64>> {
            (0..400).map(|_| all.next().unwrap().prefix).collect()
        };
        let viral = |all: &[Option<u64>]| all.iter().filter(|one| **one == Some(2600)).count();
        assert_eq!(viral(&prefixes(&mut requests)), 0);
        requests.go_viral(Some((3000, 0.5)));
        assert!((150..=250).contains(&viral(&prefixes(&mut requests))));
        requests.share_nothing(true);
        assert!(prefixes(&mut requests).iter().all(Option::is_none));
        requests.share_nothing(false);
        requests.go_viral(None);
        let last = prefixes(&mut requests);
        assert!(viral(&last) == 0 && last.iter().all(Option::is_some));
    }

    #[test]
    fn w6_shares_nothing() {
        let plan = Single { prompts: 0, ..w1() };
        let requests = requests(plan, 1000);
        assert!(requests.iter().all(|request| request.prefix.is_none()));
        let starts: std::collections::BTreeSet<String> = requests
            .iter()
            .map(|request| {
                let mut text = String::new();
                request.messages[0].write(&mut text);
                text.chars().take(16).collect()
            })
            .collect();
        assert_eq!(starts.len(), 1000);
    }
}
