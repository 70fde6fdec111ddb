//! Proves over generated requests what keeps a prompt's key and what changes it, that neither
//! windows nor cuts do, and that every body costs linear time and constant memory.
//!
//! proptest prints the seed of a failure and keeps it in proptest-regressions.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use prefix_router::payload::{End, Head, Plan, ReadOptions, Reader};
use prefix_router::placement::{HostId, order};
use prefix_router::popularity::{Heat, Popularity, rungs};
use prefix_router::prefix::{Checkpoint, Key, Kinds, Prompt};
use prefix_router::store::MemoryStore;
use proptest::prelude::*;

const CHAT: &str = "/v1/chat/completions";

fn read(path: &str, body: &str) -> Prompt {
    read_windows(path, &[body.as_bytes()], End::Whole)
}

fn read_windows(path: &str, windows: &[&[u8]], end: End) -> Prompt {
    let head = Head {
        path: path.as_bytes(),
        ..Head::default()
    };
    let mut reader = Reader::with(&head, &Plan::new(&ReadOptions::default()));
    for window in windows {
        reader.feed(window);
    }
    reader.finish(end)
}

fn key(prompt: &Prompt) -> Key {
    prompt.key(prompt.checkpoints.last().unwrap())
}

/// A message as generated: its role, and its text in parts.
#[derive(Clone, Debug)]
struct Message {
    role: &'static str,
    parts: Vec<String>,
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        "\\PC{0,40}",
        "[a-c\n\"\\\\\u{7f}é🌤]{0,300}",
        (prop::char::any(), 0_usize..3000)
            .prop_map(|(letter, count)| letter.to_string().repeat(count)),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    let role = prop::sample::select(vec!["system", "user", "assistant", "tool"]);
    (role, prop::collection::vec(text(), 1..4)).prop_map(|(role, parts)| Message { role, parts })
}

fn messages() -> impl Strategy<Value = Vec<Message>> {
    prop::collection::vec(message(), 1..6)
}

/// How a request is written, without a change of what it means.
#[derive(Clone, Debug)]
struct Style {
    escape: u8,
    blanks: bool,
    role_last: bool,
    lists: bool,
    sampling_first: bool,
    system_last: bool,
}

fn style() -> impl Strategy<Value = Style> {
    (0_u8..4, any::<[bool; 5]>()).prop_map(
        |(escape, [blanks, role_last, lists, sampling, last])| Style {
            escape,
            blanks,
            role_last,
            lists,
            sampling_first: sampling,
            system_last: last,
        },
    )
}

impl Style {
    const PLAIN: Self = Self {
        escape: 0,
        blanks: false,
        role_last: false,
        lists: true,
        sampling_first: false,
        system_last: false,
    };

    /// A JSON string: 0 as serde_json writes it, 1 with every unit escaped, 2 with non-ASCII
    /// escaped in capitals, 3 with slashes escaped.
    fn string(&self, text: &str) -> String {
        let plain = serde_json::to_string(text).unwrap();
        let unit = |unit: u16| match self.escape {
            2 => format!("\\u{unit:04X}"),
            _ => format!("\\u{unit:04x}"),
        };
        match self.escape {
            1 => format!("\"{}\"", text.encode_utf16().map(unit).collect::<String>()),
            2 => {
                let mut escaped = String::new();
                for letter in plain.chars() {
                    if letter.is_ascii() {
                        escaped.push(letter);
                    } else {
                        escaped.extend(letter.encode_utf16(&mut [0; 2]).iter().map(|&u| unit(u)));
                    }
                }
                escaped
            }
            3 => plain.replace('/', "\\/"),
            _ => plain,
        }
    }

    fn content(&self, parts: &[String]) -> String {
        if let ([part], false) = (parts, self.lists) {
            return self.string(part);
        }
        let part = |part: &String| {
            let text = self.string(part);
            match self.role_last {
                true => {
                    format!(r#"{{"text":{text},"type":"text","cache_control":{{"type":"x"}}}}"#)
                }
                false => format!(r#"{{"type":"text","text":{text}}}"#),
            }
        };
        format!("[{}]", parts.iter().map(part).collect::<Vec<_>>().join(","))
    }

    fn message(&self, message: &Message) -> String {
        let content = self.content(&message.parts);
        match self.role_last {
            true => format!(r#"{{"content":{content},"role":"{}"}}"#, message.role),
            false => format!(
                r#"{{"role":"{}","content":{content},"refusal":null}}"#,
                message.role
            ),
        }
    }

    fn messages(&self, messages: &[Message]) -> String {
        let messages: Vec<String> = messages
            .iter()
            .map(|message| self.message(message))
            .collect();
        format!(
            "[{}]",
            messages.join(if self.blanks { " ,\n " } else { "," })
        )
    }

    fn body(&self, messages: &[Message], system: Option<&str>, model: &str) -> String {
        let mut members = vec![format!("\"messages\":{}", self.messages(messages))];
        members.push(format!("\"model\":{}", self.string(model)));
        let system = system.map(|system| format!("\"system\":{}", self.string(system)));
        match self.system_last {
            true => members.extend(system),
            false => members.splice(0..0, system).for_each(drop),
        }
        let sampling =
            r#""temperature":0.25,"stop":["]}","\""],"user":"u","response_format":{"a":[1,{}]}"#;
        match self.sampling_first {
            true => members.insert(0, sampling.to_owned()),
            false => members.push("\"top_p\":1".to_owned()),
        }
        match self.blanks {
            true => format!(" {{ {} }}\r\n", members.join(" ,\t")),
            false => format!("{{{}}}", members.join(",")),
        }
    }
}

/// Checkpoints before a position.
fn before(prompt: &Prompt, position: u64) -> Vec<(u64, u64)> {
    let rungs = Kinds::KEY.with(Kinds::INDEX);
    prompt
        .checkpoints
        .iter()
        .filter(|checkpoint| checkpoint.position < position && checkpoint.kinds.has(rungs))
        .map(|Checkpoint { position, hash, .. }| (*position, *hash))
        .collect()
}

fn bytes(messages: &[Message]) -> u64 {
    messages
        .iter()
        .flat_map(|message| &message.parts)
        .map(|part| part.len() as u64)
        .sum()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn how_a_request_is_written_changes_nothing(messages in messages(), style in style(), system in prop::option::of(text())) {
        let plain = Style::PLAIN.body(&messages, system.as_deref(), "m");
        let other = style.body(&messages, system.as_deref(), "m");
        for path in [CHAT, "/v1/messages", "/api/chat", "/invocations", "/unknown"] {
            // Where an API has no system prompt beside the messages, nothing is to be lost or won.
            let (plain, other) = (read(path, &plain), read(path, &other));
            prop_assert_eq!(&plain.checkpoints, &other.checkpoints);
            prop_assert_eq!(plain.seed, other.seed);
            prop_assert_eq!(plain.bytes, other.bytes);
        }
    }

    #[test]
    fn windows_change_nothing(messages in messages(), style in style(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8)) {
        let body = style.body(&messages, Some("s"), "m");
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(body.len())).collect();
        at.sort_unstable();
        let mut windows = Vec::new();
        let mut rest = body.as_bytes();
        let mut done = 0;
        for cut in at {
            let (window, tail) = rest.split_at(cut - done);
            windows.push(window);
            (rest, done) = (tail, cut);
        }
        windows.push(rest);
        prop_assert_eq!(read_windows("/v1/messages", &windows, End::Whole), read("/v1/messages", &body));
    }

    #[test]
    fn a_cut_changes_nothing_before_it(messages in messages(), style in style(), cut in any::<prop::sample::Index>()) {
        let body = style.body(&messages, None, "m");
        let whole = read(CHAT, &body);
        let seen = read_windows(CHAT, &[&body.as_bytes()[..cut.index(body.len())]], End::Cut);
        if seen.api == "openai_chat" {
            let end = seen.checkpoints.last().unwrap().position;
            let known = before(&whole, end);
            for checkpoint in before(&seen, end) {
                // The end of the second of two messages is an end to the key only if a third
                // follows; its hash is known either way.
                let same = whole.checkpoints.iter().any(|other| (other.position, other.hash) == checkpoint);
                prop_assert!(same, "{:?} is not among {:?}", checkpoint, known);
            }
        }
    }

    #[test]
    fn what_differs_differs_from_there_on(messages in messages(), at in any::<prop::sample::Index>(), letter in any::<char>()) {
        let at = at.index(messages.len());
        let mut other = messages.clone();
        other[at].parts.last_mut().unwrap().push(letter);
        let (a, b) = (read(CHAT, &Style::PLAIN.body(&messages, None, "m")), read(CHAT, &Style::PLAIN.body(&other, None, "m")));
        prop_assert_ne!(key(&a), key(&b));
        // What lies before the text that differs is shared.
        let shared = bytes(&messages[..=at]);
        prop_assert_eq!(before(&a, shared), before(&b, shared));
    }

    #[test]
    fn roles_and_boundaries_matter(messages in messages(), at in any::<prop::sample::Index>()) {
        let whole = key(&read(CHAT, &Style::PLAIN.body(&messages, None, "m")));
        let at = at.index(messages.len());
        let mut role = messages.clone();
        role[at].role = if role[at].role == "user" { "assistant" } else { "user" };
        prop_assert_ne!(key(&read(CHAT, &Style::PLAIN.body(&role, None, "m"))), whole);
        let mut joined = messages.clone();
        if joined[at].parts.len() > 1 {
            let last = joined[at].parts.pop().unwrap();
            joined[at].parts.last_mut().unwrap().push_str(&last);
            prop_assert_ne!(key(&read(CHAT, &Style::PLAIN.body(&joined, None, "m"))), whole);
        }
    }

    #[test]
    fn a_turn_keeps_every_checkpoint_of_the_turn_before(messages in messages(), more in messages(), system in prop::option::of(text())) {
        let first = read("/v1/messages", &Style::PLAIN.body(&messages, system.as_deref(), "m"));
        let longer: Vec<Message> = messages.iter().chain(&more).cloned().collect();
        let second = read("/v1/messages", &Style::PLAIN.body(&longer, system.as_deref(), "m"));
        prop_assert_eq!(first.seed, second.seed);
        // Message ends are kept for the first two and the last eight messages.
        for checkpoint in &first.checkpoints {
            let same = second.checkpoints.iter().any(|other| other.hash == checkpoint.hash);
            let moved = more.iter().all(|message| message.parts.iter().all(String::is_empty));
            let rung = checkpoint.kinds.without(Kinds::MESSAGE_END.with(Kinds::END)) != Kinds::default();
            let covered = second.checkpoints.iter().any(|other| other.position == checkpoint.position);
            prop_assert!(same || moved || covered || !rung, "{:?}", checkpoint);
        }
        let end = first.checkpoints.last().unwrap();
        let next = second.checkpoints.iter().find(|other| other.position >= end.position).unwrap();
        if more.len() <= 6 && next.position == end.position && !more[0].parts.concat().is_empty() {
            prop_assert_eq!(next.hash, end.hash);
        }
    }

    #[test]
    fn token_ids_keep_their_boundaries(ids in prop::collection::vec(any::<u32>(), 1..600), at in any::<prop::sample::Index>()) {
        let body = |ids: &[u32]| format!(r#"{{"prompt":{}}}"#, serde_json::to_string(ids).unwrap());
        let whole = read("/v1/completions", &body(&ids));
        prop_assert_eq!(whole.bytes, 4 * ids.len() as u64);
        // The same digits, cut in another place.
        let at = at.index(ids.len());
        let digits = ids[at].to_string();
        if digits.len() > 1 && !digits[1..].starts_with('0') {
            let mut other = ids.clone();
            let (head, tail) = digits.split_at(1);
            other.splice(at..=at, [head.parse().unwrap(), tail.parse().unwrap()]);
            let other = read("/v1/completions", &body(&other));
            prop_assert_ne!(key(&other), key(&whole));
            prop_assert_eq!(before(&other, 4 * at as u64), before(&whole, 4 * at as u64));
        }
    }

    #[test]
    fn any_bytes_give_a_prompt_whatever_the_windows(bytes in prop::collection::vec(any::<u8>(), 0..400), cut in any::<prop::sample::Index>(), path in prop::sample::select(vec![CHAT, "/generate", "/x"])) {
        let whole = read_windows(path, &[&bytes], End::Whole);
        let (head, tail) = bytes.split_at(cut.index(bytes.len() + 1));
        prop_assert_eq!(read_windows(path, &[head, tail], End::Whole), whole);
    }

    #[test]
    fn mangled_bodies_give_a_prompt_whatever_the_windows(messages in messages(), style in style(), at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<prop::sample::Index>()) {
        let mut body = style.body(&messages, Some("s"), "m").into_bytes();
        let at = at.index(body.len());
        body[at] = byte;
        let whole = read_windows("/v1/messages", &[&body], End::Whole);
        let (head, tail) = body.split_at(cut.index(body.len()));
        prop_assert_eq!(read_windows("/v1/messages", &[head, tail], End::Whole), whole);
    }
}

/// Item 0: one chat among others, in the field order of two SDKs, with images of 3 MB in it.
#[test]
fn a_chat_from_20_kb_to_2_mb_keeps_its_home_in_100_turns() {
    for path in [CHAT, "/v1/messages"] {
        let hosts: Vec<HostId> = (1..=7)
            .map(|host| HostId::of(&format!("10.0.0.{host}:8000")))
            .collect();
        let store = MemoryStore::new();
        let home = |prompt: &Prompt| {
            let worker = Popularity::new("pool".to_owned(), Heat::default());
            let key = worker.visit(&store, &rungs(prompt), 7).unwrap();
            order(key.key, &hosts, |host| (*host, 1))[0]
        };
        let mut chat = Chat::new(path);
        let mut homes = Vec::new();
        for turn in 0..100 {
            for other in 0..40 {
                home(&read(path, &Chat::other(turn * 40 + other)));
            }
            let prompt = read(path, &chat.body(turn));
            // An image counts as its tokens: the ladder does not move.
            assert!(prompt.bytes < 2_400_000, "{}", prompt.bytes);
            homes.push(home(&prompt));
            chat.answer(turn);
        }
        homes.dedup();
        assert_eq!(homes.len(), 1, "{path}");
    }
}

/// A chat as it grows by 20 KB a turn.
struct Chat {
    path: &'static str,
    system: String,
    messages: String,
    image: String,
}

impl Chat {
    fn new(path: &'static str) -> Self {
        let first = "The first question. ".repeat(500);
        Self {
            path,
            system: "Be terse. ".repeat(1000),
            messages: format!(r#"{{"role":"user","content":"{first}"}}"#),
            image: "iVBORw0KGgoAAAA".repeat(200_000),
        }
    }

    /// Members in the order of the API's SDK; what varies with the turn is not rendered.
    fn body(&self, turn: u32) -> String {
        let (system, messages) = (&self.system, &self.messages);
        match self.path {
            CHAT => format!(
                r#"{{"messages":[{{"role":"system","content":"{system}"}},{messages}],"model":"m","temperature":{turn},"tools":[{{"type":"function"}}]}}"#
            ),
            _ => format!(
                r#"{{"max_tokens":{turn},"messages":[{messages}],"model":"m","system":"{system}","tools":[{{"name":"t"}}]}}"#
            ),
        }
    }

    fn answer(&mut self, turn: u32) {
        let answer = "An answer. ".repeat(900);
        let question = "Another question. ".repeat(550);
        let image = match turn {
            60 | 90 => format!(
                r#"{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{}"}}}},"#,
                self.image
            ),
            _ => String::new(),
        };
        self.messages.push_str(&format!(
            r#",{{"role":"assistant","content":"{answer}"}},{{"role":"user","content":[{image}{{"type":"text","text":"{question}"}}]}}"#
        ));
    }

    /// Somebody else's question.
    fn other(number: u32) -> String {
        let text = format!("Question {number}. ").repeat(150);
        format!(r#"{{"messages":[{{"role":"user","content":"{text}"}}],"model":"m"}}"#)
    }
}

/// Processor time that this thread has used; where the system does not tell, the clock's.
fn processor_time() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    let used = fs::read_to_string("/proc/thread-self/schedstat").ok();
    let used = used.and_then(|used| used.split(' ').next()?.parse().ok());
    used.map_or_else(
        || START.get_or_init(Instant::now).elapsed(),
        Duration::from_nanos,
    )
}

/// The processor time that a body takes: the mean over what the system counts in ticks.
fn time(body: &[u8]) -> (Prompt, Duration) {
    const MEASURED: Duration = Duration::from_millis(60);
    let windows: Vec<&[u8]> = body.chunks(65_536).collect();
    let start = processor_time();
    for calls in 1_u32.. {
        let prompt = read_windows(CHAT, &windows, End::Whole);
        let used = processor_time() - start;
        if used >= MEASURED {
            return (prompt, used / calls);
        }
    }
    unreachable!("processor time goes on")
}

/// Sixteen times the body takes sixteen times as long; four times that is allowed to caches and
/// to neighbours. Quadratic time would be 256 times.
#[track_caller]
fn linear(name: &str, body: impl Fn(usize) -> Vec<u8>) -> Prompt {
    const SMALL: usize = 64 * 1024;
    let (_, small) = time(&body(SMALL));
    let (prompt, large) = time(&body(16 * SMALL));
    let limit = small * 64;
    assert!(large < limit, "{name}: {small:?} to {large:?}");
    prompt
}

#[test]
fn hostile_bodies_take_linear_time() {
    let brackets = linear("brackets", |size| vec![b'['; size]);
    assert_eq!(brackets.api, "raw");
    linear("objects", |size| br#"{"a":"#.repeat(size / 5));
    linear("content", |size| {
        [
            br#"{"messages":[{"content":"#.to_vec(),
            br#"[{"content":"#.repeat(size / 12),
        ]
        .concat()
    });
    linear("backslashes", |size| {
        [br#"{"messages":[{"content":""#.to_vec(), vec![b'\\'; size]].concat()
    });
    linear("surrogates", |size| {
        [
            br#"{"messages":[{"content":""#.to_vec(),
            br"\ud83d".repeat(size / 6),
        ]
        .concat()
    });
    linear("keys", |size| {
        let members: Vec<String> = (0..size / 12).map(|at| format!("\"k{at:06}\":0")).collect();
        format!("{{{}}}", members.join(",")).into_bytes()
    });
    linear("one long key", |size| {
        [b"{\"".to_vec(), vec![b'k'; size]].concat()
    });
    linear("one long number", |size| {
        [b"{\"messages\":".to_vec(), vec![b'9'; size]].concat()
    });
    linear("blanks", |size| vec![b' '; size]);
}

#[test]
fn a_million_tiny_messages_are_all_read() {
    let tiny = r#"{"role":"user","content":"a"},"#.repeat(1_000_000);
    let body = format!(r#"{{"messages":[{}]}}"#, tiny.trim_end_matches(','));
    let prompt = read_windows(
        CHAT,
        &body.as_bytes().chunks(65_536).collect::<Vec<_>>(),
        End::Whole,
    );
    assert_eq!(prompt.messages, 1_000_000);
    assert_eq!(prompt.bytes, 1_000_000);
    assert!(
        prompt.checkpoints.len() < 100,
        "{}",
        prompt.checkpoints.len()
    );
}

#[test]
fn two_hundred_levels_are_read() {
    let deep = |value: &str| format!("{}{value}{}", "[".repeat(200), "]".repeat(200));
    let body = |value: &str| format!(r#"{{"tools":{},"messages":["a"]}}"#, deep(value));
    let (one, two) = (read(CHAT, &body("1")), read(CHAT, &body("2")));
    assert_ne!(one.seed, two.seed, "the innermost value counts");
    assert_eq!(one.messages, 1);
}
