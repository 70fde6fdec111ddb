//! JSON text → a tree that keeps the order and the repetition of fields.
//!
//! Guarantee: what was written is what is here: no field is lost, merged or reordered, which
//! `serde_json::Value` does to duplicate keys. Not here: what the fields mean (config.rs).

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt;

/// One JSON value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Node {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number without fraction that fits 64 bits.
    Integer(i128),
    /// Any other number.
    Float(f64),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<Node>),
    /// An object, its fields as written.
    Object(Vec<(String, Node)>),
}

/// Text longer than this is cut in messages, so that an error stays one readable line.
pub(super) const SHOWN_CHARS_MAX: usize = 60;

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value}"),
            Self::Text(text) if text.chars().count() > SHOWN_CHARS_MAX => {
                let shown: String = text.chars().take(SHOWN_CHARS_MAX).collect();
                write!(f, "{shown:?}… ({} bytes)", text.len())
            }
            Self::Text(text) => write!(f, "{text:?}"),
            Self::List(items) => write!(f, "a list of {}", items.len()),
            Self::Object(_) => f.write_str("an object"),
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Builder)
    }
}

/// The text of the value that a field of the option table has, where all above it is as declared.
pub(super) fn text_at<'t>(bytes: &'t [u8], pointer: &str) -> Option<&'t str> {
    let mut value: &RawValue = serde_json::from_slice(bytes).ok()?;
    for name in pointer.split('/').skip(1) {
        // No field that is declared is called by a number.
        value = match name.parse::<usize>() {
            Ok(index) => {
                let items: Vec<&RawValue> = serde_json::from_str(value.get()).ok()?;
                items.get(index).copied()?
            }
            Err(_) => {
                let fields: BTreeMap<String, &RawValue> = serde_json::from_str(value.get()).ok()?;
                fields.get(name).copied()?
            }
        };
    }
    Some(value.get())
}

struct Builder;

impl<'de> Visitor<'de> for Builder {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Integer(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Integer(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Node, E> {
        Ok(Node::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let mut fields = Vec::new();
        while let Some(field) = access.next_entry()? {
            fields.push(field);
        }
        Ok(Node::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_order_and_repetition() {
        let tree: Node = serde_json::from_str(r#"{"b":1,"a":[null,true,-1,1.5],"b":"x"}"#).unwrap();
        let list = vec![
            Node::Null,
            Node::Bool(true),
            Node::Integer(-1),
            Node::Float(1.5),
        ];
        assert_eq!(
            tree,
            Node::Object(vec![
                ("b".into(), Node::Integer(1)),
                ("a".into(), Node::List(list)),
                ("b".into(), Node::Text("x".into())),
            ])
        );
    }

    #[test]
    fn deep_nesting_is_an_error_and_not_a_crash() {
        let deep = "[".repeat(100_000);
        assert!(
            serde_json::from_str::<Node>(&deep)
                .unwrap_err()
                .to_string()
                .starts_with("recursion limit exceeded")
        );
    }
}
