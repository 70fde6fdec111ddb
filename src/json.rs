//! A push tokenizer for JSON that arrives in windows of any size.
//!
//! Guarantee: one pass, constant memory, no recursion, and the same events whatever the cuts
//! between windows (a text may come in other pieces). It is tolerant where an engine's parser may
//! be: a byte-order mark, lone surrogates (passed on as the three bytes UTF-8 would use), invalid
//! UTF-8 and raw control characters (passed on as they are), `NaN`, numbers of any length and
//! commas too many. Where it cannot go on, it stops ([`Progress::Broken`]) and keeps what it said.
//! Not here: what the values mean (payload/), a tree of them, writing JSON.

use memchr::memchr2;

/// Containers inside each other beyond this are passed over as one value. Chat bodies need about
/// ten levels, tool schemas perhaps thirty; one bit each, 256 are 32 bytes.
pub const DEPTH_MAX: u32 = 256;

/// Containers inside each other in one that is passed over. A body that goes on opening them holds
/// no prompt, so the tokenizer stops rather than count millions of brackets.
const OVER_DEPTH_MAX: u64 = 16 * 1024;

/// Keys are handed out cut to this many bytes; no key that means something to us is longer.
pub const KEY_BYTES_MAX: usize = 128;

/// Short runs between escapes are gathered to pieces of this size, so that a text full of `\n`
/// costs one call per KiB and not one per line.
const SCRATCH_BYTES: usize = 1024;

/// Runs are copied word by word while it is looked for their end. From this length on they are
/// handed out where they lie.
const RUN_BYTES_MAX: usize = 256;

/// Bytes in a word.
const WORD: usize = 8;

/// An object or an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// `{…}`
    Object,
    /// `[…]`
    Array,
}

/// Whether a container's content is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visit {
    /// Its events follow, the last of them is [`Handler::end`].
    Into,
    /// It is passed over, without any further event.
    Over,
}

/// Receives what a body says, in its order.
pub trait Handler {
    /// A container opens.
    fn begin(&mut self, container: Container) -> Visit;
    /// The container that was entered last closes.
    fn end(&mut self);
    /// A member's key, unescaped, cut to [`KEY_BYTES_MAX`].
    fn key(&mut self, key: &[u8]);
    /// A string value opens.
    fn string_begin(&mut self);
    /// The next bytes of it, unescaped.
    fn string(&mut self, piece: &[u8]);
    /// It closes.
    fn string_end(&mut self);
    /// The next bytes of a number or a word such as `true`.
    fn literal(&mut self, piece: &[u8]);
    /// The number or word is complete.
    fn literal_end(&mut self);
    /// A number or word that lies in one window.
    fn literal_whole(&mut self, whole: &[u8]) {
        self.literal(whole);
        self.literal_end();
    }
}

/// How far a body has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The value is not complete yet.
    Open,
    /// The value is complete, and only white space followed it.
    Done,
    /// What came is not JSON; the events up to there stand.
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before a value (or, in an array, its end).
    Value,
    /// After a value: a comma or the container's end.
    After,
    /// In an object: a key or its end.
    Key,
    /// After a key.
    Colon,
    /// In a string or a key.
    Text,
    /// After a backslash.
    Escape,
    /// In the four digits after `\u`.
    Unicode,
    /// In a number or a word.
    Literal,
    /// In a container that is passed over.
    Over,
    /// In a string there.
    OverText,
    /// After a backslash there.
    OverEscape,
    /// After the value.
    Done,
    /// Not JSON.
    Broken,
}

/// The tokenizer. See the module.
#[derive(Debug)]
pub struct Tokenizer {
    state: State,
    /// Bytes of a byte-order mark seen so far; 3 when none can follow any more.
    mark: u8,
    /// One bit a level below the innermost: set for an object.
    objects: [u64; 4],
    /// Whether the innermost container is an object.
    in_object: bool,
    depth: u32,
    /// Containers open inside the one that is passed over, itself included.
    over: u64,
    in_key: bool,
    /// Unescaped text that is not handed out yet; of a key, all of it that fits.
    scratch: [u8; SCRATCH_BYTES],
    scratch_len: usize,
    unicode: u16,
    digits: u8,
    /// A high surrogate whose low one has not come yet.
    high: Option<u16>,
}

impl Default for Tokenizer {
    fn default() -> Self {
        Self {
            state: State::Value,
            mark: 0,
            objects: [0; 4],
            in_object: false,
            depth: 0,
            over: 0,
            in_key: false,
            scratch: [0; SCRATCH_BYTES],
            scratch_len: 0,
            unicode: 0,
            digits: 0,
            high: None,
        }
    }
}

const BYTE_ORDER_MARK: [u8; 3] = [0xef, 0xbb, 0xbf];

impl Tokenizer {
    /// Reads the next window. Everything of it that can be said is said before this returns.
    pub fn feed(&mut self, window: &[u8], handler: &mut impl Handler) {
        let mut rest = self.skip_mark(window);
        while !rest.is_empty() {
            rest = match self.state {
                State::Text => self.text(rest, handler),
                State::Escape => self.escape(rest, handler),
                State::Unicode => self.unicode(rest, handler),
                State::Literal => self.literal(rest, handler),
                State::Over => self.over(rest),
                State::OverText => self.over_text(rest),
                State::OverEscape => {
                    self.state = State::OverText;
                    rest.get(1..).unwrap_or_default()
                }
                State::Broken => return,
                _ => self.structure(rest, handler),
            };
        }
        if !self.in_key {
            self.flush(handler);
        }
    }

    /// Ends the input: a number at its very end is complete now. Returns how far the body came.
    pub fn finish(&mut self, handler: &mut impl Handler) -> Progress {
        if self.state == State::Literal && self.depth == 0 {
            handler.literal_end();
            self.state = State::Done;
        }
        self.progress()
    }

    /// How far the body has come.
    #[must_use]
    pub fn progress(&self) -> Progress {
        match self.state {
            State::Done => Progress::Done,
            State::Broken => Progress::Broken,
            _ => Progress::Open,
        }
    }

    /// Passes over a byte-order mark at the body's start.
    fn skip_mark<'a>(&mut self, window: &'a [u8]) -> &'a [u8] {
        let mut rest = window;
        while self.mark < 3 {
            let Some((&byte, tail)) = rest.split_first() else {
                break;
            };
            if BYTE_ORDER_MARK.get(usize::from(self.mark)) == Some(&byte) {
                self.mark += 1;
                rest = tail;
                continue;
            }
            if self.mark != 0 {
                self.state = State::Broken;
            }
            self.mark = 3;
        }
        rest
    }

    /// Everything between strings and numbers.
    fn structure<'a>(&mut self, window: &'a [u8], handler: &mut impl Handler) -> &'a [u8] {
        let mut rest = window;
        while let Some((&byte, tail)) = rest.split_first() {
            match (self.state, byte) {
                (_, b' ' | b'\n' | b'\r' | b'\t') => {
                    rest = skip_space(tail);
                    continue;
                }
                (State::After, b',') if self.in_object => self.state = State::Key,
                (State::After, b',') => self.state = State::Value,
                (State::Colon, b':') => self.state = State::Value,
                (State::Key, b'"') => {
                    self.in_key = true;
                    self.state = State::Text;
                    return tail;
                }
                (State::Value, b'"') => {
                    self.state = State::Text;
                    handler.string_begin();
                    return tail;
                }
                (State::Value, b'{') => self.begin(Container::Object, handler),
                (State::Value, b'[') => self.begin(Container::Array, handler),
                (State::After | State::Key, b'}') if self.in_object => self.end(handler),
                (State::After | State::Value, b']') if self.depth > 0 && !self.in_object => {
                    self.end(handler);
                }
                (State::Value, _) if is_literal(byte) => {
                    rest = self.literal_begin(rest, handler);
                    continue;
                }
                // One comma too many, where a value or a key could begin.
                (State::Value | State::Key, b',') => {}
                (State::Over, _) => return rest,
                _ => {
                    self.state = State::Broken;
                    return &[];
                }
            }
            rest = tail;
        }
        rest
    }

    fn begin(&mut self, container: Container, handler: &mut impl Handler) {
        if self.depth == DEPTH_MAX {
            handler.literal_whole(b"[");
            self.pass_over();
            return;
        }
        if handler.begin(container) == Visit::Over {
            self.pass_over();
            return;
        }
        self.remember(self.in_object);
        self.depth += 1;
        self.in_object = container == Container::Object;
        self.state = if self.in_object {
            State::Key
        } else {
            State::Value
        };
    }

    /// Keeps the kind of the container that is no longer the innermost.
    fn remember(&mut self, object: bool) {
        let bit = 1 << (self.depth % 64);
        if let Some(bits) = self.objects.get_mut((self.depth / 64) as usize) {
            *bits = if object { *bits | bit } else { *bits & !bit };
        }
    }

    fn pass_over(&mut self) {
        self.over = 1;
        self.state = State::Over;
    }

    fn end(&mut self, handler: &mut impl Handler) {
        self.depth -= 1;
        let bits = self
            .objects
            .get((self.depth / 64) as usize)
            .copied()
            .unwrap_or(0);
        self.in_object = bits >> (self.depth % 64) & 1 == 1;
        handler.end();
        self.value_done();
    }

    fn value_done(&mut self) {
        self.state = if self.depth == 0 {
            State::Done
        } else {
            State::After
        };
    }

    /// A number or a word; in most cases it lies in this window whole. In an array, others like it
    /// follow.
    fn literal_begin<'a>(&mut self, window: &'a [u8], handler: &mut impl Handler) -> &'a [u8] {
        let mut rest = window;
        loop {
            let Some(end) = rest.iter().position(|&byte| !is_literal(byte)) else {
                self.state = State::Literal;
                handler.literal(rest);
                return &[];
            };
            let (whole, tail) = rest.split_at(end);
            handler.literal_whole(whole);
            match tail {
                [b',', next, ..] if !self.in_object && self.depth > 0 && is_literal(*next) => {
                    rest = tail.get(1..).unwrap_or_default();
                }
                _ => {
                    self.value_done();
                    return tail;
                }
            }
        }
    }

    /// The rest of a number or a word.
    fn literal<'a>(&mut self, rest: &'a [u8], handler: &mut impl Handler) -> &'a [u8] {
        let end = rest.iter().position(|&byte| !is_literal(byte));
        let (piece, tail) = rest.split_at(end.unwrap_or(rest.len()));
        if !piece.is_empty() {
            handler.literal(piece);
        }
        if end.is_some() {
            handler.literal_end();
            self.value_done();
        }
        tail
    }

    fn over<'a>(&mut self, rest: &'a [u8]) -> &'a [u8] {
        for (at, byte) in rest.iter().enumerate() {
            match byte {
                b'{' | b'[' if self.over == OVER_DEPTH_MAX => {
                    self.state = State::Broken;
                    return &[];
                }
                b'{' | b'[' => self.over += 1,
                b'}' | b']' => {
                    self.over -= 1;
                    if self.over == 0 {
                        self.value_done();
                        return rest.get(at + 1..).unwrap_or_default();
                    }
                }
                b'"' => {
                    self.state = State::OverText;
                    return rest.get(at + 1..).unwrap_or_default();
                }
                _ => {}
            }
        }
        &[]
    }

    fn over_text<'a>(&mut self, rest: &'a [u8]) -> &'a [u8] {
        let Some(at) = memchr2(b'"', b'\\', rest) else {
            return &[];
        };
        self.state = match rest.get(at) {
            Some(b'"') => State::Over,
            _ => State::OverEscape,
        };
        rest.get(at + 1..).unwrap_or_default()
    }
}

/// What follows the white space at the start. Runs of it are long in indented bodies.
fn skip_space(bytes: &[u8]) -> &[u8] {
    let end = bytes
        .iter()
        .position(|byte| !matches!(byte, b' ' | b'\n' | b'\r' | b'\t'));
    end.and_then(|end| bytes.get(end..)).unwrap_or_default()
}

/// Strings and keys.
impl Tokenizer {
    fn text<'a>(&mut self, window: &'a [u8], handler: &mut impl Handler) -> &'a [u8] {
        let mut rest = window;
        loop {
            if self.high.is_some() && rest.first().is_some_and(|&byte| byte != b'\\') {
                self.lone(handler);
            }
            rest = self.run(rest, handler);
            match rest {
                [b'"', tail @ ..] => {
                    self.text_end(handler);
                    return tail;
                }
                [b'\\', b'u', a, b, c, d, tail @ ..] => {
                    let Some(unit) = unit_of([*a, *b, *c, *d]) else {
                        break;
                    };
                    self.unit(unit, handler);
                    rest = tail;
                }
                [b'\\', letter, tail @ ..] => {
                    let Some(byte) = unescape(*letter) else {
                        break;
                    };
                    self.lone(handler);
                    self.put(&[byte], handler);
                    rest = tail;
                }
                [] => return rest,
                _ => break,
            }
        }
        // An escape that the window cuts, or that is none of JSON's: byte by byte.
        self.state = State::Escape;
        rest.get(1..).unwrap_or_default()
    }

    /// Copies or hands out everything up to the next quote or backslash, and returns the rest.
    fn run<'a>(&mut self, window: &'a [u8], handler: &mut impl Handler) -> &'a [u8] {
        if self.scratch_len + RUN_BYTES_MAX > SCRATCH_BYTES {
            self.flush(handler);
        }
        let room = self.scratch.get_mut(self.scratch_len..).unwrap_or_default();
        let (room, _) = room.as_chunks_mut::<WORD>();
        let (words, _) = window.as_chunks::<WORD>();
        let mut len = 0;
        for (to, from) in room.iter_mut().zip(words).take(RUN_BYTES_MAX / WORD) {
            *to = *from;
            let stops = stops(u64::from_le_bytes(*from));
            if stops != 0 {
                len += (stops.trailing_zeros() / 8) as usize;
                self.scratch_len += len;
                return window.get(len..).unwrap_or_default();
            }
            len += WORD;
        }
        self.scratch_len += len;
        let rest = window.get(len..).unwrap_or_default();
        if len < RUN_BYTES_MAX {
            return self.run_end(rest, handler);
        }
        let end = memchr2(b'"', b'\\', rest).unwrap_or(rest.len());
        let (run, rest) = rest.split_at(end);
        if !self.in_key && !run.is_empty() {
            self.flush(handler);
            handler.string(run);
        }
        rest
    }

    /// The last bytes of a window, one by one.
    fn run_end<'a>(&mut self, window: &'a [u8], handler: &mut impl Handler) -> &'a [u8] {
        let end = window.iter().position(|byte| matches!(byte, b'"' | b'\\'));
        let (run, rest) = window.split_at(end.unwrap_or(window.len()));
        self.put(run, handler);
        rest
    }

    fn text_end(&mut self, handler: &mut impl Handler) {
        self.lone(handler);
        if self.in_key {
            let len = self.scratch_len.min(KEY_BYTES_MAX);
            handler.key(self.scratch.get(..len).unwrap_or_default());
            self.scratch_len = 0;
            self.in_key = false;
            self.state = State::Colon;
            return;
        }
        self.flush(handler);
        handler.string_end();
        self.value_done();
    }

    fn escape<'a>(&mut self, rest: &'a [u8], handler: &mut impl Handler) -> &'a [u8] {
        let Some((&byte, tail)) = rest.split_first() else {
            return rest;
        };
        self.state = State::Text;
        if byte == b'u' {
            self.unicode = 0;
            self.digits = 0;
            self.state = State::Unicode;
            return tail;
        }
        self.lone(handler);
        match unescape(byte) {
            Some(byte) => self.put(&[byte], handler),
            // No escape of JSON's: both bytes are taken as they are.
            None => self.put(&[b'\\', byte], handler),
        }
        tail
    }

    fn unicode<'a>(&mut self, rest: &'a [u8], handler: &mut impl Handler) -> &'a [u8] {
        let Some((&byte, tail)) = rest.split_first() else {
            return rest;
        };
        let Some(digit) = char::from(byte).to_digit(16) else {
            // Too few digits: the escape is dropped, and this byte is text again.
            self.state = State::Text;
            self.lone(handler);
            self.put(b"\\u", handler);
            return rest;
        };
        self.unicode = self.unicode << 4 | digit as u16;
        self.digits += 1;
        if self.digits == 4 {
            self.state = State::Text;
            self.unit(self.unicode, handler);
        }
        tail
    }

    /// One UTF-16 unit from a `\u` escape.
    fn unit(&mut self, unit: u16, handler: &mut impl Handler) {
        if let (Some(high), 0xdc00..=0xdfff) = (self.high, unit) {
            self.high = None;
            let scalar = 0x1_0000 + ((u32::from(high) & 0x3ff) << 10) + (u32::from(unit) & 0x3ff);
            let low = |shift: u32| 0x80 | (scalar >> shift & 0x3f) as u8;
            self.put(
                &[0xf0 | (scalar >> 18) as u8, low(12), low(6), low(0)],
                handler,
            );
            return;
        }
        self.lone(handler);
        if (0xd800..=0xdbff).contains(&unit) {
            self.high = Some(unit);
            return;
        }
        self.put_unit(unit, handler);
    }

    /// Lets go of a high surrogate that stayed alone.
    fn lone(&mut self, handler: &mut impl Handler) {
        if let Some(high) = self.high.take() {
            self.put_unit(high, handler);
        }
    }

    /// A unit as UTF-8 would write it, surrogates too.
    fn put_unit(&mut self, unit: u16, handler: &mut impl Handler) {
        let low = 0x80 | (unit & 0x3f) as u8;
        match unit {
            0..0x80 => self.put(&[unit as u8], handler),
            0x80..0x800 => self.put(&[0xc0 | (unit >> 6) as u8, low], handler),
            _ => {
                let middle = 0x80 | (unit >> 6 & 0x3f) as u8;
                self.put(&[0xe0 | (unit >> 12) as u8, middle, low], handler);
            }
        }
    }

    /// A few bytes, fewer than [`SCRATCH_BYTES`].
    fn put(&mut self, bytes: &[u8], handler: &mut impl Handler) {
        if self.scratch_len + bytes.len() > SCRATCH_BYTES {
            self.flush(handler);
        }
        let end = self.scratch_len + bytes.len();
        if let Some(room) = self.scratch.get_mut(self.scratch_len..end) {
            for (to, from) in room.iter_mut().zip(bytes) {
                *to = *from;
            }
            self.scratch_len = end;
        }
    }

    /// Hands out what was gathered. What a key has beyond the room is dropped.
    fn flush(&mut self, handler: &mut impl Handler) {
        if self.in_key {
            self.scratch_len = self.scratch_len.min(KEY_BYTES_MAX);
        } else if self.scratch_len > 0 {
            handler.string(self.scratch.get(..self.scratch_len).unwrap_or_default());
            self.scratch_len = 0;
        }
    }
}

/// Whether a byte may stand in a number or a word. Tolerant: `NaN` and `+1` are what some write.
fn is_literal(byte: u8) -> bool {
    LITERALS.get(usize::from(byte)).copied().unwrap_or(false)
}

/// [`is_literal`] of every byte.
const LITERALS: [bool; 256] = {
    let mut literals = [false; 256];
    let mut byte = 0_u8;
    let mut rest = literals.as_mut_slice();
    while let Some((place, tail)) = rest.split_first_mut() {
        *place = byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.');
        byte = byte.wrapping_add(1);
        rest = tail;
    }
    literals
};

/// The high bit of every byte of a word that is a quote or a backslash, up to the first of them.
/// (Bytes behind it may be marked wrongly.) Source: Mycroft's test for a zero byte.
fn stops(word: u64) -> u64 {
    const ONES: u64 = u64::from_le_bytes([1; WORD]);
    const HIGHS: u64 = ONES << 7;
    let zero = |word: u64| word.wrapping_sub(ONES) & !word & HIGHS;
    zero(word ^ (ONES * b'"' as u64)) | zero(word ^ (ONES * b'\\' as u64))
}

/// The UTF-16 unit of four hexadecimal digits.
fn unit_of(digits: [u8; 4]) -> Option<u16> {
    let mut unit = 0;
    let mut wrong = 0;
    for digit in digits {
        let value = HEX.get(usize::from(digit)).copied().unwrap_or(NO_HEX);
        wrong |= value;
        unit = unit << 4 | u16::from(value);
    }
    (wrong & NO_HEX == 0).then_some(unit)
}

/// Set in what is no hexadecimal digit.
const NO_HEX: u8 = 0x80;

/// The value of every byte as a hexadecimal digit.
const HEX: [u8; 256] = {
    let mut values = [NO_HEX; 256];
    let mut byte = 0_u8;
    let mut rest = values.as_mut_slice();
    while let Some((place, tail)) = rest.split_first_mut() {
        *place = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'A'..=b'F' => byte - b'A' + 10,
            _ => NO_HEX,
        };
        byte = byte.wrapping_add(1);
        rest = tail;
    }
    values
};

/// The byte that a one-letter escape stands for.
fn unescape(letter: u8) -> Option<u8> {
    Some(match letter {
        b'n' => b'\n',
        b'"' | b'\\' | b'/' => letter,
        b't' => b'\t',
        b'r' => b'\r',
        b'b' => 8,
        b'f' => 12,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wants nothing.
    struct Nothing;

    impl Handler for Nothing {
        fn begin(&mut self, _container: Container) -> Visit {
            Visit::Over
        }
        fn end(&mut self) {}
        fn key(&mut self, _key: &[u8]) {}
        fn string_begin(&mut self) {}
        fn string(&mut self, _piece: &[u8]) {}
        fn string_end(&mut self) {}
        fn literal(&mut self, _piece: &[u8]) {}
        fn literal_end(&mut self) {}
    }

    fn progress(body: &str) -> Progress {
        let mut tokenizer = Tokenizer::default();
        tokenizer.feed(body.as_bytes(), &mut Nothing);
        tokenizer.finish(&mut Nothing)
    }

    #[test]
    fn brackets_without_end_stop_the_tokenizer() {
        let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        let bound = OVER_DEPTH_MAX as usize;
        assert_eq!(progress(&nested(bound)), Progress::Done);
        assert_eq!(progress(&nested(bound + 1)), Progress::Broken);
        assert_eq!(progress(&"[".repeat(10_000_000)), Progress::Broken);
    }

    #[test]
    fn white_space_of_any_length_says_nothing() {
        let space = " \t\r\n".repeat(1000);
        let body = format!("{space}[{space}]{space}");
        assert_eq!(progress(&body), Progress::Done);
        assert_eq!(progress(&space), Progress::Open);
    }
}
