//! One vLLM-like engine without a clock: continuous batching, chunked prefill, a prefix cache.
//!
//! Guarantee: what is computed is exactly prompt − hit + output − 1 tokens per finished job, plus
//! what preemptions computed again; a job that ends or is cancelled leaves no block pinned.
//! Not here: time (whoever calls [`Engine::begin`] waits as long as it says), text (render.rs).
//!
//! The order inside a step is vLLM V1's: one token for every sequence that decodes, then the
//! prompts under way, then the waiting ones first come first served; full blocks can be found as
//! soon as they are scheduled; when no block is free the youngest sequence is computed again later.

#![expect(
    clippy::indexing_slicing,
    reason = "slots and blocks are numbers this module gave out itself and never takes back"
)]

use std::collections::VecDeque;
use std::sync::Arc;

use crate::engine::blocks::BlockPool;
use crate::engine::cost::{EngineConfig, StepWork};

/// What an engine is asked to do.
#[derive(Clone, Debug)]
pub struct Job {
    /// Tokens of the prompt, at least one.
    pub prompt_tokens: u32,
    /// Tokens to generate, at least one.
    pub output_tokens: u32,
    /// The chained hashes of the full blocks of prompt and answer. May end early: blocks past its
    /// end are never found again.
    pub chain: Arc<[u64]>,
}

/// A submitted job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId {
    slot: u32,
    generation: u32,
}

/// A job got one more token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Whose.
    pub job: JobId,
    /// Tokens generated so far; 1 is the first.
    pub generated: u32,
    /// Prompt tokens that were found in the cache when the job was first scheduled.
    pub cached_tokens: u32,
    /// Whether it was the last; the job is gone then.
    pub finished: bool,
}

/// Which tokens [`Engine::finish`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// All: someone reads the stream.
    Every,
    /// The first and the last of each job.
    FirstAndLast,
}

/// Why a job was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// No prompt, or nothing to generate.
    Empty,
    /// Prompt and answer together exceed the KV cache.
    TooLong,
}

/// Totals since the start or the last [`Engine::reset_counters`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Jobs taken.
    pub submitted: u64,
    /// Jobs that got their last token.
    pub finished: u64,
    /// Jobs that left before.
    pub cancelled: u64,
    /// Times a sequence gave its blocks back.
    pub preemptions: u64,
    /// Prompt tokens of jobs at their first scheduling: what the cache was asked for.
    pub queried_tokens: u64,
    /// Of those, found.
    pub hit_tokens: u64,
    /// Prompt tokens of jobs that got a first token.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Tokens computed, prompts and answers.
    pub computed_tokens: u64,
    /// Steps taken.
    pub steps: u64,
    /// Nanoseconds spent in them.
    pub busy_ns: u64,
}

#[derive(Debug)]
struct Sequence {
    job: Job,
    generation: u32,
    /// Tokens with KV, this step's included.
    computed: u32,
    generated: u32,
    /// Blocks held, in the order of the text.
    held: Vec<u32>,
    /// How many of them can be found.
    published: u32,
    /// Set at the first scheduling.
    cached_tokens: Option<u32>,
    /// This sequence's part of [`Engine::backlog_tokens`].
    backlog: u32,
    live: bool,
}

impl Sequence {
    fn known(&self) -> u32 {
        self.job.prompt_tokens + self.generated
    }

    fn decodes(&self) -> bool {
        self.generated > 0 && self.known() == self.computed + 1
    }
}

/// One engine.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    report: Report,
    pool: BlockPool,
    sequences: Vec<Sequence>,
    vacant: Vec<u32>,
    /// In the order of admission.
    running: Vec<u32>,
    waiting: VecDeque<u32>,
    /// What the current step computes: slot, generation, tokens.
    plan: Vec<(u32, u32, u32)>,
    in_step: bool,
    backlog: u64,
    counters: Counters,
}

impl Engine {
    /// An idle engine with an empty cache.
    #[must_use]
    pub fn new(config: EngineConfig, report: Report) -> Self {
        let pool = BlockPool::new(config.blocks());
        Self {
            config,
            report,
            pool,
            sequences: Vec::new(),
            vacant: Vec::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            plan: Vec::new(),
            in_step: false,
            backlog: 0,
            counters: Counters::default(),
        }
    }

    /// Puts a job at the end of the queue.
    pub fn submit(&mut self, job: Job) -> Result<JobId, Refused> {
        if job.prompt_tokens == 0 || job.output_tokens == 0 {
            return Err(Refused::Empty);
        }
        let tokens = u64::from(job.prompt_tokens) + u64::from(job.output_tokens) - 1;
        if tokens.div_ceil(u64::from(self.config.block_tokens)) > u64::from(self.pool.len()) {
            return Err(Refused::TooLong);
        }
        let backlog = job.prompt_tokens - self.match_tokens(&job);
        self.backlog += u64::from(backlog);
        let mut sequence = Sequence {
            job,
            generation: 0,
            computed: 0,
            generated: 0,
            held: Vec::new(),
            published: 0,
            cached_tokens: None,
            backlog,
            live: true,
        };
        let slot = match self.vacant.pop() {
            Some(slot) => {
                let old = &mut self.sequences[slot as usize];
                sequence.generation = old.generation.wrapping_add(1);
                *old = sequence;
                slot
            }
            None => {
                self.sequences.push(sequence);
                u32::try_from(self.sequences.len() - 1).unwrap_or(u32::MAX)
            }
        };
        self.waiting.push_back(slot);
        self.counters.submitted += 1;
        let generation = self.sequences[slot as usize].generation;
        Ok(JobId { slot, generation })
    }

    /// Takes a job out, wherever it stands; one that is gone already is left alone.
    pub fn cancel(&mut self, id: JobId) {
        let Some(sequence) = self.sequences.get(id.slot as usize) else {
            return;
        };
        if !sequence.live || sequence.generation != id.generation {
            return;
        }
        self.running.retain(|&slot| slot != id.slot);
        self.waiting.retain(|&slot| slot != id.slot);
        self.retire(id.slot);
        self.counters.cancelled += 1;
    }

    /// Starts a step and says how many nanoseconds it takes; `None` if there is nothing to do.
    /// [`Self::finish`] ends it.
    pub fn begin(&mut self) -> Option<u64> {
        if self.in_step || (self.running.is_empty() && self.waiting.is_empty()) {
            return None;
        }
        self.plan.clear();
        let mut work = StepWork::default();
        let mut budget = self.config.step_tokens_max;
        let preemptions = self.counters.preemptions;
        self.schedule_running(true, &mut budget);
        self.schedule_running(false, &mut budget);
        if preemptions == self.counters.preemptions {
            self.admit(&mut budget);
        }
        for &(slot, _, tokens) in &self.plan {
            let sequence = &self.sequences[slot as usize];
            self.counters.computed_tokens += u64::from(tokens);
            if tokens == 1 && sequence.generated > 0 {
                work.decodes += 1;
                work.decode_context += u64::from(sequence.computed);
            } else {
                // The chunk's tokens see half of it in the mean.
                let context = sequence.computed - tokens + tokens / 2;
                self.config.add_prefill(&mut work, tokens, context);
            }
        }
        let ns = self.config.step_ns(&work);
        self.counters.steps += 1;
        self.counters.busy_ns += ns;
        self.in_step = true;
        Some(ns)
    }

    /// Ends the step: every sequence whose text is computed to its end gets a token.
    pub fn finish(&mut self, progress: &mut Vec<Progress>) {
        if !std::mem::take(&mut self.in_step) {
            return;
        }
        let plan = std::mem::take(&mut self.plan);
        let mut ended = false;
        for &(slot, generation, _) in &plan {
            let sequence = &mut self.sequences[slot as usize];
            let gone = !sequence.live || sequence.generation != generation;
            if gone || sequence.computed < sequence.known() {
                continue;
            }
            sequence.generated += 1;
            self.counters.generated_tokens += 1;
            let first = sequence.generated == 1;
            if first {
                self.counters.prompt_tokens += u64::from(sequence.job.prompt_tokens);
            }
            let finished = sequence.generated == sequence.job.output_tokens;
            if first || finished || self.report == Report::Every {
                progress.push(Progress {
                    job: JobId { slot, generation },
                    generated: sequence.generated,
                    cached_tokens: sequence.cached_tokens.unwrap_or(0),
                    finished,
                });
            }
            if finished {
                self.retire(slot);
                self.counters.finished += 1;
                ended = true;
            }
        }
        if ended {
            let sequences = &self.sequences;
            self.running.retain(|&slot| sequences[slot as usize].live);
        }
        self.plan = plan;
    }

    /// Prompt tokens of this job that would be found now.
    #[must_use]
    pub fn match_tokens(&self, job: &Job) -> u32 {
        let block = self.config.block_tokens;
        let most = (job.prompt_tokens.saturating_sub(1) / block) as usize;
        let chain = job.chain.get(..most).unwrap_or(&job.chain);
        self.pool.depth(chain) * block
    }

    /// Jobs being computed.
    #[must_use]
    pub fn running(&self) -> u32 {
        u32::try_from(self.running.len()).unwrap_or(u32::MAX)
    }

    /// Jobs in the queue.
    #[must_use]
    pub fn waiting(&self) -> u32 {
        u32::try_from(self.waiting.len()).unwrap_or(u32::MAX)
    }

    /// Prompt tokens still to be computed for jobs that were submitted.
    #[must_use]
    pub fn backlog_tokens(&self) -> u64 {
        self.backlog
    }

    /// The KV cache.
    #[must_use]
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Sizes and constants.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Totals.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Starts all totals at zero.
    pub fn reset_counters(&mut self) {
        self.counters = Counters::default();
    }

    /// Empties the prefix cache.
    pub fn flush(&mut self) {
        self.pool.flush();
    }

    /// One pass over the running sequences: those that decode, or those whose prompt is under way.
    fn schedule_running(&mut self, decoding: bool, budget: &mut u32) {
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let slot = self.running[at];
            let sequence = &self.sequences[slot as usize];
            let left = sequence.known() - sequence.computed;
            if left == 0 || sequence.decodes() != decoding {
                at += 1;
                continue;
            }
            let tokens = left.min(*budget);
            let upto = sequence.computed + tokens;
            // Bounded: each turn takes a sequence out of `running`.
            while !self.hold(slot, upto) {
                let Some(&youngest) = self.running.last() else {
                    return;
                };
                self.preempt(youngest, budget);
                if youngest == slot {
                    return;
                }
            }
            self.schedule(slot, tokens, budget);
            at += 1;
        }
    }

    /// Takes sequences from the queue while there is room for them.
    fn admit(&mut self, budget: &mut u32) {
        while *budget > 0 && self.running() < self.config.seqs_max {
            let Some(&slot) = self.waiting.front() else {
                return;
            };
            let block = self.config.block_tokens;
            let sequence = &self.sequences[slot as usize];
            let known = sequence.known();
            // The last token is always computed: its result is the next token.
            let most = ((known - 1) / block) as usize;
            let chain = Arc::clone(&sequence.job.chain);
            let chain = chain.get(..most).unwrap_or(&chain);
            let (found, unpinned) = self.pool.find(chain);
            let hit = found * block;
            let tokens = (known - hit).min(*budget);
            let fresh = (hit + tokens).div_ceil(block) - found;
            if fresh + unpinned > self.pool.free() {
                return;
            }
            self.waiting.pop_front();
            self.running.push(slot);
            let sequence = &mut self.sequences[slot as usize];
            self.pool.pin(
                chain.get(..found as usize).unwrap_or(&[]),
                &mut sequence.held,
            );
            sequence.published = found;
            sequence.computed = hit;
            if sequence.cached_tokens.is_none() {
                sequence.cached_tokens = Some(hit);
                self.counters.queried_tokens += u64::from(sequence.job.prompt_tokens);
                self.counters.hit_tokens += u64::from(hit);
            }
            self.backlog = self.backlog - u64::from(sequence.backlog) + u64::from(known - hit);
            sequence.backlog = known - hit;
            if !self.hold(slot, hit + tokens) {
                debug_assert!(false, "room was checked");
                return;
            }
            self.schedule(slot, tokens, budget);
        }
    }

    /// Takes the blocks for the first `upto` tokens; false, and nothing taken, if there are too few.
    fn hold(&mut self, slot: u32, upto: u32) -> bool {
        let sequence = &mut self.sequences[slot as usize];
        let need = upto.div_ceil(self.config.block_tokens) as usize;
        let missing = need.saturating_sub(sequence.held.len());
        if missing > self.pool.free() as usize {
            return false;
        }
        for _ in 0..missing {
            let Some(index) = self.pool.allocate() else {
                return false;
            };
            sequence.held.push(index);
        }
        true
    }

    fn schedule(&mut self, slot: u32, tokens: u32, budget: &mut u32) {
        let sequence = &mut self.sequences[slot as usize];
        sequence.computed += tokens;
        *budget -= tokens;
        self.plan.push((slot, sequence.generation, tokens));
        let done = tokens.min(sequence.backlog);
        sequence.backlog -= done;
        self.backlog -= u64::from(done);
        let full = sequence.computed / self.config.block_tokens;
        while sequence.published < full {
            let at = sequence.published as usize;
            let (Some(&hash), Some(held)) = (sequence.job.chain.get(at), sequence.held.get_mut(at))
            else {
                return;
            };
            *held = self.pool.publish(*held, hash);
            sequence.published += 1;
        }
    }

    /// Gives a sequence's blocks back and puts it at the head of the queue.
    fn preempt(&mut self, slot: u32, budget: &mut u32) {
        self.running.retain(|&other| other != slot);
        if let Some(at) = self.plan.iter().position(|&(other, ..)| other == slot) {
            let (_, _, tokens) = self.plan.remove(at);
            *budget += tokens;
        }
        let sequence = &mut self.sequences[slot as usize];
        let held = std::mem::take(&mut sequence.held);
        sequence.computed = 0;
        sequence.published = 0;
        self.backlog += u64::from(sequence.known() - sequence.backlog);
        sequence.backlog = sequence.known();
        self.pool.release(&held);
        self.waiting.push_front(slot);
        self.counters.preemptions += 1;
    }

    fn retire(&mut self, slot: u32) {
        let sequence = &mut self.sequences[slot as usize];
        let held = std::mem::take(&mut sequence.held);
        self.backlog -= u64::from(std::mem::take(&mut sequence.backlog));
        sequence.live = false;
        sequence.job.chain = Arc::from([]);
        self.pool.release(&held);
        self.vacant.push(slot);
    }
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
