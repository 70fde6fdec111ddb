//! The demo on real engines: three llama.cpp servers, and conversations that wait for their answers.
//!
//! Guarantee: what was measured on real engines is never mixed with what was simulated. Not here:
//! the servers (real/), a policy's turn (round/).

use serde_json::json;

use crate::harness;
use crate::real::{self, llama};
use crate::report::Run;
use crate::round::fleet::Fleet;
use crate::round::{Model, Policy, Round, Setup, Show};
use crate::workload::Form;
use crate::workload::conversations::{Conversations, Rounds};
use crate::workload::options::Kind;

use super::settings::{DemoArgs, Places};

/// Two processor cores compute for three engines as they do for two, and Envoy and the load need
/// little.
const HOSTS: u16 = 3;

/// Tenants with two conversations each: their 24 prompts fit the 24 slots of three engines, if no
/// engine gets more than 8 of them.
const TENANTS: u32 = 12;
const EACH: u32 = 2;
const TURNS: u32 = 8;

/// Requests at once, for each engine: one computes its prompt while the other's answer comes.
const AT_ONCE_EACH: u32 = 2;

/// What will be run.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    /// Where it listens.
    pub places: Places,
    /// The conversations.
    pub plan: Conversations,
}

impl Settings {
    pub(super) fn new(args: &DemoArgs) -> anyhow::Result<Self> {
        refuse_what_does_not_apply(args)?;
        let tenants = args.tenants.unwrap_or(TENANTS);
        let turns = args.turns.unwrap_or(TURNS);
        Ok(Self {
            places: Places::new(args, args.hosts.unwrap_or(HOSTS))?,
            plan: Conversations::of_tenants(tenants, EACH, turns, args.workload.seed),
        })
    }

    fn at_once(&self) -> u32 {
        self.places.engine_ports.len() as u32 * AT_ONCE_EACH
    }

    /// What the results hold for, in sentences.
    pub(super) fn conditions(&self, envoy_version: &str) -> Vec<String> {
        let Conversations {
            systems,
            count,
            turns,
            output_tokens,
            ..
        } = self.plan;
        let sizes = llama::Sizes::DEMO;
        vec![
            format!(
                "{systems} tenants, each with a system prompt of about 1,600 tokens and {} \
                 conversations of {turns} turns, {output_tokens} tokens of answer; {} requests at \
                 once.",
                count / systems.max(1),
                self.at_once()
            ),
            format!(
                "{} real llama.cpp servers (xllamacpp {}) with a tiny model of random weights, {} \
                 slots each, behind Envoy {envoy_version}: real scheduling, attention and prompt \
                 caches; only the answers mean nothing. The filter knows that its gateway is the \
                 only one.",
                self.places.engine_ports.len(),
                llama::VERSION,
                sizes.slots
            ),
            "Measured from cold caches, in real time, on this machine's own cores. Every policy \
             starts from engines that were started anew; hits are what the engines' answers say \
             (cached_tokens)."
                .to_owned(),
        ]
    }

    /// Runs one policy.
    pub(super) async fn play(
        &self,
        fleet: &Fleet,
        policy: Policy,
        show: Option<Show>,
    ) -> anyhow::Result<Run> {
        let setup = Setup {
            file: "envoy/envoy.yaml",
            with_filter: only_gateway,
            without_filter: llama::one_request_a_connection,
            gateways: 1,
            port: self.places.port,
            form: Form::Chat,
            stream: true,
            models: vec![Model::plain(real::MODEL, real::CLUSTER)],
            named: true,
        };
        let round = Round::open(&setup, fleet, policy, show).await?;
        let mut driver = round.driver(Box::new(Rounds::new(self.plan, self.at_once())));
        let run = round
            .play_through(&mut driver, self.plan.requests())
            .await?;
        round.close().await?;
        Ok(run)
    }
}

/// The demo's Envoy is the only one.
fn only_gateway(plan: harness::Plan) -> harness::Plan {
    let plan = llama::one_request_a_connection(plan);
    plan.filter_config(&json!({"pools": [{
        "cluster": real::CLUSTER,
        "gateways": "one",
        "hosts": {"admin_cluster": "envoy_admin"},
    }]}))
}

/// The options that shape a load on simulated engines.
fn refuse_what_does_not_apply(args: &DemoArgs) -> anyhow::Result<()> {
    let load = &args.workload;
    let given = [
        ("--workload", load.workload != Kind::default()),
        ("--trace", load.trace.is_some()),
        ("--rate", load.rate.is_some()),
        ("--bursty", load.bursty),
        ("--prompts", load.prompts.is_some()),
        ("--zipf", load.zipf.is_some()),
        ("--prompt-tokens", load.prompt_tokens.is_some()),
        ("--question-tokens", load.question_tokens.is_some()),
        ("--output-tokens", load.output_tokens.is_some()),
        ("--duration", args.duration.is_some()),
        ("--full", args.full),
        ("--kv-tokens", args.kv_tokens.is_some()),
        ("--speed", args.speed.is_some()),
        ("--warmup", args.warmup.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => anyhow::bail!(
            "{flag}: only for simulated engines; real ones take --tenants and --turns"
        ),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(arguments: &[&str]) -> anyhow::Result<Settings> {
        let arguments = [&["--engine", "llama.cpp"], arguments].concat();
        Settings::new(&DemoArgs::parsed(&arguments)?)
    }

    #[test]
    fn three_engines_have_a_slot_for_each_conversation() {
        let settings = settings(&[]).unwrap();
        let engines = settings.places.engine_ports.len() as u32;
        assert_eq!((engines, settings.plan.requests()), (3, 192));
        assert_eq!(engines * llama::Sizes::DEMO.slots, settings.plan.count);
        let said = settings.conditions("1.40.0").join(" ");
        assert!(said.contains("real llama.cpp"), "{said}");
    }

    #[test]
    fn options_of_simulated_engines_are_refused_by_name() {
        for arguments in [
            ["--kv-tokens", "1000"],
            ["--workload", "W3"],
            ["--rate", "3"],
            ["--duration", "9"],
            ["--warmup", "0"],
        ] {
            let error = settings(&arguments).unwrap_err().to_string();
            let expected = format!("{}: only for simulated engines", arguments[0]);
            assert!(error.starts_with(&expected), "{error}");
        }
        let sized = settings(&["--tenants", "5", "--turns", "2", "--seed", "4"]).unwrap();
        assert_eq!((sized.plan.requests(), sized.plan.seed), (20, 4));
    }
}
