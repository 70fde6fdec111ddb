//! `/metrics` in Prometheus' text form, under the names vLLM gives them.
//!
//! Guarantee: names and units are vLLM's; seconds are the engine's own clock's. What vLLM does not
//! have starts with `sim:`. Not here: what is counted (scheduler.rs, server.rs).

use std::fmt::Write as _;

use crate::engine::scheduler::Counters;

/// Upper bounds in seconds of vLLM's time-to-first-token histogram.
const BOUNDS_S: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];

/// A total's name, its help text, and where it is counted.
type Total = (&'static str, &'static str, fn(&Counters) -> u64);

const TOTALS: [Total; 10] = [
    (
        "vllm:prefix_cache_queries_total",
        "Prompt tokens the prefix cache was asked for.",
        |counters| counters.queried_tokens,
    ),
    (
        "vllm:prefix_cache_hits_total",
        "Of those, found.",
        |counters| counters.hit_tokens,
    ),
    (
        "vllm:prompt_tokens_total",
        "Prompt tokens processed.",
        |counters| counters.prompt_tokens,
    ),
    (
        "vllm:prompt_tokens_cached_total",
        "Prompt tokens from the cache.",
        |counters| counters.hit_tokens,
    ),
    (
        "vllm:generation_tokens_total",
        "Tokens generated.",
        |counters| counters.generated_tokens,
    ),
    (
        "vllm:num_preemptions_total",
        "Requests computed again.",
        |counters| counters.preemptions,
    ),
    (
        "vllm:request_success_total",
        "Requests answered to their end.",
        |counters| counters.finished,
    ),
    (
        "sim:requests_cancelled_total",
        "Requests whose client left.",
        |counters| counters.cancelled,
    ),
    (
        "sim:computed_tokens_total",
        "Tokens computed.",
        |counters| counters.computed_tokens,
    ),
    ("sim:steps_total", "Steps taken.", |counters| counters.steps),
];

/// Times, by vLLM's bounds.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    counts: [u64; BOUNDS_S.len()],
    count: u64,
    sum_ns: u64,
}

impl Histogram {
    /// Adds one time.
    pub fn add(&mut self, ns: u64) {
        let seconds = ns as f64 / 1e9;
        self.count += 1;
        self.sum_ns += ns;
        let bounds = BOUNDS_S.iter().zip(&mut self.counts);
        for (_, count) in bounds.filter(|(bound, _)| seconds <= **bound) {
            *count += 1;
        }
    }
}

/// A page being written.
#[derive(Debug)]
pub struct Page {
    text: String,
    labels: String,
}

impl Page {
    /// An empty page whose series all carry this model's name.
    #[must_use]
    pub fn new(model: &str) -> Self {
        let model = model
            .replace('\\', "\\\\")
            .replace('"', "\\\"")
            .replace('\n', "\\n");
        let labels = format!("engine=\"0\",model_name=\"{model}\"");
        Self {
            text: String::new(),
            labels,
        }
    }

    /// A value that goes up and down.
    pub fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.head(name, help, "gauge");
        let _ = writeln!(self.text, "{name}{{{}}} {value}", self.labels);
    }

    /// All totals.
    pub fn counters(&mut self, counters: &Counters) {
        for (name, help, total) in TOTALS {
            self.head(name, help, "counter");
            let _ = writeln!(self.text, "{name}{{{}}} {}", self.labels, total(counters));
        }
    }

    /// Times.
    pub fn histogram(&mut self, name: &str, help: &str, times: &Histogram) {
        self.head(name, help, "histogram");
        let labels = self.labels.clone();
        for (bound, count) in BOUNDS_S.iter().zip(times.counts) {
            let _ = writeln!(
                self.text,
                "{name}_bucket{{{labels},le=\"{bound:?}\"}} {count}"
            );
        }
        let Histogram { count, sum_ns, .. } = times;
        let _ = writeln!(self.text, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
        let _ = writeln!(self.text, "{name}_sum{{{labels}}} {}", *sum_ns as f64 / 1e9);
        let _ = writeln!(self.text, "{name}_count{{{labels}}} {count}");
    }

    /// The page.
    #[must_use]
    pub fn finish(self) -> String {
        self.text
    }

    fn head(&mut self, name: &str, help: &str, kind: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }
}
