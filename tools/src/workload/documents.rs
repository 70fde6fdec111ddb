//! W4: questions about a few documents out of many, behind one short system prompt.
//!
//! Guarantee: which documents a request holds, in which order, depends on the seed and the
//! request's number only. Not here: one shared prompt per request (single.rs).

use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand::seq::SliceRandom as _;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution as _, LogNormal, Zipf};

use super::arrivals::{Arrivals, Spread};
use super::lengths;
use super::options::stream;
use super::text::{self, Text};
use super::{Message, Request, Role, Workload};

/// Documents get at least this many tokens, whatever the log-normal draws.
const DOCUMENT_TOKENS_MIN: f64 = 32.0;
/// And at most this many times the mean.
const DOCUMENT_TOKENS_MAX: f64 = 4.0;

/// What W4 is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Documents {
    /// Documents there are.
    pub documents: u32,
    /// Exponent of their popularity.
    pub zipf: f64,
    /// Documents in a request.
    pub picked: u32,
    /// Mean tokens of a document.
    pub document_tokens: f64,
    /// Standard deviation of a document length's logarithm.
    pub sigma: f64,
    /// Tokens of the system prompt that all share.
    pub system_tokens: u32,
    /// Tokens of the question behind the documents.
    pub question_tokens: u32,
    /// Mean tokens of an answer.
    pub output_tokens: u32,
    /// Requests a second.
    pub rate: f64,
    /// Even or bursty.
    pub spread: Spread,
    /// Seed of everything.
    pub seed: u64,
}

/// The requests of one [`Documents`].
pub struct DocumentRequests {
    plan: Documents,
    arrivals: Arrivals,
    choice: ChaCha8Rng,
    zipf: Zipf<f64>,
    lengths: Vec<u32>,
    sent: u64,
}

impl DocumentRequests {
    /// Starts the workload.
    ///
    /// # Errors
    /// If a parameter is out of what the distributions take.
    pub fn new(plan: Documents) -> anyhow::Result<Self> {
        anyhow::ensure!(
            (1..=plan.documents / 2).contains(&plan.picked),
            "expected from 1 to half of the {} documents in a request, got {}",
            plan.documents,
            plan.picked
        );
        let mean = plan.document_tokens.max(DOCUMENT_TOKENS_MIN);
        let length = LogNormal::new(mean.ln() - plan.sigma.powi(2) / 2.0, plan.sigma)?;
        let mut rng = stream(plan.seed, "document lengths");
        let most = mean * DOCUMENT_TOKENS_MAX;
        let mut draw = || {
            length
                .sample(&mut rng)
                .round()
                .clamp(DOCUMENT_TOKENS_MIN, most) as u32
        };
        let lengths = (0..plan.documents).map(|_| draw()).collect();
        Ok(Self {
            arrivals: Arrivals::new(stream(plan.seed, "arrivals"), plan.rate, plan.spread),
            choice: stream(plan.seed, "documents"),
            zipf: Zipf::new(f64::from(plan.documents), plan.zipf)?,
            lengths,
            sent: 0,
            plan,
        })
    }

    /// Different documents by popularity; half of the requests hold the popular ones first, as a
    /// retriever that sorts would, the other half in any order.
    fn pick(&mut self) -> Vec<u64> {
        let mut picked: Vec<u64> = Vec::with_capacity(self.plan.picked as usize);
        // Ends: at most half of the documents are picked, so a draw is new often enough.
        while picked.len() < self.plan.picked as usize {
            let document = (self.zipf.sample(&mut self.choice) as u64).saturating_sub(1);
            if !picked.contains(&document) {
                picked.push(document);
            }
        }
        if self.choice.random_bool(0.5) {
            picked.sort_unstable();
        } else {
            picked.shuffle(&mut self.choice);
        }
        picked
    }

    fn request(&self, id: u64, at: Duration, documents: &[u64], question: &str) -> Request {
        let seed = self.plan.seed;
        let made = |purpose: &str, which: u64, tokens: u32| Text::Made {
            id: text::id(purpose, seed, which),
            tokens,
        };
        let mut texts: Vec<Text> = documents
            .iter()
            .zip(documents.iter().map(|&document| self.tokens(document)))
            .map(|(&document, tokens)| made("document", document, tokens))
            .collect();
        texts.push(made(question, id, self.plan.question_tokens));
        let system = made("system", 0, self.plan.system_tokens);
        Request {
            id,
            at,
            prefix: documents.first().copied(),
            turn: 0,
            turns_left: 0,
            messages: Arc::new(vec![
                Message::new(Role::System, system),
                Message {
                    role: Role::User,
                    texts,
                },
            ]),
            output_tokens: lengths::answer(self.plan.output_tokens, seed, id, 0),
        }
    }

    fn tokens(&self, document: u64) -> u32 {
        let index = usize::try_from(document).unwrap_or(usize::MAX);
        self.lengths.get(index).copied().unwrap_or(0)
    }
}

impl Workload for DocumentRequests {
    fn next(&mut self) -> Option<Request> {
        let id = self.sent;
        self.sent += 1;
        let at = self.arrivals.next_at();
        let documents = self.pick();
        Some(self.request(id, at, &documents, "question"))
    }

    fn follow(&mut self, _request: &Request, _ended: Duration, _answer: &str) -> Option<Request> {
        None
    }

    fn prefixes(&self) -> Option<u64> {
        Some(u64::from(self.plan.documents))
    }

    fn probe(&self, index: u64) -> Option<Request> {
        let known = index < u64::from(self.plan.documents);
        known.then(|| self.request(index, Duration::ZERO, &[index], "probe"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_requests_have_the_popular_documents_first() {
        let plan = Documents {
            documents: 1500,
            zipf: 0.9,
            picked: 4,
            document_tokens: 800.0,
            sigma: 0.3,
            system_tokens: 320,
            question_tokens: 120,
            output_tokens: 220,
            rate: 10.0,
            spread: Spread::Even,
            seed: 4,
        };
        let mut requests = DocumentRequests::new(plan).unwrap();
        let (mut sorted, mut tokens) = (0, 0);
        for _ in 0..4_000 {
            let picked = requests.pick();
            assert_eq!(picked.len(), 4);
            sorted += u32::from(picked.is_sorted());
            tokens += requests
                .request(0, Duration::ZERO, &picked, "question")
                .prompt_tokens();
        }
        // Half, and 1 in 4! of the others.
        let share = f64::from(sorted) / 4_000.0;
        assert!((share - (0.5 + 0.5 / 24.0)).abs() < 0.03, "{share}");
        let mean = tokens as f64 / 4_000.0;
        // The popular documents' lengths are a matter of the seed.
        assert!((mean - 3_640.0).abs() < 400.0, "{mean} tokens");
        let messages = requests.next().unwrap().messages;
        assert_eq!((messages.len(), messages[1].texts.len()), (2, 5));
    }
}
