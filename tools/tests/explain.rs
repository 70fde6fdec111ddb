//! Proves that `explain` says of bodies of every kind what it is meant to say (golden files), finds
//! where two differ, and is right about logs whose answers are known.
//!
//! `UPDATE=1` writes the golden files anew; read the difference before you believe it.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tools::explain::{ExplainArgs, render};

#[path = "../../tests/payloads/expand.rs"]
mod expand;

fn explain(line: &[&str]) -> anyhow::Result<String> {
    explain_in(line, 80)
}

fn explain_in(line: &[&str], columns: usize) -> anyhow::Result<String> {
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: ExplainArgs,
    }
    let words = std::iter::once("explain").chain(line.iter().copied());
    render(&<Cli as clap::Parser>::try_parse_from(words)?.args, columns)
}

fn explained(line: &[&str]) -> String {
    // A log is played anew for each width, which takes a while.
    if !line.contains(&"--log") {
        for columns in [40, 41, 60, 79] {
            explained_in(line, columns);
        }
    }
    explained_in(line, 80)
}

#[track_caller]
fn explained_in(line: &[&str], columns: usize) -> String {
    let text = explain_in(line, columns).unwrap();
    for row in text.lines() {
        let fits = row.chars().count() <= columns;
        // A name that is too long by itself is not broken.
        let alone = columns < 80 && !row.trim_start().contains(' ');
        assert!(fits || alone, "wider than {columns} columns: {row:?}");
    }
    text
}

/// What a program gets.
fn told(line: &[&str]) -> Value {
    let line: Vec<&str> = line.iter().copied().chain(["--json"]).collect();
    serde_json::from_str(&explain(&line).unwrap()).unwrap()
}

/// A folder for the bodies and logs of one test.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn log(&self, lines: impl Iterator<Item = Value>) -> String {
        let text = lines.fold(String::new(), |mut text, line| {
            writeln!(text, "{line}").unwrap();
            text
        });
        self.write("requests.jsonl", text.as_bytes())
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A body of tests/payloads and the path it was sent to.
fn case(name: &str) -> (String, Vec<u8>) {
    let file = root().join("tests/payloads").join(format!("{name}.txt"));
    let text = std::fs::read_to_string(file).unwrap();
    let (input, _) = text.split_once("\n===\n").unwrap();
    let (head, body) = input.split_once("\n\n").unwrap();
    let path = head.lines().find_map(|line| line.strip_prefix("POST "));
    (path.unwrap().to_owned(), expand::expand(body))
}

fn golden(name: &str, shown: &str) {
    let file = root().join(format!("tools/tests/explain/{name}.txt"));
    if std::env::var_os("UPDATE").is_some() {
        assert!(
            std::env::var_os("CI").is_none(),
            "UPDATE is refused where CI is set"
        );
        std::fs::write(file, shown).unwrap();
        return;
    }
    let known = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        known == shown,
        "{name}: not as in {}\n{shown}",
        file.display()
    );
}

const HOSTS: &str = "10.0.0.1:8000,10.0.0.2:8000,10.0.0.3:8000";

#[test]
fn bodies_of_every_kind_are_explained_as_before() {
    // golden file | body | further arguments
    let rows = [
        (
            "openai_chat",
            "openai_chat/long_system",
            "--hosts HOSTS --seen 9",
        ),
        (
            "tools_of_mistral",
            "openai_chat/tools_of_mistral",
            "--hosts HOSTS",
        ),
        (
            "tool_call",
            "openai_chat/tool_call",
            "--load 10.0.0.1:8000=3:9000 --hosts HOSTS",
        ),
        (
            "sampling_fields",
            "openai_chat/sampling_fields",
            "--no-text",
        ),
        ("openai_completions", "openai_completions/token_batch", ""),
        (
            "openai_responses",
            "openai_responses/previous_response_id",
            "",
        ),
        (
            "anthropic_messages",
            "anthropic_messages/billing_header",
            "--hosts HOSTS",
        ),
        ("gemini", "gemini/inline_data", ""),
        ("bedrock_converse", "bedrock_converse/tool_use", ""),
        ("ollama_chat", "ollama_chat/options", ""),
        ("triton_infer", "triton_infer/input_ids", ""),
        (
            "openai_embeddings",
            "openai_embeddings/batch",
            "--hosts HOSTS",
        ),
        (
            "native_without_a_path",
            "native/inputs",
            "--path / --header x-amzn-sagemaker-prefix-aware-id:team-a",
        ),
        ("raw", "raw/not_json", ""),
    ];
    let folder = Folder::new();
    for (name, from, more) in rows {
        let (path, body) = case(from);
        let file = folder.write("body.json", &body);
        let more = more.replace("HOSTS", HOSTS);
        let mut line = vec![file.as_str()];
        if !more.contains("--path") {
            line.extend(["--path", &path]);
        }
        line.extend(more.split_whitespace());
        golden(name, &explained(&line));
        if name == "openai_chat" {
            golden("openai_chat_narrow", &explained_in(&line, 40));
        }
    }
}

#[test]
fn a_body_that_is_not_json_is_said_to_be_none_and_what_becomes_of_it() {
    #[track_caller]
    fn check(body: &str, expected: &[&str]) {
        let folder = Folder::new();
        let file = folder.write("body.json", body.as_bytes());
        let text = explained(&[&file, "--path", "/v1/chat/completions"]);
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in expected {
            assert!(text.contains(part), "{part:?} is not in {text:?}");
        }
        assert!(!text.contains("0 bytes, about"), "{text}");
    }
    const RAW: &str = "Its raw bytes stand in for a prompt: equal bodies have one home.";
    check(
        r#"{"model": "m", "messages": broken}"#,
        &[
            "API: raw, because it is not JSON.",
            "The body is not JSON: expected value at line 1 column 28.",
            RAW,
        ],
    );
    check(
        r#"{"model": "m" "messages": []}"#,
        &["API: raw, because it is not JSON.", RAW],
    );
    check("", &["The body is not JSON: it is empty."]);
    check(
        r#"{"messages": [broken]}"#,
        &[
            "The body is not JSON: expected value at line 1 column 15. It is placed by what could be \
             read of it.",
            "Nothing: no text was found.",
            "the host with the least to do gets it",
        ],
    );
    check(
        r#"{"messages": [}"#,
        &["The body stops being JSON", "Nothing: no text was found."],
    );
    check(
        r#"{"messages": [{"role": "user", "content": "hi"}"#,
        &["The body is not JSON: EOF", "The body ends early"],
    );
    // Deeper than a parser that builds values goes, and JSON all the same.
    let deep = format!("{{\"messages\": {}{}}}", "[".repeat(300), "]".repeat(300));
    let folder = Folder::new();
    assert!(told(&[&folder.write("deep.json", deep.as_bytes())])["not_json"].is_null());
}

#[test]
fn the_configuration_decides_the_key_and_the_hosts() {
    let folder = Folder::new();
    let (path, body) = case("openai_chat/long_system");
    let body = folder.write("body.json", &body);
    let config = folder.write(
        "config.json",
        br#"{"pools": [{"cluster": "engines", "hosts": {"static": ["10.0.0.1:80", "10.0.0.2:80"]},
            "routing": "fixed", "prefix_length": 2048, "limit": 2}]}"#,
    );
    let fixed = told(&[&body, "--path", &path, "--config", &config]);
    assert_eq!(fixed["routing"]["mode"], "fixed");
    assert_eq!(fixed["route"]["decision"], "home");
    let home = fixed["route"]["hosts"][0]["host"].as_str().unwrap();
    assert_eq!(fixed["route"]["sent_to"], home);
    // Full, and below half of the limit in the mean over both hosts.
    let full = told(&[
        &body,
        "--path",
        &path,
        "--config",
        &config,
        "--load",
        &format!("{home}=2"),
    ]);
    // 2 in flight over 2 hosts: the mean is half of the limit, so it is ignored.
    assert_eq!(full["route"]["decision"], "home");
    let envoy = root().join("envoy/envoy.yaml");
    let shipped = told(&[&body, "--config", envoy.to_str().unwrap()]);
    let hosts = shipped["route"]["hosts"].as_array().unwrap();
    assert_eq!(hosts.len(), 3);
    assert!(
        hosts[0]["host"]
            .as_str()
            .unwrap()
            .starts_with("127.0.0.1:800")
    );
}

#[test]
fn the_home_of_hosts_that_a_file_names_is_not_passed_off_as_that_of_their_ips() {
    let folder = Folder::new();
    let file = root().join("envoy/envoy.yaml");
    let yaml = std::fs::read_to_string(file).unwrap();
    assert!(
        yaml.contains("address: 127.0.0.1, port_value: 8001"),
        "{yaml}"
    );
    let named = yaml.replace(
        "address: 127.0.0.1, port_value: 8001",
        "address: vllm, port_value: 8001",
    );
    let named = folder.write("envoy.yaml", named.as_bytes());
    let body = folder.write("body.json", b"{\"prompt\": \"Hello\"}");
    let said = "vllm:8001 is a name";
    assert!(explained(&[&body, "--config", &named]).contains(said));
    assert!(!explained(&[&body, "--hosts", HOSTS]).contains(said));
}

#[test]
fn a_request_is_explained_in_the_pool_that_serves_it() {
    let folder = Folder::new();
    let config = root().join("envoy/pools.yaml");
    let config = config.to_str().unwrap();
    let chat =
        |model: &str| json!({"model": model, "messages": [{"role": "user", "content": "Hi"}]});
    let body = |model: &str| folder.write(model, chat(model).to_string().as_bytes());
    let component = "x-amzn-sagemaker-inference-component: qwen-component";
    // model | further arguments | pool | why | first digits of its hosts
    for (model, more, pool, why, hosts) in [
        (
            "qwen-7b",
            vec![],
            "qwen",
            "its model leads to it",
            "127.0.0.1:801",
        ),
        (
            "llama-70b",
            vec![],
            "llama",
            "its model leads to it",
            "127.0.0.1:800",
        ),
        (
            "gpt",
            vec!["--header", component],
            "qwen",
            "a header leads to it",
            "127.0.0.1:801",
        ),
        (
            "gpt",
            vec!["--pool", "llama"],
            "llama",
            "--pool says so",
            "127.0.0.1:800",
        ),
    ] {
        let body = body(model);
        let line = [vec![body.as_str(), "--config", config], more].concat();
        let told = told(&line);
        assert_eq!(told["pool"], json!([pool, why]), "{line:?}");
        let sent_to = told["route"]["sent_to"].as_str().unwrap();
        assert!(sent_to.starts_with(hosts), "{line:?}: {sent_to}");
        assert!(explained(&line).contains(&format!("Pool: {pool}, because {why}.")));
    }
    let log = folder.log(
        ["qwen-7b", "llama-70b", "qwen-72b", "gpt"]
            .map(chat)
            .into_iter(),
    );
    let report = told(&["--log", &log, "--config", config, "--pool", "qwen"]);
    assert_eq!(report["sharing"]["requests"], 2);
    assert_eq!(report["others"], 2);
    assert_eq!(report["hosts"], 3);
    for (line, expected) in [
        (vec![body("gpt")], "no pool serves its model"),
        (
            vec![body("qwen-7b"), body("llama-70b")],
            "never meet on a host",
        ),
        (
            vec!["--log".into(), log],
            "the configuration has several: llama, qwen",
        ),
        (
            vec![body("gpt"), "--pool".into(), "gpt".into()],
            "expected llama, qwen, got gpt",
        ),
    ] {
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        let line = [line, vec!["--config", config]].concat();
        let error = format!("{:#}", explain(&line).unwrap_err());
        assert!(error.contains(expected), "{expected:?} is not in {error:?}");
    }
}

#[test]
fn counts_come_from_seen_and_from_a_log() {
    let folder = Folder::new();
    let (path, body) = case("openai_chat/long_system");
    let file = folder.write("body.json", &body);
    let cold = told(&[&file, "--path", &path, "--hosts", HOSTS]);
    assert_eq!(cold["route"]["tokens"], 256);
    assert_eq!(cold["route"]["rungs"][0]["seen"], 1);
    // 9 before and this one: above 4, and above half of a third of 10.
    let seen = told(&[&file, "--path", &path, "--hosts", HOSTS, "--seen", "9"]);
    assert_eq!(seen["route"]["rungs"][0]["seen"], 10);
    assert_eq!(seen["route"]["rungs"][0]["is_hot"], true);
    assert_eq!(seen["route"]["hot_above"], 4);
    let body: Value = serde_json::from_slice(&body).unwrap();
    let log = folder.log((0..9).map(|_| json!({"path": path, "body": body})));
    let logged = told(&[&file, "--path", &path, "--hosts", HOSTS, "--log", &log]);
    assert_eq!(logged["log_requests"], 9);
    assert_eq!(logged["route"]["rungs"], seen["route"]["rungs"]);
    assert_eq!(logged["route"]["key"], seen["route"]["key"]);
}

fn chat(system: &str, user: &str) -> Value {
    json!({"model": "m", "messages": [
        {"role": "system", "content": system}, {"role": "user", "content": user}
    ]})
}

fn compared(left: &Value, right: &Value) -> Value {
    let folder = Folder::new();
    let a = folder.write("a.json", left.to_string().as_bytes());
    let b = folder.write("b.json", right.to_string().as_bytes());
    explained(&[&a, &b, "--hosts", HOSTS]);
    told(&[&a, "--against", &b, "--hosts", HOSTS])
}

#[test]
fn the_first_differing_byte_of_two_prompts_is_found() {
    let system = "Be brief. ".repeat(200);
    let same = compared(&chat(&system, "Hello"), &chat(&system, "Hello"));
    assert_eq!(same["difference"], Value::Null);
    assert_eq!(
        (&same["same_key"], &same["left_home"]),
        (&json!(true), &same["right_home"])
    );

    let asks = compared(&chat(&system, "Hello you"), &chat(&system, "Hello me"));
    assert_eq!(asks["difference"]["part"], "message 2, user: text");
    assert_eq!(asks["difference"]["offset"], 6);
    assert_eq!(asks["shared_bytes"], 2006);
    assert_eq!(asks["shared_tokens"], 501);
    assert_eq!(asks["shared_checkpoint"], 2000);
    assert_eq!(asks["same_key"], true);

    // Beyond what is kept of a part for other purposes, and inside a character of two bytes.
    let long = "x".repeat(300_000);
    let late = compared(
        &chat(&format!("{long}é"), ""),
        &chat(&format!("{long}è"), ""),
    );
    assert_eq!(late["difference"]["offset"], 300_001);

    let role = json!({"model": "m", "messages": [{"role": "user", "content": "Hello"}]});
    let other = json!({"model": "m", "messages": [{"role": "tool", "content": "Hello"}]});
    let role = compared(&role, &other);
    assert_eq!(
        role["difference"]["what"],
        "another role or name of the message"
    );
    assert_eq!(role["difference"]["offset"], 5);
}

#[test]
fn what_is_mixed_into_the_key_keeps_equal_prompts_apart() {
    let mut salted = chat("Be brief.", "Hello");
    salted["cache_salt"] = json!("a");
    let mut other = salted.clone();
    other["cache_salt"] = json!("b");
    let salts = compared(&salted, &other);
    assert_eq!(salts["difference"], Value::Null);
    assert_eq!(salts["seeds"], json!(["cache_salt"]));
    assert_eq!(salts["same_key"], false);
}

#[test]
fn two_images_are_told_apart_by_their_hash() {
    let image = |data: &str| {
        let url = format!("data:image/png;base64,{data}");
        json!({"model": "m", "messages": [{"role": "user", "content": [
            {"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": url}}
        ]}]})
    };
    let images = compared(&image("AAAA"), &image("AAAB"));
    assert_eq!(
        images["difference"]["part"],
        "message 1, user: image or file"
    );
    assert_eq!(images["shared_bytes"], 3);
}

/// Words that depend on a number, of about this many bytes.
fn words(seed: u64, bytes: usize) -> String {
    let mut text = String::new();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    while text.len() < bytes {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        text.push(char::from(b'a' + (state >> 59) as u8 % 26));
        if (state >> 40).is_multiple_of(6) {
            text.push(' ');
        }
    }
    text
}

fn hits(report: &Value, mode: &str) -> f64 {
    let modes = report["modes"].as_array().unwrap();
    let mode = modes.iter().find(|found| found["name"] == mode).unwrap();
    mode["hit_rate"].as_f64().unwrap()
}

#[track_caller]
fn near(found: f64, expected: f64, within: f64) {
    assert!(
        (found - expected).abs() <= within,
        "{found}, expected {expected}"
    );
}

#[track_caller]
fn says(sentence: &Value, part: &str) {
    let text = sentence.as_str().unwrap();
    assert!(text.contains(part), "{part:?} is not in {text:?}");
}

const PATH: [&str; 2] = ["--path", "/v1/chat/completions"];

/// What is told of a log on seven hosts.
fn logged(lines: impl Iterator<Item = Value>) -> Value {
    let folder = Folder::new();
    let log = folder.log(lines);
    told(&["--log", &log, PATH[0], PATH[1]])
}

#[test]
fn a_log_is_explained_as_before() {
    let folder = Folder::new();
    let rest = words(1, 2000);
    let log = folder.log((0..40_u64).map(|at| {
        let system = match at % 2 {
            0 => format!("Now: 2026-11-29 12:00:{at:02}. {rest}"),
            _ => words(2, 3000),
        };
        let body = chat(&system, &format!("question {at}"));
        json!({"body": body, "time": at as f64 / 4.0, "output_tokens": 50})
    }));
    let line = ["--log", &log, PATH[0], PATH[1]];
    golden("log", &explained(&line));
    golden("log_narrow", &explained_in(&line, 40));
}

#[test]
fn prompts_used_again_hit_as_often_as_arithmetic_says() {
    // 40 prompts, each 15 times, in another order each time.
    let (prompts, uses, hosts) = (40, 15, 7.0_f64);
    let systems: Vec<String> = (0..prompts).map(|seed| words(seed, 4096)).collect();
    let report = logged((0..prompts * uses).map(|at| {
        let prompt = (at * 7 + at / prompts * 3) % prompts;
        chat(&systems[prompt as usize], &format!("question {at:04}"))
    }));
    let uses = uses as f64;
    // Of each prompt all but the question and the template's marks is shared, in blocks of 16.
    let shared = 4096.0 / 4.0 / report["sharing"]["tokens"]["mean"].as_f64().unwrap();
    let pinned = shared * (1.0 - 1.0 / uses);
    // At random, a prompt comes to so many hosts, and is cold once on each.
    let visited = hosts * (1.0 - (1.0 - 1.0 / hosts).powf(uses));
    let random = shared * (1.0 - visited / uses);
    near(report["sharing"]["most"].as_f64().unwrap(), pinned, 0.015);
    near(hits(&report, "adaptive"), pinned, 0.015);
    near(hits(&report, "fixed, 1024 characters"), pinned, 0.015);
    near(hits(&report, "oracle"), pinned, 0.015);
    // 600 requests: the number of hosts visited has a standard deviation of 0.7 of 6.3 for each of
    // 40 prompts, so the hit rate's is 0.7 / 15 / √40 = 0.7 %.
    near(hits(&report, "random"), random, 0.025);
    assert_eq!(report["advice"]["helps"], true);
    assert_eq!(report["spoilers"], json!([]));
    says(&report["advice"]["gain"], "Adaptive routing finds");
}

#[test]
fn a_time_in_the_system_prompt_is_named_at_its_offset() {
    let rest = words(1, 4000);
    let system = |at: u64| format!("Now: 2026-11-29 12:{:02}:{:02}. {rest}", at / 60, at % 60);
    let report = logged((0..120).map(|at| chat(&system(at), &format!("question {at}"))));
    let culprit = &report["spoilers"][0];
    assert_eq!(culprit["kind"], "text");
    assert_eq!(culprit["looks_like"], "a date or time");
    assert_eq!(
        (&culprit["message"], &culprit["role"]),
        (&json!(1), &json!("system"))
    );
    assert_eq!(
        (&culprit["offset_min"], &culprit["offset_max"]),
        (&json!(5), &json!(5))
    );
    near(culprit["lost_tokens"].as_f64().unwrap(), 1002.0, 4.0);
    says(&report["advice"]["remedies"][0], "Move it to the end");
    assert_eq!(report["spoilers"].as_array().unwrap().len(), 1);
    assert_eq!(report["advice"]["helps"], false);
    // At the very start.
    let at_start = |at: u64| format!("2026-11-29T12:{:02}:{:02}Z {rest}", at / 60, at % 60);
    let report = logged((0..120).map(|at| chat(&at_start(at), "question")));
    assert_eq!(report["spoilers"][0]["offset_max"], 0);
    assert_eq!(report["spoilers"][0]["looks_like"], "a date or time");
}

#[test]
fn tools_in_changing_order_and_a_salt_for_each_request_are_named() {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "description": words(9, 800)}});
    let report = logged((0..60).map(|at| {
        let mut body = chat("Be brief.", &format!("question {at}"));
        let mut names = ["read", "write", "list"];
        names.rotate_left(at % 3);
        body["tools"] = names.map(tool).to_vec().into();
        body
    }));
    assert_eq!(report["spoilers"][0]["kind"], "tools_order");
    says(&report["advice"]["remedies"][0], "sorted by name");
    let system = words(1, 4000);
    let report = logged((0..60).map(|at| {
        let mut body = chat(&system, &format!("question {at}"));
        body["cache_salt"] = json!(format!("salt {at}"));
        body
    }));
    assert_eq!(report["spoilers"][0]["kind"], "seed");
    assert_eq!(report["spoilers"][0]["name"], "cache_salt");
    says(&report["advice"]["remedies"][0], "one salt for each tenant");
    assert_eq!(hits(&report, "oracle"), 0.0);
}

#[test]
fn unique_prompts_have_nothing_to_gain() {
    let report = logged((0..150).map(|at| chat(&words(at, 4000), "question")));
    assert_eq!(report["advice"]["helps"], false);
    says(&report["advice"]["gain"], "Nothing to gain");
    says(&report["advice"]["gain"], "least_request");
    assert_eq!(report["spoilers"], json!([]));
    for mode in ["random", "adaptive", "oracle"] {
        assert!(hits(&report, mode) < 0.01, "{mode}: {report}");
    }
}

#[test]
fn one_viral_prompt_is_named_and_spread() {
    let viral = words(0, 8000);
    let report = logged((0..400_u64).map(|at| {
        let system = if at % 2 == 0 {
            viral.clone()
        } else {
            words(at, 8000)
        };
        let body = chat(&system, &format!("{}{at}", words(at, 2000)));
        json!({"body": body, "time": at as f64 * 0.2, "output_tokens": 20})
    }));
    let first = &report["sharing"]["prefixes"][0];
    assert_eq!(
        (&first["requests"], &first["tokens"]),
        (&json!(200), &json!(2000))
    );
    says(&report["advice"]["viral"], "is in 50 % of all requests");
    let modes = report["modes"].as_array().unwrap();
    let busiest = |name: &str| {
        let mode = modes.iter().find(|mode| mode["name"] == name).unwrap();
        mode["share_max_over_mean"].as_f64().unwrap()
    };
    // Half of all requests on one of seven hosts, and its part of the rest: 0.5 × 7 + 0.5.
    near(busiest("fixed, 4096 characters"), 4.0, 0.3);
    assert!(busiest("adaptive") < 2.0, "{modes:?}");
}

#[test]
fn the_limit_follows_from_the_log_s_concurrency() {
    // 20 requests a second of 3.5 s each: 70 in flight, 10 on each of seven hosts.
    let systems: Vec<String> = (0..70).map(|seed| words(seed, 2000)).collect();
    let report = logged((0..700_usize).map(|at| {
        let body = chat(&systems[at * 11 % 70], "question");
        json!({"body": body, "time": at as f64 / 20.0, "duration": 3.5, "output_tokens": 10})
    }));
    let load = &report["in_flight"];
    near(load["total"].as_f64().unwrap(), 70.0, 0.01);
    near(load["per_host"].as_f64().unwrap(), 10.0, 0.01);
    let (limit, peak) = (
        report["advice"]["limit"].as_u64().unwrap(),
        load["peak"].as_u64().unwrap(),
    );
    assert!(peak >= 10, "{peak}");
    assert_eq!(limit, (peak + 1).max(21));
    says(
        &report["advice"]["limit_why"][0],
        "20.00 × 3.50 (by the log) = 70.0",
    );
    // Without durations, the engines' model stands in: 100 tokens of at least 14 ms.
    let report = logged((0..400_usize).map(|at| {
        let body = chat(&systems[at * 11 % 70], "question");
        json!({"body": body, "time": at as f64 / 10.0, "output_tokens": 100})
    }));
    near(report["in_flight"]["total"].as_f64().unwrap(), 14.7, 0.8);
    // Without times there is no load to tell of.
    let report = logged((0..20).map(|at| chat(&systems[at % 2], "question")));
    assert_eq!(report["advice"]["limit"], Value::Null);
    says(
        &report["advice"]["limit_why"][0],
        "not every line of the log has a time",
    );
    // Nor is there any if only one request has come.
    let line = |time: f64| json!({"body": chat("Be brief.", "hello"), "time": time});
    let report = logged([5.0, -1e300].map(line).into_iter());
    assert_eq!(report["unreadable"], 1);
    says(
        &report["advice"]["limit_why"][0],
        "Not known: that takes two requests at different times.",
    );
}

#[test]
fn a_trace_in_mooncake_s_format_is_a_log() {
    let report = logged((0..40_u64).map(|at| {
        json!({"timestamp": at * 2000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 100 + at]})
    }));
    assert_eq!(report["sharing"]["requests"], 40);
    // Two blocks of 512 tokens of 1,100 are shared by all but the first.
    near(
        report["sharing"]["most"].as_f64().unwrap(),
        1024.0 / 1105.0 * 39.0 / 40.0,
        0.01,
    );
    near(
        report["in_flight"]["requests_per_s"].as_f64().unwrap(),
        0.5,
        0.001,
    );
}

#[test]
fn no_text_means_none() {
    let folder = Folder::new();
    let secret = format!("Zanzibar {}", words(1, 4000));
    let bodies: Vec<Value> = (0..20)
        .map(|at| chat(&format!("{at} {secret}"), "Zanzibar"))
        .collect();
    let a = folder.write("a.json", bodies[0].to_string().as_bytes());
    let b = folder.write("b.json", bodies[1].to_string().as_bytes());
    let log = folder.log(bodies.into_iter());
    for line in [vec![a.as_str()], vec![&a, &b], vec!["--log", &log]] {
        assert!(
            explained(&line).contains("Zanzibar") || line.len() == 2,
            "{line:?}"
        );
        let quiet: Vec<&str> = line.iter().copied().chain(["--no-text"]).collect();
        assert!(!explained(&quiet).contains("Zanzibar"), "{line:?}");
        assert!(!told(&quiet).to_string().contains("Zanzibar"), "{line:?}");
    }
}

#[test]
fn lines_that_cannot_be_read_are_passed_over_and_the_first_is_named() {
    let folder = Folder::new();
    let line = |time: Value| json!({"body": chat("Be brief.", "hello"), "time": time});
    let log = folder.log(
        [json!(1.0), json!("noon"), json!(2.0), json!(-1)]
            .map(line)
            .into_iter(),
    );
    let report = told(&["--log", &log, PATH[0], PATH[1]]);
    assert_eq!(report["unreadable"], 2);
    says(
        &report["first_unreadable"],
        "line 2: \"time\": expected seconds as a number of 0 or more, got \"noon\"",
    );
    let text = explained(&["--log", &log, PATH[0], PATH[1]]).replace('\n', " ");
    assert!(
        text.contains("2 lines passed over; the first is line 2:"),
        "{text}"
    );
}

#[test]
fn applications_with_a_common_end_spoil_nothing() {
    let rest = words(1, 4000);
    let report = logged((0..120).map(|at| {
        let system = format!(
            "You help the people of {}. {rest}",
            ["Rome", "Oslo", "Lima"][at % 3]
        );
        chat(&system, &format!("question {at}"))
    }));
    assert_eq!(report["spoilers"], json!([]));
}

#[test]
fn what_cannot_be_used_is_refused_by_name() {
    #[track_caller]
    fn refused(line: &[&str], expected: &str) {
        let error = format!("{:#}", explain(line).unwrap_err());
        assert!(error.contains(expected), "{expected:?} is not in {error:?}");
    }
    let folder = Folder::new();
    let body = folder.write("body.json", b"{}");
    let text = folder.write("text.jsonl", b"not JSON\n");
    refused(&[], "BODY");
    refused(&["/nowhere.json"], "/nowhere.json: cannot be read");
    // The line is the file's, whatever lines before it are empty.
    let times = folder.write("times.jsonl", b"\n{\"body\": {}, \"time\": \"noon\"}\n");
    refused(
        &["--log", &times],
        "times.jsonl: no line of it can be read; line 2: \"time\": expected seconds as a number of 0 \
         or more, got \"noon\"",
    );
    for (first, last) in [
        ("0", "1e300"),
        ("1e300", "1e300"),
        ("0", "3e6"),
        ("1.7e12", "1.700000000001e12"),
    ] {
        let lines = [first, last].map(|time| format!("{{\"body\": {{}}, \"time\": {time}}}\n"));
        let log = folder.write("no_seconds.jsonl", lines.concat().as_bytes());
        refused(&["--log", &log], "expected seconds, and 31 days at most");
    }
    let log = folder.log((0..2).map(|_| json!({"body": {}})));
    refused(
        &["--log", &log, "--rate", "1e-300"],
        "invalid value '1e-300' for '--rate <RATE>': expected a rate from 0.001 to 100000",
    );
    refused(
        &["--log", &text],
        "no line of it can be read; line 1: expected a JSON object",
    );
    for host in ["vllm:8000", "10.0.0.1", "10.0.0.1:0"] {
        refused(
            &[&body, "--hosts", &format!("10.0.0.2:8000,{host}")],
            &format!("--hosts: expected ip:port, got \"{host}\": Envoy knows a host by its IP"),
        );
    }
    refused(&[&body, "--header", "none"], "expected \"name: value\"");
    refused(
        &[&body, "--load", "10.0.0.1:80=1"],
        "10.0.0.1:80 is none of the hosts",
    );
    refused(
        &[&body, "--hosts", HOSTS, "--load", "10.0.0.1:8000=x"],
        "HOST=REQUESTS",
    );
    refused(&[&body, "--config", &body], "config /pools");
    refused(&[&body, &body, "--against", &body], "compares two bodies");
}
