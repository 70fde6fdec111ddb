//! Proves in a short soak that no request is lost and no counter leaks, whatever ends the requests,
//! and that the hook which makes VMs panic is not in the filter that ships. The long form is
//! `cargo pr soak`.

#![allow(clippy::unwrap_used)]

use tools::setup;
use tools::soak::{SoakArgs, soak};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_and_counters_end_at_zero_whatever_ends_the_requests() {
    let args = SoakArgs {
        requests: 5000,
        workers: 2,
        engines: 4,
        clients: 32,
        panics: 2,
        limit: 6,
        seed: 7,
        compare: false,
        json: false,
    };
    let report = soak(&args).await.unwrap();
    println!("{report}");
    assert!(
        report.faults().is_empty(),
        "{:?}\n{report}",
        report.faults()
    );
    assert!(report.diverted > 0, "the limit was never reached");
    assert!(report.crashes > 0);
    let meant: u64 = report.endings.values().map(|count| count.meant).sum();
    assert!(
        meant > args.requests * 8 / 10,
        "the trouble met too many requests: {report}"
    );
}

#[test]
fn the_filter_that_ships_has_no_hook_to_panic() {
    const HOOK: &[u8] = b"x-prefix-router-panic";
    let has_hook = |wasm: &std::path::Path| {
        let bytes = std::fs::read(wasm).unwrap();
        bytes.windows(HOOK.len()).any(|window| window == HOOK)
    };
    assert!(
        has_hook(&setup::ready_with_test_hooks().unwrap().wasm),
        "the hook has another name"
    );
    assert!(
        !has_hook(&setup::ready().unwrap().wasm),
        "the hook is in the release build"
    );
}
