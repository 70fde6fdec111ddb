//! Deterministic prompts as OpenAI request bodies.
//!
//! Guarantee: the same seed gives the same text on every machine; different seeds differ within
//! the first word. Not here: workloads with a distribution (workload).

use serde_json::json;

/// Text of at least `bytes` bytes, made of made-up words.
#[must_use]
pub fn words(seed: u64, bytes: usize) -> String {
    use std::fmt::Write as _;
    let mut text = format!("w{seed}");
    // SplitMix64: the published constants; any full-period generator would do.
    let mut state = seed;
    while text.len() < bytes {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let _ = write!(text, " {:x}", (word ^ (word >> 31)) & 0xff_ffff);
    }
    text
}

/// A chat completion body with one system prompt and one question.
#[must_use]
pub fn chat(system: &str, user: &str) -> Vec<u8> {
    chat_turns(system, &[user])
}

/// A chat completion body with one short message. The adaptive key of such a prompt has nothing
/// to choose from, so however often it is sent, it has one home.
#[must_use]
pub fn ask(text: &str) -> Vec<u8> {
    json!({"messages": [{"role": "user", "content": text}], "model": "m", "max_tokens": 1})
        .to_string()
        .into_bytes()
}

/// The same body for another model.
#[must_use]
pub fn for_model(body: &[u8], model: &str) -> Vec<u8> {
    let mut body: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    if let Some(fields) = body.as_object_mut() {
        fields.insert("model".to_owned(), json!(model));
    }
    body.to_string().into_bytes()
}

/// A chat completion body of a conversation: user, assistant, user, … after the system prompt.
#[must_use]
pub fn chat_turns(system: &str, turns: &[&str]) -> Vec<u8> {
    let mut messages = vec![json!({"role": "system", "content": system})];
    messages.extend(turns.iter().enumerate().map(|(n, text)| {
        let role = if n % 2 == 0 { "user" } else { "assistant" };
        json!({"role": role, "content": text})
    }));
    json!({"messages": messages, "model": "m", "max_tokens": 1})
        .to_string()
        .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_depends_on_the_seed_alone() {
        assert_eq!(words(7, 200), words(7, 200));
        assert!(words(7, 200).len() >= 200);
        assert_ne!(words(7, 200)[..8], words(8, 200)[..8]);
        assert!(words(7, 4000).starts_with(&words(7, 200)));
    }

    #[test]
    fn a_later_turn_begins_with_the_earlier_one() {
        let value: serde_json::Value =
            serde_json::from_slice(&chat_turns("s", &["a", "b", "c"])).unwrap();
        assert_eq!(
            value["messages"][3],
            json!({"role": "user", "content": "c"})
        );
        assert_eq!(value["messages"][2]["role"], "assistant");
    }
}
