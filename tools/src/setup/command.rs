//! Runs other programs for set-up: bounded in time, their output kept in a file.
//!
//! Guarantee: a program that hangs is ended after its time; a failure shows the last lines of what
//! the program said. Not here: which programs (envoy.rs, toolchain.rs, filter.rs).

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How often a running program is looked at.
const POLL: Duration = Duration::from_millis(20);

/// How much of a failed program's output an error shows: enough for a compiler's last error.
const TAIL_LINES: usize = 20;

/// Asking a program for its version or a path answers at once; more means it hangs.
const QUESTION_SECONDS: u64 = 60;

/// Runs a program to its end, its output going to `log`; an error carries the output's end.
pub(super) fn run(command: &mut Command, log: &Path, limit: Duration) -> Result<()> {
    let status = run_for_status(command, log, limit)?;
    if status.success() {
        return Ok(());
    }
    bail!(
        "`{}` failed ({status}); its last lines:\n{}",
        shown(command),
        tail(log)
    )
}

/// Runs a program and returns what it printed on stdout; `None` when it is missing or failed.
pub(super) fn answer(command: &mut Command) -> Option<String> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut stdout = child.stdout.take()?;
    // Read beside the wait: a program with more to say than a pipe holds waits for its reader.
    let reader = thread::spawn(move || {
        let mut bytes = Vec::new();
        stdout.read_to_end(&mut bytes).map(|_| bytes)
    });
    let status = wait(&mut child, Duration::from_secs(QUESTION_SECONDS)).ok()?;
    if status.is_none() {
        child.kill().ok()?;
        child.wait().ok()?;
    }
    let bytes = reader.join().ok()?.ok()?;
    status?
        .success()
        .then(|| String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// Runs a program, both its outputs going to `log`.
pub(super) fn run_for_status(
    command: &mut Command,
    log: &Path,
    limit: Duration,
) -> Result<ExitStatus> {
    let file = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .spawn()
        .with_context(|| format!("cannot start `{}`", shown(command)))?;
    if let Some(status) = wait(&mut child, limit)? {
        return Ok(status);
    }
    child.kill()?;
    child.wait()?;
    bail!(
        "`{}` was stopped after {} s; its last lines:\n{}",
        shown(command),
        limit.as_secs(),
        tail(log)
    )
}

/// The last lines of a log.
pub(super) fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(TAIL_LINES);
    lines.get(from..).unwrap_or_default().join("\n")
}

fn wait(child: &mut std::process::Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(POLL);
    }
    Ok(None)
}

/// The command as one would type it.
fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("prefix-router-{}-{name}", std::process::id()))
    }

    #[test]
    fn a_failure_shows_the_last_lines() {
        let log = log("fails");
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "for i in $(seq 1 30); do echo line $i; done; echo why >&2; exit 3",
        ]);
        let error = run(&mut command, &log, Duration::from_secs(10))
            .unwrap_err()
            .to_string();
        assert!(error.contains("exit status: 3"), "{error}");
        assert!(error.ends_with("line 30\nwhy"), "{error}");
        assert!(!error.contains("line 11\n"), "{error}");
        fs::remove_file(log).unwrap();
    }

    #[test]
    fn a_program_that_hangs_is_stopped() {
        let log = log("hangs");
        let started = Instant::now();
        let mut command = Command::new("sleep");
        command.arg("60");
        let error = run(&mut command, &log, Duration::from_millis(100))
            .unwrap_err()
            .to_string();
        assert!(error.contains("`sleep 60` was stopped"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(10));
        fs::remove_file(log).unwrap();
    }

    #[test]
    fn a_missing_program_has_no_answer() {
        assert_eq!(
            answer(&mut Command::new("prefix-router-no-such-program")),
            None
        );
        assert_eq!(answer(&mut Command::new("false")), None);
        assert_eq!(
            answer(Command::new("echo").arg("yes")),
            Some("yes".to_owned())
        );
    }
}
