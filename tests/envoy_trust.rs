//! Proves in a real Envoy that no client chooses the host, that engines never see routing headers,
//! and that operators see why a request went where it went.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::time::Duration;

use prefix_router::names::METRICS;
use serde_json::json;
use tools::testkit::{
    Gateway, GatewayPlan, MockEngine, Protocol, Request, chat, eventually, words,
};

const BOTH: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];

fn prompt(n: u64) -> Vec<u8> {
    chat(&words(n, 2000), "hello")
}

/// A request that wants to choose its host and its pool, in every spelling.
fn spoofed(request: Request, wanted: &str) -> Request {
    request
        .header("x-prefix-route-host", wanted)
        .header("X-Prefix-Route-Host", format!("{wanted},{wanted}"))
        .header("x-prefix-route-pool", "envoy_admin")
}

#[tokio::test]
async fn a_client_that_names_a_host_is_not_obeyed_and_engines_never_see_the_name() {
    let engines = MockEngine::start_many(5).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let bodies = (0..20).map(prompt).chain((0..20).map(|n| {
        let mut broken = prompt(100 + n);
        broken.truncate(1800);
        broken
    }));
    for (n, body) in bodies.enumerate() {
        let client = gateway.client(BOTH[n % 2]);
        let home = client.host(Request::chat(body.clone())).await.unwrap();
        let other = engines.iter().find(|engine| engine.name() != home).unwrap();
        let spoof = spoofed(Request::chat(body), other.name());
        assert_eq!(client.host(spoof).await.unwrap(), home, "body {n}");
    }
    let mut used = BTreeSet::new();
    for n in 0..60 {
        let client = gateway.client(BOTH[n % 2]);
        let spoof = spoofed(Request::get("/v1/models"), engines[0].name());
        used.insert(client.host(spoof).await.unwrap());
    }
    assert!(used.len() > 1, "every GET went to {used:?}");
    let seen: Vec<_> = engines.iter().flat_map(MockEngine::take_recorded).collect();
    assert_eq!(seen.len(), 140);
    for request in seen {
        let leaked = request
            .headers
            .iter()
            .find(|(name, _)| name.starts_with("x-prefix-rout"));
        assert_eq!(leaked, None, "on {} {}", request.method, request.path);
    }
}

#[tokio::test]
async fn debug_headers_are_off_unless_configured() {
    let engines = MockEngine::start_many(2).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let asked = Request::chat(prompt(1)).header("x-prefix-router-debug", "1");
    for request in [Request::chat(prompt(1)), asked, Request::get("/v1/models")] {
        let answer = client.ok(request).await.unwrap();
        let ours = answer
            .headers
            .keys()
            .find(|name| name.as_str().starts_with("x-prefix-"));
        assert_eq!(ours, None);
    }
}

#[tokio::test]
async fn debug_headers_say_where_a_request_went_and_why() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let config = json!({"debug_headers": "always"});
    let trusting = trusting("127.0.0.0", 8, Gateway::of(&engines).config(config.clone()));
    let trusting = trusting.start().await.unwrap();
    let wary = Gateway::of(&engines).config(config).start().await.unwrap();
    for protocol in BOTH {
        let (inside, outside) = (trusting.client(protocol), wary.client(protocol));
        let answer = inside.ok(Request::chat(prompt(1))).await.unwrap();
        assert_eq!(answer.header("x-prefix-router-host"), answer.engine());
        let decision = answer.header("x-prefix-router-decision").unwrap();
        assert!(["home", "match"].contains(&decision.as_str()), "{decision}");
        assert!(answer.header("x-prefix-router-checkpoint").is_some());
        let key = answer.header("x-prefix-router-key").unwrap();
        let other = inside.ok(Request::chat(prompt(2))).await.unwrap();
        assert_ne!(other.header("x-prefix-router-key").unwrap(), key);
        // Strangers could tell by the key which prompts are alike.
        let answer = outside.ok(Request::chat(prompt(1))).await.unwrap();
        assert_eq!(answer.header("x-prefix-router-host"), answer.engine());
        assert_eq!(answer.header("x-prefix-router-key"), None);
    }
    // A request that failed explains itself too, and so does one without a prompt.
    let client = wary.client(Protocol::Http1);
    let error = tools::testkit::Behaviour::Answer {
        status: 500,
        after_ms: 0,
    };
    let failed = client
        .send(Request::chat(prompt(1)).script(error))
        .await
        .unwrap();
    assert_eq!(failed.status, 500);
    assert_eq!(failed.header("x-prefix-router-host"), failed.engine());
    let plain = client.ok(Request::get("/v1/models")).await.unwrap();
    assert!(
        plain
            .header("x-prefix-router-decision")
            .unwrap()
            .contains("not_a_prompt")
    );
}

#[tokio::test]
async fn debug_headers_on_request_need_the_request() {
    let engines = MockEngine::start_many(3).await.unwrap();
    let config = json!({"debug_headers": "on_request"});
    let gateway = trusting("127.0.0.0", 8, Gateway::of(&engines).config(config));
    let gateway = gateway.start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    let plain = client.ok(Request::chat(prompt(1))).await.unwrap();
    assert_eq!(plain.header("x-prefix-router-decision"), None);
    let asked = Request::chat(prompt(1)).header("x-prefix-router-debug", "1");
    let answer = client.ok(asked.clone()).await.unwrap();
    assert_eq!(answer.header("x-prefix-router-host"), answer.engine());
    assert!(answer.header("x-prefix-router-key").is_some());

    // The same from outside: where keys of strangers could be compared, they are not shown.
    let config = json!({"debug_headers": "on_request"});
    let gateway = trusting("192.0.2.1", 32, Gateway::of(&engines).config(config));
    let gateway = gateway.start().await.unwrap();
    let answer = gateway.client(Protocol::Http1).ok(asked).await.unwrap();
    let ours = answer
        .headers
        .keys()
        .find(|name| name.as_str().starts_with("x-prefix-"));
    assert_eq!(ours, None);
}

/// Takes requests from these addresses as internal.
fn trusting(prefix: &'static str, len: u32, gateway: GatewayPlan) -> GatewayPlan {
    let range = json!({"address_prefix": prefix, "prefix_len": len});
    gateway.edit(move |plan| {
        plan.edit_http(|http| {
            http["internal_address_config"] = json!({"cidr_ranges": [range]});
            Ok(())
        })
    })
}

/// A metric's name without what Prometheus appends for the parts of a histogram.
fn plain(name: &str) -> &str {
    let part = ["_bucket", "_sum", "_count"]
        .iter()
        .find_map(|part| name.strip_suffix(part));
    part.unwrap_or(name)
}

#[tokio::test]
async fn metrics_are_those_documented_with_labels_from_the_config_alone() {
    let engines = MockEngine::start_many(2).await.unwrap();
    let gateway = Gateway::of(&engines).start().await.unwrap();
    let client = gateway.client(Protocol::Http1);
    client.ok(Request::chat(prompt(1))).await.unwrap();
    client.ok(Request::chat("not json")).await.unwrap();
    client.ok(Request::get("/v1/models")).await.unwrap();
    gateway.quiet().await.unwrap();
    // Envoy shows a histogram only after it has flushed it, 5 seconds apart.
    let shown = eventually(Duration::from_secs(15), async || {
        let found = gateway.metrics().await.unwrap();
        METRICS.iter().all(|metric| {
            found
                .iter()
                .any(|sample| plain(&sample.name) == metric.name)
        })
    });
    let shown = shown.await;
    let metrics = gateway.metrics().await.unwrap();
    let names: BTreeSet<&str> = metrics.iter().map(|sample| plain(&sample.name)).collect();
    assert!(shown, "not all documented metrics are shown: {names:?}");
    for sample in &metrics {
        let metric = METRICS
            .iter()
            .find(|metric| metric.name == plain(&sample.name));
        let metric = metric.unwrap_or_else(|| panic!("{} is not documented", sample.name));
        let labels = sample
            .labels
            .keys()
            .map(String::as_str)
            .filter(|label| *label != "le");
        let labels: BTreeSet<&str> = labels.collect();
        assert_eq!(
            labels,
            metric.labels.iter().copied().collect(),
            "{}",
            sample.name
        );
    }
    let hosts: BTreeSet<&str> = metrics
        .iter()
        .filter_map(|series| series.labels.get("upstream_host").map(String::as_str))
        .collect();
    assert_eq!(hosts, engines.iter().map(MockEngine::name).collect());
}
