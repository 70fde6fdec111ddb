//! The report as a table of at most 80 columns.
//!
//! Guarantee: no line is wider than a terminal of 80 columns. Not here: the figures (mod.rs).

use std::fmt::Write as _;

use super::{Report, Run, gain};

/// Columns of the narrowest terminal that is served.
pub const WIDTH: usize = 80;

/// The report as text.
#[must_use]
pub fn render(report: &Report) -> String {
    let mut out: Vec<String> = Vec::new();
    for condition in &report.conditions {
        out.extend(wrap(condition));
    }
    out.push(String::new());
    out.extend(figures(report).lines().map(str::to_owned));
    for run in report.runs.iter().filter(|run| !run.decisions.is_empty()) {
        let total = run.decisions.values().sum::<u64>().max(1) as f64;
        let kinds = run.decisions.iter();
        let kinds = kinds.map(|(kind, count)| {
            format!("{kind} {count} ({:.1} %)", *count as f64 * 100.0 / total)
        });
        let kinds: Vec<String> = kinds.collect();
        out.push(String::new());
        out.extend(wrap(&format!(
            "Decisions of {}: {}.",
            run.policy,
            kinds.join(", ")
        )));
    }
    out.push(String::new());
    if let Some((ours, others)) = report.runs.split_last() {
        for line in others.iter().filter_map(|base| gain(base, ours)) {
            out.extend(wrap(&line));
        }
    }
    for doubt in report.doubts() {
        out.extend(wrap(&format!("Attention: {doubt}")));
    }
    out.join("\n") + "\n"
}

fn figures(report: &Report) -> String {
    type Figure = fn(&Run) -> String;
    let mut rows: Vec<(&str, Figure)> = vec![
        ("requests", |run| run.requests.to_string()),
        ("errors", |run| run.failed().to_string()),
        ("cache hits, % of prompt tokens", |run| {
            format!("{:.1}", run.hit_rate * 100.0)
        }),
        ("TTFT P50, ms", |run| ms(run.ttft(0.5))),
        ("TTFT P90, ms", |run| ms(run.ttft(0.9))),
        ("TTFT P99, ms", |run| ms(run.ttft(0.99))),
        ("output tokens/s", |run| {
            format!("{:.0}", run.output_tokens_per_s)
        }),
        ("busiest host / mean", |run| {
            format!("{:.2}", run.max_over_mean())
        }),
    ];
    // Where the load does not wait for answers, it is the load's, not the policies'.
    if report.runs.iter().all(|run| run.requests_per_s.is_some()) {
        rows.push(("requests/s", |run| {
            format!("{:.2}", run.requests_per_s.unwrap_or(0.0))
        }));
    }
    let mut out = String::new();
    let mut line = |name: &str, values: &mut dyn Iterator<Item = String>| {
        let values = values.fold(String::new(), |line, value| format!("{line}{value:>15}"));
        let _ = writeln!(out, "{name:<32}{values}");
    };
    line("", &mut report.runs.iter().map(|run| run.policy.to_owned()));
    for (name, figure) in rows {
        line(name, &mut report.runs.iter().map(figure));
    }
    let hosts = report.runs.first().map_or(&[][..], |run| &run.shares);
    for (host, _) in hosts {
        let share = |run: &Run| {
            let total = run
                .shares
                .iter()
                .map(|(_, count)| count)
                .sum::<u64>()
                .max(1);
            let found = run.shares.iter().find(|(name, _)| name == host);
            found.map_or("-".into(), |(_, count)| {
                format!("{:.1}", *count as f64 * 100.0 / total as f64)
            })
        };
        line(&format!("% on {host}"), &mut report.runs.iter().map(share));
    }
    out
}

fn ms(value: Option<f64>) -> String {
    value.map_or("-".into(), |ms| format!("{ms:.0}"))
}

/// Breaks a sentence into lines that fit, never between a number and its `%`.
#[must_use]
pub fn wrap(text: &str) -> Vec<String> {
    wrap_to(text, WIDTH)
}

/// The same for lines of another width.
#[must_use]
pub fn wrap_to(text: &str, width: usize) -> Vec<String> {
    let text = text.replace(" %", "\u{a0}%");
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let Some(line) = lines.last_mut() else {
            continue;
        };
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
        } else {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
        .into_iter()
        .map(|line| line.replace('\u{a0}', " "))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn no_line_begins_with_a_percent_sign() {
        let text = format!("{} 4.5 %).", "x".repeat(WIDTH - 4));
        assert_eq!(wrap(&text), ["x".repeat(WIDTH - 4), "4.5 %).".to_owned()]);
    }

    #[test]
    fn the_table_fits_eighty_columns_and_has_every_figure() {
        let text = render(&report());
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{line:?}");
        }
        for part in [
            "cache hits, % of prompt tokens",
            "83.0",
            "446",
            "% on 127.0.0.1:9006",
            "Decisions of prefix_router: divert 100 (7.1 %), home 1300 (92.9 %).",
            "least_request: cache hits",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }
}
