//! Real engines, small enough for a few processor cores: what they need, and how they are started.
//!
//! Guarantee: the model is made here, from a text of the workloads' own kind, and the same
//! everywhere; nothing but Python packages is fetched. Not here: their processes (round/fleet.rs),
//! what they are asked (workload/).

pub(crate) mod llama;
pub(crate) mod vllm;

use std::fs;
use std::hash::Hasher as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustc_hash::FxHasher;

use crate::setup;
use crate::setup::python::Environment;
use crate::workload::text::{self, Text};

/// Writes the model that all of them run.
const TINY_MODEL: &str = include_str!("../../real/tiny_model.py");

/// Its name in requests.
pub(crate) const MODEL: &str = "tiny";

/// Their cluster in the Envoy file.
pub(crate) const CLUSTER: &str = "engines";

/// Made in 2 s; machines that compile at the same time take longer.
const MODEL_LIMIT: Duration = Duration::from_secs(120);

/// The text from which the vocabulary is learned: 480 KB in pieces of 4 KB. Half of it gives the
/// same 2.2 bytes a token.
const CORPUS_PIECES: u64 = 120;
const CORPUS_PIECE_TOKENS: u32 = 1000;

/// The model in one of the forms that the script knows, made now if it was not made before.
fn model(environment: &Environment, form: &str, ending: &str) -> Result<PathBuf> {
    let folder = setup::results("real")?;
    let corpus = corpus();
    let mut hasher = FxHasher::default();
    hasher.write(TINY_MODEL.as_bytes());
    hasher.write(corpus.as_bytes());
    // Named after what it is made from: a newer script makes another one.
    let path = folder.join(format!("tiny-{:016x}{ending}", hasher.finish()));
    if path.exists() {
        return Ok(path);
    }
    let script = file("tiny_model.py", TINY_MODEL)?;
    let text = file("corpus.txt", &corpus)?;
    let partial = folder.join(format!("partial-{}{ending}", std::process::id()));
    let arguments = [&script, Path::new(form), &text, &partial];
    let what = "making a tiny model with random weights";
    environment.run(what, &arguments, MODEL_LIMIT)?;
    // Renamed last, so that the model is either whole or not there.
    match fs::rename(&partial, &path) {
        // Another process has made it in the meantime.
        Err(_) if path.exists() => Ok(path),
        renamed => renamed
            .map(|()| path)
            .with_context(|| format!("no model in {}", folder.display())),
    }
}

fn corpus() -> String {
    let mut corpus = String::new();
    for piece in 0..CORPUS_PIECES {
        let id = text::id("vocabulary", 0, piece);
        let tokens = CORPUS_PIECE_TOKENS;
        Text::Made { id, tokens }.write(&mut corpus);
        corpus.push('\n');
    }
    corpus
}

/// A file of this program, written where other programs can read it.
fn file(name: &str, content: &str) -> Result<PathBuf> {
    let folder = setup::results("real")?;
    let path = folder.join(name);
    if fs::read_to_string(&path).is_ok_and(|found| found == content) {
        return Ok(path);
    }
    // Renamed, because another process may be reading it.
    let partial = folder.join(format!("partial-{}-{name}", std::process::id()));
    fs::write(&partial, content).with_context(|| format!("cannot write {}", partial.display()))?;
    fs::rename(&partial, &path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}
