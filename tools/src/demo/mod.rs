//! `cargo demo`: engines and a real Envoy, with and without the filter, under the same load.
//!
//! Guarantee: every policy meets the same requests at the same times, on engines whose caches are
//! empty at first; no process outlives the demo. Not here: engines (engine/), the Envoy
//! (round/, harness/), requests (load/, workload/), tables and plots (report/).

mod real;
mod settings;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::page::{Board, HostState, Mode, Page, Stage};
use crate::print::note;
use crate::real::llama::{Llama, Sizes};
use crate::report::{Report, Run, page, table};
use crate::round::fleet::{self, Fleet, Kind};
use crate::round::{Model, Policy, Round, Setup, Show, Stretch, interrupted};
use crate::setup;
use crate::workload::Form;
use settings::{EngineKind, Places, Settings};

pub use settings::DemoArgs;

/// What will be run.
enum Demo {
    Simulated(Settings),
    Real(real::Settings),
}

/// Runs the command.
///
/// # Errors
/// If something the demo needs is missing, or a run fails; the message says what to do.
pub fn run(args: &DemoArgs) -> anyhow::Result<()> {
    let demo = match args.engine {
        EngineKind::Simulated => Demo::Simulated(Settings::new(args)?),
        EngineKind::LlamaCpp => Demo::Real(real::Settings::new(args)?),
    };
    let ready = setup::ready()?;
    let engines = demo.engines()?;
    // One thread: the load must leave the processors to the engines and Envoy.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let report = tokio::select! {
            report = play(&demo, args.workload.seed, engines, &ready) => report?,
            name = interrupted() => {
                // The line of progress is not ended.
                note!();
                anyhow::bail!("stopped by {name}; every process it started has ended")
            }
        };
        publish(&demo, &report, args.json)
    })
}

impl Demo {
    fn places(&self) -> &Places {
        match self {
            Self::Simulated(settings) => &settings.places,
            Self::Real(settings) => &settings.places,
        }
    }

    /// The engines to be started; real ones may have to be fetched.
    fn engines(&self) -> anyhow::Result<Kind> {
        match self {
            Self::Simulated(settings) => Kind::simulated(settings.kv_tokens),
            Self::Real(_) => Ok(Llama::ready()?.kind(Sizes::DEMO)),
        }
    }

    fn conditions(&self, envoy_version: &str) -> Vec<String> {
        match self {
            Self::Simulated(settings) => settings.conditions(envoy_version),
            Self::Real(settings) => settings.conditions(envoy_version),
        }
    }

    /// What engines these are, for titles.
    fn engines_name(&self) -> &'static str {
        match self {
            Self::Simulated(_) => "simulated engines",
            Self::Real(_) => "real llama.cpp engines",
        }
    }

    /// The report's file: one kind of engines never overwrites what was measured on the other.
    fn page_file(&self) -> &'static str {
        match self {
            Self::Simulated(_) => "report.html",
            Self::Real(_) => "report-llama.cpp.html",
        }
    }

    /// What is real about it, for the page.
    fn about(&self) -> &'static str {
        match self {
            Self::Simulated(_) => {
                "The engines are simulated; Envoy, the filter and every request are real."
            }
            Self::Real(_) => {
                "Everything is real; only the model is tiny, and its weights are random."
            }
        }
    }

    /// Engine time per real time.
    fn speed(&self) -> f64 {
        match self {
            Self::Simulated(settings) => settings.speed,
            Self::Real(_) => 1.0,
        }
    }

    async fn play(&self, fleet: &Fleet, policy: Policy, show: Option<Show>) -> anyhow::Result<Run> {
        match self {
            Self::Simulated(settings) => simulated(settings, fleet, policy, show).await,
            Self::Real(settings) => settings.play(fleet, policy, show).await,
        }
    }
}

/// Plays the policies one after another.
async fn play(
    demo: &Demo,
    seed: u64,
    engines: Kind,
    ready: &setup::Ready,
) -> anyhow::Result<Report> {
    let began = Instant::now();
    let places = demo.places();
    if places.port != 0 {
        fleet::free(&(Ipv4Addr::LOCALHOST, places.port).into(), "--port")?;
    }
    let logs = setup::results("demo")?;
    let fleet = Fleet::start(&places.engine_ports, engines, &logs).await?;
    let mut report = Report {
        engines: demo.engines_name().to_owned(),
        conditions: demo.conditions(&ready.envoy_version),
        seed,
        commit: setup::commit(),
        runs: Vec::new(),
    };
    for line in report.conditions.iter().flat_map(|text| table::wrap(text)) {
        note!("{line}");
    }
    let page = match places.page {
        Some(address) => Some(show(address, demo, &fleet, &report).await?),
        None => None,
    };
    for (place, policy) in Policy::ALL.into_iter().enumerate() {
        let show = page.as_ref().map(|(board, _)| Show {
            board: Arc::clone(board),
            place,
        });
        let run = demo.play(&fleet, policy, show).await;
        report
            .runs
            .push(run.with_context(|| format!("policy {}", policy.name()))?);
    }
    fleet.down().await?;
    let seconds = began.elapsed().as_secs();
    note!("All of it took {} min {} s.\n", seconds / 60, seconds % 60);
    Ok(report)
}

/// Runs one policy on simulated engines.
async fn simulated(
    settings: &Settings,
    fleet: &Fleet,
    policy: Policy,
    show: Option<Show>,
) -> anyhow::Result<Run> {
    let setup = Setup {
        file: "envoy/envoy.yaml",
        with_filter: |plan| plan,
        without_filter: |plan| plan,
        gateways: 1,
        port: settings.places.port,
        form: Form::Chat,
        stream: true,
        models: vec![Model::plain("sim", "engines")],
        named: false,
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
    demo: &Demo,
    fleet: &Fleet,
    report: &Report,
) -> anyhow::Result<(Arc<Board>, Page)> {
    let mut about = vec![format!(
        "{} One policy runs after another, each from cold engines, with the same requests.",
        demo.about()
    )];
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
        board.set_stage(place, Stage::Waiting, demo.speed());
    }
    let page = Page::serve(Arc::clone(&board), address, None).await?;
    note!("Live page while this runs: {}\n", page.seen_at());
    Ok((board, page))
}

fn publish(demo: &Demo, report: &Report, json: bool) -> anyhow::Result<()> {
    let path = setup::results("demo")?.join(demo.page_file());
    std::fs::write(&path, page::render(report)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    let text = if json {
        report.json()? + "\n"
    } else {
        table::render(report)
    };
    crate::print::result(format_args!("{text}"))?;
    note!("\nPlots: {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_and_real_engines_have_reports_of_their_own() {
        let args = DemoArgs::parsed(&[]).unwrap();
        let simulated = Demo::Simulated(Settings::new(&args).unwrap());
        let real = Demo::Real(real::Settings::new(&args).unwrap());
        let names = |demo: &Demo| (demo.page_file(), demo.engines_name());
        assert_eq!(names(&simulated), ("report.html", "simulated engines"));
        assert_eq!(
            names(&real),
            ("report-llama.cpp.html", "real llama.cpp engines")
        );
    }
}
