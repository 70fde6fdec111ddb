//! Rows of single runs → one line for all seeds, with what is known of its error.
//!
//! Guarantee: an interval is Student's, at 95 %; with one seed there is none. Not here: the
//! figures of a run (measure.rs), how they are drawn (output.rs).

use std::collections::BTreeMap;

use serde::Serialize;

use crate::simulate::cells::{Arrival, Cell, Name};
use crate::simulate::measure::Figures;
use crate::simulate::policy::Kind;

/// A run and its figures, as `--json` prints it.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The workload.
    pub workload: &'static str,
    /// Times the rate at which random routing is just stable.
    pub load: f64,
    /// `poisson` or `bursty`.
    pub arrival: &'static str,
    /// Gateways that share nothing.
    pub gateways: u32,
    /// The policy.
    pub policy: String,
    /// The seed.
    pub seed: u64,
    /// What was seen.
    #[serde(flatten)]
    pub figures: Figures,
    /// Seconds of the machine the run took.
    pub took_s: f64,
}

impl Row {
    /// The row of a cell.
    #[must_use]
    pub fn new(cell: &Cell, figures: Figures, took_s: f64) -> Self {
        Self {
            workload: cell.workload.label(),
            load: cell.load,
            arrival: cell.arrival.label(),
            gateways: cell.gateways,
            policy: cell.policy.name(),
            seed: cell.seed,
            figures,
            took_s,
        }
    }
}

/// A mean over seeds and half the width of its 95 % interval; `None` with one seed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The mean.
    pub mean: f64,
    /// The interval is the mean ± this.
    pub ci95: Option<f64>,
}

/// Student's t at 97.5 %, by degrees of freedom from 1; beyond, the normal's 1.96.
const STUDENT: [f64; 20] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
];

impl Estimate {
    /// Of independent values.
    #[must_use]
    pub fn of(values: &[f64]) -> Self {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count.max(1.0);
        let Some(freedom) = values.len().checked_sub(1).filter(|&freedom| freedom > 0) else {
            return Self { mean, ci95: None };
        };
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let error = (squares / freedom as f64 / count).sqrt();
        let student = STUDENT.get(freedom - 1).copied().unwrap_or(1.96);
        Self {
            mean,
            ci95: Some(student * error),
        }
    }
}

/// One line for all seeds of a cell.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// The workload.
    pub workload: &'static str,
    /// Times the rate at which random routing is just stable.
    pub load: f64,
    /// `poisson` or `bursty`.
    pub arrival: &'static str,
    /// Gateways that share nothing.
    pub gateways: u32,
    /// The policy.
    pub policy: String,
    /// Runs.
    pub seeds: u32,
    /// Part of the prompts' tokens that were found in the caches.
    pub hit_rate: Estimate,
    /// Seconds to the first token, the median.
    pub p50: Estimate,
    /// The mean.
    pub mean: Estimate,
    /// 90 %.
    pub p90: Estimate,
    /// 99 %.
    pub p99: Estimate,
    /// Prompt and answer tokens done a second.
    pub tokens_per_s: Estimate,
    /// Requests of the host that got most, over the mean.
    pub share_max_over_mean: Estimate,
    /// The same of requests in flight.
    pub in_flight_max_over_mean: Estimate,
    /// Part of the requests led away from home.
    pub diverted: Estimate,
    /// Part of the later turns that stayed; not a number without chats.
    pub turns_kept: Estimate,
}

type Group = (Name, u64, Arrival, u32, Kind);

/// One line per cell without its seed, in the order of the cells.
#[must_use]
pub fn lines(runs: &[(Cell, Figures)]) -> Vec<Line> {
    let group = |cell: &Cell| -> Group {
        (
            cell.workload,
            cell.load.to_bits(),
            cell.arrival,
            cell.gateways,
            cell.policy,
        )
    };
    let mut order: Vec<Group> = Vec::new();
    let mut groups: BTreeMap<Group, Vec<&(Cell, Figures)>> = BTreeMap::new();
    for run in runs {
        let group = group(&run.0);
        if !order.contains(&group) {
            order.push(group);
        }
        groups.entry(group).or_default().push(run);
    }
    order
        .iter()
        .filter_map(|group| line(groups.get(group)?))
        .collect()
}

fn line(runs: &[&(Cell, Figures)]) -> Option<Line> {
    let (cell, _) = runs.first()?;
    let estimate = |figure: fn(&Figures) -> f64| {
        let values: Vec<f64> = runs.iter().map(|(_, figures)| figure(figures)).collect();
        Estimate::of(&values)
    };
    Some(Line {
        workload: cell.workload.label(),
        load: cell.load,
        arrival: cell.arrival.label(),
        gateways: cell.gateways,
        policy: cell.policy.name(),
        seeds: runs.len() as u32,
        hit_rate: estimate(|f| f.hit_rate),
        p50: estimate(|f| f.ttft_s.p50),
        mean: estimate(|f| f.ttft_s.mean),
        p90: estimate(|f| f.ttft_s.p90),
        p99: estimate(|f| f.ttft_s.p99),
        tokens_per_s: estimate(|f| f.tokens_per_s),
        share_max_over_mean: estimate(|f| f.share_max_over_mean),
        in_flight_max_over_mean: estimate(|f| f.in_flight_max_over_mean),
        diverted: estimate(|f| f.diverted),
        turns_kept: estimate(|f| f.turns_kept as f64 / f.later_turns as f64),
    })
}

/// A policy's times over a base's: geometric means over all cells both have but W6, where nothing
/// can be gained.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Relative {
    /// The policy.
    pub policy: String,
    /// Gateways.
    pub gateways: u32,
    /// Cells compared.
    pub cells: u32,
    /// Medians.
    pub p50: f64,
    /// Means.
    pub mean: f64,
    /// 99 %.
    pub p99: f64,
}

/// Every policy relative to `base`.
#[must_use]
pub fn relative(lines: &[Line], base: Kind) -> Vec<Relative> {
    let base = base.name();
    let mut sums: BTreeMap<(u32, &str), (u32, [f64; 3])> = BTreeMap::new();
    for line in lines
        .iter()
        .filter(|line| line.workload != Name::W6.label())
    {
        let same = |other: &&Line| {
            other.policy == base
                && (other.workload, other.arrival, other.gateways)
                    == (line.workload, line.arrival, line.gateways)
                && other.load.to_bits() == line.load.to_bits()
        };
        let Some(other) = lines.iter().find(same) else {
            continue;
        };
        let logs = [
            (line.p50.mean / other.p50.mean).ln(),
            (line.mean.mean / other.mean.mean).ln(),
            (line.p99.mean / other.p99.mean).ln(),
        ];
        let (cells, sum) = sums.entry((line.gateways, &line.policy)).or_default();
        *cells += 1;
        sum.iter_mut().zip(logs).for_each(|(sum, log)| *sum += log);
    }
    let mut found: Vec<Relative> = sums
        .into_iter()
        .map(|((gateways, policy), (cells, [p50, mean, p99]))| {
            let of = |sum: f64| (sum / f64::from(cells)).exp();
            Relative {
                policy: policy.to_owned(),
                gateways,
                cells,
                p50: of(p50),
                mean: of(mean),
                p99: of(p99),
            }
        })
        .collect();
    found.sort_by(|a, b| a.gateways.cmp(&b.gateways).then(a.mean.total_cmp(&b.mean)));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_student_s() {
        let estimate = Estimate::of(&[1.0, 2.0, 3.0]);
        assert_eq!(estimate.mean, 2.0);
        // 4.303 × 1 / √3
        assert!((estimate.ci95.unwrap() - 2.4843).abs() < 1e-3);
        assert_eq!(
            Estimate::of(&[5.0]),
            Estimate {
                mean: 5.0,
                ci95: None
            }
        );
    }
}
