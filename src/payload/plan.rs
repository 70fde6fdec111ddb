//! The options of reading, made ready once for many bodies.
//!
//! Not here: the options themselves (the module above).

use std::sync::Arc;

use super::ReadOptions;
use super::pointer::Pointers;
use crate::prefix::BYTES_PER_TOKEN;

/// The longest text that is looked for at a prompt's start.
pub(super) const SKIP_BYTES_MAX: usize = 1024;

/// Texts that are looked for there.
const SKIPS_MAX: usize = 16;

/// How bodies are read: [`ReadOptions`] made ready. A copy of it costs one counter.
#[derive(Clone, Debug)]
pub struct Plan(pub(super) Arc<Compiled>);

#[derive(Debug)]
pub(super) struct Compiled {
    pub(super) options: ReadOptions,
    pub(super) pointers: Pointers,
    pub(super) skip: Vec<Vec<u8>>,
    pub(super) fixed: Option<u32>,
    pub(super) media_bytes: u64,
}

impl Plan {
    /// Makes options ready.
    #[must_use]
    pub fn new(options: &ReadOptions) -> Self {
        let usable = |skip: &&String| (1..=SKIP_BYTES_MAX).contains(&skip.len());
        let skip = options.skip.iter().filter(usable).take(SKIPS_MAX);
        Self(Arc::new(Compiled {
            pointers: Pointers::new(&options.pointers, &options.template_inputs),
            skip: skip.map(|skip| skip.clone().into_bytes()).collect(),
            fixed: options.prefix_length,
            media_bytes: u64::from(options.image_tokens) * BYTES_PER_TOKEN,
            options: options.clone(),
        }))
    }
}
