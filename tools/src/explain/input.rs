//! What is explained: the configuration, its hosts, and request bodies.
//!
//! Guarantee: bodies are read as the filter reads them, in its windows and up to its bound. Not
//! here: what is made of them.

use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use prefix_router::config::{Config, HostSource, Pool};
use prefix_router::hosts::canonical;
use prefix_router::payload::parts::{Explained, explain};
use prefix_router::payload::{End, Head, Plan};
use prefix_router::request::WINDOW_BYTES;
use prefix_router::select::Selector;

use super::ExplainArgs;
use crate::check;

/// No filter holds more of a body (`body_bytes_max`), and no configuration is larger.
const FILE_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Adaptive routing, everything else by default; its cluster and admin are never asked.
const DEFAULT: &str = r#"{"pools": [{"cluster": "engines", "hosts": {"admin_cluster": "admin"}}]}"#;

/// The configuration and what came with it.
pub(super) struct Setup {
    pub config: Config,
    /// The pool that is explained, and its place in the configuration.
    pub pool: Pool,
    chosen: usize,
    selector: Selector,
    /// How bodies are read.
    pub plan: Plan,
    /// The hosts, as far as they are known.
    pub hosts: Vec<String>,
    /// The hosts that the configuration's file gives each pool.
    found: Vec<Vec<String>>,
    path: String,
    headers: Vec<(String, String)>,
}

/// One request.
pub(super) struct Body {
    /// Its file.
    pub name: String,
    pub path: String,
    pub bytes: Vec<u8>,
    pub headers: Vec<(String, String)>,
}

impl Setup {
    pub(super) fn new(args: &ExplainArgs) -> Result<Self> {
        let (text, found) = match &args.config {
            None => (DEFAULT.to_owned(), Vec::new()),
            Some(path) => {
                let bytes = read(path)?;
                let text = String::from_utf8_lossy(&bytes);
                check::configuration(&text).with_context(|| path.display().to_string())?
            }
        };
        let config = Config::parse(text.as_bytes())?;
        let pool = config.pools.first().context("config: no pool")?.clone();
        let headers: Result<Vec<_>> = args.headers.iter().map(|text| header(text)).collect();
        let hosts: Result<Vec<_>> = args.hosts.iter().map(|text| host(text)).collect();
        let default = config.pools.iter().position(|pool| pool.default);
        Ok(Self {
            plan: Plan::new(&config.read),
            hosts: hosts?,
            pool,
            chosen: 0,
            selector: Selector::new(config.pools.iter().map(|pool| &pool.matches), default),
            found,
            config,
            path: args.path.clone(),
            headers: headers?,
        })
    }

    /// Takes the pool that serves all of these bodies, or the one that `--pool` names.
    pub(super) fn choose(&mut self, args: &ExplainArgs, bodies: &[&Body]) -> Result<()> {
        let mut served = None;
        for body in bodies {
            let serves = self.serves(body);
            let serves = serves.filter(|_| args.pool.is_none());
            anyhow::ensure!(
                served.is_none_or(|(_, before)| before == serves),
                "the bodies are of different pools, so they never meet on a host; --pool takes \
                 both as requests of one"
            );
            served = Some((&body.name, serves));
        }
        self.chosen = match (&args.pool, served) {
            (Some(name), _) => {
                let place = self.config.pools.iter().position(|pool| pool.name == *name);
                place.with_context(|| format!("--pool: expected {}, got {name}", self.names()))?
            }
            (None, Some((_, Some(place)))) => place,
            (None, Some((name, None))) => anyhow::bail!(
                "{name}: no pool serves its model, so it goes where Envoy's own route leads; \
                 --pool takes it as a request of one: {}",
                self.names()
            ),
            (None, None) if self.config.pools.len() == 1 => 0,
            (None, None) => anyhow::bail!(
                "--pool: a log is played on one pool, and the configuration has several: {}",
                self.names()
            ),
        };
        let pool = self
            .config
            .pools
            .get(self.chosen)
            .context("config: no pool")?;
        self.pool = pool.clone();
        // As the filter reads it where the head decides, and to the same key where the model does.
        self.config.read = self.config.read_for(&self.pool);
        self.plan = Plan::new(&self.config.read);
        if self.hosts.is_empty() {
            self.hosts = match &self.pool.hosts {
                HostSource::Static(hosts) => hosts.clone(),
                HostSource::Admin { .. } | HostSource::Learned => {
                    self.found.get(self.chosen).cloned().unwrap_or_default()
                }
            };
        }
        Ok(())
    }

    fn names(&self) -> String {
        let names = self.config.pools.iter().map(|pool| pool.name.as_str());
        names.collect::<Vec<_>>().join(", ")
    }

    /// The place of the pool that serves this request, as the filter finds it.
    fn serves(&self, body: &Body) -> Option<usize> {
        let header = |name: &str| body.header(name).map(<[u8]>::to_vec);
        let by_head = self.selector.by_head(body.path.as_bytes(), header);
        by_head.or_else(|| {
            let model = self.explain(body).prompt.model;
            self.selector.by_model(model.as_deref())
        })
    }

    /// Whether the explained pool serves this request of a log.
    pub(super) fn is_served(&self, body: &Body) -> bool {
        let takes_all = self.config.pools.len() == 1 && self.pool.matches.models.is_empty();
        takes_all || self.serves(body) == Some(self.chosen)
    }

    /// The explained pool's name and what led to it, if there are several.
    pub(super) fn pool_of(&self, body: &Body) -> Option<(String, &'static str)> {
        let header = |name: &str| body.header(name).map(<[u8]>::to_vec);
        let path = body.path.as_bytes();
        let why = if self.config.pools.len() == 1 {
            return None;
        } else if self.serves(body) != Some(self.chosen) {
            "--pool says so"
        } else if self.selector.by_head(b"", header).is_some() {
            "a header leads to it"
        } else if self.selector.by_head(path, |_| None).is_some() {
            "its path leads to it"
        } else {
            let model = self.explain(body).prompt.model.unwrap_or_default();
            let mut models = self.pool.matches.models.iter();
            match models.any(|pattern| pattern.fits(&model)) {
                true => "its model leads to it",
                false => "it is the default",
            }
        };
        Some((self.pool.name.clone(), why))
    }

    /// The body in this file, with the path and headers of the command line.
    pub(super) fn body(&self, file: &Path) -> Result<Body> {
        Ok(Body {
            name: match file.as_os_str() == "-" {
                true => "standard input".into(),
                false => name_of(file),
            },
            path: self.path.clone(),
            bytes: read(file)?,
            headers: self.headers.clone(),
        })
    }

    /// What the filter makes of a request.
    pub(super) fn explain(&self, body: &Body) -> Explained {
        self.explain_by(body, &self.plan)
    }

    /// The same with other options of reading.
    pub(super) fn explain_by(&self, body: &Body, plan: &Plan) -> Explained {
        let bytes_max = self.config.request.body_bytes_max as usize;
        let (bytes, end) = match body.bytes.get(..bytes_max) {
            Some(held) if held.len() < body.bytes.len() => (held, End::Cut),
            _ => (body.bytes.as_slice(), End::Whole),
        };
        let windows: Vec<&[u8]> = bytes.chunks(WINDOW_BYTES as usize).collect();
        explain(&self.head(body), plan, &windows, end)
    }

    pub(super) fn head<'a>(&self, body: &'a Body) -> Head<'a> {
        let tenant = self.config.request.tenant_header.as_deref();
        Head {
            path: body.path.as_bytes(),
            content_type: b"application/json",
            content_encoding: body.header("content-encoding").unwrap_or_default(),
            tenant: tenant.and_then(|name| body.header(name)),
        }
    }
}

impl Body {
    fn header(&self, name: &str) -> Option<&[u8]> {
        let named = |(other, _): &&(String, String)| other.eq_ignore_ascii_case(name);
        self.headers
            .iter()
            .find(named)
            .map(|(_, value)| value.as_bytes())
    }
}

/// A file's name without its folders.
pub(super) fn name_of(file: &Path) -> String {
    let name = file.file_name().unwrap_or(file.as_os_str());
    name.to_string_lossy().into_owned()
}

fn host(text: &str) -> Result<String> {
    canonical(text).with_context(|| {
        format!(
            "--hosts: expected ip:port, got {text:?}: Envoy knows a host by its IP, and a name has \
             another home than the IPs behind it"
        )
    })
}

fn header(text: &str) -> Result<(String, String)> {
    let (name, value) = text
        .split_once(':')
        .with_context(|| format!("--header: expected \"name: value\", got {text:?}"))?;
    Ok((name.trim().to_ascii_lowercase(), value.trim().to_owned()))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let name = path.display();
    let read = if path.as_os_str() == "-" {
        std::io::stdin()
            .take(FILE_BYTES_MAX + 1)
            .read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path)
            .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes))
    };
    read.with_context(|| format!("{name}: cannot be read"))?;
    anyhow::ensure!(
        bytes.len() as u64 <= FILE_BYTES_MAX,
        "{name}: more than {FILE_BYTES_MAX} bytes"
    );
    Ok(bytes)
}
