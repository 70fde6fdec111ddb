//! The proxy-wasm glue: root context, request contexts, host calls.
//!
//! Guarantee: the only modules that know the proxy. Not here: any routing rule.

mod answer;
mod hooks;
mod host;
mod http;
mod metrics;
mod polls;
mod pool;
mod root;
mod worker;

pub use root::start;
