//! What a body has beside its prompt, found by leaving it away and reading again.
//!
//! Guarantee: what is told of a field is what the filter does with it, for it is tried out. Not
//! here: what the filter reads (src/payload).

use prefix_router::payload::decode::{DETECT_BYTES, Decoder, Encoding, Limits};
use prefix_router::payload::parts::Explained;
use serde::Serialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::input::{Body, Setup};

/// Fields tried out, each by reading the body once more. Requests have about ten.
const FIELDS_MAX: usize = 64;

/// Levels of a body below which nothing is tried out: `messages/*/content/*/image_url` has five.
const DEPTH_MAX: usize = 5;

/// What a field does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Effect {
    /// It is part of the prompt.
    Prompt,
    /// It is mixed into the key.
    Seed,
    /// It counts for the prompt's length only.
    Length,
    /// It splits a key that is too hot.
    Hint,
    /// It says that the prompt continues what one engine holds.
    EngineState,
    /// It says whether the answer is streamed.
    Stream,
    /// It is left out.
    Nothing,
}

/// A field of the body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Field {
    /// Where it stands; `*` is any place of a list.
    pub field: String,
    pub effect: Effect,
    /// Whether the body would be of another API without it.
    pub decides_api: bool,
}

/// The body's fields, or why they cannot be tried out.
pub(super) fn fields(setup: &Setup, body: &Body) -> Result<Vec<Field>, String> {
    let text = decoded(body)?;
    let value: Value =
        serde_json::from_slice(&text).map_err(|error| format!("it is not plain JSON: {error}"))?;
    let mut trial = Trial {
        setup,
        body,
        whole: read(setup, body, &value),
        fields: Vec::new(),
        left: FIELDS_MAX,
    };
    trial.below(&value, &mut Vec::new());
    Ok(trial.fields)
}

/// What is wrong with a body that is not JSON.
pub(super) fn not_json(body: &Body) -> Option<String> {
    let text = decoded(body).ok()?;
    if text.is_empty() {
        return Some("it is empty".into());
    }
    // This looks at the grammar alone, however deep the body goes.
    let error = serde_json::from_slice::<IgnoredAny>(&text).err()?;
    Some(error.to_string())
}

/// The body without its coding.
pub(super) fn decoded(body: &Body) -> Result<Vec<u8>, String> {
    let first = body.bytes.get(..DETECT_BYTES).unwrap_or(&body.bytes);
    let coding = body
        .headers
        .iter()
        .find(|(name, _)| name == "content-encoding");
    let coding = coding.map_or(&b""[..], |(_, value)| value.as_bytes());
    let Some(encoding) = Encoding::detect(coding, first) else {
        return Ok(body.bytes.clone());
    };
    let mut text = Vec::new();
    let mut keep = |piece: &[u8]| text.extend_from_slice(piece);
    let mut decoder = Decoder::new(encoding, Limits::default());
    let fed = decoder.feed(&body.bytes, &mut keep);
    fed.and_then(|()| decoder.finish(&mut keep))
        .map_err(|error| format!("it cannot be decoded ({})", error.label()))?;
    Ok(text)
}

struct Trial<'a> {
    setup: &'a Setup,
    body: &'a Body,
    whole: Explained,
    fields: Vec<Field>,
    left: usize,
}

impl Trial<'_> {
    /// Tries out the members of all objects that `path` leads to.
    fn below(&mut self, value: &Value, path: &mut Vec<String>) {
        if path.len() >= DEPTH_MAX {
            return;
        }
        for name in members(value, path) {
            if self.left == 0 {
                return;
            }
            self.left -= 1;
            path.push(name);
            let mut without = value.clone();
            remove(&mut without, path);
            let seen = read(self.setup, self.body, &without);
            let effect = effect(&self.whole, &seen);
            // Below the first level only what is left out is of interest.
            if path.len() == 1 || effect == Effect::Nothing {
                self.fields.push(Field {
                    field: path.join("/"),
                    effect,
                    decides_api: seen.prompt.api != self.whole.prompt.api,
                });
            }
            let is_tools = ["tools", "functions"].contains(&path.concat().as_str());
            if effect == Effect::Prompt && !is_tools {
                self.below(value, path);
                path.push("*".into());
                self.below(value, path);
                path.pop();
            }
            path.pop();
        }
    }
}

/// The names of the members of all objects that a path leads to, in order, none twice.
fn members(value: &Value, path: &[String]) -> Vec<String> {
    let mut names = Vec::new();
    visit(&mut value.clone(), path, &mut |object| {
        for (name, value) in object.iter() {
            if !value.is_null() && !names.contains(name) && names.len() < FIELDS_MAX {
                names.push(name.clone());
            }
        }
    });
    names
}

fn remove(value: &mut Value, path: &[String]) {
    if let Some((last, parents)) = path.split_last() {
        visit(value, parents, &mut |object| {
            object.remove(last);
        });
    }
}

fn visit(
    value: &mut Value,
    path: &[String],
    each: &mut impl FnMut(&mut serde_json::Map<String, Value>),
) {
    match (path.split_first(), value) {
        (None, Value::Object(object)) => each(object),
        (Some((step, rest)), Value::Array(items)) if step == "*" => {
            items.iter_mut().for_each(|item| visit(item, rest, each));
        }
        (Some((step, rest)), Value::Object(object)) => {
            if let Some(member) = object.get_mut(step) {
                visit(member, rest, each);
            }
        }
        _ => {}
    }
}

/// Members stand in another order here than in the body, in every trial in the same one.
fn read(setup: &Setup, body: &Body, value: &Value) -> Explained {
    setup.explain(&Body {
        name: body.name.clone(),
        path: body.path.clone(),
        bytes: value.to_string().into_bytes(),
        headers: body
            .headers
            .iter()
            .filter(|(name, _)| name != "content-encoding")
            .cloned()
            .collect(),
    })
}

fn effect(whole: &Explained, without: &Explained) -> Effect {
    let (whole, without) = (&whole.prompt, &without.prompt);
    let coverage = whole.coverage == without.coverage;
    if !coverage || whole.checkpoints != without.checkpoints || whole.fixed != without.fixed {
        return Effect::Prompt;
    }
    if whole.seed != without.seed {
        return Effect::Seed;
    }
    if whole.bytes != without.bytes {
        return Effect::Length;
    }
    if whole.cache_key != without.cache_key {
        return Effect::Hint;
    }
    if whole.engine_state != without.engine_state {
        return Effect::EngineState;
    }
    if whole.stream != without.stream {
        return Effect::Stream;
    }
    Effect::Nothing
}

/// Why a field is left out, by its last name.
pub(super) fn why(field: &str) -> &'static str {
    let name = field.rsplit('/').next().unwrap_or(field);
    match name {
        "stream" | "stream_options" => "how the answer is sent, not what is asked",
        "user" | "metadata" | "store" | "service_tier" | "safety_identifier" => {
            "says who asks; engines do not show it to the model"
        }
        "response_format"
        | "guided_json"
        | "guided_regex"
        | "guided_choice"
        | "guided_grammar"
        | "structured_outputs"
        | "tool_choice"
        | "parallel_tool_calls"
        | "text" => "bounds the answer's form, not the prompt",
        "id" | "tool_call_id" | "call_id" | "tool_use_id" | "toolUseId" | "index" | "status" => {
            "an id or mark; chat templates do not show it to the model"
        }
        "cache_control" => "a hint for a provider's cache, no text",
        "signature" => "signs the reasoning; the model does not see it",
        "type" | "datatype" | "shape" => "tells how to read what stands beside it",
        "name" if field.starts_with("inputs/") => "tells how to read what stands beside it",
        "previous_response_id" | "conversation" => "names what one engine holds",
        name if is_sampling(name) => "how the answer is chosen, not what is asked",
        _ => "not known to be shown to the model",
    }
}

fn is_sampling(name: &str) -> bool {
    const NAMES: [&str; 24] = [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "max_tokens",
        "max_new_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "min_tokens",
        "n",
        "best_of",
        "seed",
        "stop",
        "stop_sequences",
        "stop_token_ids",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "generationConfig",
        "inferenceConfig",
    ];
    NAMES.contains(&name)
        || matches!(
            name,
            "options" | "sampling_params" | "parameters" | "do_sample" | "details"
        )
}
