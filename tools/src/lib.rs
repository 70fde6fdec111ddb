//! The prefix-router command-line tool's parts: simulated engines, load, demo, set-up, harness.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

pub mod bench;
pub mod check;
pub mod churn;
pub mod demo;
pub mod engine;
pub mod explain;
pub mod harness;
pub mod live;
pub mod load;
mod numbers;
pub mod page;
pub mod print;
mod real;
pub mod report;
mod round;
pub mod scale;
pub mod setup;
pub mod simulate;
pub mod soak;
pub mod testkit;
pub mod turnover;
pub mod workload;
