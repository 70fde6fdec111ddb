//! What was measured as tables: for a terminal of 80 columns, as Markdown, as JSON.
//!
//! Guarantee: every router that played is in every table of its cell, ours among the others, in one
//! order; a figure that was not measured is a dash. Not here: plots (page.rs).

use std::fmt::Write as _;

use serde::Serialize;

use super::Results;
use super::plays::{Column, Part, Row, Spread};
use super::router::{self, Contestant, Told};
use super::{fleet, published};
use crate::report::table::wrap;

/// Columns of the narrowest terminal that is served.
const WIDTH: usize = 80;

/// A figure that was not measured.
const NONE: &str = "–";

/// The whole for a terminal.
pub(super) fn terminal(results: &Results) -> String {
    let mut out: Vec<String> = Vec::new();
    for part in &results.parts {
        out.push(part.title.to_owned());
        out.extend(wrap(part.about));
        for (cell, rows) in cells(part, results) {
            out.push(String::new());
            out.push(cell);
            out.extend(lines(part, &rows));
        }
        out.push(String::new());
    }
    for line in results.findings().iter().chain(&results.conditions) {
        out.extend(wrap(line));
    }
    for fault in results.faults() {
        out.extend(wrap(&format!("Attention: {fault}")));
    }
    out.join("\n") + "\n"
}

/// The whole as Markdown: first the README's table, then each part's.
pub(super) fn markdown(results: &Results) -> String {
    let mut out = String::from("# Beside other routers\n\n");
    out += &readme(results);
    for part in &results.parts {
        let _ = writeln!(out, "\n## {}\n\n{}", part.title, part.about);
        for (cell, rows) in cells(part, results) {
            let _ = writeln!(out, "\n### {cell}\n");
            out += &markdown_table(part, &rows);
        }
    }
    let _ = writeln!(out, "\n## Not measured\n");
    for one in &published::ALL {
        let _ = writeln!(
            out,
            "- {}: {}. Its own figures: {} ({}).",
            one.name, one.why, one.figures, one.source
        );
    }
    let _ = writeln!(out, "\n## Conditions\n");
    for line in results.findings().iter().chain(&results.conditions) {
        let _ = writeln!(out, "- {line}");
    }
    for fault in results.faults() {
        let _ = writeln!(out, "- Attention: {fault}");
    }
    out
}

#[derive(Serialize)]
struct Json<'a> {
    rows: Vec<Row>,
    routers: Vec<JsonRouter>,
    conditions: &'a [String],
    faults: Vec<String>,
    seed: u64,
    commit: &'a str,
}

#[derive(Serialize)]
struct JsonRouter {
    name: &'static str,
    version: String,
    setting: &'static str,
    told: &'static str,
}

/// The whole as one JSON object.
pub(super) fn json(results: &Results) -> anyhow::Result<String> {
    let routers = results.contestants.iter().map(|one| JsonRouter {
        name: one.name,
        version: results.version(one),
        setting: one.setting,
        told: told(one.told),
    });
    Ok(serde_json::to_string(&Json {
        rows: results
            .parts
            .iter()
            .flat_map(|part| results.rows(part))
            .collect(),
        routers: routers.collect(),
        conditions: &results.conditions,
        faults: results.faults(),
        seed: results.key.seed,
        commit: &results.key.commit,
    })?)
}

/// What clients have to say.
pub(super) fn told(told: Told) -> &'static str {
    match told {
        Told::Nothing => "nothing",
        Told::Tenant => "a tenant header",
        Told::Session => "a session header",
    }
}

/// The rows of a part by cell, routers in their own order.
pub(super) fn cells(part: &Part, results: &Results) -> Vec<(String, Vec<Row>)> {
    let mut cells: Vec<(String, Vec<Row>)> = Vec::new();
    for row in results.rows(part) {
        match cells.iter_mut().find(|(cell, _)| *cell == row.cell) {
            Some((_, rows)) => rows.push(row),
            None => cells.push((row.cell.clone(), vec![row])),
        }
    }
    for (_, rows) in &mut cells {
        rows.sort_by_key(|row| router::place(&row.router));
    }
    cells
}

/// A figure with its spread, e.g. `197 (195-200)`; the spread is left out where there is none.
fn shown(spread: Option<&Spread>, digits: usize) -> String {
    let Some(spread) = spread else {
        return NONE.to_owned();
    };
    let text = |value: f64| format!("{value:.digits$}");
    let (median, min, max) = (text(spread.median), text(spread.min), text(spread.max));
    if min == max {
        return median;
    }
    format!("{median} ({min}-{max})")
}

/// The columns of a table: those that are told only where they are not 0 may be missing.
fn columns<'a>(part: &'a Part, rows: &[Row]) -> Vec<&'a Column> {
    let seen = |column: &&Column| {
        let found = |row: &Row| {
            let spread = row.figures.get(column.figure);
            spread.is_some_and(|spread| spread.max > 0.0 || !column.quiet)
        };
        rows.iter().any(found)
    };
    part.columns.iter().filter(seen).collect()
}

/// Headings and figures of a table, as texts.
fn texts(part: &Part, rows: &[Row]) -> (Vec<String>, Vec<Vec<String>>) {
    let columns = columns(part, rows);
    let mut heads = vec!["router".to_owned()];
    heads.extend(columns.iter().map(|column| column.head.to_owned()));
    let with_hosts = part.hosts && rows.iter().any(|row| !row.hosts.is_empty());
    if with_hosts {
        heads.push("hosts".to_owned());
    }
    let line = |row: &Row| {
        let mut line = vec![row.router.clone()];
        let figures = columns.iter();
        line.extend(figures.map(|one| shown(row.figures.get(one.figure), one.digits)));
        if with_hosts {
            let hosts: Vec<String> = row.hosts.iter().map(ToString::to_string).collect();
            line.push(hosts.join("/"));
        }
        line
    };
    let lines = rows.iter().map(line).collect();
    (heads, lines)
}

/// A table for a terminal; what does not fit its width follows below, the routers named again.
fn lines(part: &Part, rows: &[Row]) -> Vec<String> {
    let (heads, rows) = texts(part, rows);
    let all: Vec<&Vec<String>> = std::iter::once(&heads).chain(&rows).collect();
    let width = |at: usize| {
        let texts = all.iter().filter_map(|line| line.get(at));
        texts.map(|text| text.chars().count()).max().unwrap_or(0)
    };
    let mut out = Vec::new();
    let mut next = 1;
    while next < heads.len() {
        let mut columns = vec![(0, width(0))];
        let mut filled = width(0);
        while next < heads.len() {
            filled += width(next) + 2;
            if filled > WIDTH && columns.len() > 1 {
                break;
            }
            columns.push((next, width(next) + 2));
            next += 1;
        }
        out.extend(all.iter().map(|line| aligned(line, &columns)));
    }
    out
}

/// Some columns of a line, the first one at the left, the others at the right of their width.
fn aligned(line: &[String], columns: &[(usize, usize)]) -> String {
    let mut out = String::new();
    for &(at, width) in columns {
        let text = line.get(at).map_or("", String::as_str);
        let space = " ".repeat(width.saturating_sub(text.chars().count()));
        out += &if at == 0 {
            format!("{text}{space}")
        } else {
            format!("{space}{text}")
        };
    }
    out.trim_end().to_owned()
}

fn markdown_table(part: &Part, rows: &[Row]) -> String {
    let (heads, rows) = texts(part, rows);
    markdown_lines(&heads, &rows)
}

/// The first column stands left, the others right.
fn markdown_lines(heads: &[String], rows: &[Vec<String>]) -> String {
    let mut out = format!("| {} |\n|---|", heads.join(" | "));
    out += &"---:|".repeat(heads.len().saturating_sub(1));
    out.push('\n');
    for row in rows {
        let _ = writeln!(out, "| {} |", row.join(" | "));
    }
    out
}

/// A column of the README's table.
struct Headline {
    head: &'static str,
    part: &'static str,
    cell: &'static str,
    figure: &'static str,
    digits: usize,
}

const fn headline(
    head: &'static str,
    part: &'static str,
    cell: &'static str,
    figure: &'static str,
    digits: usize,
) -> Headline {
    Headline {
        head,
        part,
        cell,
        figure,
        digits,
    }
}

/// One system prompt that all share is what tells routers apart.
const SHARED: &str = "1 system prompt, 16 at once";

/// What the README shows: one line a router, medians.
const HEADLINES: [Headline; 8] = [
    headline("hits %", "fleet", fleet::LOAD, "hits", 1),
    headline("TTFT P50, ms", "fleet", fleet::LOAD, "p50", 0),
    headline("turns kept of 200", "conversations", SHARED, "kept", 0),
    headline("busiest host", "conversations", SHARED, "share", 2),
    headline(
        "new host gets, %",
        "scaling",
        "a fifth host joins",
        "new",
        1,
    ),
    headline(
        "host killed: failed",
        "scaling",
        "one of four is killed",
        "lost",
        0,
    ),
    headline("µs at 4 KB", "cpu", "4 KB", "us", 0),
    headline("µs at 32 KB", "cpu", "32 KB", "us", 0),
];

/// The README's table.
pub(super) fn readme(results: &Results) -> String {
    let all: Vec<Row> = results
        .parts
        .iter()
        .flat_map(|part| results.rows(part))
        .collect();
    let measured = |headline: &&Headline| {
        let of = |row: &Row| row.part == headline.part && row.cell == headline.cell;
        all.iter().any(of)
    };
    let headlines: Vec<&Headline> = HEADLINES.iter().filter(measured).collect();
    let mut heads = vec!["router".to_owned(), "clients tell it".to_owned()];
    heads.extend(headlines.iter().map(|one| one.head.to_owned()));
    let line = |contestant: &Contestant| {
        let mut line = vec![contestant.name.to_owned(), told(contestant.told).to_owned()];
        line.extend(headlines.iter().map(|one| {
            let row = all.iter().find(|row| {
                row.part == one.part && row.cell == one.cell && row.router == contestant.name
            });
            let spread = row.and_then(|row| row.figures.get(one.figure));
            spread.map_or(NONE.to_owned(), |spread| {
                format!("{:.*}", one.digits, spread.median)
            })
        }));
        line
    };
    let lines: Vec<Vec<String>> = results.contestants.iter().map(line).collect();
    markdown_lines(&heads, &lines)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::plays::tests::{key, play};
    use clap::ValueEnum as _;

    use super::super::What;
    use super::super::plays::{self, column};
    use super::*;

    pub(in super::super) fn results() -> Results {
        let one = "1 system prompt, 16 at once";
        let ten = "10 system prompts, 16 at once";
        let mut failed = play(ten, "smg-cache_aware", 1, 0.0);
        failed.figures.clear();
        failed.hosts.clear();
        failed.faults.push("it ended (exit status: 1)".to_owned());
        Results {
            parts: vec![What::Conversations.part()],
            contestants: Contestant::named(&[]).unwrap(),
            plays: vec![
                play(one, "sglang-cache_aware-tuned", 1, 195.0),
                play(one, "prefix_router", 1, 197.0),
                play(one, "prefix_router", 2, 200.0),
                play(ten, "prefix_router", 1, 200.0),
                failed,
            ],
            conditions: vec!["Envoy 1.40.0".to_owned()],
            missing: vec!["vllm-router 0.1.17 cannot be installed".to_owned()],
            envoy_version: "1.40.0".to_owned(),
            key: key(),
        }
    }

    #[test]
    fn the_terminal_s_tables_fit_eighty_columns_and_show_ours_first() {
        let text = terminal(&results());
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{line:?}");
        }
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        let at = lines
            .iter()
            .position(|line| *line == "1 system prompt, 16 at once")
            .unwrap();
        assert_eq!(
            lines[at + 1..at + 4],
            [
                "router                      kept of 200  share        hosts",
                "prefix_router             198 (197-200)   1.25  63/62/63/62",
                "sglang-cache_aware-tuned            195   1.25  63/62/63/62",
            ]
        );
        for part in [
            "smg-cache_aware            –      –",
            "Attention: vllm-router 0.1.17 cannot be installed",
            "Attention: conversations, 10 system prompts, 16 at once, smg-cache_aware: it",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn a_table_that_is_too_wide_goes_on_below() {
        let columns = const {
            &[
                column("kept", "a heading that takes up half of the width", 0),
                column("share", "another one that takes up half of it too", 2),
            ]
        };
        let part = Part {
            columns,
            hosts: false,
            ..*What::Conversations.part()
        };
        let rows = plays::rows(&part, &[play("one", "smg-cache_aware", 1, 7.0)]);
        let lines = lines(&part, &rows);
        assert_eq!(
            lines,
            [
                "router           a heading that takes up half of the width",
                "smg-cache_aware                                          7",
                "router           another one that takes up half of it too",
                "smg-cache_aware                                      1.25",
            ]
        );
    }

    #[test]
    fn markdown_has_as_many_columns_in_every_line_and_who_was_not_measured() {
        let text = markdown(&results());
        let mut columns = 0;
        for line in text.lines().filter(|line| line.starts_with('|')) {
            let found = line.matches('|').count();
            if !line.starts_with("| router") {
                assert_eq!(found, columns, "{line}");
            }
            columns = found;
        }
        for part in [
            "| prefix_router | nothing | 198 | 1.25 |",
            "llm-d",
            "KubeAI",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn a_headline_names_a_figure_of_its_part() {
        for one in &HEADLINES {
            let parts = What::value_variants().iter().map(|what| what.part());
            let part = parts.into_iter().find(|part| part.name == one.part);
            let columns = part.unwrap().columns;
            let found = columns.iter().any(|column| column.figure == one.figure);
            assert!(found, "{} has no {}", one.part, one.figure);
        }
    }

    #[test]
    fn json_has_rows_routers_and_faults() {
        let json: serde_json::Value = serde_json::from_str(&json(&results()).unwrap()).unwrap();
        assert_eq!(json["rows"][1]["router"], "prefix_router");
        assert_eq!(json["rows"][1]["figures"]["kept"]["median"], 198.5);
        assert_eq!(json["routers"][5]["version"], "sglang-router 0.3.2");
        assert_eq!(json["faults"].as_array().unwrap().len(), 2);
    }
}
