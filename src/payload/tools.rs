//! Where chat templates render the tools, by the model's name.
//!
//! Not here: the tools themselves (walk.rs).

use super::Tools;

/// Parts of model names, lower case, and where those models' templates put the tools. The first
/// that occurs in a name decides.
const BY_MODEL: [(&str, Tools); 20] = [
    // Mistral's templates up to v11 put them before the last user message; later ones do not.
    ("mistral", Tools::BeforeLastUser),
    ("mixtral", Tools::BeforeLastUser),
    ("codestral", Tools::BeforeLastUser),
    ("ministral", Tools::BeforeLastUser),
    ("pixtral", Tools::BeforeLastUser),
    ("devstral", Tools::BeforeLastUser),
    ("magistral", Tools::BeforeLastUser),
    // Appended to the system message.
    ("qwen", Tools::AfterSystem),
    ("qwq", Tools::AfterSystem),
    ("hermes", Tools::AfterSystem),
    ("deepseek", Tools::AfterSystem),
    ("gpt-oss", Tools::AfterSystem),
    ("phi-4", Tools::AfterSystem),
    ("granite", Tools::AfterSystem),
    ("command-", Tools::AfterSystem),
    // In the first user message.
    ("llama-3", Tools::AfterSystem),
    ("llama3", Tools::AfterSystem),
    ("llama-4", Tools::AfterSystem),
    // In front of everything.
    ("kimi", Tools::BeforeSystem),
    ("glm", Tools::BeforeSystem),
];

/// What a pool's setting means for a model.
pub(super) fn place(setting: Tools, model: Option<&[u8]>) -> Tools {
    if setting != Tools::ByModel {
        return setting;
    }
    let model = model.unwrap_or_default();
    BY_MODEL
        .iter()
        .find(|(part, _)| {
            model
                .windows(part.len())
                .any(|window| window.eq_ignore_ascii_case(part.as_bytes()))
        })
        .map_or(Tools::BeforeSystem, |(_, place)| *place)
}
