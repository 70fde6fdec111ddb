//! How long answers are.
//!
//! Guarantee: an answer's length depends on the seed and its request only; its mean is the one
//! asked for. Not here: lengths of prompts, which belong to the prompts (single.rs, documents.rs).

use rand_distr::{Distribution as _, LogNormal};

use super::options::stream;
use super::text;

/// Standard deviation of an answer length's logarithm. Answers of one length would end together
/// and make least-request routing send in bunches: it then waits twice as long as round robin
/// (80 % load, no sharing: 0.85 s against 0.28 s; with this spread 0.35 s, as in ROUTING.md 1).
const ANSWER_SIGMA: f64 = 0.5;
/// No answer is longer than this many times the mean.
const ANSWER_MAX: f64 = 4.0;

/// Tokens of the answer to one request of a workload whose answers have `mean` tokens.
#[must_use]
pub fn answer(mean: u32, seed: u64, chat: u64, turn: u32) -> u32 {
    // A request for a single token wants the first one's time and nothing else.
    if mean <= 1 {
        return mean;
    }
    let tokens = f64::from(mean);
    // A log-normal's mean is exp(mu + sigma²/2).
    let mu = tokens.ln() - ANSWER_SIGMA.powi(2) / 2.0;
    let Ok(length) = LogNormal::new(mu, ANSWER_SIGMA) else {
        return mean;
    };
    let mut rng = stream(seed, "answer length");
    rng.set_stream(text::id("answer", chat, u64::from(turn)));
    length
        .sample(&mut rng)
        .round()
        .clamp(1.0, tokens * ANSWER_MAX) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_vary_around_their_mean() {
        let lengths: Vec<u32> = (0..20_000).map(|chat| answer(220, 1, chat, 0)).collect();
        let mean = lengths.iter().map(|&tokens| f64::from(tokens)).sum::<f64>() / 20_000.0;
        assert!((mean - 220.0).abs() < 3.0, "{mean}");
        let short = lengths.iter().filter(|&&tokens| tokens < 110).count();
        assert!(
            (1_000..3_000).contains(&short),
            "{short} of 20000 below half of the mean"
        );
        assert!(lengths.iter().all(|tokens| (1..=880).contains(tokens)));
        assert_eq!(answer(1, 1, 7, 0), 1);
        assert_eq!(answer(220, 1, 7, 3), answer(220, 1, 7, 3));
    }
}
