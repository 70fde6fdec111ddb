//! One cell's figures, and the file that keeps them.
//!
//! Guarantee: a row is found again only under the same commit, seed and sizes, and only if the
//! machine kept up while it was measured; a line that cannot be read is passed over. Not here:
//! measuring (mod.rs), tables.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::report::Run;

/// What has to be equal for a row to be that of this run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Key {
    /// The commit of the sources.
    pub commit: String,
    /// The seed.
    pub seed: u64,
    /// The sizes, as JSON.
    pub sizes: String,
}

/// One policy's figures in one stretch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Figures {
    /// Requests that ended well.
    pub requests: u64,
    /// Those that did not.
    pub errors: u64,
    /// Share of the prompt tokens that the engines found in their caches.
    pub hit_rate: f64,
    /// Milliseconds to the first token: P50 and P90.
    pub ttft_ms: Option<(f64, f64)>,
    /// Whether they are the engines' own, since the client saw no first token of a whole answer.
    pub ttft_of_engines: bool,
    /// Milliseconds to the end of the answer: P50 and P90.
    pub answer_ms: Option<(f64, f64)>,
    /// Tokens a second that the engines produced.
    pub output_tokens_per_s: f64,
    /// Requests of the host that got fewest and of the one that got most, by the mean's.
    pub shares: (f64, f64),
    /// Mean µs of the filter's decisions.
    pub decision_us: Option<f64>,
    /// Processor time of the Envoys for each request, in µs.
    pub envoy_cpu_us: Option<f64>,
    /// Where the machine did not keep up, so that these figures are not to be believed.
    pub doubts: Vec<String>,
}

impl Figures {
    pub(super) fn of(run: &Run) -> Self {
        let both = |at: &dyn Fn(f64) -> Option<f64>| Some((at(0.5)?, at(0.9)?));
        let seen = both(&|share| run.ttft(share));
        Self {
            requests: run.requests,
            errors: run.failed(),
            hit_rate: run.hit_rate,
            ttft_of_engines: seen.is_none(),
            ttft_ms: seen.or_else(|| both(&|share| run.engine_ttft_ms(share))),
            answer_ms: both(&|share| run.answer(share)),
            output_tokens_per_s: run.output_tokens_per_s,
            shares: (run.min_over_mean(), run.max_over_mean()),
            decision_us: run.decision_us,
            envoy_cpu_us: run.envoy_cpu_us,
            doubts: run.slowness(),
        }
    }

    /// The share of requests that ended well.
    pub(super) fn success(&self) -> f64 {
        self.requests as f64 / (self.requests + self.errors).max(1) as f64
    }
}

/// Both policies in one stretch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Pair {
    /// The same Envoys without the filter.
    pub random: Figures,
    /// Ours.
    pub prefix_router: Figures,
}

impl Pair {
    /// How much more tokens a second ours brought, e.g. 0.16.
    pub(super) fn throughput_gain(&self) -> f64 {
        let base = self.random.output_tokens_per_s;
        if base > 0.0 {
            self.prefix_router.output_tokens_per_s / base - 1.0
        } else {
            0.0
        }
    }
}

/// One cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Row {
    /// The cell's name.
    pub cell: String,
    /// What it is of.
    pub key: Key,
    /// Long prompts, 80 % load.
    pub long: Pair,
    /// Long prompts, 117 % load.
    pub high: Pair,
    /// Short prompts.
    pub short: Pair,
}

impl Row {
    /// The stretches, with their names.
    pub(super) fn pairs(&self) -> [(&'static str, &Pair); 3] {
        [
            ("long", &self.long),
            ("117 %", &self.high),
            ("short", &self.short),
        ]
    }

    /// Whether it is of this cell and run.
    fn is(&self, cell: &str, key: &Key) -> bool {
        self.cell == cell && self.key == *key
    }

    /// Why its figures are not to be believed; empty if they are.
    pub(super) fn doubts(&self) -> Vec<String> {
        let of = |(name, pair): (&'static str, &Pair)| {
            let both = [&pair.random, &pair.prefix_router];
            let doubts = both.into_iter().flat_map(|figures| figures.doubts.clone());
            doubts
                .map(|doubt| format!("{}, {name}: {doubt}", self.cell))
                .collect::<Vec<_>>()
        };
        self.pairs().into_iter().flat_map(of).collect()
    }

    /// The least share of requests that ended well.
    pub(super) fn success(&self) -> f64 {
        let all = self.pairs().map(|(_, pair)| pair.prefix_router.success());
        all.into_iter().fold(1.0, f64::min)
    }
}

/// Rows kept at most, the newest: 60 whole runs, about 3 MB.
const ROWS_MAX: usize = 1000;

/// The file of finished rows, one JSON object a line.
pub(super) struct Store {
    path: PathBuf,
    resume: bool,
    rows: Vec<Row>,
}

impl Store {
    /// Opens the file; rows are found in it to resume only.
    pub(super) fn open(path: PathBuf, resume: bool) -> Result<Self> {
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        };
        let lines = text.lines();
        let rows = lines.filter_map(|line| serde_json::from_str(line).ok());
        Ok(Self {
            path,
            resume,
            rows: rows.collect(),
        })
    }

    /// The folder it lies in.
    pub(super) fn folder(&self) -> PathBuf {
        self.path
            .parent()
            .map_or_else(PathBuf::new, Path::to_path_buf)
    }

    /// The row of a cell, if it can be believed.
    pub(super) fn find(&self, cell: &str, key: &Key) -> Option<Row> {
        let mut rows = self.rows.iter().filter(|_| self.resume);
        let found = rows.find(|row| row.is(cell, key))?;
        found.doubts().is_empty().then(|| found.clone())
    }

    /// Adds a row, on disk at once, in place of an earlier one.
    pub(super) fn keep(&mut self, row: &Row) -> Result<()> {
        self.rows.retain(|found| !found.is(&row.cell, &row.key));
        self.rows.push(row.clone());
        let over = self.rows.len().saturating_sub(ROWS_MAX);
        self.rows.drain(..over);
        let lines = self.rows.iter().map(serde_json::to_string);
        let lines: Vec<String> = lines.collect::<serde_json::Result<_>>()?;
        // In one step: whoever stops this loses nothing.
        let fresh = self.path.with_extension("new");
        fs::write(&fresh, lines.join("\n") + "\n")
            .with_context(|| format!("cannot write {}", fresh.display()))?;
        fs::rename(&fresh, &self.path)
            .with_context(|| format!("cannot replace {}", self.path.display()))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn row(cell: &str, hits: f64) -> Row {
        let figures = |hit_rate, ttft, tokens| Figures {
            requests: 700,
            hit_rate,
            ttft_ms: Some((ttft, ttft * 4.0)),
            answer_ms: Some((ttft + 1000.0, ttft + 2000.0)),
            output_tokens_per_s: tokens,
            shares: (0.934, 1.081),
            envoy_cpu_us: Some(700.0),
            ..Figures::default()
        };
        let pair = |random_hits, hits| {
            let mut ours = figures(hits, 40.0, 1080.0);
            ours.decision_us = Some(14.6);
            Pair {
                random: figures(random_hits, 1400.0, 900.0),
                prefix_router: ours,
            }
        };
        Row {
            cell: cell.to_owned(),
            key: key(1),
            long: pair(0.25, hits),
            high: pair(0.25, hits),
            short: pair(0.0, 0.0),
        }
    }

    pub(in super::super) fn key(seed: u64) -> Key {
        Key {
            commit: "abc".to_owned(),
            seed,
            sizes: "{}".to_owned(),
        }
    }

    #[test]
    fn a_finished_row_is_found_under_its_own_key_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let mut store = Store::open(path.clone(), false).unwrap();
        store.keep(&row("one", 0.9)).unwrap();
        let again = Store::open(path.clone(), true).unwrap();
        assert_eq!(again.find("one", &key(1)), Some(row("one", 0.9)));
        assert_eq!(again.find("two", &key(1)), None);
        assert_eq!(again.find("one", &key(2)), None);
        let mut other = key(1);
        other.sizes = "{\"speed\":1}".to_owned();
        assert_eq!(again.find("one", &other), None);
        let mut fresh = Store::open(path.clone(), false).unwrap();
        assert_eq!(fresh.find("one", &key(1)), None, "only to resume");
        fresh.keep(&row("two", 0.7)).unwrap();
        let again = Store::open(path, true).unwrap();
        assert_eq!(
            again.find("one", &key(1)),
            Some(row("one", 0.9)),
            "not lost"
        );
    }

    #[test]
    fn what_is_doubtful_or_cut_short_is_measured_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let mut store = Store::open(path.clone(), false).unwrap();
        let mut doubtful = row("one", 0.9);
        doubtful.high.random.doubts.push("late".to_owned());
        store.keep(&row("one", 0.8)).unwrap();
        store.keep(&doubtful).unwrap();
        store.keep(&row("two", 0.9)).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, &text[..text.len() - 9]).unwrap();
        let mut again = Store::open(path.clone(), true).unwrap();
        assert_eq!(
            again.find("one", &key(1)),
            None,
            "its last run was doubtful"
        );
        assert_eq!(again.find("two", &key(1)), None, "its line is cut");
        again.keep(&row("two", 0.7)).unwrap();
        let last = Store::open(path, true).unwrap();
        assert_eq!(last.find("two", &key(1)), Some(row("two", 0.7)));
    }
}
