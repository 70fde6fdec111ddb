//! Faults on purpose: with the feature `test-hooks`, a request can make its VM panic in a callback
//! that it names, or tell in the log how many calls to the proxy it took, and a pool is gone after
//! seconds.
//!
//! Guarantee: without the feature there is nothing here. Not here: what survives a panic.

#[cfg(feature = "test-hooks")]
use std::cell::RefCell;
#[cfg(feature = "test-hooks")]
use std::collections::BTreeMap;

use super::host::Headers;

#[cfg(feature = "test-hooks")]
thread_local! {
    /// Calls of this VM to the proxy since a request asked for them, by kind.
    static CALLS: RefCell<BTreeMap<&'static str, u32>> = RefCell::default();
}

/// A call to the proxy is made.
#[cfg(feature = "test-hooks")]
pub fn count(call: &'static str) {
    CALLS.with_borrow_mut(|calls| *calls.entry(call).or_default() += 1);
}

/// Does nothing.
#[cfg(not(feature = "test-hooks"))]
pub fn count(_call: &'static str) {}

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
    #[cfg(feature = "test-hooks")]
    tells_calls: bool,
}

#[cfg(feature = "test-hooks")]
impl Hooks {
    /// Reads the request's headers.
    pub fn read(&mut self, headers: &Headers) {
        self.panic_in = headers.values("x-prefix-router-panic");
        self.tells_calls = headers.value("x-prefix-router-calls").is_some();
        if self.tells_calls {
            CALLS.take();
            count("request headers");
        }
    }

    /// The request has ended: tells how many calls there were since its headers came, which are
    /// the request's own if the VM has had nothing else to do.
    pub fn ended(&self) {
        if self.tells_calls {
            let calls = CALLS.take().into_iter();
            let calls: Vec<String> = calls.map(|(call, n)| format!("{n} {call}")).collect();
            log::info!("calls to the proxy: {}.", calls.join(", "));
        }
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

    /// Does nothing.
    pub fn ended(&self) {}
}
