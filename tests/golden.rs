//! Proves that prompts hash, and keys order hosts, as they did in every release of this hash
//! format: `tests/golden/hash_format_N.txt` was written when format N was made.
//!
//! `UPDATE=1 cargo test --test golden` writes the file of a new format, and adds lines to the
//! present one's; it never changes a line, because no release may.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use prefix_router::payload::{End, Head, ReadOptions, Reader};
use prefix_router::placement::{HostId, order};
use prefix_router::popularity;
use prefix_router::prefix::{HASH_FORMAT, Key, Prompt, mix};
use serde_json::{Value, json};

const TO_DO: &str = "\
A prompt's hash or a key's order of hosts is not what it was. Gateways of this build send prompts \
to other hosts than those of the release before: every cache of a fleet would go cold with the \
update, and two gateways that are not updated at once would not agree meanwhile.\n\
If that was not meant, undo it. If it is worth that price: give HASH_FORMAT in src/prefix.rs the \
next number, run `UPDATE=1 cargo test --test golden`, which writes that format's file, and say in \
CHANGELOG.md that `hash_format` has changed.\n";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn file() -> PathBuf {
    root().join(format!("tests/golden/hash_format_{HASH_FORMAT}.txt"))
}

/// Text of this many bytes; whoever has the same name has the same text.
fn text(name: &str, bytes: usize) -> String {
    let words = format!("{name} says what {name} has to say about it; ");
    words.chars().cycle().take(bytes).collect()
}

fn message(role: &str, content: String) -> Value {
    json!({"role": role, "content": content})
}

/// Bodies by name, with the path they are sent to.
fn bodies() -> Vec<(&'static str, &'static str, Value)> {
    const CHAT: &str = "/v1/chat/completions";
    let system = || message("system", text("system", 20_000));
    let turns = || {
        vec![
            system(),
            message("user", text("question 0", 900)),
            message("assistant", text("answer 0", 1500)),
            message("user", text("question 1", 700)),
        ]
    };
    let tool = json!({"type": "function", "function": {
        "name": "search", "description": text("tool", 400), "parameters": {"type": "object"}}});
    vec![
        (
            "short",
            CHAT,
            json!({"messages": [message("user", "Hello".into())]}),
        ),
        (
            "long",
            CHAT,
            json!({"messages": [system(), message("user", text("question 0", 900))]}),
        ),
        ("second turn", CHAT, json!({"messages": turns()})),
        (
            "other model",
            CHAT,
            json!({"messages": turns(), "model": "llama"}),
        ),
        ("tools", CHAT, json!({"messages": turns(), "tools": [tool]})),
        (
            "salt",
            CHAT,
            json!({"messages": turns(), "cache_salt": "s"}),
        ),
        (
            "Chinese",
            CHAT,
            json!({"messages": [message("user", "前缀路由".repeat(400))]}),
        ),
        (
            "completion",
            "/v1/completions",
            json!({"prompt": text("prompt", 5000)}),
        ),
        (
            "system beside",
            "/v1/messages",
            json!({"system": text("system", 3000), "messages": [
                message("user", text("question 0", 2000))]}),
        ),
        (
            "long system beside",
            "/v1/messages",
            json!({"system": text("system", 20_000), "messages": [
                message("user", text("question 0", 900))]}),
        ),
        (
            "token ids",
            "/v1/completions",
            json!({"prompt": (0..2000).collect::<Vec<u32>>()}),
        ),
        (
            "image",
            CHAT,
            json!({"messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "https://cdn/a"}},
                {"type": "text", "text": text("question 0", 900)}]}]}),
        ),
        (
            "native",
            "/invocations",
            json!({"inputs": text("input", 5000)}),
        ),
        (
            "no prompt",
            "/elsewhere",
            json!({"weather": text("weather", 3000)}),
        ),
    ]
}

/// Ways to read a body that change what it hashes to.
fn readings() -> [(&'static str, Option<&'static [u8]>, ReadOptions); 3] {
    let plain = ReadOptions {
        prefix_length: Some(4096),
        ..ReadOptions::default()
    };
    let seeded = ReadOptions {
        seed: 42,
        ..plain.clone()
    };
    [
        ("", None, plain.clone()),
        (" with a tenant", Some(b"tenant"), plain),
        (" with a seed", None, seeded),
    ]
}

fn read(path: &str, body: &Value, tenant: Option<&[u8]>, options: &ReadOptions) -> Prompt {
    let head = Head {
        path: path.as_bytes(),
        content_type: b"application/json",
        tenant,
        ..Head::default()
    };
    let mut reader = Reader::new(&head, options);
    reader.feed(body.to_string().as_bytes());
    reader.finish(End::Whole)
}

/// A fleet by name: its addresses with their weights.
fn fleets() -> Vec<(&'static str, Vec<(String, u32)>)> {
    let even = |count: u32| {
        (1..=count)
            .map(|n| (format!("10.0.0.{n}:8000"), 1))
            .collect()
    };
    let weighted = (1..=8)
        .map(|n| (format!("10.0.0.{n}:8000"), 256 >> (n % 4)))
        .collect();
    let named = (1..=3).map(|n| (format!("[fd00::{n}]:30000"), 1)).collect();
    vec![
        ("3 hosts", even(3)),
        ("7 hosts", even(7)),
        ("8 hosts", even(8)),
        ("8 hosts of weights 128 64 32 256 in turn", weighted),
        ("3 hosts by IPv6", named),
    ]
}

/// The numbers of a fleet's hosts, from 1, in the order of `key`.
fn order_of(key: Key, fleet: &[(String, u32)]) -> String {
    let hosts: Vec<(u32, HostId, u32)> = (1..)
        .zip(fleet)
        .map(|(number, (address, weight))| (number, HostId::of(address), *weight))
        .collect();
    let order = order(key, &hosts, |&(_, id, weight)| (id, weight));
    let numbers: Vec<String> = order
        .iter()
        .map(|(number, ..)| number.to_string())
        .collect();
    numbers.join(" ")
}

fn listing() -> String {
    let mut shown = format!(
        "Hash format {HASH_FORMAT}. Keys of prompts by position in bytes, and hosts in the order \
         of a key.\n"
    );
    let mut keys: Vec<(String, Key)> = Vec::new();
    for (name, path, body) in bodies() {
        for (how, tenant, options) in readings() {
            let prompt = read(path, &body, tenant, &options);
            let mut line = format!("prompt {name}{how}:");
            for rung in popularity::rungs(&prompt) {
                let _ = write!(line, " {}={:016x}", rung.position, rung.key.0);
            }
            if let Some(fixed) = prompt.fixed {
                let _ = write!(line, " fixed={:016x}", mix(fixed, prompt.seed));
            }
            let _ = writeln!(shown, "{line}");
            let first = popularity::rungs(&prompt).first().map(|rung| rung.key);
            keys.extend(first.map(|key| (format!("{name}{how}"), key)));
        }
    }
    for (fleet, hosts) in fleets() {
        for (name, key) in &keys {
            let _ = writeln!(shown, "order {fleet}, {name}: {}", order_of(*key, &hosts));
        }
    }
    shown
}

#[test]
fn prompts_hash_and_keys_order_hosts_as_in_every_release_of_this_format() {
    let found = listing();
    let known = std::fs::read_to_string(file()).unwrap_or_default();
    let lines: BTreeSet<&str> = found.lines().collect();
    let gone: Vec<&str> = known.lines().filter(|line| !lines.contains(line)).collect();
    assert!(
        gone.is_empty(),
        "{TO_DO}\nno longer so:\n{}",
        gone.join("\n")
    );
    if std::env::var_os("UPDATE").is_some() {
        assert!(
            std::env::var_os("CI").is_none(),
            "UPDATE is for people: CI only compares"
        );
        std::fs::write(file(), &found).unwrap();
        return;
    }
    assert_eq!(
        known, found,
        "lines were added: UPDATE=1 cargo test --test golden"
    );
}

#[test]
fn earlier_formats_are_kept_and_the_changelog_names_the_present_one() {
    for format in (1..=HASH_FORMAT).filter(|format| *format < HASH_FORMAT) {
        let file = root().join(format!("tests/golden/hash_format_{format}.txt"));
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let title = format!("Hash format {format}.");
        assert!(text.starts_with(&title), "{}: no {title:?}", file.display());
    }
    let changelog = std::fs::read_to_string(root().join("CHANGELOG.md")).unwrap();
    let named = format!("`hash_format` {HASH_FORMAT}");
    assert!(
        changelog.contains(&named),
        "CHANGELOG.md does not say {named:?}"
    );
}
