//! The server over real sockets: what clients of a real vLLM rely on.

use http_body_util::Full;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::Value;

use super::*;

type Http = Client<HttpConnector, Full<Bytes>>;

async fn start(config: ServerConfig) -> (Handle, Http, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let handle = spawn(config, listener).unwrap();
    let client = Client::builder(TokioExecutor::new()).build_http();
    let url = format!("http://{}", handle.address());
    (handle, client, url)
}

fn fast() -> ServerConfig {
    ServerConfig {
        speed: 100.0,
        ..ServerConfig::default()
    }
}

async fn send(http: &Http, method: Method, url: String, body: Value) -> Response<Incoming> {
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    let request = Request::builder()
        .method(method)
        .uri(url)
        .body(Full::from(body))
        .unwrap();
    http.request(request).await.unwrap()
}

async fn text(response: Response<Incoming>) -> String {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

async fn post(http: &Http, url: &str, path: &str, body: Value) -> (u16, String) {
    let response = send(http, Method::POST, format!("{url}{path}"), body).await;
    (response.status().as_u16(), text(response).await)
}

fn events(stream: &str) -> Vec<Value> {
    stream
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "))
        .filter(|event| *event != "[DONE]")
        .map(|event| serde_json::from_str(event).unwrap())
        .collect()
}

/// Polls until the condition holds; fails after five seconds.
async fn eventually(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..500 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not within five seconds: {what}");
}

fn chat(content: &str, tokens: u32, stream: bool) -> Value {
    json!({"model": "m", "stream": stream, "max_tokens": tokens,
           "stream_options": {"include_usage": true},
           "messages": [{"role": "system", "content": content}, {"role": "user", "content": "q"}]})
}

#[tokio::test]
async fn a_stream_has_one_event_per_token_then_usage_then_done() {
    let (_handle, http, url) = start(fast()).await;
    let (status, stream) = post(
        &http,
        &url,
        "/v1/chat/completions",
        chat(&"x".repeat(4_000), 7, true),
    )
    .await;
    assert_eq!(status, 200);
    assert!(stream.ends_with("data: [DONE]\n\n"));
    let events = events(&stream);
    assert_eq!(events.len(), 1 + 7 + 1);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let texts: Vec<&str> = events[1..8]
        .iter()
        .map(|event| event["choices"][0]["delta"]["content"].as_str().unwrap())
        .collect();
    assert!(texts.iter().all(|text| text.len() == 4), "{texts:?}");
    assert_eq!(events[6]["choices"][0]["finish_reason"], Value::Null);
    assert_eq!(events[7]["choices"][0]["finish_reason"], "length");
    let usage = &events[8]["usage"];
    assert_eq!(events[8]["choices"], json!([]));
    assert_eq!(usage["completion_tokens"], 7);
    // begin, 2 × (role, name, end) with "system" in 2 tokens, 1000 + 1 of text, role, "assistant".
    assert_eq!(usage["prompt_tokens"], 1 + 7 + 1_001 + 4);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
}

#[tokio::test]
async fn of_events_with_several_tokens_the_first_has_one_so_that_its_time_is_the_first_token_s() {
    let config = ServerConfig {
        tokens_per_event: 4,
        ..fast()
    };
    let (_handle, http, url) = start(config).await;
    let path = "/v1/chat/completions";
    let (_, stream) = post(&http, &url, path, chat("hello", 10, true)).await;
    let tokens: Vec<usize> = events(&stream)
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .map(|text| text.len() / 4)
        .filter(|tokens| *tokens > 0)
        .collect();
    assert_eq!(tokens, [1, 4, 4, 1]);
}

#[tokio::test]
async fn the_same_answer_whole_or_streamed_and_the_prompt_is_cached() {
    let (handle, http, url) = start(fast()).await;
    let path = "/v1/chat/completions";
    let (_, stream) = post(&http, &url, path, chat(&"x".repeat(4_000), 9, true)).await;
    let streamed: String = events(&stream)
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    let (_, whole) = post(&http, &url, path, chat(&"x".repeat(4_000), 9, false)).await;
    let whole: Value = serde_json::from_str(&whole).unwrap();
    assert_eq!(whole["choices"][0]["message"]["content"], streamed);
    // 1013 prompt tokens: 63 full blocks before the last token.
    assert_eq!(
        whole["usage"]["prompt_tokens_details"]["cached_tokens"],
        63 * 16
    );
    let counters = handle.snapshot().counters;
    assert_eq!(
        (counters.queried_tokens, counters.hit_tokens),
        (2 * 1_013, 63 * 16)
    );
    assert_eq!(counters.computed_tokens, 2 * (1_013 + 9 - 1) - 63 * 16);
    assert_eq!(handle.snapshot().pinned_blocks, 0);
}

#[tokio::test]
async fn salts_and_models_share_nothing() {
    let (handle, http, url) = start(fast()).await;
    let base = chat(&"x".repeat(4_000), 1, false);
    for (field, value) in [("model", "other"), ("cache_salt", "a"), ("cache_salt", "b")] {
        let mut body = base.clone();
        body[field] = json!(value);
        post(&http, &url, "/v1/chat/completions", body).await;
    }
    assert_eq!(handle.snapshot().counters.finished, 3);
    assert_eq!(handle.snapshot().counters.hit_tokens, 0);
}

#[tokio::test]
async fn every_api_answers_in_its_own_shape() {
    let (_handle, http, url) = start(fast()).await;
    let native = json!({"inputs": "some text", "parameters": {"max_new_tokens": 3}});
    for path in ["/generate", "/invocations"] {
        let (status, body) = post(&http, &url, path, native.clone()).await;
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (status, body["generated_text"].as_str().unwrap().len()),
            (200, 12)
        );
        assert_eq!(body["usage"]["completion_tokens"], 3);
    }
    for prompt in [json!("some text"), json!([1, 2, 3]), json!(["some text"])] {
        let body = json!({"model": "m", "prompt": prompt, "max_tokens": 2});
        let (_, body) = post(&http, &url, "/v1/completions", body).await;
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body["choices"][0]["text"].as_str().unwrap().len(), 8);
    }
    let (_, body) = post(&http, &url, "/invocations", chat("s", 2, false)).await;
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["object"], "chat.completion");
    let mut stream = native;
    stream["stream"] = json!(true);
    let (_, body) = post(&http, &url, "/generate", stream).await;
    let events = events(&body);
    assert_eq!(events.len(), 3);
    assert_eq!(events[2]["generated_text"].as_str().unwrap().len(), 12);
}

#[tokio::test]
async fn what_is_wrong_is_said_in_openai_s_shape() {
    let config = ServerConfig {
        models: vec!["m".into()],
        ..fast()
    };
    let (_handle, http, url) = start(config).await;
    let chat_path = "/v1/chat/completions";
    for (field, value, status, message) in [
        (
            "messages",
            json!([]),
            400,
            "messages: expected at least one",
        ),
        ("model", json!("no"), 404, "The model `no` does not exist."),
        (
            "max_tokens",
            json!(0),
            400,
            "max_tokens: expected at least 1",
        ),
        (
            "max_tokens",
            json!(200_000),
            400,
            "context length is 131072",
        ),
        ("n", json!(2), 400, "n: this engine gives one answer"),
    ] {
        let mut body = chat("s", 5, false);
        body[field] = value;
        refused(post(&http, &url, chat_path, body).await, status, message);
    }
    for (path, body, status, message) in [
        (
            chat_path,
            json!("text"),
            400,
            "body: expected a JSON request",
        ),
        (
            "/v1/completions",
            json!({"prompt": {}}),
            400,
            "prompt: expected",
        ),
        (
            "/sim/clock",
            json!({"speed": 0}),
            400,
            "body /speed: expected",
        ),
        ("/nowhere", json!({}), 404, "POST /nowhere: not served here"),
    ] {
        refused(post(&http, &url, path, body).await, status, message);
    }
}

#[track_caller]
fn refused((got, body): (u16, String), status: u16, message: &str) {
    let body: Value = serde_json::from_str(&body).unwrap();
    let text = body["error"]["message"].as_str().unwrap();
    assert_eq!(got, status, "{text}");
    assert!(text.contains(message), "{text}");
    assert_eq!(body["error"]["code"], status);
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_place_in_the_queue_and_in_its_answer() {
    let engine = EngineConfig {
        seqs_max: 1,
        ..EngineConfig::default()
    };
    let (handle, http, url) = start(ServerConfig {
        engine,
        ..ServerConfig::default()
    })
    .await;
    let path = format!("{url}/v1/chat/completions");
    let body = chat("s", 100_000, true);
    let mut streaming = send(&http, Method::POST, path.clone(), body.clone()).await;
    assert!(streaming.body_mut().frame().await.is_some());
    let queued = send(&http, Method::POST, path.clone(), body).await;
    let plain = tokio::spawn({
        let http = http.clone();
        async move { send(&http, Method::POST, path, chat("s", 100_000, false)).await }
    });
    eventually("three requests", || handle.snapshot().waiting == 2).await;
    assert_eq!(handle.snapshot().running, 1);
    plain.abort();
    eventually("the plain one left", || handle.snapshot().waiting == 1).await;
    drop(queued);
    eventually("the queued one left", || handle.snapshot().waiting == 0).await;
    drop(streaming);
    eventually("the streaming one left", || handle.snapshot().running == 0).await;
    assert_eq!(handle.snapshot().counters.cancelled, 3);
    assert_eq!(handle.snapshot().pinned_blocks, 0);
}

#[tokio::test]
async fn tokens_come_when_the_clock_says() {
    let (handle, http, url) = start(ServerConfig::default()).await;
    let path = format!("{url}/v1/chat/completions");
    let start = std::time::Instant::now();
    let mut response = send(
        &http,
        Method::POST,
        path.clone(),
        chat(&"x".repeat(8_000), 100_000, true),
    )
    .await;
    response.body_mut().frame().await.unwrap().unwrap();
    // 14 ms + 2013 tokens / 14000 per second.
    let first = start.elapsed();
    assert!(first >= Duration::from_millis(157), "{first:?}");
    drop(response);
    let (status, _) = post(&http, &url, "/sim/clock", json!({"speed": 1000})).await;
    assert_eq!(status, 200);
    let start = std::time::Instant::now();
    post(&http, &url, "/v1/chat/completions", chat("s", 1_000, true)).await;
    // 14 seconds of the engine.
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
    assert!(handle.snapshot().counters.busy_ns > 14_000_000_000);
}

#[tokio::test]
async fn control_and_metrics() {
    let config = ServerConfig {
        models: vec!["m".into()],
        ..fast()
    };
    let (handle, http, url) = start(config).await;
    let chat_path = "/v1/chat/completions";
    post(&http, &url, chat_path, chat(&"x".repeat(4_000), 5, true)).await;
    post(&http, &url, chat_path, chat(&"x".repeat(4_000), 5, true)).await;
    let page = text(send(&http, Method::GET, format!("{url}/metrics"), Value::Null).await).await;
    let labels = "{engine=\"0\",model_name=\"m\"}";
    for line in [
        format!("vllm:num_requests_running{labels} 0"),
        format!("vllm:prefix_cache_queries_total{labels} 2026"),
        format!("vllm:prefix_cache_hits_total{labels} 1008"),
        format!("vllm:prompt_tokens_total{labels} 2026"),
        format!("vllm:generation_tokens_total{labels} 10"),
        format!("vllm:time_to_first_token_seconds_count{labels} 2"),
        "vllm:time_to_first_token_seconds_bucket{engine=\"0\",model_name=\"m\",le=\"+Inf\"} 2"
            .to_owned(),
    ] {
        assert!(page.lines().any(|found| found == line), "{line}\n{page}");
    }
    post(&http, &url, "/sim/flush", json!({})).await;
    let (_, counters) = post(&http, &url, "/sim/reset-counters", json!({})).await;
    let counters: Value = serde_json::from_str(&counters).unwrap();
    assert_eq!(
        (&counters["hit_tokens"], &counters["cached_blocks"]),
        (&json!(0), &json!(0))
    );
    post(&http, &url, chat_path, chat(&"x".repeat(4_000), 5, true)).await;
    assert_eq!(handle.snapshot().counters.hit_tokens, 0);
    let health = |status: u16| {
        let (http, url) = (http.clone(), format!("{url}/health"));
        async move {
            let response = send(&http, Method::GET, url, Value::Null).await;
            assert_eq!(response.status().as_u16(), status);
        }
    };
    health(200).await;
    post(&http, &url, "/sim/health", json!({"healthy": false})).await;
    health(503).await;
    let models = text(send(&http, Method::GET, format!("{url}/v1/models"), Value::Null).await);
    let models: Value = serde_json::from_str(&models.await).unwrap();
    assert_eq!(models["data"][0]["id"], "m");
}

#[tokio::test]
async fn a_stopped_engine_cuts_its_streams() {
    let (handle, http, url) = start(ServerConfig::default()).await;
    let path = format!("{url}/v1/chat/completions");
    let mut response = send(&http, Method::POST, path, chat("s", 100_000, true)).await;
    response.body_mut().frame().await.unwrap().unwrap();
    drop(handle);
    let mut frames = 0;
    let end = loop {
        match response.body_mut().frame().await {
            Some(Ok(_)) => frames += 1,
            end => break end,
        }
        assert!(frames < 100);
    };
    assert!(matches!(end, Some(Err(_))), "{end:?}");
}

#[tokio::test]
async fn a_prompt_is_rendered_to_tokens_only_where_scale_out_is_enabled() {
    let path = "/v1/chat/completions/render";
    let (_handle, http, url) = start(fast()).await;
    let (status, _) = post(&http, &url, path, chat("s", 1, false)).await;
    assert_eq!(status, 403);
    let config = ServerConfig {
        enable_scale_out: true,
        ..fast()
    };
    let (handle, http, url) = start(config).await;
    let ids = async |system: &str| {
        let (status, text) = post(&http, &url, path, chat(system, 1, false)).await;
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        let ids = answer["token_ids"].as_array().unwrap();
        ids.iter()
            .map(|id| id.as_u64().unwrap())
            .collect::<Vec<_>>()
    };
    let (one, other) = (
        ids(&"x".repeat(400)).await,
        ids(&format!("{}y", "x".repeat(399))).await,
    );
    // begin, 2 × (role, name, end) with "system" in 2 tokens, 100 + 1 of text, role, "assistant".
    assert_eq!((one.len(), other.len()), (1 + 7 + 101 + 4, one.len()));
    let same = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
    assert_eq!(same, 1 + 3 + 99, "equal up to the token that differs");
    assert_eq!(
        handle.snapshot().counters.submitted,
        0,
        "nothing is computed"
    );
}
