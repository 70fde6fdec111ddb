//! An explanation in words, for a terminal of 40 to 80 columns.
//!
//! Guarantee: no line is wider than the terminal, but for a name that is wider by itself; and every
//! word of the project is explained where it first stands. Not here: the figures, how wide it is.

use std::fmt::Write as _;

use prefix_router::hosts::canonical;

use super::describe::Description;
use super::gateway::{Host, Route};
use super::left_out::{self, Effect};
use crate::report::table::{WIDTH, wrap_to};

/// Checkpoints shown at most from a prompt's start, and from its end.
const CHECKPOINTS_SHOWN: usize = 8;

/// Parts shown at most from a prompt's start, and from its end.
const PARTS_SHOWN: usize = 20;

/// Columns that the text at a row's end has at least; where fewer are left, it has its own line.
const TEXT_COLUMNS_MIN: usize = 12;

/// A text under construction.
pub(super) struct Page {
    pub text: String,
    width: usize,
}

/// What stands at the end of a table's row.
#[derive(Clone, Copy)]
pub(super) enum End<'a> {
    /// Broken into lines where it is too long.
    Words(&'a str),
    /// Cut off where it is too long.
    Excerpt(&'a str),
}

impl Page {
    /// An empty one of this many columns.
    pub(super) fn new(width: usize) -> Self {
        Self {
            text: String::new(),
            width,
        }
    }

    /// A headline with what it is about.
    pub(super) fn head(&mut self, title: &str) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        self.line(title);
    }

    /// What goes on with a headline.
    pub(super) fn line(&mut self, text: &str) {
        for line in wrap_to(text, self.width) {
            let _ = writeln!(self.text, "{line}");
        }
    }

    /// A sentence, broken into lines, set in by two columns.
    pub(super) fn say(&mut self, sentence: &str) {
        for line in wrap_to(sentence, self.width.saturating_sub(2)) {
            let _ = writeln!(self.text, "  {line}");
        }
    }

    /// A row of a table: cells, each as wide in every row, and what stands at its end. What does not
    /// fit goes on in the next line, in every row at the same cell.
    pub(super) fn row(&mut self, cells: &[String], end: End) {
        // Where there is little room, none is lost to the margin.
        let margin = if self.width < WIDTH { 2 } else { 4 };
        let mut line = " ".repeat(margin);
        for cell in cells {
            if columns(&line) + columns(cell) > self.width && columns(&line) > margin {
                self.push(&line);
                line = " ".repeat(margin + 2);
            }
            line.push_str(cell);
        }
        if columns(&line) + TEXT_COLUMNS_MIN > self.width {
            self.push(&line);
            line = " ".repeat(margin + 2);
        }
        let start = columns(&line);
        let room = self.width.saturating_sub(start);
        match end {
            End::Excerpt(text) => self.push(&(line + &cut(text, room))),
            End::Words(text) => {
                for words in wrap_to(text, room) {
                    self.push(&(line + &words));
                    line = " ".repeat(start);
                }
            }
        }
    }

    /// A line, if there is anything in it.
    fn push(&mut self, line: &str) {
        let line = line.trim_end();
        if !line.is_empty() {
            let _ = writeln!(self.text, "{line}");
        }
    }
}

fn columns(text: &str) -> usize {
    text.chars().count()
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
pub(super) fn description(told: &Description, width: usize) -> String {
    let mut page = Page::new(width);
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
    let row = |from: &str, bytes: &str, what: &str| {
        [
            format!("{from:>9}"),
            format!(" {bytes:>9}"),
            format!("  {what:<21} "),
        ]
    };
    page.row(&row("from byte", "bytes", "part"), End::Words(""));
    let hidden = 2 * PARTS_SHOWN..told.parts.len();
    for (index, part) in told.parts.iter().enumerate() {
        let from_end = told.parts.len() - index;
        if !hidden.is_empty() && index == PARTS_SHOWN {
            let more = format!("… {} more parts", hidden.len());
            page.row(&[format!("{:>10}", "")], End::Words(&more));
        }
        if !hidden.is_empty() && index >= PARTS_SHOWN && from_end > PARTS_SHOWN {
            continue;
        }
        page.row(
            &row(&number(part.from), &number(part.bytes), &part.what),
            End::Excerpt(&part.text),
        );
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
        let of = |value: &Option<String>| cut(value.as_deref().unwrap_or(""), 60);
        match name.as_str() {
            "model" => page.row(&["model: ".into()], End::Excerpt(&of(&told.model))),
            "tenant" => page.row(&["tenant: ".into()], End::Excerpt(&of(&told.tenant))),
            "tools" => page.row(&[], End::Words("tools: they stand in front of everything")),
            name => page.row(&[], End::Words(name)),
        }
    }
}

/// The cells of a row that tells two numbers of a prefix, and its hash.
pub(super) fn hashed(first: &str, second: &str, hash: &str) -> [String; 4] {
    [
        format!("{first:>9}"),
        format!(" {second:>9}"),
        format!("  {hash:<16}"),
        "  ".into(),
    ]
}

fn checkpoints(page: &mut Page, told: &Description) {
    page.head("Checkpoints: places at which prompts are compared");
    page.say(
        "A checkpoint's hash stands for everything before it. Two prompts with the same hash at a \
         place are the same up to there. `key`: the key may end here. `index`: the filter keeps \
         which hosts were sent a prompt up to here.",
    );
    page.row(&hashed("byte", "token", "hash"), End::Words("used for"));
    let all = &told.checkpoints;
    let hidden = 2 * CHECKPOINTS_SHOWN..all.len();
    for (index, at) in all.iter().enumerate() {
        if !hidden.is_empty() && index == CHECKPOINTS_SHOWN {
            let more = format!("… {} more", hidden.len());
            page.row(&[format!("{:>10}", "")], End::Words(&more));
        }
        if !hidden.is_empty() && index >= CHECKPOINTS_SHOWN && all.len() - index > CHECKPOINTS_SHOWN
        {
            continue;
        }
        page.row(
            &hashed(&number(at.bytes), &number(at.tokens), &at.hash),
            End::Words(&at.uses.join(", ")),
        );
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
    let row = |tokens: &str, seen: &str| [format!("{tokens:>9}"), format!(" {seen:>9}  ")];
    page.row(&row("tokens", "seen"), End::Words("so"));
    for rung in &route.rungs {
        let is_key = rung.bytes >= route.bytes;
        let what = match (rung.is_hot, is_key) {
            (true, false) => "hot: every host is taken to hold it",
            (true, true) => "hot, but there is nothing behind it: the key ends here",
            (false, _) => "not hot: the key ends here",
        };
        let (tokens, seen) = (number(rung.tokens), number(u64::from(rung.seen)));
        page.row(&row(&tokens, &seen), End::Words(what));
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
    let row = |host: &str, figures: [&str; 4], home: &str| {
        let figures = figures.map(|figure| format!(" {figure:>9}"));
        let [in_flight, waiting, known, cost] = figures;
        [
            format!("{host:<24}"),
            in_flight,
            waiting,
            known,
            cost,
            format!("  {home}"),
        ]
    };
    let cost = if costs { "cost" } else { "" };
    page.row(
        &row("host", ["in flight", "waiting", "known", cost], ""),
        End::Words(""),
    );
    for (place, host) in route.hosts.iter().enumerate() {
        let home = if place == 0 { "home" } else { "" };
        let figures = [
            &host.in_flight.to_string(),
            &host.pending.to_string(),
            &format!("{:.0}", host.known),
            &host.cost.map_or(String::new(), |cost| format!("{cost:.0}")),
        ];
        page.row(
            &row(&host.host, figures.map(String::as_str), home),
            End::Words(""),
        );
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
