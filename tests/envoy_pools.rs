//! Proves in a real Envoy that each request meets only hosts of its pool, whatever names the pool;
//! that no client chooses it; that pools keep apart what they should and share the counts of hosts;
//! and that a pool can be observed, routed in part, and switched on while requests run.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use prefix_router::names::{
    ABSTAIN, CACHED_TOKENS, COMPONENT_HEADER, DECISIONS, IN_FLIGHT, PREDICTED_CACHED_TOKENS,
    PROMPT_TOKENS,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tools::harness::Plan;
use tools::testkit::{
    Behaviour, Client, Connection, DEFAULT_POOL, Gateway, GatewayPlan, MockEngine, OTHER_POOL,
    Protocol, Request, Traffic, TrafficPlan, ask, chat, eventually, for_model, words,
};

const SOON: Duration = Duration::from_secs(20);
const BOTH: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];
/// Two models, one with three adapters; the last one is the other pool's.
const MODELS: [&str; 5] = [
    "llama-70b",
    "llama-70b-lora-a",
    "llama-70b-lora-b",
    "llama-70b-lora-c",
    "qwen-32b",
];

fn prompt(n: u64) -> Vec<u8> {
    chat(&words(n, 1200), "hello")
}

fn names(engines: &[MockEngine]) -> BTreeSet<&str> {
    engines.iter().map(MockEngine::name).collect()
}

/// Sends `count` requests, as many at a time as there are lanes; `request` makes each, and its host
/// comes back with its number.
async fn send_all(
    client: &Arc<Client>,
    count: usize,
    request: impl Fn(usize) -> Request,
) -> Vec<(usize, String)> {
    const LANES: usize = 16;
    let mut hosts = Vec::with_capacity(count);
    let mut running = JoinSet::new();
    for n in 0..count {
        if running.len() == LANES {
            hosts.push(running.join_next().await.unwrap().unwrap());
        }
        let (client, request) = (Arc::clone(client), request(n));
        running.spawn(async move { (n, client.host(request).await.unwrap()) });
    }
    while let Some(host) = running.join_next().await {
        hosts.push(host.unwrap());
    }
    hosts
}

#[tokio::test]
async fn two_models_and_three_adapters_meet_no_wrong_host_in_ten_thousand_requests() {
    const COUNT: usize = 10_000;
    const PROMPTS: usize = 40;
    let engines = MockEngine::start_many(6).await.unwrap();
    let (llama, qwen) = engines.split_at(3);
    let gateway = Gateway::of_two(llama, qwen).start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    client.open(16).await.unwrap();
    let prompts: Vec<Vec<u8>> = (0..PROMPTS as u64).map(|n| ask(&words(n, 300))).collect();
    let bodies: Vec<Vec<u8>> = prompts
        .iter()
        .flat_map(|prompt| MODELS.map(|model| for_model(prompt, model)))
        .collect();
    let hosts = send_all(&client, COUNT, |n| {
        Request::chat(bodies[n % bodies.len()].clone())
    });
    let mut seen: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
    let (llama_names, qwen_names) = (names(llama), names(qwen));
    for (n, host) in hosts.await {
        let right = if MODELS[n % MODELS.len()] == "qwen-32b" {
            &qwen_names
        } else {
            &llama_names
        };
        assert!(right.contains(host.as_str()), "request {n} went to {host}");
        seen.entry(n % bodies.len()).or_default().insert(host);
    }
    // The adapter is in the key: the same prompt for another adapter has another home.
    let homes = |place: usize| &seen[&place];
    let moved = (0..PROMPTS).filter(|n| homes(n * 5) != homes(n * 5 + 1));
    assert!(moved.count() > PROMPTS / 4, "adapters share their homes");
    for (pool, part) in [(DEFAULT_POOL, 4), (OTHER_POOL, 1)] {
        let counted = gateway.metric(DECISIONS, &[("pool", pool)]).await.unwrap();
        assert_eq!(counted, (COUNT * part / 5) as f64, "{pool}");
    }
    let leaked = engines.iter().flat_map(MockEngine::take_recorded);
    let leaked = leaked
        .flat_map(|request| request.headers)
        .find(|(name, _)| name.starts_with("x-prefix-rout"));
    assert_eq!(leaked, None);
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn headers_count_before_paths_and_these_before_models_with_and_without_a_body() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let (llama, qwen) = engines.split_at(2);
    let gateway = Gateway::of_two(llama, qwen)
        .other_pool(json!({
            "paths": ["/qwen/"], "headers": [{"name": "X-Team", "values": ["red*"]}]
        }))
        .start()
        .await
        .unwrap();
    let chat = |model| for_model(&prompt(1), model);
    let component = |request: Request, name| request.header(COMPONENT_HEADER, name);
    let (path, cut) = ("/qwen/v1/chat/completions", &chat("qwen-32b")[..900]);
    // request | whether the other pool serves it
    let rows = [
        (Request::chat(chat("llama-70b")), false),
        (Request::chat(chat("llama-70b-lora-x")), false),
        (Request::chat(chat("qwen-x")), true),
        (
            component(Request::chat(chat("llama-70b")), "qwen-component"),
            true,
        ),
        (
            component(Request::chat(chat("qwen-x")), "llama-component"),
            false,
        ),
        (component(Request::chat(chat("qwen-x")), "unknown"), true),
        (
            Request::chat(chat("llama-70b")).header("x-team", "red-1"),
            true,
        ),
        (
            component(Request::post(path, chat("x")), "llama-component"),
            false,
        ),
        (Request::post(path, chat("llama-70b")), true),
        (Request::post(path, "not json"), true),
        (Request::post(path, cut.to_vec()), true),
        (Request::get("/qwen/v1/models"), true),
        (
            component(Request::get("/v1/models"), "qwen-component"),
            true,
        ),
        (Request::get("/v1/models"), false),
        (Request::chat("not json"), false),
        (
            Request::post("/v1/embeddings", r#"{"input": "x", "model": "qwen-e"}"#),
            true,
        ),
    ];
    for (n, (request, is_other)) in rows.into_iter().enumerate() {
        for protocol in BOTH {
            let client = gateway.client(protocol);
            let host = client.host(request.clone()).await.unwrap();
            let right = names(if is_other { qwen } else { llama });
            assert!(right.contains(host.as_str()), "row {n} over {protocol:?}");
        }
    }
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn a_request_whose_body_is_late_counts_in_the_pool_that_its_head_leads_to() {
    let engines = MockEngine::start_many(2).await.unwrap();
    let (llama, qwen) = engines.split_at(1);
    let gateway = Gateway::of_two(llama, qwen).start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let by_head = Request::chat(prompt(1)).header(COMPONENT_HEADER, "qwen-component");
    let by_body = Request::chat(for_model(&prompt(1), "qwen-x"));
    // request | where it goes and is counted: what its body says comes too late
    for (request, host, pool) in [
        (by_head, &qwen[0], OTHER_POOL),
        (by_body, &llama[0], DEFAULT_POOL),
    ] {
        let late = request.cut_every(usize::MAX, Duration::from_secs(1), &[]);
        assert_eq!(client.host(late).await.unwrap(), host.name());
        let labels = [("pool", pool), ("reason", "watchdog")];
        assert_eq!(
            gateway.metric(ABSTAIN, &labels).await.unwrap(),
            1.0,
            "{pool}"
        );
    }
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn an_unknown_model_goes_where_the_own_route_leads_untouched_and_is_counted() {
    let engines = MockEngine::start_many(4).await.unwrap();
    let (llama, qwen) = engines.split_at(2);
    let config = json!({"debug_headers": "always"});
    let gateway = Gateway::of_two(llama, qwen).config(config.clone()).start();
    // One without a default: both pools are led to by the header.
    let none = json!({"default": false});
    let headless = Gateway::of_two(llama, qwen).pool(none).config(config);
    let headless = headless.edit(|plan| {
        plan.edit_http(|http| {
            let routes = http["route_config"]["virtual_hosts"][0]["routes"].as_array_mut();
            let routes = routes.unwrap();
            let mut route = routes[0].clone();
            route["match"]["headers"][0]["string_match"]["exact"] = json!(DEFAULT_POOL);
            route["route"]["cluster"] = json!(DEFAULT_POOL);
            routes.insert(0, route);
            Ok(())
        })
    });
    let (gateway, headless) = (gateway.await.unwrap(), headless.start().await.unwrap());
    for (gateway, pool) in [(&gateway, DEFAULT_POOL), (&headless, "none")] {
        let client = gateway.client(Protocol::Http1);
        for n in 0..20 {
            let request = Request::chat(for_model(&prompt(n), "gpt-oss"));
            let answer = client.ok(request).await.unwrap();
            assert!(names(llama).contains(answer.engine().unwrap().as_str()));
            let decision = answer.header("x-prefix-router-decision").unwrap();
            assert_eq!(decision, "abstain (no_pool)");
            assert_eq!(answer.header("x-prefix-router-pool"), None);
        }
        let labels = [("pool", pool), ("reason", "no_pool")];
        assert_eq!(gateway.metric(ABSTAIN, &labels).await.unwrap(), 20.0);
        for (model, pool) in [("llama-70b", DEFAULT_POOL), ("qwen-32b", OTHER_POOL)] {
            let request = Request::chat(for_model(&prompt(1), model));
            let answer = client.ok(request).await.unwrap();
            let told = answer.header("x-prefix-router-pool");
            assert_eq!(told.as_deref(), Some(pool));
        }
        // It is counted in flight where it runs, though no pool chose that host.
        let mut held = Connection::open(gateway.address(), Protocol::Http1)
            .await
            .unwrap();
        let request = Request::chat(for_model(&prompt(1), "gpt-oss"))
            .script(Behaviour::HoldStream { events: 1 });
        let mut stream = held.start(request).await.unwrap();
        assert!(stream.next().await.unwrap().is_some());
        let engine = stream.engine().unwrap();
        gateway.wait_in_flight(&engine, 1).await.unwrap();
        engines.iter().for_each(MockEngine::release);
        stream.finish().await.unwrap();
        gateway.quiet().await.unwrap();
        // The pools are led to as ever.
        for (model, engines) in [("llama-70b", llama), ("qwen-x", qwen)] {
            let answer = client.ok(Request::chat(for_model(&prompt(1), model))).await;
            let host = answer.unwrap().engine().unwrap();
            assert!(names(engines).contains(host.as_str()), "{model} of {pool}");
        }
    }
}

/// Names another pool in every spelling, and Envoy's admin.
fn spoofed(request: Request, wanted: &str) -> Request {
    request
        .header("x-prefix-route-pool", wanted)
        .header("X-Prefix-Route-Pool", "envoy_admin")
        .header("X-PREFIX-ROUTE-POOL", wanted)
}

fn without_filter(gateway: GatewayPlan) -> GatewayPlan {
    gateway.edit(|plan| {
        plan.edit_filters(|filters| {
            for filter in filters {
                if filter["name"] == "prefix_router" {
                    filter["disabled"] = json!(true);
                }
            }
            Ok(())
        })
    })
}

#[tokio::test]
async fn no_client_chooses_the_pool_on_any_path_nor_with_the_filter_disabled() {
    let engines = MockEngine::start_many(2).await.unwrap();
    let (llama, qwen) = engines.split_at(1);
    let config = json!({"request": {"body_bytes_max": 65_536}});
    let large = for_model(&chat(&words(1, 100_000), "hello"), "llama-70b");
    let requests = [
        Request::chat(for_model(&prompt(1), "llama-70b")),
        Request::chat(for_model(&prompt(1), "unknown")),
        Request::chat(large),
        Request::chat("not json"),
        Request::get("/v1/models"),
    ];
    for file in ["envoy/pools.yaml", "envoy/pools-cluster-header.yaml"] {
        let plan = || {
            Gateway::of_two(llama, qwen)
                .file(file)
                .config(config.clone())
        };
        let gateway = plan().start().await.unwrap();
        let disabled = without_filter(plan()).start_unsettled().await.unwrap();
        for gateway in [&gateway, &disabled] {
            for (n, request) in requests.iter().enumerate() {
                for protocol in BOTH {
                    let request = spoofed(request.clone(), OTHER_POOL);
                    let host = gateway.client(protocol).host(request).await.unwrap();
                    assert_eq!(host, llama[0].name(), "request {n}, {file}");
                }
            }
        }
        // The filter's own choice is obeyed, whatever the client says.
        let other = spoofed(Request::chat(for_model(&prompt(1), "qwen-x")), DEFAULT_POOL);
        let host = gateway.client(Protocol::Http2).host(other).await.unwrap();
        assert_eq!(host, qwen[0].name(), "{file}");
        for engine in &engines {
            for request in engine.take_recorded() {
                let mut headers = request.headers.iter();
                let leaked = headers.find(|(name, _)| name.starts_with("x-prefix-rout"));
                assert_eq!(leaked, None, "{} {}, {file}", request.method, request.path);
            }
        }
    }
}

#[tokio::test]
async fn pools_that_share_hosts_have_keys_of_their_own_and_one_count() {
    const HELD: u64 = 30;
    let engines = MockEngine::start_many(3).await.unwrap();
    // The middle one is in both pools.
    let gateway = Gateway::of_two(&engines[..2], &engines[1..])
        .start()
        .await
        .unwrap();
    let client = gateway.client(Protocol::Http1);
    let both = ["llama-70b", "qwen-x"];
    let mut differ = 0;
    for n in 0..40 {
        let [one, other] = both.map(|model| Request::chat(for_model(&prompt(n), model)));
        let (one, other) = (
            client.host(one).await.unwrap(),
            client.host(other).await.unwrap(),
        );
        let shared = engines[1].name();
        differ += usize::from((one == shared) != (other == shared));
    }
    assert!(differ >= 8, "{differ} of 40 prompts have keys of their own");

    let mut streams = Vec::new();
    for n in 0..HELD {
        for model in both {
            let mut connection = Connection::open(gateway.address(), Protocol::Http1)
                .await
                .unwrap();
            let held = Request::chat(for_model(&prompt(n), model))
                .script(Behaviour::HoldStream { events: 1 });
            let mut stream = connection.start(held).await.unwrap();
            assert!(stream.next().await.unwrap().is_some());
            streams.push((connection, stream));
        }
    }
    let shared = &engines[1];
    assert!(
        shared.in_flight() >= 8,
        "{} on the shared one",
        shared.in_flight()
    );
    // Longer than the 1.5 s and three polls that it takes to be sure that Envoy has fewer than we count.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let repairs = gateway.metric("prefix_router_counter_repairs_total", &[]);
    assert_eq!(repairs.await.unwrap(), 0.0);
    for pool in [DEFAULT_POOL, OTHER_POOL] {
        let labels = [("pool", pool), ("upstream_host", shared.name())];
        let counted = gateway.metric(IN_FLIGHT, &labels).await.unwrap();
        assert_eq!(counted, shared.in_flight() as f64, "{pool}");
    }
    engines.iter().for_each(MockEngine::release);
    for (_, stream) in streams {
        stream.finish().await.unwrap();
    }
    gateway.quiet().await.unwrap();
}

#[tokio::test]
async fn observe_leaves_the_host_to_envoy_and_tells_what_it_would_have_found() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let config = json!({"debug_headers": "always", "learning": {"sample": 1}});
    let gateway = Gateway::of(&engines)
        .pool(json!({"mode": "observe"}))
        .config(config)
        .start()
        .await
        .unwrap();
    let client = gateway.client(Protocol::Http1);
    let mut used = BTreeSet::new();
    let mut answered = 0.0;
    for _ in 0..40 {
        let answer = client.ok(Request::chat(prompt(1))).await.unwrap();
        let decision = answer.header("x-prefix-router-decision").unwrap();
        let known = ["home (observed)", "match (observed)"];
        assert!(known.contains(&decision.as_str()), "{decision}");
        assert_eq!(answer.header("x-prefix-router-host"), answer.engine());
        used.insert(answer.engine().unwrap());
        answered += 1.0;
    }
    assert_eq!(
        used.len(),
        3,
        "Envoy's own choice does not stay with one host"
    );
    let sum = async |name| gateway.metric(name, &[]).await.unwrap();
    let settled = eventually(SOON, async || sum(PROMPT_TOKENS).await == answered * 100.0);
    assert!(settled.await, "{}", sum(PROMPT_TOKENS).await);
    // What Envoy's choice finds, which the engines say, and what ours would have found: all but the
    // first one's prompt.
    assert_eq!(sum(CACHED_TOKENS).await, answered * 64.0);
    let predicted = sum(PREDICTED_CACHED_TOKENS).await / sum(PROMPT_TOKENS).await;
    assert!((0.9..0.98).contains(&predicted), "{predicted}");

    // A request counts in flight where it runs.
    let mut held = Vec::new();
    for _ in 0..6 {
        let mut connection = Connection::open(gateway.address(), Protocol::Http1)
            .await
            .unwrap();
        let request = Request::chat(prompt(1)).script(Behaviour::HoldStream { events: 1 });
        let mut stream = connection.start(request).await.unwrap();
        assert!(stream.next().await.unwrap().is_some());
        held.push((connection, stream));
    }
    for engine in &engines {
        gateway
            .wait_in_flight(engine.name(), engine.in_flight())
            .await
            .unwrap();
    }
    engines.iter().for_each(MockEngine::release);
    for (_, stream) in held {
        stream.finish().await.unwrap();
    }
    gateway.quiet().await.unwrap();
}

/// Which of a thousand prompts a gateway routes.
async fn routed(gateway: &Gateway) -> BTreeSet<usize> {
    let client = gateway.client(Protocol::Http1);
    let mut routed = BTreeSet::new();
    for n in 0..1000 {
        let request = Request::chat(ask(&format!("question {n}")));
        let answer = client.ok(request).await.unwrap();
        match answer.header("x-prefix-router-decision").unwrap().as_str() {
            "abstain (share)" => {}
            decision => {
                assert!(!decision.starts_with("abstain"), "{decision}");
                routed.insert(n);
            }
        }
    }
    routed
}

#[tokio::test]
async fn a_share_of_a_quarter_routes_a_quarter_of_the_keys_the_same_on_every_gateway() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let plan = || {
        Gateway::of(&engines)
            .pool(json!({"share": 0.25}))
            .config(json!({"debug_headers": "always"}))
    };
    let (first, second) = (plan().start().await.unwrap(), plan().start().await.unwrap());
    let (by_first, by_second) = tokio::join!(routed(&first), routed(&second));
    assert_eq!(by_first, by_second);
    let count = by_first.len();
    assert!(
        (220..=280).contains(&count),
        "{count} of 1000 keys are routed"
    );
    let labels = [("reason", "share")];
    let abstained = first.metric(ABSTAIN, &labels).await.unwrap();
    assert_eq!(abstained, (1000 - count) as f64);
    // What is not routed is counted in flight all the same.
    let left = (0..1000).find(|n| !by_first.contains(n)).unwrap();
    let mut connection = Connection::open(first.address(), Protocol::Http1)
        .await
        .unwrap();
    let held =
        Request::chat(ask(&format!("question {left}"))).script(Behaviour::HoldStream { events: 1 });
    let mut stream = connection.start(held).await.unwrap();
    assert!(stream.next().await.unwrap().is_some());
    first
        .wait_in_flight(&stream.engine().unwrap(), 1)
        .await
        .unwrap();
    engines.iter().for_each(MockEngine::release);
    stream.finish().await.unwrap();
    first.quiet().await.unwrap();
}

#[tokio::test]
async fn a_pool_is_switched_from_observe_to_on_without_a_lost_request() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let plan = |mode: &str| Gateway::of(&engines).pool(json!({ "mode": mode }));
    let gateway = plan("observe")
        .edit(Plan::listeners_from_file)
        .start()
        .await
        .unwrap();
    let traffic = Traffic::start(
        gateway.address(),
        &TrafficPlan {
            per_second: 50.0,
            clients: 8,
            prefixes: 40,
            ..TrafficPlan::default()
        },
    );
    let sent = async || gateway.metric(DECISIONS, &[]).await.unwrap();
    assert!(eventually(SOON, async || sent().await >= 100.0).await);
    let config: Value = plan("on").filter_config();
    gateway.envoy().set_filter_config(&config).await.unwrap();
    let stays = async || {
        // On connections of its own: old ones go on with what was.
        let client = gateway.client(Protocol::Http1);
        let mut hosts = BTreeSet::new();
        for _ in 0..8 {
            hosts.insert(client.host(Request::chat(prompt(9))).await.unwrap());
        }
        hosts.len() == 1
    };
    assert!(
        eventually(SOON, stays).await,
        "prompts do not stay with one host"
    );
    let report = traffic.stop().await.unwrap();
    assert_eq!(report.failed, 0, "{:?}", report.failures);
    assert!(report.sent >= 100, "{}", report.sent);
    gateway.quiet().await.unwrap();
}
