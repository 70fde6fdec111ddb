//! A request as the bytes a client would send: OpenAI's two forms and the native one.
//!
//! Guarantee: fields stand in the order in which OpenAI's SDK writes them (`messages` first, then
//! `model`), since the router must cope with it. Not here: HTTP.

use serde::{Serialize, Serializer};

use super::{Message, Request, Role};

/// The API a body is written for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Form {
    /// `POST /v1/chat/completions`.
    #[default]
    Chat,
    /// `POST /v1/completions`, the messages as one string.
    Completions,
    /// `POST /invocations` with `{"inputs": …}`, the messages as one string.
    Native,
}

impl Form {
    /// The path the form is posted to.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Native => "/invocations",
        }
    }
}

/// What a body says beyond its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask<'a> {
    /// The API.
    pub form: Form,
    /// The model's name.
    pub model: &'a str,
    /// Whether the answer is to be streamed, with its usage at the end.
    pub stream: bool,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Serialize)]
struct ChatMessage<'a> {
    role: &'static str,
    #[serde(serialize_with = "content")]
    content: &'a Message,
}

#[derive(Serialize)]
struct ChatBody<'a> {
    messages: Vec<ChatMessage<'a>>,
    model: &'a str,
    max_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
}

#[derive(Serialize)]
struct CompletionsBody<'a> {
    model: &'a str,
    prompt: String,
    max_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
}

#[derive(Serialize)]
struct NativeParameters {
    max_new_tokens: u32,
}

#[derive(Serialize)]
struct NativeBody {
    inputs: String,
    parameters: NativeParameters,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<bool>,
}

fn content<S: Serializer>(message: &&Message, serializer: S) -> Result<S::Ok, S::Error> {
    let mut out = String::new();
    message.write(&mut out);
    serializer.serialize_str(&out)
}

/// The request's body.
#[must_use]
pub fn render(request: &Request, ask: &Ask<'_>) -> Vec<u8> {
    let max_tokens = request.output_tokens;
    let stream = ask.stream.then_some(true);
    let stream_options = ask.stream.then_some(StreamOptions {
        include_usage: true,
    });
    let model = ask.model;
    let body = match ask.form {
        Form::Chat => {
            let messages = request.messages.iter();
            let messages = messages.map(|content| ChatMessage {
                role: content.role.name(),
                content,
            });
            let messages = messages.collect();
            serde_json::to_vec(&ChatBody {
                messages,
                model,
                max_tokens,
                stream,
                stream_options,
            })
        }
        Form::Completions => {
            let prompt = plain(request);
            let body = CompletionsBody {
                model,
                prompt,
                max_tokens,
                stream,
                stream_options,
            };
            serde_json::to_vec(&body)
        }
        Form::Native => {
            let parameters = NativeParameters {
                max_new_tokens: max_tokens,
            };
            serde_json::to_vec(&NativeBody {
                inputs: plain(request),
                parameters,
                stream,
            })
        }
    };
    // Strings and numbers always serialise; an empty body would be refused by every engine.
    body.unwrap_or_default()
}

/// The messages as one text, for the APIs that know no messages.
fn plain(request: &Request) -> String {
    let mut out = String::new();
    for message in request.messages.iter() {
        out.push_str(match message.role {
            Role::System => "",
            Role::User => "\n\nQ: ",
            Role::Assistant => "\n\nA: ",
        });
        message.write(&mut out);
    }
    out
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::workload::Text;

    fn request() -> Request {
        let system = Message::new(Role::System, Text::Said("Be \"kind\".".into()));
        let user = Message {
            role: Role::User,
            texts: vec![Text::Said("Hel".into()), Text::Said("lo".into())],
        };
        Request {
            id: 0,
            at: Duration::ZERO,
            prefix: None,
            turn: 0,
            turns_left: 0,
            messages: Arc::new(vec![system, user]),
            output_tokens: 5,
        }
    }

    #[track_caller]
    fn check(form: Form, stream: bool, expected: &str) {
        let body = render(
            &request(),
            &Ask {
                form,
                model: "m",
                stream,
            },
        );
        assert_eq!(String::from_utf8(body).unwrap(), expected);
    }

    #[test]
    fn bodies_are_written_as_sdks_write_them() {
        check(
            Form::Chat,
            true,
            r#"{"messages":[{"role":"system","content":"Be \"kind\"."},{"role":"user","content":"Hello"}],"model":"m","max_tokens":5,"stream":true,"stream_options":{"include_usage":true}}"#,
        );
        check(
            Form::Chat,
            false,
            r#"{"messages":[{"role":"system","content":"Be \"kind\"."},{"role":"user","content":"Hello"}],"model":"m","max_tokens":5}"#,
        );
        check(
            Form::Completions,
            true,
            r#"{"model":"m","prompt":"Be \"kind\".\n\nQ: Hello","max_tokens":5,"stream":true,"stream_options":{"include_usage":true}}"#,
        );
        check(
            Form::Native,
            false,
            r#"{"inputs":"Be \"kind\".\n\nQ: Hello","parameters":{"max_new_tokens":5}}"#,
        );
    }
}
