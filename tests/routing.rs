//! Proves what the routing of whole conversations comes to, from body bytes to booked hosts, over
//! an in-memory store: turns that stay, shares of hosts, agreement of gateways, memory that stays.

use prefix_router::fleet::{self, Fleet};
use prefix_router::hosts::HostReport;
use prefix_router::learned::Report;
use prefix_router::load::{self, Ledger};
use prefix_router::payload::{End, Head, ReadOptions, Reader};
use prefix_router::placement::order;
use prefix_router::pool::{self, Placed, Router, Rule, Rules, View};
use prefix_router::prefix::Prompt;
use prefix_router::request::Request;
use prefix_router::route::{Bounds, Decision};
use prefix_router::store::{MemoryStore, Store as _};

const POOL: &str = "llm";
/// What time it is, all through a test.
const NOW_MS: u64 = 2000;

/// One gateway with one worker.
struct Gateway {
    store: MemoryStore,
    ledger: Ledger,
    rules: Rules,
    router: Router,
    view: View,
}

impl Gateway {
    fn new(hosts: u16, one_gateway: bool) -> Self {
        let bounds = Bounds {
            limit: None,
            panic_rule: true,
        };
        Self::bounded(hosts, one_gateway, bounds, false)
    }

    fn bounded(hosts: u16, one_gateway: bool, bounds: Bounds, rejects: bool) -> Self {
        let (store, ledger) = (MemoryStore::new(), Ledger::default());
        let address = |n| HostReport::usable(&format!("10.0.0.{n}:8000"));
        let reports: Vec<HostReport> = (1..=hosts).map(address).collect();
        Fleet::default().apply(&store, &ledger, POOL, &reports, 1000);
        let view = fleet::view(&store, POOL).unwrap();
        let rule = Rule::Adaptive {
            heat: Default::default(),
            constants: Default::default(),
            one_gateway,
        };
        let rules = Rules {
            rule,
            bounds,
            rejects,
            slow_start_ms: 30_000,
            share: 1.0,
            observes: false,
        };
        Self {
            store,
            ledger,
            rules,
            router: Router::new(POOL, rules),
            view,
        }
    }

    /// Places a prompt and leaves it running.
    fn start(&self, prompt: &Prompt) -> (Request, Placed) {
        self.start_at(prompt, NOW_MS)
    }

    fn start_at(&self, prompt: &Prompt, now_ms: u64) -> (Request, Placed) {
        let mut request = Request::default();
        let plan = self
            .router
            .plan(prompt, self.view.candidates().len(), &self.store)
            .unwrap();
        let placed = self
            .router
            .place(
                &plan,
                &self.view,
                &mut request,
                now_ms,
                &self.store,
                &self.ledger,
            )
            .unwrap();
        (request, placed)
    }

    fn answer(&self, request: &mut Request) {
        let changes = request.answered();
        self.ledger.transact(&self.store, |_| ((), changes));
    }

    fn end(&self, request: &mut Request) {
        let changes = request.end();
        self.ledger.transact(&self.store, |_| ((), changes));
    }

    fn address(&self, placed: &Placed) -> String {
        self.view
            .address_of(placed.placement.hosts[0].seat)
            .unwrap()
            .to_owned()
    }

    /// Places a prompt and ends it; the host that it went to.
    fn host(&self, prompt: &Prompt) -> String {
        let (mut request, placed) = self.start(prompt);
        self.end(&mut request);
        self.address(&placed)
    }
}

fn prompt(messages: &[(&str, String)]) -> Prompt {
    let messages: Vec<_> = messages
        .iter()
        .map(|(role, content)| serde_json::json!({"role": role, "content": content}))
        .collect();
    let body = serde_json::json!({"messages": messages, "model": "m", "stream": true});
    let head = Head {
        path: b"/v1/chat/completions",
        ..Head::default()
    };
    let mut reader = Reader::new(&head, &ReadOptions::default());
    reader.feed(body.to_string().as_bytes());
    reader.finish(End::Whole)
}

/// Text of this many bytes that differs early from that of any other name.
fn text(name: &str, bytes: usize) -> String {
    let words = format!("{name} says what {name} has to say about it; ");
    words.chars().cycle().take(bytes).collect()
}

/// Turn `turn` of a conversation: its system prompt, then questions and answers.
fn turn(system: &str, conversation: &str, turn: usize) -> Prompt {
    let mut messages = vec![("system", text(system, 12_000))];
    for n in 0..turn {
        messages.push(("user", text(&format!("{conversation} question {n}"), 500)));
        messages.push((
            "assistant",
            text(&format!("{conversation} answer {n}"), 1000),
        ));
    }
    messages.push((
        "user",
        text(&format!("{conversation} question {turn}"), 500),
    ));
    prompt(&messages)
}

/// 50 conversations of 5 turns over 4 hosts, turns interleaved, `at_once` requests running at any
/// time. Later turns that stayed on their host, and the largest share over the mean.
fn conversations(gateway: &Gateway, systems: usize, at_once: usize, seed: &str) -> (usize, f64) {
    let mut last = vec![String::new(); 50];
    let mut shares = std::collections::BTreeMap::<String, f64>::new();
    let mut stayed = 0;
    let mut running = std::collections::VecDeque::new();
    for n in 0..5 {
        for (conversation, last) in last.iter_mut().enumerate() {
            let system = format!("{seed} system {}", conversation % systems);
            let (request, placed) =
                gateway.start(&turn(&system, &format!("{seed} {conversation}"), n));
            running.push_back(request);
            // The first token comes a quarter of the way to the last one.
            if let Some(request) = running.iter_mut().nth_back(at_once / 4) {
                gateway.answer(request);
            }
            if running.len() >= at_once {
                gateway.end(&mut running.pop_front().unwrap());
            }
            let host = gateway.address(&placed);
            stayed += usize::from(n > 0 && *last == host);
            *shares.entry(host.clone()).or_default() += 1.0;
            *last = host;
        }
    }
    running.iter_mut().for_each(|request| gateway.end(request));
    let most = shares.values().copied().fold(0.0, f64::max);
    (stayed, most / (250.0 / 4.0))
}

#[track_caller]
#[expect(
    clippy::print_stdout,
    reason = "the test runner keeps it for a failure"
)]
fn check_conversations(systems: usize, at_once: usize) {
    const SEEDS: usize = 8;
    let mut uneven = 0.0;
    for seed in 0..SEEDS {
        let gateway = Gateway::new(4, true);
        let (stayed, share) = conversations(&gateway, systems, at_once, &format!("s{seed}"));
        assert!(
            stayed >= 196,
            "{systems} systems, {at_once} at once, seed {seed}: {stayed}"
        );
        uneven += share / SEEDS as f64;
    }
    println!("{systems} systems, {at_once} at once: max/mean {uneven:.2}");
    assert!(
        uneven <= 1.3,
        "{systems} systems, {at_once} at once: max/mean {uneven:.2}"
    );
}

#[test]
fn conversations_behind_one_system_prompt_stay_and_spread() {
    check_conversations(1, 1);
    check_conversations(1, 16);
}

#[test]
fn conversations_behind_ten_system_prompts_stay_and_spread() {
    check_conversations(10, 1);
    check_conversations(10, 16);
}

#[test]
fn two_gateways_that_share_nothing_agree_on_new_prompts() {
    let (one, other) = (Gateway::new(7, false), Gateway::new(7, false));
    for n in 0..1000 {
        let prompt = turn(&format!("app {n}"), "x", 0);
        assert_eq!(one.host(&prompt), other.host(&prompt), "prompt {n}");
    }
}

#[test]
fn a_burst_of_one_new_prompt_does_not_herd_and_stays_on_few_hosts() {
    let gateway = Gateway::new(7, false);
    let prompt = turn("viral", "x", 0);
    let mut hosts = std::collections::BTreeMap::<String, u32>::new();
    let running: Vec<Request> = (0..200)
        .map(|_| {
            let (request, placed) = gateway.start(&prompt);
            *hosts.entry(gateway.address(&placed)).or_default() += 1;
            request
        })
        .collect();
    assert_eq!(running.len(), 200);
    // 200 equal requests of 3,000 tokens that all run at once: one host would have 10,000 tokens'
    // worth of requests in flight, which outweighs computing the prompt once more elsewhere.
    let most = *hosts.values().max().unwrap();
    assert!(hosts.len() >= 2 && most <= 130, "{hosts:?}");
}

#[test]
fn an_engine_that_lost_its_cache_is_no_longer_believed_to_hold_a_prompt() {
    let gateway = Gateway::new(4, false);
    let prompt = turn("app", "x", 3);
    let (mut request, first) = gateway.start(&prompt);
    gateway.end(&mut request);
    let (mut request, again) = gateway.start(&prompt);
    gateway.end(&mut request);
    let tokens = prompt.tokens();
    assert!(again.expected.as_ref().unwrap().cached_tokens() > 0.9 * tokens as f64);
    let report = Report {
        prompt_tokens: Some(tokens),
        cached_tokens: Some(0),
    };
    gateway.router.learn(&again, report, &gateway.store);
    let (_, after) = gateway.start(&prompt);
    assert_eq!(
        gateway.address(&after),
        gateway.address(&first),
        "its home is what it was"
    );
    assert!(after.expected.unwrap().cached_tokens() <= 1.0 + 128.0);
}

#[test]
fn the_next_turn_is_expected_to_find_the_answer_too_and_another_chat_the_system_prompt_only() {
    let gateway = Gateway::new(4, false);
    let cached_bytes = |prompt: &Prompt| {
        let (mut request, placed) = gateway.start(prompt);
        gateway.end(&mut request);
        // Before anything was learned, a token is four bytes.
        placed.expected.unwrap().cached_tokens() * 4.0
    };
    // The system prompt has 12,000 bytes, a question 500, an answer 1,000.
    assert_eq!(cached_bytes(&turn("app", "x", 0)), 0.0);
    assert_eq!(cached_bytes(&turn("app", "x", 1)), 13_500.0);
    assert_eq!(cached_bytes(&turn("app", "x", 2)), 15_000.0);
    assert_eq!(cached_bytes(&turn("app", "y", 0)), 12_000.0);
    // The same turn once more has nothing new: all of it but its last token may be found.
    assert!(cached_bytes(&turn("app", "x", 2)) > 15_000.0);
}

#[test]
fn with_reject_exactly_the_excess_is_refused() {
    let bounds = Bounds {
        limit: Some(10),
        panic_rule: false,
    };
    let gateway = Gateway::bounded(7, false, bounds, true);
    let prompt = turn("app", "x", 0);
    let mut running: Vec<(Request, Placed)> = (0..200).map(|_| gateway.start(&prompt)).collect();
    let is_refused = |placed: &Placed| placed.placement.decision == Decision::Reject;
    let refused = running
        .iter()
        .filter(|(_, placed)| is_refused(placed))
        .count();
    assert_eq!(refused, 200 - 7 * 10);
    for host in &gateway.view.hosts {
        let in_flight = load::read(&gateway.store).unwrap().of(host.seat).in_flight;
        assert_eq!(in_flight, 10, "{}", host.address);
    }
    running
        .iter_mut()
        .for_each(|(request, _)| gateway.end(request));
    assert!(
        !is_refused(&gateway.start(&prompt).1),
        "there is room again"
    );
}

#[test]
fn a_host_that_comes_later_takes_its_share_bit_by_bit_and_no_prefix_moves_twice() {
    let mut gateway = Gateway::new(7, false);
    let mut reports: Vec<HostReport> = (1..=7)
        .map(|n| HostReport::usable(&format!("10.0.0.{n}:8000")))
        .collect();
    reports.push(HostReport::usable("10.0.0.8:8000"));
    let came_ms = 100_000;
    Fleet::default().apply(&gateway.store, &gateway.ledger, POOL, &reports, came_ms);
    gateway.view = fleet::view(&gateway.store, POOL).unwrap();
    let prompts: Vec<Prompt> = (0..400)
        .map(|n| turn(&format!("app {n}"), "x", 0))
        .collect();
    let homes_at = |now_ms: u64| -> Vec<String> {
        let candidates = gateway.view.candidates_at(now_ms, 30_000);
        let home = |prompt: &Prompt| {
            let key = prompt.key(&prompt.checkpoints[0]);
            let first = order(key, &candidates, |host| (host.id, host.weight))[0];
            gateway.view.address_of(first.seat).unwrap().to_owned()
        };
        prompts.iter().map(home).collect()
    };
    let times = [
        came_ms,
        came_ms + 5_000,
        came_ms + 15_000,
        came_ms + 25_000,
        came_ms + 30_000,
    ];
    let homes: Vec<Vec<String>> = times.into_iter().map(homes_at).collect();
    let share = |homes: &Vec<String>| homes.iter().filter(|home| *home == "10.0.0.8:8000").count();
    let shares: Vec<usize> = homes.iter().map(share).collect();
    assert!(
        shares[0] <= 2,
        "a new host starts with almost nothing: {shares:?}"
    );
    assert!(
        shares.windows(2).all(|pair| pair[0] < pair[1]),
        "{shares:?}"
    );
    assert!(
        (35..=65).contains(&shares[4]),
        "an eighth of 400 is 50: {shares:?}"
    );
    for n in 0..prompts.len() {
        let moves = homes
            .windows(2)
            .filter(|pair| pair[0][n] != pair[1][n])
            .count();
        assert!(moves <= 1, "prompt {n} moved {moves} times");
    }
}

#[test]
fn hosts_that_start_together_start_at_full_weight() {
    let gateway = Gateway::new(7, false);
    let now = gateway.view.candidates_at(1500, 30_000);
    assert_eq!(*now, *gateway.view.candidates());
}

#[test]
fn a_host_that_fails_at_once_does_not_look_idle() {
    let gateway = Gateway::new(2, false);
    let mut failed = 0;
    for n in 0..200 {
        let (mut request, placed) = gateway.start(&turn(&format!("app {n}"), "x", 0));
        if gateway.address(&placed) == "10.0.0.1:8000" {
            failed += 1;
            let changes = request.failed();
            gateway.ledger.transact(&gateway.store, |_| ((), changes));
        }
        gateway.end(&mut request);
    }
    // About half of the prompts are at home there. After a few failures their other host computes
    // them; no failure fades in this test.
    assert!(
        (3..=40).contains(&failed),
        "{failed} of 200 went to the failing host"
    );
}

#[test]
fn what_is_kept_of_a_pool_that_is_gone_is_emptied_and_it_may_come_back() {
    let mut gateway = Gateway::new(4, false);
    let keys = |pool: &str| {
        let pages = (0..32).map(|page| format!("prefix_router.1.index.{pool}.{page}"));
        let mut keys: Vec<String> = pages.collect();
        keys.push(format!("prefix_router.3.sketch.{pool}"));
        keys
    };
    let bytes = |gateway: &Gateway, pool: &str| -> usize {
        let values = keys(pool)
            .into_iter()
            .filter_map(|key| gateway.store.read(&key).ok());
        values
            .filter_map(|seen| seen.value)
            .map(|value| value.len())
            .sum()
    };
    // A pool that goes on, by its own keys.
    for key in keys("other") {
        gateway.store.write(&key, b"kept", None).unwrap();
    }
    let routed = |gateway: &Gateway| -> Vec<String> {
        let turns = (0..8).map(|n| gateway.host(&turn("system", &format!("chat {n}"), 2)));
        turns.collect()
    };
    let first = routed(&gateway);
    let kept = bytes(&gateway, POOL);
    assert!(kept > 4_108, "{kept} bytes");
    pool::forget(&gateway.store, POOL);
    let left = (bytes(&gateway, POOL), bytes(&gateway, "other"));
    assert_eq!(left, (0, 33 * 4));
    // The configuration that brings it back has routers of its own.
    gateway.router = Router::new(POOL, gateway.rules);
    assert_eq!(routed(&gateway), first, "it is as new");
    // Nothing is made for a pool that had nothing.
    pool::forget(&gateway.store, "unknown");
    let never = keys("unknown").into_iter();
    assert!(
        never
            .map(|key| gateway.store.read(&key).unwrap())
            .all(|seen| seen.value.is_none())
    );
}

/// One pass over 500 prompts that others asked before, 16 running at any time, each with its first
/// token at once; the host of each.
fn pass(gateway: &Gateway, number: usize, now_ms: u64) -> Vec<String> {
    let mut running = std::collections::VecDeque::new();
    let mut hosts = Vec::new();
    for n in 0..500 {
        let system = text(&format!("app {n}"), 12_000);
        let question = text(&format!("question {number} of {n}"), 200);
        let prompt = prompt(&[("system", system), ("user", question)]);
        let (mut request, placed) = gateway.start_at(&prompt, now_ms);
        gateway.answer(&mut request);
        running.push_back(request);
        if running.len() == 16 {
            gateway.end(&mut running.pop_front().unwrap());
        }
        hosts.push(gateway.address(&placed));
    }
    running.iter_mut().for_each(|request| gateway.end(request));
    hosts
}

#[test]
fn a_host_that_joins_gets_its_share_and_one_that_leaves_moves_its_own_prompts_only() {
    let mut gateway = Gateway::new(4, false);
    let fleet = Fleet::default();
    let set_hosts = |gateway: &mut Gateway, hosts: std::ops::RangeInclusive<u16>, now_ms| {
        let report = |n| HostReport::usable(&format!("10.0.0.{n}:8000"));
        let reports: Vec<HostReport> = hosts.map(report).collect();
        fleet.apply(&gateway.store, &gateway.ledger, POOL, &reports, now_ms);
        gateway.view = fleet::view(&gateway.store, POOL).unwrap();
    };
    set_hosts(&mut gateway, 1..=4, 1000);
    pass(&gateway, 0, 2000);
    let before = pass(&gateway, 1, 3000);
    assert_eq!(pass(&gateway, 2, 4000), before, "nothing happened");

    set_hosts(&mut gateway, 1..=5, 20_000);
    let new = "10.0.0.5:8000";
    for second in 0..35 {
        pass(&gateway, 3 + second, 20_000 + 1000 * second as u64);
    }
    let joined = pass(&gateway, 40, 56_000);
    let came = |(before, after): &(&String, &String)| before != after && *after == new;
    let moved = before.iter().zip(&joined).filter(|(a, b)| a != b).count();
    assert_eq!(before.iter().zip(&joined).filter(came).count(), moved);
    // A fifth of 500 is 100.
    assert!((85..=115).contains(&moved), "{moved}");

    set_hosts(&mut gateway, 2..=5, 59_000);
    let left = pass(&gateway, 41, 60_000);
    for (n, (before, after)) in joined.iter().zip(&left).enumerate() {
        assert!(
            before == after || before == "10.0.0.1:8000",
            "prompt {n}: {before} {after}"
        );
    }
}

/// Chats with documents behind forty system prompts, after as many of others as fill the sketch; later
/// turns that stayed on their host, of how many.
fn chats_in_a_large_fleet(hosts: u16) -> (u32, u32) {
    let gateway = Gateway::new(hosts, false);
    let chat = |chat: usize, turns: usize| {
        let document = text(&format!("document of chat {chat}"), 24_000);
        let mut messages = vec![
            ("system", text(&format!("system {}", chat % 40), 12_000)),
            ("user", document),
        ];
        for turn in 0..turns {
            messages.push(("assistant", text(&format!("{chat} answer {turn}"), 2000)));
            messages.push(("user", text(&format!("{chat} question {turn}"), 1000)));
        }
        prompt(&messages)
    };
    for other in 0..1500 {
        gateway.host(&chat(100_000 + other, 0));
    }
    let (mut stayed, mut later) = (0, 0);
    let mut last = vec![String::new(); 100];
    let mut running = std::collections::VecDeque::new();
    for turn in 0..5 {
        for (number, last) in last.iter_mut().enumerate() {
            let (request, placed) = gateway.start(&chat(number, turn));
            running.push_back(request);
            if running.len() > usize::from(hosts) / 2 {
                let mut request = running.pop_front().unwrap();
                gateway.answer(&mut request);
                gateway.end(&mut request);
            }
            let host = gateway.address(&placed);
            if turn > 0 {
                later += 1;
                stayed += u32::from(*last == host);
            }
            *last = host;
        }
    }
    (stayed, later)
}

#[test]
fn chats_keep_their_hosts_in_fleets_of_any_size() {
    for hosts in [7, 100, 128, 200, 500] {
        let (stayed, later) = chats_in_a_large_fleet(hosts);
        assert_eq!(later, 400);
        // One in a hundred may leave a busy host.
        assert!(stayed >= 396, "{stayed} of {later} on {hosts} hosts");
    }
}
