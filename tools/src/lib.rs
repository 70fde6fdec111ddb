//! The prefix-router command-line tool's parts: simulated engines, load, demo, set-up, harness.

pub mod testkit;
pub mod workload;
