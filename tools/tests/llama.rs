//! Proves on real llama.cpp engines that prompts meet their caches: three servers, a few
//! conversations, a real Envoy with the filter and without.
//!
//! Guarantee: hits are the engines' own word (`usage.prompt_tokens_details.cached_tokens`); the
//! policies are compared within one run. Where the engines' package cannot be had, it says so and
//! passes. Not here: times, which a busy machine decides.

#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, Stdio};

use serde_json::Value;
use tools::testkit::skipped;

/// How much of the set-up's word a skipped test repeats.
const SAID_LINES: usize = 12;

/// Three free ports in a row, below those that the system gives to clients.
fn ports() -> u16 {
    let begin = (std::process::id() % 1000) as u16 * 3;
    let free = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    (0..1000)
        .map(|step| 15_000 + (begin + step * 3) % 4000)
        .find(|&port| (port..port + 3).all(free))
        .unwrap()
}

/// The demo on real engines: its report, or why there are none.
fn demo(tenants: u32, turns: u32) -> Result<Value, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_prefix-router"));
    command.args(["demo", "--engine", "llama.cpp", "--json", "--no-page"]);
    command.args(["--tenants", &tenants.to_string()]);
    command.args(["--turns", &turns.to_string()]);
    command.args(["--engine-port", &ports().to_string()]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if said.contains("cannot make a Python environment") {
        return Err(said);
    }
    assert!(output.status.success(), "{said}");
    Ok(serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn prompts_meet_the_caches_of_real_engines() {
    let report = match demo(12, 2) {
        Ok(report) => report,
        Err(said) => {
            let lines: Vec<&str> = said.lines().collect();
            let from = lines.len().saturating_sub(SAID_LINES);
            let last = lines[from..].join("\n");
            skipped(&format!(
                "real llama.cpp engines cannot be had here:\n{last}"
            ));
            return;
        }
    };
    let runs = report["runs"].as_array().unwrap();
    let policies: Vec<_> = runs.iter().map(|run| run["policy"].clone()).collect();
    assert_eq!(policies, ["random", "least_request", "prefix_router"]);
    for run in runs {
        // 12 tenants, 2 conversations each, 2 turns.
        assert_eq!(
            (&run["requests"], &run["errors"]),
            (&48.into(), &0.into()),
            "{run}"
        );
        let shares = run["shares"].as_object().unwrap();
        let served: u64 = shares.values().filter_map(Value::as_u64).sum();
        assert_eq!((shares.len(), served), (3, 48), "{run}");
        assert!(run["requests_per_s"].as_f64() > Some(0.0), "{run}");
    }
    let hits = |run: usize| runs[run]["hit_rate"].as_f64().unwrap();
    // A tenant's prompt is computed once at least, 12 of 48 times, and by every engine that gets it:
    // random routing gives it to 2.4 of three in the mean, which are 29 of 48 times. Seen on a busy
    // machine: 20 and 28 %, against 69 and 66 %.
    assert!(
        hits(2) > hits(0) + 0.2,
        "prefix_router {}, random {}",
        hits(2),
        hits(0)
    );
    assert!(hits(2) < 0.85, "more than was ever cached: {}", hits(2));
    let decided = runs[2]["decisions"].as_object().unwrap();
    let decided: u64 = decided.values().filter_map(Value::as_u64).sum();
    assert_eq!(decided, 48, "{}", runs[2]);
}
