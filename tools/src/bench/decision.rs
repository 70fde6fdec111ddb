//! `prefix-router bench decision`: how long the choice of a host takes, for fleets of several sizes.
//!
//! Guarantee: the time in Envoy is what the filter itself measures (`decision_us`: key, choice,
//! booking and note in the index), in a VM of a real Envoy under requests; the parts are the same
//! code, native, over an in-memory store, so they show where the time goes and leave out what
//! shared data and wasm add. Not here: reading the body, which `bench overhead` includes.

use std::cell::Cell;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use prefix_router::cost::{self, Constants, Query};
use prefix_router::fleet::{self, Fleet};
use prefix_router::hosts::HostReport;
use prefix_router::learned::Learned;
use prefix_router::load::{self, Ledger};
use prefix_router::names::DECISION_US;
use prefix_router::payload::{End, Head, ReadOptions, Reader};
use prefix_router::placement::order;
use prefix_router::pool::{Router, Rule, Rules, View};
use prefix_router::popularity::Heat;
use prefix_router::prefix::{Key, Prompt, mix};
use prefix_router::request::Request;
use prefix_router::route::Bounds;
use prefix_router::store::{Cas, MemoryStore, Store, StoreError, Versioned};
use serde::Serialize;
use serde_json::json;
use tokio::task::JoinSet;

use super::http::{Connection, Upstream, request};
use crate::harness::{Envoy, Plan};
use crate::print::{note, say};
use crate::{setup, testkit};

/// Sizes of fleets.
const HOSTS: [usize; 4] = [7, 50, 200, 500];
/// Budgets in µs for some of them (DESIGN: the choice itself).
const BUDGETS: [(usize, f64); 2] = [(7, 20.0), (200, 100.0)];
/// Bodies in KB.
const BODIES: [usize; 2] = [4, 32];
/// Prompts of a size; 1,000 × 32 KB are 32 MB.
const PROMPTS: u64 = 1000;
/// How many of them share a system prompt, which is half of the body.
const PROMPTS_PER_SYSTEM: u64 = 8;
/// Requests before the first that counts.
const WARMUP: usize = 200;
/// Connections that send one request after the other: some requests are in flight.
const CONNECTIONS: usize = 4;
/// The histogram's buckets end at every µs up to here, then get wider.
const FINE_US: u64 = 250;
/// Envoy shows a histogram when it has merged the workers' parts, which the run makes it do so often.
const FLUSH: &str = "0.2s";
/// Until the last decision shows.
const SHOWN_LIMIT: Duration = Duration::from_secs(20);

/// Options of `prefix-router bench decision`
#[derive(Args, Debug)]
pub(super) struct DecisionArgs {
    /// How often each prompt is sent: from the second time on the index knows it
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    rows: Vec<Row>,
    rounds: u32,
    commit: String,
}

/// One fleet and one size of body; times in µs.
#[derive(Serialize)]
struct Row {
    hosts: usize,
    body_bytes: usize,
    decisions: u64,
    envoy: Times,
    native: Parts,
    budget_us: Option<f64>,
}

/// Of the filter's own histogram. The mean holds every preemption of a busy machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Times {
    median_us: u64,
    p90_us: u64,
    mean_us: f64,
}

/// Means of the parts over the in-memory store.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Parts {
    /// The key, with the sketch.
    plan_us: f64,
    /// Index, choice, booking, note in the index.
    place_us: f64,
    /// The choice alone: costs and order of all hosts.
    choice_us: f64,
    /// The rendezvous order alone.
    order_us: f64,
    /// Values read from the store per decision.
    reads: f64,
    /// Values written.
    writes: f64,
    /// Bytes copied by both.
    bytes: f64,
}

/// Runs it and prints the result.
pub(super) fn run(args: &DecisionArgs) -> Result<()> {
    let report = tokio::runtime::Runtime::new()?.block_on(measure(args))?;
    if args.json {
        say!("{}", serde_json::to_string(&report)?)?;
    } else {
        print(&report)?;
    }
    Ok(())
}

async fn measure(args: &DecisionArgs) -> Result<Report> {
    let mut rows = Vec::new();
    for hosts in HOSTS {
        for kilobytes in BODIES {
            note!("bench: {hosts} hosts, bodies of {kilobytes} KB …");
            let bodies = bodies(kilobytes * 1024);
            let native = native(args, hosts, &bodies)?;
            let (decisions, envoy) = in_envoy(args, hosts, &bodies).await?;
            let budget = BUDGETS.iter().find(|(count, _)| *count == hosts);
            rows.push(Row {
                hosts,
                body_bytes: bodies.first().map_or(0, Vec::len),
                decisions,
                envoy,
                native,
                budget_us: budget.map(|(_, us)| *us),
            });
        }
    }
    Ok(Report {
        rows,
        rounds: args.rounds,
        commit: setup::commit(),
    })
}

/// Chat requests of about `bytes`: a system prompt that others have too, then a conversation.
fn bodies(bytes: usize) -> Vec<Vec<u8>> {
    let turn = |prompt: u64, n: u64| testkit::words(1_000_000 + prompt * 3 + n, bytes / 6);
    (0..PROMPTS)
        .map(|prompt| {
            let system = testkit::words(prompt / PROMPTS_PER_SYSTEM, bytes / 2);
            let turns: Vec<String> = (0..3).map(|n| turn(prompt, n)).collect();
            let turns: Vec<&str> = turns.iter().map(String::as_str).collect();
            testkit::chat_turns(&system, &turns)
        })
        .collect()
}

/// Addresses on the loopback network, all served by one upstream.
fn address(n: usize, port: u16) -> Result<SocketAddr> {
    let (high, low) = (u8::try_from(n / 250 + 1)?, u8::try_from(n % 250 + 1)?);
    Ok(SocketAddr::from(([127, 1, high, low], port)))
}

/// What the filter measures in a VM of a real Envoy.
async fn in_envoy(args: &DecisionArgs, hosts: usize, bodies: &[Vec<u8>]) -> Result<(u64, Times)> {
    let upstream = Upstream::start_at(IpAddr::from(Ipv4Addr::UNSPECIFIED)).await?;
    let port = upstream.address.port();
    let addresses: Vec<SocketAddr> = (0..hosts)
        .map(|n| address(n, port))
        .collect::<Result<_>>()?;
    let envoy = plan(&addresses)?.start().await?;
    let usable = [("state", "usable")];
    let wanted = |found| found == hosts as f64;
    envoy
        .wait_until_metric(prefix_router::names::HOSTS, &usable, wanted, SHOWN_LIMIT)
        .await?;
    let requests: Vec<Vec<u8>> = bodies.iter().map(|body| request(body)).collect();
    let warmup = requests.get(..WARMUP).unwrap_or(&requests);
    send(&envoy, warmup, 1).await?;
    let before = histogram(&envoy, warmup.len() as u64).await?;
    send(&envoy, &requests, args.rounds).await?;
    let all = warmup.len() as u64 + requests.len() as u64 * u64::from(args.rounds);
    let after = histogram(&envoy, all).await?;
    Ok((after.count - before.count, after.since(&before)?))
}

/// The shipped file with a histogram that resolves single µs, and without health checks: 500 hosts'
/// would keep the one upstream busy, and the choice does not see them.
fn plan(hosts: &[SocketAddr]) -> Result<Plan> {
    let fine = (1..=FINE_US).chain([300, 400, 500, 700, 1000, 2000, 5000, 10_000]);
    let buckets: Vec<u64> = fine.collect();
    Ok(Plan::load("envoy/envoy.yaml")?
        .hosts("engines", hosts)
        .concurrency(1)
        .log_level("warning")
        .set(
            "/stats_config/histogram_bucket_settings/0/buckets",
            json!(buckets),
        )
        .edit(|config| {
            let config = config.as_object_mut().context("no object")?;
            config.insert("stats_flush_interval".to_owned(), json!(FLUSH));
            Ok(())
        })
        .edit_cluster("engines", |cluster| {
            let cluster = cluster.as_object_mut().context("no object")?;
            cluster.remove("health_checks");
            Ok(())
        }))
}

/// Sends every request `rounds` times over [`CONNECTIONS`].
async fn send(envoy: &Envoy, requests: &[Vec<u8>], rounds: u32) -> Result<()> {
    let mut running = JoinSet::new();
    for first in 0..CONNECTIONS {
        let mine = requests.iter().skip(first).step_by(CONNECTIONS);
        let mine: Vec<Vec<u8>> = mine.cloned().collect();
        let address = envoy.address();
        running.spawn(async move {
            let mut connection = Connection::open(address).await?;
            for _ in 0..rounds {
                for request in &mine {
                    connection.send(request).await?;
                }
            }
            anyhow::Ok(())
        });
    }
    while let Some(sent) = running.join_next().await {
        sent??;
    }
    Ok(())
}

/// A histogram of whole µs: how many decisions took less than each bucket's end.
#[derive(Debug, PartialEq)]
struct Histogram {
    count: u64,
    sum: f64,
    below: Vec<(u64, u64)>,
}

/// The filter's histogram once it holds so many decisions.
async fn histogram(envoy: &Envoy, count: u64) -> Result<Histogram> {
    let name = format!("{DECISION_US}_count");
    let wanted = |found| found >= count as f64;
    envoy
        .wait_until_metric(&name, &[], wanted, SHOWN_LIMIT)
        .await?;
    let metrics = envoy.metrics().await?;
    let total = |suffix: &str| {
        let name = format!("{DECISION_US}{suffix}");
        metrics
            .iter()
            .filter(|sample| sample.name == name)
            .map(|sample| sample.value)
            .sum::<f64>()
    };
    let bucket = format!("{DECISION_US}_bucket");
    let buckets = metrics.iter().filter(|sample| sample.name == bucket);
    let mut below: Vec<(u64, u64)> = buckets
        .filter_map(|sample| {
            let end = sample.labels.get("le")?.parse::<f64>().ok()?;
            end.is_finite().then_some((end as u64, sample.value as u64))
        })
        .collect();
    below.sort_unstable();
    ensure!(!below.is_empty(), "{DECISION_US} has no buckets");
    Ok(Histogram {
        count: total("_count") as u64,
        sum: total("_sum"),
        below,
    })
}

impl Histogram {
    /// What came after `before`.
    fn since(&self, before: &Self) -> Result<Times> {
        let count = self.count.saturating_sub(before.count);
        ensure!(count > 0, "the filter made no decision");
        let at = |part: f64| {
            let rank = (part * count as f64).ceil() as u64;
            let pairs = self.below.iter().zip(&before.below);
            let mut pairs = pairs.map(|(now, then)| (now.0, now.1.saturating_sub(then.1)));
            // Envoy's bucket of `le` holds what is less: a decision of 12 µs is below 13.
            let found = pairs.find(|(_, below)| *below >= rank);
            found.map(|(end, _)| end.saturating_sub(1))
        };
        let beyond = "decisions take longer than the histogram's last bucket";
        Ok(Times {
            median_us: at(0.5).context(beyond)?,
            p90_us: at(0.9).context(beyond)?,
            mean_us: (self.sum - before.sum) / count as f64,
        })
    }
}

/// A store that counts what passes through it.
#[derive(Default)]
struct Counting {
    inner: MemoryStore,
    reads: Cell<u64>,
    writes: Cell<u64>,
    bytes: Cell<u64>,
}

impl Counting {
    fn count(&self, cell: &Cell<u64>, bytes: usize) {
        cell.set(cell.get() + 1);
        self.bytes.set(self.bytes.get() + bytes as u64);
    }
}

impl Store for Counting {
    fn read(&self, key: &str) -> Result<Versioned, StoreError> {
        let seen = self.inner.read(key)?;
        self.count(&self.reads, seen.value.as_ref().map_or(0, Vec::len));
        Ok(seen)
    }

    fn write(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), StoreError> {
        self.count(&self.writes, value.len());
        self.inner.write(key, value, cas)
    }
}

/// The parts of the choice, native.
fn native(args: &DecisionArgs, hosts: usize, bodies: &[Vec<u8>]) -> Result<Parts> {
    let prompts: Vec<Prompt> = bodies.iter().map(|body| read(body)).collect();
    let (store, ledger) = (Counting::default(), Ledger::default());
    let view = seat(hosts, &store, &ledger)?;
    let rule = Rule::Adaptive {
        heat: Heat::default(),
        constants: Constants::default(),
        one_gateway: false,
    };
    let bounds = Bounds {
        limit: None,
        panic_rule: true,
    };
    let rules = Rules {
        rule,
        bounds,
        rejects: false,
        slow_start_ms: 0,
        share: 1.0,
        observes: false,
    };
    let router = Router::new("engines", rules);
    for cell in [&store.reads, &store.writes, &store.bytes] {
        cell.set(0);
    }
    let (mut planning, mut placing) = (Duration::ZERO, Duration::ZERO);
    let mut running = Vec::new();
    let (mut decisions, mut own) = (0_u64, [0; 3]);
    for prompt in (0..args.rounds).flat_map(|_| &prompts) {
        // A worker that decides once a second exchanges all it knows with each decision: the most
        // that a choice costs.
        let now_ms = 1000 * decisions;
        let started = Instant::now();
        let plan = router.plan(prompt, hosts, &store);
        let planned = Instant::now();
        let Some(plan) = plan else {
            bail!("a prompt without a key");
        };
        let mut request = Request::default();
        let placed = router.place(&plan, &view, &mut request, now_ms, &store, &ledger);
        placing += planned.elapsed();
        planning += planned - started;
        ensure!(
            placed.is_ok_and(|placed| !placed.placement.hosts.is_empty()),
            "a prompt was not placed"
        );
        decisions += 1;
        running.push(request);
        // As in Envoy some are in flight; what their end does to the store is not the choice's.
        let counted = [&store.reads, &store.writes, &store.bytes].map(Cell::get);
        if running.len() > CONNECTIONS {
            let changes = running.remove(0).end();
            ledger.transact(&store, |_| ((), changes));
        }
        let after = [&store.reads, &store.writes, &store.bytes].map(Cell::get);
        for ((own, after), counted) in own.iter_mut().zip(after).zip(counted) {
            *own += after - counted;
        }
    }
    let (choice_us, order_us) = choices(&view, &store, bounds)?;
    let mean = |time: Duration| time.as_secs_f64() * 1e6 / decisions as f64;
    let [reads, writes, bytes] = [&store.reads, &store.writes, &store.bytes].map(Cell::get);
    let [own_reads, own_writes, own_bytes] = own;
    let each = |count: u64, own: u64| count.saturating_sub(own) as f64 / decisions as f64;
    Ok(Parts {
        plan_us: mean(planning),
        place_us: mean(placing),
        choice_us,
        order_us,
        reads: each(reads.saturating_sub(1), own_reads),
        writes: each(writes, own_writes),
        bytes: each(bytes, own_bytes),
    })
}

fn read(body: &[u8]) -> Prompt {
    let head = Head {
        path: b"/v1/chat/completions",
        content_type: b"application/json",
        ..Head::default()
    };
    let mut reader = Reader::new(&head, &ReadOptions::default());
    reader.feed(body);
    let mut prompt = reader.finish(End::Whole);
    // So that none of its load ends by time, which would count as the next one's.
    prompt.stream = true;
    prompt
}

/// A fleet of so many hosts, as the filter learns of it.
fn seat(hosts: usize, store: &Counting, ledger: &Ledger) -> Result<View> {
    let report = |n| Ok(HostReport::usable(&address(n, 8000)?.to_string()));
    let reports: Vec<HostReport> = (0..hosts).map(report).collect::<Result<_>>()?;
    Fleet::default().apply(store, ledger, "engines", &reports, 0);
    fleet::view(store, "engines").context("no view of the fleet")
}

/// The mean time of the choice and of the order in it, over many keys.
fn choices(view: &View, store: &Counting, bounds: Bounds) -> Result<(f64, f64)> {
    const KEYS: u64 = 2000;
    let Ok(mut loads) = load::read(store) else {
        bail!("no loads");
    };
    let hosts = view.candidates();
    let known = vec![0.0; hosts.len()];
    let (belief, constants) = (Learned::default().belief(false), Constants::default());
    let started = Instant::now();
    for key in 0..KEYS {
        let query = Query {
            key: Key(mix(key, 1)),
            hosts,
            known: &known,
            tokens: 1000.0,
            floor: 0.0,
            affinity: true,
            belief,
            bounds,
        };
        black_box(cost::decide(&query, &mut loads, &constants));
    }
    let chosen = started.elapsed();
    let started = Instant::now();
    for key in 0..KEYS {
        let key = Key(mix(key, 1));
        black_box(order(key, hosts, |host| (host.id, host.weight)));
    }
    let ordered = started.elapsed();
    let mean = |time: Duration| time.as_secs_f64() * 1e6 / KEYS as f64;
    Ok((mean(chosen), mean(ordered)))
}

fn print(report: &Report) -> Result<()> {
    say!("The choice of a host in µs: as the filter measures it in Envoy, and its parts, native")?;
    say!(
        "{:>5} {:>6} | {:>6} {:>5} {:>6} {:>6} | {:>5} {:>5} {:>6} {:>5} {:>5}",
        "hosts",
        "body",
        "median",
        "p90",
        "mean",
        "budget",
        "plan",
        "place",
        "choice",
        "order",
        "KB"
    )?;
    for row in &report.rows {
        let budget = row
            .budget_us
            .map_or("-".to_owned(), |us| format!("{us:.0}"));
        let over = row
            .budget_us
            .is_some_and(|us| row.envoy.median_us as f64 > us);
        say!(
            "{:>5} {:>3} KB | {:>6} {:>5} {:>6.1} {:>6} | {:>5.1} {:>5.1} {:>6.1} {:>5.1} {:>5.1}{}",
            row.hosts,
            row.body_bytes / 1024,
            row.envoy.median_us,
            row.envoy.p90_us,
            row.envoy.mean_us,
            budget,
            row.native.plan_us,
            row.native.place_us,
            row.native.choice_us,
            row.native.order_us,
            row.native.bytes / 1024.0,
            if over { "  over" } else { "" },
        )?;
    }
    let decisions: u64 = report.rows.iter().map(|row| row.decisions).sum();
    say!(
        "KB: read from and written to shared data; {decisions} decisions, {} rounds, commit {}",
        report.rounds,
        report.commit
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(count: u64, sum: f64, below: &[(u64, u64)]) -> Histogram {
        Histogram {
            count,
            sum,
            below: below.to_vec(),
        }
    }

    #[test]
    fn times_are_of_what_came_after_the_warm_up() {
        let before = histogram(2, 100.0, &[(10, 0), (20, 0), (60, 2)]);
        let after = histogram(12, 250.0, &[(10, 5), (20, 9), (60, 12)]);
        let expected = Times {
            median_us: 9,
            p90_us: 19,
            mean_us: 15.0,
        };
        assert_eq!(after.since(&before).unwrap(), expected);
        assert!(after.since(&after).is_err(), "nothing was decided");
        let beyond = histogram(12, 250.0, &[(10, 0), (20, 0), (60, 2)]);
        assert!(beyond.since(&before).is_err(), "the median is not shown");
    }

    #[test]
    fn the_native_parts_are_of_the_whole_choice() {
        let args = DecisionArgs {
            rounds: 1,
            json: false,
        };
        let bodies: Vec<Vec<u8>> = bodies(4096).into_iter().take(50).collect();
        let parts = native(&args, 50, &bodies).unwrap();
        // Sketch, page and loads are read once and written once each.
        assert!((2.9..3.1).contains(&parts.reads), "{parts:?}");
        assert!((2.9..3.1).contains(&parts.writes), "{parts:?}");
        assert!(parts.bytes > 2.0 * (4_108.0 + 3_076.0), "{parts:?}");
        assert!(parts.order_us < parts.choice_us, "{parts:?}");
    }
}
