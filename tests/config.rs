//! Proves what the config parser refuses, word for word, and what it makes of what it accepts.
//!
//! `UPDATE=1 cargo test --test config` rewrites the expected messages; review them then.

#![allow(clippy::unwrap_used)]

use prefix_router::config::{
    Absent, Config, DebugHeaders, HostSource, Kind, Learning, Mode, OPTIONS, Opt, Pool, Request,
    Routing,
};
use prefix_router::cost::Constants;
use prefix_router::payload::{CacheKey, ReadOptions, Tools};
use prefix_router::popularity::Heat;
use prefix_router::route::Bounds;
use prefix_router::select::{Matches, Pattern};
use std::path::{Path, PathBuf};

fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config/errors");
    let entries = std::fs::read_dir(folder).unwrap();
    let mut cases: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    cases.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "json")
    });
    cases.sort();
    cases
}

#[test]
fn refuses_with_path_expectation_and_finding() {
    let update = std::env::var_os("UPDATE").is_some();
    let ci = std::env::var_os("CI").is_some();
    assert!(!(update && ci), "UPDATE is for people: CI only compares");
    let mut failures = Vec::new();
    for case in cases() {
        let name = case.file_stem().unwrap().to_string_lossy().into_owned();
        let Err(error) = Config::parse(&std::fs::read(&case).unwrap()) else {
            failures.push(format!("{name}: accepted"));
            continue;
        };
        let found = format!("{error}\n");
        let golden = case.with_extension("txt");
        if update {
            std::fs::write(&golden, &found).unwrap();
            continue;
        }
        let expected = std::fs::read_to_string(&golden).unwrap_or_default();
        if found != expected {
            failures.push(format!("{name}\n  expected {expected}  found    {found}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_refusal_is_one_line_about_one_case() {
    let messages: Vec<_> = cases()
        .iter()
        .map(|case| std::fs::read_to_string(case.with_extension("txt")).unwrap())
        .collect();
    assert!(messages.len() >= 80, "{} cases", messages.len());
    for message in messages {
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(message.len() < 400, "{message}");
    }
}

#[test]
fn every_option_has_a_refusal() {
    let messages: String = cases()
        .iter()
        .map(|case| std::fs::read_to_string(case.with_extension("txt")).unwrap())
        .collect();
    for option in OPTIONS {
        let path = option.path.replace('*', "0");
        assert!(
            messages.contains(&format!("config {path}:"))
                || messages.contains(&format!("config {path}/")),
            "no case in tests/config/errors refuses {path}"
        );
    }
}

#[track_caller]
fn parsed(text: &str) -> Config {
    Config::parse(text.as_bytes()).unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
fn pool(options: &str) -> Pool {
    let start = r#"{"pools": [{"cluster": "engines", "hosts": {"admin_cluster": "admin"}"#;
    parsed(&format!("{start}{options}}}]}}")).pools.remove(0)
}

fn pattern(text: &str) -> Pattern {
    Pattern::parse(text).unwrap()
}

fn adaptive() -> Routing {
    Routing::Adaptive {
        heat: Heat::default(),
        constants: Constants::default(),
        one_gateway: false,
    }
}

const SMALLEST: &str =
    r#"{"pools": [{"cluster": "engines", "hosts": {"admin_cluster": "envoy_admin"}}]}"#;

#[test]
fn the_smallest_config_has_every_default() {
    let expected = Config {
        pools: vec![Pool {
            name: "engines".into(),
            cluster: "engines".into(),
            default: true,
            matches: Matches::default(),
            mode: Mode::On,
            share: 1.0,
            cache_key: CacheKey::Hint,
            hosts: HostSource::Admin {
                cluster: "envoy_admin".into(),
                poll_ms: 500,
            },
            routing: adaptive(),
            bounds: Bounds {
                limit: None,
                panic_rule: true,
            },
            strict_health: false,
            rejects: false,
            slow_start_ms: 30_000,
            zone: None,
        }],
        read: ReadOptions::default(),
        request: Request {
            body_bytes_max: 8 << 20,
            body_wait_ms: 500,
            body_idle_ms: 30_000,
            tenant_header: Some("x-amzn-sagemaker-prefix-aware-id".into()),
        },
        learning: Learning { sample: 8 },
        debug_headers: DebugHeaders::Off,
        log: log::LevelFilter::Info,
        host_series_max: 256,
    };
    assert_eq!(parsed(SMALLEST), expected);
}

#[test]
fn every_option_is_taken_over() {
    let config = parsed(
        r#"{
            "pools": [{
                "name": "chat", "cluster": "engines", "default": false,
                "models": ["llama", "llama-*"], "components": ["ic"],
                "headers": [{"name": "X-Team", "values": ["red"]}], "paths": ["/chat/"],
                "mode": "observe", "share": 0.25,
                "hosts": {"static": ["10.0.0.1:8000", "[FD00:0::1]:8000"]},
                "limit": 4, "panic_rule": false, "strict_health": true
            }],
            "seed": 18446744073709551615,
            "request": {
                "body_bytes_max": 65536, "body_wait_ms": 100, "body_idle_ms": 1000,
                "tenant_header": "X-Tenant", "pointers": ["/q"], "template_inputs": [],
                "skip": ["now:"], "image_tokens": 256, "tools": "before_last_user",
                "prompt_cache_key": "ignore"
            },
            "learning": {"sample": 0},
            "debug_headers": "on_request", "log": "debug", "host_series_max": 0
        }"#,
    );
    let expected = Config {
        pools: vec![Pool {
            name: "chat".into(),
            cluster: "engines".into(),
            default: false,
            matches: Matches {
                models: vec![pattern("llama"), pattern("llama-*")],
                headers: vec![
                    (
                        "x-amzn-sagemaker-inference-component".into(),
                        vec![pattern("ic")],
                    ),
                    ("x-team".into(), vec![pattern("red")]),
                ],
                paths: vec!["/chat/".into()],
            },
            mode: Mode::Observe,
            share: 0.25,
            cache_key: CacheKey::Ignore,
            hosts: HostSource::Static(vec!["10.0.0.1:8000".into(), "[fd00::1]:8000".into()]),
            routing: adaptive(),
            bounds: Bounds {
                limit: Some(4),
                panic_rule: false,
            },
            strict_health: true,
            rejects: false,
            slow_start_ms: 30_000,
            zone: None,
        }],
        read: ReadOptions {
            seed: u64::MAX,
            prefix_length: None,
            pointers: vec!["/q".into()],
            template_inputs: vec![],
            cache_key: CacheKey::Ignore,
            tools: Tools::BeforeLastUser,
            image_tokens: 256,
            skip: vec!["now:".into()],
        },
        request: Request {
            body_bytes_max: 65_536,
            body_wait_ms: 100,
            body_idle_ms: 1000,
            tenant_header: Some("x-tenant".into()),
        },
        learning: Learning { sample: 0 },
        debug_headers: DebugHeaders::OnRequest,
        log: log::LevelFilter::Debug,
        host_series_max: 0,
    };
    assert_eq!(config, expected);
}

#[test]
fn a_zone_counts_where_other_zones_cost_more() {
    let pool = |options: &str| {
        let hosts = r#""hosts": {"admin_cluster": "admin"}"#;
        let text = format!(r#"{{"pools": [{{"cluster": "engines", {hosts}, {options}}}]}}"#);
        let pool = parsed(&text).pools.remove(0);
        (pool.routing.weighs_zones(), pool.zone)
    };
    assert_eq!(pool(r#""zone_tokens": 0"#), (false, None));
    assert_eq!(pool(r#""zone_tokens": 0.5"#), (true, None));
    let both = pool(r#""zone_tokens": 100, "zone": "z1""#);
    assert_eq!(both, (true, Some("z1".into())));
}

#[test]
fn hosts_that_no_source_lists_are_learned() {
    for hosts in ["", r#", "hosts": {}"#] {
        let config = parsed(&format!(
            r#"{{"pools": [{{"cluster": "engines"{hosts}}}]}}"#
        ));
        assert_eq!(config.pools[0].hosts, HostSource::Learned);
    }
}

#[test]
fn the_sagemaker_block_means_fixed() {
    let block =
        r#", "PrefixAwareRoutingConfig": {"PrefixLength": 4096, "ConcurrencyThreshold": 10}"#;
    let own = r#", "routing": "fixed", "prefix_length": 4096, "concurrency_threshold": 10"#;
    let limit = r#", "routing": "fixed", "prefix_length": 4096, "limit": 10"#;
    let expected = pool(block);
    assert_eq!(
        expected.routing,
        Routing::Fixed {
            prefix_length: 4096
        }
    );
    assert_eq!(
        expected.bounds,
        Bounds {
            limit: Some(10),
            panic_rule: true
        }
    );
    assert_eq!(pool(own), expected);
    assert_eq!(pool(limit), expected);
    assert_eq!(pool(&format!(r#"{block}, "routing": "fixed""#)), expected);
}

#[test]
fn in_fixed_mode_the_cache_key_is_a_seed_unless_the_config_says_otherwise() {
    let fixed = SMALLEST.replace(
        r#""cluster""#,
        r#""routing": "fixed", "prefix_length": 1024, "limit": 1, "cluster""#,
    );
    let read = parsed(&fixed).read;
    assert_eq!(
        (read.cache_key, read.prefix_length),
        (CacheKey::Seed, Some(1024))
    );
    let hint = fixed.replacen('{', r#"{"request": {"prompt_cache_key": "hint"}, "#, 1);
    assert_eq!(parsed(&hint).read.cache_key, CacheKey::Hint);
}

/// Two pools with these options.
#[track_caller]
fn two_pools(first: &str, second: &str) -> Config {
    let pool = |cluster: &str, options: &str| {
        format!(r#"{{"cluster": "{cluster}", "hosts": {{"admin_cluster": "admin"}}, {options}}}"#)
    };
    let (first, second) = (pool("a", first), pool("b", second));
    parsed(&format!(r#"{{"pools": [{first}, {second}]}}"#))
}

#[test]
fn only_pools_that_the_body_leads_to_are_read_alike() {
    let fixed = |length| format!(r#""routing": "fixed", "prefix_length": {length}, "limit": 4"#);
    let by_body = format!(r#""default": true, {}"#, fixed(2048));
    let same = format!(r#""models": ["b"], {}"#, fixed(2048));
    let by_head = format!(r#""paths": ["/b/"], {}"#, fixed(4096));
    for (second, expected) in [(same, 2048), (by_head, 4096)] {
        let config = two_pools(&by_body, &second);
        assert_eq!(config.read.prefix_length, Some(2048));
        let read = config.read_for(&config.pools[1]);
        assert_eq!(
            (read.prefix_length, read.cache_key),
            (Some(expected), CacheKey::Seed)
        );
    }
    let config = two_pools(&by_body, r#""components": ["b"]"#);
    let read = config.read_for(&config.pools[1]);
    assert_eq!((read.prefix_length, read.cache_key), (None, CacheKey::Hint));
}

#[test]
fn none_of_the_pools_need_be_the_default() {
    let config = two_pools(r#""models": ["a"], "default": false"#, r#""models": ["b"]"#);
    assert!(config.pools.iter().all(|pool| !pool.default));
    let config = two_pools(r#""default": true"#, r#""models": ["b"]"#);
    assert!(config.pools[0].default && !config.pools[1].default);
}

#[test]
fn every_constant_of_the_choice_can_be_set() {
    let options = r#", "gateways": "one", "zone_tokens": 7, "expert": {
        "affinity_weight": 3, "hot_share": 0.25, "count_min": 8, "halve_requests": 500,
        "step_tokens": 2048, "in_flight_tokens": 0, "failure_tokens": 5, "slack": 1, "stick": 0.5, "balance": 1.5,
        "idle_in_flight": 2.5
    }"#;
    let expected = Routing::Adaptive {
        heat: Heat {
            hot_share: 0.25,
            count_min: 8,
            halve_requests: 500,
        },
        constants: Constants {
            affinity_weight: 3.0,
            step_tokens: 2048.0,
            in_flight_tokens: 0.0,
            failure_tokens: 5.0,
            zone_tokens: 7.0,
            slack: 1.0,
            stick: 0.5,
            balance: 1.5,
            idle_in_flight: 2.5,
        },
        one_gateway: true,
    };
    assert_eq!(pool(options).routing, expected);
}

#[test]
fn a_seed_in_words_is_the_same_on_every_gateway() {
    let seeded = SMALLEST.replacen('{', r#"{"seed": "fleet-7", "#, 1);
    // xxh64 of the text with seed 0; a change of it makes every cache of a fleet cold.
    assert_eq!(parsed(&seeded).read.seed, 13_940_128_944_561_287_315);
}

#[test]
fn the_limits_of_every_integer_are_accepted_and_the_next_ones_are_not() {
    for option in OPTIONS {
        let Kind::Integer { min, max, .. } = option.kind else {
            continue;
        };
        for value in [min, max] {
            let text = with_integer(option, value);
            parsed(&text);
        }
        let mut outside = vec![max + 1];
        outside.extend(min.checked_sub(1));
        for value in outside {
            let error = Config::parse(with_integer(option, value).as_bytes()).unwrap_err();
            assert_eq!(error.pointer, option.path.replace('*', "0"));
        }
    }
}

/// A config in which every integer that must be there is, and `option` is `value`.
fn with_integer(option: &Opt, value: u64) -> String {
    let fixed = ["prefix_length", "concurrency_threshold"].contains(&option.name());
    let mut pool = serde_json::json!({"cluster": "engines", "hosts": {"admin_cluster": "admin"}});
    if fixed {
        pool["routing"] = "fixed".into();
        pool["prefix_length"] = 4096.into();
        pool["concurrency_threshold"] = 10.into();
    }
    if option.parent().ends_with("PrefixAwareRoutingConfig") {
        pool["PrefixAwareRoutingConfig"] =
            serde_json::json!({"PrefixLength": 4096, "ConcurrencyThreshold": 10});
    }
    if option.parent().ends_with("expert") {
        pool["expert"] = serde_json::json!({});
    }
    let mut config = serde_json::json!({"pools": [pool], "request": {}, "learning": {}});
    let parent = option.parent().replace('*', "0");
    config.pointer_mut(&parent).unwrap()[option.name()] = value.into();
    config.to_string()
}

#[test]
fn a_stated_default_is_the_default_in_force() {
    let default = parsed(SMALLEST);
    for option in OPTIONS {
        let value = match option.absent {
            Absent::Integer(value) => value.into(),
            Absent::Decimal(value) => value.into(),
            Absent::Text(text) => text.into(),
            Absent::Texts(texts) => texts.into(),
            Absent::Bool(_) | Absent::Required | Absent::Means(_) => continue,
        };
        let mut config: serde_json::Value = serde_json::from_str(SMALLEST).unwrap();
        config["request"] = serde_json::json!({});
        config["pools"][0]["expert"] = serde_json::json!({});
        config["learning"] = serde_json::json!({});
        let parent = option.parent().replace('*', "0");
        config.pointer_mut(&parent).unwrap()[option.name()] = value;
        assert_eq!(parsed(&config.to_string()), default, "{}", option.path);
    }
}
