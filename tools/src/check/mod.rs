//! `prefix-router check`: is this filter configuration valid, and what does it mean?
//!
//! Guarantee: what is accepted here is what the filter accepts, for it is the same parser. Not
//! here: whether Envoy accepts the rest of its file (`envoy --mode validate`).

mod admin;
mod chain;
mod meaning;
mod routes;
mod surroundings;

use std::io::Read as _;
use std::path::PathBuf;

use crate::print::{columns, say};
use anyhow::{Context as _, Result, bail};
use prefix_router::config::Config;
use serde::Serialize;
use serde_json::Value;
use serde_saphyr::UserMessageFormatter;

/// Options of `check`.
#[derive(Clone, Debug, clap::Args)]
pub struct CheckArgs {
    /// The filter's configuration as JSON, or an Envoy file (YAML or JSON) with the filter in it;
    /// `-` reads standard input.
    file: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// What was found out about one configuration.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Where it stands in the file, as a JSON Pointer; empty if it is the whole file.
    pub place: String,
    /// Why the filter refuses it, or what around it makes it useless.
    pub errors: Vec<String>,
    /// What it means, in words.
    pub meaning: Vec<String>,
    /// What around it may keep the filter from working as meant.
    pub warnings: Vec<String>,
}

/// What is wrong around a filter: what is lost for certain, and what may be.
#[derive(Debug, Default)]
struct Problems {
    errors: Vec<String>,
    warnings: Vec<String>,
}

impl Problems {
    fn add(&mut self, other: Self) {
        self.errors.extend(other.errors);
        self.warnings.extend(other.warnings);
    }
}

/// Nothing that people write by hand is larger.
const FILE_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Runs the command.
pub fn run(args: &CheckArgs) -> Result<()> {
    let name = args.file.display();
    let text = read(args).with_context(|| format!("cannot read {name}"))?;
    let findings = check(&text).with_context(|| name.to_string())?;
    let invalid = findings
        .iter()
        .filter(|finding| !finding.errors.is_empty())
        .count();
    if args.json {
        say!("{}", serde_json::json!({ "findings": findings }))?;
    } else {
        findings.iter().try_for_each(print)?;
    }
    if invalid > 0 {
        bail!("{name}: this configuration does not work");
    }
    Ok(())
}

fn read(args: &CheckArgs) -> std::io::Result<String> {
    let mut text = String::new();
    if args.file.as_os_str() == "-" {
        std::io::stdin()
            .take(FILE_BYTES_MAX)
            .read_to_string(&mut text)?;
    } else {
        std::fs::File::open(&args.file)?
            .take(FILE_BYTES_MAX)
            .read_to_string(&mut text)?;
    }
    Ok(text)
}

fn print(finding: &Finding) -> Result<()> {
    if !finding.place.is_empty() {
        say!("{}", finding.place)?;
    }
    if finding.errors.is_empty() {
        say!("valid")?;
    }
    for error in &finding.errors {
        say!("error: {error}")?;
    }
    let columns = columns();
    let meaning = finding.meaning.iter();
    for line in meaning.flat_map(|line| meaning::folded(line, columns)) {
        say!("{line}")?;
    }
    for warning in &finding.warnings {
        say!("warning: {warning}")?;
    }
    Ok(())
}

/// Checks a filter configuration, or every one in an Envoy file.
///
/// # Errors
/// If the text is neither.
pub fn check(text: &str) -> Result<Vec<Finding>> {
    // A configuration that is not even JSON is told where, by the filter's own parser.
    let is_object = text.trim_start().starts_with('{');
    let parsed = serde_json::from_str::<Value>(text);
    if is_object && !parsed.as_ref().is_ok_and(surroundings::is_envoy) {
        return Ok(vec![judge(text, String::new())]);
    }
    let documents = documents(text)?;
    let mut findings = Vec::new();
    for document in &documents {
        for found in surroundings::filters(document) {
            findings.push(judge_found(document, found));
        }
    }
    if findings.is_empty() {
        bail!("{}", surroundings::unfound(&documents));
    }
    Ok(findings)
}

/// The filter configuration in a text that is one, or the first one in an Envoy file, and the hosts
/// that the file gives the cluster of each of its pools.
///
/// # Errors
/// If there is none.
pub(crate) fn configuration(text: &str) -> Result<(String, Vec<Vec<String>>)> {
    let is_object = text.trim_start().starts_with('{');
    let parsed = serde_json::from_str::<Value>(text);
    if is_object && !parsed.as_ref().is_ok_and(surroundings::is_envoy) {
        return Ok((text.to_owned(), Vec::new()));
    }
    let documents = documents(text)?;
    for document in &documents {
        if let Some(found) = surroundings::filters(document).into_iter().next() {
            let configuration = found.configuration.map_err(anyhow::Error::msg)?;
            let hosts = surroundings::hosts(document, configuration);
            return Ok((configuration.to_owned(), hosts));
        }
    }
    bail!("{}", surroundings::unfound(&documents));
}

/// The YAML documents of a text; JSON is YAML.
fn documents(text: &str) -> Result<Vec<Value>> {
    // The formatter for users: the other one advises on the parser's options.
    serde_saphyr::from_multiple(text).map_err(|error| {
        anyhow::anyhow!(
            "not YAML: {}",
            error.render_with_formatter(&UserMessageFormatter)
        )
    })
}

fn judge_found(document: &Value, found: surroundings::Found<'_>) -> Finding {
    let text = match found.configuration {
        Ok(text) => text,
        Err(error) => {
            return Finding {
                place: found.place,
                errors: vec![error],
                meaning: Vec::new(),
                warnings: Vec::new(),
            };
        }
    };
    let place = found.place.clone();
    let mut finding = judge(text, found.place);
    if let Ok(config) = Config::parse(text.as_bytes()) {
        let problems = surroundings::problems(document, &place, found.filter, &config);
        finding.errors = problems.errors;
        finding.warnings = problems.warnings;
    }
    finding
}

fn judge(configuration: &str, place: String) -> Finding {
    let (errors, meaning) = match Config::parse(configuration.as_bytes()) {
        Ok(config) => (Vec::new(), meaning::of(&config)),
        Err(error) => (vec![error.to_string()], Vec::new()),
    };
    Finding {
        place,
        errors,
        meaning,
        warnings: Vec::new(),
    }
}
