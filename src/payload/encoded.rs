//! One body's reader: what decodes it, if need be, in front of what reads it.
//!
//! Guarantee: a body that is encoded gives the prompt of what is in it; one that cannot be decoded
//! gives its own bytes as they came; one that is cut gives what came out before the cut.
//! Not here: the formats and their limits (decode.rs), the content (reader.rs).

use super::decode::{DETECT_BYTES, DecodeError, Decoder, Encoding, Limits};
use super::parts::Witness;
use super::plan::Plan;
use super::reader::Plain;
use super::{End, Head, ReadOptions};
use crate::prefix::{Chain, Prompt, Sink};

/// Reads one body into its prompt.
pub type Reader = Reading<Chain>;

/// Names of codings longer than this are no single one that we know.
const CONTENT_ENCODING_BYTES_MAX: usize = 64;

/// Reads one body, part by part into a sink.
pub struct Reading<S> {
    content_encoding: Vec<u8>,
    /// The body's first bytes, until there are enough to tell how it is encoded.
    first: Option<Vec<u8>>,
    encoded: Option<Encoded<S>>,
    /// In a box: it is large, and readers are handed around while their bodies come.
    plain: Box<Plain<S>>,
}

/// What an encoded body needs.
struct Encoded<S> {
    decoder: Decoder,
    /// Its bytes as they come.
    bytes: S,
}

impl<S: Sink> Reading<S> {
    /// A reader for the body that follows `head`.
    #[must_use]
    pub fn new(head: &Head<'_>, options: &ReadOptions) -> Self {
        Self::with(head, &Plan::new(options))
    }

    /// The same, with options that were made ready before.
    #[must_use]
    pub fn with(head: &Head<'_>, plan: &Plan) -> Self {
        let coding = head.content_encoding.iter();
        Self {
            content_encoding: coding.copied().take(CONTENT_ENCODING_BYTES_MAX).collect(),
            first: Some(Vec::new()),
            encoded: None,
            plain: Box::new(Plain::with(head, plan)),
        }
    }

    /// Whether the body is known to be encoded. Decoders take memory: whoever reads many bodies at
    /// a time should wait for the end of such a one and feed it in one go.
    #[must_use]
    pub fn is_encoded(&self) -> bool {
        self.encoded.is_some()
    }

    /// The next bytes, in any cut.
    pub fn feed(&mut self, window: &[u8]) {
        let Some(first) = &mut self.first else {
            return self.read(window);
        };
        let missing = DETECT_BYTES.saturating_sub(first.len());
        let (head, rest) = window.split_at(missing.min(window.len()));
        first.extend_from_slice(head);
        if first.len() >= DETECT_BYTES {
            self.detect();
            self.read(rest);
        }
    }

    /// The prompt.
    #[must_use]
    pub fn finish(self, end: End) -> Prompt {
        self.finish_seen(end, &mut ())
    }

    /// The same, while somebody looks at what it is made of.
    pub fn finish_seen(mut self, end: End, witness: &mut impl Witness<S>) -> Prompt {
        self.detect();
        let Some(Encoded { decoder, bytes }) = self.encoded else {
            return self.plain.finish(end, witness);
        };
        match decoder.finish(&mut |piece| self.plain.feed(piece)) {
            Ok(()) => self.plain.finish(end, witness),
            Err(error) if error.is_cut() && self.plain.claimed() => {
                self.plain.finish(End::Cut, witness)
            }
            Err(_) => self.plain.undecoded(bytes, witness),
        }
    }

    /// Decides how the body is encoded, once.
    fn detect(&mut self) {
        let Some(first) = self.first.take() else {
            return;
        };
        if let Some(encoding) = Encoding::detect(&self.content_encoding, &first) {
            self.encoded = Some(Encoded {
                decoder: Decoder::new(encoding, Limits::default()),
                bytes: self.plain.sibling(),
            });
        }
        self.read(&first);
    }

    fn read(&mut self, window: &[u8]) {
        let Some(Encoded { decoder, bytes }) = &mut self.encoded else {
            return self.plain.feed(window);
        };
        bytes.text(window);
        // The decoder keeps its error: it is dealt with at the end.
        let _: Result<(), DecodeError> = decoder.feed(window, &mut |piece| self.plain.feed(piece));
    }
}
