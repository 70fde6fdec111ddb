//! llama.cpp's own HTTP server, from the Python package xllamacpp.
//!
//! Guarantee: the version is pinned; nothing is compiled. An engine's only cache is its slots, one
//! prompt each, so that there is a cache to run out of. Not here: the model (mod.rs).

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::CLUSTER;
use crate::harness::Plan;
use crate::round::fleet::{Cooling, Kind};
use crate::setup::python::{self, Environment, Wanted};

/// Starts the server of the wheel, which has no program of its own.
const SERVER: &str = include_str!("../../real/llama_server.py");

/// The version of llama.cpp, as its package counts.
pub(crate) const VERSION: &str = "2026.10.11549";

/// 55 MB: ten minutes are 90 KB/s.
const FETCH_LIMIT: Duration = Duration::from_secs(600);

/// The packages, without what they need only for models from the network.
const WANTED: Wanted<'_> = Wanted {
    name: "llama-cpp",
    what: "llama.cpp's server (Python package xllamacpp, 34 MB) and what makes a model (21 MB)",
    installs: &[&[
        "--no-deps",
        "--only-binary=:all:",
        "xllamacpp==2026.10.11549",
        "gguf==0.19.0",
        "numpy>=2,<3",
        "pyyaml==6.0.4",
        "tokenizers==0.23.3",
    ]],
    limit: FETCH_LIMIT,
};

/// It is up in a second; machines that compile take longer.
const START_LIMIT: Duration = Duration::from_secs(60);

/// It ends in a tenth of a second once it is asked to, after the step it computes.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// What an engine can keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Slots: requests at once, and prompts whose KV cache is kept.
    pub slots: u32,
    /// Tokens of all slots together.
    pub context: u32,
}

impl Sizes {
    /// The ones of the demo: a slot has 4,096 tokens.
    pub(crate) const DEMO: Self = Self {
        slots: 8,
        context: 32_768,
    };
}

/// What a llama.cpp engine is started from.
pub(crate) struct Llama {
    environment: Environment,
    server: PathBuf,
    model: PathBuf,
}

impl Llama {
    /// Finds everything or makes it; prints to stderr only what takes time.
    ///
    /// # Errors
    /// If the packages cannot be had; the error says why.
    pub(crate) fn ready() -> Result<Self> {
        let environment = python::environment(&WANTED)?;
        Ok(Self {
            server: super::file("llama_server.py", SERVER)?,
            model: super::model(&environment, "gguf", ".gguf")?,
            environment,
        })
    }

    /// Engines of these sizes; they are cold when they were started anew.
    pub(crate) fn kind(self, sizes: Sizes) -> Kind {
        Kind {
            start: Box::new(move |port| {
                let mut command = Command::new(self.environment.python());
                command.arg(&self.server).arg(&self.model);
                let numbers = [port.into(), sizes.slots, sizes.context];
                command.args(numbers.map(|number| number.to_string()));
                command
            }),
            family: false,
            start_limit: START_LIMIT,
            stop_limit: STOP_LIMIT,
            cooling: Cooling::Restart,
        }
    }
}

/// Lets Envoy use each connection to an engine once. The server closes a connection after each
/// streamed answer and does not announce it, so that a request sent at that moment is lost: 3 of 192
/// were answered 503 on a busy machine.
pub(crate) fn one_request_a_connection(plan: Plan) -> Plan {
    const OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
    plan.edit_cluster(CLUSTER, |cluster| {
        let options = json!({OPTIONS: {
            "@type": format!("type.googleapis.com/{OPTIONS}"),
            "common_http_protocol_options": {"max_requests_per_connection": 1},
            "explicit_http_config": {"http_protocol_options": {}},
        }});
        let cluster = cluster.as_object_mut().context("a cluster is an object")?;
        cluster.insert("typed_extension_protocol_options".to_owned(), options);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_that_is_told_is_the_one_that_is_fetched() {
        let package = format!("xllamacpp=={VERSION}");
        assert!(WANTED.installs.concat().contains(&package.as_str()));
    }
}
