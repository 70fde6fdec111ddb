//! Proves that the README's tables are those of the code and that its examples are accepted.
//!
//! `UPDATE=1 cargo test --test readme` rewrites the tables.

#![allow(clippy::unwrap_used)]

use prefix_router::config::{Absent, Config, Kind, OPTIONS, Opt};
use prefix_router::names::METRICS;
use std::path::{Path, PathBuf};

fn readme() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")
}

/// Compares the README's part between the two markers of `name` with `table`, or rewrites it.
#[track_caller]
fn check_table(name: &str, table: &str) {
    let text = std::fs::read_to_string(readme()).unwrap();
    let start = format!("<!-- {name}: generated, see CONTRIBUTING.md -->\n");
    let end = format!("<!-- end of {name} -->");
    let (before, rest) = text
        .split_once(&start)
        .expect("README.md has the first marker");
    let (found, after) = rest
        .split_once(&end)
        .expect("README.md has the second marker");
    if std::env::var_os("UPDATE").is_none() {
        assert_eq!(
            found, table,
            "the README's {name} are stale: UPDATE=1 cargo test --test readme"
        );
        return;
    }
    assert!(
        std::env::var_os("CI").is_none(),
        "UPDATE is for people: CI only compares"
    );
    std::fs::write(readme(), format!("{before}{start}{table}{end}{after}")).unwrap();
}

/// A cell: nothing in it may end it.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn takes(option: &Opt) -> String {
    match option.kind {
        Kind::Integer { min, max, unit } => format!("{min}–{max} {unit}"),
        Kind::Decimal { min, max, unit } => format!("{min}–{max} {unit}"),
        Kind::Choice(words) => {
            let quoted: Vec<_> = words.iter().map(|word| format!("`\"{word}\"`")).collect();
            quoted.join(", ")
        }
        kind => kind.to_string(),
    }
}

fn default(option: &Opt) -> String {
    match option.absent {
        Absent::Required => "required".into(),
        Absent::Means(text) => text.into(),
        Absent::Integer(value) => format!("`{value}`"),
        Absent::Decimal(value) => format!("`{value}`"),
        Absent::Bool(value) => format!("`{value}`"),
        Absent::Text(text) => format!("`{text:?}`"),
        Absent::Texts(texts) => format!("`{texts:?}`"),
    }
}

fn options() -> String {
    let mut table = String::from("| Option | Takes | Default | Meaning |\n|---|---|---|---|\n");
    for option in OPTIONS {
        table.push_str(&format!(
            "| `{}` | {} | {} | {} |\n",
            option.path,
            cell(&takes(option)),
            cell(&default(option)),
            cell(option.doc)
        ));
    }
    table
}

fn metrics() -> String {
    let mut table = String::from("| Metric | Kind | Meaning |\n|---|---|---|\n");
    for metric in METRICS {
        table.push_str(&format!(
            "| `{}{{{}}}` | {} | {} |\n",
            metric.name,
            metric.labels.join(", "),
            format!("{:?}", metric.kind).to_lowercase(),
            cell(metric.doc)
        ));
    }
    table
}

/// One test, since both tables are in one file.
#[test]
fn the_tables_are_those_of_the_code() {
    check_table("options", &options());
    check_table("metrics", &metrics());
}

#[test]
fn every_json_example_is_accepted() {
    let text = std::fs::read_to_string(readme()).unwrap();
    let examples: Vec<&str> = text
        .split("```json\n")
        .skip(1)
        .filter_map(|rest| rest.split_once("```"))
        .map(|(example, _)| example)
        .filter(|example| example.contains("\"pools\""))
        .collect();
    assert!(!examples.is_empty(), "README.md shows no config");
    for example in examples {
        Config::parse(example.as_bytes()).unwrap_or_else(|error| panic!("{error}\n{example}"));
    }
}
