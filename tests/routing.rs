//! Proves what the routing of whole conversations comes to, from body bytes to booked hosts, over
//! an in-memory store: turns that stay, shares of hosts, agreement of gateways, memory that stays.

use prefix_router::fleet::{self, Fleet};
use prefix_router::hosts::HostReport;
use prefix_router::learned::Report;
use prefix_router::load::Ledger;
use prefix_router::payload::{End, Head, ReadOptions, Reader};
use prefix_router::pool::{Placed, Router, Rule, View};
use prefix_router::prefix::Prompt;
use prefix_router::request::Request;
use prefix_router::route::Bounds;
use prefix_router::store::MemoryStore;

const POOL: &str = "llm";

/// One gateway with one worker.
struct Gateway {
    store: MemoryStore,
    ledger: Ledger,
    router: Router,
    view: View,
}

impl Gateway {
    fn new(hosts: u16, one_gateway: bool) -> Self {
        let (store, ledger) = (MemoryStore::new(), Ledger::default());
        let address = |n| HostReport::usable(&format!("10.0.0.{n}:8000"));
        let reports: Vec<HostReport> = (1..=hosts).map(address).collect();
        Fleet::default().apply(&store, &ledger, POOL, &reports);
        let view = fleet::view(&store, POOL).unwrap();
        let rule = Rule::Adaptive {
            heat: Default::default(),
            constants: Default::default(),
            one_gateway,
        };
        let bounds = Bounds {
            limit: None,
            panic_rule: true,
        };
        Self {
            store,
            ledger,
            router: Router::new(POOL, rule, bounds),
            view,
        }
    }

    /// Places a prompt and leaves it running.
    fn start(&self, prompt: &Prompt) -> (Request, Placed) {
        let mut request = Request::default();
        let plan = self
            .router
            .plan(prompt, self.view.candidates().len(), &self.store)
            .unwrap();
        let placed = self
            .router
            .place(&plan, &self.view, &mut request, &self.store, &self.ledger)
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
