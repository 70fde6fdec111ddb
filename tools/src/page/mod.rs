//! The live page: what fleets are doing, in a browser, while they do it.
//!
//! Guarantee: it listens where it is told to, loads nothing from anywhere else, and what it cannot
//! show in time it leaves out; no client can slow down what is shown. Not here: what runs (demo/,
//! live/); the report after the end (report/).

mod board;
mod fleet;
mod server;

pub use board::{Board, Controls, Mode};
pub use fleet::{HostState, Stage};
pub use server::{Ask, Command, Page};
