//! An explanation in words, for a terminal of 80 columns.
//!
//! Guarantee: no line is wider, and every word of the project is explained where it first stands.
//! Not here: the figures.

use std::fmt::Write as _;

use prefix_router::hosts::canonical;

use super::describe::Description;
use super::gateway::{Host, Route};
use super::left_out::{self, Effect};
use crate::report::table::wrap_to;

/// Columns of a narrow terminal.
pub(super) const WIDTH: usize = 80;

/// Checkpoints shown at most from a prompt's start, and from its end.
const CHECKPOINTS_SHOWN: usize = 8;

/// Parts shown at most from a prompt's start, and from its end.
const PARTS_SHOWN: usize = 20;

/// A text under construction.
#[derive(Default)]
pub(super) struct Page {
    pub text: String,
}

impl Page {
    /// A headline with what it is about.
    pub(super) fn head(&mut self, title: &str) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        self.text.push_str(title);
        self.text.push('\n');
    }

    /// A sentence, broken into lines, set in by two columns.
    pub(super) fn say(&mut self, sentence: &str) {
        for line in wrap_to(sentence, WIDTH - 2) {
            let _ = writeln!(self.text, "  {line}");
        }
    }

    /// A row of a table, set in by four columns and cut to the width.
    pub(super) fn row(&mut self, row: &str) {
        let _ = writeln!(self.text, "    {}", cut(row.trim_end(), WIDTH - 4));
    }
}

/// A number with its thousands set apart.
pub(super) fn number(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of things.
pub(super) fn count(value: u64, thing: &str) -> String {
    let plural = if value == 1 { "" } else { "s" };
    format!("{} {thing}{plural}", number(value))
}

/// The first characters of a text, with a mark if there are more.
pub(super) fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(width.saturating_sub(1)).collect();
    cut.push('…');
    cut
}

/// Bytes as one line: white space as one space, structure of canonical values as JSON's marks.
pub(super) fn readable(bytes: &[u8]) -> String {
    readable_inside(bytes).trim().to_owned()
}

/// The same of bytes from the middle of a text, with the white space at their ends.
pub(super) fn readable_inside(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        for letter in chunk.valid().chars() {
            match letter {
                letter if letter.is_whitespace() || letter.is_control() => {
                    if !text.ends_with(' ') {
                        text.push(' ');
                    }
                }
                letter => text.push(letter),
            }
        }
        for byte in chunk.invalid() {
            // The marks of src/payload/walk/values.rs.
            let opens = text.is_empty() || text.ends_with(['{', '[', ' ']);
            text.push_str(match byte {
                0xf8 => "{",
                0xf9 => "[",
                0xfa => "}",
                0xfb..=0xfd if opens => "",
                0xfb => ", ",
                0xfc | 0xfd => ": ",
                _ => "\u{fffd}",
            });
        }
    }
    text
}

/// All that is said of one request.
pub(super) fn description(told: &Description) -> String {
    let mut page = Page::default();
    page.head(&format!(
        "The request: {}, {}",
        told.body,
        count(told.bytes, "byte")
    ));
    api(&mut page, told);
    if let Some((pool, why)) = &told.pool {
        page.say(&format!("Pool: {pool}, because {why}."));
    }
    prompt(&mut page, told);
    left_out(&mut page, told);
    seeds(&mut page, told);
    checkpoints(&mut page, told);
    match &told.route {
        Some(route) => {
            key(&mut page, told, route);
            hosts(&mut page, told, route);
        }
        None => {
            page.head("No key");
            page.say("There is nothing to go by: Envoy's own policy chooses the host.");
        }
    }
    page.text
}

fn api(page: &mut Page, told: &Description) {
    let field = told.api_field.as_deref();
    let why = match (told.unread, told.path_apis.as_slice(), field) {
        (Some("not_json"), ..) => "it is not JSON".into(),
        (Some("unknown_shape"), ..) if told.not_json.is_some() => "it is not JSON".into(),
        (Some("unknown_shape"), ..) => {
            "it has no field that any known API keeps a prompt in".into()
        }
        (Some("encoded"), ..) => "it is encoded in a way that cannot be undone".into(),
        (_, [only], _) if *only == told.api => {
            format!("requests to {} are of this kind", told.path)
        }
        (_, [_, ..], Some(field)) => format!(
            "requests to {} are of this kind if they have the field {field}",
            told.path
        ),
        (_, _, Some(field)) if told.path.is_empty() => {
            format!("it has the field {field}; no --path was given to tell by")
        }
        (_, _, Some(field)) => format!(
            "{} tells nothing; the body has the field {field}",
            told.path
        ),
        _ => "its shape tells".into(),
    };
    page.say(&format!("API: {}, because {why}.", told.api));
    let broken = told.not_json.as_ref();
    if let Some(why) = broken {
        page.say(&format!("The body is not JSON: {why}."));
    }
    match told.unread {
        Some("truncated") => page.say("The body ends early: it is placed by what was read."),
        Some("malformed") => {
            page.say("The body stops being JSON: it is placed by what came before.");
        }
        Some(_) => page.say("Its raw bytes stand in for a prompt: equal bodies have one home."),
        None if broken.is_some() => page.say("It is placed by what could be read of it."),
        None => {}
    }
    if told.prompts > 1 {
        page.say(&format!(
            "It is a batch of {} prompts: the first one places it, all count for its length.",
            told.prompts
        ));
    }
    if told.engine_state {
        page.say(
            "It continues an answer that one engine holds, and no other: the filter does not know \
             which. Give such clients an engine of their own.",
        );
    }
}

fn prompt(page: &mut Page, told: &Description) {
    page.head("The prompt: what the engine turns into tokens, in the order it sees it");
    match told.prompt_bytes {
        0 => page.say("Nothing: no text was found."),
        bytes => page.say(&format!(
            "{}, about {} (by 4 bytes a token).",
            count(bytes, "byte"),
            count(told.prompt_tokens, "token")
        )),
    }
    if told.parts.is_empty() {
        return;
    }
    page.row(&format!("{:>9} {:>9}  part", "from byte", "bytes"));
    let hidden = 2 * PARTS_SHOWN..told.parts.len();
    for (index, part) in told.parts.iter().enumerate() {
        let from_end = told.parts.len() - index;
        if !hidden.is_empty() && index == PARTS_SHOWN {
            page.row(&format!("{:>9} … {} more parts", "", hidden.len()));
        }
        if !hidden.is_empty() && index >= PARTS_SHOWN && from_end > PARTS_SHOWN {
            continue;
        }
        page.row(&format!(
            "{:>9} {:>9}  {:<21} {}",
            number(part.from),
            number(part.bytes),
            part.what,
            part.text
        ));
    }
}

fn left_out(page: &mut Page, told: &Description) {
    if told.has_media {
        page.say(&format!(
            "An image, a sound or a file counts as {}, whatever its size (request.image_tokens).",
            count(u64::from(told.image_tokens), "token")
        ));
    }
    let fields = || told.fields.iter();
    let nothing: Vec<_> = fields()
        .filter(|field| {
            matches!(
                field.effect,
                Effect::Nothing | Effect::Stream | Effect::Hint | Effect::EngineState
            )
        })
        .collect();
    if nothing.is_empty() && told.skipped.is_none() && !told.tools_left_out {
        if let Some(why) = &told.fields_unknown {
            page.head("Left out of the prompt");
            page.say(&format!("Cannot be told field by field: {why}."));
        }
        return;
    }
    page.head("Left out: it changes neither the key nor the host");
    // Fields that are left out for one reason stand together.
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for field in nothing {
        let why = match field.effect {
            Effect::Hint => "read, but used only to split a prompt that is too hot as a whole",
            Effect::Stream => "how the answer is sent; read for the load, not for the key",
            _ => left_out::why(&field.field),
        };
        match reasons.iter_mut().find(|(reason, _)| *reason == why) {
            Some((_, names)) => names.push(&field.field),
            None => reasons.push((why, vec![&field.field])),
        }
    }
    for (why, names) in reasons {
        page.say(&format!("{}: {why}.", names.join(", ")));
    }
    if let Some(line) = &told.skipped {
        page.say(&format!(
            "The line \"{line}\": the configuration skips it (request.skip), as engines do."
        ));
    }
    if told.tools_left_out {
        page.say(
            "The tools: this model's template shows them just before the last user message, so \
             they move with every turn. They count for the prompt's length only.",
        );
    }
}

fn seeds(page: &mut Page, told: &Description) {
    let mut names = told.seeds.clone();
    if told.config_seed {
        names.push("the configuration's seed".into());
    }
    if names.is_empty() {
        return;
    }
    page.head("Mixed into the key: requests that differ in it never count as alike");
    for name in &names {
        let text = match name.as_str() {
            "model" => format!("model: {}", cut(told.model.as_deref().unwrap_or(""), 60)),
            "tenant" => format!("tenant: {}", cut(told.tenant.as_deref().unwrap_or(""), 60)),
            "tools" => "tools: they stand in front of everything".into(),
            name => name.to_owned(),
        };
        page.row(&text);
    }
}

fn checkpoints(page: &mut Page, told: &Description) {
    page.head("Checkpoints: places at which prompts are compared");
    page.say(
        "A checkpoint's hash stands for everything before it. Two prompts with the same hash at a \
         place are the same up to there. `key`: the key may end here. `index`: the filter keeps \
         which hosts were sent a prompt up to here.",
    );
    page.row(&format!(
        "{:>9} {:>9}  {:<16}  used for",
        "byte", "token", "hash"
    ));
    let all = &told.checkpoints;
    let hidden = 2 * CHECKPOINTS_SHOWN..all.len();
    for (index, at) in all.iter().enumerate() {
        if !hidden.is_empty() && index == CHECKPOINTS_SHOWN {
            page.row(&format!("{:>9} … {} more", "", hidden.len()));
        }
        if !hidden.is_empty() && index >= CHECKPOINTS_SHOWN && all.len() - index > CHECKPOINTS_SHOWN
        {
            continue;
        }
        page.row(&format!(
            "{:>9} {:>9}  {}  {}",
            number(at.bytes),
            number(at.tokens),
            at.hash,
            at.uses.join(", ")
        ));
    }
}

fn key(page: &mut Page, told: &Description, route: &Route) {
    page.head("The key: the part of the prompt that chooses the host");
    if let Some(length) = told.routing.prefix_length {
        page.say(&format!(
            "{}: the first {} of the prompt (routing is `fixed`).",
            route.key,
            count(u64::from(length), "character")
        ));
        return;
    }
    if !told.affinity {
        page.say(&format!("{}: the whole prompt.", route.key));
        page.say(
            "No cache helps such a request (it asks for no text, or has none): the host with the \
             least to do gets it, and the key only decides between equals.",
        );
        return;
    }
    let all = route.bytes >= told.checkpoints.last().map_or(0, |last| last.bytes);
    let which = if all {
        "the whole prompt,"
    } else {
        "its first"
    };
    page.say(&format!(
        "{}: {which} {}.",
        route.key,
        count(route.tokens, "token")
    ));
    heat(page, told, route);
}

/// Why the key is as deep as it is.
fn heat(page: &mut Page, told: &Description, route: &Route) {
    let requests = route.requests.unwrap_or(0);
    let above = route.hot_above.unwrap_or(0);
    let is_hot = |rung: &super::gateway::Rung| rung.is_hot && rung.bytes >= route.bytes;
    let why = if route.rungs.iter().any(is_hot) {
        "Every beginning of it is hot, so all of it is the key."
    } else {
        "It is the shortest beginning that is not hot."
    };
    page.say(&format!(
        "{why} Hot is what more than {above} of the recent \
         requests ({} so far) begin with: more than {} of a host's even share, and more than {}.",
        number(u64::from(requests)),
        told.routing.hot_share,
        told.routing.count_min
    ));
    match (told.log_requests, told.seen) {
        (None, 0) => page.say(
            "This is a gateway that has seen nothing yet; --seen N or --log FILE tell what came \
             before.",
        ),
        (log, seen) => {
            let mut before = Vec::new();
            if let Some(requests) = log {
                before.push(format!("{} of the log", count(requests, "request")));
            }
            if seen > 0 {
                before.push(format!("this one {}", count(u64::from(seen), "time")));
            }
            page.say(&format!("Before it came {}.", before.join(" and ")));
        }
    }
    page.row(&format!("{:>9} {:>9}  so", "tokens", "seen"));
    for rung in &route.rungs {
        let is_key = rung.bytes >= route.bytes;
        let what = match (rung.is_hot, is_key) {
            (true, false) => "hot: every host is taken to hold it",
            (true, true) => "hot, but there is nothing behind it: the key ends here",
            (false, _) => "not hot: the key ends here",
        };
        page.row(&format!(
            "{:>9} {:>9}  {what}",
            number(rung.tokens),
            number(u64::from(rung.seen))
        ));
        if is_key {
            break;
        }
    }
}

fn hosts(page: &mut Page, told: &Description, route: &Route) {
    if route.hosts.is_empty() {
        page.head("The hosts: not known");
        page.say("Name them with --hosts 10.0.0.1:8000,10.0.0.2:8000 to see where this goes.");
        return;
    }
    page.head("The hosts, in this key's order: home first, then who takes over");
    let costs = route.hosts.iter().any(|host| host.cost.is_some());
    if costs {
        page.say(
            "Cost, in tokens: what waits there, what the host would have to compute of this prompt \
             (times two or more), and 50 for each request it works on. The home costs less \
             than it looks, for another gateway may have sent it this prompt; it keeps a request \
             while it costs little more than the cheapest.",
        );
    }
    page.row(&format!(
        "{:<24} {:>9} {:>9} {:>9} {:>9}",
        "host",
        "in flight",
        "waiting",
        "known",
        if costs { "cost" } else { "" }
    ));
    for (place, host) in route.hosts.iter().enumerate() {
        let home = if place == 0 { "home" } else { "" };
        page.row(&format!(
            "{:<24} {:>9} {:>9} {:>9.0} {:>9}  {home}",
            host.host,
            host.in_flight,
            host.pending,
            host.known,
            host.cost.map_or(String::new(), |cost| format!("{cost:.0}"))
        ));
    }
    page.say(
        "in flight: requests it works on. waiting: tokens it has yet to compute. known: tokens of \
         this prompt that it was sent before.",
    );
    if let Some(limit) = told.routing.limit {
        page.say(&format!("A host with {limit} in flight is full (limit)."));
    }
    let why = match route.decision {
        "home" => "its home",
        "match" => "it was sent more of this prompt than the home",
        "divert" => "the home costs too much, or is full",
        "saturated" => "all are full, and it has the least in flight",
        "reject" => "all are full: it is answered 429",
        _ => "no host is usable",
    };
    let to = route.sent_to.as_deref().unwrap_or("nobody");
    page.say(&format!("Sent to {to} ({}: {why}).", route.decision));
    let named = |host: &&Host| canonical(&host.host).is_none();
    if let Some(host) = route.hosts.iter().find(named) {
        page.say(&format!(
            "{} is a name: in Envoy the IPs behind it count, and this prompt's order of hosts is \
             another. --hosts with ip:port shows it.",
            host.host
        ));
    }
}
