//! Several workloads at the same time, and workloads from somewhere in their middle.
//!
//! Guarantee: request n is of workload n mod their number, so that whoever sends it knows which
//! model it is for. Not here: the workloads.

use std::time::Duration;

use super::{Request, Workload};

/// Workloads whose arrivals are merged in order of time.
pub struct Several {
    parts: Vec<Part>,
}

struct Part {
    workload: Box<dyn Workload>,
    next: Option<Request>,
    /// The workload's time that counts as the start.
    base: Duration,
}

impl Several {
    /// Merges workloads, each of them from its request `skip` on, which is due at the start.
    #[must_use]
    pub fn new(workloads: Vec<Box<dyn Workload>>, skip: u64) -> Self {
        let parts = workloads.into_iter().map(|mut workload| {
            for _ in 0..skip {
                workload.next();
            }
            let next = workload.next();
            let first = next.as_ref().map_or(Duration::ZERO, |request| request.at);
            // From its beginning, a workload keeps its first wait.
            let base = if skip == 0 { Duration::ZERO } else { first };
            Part {
                workload,
                next,
                base,
            }
        });
        Self {
            parts: parts.collect(),
        }
    }

    fn part(&mut self, id: u64) -> Option<(u64, &mut Part)> {
        let count = self.parts.len() as u64;
        let index = id.checked_rem(count)?;
        Some((count, self.parts.get_mut(index as usize)?))
    }

    /// What a part has to send after one of its requests has ended.
    fn then(
        &mut self,
        request: &Request,
        next: impl FnOnce(&mut dyn Workload, &Request, Duration) -> Option<Request>,
    ) -> Option<Request> {
        let (count, part) = self.part(request.id)?;
        let inner = Request {
            id: request.id / count,
            at: request.at + part.base,
            ..request.clone()
        };
        let turn = next(part.workload.as_mut(), &inner, part.base)?;
        let own = turn.id;
        Some(outer(turn, own, request.id % count, count, part.base))
    }
}

/// A part's request as one of all, `own` its number in the part.
fn outer(mut request: Request, own: u64, index: u64, count: u64, base: Duration) -> Request {
    request.id = own * count + index;
    request.at = request.at.saturating_sub(base);
    request
}

impl Workload for Several {
    fn next(&mut self) -> Option<Request> {
        let count = self.parts.len() as u64;
        let due = |part: &Part| Some(part.next.as_ref()?.at.saturating_sub(part.base));
        let parts = self.parts.iter().enumerate();
        let first = parts.filter_map(|(index, part)| Some((due(part)?, index)));
        let (_, index) = first.min()?;
        let part = self.parts.get_mut(index)?;
        let next = part.workload.next();
        let request = std::mem::replace(&mut part.next, next)?;
        let own = request.id;
        Some(outer(request, own, index as u64, count, part.base))
    }

    fn follow(&mut self, request: &Request, ended: Duration, answer: &str) -> Option<Request> {
        self.then(request, |workload, inner, base| {
            workload.follow(inner, ended + base, answer)
        })
    }

    fn failed(&mut self, request: &Request, at: Duration) -> Option<Request> {
        self.then(request, |workload, inner, base| {
            workload.failed(inner, at + base)
        })
    }

    fn prefixes(&self) -> Option<u64> {
        let counts = self.parts.iter().map(|part| part.workload.prefixes());
        counts.sum()
    }

    fn probe(&self, index: u64) -> Option<Request> {
        let count = self.parts.len() as u64;
        let mut index = index;
        for (at, part) in self.parts.iter().enumerate() {
            let here = part.workload.prefixes()?;
            if index < here {
                let request = part.workload.probe(index)?;
                let own = request.id;
                return Some(outer(request, own, at as u64, count, Duration::ZERO));
            }
            index -= here;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::arrivals::Spread;
    use crate::workload::single::{Single, SingleRequests};

    fn part(seed: u64) -> Box<dyn Workload> {
        let plan = Single {
            prompts: 20,
            zipf: 0.55,
            prompt_tokens: 300.0,
            sigma: 0.3,
            question_tokens: 10,
            output_tokens: 4,
            rate: 5.0,
            spread: Spread::Even,
            viral: None,
            seed,
        };
        Box::new(SingleRequests::new(plan).unwrap())
    }

    fn all(mut workload: Several, count: usize) -> Vec<Request> {
        (0..count).filter_map(|_| workload.next()).collect()
    }

    #[test]
    fn requests_come_in_order_of_time_and_tell_their_workload_by_their_number() {
        let merged = all(Several::new(vec![part(1), part(2)], 0), 400);
        assert!(merged.windows(2).all(|pair| pair[0].at <= pair[1].at));
        for seed in [1, 2] {
            let own: Vec<_> = merged.iter().filter(|one| one.id % 2 == seed - 1).collect();
            assert!((150..250).contains(&own.len()), "{} of 400", own.len());
            let mut alone = part(seed);
            for (number, found) in own.into_iter().enumerate() {
                let expected = alone.next().unwrap();
                assert_eq!(found.id / 2, number as u64);
                assert_eq!(
                    (found.at, &found.messages),
                    (expected.at, &expected.messages)
                );
            }
        }
    }

    #[test]
    fn a_workload_from_its_middle_begins_at_once_and_asks_nothing_twice() {
        let begin = all(Several::new(vec![part(1)], 0), 130);
        let middle = all(Several::new(vec![part(1)], 100), 30);
        assert_eq!(middle[0].at, Duration::ZERO);
        for (late, early) in middle.iter().zip(&begin[100..]) {
            assert_eq!((late.id, &late.messages), (early.id, &early.messages));
            assert_eq!(late.at + begin[100].at, early.at);
        }
    }

    #[test]
    fn every_prefix_of_every_workload_can_be_asked_for() {
        let several = Several::new(vec![part(1), part(2)], 0);
        assert_eq!(several.prefixes(), Some(40));
        let probe = several.probe(25).unwrap();
        assert_eq!((probe.prefix, probe.id % 2), (Some(5), 1));
        assert_eq!(several.probe(40), None);
    }
}
