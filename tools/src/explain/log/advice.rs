//! What to do about a log: whether prefix routing helps, which limit fits, what to change.
//!
//! Guarantee: every sentence follows from a figure of the report. Not here: the figures.

use serde::Serialize;

use super::replay::{InFlight, Mode, Replay};
use super::sharing::Sharing;
use super::spoilers::{Cause, Spoiler};
use crate::explain::ExplainArgs;
use crate::explain::input::Setup;
use crate::explain::show::number;

/// Part of the tokens below which sharing is not worth a filter.
const WORTH: f64 = 0.05;

/// Hits above random routing's from which the filter is worth it.
const GAIN: f64 = 0.02;

/// Advice.
#[derive(Debug, Serialize)]
pub(super) struct Advice {
    /// Whether hosts chosen by prefix find more in their caches than hosts chosen at random.
    pub helps: bool,
    pub gain: String,
    /// The limit to set where one is needed; none if the log does not tell the load.
    pub limit: Option<u32>,
    pub limit_why: Vec<String>,
    /// A beginning that so many requests have that one host could not serve them.
    pub viral: Option<String>,
    /// What to change about each culprit.
    pub remedies: Vec<String>,
}

pub(super) fn advice(
    setup: &Setup,
    args: &ExplainArgs,
    sharing: &Sharing,
    replay: &Replay,
    in_flight: Result<&InFlight, &'static str>,
    spoilers: &[Spoiler],
) -> Advice {
    let (helps, mut gain) = gain(sharing, &replay.modes);
    if !spoilers.is_empty() {
        gain.push_str(" That is how the prompts are now; see above what spoils sharing.");
    }
    let (limit, limit_why) = limit(setup, args, replay.hosts, in_flight);
    Advice {
        helps,
        gain,
        limit,
        limit_why,
        viral: viral(sharing, replay.hosts),
        remedies: spoilers.iter().map(remedy).collect(),
    }
}

fn hits(modes: &[Mode], name: &str) -> f64 {
    let mode = modes.iter().find(|mode| mode.name == name);
    mode.map_or(0.0, |mode| mode.hit_rate)
}

fn gain(sharing: &Sharing, modes: &[Mode]) -> (bool, String) {
    let percent = |part: f64| format!("{:.1} %", part * 100.0);
    let (random, adaptive) = (hits(modes, "random"), hits(modes, "adaptive"));
    if sharing.most < WORTH {
        return (
            false,
            format!(
                "Nothing to gain: only {} of the prompts' tokens ever came before, so there is \
                 hardly anything in a cache to find. {}",
                percent(sharing.most),
                price(modes)
            ),
        );
    }
    if adaptive < random + GAIN {
        return (
            false,
            format!(
                "Little to gain: caches already give {} with hosts chosen at random, {} with \
                 adaptive routing.",
                percent(random),
                percent(adaptive)
            ),
        );
    }
    let computed = (1.0 - adaptive) / (1.0 - random).max(1e-9);
    (
        true,
        format!(
            "Adaptive routing finds {} of the prompts' tokens in caches, random routing {}: engines \
             compute {} of the prompt tokens that they compute now.",
            percent(adaptive),
            percent(random),
            percent(computed)
        ),
    )
}

/// What the filter costs where there is nothing to find, by the figures of the table.
fn price(modes: &[Mode]) -> String {
    let of = |name: &str| modes.iter().find(|mode| mode.name == name);
    let (Some(base), Some(ours)) = (of("least_request"), of("adaptive")) else {
        return String::new();
    };
    // As the table rounds them.
    let busiest = |mode: &Mode| (mode.share_max_over_mean * 100.0).round() / 100.0;
    let p90 = |mode: &Mode| (mode.ttft_p90_s * 1e3).round();
    let figures = format!(
        "{:.2} times the mean on its busiest host and a P90 of {:.0} ms, least_request {:.2} and \
         {:.0} ms",
        busiest(ours),
        p90(ours),
        busiest(base),
        p90(base)
    );
    if busiest(ours) > busiest(base) || p90(ours) > p90(base) {
        format!(
            "The filter has a price: a prompt keeps its home until that is half a prompt busier \
             than the best host (expert.slack), so hosts are less even. Adaptive routing has {figures}."
        )
    } else {
        format!("Here the filter costs nothing: adaptive routing has {figures}.")
    }
}

fn viral(sharing: &Sharing, hosts: u32) -> Option<String> {
    let most = sharing
        .prefixes
        .iter()
        .max_by_key(|prefix| prefix.requests)?;
    let share = most.requests as f64 / sharing.requests.max(1) as f64;
    let even = 1.0 / f64::from(hosts.max(1));
    (hosts > 1 && share > even).then(|| {
        format!(
            "One beginning ({} tokens, hash {}) is in {:.0} % of all requests, more than one host's \
             even share of {:.0} %. Adaptive routing spreads it over the hosts by what follows it; \
             fixed routing sends all of them to one host, until its limit.",
            number(most.tokens),
            most.hash,
            share * 100.0,
            even * 100.0
        )
    })
}

fn limit(
    setup: &Setup,
    args: &ExplainArgs,
    hosts: u32,
    in_flight: Result<&InFlight, &'static str>,
) -> (Option<u32>, Vec<String>) {
    let load = match in_flight {
        Ok(load) => load,
        Err(why) => return (None, vec![format!("Not known: {why}")]),
    };
    let by_mean = (2.0 * load.per_host).floor() as u32 + 1;
    let limit = by_mean.max(load.peak + 1);
    let from = if load.measured {
        "by the log"
    } else {
        "simulated"
    };
    let mut why = vec![
        format!(
            "Little's law: requests in flight = requests a second × seconds that each takes. Here \
             {:.2} × {:.2} ({from}) = {:.1}, which is {:.1} on each of {hosts} hosts.",
            load.requests_per_s, load.seconds, load.total, load.per_host
        ),
        format!(
            "99 of 100 requests find at most {} on their host, themselves included.",
            load.peak
        ),
        format!(
            "Adaptive routing needs no limit. Where one is wanted, and in fixed routing: {limit}. \
             It is above that peak, so that usual moments send nothing away from home; and above \
             twice the mean ({:.1}), because a limit is ignored while the mean is half of it or more.",
            2.0 * load.per_host
        ),
        format!(
            "It is per gateway: with 2 gateways, set {} in each.",
            limit.div_ceil(2)
        ),
    ];
    if limit > args.engine.seqs_max {
        why.push(format!(
            "An engine runs {} at once (its max_num_seqs) and queues the rest: these hosts are \
             too few for this load.",
            args.engine.seqs_max
        ));
    }
    if let Some(set) = setup.pool.bounds.limit {
        why.push(if f64::from(set) <= 2.0 * load.per_host {
            format!("The configuration's {set} is mostly ignored: the mean is half of it or more.")
        } else if set <= load.peak {
            format!("The configuration's {set} sends requests away from home in usual moments.")
        } else {
            format!("The configuration's {set} fits.")
        });
    }
    (Some(limit), why)
}

fn remedy(spoiler: &Spoiler) -> String {
    match &spoiler.cause {
        Cause::Text { .. } => "Move it to the end of the prompt, or make it coarser (the day \
                               instead of the second). If the engine drops that line before it \
                               computes, name its beginning in request.skip."
            .into(),
        Cause::Seed { name } if name == "cache_salt" => {
            "Engines keep prompts of different salts apart. Use one salt for each tenant, not for \
             each request."
                .into()
        }
        Cause::Seed { name } if name == "tenant" => {
            "Tenants are kept apart on purpose. If the header names users or requests instead, set \
             request.tenant_header to the tenant's."
                .into()
        }
        Cause::Seed { name } if name == "prompt_cache_key" => {
            "It is set to separate keys (request.prompt_cache_key is \"seed\"). Use one for all \
             requests that share a prompt, or set \"hint\"."
                .into()
        }
        Cause::Seed { .. } => "Give the same value in all requests that could share, or, if the \
                               engine does not render it, take it out of the configuration."
            .into(),
        Cause::ToolsOrder => "Send tools in one order, sorted by name for instance.".into(),
        Cause::ToolsMembers => "Write the members of each tool's JSON in one order: templates \
                                render them as they come."
            .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_filter_costs_without_sharing_is_told_by_the_tables_figures() {
        #[track_caller]
        fn check(base: (f64, f64), ours: (f64, f64), expected: [&str; 2]) {
            let mode = |name: &str, (share_max_over_mean, ttft_p90_s): (f64, f64)| Mode {
                name: name.into(),
                hit_rate: 0.0,
                ttft_p50_s: 0.05,
                ttft_p90_s,
                share_max_over_mean,
                unserved: 0,
            };
            let said = price(&[mode("least_request", base), mode("adaptive", ours)]);
            for part in expected {
                assert!(said.contains(part), "{part:?} is not in {said:?}");
            }
        }
        let figures = "1.40 times the mean on its busiest host and a P90 of 73 ms, least_request \
                       1.05 and 63 ms";
        check((1.05, 0.063), (1.4, 0.073), ["has a price", figures]);
        check(
            (1.05, 0.063),
            (1.04, 0.073),
            ["has a price", "P90 of 73 ms"],
        );
        check((1.05, 0.063), (1.4, 0.060), ["has a price", "1.40 times"]);
        check(
            (1.05, 0.063),
            (1.05, 0.063),
            ["costs nothing", "1.05 and 63 ms"],
        );
        check(
            (1.05, 0.063),
            (1.051, 0.0634),
            ["costs nothing", "1.05 times"],
        );
    }
}
