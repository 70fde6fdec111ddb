//! The sixteen setups as a web page with plots.
//!
//! Guarantee: the page loads nothing and runs no script. Not here: the figures (row.rs), the page's
//! frame (report/page.rs).

use std::fmt::Write as _;

use plotters::prelude::*;

use super::row::{Figures, Pair, Row};
use super::table::{self, CAPTION, Results};
use crate::report::page::{begin, end, escape, figure};
use crate::report::plots::{Drawn, RUNS, failed, frame};

/// The page.
pub(super) fn render(results: &Results) -> anyhow::Result<String> {
    let mut out = begin("sixteen setups", "Sixteen setups, random and by prefix");
    for line in results.findings() {
        let _ = writeln!(out, "<p class=\"gain\">{}</p>", escape(&line));
    }
    for doubt in results.doubts() {
        let _ = writeln!(out, "<p class=\"doubt\">Attention: {}</p>", escape(&doubt));
    }
    let _ = writeln!(
        out,
        "<p class=\"legend\"><span class=\"run0\">random</span> \
         <span class=\"run2\">prefix_router</span></p>\n<div class=\"plots\">"
    );
    let ttft = |pair: &Pair| both(pair, |figures| figures.ttft_ms.map_or(0.0, |(p50, _)| p50));
    for (title, svg) in [
        (
            "Cache hits, long prompts, 80 % load",
            bars(results, "% hits", |row| {
                both(&row.long, |figures| figures.hit_rate * 100.0)
            })?,
        ),
        (
            "P50 time to the first token, long prompts, 80 % load",
            bars(results, "ms", |row| ttft(&row.long))?,
        ),
        (
            "Throughput, long prompts, 117 % load",
            bars(results, "tokens/s", |row| {
                both(&row.high, |figures| figures.output_tokens_per_s)
            })?,
        ),
        (
            "P50 time to the first token, short prompts",
            bars(results, "ms", |row| ttft(&row.short))?,
        ),
    ] {
        out.push_str(&figure(title, &svg));
    }
    let _ = writeln!(out, "</div>\n<ol>");
    for row in &results.rows {
        let _ = writeln!(out, "<li>{}</li>", escape(&row.cell));
    }
    let _ = writeln!(
        out,
        "</ol>\n<h2>Figures</h2>\n<p>{}</p>\n<div class=\"scroll\"><pre>{}</pre></div>",
        escape(CAPTION),
        escape(&table::figures(results))
    );
    end(
        &mut out,
        &results.conditions,
        results.key.seed,
        &results.key.commit,
    );
    Ok(out)
}

fn both(pair: &Pair, value: impl Fn(&Figures) -> f64) -> [f64; 2] {
    [value(&pair.random), value(&pair.prefix_router)]
}

/// Two bars for each row: random and ours.
fn bars(results: &Results, name: &str, values: impl Fn(&Row) -> [f64; 2]) -> Drawn {
    let values: Vec<[f64; 2]> = results.rows.iter().map(values).collect();
    let most = values.iter().flatten().copied().fold(1.0, f64::max);
    let x = 0.5..values.len().max(1) as f64 + 0.5;
    frame(x, 0.0..most * 1.1, ["setup", name], |chart| {
        let [random, _, ours] = RUNS;
        for (place, colour) in [random, ours].into_iter().enumerate() {
            let bars = values.iter().enumerate().map(|(row, both)| {
                let left = row as f64 + 0.6 + 0.4 * place as f64;
                let height = both.get(place).copied().unwrap_or(0.0);
                Rectangle::new([(left, 0.0), (left + 0.36, height)], colour.filled())
            });
            chart.draw_series(bars).map_err(failed)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::super::table::tests::results;
    use super::*;

    #[test]
    fn the_page_shows_four_plots_of_both_policies_and_all_figures() {
        let page = render(&results()).unwrap();
        assert_eq!(page.matches("<svg ").count(), 4);
        for part in [
            "#030000",
            "#050000",
            "fitted so that random",
            "single-native-stream-2",
            "0.93-1.08",
            "Attention: components-openai-stream-2",
        ] {
            assert!(page.contains(part), "{part:?} is not in the page");
        }
        assert!(!page.contains("<script"));
    }

    #[test]
    fn no_row_is_drawn_as_nothing() {
        let mut none = results();
        none.rows.clear();
        render(&none).unwrap();
    }
}
