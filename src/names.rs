//! Every name that people outside see: headers, metrics, properties.
//!
//! Guarantee: these are stable (golden-tested); labels come from the config or the host list, never
//! from a request. Not here: what is counted when (filter/).

/// The ordered list of hosts, from the filter to `override_host`.
pub const ROUTE_HOST: &str = "x-prefix-route-host";

/// The pool's name, from the filter to the routes.
pub const ROUTE_POOL: &str = "x-prefix-route-pool";

/// What ends a label's value inside a stat's name.
pub const LABEL_END: &str = ".=";
