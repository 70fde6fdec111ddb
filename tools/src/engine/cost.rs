//! What a simulated engine is made of: its sizes, and how long one of its steps takes.
//!
//! Guarantee: the same step costs the same time on every clock. Not here: which tokens a step
//! computes (scheduler.rs), clocks (server.rs, simulate).
//!
//! The defaults describe Llama-3.1-70B in bf16 on one 8 × H100-80GB machine. KV per token is
//! 80 layers × 8 KV heads × 128 × 2 (K and V) × 2 B = 320 KiB; 8 × 80 GB × 0.9 − 141 GB of weights
//! − activations ≈ 400 GB, which is 1.2 M tokens.

use clap::Args;

/// Nanoseconds in a second, as the clock counts them.
pub const NS_PER_S: f64 = 1e9;

/// Sizes and constants of one engine.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Tokens per cache block (vLLM's default)
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=8192))]
    pub block_tokens: u32,
    /// Tokens the KV cache holds
    #[arg(long, default_value_t = 1_200_000,
          value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub kv_tokens: u64,
    /// Sequences that run at once (vLLM's max_num_seqs)
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub seqs_max: u32,
    /// Tokens computed in one step (vLLM's max_num_batched_tokens)
    #[arg(long, default_value_t = 8192,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub step_tokens_max: u32,
    /// Milliseconds a step takes at least: reading the weights once
    #[arg(long, default_value_t = 14.0)]
    pub step_base_ms: f64,
    /// Prompt tokens computed per second, at no context
    #[arg(long, default_value_t = 14_000.0)]
    pub prefill_tokens_per_s: f64,
    /// Context tokens at which attention costs a prompt token as much as everything else
    #[arg(long, default_value_t = 54_000.0)]
    pub attention_tokens: f64,
    /// Microseconds a decoded token adds to its step
    #[arg(long, default_value_t = 40.0)]
    pub decode_us: f64,
    /// Nanoseconds a decoded token's step takes per token of its context: reading its KV
    #[arg(long, default_value_t = 17.5)]
    pub decode_context_ns: f64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            block_tokens: 16,
            kv_tokens: 1_200_000,
            seqs_max: 256,
            step_tokens_max: 8192,
            step_base_ms: 14.0,
            prefill_tokens_per_s: 14_000.0,
            attention_tokens: 54_000.0,
            decode_us: 40.0,
            decode_context_ns: 17.5,
        }
    }
}

/// What one step computes, as far as it costs time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepWork {
    /// Prompt tokens, weighted by their context: `n × (1 + context / attention_tokens)`.
    pub prefill_weighted: f64,
    /// Decoded tokens.
    pub decodes: u64,
    /// The sum of the decoding sequences' contexts, in tokens.
    pub decode_context: u64,
}

impl EngineConfig {
    /// Checks what the flags' own ranges cannot say.
    pub fn check(&self) -> anyhow::Result<()> {
        // With these, the longest step fits the clock: 64 bits of nanoseconds.
        let ranges = [
            ("step-base-ms", self.step_base_ms, 0.001, 60_000.0),
            ("prefill-tokens-per-s", self.prefill_tokens_per_s, 1.0, 1e9),
            ("attention-tokens", self.attention_tokens, 1.0, 1e9),
            ("decode-us", self.decode_us, 0.0, 1e6),
            ("decode-context-ns", self.decode_context_ns, 0.0, 1e6),
        ];
        for (flag, value, low, high) in ranges {
            anyhow::ensure!(
                (low..=high).contains(&value),
                "--{flag}: expected a number from {low} to {high}, got {value:?}"
            );
        }
        anyhow::ensure!(
            self.blocks() >= 1,
            "--kv-tokens: expected at least one block of {} tokens, got {}",
            self.block_tokens,
            self.kv_tokens
        );
        Ok(())
    }

    /// Blocks in the KV cache.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        u32::try_from(self.kv_tokens / u64::from(self.block_tokens)).unwrap_or(u32::MAX - 1)
    }

    /// Adds a chunk of `tokens` prompt tokens that stands behind `context` tokens.
    pub fn add_prefill(&self, work: &mut StepWork, tokens: u32, context: u32) {
        work.prefill_weighted +=
            f64::from(tokens) * (1.0 + f64::from(context) / self.attention_tokens);
    }

    /// How long a step takes, in nanoseconds.
    #[must_use]
    pub fn step_ns(&self, work: &StepWork) -> u64 {
        let prefill_s = work.prefill_weighted / self.prefill_tokens_per_s;
        let ns = self.step_base_ms * 1e6
            + prefill_s * NS_PER_S
            + work.decodes as f64 * self.decode_us * 1e3
            + work.decode_context as f64 * self.decode_context_ns;
        ns.round() as u64
    }
}
