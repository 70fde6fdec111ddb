//! Numbers with a fraction on the command line, refused as they are parsed.
//!
//! Guarantee: every time, speed, rate and load that gets past here fits a clock, so that nothing
//! fails on it later, when engines and an Envoy run. Not here: integers, whose ranges clap knows.

/// The shortest and the longest that anything is played, in seconds; the longest is a week.
const SECONDS: (f64, f64) = (1.0, 604_800.0);

/// Takes a number from `low` to `high`, of `what`.
pub(crate) fn within(
    low: f64,
    high: f64,
    what: &'static str,
) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync + 'static {
    move |text| match text.parse::<f64>() {
        Ok(number) if (low..=high).contains(&number) => Ok(number),
        _ => Err(format!("expected {what} from {low} to {high}")),
    }
}

/// How long something is measured or played.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    within(SECONDS.0, SECONDS.1, "seconds")(text)
}

/// How long something is waited for, or not measured.
pub(crate) fn seconds_or_none(text: &str) -> Result<f64, String> {
    within(0.0, SECONDS.1, "seconds")(text)
}

/// Times the highest rate at which random routing is stable.
pub(crate) fn load(text: &str) -> Result<f64, String> {
    within(0.01, 10.0, "a load")(text)
}

/// Engine time per real time.
pub(crate) fn speed(text: &str) -> Result<f64, String> {
    let speeds = crate::engine::clock::SPEEDS;
    within(*speeds.start(), *speeds.end(), "a number")(text)
}

/// Requests a second, or how many times faster than recorded a trace is played.
pub(crate) fn rate(text: &str) -> Result<f64, String> {
    within(0.001, 100_000.0, "a rate")(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_no_clock_can_hold_are_refused_with_their_range() {
        for parser in [seconds, load, speed, rate] {
            for text in [
                "0", "-1", "nan", "inf", "1e300", "1e-300", "-1e300", "x", "",
            ] {
                assert!(parser(text).is_err(), "{text}");
            }
            assert_eq!(parser("1.5"), Ok(1.5));
        }
        assert_eq!(seconds_or_none("0"), Ok(0.0));
        let refused = |parser: fn(&str) -> Result<f64, String>| parser("1e300").unwrap_err();
        assert_eq!(refused(seconds), "expected seconds from 1 to 604800");
        assert_eq!(refused(load), "expected a load from 0.01 to 10");
        assert_eq!(refused(rate), "expected a rate from 0.001 to 100000");
        assert_eq!(refused(speed), "expected a number from 0.01 to 1000");
    }
}
