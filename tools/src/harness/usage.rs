//! What a process has used so far: processor time and memory, from `/proc`.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

/// A reading of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Time its present threads have run.
    pub cpu: Duration,
    /// Memory in RAM, in bytes.
    pub resident_bytes: u64,
}

impl Usage {
    /// Reads a process.
    ///
    /// Processor time is the sum over the threads' `schedstat`, in nanoseconds; the ticks of
    /// `/proc/<pid>/stat` are 10 ms, as long as hundreds of requests.
    pub fn of(pid: u32) -> Result<Self> {
        let mut nanos = 0_u64;
        let tasks = format!("/proc/{pid}/task");
        let threads = fs::read_dir(&tasks).with_context(|| format!("no process {pid}"))?;
        for thread in threads {
            // A thread may end between the listing and the reading.
            let Ok(text) = fs::read_to_string(thread?.path().join("schedstat")) else {
                continue;
            };
            let ran = text
                .split(' ')
                .next()
                .and_then(|nanos| nanos.parse::<u64>().ok());
            nanos = nanos.saturating_add(ran.context("schedstat has no time")?);
        }
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let kilobytes = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .and_then(|rest| rest.split_whitespace().next())
            .and_then(|number| number.parse::<u64>().ok())
            .ok_or_else(|| anyhow!("process {pid} has no VmRSS"))?;
        Ok(Self {
            cpu: Duration::from_nanos(nanos),
            resident_bytes: kilobytes.saturating_mul(1024),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_shows_as_processor_time() {
        let before = Usage::of(std::process::id()).unwrap();
        let mut sum = 0_u64;
        let started = std::time::Instant::now();
        while started.elapsed() < Duration::from_millis(50) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        let after = Usage::of(std::process::id()).unwrap();
        let ran = after.cpu.saturating_sub(before.cpu);
        assert!(ran > Duration::from_millis(1), "{ran:?}");
        assert!(after.resident_bytes > 100_000, "{after:?}");
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        assert!(Usage::of(u32::MAX).is_err());
    }
}
