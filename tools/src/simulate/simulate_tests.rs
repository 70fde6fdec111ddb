//! The simulator against its own books, and policies against what they must do.

use super::policy::Kind;
use super::world::Outcome;
use super::*;

fn args(line: &str) -> SimulateArgs {
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: SimulateArgs,
    }
    let words = std::iter::once("simulate").chain(line.split_whitespace());
    <Cli as clap::Parser>::try_parse_from(words).unwrap().args
}

/// Runs the only cell of a command line.
fn one(line: &str) -> (Setting, Outcome, Figures) {
    let args = args(line);
    let cells = cells(&args).unwrap();
    assert_eq!(cells.len(), 1, "{line}");
    let source = Source::new(
        cells[0].workload,
        cells[0].seed,
        cells[0].arrival,
        &args.traces,
        &args.sizes,
    );
    let preparer = Preparer::new(args.template, args.engine.block_tokens, PREFIX_LENGTH);
    let setting = setting(&args, &cells[0]);
    let mut workload = source.unwrap().open(&cells[0], &args.sizes).unwrap();
    let outcome = world::run(&setting, workload.as_mut(), &preparer).unwrap();
    let figures = measure::figures(&setting, &outcome);
    (setting, outcome, figures)
}

/// What a test has time for without optimisation.
const SHORT: &str = "--warmup 2 --window 8 --drain 300 --gateways 2";

#[test]
fn what_arrived_is_done_and_what_was_computed_is_prompt_minus_hit_plus_answer_minus_one() {
    for policy in <Kind as clap::ValueEnum>::value_variants() {
        let line = format!(
            "--workload W2 --load 0.8 --policy {} {SHORT}",
            policy.name()
        );
        conserves(&line);
    }
    for (workload, load) in [("W1", 0.5), ("W3", 4.0), ("W4", 0.3), ("W5", 0.3)] {
        let line = format!("--workload {workload} --load {load} --policy prefix_router {SHORT}");
        conserves(&line);
    }
}

#[track_caller]
fn conserves(line: &str) {
    let (_, outcome, figures) = one(line);
    let done = outcome
        .records
        .iter()
        .filter(|record| record.done_ns.is_some());
    assert_eq!(done.count(), outcome.records.len(), "{line}");
    let expected: u64 = outcome
        .records
        .iter()
        .map(|r| u64::from(r.prompt_tokens - r.cached_tokens + r.output_tokens - 1))
        .sum();
    let computed = (outcome.computed_tokens, outcome.preemptions);
    assert_eq!(computed, (expected, 0), "{line}");
    let left = (outcome.pinned_blocks, figures.unserved);
    assert_eq!(left, (0, 0), "{line}");
    assert!(
        figures.hit_rate > 0.0 && figures.requests > 2,
        "{line}: {figures:?}"
    );
}

#[test]
fn without_sharing_nothing_hits_under_any_policy() {
    for policy in <Kind as clap::ValueEnum>::value_variants() {
        let line = format!(
            "--workload W6 --load 0.5 --policy {} {SHORT}",
            policy.name()
        );
        let (_, _, figures) = one(&line);
        assert!(figures.requests > 50, "{line}");
        assert_eq!(figures.hit_rate, 0.0, "{line}");
    }
}

#[test]
fn the_same_cell_is_the_same_run() {
    for policy in ["prefix_router", "sgl_cache_aware", "random"] {
        let line = format!("--workload W2 --load 0.5 --policy {policy} {SHORT}");
        let (one_run, other) = (one(&line), one(&line));
        assert_eq!(one_run.1.records, other.1.records, "{line}");
        assert!(one(&format!("{line} --seed 2")).1.records != other.1.records);
    }
}

#[test]
fn prefixes_that_stay_home_are_found_there() {
    let rate = |policy: &str| {
        let line = format!("--workload W2 --load 0.6 --policy {policy} --warmup 30 --window 30");
        one(&line).2.hit_rate
    };
    let (random, ring, oracle) = (rate("random"), rate("ring_hash1024"), rate("oracle"));
    assert!(random < 0.8, "{random}");
    assert!(
        ring > random + 0.1 && oracle > random + 0.1,
        "{random} {ring} {oracle}"
    );
}

#[test]
fn conversations_run_turn_by_turn() {
    for (policy, at_once) in [("oracle", 1), ("round_robin", 16)] {
        let line =
            format!("--workload C10 --load {at_once} --policy {policy} --window 2000 --drain 60");
        let (setting, outcome, figures) = one(&line);
        assert_eq!(
            (setting.hosts, figures.requests, figures.later_turns),
            (4, 250, 200)
        );
        let turns: Vec<u32> = outcome.records.iter().map(|record| record.turn).collect();
        assert!(turns.is_sorted(), "{line}");
        let stays = figures.turns_kept as f64 / 200.0;
        assert!(
            if policy == "oracle" {
                stays > 0.9
            } else {
                stays < 0.6
            },
            "{line}: {stays}"
        );
    }
}

#[test]
fn events_change_the_fleet() {
    let line = "--workload W2 --load 0.5 --policy ring_hash1024 --warmup 10 --window 110 \
                --event 40:add,70:remove:3,90:restart:1,100:restart-gateway:0";
    let (_, outcome, figures) = one(line);
    let to = |host: u32, from: f64, until: f64| {
        outcome
            .records
            .iter()
            .filter(|record| record.host == host)
            .filter(|record| (from..until).contains(&(record.arrived_ns as f64 / 1e9)))
            .count()
    };
    assert_eq!((to(7, 0.0, 40.0), to(3, 70.0, 200.0)), (0, 0));
    assert!(to(7, 40.0, 120.0) > 10 && to(3, 0.0, 70.0) > 10 && to(1, 90.0, 120.0) > 3);
    assert!(
        outcome
            .records
            .iter()
            .any(|record| record.lost && record.host == 1)
    );
    assert_eq!(figures.events.len(), 4);
    let added = &figures.events[0];
    assert!(added.keys > 20 && added.moved < 0.4, "{added:?}");
}

#[test]
fn help_names_what_lists_take_as_they_are_to_be_written() {
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: SimulateArgs,
    }
    let mut command = <Cli as clap::CommandFactory>::command();
    let help = command.render_long_help().to_string();
    for part in [
        "--workload <NAME,…>",
        "- W1: ",
        "- W7s: ",
        "[default: W1]",
        "--policy <POLICY,…>",
        "- prefix_router_local_index: ",
        "- all: ",
        "with commas between them",
    ] {
        assert!(help.contains(part), "{part:?} is not in {help}");
    }
    assert_eq!(args("--workload w1,W7S").workload, [Name::W1, Name::W7s]);
    let all = cells(&args("--policy all")).unwrap().len();
    assert_eq!(all, <Kind as ValueEnum>::value_variants().len());
    for (flag, value, expected) in [
        ("--policy", "nonsense", "prefix_router"),
        ("--load", "0", "expected a load from 0.01"),
    ] {
        let wrong = <Cli as clap::Parser>::try_parse_from(["simulate", flag, value]);
        let text = wrong.err().unwrap().to_string();
        assert!(text.contains(flag) && text.contains(expected), "{text}");
    }
}

#[test]
fn flags_that_cannot_be_used_are_refused() {
    for (line, expected) in [
        (
            "--load 11",
            "--load: expected loads from 0.01 to 10 for W1, got 11",
        ),
        (
            "--workload W1,W7 --traces nowhere",
            "W7 plays Mooncake's trace of a chat service",
        ),
        (
            "--step-base-ms 0",
            "--step-base-ms: expected a number from 0.001 to 60000",
        ),
    ] {
        let error = format!("{:#}", run(args(line)).unwrap_err());
        assert!(error.contains(expected), "{line}: {error}");
    }
    for event in ["1e308:add", "1e300:restart-gateway:0", "-1:add", "nan:add"] {
        assert_eq!(
            super::event(event),
            Err("expected SECONDS from 0 to 1814400".to_owned()),
            "{event}"
        );
    }
    assert!(event("60:explode").is_err() && event("x:add").is_err() && event("6:add:1").is_err());
    assert_eq!(event("60:remove:3"), Ok((60.0, Happening::Remove(3))));
}
