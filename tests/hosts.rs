//! Proves what is made of Envoy's answers about its hosts, and of addresses.

#![allow(clippy::unwrap_used)]

use prefix_router::hosts::{AdminSource, HostReport, HostsError, State, canonical, clusters_path};

/// The answer of an Envoy 1.40.0 with hosts in every state that a file can put them in.
const ANSWER: &str = include_str!("hosts/clusters.json");

fn report(address: &str, state: State) -> HostReport {
    HostReport {
        address: address.into(),
        state,
        degraded: state == State::Degraded,
        weight: 1,
        zone: String::new(),
        active: Some(0),
    }
}

/// What an answer says of one cluster.
fn parse(bytes: &[u8], cluster: &str) -> Result<Vec<HostReport>, HostsError> {
    prefix_router::hosts::parse_clusters(bytes, &[cluster])?.remove(0)
}

#[test]
fn reads_every_host_of_the_cluster_and_of_no_other() {
    // Two of six are healthy: they take 46 % and leave the degraded one 23 %, an even share.
    let usable = |address: &str| HostReport {
        weight: 100,
        ..report(address, State::Usable)
    };
    let heavy = HostReport {
        weight: 300,
        ..usable("10.0.0.1:8000")
    };
    let degraded = HostReport {
        degraded: true,
        ..usable("10.0.0.4:8000")
    };
    let mut expected = vec![
        heavy,
        report("10.0.0.2:8000", State::Draining),
        report("10.0.0.3:8000", State::Failed),
        degraded,
        report("10.0.0.5:8000", State::Failed),
        report("10.1.0.1:8000", State::Standby),
        usable("[fd00::1]:8000"),
    ];
    for (place, host) in expected.iter_mut().enumerate() {
        host.zone = if place == 5 { "z\"2" } else { "z1" }.into();
    }
    assert_eq!(parse(ANSWER.as_bytes(), "engines"), Ok(expected));
    let mesh = parse(ANSWER.as_bytes(), "outbound|8000||engines.default");
    assert_eq!(mesh, Ok(vec![report("127.0.0.1:1", State::Usable)]));
    let checked = parse(ANSWER.as_bytes(), "checked");
    assert_eq!(checked, Ok(vec![report("127.0.0.1:2", State::Failed)]));
}

#[test]
fn a_cluster_without_addresses_has_no_hosts_and_an_unknown_one_is_an_error() {
    assert_eq!(parse(ANSWER.as_bytes(), "empty"), Ok(vec![]));
    assert_eq!(parse(ANSWER.as_bytes(), "pipes"), Ok(vec![]));
    let unknown = parse(ANSWER.as_bytes(), "engine");
    assert_eq!(unknown, Err(HostsError::NoCluster));
    assert_eq!(parse(b"{}", "engines"), Err(HostsError::NoCluster));
}

#[test]
fn an_answer_that_is_cut_off_at_any_byte_is_an_error_or_no_cluster() {
    for end in 0..ANSWER.trim_end().len() {
        let cut = &ANSWER.as_bytes()[..end];
        assert!(parse(cut, "engines").is_err(), "cut at {end}");
    }
}

/// The state of a host with this `health_status`.
#[track_caller]
fn check_health(health_status: &str, expected: State) {
    let text = format!(
        r#"{{"cluster_statuses": [{{"name": "c", "host_statuses": [{{
            "address": {{"socket_address": {{"address": "10.0.0.1", "port_value": 1}}}},
            "health_status": {{{health_status}}}
        }}]}}]}}"#
    );
    let found = parse(text.as_bytes(), "c").unwrap();
    assert_eq!(
        found,
        vec![report("10.0.0.1:1", expected)],
        "{health_status}"
    );
}

#[test]
fn every_flag_of_envoy_counts() {
    check_health("", State::Usable);
    check_health(r#""eds_health_status": "HEALTHY""#, State::Usable);
    check_health(r#""eds_health_status": "UNKNOWN""#, State::Usable);
    check_health(r#""eds_health_status": "DRAINING""#, State::Draining);
    check_health(r#""pending_dynamic_removal": true"#, State::Draining);
    check_health(r#""eds_health_status": "UNHEALTHY""#, State::Failed);
    check_health(r#""eds_health_status": "TIMEOUT""#, State::Failed);
    for flag in [
        "failed_active_health_check",
        "failed_outlier_check",
        "pending_active_hc",
        "excluded_via_immediate_hc_fail",
        "active_hc_timeout",
    ] {
        check_health(&format!(r#""{flag}": true"#), State::Failed);
        check_health(
            &format!(r#""eds_health_status": "DEGRADED", "{flag}": true"#),
            State::Failed,
        );
    }
}

#[test]
fn an_address_that_is_listed_twice_is_one_host_and_the_usable_one_wins() {
    let host = |active: u32, health: &str| {
        format!(
            r#"{{"address": {{"socket_address": {{"address": "10.0.0.1", "port_value": 1}}}},
                "stats": [{{"name": "cx_active", "value": "9"}},
                          {{"type": "GAUGE", "name": "rq_active", "value": "{active}"}}],
                "health_status": {{{health}}}}}"#
        )
    };
    let (old, new) = (host(3, r#""pending_dynamic_removal": true"#), host(2, ""));
    for hosts in [format!("{old}, {new}"), format!("{new}, {old}")] {
        let text =
            format!(r#"{{"cluster_statuses": [{{"name": "c", "host_statuses": [{hosts}]}}]}}"#);
        let expected = HostReport {
            active: Some(5),
            ..report("10.0.0.1:1", State::Usable)
        };
        assert_eq!(parse(text.as_bytes(), "c"), Ok(vec![expected]));
    }
}

#[test]
fn a_cluster_name_is_asked_for_as_it_is() {
    assert_eq!(
        clusters_path(&["my_engines-2"]),
        "/clusters?format=json&filter=%5Emy_engines-2%24"
    );
    assert_eq!(
        clusters_path(&["outbound|80||a.b"]),
        "/clusters?format=json&filter=%5Eoutbound%5C%7C80%5C%7C%5C%7Ca%5C%2Eb%24"
    );
}

#[test]
fn several_clusters_are_asked_for_at_once_and_one_that_is_missing_harms_no_other() {
    assert_eq!(
        clusters_path(&["a", "b.c"]),
        "/clusters?format=json&filter=%5E(a%7Cb%5C%2Ec)%24"
    );
    let long = "|".repeat(256);
    let many: Vec<&str> = vec![&long; 64];
    assert_eq!(clusters_path(&many), "/clusters?format=json");
    let mut source = AdminSource::new(["empty", "engine", "engines"]);
    source.ask(0);
    let found = source.answer(ANSWER.as_bytes()).unwrap();
    assert_eq!(found[0], Ok(vec![]));
    assert_eq!(found[1], Err(HostsError::NoCluster));
    assert_eq!(found[2], parse(ANSWER.as_bytes(), "engines"));
}

#[test]
fn large_clusters_are_asked_for_their_gauges_at_once() {
    let mut source = AdminSource::new(["a:b", "c"]);
    source.ask(0);
    let both = list(300, 0).replacen('[', r#"[{"name":"c","host_statuses":[]},"#, 1);
    source.answer(both.as_bytes()).unwrap();
    assert_eq!(
        source.ask(500),
        "/stats?filter=%5Ecluster%5C.(a_b%7Cc)%5C.endpoint%5C..*%5C.(healthy%7Crq_active)%24"
    );
    let found = source.answer(gauges(300, 2).as_bytes()).unwrap();
    assert_eq!(failed(found[0].as_ref().unwrap()), 2);
    assert_eq!(found[1], Ok(vec![]));
}

#[test]
fn addresses_have_one_form() {
    let check = |given, expected: Option<&str>| {
        assert_eq!(canonical(given).as_deref(), expected, "{given}");
    };
    check("10.0.0.1:8000", Some("10.0.0.1:8000"));
    check("[FD00:0:0::1]:8000", Some("[fd00::1]:8000"));
    check("[0:0:0:0:0:0:0:1]:1", Some("[::1]:1"));
    for refused in [
        "",
        "10.0.0.1",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "::1:80",
        "a:80",
        "010.0.0.1:80",
    ] {
        check(refused, None);
    }
}

#[test]
fn only_the_best_priority_with_a_usable_host_counts() {
    // health of priorities 0, 1, 2 | their states
    let (usable, degraded, draining, failed) = ("HEALTHY", "DEGRADED", "DRAINING", "UNHEALTHY");
    let standby = State::Standby;
    let rows = [
        ([usable, usable, usable], [State::Usable, standby, standby]),
        (
            [degraded, usable, usable],
            [State::Degraded, State::Usable, standby],
        ),
        (
            [failed, degraded, degraded],
            [State::Failed, State::Usable, State::Degraded],
        ),
        (
            [failed, usable, usable],
            [State::Failed, State::Usable, standby],
        ),
        (
            [failed, draining, usable],
            [State::Failed, State::Draining, State::Usable],
        ),
        ([failed, failed, failed], [State::Failed; 3]),
    ];
    for (health, expected) in rows {
        let host = |(priority, health): (usize, &str)| {
            format!(
                r#"{{"address": {{"socket_address": {{"address": "10.0.0.{priority}",
                     "port_value": 1}}}}, "priority": {priority},
                     "health_status": {{"eds_health_status": "{health}"}}}}"#
            )
        };
        let hosts: Vec<_> = health.into_iter().enumerate().map(host).collect();
        let text = format!(
            r#"{{"cluster_statuses": [{{"name": "c", "host_statuses": [{}]}}]}}"#,
            hosts.join(", ")
        );
        let reports = parse(text.as_bytes(), "c").unwrap();
        let states: Vec<_> = reports.into_iter().map(|report| report.state).collect();
        assert_eq!(states, expected);
    }
}

/// The hosts of one cluster by their health → their states and weights.
#[track_caller]
fn check_degraded(health: &str, expected: &str) {
    let host = |(n, health): (usize, &str)| {
        let health = match health {
            "h" => r#""eds_health_status": "HEALTHY""#,
            "d" => r#""eds_health_status": "DEGRADED""#,
            "a" => r#""failed_active_degraded_check": true"#,
            _ => r#""failed_active_health_check": true"#,
        };
        format!(
            r#"{{"address": {{"socket_address": {{"address": "10.0.0.{n}", "port_value": 1}}}},
                "health_status": {{{health}}}}}"#
        )
    };
    let hosts: Vec<_> = health.split(' ').enumerate().map(host).collect();
    let hosts = hosts.join(", ");
    let text = format!(r#"{{"cluster_statuses": [{{"name": "c", "host_statuses": [{hosts}]}}]}}"#);
    let reports = parse(text.as_bytes(), "c").unwrap().into_iter();
    let found: Vec<_> = reports
        .map(|host| format!("{} {}", host.state.label(), host.weight))
        .collect();
    assert_eq!(found.join(", "), expected, "{health}");
}

#[test]
fn a_degraded_host_gets_what_envoy_would_give_it() {
    // Envoy: 3 of 4 healthy take all, 1 of 4 takes 35 % and the three degraded 65 %.
    check_degraded("h h h d", "usable 1, usable 1, usable 1, degraded 1");
    check_degraded("h h h a", "usable 1, usable 1, usable 1, degraded 1");
    check_degraded("h d d d", "usable 100, usable 61, usable 61, usable 61");
    check_degraded("h h d d", "usable 100, usable 100, usable 42, usable 42");
    check_degraded("d d", "usable 1, usable 1");
    // None is healthy: they share all.
    check_degraded("d f", "usable 1, failed 1");
    // What has failed does not help: the healthy one takes 35 %, the degraded one as much.
    check_degraded("h d f f", "usable 100, usable 100, failed 1, failed 1");
}

/// The list of `count` hosts, of which the first `failed` fail their checks.
fn list(count: usize, failed: usize) -> String {
    let host = |n: usize| {
        let health = match n < failed {
            true => r#""failed_active_health_check": true"#,
            false => "",
        };
        format!(
            r#"{{"address": {{"socket_address": {{"address": "10.0.{}.{}", "port_value": 8000}}}},
                "health_status": {{{health}}}}}"#,
            n / 250,
            n % 250
        )
    };
    let hosts: Vec<_> = (0..count).map(host).collect();
    format!(
        r#"{{"cluster_statuses": [{{"name": "a:b", "host_statuses": [{}]}}]}}"#,
        hosts.join(",")
    )
}

/// The gauges of the same hosts, each with its number as its requests.
fn gauges(count: usize, failed: usize) -> String {
    let host = |n: usize| {
        let name = format!("cluster.a_b.endpoint.10.0.{}.{}_8000", n / 250, n % 250);
        let healthy = u32::from(n >= failed);
        format!("{name}.rq_active: {n}\n{name}.healthy: {healthy}\n")
    };
    (0..count).map(host).collect()
}

/// The hosts of the only cluster.
#[track_caller]
fn only(answer: Result<Vec<Result<Vec<HostReport>, HostsError>>, HostsError>) -> Vec<HostReport> {
    answer.unwrap().remove(0).unwrap()
}

fn is_list(path: &str) -> bool {
    path.starts_with("/clusters?")
}

fn failed(reports: &[HostReport]) -> usize {
    let failed = reports
        .iter()
        .filter(|report| report.state == State::Failed);
    failed.count()
}

#[test]
fn a_small_cluster_is_always_listed() {
    let mut source = AdminSource::new(["a:b"]);
    for now_ms in [0, 500, 1000] {
        assert!(is_list(&source.ask(now_ms)));
        let reports = only(source.answer(list(200, 7).as_bytes()));
        assert_eq!((reports.len(), failed(&reports)), (200, 7));
    }
}

#[test]
fn a_large_cluster_is_listed_now_and_then_and_when_its_gauges_change() {
    let mut source = AdminSource::new(["a:b"]);
    assert!(is_list(&source.ask(0)));
    only(source.answer(list(500, 7).as_bytes()));

    let path = source.ask(500);
    assert_eq!(
        path,
        "/stats?filter=%5Ecluster%5C.a_b%5C.endpoint%5C..*%5C.(healthy%7Crq_active)%24"
    );
    let reports = only(source.answer(gauges(500, 7).as_bytes()));
    assert_eq!((reports.len(), failed(&reports)), (500, 7));
    let last = reports
        .iter()
        .find(|report| report.address == "10.0.1.249:8000");
    assert_eq!(last.unwrap().active, Some(499));

    // A host fails: known at once, and the list is asked for more.
    assert!(!is_list(&source.ask(1000)));
    assert_eq!(failed(&only(source.answer(gauges(500, 8).as_bytes()))), 8);
    assert!(is_list(&source.ask(1500)));
    only(source.answer(list(500, 8).as_bytes()));

    // It recovers, and one is gone: what recovers is usable as soon as the list says so.
    assert!(!is_list(&source.ask(2000)));
    assert_eq!(failed(&only(source.answer(gauges(499, 7).as_bytes()))), 9);
    assert!(is_list(&source.ask(2500)));
    only(source.answer(list(499, 7).as_bytes()));

    assert!(!is_list(&source.ask(12_499)));
    only(source.answer(gauges(499, 7).as_bytes()));
    assert!(is_list(&source.ask(12_500)));
}

#[test]
fn a_host_that_recovers_in_a_large_cluster_is_failed_until_the_list_tells_its_priority() {
    let mut source = AdminSource::new(["a:b"]);
    let second = r#""priority": 1, "health_status""#;
    let listed = |failed| list(300, failed).replacen(r#""health_status""#, second, 1);
    source.ask(0);
    only(source.answer(listed(1).as_bytes()));
    assert!(!is_list(&source.ask(500)));
    let reports = only(source.answer(gauges(300, 0).as_bytes()));
    assert_eq!(failed(&reports), 1);
    assert!(is_list(&source.ask(1000)));
    let reports = only(source.answer(listed(0).as_bytes()));
    let standby = |report: &&HostReport| report.state == State::Standby;
    assert_eq!(reports.iter().filter(standby).count(), 1);
    // While it stays well, nothing is asked for.
    assert!(!is_list(&source.ask(1500)));
    only(source.answer(gauges(300, 0).as_bytes()));
    assert!(!is_list(&source.ask(2000)));
}

#[test]
fn with_the_clock_set_back_a_large_cluster_is_listed_as_often_as_ever() {
    let mut source = AdminSource::new(["a:b"]);
    source.ask(1_000_000_000);
    only(source.answer(list(300, 0).as_bytes()));
    assert!(is_list(&source.ask(1000)));
    only(source.answer(list(300, 0).as_bytes()));
    assert!(!is_list(&source.ask(10_999)));
    only(source.answer(gauges(300, 0).as_bytes()));
    assert!(is_list(&source.ask(11_000)));
}

#[test]
fn without_gauges_a_large_cluster_is_listed_always() {
    let mut source = AdminSource::new(["a:b"]);
    source.ask(0);
    only(source.answer(list(300, 0).as_bytes()));
    assert!(!is_list(&source.ask(500)));
    assert_eq!(only(source.answer(b"")).len(), 300);
    assert!(is_list(&source.ask(1000)));
    only(source.answer(list(300, 0).as_bytes()));
    assert!(is_list(&source.ask(1500)));
}

#[test]
fn an_answer_that_cannot_be_read_leaves_what_was_known() {
    let mut source = AdminSource::new(["a:b"]);
    source.ask(0);
    only(source.answer(list(300, 0).as_bytes()));
    source.ask(500);
    assert!(source.answer(b"\xff").is_err());
    assert!(!is_list(&source.ask(1000)));
    assert_eq!(only(source.answer(gauges(300, 0).as_bytes())).len(), 300);
}
