//! Where the peers come from, and what each of them is asked in its own way.
//!
//! Guarantee: a package has one version, the one that is named in reports; one that cannot be
//! installed is named with the reason, and the others are measured. Not here: what they are told
//! beyond their defaults (router.rs).

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use hyper::Method;
use serde_json::{Value, json};

use super::router::Contestant;
use crate::setup::python::{self, Environment, Wanted};
use crate::testkit::{Client, Request};

/// The largest has 40 MB of packages: ten minutes is 70 KB/s.
const INSTALL_LIMIT: Duration = Duration::from_secs(600);

/// A router of others, as its package names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Package {
    /// SGLang's router.
    Sglang,
    /// Shepherd Model Gateway.
    Smg,
    /// vLLM's router.
    Vllm,
}

impl Package {
    /// All.
    pub(super) const ALL: [Self; 3] = [Self::Sglang, Self::Smg, Self::Vllm];

    /// Its name on the Python package index.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Sglang => "sglang-router",
            Self::Smg => "smg",
            Self::Vllm => "vllm-router",
        }
    }

    /// Its version.
    pub(super) fn version(self) -> &'static str {
        match self {
            Self::Sglang => "0.3.2",
            Self::Smg => "1.13.0",
            Self::Vllm => "0.1.17",
        }
    }

    /// The first arguments of its program.
    pub(super) fn launch(self) -> &'static [&'static str] {
        match self {
            Self::Sglang | Self::Smg => &["launch"],
            Self::Vllm => &[],
        }
    }

    /// The level of its log at which warnings are told.
    pub(super) fn warnings(self) -> &'static str {
        match self {
            Self::Sglang | Self::Smg => "warn",
            Self::Vllm => "warning",
        }
    }

    /// Gives it one more host.
    pub(super) async fn add(self, client: &Client, host: SocketAddr) -> Result<()> {
        let url = format!("http://{host}");
        let request = match self {
            Self::Sglang | Self::Smg => {
                Request::post("/workers", json!({ "url": url }).to_string())
            }
            Self::Vllm => Request::new(Method::POST, &format!("/add_worker?url={url}")),
        };
        self.accepted(client, request).await
    }

    /// Takes a host from it.
    pub(super) async fn remove(self, client: &Client, host: SocketAddr) -> Result<()> {
        let url = format!("http://{host}");
        let request = match self {
            Self::Sglang | Self::Smg => {
                let list = client.ok(Request::get("/workers")).await?;
                let id = worker(&serde_json::from_slice(&list.body)?, &url)
                    .with_context(|| format!("{} does not know {url}", self.name()))?;
                Request::new(Method::DELETE, &format!("/workers/{id}"))
            }
            Self::Vllm => Request::new(Method::POST, &format!("/remove_worker?url={url}")),
        };
        self.accepted(client, request).await
    }

    async fn accepted(self, client: &Client, request: Request) -> Result<()> {
        let path = request.path.clone();
        let answer = client.send(request).await?;
        ensure!(
            (200..300).contains(&answer.status),
            "{} answers {path} with {}: {}",
            self.name(),
            answer.status,
            String::from_utf8_lossy(&answer.body)
        );
        Ok(())
    }
}

/// The id of a host in a router's list.
fn worker(list: &Value, url: &str) -> Option<String> {
    let workers = list.get("workers")?.as_array()?;
    let found = workers
        .iter()
        .find(|worker| worker.get("url").and_then(Value::as_str) == Some(url))?;
    found.get("id")?.as_str().map(str::to_owned)
}

/// What could be installed.
#[derive(Debug, Default)]
pub(super) struct Installed {
    environments: Vec<(Package, Environment)>,
}

impl Installed {
    /// Installs what these need, each in an environment of its own: their packages disagree. Also
    /// what could not be installed, in sentences.
    pub(super) fn new(contestants: &[Contestant]) -> (Self, Vec<String>) {
        let (mut installed, mut missing) = (Self::default(), Vec::new());
        for package in Package::ALL {
            let needed = |one: &Contestant| one.package() == Some(package);
            if !contestants.iter().any(needed) {
                continue;
            }
            match install(package) {
                Ok(environment) => installed.environments.push((package, environment)),
                Err(error) => missing.push(format!(
                    "{} {} cannot be installed and is left out: {error:#}",
                    package.name(),
                    package.version()
                )),
            }
        }
        (installed, missing)
    }

    /// Whether a router can be started.
    pub(super) fn has(&self, contestant: &Contestant) -> bool {
        let found = |wanted| self.environments.iter().any(|(one, _)| *one == wanted);
        contestant.package().is_none_or(found)
    }

    /// A package's program.
    pub(super) fn program(&self, package: Package) -> Result<PathBuf> {
        let found = self.environments.iter().find(|(one, _)| *one == package);
        let (_, environment) =
            found.with_context(|| format!("{} is not installed", package.name()))?;
        Ok(environment.program(package.name()))
    }
}

fn install(package: Package) -> Result<Environment> {
    let pinned = format!("{}=={}", package.name(), package.version());
    let environment = python::environment(&Wanted {
        name: package.name(),
        what: &format!("{} {}", package.name(), package.version()),
        installs: &[&[&pinned]],
        limit: INSTALL_LIMIT,
    })?;
    let program = environment.program(package.name());
    ensure!(
        program.is_file(),
        "the package {pinned} has no program {}",
        program.display()
    );
    Ok(environment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_found_by_its_url() {
        let list = json!({"workers": [
            {"id": "a", "url": "http://127.0.0.1:1"},
            {"id": "b", "url": "http://127.0.0.1:12"},
        ]});
        assert_eq!(worker(&list, "http://127.0.0.1:12").as_deref(), Some("b"));
        assert_eq!(worker(&list, "http://127.0.0.1:2"), None);
    }
}
