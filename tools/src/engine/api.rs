//! The HTTP APIs of an engine: request bodies → jobs, progress → response bytes.
//!
//! Guarantee: exactly the asked number of tokens is answered, each of them four bytes of text; an
//! error has OpenAI's shape. Not here: sockets (server.rs), templates (render.rs).

use serde::Deserialize;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::engine::render::{Answer, Message, Part, Rendered, Template};

/// Which API a request speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
    /// `/generate`, and what else comes to `/invocations`.
    Native,
}

/// How requests are read.
#[derive(Clone, Debug)]
pub struct ReadLimits {
    /// The names served; empty: any.
    pub models: Vec<String>,
    /// Tokens answered when the request does not say.
    pub output_tokens_default: u32,
    /// Prompt and answer together.
    pub context_tokens_max: u32,
    /// The chat template.
    pub template: Template,
    /// Tokens per cache block.
    pub block_tokens: u32,
}

/// A request, ready to be scheduled.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its API.
    pub api: Api,
    /// The model it names.
    pub model: String,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
    /// Block hashes of prompt and answer.
    pub chain: Vec<u64>,
    /// The answer.
    pub answer: Answer,
    /// Whether tokens are sent as they are produced.
    pub stream: bool,
    /// Whether a stream ends with usage.
    pub include_usage: bool,
}

/// A refusal: status, OpenAI's error type, message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    kind: &'static str,
    message: String,
}

impl ApiError {
    /// The request cannot be understood.
    #[must_use]
    pub fn bad(message: impl Into<String>) -> Self {
        Self {
            status: 400,
            kind: "BadRequestError",
            message: message.into(),
        }
    }

    /// There is no such thing.
    #[must_use]
    pub fn not_found(message: impl Into<String>) -> Self {
        Self {
            status: 404,
            kind: "NotFoundError",
            message: message.into(),
        }
    }

    /// Any other status.
    #[must_use]
    pub fn status(status: u16, kind: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            message: message.into(),
        }
    }

    /// The body.
    #[must_use]
    pub fn body(&self) -> Vec<u8> {
        let error = json!({"error": {"message": self.message, "type": self.kind, "param": null,
                                     "code": self.status}});
        error.to_string().into_bytes()
    }
}

#[derive(Deserialize)]
struct Body {
    model: Option<String>,
    messages: Option<Vec<ChatMessage>>,
    prompt: Option<Value>,
    inputs: Option<Value>,
    parameters: Option<Parameters>,
    tools: Option<Value>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    cache_salt: Option<String>,
    n: Option<u32>,
}

#[derive(Deserialize)]
struct ChatMessage {
    role: String,
    content: Option<Content>,
    tool_calls: Option<Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Value>),
}

#[derive(Deserialize)]
struct Parameters {
    max_new_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// Reads a request body.
pub fn read(api: Option<Api>, body: &[u8], limits: &ReadLimits) -> Result<Request, ApiError> {
    let body: Body = serde_json::from_slice(body)
        .map_err(|error| ApiError::bad(format!("body: expected a JSON request, {error}")))?;
    if body.n.is_some_and(|n| n != 1) {
        return Err(ApiError::bad("n: this engine gives one answer to a prompt"));
    }
    let model = model_of(&body, limits)?;
    let api = api.unwrap_or(match (&body.messages, &body.prompt) {
        (Some(_), _) => Api::Chat,
        (None, Some(_)) => Api::Completion,
        (None, None) => Api::Native,
    });
    let mut rendered = match api {
        Api::Chat => chat(&body, limits.template)?,
        Api::Completion => plain("prompt", body.prompt.as_ref())?,
        Api::Native => plain("inputs", body.inputs.as_ref())?,
    };
    let prompt_tokens = rendered.tokens();
    let output_tokens = output_tokens(&body, prompt_tokens, limits)?;
    let answer = Answer::new(limits.template, rendered.digest(), output_tokens);
    rendered.push_answer(&answer);
    let salt = body.cache_salt.unwrap_or_default();
    let seed = xxh3_64_with_seed(salt.as_bytes(), xxh3_64_with_seed(model.as_bytes(), 1));
    let stream_options = body
        .stream_options
        .and_then(|options| options.include_usage);
    Ok(Request {
        api,
        prompt_tokens,
        output_tokens,
        chain: rendered.chain(seed, limits.block_tokens),
        answer,
        stream: body.stream.unwrap_or(false),
        include_usage: stream_options.unwrap_or(false),
        model,
    })
}

/// What a chat's prompt is in tokens, and nothing computed: the answer to vLLM's `…/render`.
pub fn render(body: &[u8], limits: &ReadLimits) -> Result<Vec<u8>, ApiError> {
    let body: Body = serde_json::from_slice(body)
        .map_err(|error| ApiError::bad(format!("body: expected a JSON request, {error}")))?;
    let model = model_of(&body, limits)?;
    let ids = chat(&body, limits.template)?.token_ids();
    Ok(json!({"model": model, "token_ids": ids})
        .to_string()
        .into_bytes())
}

fn model_of(body: &Body, limits: &ReadLimits) -> Result<String, ApiError> {
    match (&body.model, limits.models.first()) {
        (Some(model), Some(_)) if !limits.models.contains(model) => Err(ApiError::not_found(
            format!("The model `{model}` does not exist."),
        )),
        (Some(model), _) => Ok(model.clone()),
        (None, Some(first)) => Ok(first.clone()),
        (None, None) => Ok(String::new()),
    }
}

fn output_tokens(body: &Body, prompt: u32, limits: &ReadLimits) -> Result<u32, ApiError> {
    let native = body.parameters.as_ref().and_then(|p| p.max_new_tokens);
    let asked = body.max_completion_tokens.or(body.max_tokens).or(native);
    let room = limits.context_tokens_max.saturating_sub(prompt);
    let tokens = asked.unwrap_or(limits.output_tokens_default.min(room));
    if tokens == 0 && room > 0 {
        return Err(ApiError::bad("max_tokens: expected at least 1, got 0"));
    }
    if tokens > room || tokens == 0 {
        return Err(ApiError::bad(format!(
            "This model's maximum context length is {} tokens; the prompt has {prompt} and the \
             answer {tokens}.",
            limits.context_tokens_max
        )));
    }
    Ok(tokens)
}

fn chat(body: &Body, template: Template) -> Result<Rendered, ApiError> {
    let messages = body.messages.as_deref().unwrap_or_default();
    if messages.is_empty() {
        return Err(ApiError::bad("messages: expected at least one"));
    }
    // What is not a string in the body is rendered as JSON.
    let rest: Vec<Vec<String>> = messages.iter().map(json_parts).collect();
    let parts: Vec<Vec<Part<'_>>> = messages.iter().zip(&rest).map(parts_of).collect();
    let messages: Vec<Message<'_>> = messages
        .iter()
        .zip(&parts)
        .map(|(message, parts)| Message {
            role: &message.role,
            parts,
        })
        .collect();
    let tools = match &body.tools {
        None | Some(Value::Null) => String::new(),
        Some(tools) => tools.to_string(),
    };
    Ok(Rendered::chat(template, tools.as_bytes(), &messages))
}

/// The message's parts that need a text of their own: first those of `content`, then tool calls.
fn json_parts(message: &ChatMessage) -> Vec<String> {
    let content = match &message.content {
        Some(Content::Parts(parts)) => parts.as_slice(),
        _ => &[],
    };
    let calls = message.tool_calls.iter().filter(|calls| !calls.is_null());
    let others = content.iter().filter(|part| text_of(part).is_none());
    others.chain(calls).map(Value::to_string).collect()
}

fn parts_of<'a>((message, rest): (&'a ChatMessage, &'a Vec<String>)) -> Vec<Part<'a>> {
    let mut rest = rest.iter();
    let mut parts = Vec::new();
    match &message.content {
        None => {}
        Some(Content::Text(text)) => parts.push(Part::Text(text)),
        Some(Content::Parts(content)) => {
            for part in content {
                match text_of(part) {
                    Some(text) => parts.push(Part::Text(text)),
                    None => parts.extend(rest.next().map(|json| Part::Image(json.as_bytes()))),
                }
            }
        }
    }
    parts.extend(rest.map(|json| Part::Text(json)));
    parts
}

fn text_of(part: &Value) -> Option<&str> {
    part.get("text").and_then(Value::as_str).or(part.as_str())
}

fn plain(field: &str, value: Option<&Value>) -> Result<Rendered, ApiError> {
    let wrong = || {
        ApiError::bad(format!(
            "{field}: expected a text, a list of token ids, or a list of one"
        ))
    };
    match value {
        Some(Value::String(text)) => Ok(Rendered::plain(text.as_bytes())),
        Some(Value::Array(items)) => match items.as_slice() {
            [inner @ (Value::String(_) | Value::Array(_))] => plain(field, Some(inner)),
            [] => Err(wrong()),
            ids => {
                let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
                let ids: Option<Vec<u32>> = ids.iter().map(id).collect();
                ids.map(|ids| Rendered::ids(&ids)).ok_or_else(wrong)
            }
        },
        _ => Err(wrong()),
    }
}

/// Tokens used, as an answer's end tells them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt.
    pub prompt_tokens: u32,
    /// Of the answer.
    pub output_tokens: u32,
    /// Of the prompt, found in the cache; `None` if the engine does not tell.
    pub cached_tokens: Option<u32>,
}

impl Usage {
    fn json(self) -> Value {
        let details = self
            .cached_tokens
            .map(|cached| json!({"cached_tokens": cached}));
        json!({"prompt_tokens": self.prompt_tokens, "completion_tokens": self.output_tokens,
               "total_tokens": self.prompt_tokens + self.output_tokens,
               "prompt_tokens_details": details})
    }
}

/// Writes one request's answer, whole or as server-sent events.
#[derive(Clone, Debug)]
pub struct Writer {
    api: Api,
    answer: Answer,
    output_tokens: u32,
    base: Value,
    // An event's bytes before and behind its text.
    open: Vec<u8>,
    close: Vec<u8>,
}

impl Writer {
    /// A writer for the answer to `request`, which has this `id`.
    #[must_use]
    pub fn new(request: &Request, id: u64, created_s: u64) -> Self {
        let (prefix, object) = match (request.api, request.stream) {
            (Api::Chat, true) => ("chatcmpl", "chat.completion.chunk"),
            (Api::Chat, false) => ("chatcmpl", "chat.completion"),
            _ => ("cmpl", "text_completion"),
        };
        let base = json!({"id": format!("{prefix}-{id:016x}"), "object": object,
                          "created": created_s, "model": request.model});
        let mut writer = Self {
            api: request.api,
            answer: request.answer,
            output_tokens: request.output_tokens,
            base,
            open: Vec::new(),
            close: Vec::new(),
        };
        // Any text that needs no escape marks the place.
        const MARK: &str = "<text>";
        let event = writer.event(MARK, None);
        let text = String::from_utf8(event).unwrap_or_default();
        if let Some((open, close)) = text.split_once(MARK) {
            writer.open = open.into();
            writer.close = close.into();
        }
        writer
    }

    /// What comes before the first token.
    pub fn first(&self, out: &mut Vec<u8>) {
        if self.api == Api::Chat {
            let delta = json!({"role": "assistant", "content": ""});
            out.extend(
                self.event_of(json!([{"index": 0, "delta": delta, "logprobs": null,
                                             "finish_reason": null}])),
            );
        }
    }

    /// One event with the tokens in this range.
    pub fn tokens(&self, tokens: std::ops::Range<u32>, out: &mut Vec<u8>) {
        let mut text = Vec::with_capacity(16);
        let last = tokens.end == self.output_tokens;
        self.answer.write(tokens, &mut text);
        if last {
            let text = String::from_utf8(text).unwrap_or_default();
            out.extend(self.event(&text, Some("length")));
            return;
        }
        out.extend_from_slice(&self.open);
        for byte in text {
            match byte {
                b'\n' => out.extend_from_slice(b"\\n"),
                byte => out.push(byte),
            }
        }
        out.extend_from_slice(&self.close);
    }

    /// What comes behind the last token.
    pub fn end(&self, usage: Option<Usage>, out: &mut Vec<u8>) {
        if let (Some(usage), true) = (usage, self.api != Api::Native) {
            let mut event = self.base.clone();
            set(&mut event, "choices", json!([]));
            set(&mut event, "usage", usage.json());
            out.extend(sse(&event));
        }
        if self.api != Api::Native {
            out.extend_from_slice(b"data: [DONE]\n\n");
        }
    }

    /// A whole answer.
    #[must_use]
    pub fn whole(&self, usage: Usage) -> Vec<u8> {
        let text = self.answer.text();
        let mut body = self.base.clone();
        let choice = match self.api {
            Api::Chat => json!({"index": 0, "logprobs": null, "finish_reason": "length",
                                "message": {"role": "assistant", "content": text}}),
            Api::Completion => json!({"index": 0, "logprobs": null, "finish_reason": "length",
                                      "text": text}),
            Api::Native => {
                let body = json!({"generated_text": text, "usage": usage.json()});
                return body.to_string().into_bytes();
            }
        };
        set(&mut body, "choices", json!([choice]));
        set(&mut body, "usage", usage.json());
        body.to_string().into_bytes()
    }

    fn event(&self, text: &str, finish_reason: Option<&str>) -> Vec<u8> {
        match self.api {
            Api::Chat => self.event_of(json!([{"index": 0, "delta": {"content": text},
                                    "logprobs": null, "finish_reason": finish_reason}])),
            Api::Completion => self.event_of(json!([{"index": 0, "text": text,
                                    "logprobs": null, "finish_reason": finish_reason}])),
            Api::Native => {
                let all = finish_reason.map(|_| self.answer.text());
                sse(&json!({"token": {"text": text}, "generated_text": all}))
            }
        }
    }

    fn event_of(&self, choices: Value) -> Vec<u8> {
        let mut event = self.base.clone();
        set(&mut event, "choices", choices);
        sse(&event)
    }
}

fn set(object: &mut Value, field: &str, value: Value) {
    if let Some(object) = object.as_object_mut() {
        object.insert(field.to_owned(), value);
    }
}

fn sse(event: &Value) -> Vec<u8> {
    format!("data: {event}\n\n").into_bytes()
}
