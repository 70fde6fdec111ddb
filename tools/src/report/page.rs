//! The report as one web page: figures, plots, conditions; light or dark as the reader has it.
//!
//! Guarantee: the page loads nothing from anywhere and runs no script. Not here: the plots.

use std::fmt::Write as _;

use super::{Report, Run, gain, plots};

const STYLE: &str = include_str!("page.css");

/// The page.
///
/// # Errors
/// If a plot cannot be drawn.
pub fn render(report: &Report) -> anyhow::Result<String> {
    let mut out = begin(
        &format!("demo on {}", report.engines),
        &format!(
            "The same load on {}, three ways to choose the engine",
            report.engines
        ),
    );
    if let Some((ours, others)) = report.runs.split_last() {
        for line in others.iter().filter_map(|base| gain(base, ours)) {
            let _ = writeln!(out, "<p class=\"gain\">{}</p>", escape(&line));
        }
    }
    for doubt in report.doubts() {
        let _ = writeln!(out, "<p class=\"doubt\">Attention: {}</p>", escape(&doubt));
    }
    figures(&mut out, report);
    legend(&mut out, report);
    let _ = writeln!(out, "<div class=\"plots\">");
    for (title, svg) in [
        ("Time to the first token", plots::ttft(report)?),
        ("Cache hits over time", plots::hits(report)?),
        ("Requests per host", plots::shares(report)?),
    ] {
        out.push_str(&figure(title, &svg));
    }
    let _ = writeln!(out, "</div>");
    hosts(&mut out, report);
    end(&mut out, &report.conditions, report.seed, &report.commit);
    Ok(out)
}

/// A page's beginning, with its name in the title.
#[must_use]
pub fn begin(name: &str, heading: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>prefix-router: {}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <h1>{}</h1>\n",
        escape(name),
        escape(heading)
    )
}

/// A plot under its title.
#[must_use]
pub fn figure(title: &str, svg: &str) -> String {
    let name = escape(title);
    let svg = svg.replacen(
        "<svg ",
        &format!("<svg role=\"img\" aria-label=\"{name}\" "),
        1,
    );
    format!("<figure><figcaption>{name}</figcaption>\n{svg}</figure>\n")
}

/// A page's end: what its figures hold for.
pub fn end(out: &mut String, conditions: &[String], seed: u64, commit: &str) {
    let _ = writeln!(out, "<h2>Conditions</h2>\n<ul>");
    for condition in conditions {
        let _ = writeln!(out, "<li>{}</li>", escape(condition));
    }
    let _ = writeln!(
        out,
        "<li>Seed {seed}, commit {}.</li>\n</ul>\n</body>\n</html>",
        escape(commit)
    );
}

fn figures(out: &mut String, report: &Report) {
    type Figure = fn(&Run) -> String;
    let mut rows: Vec<(&str, Figure)> = vec![
        ("Requests", |run| run.requests.to_string()),
        ("Errors", |run| run.failed().to_string()),
        ("Cache hits, % of prompt tokens", |run| {
            format!("{:.1}", run.hit_rate * 100.0)
        }),
        ("TTFT P50, ms", |run| ms(run.ttft(0.5))),
        ("TTFT P90, ms", |run| ms(run.ttft(0.9))),
        ("TTFT P99, ms", |run| ms(run.ttft(0.99))),
        ("Output tokens/s", |run| {
            format!("{:.0}", run.output_tokens_per_s)
        }),
        ("Busiest host / mean", |run| {
            format!("{:.2}", run.max_over_mean())
        }),
    ];
    // Where the load does not wait for answers, it is the load's, not the policies'.
    if report.runs.iter().all(|run| run.requests_per_s.is_some()) {
        rows.push(("Requests/s", |run| {
            format!("{:.2}", run.requests_per_s.unwrap_or(0.0))
        }));
    }
    let _ = write!(out, "<div class=\"scroll\"><table>\n<tr><th></th>");
    for run in &report.runs {
        let _ = write!(out, "<th>{}</th>", escape(run.policy));
    }
    let _ = writeln!(out, "</tr>");
    for (name, figure) in rows {
        let _ = write!(out, "<tr><th>{name}</th>");
        for run in &report.runs {
            let _ = write!(out, "<td>{}</td>", figure(run));
        }
        let _ = writeln!(out, "</tr>");
    }
    let _ = writeln!(out, "</table></div>");
}

fn legend(out: &mut String, report: &Report) {
    let _ = write!(out, "<p class=\"legend\">");
    for (index, run) in report.runs.iter().enumerate() {
        let _ = write!(
            out,
            "<span class=\"run{index}\">{}</span> ",
            escape(run.policy)
        );
    }
    let _ = writeln!(out, "</p>");
}

fn hosts(out: &mut String, report: &Report) {
    let _ = write!(
        out,
        "<h2>Requests per host</h2>\n<div class=\"scroll\"><table>\n<tr><th></th>"
    );
    for run in &report.runs {
        let _ = write!(out, "<th>{}</th>", escape(run.policy));
    }
    let _ = writeln!(out, "</tr>");
    let hosts = report.runs.first().map_or(&[][..], |run| &run.shares);
    for (number, (host, _)) in hosts.iter().enumerate() {
        // On a narrow screen an address is broken before its port, not inside it.
        let address = escape(host).replace(':', ":<wbr>");
        let _ = write!(out, "<tr><th>{}: {address}</th>", number + 1);
        for run in &report.runs {
            let count = run.shares.iter().find(|(name, _)| name == host);
            let _ = write!(out, "<td>{}</td>", count.map_or(0, |(_, count)| *count));
        }
        let _ = writeln!(out, "</tr>");
    }
    let _ = writeln!(out, "</table></div>");
    for run in report.runs.iter().filter(|run| !run.decisions.is_empty()) {
        let kinds = run
            .decisions
            .iter()
            .map(|(kind, count)| format!("{} {count}", escape(kind)));
        let kinds: Vec<String> = kinds.collect();
        let _ = writeln!(
            out,
            "<p>Decisions of {}: {}.</p>",
            escape(run.policy),
            kinds.join(", ")
        );
    }
}

fn ms(value: Option<f64>) -> String {
    value.map_or("–".into(), |ms| format!("{ms:.0}"))
}

/// A text as HTML shows it.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn the_page_needs_nothing_but_itself() {
        let page = render(&report()).unwrap();
        let without_names = page.replace("http://www.w3.org/2000/svg", "");
        for foreign in [
            "http:", "https:", "<script", "src=", "@import", "url(", "<link",
        ] {
            assert!(!without_names.contains(foreign), "{foreign} is in the page");
        }
        assert_eq!(page.matches("<svg ").count(), 3);
        assert!(page.contains("<title>prefix-router: demo on simulated engines</title>"));
        assert!(page.contains("<h1>The same load on simulated engines,"));
        assert!(page.contains("<td>83.0</td>"));
    }

    #[test]
    fn text_is_escaped() {
        let mut report = report();
        report.conditions = vec!["a < b & \"c\"".into()];
        assert!(
            render(&report)
                .unwrap()
                .contains("<li>a &lt; b &amp; &quot;c&quot;</li>")
        );
    }
}
