//! What is explained: the configuration, its hosts, and request bodies.
//!
//! Guarantee: bodies are read as the filter reads them, in its windows and up to its bound. Not
//! here: what is made of them.

use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use prefix_router::config::{Config, HostSource, Pool};
use prefix_router::payload::parts::{Explained, explain};
use prefix_router::payload::{End, Head, Plan};
use prefix_router::request::WINDOW_BYTES;

use super::ExplainArgs;
use crate::check;

/// No filter holds more of a body (`body_bytes_max`), and no configuration is larger.
const FILE_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Adaptive routing, everything else by default; its cluster and admin are never asked.
const DEFAULT: &str = r#"{"pools": [{"cluster": "engines", "hosts": {"admin_cluster": "admin"}}]}"#;

/// The configuration and what came with it.
pub(super) struct Setup {
    pub config: Config,
    pub pool: Pool,
    /// How bodies are read.
    pub plan: Plan,
    /// The hosts, as far as they are known.
    pub hosts: Vec<String>,
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
        let listed = match &pool.hosts {
            HostSource::Static(hosts) => hosts.clone(),
            HostSource::Admin { .. } | HostSource::Learned => found,
        };
        let headers: Result<Vec<_>> = args.headers.iter().map(|text| header(text)).collect();
        Ok(Self {
            plan: Plan::new(&config.read),
            hosts: if args.hosts.is_empty() {
                listed
            } else {
                args.hosts.clone()
            },
            pool,
            config,
            path: args.path.clone(),
            headers: headers?,
        })
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
