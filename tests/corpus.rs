//! Proves that whatever fuzzing ever found, and every seed it starts from, still holds: replays
//! fuzz/corpus through the functions of the fuzz targets, with the stable compiler.

use std::fs;
use std::path::{Path, PathBuf};

#[path = "../fuzz/src/checks.rs"]
mod checks;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz")
}

fn names(folder: &Path, ending: &str) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter_map(|name| name.strip_suffix(ending).map(str::to_owned))
        .collect();
    names.sort();
    names
}

/// Names each input before it is replayed, so that a failure says which one it was.
#[expect(
    clippy::print_stdout,
    reason = "the test runner keeps it for a failure"
)]
fn replay(target: &str, check: fn(&[u8])) {
    let folder = fuzz().join("corpus").join(target);
    let inputs = names(&folder, "");
    assert!(inputs.len() >= 10, "{target}: {} inputs", inputs.len());
    for input in inputs {
        println!("{target}/{input}");
        check(&fs::read(folder.join(&input)).unwrap());
    }
}

#[test]
fn json_corpus_holds() {
    replay("json", checks::json);
}

#[test]
fn reader_corpus_holds() {
    replay("reader", checks::reader);
}

#[test]
fn usage_corpus_holds() {
    replay("usage", checks::usage);
}

#[test]
fn decode_corpus_holds() {
    replay("decode", checks::decode);
}

#[test]
fn config_corpus_holds() {
    replay("config", checks::config);
}

#[test]
fn hosts_corpus_holds() {
    replay("hosts", checks::hosts);
}

#[test]
fn every_target_has_a_corpus_and_is_replayed_here() {
    let targets = names(&fuzz().join("targets"), ".rs");
    assert_eq!(names(&fuzz().join("corpus"), ""), targets);
    let this = include_str!("corpus.rs");
    for target in targets {
        assert!(this.contains(&format!("checks::{target})")), "{target}");
    }
}
