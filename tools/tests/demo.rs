//! Proves that the demo and the sixteen setups run from end to end, tell what they promise, and
//! leave nothing behind.
//!
//! Guarantee: all is small and short here; its figures are not judged. Not here: figures.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Two engines and few prompts.
const SMALL: [&str; 9] = [
    "demo",
    "--hosts",
    "2",
    "--prompts",
    "20",
    "--rate",
    "8",
    "--warmup",
    "60",
];

/// The first of so many free ports in a row, below those that the system gives to clients.
fn ports(count: u16) -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Processes that test at the same time begin at different ports.
    let begin = (std::process::id() % 1000) as u16 * 10;
    for _ in 0..1000 {
        let port = 20_000 + (begin + NEXT.fetch_add(count, Ordering::Relaxed)) % 10_000;
        let free = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
        if (port..port + count).all(free) {
            return port;
        }
    }
    panic!("no {count} free ports in a row");
}

fn demo(port: u16, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_prefix-router"));
    command
        .args(SMALL)
        .args(["--engine-port", &port.to_string()])
        .args(more);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Process ids of the demo's children and theirs.
fn descendants(pid: u32) -> Vec<u32> {
    let mut all = vec![pid];
    let mut at = 0;
    while let Some(pid) = all.get(at) {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap_or_default();
        all.extend(
            children
                .split_whitespace()
                .filter_map(|pid| pid.parse::<u32>().ok()),
        );
        at += 1;
    }
    all.split_off(1)
}

fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit(") ")
        .next()
        .and_then(|rest| rest.chars().next());
    state.is_some_and(|state| state != 'Z')
}

/// Waits until a line of the demo's progress contains `text`; fails with all lines if none does.
fn wait_for(demo: &mut Child, text: &str) {
    let mut seen = Vec::new();
    let mut lines = BufReader::new(demo.stderr.take().unwrap()).lines();
    for line in &mut lines {
        let line = line.unwrap();
        if line.contains(text) {
            // The rest has to go somewhere, or the demo would wait for a reader.
            std::thread::spawn(move || lines.for_each(drop));
            return;
        }
        seen.push(line);
    }
    panic!("no line has {text:?}:\n{}", seen.join("\n"));
}

#[test]
fn a_demo_prints_one_object_for_three_policies() {
    let output = demo(ports(2), &["--duration", "3", "--json"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["seed"], 1);
    assert!(
        report["commit"]
            .as_str()
            .is_some_and(|commit| !commit.is_empty())
    );
    let runs = report["runs"].as_array().unwrap();
    let policies: Vec<_> = runs
        .iter()
        .filter_map(|run| run["policy"].as_str())
        .collect();
    assert_eq!(policies, ["random", "least_request", "prefix_router"]);
    let requests = runs[0]["requests"].as_u64().unwrap();
    assert!(
        (8..=60).contains(&requests),
        "{requests} requests at 8 a second in 3 s"
    );
    for run in runs {
        assert_eq!(
            run["requests"], requests,
            "every policy gets the same: {run}"
        );
        assert_eq!(run["errors"], 0, "{run}");
        let shares = run["shares"].as_object().unwrap();
        let served: u64 = shares.values().filter_map(Value::as_u64).sum();
        assert_eq!((shares.len(), served), (2, requests), "{run}");
        assert!(
            run["ttft_ms"]["p50"].as_f64().is_some_and(|ms| ms > 10.0),
            "{run}"
        );
        assert!(
            run["output_tokens_per_s"]
                .as_f64()
                .is_some_and(|rate| rate > 0.0),
            "{run}"
        );
    }
    let decided: u64 = runs[2]["decisions"]
        .as_object()
        .unwrap()
        .values()
        .filter_map(Value::as_u64)
        .sum();
    assert_eq!(decided, requests, "{}", runs[2]);
    assert_eq!(runs[0]["decisions"], serde_json::json!({}));
    // Twenty prompts fit every cache, so each is computed once per host that gets it.
    let hits = |run: usize| runs[run]["hit_rate"].as_f64().unwrap();
    assert!(hits(2) >= hits(0), "{said}");
}

#[test]
fn a_stopped_demo_leaves_no_process() {
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let mut child = demo(ports(2), &["--duration", "60"]).spawn().unwrap();
        wait_for(&mut child, "random         measuring");
        let family = descendants(child.id());
        assert!(
            family.len() >= 3,
            "two engines and an Envoy, not {family:?}"
        );
        kill_process(
            Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(),
            signal,
        )
        .unwrap();
        assert!(!child.wait().unwrap().success());
        let began = Instant::now();
        while family.iter().any(|&pid| alive(pid)) {
            let left: Vec<_> = family.iter().filter(|&&pid| alive(pid)).collect();
            assert!(
                began.elapsed() < Duration::from_secs(10),
                "{signal:?} left {left:?}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn a_port_in_use_is_said_with_what_to_do() {
    let port = ports(2);
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    let output = demo(port, &[]).output().unwrap();
    drop(taken);
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    for part in [&format!("127.0.0.1:{port}"), "--engine-port", "in use"] {
        assert!(said.contains(part), "{part:?} is not in {said:?}");
    }
}

#[test]
fn one_of_the_sixteen_setups_is_measured_once_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let cell = "single-native-whole-2";
    let run = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_prefix-router"));
        command.args(["bench", "sixteen", "--window", "3", "--warmup", "30"]);
        command.args(["--only", cell, "--engine-port", &ports(7).to_string()]);
        command.arg("--output").arg(folder.path()).args(more);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        (output.stdout, said)
    };
    let (json, said) = run(&["--json"]);
    assert!(
        said.contains(&format!("[1/1] {cell}, about 1 min left")),
        "{said}"
    );
    let report: Value = serde_json::from_slice(&json).unwrap();
    let row = &report["rows"][0];
    assert_eq!((&row["cell"], &report["seed"]), (&cell.into(), &1.into()));
    for part in ["long", "high", "short"] {
        let requests = |policy: &str| row[part][policy]["requests"].as_u64().unwrap();
        assert!(requests("random") > 5, "{row}");
        assert_eq!(
            requests("random"),
            requests("prefix_router"),
            "{part}: {row}"
        );
        for policy in ["random", "prefix_router"] {
            let figures = &row[part][policy];
            assert_eq!(figures["errors"], 0, "{row}");
            assert_eq!(figures["ttft_of_engines"], true, "{row}");
            let (ttft, answer) = (&figures["ttft_ms"][0], &figures["answer_ms"][0]);
            assert!(
                ttft.as_f64() > Some(1.0) && answer.as_f64() > ttft.as_f64(),
                "{row}"
            );
        }
        assert!(
            row[part]["prefix_router"]["envoy_cpu_us"].as_f64() > Some(1.0),
            "{row}"
        );
    }
    let page = std::fs::read_to_string(folder.path().join("sixteen.html")).unwrap();
    assert!(page.contains("<svg ") && page.contains(cell));
    // A machine that did not keep up has its row measured again; that is tested with the rows.
    let rows = folder.path().join("sixteen.jsonl");
    let mut kept: Value = serde_json::from_str(&std::fs::read_to_string(&rows).unwrap()).unwrap();
    for part in ["long", "high", "short"] {
        for policy in ["random", "prefix_router"] {
            kept[part][policy]["doubts"] = serde_json::json!([]);
        }
    }
    std::fs::write(&rows, format!("{kept}\n")).unwrap();
    let (table, said) = run(&["--resume"]);
    assert!(
        said.contains(&format!("[1/1] {cell}: kept from an earlier run")),
        "{said}"
    );
    let table = String::from_utf8(table).unwrap();
    assert!(
        table
            .lines()
            .any(|line| line.starts_with(&format!("{cell}  "))),
        "{table}"
    );
}
