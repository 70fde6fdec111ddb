//! What the tool says: results on standard output, everything else on standard error.
//!
//! Guarantee: nothing here panics or ends the process, so whatever was started still ends when it
//! is dropped. A result that cannot be written is an error, as of any other file. Two failures are
//! none: a reader who has gone, as in `… | head`, has seen what it wanted, and the command ends as
//! if all had been read, with the exit code of what it found out; and there is nobody to be told
//! that standard error cannot be written. Nothing else of the tool prints (clippy denies it), but for
//! tests that are skipped or fail. Not here: what is said.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write as _};

use anyhow::{Context as _, Result};

use crate::report::table::WIDTH;

/// Columns of the narrowest terminal that text is broken for; a table's figures need these.
const COLUMNS_MIN: usize = 40;

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

/// Columns, 40 to 80, that a text on standard output has: those of the terminal, else those that the
/// variable `COLUMNS` says, else 80.
#[must_use]
pub fn columns() -> usize {
    let terminal = rustix::termios::tcgetwinsize(std::io::stdout());
    let terminal = terminal.ok().map(|size| usize::from(size.ws_col));
    served(terminal, std::env::var("COLUMNS").ok().as_deref())
}

fn served(terminal: Option<usize>, named: Option<&str>) -> usize {
    let named = named.and_then(|columns| columns.parse().ok());
    // Some terminals say 0 where they do not know.
    let known = [terminal, named]
        .into_iter()
        .flatten()
        .find(|&columns| columns > 0);
    known.unwrap_or(WIDTH).clamp(COLUMNS_MIN, WIDTH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_terminal_says_how_wide_it_is_then_a_variable() {
        let row = |terminal, named, expected| {
            assert_eq!(served(terminal, named), expected, "{terminal:?} {named:?}");
        };
        row(None, None, 80);
        row(Some(60), None, 60);
        row(Some(60), Some("50"), 60);
        row(Some(0), Some("50"), 50);
        row(None, Some("40"), 40);
        row(None, Some("39"), 40);
        row(None, Some("0"), 80);
        row(Some(200), None, 80);
        row(None, Some("wide"), 80);
    }
}
