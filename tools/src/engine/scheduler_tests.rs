//! The scheduler against theory (M/D/1), against its own books, and at its limits.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

fn job(prompt_tokens: u32, output_tokens: u32, text: u64) -> Job {
    // Every job's text is its own, block by block.
    let blocks = u64::from((prompt_tokens + output_tokens).div_ceil(16));
    Job {
        prompt_tokens,
        output_tokens,
        chain: (0..blocks).map(|at| (text << 20) + at + 1).collect(),
    }
}

fn small(kv_tokens: u64) -> Engine {
    let config = EngineConfig {
        kv_tokens,
        ..EngineConfig::default()
    };
    Engine::new(config, Report::Every)
}

/// Runs until nothing is left; returns every progress in order and the time it took.
fn drain(engine: &mut Engine) -> (Vec<Progress>, u64) {
    let mut progress = Vec::new();
    let mut ns = 0;
    while let Some(step) = engine.begin() {
        ns += step;
        engine.finish(&mut progress);
    }
    (progress, ns)
}

#[test]
fn one_prompt_takes_the_time_the_formula_says() {
    let mut engine = small(1_200_000);
    engine.submit(job(7_000, 3, 1)).unwrap();
    let (progress, ns) = drain(&mut engine);
    assert_eq!(progress.len(), 3);
    // 14 ms + 7000 / 14000 s × (1 + 3500 / 54000), then two steps of 14 ms + 40 µs + 17.5 ns × context.
    let decode = |context: f64| 14e6 + 40e3 + 17.5 * context;
    let expected = 14e6 + 5e8 * (1.0 + 3_500.0 / 54_000.0) + decode(7001.0) + decode(7002.0);
    assert!((ns as f64 - expected).abs() <= 3.0, "{ns} {expected}");
}

#[test]
fn a_long_prompt_is_computed_in_chunks_beside_those_that_decode() {
    let mut engine = small(1_200_000);
    engine.submit(job(16, 100, 1)).unwrap();
    engine.begin();
    let mut progress = Vec::new();
    engine.finish(&mut progress);
    engine.submit(job(20_000, 1, 2)).unwrap();
    let mut steps = 0;
    while progress.iter().filter(|p| p.finished).count() == 0 {
        engine.begin().unwrap();
        engine.finish(&mut progress);
        steps += 1;
    }
    // 8191 + 8191 + 3618 tokens, one decode token in each step.
    assert_eq!(steps, 3);
    assert_eq!(progress.len(), 1 + 3 + 1);
}

#[test]
fn a_hit_never_covers_the_whole_prompt() {
    // prompt tokens → cached tokens of the same prompt again
    for (prompt, cached) in [
        (15, 0),
        (16, 0),
        (17, 16),
        (32, 16),
        (33, 32),
        (3_120, 3_104),
    ] {
        let mut engine = small(1_200_000);
        engine.submit(job(prompt, 1, 1)).unwrap();
        drain(&mut engine);
        engine.submit(job(prompt, 1, 1)).unwrap();
        let (progress, _) = drain(&mut engine);
        assert_eq!(
            progress[0].cached_tokens, cached,
            "prompt of {prompt} tokens"
        );
        let counters = engine.counters();
        assert_eq!(counters.queried_tokens, 2 * u64::from(prompt));
        assert_eq!(counters.hit_tokens, u64::from(cached));
    }
}

#[test]
fn an_answer_is_found_by_the_turn_that_quotes_it() {
    let mut engine = small(1_200_000);
    let mut chain: Vec<u64> = (1..=20).collect();
    engine
        .submit(Job {
            prompt_tokens: 160,
            output_tokens: 81,
            chain: chain.clone().into(),
        })
        .unwrap();
    drain(&mut engine);
    chain.extend(100..200);
    engine
        .submit(Job {
            prompt_tokens: 1_000,
            output_tokens: 1,
            chain: chain.into(),
        })
        .unwrap();
    let (progress, _) = drain(&mut engine);
    // 160 + 81 − 1 computed tokens fill 15 blocks.
    assert_eq!(progress[0].cached_tokens, 15 * 16);
}

#[test]
fn blocks_are_found_as_soon_as_they_are_scheduled() {
    let mut engine = small(1_200_000);
    for _ in 0..3 {
        engine.submit(job(3_120, 5, 1)).unwrap();
    }
    let (progress, _) = drain(&mut engine);
    let cached: Vec<u32> = progress
        .iter()
        .filter(|p| p.finished)
        .map(|p| p.cached_tokens)
        .collect();
    assert_eq!(cached, [0, 3_104, 3_104]);
    assert_eq!(engine.pool().pinned(), 0);
}

#[test]
fn without_room_the_youngest_is_computed_again_and_all_end() {
    let mut engine = small(64 * 16);
    for text in 0..6 {
        engine.submit(job(200, 120, text)).unwrap();
    }
    let (progress, _) = drain(&mut engine);
    let counters = engine.counters();
    assert!(counters.preemptions > 0);
    assert_eq!(counters.finished, 6);
    assert_eq!(progress.iter().filter(|p| p.finished).count(), 6);
    assert_eq!(counters.generated_tokens, 6 * 120);
    assert!(counters.computed_tokens >= 6 * 319);
    assert_eq!((engine.pool().pinned(), engine.backlog_tokens()), (0, 0));
}

#[test]
fn what_cannot_run_is_refused() {
    let mut engine = small(64 * 16);
    assert_eq!(engine.submit(job(0, 1, 1)), Err(Refused::Empty));
    assert_eq!(engine.submit(job(1, 0, 1)), Err(Refused::Empty));
    assert_eq!(engine.submit(job(1_024, 2, 1)), Err(Refused::TooLong));
    assert!(engine.submit(job(1_024, 1, 1)).is_ok());
    assert_eq!(drain(&mut engine).0.len(), 1);
}

#[test]
fn a_cancelled_job_frees_its_place_at_once() {
    let mut engine = small(1_200_000);
    let jobs: Vec<JobId> = (0..3)
        .map(|text| engine.submit(job(3_000, 50, text)).unwrap())
        .collect();
    engine.begin().unwrap();
    assert_eq!((engine.running(), engine.waiting()), (3, 0));
    engine.cancel(jobs[0]);
    engine.cancel(jobs[0]);
    // The slot is taken by another while the step still runs.
    let late = engine.submit(job(500, 1, 9)).unwrap();
    let mut progress = Vec::new();
    engine.finish(&mut progress);
    assert!(progress.iter().all(|p| p.job != jobs[0] && p.job != late));
    engine.cancel(jobs[1]);
    engine.cancel(jobs[2]);
    let (rest, _) = drain(&mut engine);
    assert_eq!(rest.iter().filter(|p| p.finished).count(), 1);
    assert_eq!(engine.counters().cancelled, 3);
    assert_eq!((engine.pool().pinned(), engine.backlog_tokens()), (0, 0));
}

/// Poisson arrivals of `prompts`, one engine; the mean time from arrival to the last token.
fn mean_stay_s(config: EngineConfig, rate: f64, prompts: u64, seed: u64) -> (f64, f64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut engine = Engine::new(config, Report::FirstAndLast);
    let tokens = engine.config().step_tokens_max;
    let mut arrivals = Vec::new();
    let mut at = 0.0;
    for _ in 0..prompts {
        at += -(1.0 - rng.random::<f64>()).ln() / rate;
        arrivals.push((at * 1e9) as u64);
    }
    let (mut now, mut next, mut stay_ns) = (0_u64, 0_usize, 0_u64);
    let mut arrived = std::collections::HashMap::new();
    let mut progress = Vec::new();
    while next < arrivals.len() || engine.running() + engine.waiting() > 0 {
        while next < arrivals.len() && arrivals[next] <= now {
            // Nothing is shared, so no block needs a name.
            let job = Job {
                prompt_tokens: tokens,
                output_tokens: 1,
                chain: Arc::from([]),
            };
            let id = engine.submit(job).unwrap();
            arrived.insert(id, arrivals[next]);
            next += 1;
        }
        let Some(ns) = engine.begin() else {
            now = arrivals[next];
            continue;
        };
        now += ns;
        progress.clear();
        engine.finish(&mut progress);
        for p in &progress {
            stay_ns += now - arrived.remove(&p.job).unwrap();
        }
    }
    let busy = engine.counters().busy_ns as f64 / now as f64;
    (stay_ns as f64 / prompts as f64 / 1e9, busy)
}

#[test]
fn one_engine_with_equal_prompts_is_an_m_d_1_queue() {
    // One prompt of 1,600 tokens fills a step: 14 ms + 1600 / 14000 s, without attention.
    let service = 0.014 + 1_600.0 / 14_000.0;
    for load in [0.3, 0.5, 0.7, 0.8, 0.9] {
        let config = EngineConfig {
            step_tokens_max: 1_600,
            attention_tokens: 1e12,
            ..EngineConfig::default()
        };
        let (stay, busy) = mean_stay_s(config, load / service, 60_000, 7);
        let theory = service * (1.0 + load / (2.0 * (1.0 - load)));
        let error = stay / theory - 1.0;
        assert!(
            error.abs() < 0.04,
            "load {load}: {stay:.4} s, theory {theory:.4} s"
        );
        assert!(
            (busy / load - 1.0).abs() < 0.02,
            "load {load}: busy {busy:.3}"
        );
    }
}

#[test]
fn what_is_computed_is_prompt_minus_hit_plus_answer_minus_one() {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let mut engine = small(1_200_000);
    let mut cached = std::collections::BTreeMap::new();
    let (mut prompts, mut answers) = (0, 0);
    let mut progress = Vec::new();
    for _ in 0..2_000 {
        let (prompt, answer) = (rng.random_range(1..6_000), rng.random_range(1..60));
        engine
            .submit(job(prompt, answer, rng.random_range(0..90)))
            .unwrap();
        prompts += u64::from(prompt);
        answers += u64::from(answer);
        for _ in 0..rng.random_range(0..12) {
            engine.begin();
            engine.finish(&mut progress);
        }
    }
    progress.extend(drain(&mut engine).0);
    for p in progress.iter().filter(|p| p.finished) {
        *cached.entry(p.job).or_insert(0) += u64::from(p.cached_tokens);
    }
    let counters = engine.counters();
    assert_eq!((counters.preemptions, counters.finished), (0, 2_000));
    assert_eq!(cached.values().sum::<u64>(), counters.hit_tokens);
    assert!(counters.hit_tokens > prompts / 4);
    assert_eq!(counters.prompt_tokens, prompts);
    assert_eq!(
        counters.computed_tokens,
        prompts - counters.hit_tokens + answers - 2_000
    );
    assert_eq!((engine.pool().pinned(), engine.backlog_tokens()), (0, 0));
}

#[test]
fn prompts_that_share_nothing_hit_nothing() {
    let mut engine = small(100_000);
    for text in 0..500 {
        engine.submit(job(3_000, 10, text)).unwrap();
    }
    drain(&mut engine);
    assert_eq!(engine.counters().hit_tokens, 0);
    assert!(engine.pool().cached() <= engine.pool().len());
}
