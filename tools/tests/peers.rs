//! Proves that routers are compared from end to end: each is started, meets the same requests, and
//! stands in every form of the result; finished plays are taken over after a stop.
//!
//! Guarantee: only what needs no package of others runs here, Envoy alone and ours. Not here: the
//! figures of a measurement, for which this machine is too busy.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Plays the conversations' four cells once with two routers.
fn peers(folder: &Path, more: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_prefix-router"))
        .args([
            "bench",
            "peers",
            "--only",
            "conversations",
            "--repeats",
            "1",
        ])
        .args(["--routers", "envoy-random,prefix_router-one"])
        .args(["--engine-port", "0", "--json", "--output"])
        .arg(folder)
        .args(more)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn median(row: &Value, figure: &str) -> f64 {
    row["figures"][figure]["median"].as_f64().unwrap()
}

#[test]
fn ours_keeps_conversations_and_spreads_them_beside_random_and_a_second_run_takes_them_over() {
    let folder = tempfile::tempdir().unwrap();
    let json = peers(folder.path(), &[]);
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 8, "four cells of two routers: {json}");
    for row in rows {
        let (kept, share) = (median(row, "kept"), median(row, "share"));
        assert_eq!(median(row, "failed"), 0.0, "{row}");
        let hosts: u64 = row["hosts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|count| count.as_u64().unwrap())
            .sum();
        assert_eq!(hosts, 250, "{row}");
        // By chance a turn stays in one of four cases: 50 of 200, with a deviation of 6.
        match row["router"].as_str().unwrap() {
            "envoy-random" => assert!((20.0..90.0).contains(&kept), "{row}"),
            ours => {
                assert_eq!(ours, "prefix_router-one");
                assert!(kept >= 190.0 && share <= 1.6, "{row}");
            }
        }
    }
    for (file, part) in [
        ("peers.md", "| prefix_router-one | nothing |"),
        ("report.html", "<li>envoy-random: Envoy 1."),
    ] {
        let text = std::fs::read_to_string(folder.path().join(file)).unwrap();
        assert!(text.contains(part), "{part:?} is not in {file}");
    }
    let again = peers(folder.path(), &["--resume"]);
    assert_eq!(again["rows"], json["rows"], "nothing was played again");
}

#[test]
fn a_router_of_a_wrong_name_is_answered_with_all_names() {
    let output = Command::new(env!("CARGO_BIN_EXE_prefix-router"))
        .args(["bench", "peers", "--routers", "nginx"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    for part in ["--routers: expected", "smg-prefix_hash", "got nginx"] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
}
