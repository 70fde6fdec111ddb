//! The file that keeps the finished rows of a long measurement, one JSON object a line.
//!
//! Guarantee: a row is on disk when `keep` returns, and is found again only under the same commit,
//! seed and sizes, and only if it can be believed; a line that cannot be read is passed over. One
//! process at a time has the file, so that none writes over another's rows. Not here: what rows are.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What has to be equal for a row to be that of this run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Key {
    /// The commit of the sources.
    pub commit: String,
    /// The seed.
    pub seed: u64,
    /// The sizes, as JSON.
    pub sizes: String,
}

/// A row that can be kept.
pub(super) trait Kept: Clone + Serialize + DeserializeOwned {
    /// Rows kept at most, the newest.
    const ROWS_MAX: usize;

    /// What it is of: no two rows of a key have the same name.
    fn name(&self) -> String;

    /// What it holds for.
    fn key(&self) -> &Key;

    /// Whether its figures can be believed.
    fn believed(&self) -> bool;

    /// Whether it is of this name and run.
    fn is(&self, name: &str, key: &Key) -> bool {
        self.key() == key && self.name() == name
    }
}

/// The file.
pub(super) struct Store<T> {
    path: PathBuf,
    resume: bool,
    rows: Vec<T>,
    /// Held as long as this is. The file of rows itself is replaced with each of them.
    _lock: File,
}

impl<T: Kept> Store<T> {
    /// Opens the file; rows are found in it to resume only.
    ///
    /// # Errors
    /// If another process has it open: two that measure at once would disturb each other as well.
    pub(super) fn open(path: PathBuf, resume: bool) -> Result<Self> {
        let lock = lock(&path)?;
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
            _lock: lock,
        })
    }

    /// The folder it lies in.
    pub(super) fn folder(&self) -> PathBuf {
        self.path
            .parent()
            .map_or_else(PathBuf::new, Path::to_path_buf)
    }

    /// The row of this name, if it can be believed.
    pub(super) fn find(&self, name: &str, key: &Key) -> Option<T> {
        let mut rows = self.rows.iter().filter(|_| self.resume);
        let found = rows.find(|row| row.is(name, key))?;
        found.believed().then(|| found.clone())
    }

    /// Adds a row, on disk at once, in place of an earlier one.
    pub(super) fn keep(&mut self, row: &T) -> Result<()> {
        self.rows.retain(|found| !found.is(&row.name(), row.key()));
        self.rows.push(row.clone());
        let over = self.rows.len().saturating_sub(T::ROWS_MAX);
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

/// Makes this process the only one that has the file at `path` open.
fn lock(path: &Path) -> Result<File> {
    let name = path.with_extension("lock");
    let file = File::create(&name).with_context(|| format!("cannot write {}", name.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!(
            "another run keeps its results in {}: wait for it, or give another --output",
            path.display()
        ),
        Err(TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("cannot lock {}", name.display()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct Line {
        name: String,
        key: Key,
        value: f64,
        doubtful: bool,
    }

    impl Kept for Line {
        const ROWS_MAX: usize = 3;

        fn name(&self) -> String {
            self.name.clone()
        }

        fn key(&self) -> &Key {
            &self.key
        }

        fn believed(&self) -> bool {
            !self.doubtful
        }
    }

    fn key(seed: u64) -> Key {
        Key {
            commit: "abc".to_owned(),
            seed,
            sizes: "{}".to_owned(),
        }
    }

    fn line(name: &str, value: f64) -> Line {
        Line {
            name: name.to_owned(),
            key: key(1),
            value,
            doubtful: false,
        }
    }

    #[test]
    fn a_finished_row_is_found_under_its_own_key_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let mut store = Store::open(path.clone(), false).unwrap();
        store.keep(&line("one", 0.9)).unwrap();
        drop(store);
        let again = Store::<Line>::open(path.clone(), true).unwrap();
        assert_eq!(again.find("one", &key(1)), Some(line("one", 0.9)));
        assert_eq!(again.find("two", &key(1)), None);
        assert_eq!(again.find("one", &key(2)), None);
        let mut other = key(1);
        other.sizes = "{\"speed\":1}".to_owned();
        assert_eq!(again.find("one", &other), None);
        drop(again);
        let mut fresh = Store::open(path.clone(), false).unwrap();
        assert_eq!(fresh.find("one", &key(1)), None, "only to resume");
        fresh.keep(&line("two", 0.7)).unwrap();
        drop(fresh);
        let again = Store::open(path, true).unwrap();
        assert_eq!(
            again.find("one", &key(1)),
            Some(line("one", 0.9)),
            "not lost"
        );
    }

    #[test]
    fn what_is_doubtful_or_cut_short_is_measured_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let mut store = Store::open(path.clone(), false).unwrap();
        let doubtful = Line {
            doubtful: true,
            ..line("one", 0.9)
        };
        store.keep(&line("one", 0.8)).unwrap();
        store.keep(&doubtful).unwrap();
        store.keep(&line("two", 0.9)).unwrap();
        drop(store);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, &text[..text.len() - 9]).unwrap();
        let mut again = Store::open(path.clone(), true).unwrap();
        assert_eq!(
            again.find("one", &key(1)),
            None,
            "its last run was doubtful"
        );
        assert_eq!(again.find("two", &key(1)), None, "its line is cut");
        again.keep(&line("two", 0.7)).unwrap();
        drop(again);
        let last = Store::open(path, true).unwrap();
        assert_eq!(last.find("two", &key(1)), Some(line("two", 0.7)));
    }

    #[test]
    fn a_second_run_in_one_folder_is_refused_and_loses_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let mut store = Store::open(path.clone(), false).unwrap();
        let Err(error) = Store::<Line>::open(path.clone(), true) else {
            panic!("opened twice");
        };
        let text = error.to_string();
        assert!(
            text.starts_with("another run keeps its results in"),
            "{text}"
        );
        assert!(text.ends_with("give another --output"), "{text}");
        store.keep(&line("one", 0.9)).unwrap();
        drop(store);
        let again = Store::<Line>::open(path, true).unwrap();
        assert_eq!(again.find("one", &key(1)), Some(line("one", 0.9)));
    }

    #[test]
    fn only_the_newest_rows_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        let mut store = Store::open(path.clone(), true).unwrap();
        for name in ["one", "two", "three", "four"] {
            store.keep(&line(name, 1.0)).unwrap();
        }
        drop(store);
        let again = Store::<Line>::open(path, true).unwrap();
        assert_eq!(again.find("one", &key(1)), None);
        assert_eq!(again.find("four", &key(1)), Some(line("four", 1.0)));
    }
}
