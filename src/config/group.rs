//! One object of the configuration, read field by field as the option table says.
//!
//! Guarantee: a field that is not declared, given twice, or of another kind is refused with its
//! path. Not here: what options mean together (config.rs, pool.rs).

use super::options::{Absent, Form, Kind, NAME_BYTES_MAX, OPTIONS, Opt, TEXT_BYTES_MAX};
use super::problem::{ConfigError, Problem};
use super::tree::Node;
use crate::hosts;
use crate::names;
use crate::select::Pattern;
use std::fmt;

/// One object of the config, with the part of the option table that it may hold.
pub(super) struct Group<'t> {
    fields: &'t [(String, Node)],
    /// Where it stands in the config.
    pointer: String,
    /// Where it stands in the table.
    path: &'static str,
}

impl<'t> Group<'t> {
    /// The object's fields, if each is declared and none is there twice.
    pub(super) fn open(
        node: &'t Node,
        pointer: String,
        path: &'static str,
    ) -> Result<Self, ConfigError> {
        let Node::Object(fields) = node else {
            return Err(wrong(pointer, Kind::Object, node));
        };
        let group = Self {
            fields,
            pointer,
            path,
        };
        for (index, (name, _)) in fields.iter().enumerate() {
            if !group.options().any(|option| option.name() == name) {
                return Err(ConfigError {
                    problem: Problem::unknown(name, group.options().map(Opt::name).collect()),
                    pointer: group.join(name),
                });
            }
            if fields.iter().take(index).any(|(other, _)| other == name) {
                return Err(ConfigError {
                    pointer: group.join(name),
                    problem: Problem::Duplicate,
                });
            }
        }
        Ok(group)
    }

    fn options(&self) -> impl Iterator<Item = &'static Opt> {
        let path = self.path;
        OPTIONS.iter().filter(move |option| option.parent() == path)
    }

    /// Where it stands in the config.
    pub(super) fn pointer(&self) -> &str {
        &self.pointer
    }

    /// The pointer of a field, escaped as JSON Pointer asks.
    pub(super) fn join(&self, name: &str) -> String {
        let name = name.replace('~', "~0").replace('/', "~1");
        format!("{}/{name}", self.pointer)
    }

    fn node(&self, option: &Opt) -> Option<&'t Node> {
        let mut fields = self.fields.iter();
        fields
            .find(|(name, _)| name == option.name())
            .map(|(_, node)| node)
    }

    pub(super) fn has(&self, option: &Opt) -> bool {
        self.node(option).is_some()
    }

    fn wrong(&self, option: &Opt, found: &Node) -> ConfigError {
        wrong(self.join(option.name()), option.kind, found)
    }

    pub(super) fn error(&self, problem: Problem) -> ConfigError {
        ConfigError {
            pointer: self.pointer.clone(),
            problem,
        }
    }

    pub(super) fn missing(&self, option: &Opt) -> ConfigError {
        ConfigError {
            pointer: self.join(option.name()),
            problem: Problem::Wrong {
                expected: option.kind.to_string(),
                found: "nothing".into(),
            },
        }
    }

    pub(super) fn contradiction(&self, option: &Opt, reason: &str) -> ConfigError {
        ConfigError::contradiction(self.join(option.name()), reason)
    }

    /// Fails for a required option that is not there.
    fn given(&self, option: &Opt) -> Result<Option<&'t Node>, ConfigError> {
        match self.node(option) {
            None if option.absent == Absent::Required => Err(self.missing(option)),
            node => Ok(node),
        }
    }

    /// An object; an absent one is read as empty.
    pub(super) fn group(&self, option: &Opt) -> Result<Group<'t>, ConfigError> {
        let pointer = self.join(option.name());
        match self.given(option)? {
            Some(node) => Group::open(node, pointer, option.path),
            None => Ok(Group {
                fields: &[],
                pointer,
                path: option.path,
            }),
        }
    }

    /// A list of objects.
    pub(super) fn items(&self, option: &Opt) -> Result<Vec<Group<'t>>, ConfigError> {
        let (Some(node), Kind::Objects { min, max, .. }) = (self.given(option)?, option.kind)
        else {
            return Ok(Vec::new());
        };
        let Node::List(items) = node else {
            return Err(self.wrong(option, node));
        };
        if items.len() < min || items.len() > max {
            return Err(self.wrong(option, node));
        }
        let path = OPTIONS
            .iter()
            .map(Opt::parent)
            .find(|parent| parent.strip_suffix("/*") == Some(option.path));
        let pointer = self.join(option.name());
        let open = |(index, item)| {
            Group::open(item, format!("{pointer}/{index}"), path.unwrap_or_default())
        };
        items.iter().enumerate().map(open).collect()
    }

    pub(super) fn integer(&self, option: &Opt) -> Result<Option<u32>, ConfigError> {
        let value = match (self.given(option)?, option.kind, option.absent) {
            (Some(Node::Integer(value)), Kind::Integer { min, max, .. }, _)
                if (i128::from(min)..=i128::from(max)).contains(value) =>
            {
                u32::try_from(*value).ok()
            }
            (Some(node), ..) => return Err(self.wrong(option, node)),
            (None, _, Absent::Integer(value)) => u32::try_from(value).ok(),
            (None, ..) => None,
        };
        Ok(value)
    }

    pub(super) fn decimal(&self, option: &Opt) -> Result<Option<f64>, ConfigError> {
        let value = match (self.given(option)?, option.absent) {
            // Exact: integers of this size fit.
            (Some(Node::Integer(value)), _) => *value as f64,
            (Some(Node::Float(value)), _) => *value,
            (Some(node), _) => return Err(self.wrong(option, node)),
            (None, Absent::Decimal(value)) => return Ok(Some(value)),
            (None, _) => return Ok(None),
        };
        match (option.kind, self.node(option)) {
            (Kind::Decimal { min, max, .. }, _) if (min..=max).contains(&value) => Ok(Some(value)),
            (_, Some(node)) => Err(self.wrong(option, node)),
            (_, None) => Ok(None),
        }
    }

    pub(super) fn bool(&self, option: &Opt) -> Result<Option<bool>, ConfigError> {
        match (self.given(option)?, option.absent) {
            (Some(Node::Bool(value)), _) => Ok(Some(*value)),
            (Some(node), _) => Err(self.wrong(option, node)),
            (None, Absent::Bool(value)) => Ok(Some(value)),
            (None, _) => Ok(None),
        }
    }

    pub(super) fn text(&self, option: &Opt) -> Result<Option<String>, ConfigError> {
        let fits = |text: &str| match option.kind {
            Kind::Choice(words) => words.contains(&text),
            Kind::Text(form) | Kind::TextOrNull(form) => has_form(text, form),
            _ => false,
        };
        match (self.given(option)?, option.absent) {
            (Some(Node::Text(text)), _) if fits(text) => Ok(Some(text.clone())),
            (Some(Node::Null), _) if matches!(option.kind, Kind::TextOrNull(_)) => Ok(None),
            (Some(node), _) => Err(self.wrong(option, node)),
            (None, Absent::Text(text)) => Ok(Some(text.to_owned())),
            (None, _) => Ok(None),
        }
    }

    pub(super) fn texts(&self, option: &Opt) -> Result<Option<Vec<String>>, ConfigError> {
        let (items, form) = match (self.given(option)?, option.kind, option.absent) {
            (Some(Node::List(items)), Kind::Texts { form, min, max }, _)
                if (min..=max).contains(&items.len()) =>
            {
                (items, form)
            }
            (Some(node), ..) => return Err(self.wrong(option, node)),
            (None, _, Absent::Texts(texts)) => {
                return Ok(Some(texts.iter().map(|&text| text.to_owned()).collect()));
            }
            (None, ..) => return Ok(None),
        };
        let pointer = self.join(option.name());
        let text = |(index, item): (usize, &Node)| match item {
            Node::Text(text) if has_form(text, form) => Ok(text.clone()),
            _ => Err(wrong(format!("{pointer}/{index}"), form, item)),
        };
        let texts: Result<_, _> = items.iter().enumerate().map(text).collect();
        texts.map(Some)
    }

    pub(super) fn seed(&self, option: &Opt) -> Result<u64, ConfigError> {
        match self.given(option)? {
            None => Ok(0),
            Some(Node::Text(text)) if has_form(text, Form::Free) => {
                Ok(xxhash_rust::xxh64::xxh64(text.as_bytes(), 0))
            }
            Some(node @ Node::Integer(value)) => {
                u64::try_from(*value).map_err(|_| self.wrong(option, node))
            }
            Some(node) => Err(self.wrong(option, node)),
        }
    }
}

fn has_form(text: &str, form: Form) -> bool {
    if text.is_empty() || text.len() > TEXT_BYTES_MAX {
        return false;
    }
    match form {
        Form::Name => is_name(text) && !text.contains(names::LABEL_END),
        Form::Header => text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.!#$%&'*+^`|~".contains(&byte)),
        Form::Pointer => text.starts_with('/'),
        Form::Address => hosts::canonical(text).is_some(),
        Form::Pattern => is_name(text) && Pattern::parse(text).is_some(),
        Form::Path => text.starts_with('/') && text.bytes().all(is_in_path),
        Form::Free => true,
    }
}

/// It can be the value of a header, which comes without spaces around it.
fn is_name(text: &str) -> bool {
    text.len() <= NAME_BYTES_MAX && !text.contains(char::is_control) && text.trim() == text
}

/// Paths come without their query and with everything else escaped.
fn is_in_path(byte: u8) -> bool {
    byte.is_ascii_graphic() && !b"?#".contains(&byte)
}

fn wrong(pointer: String, expected: impl fmt::Display, found: &Node) -> ConfigError {
    ConfigError {
        pointer,
        problem: Problem::Wrong {
            expected: expected.to_string(),
            found: found.to_string(),
        },
    }
}
