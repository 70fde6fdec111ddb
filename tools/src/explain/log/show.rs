//! A log's report in words, for a terminal of 80 columns.
//!
//! Not here: the figures, the advice.

use super::LogReport;
use super::spoilers::{Cause, Spoiler};
use crate::explain::show::{Page, count, number};

pub(super) fn report(told: &LogReport) -> String {
    let mut page = Page::default();
    page.head(&format!(
        "The log: {}, {}",
        told.file,
        count(told.sharing.requests, "request")
    ));
    lines(&mut page, told);
    sharing(&mut page, told);
    modes(&mut page, told);
    spoilers(&mut page, told);
    page.head("Is prefix routing worth it?");
    page.say(&told.advice.gain);
    if let Some(viral) = &told.advice.viral {
        page.say(viral);
    }
    page.head("Which limit? (the most requests in flight on a host before others take over)");
    for why in &told.advice.limit_why {
        page.say(why);
    }
    page.text
}

fn lines(page: &mut Page, told: &LogReport) {
    let apis = told.sharing.apis.iter();
    let apis = apis.map(|(api, requests)| format!("{api} {}", number(*requests)));
    page.say(&format!("APIs: {}.", apis.collect::<Vec<_>>().join(", ")));
    if let Some(first) = &told.first_unreadable {
        let lines = count(told.unreadable, "line");
        page.say(&format!("{lines} passed over; the first is {first}."));
    }
    if told.others > 0 {
        page.say(&format!(
            "{} left out: another pool serves them, or none.",
            count(told.others, "request")
        ));
    }
    if told.goes_on {
        page.say("The log is longer; these are as many as are looked at at once.");
    }
    let tokens = &told.sharing.tokens;
    page.say(&format!(
        "Prompts have {:.0} tokens in the mean (by 4 bytes a token). One in ten has at most {}, \
         half at most {}, nine in ten at most {}, the longest {}.",
        tokens.mean,
        number(tokens.p10),
        number(tokens.p50),
        number(tokens.p90),
        number(tokens.max)
    ));
}

fn sharing(page: &mut Page, told: &LogReport) {
    page.head("What the prompts share");
    page.say(&format!(
        "{:.1} % of all prompt tokens stand in a beginning that came before. One cache for all, \
         that never forgets, would find those; more is not possible.",
        told.sharing.most * 100.0
    ));
    if !told.sharing.depths.is_empty() {
        page.row(&format!(
            "{:>12} {:>14} {:>18}",
            "first tokens", "requests", "came before"
        ));
    }
    for depth in &told.sharing.depths {
        page.row(&format!(
            "{:>12} {:>14} {:>16.1} %",
            number(depth.tokens),
            number(depth.requests),
            depth.shared as f64 * 100.0 / depth.requests.max(1) as f64
        ));
    }
    if told.sharing.prefixes.is_empty() {
        return;
    }
    page.say("The beginnings that save most, each as long as all its requests share it:");
    page.row(&format!(
        "{:>9} {:>9}  {:<16}  begins",
        "requests", "tokens", "hash"
    ));
    for prefix in &told.sharing.prefixes {
        page.row(&format!(
            "{:>9} {:>9}  {}  {}",
            number(prefix.requests),
            number(prefix.tokens),
            prefix.hash,
            prefix.excerpt
        ));
    }
}

fn modes(page: &mut Page, told: &LogReport) {
    page.head(&format!(
        "What each way to choose a host would find in caches, on {}",
        count(u64::from(told.hosts), "host")
    ));
    let times = if told.timed {
        "Requests come at the log's times, or at --rate."
    } else {
        "Not every line of the log has a time, so each request waits for the one before: there is no load."
    };
    page.say(&format!(
        "Played on simulated engines with {} tokens of KV cache each, all empty at first. {times} \
         Answers are not in the log, so a chat's next turn finds only the turns before.",
        number(told.kv_tokens)
    ));
    page.row(&format!(
        "{:<28} {:>7} {:>12} {:>12} {:>12}",
        "", "hits", "TTFT P50", "TTFT P90", "busiest host"
    ));
    for mode in &told.modes {
        page.row(&format!(
            "{:<28} {:>5.1} % {:>9.0} ms {:>9.0} ms {:>12.2}",
            mode.name,
            mode.hit_rate * 100.0,
            mode.ttft_p50_s * 1e3,
            mode.ttft_p90_s * 1e3,
            mode.share_max_over_mean
        ));
    }
    page.say(
        "hits: part of the prompt tokens found in caches. TTFT: time to the first token; half (P50) \
         and nine tenths (P90) of the requests wait no longer. busiest host: its requests over the \
         mean. fixed: by the first so many characters, with a limit of 64 requests on a \
         host. oracle: knows every cache and queue.",
    );
    let unserved = told
        .modes
        .iter()
        .map(|mode| mode.unserved)
        .max()
        .unwrap_or(0);
    if unserved > 0 {
        page.say(&format!(
            "{} longer than an engine's cache, and not served.",
            count(unserved, "request")
        ));
    }
}

fn spoilers(page: &mut Page, told: &LogReport) {
    page.head("What spoils sharing");
    if told.spoilers.is_empty() {
        page.say(&format!(
            "Nothing found: of {} compared with each other, none that otherwise agree differ in \
             something small.",
            count(told.compared, "request")
        ));
    }
    for (spoiler, remedy) in told.spoilers.iter().zip(&told.advice.remedies) {
        page.say(&culprit(spoiler));
        if let [first, second] = spoiler.examples.as_slice() {
            page.row(&format!("such as  {first}"));
            page.row(&format!("and      {second}"));
        }
        page.say(&format!(
            "It differs in {} of {} requests compared. About {} behind it are the same, and each \
             time they are computed again.",
            number(spoiler.requests),
            number(spoiler.compared),
            count(spoiler.lost_tokens, "token")
        ));
        page.say(remedy);
    }
}

fn culprit(spoiler: &Spoiler) -> String {
    match &spoiler.cause {
        Cause::Text {
            message,
            role,
            looks_like,
        } => {
            let place = match (spoiler.offset_min, spoiler.offset_max) {
                (least, most) if least == most => format!("byte {least}"),
                (least, most) => format!("bytes {least} to {most}"),
            };
            let role = match role.as_str() {
                "" => String::new(),
                role => format!(" ({role})"),
            };
            let mut letters = looks_like.chars();
            let first = letters.next().map(|letter| letter.to_ascii_uppercase());
            let what: String = first.into_iter().chain(letters).collect();
            format!("{what} at {place} of message {message}{role} changes from request to request.")
        }
        Cause::Seed { name } => {
            format!("{name} differs between requests that otherwise share a prompt.")
        }
        Cause::ToolsOrder => "The same tools come in changing order.".into(),
        Cause::ToolsMembers => "The members of the tools' JSON come in changing order.".into(),
    }
}
