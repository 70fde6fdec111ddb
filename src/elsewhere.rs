//! Whether the proxy does what it is told: requests that other hosts answered than the chosen ones.
//!
//! A retry does that now and then. A configuration that loses the choice, by a filter in the wrong
//! place or a key that two of its parts write differently, does it always: the proxy then balances by
//! itself, and nothing else shows that routing is without effect.
//!
//! Guarantee: told once, and again only after it was well. Not here: counting (filter/metrics.rs).

/// Requests after which it is judged.
const WINDOW: u32 = 50;
/// So many of them elsewhere are more than retries. A proxy that balances by itself over two hosts
/// sends half elsewhere, 20 or more of 50 in 94 % of windows; over more hosts more.
const ELSEWHERE_MIN: u32 = 20;

/// One pool's answers in one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elsewhere {
    answers: u32,
    elsewhere: u32,
    told: bool,
}

impl Elsewhere {
    /// A host answered a request that another one, or it itself, had been chosen for. The part of the
    /// last requests that others answered, if it is time to tell: how many of how many.
    pub fn see(&mut self, elsewhere: bool) -> Option<(u32, u32)> {
        self.answers += 1;
        self.elsewhere += u32::from(elsewhere);
        if self.answers < WINDOW {
            return None;
        }
        let found = (self.elsewhere, self.answers);
        let is_lost = self.elsewhere >= ELSEWHERE_MIN;
        let is_news = is_lost && !self.told;
        *self = Self {
            told: is_lost,
            ..Self::default()
        };
        is_news.then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is told of so many requests, of which one in `every` is answered elsewhere.
    fn told(seen: &mut Elsewhere, requests: u32, every: u32) -> Vec<(u32, u32)> {
        let answers = (1..=requests).map(|n| seen.see(n % every == 0));
        answers.flatten().collect()
    }

    #[test]
    fn retries_now_and_then_are_not_told() {
        assert_eq!(told(&mut Elsewhere::default(), 1000, 3), []);
    }

    #[test]
    fn a_choice_that_is_lost_is_told_once_until_it_was_well() {
        let mut seen = Elsewhere::default();
        assert_eq!(told(&mut seen, 49, 1), []);
        assert_eq!(told(&mut seen, 1, 1), [(50, 50)]);
        assert_eq!(told(&mut seen, 500, 1), []);
        assert_eq!(told(&mut seen, 50, 100), []);
        // Two hosts, one of which is the chosen one by chance.
        assert_eq!(told(&mut seen, 100, 2), [(25, 50)]);
    }
}
