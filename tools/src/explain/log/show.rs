//! A log's report in words, for a terminal of 40 to 80 columns.
//!
//! Not here: the figures, the advice.

use super::LogReport;
use super::spoilers::{Cause, Spoiler};
use crate::explain::show::{End, Page, count, hashed, number};

pub(super) fn report(told: &LogReport, width: usize) -> String {
    let mut page = Page::new(width);
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
    let row = |tokens: &str, requests: &str, before: &str| {
        [
            format!("{tokens:>12}"),
            format!(" {requests:>14}"),
            format!(" {before:>18}"),
        ]
    };
    if !told.sharing.depths.is_empty() {
        page.row(
            &row("first tokens", "requests", "came before"),
            End::Words(""),
        );
    }
    for depth in &told.sharing.depths {
        let before = depth.shared as f64 * 100.0 / depth.requests.max(1) as f64;
        page.row(
            &row(
                &number(depth.tokens),
                &number(depth.requests),
                &format!("{before:.1} %"),
            ),
            End::Words(""),
        );
    }
    if told.sharing.prefixes.is_empty() {
        return;
    }
    page.say("The beginnings that save most, each as long as all its requests share it:");
    page.row(&hashed("requests", "tokens", "hash"), End::Words("begins"));
    for prefix in &told.sharing.prefixes {
        page.row(
            &hashed(
                &number(prefix.requests),
                &number(prefix.tokens),
                &prefix.hash,
            ),
            End::Excerpt(&prefix.excerpt),
        );
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
    let row = |name: &str, hits: &str, p50: &str, p90: &str, busiest: &str| {
        [
            format!("{name:<28}"),
            format!(" {hits:>7}"),
            format!(" {p50:>12}"),
            format!(" {p90:>12}"),
            format!(" {busiest:>12}"),
        ]
    };
    page.row(
        &row("", "hits", "TTFT P50", "TTFT P90", "busiest host"),
        End::Words(""),
    );
    for mode in &told.modes {
        page.row(
            &row(
                &mode.name,
                &format!("{:.1} %", mode.hit_rate * 100.0),
                &format!("{:.0} ms", mode.ttft_p50_s * 1e3),
                &format!("{:.0} ms", mode.ttft_p90_s * 1e3),
                &format!("{:.2}", mode.share_max_over_mean),
            ),
            End::Words(""),
        );
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
            page.row(&["such as  ".into()], End::Excerpt(first));
            page.row(&["and      ".into()], End::Excerpt(second));
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
