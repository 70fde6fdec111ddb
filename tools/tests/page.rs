//! Proves in a real Chromium that the live page shows what happens, that everybody can use it, and
//! that each of its controls is carried out, in the page's own figures. What takes caches minutes to
//! show is asked for by .ci/compose-check. Without a Chromium on the `PATH` it says that
//! it was skipped.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::BufRead as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tools::testkit::{Browser, Tab, skipped};

/// Most effects are there at once; caches take a moment to fill on a busy machine.
const SOON: Duration = Duration::from_secs(20);
const LATER: Duration = Duration::from_secs(90);

/// The fleets as the page numbers them.
const WITH: &str = "latest.fleets[1]";
const WITHOUT: &str = "latest.fleets[0]";

/// A running `prefix-router live`; ends with its value.
struct Live {
    child: Child,
    url: String,
}

impl Live {
    fn start(engine_port: u16) -> Self {
        let port = engine_port.to_string();
        let mut child = Command::new(env!("CARGO_BIN_EXE_prefix-router"))
            .args(["live", "--page", "127.0.0.1:0", "--seconds", "900"])
            // A third of the usual everything: engines that were built for tests are slow.
            .args(["--rate", "6", "--prompts", "70", "--kv-tokens", "40000"])
            .args(["--engine-port", &port])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("Live page: ").unwrap().to_owned();
        Self { child, url }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The browser, or why there is nothing to test.
fn chromium() -> Option<PathBuf> {
    let found = Browser::find();
    if found.is_none() {
        skipped("no Chromium on the PATH; `apt-get install chromium` brings one");
    }
    found
}

/// Waits until an expression of the page is true, and says how long it took.
#[expect(
    clippy::print_stdout,
    reason = "the test runner keeps it for a failure"
)]
async fn wait(tab: &Tab, what: &str, expression: &str, limit: Duration) {
    let began = Instant::now();
    loop {
        // Before the first frame there is nothing to ask about.
        if let Ok(Value::Bool(true)) = tab.eval(expression).await {
            println!("{what}: after {:.1} s", began.elapsed().as_secs_f64());
            return;
        }
        assert!(
            began.elapsed() < limit,
            "{what}: not after {} s: {expression}\n{:?}",
            limit.as_secs(),
            tab.eval("JSON.stringify(latest)").await
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn number(tab: &Tab, expression: &str) -> f64 {
    let value = tab.eval(expression).await.unwrap();
    value
        .as_f64()
        .unwrap_or_else(|| panic!("{expression} is {value}"))
}

/// Chooses a value as a person does, so that the page hears of it.
async fn choose(tab: &Tab, id: &str, value: &str) {
    let script = format!(
        "{{ const one = document.getElementById('{id}'); one.value = '{value}'; \
         if (one.value !== '{value}') throw '{id} has no {value}'; \
         one.dispatchEvent(new Event('change')); one.blur(); }}"
    );
    tab.eval(&script).await.unwrap();
}

async fn click(tab: &Tab, selector: &str) {
    let script = format!("document.querySelector('{selector}').click()");
    tab.eval(&script).await.unwrap();
}

async fn on_host(tab: &Tab, host: u32, action: &str) {
    choose(tab, "host", &host.to_string()).await;
    click(tab, &format!("[data-host-do={action}]")).await;
}

/// A page on a pair of fleets of its own, and what keeps it open.
async fn open(program: &Path, engine_port: u16) -> (Live, Browser, Tab) {
    let live = Live::start(engine_port);
    let browser = Browser::start(program).await.unwrap();
    let tab = browser.open(&live.url, 1280, 800, false).await.unwrap();
    loads_and_moves(&tab).await;
    (live, browser, tab)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_shows_what_happens_and_can_be_used_by_everybody() {
    let Some(program) = chromium() else { return };
    let (live, browser, tab) = open(&program, 19_501).await;
    fits_and_can_be_read(&tab, &browser, &live.url).await;
    a_viral_prompt_spreads(&tab).await;
    unique_prompts_miss(&tab).await;
    hosts_die_drain_and_come(&tab).await;
    limit_opponent_and_load_change(&tab).await;
    assert_eq!(tab.problems(), Vec::<String>::new());
}

async fn loads_and_moves(tab: &Tab) {
    let warm =
        format!("{WITH}.figures.hits > 0.6 && {WITH}.figures.hits > 2 * {WITHOUT}.figures.hits");
    wait(
        tab,
        "hits with the filter are more than twice those without",
        &warm,
        LATER,
    )
    .await;
    let faster = format!("{WITH}.figures.p50 < 0.6 * {WITHOUT}.figures.p50");
    wait(
        tab,
        "the first token comes sooner with the filter",
        &faster,
        SOON,
    )
    .await;
    let shown = "document.querySelectorAll('[data-figure=hits]')[1].textContent";
    let same = format!("{shown} === Math.round({WITH}.figures.hits * 100) + ' %'");
    wait(tab, "the figure on the page is the frame's", &same, SOON).await;
    let before = tab
        .eval("JSON.stringify(latest.fleets.map((one) => one.hosts))")
        .await
        .unwrap();
    let moved = format!("JSON.stringify(latest.fleets.map((one) => one.hosts)) !== {before:?}");
    wait(tab, "requests come and go", &moved, SOON).await;
    wait(
        tab,
        "curves are drawn",
        "charts[0].plot.data[0].length > 5",
        SOON,
    )
    .await;
    let home = format!(
        "{WITH}.decisions.home > 50 && document.querySelector('[data-decision=home]') !== null"
    );
    wait(tab, "decisions are counted", &home, SOON).await;
    assert_eq!(tab.problems(), Vec::<String>::new());
}

/// No sideways scrolling, a name for everything that can be used, and no mouse needed.
async fn fits_and_can_be_read(tab: &Tab, browser: &Browser, url: &str) {
    let narrow = browser.open(url, 390, 844, true).await.unwrap();
    wait(
        &narrow,
        "the narrow page is there",
        "latest !== null && charts !== null",
        SOON,
    )
    .await;
    for one in [tab, &narrow] {
        let wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth";
        assert_eq!(number(one, wide).await, 0.0);
    }
    let paper = "getComputedStyle(document.body).backgroundColor";
    assert_ne!(
        tab.eval(paper).await.unwrap(),
        narrow.eval(paper).await.unwrap()
    );
    for (one, width) in [(tab, "wide"), (&narrow, "narrow")] {
        pictures(one, width).await;
    }
    let accessible = tab.accessible().await.unwrap();
    let usable: Vec<_> = accessible
        .iter()
        .filter(|(role, _)| ["button", "combobox", "link"].contains(&role.as_str()))
        .collect();
    assert!(usable.len() >= 11, "{usable:?}");
    assert!(
        usable.iter().all(|(_, name)| !name.is_empty()),
        "{usable:?}"
    );
    // Keys alone: the link past the fleets, the first control, which is then pressed twice.
    tab.eval("document.body.focus()").await.unwrap();
    tab.press("Tab", 9).await.unwrap();
    tab.press("Tab", 9).await.unwrap();
    assert_eq!(
        tab.eval("document.activeElement.id").await.unwrap(),
        "viral"
    );
    let ring = "getComputedStyle(document.activeElement).outlineStyle";
    assert_eq!(tab.eval(ring).await.unwrap(), "solid");
    for on in ["true", "false"] {
        tab.press("Enter", 13).await.unwrap();
        let pressed = format!("document.getElementById('viral').ariaPressed === '{on}'");
        wait(tab, "a key presses the button", &pressed, SOON).await;
    }
}

/// For people to look at: what no assertion sees is ugly or unclear.
#[expect(
    clippy::print_stdout,
    reason = "the test runner keeps it for a failure"
)]
async fn pictures(tab: &Tab, width: &str) {
    for (dark, paper) in [(true, "dark"), (false, "light")] {
        tab.set_dark(dark).await.unwrap();
        // Curves take their colours from the page with the next frame.
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let name = format!("page-{width}-{paper}.png");
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        tab.screenshot(&file).await.unwrap();
        println!("picture: {}", file.display());
    }
}

async fn a_viral_prompt_spreads(tab: &Tab) {
    let viral = "one.running.some((it) => it[1] === latest.controls.viral_prefix)";
    let hosts = format!("{WITH}.hosts.filter((one) => {viral}).length");
    wait(
        tab,
        "nothing is viral yet",
        &format!("{hosts} === 0"),
        LATER,
    )
    .await;
    let p99 = format!("{WITH}.figures.p99");
    let before = number(tab, &p99).await;
    click(tab, "#viral").await;
    let spread = format!("{hosts} >= 3");
    wait(
        tab,
        "the viral prompt is on three hosts at once",
        &spread,
        LATER,
    )
    .await;
    // Figures are about the last ten seconds.
    tab.eval("globalThis.since = performance.now()")
        .await
        .unwrap();
    let calm = format!("performance.now() - since > 10000 && {p99} <= 2 * {before}");
    wait(
        tab,
        "the slowest 1 % wait no more than twice as long",
        &calm,
        LATER,
    )
    .await;
    let same = format!("{WITH}.figures.hits > 0.6");
    wait(tab, "hits stay", &same, SOON).await;
    click(tab, "#viral").await;
}

async fn unique_prompts_miss(tab: &Tab) {
    click(tab, "#unique").await;
    let none = "latest.fleets.every((one) => one.figures.hits < 0.05)";
    wait(
        tab,
        "prompts that nobody shares are in no cache",
        none,
        LATER,
    )
    .await;
    click(tab, "#unique").await;
}

async fn hosts_die_drain_and_come(tab: &Tab) {
    let every = |what: &str| format!("latest.fleets.every((one) => {what})");
    let prompts = format!("{WITH}.hosts[1].prompts");
    let before = number(tab, &prompts).await;
    assert!(before > 4.0, "{before} prompts");
    on_host(tab, 1, "kill").await;
    let dead = every("one.hosts[1].state === 'killed' && one.hosts[1].in_flight === 0");
    wait(tab, "a killed host has nothing in flight", &dead, SOON).await;
    let fine = every("one.figures.failed === 0");
    wait(tab, "nothing fails any more", &fine, LATER).await;
    on_host(tab, 1, "restart").await;
    let up = every("one.hosts[1].state === 'up'");
    wait(tab, "a restarted host is back", &up, SOON).await;
    let back = format!("{prompts} >= {before} / 2");
    wait(tab, "with its prompts", &back, LATER).await;
    on_host(tab, 2, "drain").await;
    let empty = every("one.hosts[2].state === 'draining' && one.hosts[2].in_flight === 0");
    wait(tab, "a draining host empties", &empty, LATER).await;
    click(tab, "#add").await;
    let added = every("one.hosts.length === 8 && one.hosts[7].state === 'up'");
    wait(tab, "an added host is there", &added, SOON).await;
    let shown = "document.querySelectorAll('.hosts tbody tr').length === 16";
    wait(tab, "and shown", shown, SOON).await;
}

async fn limit_opponent_and_load_change(tab: &Tab) {
    choose(tab, "limit", "2").await;
    wait(tab, "another limit", &format!("{WITH}.limit === 2"), SOON).await;
    choose(tab, "opponent", "ring_hash").await;
    let title = "document.querySelector('#fleet-0').textContent.includes('ring_hash')";
    wait(tab, "another opponent", title, SOON).await;
    choose(tab, "rate", "1").await;
    let less = "latest.fleets.every((one) => one.figures.rate < 3)";
    wait(tab, "fewer requests", less, LATER).await;
}
