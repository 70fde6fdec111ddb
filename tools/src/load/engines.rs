//! What engines themselves counted: their `/metrics`, under the names vLLM gives them.
//!
//! Guarantee: a page without these names is an error, never a zero. Not here: what the client saw.

use std::time::Duration;

use anyhow::{Context as _, bail};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, StatusCode};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Serialize;

/// A metrics page at most; vLLM's is about 60 KB.
const PAGE_BYTES_MAX: usize = 4 << 20;

/// An engine answers its own pages within this.
const TIMEOUT: Duration = Duration::from_secs(10);

/// An engine's counters since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Requests that ended well.
    pub requests: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub queried_tokens: u64,
    /// Of these, found.
    pub hit_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
}

impl Counters {
    /// What was counted after `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(before.requests),
            queried_tokens: self.queried_tokens.saturating_sub(before.queried_tokens),
            hit_tokens: self.hit_tokens.saturating_sub(before.hit_tokens),
            output_tokens: self.output_tokens.saturating_sub(before.output_tokens),
        }
    }

    /// The sum of several engines.
    #[must_use]
    pub fn sum<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        all.into_iter().fold(Self::default(), |sum, one| Self {
            requests: sum.requests + one.requests,
            queried_tokens: sum.queried_tokens + one.queried_tokens,
            hit_tokens: sum.hit_tokens + one.hit_tokens,
            output_tokens: sum.output_tokens + one.output_tokens,
        })
    }

    /// The share of looked-up tokens that were found; 0 before any lookup.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        if self.queried_tokens == 0 {
            return 0.0;
        }
        self.hit_tokens as f64 / self.queried_tokens as f64
    }

    /// Reads a metrics page; several models of one engine are summed.
    ///
    /// # Errors
    /// If one of the names is not on the page.
    pub fn parse(page: &str) -> anyhow::Result<Self> {
        let read = |name: &str| total(page, name).with_context(|| format!("no {name} on the page"));
        Ok(Self {
            // A vLLM that has finished nothing yet does not show the counter of what it finished.
            requests: total(page, "vllm:request_success_total").unwrap_or(0),
            queried_tokens: read("vllm:prefix_cache_queries_total")?,
            hit_tokens: read("vllm:prefix_cache_hits_total")?,
            output_tokens: read("vllm:generation_tokens_total")?,
        })
    }
}

fn total(page: &str, name: &str) -> Option<u64> {
    sum(page, name).map(|sum| sum as u64)
}

/// The sum of a metric's series; `None` if there is none.
fn sum(page: &str, name: &str) -> Option<f64> {
    let values = page.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let value = match rest.strip_prefix('{') {
            Some(labels) => labels.rsplit_once('}')?.1,
            None => rest.strip_prefix(' ')?,
        };
        value.split_ascii_whitespace().next()?.parse::<f64>().ok()
    });
    values.reduce(|sum, value| sum + value)
}

/// A histogram of seconds, as Prometheus has it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// Upper bounds in seconds, ascending, with the count of all values up to each; the last is
    /// infinite.
    buckets: Vec<(f64, f64)>,
}

impl Histogram {
    /// Adds the histogram `name` of a metrics page; none on the page adds nothing.
    fn add(&mut self, page: &str, name: &str) {
        for line in page.lines() {
            let rest = line
                .strip_prefix(name)
                .and_then(|rest| rest.strip_prefix("_bucket{"));
            let Some((labels, value)) = rest.and_then(|rest| rest.rsplit_once('}')) else {
                continue;
            };
            let bound = labels
                .split_once("le=\"")
                .and_then(|(_, rest)| rest.split('"').next());
            let (Some(Ok(bound)), Ok(count)) =
                (bound.map(str::parse::<f64>), value.trim().parse::<f64>())
            else {
                continue;
            };
            match self.buckets.iter_mut().find(|(found, _)| *found == bound) {
                Some((_, sum)) => *sum += count,
                None => self.buckets.push((bound, count)),
            }
        }
        self.buckets
            .sort_by(|(one, _), (two, _)| one.total_cmp(two));
    }

    /// What came after `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let earlier = |bound: f64| {
            let found = before.buckets.iter().find(|(found, _)| *found == bound);
            found.map_or(0.0, |(_, count)| *count)
        };
        let buckets = self.buckets.iter();
        let buckets = buckets.map(|&(bound, count)| (bound, count - earlier(bound)));
        Self {
            buckets: buckets.collect(),
        }
    }

    /// The value that a share of all (0 to 1) does not exceed, in seconds, as Prometheus'
    /// `histogram_quantile` gives it: a straight line within the bucket, and the last finite bound
    /// beyond all of them. `None` without values.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let total = self.buckets.last().map(|(_, count)| *count)?;
        let rank = share * total;
        let (mut low, mut below) = (0.0, 0.0);
        for &(bound, count) in &self.buckets {
            if count >= rank && count > below {
                let high = if bound.is_finite() { bound } else { low };
                return Some(low + (high - low) * (rank - below) / (count - below));
            }
            (low, below) = (bound, count);
        }
        None
    }
}

/// Asks engines for what they counted, and simulated ones for more.
pub struct Engines {
    pool: Pool<HttpConnector, Full<Bytes>>,
    /// Their addresses, `ip:port`.
    pub addresses: Vec<String>,
}

impl Engines {
    /// The engines at `addresses`, each `ip:port`.
    #[must_use]
    pub fn new(addresses: Vec<String>) -> Self {
        let pool = Pool::builder(TokioExecutor::new()).build_http();
        Self { pool, addresses }
    }

    /// Every engine's counters, in the order of the addresses.
    ///
    /// # Errors
    /// If one does not answer, or not with vLLM's names.
    pub async fn counters(&self) -> anyhow::Result<Vec<Counters>> {
        let mut all = Vec::with_capacity(self.addresses.len());
        for address in &self.addresses {
            let page = self.call(Method::GET, address, "/metrics", "").await?;
            all.push(Counters::parse(&page).with_context(|| format!("http://{address}/metrics"))?);
        }
        Ok(all)
    }

    /// A histogram over all engines.
    ///
    /// # Errors
    /// If an engine does not answer.
    pub async fn histogram(&self, name: &str) -> anyhow::Result<Histogram> {
        let mut all = Histogram::default();
        for address in &self.addresses {
            let page = self.call(Method::GET, address, "/metrics", "").await?;
            all.add(&page, name);
        }
        Ok(all)
    }

    /// The sum of a counter's or gauge's series on every engine, 0 where there is none.
    ///
    /// # Errors
    /// If an engine does not answer.
    pub async fn values(&self, name: &str) -> anyhow::Result<Vec<f64>> {
        let mut all = Vec::with_capacity(self.addresses.len());
        for address in &self.addresses {
            let page = self.call(Method::GET, address, "/metrics", "").await?;
            all.push(sum(&page, name).unwrap_or(0.0));
        }
        Ok(all)
    }

    /// Posts `body` to `path` of every engine.
    ///
    /// # Errors
    /// If one does not answer with success.
    pub async fn post(&self, path: &str, body: &str) -> anyhow::Result<()> {
        for address in &self.addresses {
            self.call(Method::POST, address, path, body).await?;
        }
        Ok(())
    }

    /// Whether every engine says that it is well.
    pub async fn healthy(&self) -> bool {
        for address in &self.addresses {
            if self
                .call(Method::GET, address, "/health", "")
                .await
                .is_err()
            {
                return false;
            }
        }
        true
    }

    /// What any server answers to a GET.
    ///
    /// # Errors
    /// If it does not answer with success.
    pub async fn page(&self, address: &str, path: &str) -> anyhow::Result<String> {
        self.call(Method::GET, address, path, "").await
    }

    async fn call(
        &self,
        method: Method,
        address: &str,
        path: &str,
        body: &str,
    ) -> anyhow::Result<String> {
        let uri = format!("http://{address}{path}");
        let request = hyper::Request::builder()
            .method(method)
            .uri(&uri)
            .header("content-type", "application/json")
            .body(Full::new(Bytes::copy_from_slice(body.as_bytes())))?;
        let work = async {
            let response = self
                .pool
                .request(request)
                .await
                .with_context(|| uri.clone())?;
            let status = response.status();
            let body = Limited::new(response.into_body(), PAGE_BYTES_MAX)
                .collect()
                .await;
            let body = body
                .map_err(|error| anyhow::anyhow!("{uri}: {error}"))?
                .to_bytes();
            if status != StatusCode::OK && status != StatusCode::NO_CONTENT {
                bail!("{uri}: status {status}");
            }
            Ok(String::from_utf8_lossy(&body).into_owned())
        };
        tokio::time::timeout(TIMEOUT, work)
            .await
            .with_context(|| format!("{uri}: no answer"))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP vllm:prefix_cache_queries_total Tokens.\n\
        vllm:prefix_cache_queries_total{engine=\"0\",model_name=\"a}b\"} 1.2199e+04\n\
        vllm:prefix_cache_queries_created{engine=\"0\"} 9\n\
        vllm:prefix_cache_hits_total{engine=\"0\"} 6046.0\n\
        vllm:request_success_total{finished_reason=\"stop\"} 2\n\
        vllm:request_success_total{finished_reason=\"length\"} 3\n\
        vllm:generation_tokens_total 77\n";

    #[test]
    fn counters_are_summed_over_their_series() {
        let expected = Counters {
            requests: 5,
            queried_tokens: 12_199,
            hit_tokens: 6046,
            output_tokens: 77,
        };
        assert_eq!(Counters::parse(PAGE).unwrap(), expected);
        assert!((expected.hit_rate() - 0.4956).abs() < 1e-4);
        assert_eq!(expected.since(&expected), Counters::default());
    }

    #[test]
    fn quantiles_of_a_histogram_lie_within_their_bucket() {
        const PAGE: &str = "t_bucket{engine=\"0\",le=\"0.1\"} 10\n\
            t_bucket{engine=\"0\",le=\"0.2\"} 30\n\
            t_bucket{engine=\"0\",le=\"+Inf\"} 40\n\
            t_sum{engine=\"0\"} 9\n";
        let mut two = Histogram::default();
        assert_eq!(two.quantile(0.5), None);
        two.add(PAGE, "t");
        let one = two.clone();
        two.add(PAGE, "t");
        assert_eq!(two.since(&one), one);
        assert_eq!(one.since(&one).quantile(0.5), None);
        // 20 of 40: the middle of the 20 between 0.1 and 0.2.
        assert!((two.quantile(0.5).unwrap() - 0.15).abs() < 1e-9);
        assert!((two.quantile(0.1).unwrap() - 0.04).abs() < 1e-9);
        assert_eq!(two.quantile(0.9), Some(0.2));
    }

    #[test]
    fn a_page_of_something_else_is_an_error() {
        let error = Counters::parse("go_threads 7\n").unwrap_err();
        assert_eq!(
            error.to_string(),
            "no vllm:prefix_cache_queries_total on the page"
        );
    }
}
