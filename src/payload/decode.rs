//! Content codings of request bodies: gzip, deflate, zstd and brotli, decoded for the key only.
//!
//! Guarantee: any bytes in any cut give the same output and the same error, in pieces of at most
//! [`OUTPUT_BYTES_MAX`]; output and memory are bounded by [`Limits`]. Not here: what the decoded
//! bytes mean (the rest of payload/). The body itself passes to the engine as it came.

use std::io::{self, BufRead, Read, Write};

use brotli_decompressor::{
    BrotliDecoderParameter, BrotliDecompressStream, BrotliResult, BrotliState, StandardAlloc,
};
use flate2::bufread::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// The first bytes of a body that [`Encoding::detect`] wants to see: the length of zstd's magic.
pub const DETECT_BYTES: usize = 4;

/// The longest piece of output.
pub const OUTPUT_BYTES_MAX: usize = 16 * 1024;

/// Input is decoded in pieces of this many bytes, counted from its start, so that the way it is
/// cut into windows changes neither the output nor the moment at which a limit is hit.
const PIECE_BYTES: usize = 4096;

const GZIP_MAGIC: [u8; 3] = [0x1f, 0x8b, 8];
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// How a body is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// RFC 1952, one or several members.
    Gzip,
    /// HTTP's `deflate`: zlib (RFC 1950), or the bare deflate (RFC 1951) that some clients send.
    Deflate,
    /// RFC 8878, one or several frames.
    Zstd,
    /// RFC 7932.
    Brotli,
    /// In a way that is not decoded here: another coding, or one on top of another.
    Unsupported,
}

impl Encoding {
    /// How a body with this `content-encoding` (empty: no such header) is encoded that begins with
    /// these bytes: [`DETECT_BYTES`] of them, or all it has. `None`: not encoded.
    ///
    /// Where the bytes tell, they decide: some clients send zstd and gzip without the header, and
    /// some proxies decode a body and leave the header. No encoded JSON object begins with `{`
    /// (brotli: the stream would end there; bare deflate: only a few bytes fit such a block).
    #[must_use]
    pub fn detect(content_encoding: &[u8], first_bytes: &[u8]) -> Option<Self> {
        if first_bytes.first() == Some(&b'{') {
            return None;
        }
        let named = Self::named(content_encoding);
        match (named, Self::by_magic(first_bytes)) {
            (Some(Self::Unsupported), _) => named,
            (Some(Self::Brotli), _) => named,
            (Some(Self::Deflate), None) => named,
            (_, told) => told,
        }
    }

    fn named(content_encoding: &[u8]) -> Option<Self> {
        let mut codings = content_encoding
            .split(|&byte| byte == b',')
            .map(<[u8]>::trim_ascii)
            .filter(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case(b"identity"));
        let first = codings.next()?;
        if codings.next().is_some() {
            return Some(Self::Unsupported);
        }
        Some(match first.to_ascii_lowercase().as_slice() {
            b"gzip" | b"x-gzip" => Self::Gzip,
            b"deflate" => Self::Deflate,
            b"zstd" => Self::Zstd,
            b"br" => Self::Brotli,
            _ => Self::Unsupported,
        })
    }

    fn by_magic(first_bytes: &[u8]) -> Option<Self> {
        if first_bytes.starts_with(&GZIP_MAGIC) {
            Some(Self::Gzip)
        } else if first_bytes.starts_with(&ZSTD_MAGIC) {
            Some(Self::Zstd)
        } else {
            is_zlib(first_bytes).then_some(Self::Deflate)
        }
    }
}

/// A zlib header: method 8, a window of 32 KiB at most, its check, no preset dictionary.
/// No JSON text begins so: the first byte would be one of 0x08, 0x18, … 0x78.
fn is_zlib(bytes: &[u8]) -> bool {
    let Some(&[method, flags]) = bytes.first_chunk() else {
        return false;
    };
    let check = u16::from_be_bytes([method, flags]) % 31;
    method & 0x0f == 8 && method >> 4 <= 7 && check == 0 && flags & 0x20 == 0
}

/// What a decoder may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of input. It bounds the time: bodies made of nothing but code tables take 0.2 µs a
    /// byte, and there is no other bound on their number.
    pub input_bytes_max: u64,
    /// Bytes of output.
    pub output_bytes_max: u64,
    /// Output per byte of input, once [`Self::ratio_free_bytes`] have come out.
    pub ratio_max: u64,
    /// Output that is free of [`Self::ratio_max`].
    pub ratio_free_bytes: u64,
    /// The window a stream may ask for, in bytes. It bounds the memory of a decoder (grown step by
    /// step, as output comes): at most two windows and 2 MiB; gzip and deflate take 0.1 MiB.
    pub window_bytes_max: u64,
}

impl Default for Limits {
    /// Output: as much as is read of a body that is not encoded. Input: chats shrink to a third or
    /// less, so 1 MiB of it is more than 700,000 tokens. Ratio: chats reach 10, and a bomb's first
    /// 1 MiB costs a millisecond. Window: by themselves encoders choose 2 MiB (zstd) and 4 MiB
    /// (brotli), and a VM keeps what its largest decoder took.
    fn default() -> Self {
        Self {
            input_bytes_max: 1 << 20,
            output_bytes_max: 8 << 20,
            ratio_max: 100,
            ratio_free_bytes: 1 << 20,
            window_bytes_max: 4 << 20,
        }
    }
}

/// Why a body was not decoded, or not to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// A coding, or a feature of one (a dictionary), that is not decoded here.
    Unsupported,
    /// Not what the format allows.
    Corrupt,
    /// The input ended before the stream did.
    Truncated,
    /// More input than [`Limits::input_bytes_max`].
    InputTooLarge,
    /// More output than [`Limits::output_bytes_max`].
    OutputTooLarge,
    /// More output per input than [`Limits::ratio_max`].
    RatioTooHigh,
    /// A larger window than [`Limits::window_bytes_max`].
    WindowTooLarge,
}

impl DecodeError {
    /// A short name for logs and metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Unsupported => "unsupported",
            Self::Corrupt => "corrupt",
            Self::Truncated => "truncated",
            Self::InputTooLarge => "input_too_large",
            Self::OutputTooLarge => "output_too_large",
            Self::RatioTooHigh => "ratio_too_high",
            Self::WindowTooLarge => "window_too_large",
        }
    }

    /// Whether what came out is the beginning of an honest body, as if it had been cut there.
    #[must_use]
    pub fn is_cut(self) -> bool {
        match self {
            Self::Truncated | Self::InputTooLarge | Self::OutputTooLarge => true,
            Self::Unsupported | Self::Corrupt | Self::RatioTooHigh | Self::WindowTooLarge => false,
        }
    }
}

/// Decodes one body, fed in windows of any cut.
pub struct Decoder {
    format: Format,
    /// Input that has not filled a piece yet.
    piece: Vec<u8>,
    budget: Budget,
    failed: Option<DecodeError>,
}

impl Decoder {
    /// A decoder for a body that is encoded like this.
    #[must_use]
    pub fn new(encoding: Encoding, limits: Limits) -> Self {
        Self {
            format: Format::New(encoding),
            piece: Vec::new(),
            budget: Budget {
                limits,
                input: 0,
                output: 0,
            },
            failed: None,
        }
    }

    /// Decodes the next bytes. After an error nothing more comes out, and the error stays.
    ///
    /// # Errors
    /// Every [`DecodeError`] but [`DecodeError::Truncated`].
    pub fn feed(
        &mut self,
        mut input: &[u8],
        out: &mut impl FnMut(&[u8]),
    ) -> Result<(), DecodeError> {
        while !input.is_empty() {
            let room = PIECE_BYTES.saturating_sub(self.piece.len());
            let (head, tail) = input.split_at(room.min(input.len()));
            self.piece.extend_from_slice(head);
            input = tail;
            if self.piece.len() >= PIECE_BYTES {
                self.step(false, out)?;
            }
        }
        self.failed.map_or(Ok(()), Err)
    }

    /// Decodes what is left: there is no more input.
    ///
    /// # Errors
    /// Every [`DecodeError`]; before one that [is a cut](DecodeError::is_cut), all that can be
    /// decoded comes out.
    pub fn finish(mut self, out: &mut impl FnMut(&[u8])) -> Result<(), DecodeError> {
        self.step(true, out)
    }

    /// Decodes the held piece.
    fn step(&mut self, last: bool, out: Out<'_>) -> Result<(), DecodeError> {
        if let Some(error) = self.failed {
            self.piece.clear();
            return Err(error);
        }
        self.budget.input += self.piece.len() as u64;
        let over = self.budget.input > self.budget.limits.input_bytes_max;
        let (piece, budget) = (self.piece.as_slice(), &mut self.budget);
        let mut result = self.format.push(piece, last || over, budget, out);
        if over && matches!(result, Ok(()) | Err(DecodeError::Truncated)) {
            result = Err(DecodeError::InputTooLarge);
        }
        self.piece.clear();
        self.failed = result.err();
        result
    }
}

/// Where output goes.
type Out<'a> = &'a mut dyn FnMut(&[u8]);

/// Counts input and output against the limits.
struct Budget {
    limits: Limits,
    input: u64,
    output: u64,
}

impl Budget {
    /// Hands out decoded bytes, as long as they are within the limits.
    fn emit(&mut self, bytes: &[u8], out: Out<'_>) -> Result<(), DecodeError> {
        for piece in bytes.chunks(OUTPUT_BYTES_MAX) {
            self.output = self.output.saturating_add(piece.len() as u64);
            if self.output > self.limits.output_bytes_max {
                return Err(DecodeError::OutputTooLarge);
            }
            let earned = self.input.saturating_mul(self.limits.ratio_max);
            if self.output > self.limits.ratio_free_bytes && self.output > earned {
                return Err(DecodeError::RatioTooHigh);
            }
            out(piece);
        }
        Ok(())
    }
}

/// The state of one format's decoder. What has not begun takes no memory.
enum Format {
    New(Encoding),
    Inflate(Box<dyn Inflate>),
    Zstd(Box<Zstd>),
    Brotli(Box<Brotli>),
}

impl Format {
    /// A decoder for a body that begins like this.
    fn start(encoding: Encoding, first: &[u8], limits: &Limits) -> Result<Self, DecodeError> {
        let source = Source::default();
        Ok(match encoding {
            Encoding::Gzip => Self::Inflate(Box::new(MultiGzDecoder::new(source))),
            Encoding::Deflate if is_zlib(first) => {
                Self::Inflate(Box::new(ZlibDecoder::new(source)))
            }
            Encoding::Deflate => Self::Inflate(Box::new(DeflateDecoder::new(source))),
            Encoding::Zstd => Self::Zstd(Box::new(Zstd::new(limits.window_bytes_max))),
            Encoding::Brotli => Self::Brotli(Box::new(Brotli::new(limits.window_bytes_max))),
            Encoding::Unsupported => return Err(DecodeError::Unsupported),
        })
    }

    fn push(
        &mut self,
        piece: &[u8],
        last: bool,
        budget: &mut Budget,
        out: Out<'_>,
    ) -> Result<(), DecodeError> {
        if let Self::New(encoding) = *self {
            *self = Self::start(encoding, piece, &budget.limits)?;
        }
        match self {
            Self::New(_) => Ok(()),
            Self::Inflate(inflate) => {
                inflate.source().push(piece, last);
                pull(inflate.as_mut(), budget, out)
            }
            Self::Zstd(zstd) => zstd.push(piece, last, budget, out),
            Self::Brotli(brotli) => brotli.push(piece, last, budget, out),
        }
    }
}

/// What the three inflate decoders read from: says "would block" between two pieces.
#[derive(Default)]
struct Source {
    bytes: Vec<u8>,
    read: usize,
    ended: bool,
}

impl Source {
    fn push(&mut self, piece: &[u8], last: bool) {
        self.bytes.drain(..self.read.min(self.bytes.len()));
        self.read = 0;
        self.bytes.extend_from_slice(piece);
        self.ended = last;
    }

    fn unread(&self) -> &[u8] {
        self.bytes.get(self.read..).unwrap_or_default()
    }
}

impl Read for Source {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut unread = self.fill_buf()?;
        let count = unread.read(into)?;
        self.consume(count);
        Ok(count)
    }
}

impl BufRead for Source {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.unread().is_empty() && !self.ended {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(self.unread())
    }

    fn consume(&mut self, count: usize) {
        self.read = self.read.saturating_add(count).min(self.bytes.len());
    }
}

/// One of flate2's decoders.
trait Inflate: Read {
    fn source(&mut self) -> &mut Source;
}

impl Inflate for MultiGzDecoder<Source> {
    fn source(&mut self) -> &mut Source {
        self.get_mut()
    }
}

impl Inflate for ZlibDecoder<Source> {
    fn source(&mut self) -> &mut Source {
        self.get_mut()
    }
}

impl Inflate for DeflateDecoder<Source> {
    fn source(&mut self) -> &mut Source {
        self.get_mut()
    }
}

/// Takes out what the pushed input gives. Ends: every turn but the last emits, which is bounded.
fn pull(inflate: &mut dyn Inflate, budget: &mut Budget, out: Out<'_>) -> Result<(), DecodeError> {
    let mut window = [0; OUTPUT_BYTES_MAX];
    loop {
        match inflate.read(&mut window) {
            // The stream is over.
            Ok(0) if inflate.source().unread().is_empty() => return Ok(()),
            Ok(0) => return Err(DecodeError::Corrupt),
            Ok(count) => budget.emit(window.get(..count).unwrap_or_default(), out)?,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(DecodeError::Truncated);
            }
            Err(_) => return Err(DecodeError::Corrupt),
        }
    }
}

/// zstd, one block at a time: the library wants to see a whole one.
struct Zstd {
    frames: FrameDecoder,
    /// Input that no step has used yet: less than a block and its headers, 128 KiB + 25 bytes,
    /// and a piece.
    held: Vec<u8>,
    state: ZstdState,
}

#[derive(Clone, Copy)]
enum ZstdState {
    /// Nothing has come yet.
    Empty,
    /// Between frames.
    Between,
    /// Inside a skippable frame, with so many bytes to go.
    Skip(u32),
    /// Between the blocks of a frame.
    Block {
        /// Four bytes of checksum follow the last block.
        checksum: bool,
    },
}

/// A frame header is no longer (RFC 8878, 3.1.1.1).
const ZSTD_FRAME_HEADER_BYTES_MAX: usize = 18;
/// A block is no longer, encoded or decoded (RFC 8878, 3.1.1.2.4).
const ZSTD_BLOCK_BYTES_MAX: usize = 128 * 1024;
const ZSTD_CHECKSUM_FLAG: u8 = 4;
/// An empty last block and room for a checksum: ends a frame that was cut, so that the library
/// lets go of what it has decoded.
const ZSTD_END: [u8; 7] = [1, 0, 0, 0, 0, 0, 0];

impl Zstd {
    fn new(window_bytes_max: u64) -> Self {
        let mut frames = FrameDecoder::new();
        frames.set_max_window_size(window_bytes_max);
        Self {
            frames,
            held: Vec::new(),
            state: ZstdState::Empty,
        }
    }

    fn push(
        &mut self,
        piece: &[u8],
        last: bool,
        budget: &mut Budget,
        out: Out<'_>,
    ) -> Result<(), DecodeError> {
        self.held.extend_from_slice(piece);
        let held = std::mem::take(&mut self.held);
        let mut rest = held.as_slice();
        while self.advance(&mut rest, last, budget, out)? {}
        self.held = rest.to_vec();
        match self.state {
            _ if !last => Ok(()),
            ZstdState::Between => Ok(()),
            ZstdState::Empty | ZstdState::Skip(_) => Err(DecodeError::Truncated),
            ZstdState::Block { .. } => {
                self.decode_block(&ZSTD_END, budget, out)?;
                Err(DecodeError::Truncated)
            }
        }
    }

    /// One step into `rest`; false if it holds too little for one.
    fn advance(
        &mut self,
        rest: &mut &[u8],
        last: bool,
        budget: &mut Budget,
        out: Out<'_>,
    ) -> Result<bool, DecodeError> {
        match self.state {
            ZstdState::Empty | ZstdState::Between => self.begin_frame(rest, last),
            ZstdState::Skip(bytes) => {
                let count = rest.len().min(bytes as usize);
                *rest = rest.get(count..).unwrap_or_default();
                // `count` is at most `bytes`, so it fits.
                let left = bytes.saturating_sub(count as u32);
                self.state = match left {
                    0 => ZstdState::Between,
                    left => ZstdState::Skip(left),
                };
                Ok(left == 0)
            }
            ZstdState::Block { checksum } => {
                let Some(bytes) = zstd_block_bytes(rest, checksum)? else {
                    return Ok(false);
                };
                let Some((block, after)) = rest.split_at_checked(bytes) else {
                    return Ok(false);
                };
                *rest = after;
                self.decode_block(block, budget, out)?;
                if self.frames.is_finished() {
                    self.state = ZstdState::Between;
                }
                Ok(true)
            }
        }
    }

    fn begin_frame(&mut self, rest: &mut &[u8], last: bool) -> Result<bool, DecodeError> {
        if rest.is_empty() || (rest.len() < ZSTD_FRAME_HEADER_BYTES_MAX && !last) {
            return Ok(false);
        }
        let descriptor = rest.get(ZSTD_MAGIC.len()).copied().unwrap_or_default();
        match self.frames.reset(&mut *rest) {
            Ok(()) => {
                self.state = ZstdState::Block {
                    checksum: descriptor & ZSTD_CHECKSUM_FLAG != 0,
                };
                Ok(true)
            }
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => {
                self.state = ZstdState::Skip(length);
                Ok(true)
            }
            Err(FrameDecoderError::WindowSizeTooBig { .. }) => Err(DecodeError::WindowTooLarge),
            Err(FrameDecoderError::DictNotProvided { .. }) => Err(DecodeError::Unsupported),
            Err(FrameDecoderError::ReadFrameHeaderError(error)) => match error {
                ReadFrameHeaderError::BadMagicNumber(_)
                | ReadFrameHeaderError::InvalidFrameDescriptor(_) => Err(DecodeError::Corrupt),
                // The header ends early.
                _ => Err(DecodeError::Truncated),
            },
            Err(_) => Err(DecodeError::Corrupt),
        }
    }

    fn decode_block(
        &mut self,
        block: &[u8],
        budget: &mut Budget,
        out: Out<'_>,
    ) -> Result<(), DecodeError> {
        self.frames
            .decode_blocks(block, BlockDecodingStrategy::UptoBlocks(1))
            .map_err(|_| DecodeError::Corrupt)?;
        let mut tap = Tap {
            budget,
            out,
            failed: None,
        };
        let collected = self.frames.collect_to_writer(&mut tap);
        match (tap.failed, collected) {
            (Some(error), _) => Err(error),
            (None, Err(_)) => Err(DecodeError::Corrupt),
            (None, Ok(_)) => Ok(()),
        }
    }
}

/// Bytes of the block at the start of `rest` with its header and, after the frame's last, the
/// checksum; `None` if its header is not all there.
fn zstd_block_bytes(rest: &[u8], checksum: bool) -> Result<Option<usize>, DecodeError> {
    let Some(&[low, middle, high]) = rest.first_chunk() else {
        return Ok(None);
    };
    let header = u32::from_le_bytes([low, middle, high, 0]);
    let (last, kind, size) = (header & 1 == 1, header >> 1 & 3, (header >> 3) as usize);
    // A run's size is that of its output; one byte of it is stored.
    let stored = if kind == 1 { 1 } else { size };
    if kind == 3 || size > ZSTD_BLOCK_BYTES_MAX {
        return Err(DecodeError::Corrupt);
    }
    Ok(Some(3 + stored + if last && checksum { 4 } else { 0 }))
}

/// Lets a library write into the budget.
struct Tap<'a> {
    budget: &'a mut Budget,
    out: Out<'a>,
    failed: Option<DecodeError>,
}

impl Write for Tap<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.budget.emit(bytes, self.out).map_err(|error| {
            self.failed = Some(error);
            io::Error::from(io::ErrorKind::Other)
        })?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// brotli.
struct Brotli {
    stream: BrotliState<StandardAlloc, StandardAlloc, StandardAlloc>,
    window_bytes_max: u64,
    /// The first byte was seen: it holds the window's size.
    begun: bool,
    ended: bool,
}

impl Brotli {
    fn new(window_bytes_max: u64) -> Self {
        let alloc = StandardAlloc::default;
        let mut stream = BrotliState::new(alloc(), alloc(), alloc());
        // RFC 7932 has no windows above 16 MiB; HTTP does not either.
        stream.set_parameter(BrotliDecoderParameter::BROTLI_DECODER_PARAM_LARGE_WINDOW, 0);
        Self {
            stream,
            window_bytes_max,
            begun: false,
            ended: false,
        }
    }

    fn push(
        &mut self,
        piece: &[u8],
        last: bool,
        budget: &mut Budget,
        out: Out<'_>,
    ) -> Result<(), DecodeError> {
        if let Some(&first) = piece.first().filter(|_| !self.begun) {
            self.begun = true;
            if brotli_window_bytes(first)? > self.window_bytes_max {
                return Err(DecodeError::WindowTooLarge);
            }
        }
        let mut window = [0; OUTPUT_BYTES_MAX];
        let (mut read, mut left) = (0, piece.len());
        // Ends: every turn but the last emits, which is bounded.
        while !self.ended {
            let (mut written, mut room, mut total) = (0, window.len(), 0);
            let result = BrotliDecompressStream(
                &mut left,
                &mut read,
                piece,
                &mut room,
                &mut written,
                &mut window,
                &mut total,
                &mut self.stream,
            );
            budget.emit(window.get(..written).unwrap_or_default(), out)?;
            match result {
                BrotliResult::ResultSuccess => self.ended = true,
                // It may hold more output than fitted, whatever it says that it needs.
                BrotliResult::NeedsMoreInput | BrotliResult::NeedsMoreOutput if written > 0 => {}
                BrotliResult::NeedsMoreInput if last => return Err(DecodeError::Truncated),
                BrotliResult::NeedsMoreInput => return Ok(()),
                BrotliResult::NeedsMoreOutput | BrotliResult::ResultFailure => {
                    return Err(DecodeError::Corrupt);
                }
            }
        }
        if left > 0 {
            return Err(DecodeError::Corrupt);
        }
        Ok(())
    }
}

/// The window that a brotli stream with this first byte asks for (RFC 7932, 9.1).
fn brotli_window_bytes(first: u8) -> Result<u64, DecodeError> {
    let bits = match (first & 1, first >> 1 & 7, first >> 4 & 7) {
        (0, _, _) => 16,
        (_, 0, 0) => 17,
        (_, 0, 1) => return Err(DecodeError::Corrupt),
        (_, 0, more) => 8 + more,
        (_, more, _) => 17 + more,
    };
    Ok(1 << bits)
}
