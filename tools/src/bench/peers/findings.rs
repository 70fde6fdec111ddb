//! What the rows say together, in sentences.
//!
//! Guarantee: each sentence says how ours compares with the best of the others, whichever is ahead.
//! Not here: the figures.

use super::plays::Row;
use super::router::{Contestant, Told};
use super::{Results, fleet};

/// Of 200 later turns so many should stay on their host.
const KEPT_MIN: f64 = 196.0;
/// The busiest host's share of the mean that is still even.
const SHARE_MAX: f64 = 1.3;

/// All sentences.
pub(super) fn of(results: &Results) -> Vec<String> {
    let rows: Vec<Row> = results
        .parts
        .iter()
        .flat_map(|part| results.rows(part))
        .collect();
    let mut found = Vec::new();
    found.extend(both(results, &rows));
    found.extend(scaling(&rows));
    found.extend(processor(results, &rows));
    found.extend(engines(results, &rows));
    found
}

fn median(row: &Row, figure: &str) -> Option<f64> {
    Some(row.figures.get(figure)?.median)
}

fn row<'a>(rows: &'a [Row], part: &str, cell: &str, router: &str) -> Option<&'a Row> {
    rows.iter()
        .find(|row| row.part == part && row.cell == cell && row.router == router)
}

/// The cells of a part, in their order.
fn cells<'a>(rows: &'a [Row], part: &str) -> Vec<&'a str> {
    let mut cells: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.part == part) {
        if !cells.contains(&row.cell.as_str()) {
            cells.push(&row.cell);
        }
    }
    cells
}

/// Who keeps conversations together and spreads them, in how many cells.
fn both(results: &Results, rows: &[Row]) -> Option<String> {
    let part = "conversations";
    let cells = cells(rows, part);
    let does = |one: &Contestant, cell: &&str| {
        row(rows, part, cell, one.name).is_some_and(|row| {
            median(row, "kept").is_some_and(|kept| kept >= KEPT_MIN)
                && median(row, "share").is_some_and(|share| share <= SHARE_MAX)
        })
    };
    let count = |one: &Contestant| cells.iter().filter(|cell| does(one, cell)).count();
    let without_header = results
        .contestants
        .iter()
        .filter(|one| one.told == Told::Nothing);
    let counts: Vec<String> = without_header
        .map(|one| (one.name, count(one)))
        .filter(|(_, count)| *count > 0)
        .map(|(name, count)| format!("{name} in {count}"))
        .collect();
    let who = if counts.is_empty() {
        "none".to_owned()
    } else {
        counts.join(", ")
    };
    (!cells.is_empty()).then(|| {
        format!(
            "Without any header from clients, at least {KEPT_MIN:.0} of 200 later turns stay and \
             the busiest host gets at most {SHARE_MAX} times the mean, of {} cells: {who}.",
            cells.len()
        )
    })
}

fn scaling(rows: &[Row]) -> Option<String> {
    let joins = row(rows, "scaling", "a fifth host joins", "prefix_router")?;
    let (moved, new) = (median(joins, "moved")?, median(joins, "new")?);
    Some(format!(
        "When a fifth host joins, prefix_router moves {moved:.1} % of the prompts, and the new host \
         has {new:.1} % of the requests after its slow start; 20 % is its due."
    ))
}

/// Ours against the leanest that reads prompts, and against Envoy alone, for each size.
fn processor(results: &Results, rows: &[Row]) -> Vec<String> {
    let part = "cpu";
    let cost = |cell: &str, name: &str| median(row(rows, part, cell, name)?, "us");
    let sentence = |cell: &&str| {
        let ours = cost(cell, "prefix_router")?;
        let others = results.contestants.iter();
        let others = others.filter(|one| one.reads_prompts() && !one.is_ours());
        let costs = others.filter_map(|one| Some((one.name, cost(cell, one.name)?)));
        let (name, least) = costs.min_by(|a, b| a.1.total_cmp(&b.1))?;
        let alone = cost(cell, "envoy-least_request").map_or(String::new(), |alone| {
            format!("; Envoy without the filter {alone:.0} µs")
        });
        Some(format!(
            "At {cell}, prefix_router takes {ours:.0} µs of processor time a request, {:.2} times \
             what the leanest other that reads prompts takes ({name}, {least:.0} µs){alone}.",
            ours / least
        ))
    };
    cells(rows, part).iter().filter_map(sentence).collect()
}

/// Ours on real engines, against the best of the others that need no header, and with one.
fn engines(results: &Results, rows: &[Row]) -> Option<String> {
    let of = |name: &str, figure: &str| median(row(rows, "fleet", fleet::LOAD, name)?, figure);
    let (hits, ttft) = (of("prefix_router", "hits")?, of("prefix_router", "p50")?);
    let best = |told: bool| {
        let others = results.contestants.iter().filter(|one| !one.is_ours());
        let others = others.filter(|one| (one.told != Told::Nothing) == told);
        let times = others.filter_map(|one| Some((one.name, of(one.name, "p50")?)));
        let (name, ttft) = times.min_by(|a, b| a.1.total_cmp(&b.1))?;
        Some(format!(
            "{name} {:.1} % and {ttft:.0} ms",
            of(name, "hits")?
        ))
    };
    let others = [("without a header", best(false)), ("with one", best(true))];
    let others = others
        .into_iter()
        .filter_map(|(how, best)| Some(format!("the fastest other {how}: {}", best?)));
    let others: Vec<String> = others.collect();
    Some(format!(
        "Real engines: prefix_router {hits:.1} % hits and {ttft:.0} ms to the first token in the \
         median; {}.",
        others.join("; ")
    ))
}

#[cfg(test)]
mod tests {
    use super::super::plays::Play;
    use super::super::plays::tests::play;
    use super::super::{What, table};
    use super::*;

    fn of_plays(what: What, plays: Vec<Play>) -> Vec<String> {
        let results = Results {
            parts: vec![what.part()],
            plays,
            ..table::tests::results()
        };
        of(&results)
    }

    #[test]
    fn who_keeps_and_spreads_is_counted_for_all_that_need_no_header() {
        let share = |mut play: Play, share: f64| {
            play.figures.insert("share".to_owned(), share);
            play
        };
        let plays = vec![
            play("one", "prefix_router", 1, 195.0),
            play("two", "prefix_router", 1, 196.0),
            play("one", "vllm-cache_aware-tuned", 1, 200.0),
            share(play("two", "vllm-cache_aware-tuned", 1, 200.0), 1.31),
            play("one", "vllm-consistent_hash", 1, 200.0),
        ];
        let found = of_plays(What::Conversations, plays);
        assert_eq!(found.len(), 1);
        assert!(
            found[0].ends_with("of 2 cells: prefix_router in 1, vllm-cache_aware-tuned in 1."),
            "{found:?}"
        );
    }

    #[test]
    fn a_leaner_peer_is_said_so() {
        let cost = |router: &str, us: f64| Play {
            part: "cpu".to_owned(),
            figures: [("us".to_owned(), us)].into(),
            ..play("4 KB", router, 1, 0.0)
        };
        let plays = vec![
            cost("prefix_router", 300.0),
            cost("envoy-least_request", 140.0),
            cost("sglang-cache_aware", 200.0),
            cost("smg-cache_aware", 380.0),
            cost("vllm-consistent_hash", 100.0),
        ];
        let found = of_plays(What::Cpu, plays);
        assert_eq!(
            found,
            [
                "At 4 KB, prefix_router takes 300 µs of processor time a request, 1.50 times what the \
                 leanest other that reads prompts takes (sglang-cache_aware, 200 µs); Envoy without \
                 the filter 140 µs."
            ]
        );
    }
}
