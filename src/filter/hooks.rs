//! Faults on purpose: with the feature `test-hooks`, a request can make its VM panic in a callback
//! that it names, and a pool is gone after seconds.
//!
//! Guarantee: without the feature there is nothing here. Not here: what survives a panic.

use super::host::Headers;

/// Time after which a pool is gone, once no configuration has it.
#[cfg(not(feature = "test-hooks"))]
pub use crate::leftovers::GONE_MS as POOL_GONE_MS;
/// The same in tests, whose Envoys drain listeners in no time.
#[cfg(feature = "test-hooks")]
pub const POOL_GONE_MS: u64 = 3000;

/// What a request asks its VM to do to itself.
#[derive(Default)]
pub struct Hooks {
    #[cfg(feature = "test-hooks")]
    panic_in: Option<Vec<u8>>,
}

#[cfg(feature = "test-hooks")]
impl Hooks {
    /// Reads the request's headers.
    pub fn read(&mut self, headers: &Headers) {
        self.panic_in = headers.values("x-prefix-router-panic");
    }

    /// Panics if the request asks for it here.
    #[expect(clippy::panic, reason = "this is what the hook is for")]
    pub fn at(&self, callback: &str) {
        if self.panic_in.as_deref() == Some(callback.as_bytes()) {
            panic!("asked to in {callback}");
        }
    }
}

#[cfg(not(feature = "test-hooks"))]
impl Hooks {
    /// Does nothing.
    pub fn read(&mut self, _headers: &Headers) {}

    /// Does nothing.
    pub fn at(&self, _callback: &str) {}
}
