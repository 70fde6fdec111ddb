//! Builds the filter to wasm, and reuses a build while its sources are unchanged.
//!
//! Guarantee: the file that is returned was built from the sources as they are now, by a cargo
//! whose environment a caller's flags cannot change. The build has a target folder of its own, so
//! it neither waits for nor disturbs the cargo that may have started us.
//! Not here: where the compiler comes from (toolchain.rs).

use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Place;
use super::command::{answer, run};
use super::steps::Steps;
use super::toolchain::{self, TARGET, Toolchain};

/// A cold build takes a minute on two free cores, two with a standard library from sources.
const BUILD_LIMIT: Duration = Duration::from_secs(1800);

/// Everything the filter is built from, below the project's folder.
const SOURCES: [&str; 4] = ["src", "Cargo.toml", "Cargo.lock", ".cargo/config.toml"];

/// Sources are a few dozen files, nested a few folders deep.
const SOURCE_DEPTH_MAX: u32 = 8;

/// cargo's variables that a caller may set for our build too: where it fetches from, how many jobs.
const CARGO_VARIABLES: [&str; 8] = [
    "CARGO_HOME",
    "CARGO_BUILD_JOBS",
    "CARGO_NET_",
    "CARGO_HTTP_",
    "CARGO_REGISTRY_",
    "CARGO_REGISTRIES_",
    "CARGO_SOURCE_",
    "CARGO_TERM_",
];

/// Which filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    /// What users deploy.
    Release,
    /// With the feature `test-hooks`.
    TestHooks,
}

impl Variant {
    fn file(self) -> &'static str {
        match self {
            Self::Release => "prefix_router.wasm",
            Self::TestHooks => "prefix_router_test_hooks.wasm",
        }
    }
}

/// A filter that was built.
#[derive(Debug)]
pub(super) struct Filter {
    pub(super) wasm: PathBuf,
    pub(super) commit: String,
}

/// Builds the filter unless the last build is of the same sources, compiler and commit.
pub(super) fn build(place: &Place, steps: &Steps, variant: Variant) -> Result<Filter> {
    let started = Instant::now();
    let wasm = place.path(variant.file());
    let mark_file = wasm.with_extension("wasm.built-from");
    let toolchain = toolchain::find(place, steps)?;
    let commit = commit_of(&place.root, &SOURCES);
    let mark = mark(place, &toolchain, &commit)?;
    if wasm.is_file() && fs::read_to_string(&mark_file).is_ok_and(|built| built == mark) {
        steps.found("the filter is built from these sources", started);
        return Ok(Filter { wasm, commit });
    }
    let what = match variant {
        Variant::Release => "building the filter (release, wasm32-wasip1)",
        Variant::TestHooks => "building the filter with test hooks (release, wasm32-wasip1)",
    };
    let built = steps
        .work(what, || cargo_build(place, &toolchain, &commit, variant))
        .context("the filter does not build")?;
    // Renamed, so that an Envoy that starts meanwhile reads the old file or the new one.
    let fresh = wasm.with_extension("wasm.new");
    fs::copy(&built, &fresh).with_context(|| format!("cargo made no {}", built.display()))?;
    fs::rename(&fresh, &wasm)?;
    fs::write(&mark_file, mark)?;
    Ok(Filter { wasm, commit })
}

fn cargo_build(
    place: &Place,
    toolchain: &Toolchain,
    commit: &str,
    variant: Variant,
) -> Result<PathBuf> {
    let target_dir = place.path("filter");
    let mut cargo = place.command(&std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
    clean_environment(&mut cargo);
    cargo.env("PREFIX_ROUTER_COMMIT", commit);
    cargo.args([
        "build",
        "--release",
        "--lib",
        "-p",
        "prefix-router",
        "--target",
        TARGET,
    ]);
    cargo.arg("--target-dir").arg(&target_dir);
    if variant == Variant::TestHooks {
        cargo.args(["--features", "test-hooks"]);
    }
    if let Toolchain::Packaged(packaged) = toolchain {
        packaged.apply(&mut cargo);
    }
    run(&mut cargo, &place.path("cargo.log"), BUILD_LIMIT)?;
    Ok(target_dir.join(TARGET).join("release/prefix_router.wasm"))
}

/// Takes away what a surrounding cargo or shell would add: flags made for another target break
/// this build, and a wrapper such as clippy's replaces the compiler.
fn clean_environment(cargo: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let of_cargo = text.starts_with("CARGO_")
            && !CARGO_VARIABLES.iter().any(|kept| text.starts_with(kept));
        let of_rustc = [
            "RUSTFLAGS",
            "RUSTC_WRAPPER",
            "RUSTC_WORKSPACE_WRAPPER",
            "MAKEFLAGS",
        ];
        if of_cargo || of_rustc.contains(&text.as_ref()) {
            cargo.env_remove(&name);
        }
    }
}

/// The short id of the last commit that touched `paths` (all when empty), with `-dirty` when files
/// differ from it; `unknown` without git.
pub(super) fn commit_of(root: &Path, paths: &[&str]) -> String {
    let git = |arguments: &[&str]| {
        answer(
            Command::new("git")
                .current_dir(root)
                .args(arguments)
                .arg("--")
                .args(paths),
        )
    };
    match git(&["log", "-1", "--format=%h", "--abbrev=12"]) {
        Some(id) if !id.is_empty() => {
            match git(&["status", "--porcelain", "--untracked-files=normal"]) {
                Some(changes) if changes.is_empty() => id,
                _ => format!("{id}-dirty"),
            }
        }
        _ => "unknown".to_owned(),
    }
}

/// Names everything a build depends on; equal marks mean an equal filter.
fn mark(place: &Place, toolchain: &Toolchain, commit: &str) -> Result<String> {
    let mut hasher = DefaultHasher::new();
    for source in SOURCES {
        hash_into(&place.root.join(source), &mut hasher, SOURCE_DEPTH_MAX)
            .with_context(|| format!("cannot read {source}"))?;
    }
    let compiler = toolchain::identity(place, toolchain);
    Ok(format!(
        "sources {:016x}\ncommit {commit}\n{compiler}\n",
        hasher.finish()
    ))
}

/// Names and contents of a file or of a folder's files, in the order of their names.
fn hash_into(path: &Path, hasher: &mut DefaultHasher, depth: u32) -> Result<()> {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    if path.is_dir() && depth > 0 {
        let mut entries: Vec<PathBuf> = fs::read_dir(path)?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_>>()?;
        entries.sort();
        for entry in entries {
            hash_into(&entry, hasher, depth.saturating_sub(1))?;
        }
        return Ok(());
    }
    let bytes = fs::read(path)?;
    for part in [name, bytes.as_slice()] {
        hasher.write_u64(part.len() as u64);
        hasher.write(part);
    }
    Ok(())
}
