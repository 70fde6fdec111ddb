//! Proves that bodies that mean the same prompt give the same checkpoints, and others do not.

#![allow(clippy::unwrap_used)]

use prefix_router::payload::{End, Head, ReadOptions, Reader};
use prefix_router::prefix::{Coverage, Kinds, Prompt, RawReason};

fn read(path: &str, body: &[u8], window: usize) -> Prompt {
    let head = Head {
        path: path.as_bytes(),
        ..Head::default()
    };
    let mut reader = Reader::new(&head, &ReadOptions::default());
    for window in body.chunks(window) {
        reader.feed(window);
    }
    reader.finish(End::Whole)
}

const CHAT: &str = "/v1/chat/completions";

fn end(prompt: &Prompt) -> (u64, u64) {
    let end = prompt.checkpoints.last().unwrap();
    assert!(end.kinds.has(Kinds::END));
    (end.position, prompt.key(end).0)
}

#[test]
fn windows_change_nothing() {
    let text = "Grüße, \\ud83d\\ude00 \\n and \\\"more\\\" ".repeat(200);
    let body = format!(
        r#"{{"messages":[{{"role":"system","content":"{text}"}},{{"role":"user","content":[{{"type":"text","text":"{text}"}}]}}],"model":"m","tools":[{{"a":1.5}}]}}"#
    );
    let whole = read(CHAT, body.as_bytes(), body.len());
    assert_eq!(whole.messages, 2);
    assert_eq!(whole.coverage, Coverage::Whole);
    assert_eq!(whole.model.as_deref(), Some("m"));
    for window in [1, 2, 3, 7, 1000] {
        assert_eq!(read(CHAT, body.as_bytes(), window), whole, "{window}");
    }
}

#[track_caller]
fn same(path: &str, a: &str, b: &str) {
    let (a, b) = (read(path, a.as_bytes(), 64), read(path, b.as_bytes(), 64));
    assert!(!matches!(a.coverage, Coverage::Raw(_)), "{a:?}");
    assert_eq!((&a.checkpoints, a.seed), (&b.checkpoints, b.seed));
}

#[track_caller]
fn different(path: &str, a: &str, b: &str) {
    let (a, b) = (read(path, a.as_bytes(), 64), read(path, b.as_bytes(), 64));
    assert!(!matches!(a.coverage, Coverage::Raw(_)), "{a:?}");
    assert_ne!(end(&a).1, end(&b).1);
}

const USER: &str = r#"{"messages":[{"role":"user","content":"a"}]}"#;

#[test]
fn the_same_prompt_is_the_same() {
    let same_chat = |body| same(CHAT, USER, body);
    same_chat(
        r#"{"temperature":1,"messages":[{"content":"\u0061","role":"user"}],"user":"x","n":[{}]}"#,
    );
    same_chat(r#" {"messages" : [ {"role":"user","content":[{"type":"text","text":"a"}]} ] } "#);
    same_chat(
        r#"{"response_format":{"type":"x"},"messages":[{"role":"user","content":"a","name":null}]}"#,
    );
    same(
        "/v1/messages",
        r#"{"system":"s","messages":[{"role":"user","content":"a"}]}"#,
        r#"{"messages":[{"role":"user","content":"a"}],
            "system":[{"type":"text","text":"s","cache_control":{}}]}"#,
    );
    same(
        "/v1/completions",
        r#"{"prompt":"a"}"#,
        r#"{"prompt":["a"]}"#,
    );
}

#[test]
fn another_prompt_is_another() {
    let different_chat = |body| different(CHAT, USER, body);
    different_chat(r#"{"messages":[{"role":"system","content":"a"}]}"#);
    different_chat(r#"{"messages":[{"role":"user","content":"b"}]}"#);
    different_chat(r#"{"model":"","messages":[{"role":"user","content":"a"}]}"#);
    different_chat(r#"{"cache_salt":"","messages":[{"role":"user","content":"a"}]}"#);
    different_chat(r#"{"tools":[],"messages":[{"role":"user","content":"a"}]}"#);
    let different_text = |a, b| different("/v1/completions", a, b);
    different_text(r#"{"prompt":[12,345]}"#, r#"{"prompt":[1,2345]}"#);
    different_text(r#"{"prompt":["ab"]}"#, r#"{"prompt":["a","b"]}"#);
}

#[test]
fn what_is_no_prompt_is_keyed_on_its_bytes() {
    let raw = |body: &str| read("/x", body.as_bytes(), 5);
    let unknown = Coverage::Raw(RawReason::UnknownShape);
    assert_eq!(raw("hello").coverage, unknown);
    assert_eq!(
        raw("hello world").coverage,
        Coverage::Raw(RawReason::NotJson)
    );
    assert_eq!(raw(r#"{"a":1}"#).coverage, unknown);
    assert_eq!(raw(r#"{"a":1}"#).bytes, 7);
    assert_ne!(end(&raw(r#"{"a":1}"#)), end(&raw(r#"{"a":2}"#)));
    let native = raw(r#"{"inputs":"text","parameters":{"temperature":1}}"#);
    assert_eq!((native.api, native.bytes), ("tgi_generate", 4));
}

/// The whole prompt is the key then: one hash of nothing would give all such prompts one home.
#[test]
fn in_fixed_mode_what_has_nothing_that_counts_has_no_prefix() {
    let options = ReadOptions {
        prefix_length: Some(1024),
        ..ReadOptions::default()
    };
    let fixed = |content: &str| {
        let body = format!(r#"{{"messages":[{{"role":"assistant",{content}}}]}}"#);
        let head = Head {
            path: CHAT.as_bytes(),
            ..Head::default()
        };
        let mut reader = Reader::new(&head, &options);
        reader.feed(body.as_bytes());
        reader.finish(End::Whole).fixed
    };
    assert_eq!(fixed(r#""tool_calls":[{"function":{"name":"a"}}]"#), None);
    assert_eq!(fixed(r#""reasoning":"a""#), None);
    assert_eq!(fixed(r#""content":"""#), None);
    assert!(fixed(r#""content":"a""#).is_some());
}

/// Prefixes of 1024 characters, and steps of 32 in what a system prompt leaves of them.
#[test]
fn in_fixed_mode_a_system_prompt_and_the_conversation_have_one_prefix_together() {
    let options = ReadOptions {
        prefix_length: Some(1024),
        ..ReadOptions::default()
    };
    let fixed = |system: usize, at: usize, first: bool| {
        let letters = |count: usize| "ü".repeat(count);
        let chat = format!("{}x{}", letters(at), letters(2000 - at));
        let chat = format!(r#""messages":[{{"role":"user","content":"{chat}"}}]"#);
        let system = format!(r#""system":"{}""#, letters(system));
        let body = match first {
            true => format!("{{{system},{chat}}}"),
            false => format!("{{{chat},{system}}}"),
        };
        let head = Head {
            path: b"/v1/messages",
            ..Head::default()
        };
        let mut reader = Reader::new(&head, &options);
        for window in body.as_bytes().chunks(777) {
            reader.feed(window);
        }
        reader.finish(End::Whole).fixed
    };
    for system in [1, 31, 32, 500, 960, 992, 993, 1023, 1024, 1500] {
        let counted = 1024_usize.saturating_sub(system) / 32 * 32;
        let same = fixed(system, 1999, true);
        for at in 0..1100 {
            let found = fixed(system, at, at % 2 == 0);
            assert_eq!(found != same, at < counted, "{system} {at}");
        }
    }
}
