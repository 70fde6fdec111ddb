//! Talks to Envoy's admin over its unix socket, and reads the counters it prints.
//!
//! Guarantee: every request ends within a stated time. Not here: what the counters should be.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use prefix_router::names;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Envoy's main thread answers; 1,000 hosts take 50 ms on an idle machine.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Asks the admin; anything but 200 is an error with what it said.
pub(super) async fn ask(socket: &Path, method: Method, path: &str) -> Result<String> {
    let answer = timeout(ANSWER_LIMIT, exchange(socket, method, path))
        .await
        .map_err(|_| anyhow!("Envoy's admin does not answer {path}"))?;
    let (status, text) = answer.with_context(|| format!("asking Envoy's admin for {path}"))?;
    if status != 200 {
        bail!(
            "Envoy's admin answers {path} with {status}: {}",
            text.trim()
        );
    }
    Ok(text)
}

async fn exchange(socket: &Path, method: Method, path: &str) -> Result<(u16, String)> {
    let stream = UnixStream::connect(socket).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "admin")
        .body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await?.to_bytes();
    connection.abort();
    Ok((status, String::from_utf8_lossy(&bytes).into_owned()))
}

/// The counters and gauges of `/stats`; histograms and texts are left out.
pub(super) fn parse_stats(text: &str) -> BTreeMap<String, u64> {
    let pairs = text.lines().filter_map(|line| line.rsplit_once(": "));
    pairs
        .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
        .collect()
}

/// One line of `/stats/prometheus`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The metric's name.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its value.
    pub value: f64,
}

impl Sample {
    /// Whether it has this name and at least these labels.
    #[must_use]
    pub fn is(&self, name: &str, labels: &[(&str, &str)]) -> bool {
        self.name == name
            && labels
                .iter()
                .all(|(label, value)| self.labels.get(*label).is_some_and(|found| found == value))
    }
}

/// The filter's decisions by kind; none without the filter.
#[must_use]
pub fn decisions(samples: &[Sample]) -> BTreeMap<String, u64> {
    let mut kinds = BTreeMap::new();
    for sample in samples {
        if sample.is(names::DECISIONS, &[]) {
            let kind = sample.labels.get(names::DECISION).cloned();
            *kinds.entry(kind.unwrap_or_default()).or_default() += sample.value as u64;
        }
    }
    kinds
}

/// The samples of a text in Prometheus' format, as Envoy prints it.
#[must_use]
pub fn parse_prometheus(text: &str) -> Vec<Sample> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(parse_sample)
        .collect()
}

fn parse_sample(line: &str) -> Option<Sample> {
    let (series, value) = line.rsplit_once(' ')?;
    let value = value.parse().ok()?;
    let Some((name, rest)) = series.split_once('{') else {
        return Some(Sample {
            name: series.to_owned(),
            labels: BTreeMap::new(),
            value,
        });
    };
    let mut labels = BTreeMap::new();
    let mut rest = rest.strip_suffix('}')?;
    while let Some((label, after)) = rest.split_once("=\"") {
        let (text, after) = parse_quoted(after)?;
        labels.insert(label.to_owned(), text);
        rest = after.strip_prefix(',').unwrap_or(after);
    }
    Some(Sample {
        name: name.to_owned(),
        labels,
        value,
    })
}

/// A label's value up to its closing quote, and what follows it.
fn parse_quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, text.get(at + 1..)?)),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                escaped => value.push(escaped),
            },
            _ => value.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_are_whole_numbers_by_name() {
        let text = "cluster.engines.upstream_rq_200: 17\n\
                    cluster.a:1.x: 2\n\
                    listener.x.time: P0(nan,1) P50(nan,2)\n\
                    cluster_manager.version: \"1\"\n";
        let stats = parse_stats(text);
        let expected = [
            ("cluster.engines.upstream_rq_200", 17),
            ("cluster.a:1.x", 2),
        ];
        assert_eq!(
            stats,
            expected
                .map(|(name, value)| (name.to_owned(), value))
                .into()
        );
    }

    #[test]
    fn samples_have_names_labels_and_values() {
        let text = "# TYPE x gauge\n\
                    x{pool=\"engines\",upstream_host=\"[::1]:80\"} 3\n\
                    y{} 0.5\n\
                    z 7\n\
                    q{a=\"b\\\"},c=\\\\\",d=\"\"} 1\n";
        let samples = parse_prometheus(text);
        let row = |sample: &Sample| format!("{} {:?} {}", sample.name, sample.labels, sample.value);
        let rows: Vec<String> = samples.iter().map(row).collect();
        assert_eq!(
            rows,
            [
                r#"x {"pool": "engines", "upstream_host": "[::1]:80"} 3"#,
                "y {} 0.5",
                "z {} 7",
                r#"q {"a": "b\"},c=\\", "d": ""} 1"#,
            ]
        );
        assert!(samples[0].is("x", &[("pool", "engines")]));
        assert!(!samples[0].is("x", &[("pool", "other")]));
        assert!(!samples[0].is("y", &[]));
    }
}
