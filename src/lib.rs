//! prefix-router: an Envoy proxy-wasm HTTP filter that sends requests with the same prompt prefix
//! to the same LLM engine, so that its KV cache is used again.
//!
//! Guarantee: every module but `filter` is pure: no clock, no randomness, no host types; time,
//! randomness and storage come in as arguments. Not here: any logic (see the modules).

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

pub mod config;
pub mod cost;
pub mod discovery;
pub mod elsewhere;
pub mod excess;
#[cfg(feature = "filter")]
pub mod filter;
pub mod fleet;
pub mod hold;
pub mod hosts;
pub mod index;
pub mod json;
pub mod learned;
pub mod lease;
pub mod leftovers;
pub mod load;
pub mod names;
pub mod payload;
pub mod placement;
pub mod pool;
pub mod popularity;
pub mod prefill;
pub mod prefix;
pub mod request;
pub mod route;
pub mod select;
pub mod series;
pub mod shares;
pub mod stall;
pub mod store;
pub mod turns;
pub mod usage;
pub mod watchdog;

// Only where the proxy loads it: natively the unit tests, which also link the crate's own library
// through the tools, would define its symbols twice.
#[cfg(all(feature = "filter", target_arch = "wasm32"))]
mod entry {
    proxy_wasm::main! {{ crate::filter::start(); }}
}
