//! Real engines behind every router, llama.cpp and vLLM: hits, times to the first token, requests a
//! second.
//!
//! Guarantee: engines have nothing cached when a play begins; hits are what their answers say,
//! tokens of a host what its own metrics say, times the client's. Not here: the engines (real/),
//! simulated ones (demo, bench sixteen).

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::plays::{Part, column, plotted, quiet};
use super::router::{Engines, Router, Told};
use super::{Bench, Outcome};
use crate::bench::live;
use crate::harness::Plan;
use crate::load::client::{Outcome as Answered, Target};
use crate::load::driver::{Record, Until};
use crate::load::stats::Tally;
use crate::print::note;
use crate::real;
use crate::real::llama::{self, Llama, Sizes};
use crate::real::vllm::Vllm;
use crate::round::fleet::{Fleet, Kind};
use crate::workload::conversations::{Conversations, Rounds};
use crate::workload::sessions::Sessions;
use crate::workload::{Form, Workload};

/// Engines: two processor cores compute for three as they do for two.
const HOSTS: u16 = 3;
/// Requests at once, two for each engine.
const AT_ONCE: u32 = 6;

/// A request is good if its first token comes within so many times what a cold one alone takes: of
/// a 70B model on eight H100, 3,000 tokens take 0.25 s, and 1 s is good …
const GOOD_TTFT: f64 = 4.0;
/// … and its further tokens within so many times: a step takes 14 ms there, and 50 ms is good.
const GOOD_TOKEN: f64 = 3.5;

/// The cell of [`PART`].
pub(super) const LOAD: &str = "12 tenants x 2 conversations x 8 turns";

/// What is asked, and of which engines.
pub(super) struct Load {
    cell: &'static str,
    engine: Engine,
    plan: fn(u64) -> Conversations,
}

/// Which engines, and how much they can keep.
#[derive(Clone, Copy, Debug)]
enum Engine {
    Llama(Sizes),
    Vllm { kv_tokens: u64 },
}

impl Engine {
    /// How they are run; fetches and makes what is missing, for minutes.
    fn kind(self) -> Result<Kind> {
        Ok(match self {
            Self::Llama(sizes) => Llama::ready()?.kind(sizes),
            Self::Vllm { kv_tokens } => Vllm::ready()?.kind(kv_tokens),
        })
    }

    /// What Envoy's file needs for them.
    fn plan(self) -> fn(Plan) -> Plan {
        match self {
            Self::Llama(_) => llama::one_request_a_connection,
            Self::Vllm { .. } => |plan| plan,
        }
    }

    /// Their counter of answered tokens.
    fn answered(self) -> &'static str {
        match self {
            Self::Llama(_) => "llamacpp:tokens_predicted_total",
            Self::Vllm { .. } => "vllm:generation_tokens_total",
        }
    }
}

/// The load on which routers should differ.
pub(super) const LOADS: [Load; 1] = [Load {
    cell: LOAD,
    engine: Engine::Llama(Sizes::DEMO),
    plan: |seed| Conversations::of_tenants(12, 2, 8, seed),
}];

/// Those on which they should not, or must lose.
pub(super) const BAD_LOADS: [Load; 3] = [
    Load {
        cell: "caches too small: 12 slots for 24 conversations of 4 turns",
        engine: Engine::Llama(Sizes {
            slots: 4,
            context: 16_384,
        }),
        plan: |seed| Conversations::of_tenants(12, 2, 4, seed),
    },
    Load {
        cell: "96 unique prompts",
        engine: Engine::Llama(Sizes::DEMO),
        plan: |seed| Conversations::of_tenants(96, 1, 1, seed),
    },
    Load {
        cell: "480 short prompts, nothing shared",
        engine: Engine::Llama(Sizes::DEMO),
        plan: |seed| Conversations {
            system_tokens: 8,
            ..Conversations::of_tenants(480, 1, 1, seed)
        },
    },
];

/// What vLLM replicas are asked: the first load's prompts are twice what one replica's cache holds.
pub(super) const VLLM_LOADS: [Load; 2] = [
    Load {
        cell: "12 tenants x 2 conversations x 8 turns, KV 16,384 tokens",
        engine: Engine::Vllm { kv_tokens: 16_384 },
        plan: |seed| Conversations::of_tenants(12, 2, 8, seed),
    },
    Load {
        cell: "24 tenants x 2 conversations x 5 turns, KV 32,768 tokens",
        engine: Engine::Vllm { kv_tokens: 32_768 },
        plan: |seed| Conversations::of_tenants(24, 2, 5, seed),
    },
];

/// The figures of all parts.
const COLUMNS: &[super::plays::Column] = &[
    plotted("hits", "hits %", 1),
    plotted("p50", "TTFT P50", 0),
    column("p90", "P90", 0),
    column("p99", "P99 ms", 0),
    plotted("rate", "requests/s", 2),
    column("good", "good %", 0),
    quiet("failed", "failed"),
];

pub(super) const PART: Part = Part {
    name: "fleet",
    title: "Three real llama.cpp engines",
    about: "12 tenants, each with a system prompt of 1,600 tokens and two conversations of 8 turns, \
        6 requests at once, over 3 llama.cpp servers with a tiny model of random weights and 8 \
        slots each; started anew for each play. Hits are the engines' own cached_tokens. Good: the \
        first token within 4 times, each further one within 3.5 times what one cold request alone \
        takes (of a 70B model on eight H100 that is 1 s and 50 ms). Hosts: answered tokens of \
        each. vllm-router's cache_aware lets vLLM tokenise, which llama.cpp does not offer; without \
        it, it spreads.",
    columns: COLUMNS,
    hosts: true,
};

pub(super) const BAD: Part = Part {
    name: "bad",
    title: "Where there is little to gain",
    about: "The same engines under loads on which routing by prefix cannot bring much: caches that \
        hold half of the conversations, prompts that nobody shares, and short ones.",
    columns: COLUMNS,
    hosts: true,
};

pub(super) const VLLM: Part = Part {
    name: "vllm",
    title: "Three real vLLM replicas",
    about: "Tenants with a system prompt of 1,600 tokens each and two conversations, 6 requests at \
        once, over 3 replicas of vLLM 0.32.0 on processor cores (one thread and blocks of 32 tokens \
        each) with a tiny model of random weights; prefix caches empty before each play. Hits are \
        the replicas' own cached_tokens. Good: the first token within 4 times, each further one \
        within 3.5 times what one cold request alone takes. Hosts: answered tokens of each.",
    columns: COLUMNS,
    hosts: true,
};

/// Measures a part.
pub(super) async fn run(bench: &mut Bench, part: &'static Part, loads: &[Load]) -> Result<()> {
    let last = bench.engine_port.checked_add(HOSTS - 1);
    let last = last.filter(|_| bench.engine_port > 0).with_context(|| {
        let got = bench.engine_port;
        format!("--engine-port: expected {HOSTS} ports from it on to exist, got {got}")
    })?;
    let ports: Vec<u16> = (bench.engine_port..=last).collect();
    for load in loads {
        // Not on a thread that serves.
        let engine = load.engine;
        let kind = tokio::task::spawn_blocking(move || engine.kind()).await??;
        note!("bench: starting {HOSTS} engines for {} …", load.cell);
        let fleet = Fleet::start(&ports, kind, &bench.store.folder()).await?;
        for repeat in 1..=bench.repeats {
            for contestant in bench.turn(repeat) {
                let slot = bench.slot(part, load.cell, contestant.name, repeat);
                if bench.have(std::slice::from_ref(&slot)) {
                    continue;
                }
                let seed = bench.seed_of(repeat);
                let played = async {
                    fleet.cool().await?;
                    let alone = alone(&fleet, load, seed).await?;
                    fleet.cool().await?;
                    let engines = Engines {
                        hosts: &fleet.addresses,
                        model: real::MODEL,
                        plan: engine.plan(),
                    };
                    let router = bench.open_with(contestant, engines, bench.workers).await?;
                    play(&router, &fleet, load, seed, &alone).await
                };
                let played = played.await;
                bench.keep(slot, played)?;
            }
        }
        fleet.down().await?;
    }
    Ok(())
}

/// Times of one request that has an engine for itself.
struct Alone {
    ttft: f64,
    token: f64,
}

/// Asks one engine one cold prompt.
async fn alone(fleet: &Fleet, load: &Load, seed: u64) -> Result<Alone> {
    let address = fleet.addresses.first().context("no engines")?;
    let target = Target {
        base: format!("http://{address}").parse()?,
        form: Form::Chat,
        model: real::MODEL.into(),
        stream: true,
        headers: hyper::HeaderMap::new(),
        prefix_header: None,
        timeout: Duration::from_secs(60),
    };
    let plan = Conversations {
        count: 1,
        turns: 1,
        // Not one of the prompts that are measured.
        ..(load.plan)(!seed)
    };
    let records = live::play(target, Box::new(Rounds::new(plan, 1)), 1.0, Until::End).await?;
    let record = records.first().context("no request was sent")?;
    let times = times(&record.outcome).context("an engine alone gave no answer")?;
    Ok(Alone {
        ttft: times.0,
        token: times.1,
    })
}

/// Seconds to the first token, and for each further one.
fn times(outcome: &Answered) -> Option<(f64, f64)> {
    if outcome.failure.is_some() {
        return None;
    }
    let first = outcome.first?.as_secs_f64();
    let further = outcome.answer.usage?.completion_tokens.saturating_sub(1);
    let rest = (outcome.total.as_secs_f64() - first).max(0.0);
    Some((first, rest / further.max(1) as f64))
}

async fn play(
    router: &Router,
    fleet: &Fleet,
    load: &Load,
    seed: u64,
    alone: &Alone,
) -> Result<Outcome> {
    let rounds: Box<dyn Workload> = Box::new(Rounds::new((load.plan)(seed), AT_ONCE));
    let workload = match router.contestant.told {
        Told::Session => Box::new(Sessions(rounds)),
        Told::Nothing | Told::Tenant => rounds,
    };
    let answered = load.engine.answered();
    let before = fleet.engines.values(answered).await?;
    let began = Instant::now();
    let records = live::play(router.target()?, workload, 1.0, Until::End).await?;
    let took = began.elapsed().as_secs_f64();
    let mut outcome = figures(&records, alone, took)?;
    let after = fleet.engines.values(answered).await?;
    ensure!(
        after.iter().sum::<f64>() > 0.0,
        "the engines do not count answered tokens as {answered}"
    );
    let since = after.iter().zip(&before);
    outcome.hosts = since
        .map(|(after, before)| (after - before) as u64)
        .collect();
    Ok(outcome)
}

fn figures(records: &[Record], alone: &Alone, took: f64) -> Result<Outcome> {
    let mut tally = Tally::default();
    records.iter().for_each(|record| tally.add(record));
    ensure!(
        tally.requests > 0,
        "no request succeeded: {:?}",
        tally.errors
    );
    let ttft = tally.ttft.percentiles().context("no first token")?;
    let good = records.iter().filter(|record| {
        times(&record.outcome).is_some_and(|(first, token)| {
            first <= alone.ttft * GOOD_TTFT && token <= alone.token * GOOD_TOKEN
        })
    });
    let mut outcome = Outcome::default();
    let hits = tally.hit_rate();
    let hits = hits.context("the answers do not say how many tokens were cached")?;
    outcome.figure("hits", hits * 100.0);
    outcome.figure("p50", ttft.p50);
    outcome.figure("p90", ttft.p90);
    outcome.figure("p99", ttft.p99);
    outcome.figure("rate", tally.requests as f64 / took.max(1e-9));
    outcome.figure("good", good.count() as f64 * 100.0 / records.len() as f64);
    outcome.figure("failed", tally.failed() as f64);
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::answer::{Answer, Usage};
    use crate::load::client::Failure;

    fn record(ttft_ms: u64, total_ms: u64, failure: Option<Failure>) -> Record {
        let answer = Answer {
            usage: Some(Usage {
                prompt_tokens: 100,
                cached_tokens: Some(40),
                completion_tokens: 11,
            }),
            ..Answer::default()
        };
        let ms = Duration::from_millis;
        Record {
            due: Duration::ZERO,
            lag: Duration::ZERO,
            ttft: Some(ms(ttft_ms)),
            total: ms(total_ms),
            prefix: None,
            chat: 0,
            turn: 0,
            outcome: Answered {
                first: Some(ms(ttft_ms)),
                total: ms(total_ms),
                answer,
                failure,
                ..Answered::failed(Failure::Cut)
            },
        }
    }

    #[test]
    fn good_are_requests_whose_first_and_further_tokens_were_in_time() {
        let alone = Alone {
            ttft: 0.1,
            token: 0.01,
        };
        let records = [
            record(400, 750, None),
            // The first token too late, then the others.
            record(401, 500, None),
            record(100, 460, None),
            record(100, 200, Some(Failure::Status(503))),
        ];
        let outcome = figures(&records, &alone, 2.0).unwrap();
        let figure = |name| {
            let found = outcome.figures.iter().find(|(one, _)| *one == name);
            found.unwrap().1
        };
        assert_eq!(figure("good"), 25.0);
        assert_eq!(figure("hits"), 40.0);
        assert_eq!((figure("rate"), figure("failed")), (1.5, 1.0));
        assert_eq!((figure("p50"), figure("p99")), (400.0, 401.0));
    }
}
