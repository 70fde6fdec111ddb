//! A host joins, one leaves, one dies: whose prompts move, what the new one gets, and what clients
//! see, through every router.
//!
//! Guarantee: each router is told of hosts in its own way (Envoy by its hosts' file, the others by
//! their own API), and has the same time to get used to a new one; where a prompt lives is what the
//! engine that served it says. Not here: what a move costs in real engines (scale.rs).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::plays::{Part, column, plotted, quiet};
use super::router::Router;
use super::{Bench, Outcome, Slot, mock};
use crate::bench::live::Engines;
use crate::load::driver::{Record, Until};
use crate::workload::conversations::Conversations;
use crate::workload::visits::Visits;

/// Hosts at the start; one more joins.
const HOSTS: u16 = 4;
/// Shared prompts.
const PROMPTS: u32 = 500;
/// Requests at once while prompts are looked for.
const AT_ONCE: u32 = 16;
/// Requests at once while a new host warms up: enough that it is found, and no load.
const AT_ONCE_CALM: u32 = 4;
/// Our own slow start takes 30 s by default; who has none loses nothing by the wait.
const SETTLE: Duration = Duration::from_secs(35);
/// A router is this old before a host joins: our filter takes hosts that come within 10 s of one
/// another for a fleet that starts, whose caches are equally cold.
const AGE: Duration = Duration::from_secs(12);
/// For so long is looked at what clients see of a dead host; our health checks take 3 s at most.
const AFTER_DEATH: Duration = Duration::from_secs(15);

/// What happens, as the names of cells.
const JOINS: &str = "a fifth host joins";
const LEAVES: &str = "one of five leaves";
const DIES: &str = "one of four is killed";

pub(super) const PART: Part = Part {
    name: "scaling",
    title: "A host joins, one leaves, one dies",
    about: "500 shared prompts of 3,000 tokens, 16 requests at once, over 4 hosts that answer in \
        30 ms. Moved: prompts whose next request is served by another host than the last one; \
        calm is the same without any event. A fifth host is due 20 % of the prompts, and 35 s \
        after it joined its share of the requests is taken. Of a host that leaves, only its own \
        prompts have to move; others moved besides, and of these some are computed anew, the rest \
        went to a host that has them too. A killed host is not announced: failed are \
        requests that the client saw fail within 15 s, of those sent, and until when.",
    columns: &[
        column("calm", "calm %", 1),
        plotted("moved", "moved %", 1),
        column("others", "others %", 1),
        column("anew", "anew %", 1),
        plotted("new", "new host %", 1),
        column("own", "its own %", 1),
        plotted("lost", "failed", 0),
        column("sent", "sent", 0),
        column("until", "until s", 1),
        quiet("failed", "failed"),
    ],
    hosts: false,
};

/// Measures the part.
pub(super) async fn run(bench: &mut Bench) -> Result<()> {
    for repeat in 1..=bench.repeats {
        for contestant in bench.turn(repeat) {
            let slots =
                [JOINS, LEAVES, DIES].map(|cell| bench.slot(&PART, cell, contestant.name, repeat));
            if bench.have(&slots) {
                continue;
            }
            let played = async {
                let config = mock();
                let engines = Engines::start(HOSTS + 1, bench.engine_port, 1.0, &config).await?;
                let hosts = engines.addresses();
                let first = hosts.get(..HOSTS.into()).context("no hosts")?;
                let router = bench.open(contestant, first).await?;
                let fleet = Fleet {
                    engines,
                    router,
                    began: Instant::now(),
                    hosts,
                    seed: bench.seed_of(repeat),
                    passes: 0,
                };
                fleet.play().await
            };
            keep(bench, slots, played.await)?;
        }
    }
    Ok(())
}

fn keep(bench: &mut Bench, slots: [Slot; 3], played: Result<[Outcome; 3]>) -> Result<()> {
    match played {
        Ok(outcomes) => slots
            .into_iter()
            .zip(outcomes)
            .try_for_each(|(slot, outcome)| bench.keep(slot, Ok(outcome))),
        // Told once; the other cells stay empty.
        Err(error) => {
            let [first, ..] = slots;
            bench.keep(first, Err(error))
        }
    }
}

/// A router and its engines, the last of which joins later.
struct Fleet {
    engines: Engines,
    router: Router,
    began: Instant,
    hosts: Vec<SocketAddr>,
    seed: u64,
    /// Passes over all prompts so far.
    passes: u32,
}

/// Where each prompt was last served.
type Places = BTreeMap<u64, Place>;

/// Where a prompt was served.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    host: String,
    /// Whether most of it was in the host's cache.
    cached: bool,
}

impl Fleet {
    async fn play(mut self) -> Result<[Outcome; 3]> {
        // Twice, so that every router has seen each prompt again.
        self.look(2).await?;
        let before = self.look(1).await?;
        let calm = self.look(1).await?;
        tokio::time::sleep(AGE.saturating_sub(self.began.elapsed())).await;
        let joins = self.joins(&before, &calm).await?;
        let now = self.look(1).await?;
        let leaves = self.leaves(&now).await?;
        Ok([joins, leaves, self.dies().await?])
    }

    async fn joins(&mut self, before: &Places, calm: &Places) -> Result<Outcome> {
        let new = self.hosts.last().copied().context("no hosts")?;
        self.router.set_hosts(&self.hosts.clone()).await?;
        let until = Until::Elapsed(SETTLE);
        let passes = self.passes..self.passes + 10_000;
        let settled = self.visit(passes, AT_ONCE_CALM, until).await?;
        // So far it may have come; the questions of a pass must not be asked again.
        self.passes += settled.len() as u32 / PROMPTS + 1;
        let after = self.look(1).await?;
        let new = new.to_string();
        let moves = Moves::between(calm, &after, &new);
        let mut outcome = Outcome::default();
        outcome.figure("calm", Moves::between(before, calm, "").share());
        outcome.figure("moved", moves.share());
        outcome.figure("others", percent(moves.others, moves.of));
        let got = after.values().filter(|place| place.host == new).count();
        outcome.figure("new", percent(got, after.len()));
        outcome.figure("failed", failed(&settled) as f64);
        Ok(outcome)
    }

    async fn leaves(&mut self, before: &Places) -> Result<Outcome> {
        let gone = self.hosts.remove(0).to_string();
        self.router.set_hosts(&self.hosts.clone()).await?;
        let after = self.look(1).await?;
        ensure!(
            !after.values().any(|place| place.host == gone),
            "{gone} was removed and still gets requests"
        );
        let moves = Moves::between(before, &after, &gone);
        let mut outcome = Outcome::default();
        outcome.figure("moved", moves.share());
        let own = before.values().filter(|place| place.host == gone).count();
        outcome.figure("own", percent(own, before.len()));
        outcome.figure("others", percent(moves.others, moves.of));
        outcome.figure("anew", percent(moves.anew, moves.of));
        Ok(outcome)
    }

    async fn dies(&mut self) -> Result<Outcome> {
        let dead = self.hosts.first().copied().context("no hosts")?;
        self.engines.kill(dead);
        let began = Instant::now();
        let passes = self.passes..self.passes + 10_000;
        let records = self
            .visit(passes, AT_ONCE, Until::Elapsed(AFTER_DEATH))
            .await?;
        let lost: Vec<&Record> = records
            .iter()
            .filter(|record| record.outcome.failure.is_some())
            .collect();
        let until = lost
            .iter()
            .map(|record| record.outcome.sent.saturating_duration_since(began))
            .max()
            .unwrap_or_default();
        let mut outcome = Outcome::default();
        outcome.figure("lost", lost.len() as f64);
        outcome.figure("sent", records.len() as f64);
        outcome.figure("until", until.as_secs_f64());
        Ok(outcome)
    }

    /// Asks each prompt so many times; where it was served last. Nothing may fail.
    async fn look(&mut self, passes: u32) -> Result<Places> {
        let range = self.passes..self.passes + passes;
        self.passes += passes;
        let records = self.visit(range, AT_ONCE, Until::End).await?;
        let expected = (passes * PROMPTS) as usize;
        ensure!(
            records.len() == expected,
            "{} of {expected} requests were sent",
            records.len()
        );
        places(&records)
    }

    async fn visit(&self, passes: Range<u32>, at_once: u32, until: Until) -> Result<Vec<Record>> {
        let plan = Conversations {
            count: PROMPTS,
            turns: 1,
            ..Conversations::new(PROMPTS, self.seed)
        };
        let visits = Box::new(Visits::new(plan, passes, at_once));
        self.engines
            .play_at(self.router.target()?, visits, until)
            .await
    }
}

fn failed(records: &[Record]) -> usize {
    let failed = |record: &&Record| record.outcome.failure.is_some();
    records.iter().filter(failed).count()
}

fn places(records: &[Record]) -> Result<Places> {
    let mut places = Places::new();
    // Records come in the order of their ends; two of a prompt are a pass apart.
    for record in records {
        if let Some(failure) = record.outcome.failure {
            anyhow::bail!(
                "a request failed while all hosts were well: {}",
                failure.name()
            );
        }
        let host = record.outcome.host.clone();
        let host = host.context("an answer does not say which engine gave it")?;
        let usage = record.outcome.answer.usage.unwrap_or_default();
        let cached = usage.cached_tokens.unwrap_or_default() * 2 > usage.prompt_tokens;
        let prompt = record.prefix.context("a request without a prompt")?;
        places.insert(prompt, Place { host, cached });
    }
    Ok(places)
}

/// Prompts that moved.
struct Moves {
    moved: usize,
    /// Those of them that neither left nor reached the host in question.
    others: usize,
    /// Those of these that were computed anew.
    anew: usize,
    of: usize,
}

impl Moves {
    fn between(before: &Places, after: &Places, host: &str) -> Self {
        let moved = before.iter().filter_map(|(prompt, from)| {
            let to = after.get(prompt)?;
            (to.host != from.host).then_some((from, to))
        });
        let moved: Vec<_> = moved.collect();
        let others = moved
            .iter()
            .filter(|(from, to)| from.host != host && to.host != host);
        Self {
            others: others.clone().count(),
            anew: others.filter(|(_, to)| !to.cached).count(),
            moved: moved.len(),
            of: before.len(),
        }
    }

    fn share(&self) -> f64 {
        percent(self.moved, self.of)
    }
}

fn percent(part: usize, of: usize) -> f64 {
    part as f64 * 100.0 / of.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_is_counted_and_whether_the_event_explains_it() {
        // A host in capitals computes the prompt anew.
        let places = |hosts: &[&str]| -> Places {
            let place = |host: &&str| Place {
                host: host.to_lowercase(),
                cached: host.chars().all(char::is_lowercase),
            };
            (0..).zip(hosts.iter().map(place)).collect()
        };
        let before = places(&["a", "b", "c", "a", "b", "c"]);
        let after = places(&["a", "NEW", "B", "new", "b", "a"]);
        let moves = Moves::between(&before, &after, "new");
        let counts = (moves.moved, moves.others, moves.anew, moves.of);
        assert_eq!(counts, (4, 2, 1, 6));
        assert_eq!((moves.share() * 6.0).round(), 400.0);
        assert_eq!(Moves::between(&before, &before, "new").moved, 0);
    }
}
