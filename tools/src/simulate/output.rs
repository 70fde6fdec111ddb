//! Lines as a Markdown table and as a plot.
//!
//! Guarantee: the same lines give the same bytes. Not here: figures.

use std::fmt::Write as _;

use anyhow::anyhow;
use plotters::prelude::*;

use crate::report::table::wrap;
use crate::simulate::summary::{Estimate, Line, Relative};

/// The table.
#[must_use]
pub fn table(lines: &[Line]) -> String {
    let several = lines.iter().any(|line| line.seeds > 1);
    let mut table = String::from(
        "| workload | load | gateways | policy | hit % | TTFT P50 s | mean | P90 | P99 | tokens/s \
         | share max/mean | in flight max/mean | diverted % | turns kept % |\n\
         |---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
    );
    for line in lines {
        let load = load(line);
        let percent = |estimate: Estimate| cell(estimate, 100.0, 1);
        let _ = writeln!(
            table,
            "| {} | {load} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            line.workload,
            line.gateways,
            line.policy,
            percent(line.hit_rate),
            cell(line.p50, 1.0, 3),
            cell(line.mean, 1.0, 3),
            cell(line.p90, 1.0, 3),
            cell(line.p99, 1.0, 2),
            cell(line.tokens_per_s, 1.0, 0),
            cell(line.share_max_over_mean, 1.0, 2),
            cell(line.in_flight_max_over_mean, 1.0, 2),
            percent(line.diverted),
            percent(line.turns_kept),
        );
    }
    if several {
        table.push_str("\n± is half of the 95 % confidence interval over the seeds.\n");
    }
    table
}

fn load(line: &Line) -> String {
    match line.arrival {
        "bursty" => format!("{:.0} % bursty", line.load * 100.0),
        "poisson" if line.workload.starts_with('C') => format!("{:.0} at once", line.load),
        _ => format!("{:.0} %", line.load * 100.0),
    }
}

/// The lines for a terminal of 80 columns: the columns that are looked at most, and no intervals.
#[must_use]
pub fn screen(lines: &[Line]) -> String {
    let mut text = String::new();
    let mut before = String::new();
    for line in lines {
        let gateways = line.gateways;
        let plural = if gateways == 1 { "" } else { "s" };
        let title = format!(
            "{} at {}, {gateways} gateway{plural}",
            line.workload,
            load(line)
        );
        if title != before {
            let gap = if text.is_empty() { "" } else { "\n" };
            let _ = writeln!(
                text,
                "{gap}{title}\n{:<25} {:>6} {:>7} {:>7} {:>7} {:>7} {:>7} {:>6}",
                "", "hits %", "P50 s", "mean s", "P90 s", "P99 s", "busiest", "kept %"
            );
            before = title;
        }
        let mean = |estimate: Estimate, factor, digits| {
            let ci95 = None;
            cell(Estimate { ci95, ..estimate }, factor, digits)
        };
        let _ = writeln!(
            text,
            "{:<25} {:>6} {:>7} {:>7} {:>7} {:>7} {:>7} {:>6}",
            line.policy,
            mean(line.hit_rate, 100.0, 1),
            mean(line.p50, 1.0, 3),
            mean(line.mean, 1.0, 3),
            mean(line.p90, 1.0, 3),
            mean(line.p99, 1.0, 2),
            mean(line.share_max_over_mean, 1.0, 2),
            mean(line.turns_kept, 100.0, 1),
        );
    }
    let meaning = "P50 to P99: time to the first token. busiest: requests of the host that got most, \
                   over the mean. kept: later turns that stayed on their host. Means over the \
                   seeds; their intervals and more columns are in the output if it is piped \
                   (Markdown), or with --json.";
    let _ = writeln!(text, "\n{}", wrap(meaning).join("\n"));
    text
}

fn cell(estimate: Estimate, factor: f64, digits: usize) -> String {
    let mean = estimate.mean * factor;
    if !mean.is_finite() {
        return "–".to_owned();
    }
    match estimate.ci95 {
        Some(ci95) => format!("{mean:.digits$} ± {:.digits$}", ci95 * factor),
        None => format!("{mean:.digits$}"),
    }
}

/// The table of geometric means.
#[must_use]
pub fn relative_table(rows: &[Relative]) -> String {
    let mut table = String::from(
        "\n| policy | gateways | P50 x oracle | mean x oracle | P99 x oracle | cells |\n\
         |---|--:|--:|--:|--:|--:|\n",
    );
    for row in rows {
        let Relative {
            policy,
            gateways,
            cells,
            p50,
            mean,
            p99,
        } = row;
        let _ = writeln!(
            table,
            "| {policy} | {gateways} | {p50:.2} | {mean:.2} | {p99:.2} | {cells} |"
        );
    }
    table
}

/// Policies' medians and 99 % by workload and load, on a logarithmic axis, as SVG.
///
/// # Errors
/// If nothing can be drawn.
pub fn plot(lines: &[Line]) -> anyhow::Result<String> {
    let mut cells: Vec<String> = Vec::new();
    let mut policies: Vec<&str> = Vec::new();
    let name = |line: &Line| {
        let bursty = if line.arrival == "bursty" {
            " bursty"
        } else {
            ""
        };
        format!(
            "{} {:.0}%{bursty} G{}",
            line.workload,
            line.load * 100.0,
            line.gateways
        )
    };
    for line in lines {
        if !cells.contains(&name(line)) {
            cells.push(name(line));
        }
        if !policies.contains(&line.policy.as_str()) {
            policies.push(&line.policy);
        }
    }
    anyhow::ensure!(!cells.is_empty(), "no run to draw");
    let times = || lines.iter().flat_map(|line| [line.p50.mean, line.p99.mean]);
    let finite = || times().filter(|time| time.is_finite() && *time > 0.0);
    // From a power of ten on, so that the axis has labels whatever the times are.
    let low = 10_f64.powf(finite().fold(f64::INFINITY, f64::min).log10().floor());
    let high = finite().fold(0.0, f64::max) * 1.25;
    anyhow::ensure!(low < high, "no times to draw");
    let width = (220 + 110 * cells.len() as u32).clamp(640, 4000);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (width, 520)).into_drawing_area();
        let wrong = |error| anyhow!("cannot draw: {error}");
        area.fill(&WHITE).map_err(wrong)?;
        draw(&area, lines, &cells, &policies, low..high, &name)?;
        area.present().map_err(wrong)?;
    }
    Ok(svg)
}

/// Okabe and Ito's colours, which people who see few colours can tell apart; then any others.
const COLORS: [RGBColor; 7] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(60, 60, 60),
];

fn color(place: usize) -> RGBAColor {
    let known = COLORS.get(place).map(RGBColor::to_rgba);
    known.unwrap_or_else(|| Palette99::pick(place).to_rgba())
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn draw(
    area: &Area<'_>,
    lines: &[Line],
    cells: &[String],
    policies: &[&str],
    seconds: std::ops::Range<f64>,
    name: &dyn Fn(&Line) -> String,
) -> anyhow::Result<()> {
    let wrong = |error| anyhow!("cannot draw: {error}");
    let mut chart = ChartBuilder::on(area)
        .caption(
            "Time to first token: bar from P50 to P99",
            ("sans-serif", 18),
        )
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .right_y_label_area_size(0)
        .build_cartesian_2d(0.0..cells.len() as f64, seconds.log_scale())
        .map_err(wrong)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(cells.len() * 2 + 1)
        .x_label_formatter(&|at| {
            let half = (at - at.floor() - 0.5).abs() < 1e-6;
            let cell = cells.get(at.floor() as usize).filter(|_| half);
            cell.cloned().unwrap_or_default()
        })
        .y_desc("seconds")
        .y_label_formatter(&|seconds| format!("{seconds}"))
        .draw()
        .map_err(wrong)?;
    for (place, policy) in policies.iter().enumerate() {
        let color = color(place);
        let offset = (place as f64 + 1.0) / (policies.len() as f64 + 1.0);
        let of_policy = || lines.iter().filter(|line| line.policy == *policy);
        let at = |line: &Line| {
            let cell = cells.iter().position(|cell| *cell == name(line));
            cell.map_or(f64::NAN, |cell| cell as f64 + offset)
        };
        let bars = of_policy().map(|line| {
            let points = vec![(at(line), line.p50.mean), (at(line), line.p99.mean)];
            PathElement::new(points, color.stroke_width(3))
        });
        chart
            .draw_series(bars)
            .map_err(wrong)?
            .label(*policy)
            .legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 12, y + 4)], color.filled()));
        let dots =
            of_policy().map(|line| Circle::new((at(line), line.p50.mean), 4, color.filled()));
        chart.draw_series(dots).map_err(wrong)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()
        .map_err(wrong)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_of_80_columns_is_never_too_narrow() {
        let of = |mean| Estimate {
            mean,
            ci95: Some(mean / 10.0),
        };
        let line = |policy: &str, gateways| Line {
            workload: "W7s",
            load: 1.1,
            arrival: "bursty",
            gateways,
            policy: policy.into(),
            seeds: 5,
            hit_rate: of(0.905),
            p50: of(123.456),
            mean: of(234.567),
            p90: of(345.678),
            p99: of(456.78),
            tokens_per_s: of(123_456.0),
            share_max_over_mean: of(1.25),
            in_flight_max_over_mean: of(1.5),
            diverted: of(0.1),
            turns_kept: of(f64::NAN),
        };
        let name = "prefix_router_local_index";
        let shown = screen(&[line(name, 1), line("oracle", 1), line(name, 16)]);
        for row in shown.lines() {
            assert!(row.chars().count() <= 80, "{row:?}");
        }
        let titles: Vec<&str> = shown.lines().filter(|row| row.contains(" at ")).collect();
        let expected = [
            "W7s at 110 % bursty, 1 gateway",
            "W7s at 110 % bursty, 16 gateways",
        ];
        assert_eq!(titles, expected);
        let row = "prefix_router_local_index   90.5 123.456 234.567 345.678  456.78    1.25      –";
        assert_eq!(
            shown.lines().filter(|line| *line == row).count(),
            2,
            "{shown}"
        );
    }
}
