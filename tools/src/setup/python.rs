//! Python environments below `target/setup`, each with the packages that one purpose needs.
//!
//! Guarantee: an environment that is returned holds what was asked for, and is made once for any
//! number of processes. The system's own Python packages are neither used nor changed. Works where
//! Python has no `ensurepip` (Debian without python3-venv), as long as it has a pip.
//! Not here: what is installed, and running it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::command::{answer, run};
use super::envoy::on_path;
use super::steps::Steps;
use super::{Place, lock};

/// Making an empty environment takes a tenth of a second, and three with a pip in it.
const VENV_LIMIT: Duration = Duration::from_secs(120);

/// The first pip that installs into the environment of another Python (`--python`).
const PIP_FOR_OTHERS: (u32, u32) = (22, 3);

/// How often pip's log is looked at for the file it fetches.
const LOOK: Duration = Duration::from_millis(500);

/// Files from this size on are told while they are fetched.
const TOLD_MB: f64 = 10.0;

/// What an environment is for and what it holds.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The name of its folder: letters, digits and `-`.
    pub name: &'a str,
    /// What is fetched, with its size, e.g. `xllamacpp (34 MB)`: told before.
    pub what: &'a str,
    /// The calls of `pip install` in their order, each with packages, pinned, and pip's options.
    pub installs: &'a [&'a [&'a str]],
    /// After this all of a call's time is up.
    pub limit: Duration,
}

/// An environment that is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    dir: PathBuf,
}

impl Environment {
    /// Its Python.
    #[must_use]
    pub fn python(&self) -> PathBuf {
        self.program("python")
    }

    /// A program that one of its packages has installed.
    #[must_use]
    pub fn program(&self, name: &str) -> PathBuf {
        self.dir.join("bin").join(name)
    }

    /// Runs its Python with these arguments to its end, announced as `what`.
    ///
    /// # Errors
    /// If it fails or takes longer than `limit`; the error has the last of what it said.
    pub fn run(&self, what: &str, arguments: &[&Path], limit: Duration) -> Result<()> {
        let log = self.dir.join("run.log");
        let mut command = Command::new(self.python());
        command.args(arguments);
        Steps::working_only().work(what, || run(&mut command, &log, limit))
    }
}

/// The environment, found as it was made before or made now; prints to stderr only what takes time.
///
/// # Errors
/// If there is no Python with a pip, or pip cannot get a package; the error has pip's own words.
pub fn environment(wanted: &Wanted<'_>) -> Result<Environment> {
    let place = Place::of_this_checkout()?;
    let steps = Steps::working_only();
    let title = format!("Python-{}", wanted.name);
    let _alone = lock(&place, &steps, &title)?;
    make(&place, &steps, wanted)
        .with_context(|| format!("cannot make a Python environment with {}", wanted.what))
}

/// Whether the environment is there, so that nothing has to be fetched.
///
/// # Errors
/// If there is no folder for it.
pub fn exists(wanted: &Wanted<'_>) -> Result<bool> {
    let place = Place::of_this_checkout()?;
    Ok(Environment::of(&place, wanted).holds(&wanted.mark()))
}

impl Wanted<'_> {
    /// What an environment says that holds this.
    fn mark(&self) -> String {
        let lines = self.installs.iter();
        lines.map(|packages| packages.join(" ") + "\n").collect()
    }
}

impl Environment {
    fn of(place: &Place, wanted: &Wanted<'_>) -> Self {
        Self {
            dir: place.path(&format!("python-{}", wanted.name)),
        }
    }

    fn mark(&self) -> PathBuf {
        self.dir.join("installed")
    }

    /// Whether it was made to its end, and runs: the Python it was made from may have gone since.
    fn holds(&self, mark: &str) -> bool {
        let whole = fs::read_to_string(self.mark()).is_ok_and(|found| found == mark);
        whole && answer(Command::new(self.python()).arg("--version")).is_some()
    }
}

fn make(place: &Place, steps: &Steps, wanted: &Wanted<'_>) -> Result<Environment> {
    let environment = Environment::of(place, wanted);
    let mark = wanted.mark();
    if environment.holds(&mark) {
        return Ok(environment);
    }
    steps.work(&format!("fetching {}", wanted.what), || {
        let python = python_with_pip(place)?;
        let pip = empty(place, &python, &environment)?;
        for packages in wanted.installs {
            install(place, steps, &pip, packages, wanted)?;
        }
        // Written last, so that an environment is either whole or made again.
        Ok::<_, anyhow::Error>(fs::write(environment.mark(), &mark)?)
    })?;
    Ok(environment)
}

/// Makes the environment empty; returns the pip that installs into it, with its arguments.
fn empty(place: &Place, python: &Path, environment: &Environment) -> Result<Vec<PathBuf>> {
    let pip = |python: &Path, more: &[&Path]| {
        let words = [python, Path::new("-m"), Path::new("pip")];
        words.iter().chain(more).map(|word| word.into()).collect()
    };
    let venv = |more: &[&str]| {
        let mut venv = Command::new(python);
        venv.args(["-m", "venv", "--clear"]).args(more);
        let log = place.path("venv.log");
        run(venv.arg(&environment.dir), &log, VENV_LIMIT)
    };
    let own = environment.python();
    let printed = answer(Command::new(python).args(["-m", "pip", "--version"]));
    if printed.as_deref().and_then(pip_version) >= Some(PIP_FOR_OTHERS) {
        venv(&["--without-pip"])
            .context("Python's venv does not work (on Debian: `apt-get install python3-venv`)")?;
        return Ok(pip(python, &[Path::new("--python"), &own]));
    }
    venv(&[]).context("this pip is old, and a venv with its own pip cannot be made")?;
    Ok(pip(&own, &[]))
}

fn install(
    place: &Place,
    steps: &Steps,
    pip: &[PathBuf],
    packages: &[&str],
    wanted: &Wanted<'_>,
) -> Result<()> {
    let Some((python, arguments)) = pip.split_first() else {
        bail!("no pip");
    };
    let mut command = Command::new(python);
    command.args(arguments).args([
        "install",
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar",
        "off",
    ]);
    command.args(packages);
    let log = place.path(&format!("pip-{}.log", wanted.name));
    thread::scope(|scope| {
        let (running, ended) = mpsc::channel::<()>();
        let log = &log;
        scope.spawn(move || tell_downloads(log, steps, &ended));
        let result = run(&mut command, log, wanted.limit);
        drop(running);
        result
    })
}

/// Says which large file is being fetched, until the other end of the channel is gone.
fn tell_downloads(log: &Path, steps: &Steps, ended: &mpsc::Receiver<()>) {
    let mut told = 0;
    while ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        let text = fs::read_to_string(log).unwrap_or_default();
        let downloads = text.lines().filter_map(download);
        let new: Vec<String> = downloads.skip(told).collect();
        told += new.len();
        new.iter().for_each(|file| steps.say(file));
    }
}

/// A large file that pip begins to fetch: `  Downloading torch-2.13.0-….whl (530.7 MB)`.
fn download(line: &str) -> Option<String> {
    let (file, size) = line
        .trim()
        .strip_prefix("Downloading ")?
        .rsplit_once(" (")?;
    let megabytes: f64 = size.strip_suffix(" MB)")?.parse().ok()?;
    let name: Vec<&str> = file.rsplit('/').next()?.split('-').take(2).collect();
    (megabytes >= TOLD_MB).then(|| format!("  {} ({megabytes:.0} MB)", name.join(" ")))
}

/// The version in `pip 23.0.1 from /usr/lib/…`.
fn pip_version(printed: &str) -> Option<(u32, u32)> {
    let version = printed.strip_prefix("pip ")?.split(' ').next()?;
    let mut numbers = version.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// A Python whose pip works: one that is installed, else one made in `target/`.
pub(super) fn python_with_pip(place: &Place) -> Result<PathBuf> {
    let pythons: Vec<PathBuf> = ["python3", "python"]
        .iter()
        .filter_map(|p| on_path(p))
        .collect();
    let system = Path::new("/usr/bin/python3");
    let pythons = pythons
        .iter()
        .map(PathBuf::as_path)
        .chain(system.is_file().then_some(system));
    let pythons: Vec<&Path> = pythons.collect();
    for python in &pythons {
        if has_pip(python) {
            return Ok(python.to_path_buf());
        }
    }
    let venv = place.path("venv");
    let venv_python = venv.join("bin/python");
    for python in &pythons {
        let made = run(
            Command::new(python)
                .args(["-m", "venv", "--clear"])
                .arg(&venv),
            &place.path("venv.log"),
            VENV_LIMIT,
        );
        if made.is_ok() && has_pip(&venv_python) {
            return Ok(venv_python);
        }
    }
    if pythons.is_empty() {
        bail!("there is no python3 on the PATH; install Python 3 with pip");
    }
    bail!(
        "{} has neither pip nor a venv with pip; install them (on Debian: `apt-get install python3-pip`)",
        pythons
            .first()
            .map(|python| python.display().to_string())
            .unwrap_or_default()
    )
}

fn has_pip(python: &Path) -> bool {
    answer(Command::new(python).args(["-m", "pip", "--version"])).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without packages, so that nothing is fetched.
    #[test]
    fn an_environment_is_made_once_and_again_when_it_should_hold_something_else() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place {
            root: folder.path().into(),
            dir: folder.path().into(),
        };
        let steps = Steps::working_only();
        let wanted = |installs| Wanted {
            name: "test",
            what: "nothing",
            installs,
            limit: Duration::from_secs(60),
        };
        let found = make(&place, &steps, &wanted(&[])).unwrap();
        let prefix =
            answer(Command::new(found.python()).args(["-c", "import sys; print(sys.prefix)"]));
        let dir = fs::canonicalize(&found.dir).unwrap();
        assert_eq!(prefix.map(PathBuf::from), Some(dir));
        let made = |found: &Environment| {
            let meta = fs::metadata(found.dir.join("installed")).unwrap();
            meta.modified().unwrap()
        };
        let first = made(&found);
        assert_eq!(make(&place, &steps, &wanted(&[])).unwrap(), found);
        assert_eq!(made(&found), first);
        // A program that is gone is made again; a package that cannot be had is pip's to tell.
        fs::remove_file(found.python()).unwrap();
        make(&place, &steps, &wanted(&[])).unwrap();
        assert!(made(&found) > first);
        let none: &[&[&str]] = &[&["--no-index", "prefix-router-no-such-package==1"]];
        let error = format!("{:#}", make(&place, &steps, &wanted(none)).unwrap_err());
        assert!(error.contains("prefix-router-no-such-package"), "{error}");
        assert!(!found.dir.join("installed").exists());
    }

    #[test]
    fn large_files_are_told_by_their_package() {
        let large = "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (530.7 MB)";
        assert_eq!(download(large).as_deref(), Some("  torch 2.13.0 (531 MB)"));
        let by_url = "Downloading file:///a/b/xllamacpp-2026.10.1-abi3.whl (33.8 MB)";
        assert_eq!(
            download(by_url).as_deref(),
            Some("  xllamacpp 2026.10.1 (34 MB)")
        );
        for small in [
            "  Downloading numpy-2.4.6-cp311.whl (9.9 MB)",
            "  Downloading anyio-4.16.0-py3-none-any.whl (134 kB)",
            "Collecting torch==2.13.0",
            "",
        ] {
            assert_eq!(download(small), None, "{small}");
        }
    }

    #[test]
    fn pip_tells_its_version_first() {
        assert_eq!(
            pip_version("pip 23.0.1 from /usr/lib (python 3.11)"),
            Some((23, 0))
        );
        assert_eq!(
            pip_version("pip 22.3 from /usr/lib (python 3.11)"),
            Some((22, 3))
        );
        assert!(pip_version("pip 20.3.4 from x") < Some(PIP_FOR_OTHERS));
        assert_eq!(pip_version("No module named pip"), None);
    }
}
