//! Proves that `check` finds the filter's configuration wherever it is, refuses what the filter
//! refuses, and warns of each thing around it that keeps the filter from working.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use tools::check::{Finding, check};

const SMALLEST: &str =
    r#"{"pools": [{"cluster": "engines", "hosts": {"admin_cluster": "envoy_admin"}}]}"#;

fn shipped() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::fs::read_to_string(root.join("envoy/envoy.yaml")).unwrap()
}

#[track_caller]
fn single(text: &str) -> Finding {
    let mut findings = check(text).unwrap();
    assert_eq!(findings.len(), 1);
    findings.remove(0)
}

#[test]
fn every_shipped_envoy_file_with_a_filter_is_valid_and_needs_no_warning() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../envoy");
    let mut checked = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let Ok(text) = std::fs::read_to_string(&path) else {
            continue;
        };
        if !text.contains("root_id: prefix_router") {
            continue;
        }
        for finding in check(&text).unwrap() {
            assert_eq!(finding.error, None, "{}", path.display());
            assert_eq!(finding.warnings, Vec::<String>::new(), "{}", path.display());
            assert!(!finding.place.is_empty());
        }
        checked += 1;
    }
    assert!(checked >= 2, "{checked} files");
}

#[test]
fn a_configuration_alone_is_told_in_words() {
    let finding = single(SMALLEST);
    assert_eq!(finding.error, None);
    assert_eq!(finding.meaning[0], "pool engines: cluster engines");
    let fixed = SMALLEST.replace(
        r#""cluster": "engines""#,
        r#""cluster": "engines", "routing": "fixed", "prefix_length": 4096, "limit": 7"#,
    );
    let meaning = single(&fixed).meaning.join("\n");
    assert!(meaning.contains("the first 4096 characters"), "{meaning}");
    assert!(
        meaning.contains("7 requests in flight per host and gateway"),
        "{meaning}"
    );
}

#[test]
fn what_the_filter_refuses_is_refused_with_its_words() {
    let error = single(&SMALLEST.replace("pools", "pool")).error.unwrap();
    assert!(
        error.starts_with("config /pool: unknown field, did you mean pools?"),
        "{error}"
    );
    let error = single("{\"pools\": [").error.unwrap();
    assert!(
        error.starts_with("config: expected JSON, got EOF"),
        "{error}"
    );
    let in_envoy = shipped().replace("\"admin_cluster\"", "\"admin\"");
    let error = single(&in_envoy).error.unwrap();
    assert!(error.contains("/pools/0/hosts/admin"), "{error}");
}

#[test]
fn a_configuration_that_will_not_arrive_as_json_is_refused() {
    let error = single(&shipped().replace("StringValue\n", "Struct\n"))
        .error
        .unwrap();
    assert!(
        error.contains("StringValue") && error.contains("Struct"),
        "{error}"
    );
}

#[test]
fn a_file_without_the_filter_is_an_error() {
    for text in ["", "a: 1", "kind: Secret\n---\nkind: Service", "]["] {
        assert!(check(text).is_err(), "{text:?}");
    }
}

/// The error for a file in which there is nothing to check contains `expected`.
#[track_caller]
fn check_unfound(text: &str, expected: &str) {
    let error = check(text).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_file_without_the_filter_is_told_what_it_has_instead() {
    let renamed = shipped()
        .replace("root_id: prefix_router", "root_id: llm_root")
        .replace("name: prefix_router\n", "name: llm\n");
    check_unfound(
        &renamed,
        "a wasm filter with name: llm and root_id: llm_root at",
    );
    check_unfound(&renamed, "expected a wasm filter with name: prefix_router");
    check_unfound("", "found an empty file");
    check_unfound("# nothing\n", "found an empty file");
    check_unfound("pools: 1", "found the field pools");
    check_unfound(
        "static_resources: {}",
        "static_resources and has no wasm filter",
    );
}

#[test]
fn a_field_given_twice_is_told_where_and_without_advice_on_the_parser() {
    let twice = shipped().replace("    type: STATIC\n", "    type: STATIC\n    type: EDS\n");
    check_unfound(&twice, "duplicate mapping key `type`");
    let error = check(&twice).unwrap_err().to_string();
    assert!(
        error.contains("line ") && !error.contains("Options"),
        "{error}"
    );
}

/// Replaces one thing in the shipped file; the one warning it gives contains `expected`.
#[track_caller]
fn check_warning(from: &str, to: &str, expected: &str) {
    let text = shipped();
    assert!(text.contains(from), "{from}");
    let finding = single(&text.replace(from, to));
    assert_eq!(finding.error, None);
    assert_eq!(finding.warnings.len(), 1, "{:?}", finding.warnings);
    assert!(
        finding.warnings[0].contains(expected),
        "{:?}",
        finding.warnings
    );
}

#[test]
fn warns_of_what_keeps_the_filter_from_working() {
    let flag = "allow_on_headers_stop_iteration: true";
    check_warning(flag, "", flag);
    check_warning(
        "failure_policy: FAIL_RELOAD",
        "failure_policy: FAIL_OPEN",
        "FAIL_RELOAD",
    );
    check_warning("vm_id: prefix_router", "vm_id: ''", "vm_id");
    check_warning(
        "\"cluster\": \"engines\"",
        "\"cluster\": \"llm\"",
        "no cluster llm",
    );
    check_warning("\"envoy_admin\"", "\"admin\"", "no cluster admin");
    let limit = "request_body_buffer_limit: 10485760";
    check_warning(limit, "request_body_buffer_limit: 8388608", limit);
    check_warning(
        "- remove: x-prefix-route-host\n",
        "- remove: x-a\n",
        "x-prefix-route-host",
    );
    check_warning(
        "- remove: x-prefix-route-pool\n",
        "- remove: x-a\n",
        "x-prefix-route-pool",
    );
    check_warning("tag_name: pool,", "tag_name: llm,", "labels");
    check_warning(
        "- header: x-prefix-route-host",
        "- header: x-a",
        "header_to_metadata",
    );
    check_warning(
        "override_host.v3.OverrideHost",
        "random.v3.Random",
        "cluster engines ignores",
    );
}

#[test]
fn every_filter_of_a_stream_of_documents_is_checked() {
    let text = format!("{}\n---\nkind: Other\n---\n{}", shipped(), shipped());
    assert_eq!(check(&text).unwrap().len(), 2);
}

#[test]
fn a_pool_that_no_route_leads_to_its_cluster_is_an_error() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = std::fs::read_to_string(root.join("envoy/pools.yaml")).unwrap();
    for (from, to, expected) in [
        ("exact: qwen", "exact: other", "no route leads to pool qwen"),
        (
            "route: { cluster: qwen,",
            "route: { cluster: llama,",
            "the route of pool qwen leads to cluster llama; expected qwen",
        ),
        (
            "              routes:\n              # One for each",
            "              routes:\n              - match: { prefix: \"/\" }\n                \
             route: { cluster: llama }\n              # One for each",
            "the route of pool qwen comes behind one that takes every request",
        ),
    ] {
        assert!(text.contains(from));
        let error = single(&text.replace(from, to)).error.unwrap();
        assert!(error.contains(expected), "{error}");
    }
}
