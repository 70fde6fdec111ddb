//! `prefix-router explain`: how a request is read and where it goes, where two requests differ, and
//! what the prompts of a log share.
//!
//! Guarantee: everything that is told was found out by the filter's own code, or by the simulator's
//! engines; nothing of either is repeated here. Not here: sockets, Envoy.

mod compare;
mod describe;
mod gateway;
mod input;
mod left_out;
mod log;
mod pieces;
mod show;

use std::path::PathBuf;

use anyhow::Result;

use crate::engine::cost::EngineConfig;
use crate::print;

/// Explain how a request is read and routed, where two requests differ, or what a log's prompts
/// share
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = AFTER_HELP)]
pub struct ExplainArgs {
    /// Request bodies: one to explain, or two to compare; `-` reads standard input
    #[arg(value_name = "BODY", num_args = 0..=2, required_unless_present = "log")]
    bodies: Vec<PathBuf>,
    /// Compare BODY with this one
    #[arg(long, value_name = "BODY")]
    against: Option<PathBuf>,
    /// Explain a log, one JSON object a line. Beside a BODY: the requests that came before it
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// The filter's configuration, or an Envoy file with it [default: adaptive routing]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The pool, of several [default: the one that serves BODY]
    #[arg(long, value_name = "POOL")]
    pool: Option<String>,
    /// The path that the request was sent to; without it, the body's shape tells the API
    #[arg(long, default_value = "", hide_default_value = true)]
    path: String,
    /// A header of the request, as `name: value`: the tenant's, or content-encoding
    #[arg(long = "header", value_name = "HEADER")]
    headers: Vec<String>,
    /// The hosts, as `ip:port` [default: those of the configuration]
    #[arg(long, value_delimiter = ',', value_name = "HOSTS")]
    hosts: Vec<String>,
    /// What a host is busy with: HOST=REQUESTS, or HOST=REQUESTS:TOKENS that wait there
    #[arg(long = "load", value_name = "LOAD")]
    loads: Vec<String>,
    /// How often the same request came before
    #[arg(long, default_value_t = 0, value_name = "N",
          value_parser = clap::value_parser!(u32).range(0..=100_000))]
    seen: u32,
    /// Show no text of prompts
    #[arg(long)]
    no_text: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Hosts that a log is played on, if none are named
    #[arg(long, default_value_t = 7, value_name = "N", help_heading = "With a log",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    hosts_count: u32,
    /// Requests a second, if the log has no times [default: each waits for the one before]
    #[arg(long, value_name = "RATE", help_heading = "With a log",
          value_parser = crate::numbers::rate)]
    rate: Option<f64>,
    /// Tokens of an answer whose line does not say
    #[arg(long, default_value_t = 200, value_name = "TOKENS", help_heading = "With a log",
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    output_tokens: u32,
    #[command(flatten, next_help_heading = "The engines that a log is played on")]
    engine: EngineConfig,
}

const AFTER_HELP: &str = "\
A log's line is a request body, or an object with it:
  {\"body\": {…}, \"path\": \"/v1/chat/completions\", \"headers\": {\"name\": \"value\"},
   \"time\": 12.5, \"output_tokens\": 180, \"duration\": 3.2}
Only `body` is needed; `time` and `duration` are in seconds. Traces in Mooncake's format
(timestamp, input_length, output_length, hash_ids) are read as well.

Examples:
  prefix-router explain --config envoy.yaml --path /v1/chat/completions body.json
  prefix-router explain monday.json --against tuesday.json
  prefix-router explain --log requests.jsonl --hosts-count 7 --kv-tokens 300000";

/// Runs the command.
///
/// # Errors
/// If a file cannot be read or is not what it should be.
pub fn run(args: &ExplainArgs) -> Result<()> {
    print::result(format_args!("{}", render(args, print::columns())?))
}

/// What the command prints, for a terminal of this many columns, 40 at least.
///
/// # Errors
/// As [`run`].
pub fn render(args: &ExplainArgs, columns: usize) -> Result<String> {
    let mut setup = input::Setup::new(args)?;
    let mut bodies = args.bodies.iter().chain(&args.against);
    let (first, second) = (bodies.next(), bodies.next());
    anyhow::ensure!(
        bodies.next().is_none(),
        "--against: compares two bodies, got three"
    );
    match (first, second) {
        (None, _) => {
            setup.choose(args, &[])?;
            log::render(args, &setup, columns)
        }
        (Some(path), None) => {
            let body = setup.body(path)?;
            setup.choose(args, &[&body])?;
            let told = describe::describe(args, &setup, &body)?;
            printed(args, &told, |told| show::description(told, columns))
        }
        (Some(left), Some(right)) => {
            let (left, right) = (setup.body(left)?, setup.body(right)?);
            setup.choose(args, &[&left, &right])?;
            let told = compare::compare(args, &setup, &left, &right)?;
            printed(args, &told, |told| compare::show(told, columns))
        }
    }
}

fn printed<T: serde::Serialize>(
    args: &ExplainArgs,
    told: &T,
    show: impl Fn(&T) -> String,
) -> Result<String> {
    Ok(if args.json {
        serde_json::to_string(told)? + "\n"
    } else {
        show(told)
    })
}
