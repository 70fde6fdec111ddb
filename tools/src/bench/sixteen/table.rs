//! The sixteen setups as tables: for a terminal of 80 columns, as Markdown, and as JSON.
//!
//! Guarantee: AWS's published figures stand under a caption that says what ours are. Not here:
//! plots (page.rs).

use std::fmt::Write as _;

use serde::Serialize;

use super::row::{Figures, Pair, Row};
use crate::bench::store::Key;
use crate::report::table::wrap;

/// Doubts about single runs that are written out: on a busy machine most have one.
const DOUBTS_SHOWN: usize = 3;

/// What ours and AWS's figures are, above both.
pub(super) const CAPTION: &str = "Ours: simulated engines behind real Envoys, under a W1 whose \
    number of prompts is fitted so that random routing gets the 25 % that AWS reports. AWS's: from \
    its announcement, with engines and traffic of its own. The two show the same kind of gain; they \
    are not measurements of the same thing.";

/// AWS's published figures, against random routing.
struct Published {
    hits_random: &'static str,
    hits: &'static str,
    ttft_p50: &'static str,
    throughput: &'static str,
    shares: &'static str,
}

const AWS: Published = Published {
    hits_random: "25",
    hits: "80",
    ttft_p50: "-77 %",
    throughput: "+16 %",
    shares: "0.92-1.08",
};

/// All rows and what they hold for.
pub(super) struct Results {
    /// In sentences.
    pub conditions: Vec<String>,
    /// Commit, seed and sizes.
    pub key: Key,
    /// The rows, in the cells' order.
    pub rows: Vec<Row>,
}

#[derive(Serialize)]
struct JsonResults<'a> {
    rows: &'a [Row],
    conditions: &'a [String],
    seed: u64,
    commit: &'a str,
}

impl Results {
    /// As one JSON object.
    pub(super) fn json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string(&JsonResults {
            rows: &self.rows,
            conditions: &self.conditions,
            seed: self.key.seed,
            commit: &self.key.commit,
        })?)
    }

    /// What the rows say together, in sentences.
    pub(super) fn findings(&self) -> Vec<String> {
        let mut found = Vec::new();
        let over = |value: &dyn Fn(&Row) -> Option<f64>| {
            let values: Vec<f64> = self.rows.iter().filter_map(value).collect();
            let least = values.iter().copied().reduce(f64::min)?;
            Some((least, values.into_iter().reduce(f64::max)?))
        };
        if let Some((least, most)) = over(&|row| Some(row.long.prefix_router.hit_rate * 100.0)) {
            found.push(format!(
                "Cache hits on long prompts: {least:.1} to {most:.1} % of the prompt tokens."
            ));
        }
        if let Some((least, most)) = over(&|row| Some(change(&row.long)? * 100.0)) {
            found.push(format!(
                "P50 TTFT on long prompts at 80 % load: {least:+.0} to {most:+.0} % against random."
            ));
        }
        if let Some((least, most)) = over(&|row| Some(row.high.throughput_gain() * 100.0)) {
            found.push(format!(
                "Tokens/s at 117 % load: {least:+.1} to {most:+.1} % against random."
            ));
        }
        if let Some((least, most)) = over(&|row| Some(change(&row.short)? * 100.0)) {
            found.push(format!(
                "P50 TTFT on short prompts, where nothing is shared: {least:+.0} to {most:+.0} %."
            ));
        }
        if let Some((least, most)) = over(&|row| Some(row.long.prefix_router.shares.1)) {
            found.push(format!(
                "The busiest host got {least:.2} to {most:.2} times the mean's requests at 80 % load."
            ));
        }
        if let Some((least, most)) = over(&|row| self.second_gateway(row)) {
            let all: Vec<f64> = self
                .rows
                .iter()
                .filter_map(|row| self.second_gateway(row))
                .collect();
            let mean = all.iter().sum::<f64>() / all.len().max(1) as f64;
            found.push(format!(
                "A second gateway that shares nothing with the first changes the hits on long \
                 prompts, at both loads, by {mean:+.1} points in the mean ({least:+.1} to {most:+.1})."
            ));
        }
        found
    }

    /// Points of hits that a second gateway changes, for the row of one gateway.
    fn second_gateway(&self, one: &Row) -> Option<f64> {
        let name = format!("{}-2", one.cell.strip_suffix("-1")?);
        let two = self.rows.iter().find(|row| row.cell == name)?;
        let hits = |row: &Row| {
            (row.long.prefix_router.hit_rate + row.high.prefix_router.hit_rate) / 2.0 * 100.0
        };
        Some(hits(two) - hits(one))
    }

    /// What is not to be believed, and what failed, in sentences.
    pub(super) fn doubts(&self) -> Vec<String> {
        let mut doubts: Vec<String> = self.rows.iter().flat_map(Row::doubts).collect();
        let more = doubts.len().saturating_sub(DOUBTS_SHOWN);
        if more > 0 {
            doubts.truncate(DOUBTS_SHOWN);
            doubts.push(format!(
                "{more} more of that kind in the setups marked !: the file of rows has them all."
            ));
        }
        for row in &self.rows {
            for (name, pair) in row.pairs() {
                for (policy, figures) in [
                    ("random", &pair.random),
                    ("prefix_router", &pair.prefix_router),
                ] {
                    if figures.errors > 0 {
                        doubts.push(format!(
                            "{}, {name}: {policy}: {} requests failed.",
                            row.cell, figures.errors
                        ));
                    }
                }
            }
        }
        doubts
    }
}

/// How much longer ours takes to the first token in the median, e.g. −0.95.
fn change(pair: &Pair) -> Option<f64> {
    let (base, _) = pair.random.ttft_ms?;
    let (ours, _) = pair.prefix_router.ttft_ms?;
    (base > 0.0).then(|| ours / base - 1.0)
}

/// The tables for a terminal.
pub(super) fn terminal(results: &Results) -> String {
    let mut out: Vec<String> = Vec::new();
    for text in results
        .conditions
        .iter()
        .map(String::as_str)
        .chain([CAPTION])
    {
        out.extend(wrap(text));
    }
    out.push(String::new());
    out.push(figures(results));
    for line in results.findings() {
        out.extend(wrap(&line));
    }
    for doubt in results.doubts() {
        out.extend(wrap(&format!("Attention: {doubt}")));
    }
    out.push(format!(
        "Seed {}, commit {}.",
        results.key.seed, results.key.commit
    ));
    out.join("\n") + "\n"
}

/// The figures alone, with what their columns mean.
pub(super) fn figures(results: &Results) -> String {
    let mut out = long_table(results);
    out.push(String::new());
    out.extend(other_table(results));
    out.push(String::new());
    out.extend(wrap(NOTE));
    out.join("\n")
}

const NOTE: &str = "rand: the same Envoys without the filter, random. hosts: requests of the host \
    that got fewest and of the one that got most, by the mean's. ~: times as the engines tell them \
    (from a histogram's buckets), because the client of a whole answer sees no first token. us: \
    the filter's own time for a decision.";

fn long_table(results: &Results) -> Vec<String> {
    let mut out = vec![
        format!(
            "{:<27}{:^12}{:^15}{:^15}{:>11}",
            "long prompts, 80 % load", "hits, %", "TTFT P50, ms", "TTFT P90, ms", "hosts"
        ),
        format!(
            "{:<27}{:>6}{:>6}{:>8}{:>7}{:>8}{:>7}{:>11}",
            "", "rand", "ours", "rand", "ours", "rand", "ours", "ours"
        ),
    ];
    for row in &results.rows {
        let (random, ours) = (&row.long.random, &row.long.prefix_router);
        let (before, after) = (times(random), times(ours));
        out.push(format!(
            "{:<27}{:>6.1}{:>6.1}{:>8}{:>7}{:>8}{:>7}{:>11}",
            name(row),
            random.hit_rate * 100.0,
            ours.hit_rate * 100.0,
            before.0,
            after.0,
            before.1,
            after.1,
            shares(ours)
        ));
    }
    out.push(format!(
        "{:<27}{:>6}{:>6}{:>8}{:>7}{:>8}{:>7}{:>11}",
        "AWS's announcement", AWS.hits_random, AWS.hits, "", AWS.ttft_p50, "", "", AWS.shares
    ));
    out
}

fn other_table(results: &Results) -> Vec<String> {
    let mut out = vec![
        format!(
            "{:<27}{:^24}{:^15}{:>8}{:>6}",
            "", "tokens/s, 117 % load", "short: P50, ms", "ended", "us"
        ),
        format!(
            "{:<27}{:>7}{:>7}{:>10}{:>8}{:>7}{:>8}{:>6}",
            "", "rand", "ours", "gain", "rand", "ours", "well, %", "ours"
        ),
    ];
    for row in &results.rows {
        let (random, ours) = (&row.high.random, &row.high.prefix_router);
        out.push(format!(
            "{:<27}{:>7.0}{:>7.0}{:>10}{:>8}{:>7}{:>8.1}{:>6}",
            name(row),
            random.output_tokens_per_s,
            ours.output_tokens_per_s,
            format!("{:+.1} %", row.high.throughput_gain() * 100.0),
            times(&row.short.random).0,
            times(&row.short.prefix_router).0,
            row.success() * 100.0,
            micros(row.long.prefix_router.decision_us)
        ));
    }
    out.push(format!(
        "{:<27}{:>7}{:>7}{:>10}",
        "AWS's announcement", "", "", AWS.throughput
    ));
    out
}

/// The table as Markdown.
pub(super) fn markdown(results: &Results) -> String {
    let mut out = String::new();
    for text in &results.conditions {
        let _ = writeln!(out, "- {text}");
    }
    let _ = writeln!(out, "\n{CAPTION}\n");
    let _ = writeln!(
        out,
        "| setup | hits %, random | ours | TTFT P50 ms, random | ours | change | TTFT P90 ms, \
         random | ours | hosts, of the mean | tokens/s at 117 %, random | ours | gain | short: hits \
         %, random | ours | TTFT P50 ms, random | ours | ended well | decision µs | Envoy CPU \
         µs/request, random | ours |\n|---|{}",
        "--:|".repeat(19)
    );
    for row in &results.rows {
        let cells = markdown_cells(row);
        let _ = writeln!(out, "| {} |", cells.join(" | "));
    }
    let _ = writeln!(
        out,
        "| AWS's announcement | {} | {} | | | {} | | | {} | | | {} | | | | | | | | |",
        AWS.hits_random, AWS.hits, AWS.ttft_p50, AWS.shares, AWS.throughput
    );
    let _ = writeln!(out, "\n{}\n", NOTE.replace("us:", "decision:"));
    for line in results.findings() {
        let _ = writeln!(out, "- {line}");
    }
    for doubt in results.doubts() {
        let _ = writeln!(out, "- Attention: {doubt}");
    }
    let _ = writeln!(
        out,
        "\nSeed {}, commit {}.",
        results.key.seed, results.key.commit
    );
    out
}

fn markdown_cells(row: &Row) -> Vec<String> {
    let (long, high, short) = (&row.long, &row.high, &row.short);
    let hits = |figures: &Figures| format!("{:.1}", figures.hit_rate * 100.0);
    let tokens = |figures: &Figures| format!("{:.0}", figures.output_tokens_per_s);
    let change = change(long).map_or("–".into(), |change| format!("{:+.0} %", change * 100.0));
    vec![
        name(row),
        hits(&long.random),
        hits(&long.prefix_router),
        times(&long.random).0,
        times(&long.prefix_router).0,
        change,
        times(&long.random).1,
        times(&long.prefix_router).1,
        shares(&long.prefix_router),
        tokens(&high.random),
        tokens(&high.prefix_router),
        format!("{:+.1} %", high.throughput_gain() * 100.0),
        hits(&short.random),
        hits(&short.prefix_router),
        times(&short.random).0,
        times(&short.prefix_router).0,
        format!("{:.1} %", row.success() * 100.0),
        micros(long.prefix_router.decision_us),
        micros(long.random.envoy_cpu_us),
        micros(long.prefix_router.envoy_cpu_us),
    ]
}

/// The cell's name, marked if its figures are not to be believed.
fn name(row: &Row) -> String {
    let mark = if row.doubts().is_empty() { "" } else { "!" };
    format!("{}{mark}", row.cell)
}

fn shares(figures: &Figures) -> String {
    format!("{:.2}-{:.2}", figures.shares.0, figures.shares.1)
}

/// P50 and P90 of the time to the first token.
fn times(figures: &Figures) -> (String, String) {
    let mark = if figures.ttft_of_engines { "~" } else { "" };
    let text = |ms: f64| format!("{mark}{ms:.0}");
    let of = |(p50, p90)| (text(p50), text(p90));
    figures.ttft_ms.map_or(("–".into(), "–".into()), of)
}

fn micros(value: Option<f64>) -> String {
    value.map_or("–".into(), |us| format!("{us:.0}"))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::row::tests::{key, row};
    use super::*;

    pub(in super::super) fn results() -> Results {
        let mut doubtful = row("components-openai-stream-2", 0.9);
        let slow = "random: the engines lost 2.0 % of their time".to_owned();
        doubtful.long.random.doubts.push(slow);
        let mut whole = row("single-native-whole-1", 0.902);
        whole.long.random.ttft_of_engines = true;
        whole.high.prefix_router.errors = 7;
        Results {
            conditions: vec!["Seven engines.".to_owned()],
            key: key(1),
            rows: vec![
                row("single-native-stream-1", 0.91),
                row("single-native-stream-2", 0.907),
                whole,
                doubtful,
            ],
        }
    }

    #[test]
    fn the_terminal_s_table_fits_eighty_columns_and_says_what_it_is() {
        let text = terminal(&results());
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line:?}");
        }
        for line in [
            "single-native-stream-1       25.0  91.0    1400     40    5600    160  0.93-1.08",
            "single-native-whole-1        25.0  90.2   ~1400     40   ~5600    160  0.93-1.08",
            "single-native-stream-1         900   1080   +20.0 %    1400     40   100.0    15",
            "single-native-whole-1          900   1080   +20.0 %    1400     40    99.0    15",
            "AWS's announcement             25    80          -77 %                 0.92-1.08",
        ] {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
        for part in [
            "fitted so that random",
            "components-openai-stream-2!",
            "Attention: components-openai-stream-2, long: random: the engines lost 2.0 %",
            "single-native-whole-1, 117 %: prefix_router: 7 requests failed.",
            "by -0.3 points in the mean (-0.3 to -0.3)",
        ] {
            let flat = text.replace('\n', " ");
            assert!(flat.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn markdown_has_as_many_columns_in_every_line() {
        let text = markdown(&results());
        let columns = |line: &str| line.matches('|').count();
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with('|')).collect();
        assert_eq!(lines.len(), 2 + 4 + 1);
        for line in &lines {
            assert_eq!(columns(line), columns(lines[0]), "{line}");
        }
        assert!(
            text.contains("| 25.0 | 91.0 | 1400 | 40 | -97 % |"),
            "{text}"
        );
        assert!(text.contains(CAPTION));
    }

    #[test]
    fn json_has_the_rows_with_their_keys() {
        let json: serde_json::Value = serde_json::from_str(&results().json().unwrap()).unwrap();
        let row = &json["rows"][0];
        assert_eq!(row["cell"], "single-native-stream-1");
        assert_eq!(row["key"]["seed"], 1);
        assert_eq!(row["long"]["prefix_router"]["hit_rate"], 0.91);
        assert_eq!(row["high"]["random"]["output_tokens_per_s"], 900.0);
        assert_eq!(row["long"]["prefix_router"]["decision_us"], 14.6);
    }
}
