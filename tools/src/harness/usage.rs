//! What a process has used so far: processor time and memory, from `/proc`.
//!
//! Guarantee: a time that was read later is not smaller, unless threads have ended and `cpu` is
//! read. Not here: when it is read, and what for.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

/// A reading of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Time its present threads have run, in nanoseconds.
    pub cpu: Duration,
    /// Time all its threads have run, those that have ended too; in ticks of 10 ms.
    pub cpu_ever: Duration,
    /// Memory in RAM, in bytes.
    pub resident_bytes: u64,
}

impl Usage {
    /// Reads a process.
    ///
    /// `cpu` is the sum over the threads' `schedstat`; the ticks of `/proc/<pid>/stat` are as long as
    /// hundreds of requests. Who starts and ends threads all the time needs these all the same.
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
            cpu_ever: ever(&fs::read_to_string(format!("/proc/{pid}/stat"))?)
                .with_context(|| format!("/proc/{pid}/stat has no times"))?,
            resident_bytes: kilobytes.saturating_mul(1024),
        })
    }
}

/// User and system time of a line of `/proc/<pid>/stat`.
fn ever(stat: &str) -> Option<Duration> {
    // The program's name, in brackets, may have spaces; the state is the third field.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    let ticks = user.saturating_add(system) as f64;
    Some(Duration::from_secs_f64(
        ticks / rustix::param::clock_ticks_per_second() as f64,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_are_the_fourteenth_and_fifteenth_field() {
        let stat = "7 (a b) c) S 4 5 6 7 8 9 10 11 12 13 200 50 16 17 18 19 20 21 22 23";
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        assert_eq!(ever(stat), Some(Duration::from_secs_f64(250.0 / ticks)));
        assert_eq!(ever("7 (a b) S 4"), None);
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
