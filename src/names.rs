//! Every name that people outside see: headers, metrics, properties.
//!
//! Guarantee: these are stable (golden-tested); labels come from the config or the host list, never
//! from a request. Not here: what is counted when (filter/).

/// What every header of the filter's own begins with.
pub const OWN_HEADERS: &str = "x-prefix-route";

/// The ordered list of hosts, from the filter to `override_host`.
pub const ROUTE_HOST: &str = "x-prefix-route-host";

/// The first host alone, in base64, from the filter to Envoy's `stateful_session`, which checks
/// its health (envoy/strict-health.yaml). The others follow in [`ROUTE_HOST`].
pub const ROUTE_FIRST: &str = "x-prefix-route-first";

/// The pool's name, from the filter to the routes.
pub const ROUTE_POOL: &str = "x-prefix-route-pool";

/// The headers that only the filter sets.
pub const ROUTE_HEADERS: [&str; 3] = [ROUTE_HOST, ROUTE_FIRST, ROUTE_POOL];

/// The header by which SageMaker's clients name an inference component.
pub const COMPONENT_HEADER: &str = "x-amzn-sagemaker-inference-component";

/// The label `pool` of requests that no pool serves.
pub const NO_POOL: &str = "none";

/// What ends a label's value inside a stat's name.
pub const LABEL_END: &str = ".=";

/// Labels of metrics; each has its `stats_tags` line in the shipped Envoy configs.
pub const POOL: &str = "pool";
/// A host's `ip:port`.
pub const UPSTREAM_HOST: &str = "upstream_host";
/// The label of all hosts that have none of their own.
pub const OTHER: &str = "other";
/// The kind of a decision.
pub const DECISION: &str = "decision";
/// Why something did not happen.
pub const REASON: &str = "reason";
/// A host's state.
pub const STATE: &str = "state";
/// An API family.
pub const API: &str = "api";
/// The filter's version.
pub const VERSION: &str = "version";
/// The commit the filter was built from.
pub const COMMIT: &str = "commit";
/// The version of everything that is hashed.
pub const FORMAT: &str = "hash_format";

/// Requests by the kind of decision.
pub const DECISIONS: &str = "prefix_router_decisions_total";
/// Requests left to the proxy's own policy, by reason.
pub const ABSTAIN: &str = "prefix_router_abstain_total";
/// Requests in flight on a host.
pub const IN_FLIGHT: &str = "prefix_router_in_flight";
/// Estimated uncached prompt tokens that a host has yet to compute.
pub const PENDING_TOKENS: &str = "prefix_router_pending_tokens";
/// Hosts of a pool by state.
pub const HOSTS: &str = "prefix_router_hosts";
/// Time from a prompt to its booked host, in microseconds.
pub const DECISION_US: &str = "prefix_router_decision_us";
/// Polls of the host source that failed.
pub const HOST_SOURCE_ERRORS: &str = "prefix_router_host_source_errors_total";
/// Requests taken from the counters because Envoy no longer had them.
pub const COUNTER_REPAIRS: &str = "prefix_router_counter_repairs_total";
/// Requests that another host answered than the chosen one.
pub const SERVED_ELSEWHERE: &str = "prefix_router_served_elsewhere_total";
/// Bodies read, by API family.
pub const PAYLOAD: &str = "prefix_router_payload_total";
/// Bodies that were not read as a prompt, or not to their end, by reason.
pub const UNREAD: &str = "prefix_router_unread_total";
/// Times that Envoy was found to hold bodies back.
pub const FLAG_UNSET: &str = "prefix_router_bodies_held_back_total";
/// Bodies that Envoy refused while they were held.
pub const BODY_REFUSED: &str = "prefix_router_bodies_refused_total";
/// Sampled answers by what they said of their prompt.
pub const USAGE: &str = "prefix_router_usage_total";
/// Prompt tokens, as engines counted them.
pub const PROMPT_TOKENS: &str = "prefix_router_prompt_tokens_total";
/// Prompt tokens that engines found in their caches.
pub const CACHED_TOKENS: &str = "prefix_router_cached_tokens_total";
/// Prompt tokens that the filter expected to be cached.
pub const PREDICTED_CACHED_TOKENS: &str = "prefix_router_predicted_cached_tokens_total";
/// Always 1; its labels say what runs.
pub const BUILD_INFO: &str = "prefix_router_build_info";

/// What a metric does over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
    /// It is a distribution.
    Histogram,
}

/// A metric as it is seen in Prometheus.
#[derive(Clone, Copy, Debug)]
pub struct MetricName {
    /// Its name.
    pub name: &'static str,
    /// What it does over time.
    pub kind: MetricKind,
    /// Its labels, in the order in which the filter gives them.
    pub labels: &'static [&'static str],
    /// What it means, for the README.
    pub doc: &'static str,
}

/// Declares the table of metrics.
macro_rules! metrics {
    ($($name:ident $kind:ident [$($label:ident),*] $doc:literal;)+) => {
        /// Every metric of the filter, in the order of the README's table.
        pub const METRICS: &[MetricName] = &[$(MetricName {
            name: $name,
            kind: MetricKind::$kind,
            labels: &[$($label),*],
            doc: $doc,
        }),+];
    };
}

metrics! {
    DECISIONS Counter [POOL, DECISION]
        "Requests by what was decided: `home`, `match` (where more of the prompt was sent before), \
         `divert` (elsewhere because of load), `saturated` (every host at its limit), `reject` \
         (answered 429 because of that), `abstain` (left to Envoy's own policy).";
    ABSTAIN Counter [POOL, REASON]
        "The requests left to Envoy's own policy, by reason: `no_hosts` (none usable is known), \
         `no_prefix` (nothing to go by), `not_a_prompt` (no body, another method), `watchdog` (the \
         body did not come in time), `exploring` (to find hosts, where no source lists them), \
         `no_pool` (no pool serves its model), `share` (its key is not in the pool's `share`). One \
         that is let go before its body says its model counts in the default pool, if neither a \
         header nor its path leads to another.";
    PAYLOAD Counter [POOL, API]
        "Bodies read, by the API they are of.";
    UNREAD Counter [POOL, REASON]
        "Bodies that were not read as a prompt, or not to their end; they are placed by their \
         bytes.";
    IN_FLIGHT Gauge [POOL, UPSTREAM_HOST]
        "Requests on a host, sent by any worker and not ended. `limit` is about this number.";
    PENDING_TOKENS Gauge [POOL, UPSTREAM_HOST]
        "Estimated prompt tokens that a host has yet to compute.";
    HOSTS Gauge [POOL, STATE]
        "Hosts by state: `usable`, `degraded` (left alone while the others of its priority \
         suffice), `failed`, `stalled`, `draining`, `standby` (of a priority not in use).";
    DECISION_US Histogram [POOL]
        "Microseconds from a prompt to its booked host.";
    HOST_SOURCE_ERRORS Counter [POOL]
        "Polls for hosts that failed. The last list stays in use: alert when this grows steadily.";
    COUNTER_REPAIRS Counter [POOL]
        "Requests taken from the counters because Envoy no longer had them, as after a panic of a \
         VM.";
    SERVED_ELSEWHERE Counter [POOL]
        "Requests that another host answered than the chosen one: after a retry, or because the \
         choice does not reach the cluster. If it is a large part of all, `prefix-router check` says \
         what loses it.";
    FLAG_UNSET Counter [POOL]
        "Times that Envoy was found to hold bodies back: set `allow_on_headers_stop_iteration`.";
    BODY_REFUSED Counter [POOL]
        "Bodies that Envoy answered 413 because it may buffer less than the filter held: raise \
         `request_body_buffer_limit`.";
    USAGE Counter [POOL, STATE]
        "Sampled answers by what they said of their prompt: `ok` (its tokens and the cached ones), \
         `no_details` (its tokens only), `absent` (nothing, more than 2^24 tokens, or encoded).";
    PROMPT_TOKENS Counter [POOL]
        "Prompt tokens of the sampled answers that were `ok`.";
    CACHED_TOKENS Counter [POOL]
        "The prompt tokens that engines found in their caches. Over \
         `prefix_router_prompt_tokens_total` it is the true hit rate.";
    PREDICTED_CACHED_TOKENS Counter [POOL]
        "The prompt tokens that the filter expected to be cached, of the same answers. 0 in `fixed` \
         pools, which expect nothing.";
    BUILD_INFO Gauge [VERSION, COMMIT, FORMAT]
        "Always 1. Gateways that disagree about `hash_format` disagree about hosts.";
}

/// Debug response header: the host that answered.
pub const DEBUG_HOST: &str = "x-prefix-router-host";
/// Debug response header: the kind of decision, and the reason if we abstained.
pub const DEBUG_DECISION: &str = "x-prefix-router-decision";
/// Debug response header: the pool.
pub const DEBUG_POOL: &str = "x-prefix-router-pool";
/// Debug response header: the key.
pub const DEBUG_KEY: &str = "x-prefix-router-key";
/// Debug response header: where in the prompt the key ends, in bytes of text.
pub const DEBUG_CHECKPOINT: &str = "x-prefix-router-checkpoint";
/// Response header of an answer of our own: why.
pub const REASON_HEADER: &str = "x-prefix-router-reason";
/// The headers of the answer to a request that found every host at its limit.
pub const REJECT_HEADERS: [(&str, &str); 3] = [
    ("content-type", "application/json"),
    ("retry-after", "1"),
    (REASON_HEADER, "saturated"),
];
/// Its body, in the shape of OpenAI's errors.
pub const REJECT_BODY: &str = concat!(
    r#"{"error": {"message": "All engines of this model are at their limit; try again later.", "#,
    r#""type": "rate_limit_error", "param": null, "code": "saturated"}}"#
);
/// The request header that asks for debug headers.
pub const DEBUG_REQUEST: &str = "x-prefix-router-debug";

/// The stat that shows as `name{labels}` in Prometheus, given the shipped `stats_tags`.
#[must_use]
pub fn metric(name: &str, labels: &[(&str, &str)]) -> String {
    let label = |(tag, value): &(&str, &str)| format!(".{tag}.=.{value}{LABEL_END}");
    labels
        .iter()
        .map(label)
        .fold(name.to_owned(), |name, label| name + &label)
}
