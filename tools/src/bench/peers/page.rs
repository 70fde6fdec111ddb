//! What was measured as a web page with plots.
//!
//! Guarantee: the page loads nothing and runs no script; it shows every figure that the tables do.
//! Not here: figures (plays.rs), the page's frame (report/page.rs).

use std::fmt::Write as _;

use plotters::prelude::*;

use super::Results;
use super::plays::{Column, Row};
use super::published;
use super::router;
use super::table::{self, cells, told};
use crate::report::page::{begin, end, escape, figure};
use crate::report::plots::{Drawn, RUNS, failed, frame};

/// The page.
pub(super) fn render(results: &Results) -> anyhow::Result<String> {
    let mut out = begin("peers", "Beside other routers");
    for line in results.findings() {
        let _ = writeln!(out, "<p class=\"gain\">{}</p>", escape(&line));
    }
    for fault in results.faults() {
        let _ = writeln!(out, "<p class=\"doubt\">Attention: {}</p>", escape(&fault));
    }
    who(&mut out, results);
    for part in &results.parts {
        let _ = writeln!(
            out,
            "<h2>{}</h2>\n<p>{}</p>\n<div class=\"plots\">",
            escape(part.title),
            escape(part.about)
        );
        for (cell, rows) in cells(part, results) {
            for column in part.columns.iter().filter(|column| column.plotted) {
                let title = format!("{}: {}", column.head, cell);
                out.push_str(&figure(&title, &bars(&rows, column)?));
            }
        }
        let _ = writeln!(out, "</div>");
    }
    let _ = writeln!(
        out,
        "<h2>Figures</h2>\n<div class=\"scroll\"><pre>{}</pre></div>\n<h2>Not measured</h2>\n<ul>",
        escape(&table::terminal(results))
    );
    for one in &published::ALL {
        let _ = writeln!(
            out,
            "<li>{}: {}. Its own figures: {} ({}).</li>",
            escape(one.name),
            escape(one.why),
            escape(one.figures),
            escape(one.source)
        );
    }
    let _ = writeln!(out, "</ul>");
    let (seed, commit) = (results.key.seed, &results.key.commit);
    end(&mut out, &results.conditions, seed, commit);
    Ok(out)
}

/// Who took part: the plots' bars have these numbers.
fn who(out: &mut String, results: &Results) {
    let _ = writeln!(
        out,
        "<p class=\"legend\"><span class=\"run0\">others</span> <span class=\"run2\">prefix_router\
         </span></p>\n<ol>"
    );
    for one in router::ALL {
        let setting = match one.setting {
            "" => "at its defaults".to_owned(),
            setting => setting.to_owned(),
        };
        let _ = writeln!(
            out,
            "<li>{}: {}, {}; clients tell it {}</li>",
            escape(one.name),
            escape(&results.version(&one)),
            escape(&setting),
            told(one.told)
        );
    }
    let _ = writeln!(out, "</ol>");
}

/// A bar for each router, ours in another colour.
fn bars(rows: &[Row], column: &Column) -> Drawn {
    let value = |row: &Row| {
        let spread = row.figures.get(column.figure);
        spread.map_or(0.0, |spread| spread.median)
    };
    let most = rows.iter().map(value).fold(1e-9, f64::max);
    let x = 0.5..router::ALL.len() as f64 + 0.5;
    frame(x, 0.0..most * 1.1, ["router", column.head], |chart| {
        let [others, _, ours] = RUNS;
        let bars = rows.iter().filter_map(|row| {
            // Rows of more workers than others have are in the tables only.
            let place = router::ALL.iter().position(|one| one.name == row.router)?;
            let colour = if router::ALL.get(place)?.is_ours() {
                ours
            } else {
                others
            };
            let left = place as f64 + 0.65;
            Some(Rectangle::new(
                [(left, 0.0), (left + 0.7, value(row))],
                colour.filled(),
            ))
        });
        chart.draw_series(bars).map_err(failed)?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::super::table::tests::results;
    use super::*;

    #[test]
    fn the_page_needs_nothing_but_itself_and_shows_losses_too() {
        let page = render(&results()).unwrap();
        let without_names = page.replace("http://www.w3.org/2000/svg", "");
        for foreign in ["http:", "https:", "<script", "src=", "<link", "url("] {
            assert!(!without_names.contains(foreign), "{foreign} is in the page");
        }
        assert_eq!(page.matches("<svg ").count(), 4);
        for part in [
            "#030000",
            "#050000",
            "198 (197-200)",
            "AIBrix",
            "Attention: conversations",
            "clients tell it a tenant header",
        ] {
            assert!(page.contains(part), "{part:?} is not in the page");
        }
    }
}
