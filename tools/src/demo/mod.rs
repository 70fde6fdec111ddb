//! `cargo demo`: engines and a real Envoy, with and without the filter, under the same load.
//!
//! Guarantee: every policy meets the same requests at the same times, on engines whose caches are
//! empty at first; no process outlives the demo. Not here: engines (engine/), the Envoy
//! (harness/), requests (load/, workload/), tables and plots (report/).

mod fleet;
mod round;
mod screen;
mod settings;

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};

use crate::page::{Board, HostState, Mode, Page, Stage};
use crate::report::{Report, page, table};
use crate::setup;
use fleet::Fleet;
use round::{Policy, Show};
use settings::Settings;

pub use settings::DemoArgs;

/// Runs the command.
///
/// # Errors
/// If something the demo needs is missing, or a run fails; the message says what to do.
pub fn run(args: &DemoArgs) -> anyhow::Result<()> {
    let settings = Settings::new(args)?;
    let ready = setup::ready()?;
    // One thread: the load must leave the processors to the engines and Envoy.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let report = tokio::select! {
            report = demo(&settings, &ready) => report?,
            name = interrupted() => {
                // The line of progress is not ended.
                eprintln!();
                anyhow::bail!("stopped by {name}; every process it started has ended")
            }
        };
        publish(&report, args.json)
    })
}

/// Waits for a signal that asks to end. What the demo has started ends when it is dropped.
pub(crate) async fn interrupted() -> &'static str {
    let kinds = [
        (SignalKind::interrupt(), "SIGINT"),
        (SignalKind::terminate(), "SIGTERM"),
        (SignalKind::hangup(), "SIGHUP"),
    ];
    let mut waiting = tokio::task::JoinSet::new();
    for (kind, name) in kinds {
        if let Ok(mut signal) = signal(kind) {
            waiting.spawn(async move {
                signal.recv().await;
                name
            });
        }
    }
    match waiting.join_next().await {
        Some(Ok(name)) => name,
        // No signal can be waited for: the system ends the process by itself.
        Some(Err(_)) | None => std::future::pending().await,
    }
}

async fn demo(settings: &Settings, ready: &setup::Ready) -> anyhow::Result<Report> {
    let began = Instant::now();
    let fleet = Fleet::start(settings, &folder()?).await?;
    let mut report = Report {
        conditions: settings.conditions(&ready.envoy_version),
        seed: settings.seed,
        commit: setup::commit(),
        runs: Vec::new(),
    };
    for line in report.conditions.iter().flat_map(|text| table::wrap(text)) {
        eprintln!("{line}");
    }
    let page = match settings.page {
        Some(address) => Some(show(address, settings, &fleet, &report).await?),
        None => None,
    };
    for (place, policy) in Policy::ALL.into_iter().enumerate() {
        let show = page.as_ref().map(|(board, _)| Show {
            board: Arc::clone(board),
            place,
        });
        let run = round::play(settings, &fleet, policy, show.as_ref()).await;
        report
            .runs
            .push(run.with_context(|| format!("policy {}", policy.name()))?);
    }
    let seconds = began.elapsed().as_secs();
    eprintln!("All of it took {} min {} s.\n", seconds / 60, seconds % 60);
    Ok(report)
}

/// Shows the rounds on a page while they run.
async fn show(
    address: SocketAddr,
    settings: &Settings,
    fleet: &Fleet,
    report: &Report,
) -> anyhow::Result<(Arc<Board>, Page)> {
    let mut about = vec![
        "The engines are simulated; Envoy, the filter and every request are real. One policy runs \
         after another, each from cold engines, with the same requests."
            .to_owned(),
    ];
    about.extend(report.conditions.first().cloned());
    let board = Board::new(Mode::Rounds, about);
    let hosts = fleet.addresses.iter();
    let hosts: Vec<_> = hosts
        .map(|address| (address.to_string(), HostState::Up))
        .collect();
    for policy in Policy::ALL {
        let ours = policy == Policy::PrefixRouter;
        let title = if ours {
            "Envoy with prefix-router".to_owned()
        } else {
            format!("Envoy alone: {}", policy.name())
        };
        let place = board.add_fleet(&title, ours, &hosts);
        board.set_stage(place, Stage::Waiting, settings.speed);
    }
    let page = Page::serve(Arc::clone(&board), address, None).await?;
    eprintln!("Live page while this runs: {}\n", page.url());
    Ok((board, page))
}

fn publish(report: &Report, json: bool) -> anyhow::Result<()> {
    let path = folder()?.join("report.html");
    std::fs::write(&path, page::render(report)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    let text = if json {
        report.json()? + "\n"
    } else {
        table::render(report)
    };
    std::io::stdout().write_all(text.as_bytes())?;
    eprintln!("\nPlots: {}", path.display());
    Ok(())
}

/// `target/demo`, where the report and the engines' logs go.
fn folder() -> anyhow::Result<PathBuf> {
    let root = setup::root()?;
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let folder = root.join(target).join("demo");
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    Ok(folder)
}
