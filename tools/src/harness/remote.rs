//! The files of an Envoy that somebody else starts, in a container for example.
//!
//! Guarantee: the same edits of the same files as for an Envoy that is started here, and a file is
//! replaced as a whole. Not here: the process.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use super::files;

/// Config, listeners and hosts of one Envoy, in a folder that it reads and watches.
#[derive(Debug)]
pub struct Files {
    dir: PathBuf,
    cluster: String,
    listeners: Value,
}

impl Files {
    /// Writes a config into `dir` with its listeners and the hosts of its EDS `cluster` in files of
    /// their own. Envoy is to be started with `envoy.json`.
    pub(super) fn write(
        dir: &Path,
        mut config: Value,
        cluster: &str,
        hosts: &[SocketAddr],
    ) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        files::write_eds(dir, cluster, hosts)?;
        let listeners = files::move_listeners(dir, &mut config)?;
        let text = serde_json::to_string_pretty(&config)?;
        files::replace(&dir.join("envoy.json"), &text)?;
        Ok(Self {
            dir: dir.to_path_buf(),
            cluster: cluster.to_owned(),
            listeners,
        })
    }

    /// Replaces the hosts; the closure sees each endpoint with its place in the list.
    pub fn set_hosts_with(
        &self,
        hosts: &[SocketAddr],
        change: impl FnMut(usize, &mut Value),
    ) -> Result<()> {
        files::write_eds_with(&self.dir, &self.cluster, hosts, change)
    }

    /// Changes the listeners. The closure sees a config that has only them.
    pub fn edit_listeners(&mut self, edit: impl FnOnce(&mut Value) -> Result<()>) -> Result<()> {
        let mut next = self.listeners.clone();
        edit(&mut next)?;
        files::write_lds(&self.dir, &next)?;
        self.listeners = next;
        Ok(())
    }
}
