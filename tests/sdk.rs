//! Proves that what real clients send is read as what their calls mean: every request that
//! tests/sdk/record.py recorded against the prompt written by hand beside it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use prefix_router::payload::{End, Head, Plan, ReadOptions, Reader, parts};
use prefix_router::prefix::{Coverage, Kinds, Part, Prompt};

/// One stretch of a prompt, as the expectations write it.
#[derive(Clone, Debug, PartialEq)]
struct Stretch {
    role: String,
    part: String,
    /// JSON: the text, the token ids, or nothing for what is known by its hash only.
    value: String,
}

fn json_text(bytes: &[u8]) -> String {
    serde_json::to_string(std::str::from_utf8(bytes).unwrap()).unwrap()
}

fn token_ids(bytes: &[u8]) -> String {
    let ids: Vec<u32> = bytes
        .chunks(4)
        .map(|id| u32::from_le_bytes(id.try_into().unwrap()))
        .collect();
    serde_json::to_string(&ids).unwrap()
}

/// A part of a message as the expectations write it.
fn written(role: &[u8], part: &parts::Stretch) -> Stretch {
    let (name, value) = match part.part {
        Part::Text => ("text", json_text(&part.bytes)),
        Part::Reasoning => ("reasoning", json_text(&part.bytes)),
        Part::Value => ("value", String::new()),
        Part::Media => ("media", String::new()),
        Part::Tokens => ("tokens", token_ids(&part.bytes)),
        Part::Raw => ("raw", String::new()),
    };
    let role = if role.is_empty() { b"-" } else { role };
    Stretch {
        role: String::from_utf8(role.to_vec()).unwrap(),
        part: name.to_owned(),
        value,
    }
}

/// One recorded request.
struct Request {
    name: String,
    path: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

impl Request {
    fn load(file: &Path) -> Self {
        let bytes = fs::read(file).unwrap();
        let end = bytes
            .windows(4)
            .position(|four| four == b"\r\n\r\n")
            .unwrap();
        let head = std::str::from_utf8(&bytes[..end]).unwrap();
        let mut lines = head.split("\r\n");
        let path = lines.next().unwrap().split(' ').nth(1).unwrap().to_owned();
        let header = |line: &str| {
            let (name, value) = line.split_once(": ").unwrap();
            (name.to_owned(), value.to_owned())
        };
        Self {
            name: file.display().to_string(),
            path,
            headers: lines.map(header).collect(),
            body: bytes[end + 4..].to_vec(),
        }
    }

    fn head(&self) -> Head<'_> {
        let header = |name| self.headers.get(name).map_or(&b""[..], String::as_bytes);
        Head {
            path: self.path.as_bytes(),
            content_type: header("content-type"),
            content_encoding: header("content-encoding"),
            tenant: None,
        }
    }

    fn read(&self, window: usize) -> Prompt {
        let mut reader = Reader::new(&self.head(), &ReadOptions::default());
        for window in self.body.chunks(window) {
            reader.feed(window);
        }
        reader.finish(End::Whole)
    }

    fn parts(&self) -> Vec<Stretch> {
        let plan = Plan::new(&ReadOptions::default());
        let explained = parts::explain(&self.head(), &plan, &[&self.body], End::Whole);
        assert_eq!(explained.prompt, self.read(usize::MAX), "{}", self.name);
        let sections = explained.sections.iter();
        sections
            .flat_map(|(_, section)| &section.messages)
            .flat_map(|message| {
                let role = message.role.as_deref().unwrap_or(b"(cut)");
                message.parts.iter().map(move |part| written(role, part))
            })
            .collect()
    }

    /// This request with another text in the place of one.
    fn with(&self, old: &str, new: &str) -> Self {
        let body = std::str::from_utf8(&self.body).unwrap();
        assert!(body.contains(old), "{}: no {old}", self.name);
        Self {
            name: format!("{} with {new}", self.name),
            path: self.path.clone(),
            headers: self.headers.clone(),
            body: body.replace(old, new).into_bytes(),
        }
    }
}

/// One case: its turns, and what is written beside them.
struct Case {
    name: String,
    turns: Vec<Request>,
    fields: BTreeMap<String, String>,
    /// The prompt of every turn.
    expected: Vec<Vec<Stretch>>,
}

impl Case {
    fn load(expect: &Path) -> Self {
        let text = fs::read_to_string(expect).unwrap();
        let (fields, lines) = text.split_once("\n\n").unwrap();
        let field = |line: &str| {
            let (name, value) = line.split_once(": ").unwrap();
            (name.to_owned(), value.to_owned())
        };
        let (mut prompt, mut expected) = (Vec::new(), Vec::new());
        for line in lines.lines() {
            if line.starts_with("-- ") {
                expected.push(prompt.clone());
                continue;
            }
            let mut words = line.splitn(2, ' ');
            let role = words.next().unwrap().to_owned();
            let (part, value) = words.next().unwrap().trim_start().split_once(' ').unwrap();
            prompt.push(Stretch {
                role,
                part: part.to_owned(),
                value: value.trim_start().to_owned(),
            });
        }
        let turn = |turn: usize| expect.with_extension(format!("{turn}.http"));
        let turns: Vec<Request> = (1..=expected.len())
            .map(|number| Request::load(&turn(number)))
            .collect();
        assert!(!turns.is_empty() && !turn(turns.len() + 1).exists());
        Self {
            name: expect.display().to_string(),
            turns,
            fields: fields.lines().map(field).collect(),
            expected,
        }
    }

    fn field(&self, name: &str) -> &str {
        self.fields.get(name).map_or("", String::as_str)
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk")
}

fn files(extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for client in fs::read_dir(folder()).unwrap() {
        let client = client.unwrap().path();
        if client.is_dir() {
            found.extend(
                fs::read_dir(client)
                    .unwrap()
                    .map(|file| file.unwrap().path()),
            );
        }
    }
    found.retain(|file| file.extension().is_some_and(|end| end == extension));
    found.sort();
    found
}

fn cases() -> Vec<Case> {
    files("expect")
        .iter()
        .map(|file| Case::load(file))
        .collect()
}

/// Value and media parts are known by their hash (the texts in them are changed instead), and a
/// call may be one value or its name and its arguments.
fn shown(stretches: &[Stretch]) -> Vec<Stretch> {
    let mut shown = stretches.to_vec();
    for stretch in &mut shown {
        if matches!(stretch.part.as_str(), "value" | "media") {
            stretch.value.clear();
        }
    }
    shown.dedup_by(|next, stretch| next.part == "value" && next == stretch);
    shown
}

#[test]
fn every_recording_has_an_expectation() {
    let expected: usize = cases().iter().map(|case| case.turns.len()).sum();
    assert_eq!(files("http").len(), expected);
    assert!(expected >= 78, "{expected}");
}

#[test]
fn the_prompt_is_what_the_call_means() {
    for case in cases() {
        for (request, expected) in case.turns.iter().zip(&case.expected) {
            assert_eq!(shown(&request.parts()), shown(expected), "{}", request.name);
        }
    }
}

#[test]
fn the_rest_of_the_request_is_understood() {
    for case in cases() {
        let streams = case.field("streams").split(' ').collect::<Vec<_>>();
        assert_eq!(streams.len(), case.turns.len(), "{}", case.name);
        for (request, stream) in case.turns.iter().zip(streams) {
            let (name, prompt) = (&request.name, request.read(usize::MAX));
            assert_eq!(prompt.api, case.field("api"), "{name}");
            assert_eq!(
                prompt.model.as_deref().unwrap_or("-"),
                case.field("model"),
                "{name}"
            );
            assert_eq!(prompt.stream, stream == "yes", "{name}: stream");
            assert_eq!(prompt.coverage, Coverage::Whole, "{name}");
            assert_eq!(
                prompt.affinity,
                case.field("affinity") != "no",
                "{name}: affinity"
            );
            let engine_state = case.field("engine state") == "yes";
            assert_eq!(prompt.engine_state, engine_state, "{name}: engine state");
        }
    }
}

#[test]
fn a_turn_keeps_every_checkpoint_of_the_turn_before() {
    let mut pairs = 0;
    for case in cases() {
        for turns in case.turns.windows(2) {
            let [before, after] = [turns[0].read(7), turns[1].read(7)];
            pairs += 1;
            for checkpoint in &before.checkpoints {
                let kept = after.checkpoints.iter().any(|other| {
                    (other.position, other.hash) == (checkpoint.position, checkpoint.hash)
                });
                assert!(kept, "{}: {checkpoint:?} is lost", turns[1].name);
            }
            assert_eq!(before.seed, after.seed, "{}", turns[1].name);
            assert!(after.bytes > before.bytes, "{}", turns[1].name);
        }
    }
    assert!(pairs >= 35, "{pairs}");
}

#[test]
fn windows_change_nothing() {
    for case in cases() {
        for request in &case.turns {
            let whole = request.read(usize::MAX);
            for window in [1, 2, 3, 7, 64] {
                assert_eq!(request.read(window), whole, "{}, {window}", request.name);
            }
        }
    }
}

/// The keys at the first message's end and at the end of a request's prompt.
fn keys(request: &Request) -> [u64; 2] {
    let prompt = request.read(usize::MAX);
    [Kinds::FIRST_MESSAGE.with(Kinds::END), Kinds::END].map(|kinds| {
        let mut found = prompt.checkpoints.iter();
        let checkpoint = found
            .find(|checkpoint| checkpoint.kinds.has(kinds))
            .unwrap();
        prompt.key(checkpoint).0
    })
}

#[test]
fn tool_calls_results_and_images_count_with_all_that_is_in_them() {
    let mut changed = 0;
    for case in cases() {
        let (last, expected) = (case.turns.last().unwrap(), case.expected.last().unwrap());
        for stretch in expected {
            let texts: Vec<String> = match stretch.part.as_str() {
                "value" => serde_json::from_str(&stretch.value).unwrap(),
                // What is in the middle of a recorded image, or a document.
                "media" if stretch.value == "red" => vec!["4z8DwHwAF".to_owned()],
                "media" if stretch.value == "blue" => vec!["NgYPj/HwADA".to_owned()],
                "media" => vec![serde_json::from_str(&stretch.value).unwrap()],
                _ => continue,
            };
            let text = texts.last().unwrap();
            let other = last.with(text, &text.to_lowercase().replace(['a', '1'], "o"));
            assert_ne!(keys(last)[1], keys(&other)[1], "{}", other.name);
            changed += 1;
        }
    }
    assert!(changed >= 18, "{changed}");
}

#[test]
fn tools_count_from_the_first_message_on() {
    let mut with_tools = 0;
    for case in cases().iter().filter(|case| case.field("tools") == "yes") {
        for request in &case.turns {
            let other = request.with("\"city\"", "\"town\"");
            assert_ne!(keys(request), keys(&other), "{}", request.name);
            assert_ne!(keys(request)[0], keys(&other)[0], "{}", request.name);
            with_tools += 1;
        }
    }
    assert!(with_tools >= 23, "{with_tools}");
}

#[test]
fn one_chat_is_the_same_from_every_client_of_an_api() {
    let turn = |case: &str, turn: u32| {
        let request = Request::load(&folder().join(format!("{case}.{turn}.http")));
        let prompt = request.read(usize::MAX);
        (prompt.checkpoints, prompt.seed)
    };
    for number in [1, 2] {
        let openai = turn("openai/chat", number);
        assert_eq!(turn("langchain/chat", number), openai);
        assert_eq!(turn("llamaindex/chat", number), openai);
    }
    for number in [1, 2] {
        let image = turn("langchain/chat_images", number);
        assert_eq!(turn("llamaindex/chat_images", number), image);
    }
    assert_eq!(
        turn("openai/chat_images", 1),
        turn("langchain/chat_images", 1)
    );
}
