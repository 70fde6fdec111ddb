//! The report's plots, as SVG that a page can colour.
//!
//! Guarantee: every plot has the same size and the page's colours: what is drawn carries one of
//! the stand-in colours below, which the page's style maps to its light or dark ones. Not here:
//! the page.

use anyhow::anyhow;
use plotters::coord::ranged1d::{
    AsRangedCoord, DefaultFormatting, KeyPointHint, Ranged, ValueFormatter,
};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use super::{Report, Run};

/// Width and height, in pixels: one column of a phone's screen; a wide screen shows several.
pub const SIZE: (u32, u32) = (460, 330);

/// Stand-in for text.
pub const INK: RGBColor = RGBColor(1, 0, 0);
/// Stand-in for axes and grid lines.
pub const GRID: RGBColor = RGBColor(2, 0, 0);
/// Stand-ins for the runs, in their order.
pub const RUNS: [RGBColor; 3] = [RGBColor(3, 0, 0), RGBColor(4, 0, 0), RGBColor(5, 0, 0)];

/// Points of a distribution's curve at most: more are not seen at this size.
const POINTS_MAX: usize = 300;

/// Numbers below the hosts' axis at most: it is 376 pixels long, and two digits take 20 of them.
const LABELS_MAX: usize = 12;

fn colour(index: usize) -> RGBColor {
    RUNS.get(index % RUNS.len()).copied().unwrap_or(INK)
}

/// A plot as SVG.
pub type Drawn = anyhow::Result<String>;

/// The share of requests whose first token came within a time.
///
/// # Errors
/// If drawing fails.
pub fn ttft(report: &Report) -> Drawn {
    let all = || report.runs.iter().flat_map(|run| &run.ttft_ms).copied();
    let least = all().fold(f64::INFINITY, f64::min).clamp(1.0, 1e6);
    let most = all().fold(least * 10.0, f64::max);
    let x = (least * 0.8..most * 1.1).log_scale();
    draw(
        report,
        x,
        0.0..100.0,
        ["ms to the first token", "% of requests"],
        |chart, index, run| {
            let count = run.ttft_ms.len();
            let step = count.div_ceil(POINTS_MAX).max(1);
            let points = (0..count).step_by(step).chain(count.checked_sub(1));
            let points = points.filter_map(|at| {
                Some((
                    *run.ttft_ms.get(at)?,
                    (at + 1) as f64 * 100.0 / count as f64,
                ))
            });
            chart
                .draw_series(LineSeries::new(points, colour(index).stroke_width(2)))
                .map_err(failed)?;
            Ok(())
        },
    )
}

/// The hit rate over the measured time.
///
/// # Errors
/// If drawing fails.
pub fn hits(report: &Report) -> Drawn {
    let times = report
        .runs
        .iter()
        .flat_map(|run| &run.hits)
        .map(|(at, _)| *at);
    let end = times.fold(1.0, f64::max);
    draw(
        report,
        0.0..end,
        0.0..100.0,
        ["s of measuring", "% hits"],
        |chart, index, run| {
            let points = run.hits.iter().map(|(at, rate)| (*at, rate * 100.0));
            chart
                .draw_series(LineSeries::new(points, colour(index).stroke_width(2)))
                .map_err(failed)?;
            Ok(())
        },
    )
}

/// Each host's share of the requests, in percent of the mean share.
///
/// # Errors
/// If drawing fails.
pub fn shares(report: &Report) -> Drawn {
    let hosts = report
        .runs
        .iter()
        .map(|run| run.shares.len())
        .max()
        .unwrap_or(0)
        .max(1);
    let runs = report.runs.len().max(1) as f64;
    let most = report
        .runs
        .iter()
        .map(Run::max_over_mean)
        .fold(1.0, f64::max);
    let top = (most * 110.0).max(140.0);
    let x = HostAxis::new(hosts);
    draw(
        report,
        x,
        0.0..top,
        ["host", "% of the mean share"],
        |chart, index, run| {
            let total = run
                .shares
                .iter()
                .map(|(_, count)| count)
                .sum::<u64>()
                .max(1) as f64;
            let bars = run.shares.iter().enumerate().map(|(host, (_, count))| {
                let height = *count as f64 * run.shares.len() as f64 * 100.0 / total;
                let left = host as f64 + 0.6 + 0.8 * index as f64 / runs;
                let right = left + 0.72 / runs;
                Rectangle::new([(left, 0.0), (right, height)], colour(index).filled())
            });
            chart.draw_series(bars).map_err(failed)?;
            Ok(())
        },
    )
}

/// Hosts side by side, each around its number, counted from one.
struct HostAxis {
    places: RangedCoordf64,
    /// The hosts that have their number below them: all while there is room, else every so many.
    labels: Vec<f64>,
}

impl HostAxis {
    fn new(hosts: usize) -> Self {
        let steps = [1, 2, 5, 10, 20, 50];
        let step = steps.into_iter().find(|step| hosts / step <= LABELS_MAX);
        let labels = (1..=hosts).filter(|host| host.is_multiple_of(step.unwrap_or(100)));
        Self {
            places: (0.5..hosts as f64 + 0.5).into(),
            labels: labels.map(|host| host as f64).collect(),
        }
    }
}

impl Ranged for HostAxis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.places.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match hint.weight().allow_light_points() {
            true => Vec::new(),
            false => self.labels.clone(),
        }
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.places.range()
    }
}

/// A plot under way.
pub type Chart<'a, 'b, X> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<X, RangedCoordf64>>;

fn draw<X>(
    report: &Report,
    x: X,
    y: std::ops::Range<f64>,
    names: [&str; 2],
    series: impl for<'a, 'b> Fn(&mut Chart<'a, 'b, X::CoordDescType>, usize, &Run) -> anyhow::Result<()>,
) -> Drawn
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    frame(x, y, names, |chart| {
        let mut runs = report.runs.iter().enumerate();
        runs.try_for_each(|(index, run)| series(chart, index, run))
    })
}

/// Axes with these names and ranges, and what `fill` draws between them.
///
/// # Errors
/// If drawing fails.
pub fn frame<X>(
    x: X,
    y: std::ops::Range<f64>,
    names: [&str; 2],
    fill: impl for<'a, 'b> Fn(&mut Chart<'a, 'b, X::CoordDescType>) -> anyhow::Result<()>,
) -> Drawn
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let text = |size: u32| ("sans-serif", size).into_font().color(&INK);
        let mut chart = ChartBuilder::on(&area)
            .margin(8)
            .margin_right(20)
            .x_label_area_size(46)
            .y_label_area_size(56)
            .build_cartesian_2d(x, y)
            .map_err(failed)?;
        let whole = |value: &f64| format!("{value:.0}");
        let [x_name, y_name] = names;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(GRID)
            .label_style(text(17))
            .axis_desc_style(text(17))
            .x_label_formatter(&whole)
            .y_label_formatter(&whole)
            .y_labels(6)
            .x_labels(7)
            .x_desc(x_name)
            .y_desc(y_name)
            .draw()
            .map_err(failed)?;
        fill(&mut chart)?;
        area.present().map_err(failed)?;
    }
    Ok(svg)
}

/// A plotter's error as ours.
pub fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot draw a plot: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn every_plot_shows_every_run_in_stand_in_colours_only() {
        for plot in [ttft, hits, shares] {
            let svg = plot(&report()).unwrap();
            for colour in ["#030000", "#040000", "#050000"] {
                assert!(svg.contains(colour), "{colour} is not in {svg}");
            }
            for hex in svg.split('#').skip(1).map(|rest| &rest[..6]) {
                assert!(
                    ["010000", "020000", "030000", "040000", "050000", "000000"].contains(&hex),
                    "#{hex}"
                );
            }
        }
    }

    /// The texts of a plot of so many hosts, up to the axis' name.
    fn labels_of(hosts: u64) -> Vec<String> {
        let mut report = report();
        for run in &mut report.runs {
            run.shares = (0..hosts).map(|host| (host.to_string(), 9)).collect();
        }
        let svg = shares(&report).unwrap();
        let below_bars = svg.split("</text>").filter_map(|text| {
            // The axis' labels stand around the place where they belong, others beside it.
            let (_, text) = text.rsplit_once("text-anchor=\"middle\"")?;
            Some(text.rsplit_once('>')?.1.trim().to_owned())
        });
        below_bars
            .filter(|text| text.parse::<f64>().is_ok())
            .collect()
    }

    #[test]
    fn hosts_are_numbered_from_one_each_once_or_every_so_many() {
        let numbers = |step: usize, hosts: usize| -> Vec<String> {
            let numbers = (step..=hosts).step_by(step);
            numbers.map(|number| number.to_string()).collect()
        };
        for hosts in 1..=50 {
            let found = labels_of(hosts as u64);
            let step = match hosts {
                0..=12 => 1,
                13..=25 => 2,
                _ => 5,
            };
            assert_eq!(found, numbers(step, hosts), "{hosts} hosts");
        }
    }

    #[test]
    fn nothing_measured_is_drawn_as_nothing() {
        for plot in [ttft, hits, shares] {
            plot(&Report::default()).unwrap();
        }
    }
}
