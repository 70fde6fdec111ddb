//! Runs real Envoys from the project's own config files, for tests, demo and measurements.
//!
//! [`Plan`] loads one of the files in `envoy/` and replaces what differs from machine to machine
//! (ports, engines, socket, wasm path); [`Envoy`] is the running process with its admin, counters
//! and log. Many may run side by side.
//! Guarantee: an Envoy never outlives the process that started it, however that one ends.
//! Not here: where Envoy and the filter come from (setup); engines and clients (testkit, engine).

mod admin;
mod envoy;
mod files;
mod log;
mod plan;
mod process;
mod remote;
mod usage;

pub use admin::{Sample, decisions, parse_prometheus};
pub use envoy::Envoy;
pub use plan::{Plan, Policy, set_filter_config};
pub use process::Process;
pub use remote::Files;
pub use usage::Usage;
