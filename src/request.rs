//! One request, from its headers to its end, as a state machine without input or output.
//!
//! Guarantee: a request is booked once and released once, whatever callbacks come in whatever
//! order, and a callback that is missing or comes twice does no harm. Not here: host calls
//! (filter/), the choice of the host (route.rs), reading of the body (payload/).

use crate::load::{Booking, Change, Changes, Ledger, Loads, NO_CHANGES, Seat};
use crate::payload::decode::DETECT_BYTES;
use crate::payload::{End, Reader};
use crate::prefix::Prompt;
use crate::route::{Abstain, Placement};
use crate::store::Store;

/// Bytes read from the proxy at a time: what the VM's memory is bound by.
pub const WINDOW_BYTES: u64 = 64 * 1024;

/// What the request's headers say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Facts<'a> {
    /// `:method`.
    pub method: &'a [u8],
    /// `content-type`.
    pub content_type: &'a [u8],
    /// Whether `upgrade` is present.
    pub upgrade: bool,
    /// Whether the headers end the request.
    pub end_of_stream: bool,
}

impl Facts<'_> {
    /// Whether the request may carry a prompt. All others pass untouched: holding a request
    /// whose body never ends would hang it (ENVOY.md 4).
    #[must_use]
    pub fn may_carry_a_prompt(&self) -> bool {
        let prompt_method = matches!(self.method, b"POST" | b"PUT" | b"PATCH");
        let content_type = self.content_type.trim_ascii_start().to_ascii_lowercase();
        let streamed = [
            &b"application/grpc"[..],
            b"application/connect+",
            b"multipart/",
        ];
        let streamed = streamed.iter().any(|kind| content_type.starts_with(kind));
        prompt_method && !self.upgrade && !self.end_of_stream && !streamed
    }
}

/// What to do about a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing yet: keep the request held.
    Wait,
    /// Read these bytes of the body and feed them.
    Read {
        /// Where they start.
        start: u64,
        /// How many there are, at most [`WINDOW_BYTES`].
        len: u64,
    },
    /// The body is read: place the request.
    Place(End),
    /// The request is not held: let everything through.
    Pass,
}

enum Stage {
    New,
    Holding { reader: Box<Reader>, read: u64 },
    Free,
}

/// One request.
pub struct Request {
    stage: Stage,
    booking: Option<Booking>,
    /// While its body has yet to end after it was placed: the tokens that are pending from then on.
    uploads: Option<u32>,
    /// Whether its end is that of a complete answer, which then settles it.
    complete: bool,
    ended: bool,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            stage: Stage::New,
            booking: None,
            uploads: None,
            complete: false,
            ended: false,
        }
    }
}

impl Request {
    /// The request is held until its body is read.
    pub fn hold(&mut self, reader: Reader) {
        if matches!(self.stage, Stage::New) {
            self.stage = Stage::Holding {
                reader: Box::new(reader),
                read: 0,
            };
        }
    }

    /// The request is not held, or no longer.
    pub fn free(&mut self) {
        self.stage = Stage::Free;
    }

    /// Whether the request is held.
    #[must_use]
    pub fn is_held(&self) -> bool {
        matches!(self.stage, Stage::Holding { .. })
    }

    /// What to do now that `buffered` bytes of the body are there and it ends or not. A body of
    /// `bytes_max` or more is not waited for. A body is read as it comes; one whose first bytes
    /// show that it is encoded is read when it is complete, so that no two decoders live at a time.
    #[must_use]
    pub fn next(&self, buffered: u64, end: bool, bytes_max: u64) -> Next {
        let Stage::Holding { read, reader } = &self.stage else {
            return Next::Pass;
        };
        let readable = buffered.min(bytes_max);
        let unread = readable.saturating_sub(*read);
        let complete = end || buffered >= bytes_max;
        if !complete && unread >= WINDOW_BYTES {
            if *read == 0 {
                let len = DETECT_BYTES as u64;
                return Next::Read { start: 0, len };
            }
            if reader.is_encoded() {
                return Next::Wait;
            }
        }
        if unread >= WINDOW_BYTES || (complete && unread > 0) {
            return Next::Read {
                start: *read,
                len: unread.min(WINDOW_BYTES),
            };
        }
        match complete {
            false => Next::Wait,
            true if end && buffered <= bytes_max => Next::Place(End::Whole),
            true => Next::Place(End::Cut),
        }
    }

    /// Bytes of the body, as [`Next::Read`] asked for. Fewer bytes than asked for are taken as
    /// all there are.
    pub fn feed(&mut self, window: &[u8], asked: u64) {
        if let Stage::Holding { reader, read } = &mut self.stage {
            reader.feed(window);
            *read = read.saturating_add(asked);
        }
    }

    /// The prompt of a held request, which is free from now on.
    pub fn prompt(&mut self, end: End) -> Option<Prompt> {
        match std::mem::replace(&mut self.stage, Stage::Free) {
            Stage::Holding { reader, .. } => Some(reader.finish(end)),
            Stage::New | Stage::Free => None,
        }
    }

    /// It is to be placed before its body has ended. As long as that lasts its host waits for the
    /// client, and nobody for the host: nothing of it is pending.
    pub fn still_uploads(&mut self) {
        self.uploads = Some(0);
    }

    /// Runs `decide` on the current loads and, if it `books`, its first host in the same
    /// transaction. `decide` also gives the tokens that this host has yet to compute, and what the caller wants
    /// to keep. If it fails, nothing is booked and the request can be placed again.
    ///
    /// # Errors
    /// Those of `decide`.
    pub fn place<K, E>(
        &mut self,
        store: &impl Store,
        ledger: &Ledger,
        books: bool,
        decide: impl Fn(&mut Loads) -> Result<(Placement, u32, K), E>,
    ) -> Result<(Placement, Option<K>), E> {
        if self.booking.is_some() || self.ended {
            return Ok((Placement::abstain(Abstain::NotAPrompt), None));
        }
        let (placement, kept) = ledger.transact(store, |loads| match decide(loads) {
            Err(error) => (Err(error), NO_CHANGES),
            Ok((placement, pending, kept)) => {
                let first = placement.hosts.first().filter(|_| books);
                let booking = first.map(|host| Booking {
                    seat: host.seat,
                    pending: self.uploads.map_or(pending, |_| 0),
                });
                (
                    Ok((placement, (booking, pending, kept))),
                    [booking.map(Change::Book), None],
                )
            }
        })?;
        let (booking, pending, kept) = kept;
        self.booking = booking;
        self.uploads = self.uploads.map(|_| pending);
        Ok((placement, Some(kept)))
    }

    /// The body of a request that was placed before ended: its host has all of it.
    pub fn uploaded(&mut self) -> Changes {
        let pending = self.uploads.take().unwrap_or_default();
        match &mut self.booking {
            Some(own) if pending > 0 => {
                let left = *own;
                own.pending = pending;
                [Some(Change::Release(left)), Some(Change::Book(*own))]
            }
            _ => NO_CHANGES,
        }
    }

    /// The host that answers became known; `None` if it is not one of ours. A request that a
    /// retry or the proxy's own policy sent elsewhere is counted there.
    pub fn served_by(&mut self, seat: Option<Seat>) -> Changes {
        // One that answers before the body has ended is not waited for any more.
        self.uploads = None;
        if self.ended || self.booking.map(|booking| booking.seat) == seat {
            return NO_CHANGES;
        }
        let pending = self.booking.map_or(0, |booking| booking.pending);
        let left = self.booking.take().map(Change::Release);
        self.booking = seat.map(|seat| Booking { seat, pending });
        [left, self.booking.map(Change::Book)]
    }

    /// Where the request is booked.
    #[must_use]
    pub fn seat(&self) -> Option<Seat> {
        self.booking.map(|booking| booking.seat)
    }

    /// Hands the pending tokens to somebody who ends them by time, all but one, which says that the
    /// answer is still to come. `None` if there are no others.
    pub fn give_pending(&mut self) -> Option<Booking> {
        let own = self.booking.as_mut().filter(|own| own.pending > 1)?;
        let given = Booking {
            pending: own.pending - 1,
            ..*own
        };
        own.pending = 1;
        Some(given)
    }

    /// The same with all of them, for the answer is there.
    pub fn give_all(&mut self) -> Option<Booking> {
        let own = self.booking.as_mut().filter(|own| own.pending > 0)?;
        let given = *own;
        own.pending = 0;
        Some(given)
    }

    /// Takes back what [`Self::give_pending`] or [`Self::give_all`] gave.
    pub fn take_pending(&mut self, given: Booking) -> Changes {
        match &mut self.booking {
            Some(own) if own.seat == given.seat => {
                own.pending = own.pending.saturating_add(given.pending);
                NO_CHANGES
            }
            _ => [Some(Change::Computed(given)), None],
        }
    }

    /// The host that serves the request failed it. What follows of the answer is none.
    pub fn failed(&mut self) -> Changes {
        let failed = self.booking.as_mut().map(|booking| {
            let failed = *booking;
            booking.pending = 0;
            failed
        });
        [failed.map(Change::Fail), None]
    }

    /// The answer is there at once and whole, so it ends at once: one write settles and ends it.
    pub fn completed(&mut self) {
        self.complete = true;
    }

    /// The first byte of the answer's body came: nothing is pending any more.
    pub fn answered(&mut self) -> Changes {
        match &mut self.booking {
            Some(booking) if booking.pending > 0 => {
                let settled = *booking;
                booking.pending = 0;
                [Some(Change::Settle(settled)), None]
            }
            _ => NO_CHANGES,
        }
    }

    /// The request ended, in whatever way.
    pub fn end(&mut self) -> Changes {
        self.stage = Stage::Free;
        self.ended = true;
        let [settled, _] = if self.complete {
            self.answered()
        } else {
            NO_CHANGES
        };
        [settled, self.booking.take().map(Change::Release)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::{Head, ReadOptions};

    const W: u64 = WINDOW_BYTES;

    /// Does what the proxy's callbacks do when so many bytes of `body` are there; says which
    /// stretches were read, and what came after them.
    fn callback(request: &mut Request, body: &[u8], buffered: u64, end: bool) -> (Vec<u64>, Next) {
        let mut read = Vec::new();
        loop {
            match request.next(buffered, end, 4 * W) {
                Next::Read { start, len } => {
                    read.extend([start, len]);
                    let bytes = &body[start as usize..(start + len) as usize];
                    request.feed(bytes, len);
                }
                next => return (read, next),
            }
        }
    }

    fn held() -> Request {
        let mut request = Request::default();
        request.hold(Reader::new(&Head::default(), &ReadOptions::default()));
        request
    }

    #[test]
    fn calls_that_stream_both_ways_are_not_held() {
        // content-type → whether it may carry a prompt
        for (content_type, expected) in [
            ("application/json", true),
            ("", true),
            ("application/connect+json", false),
            ("application/grpc+proto", false),
            (" Multipart/form-data; boundary=x", false),
        ] {
            let facts = Facts {
                method: b"POST",
                content_type: content_type.as_bytes(),
                ..Facts::default()
            };
            assert_eq!(facts.may_carry_a_prompt(), expected, "{content_type}");
        }
    }

    #[test]
    fn only_a_body_that_ends_may_carry_a_prompt() {
        // method, whether it upgrades, whether its headers end it → whether it may carry a prompt
        for (method, upgrade, end_of_stream, expected) in [
            ("POST", false, false, true),
            ("PUT", false, false, true),
            ("PATCH", false, false, true),
            ("GET", false, false, false),
            ("CONNECT", false, false, false),
            ("POST", true, false, false),
            ("POST", false, true, false),
        ] {
            let facts = Facts {
                method: method.as_bytes(),
                upgrade,
                end_of_stream,
                ..Facts::default()
            };
            let found = facts.may_carry_a_prompt();
            assert_eq!(found, expected, "{method} {upgrade} {end_of_stream}");
        }
    }

    #[test]
    fn a_body_is_read_in_windows_as_it_comes() {
        let body = vec![b'{'; 8 * W as usize];
        let mut request = held();
        let mut step = |buffered, end| callback(&mut request, &body, buffered, end);
        assert_eq!(step(W - 1, false), (vec![], Next::Wait));
        assert_eq!(step(W, false), (vec![0, 4], Next::Wait));
        assert_eq!(step(W + 4, false), (vec![4, W], Next::Wait));
        assert_eq!(step(W + 9, true), (vec![W + 4, 5], Next::Place(End::Whole)));
    }

    #[test]
    fn a_body_that_is_there_at_once_is_read_from_its_start() {
        let body = vec![b'{'; 8 * W as usize];
        for (buffered, reads, end) in [
            (0, vec![], End::Whole),
            (9, vec![0, 9], End::Whole),
            (W + 9, vec![0, W, W, 9], End::Whole),
            (4 * W, vec![0, W, W, W, 2 * W, W, 3 * W, W], End::Whole),
            (4 * W + 1, vec![0, W, W, W, 2 * W, W, 3 * W, W], End::Cut),
        ] {
            let step = callback(&mut held(), &body, buffered, true);
            assert_eq!(step, (reads, Next::Place(end)), "{buffered}");
        }
        assert_eq!(
            callback(&mut held(), &body, 5 * W, false).1,
            Next::Place(End::Cut)
        );
    }

    #[test]
    fn an_encoded_body_is_read_when_it_is_complete() {
        let mut body = vec![0; 8 * W as usize];
        body[..3].copy_from_slice(&[0x1f, 0x8b, 8]);
        for (last, end, reads_end) in [(3 * W, true, End::Whole), (4 * W, false, End::Cut)] {
            let mut request = held();
            let mut step = |buffered, end| callback(&mut request, &body, buffered, end);
            assert_eq!(step(W, false), (vec![0, 4], Next::Wait));
            assert_eq!(step(2 * W, false), (vec![], Next::Wait));
            let (reads, next) = step(last, end);
            assert_eq!(
                (reads.iter().skip(1).step_by(2).sum::<u64>(), next),
                (last - 4, Next::Place(reads_end))
            );
        }
    }
}
