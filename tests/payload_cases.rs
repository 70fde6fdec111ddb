//! Proves what every case in tests/payloads says: its prompt, its checkpoints, which other case it
//! is equal to, and that neither windows nor cuts change what is before them.
//!
//! A case is a file: a sentence, the request line, headers and options, relations to other cases of
//! its folder, the body, `===`, and what is expected. `UPDATE=1` writes the expectations and the
//! hashes anew; read the difference before you believe it.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use prefix_router::payload::parts::{Explained, Parts, Place, explain};
use prefix_router::payload::{CacheKey, End, Head, Plan, RAW, ReadOptions, Tools, apis};
use prefix_router::prefix::{Checkpoint, Coverage, HASH_FORMAT, Kinds, Part, Sink};

#[path = "payloads/expand.rs"]
mod expand;

use expand::expand;

/// Fewer than this, and the folder was not found or has lost files.
const CASES_MIN: usize = 150;

struct Case {
    file: PathBuf,
    name: String,
    path: String,
    content_encoding: String,
    tenant: Option<String>,
    options: ReadOptions,
    end: End,
    cuts: bool,
    relations: Vec<(String, String)>,
    body: Vec<u8>,
    input: String,
    expected: String,
}

impl Case {
    fn load(file: &Path) -> Self {
        let text = fs::read_to_string(file).unwrap();
        // A new case may have its input only.
        let input_only = (text.trim_end(), "");
        let (input, expected) = text.split_once("\n===\n").unwrap_or(input_only);
        let (head, body) = input.split_once("\n\n").unwrap();
        let mut lines = head.lines();
        assert!(
            lines.next().unwrap().starts_with("# "),
            "{}",
            file.display()
        );
        let folder = file.parent().unwrap().file_name().unwrap();
        let mut case = Self {
            name: format!(
                "{}/{}",
                folder.to_str().unwrap(),
                file.file_stem().unwrap().to_str().unwrap()
            ),
            file: file.to_owned(),
            path: lines
                .next()
                .unwrap()
                .strip_prefix("POST ")
                .unwrap()
                .to_owned(),
            content_encoding: String::new(),
            tenant: None,
            options: ReadOptions::default(),
            end: End::Whole,
            cuts: true,
            relations: Vec::new(),
            body: expand(body),
            input: input.to_owned(),
            expected: expected.to_owned(),
        };
        for line in lines {
            let (name, value) = line.split_once(": ").unwrap();
            match name {
                "content-encoding" => case.content_encoding = value.to_owned(),
                "tenant" => case.tenant = Some(value.to_owned()),
                "cuts" => case.cuts = value != "no",
                "options" => case.option(value),
                _ => case.relations.push((name.to_owned(), value.to_owned())),
            }
        }
        case
    }

    fn option(&mut self, option: &str) {
        let (name, value) = option.split_once('=').unwrap();
        let list = || value.split(',').map(str::to_owned).collect();
        match (name, value) {
            ("end", "cut") => self.end = End::Cut,
            ("tools", "after_system") => self.options.tools = Tools::AfterSystem,
            ("tools", "before_last_user") => self.options.tools = Tools::BeforeLastUser,
            ("cache_key", "seed") => self.options.cache_key = CacheKey::Seed,
            ("cache_key", "ignore") => self.options.cache_key = CacheKey::Ignore,
            ("prefix_length", _) => self.options.prefix_length = Some(value.parse().unwrap()),
            ("image_tokens", _) => self.options.image_tokens = value.parse().unwrap(),
            ("template_inputs", _) => self.options.template_inputs = list(),
            ("pointers", _) => self.options.pointers = list(),
            ("skip", _) => self.options.skip = list(),
            _ => panic!("{}: unknown option {option}", self.name),
        }
    }

    fn read(&self, window: usize) -> Explained {
        self.read_bytes(&self.body, window, self.end)
    }

    fn read_bytes(&self, bytes: &[u8], window: usize, end: End) -> Explained {
        let head = Head {
            path: self.path.as_bytes(),
            content_type: b"application/json",
            content_encoding: self.content_encoding.as_bytes(),
            tenant: self.tenant.as_deref().map(str::as_bytes),
        };
        let windows: Vec<&[u8]> = bytes.chunks(window.max(1)).collect();
        explain(&head, &Plan::new(&self.options), &windows, end)
    }
}

fn cases() -> Vec<Case> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/payloads");
    let mut files = Vec::new();
    for folder in fs::read_dir(root).unwrap() {
        let folder = folder.unwrap().path();
        if folder.is_dir() {
            let entries = fs::read_dir(folder).unwrap();
            files.extend(entries.map(|entry| entry.unwrap().path()));
        }
    }
    files.sort();
    assert!(files.len() >= CASES_MIN, "only {} cases", files.len());
    files.iter().map(|file| Case::load(file)).collect()
}

/// Whether the expectations are to be written: never where a machine judges them.
fn updating() -> bool {
    let update = std::env::var_os("UPDATE").is_some();
    let ci = std::env::var_os("CI").is_some();
    assert!(!(update && ci), "UPDATE is refused where CI is set");
    update
}

#[test]
fn every_case_reads_as_it_says() {
    let mut wrong = Vec::new();
    for case in cases() {
        let shown = show(&case.read(usize::MAX));
        if shown == case.expected {
            continue;
        }
        if updating() {
            fs::write(&case.file, format!("{}\n===\n{shown}", case.input)).unwrap();
        } else {
            wrong.push(format!(
                "{}\n--- expected\n{}--- read\n{shown}",
                case.name, case.expected
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A family without a case, or without a line in the README, is not done.
#[test]
fn every_family_has_cases_and_a_line_in_the_readme() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let readme = fs::read_to_string(readme).unwrap();
    let cases = cases();
    for api in apis().into_iter().chain([RAW]) {
        let of_it = |case: &&Case| {
            case.name.starts_with(&format!("{api}/")) && case.read(usize::MAX).prompt.api == api
        };
        assert!(cases.iter().any(|case| of_it(&case)), "no case of {api}");
        assert!(
            readme.contains(&format!("| `{api}` |")),
            "README.md does not list {api}"
        );
    }
}

#[test]
fn windows_change_nothing() {
    for case in cases() {
        let whole = case.read(usize::MAX);
        for window in [1, 2, 3, 7, 1024, 65_536] {
            let other = case.read(window);
            assert_eq!(other.prompt, whole.prompt, "{} in {window}", case.name);
            assert_eq!(show(&other), show(&whole), "{} in {window}", case.name);
        }
    }
}

/// A body cut anywhere has, in each of its sections, the checkpoints that the whole body has there.
#[test]
fn a_cut_changes_nothing_before_it() {
    for case in cases().iter().filter(|case| case.cuts) {
        let whole = case.read(usize::MAX);
        let every = (case.body.len() / 64).clamp(1, 1024);
        for cut in (0..case.body.len()).step_by(every) {
            let seen = case.read_bytes(&case.body[..cut], usize::MAX, End::Cut);
            for (place, section) in &seen.sections {
                let same = |(other, _): &&(Place, Parts)| other == place;
                let Some((_, known)) = whole.sections.iter().find(same) else {
                    assert_eq!(*place, Place::Raw, "{} cut at {cut}", case.name);
                    continue;
                };
                begins(section, known, &format!("{} cut at {cut}", case.name));
            }
        }
    }
}

/// `seen` has no checkpoint before its end that `known` contradicts.
#[track_caller]
fn begins(seen: &Parts, known: &Parts, what: &str) {
    let known = known.chain().checkpoints();
    let rungs = Kinds::KEY.with(Kinds::INDEX).with(Kinds::FIRST_MESSAGE);
    let seen = seen.chain().checkpoints();
    let end = seen.last().unwrap().position;
    for checkpoint in seen.iter().filter(|checkpoint| checkpoint.position < end) {
        let there = known
            .iter()
            .find(|known| known.position == checkpoint.position);
        match there {
            Some(there) => assert_eq!(there.hash, checkpoint.hash, "{what}: {checkpoint:?}"),
            None => assert!(
                !checkpoint.kinds.has(rungs),
                "{what}: {checkpoint:?} is new"
            ),
        }
    }
}

#[test]
fn cases_are_related_as_they_say() {
    let cases = cases();
    let read: BTreeMap<&str, Explained> = cases
        .iter()
        .map(|case| (case.name.as_str(), case.read(usize::MAX)))
        .collect();
    for case in &cases {
        let folder = case.name.split('/').next().unwrap();
        for (relation, value) in &case.relations {
            let (other, position) = match value.split_once(" to ") {
                Some((other, position)) => (other, position.parse().unwrap()),
                None => (value.as_str(), u64::MAX),
            };
            let this = &read[case.name.as_str()];
            let other = &read[format!("{folder}/{other}").as_str()];
            related(
                relation,
                this,
                other,
                position,
                &format!("{}: {relation} {value}", case.name),
            );
        }
    }
}

#[track_caller]
fn related(relation: &str, this: &Explained, other: &Explained, to: u64, what: &str) {
    let (a, b) = (&this.prompt, &other.prompt);
    let key =
        |prompt: &prefix_router::prefix::Prompt| prompt.key(prompt.checkpoints.last().unwrap());
    match relation {
        "same" => {
            assert_eq!(a.seed, b.seed, "{what}");
            assert_eq!(a.checkpoints, b.checkpoints, "{what}");
        }
        "differs" => assert_ne!(key(a), key(b), "{what}"),
        "same-fixed" => {
            assert!(a.fixed.is_some(), "{what}");
            assert_eq!((a.fixed, a.seed), (b.fixed, b.seed), "{what}");
        }
        "differs-fixed" => assert_ne!(a.fixed, b.fixed, "{what}"),
        "shares" => {
            assert_eq!(a.seed, b.seed, "{what}");
            // What ends here in one of them is the other's inside.
            let place = |checkpoint: &Checkpoint| (checkpoint.position, checkpoint.hash);
            let places = |checkpoints: &[Checkpoint]| -> Vec<(u64, u64)> {
                let shared = checkpoints
                    .iter()
                    .filter(|checkpoint| checkpoint.position <= to);
                shared.map(place).collect()
            };
            assert_eq!(places(&a.checkpoints), places(&b.checkpoints), "{what}");
            let next = |checkpoints: &[Checkpoint]| {
                checkpoints
                    .iter()
                    .find(|checkpoint| checkpoint.position > to)
                    .map(place)
            };
            if let (Some(a), Some(b)) = (next(&a.checkpoints), next(&b.checkpoints)) {
                assert_ne!(a, b, "{what}: more is shared");
            }
        }
        _ => panic!("{what}: unknown relation"),
    }
}

/// The hashes themselves: a change of them is a change of the hash format.
#[test]
fn hashes_are_those_of_the_format() {
    let mut shown = format!(
        "Keys of every case, hash format {HASH_FORMAT}. If a line of a case that did not change has \
         changed, every cache in a fleet will go cold with the release that does it: give \
         HASH_FORMAT the next number and say so in the changelog.\n"
    );
    for case in cases() {
        let prompt = case.read(usize::MAX).prompt;
        let end = prompt.key(prompt.checkpoints.last().unwrap()).0;
        let first = prompt.key(&prompt.checkpoints[0]).0;
        let fixed = prompt
            .fixed
            .map_or(String::new(), |fixed| format!(" fixed {fixed:016x}"));
        writeln!(
            shown,
            "{} first {first:016x} end {end:016x}{fixed}",
            case.name
        )
        .unwrap();
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/payloads/hash_format.txt");
    if updating() {
        fs::write(file, shown).unwrap();
        return;
    }
    let known = fs::read_to_string(file).unwrap();
    assert!(
        known == shown,
        "a new case only needs UPDATE=1; a key that changes makes every cache of a fleet cold:\n{}",
        differences(&known, &shown)
    );
}

/// The lines that only one of two texts has.
fn differences(before: &str, after: &str) -> String {
    let only = |mark: &str, this: &str, other: &str| -> String {
        let other: BTreeSet<&str> = other.lines().collect();
        let lines = this.lines().filter(|line| !other.contains(line));
        lines.map(|line| format!("{mark} {line}\n")).collect()
    };
    only("-", before, after) + &only("+", after, before)
}

fn show(explained: &Explained) -> String {
    let mut shown = String::new();
    let prompt = &explained.prompt;
    let coverage = match prompt.coverage {
        Coverage::Whole => "whole",
        other => other.label().unwrap(),
    };
    writeln!(shown, "{}, {coverage}", prompt.api).unwrap();
    for (place, section) in &explained.sections {
        writeln!(shown, "{place:?}").unwrap();
        for message in &section.messages {
            let role = message
                .role
                .as_ref()
                .map(|role| String::from_utf8_lossy(role));
            let role = match role.as_deref() {
                None => "(open)",
                Some("") => "(none)",
                Some(role) => role,
            };
            writeln!(shown, "  {role}").unwrap();
            for stretch in &message.parts {
                let text = show_bytes(stretch.part, &stretch.bytes);
                writeln!(shown, "    {:?} {} {text}", stretch.part, stretch.len).unwrap();
            }
        }
    }
    let seeds: Vec<&str> = explained
        .seeds
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    writeln!(shown, "seeds: {}", seeds.join(" ")).unwrap();
    if let Some(model) = &prompt.model {
        writeln!(shown, "model: {}", cut(model)).unwrap();
    }
    writeln!(
        shown,
        "bytes {}, messages {}, prompts {}{}{}{}{}",
        prompt.bytes,
        prompt.messages,
        prompt.prompts,
        if prompt.affinity { "" } else { ", no affinity" },
        if prompt.stream { ", stream" } else { "" },
        if prompt.engine_state {
            ", engine state"
        } else {
            ""
        },
        if prompt.cache_key.is_some() {
            ", cache key"
        } else {
            ""
        },
    )
    .unwrap();
    for checkpoint in &prompt.checkpoints {
        writeln!(
            shown,
            "{} {}",
            checkpoint.position,
            show_kinds(checkpoint.kinds)
        )
        .unwrap();
    }
    shown
}

fn show_kinds(kinds: Kinds) -> String {
    [
        (Kinds::KEY, "key"),
        (Kinds::INDEX, "index"),
        (Kinds::MESSAGE_END, "message"),
        (Kinds::FIRST_MESSAGE, "first"),
        (Kinds::SECOND_MESSAGE, "second"),
        (Kinds::END, "end"),
    ]
    .iter()
    .filter(|(kind, _)| kinds.has(*kind))
    .map(|(_, name)| *name)
    .collect::<Vec<_>>()
    .join(" ")
}

/// Texts as they are, cut; structure as marks; ids as numbers.
fn show_bytes(part: Part, bytes: &[u8]) -> String {
    if part == Part::Tokens {
        let id = |id: &[u8]| u32::from_le_bytes(id.try_into().unwrap()).to_string();
        return cut(&bytes.chunks(4).map(id).collect::<Vec<_>>().join(" "));
    }
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        write!(text, "{}", chunk.valid().escape_debug()).unwrap();
        for byte in chunk.invalid() {
            match byte {
                0xf8 => text.push_str("{ "),
                0xf9 => text.push_str("[ "),
                0xfa => text.push_str("} "),
                0xfb => text.push_str(" ."),
                0xfc => text.push_str(" ="),
                0xfd => text.push_str(" #"),
                _ => write!(text, "\\x{byte:02x}").unwrap(),
            }
        }
    }
    cut(&text)
}

fn cut(text: &str) -> String {
    const SHOWN: usize = 72;
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}
