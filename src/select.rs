//! Which pool serves a request.
//!
//! Guarantee: the answer follows from what the pools list, not from the order in which they are
//! written; what the request's head decides, no body changes. Not here: the host within the pool
//! (route.rs, cost.rs), how the proxy is told (filter/).
//!
//! Head first: a request whose body cannot be read, or that has none, goes to the same pool as
//! others with its headers or its path.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::names;

/// A text with at most one `*`, which stands for any text, the empty one included.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pattern {
    start: String,
    /// What follows the `*`; `None` if there is none.
    end: Option<String>,
}

impl Pattern {
    /// The pattern of this text; `None` if it has more than one `*`. One star is enough for
    /// families of names, and of two patterns that fit a text one is then always the narrower.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (start, end) = match text.split_once('*') {
            None => (text, None),
            Some((_, end)) if end.contains('*') => return None,
            Some((start, end)) => (start, Some(end.to_owned())),
        };
        let start = start.to_owned();
        Some(Self { start, end })
    }

    /// The pattern of all texts that start so.
    #[must_use]
    pub fn starting(start: &str) -> Self {
        Self {
            start: start.to_owned(),
            end: Some(String::new()),
        }
    }

    /// Whether it stands for this text.
    #[must_use]
    pub fn fits(&self, text: &str) -> bool {
        let rest = text.strip_prefix(&self.start);
        rest.is_some_and(|rest| match &self.end {
            None => rest.is_empty(),
            Some(end) => rest.ends_with(end.as_str()),
        })
    }

    /// Of two different patterns that fit a text this is the larger for the narrower: it is none,
    /// has more letters, or has more of them in front. It is never equal: patterns with the same
    /// letters in front and behind are the same.
    fn narrowness(&self) -> (bool, usize, usize) {
        let behind = self.end.as_ref().map_or(0, String::len);
        let front = self.start.len();
        (self.end.is_none(), front + behind, front)
    }
}

/// What a pool says of the requests that it serves; one of these is enough.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matches {
    /// Models, as the body or the path names them.
    pub models: Vec<Pattern>,
    /// Headers by their names in lower case, and their values.
    pub headers: Vec<(String, Vec<Pattern>)>,
    /// What the path starts with.
    pub paths: Vec<String>,
}

impl Matches {
    /// Whether no request is served because of them.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.models.is_empty() && self.headers.is_empty() && self.paths.is_empty()
    }
}

/// Patterns and the pools that they lead to.
#[derive(Clone, Debug, Default)]
struct Table {
    /// The narrowest first.
    patterns: Vec<(Pattern, usize)>,
}

impl Table {
    fn add(&mut self, pattern: &Pattern, pool: usize) {
        let at = Reverse(pattern.narrowness());
        let place = self
            .patterns
            .partition_point(|(other, _)| Reverse(other.narrowness()) <= at);
        self.patterns.insert(place, (pattern.clone(), pool));
    }

    fn find(&self, text: &str) -> Option<usize> {
        let mut patterns = self.patterns.iter();
        let found = patterns.find(|(pattern, _)| pattern.fits(text));
        found.map(|(_, pool)| *pool)
    }
}

/// Chooses among the pools of a configuration, which it knows by their place in it.
#[derive(Clone, Debug, Default)]
pub struct Selector {
    /// By name; the inference component's comes first.
    headers: Vec<(String, Table)>,
    paths: Table,
    models: Table,
    default: Option<usize>,
    /// Whether the default pool says which models it serves.
    default_lists_models: bool,
}

impl Selector {
    /// A selector for pools with these matches; `default` is the one whose cluster the proxy's own
    /// route leads to.
    pub fn new<'m>(pools: impl IntoIterator<Item = &'m Matches>, default: Option<usize>) -> Self {
        let mut headers: BTreeMap<&str, Table> = BTreeMap::new();
        let mut found = Self {
            default,
            ..Self::default()
        };
        for (pool, matches) in pools.into_iter().enumerate() {
            for (name, values) in &matches.headers {
                let table = headers.entry(name).or_default();
                values.iter().for_each(|value| table.add(value, pool));
            }
            for path in &matches.paths {
                found.paths.add(&Pattern::starting(path), pool);
            }
            for model in &matches.models {
                found.models.add(model, pool);
            }
            if default == Some(pool) {
                found.default_lists_models = !matches.models.is_empty();
            }
        }
        // The others stay in the order of their names.
        let component = headers.remove_entry(names::COMPONENT_HEADER);
        let headers = component.into_iter().chain(headers);
        found.headers = headers
            .map(|(name, table)| (name.to_owned(), table))
            .collect();
        found
    }

    /// The pool that the request's head decides on: by its headers, else by its path.
    #[must_use]
    pub fn by_head(&self, path: &[u8], header: impl Fn(&str) -> Option<Vec<u8>>) -> Option<usize> {
        let by_header = self.headers.iter().find_map(|(name, table)| {
            let value = header(name)?;
            table.find(std::str::from_utf8(&value).ok()?.trim())
        });
        by_header.or_else(|| self.paths.find(std::str::from_utf8(path).ok()?))
    }

    /// The pool of a request that its head does not decide on: by the model, else the default. No
    /// pool serves a model that none lists, unless the default takes any.
    #[must_use]
    pub fn by_model(&self, model: Option<&str>) -> Option<usize> {
        let Some(model) = model else {
            return self.default;
        };
        let by_model = self.models.find(model);
        by_model.or_else(|| self.default.filter(|_| !self.default_lists_models))
    }

    /// The pool whose cluster the proxy's own route leads to, if it is one of ours.
    #[must_use]
    pub fn own_pool(&self) -> Option<usize> {
        self.default
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patterns(texts: &str) -> Vec<Pattern> {
        let texts = texts.split_whitespace();
        texts.map(|text| Pattern::parse(text).unwrap()).collect()
    }

    #[test]
    fn one_star_stands_for_any_text() {
        // pattern | texts that it fits | texts that it does not fit
        for (pattern, fits, not) in [
            ("llama", vec!["llama"], vec!["llama2", "Llama", ""]),
            (
                "llama-*",
                vec!["llama-", "llama-70b"],
                vec!["llama", "a-llama-"],
            ),
            ("*-it", vec!["-it", "gemma-it"], vec!["it", "gemma-it-2"]),
            ("a*a", vec!["aa", "aba"], vec!["a", "ab"]),
            ("*", vec!["", "anything"], vec![]),
        ] {
            let parsed = Pattern::parse(pattern).unwrap();
            for text in fits {
                assert!(parsed.fits(text), "{pattern} {text}");
            }
            for text in not {
                assert!(!parsed.fits(text), "{pattern} {text}");
            }
        }
        assert_eq!(Pattern::parse("a*b*"), None);
    }

    #[track_caller]
    fn check_models(pools: &[&str], rows: &[(&str, Option<usize>)]) {
        let mut matches: Vec<Matches> = pools
            .iter()
            .map(|models| Matches {
                models: patterns(models),
                ..Matches::default()
            })
            .collect();
        let selector = Selector::new(&matches, None);
        let last = matches.len() - 1;
        matches.reverse();
        for pool in &mut matches {
            pool.models.reverse();
        }
        let reversed = Selector::new(&matches, None);
        for (model, expected) in rows {
            assert_eq!(selector.by_model(Some(model)), *expected, "{model}");
            let found = reversed.by_model(Some(model));
            assert_eq!(found.map(|pool| last - pool), *expected, "{model} reversed");
        }
    }

    #[test]
    fn the_narrowest_pattern_counts_in_whatever_order_pools_stand() {
        let pools = [
            "*",
            "llama-*",
            "*-lora llama-7b-*",
            "llama-7b-lora qwen",
            "l*a",
        ];
        check_models(
            &pools,
            &[
                ("gpt", Some(0)),
                ("llama-70b", Some(1)),
                ("llama-7b-", Some(2)),
                // "llama-7b-*" has more letters than "*-lora", and than "llama-*".
                ("llama-7b-x-lora", Some(2)),
                ("llama-lora", Some(1)),
                ("qwen-lora", Some(2)),
                ("llama-7b-lora", Some(3)),
                ("qwen", Some(3)),
                ("lora", Some(4)),
            ],
        );
        check_models(
            &["ab*", "*ba"],
            &[("abba", Some(0)), ("ba", Some(1)), ("a", None)],
        );
    }

    #[test]
    fn headers_count_before_paths_before_models_before_the_default() {
        let component = names::COMPONENT_HEADER;
        let by_component = Matches {
            headers: vec![(component.into(), patterns("ic-*"))],
            ..Matches::default()
        };
        let by_team = Matches {
            headers: vec![("a-team".into(), patterns("red"))],
            paths: vec!["/red/".into()],
            ..Matches::default()
        };
        let by_path = Matches {
            paths: vec!["/red/v2/".into(), "/blue".into()],
            ..Matches::default()
        };
        let by_model = Matches {
            models: patterns("llama"),
            ..Matches::default()
        };
        let pools = [by_component, by_team, by_path, by_model, Matches::default()];
        let selector = Selector::new(&pools, Some(4));
        let find = |headers: &[(&str, &str)], path: &str, model| {
            let header = |name: &str| {
                let found = headers.iter().find(|(own, _)| *own == name);
                found.map(|(_, value)| value.as_bytes().to_vec())
            };
            let by_head = selector.by_head(path.as_bytes(), header);
            by_head.or_else(|| selector.by_model(model))
        };
        let (ic, team) = ((component, " ic-1 "), ("a-team", "red"));
        let rows = [
            (&[team, ic][..], "/red/v2/x", Some("llama"), Some(0)),
            (&[team, (component, "x")], "/blue", Some("llama"), Some(1)),
            (&[], "/red/x", Some("llama"), Some(1)),
            (&[], "/red/v2/x?y", None, Some(2)),
            (&[("a-team", "green")], "/bluer", None, Some(2)),
            (&[], "/v1", Some("llama"), Some(3)),
            (&[], "/v1", Some("gpt"), Some(4)),
            (&[], "/v1", None, Some(4)),
        ];
        for (headers, path, model, expected) in rows {
            let found = find(headers, path, model);
            assert_eq!(found, expected, "{headers:?} {path} {model:?}");
        }
    }

    #[test]
    fn no_pool_serves_a_model_that_none_lists_unless_the_default_takes_any() {
        let listing = Matches {
            models: patterns("llama"),
            ..Matches::default()
        };
        let any = Matches::default();
        //  pools | default | unknown model | no model
        for (pools, default, unknown, none) in [
            (vec![&listing, &any], Some(1), Some(1), Some(1)),
            (vec![&listing], Some(0), None, Some(0)),
            (vec![&listing], None, None, None),
        ] {
            let selector = Selector::new(pools, default);
            assert_eq!(selector.by_model(Some("gpt")), unknown);
            assert_eq!(selector.by_model(None), none);
            assert_eq!(selector.by_model(Some("llama")), Some(0));
        }
    }
}
