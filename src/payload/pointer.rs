//! JSON pointers (RFC 6901) followed while a body streams by.
//!
//! Guarantee: at most [`POINTERS_MAX`] of each kind; a step costs one comparison a pointer.
//! Not here: what is found there (walk.rs).

use super::node::INPUTS_MAX;

/// JSON pointers to prompts that are tried.
pub(super) const POINTERS_MAX: usize = 16;

/// What a pointer leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// A prompt; the smaller the number, the more it is preferred.
    Prompt(u8),
    /// A template input.
    Input(u8),
}

/// The pointers of a config.
#[derive(Clone, Debug, Default)]
pub(super) struct Pointers {
    all: Vec<(Target, Vec<Vec<u8>>)>,
    /// Those that lead to prompts, as a set.
    prompts: u32,
}

impl Pointers {
    /// Pointers to prompts and to template inputs; what is beyond the bounds is not followed.
    pub(super) fn new(prompts: &[String], inputs: &[String]) -> Self {
        let prompts = prompts
            .iter()
            .take(POINTERS_MAX)
            .zip(0..)
            .map(|(text, slot)| (Target::Prompt(slot), segments(text)));
        let inputs = inputs
            .iter()
            .take(INPUTS_MAX)
            .zip(0..)
            .map(|(text, slot)| (Target::Input(slot), segments(text)));
        let all: Vec<_> = prompts.chain(inputs).collect();
        let is_prompt = |target: &Target| matches!(target, Target::Prompt(_));
        Self {
            prompts: (0..)
                .zip(&all)
                .filter(|(_, (target, _))| is_prompt(target))
                .fold(0, |set, (bit, _): (u32, _)| set | 1 << bit),
            all,
        }
    }

    /// The pointers that start with a member of the body, as a set; those to prompts only where
    /// bodies have no shape of their own (`native`).
    pub(super) fn begin(&self, key: &[u8], native: bool) -> u32 {
        let set = self.matching(u32::MAX, 0, key);
        if native { set } else { set & !self.prompts }
    }

    /// One segment further: what has been reached (the first of several), and who goes on.
    pub(super) fn step(&self, set: u32, depth: u8, key: &[u8]) -> (Option<Target>, u32) {
        let set = self.matching(set, depth, key);
        let mut reached = None;
        let mut rest = 0;
        for (bit, (target, segments)) in self.all.iter().enumerate() {
            if set >> bit & 1 == 0 {
                continue;
            }
            if segments.len() == usize::from(depth) + 1 {
                reached = reached.or(Some(*target));
            } else {
                rest |= 1 << bit;
            }
        }
        (reached, rest)
    }

    fn matching(&self, set: u32, depth: u8, key: &[u8]) -> u32 {
        let mut matching = 0;
        for (bit, (_, segments)) in self.all.iter().enumerate() {
            let segment = segments.get(usize::from(depth));
            if set >> bit & 1 == 1 && segment.is_some_and(|segment| segment == key) {
                matching |= 1 << bit;
            }
        }
        matching
    }
}

fn segments(pointer: &str) -> Vec<Vec<u8>> {
    let pointer = pointer.strip_prefix('/').unwrap_or(pointer);
    pointer
        .split('/')
        .map(|segment| segment.replace("~1", "/").replace("~0", "~").into_bytes())
        .collect()
}
