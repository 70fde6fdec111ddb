//! What a process has used so far: processor time and memory.
//!
//! Guarantee: a time that was read later is not smaller; what ended threads ran is in it. Not here:
//! when it is read, and what for.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;

/// A reading of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Time that its threads have run.
    pub cpu: Duration,
    /// Memory in RAM, in bytes.
    pub resident_bytes: u64,
}

impl Usage {
    /// Reads a process.
    ///
    /// Processor time is the process's own clock, in nanoseconds: the ticks of `/proc/<pid>/stat`
    /// are 10 ms, as long as hundreds of requests, and the times of its tasks lack those that have
    /// ended.
    pub fn of(pid: u32) -> Result<Self> {
        let id = Pid::from_raw(i32::try_from(pid).with_context(|| format!("no process {pid}"))?);
        let clock = clock_getcpuclockid(id).with_context(|| format!("no process {pid}"))?;
        let cpu = clock.now().with_context(|| format!("no process {pid}"))?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let kilobytes = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .and_then(|rest| rest.split_whitespace().next())
            .and_then(|number| number.parse::<u64>().ok())
            .ok_or_else(|| anyhow!("process {pid} has no VmRSS"))?;
        Ok(Self {
            cpu: cpu.into(),
            resident_bytes: kilobytes.saturating_mul(1024),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_ended_thread_ran_stays_counted() {
        let before = Usage::of(std::process::id()).unwrap().cpu;
        let thread = std::thread::spawn(|| {
            let started = std::time::Instant::now();
            let mut sum = 0_u64;
            while started.elapsed() < Duration::from_millis(50) {
                sum = std::hint::black_box(sum.wrapping_add(1));
            }
        });
        thread.join().unwrap();
        let ran = Usage::of(std::process::id()).unwrap().cpu - before;
        assert!(ran > Duration::from_millis(1), "{ran:?}");
    }

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
