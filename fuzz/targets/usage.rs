//! Fuzzes `prefix_router_fuzz::usage`; see there for what must hold.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| prefix_router_fuzz::usage(bytes));
