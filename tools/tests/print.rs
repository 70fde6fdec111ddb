//! Proves that the tool ends in order, and with the right exit code, where what it says cannot be
//! written: on a full disk, to a reader who has gone, and without a standard error.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

const VALID: &str =
    r#"{"pools": [{"cluster": "engines", "hosts": {"admin_cluster": "envoy_admin"}}]}"#;
const FULL: &str =
    "prefix-router: cannot write the output: No space left on device (os error 28)\n";

/// The files that the commands here read.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let body = r#"{"model": "m", "messages": [{"role": "user", "content": "Hello"}]}"#;
        let invalid = VALID.replace("pools", "pool");
        for (name, text) in [
            ("body", body),
            ("valid", VALID),
            ("invalid", invalid.as_str()),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Where an output goes.
#[derive(Clone, Copy, Debug)]
enum To {
    Us,
    FullDisk,
    /// A pipe whose reader has gone.
    Nobody,
}

impl To {
    fn stdio(self) -> Stdio {
        match self {
            Self::Us => Stdio::piped(),
            Self::FullDisk => File::options()
                .write(true)
                .open("/dev/full")
                .unwrap()
                .into(),
            Self::Nobody => std::io::pipe().unwrap().1.into(),
        }
    }
}

/// What can be seen of a command that has ended: exit code, standard output, standard error.
type Seen = (Option<i32>, String, String);

fn seen(line: &str, out: To, err: To) -> Seen {
    let folder = Folder::new();
    let output = Command::new(env!("CARGO_BIN_EXE_prefix-router"))
        .args(line.split(' '))
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .stdout(out.stdio())
        .stderr(err.stdio())
        .output()
        .unwrap();
    (
        output.status.code(),
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

/// Commands of one second at most, and their exit codes.
const COMMANDS: [(&str, i32); 9] = [
    ("--help", 0),
    ("--version", 0),
    ("explain --help", 0),
    ("explain body", 0),
    ("explain body --json", 0),
    ("check valid", 0),
    ("check valid --json", 0),
    ("check invalid", 1),
    (SIMULATE, 0),
];
const SIMULATE: &str = "simulate --workload w2 --load 0.1 --policy random --hosts 2 --seed 1 \
                        --warmup 1 --window 1";

#[test]
fn a_full_disk_is_told_in_one_line() {
    for (line, _) in COMMANDS {
        let (code, _, err) = seen(line, To::FullDisk, To::Us);
        let last = err.lines().last().map(|line| format!("{line}\n"));
        assert_eq!((code, last.as_deref()), (Some(1), Some(FULL)), "{line}");
        // Only work that takes time says before how far it is.
        assert!(err == FULL || line == SIMULATE, "{line}: {err}");
    }
}

#[test]
fn a_reader_who_has_gone_changes_nothing_else() {
    for (line, expected) in COMMANDS {
        let (code, _, err) = seen(line, To::Nobody, To::Us);
        let (_, out, usual) = seen(line, To::Us, To::Us);
        assert!(!out.is_empty(), "{line}");
        assert_eq!(code, Some(expected), "{line}: {err}");
        // How long a cell of a simulation took is in its line.
        if line != SIMULATE {
            assert_eq!(err, usual, "{line}");
        }
    }
}

#[test]
fn a_standard_error_that_cannot_be_written_changes_nothing_else() {
    let commands = COMMANDS.into_iter();
    let wrong = [("explain missing", 1), ("explain", 2), ("nonsense", 2)];
    for (line, expected) in commands.chain(wrong) {
        let (_, usual, _) = seen(line, To::Us, To::Us);
        for err in [To::FullDisk, To::Nobody] {
            let (code, out, _) = seen(line, To::Us, err);
            assert_eq!(
                (code, out),
                (Some(expected), usual.clone()),
                "{line} {err:?}"
            );
        }
    }
}

#[test]
fn where_nothing_can_be_written_the_exit_code_tells() {
    for (line, _) in COMMANDS {
        let (code, ..) = seen(line, To::FullDisk, To::FullDisk);
        assert_eq!(code, Some(1), "{line}");
    }
}

/// As a shell does with `2>&-` and `>&-`.
#[test]
fn closed_outputs_are_no_outputs() {
    for (closed, out) in [("2>&-", true), (">&-", false), (">&- 2>&-", false)] {
        let folder = Folder::new();
        let output = Command::new("sh")
            .args(["-c", &format!("exec \"$0\" check valid {closed}")])
            .arg(env!("CARGO_BIN_EXE_prefix-router"))
            .current_dir(folder.path())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{closed}");
        assert_eq!(output.stdout.starts_with(b"valid\n"), out, "{closed}");
    }
}

#[track_caller]
fn check_fits(line: [&str; 2], columns: &[(&str, usize)]) {
    let folder = Folder::new();
    for &(columns, widest) in columns {
        let output = Command::new(env!("CARGO_BIN_EXE_prefix-router"))
            .args(line)
            .current_dir(folder.path())
            .env("COLUMNS", columns)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let found = text.lines().map(|line| line.chars().count()).max();
        // Full but for less than a word.
        let full = found.is_some_and(|found| found <= widest && found + 8 > widest);
        assert!(full, "COLUMNS={columns}: {found:?}\n{text}");
    }
}

#[test]
fn an_explanation_fits_the_columns_that_are_named() {
    check_fits(["explain", "body"], &[("40", 40), ("60", 60), ("200", 80)]);
}

#[test]
fn what_a_configuration_means_fits_the_columns_that_are_named() {
    // At 40 a header's name alone is wider than what is left of a row.
    check_fits(["check", "valid"], &[("60", 60), ("200", 80)]);
}

/// A server has something to end: what it started ends as it does after any other error.
#[test]
fn a_server_that_cannot_say_where_it_listens_ends() {
    let (code, _, err) = seen("engine --port 0", To::FullDisk, To::Us);
    assert_eq!((code, err.as_str()), (Some(1), FULL));
}
