//! A program that runs beside us, its output in a file.
//!
//! Guarantee: it ends with this value or with this process, whichever ends first, and however.
//! Not here: which program, and when it is ready.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::sleep;

use super::log;
use super::usage::Usage;

/// How often a program that is to end is looked at.
const POLL: Duration = Duration::from_millis(20);

/// Waits for its standard input to close, which is when the process that started the program has
/// ended, then ends the program: at once, and by force if that does not help.
const GUARD: &str = "read -r _; kill -TERM $1 2>/dev/null && sleep 2 && kill -KILL $1 2>/dev/null";

/// A running program.
#[derive(Debug)]
pub struct Process {
    child: Child,
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
        let file = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Self {
            guard: guard(child.id())?,
            child,
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
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn guard(pid: u32) -> Result<Child> {
    Command::new("sh")
        .args(["-c", GUARD, "guard", &pid.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot start sh, which ends a program when this process ends")
}
