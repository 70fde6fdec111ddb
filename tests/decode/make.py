"""Writes the encoded bodies of this folder: what the encoders that clients use really produce.

Run again after `pip install zstandard brotli`, from the repository's root:

    python3 tests/decode/make.py

tests/decode.rs says what each file stands for. `plain.json` is the body that all of them hold.
"""

import gzip
import io
import json
import pathlib
import random
import zlib

import brotli
import zstandard

FOLDER = pathlib.Path(__file__).parent
WORDS = "cache prefix engine prompt token hash ladder window route host the a of and to in".split()


def body() -> bytes:
    """A chat of about 160 KB: more than one zstd block, more than one deflate window."""
    dice = random.Random(7)
    messages = [{"role": "system", "content": "You answer in one line. é 漢 \U0001f600"}]
    for turn in range(140):
        text = " ".join(dice.choice(WORDS) + str(dice.randrange(8)) for _ in range(180))
        messages.append({"role": ("user", "assistant")[turn % 2], "content": text})
    return json.dumps({"messages": messages, "model": "m"}, ensure_ascii=False).encode()


def zstd_stream(data: bytes, **options: object) -> bytes:
    """As a client that does not know the length in advance."""
    encoder = zstandard.ZstdCompressor(**options).compressobj()
    return encoder.compress(data) + encoder.flush()


def deflate(data: bytes, window_bits: int) -> bytes:
    encoder = zlib.compressobj(6, zlib.DEFLATED, window_bits)
    return encoder.compress(data) + encoder.flush()


def brotli_zeros(size: int) -> bytes:
    encoder = brotli.Compressor(quality=5, lgwin=22)
    out = io.BytesIO()
    for _ in range(size >> 20):
        out.write(encoder.process(bytes(1 << 20)))
    out.write(encoder.finish())
    return out.getvalue()


def main() -> None:
    data = body()
    half = len(data) // 2
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    files = {
        "plain.json": data,
        "whole.gz": gzip.compress(data, mtime=0),
        "members.gz": gzip.compress(data[:half], mtime=0) + gzip.compress(data[half:], mtime=0),
        "zlib.deflate": deflate(data, 15),
        "bare.deflate": deflate(data, -15),
        "level3.zst": zstandard.ZstdCompressor(level=3).compress(data),
        "stream.zst": zstd_stream(data, level=3, write_checksum=True),
        "level19.zst": zstandard.ZstdCompressor(level=19).compress(data),
        "frames.zst": zstd_stream(data[:half]) + skippable + zstd_stream(data[half:]),
        "quality5.br": brotli.compress(data, quality=5, lgwin=22),
        "quality11.br": brotli.compress(data, quality=11, lgwin=18),
        "window24.br": brotli.compress(data, quality=5, lgwin=24),
        "bomb.br": brotli_zeros(1 << 30),
    }
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)


main()
