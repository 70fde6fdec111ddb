//! Proves that encoded bodies are decoded as their clients encoded them, however they are cut,
//! that what is broken or hostile ends early with the right error, and that prompts are the same.

use std::io::Write;
use std::time::{Duration, Instant};

use prefix_router::payload::decode::{
    DETECT_BYTES, DecodeError, Decoder, Encoding, Limits, OUTPUT_BYTES_MAX,
};
use prefix_router::payload::{End, Head, ReadOptions, Reader};
use prefix_router::prefix::{Coverage, Kinds, Prompt, RawReason};

const PLAIN: &[u8] = include_bytes!("decode/plain.json");

/// Every file of tests/decode, as (name, its coding's header value, its bytes).
const ENCODED: &[(&str, &str, &[u8])] = &[
    ("one gzip member", "gzip", include_bytes!("decode/whole.gz")),
    (
        "two gzip members",
        "gzip",
        include_bytes!("decode/members.gz"),
    ),
    (
        "deflate as zlib",
        "deflate",
        include_bytes!("decode/zlib.deflate"),
    ),
    (
        "bare deflate",
        "deflate",
        include_bytes!("decode/bare.deflate"),
    ),
    (
        "zstd, length known",
        "zstd",
        include_bytes!("decode/level3.zst"),
    ),
    (
        "zstd, streamed, checksum",
        "zstd",
        include_bytes!("decode/stream.zst"),
    ),
    (
        "zstd, level 19",
        "zstd",
        include_bytes!("decode/level19.zst"),
    ),
    (
        "zstd, two frames and one skipped",
        "zstd",
        include_bytes!("decode/frames.zst"),
    ),
    (
        "brotli, quality 5",
        "br",
        include_bytes!("decode/quality5.br"),
    ),
    (
        "brotli, quality 11, small window",
        "br",
        include_bytes!("decode/quality11.br"),
    ),
];

/// The output, and how it ended, of a body fed in windows of `cut` bytes.
fn decode(
    encoding: Encoding,
    limits: Limits,
    body: &[u8],
    cut: usize,
) -> (Vec<u8>, Result<(), DecodeError>) {
    let mut decoded = Vec::new();
    let mut out = |piece: &[u8]| {
        assert!(piece.len() <= OUTPUT_BYTES_MAX);
        decoded.extend_from_slice(piece);
    };
    let mut decoder = Decoder::new(encoding, limits);
    for window in body.chunks(cut) {
        if let Err(error) = decoder.feed(window, &mut out) {
            assert_eq!(decoder.feed(b"more", &mut out), Err(error), "errors stay");
            assert_eq!(decoder.finish(&mut out), Err(error), "errors stay");
            return (decoded, Err(error));
        }
    }
    let end = decoder.finish(&mut out);
    (decoded, end)
}

fn whole(encoding: Encoding, body: &[u8]) -> (Vec<u8>, Result<(), DecodeError>) {
    decode(encoding, Limits::default(), body, 64 * 1024)
}

fn encoding(header: &str, body: &[u8]) -> Encoding {
    let first = body.get(..DETECT_BYTES).unwrap_or(body);
    Encoding::detect(header.as_bytes(), first).unwrap()
}

#[test]
fn every_client_encoding_decodes_to_the_body_however_it_is_cut() {
    for &(name, header, body) in ENCODED {
        for cut in [1, 2, 3, 7, 1024, 4095, 4096, 4097, 64 * 1024, usize::MAX] {
            let (decoded, end) = decode(encoding(header, body), Limits::default(), body, cut);
            assert_eq!(end, Ok(()), "{name}, cut at {cut}");
            assert!(decoded == PLAIN, "{name}, cut at {cut}");
        }
    }
}

#[test]
fn the_coding_is_found_by_header_and_by_magic() {
    use Encoding::{Brotli, Deflate, Gzip, Unsupported, Zstd};
    let gzip: &[u8] = &[0x1f, 0x8b, 8, 0];
    let zstd: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
    let zlib: &[u8] = &[0x78, 0x9c, 0xab, 0x56];
    let other: &[u8] = &[0xab, 0x56, 0xca, 0x4d];
    let rows: &[(&str, &[u8], Option<Encoding>)] = &[
        ("", b"{\"me", None),
        ("", b" {\"m", None),
        ("", b"", None),
        ("", gzip, Some(Gzip)),
        ("", zstd, Some(Zstd)),
        ("", zlib, Some(Deflate)),
        ("", other, None),
        ("gzip", gzip, Some(Gzip)),
        ("X-GZip", gzip, Some(Gzip)),
        ("zstd", zstd, Some(Zstd)),
        (" zstd ", zstd, Some(Zstd)),
        ("identity, zstd", zstd, Some(Zstd)),
        ("identity", b"{\"me", None),
        ("deflate", zlib, Some(Deflate)),
        ("deflate", other, Some(Deflate)),
        ("br", other, Some(Brotli)),
        ("br", b"[", Some(Brotli)),
        // A wrong header: the bytes decide.
        ("zstd", gzip, Some(Gzip)),
        ("gzip", zstd, Some(Zstd)),
        // A proxy decoded the body and left the header.
        ("gzip", b"{\"me", None),
        ("gzip", b"[1,2", None),
        ("br", b"{\"me", None),
        ("deflate", b"{\"me", None),
        ("gzip, br", b"{\"me", None),
        // Not decoded.
        ("gzip, br", gzip, Some(Unsupported)),
        ("gzip,gzip", gzip, Some(Unsupported)),
        ("compress", other, Some(Unsupported)),
        ("aws-chunked", other, Some(Unsupported)),
        ("\u{ff}", other, Some(Unsupported)),
    ];
    for &(header, first, expected) in rows {
        let found = Encoding::detect(header.as_bytes(), first);
        assert_eq!(found, expected, "{header:?} {first:x?}");
    }
}

#[test]
fn a_truncated_body_gives_what_it_holds_and_says_so() {
    for &(name, header, body) in ENCODED {
        let kept = body.len() - 5;
        let coding = encoding(header, body);
        let (decoded, end) = whole(coding, &body[..kept]);
        assert_eq!(end, Err(DecodeError::Truncated), "{name}");
        assert!(PLAIN.starts_with(&decoded), "{name}");
        // zstd cannot give a part of a block.
        let lost = PLAIN.len() - decoded.len();
        let lost_max = if coding == Encoding::Zstd {
            128 * 1024
        } else {
            1024
        };
        assert!(lost <= lost_max, "{name}: lost {lost}");
    }
    for coding in [
        Encoding::Gzip,
        Encoding::Deflate,
        Encoding::Zstd,
        Encoding::Brotli,
    ] {
        assert_eq!(whole(coding, b""), (vec![], Err(DecodeError::Truncated)));
    }
}

#[test]
fn input_ends_at_its_limit_and_gives_what_it_holds() {
    let limits = Limits {
        input_bytes_max: 32 * 1024 - 1,
        ..Limits::default()
    };
    for &(name, header, body) in ENCODED {
        for cut in [1, 4096, usize::MAX] {
            let (decoded, end) = decode(encoding(header, body), limits, body, cut);
            assert_eq!(end, Err(DecodeError::InputTooLarge), "{name}");
            assert!(PLAIN.starts_with(&decoded), "{name}");
            // Half a zstd block gives nothing; the smaller blocks before it do.
            let kept_min = if header == "zstd" { 0 } else { 100_000 };
            assert!(decoded.len() >= kept_min, "{name}: {}", decoded.len());
        }
    }
}

#[test]
fn every_cut_point_is_truncation_never_corruption() {
    for &(name, header, body) in ENCODED {
        let coding = encoding(header, body);
        for kept in (0..200).chain(body.len() - 200..body.len()) {
            // Between two members or frames a stream is whole, too; none of these cuts is there.
            let (decoded, end) = whole(coding, &body[..kept]);
            assert_eq!(end, Err(DecodeError::Truncated), "{name}, {kept} bytes");
            assert!(PLAIN.starts_with(&decoded), "{name}, {kept} bytes");
        }
    }
}

#[test]
fn corrupt_bodies_end_with_an_error_or_other_text_but_the_same_in_any_cut() {
    for &(name, header, body) in ENCODED {
        let coding = encoding(header, body);
        for at in (0..64).chain((64..body.len()).step_by(997)) {
            let mut broken = body.to_vec();
            broken[at] ^= 0x55;
            let expected = whole(coding, &broken);
            assert_eq!(
                expected,
                decode(coding, Limits::default(), &broken, 13),
                "{name}, byte {at}"
            );
        }
    }
    for (coding, garbage) in [
        (Encoding::Gzip, 0xff),
        (Encoding::Deflate, 0xff),
        (Encoding::Zstd, 0xff),
        (Encoding::Brotli, 0x11),
    ] {
        let end = whole(coding, &[garbage; 64]);
        assert_eq!(end, (vec![], Err(DecodeError::Corrupt)), "{coding:?}");
    }
    for &(name, header, body) in ENCODED {
        let (_, end) = whole(
            encoding(header, body),
            &[body, b"trailing garbage, long"].concat(),
        );
        assert_eq!(end, Err(DecodeError::Corrupt), "{name}");
    }
}

#[test]
fn what_is_not_supported_says_so() {
    let (_, end) = whole(Encoding::Unsupported, b"anything");
    assert_eq!(end, Err(DecodeError::Unsupported));
    // A frame that needs dictionary 1.
    let frame = [0x28, 0xb5, 0x2f, 0xfd, 0x21, 0x01, 0x10, 0x81, 0, 0, b'x'];
    assert_eq!(
        whole(Encoding::Zstd, &frame),
        (vec![], Err(DecodeError::Unsupported))
    );
}

#[test]
fn windows_above_the_limit_are_refused_before_memory_is_taken() {
    let window24 = include_bytes!("decode/window24.br");
    let (_, end) = whole(Encoding::Brotli, window24);
    assert_eq!(end, Err(DecodeError::WindowTooLarge));
    let wide = Limits {
        window_bytes_max: 16 << 20,
        ..Limits::default()
    };
    assert!(decode(Encoding::Brotli, wide, window24, 4096) == (PLAIN.to_vec(), Ok(())));
    // Window descriptors: 2^(10 + exponent) · (1 + mantissa / 8).
    for (descriptor, expected) in [
        (12 << 3, Ok(())),
        (12 << 3 | 1, Err(DecodeError::WindowTooLarge)),
        (31 << 3, Err(DecodeError::WindowTooLarge)),
    ] {
        let frame = [
            &[0x28, 0xb5, 0x2f, 0xfd, 0, descriptor],
            &raw_block(b"x", true)[..],
        ]
        .concat();
        assert_eq!(whole(Encoding::Zstd, &frame).1, expected, "{descriptor:#x}");
    }
}

fn raw_block(content: &[u8], last: bool) -> Vec<u8> {
    let header = (content.len() as u32) << 3 | u32::from(last);
    [&header.to_le_bytes()[..3], content].concat()
}

/// 1 GiB of zeros as clients could send it, and a limit of time that no honest decoder misses.
fn bombs() -> Vec<(&'static str, Encoding, Vec<u8>)> {
    let run = (((128 * 1024) << 3) | 2_u32).to_le_bytes();
    let zstd = [
        &[0x28, 0xb5, 0x2f, 0xfd, 0, 7 << 3][..],
        &run[..3]
            .iter()
            .copied()
            .chain([0])
            .collect::<Vec<_>>()
            .repeat(8192),
    ]
    .concat();
    // A block that is flushed can be repeated: it begins and ends with a byte.
    let mut deflate = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::best());
    deflate.write_all(&vec![0; 1 << 20]).unwrap();
    deflate.flush().unwrap();
    let deflate = deflate.get_ref().repeat(1024);
    let gzip = [&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff][..], &deflate].concat();
    vec![
        ("gzip", Encoding::Gzip, gzip),
        ("deflate", Encoding::Deflate, deflate),
        ("zstd", Encoding::Zstd, zstd),
        (
            "brotli",
            Encoding::Brotli,
            include_bytes!("decode/bomb.br").to_vec(),
        ),
    ]
}

#[test]
fn bombs_of_a_gigabyte_end_after_the_first_megabyte() {
    let limits = Limits::default();
    for (name, coding, bomb) in bombs() {
        let start = Instant::now();
        let (decoded, end) = decode(coding, limits, &bomb, 64 * 1024);
        assert_eq!(end, Err(DecodeError::RatioTooHigh), "{name}");
        assert!(
            decoded.len() as u64 <= limits.ratio_free_bytes,
            "{name}: {}",
            decoded.len()
        );
        assert!(decoded.iter().all(|&byte| byte == 0), "{name}");
        // Milliseconds in a release build; this build is slower and the machine may be busy.
        assert!(
            start.elapsed() < Duration::from_secs(2),
            "{name}: {:?}",
            start.elapsed()
        );
    }
}

#[test]
fn output_ends_at_its_limit_whatever_the_ratio() {
    let limits = Limits {
        output_bytes_max: 3 << 20,
        ratio_max: u64::MAX,
        ..Limits::default()
    };
    for (name, coding, bomb) in bombs() {
        let (decoded, end) = decode(coding, limits, &bomb, 4096);
        assert_eq!(end, Err(DecodeError::OutputTooLarge), "{name}");
        assert!(decoded.len() as u64 <= limits.output_bytes_max, "{name}");
        assert!(
            decoded.len() as u64 > limits.output_bytes_max - 16 * 1024,
            "{name}"
        );
    }
}

/// Reads a body as the filter does.
fn read(content_encoding: &str, body: &[u8], cut: usize, end: End) -> Prompt {
    let head = Head {
        path: b"/v1/chat/completions",
        content_encoding: content_encoding.as_bytes(),
        ..Head::default()
    };
    let mut reader = Reader::new(&head, &ReadOptions::default());
    for window in body.chunks(cut) {
        reader.feed(window);
    }
    reader.finish(end)
}

#[test]
fn an_encoded_body_is_the_prompt_that_is_in_it() {
    let plain = read("", PLAIN, usize::MAX, End::Whole);
    assert_eq!((plain.messages, plain.coverage), (141, Coverage::Whole));
    for &(name, header, body) in ENCODED {
        for cut in [1, 1000, usize::MAX] {
            assert_eq!(read(header, body, cut, End::Whole), plain, "{name}");
        }
        // Bare deflate and brotli cannot be told without their header.
        if Encoding::detect(b"", &body[..DETECT_BYTES]).is_some() {
            assert_eq!(read("", body, 1, End::Whole), plain, "{name}, no header");
        }
    }
    assert_eq!(read("zstd", PLAIN, 1, End::Whole), plain, "decoded before");
}

#[test]
fn a_cut_encoded_body_keeps_the_key_of_its_beginning() {
    let plain = read("", PLAIN, usize::MAX, End::Whole);
    for &(name, header, body) in ENCODED.iter().filter(|row| row.1 != "zstd") {
        for (kept, end) in [(30_000, End::Cut), (30_000, End::Whole), (5000, End::Whole)] {
            let cut = read(header, &body[..kept], 999, end);
            assert_eq!(cut.coverage, Coverage::Truncated, "{name}");
            let rungs = |prompt: &Prompt| {
                let mut checkpoints = prompt.checkpoints.clone();
                checkpoints.retain(|checkpoint| checkpoint.kinds.has(Kinds::INDEX));
                checkpoints.truncate(8);
                checkpoints
            };
            assert_eq!(rungs(&cut), rungs(&plain), "{name}, {kept} bytes");
        }
    }
}

#[test]
fn a_body_that_cannot_be_decoded_is_its_bytes() {
    let gzip = ENCODED[0].2;
    let mut broken = gzip.to_vec();
    broken[2000] ^= 1;
    let (_, _, bomb) = bombs().swap_remove(0);
    let unknown = b"some bytes that no magic announces";
    for (header, body) in [
        ("gzip", &broken[..]),
        ("gzip", &gzip[..15]),
        ("gzip, br", gzip),
        ("compress", unknown),
        ("gzip", &bomb),
    ] {
        let whole = read(header, body, usize::MAX, End::Whole);
        assert_eq!(
            whole.coverage,
            Coverage::Raw(RawReason::Encoded),
            "{header}"
        );
        assert_eq!(whole.bytes, body.len() as u64, "{header}");
        assert!(whole.affinity, "{header}");
        assert_eq!(read(header, body, 777, End::Whole), whole, "{header}");
        let longer = read(header, &[body, b"x"].concat(), 64, End::Whole);
        assert_ne!(
            whole.checkpoints.last(),
            longer.checkpoints.last(),
            "{header}"
        );
    }
}
