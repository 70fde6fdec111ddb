//! An engine's own time: the machine's, faster or slower.
//!
//! Guarantee: the engine's time never goes back, also when its speed changes. Not here: waiting.

use std::time::{Duration, Instant};

/// Slowest and fastest speed: beyond, the operating system's timers decide, not the engine.
pub const SPEEDS: std::ops::RangeInclusive<f64> = 0.01..=1000.0;

/// A clock.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    wall: Instant,
    engine_ns: u64,
    speed: f64,
}

impl Clock {
    /// A clock that starts at zero.
    #[must_use]
    pub fn new(speed: f64) -> Self {
        Self {
            wall: Instant::now(),
            engine_ns: 0,
            speed,
        }
    }

    /// Nanoseconds since its start.
    #[must_use]
    pub fn now(&self) -> u64 {
        let wall_ns = self.wall.elapsed().as_nanos() as f64;
        self.engine_ns + (wall_ns * self.speed) as u64
    }

    /// When the machine's time reaches a time of this clock.
    #[must_use]
    pub fn wall_of(&self, engine_ns: u64) -> Instant {
        let ahead_ns = engine_ns.saturating_sub(self.engine_ns) as f64 / self.speed;
        self.wall + Duration::from_nanos(ahead_ns as u64)
    }

    /// Engine seconds per second of the machine.
    #[must_use]
    pub fn speed(&self) -> f64 {
        self.speed
    }

    /// Goes on from now at another speed.
    pub fn set_speed(&mut self, speed: f64) {
        self.engine_ns = self.now();
        self.wall = Instant::now();
        self.speed = speed;
    }
}
