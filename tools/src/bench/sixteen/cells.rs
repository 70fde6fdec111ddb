//! The sixteen setups, and the sizes at which they are run.
//!
//! Guarantee: a cell's name says all that tells it from the others; what is scaled is in
//! [`Sizes::conditions`], above every result. Not here: running them (mod.rs).

use std::time::Duration;

use anyhow::Context as _;
use hyper::header::{HeaderMap, HeaderValue};
use serde::Serialize;
use serde_json::json;

use super::SixteenArgs;
use crate::harness::Plan;
use crate::load::driver::Until;
use crate::round::{Model, Setup, Stretch};
use crate::workload::arrivals::Spread;
use crate::workload::several::Several;
use crate::workload::single::{Single, SingleRequests};
use crate::workload::{Form, Workload};

/// Engines, as in AWS's announcement.
pub(super) const HOSTS: u16 = 7;

/// The study's KV cache in each engine, in tokens.
pub(super) const KV_TOKENS: u64 = 1_200_000;

/// W1 with long prompts: so many of them, Zipf 0.55 …
const PROMPTS: u32 = 1050;
/// … of so many tokens in the mean, that random routing finds 25 % of the tokens in the caches.
/// In virtual time (`simulate --workload W1 --load 1 --rate 12 --prompt-tokens 8000
/// --output-tokens 64 --policy random`, seeds 1 and 2): 975 prompts give 27.8 %, 1,100 give 24.6 %.
const PROMPT_TOKENS: f64 = 8000.0;
/// Tokens of a question.
const QUESTION_TOKENS: u32 = 120;
/// Tokens of an answer in the mean; each is an event through Envoy.
const OUTPUT_TOKENS: u32 = 64;

/// What random routing can serve of that on seven engines, in requests a second. In virtual time,
/// as above with 1,000 prompts, the tokens served stop growing there: 100,900 a second at 13
/// requests, 111,700 at 14, 119,900 at 15, 118,400 at 16, and 119,000 are 14.5 requests of 8,184.
const CAPACITY: f64 = 14.5;
/// The load at which hits and times are compared, as a share of it.
const LOAD: f64 = 0.8;
/// The load at which throughput is compared: AWS's +16 % needs more than random routing can serve.
const HIGH_LOAD: f64 = 1.17;

/// Short prompts have the lengths of ShareGPT's first turns: 161 tokens in the mean (the vLLM
/// paper's count), most of them far shorter than the longest.
const SHORT_PROMPT_TOKENS: f64 = 101.0;
/// The rest of those 161.
const SHORT_QUESTION_TOKENS: u32 = 60;
/// Standard deviation of their length's logarithm.
const SHORT_SIGMA: f64 = 1.0;
/// Short requests a second: as many events through Envoy as the long ones' at high load.
const SHORT_RATE: f64 = 15.0;

/// Requests that fill the caches: three uses of each prompt in the mean.
const WARMUP: u64 = 3150;
/// How fast the engines' clock runs meanwhile.
const WARMUP_SPEED: f64 = 20.0;

/// Requests of a workload that are set apart for each stretch, so that none asks what another has
/// asked: 10 times what the longest one sends.
const STRETCH_REQUESTS: u64 = 20_000;

/// SageMaker's header that names the inference component.
const COMPONENT_HEADER: &str = "x-amzn-sagemaker-inference-component";

/// One of the sixteen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    /// Inference components instead of a single model.
    pub components: bool,
    /// The API.
    pub form: Form,
    /// Whether answers are streamed.
    pub stream: bool,
    /// One gateway, or two that share nothing.
    pub gateways: u16,
}

impl Cell {
    /// All sixteen.
    pub(super) fn all() -> Vec<Self> {
        let mut cells = Vec::new();
        for components in [false, true] {
            for form in [Form::Native, Form::Chat] {
                for stream in [true, false] {
                    for gateways in [1, 2] {
                        cells.push(Self {
                            components,
                            form,
                            stream,
                            gateways,
                        });
                    }
                }
            }
        }
        cells
    }

    /// E.g. `single-native-stream-1`.
    pub(super) fn name(self) -> String {
        let models = if self.components {
            "components"
        } else {
            "single"
        };
        let form = if self.form == Form::Native {
            "native"
        } else {
            "openai"
        };
        let answer = if self.stream { "stream" } else { "whole" };
        format!("{models}-{form}-{answer}-{}", self.gateways)
    }

    /// The cells with these names, in their own order; all without any.
    pub(super) fn named(names: &[String]) -> anyhow::Result<Vec<Self>> {
        let all = Self::all();
        for name in names {
            anyhow::ensure!(
                all.iter().any(|cell| cell.name() == *name),
                "--only: there is no cell {name:?}; the cells are {}",
                all.iter()
                    .map(|cell| cell.name())
                    .collect::<Vec<_>>()
                    .join(", ")
            );
        }
        let wanted = |cell: &Cell| names.is_empty() || names.contains(&cell.name());
        Ok(all.into_iter().filter(wanted).collect())
    }

    /// What its rounds are played with.
    pub(super) fn setup(self) -> Setup {
        let models = if self.components {
            ["llama", "qwen"].map(component).into()
        } else {
            vec![Model::plain("sim", "engines")]
        };
        Setup {
            file: if self.components {
                "envoy/pools.yaml"
            } else {
                "envoy/envoy.yaml"
            },
            with_filter: |plan| plan,
            without_filter: if self.components {
                by_header
            } else {
                |plan| plan
            },
            gateways: self.gateways,
            port: 0,
            form: self.form,
            stream: self.stream,
            models,
            named: false,
        }
    }

    fn workloads(self) -> u32 {
        if self.components { 2 } else { 1 }
    }
}

/// An inference component of `envoy/pools.yaml`, by its cluster.
fn component(cluster: &'static str) -> Model {
    let (name, value) = match cluster {
        "llama" => ("llama-70b", "llama-component"),
        _ => ("qwen-72b", "qwen-component"),
    };
    let value = HeaderValue::from_static(value);
    let headers = HeaderMap::from_iter([(
        hyper::header::HeaderName::from_static(COMPONENT_HEADER),
        value,
    )]);
    Model {
        name,
        headers,
        cluster,
    }
}

/// Without the filter nobody sets the pool's header: the route then looks for the client's own.
fn by_header(plan: Plan) -> Plan {
    let headers = json!([{"name": COMPONENT_HEADER, "string_match": {"exact": "qwen-component"}}]);
    plan.edit_http(|http| {
        let route = http.pointer_mut("/route_config/virtual_hosts/0/routes/0/match/headers");
        *route.context("the first route has no match by header")? = headers;
        Ok(())
    })
}

/// What is measured of a cell and policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Long prompts at 80 % of what random routing can serve.
    Long,
    /// Long prompts at 117 %.
    High,
    /// Short prompts.
    Short,
}

/// How much is run. Its JSON is the part of a row's key that says so.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Sizes {
    /// Engine time per real time while measuring.
    pub speed: f64,
    /// Seconds of engine time that long prompts are measured for.
    pub window: f64,
    /// Requests that fill the caches.
    pub warmup: u64,
    prompts: u32,
    prompt_tokens: f64,
    output_tokens: u32,
    capacity: f64,
    loads: (f64, f64),
    short: (f64, u32, f64, f64),
}

impl Sizes {
    pub(super) fn new(args: &SixteenArgs) -> anyhow::Result<Self> {
        let fine = |name: &str, value: f64, least: f64, most: f64| {
            anyhow::ensure!(
                (least..=most).contains(&value),
                "--{name}: expected a number from {least} to {most}, got {value}"
            );
            Ok(value)
        };
        Ok(Self {
            speed: fine("speed", args.speed, 0.1, 20.0)?,
            window: fine("window", args.window, 3.0, 3600.0)?,
            warmup: args.warmup.unwrap_or(WARMUP).clamp(1, STRETCH_REQUESTS),
            prompts: PROMPTS,
            prompt_tokens: PROMPT_TOKENS,
            output_tokens: OUTPUT_TOKENS,
            capacity: CAPACITY,
            loads: (LOAD, HIGH_LOAD),
            short: (
                SHORT_PROMPT_TOKENS,
                SHORT_QUESTION_TOKENS,
                SHORT_SIGMA,
                SHORT_RATE,
            ),
        })
    }

    /// The clock's speed during the warm-up.
    pub(super) fn warmup_speed(&self) -> f64 {
        WARMUP_SPEED.max(self.speed)
    }

    /// A part of the run.
    pub(super) fn stretch(&self, part: Part) -> Stretch {
        let second = Duration::from_secs_f64;
        let (title, settle, window) = match part {
            Part::Long => ("long, 80 %", 0.0, self.window),
            Part::High => ("long, 117 %", self.window / 3.0, self.window * 2.0 / 3.0),
            Part::Short => ("short", 0.0, self.window / 2.0),
        };
        Stretch {
            title,
            speed: self.speed,
            settle: second(settle),
            window: second(window),
            until: Until::Elapsed(second(settle + window)),
        }
    }

    /// The requests of a part; the warm-up's are those before the first one's.
    pub(super) fn workload(
        &self,
        cell: Cell,
        seed: u64,
        part: Option<Part>,
    ) -> anyhow::Result<Box<dyn Workload>> {
        let count = cell.workloads();
        let (rate, skip) = match part {
            None => (self.capacity * LOAD, 0),
            Some(Part::Long) => (self.capacity * LOAD, STRETCH_REQUESTS),
            Some(Part::High) => (self.capacity * HIGH_LOAD, 2 * STRETCH_REQUESTS),
            Some(Part::Short) => (SHORT_RATE, 0),
        };
        let mut all: Vec<Box<dyn Workload>> = Vec::new();
        for model in 0..count {
            let mut plan = Single {
                prompts: self.prompts / count,
                zipf: 0.55,
                prompt_tokens: self.prompt_tokens,
                sigma: 0.3,
                question_tokens: QUESTION_TOKENS,
                output_tokens: self.output_tokens,
                rate: rate / f64::from(count),
                spread: Spread::Even,
                viral: None,
                // Models answer different prompts.
                seed: seed.wrapping_mul(2).wrapping_add(model.into()),
            };
            if part == Some(Part::Short) {
                plan.prompts = 0;
                plan.prompt_tokens = SHORT_PROMPT_TOKENS;
                plan.sigma = SHORT_SIGMA;
                plan.question_tokens = SHORT_QUESTION_TOKENS;
            }
            all.push(Box::new(SingleRequests::new(plan)?));
        }
        Ok(Box::new(Several::new(all, skip)))
    }

    /// Real seconds that a cell takes, for the time left before one has been run: both policies'
    /// start (4 s for each gateway), warm-up, stretches and their drains (a quarter more).
    pub(super) fn cell_seconds(&self, cell: Cell) -> f64 {
        let start = 4.0 * f64::from(cell.gateways);
        let warmup = self.warmup as f64 / (self.capacity * LOAD * self.warmup_speed());
        let measured = self.window * 2.5 / self.speed;
        2.0 * (start + warmup + measured * 1.25)
    }

    /// What the results hold for, in sentences.
    pub(super) fn conditions(&self, envoy_version: &str) -> Vec<String> {
        let (low, high) = (self.capacity * LOAD, self.capacity * HIGH_LOAD);
        vec![
            format!(
                "{HOSTS} simulated engines (70B on 8 × H100, 1,200,000 tokens of KV cache each) \
                 behind real Envoys {envoy_version}; random routing is the same Envoys without the \
                 filter. With inference components, two models share all engines and their caches, \
                 and a header names the model."
            ),
            format!(
                "Long prompts: {} shared ones of {:.0} tokens (Zipf 0.55), half for each of two \
                 components, with questions of {QUESTION_TOKENS} and answers of {} tokens; their \
                 number is fitted so that random routing hits 25 %. Hits, times and shares at \
                 {low:.1} requests/s, 80 % of what random routing can serve; tokens/s at {high:.1}, \
                 which is 117 % of it: tokens that the engines produced between a third of that \
                 stretch and its end.",
                self.prompts, self.prompt_tokens, self.output_tokens
            ),
            format!(
                "Short prompts: ShareGPT's lengths (161 tokens in the mean), {SHORT_RATE:.0} \
                 requests/s, nothing shared: there is nothing to gain, and nothing may be lost."
            ),
            format!(
                "Warm-up, not in the figures: {} requests with one token of answer. Then the \
                 engines' clock and the arrivals run {} times as fast as real time, for {:.0} s, \
                 {:.0} s and {:.0} s of engine time. All times are engine time, so what Envoy and \
                 this machine take counts {} times. A row is marked ! when requests left late or \
                 engines lost time.",
                self.warmup,
                self.speed,
                self.window,
                self.window,
                self.window / 2.0,
                self.speed
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_sixteen_and_each_has_its_name() {
        let names: std::collections::BTreeSet<_> =
            Cell::all().into_iter().map(Cell::name).collect();
        assert_eq!(names.len(), 16);
        assert!(names.contains("single-native-stream-1"));
        assert!(names.contains("components-openai-whole-2"));
        assert!(names.iter().all(|name| name.len() <= 26));
    }

    #[test]
    fn cells_are_taken_by_name_in_their_own_order() {
        let names = |wanted: &[&str]| {
            let wanted: Vec<String> = wanted.iter().map(|&name| name.to_owned()).collect();
            Cell::named(&wanted).map(|cells| cells.into_iter().map(Cell::name).collect::<Vec<_>>())
        };
        assert_eq!(names(&[]).unwrap().len(), 16);
        assert_eq!(
            names(&["single-openai-whole-2", "single-native-stream-1"]).unwrap(),
            ["single-native-stream-1", "single-openai-whole-2"]
        );
        let error = names(&["single"]).unwrap_err().to_string();
        assert!(
            error.contains("--only: there is no cell \"single\""),
            "{error}"
        );
        assert!(error.contains("components-native-whole-1"), "{error}");
    }

    #[test]
    fn the_whole_fits_an_hour() {
        let sizes = Sizes::new(&SixteenArgs::default()).unwrap();
        let all = Cell::all().into_iter();
        let seconds: f64 = all.map(|cell| sizes.cell_seconds(cell)).sum();
        assert!(seconds < 3600.0, "{seconds} s");
    }

    #[test]
    fn no_stretch_asks_what_another_has_asked() {
        let sizes = Sizes::new(&SixteenArgs::default()).unwrap();
        for cell in Cell::all() {
            let mut seen = std::collections::BTreeSet::new();
            for part in [None, Some(Part::Long), Some(Part::High), Some(Part::Short)] {
                let mut workload = sizes.workload(cell, 1, part).unwrap();
                for _ in 0..300 {
                    let request = workload.next().unwrap();
                    let mut text = String::new();
                    request.messages[1].write(&mut text);
                    assert!(seen.insert(text), "{} {part:?}", cell.name());
                    let mean = match part {
                        Some(Part::Short) => 64..=2000,
                        _ => 300..=33_000,
                    };
                    assert!(mean.contains(&request.prompt_tokens()));
                }
            }
        }
    }
}
