//! What the demo runs: its options, and the sizes that fit two processor cores.
//!
//! Guarantee: what is scaled down is stated, with the rest of the conditions, above every result.
//! Not here: running it.

use std::net::SocketAddr;
use std::time::Duration;

use crate::load::driver::Until;
use crate::workload::options::Kind;
use crate::workload::{Plan, WorkloadArgs};

/// Seven engines, as in the study.
const HOSTS: u16 = 7;

/// The scaled W1: a quarter of the study's 2,600 prompts …
const PROMPTS: u32 = 650;
/// … and of each engine's 1.2 M tokens of KV cache, so that random routing keeps its 24 % …
const KV_TOKENS: u64 = 300_000;
/// … and answers of 64 tokens instead of 220, since each token is an event through Envoy.
const OUTPUT_TOKENS: u32 = 64;
/// 80 % of what random routing can serve at this size. A request costs an engine 0.185 s: 2,370
/// prompt tokens that no cache holds (3,120 × 76 %) at 14,000 a second with 3 % more for attention,
/// 6 ms of decoding 64 tokens, and 4 ms of the 14 ms that each step of 8,192 tokens costs at least.
/// Seven engines serve 37.8 a second then; the study's random routing was stable up to 96.5 % of
/// this sum (33.7 of 34.9 at full size), which is 36.4.
const RATE: f64 = 29.0;

/// The study's KV cache, in tokens.
const KV_TOKENS_FULL: u64 = 1_200_000;

/// Four uses of each prompt in the mean; hits settle then. An LRU model of seven hosts with fixed
/// homes hits 79 % of the tokens in the 1,300 requests after a warm-up of 650, 87 % after 1,300,
/// 91 % after 1,950, 92 % after 2,600 and 91 % after 3,700. That is more than the study's 84 % at
/// full size, because answers of 64 tokens push less out of the caches than those of 220.
const WARMUP: u64 = 2600;
/// The same for full-size W1.
const WARMUP_FULL: u64 = 8000;

/// The trace is played as recorded, from its start, with the caches cold as they were.
const TRACE_REQUESTS: usize = 1500;
/// Arrivals as in the trace, but this much closer together: random routing then works near the
/// limit of what it can serve (the study: 1.3 on the whole trace), without being beyond it.
const TRACE_RATE: f64 = 1.2;
/// Its engines' clock runs this many times faster than real time: 425 s for each policy are 85 s.
const TRACE_SPEED: f64 = 5.0;

/// How fast the engines' clock runs while caches are filled.
const WARMUP_SPEED: f64 = 20.0;

/// Seconds that are measured for each policy.
const DURATION: f64 = 60.0;

/// Which engines are behind Envoy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineKind {
    /// Simulated ones: scheduling and prefix cache as vLLM has them, the timing of a large model.
    #[default]
    Simulated,
    /// Real llama.cpp servers with a tiny model of random weights, fetched from Python's package
    /// index (55 MB). Their load is conversations of tenants, which wait for their answers.
    #[value(name = "llama.cpp")]
    LlamaCpp,
}

/// Options of `demo`.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoArgs {
    /// The engines.
    #[arg(long, value_enum, default_value = "simulated")]
    pub(super) engine: EngineKind,
    #[command(flatten)]
    pub(super) workload: WorkloadArgs,
    /// Engines; 7, or 3 real ones.
    #[arg(long, value_parser = clap::value_parser!(u16).range(2..=64))]
    pub(super) hosts: Option<u16>,
    /// Real engines: tenants, each with a system prompt and two conversations [default: 12].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) tenants: Option<u32>,
    /// Real engines: turns of each conversation [default: 8].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=20))]
    pub(super) turns: Option<u32>,
    /// Seconds that are measured for each policy, in engine time [default: 60]; a trace ends by
    /// itself.
    #[arg(long, value_name = "SECONDS", conflicts_with = "trace",
          value_parser = crate::numbers::seconds)]
    pub(super) duration: Option<f64>,
    /// W1 or W5 at the study's full size: four times the prompts and the KV cache, longer answers.
    #[arg(long)]
    pub(super) full: bool,
    /// Tokens of KV cache in each engine.
    #[arg(long, value_name = "TOKENS")]
    pub(super) kv_tokens: Option<u64>,
    /// How many times faster than real time the engines' clock runs while measuring. Requests
    /// come as much faster, and all times are given in engine time.
    #[arg(long)]
    pub(super) speed: Option<f64>,
    /// Requests before measuring, with one token of answer each and a clock 20 times as fast.
    #[arg(long, value_name = "REQUESTS")]
    pub(super) warmup: Option<u64>,
    /// First of the ports on which the engines listen. Where a prefix lives depends on the
    /// engines' addresses, so that the same ports give the same placement.
    #[arg(long, value_name = "PORT", default_value_t = 19_101)]
    engine_port: u16,
    /// Port on which Envoy listens; 0: any free one.
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    port: u16,
    /// Address on which a page shows the rounds while they run; port 0: any free one.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    page: SocketAddr,
    /// Show no page.
    #[arg(long, conflicts_with = "page")]
    no_page: bool,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub(super) json: bool,
}

/// Where a demo listens.
#[derive(Clone, Debug)]
pub(super) struct Places {
    /// The engines' ports.
    pub engine_ports: Vec<u16>,
    /// Envoy's port, or 0.
    pub port: u16,
    /// Where the page is, if one is wanted.
    pub page: Option<SocketAddr>,
}

impl Places {
    /// For so many engines.
    pub(super) fn new(args: &DemoArgs, hosts: u16) -> anyhow::Result<Self> {
        let last = args.engine_port.checked_add(hosts - 1);
        anyhow::ensure!(
            args.engine_port > 0 && last.is_some(),
            "--engine-port: expected {hosts} ports from it on to exist, got {}",
            args.engine_port
        );
        Ok(Self {
            engine_ports: (args.engine_port..).take(hosts.into()).collect(),
            port: args.port,
            page: (!args.no_page).then_some(args.page),
        })
    }
}

/// What will be run on simulated engines.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    /// The requests.
    pub plan: Plan,
    /// In words.
    pub workload: String,
    /// Where it listens.
    pub places: Places,
    /// Tokens of KV cache in each engine.
    pub kv_tokens: u64,
    /// Engine time per real time while measuring.
    pub speed: f64,
    /// The same while warming up.
    pub warmup_speed: f64,
    /// Requests before measuring.
    pub warmup: u64,
    /// The measured stretch.
    pub until: Until,
    /// Its length in engine time.
    pub window: Duration,
}

impl Settings {
    pub(super) fn new(args: &DemoArgs) -> anyhow::Result<Self> {
        let trace = args.workload.trace.is_some();
        let single = matches!(args.workload.workload, Kind::W1 | Kind::W5);
        let scaled = single && !args.full && !trace;
        anyhow::ensure!(
            !args.full || (single && !trace),
            "--full: only W1 and W5 have a smaller size; this workload always runs in full"
        );
        for (flag, given) in [("--tenants", args.tenants), ("--turns", args.turns)] {
            anyhow::ensure!(given.is_none(), "{flag}: only for --engine llama.cpp");
        }
        let hosts = args.hosts.unwrap_or(HOSTS);
        let share = f64::from(hosts) / f64::from(HOSTS);
        let mut workload = args.workload.clone();
        let sizes_given = args.kv_tokens.is_some() || sized(&workload);
        if scaled {
            let prompts = (f64::from(PROMPTS) * share).round() as u32;
            workload.prompts.get_or_insert(prompts);
            workload.output_tokens.get_or_insert(OUTPUT_TOKENS);
        }
        if trace {
            workload.trace_requests.get_or_insert(TRACE_REQUESTS);
        }
        let default_rate = match (trace, args.workload.workload, scaled) {
            (true, ..) => TRACE_RATE,
            (_, Kind::W1, true) => RATE,
            _ => workload.plan()?.rate(),
        };
        workload.rate.get_or_insert(default_rate * share);
        let plan = workload.plan()?;
        let speed = args.speed.unwrap_or(if trace { TRACE_SPEED } else { 1.0 });
        anyhow::ensure!(
            speed.is_finite() && (0.01..=100.0).contains(&speed),
            "--speed: expected a number from 0.01 to 100, got {speed}"
        );
        let (until, window) = match &plan {
            Plan::Trace(trace) => (Until::End, trace.length()),
            _ => {
                let seconds = args.duration.unwrap_or(DURATION);
                let window = Duration::from_secs_f64(seconds);
                (Until::Elapsed(window), window)
            }
        };
        anyhow::ensure!(
            window >= Duration::from_secs(1),
            "the trace: expected at least 1 second, got {}",
            window.as_secs_f64()
        );
        let kv_tokens = if scaled { KV_TOKENS } else { KV_TOKENS_FULL };
        let warmup = match (trace, args.full) {
            (true, _) => 0,
            (false, true) => WARMUP_FULL,
            (false, false) => WARMUP,
        };
        Ok(Self {
            workload: describe(&workload, &plan, sizes_given),
            plan,
            places: Places::new(args, hosts)?,
            kv_tokens: args.kv_tokens.unwrap_or(kv_tokens),
            speed,
            warmup_speed: WARMUP_SPEED.max(speed),
            warmup: args.warmup.unwrap_or(warmup),
            until,
            window,
        })
    }

    /// What the results hold for, in sentences.
    pub(super) fn conditions(&self, envoy_version: &str) -> Vec<String> {
        let hosts = self.places.engine_ports.len();
        let clock = if (self.speed - 1.0).abs() < 1e-9 {
            "in real time".to_owned()
        } else {
            format!(
                "{} times as fast as real time (all times are engine time)",
                self.speed
            )
        };
        let warmup = if self.warmup == 0 {
            "Measured from cold caches, without warm-up".to_owned()
        } else {
            format!(
                "Warm-up, not in the figures: {} requests with one token of answer, clock × {}",
                self.warmup, self.warmup_speed
            )
        };
        vec![
            self.workload.clone(),
            format!(
                "{hosts} simulated engines (70B on 8 × H100), {} tokens of KV cache each, behind \
                 Envoy {envoy_version}.",
                thousands(self.kv_tokens)
            ),
            format!(
                "{warmup}; then {:.0} s measured, {clock}. Every policy starts from cold engines \
                 and gets the same requests.",
                self.window.as_secs_f64()
            ),
        ]
    }
}

/// Whether options decide how much a request costs, or how many come.
fn sized(args: &WorkloadArgs) -> bool {
    let WorkloadArgs {
        rate,
        prompts,
        zipf,
        prompt_tokens,
        question_tokens,
        output_tokens,
        ..
    } = args;
    let counts = [prompts, question_tokens, output_tokens];
    let numbers = [rate, zipf, prompt_tokens];
    counts.iter().any(|count| count.is_some()) || numbers.iter().any(|number| number.is_some())
}

fn describe(args: &WorkloadArgs, plan: &Plan, sizes_given: bool) -> String {
    let load = if sizes_given {
        ""
    } else {
        ", 80 % of what random routing can serve"
    };
    match plan {
        Plan::Single(single) => format!(
            "{:?}: {} prompts of {:.0} tokens (Zipf {}) with questions of {}, {} tokens of \
             answer, {:.1} requests/s{load}.",
            args.workload,
            thousands(single.prompts.into()),
            single.prompt_tokens,
            single.zipf,
            single.question_tokens,
            single.output_tokens,
            single.rate
        ),
        Plan::Trace(trace) => format!(
            "Trace: its first {} requests, arriving {} times as fast as recorded.",
            thousands(trace.requests() as u64),
            trace.speed
        ),
        other => format!(
            "{:?} of the study, {} a second.",
            args.workload,
            other.rate()
        ),
    }
}

/// 1234567 → "1,234,567".
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
impl DemoArgs {
    /// These arguments as the command line takes them, for tests.
    pub(super) fn parsed(arguments: &[&str]) -> Result<Self, clap::Error> {
        #[derive(clap::Parser)]
        struct Arguments {
            #[command(flatten)]
            demo: DemoArgs,
        }
        let arguments = [&["demo"], arguments].concat();
        <Arguments as clap::Parser>::try_parse_from(arguments).map(|parsed| parsed.demo)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(arguments: &[&str]) -> anyhow::Result<Settings> {
        Settings::new(&DemoArgs::parsed(arguments)?)
    }

    #[test]
    fn the_default_is_w1_scaled_as_a_whole() {
        let settings = settings(&[]).unwrap();
        let Plan::Single(plan) = &settings.plan else {
            panic!("{:?}", settings.plan)
        };
        assert_eq!(
            (plan.prompts, plan.output_tokens, plan.rate),
            (650, 64, 29.0)
        );
        assert_eq!(settings.kv_tokens * 4, 1_200_000);
        assert_eq!(plan.prompts * 4, 2600);
        assert_eq!(
            settings.places.engine_ports,
            (19_101..19_108).collect::<Vec<_>>()
        );
        assert!(settings.window >= Duration::from_secs(40) && settings.speed <= 2.0);
    }

    #[test]
    fn fewer_hosts_get_less_of_everything_but_memory_each() {
        let settings = settings(&["--hosts", "14"]).unwrap();
        assert!(
            settings
                .workload
                .contains("80 % of what random routing can serve")
        );
        let Plan::Single(plan) = &settings.plan else {
            panic!("{:?}", settings.plan)
        };
        assert_eq!((plan.prompts, plan.rate), (1300, 58.0));
        assert_eq!(settings.kv_tokens, 300_000);
    }

    #[test]
    fn the_load_s_share_of_capacity_is_claimed_for_the_known_sizes_only() {
        let other = settings(&["--output-tokens", "200"]).unwrap();
        assert!(!other.workload.contains('%'), "{}", other.workload);
        let other = settings(&["--kv-tokens", "200000"]).unwrap();
        assert!(!other.workload.contains('%'), "{}", other.workload);
    }

    #[test]
    fn full_size_is_one_flag_away() {
        let settings = settings(&["--full"]).unwrap();
        let Plan::Single(plan) = &settings.plan else {
            panic!("{:?}", settings.plan)
        };
        assert_eq!(
            (plan.prompts, plan.output_tokens, plan.rate),
            (2600, 220, 26.7)
        );
        assert_eq!(settings.kv_tokens, 1_200_000);
    }

    #[test]
    fn what_cannot_be_run_is_refused_by_its_flag() {
        #[track_caller]
        fn refused(arguments: &[&str], expected: &str) {
            let error = format!("{:#}", settings(arguments).unwrap_err());
            assert!(error.contains(expected), "{expected:?} is not in {error:?}");
        }
        refused(
            &["--engine-port", "65533"],
            "--engine-port: expected 7 ports",
        );
        refused(&["--hosts", "1"], "--hosts");
        refused(&["--rate", "0"], "expected a rate from 0.001");
        refused(&["--duration", "0"], "expected seconds from 1");
        refused(&["--duration", "nan"], "expected seconds from 1");
        refused(&["--speed", "0"], "--speed: expected a number from 0.01");
        refused(&["--full", "--workload", "W2"], "--full: only W1 and W5");
        refused(
            &["--trace", "no/such/file"],
            "no/such/file: cannot be opened",
        );
    }
}
