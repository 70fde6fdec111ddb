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

/// The only error.
#[track_caller]
fn single_error(text: &str) -> String {
    let mut errors = single(text).errors;
    assert_eq!(errors.len(), 1, "{errors:?}");
    errors.remove(0)
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
            assert_eq!(finding.errors, Vec::<String>::new(), "{}", path.display());
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
    assert_eq!(finding.errors, Vec::<String>::new());
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
    let error = single_error(&SMALLEST.replace("pools", "pool"));
    assert!(
        error.starts_with("config /pool: unknown field, did you mean pools?"),
        "{error}"
    );
    let error = single_error("{\"pools\": [");
    assert!(
        error.starts_with("config: expected JSON, got EOF"),
        "{error}"
    );
    let in_envoy = shipped().replace("\"admin_cluster\"", "\"admin\"");
    let error = single_error(&in_envoy);
    assert!(error.contains("/pools/0/hosts/admin"), "{error}");
}

#[test]
fn a_configuration_that_will_not_arrive_as_json_is_refused() {
    let error = single_error(&shipped().replace("StringValue\n", "Struct\n"));
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
    assert_eq!(finding.errors, Vec::<String>::new());
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
        let error = single_error(&text.replace(from, to));
        assert!(error.contains(expected), "{error}");
    }
}

/// Replaces one thing in the shipped file; the one error it gives contains `expected`.
#[track_caller]
fn check_error(from: &str, to: &str, expected: &str) {
    let text = shipped();
    assert!(text.contains(from), "{from}");
    let error = single_error(&text.replace(from, to));
    assert!(error.contains(expected), "{error}");
}

/// The shipped file with its HTTP filters in another order: of the filter (0), `header_to_metadata`
/// (1) and the router (2).
fn ordered(order: &[usize]) -> String {
    let text = shipped();
    let starts = [
        "          - name: prefix_router\n",
        "          - name: envoy.filters.http.header_to_metadata\n",
        "          - name: envoy.filters.http.router\n",
        "\n  # For Prometheus",
    ];
    let at: Vec<usize> = starts
        .iter()
        .map(|start| text.find(start).unwrap())
        .collect();
    let parts = order.iter().map(|&part| &text[at[part]..at[part + 1]]);
    let parts: String = parts.collect();
    format!("{}{parts}{}", &text[..at[0]], &text[at[3]..])
}

#[test]
fn header_to_metadata_has_to_stand_between_the_filter_and_the_router() {
    assert_eq!(ordered(&[0, 1, 2]), shipped());
    for (order, expected) in [
        (
            &[1, 0, 2][..],
            "(http_filters/0) stands in front of prefix_router (http_filters/1)",
        ),
        (&[0, 2], "choices are lost: copy header_to_metadata"),
        (
            &[0, 2, 1],
            "header_to_metadata (http_filters/2) stands behind the router",
        ),
        (
            &[1, 2, 0],
            "prefix_router (http_filters/2) stands behind the router",
        ),
    ] {
        let error = single_error(&ordered(order));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_choice_that_the_policy_does_not_find_is_an_error() {
    let header = "- header: x-prefix-route-host";
    check_error(
        header,
        "- header: x-a",
        "moves x-a; expected x-prefix-route-host",
    );
    check_error(
        "type: STRING",
        "type: NUMBER",
        "as type NUMBER; expected STRING",
    );
    let written = "key: prefix-route-host, type";
    let expected = "reads envoy.lb/prefix-route-host, but header_to_metadata writes envoy.lb/host";
    check_error(written, "key: host, type", expected);
    let space = "metadata_namespace: envoy.lb, ";
    check_error(
        space,
        "",
        "writes envoy.filters.http.header_to_metadata/prefix-route-host",
    );
    let read = "path: [{ key: prefix-route-host }]";
    check_error(
        read,
        "path: [{ key: host }]",
        "cluster engines does not get",
    );
    check_error(
        read,
        "path: [{ key: prefix-route-host }, { key: a }]",
        "host/a, but",
    );
    let policy = "override_host.v3.OverrideHost";
    check_error(policy, "random.v3.Random", "cluster engines ignores");
}

#[test]
fn other_ways_of_the_choice_are_no_error() {
    let metadata = "- metadata: { key: envoy.lb, path: [{ key: prefix-route-host }] }";
    let by_header = shipped().replace(metadata, "- header: X-Prefix-Route-Host");
    assert!(single_error(&by_header).contains("reads x-prefix-route-host, but"));
    let kept = by_header.replace("remove: true", "remove: false");
    assert_eq!(single(&kept).errors, Vec::<String>::new());
    let by_default = shipped().replace(", type: STRING", "");
    assert_eq!(single(&by_default).errors, Vec::<String>::new());
    // What another filter writes is not known.
    let lua = "          - name: lua\n            typed_config:\n              \
               \"@type\": type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua\n";
    let router = "          - name: envoy.filters.http.router\n";
    let lua = ordered(&[0, 2]).replacen(router, &format!("{lua}{router}"), 1);
    let finding = single(&lua);
    assert_eq!(finding.errors, Vec::<String>::new());
    assert!(finding.warnings[0].contains("copy header_to_metadata"));
    // Nothing is sent that could get lost.
    let observed = ordered(&[0, 2]).replace("\"hosts\": {", "\"mode\": \"observe\", \"hosts\": {");
    assert_eq!(single(&observed).errors, Vec::<String>::new());
}

#[test]
fn a_cluster_that_can_serve_no_pool_is_an_error() {
    check_error(
        "\"envoy_admin\"",
        "\"admin\"",
        "no cluster admin, so that pool engines learns",
    );
    let missing = shipped().replace("  - name: engines\n", "  - name: llm\n");
    let errors = single(&missing).errors;
    assert_eq!(
        errors,
        ["the file has no cluster engines, so that pool engines routes nothing"]
    );
    let managed = format!("dynamic_resources: {{ cds_config: {{ ads: {{}} }} }}\n{missing}");
    assert_eq!(single(&managed).errors, Vec::<String>::new());
    for kind in ["LOGICAL_DNS", "ORIGINAL_DST"] {
        let expected = format!("cluster engines is of type {kind}");
        let text = shipped().replacen("type: STATIC", &format!("type: {kind}"), 1);
        assert!(single_error(&text).starts_with(&expected));
    }
}

#[test]
fn a_default_pool_that_no_route_leads_to_is_an_error() {
    let route = "                  cluster: engines\n";
    let to = |way: &str| shipped().replace(route, &format!("                  {way}\n"));
    let error = single_error(&to("cluster: web"));
    assert!(
        error.contains("go to cluster web; expected engines"),
        "{error}"
    );
    for way in [
        "weighted_clusters: { clusters: [{ name: web, weight: 1 }, { name: engines, weight: 9 }] }",
        "cluster_header: x-a",
    ] {
        assert_eq!(single(&to(way)).errors, Vec::<String>::new(), "{way}");
    }
}

/// The shipped file with one more route, in front; the warnings it gives.
fn warnings_with(route: &str) -> Vec<String> {
    let routes = "              routes:\n              - match: { prefix: \"/\" }\n";
    let text = shipped();
    assert!(text.contains(routes));
    let (head, tail) = routes.split_at(routes.find("              - ").unwrap());
    let with = format!("{head}              - {route}\n{tail}");
    let finding = single(&text.replace(routes, &with));
    assert_eq!(finding.errors, Vec::<String>::new());
    finding.warnings
}

#[test]
fn warns_of_other_routes_whose_requests_the_filter_holds() {
    let off = "typed_per_filter_config: { prefix_router: { \"@type\": \
               type.googleapis.com/envoy.config.route.v3.FilterConfig, disabled: true } }";
    let web = "match: { prefix: /web }, route: { cluster: web }";
    let warnings = warnings_with(&format!("{{ {web} }}"));
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(
        warnings[0].starts_with("cluster web is in no pool"),
        "{warnings:?}"
    );
    assert!(warnings[0].ends_with(off), "{warnings:?}");
    for quiet in [
        format!("{web}, {off}"),
        web.replace(
            "/web",
            "/web, headers: [{ name: ':method', string_match: { exact: GET } }]",
        ),
        web.replace("cluster: web", "cluster: engines"),
        "match: { prefix: /web }, direct_response: { status: 404 }".into(),
    ] {
        let warnings = warnings_with(&format!("{{ {quiet} }}"));
        assert_eq!(warnings, Vec::<String>::new(), "{quiet}");
    }
}

#[test]
fn an_admin_that_the_filter_does_not_reach_is_an_error() {
    let admin = "/run/envoy/admin.sock, mode";
    let expected = "leads to /run/envoy/admin.sock, but the admin listens on /run/a.sock";
    check_error(admin, "/run/a.sock, mode", expected);
    let pipe = "{ pipe: { path: /run/envoy/admin.sock } }";
    let at = |ip: &str, port: u16| {
        format!("{{ socket_address: {{ address: {ip}, port_value: {port} }} }}")
    };
    check_error(pipe, &at("127.0.0.1", 9902), "leads to 127.0.0.1:9902, but");
    // A listener may hand on what is asked; an admin on all addresses is reached at any.
    let handed_on = shipped().replace(pipe, &at("127.0.0.1", 9901));
    assert_eq!(single(&handed_on).errors, Vec::<String>::new());
    let own = "{ pipe: { path: /run/envoy/admin.sock, mode: 384 } }";
    let open = shipped().replace(own, &at("0.0.0.0", 9902));
    let open = open.replace(pipe, &at("127.0.0.1", 9902));
    assert_eq!(single(&open).errors, Vec::<String>::new());
    let none = shipped().replace("\nadmin:", "\nnode2:");
    assert!(single(&none).warnings[0].contains("no admin.address"));
}

#[test]
fn an_admin_that_does_not_allow_the_filters_questions_is_an_error() {
    let allowing = |rules: &str| {
        shipped().replace(
            "\nadmin:\n",
            &format!("\nadmin:\n  allow_paths: [{rules}]\n"),
        )
    };
    // Envoy 1.40 answers 403 to /clusters?format=json if only /clusters is allowed exactly.
    for rules in [
        "{ prefix: /stats }",
        "{ exact: /clusters }",
        "{ suffix: /clusters }",
    ] {
        let error = single_error(&allowing(rules));
        assert!(error.contains("add { prefix: /clusters }"), "{error}");
    }
    for rules in [
        "",
        "{ exact: /ready }, { prefix: /clusters }",
        "{ prefix: /CLUSTERS, ignore_case: true }",
        "{ contains: format=json }",
        "{ safe_regex: { regex: '/clusters.*' } }",
    ] {
        let finding = single(&allowing(rules));
        assert_eq!(finding.errors, Vec::<String>::new(), "{rules}");
        assert_eq!(finding.warnings, Vec::<String>::new(), "{rules}");
    }
    let gauges = "    # track_cluster_stats";
    let text = allowing("{ prefix: /clusters }").replace(gauges, "    track_cluster_stats");
    assert!(single(&text).warnings[0].contains("add { prefix: /stats }"));
}
