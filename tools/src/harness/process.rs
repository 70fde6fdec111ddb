//! A program that runs beside us, its output in a file.
//!
//! Guarantee: it ends with this value or with this process, whichever ends first, and however.
//! Not here: which program, and when it is ready.

use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::time::sleep;

use super::log;
use super::usage::Usage;

/// How often a program that is to end is looked at.
const POLL: Duration = Duration::from_millis(20);

/// Waits for its standard input to close, which is when the process that started the program has
/// ended, then ends the program: at once, and by force if that does not help.
const GUARD: &str = "read -r _; kill -TERM $1 2>/dev/null && sleep 2 && kill -KILL $1 2>/dev/null";

/// The same for a program that starts others: they get the force, too, even if it has ended.
const GUARD_FAMILY: &str =
    "read -r _; kill -TERM $1 2>/dev/null; sleep 2; kill -s KILL -- -$1 2>/dev/null";

/// A running program.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// Whether it leads a process group of its own.
    family: bool,
    pub(super) guard: Child,
    log: PathBuf,
}

impl Process {
    /// Starts it; both its outputs go to `log`, a file of its own, so that nothing else's output
    /// lands in it.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(command: &mut Command, log: &Path) -> Result<Self> {
        Self::spawn(command, log, false)
    }

    /// The same for a program that starts others, which end with it: in a process group of their
    /// own.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_family(command: &mut Command, log: &Path) -> Result<Self> {
        Self::spawn(command.process_group(0), log, true)
    }

    fn spawn(command: &mut Command, log: &Path, family: bool) -> Result<Self> {
        let file = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Self {
            guard: guard(child.id(), family)?,
            child,
            family,
            log: log.to_path_buf(),
        })
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Processor time and memory so far.
    ///
    /// # Errors
    /// If it has ended.
    pub fn usage(&self) -> Result<Usage> {
        Usage::of(self.child.id())
    }

    /// How it ended; `None` while it runs.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// What it has said so far.
    #[must_use]
    pub fn log(&self) -> String {
        log::read(&self.log)
    }

    /// Asks it to end, and does not wait.
    ///
    /// # Errors
    /// If it cannot be asked.
    pub fn terminate(&self) -> Result<()> {
        if let Some(pid) = Pid::from_raw(self.child.id().try_into()?) {
            kill_process(pid, Signal::TERM)?;
        }
        Ok(())
    }

    /// Asks it to end and waits; `None` if it does not within `limit`.
    ///
    /// # Errors
    /// If it cannot be asked.
    pub async fn stop(&mut self, limit: Duration) -> Result<Option<ExitStatus>> {
        self.terminate()?;
        self.wait(limit).await
    }

    /// Waits for one that was asked to end; `None` if it does not within `limit`. It is not asked
    /// again: some take a second time for impatience, and do not clean up.
    ///
    /// # Errors
    /// If the system does not say how it ended.
    pub async fn wait(&mut self, limit: Duration) -> Result<Option<ExitStatus>> {
        let started = Instant::now();
        while started.elapsed() < limit {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            sleep(POLL).await;
        }
        Ok(None)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The guard first: it would otherwise end whoever gets this process id next.
        let _ = self.guard.kill();
        let _ = self.guard.wait();
        // Only before it was waited for: later its number may be another's.
        if self.family
            && let Ok(None) = self.child.try_wait()
            && let Some(pid) = self.child.id().try_into().ok().and_then(Pid::from_raw)
        {
            let _ = kill_process_group(pid, Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn guard(pid: u32, family: bool) -> Result<Child> {
    let mut guard = Command::new("sh");
    if family {
        // Ctrl-C in a terminal, which does not reach the family, must not end its guard.
        guard.process_group(0);
    }
    let script = if family { GUARD_FAMILY } else { GUARD };
    guard
        .args(["-c", script, "guard", &pid.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot start sh, which ends a program when this process ends")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Starts a shell that starts another program, and tells that one's process id.
    async fn family(folder: &Path) -> (Process, u32) {
        let told = folder.join("pid");
        let script = "sleep 300 & echo $! > \"$0.new\" && mv \"$0.new\" \"$0\"; wait";
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(&told);
        let process = Process::start_family(&mut command, &folder.join("log")).unwrap();
        let began = Instant::now();
        while !told.exists() {
            assert!(began.elapsed() < Duration::from_secs(20), "nothing started");
            sleep(POLL).await;
        }
        let pid = std::fs::read_to_string(told).unwrap();
        (process, pid.trim().parse().unwrap())
    }

    /// Waits until a process is gone; one that nobody has waited for yet counts as gone.
    async fn gone(pid: u32) {
        let began = Instant::now();
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let state = stat
                .rsplit(") ")
                .next()
                .and_then(|rest| rest.chars().next());
            if state.is_none_or(|state| state == 'Z') {
                return;
            }
            assert!(
                began.elapsed() < Duration::from_secs(20),
                "{pid} is still there"
            );
            sleep(POLL).await;
        }
    }

    #[tokio::test]
    async fn what_a_program_has_started_ends_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let (process, other) = family(folder.path()).await;
        drop(process);
        gone(other).await;
    }

    #[tokio::test]
    async fn what_a_program_has_started_ends_when_the_process_that_started_it_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let (mut process, other) = family(folder.path()).await;
        // As the system does when a process ends in whatever way.
        drop(process.guard.stdin.take());
        gone(other).await;
    }
}
