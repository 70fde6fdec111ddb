//! One answer on its way to the client: a sample of them is read for the engine's own counts.
//!
//! Guarantee: bytes are looked at where they pass, never held, copied in windows of bounded size.
//! Not here: what counts look like (usage.rs), what is learned from them (pool.rs).

use super::host::{self, Headers};
use super::pool::Pool;
use super::worker::Worker;
use crate::pool::Placed;
use crate::request::WINDOW_BYTES;
use crate::usage::{Reader, Usage};

/// One answer.
#[derive(Default)]
pub struct Answer {
    /// Not there if the answer is not in the sample.
    reader: Option<Box<Reader>>,
}

impl Answer {
    /// The headers of an answer to a placed request are there: chooses whether its body is read.
    pub fn begin(
        &mut self,
        worker: &Worker,
        pool: &Pool,
        placed: &Placed,
        api: &'static str,
        headers: &Headers,
    ) {
        let is_answer = headers.value(":status") == Some(b"200");
        if !is_answer || !worker.samples() {
            return;
        }
        let encoding = headers.value("content-encoding").unwrap_or_default();
        if encoding.is_empty() || encoding.eq_ignore_ascii_case(b"identity") {
            self.reader = Some(Box::default());
        } else {
            // Decoding would cost more than it teaches: such an answer says nothing to us.
            pool.learn(placed, api, Usage::default());
        }
    }

    /// The next `size` bytes of the body pass: the response's body callback.
    pub fn pass(&mut self, size: u64) {
        let Some(reader) = &mut self.reader else {
            return;
        };
        let mut start = 0;
        // Ends: each turn takes a whole window or the rest.
        while start < size {
            let len = (size - start).min(WINDOW_BYTES);
            reader.feed(&host::response_body(start, len));
            start += len;
        }
    }

    /// The answer is over. One that was cut off counts only if it said something: its end, where
    /// most engines put their counts, was never seen.
    pub fn end(&mut self, pool: &Pool, placed: &Placed, api: &'static str, complete: bool) {
        let Some(reader) = self.reader.take() else {
            return;
        };
        let usage = reader.finish();
        if complete || usage.prompt_tokens.is_some() {
            pool.learn(placed, api, usage);
        }
    }
}
