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

/// Keys are handed out cut to this many bytes; no key that means something to us is longer.
pub const KEY_BYTES_MAX: usize = 128;

/// Short runs between escapes are gathered to pieces of this size, so that a text full of `\n`
/// costs one call per KiB and not one per line.
const SCRATCH_BYTES: usize = 1024;

/// Runs of at least this length are handed out where they lie: copying them would cost more than
/// the call that is saved.
const RUN_BYTES_MIN: usize = 256;

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
    /// One bit a level: set for an object.
    objects: [u64; 4],
    depth: u32,
    /// Containers open inside the one that is passed over, itself included.
    over: u64,
    in_key: bool,
    key: [u8; KEY_BYTES_MAX],
    key_len: usize,
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
            depth: 0,
            over: 0,
            in_key: false,
            key: [0; KEY_BYTES_MAX],
            key_len: 0,
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
        let mut rest = window;
        while self.mark < 3 && !rest.is_empty() {
            let expected = BYTE_ORDER_MARK.get(usize::from(self.mark)).copied();
            match rest.split_first() {
                Some((&byte, tail)) if Some(byte) == expected => {
                    self.mark += 1;
                    rest = tail;
                }
                _ => {
                    if self.mark != 0 {
                        self.state = State::Broken;
                    }
                    self.mark = 3;
                }
            }
        }
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
        self.flush(handler);
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

    fn structure<'a>(&mut self, rest: &'a [u8], handler: &mut impl Handler) -> &'a [u8] {
        let Some((&byte, tail)) = rest.split_first() else {
            return rest;
        };
        match (self.state, byte) {
            (_, b' ' | b'\n' | b'\r' | b'\t') => {}
            (State::Value | State::Key, b',') => {}
            (State::Value, b'{') => self.begin(Container::Object, handler),
            (State::Value, b'[') => self.begin(Container::Array, handler),
            (State::Value, b'"') => {
                self.in_key = false;
                self.state = State::Text;
                handler.string_begin();
            }
            (State::Value, b'-' | b'+' | b'.' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z') => {
                self.state = State::Literal;
                return rest;
            }
            (State::Key, b'"') => {
                self.in_key = true;
                self.key_len = 0;
                self.state = State::Text;
            }
            (State::Colon, b':') => self.state = State::Value,
            (State::After, b',') => {
                self.state = if self.in_object() {
                    State::Key
                } else {
                    State::Value
                };
            }
            (State::After | State::Key, b'}') if self.in_object() => self.end(handler),
            (State::After | State::Value, b']') if self.depth > 0 && !self.in_object() => {
                self.end(handler);
            }
            _ => self.state = State::Broken,
        }
        tail
    }

    fn in_object(&self) -> bool {
        let Some(level) = self.depth.checked_sub(1) else {
            return false;
        };
        let bits = self
            .objects
            .get((level / 64) as usize)
            .copied()
            .unwrap_or(0);
        bits >> (level % 64) & 1 == 1
    }

    fn begin(&mut self, container: Container, handler: &mut impl Handler) {
        if self.depth == DEPTH_MAX {
            handler.literal(b"[");
            handler.literal_end();
            self.pass_over();
            return;
        }
        if handler.begin(container) == Visit::Over {
            self.pass_over();
            return;
        }
        if let Some(bits) = self.objects.get_mut((self.depth / 64) as usize) {
            let bit = 1 << (self.depth % 64);
            match container {
                Container::Object => *bits |= bit,
                Container::Array => *bits &= !bit,
            }
        }
        self.depth += 1;
        self.state = match container {
            Container::Object => State::Key,
            Container::Array => State::Value,
        };
    }

    fn pass_over(&mut self) {
        self.over = 1;
        self.state = State::Over;
    }

    fn end(&mut self, handler: &mut impl Handler) {
        self.depth -= 1;
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

    fn text<'a>(&mut self, rest: &'a [u8], handler: &mut impl Handler) -> &'a [u8] {
        let Some(at) = memchr2(b'"', b'\\', rest) else {
            self.run(rest, handler);
            return &[];
        };
        let (run, tail) = rest.split_at(at);
        self.run(run, handler);
        let Some((&stop, tail)) = tail.split_first() else {
            return tail;
        };
        if stop == b'"' {
            self.text_end(handler);
            return tail;
        }
        // The common escapes are read here, in one step; the others, and those that a window's
        // end cuts, go through the states.
        let simple = tail.first().copied().and_then(unescape);
        if let (Some(byte), Some((_, tail))) = (simple, tail.split_first()) {
            self.run(&[byte], handler);
            return tail;
        }
        self.state = State::Escape;
        tail
    }

    fn text_end(&mut self, handler: &mut impl Handler) {
        self.lone(handler);
        if self.in_key {
            handler.key(self.key.get(..self.key_len).unwrap_or_default());
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
        match unescape(byte) {
            Some(byte) => self.run(&[byte], handler),
            None if byte == b'u' => {
                self.unicode = 0;
                self.digits = 0;
                self.state = State::Unicode;
            }
            // No escape of JSON's: both bytes are taken as they are.
            None => self.run(&[b'\\', byte], handler),
        }
        tail
    }

    fn unicode<'a>(&mut self, rest: &'a [u8], handler: &mut impl Handler) -> &'a [u8] {
        let Some((&byte, tail)) = rest.split_first() else {
            return rest;
        };
        let Some(digit) = char::from(byte).to_digit(16) else {
            // Too few digits: what there was counts, and this byte is text again.
            self.state = State::Text;
            self.run(b"\\u", handler);
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
            let scalar = 0x1_0000 + ((u32::from(high) - 0xd800) << 10) + u32::from(unit) - 0xdc00;
            let mut utf8 = [0; 4];
            let text = char::from_u32(scalar).unwrap_or(char::REPLACEMENT_CHARACTER);
            self.put(text.encode_utf8(&mut utf8).as_bytes(), handler);
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

    /// Text that is no part of a surrogate pair.
    fn run(&mut self, bytes: &[u8], handler: &mut impl Handler) {
        if bytes.is_empty() {
            return;
        }
        self.lone(handler);
        self.put(bytes, handler);
    }

    fn put(&mut self, bytes: &[u8], handler: &mut impl Handler) {
        if self.in_key {
            let room = self.key.get_mut(self.key_len..).unwrap_or_default();
            let len = bytes.len().min(room.len());
            copy(room, bytes);
            self.key_len += len;
            return;
        }
        if self.scratch_len + bytes.len() > SCRATCH_BYTES || bytes.len() >= RUN_BYTES_MIN {
            self.flush(handler);
        }
        if bytes.len() >= RUN_BYTES_MIN {
            handler.string(bytes);
            return;
        }
        copy(
            self.scratch.get_mut(self.scratch_len..).unwrap_or_default(),
            bytes,
        );
        self.scratch_len += bytes.len();
    }

    fn flush(&mut self, handler: &mut impl Handler) {
        if self.scratch_len > 0 {
            handler.string(self.scratch.get(..self.scratch_len).unwrap_or_default());
            self.scratch_len = 0;
        }
    }

    fn literal<'a>(&mut self, rest: &'a [u8], handler: &mut impl Handler) -> &'a [u8] {
        let end = rest
            .iter()
            .position(|byte| !byte.is_ascii_alphanumeric() && !matches!(byte, b'-' | b'+' | b'.'));
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
        self.state = if rest.get(at) == Some(&b'"') {
            State::Over
        } else {
            State::OverEscape
        };
        rest.get(at + 1..).unwrap_or_default()
    }
}

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

/// Copies as much as fits.
fn copy(to: &mut [u8], from: &[u8]) {
    let len = to.len().min(from.len());
    if let (Some(to), Some(from)) = (to.get_mut(..len), from.get(..len)) {
        to.copy_from_slice(from);
    }
}
