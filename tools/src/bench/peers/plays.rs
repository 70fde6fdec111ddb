//! What was measured: plays, the parts they belong to, and what several of them say together.
//!
//! Guarantee: a figure is shown as the median of its plays with the least and the largest of them;
//! a play that failed is told, never left out silently. Not here: measuring, drawing.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::bench::store::{Kept, Key};

/// One router once in one cell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Play {
    /// Which part it is of, e.g. `conversations`.
    pub part: String,
    /// Which cell of it, e.g. `1 system prompt, 16 at once`.
    pub cell: String,
    /// The router's name.
    pub router: String,
    /// Which repetition, from 1 on; the seed follows from it.
    pub repeat: u32,
    /// What it holds for.
    pub key: Key,
    /// What was measured, by the figure's name.
    pub figures: BTreeMap<String, f64>,
    /// Requests of each host, in the hosts' order.
    pub hosts: Vec<u64>,
    /// What went wrong, in sentences.
    pub faults: Vec<String>,
}

impl Kept for Play {
    /// Ten whole runs of about 1,200 plays, some 6 MB.
    const ROWS_MAX: usize = 12_000;

    fn name(&self) -> String {
        name(&self.part, &self.cell, &self.router, self.repeat)
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn believed(&self) -> bool {
        self.faults.is_empty()
    }
}

/// A play's name.
pub(super) fn name(part: &str, cell: &str, router: &str, repeat: u32) -> String {
    format!("{part} / {cell} / {router} / {repeat}")
}

/// One column of a part's tables.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    /// The figure's name in plays and in JSON.
    pub figure: &'static str,
    /// Its heading, with its unit.
    pub head: &'static str,
    /// Digits behind the point.
    pub digits: usize,
    /// Whether it is drawn.
    pub plotted: bool,
    /// Whether it is shown only where it is not 0.
    pub quiet: bool,
}

/// A column that is shown.
pub(super) const fn column(figure: &'static str, head: &'static str, digits: usize) -> Column {
    Column {
        figure,
        head,
        digits,
        plotted: false,
        quiet: false,
    }
}

/// A column that is shown and drawn.
pub(super) const fn plotted(figure: &'static str, head: &'static str, digits: usize) -> Column {
    Column {
        plotted: true,
        ..column(figure, head, digits)
    }
}

/// A column that should be all zeros, and is shown only where it is not.
pub(super) const fn quiet(figure: &'static str, head: &'static str) -> Column {
    Column {
        quiet: true,
        ..column(figure, head, 0)
    }
}

/// One of the things that are measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its heading.
    pub title: &'static str,
    /// What was done, in sentences.
    pub about: &'static str,
    /// What is shown of it.
    pub columns: &'static [Column],
    /// Whether the hosts' requests are shown.
    pub hosts: bool,
}

/// The median of values, and the least and the largest of them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// Of any number of values; `None` for none.
    pub(super) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let upper = *values.get(middle)?;
        let lower = if values.len().is_multiple_of(2) {
            *values.get(middle.checked_sub(1)?)?
        } else {
            upper
        };
        Some(Self {
            median: f64::midpoint(lower, upper),
            min: *values.first()?,
            max: *values.last()?,
        })
    }
}

/// One router in one cell, over all its plays.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub part: &'static str,
    pub cell: String,
    pub router: String,
    pub plays: usize,
    pub figures: BTreeMap<&'static str, Spread>,
    /// Requests of each host in the first play.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<u64>,
}

/// The rows of a part, cells and routers in the order in which they were first played.
pub(super) fn rows(part: &Part, plays: &[Play]) -> Vec<Row> {
    let mut cells: Vec<(&str, &str)> = Vec::new();
    let mine = || plays.iter().filter(|play| play.part == part.name);
    for play in mine() {
        let cell = (play.cell.as_str(), play.router.as_str());
        if !cells.contains(&cell) {
            cells.push(cell);
        }
    }
    let row = |(cell, router): (&str, &str)| {
        let of: Vec<&Play> = mine()
            .filter(|play| play.cell == cell && play.router == router)
            .collect();
        let spread = |figure: &str| {
            let values = of.iter().filter_map(|play| play.figures.get(figure));
            Spread::of(values.copied().collect())
        };
        let figures = part.columns.iter();
        let figures = figures.filter_map(|column| Some((column.figure, spread(column.figure)?)));
        Row {
            part: part.name,
            cell: cell.to_owned(),
            router: router.to_owned(),
            plays: of.len(),
            figures: figures.collect(),
            hosts: of.first().map_or_else(Vec::new, |play| play.hosts.clone()),
        }
    };
    cells.into_iter().map(row).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn key() -> Key {
        Key {
            commit: "abc".to_owned(),
            seed: 1,
            sizes: "{}".to_owned(),
        }
    }

    pub(in super::super) fn play(cell: &str, router: &str, repeat: u32, kept: f64) -> Play {
        Play {
            part: "conversations".to_owned(),
            cell: cell.to_owned(),
            router: router.to_owned(),
            repeat,
            key: key(),
            figures: [("kept", kept), ("share", 1.25)]
                .map(|(name, value)| (name.to_owned(), value))
                .into(),
            hosts: vec![63, 62, 63, 62],
            faults: Vec::new(),
        }
    }

    #[test]
    fn a_spread_is_median_least_and_largest() {
        let spread =
            |values: &[f64]| Spread::of(values.to_vec()).map(|all| (all.median, all.min, all.max));
        assert_eq!(spread(&[]), None);
        assert_eq!(spread(&[7.0]), Some((7.0, 7.0, 7.0)));
        assert_eq!(spread(&[9.0, 1.0, 2.0]), Some((2.0, 1.0, 9.0)));
        assert_eq!(spread(&[9.0, 1.0, 2.0, 4.0]), Some((3.0, 1.0, 9.0)));
    }

    #[test]
    fn a_row_has_all_plays_of_a_router_in_a_cell() {
        let part = Part {
            name: "conversations",
            title: "",
            about: "",
            columns: const { &[column("kept", "kept", 0)] },
            hosts: true,
        };
        let plays = [
            play("b", "x", 1, 200.0),
            play("a", "x", 1, 10.0),
            play("b", "y", 1, 7.0),
            play("b", "x", 2, 190.0),
        ];
        let rows = rows(&part, &plays);
        let names: Vec<_> = rows
            .iter()
            .map(|row| (row.cell.as_str(), row.router.as_str(), row.plays))
            .collect();
        assert_eq!(names, [("b", "x", 2), ("a", "x", 1), ("b", "y", 1)]);
        assert_eq!(rows[0].figures["kept"].median, 195.0);
    }
}
