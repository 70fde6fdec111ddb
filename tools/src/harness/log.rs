//! Reads Envoy's log: its lines, and the one that says why it did not start.

use std::fs;
use std::path::Path;

/// How many lines stand in for a reason when none is found.
const TAIL_LINES: usize = 5;

/// The text of the log so far.
pub(super) fn read(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

/// Why Envoy gave up: what the filter said, else the first critical line.
pub(super) fn reason(log: &str) -> String {
    let level = |line: &str, level: &str| line.contains(&format!("][{level}]["));
    let serious = |line: &&str| level(line, "critical") || level(line, "error");
    let of_filter = log
        .lines()
        .filter(serious)
        .find(|line| line.contains("wasm log "));
    let critical = || log.lines().find(|line| level(line, "critical"));
    if let Some(line) = of_filter.or_else(critical) {
        return message(line).to_owned();
    }
    let lines: Vec<&str> = log.lines().collect();
    let from = lines.len().saturating_sub(TAIL_LINES);
    lines.get(from..).unwrap_or_default().join("\n")
}

/// A log line without time, thread, level and source: `[…][…][error][wasm] [….cc:104] message`.
fn message(line: &str) -> &str {
    let mut rest = line;
    while rest.starts_with('[')
        && let Some((_, after)) = rest.split_once(']')
    {
        rest = after.trim_start();
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(log: &str, expected: &str) {
        assert_eq!(reason(log), expected);
    }

    #[test]
    fn the_filters_own_words_come_first() {
        check(
            "[t][1][info][main] [server.cc:1] starting\n\
             [t][1][critical][wasm] [wasm.cc:6] Plugin failed\n\
             [t][1][error][wasm] [context.cc:1] wasm log prefix_router prefix_router: config /limit: no\n",
            "wasm log prefix_router prefix_router: config /limit: no",
        );
    }

    #[test]
    fn else_the_first_critical_line() {
        check(
            "[t][1][error][config] [a.cc:1] something\n\
             [t][1][critical][main] [server.cc:1] cannot bind '127.0.0.1:80': Address already in use\n\
             [t][1][critical][main] [server.cc:2] later\n",
            "cannot bind '127.0.0.1:80': Address already in use",
        );
    }

    #[test]
    fn else_the_end_of_the_log() {
        check("1\n2\n3\n4\n5\n6\n", "2\n3\n4\n5\n6");
        check("", "");
    }
}
