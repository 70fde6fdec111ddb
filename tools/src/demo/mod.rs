//! `cargo demo`: engines and a real Envoy, with and without the filter, under the same load.
//!
//! Guarantee: every policy meets the same requests at the same times, on engines whose caches are
//! empty at first; no process outlives the demo. Not here: engines (engine/), the Envoy
//! (round/, harness/), requests (load/, workload/), tables and plots (report/).

mod settings;

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::page::{Board, HostState, Mode, Page, Stage};
use crate::report::{Report, Run, page, table};
use crate::round::fleet::{self, Fleet};
use crate::round::{Model, Policy, Round, Setup, Show, Stretch, interrupted};
use crate::setup;
use crate::workload::Form;
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

async fn demo(settings: &Settings, ready: &setup::Ready) -> anyhow::Result<Report> {
    let began = Instant::now();
    if settings.port != 0 {
        fleet::free(&(Ipv4Addr::LOCALHOST, settings.port).into(), "--port")?;
    }
    let logs = setup::results("demo")?;
    let fleet = Fleet::start(&settings.engine_ports, settings.kv_tokens, &logs).await?;
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
        let run = play(settings, &fleet, policy, show).await;
        report
            .runs
            .push(run.with_context(|| format!("policy {}", policy.name()))?);
    }
    let seconds = began.elapsed().as_secs();
    eprintln!("All of it took {} min {} s.\n", seconds / 60, seconds % 60);
    Ok(report)
}

/// Runs one policy.
async fn play(
    settings: &Settings,
    fleet: &Fleet,
    policy: Policy,
    show: Option<Show>,
) -> anyhow::Result<Run> {
    let setup = Setup {
        file: "envoy/envoy.yaml",
        without_filter: |plan| plan,
        gateways: 1,
        port: settings.port,
        form: Form::Chat,
        stream: true,
        models: vec![Model::plain("sim", "engines")],
    };
    let round = Round::open(&setup, fleet, policy, show).await?;
    let mut driver = round.driver(settings.plan.open()?);
    if settings.warmup > 0 {
        round
            .warm_up(&mut driver, settings.warmup, settings.warmup_speed)
            .await?;
    }
    let stretch = Stretch {
        title: "measuring",
        speed: settings.speed,
        settle: Duration::ZERO,
        window: settings.window,
        until: settings.until,
    };
    let run = round.measure(&mut driver, &stretch).await?;
    round.close().await?;
    Ok(run)
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
    let path = setup::results("demo")?.join("report.html");
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
