//! What the tool says: results on standard output, everything else on standard error.
//!
//! Guarantee: nothing here panics or ends the process, so whatever was started still ends when it
//! is dropped. A result that cannot be written is an error, as of any other file. Two failures are
//! none: a reader who has gone, as in `… | head`, has seen what it wanted, and the command ends as
//! if all had been read, with the exit code of what it found out; and there is nobody to be told
//! that standard error cannot be written. Nothing else of the tool prints (clippy denies it), but for
//! tests that are skipped or fail. Not here: what is said, and how wide.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write as _};

use anyhow::{Context as _, Result};

/// Writes a line of the result to standard output, in the manner of `println!`.
macro_rules! say {
    ($($text:tt)+) => {
        $crate::print::result(format_args!("{}\n", format_args!($($text)+)))
    };
}

/// Writes a line to standard error, in the manner of `eprintln!`.
macro_rules! note {
    () => {
        $crate::print::remark(format_args!("\n"))
    };
    ($($text:tt)+) => {
        $crate::print::remark(format_args!("{}\n", format_args!($($text)+)))
    };
}

pub(crate) use {note, say};

/// Writes a part of the result to standard output, as it stands.
///
/// # Errors
/// If it cannot be written, though somebody reads.
pub fn result(text: Arguments<'_>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    written(out.write_fmt(text).and_then(|()| out.flush()))
}

/// What it means how a part of the result was written.
///
/// # Errors
/// If it could not be written, though somebody reads.
pub fn written(outcome: std::io::Result<()>) -> Result<()> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.context("cannot write the output"),
    }
}

/// Writes to standard error, as it stands and at once: a line that two threads write stays whole.
pub fn remark(text: Arguments<'_>) {
    let _ = std::io::stderr()
        .lock()
        .write_all(text.to_string().as_bytes());
}
