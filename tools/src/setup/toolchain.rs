//! A Rust that can compile to `wasm32-wasip1`, the filter's target.
//!
//! Three ways, in this order: the target's standard library is installed; rustup installs it; on
//! Debian and its kin, a packaged compiler with the standard library's sources, from which cargo
//! builds it. As root these packages are installed, otherwise unpacked below `target/`.
//! Not here: the build of the filter (filter.rs).

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use super::Place;
use super::command::{answer, run};
use super::envoy::on_path;
use super::steps::Steps;

/// What the filter is compiled to.
pub(super) const TARGET: &str = "wasm32-wasip1";

/// The compiler, the standard library's sources, and the C library that `wasm32-wasip1` needs.
const PACKAGES: [&str; 3] = ["rustc-web", "rust-web-src", "wasi-libc"];

/// Shared libraries of the packaged compiler, by the start of their package's name; the rest of
/// the name is a version. Only needed when the packages are unpacked rather than installed.
const LIBRARY_PACKAGES: [&str; 2] = ["libstd-rust-web", "libllvm"];

/// rustup fetches about 20 MB.
const RUSTUP_LIMIT: Duration = Duration::from_secs(300);

/// The packages have 140 MB, and 0.8 GB unpacked.
const PACKAGES_LIMIT: Duration = Duration::from_secs(900);

/// How to compile to [`TARGET`] on this machine.
#[derive(Debug)]
pub(super) enum Toolchain {
    /// `cargo build --target` just works.
    Installed,
    /// A packaged compiler, and a standard library to be built from its sources.
    Packaged(Packaged),
}

/// What .cargo/config.toml says of the target, as `CARGO_ENCODED_RUSTFLAGS` parts flags.
const FILTER_FLAGS: &str = "-Ctarget-feature=+simd128\x1f-Cllvm-args=-inline-threshold=75";

/// A compiler from packages.
#[derive(Debug)]
pub(super) struct Packaged {
    rustc: PathBuf,
    /// Where its shared libraries are, if not where the system looks.
    libraries: Option<PathBuf>,
    /// The folder with the target's C library.
    wasi_libc: PathBuf,
    linker: PathBuf,
}

impl Packaged {
    /// Adds what makes `cargo build` use this compiler and build the standard library with it.
    pub(super) fn apply(&self, cargo: &mut Command) {
        cargo.env("RUSTC", &self.rustc);
        // The compiler is a stable one; building its own standard library needs this key.
        cargo.env("RUSTC_BOOTSTRAP", "1");
        cargo.env("CARGO_TARGET_WASM32_WASIP1_LINKER", &self.linker);
        if let Some(libraries) = &self.libraries {
            cargo.env("LD_LIBRARY_PATH", libraries);
        }
        // These take the place of those in .cargo/config.toml.
        let mut flags = OsString::from(FILTER_FLAGS);
        flags.push("\x1f-Lnative=");
        flags.push(&self.wasi_libc);
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags);
        cargo.arg("-Zbuild-std=std,panic_abort");
    }
}

/// Finds or installs a way to compile to [`TARGET`].
pub(super) fn find(place: &Place, steps: &Steps) -> Result<Toolchain> {
    let started = Instant::now();
    if target_installed(place) {
        steps.found(&format!("the target {TARGET} is installed"), started);
        return Ok(Toolchain::Installed);
    }
    // Made by an earlier run on this machine: faster than asking rustup for what it did not have.
    if let Some(packaged) = existing(place) {
        let rustc = packaged.rustc.display();
        steps.found(
            &format!("{TARGET} through the packaged compiler {rustc}"),
            started,
        );
        return Ok(Toolchain::Packaged(packaged));
    }
    let rustup = steps.work(&format!("rustup target add {TARGET}"), || by_rustup(place));
    let rustup = match rustup {
        Ok(()) => return Ok(Toolchain::Installed),
        Err(error) => error,
    };
    match by_packages(place, steps) {
        Ok(packaged) => Ok(Toolchain::Packaged(packaged)),
        Err(packages) => Err(anyhow!(
            "no way to compile to {TARGET}. By hand: `rustup target add {TARGET}`, or your \
             distribution's package with that target's standard library.\n\
             Tried rustup: {rustup:#}\nTried Debian's packages: {packages:#}"
        )),
    }
}

/// Identifies the compiler, so that a build by another one is not taken for this one's.
pub(super) fn identity(place: &Place, toolchain: &Toolchain) -> String {
    let mut rustc = match toolchain {
        Toolchain::Installed => place.command(&rustc_name()),
        Toolchain::Packaged(packaged) => packaged.rustc_command(),
    };
    answer(rustc.arg("-vV")).unwrap_or_default()
}

fn rustc_name() -> String {
    std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned())
}

fn target_installed(place: &Place) -> bool {
    let mut rustc = place.command(&rustc_name());
    let Some(dir) = answer(rustc.args(["--print", "target-libdir", "--target", TARGET])) else {
        return false;
    };
    let Ok(files) = fs::read_dir(dir) else {
        return false;
    };
    files.filter_map(Result::ok).any(|file| {
        let name = file.file_name();
        let name = name.to_string_lossy();
        name.starts_with("libstd-") && name.ends_with(".rlib")
    })
}

fn by_rustup(place: &Place) -> Result<()> {
    if on_path("rustup").is_none() {
        bail!("there is no rustup on the PATH");
    }
    let mut rustup = place.command("rustup");
    run(
        rustup.args(["target", "add", TARGET]),
        &place.path("rustup.log"),
        RUSTUP_LIMIT,
    )?;
    if target_installed(place) {
        return Ok(());
    }
    bail!(
        "rustup reports success, but the compiler {} has no {TARGET}",
        rustc_name()
    )
}

fn by_packages(place: &Place, steps: &Steps) -> Result<Packaged> {
    if on_path("apt-get").is_none() {
        bail!("this system has no apt-get");
    }
    linker(place)?;
    if !packages_known() {
        let what = "apt-get update";
        // Without root it cannot write the system's lists; then what is known has to do.
        let _ = steps.work(what, || apt(place, &["update"]));
    }
    let install = ["install", "--yes", "--no-install-recommends", "--no-remove"];
    let what = format!("apt-get install {}", PACKAGES.join(" "));
    let installed = if is_root() {
        steps.work(&what, || {
            apt(place, &[&install[..], &PACKAGES[..]].concat())
        })
    } else {
        Err(anyhow!("not root"))
    };
    if installed.is_ok()
        && let Some(packaged) = existing(place)
    {
        return Ok(packaged);
    }
    let what = format!("unpacking {} below target/ (140 MB)", PACKAGES.join(", "));
    steps.work(&what, || unpack(place))?;
    existing(place).context("the packages lack the compiler, its sources or the C library")
}

fn apt(place: &Place, arguments: &[&str]) -> Result<()> {
    let mut apt = place.command("apt-get");
    apt.env("DEBIAN_FRONTEND", "noninteractive").args(arguments);
    run(&mut apt, &place.path("apt.log"), PACKAGES_LIMIT)
}

fn packages_known() -> bool {
    PACKAGES.iter().all(|package| {
        answer(Command::new("apt-cache").args(["show", "--no-all-versions", package]))
            .is_some_and(|text| !text.is_empty())
    })
}

fn is_root() -> bool {
    answer(Command::new("id").arg("-u")).as_deref() == Some("0")
}

/// Fetches the packages and their libraries and unpacks them; needs no root.
fn unpack(place: &Place) -> Result<()> {
    let debs = place.path("packages");
    let tree = place.path("packaged");
    for dir in [&debs, &tree] {
        if dir.exists() {
            fs::remove_dir_all(dir)?;
        }
        fs::create_dir_all(dir)?;
    }
    let mut download = Command::new("apt-get");
    download
        .current_dir(&debs)
        .arg("download")
        .args(PACKAGES)
        .args(library_packages()?);
    run(&mut download, &place.path("apt.log"), PACKAGES_LIMIT)?;
    for deb in fs::read_dir(&debs)? {
        let mut unpack = Command::new("dpkg-deb");
        unpack.arg("-x").arg(deb?.path()).arg(&tree);
        run(&mut unpack, &place.path("dpkg.log"), PACKAGES_LIMIT)?;
    }
    fs::remove_dir_all(&debs)?;
    Ok(())
}

/// The names, with versions, of the libraries the packaged compiler is linked with.
fn library_packages() -> Result<Vec<String>> {
    let mut depends = Command::new("apt-cache");
    depends.args(["depends", "--recurse", "--important", PACKAGES[0]]);
    let text = answer(&mut depends).context("`apt-cache depends` fails")?;
    let names = text
        .lines()
        .filter(|line| !line.starts_with([' ', '|', '<']));
    let libraries =
        names.filter(|name| LIBRARY_PACKAGES.iter().any(|start| name.starts_with(start)));
    Ok(libraries.map(str::to_owned).collect())
}

/// A packaged compiler that is there and runs.
fn existing(place: &Place) -> Option<Packaged> {
    let linker = linker(place).ok()?;
    let unpacked = place.path("packaged");
    for (root, own) in [(Path::new("/"), false), (unpacked.as_path(), true)] {
        let libraries = own.then(|| root.join("usr/lib").join(multiarch()));
        let packaged = Packaged {
            rustc: root.join("usr/bin/rustc"),
            libraries,
            wasi_libc: root.join("usr/lib/wasm32-wasi"),
            linker: linker.clone(),
        };
        if packaged.usable() {
            return Some(packaged);
        }
    }
    None
}

impl Packaged {
    fn usable(&self) -> bool {
        if !self.rustc.is_file() || !self.wasi_libc.join("libc.a").is_file() {
            return false;
        }
        let sysroot = answer(self.rustc_command().args(["--print", "sysroot"]));
        sysroot.is_some_and(|sysroot| {
            Path::new(&sysroot)
                .join("lib/rustlib/src/rust/library/std/Cargo.toml")
                .is_file()
        })
    }

    fn rustc_command(&self) -> Command {
        let mut rustc = Command::new(&self.rustc);
        if let Some(libraries) = &self.libraries {
            rustc.env("LD_LIBRARY_PATH", libraries);
        }
        rustc
    }
}

/// The folder below `usr/lib` with this machine's shared libraries.
fn multiarch() -> String {
    format!("{}-linux-gnu", std::env::consts::ARCH)
}

/// LLVM's linker for wasm: Rust's own copy, else the one on the `PATH`.
fn linker(place: &Place) -> Result<PathBuf> {
    if let Some(sysroot) = answer(place.command(&rustc_name()).args(["--print", "sysroot"])) {
        let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let lld = Path::new(&sysroot)
            .join("lib/rustlib")
            .join(host)
            .join("bin/rust-lld");
        if lld.is_file() {
            return Ok(lld);
        }
    }
    on_path("rust-lld")
        .or_else(|| on_path("wasm-ld"))
        .context("this Rust has no rust-lld, and there is no wasm-ld; install your distribution's package lld")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packaged_compiler_gets_the_flags_of_cargos_configuration() {
        let config = include_str!("../../../.cargo/config.toml");
        let flags = FILTER_FLAGS.replace('\x1f', "\", \"");
        assert!(config.contains(&format!("rustflags = [\"{flags}\"]")));
    }
}
