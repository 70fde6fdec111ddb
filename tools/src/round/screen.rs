//! How far a round is, on standard error.
//!
//! Guarantee: a terminal gets one line that changes, anything else a line every ten seconds. Not
//! here: results.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use crate::load::driver::{Record, Watch};
use crate::load::stats::Tally;
use crate::print::note;

/// Where standard error is no terminal, a line this often says that the round lives.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Columns of the narrowest terminal that is served.
const WIDTH: usize = 79;

/// One stage of a run, watched.
pub(crate) struct Stage {
    /// What came back so far.
    pub tally: Tally,
    title: String,
    of: String,
    terminal: bool,
    said: Instant,
}

impl Stage {
    /// A stage under this title, with its end in words and an empty tally.
    pub(crate) fn new(title: String, of: String, tally: Tally) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let stage = Self {
            tally,
            title,
            of,
            terminal,
            said: Instant::now(),
        };
        stage.say("");
        stage
    }

    /// Ends the stage's line with its result.
    pub(crate) fn end(self, result: &str) {
        self.say(result);
        if self.terminal {
            note!();
        }
    }

    fn say(&self, text: &str) {
        let line = format!("{}  {text}", self.title);
        if self.terminal {
            let line: String = line.chars().take(WIDTH).collect();
            crate::print::remark(format_args!("\r{line:<WIDTH$}"));
        } else {
            note!("{line}");
        }
    }
}

impl Watch for Stage {
    fn ended(&mut self, record: Record) {
        self.tally.ended(record);
    }

    fn tick(&mut self, sent: u64, in_flight: usize, elapsed: Duration) {
        if !self.terminal && self.said.elapsed() < LINE_EVERY {
            return;
        }
        self.said = Instant::now();
        let hits = self.tally.hit_rate().map_or(String::new(), |rate| {
            format!(", hits {:.0} %", rate * 100.0)
        });
        let failed = match self.tally.failed() {
            0 => String::new(),
            failed => format!(", {failed} FAILED"),
        };
        self.say(&format!(
            "{:.0} s, {sent} sent{}, {in_flight} in flight{hits}{failed}",
            elapsed.as_secs_f64(),
            self.of
        ));
    }
}
