//! Every call to the proxy, with its status turned into our own error.
//!
//! Guarantee: no call here panics in the phases its comment names; the SDK's own calls panic on
//! statuses they do not list, so nothing else in the crate calls it. Not here: decisions.

use std::time::{Duration, UNIX_EPOCH};

use proxy_wasm::hostcalls;
use proxy_wasm::types::{BufferType, MapType, MetricType};

use super::hooks::count;
use crate::store::{CREATE, Cas, Store, StoreError, Versioned};

/// The proxy did not do what it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// A metric's number in the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric(u32);

/// Shared data of the `vm_id`: any phase.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shared;

impl Store for Shared {
    fn read(&self, key: &str) -> Result<Versioned, StoreError> {
        count("shared data read");
        match hostcalls::get_shared_data(key) {
            Ok((None, None)) => Ok(Versioned {
                value: None,
                cas: CREATE,
            }),
            Ok((value, cas)) => Ok(Versioned {
                value,
                cas: cas.unwrap_or(CREATE),
            }),
            Err(_) => Err(StoreError::Refused),
        }
    }

    fn write(&self, key: &str, value: &[u8], cas: Option<Cas>) -> Result<(), StoreError> {
        use proxy_wasm::types::Status;
        count("shared data written");
        match hostcalls::set_shared_data(key, Some(value), cas) {
            Ok(()) => Ok(()),
            Err(Status::CasMismatch) => Err(StoreError::Stale),
            Err(_) => Err(StoreError::Refused),
        }
    }
}

/// Microseconds since 1970: any phase.
pub fn now_us() -> u64 {
    count("clock");
    let since = hostcalls::get_current_time()
        .ok()
        .and_then(|now| now.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| {
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
    })
}

/// Milliseconds since 1970: any phase.
pub fn now_ms() -> u64 {
    now_us() / 1000
}

/// All headers of a request or of its answer, copied in one call: at ten calls for one each, they
/// were 10 of the 80 µs that the filter adds to a request of 4 KB (`bench overhead`).
pub struct Headers(Vec<(String, Vec<u8>)>);

impl Headers {
    /// The request's headers: its header callback. The SDK takes names for UTF-8, which Envoy's
    /// parsers have made sure of; values may be any bytes.
    pub fn of_request() -> Self {
        count("request headers");
        Self(hostcalls::get_map_bytes(MapType::HttpRequestHeaders).unwrap_or_default())
    }

    /// The answer's headers: its header callback.
    pub fn of_response() -> Self {
        count("response headers");
        Self(hostcalls::get_map_bytes(MapType::HttpResponseHeaders).unwrap_or_default())
    }

    /// The first value of a header, whose name is in lower case as all names are here.
    pub fn value(&self, name: &str) -> Option<&[u8]> {
        let mut values = self.0.iter().filter(|(known, _)| known == name);
        values.next().map(|(_, value)| value.as_slice())
    }

    /// All values of a header that may come several times, as one list.
    pub fn values(&self, name: &str) -> Option<Vec<u8>> {
        let values = self.0.iter().filter(|(known, _)| known == name);
        let values: Vec<&[u8]> = values.map(|(_, value)| value.as_slice()).collect();
        (!values.is_empty()).then(|| values.join(&b','))
    }

    /// The length of the body, if it is declared.
    pub fn length(&self) -> Option<u64> {
        let length = self.value("content-length")?;
        std::str::from_utf8(length).ok()?.parse().ok()
    }

    /// Whether Envoy says that the request comes from an internal address, in a header that
    /// outsiders cannot set.
    pub fn say_internal(&self) -> bool {
        self.value("x-envoy-internal") == Some(b"true")
    }
}

/// Sets a request header, whatever there was of it: callbacks of the request.
pub fn set_request_header(name: &str, value: &str) {
    count("header changed");
    // The only failure is a missing map, and the request's own callbacks have one.
    let _ = hostcalls::set_map_value(MapType::HttpRequestHeaders, name, Some(value));
}

/// Removes a request header: callbacks of the request.
pub fn remove_request_header(name: &str) {
    count("header changed");
    let _ = hostcalls::remove_map_value(MapType::HttpRequestHeaders, name);
}

/// Sets a response header: the response's header callback.
pub fn set_response_header(name: &str, value: &str) {
    count("header changed");
    let _ = hostcalls::set_map_value(MapType::HttpResponseHeaders, name, Some(value));
}

/// Removes a response header: the response's header callback.
pub fn remove_response_header(name: &str) {
    count("header changed");
    let _ = hostcalls::remove_map_value(MapType::HttpResponseHeaders, name);
}

/// Bytes of the request's body that the proxy holds: body and trailer callbacks.
pub fn request_body(start: u64, len: u64) -> Vec<u8> {
    buffer(BufferType::HttpRequestBody, start, len)
}

/// Bytes of the response's body that pass: its body callback, which names how many there are.
pub fn response_body(start: u64, len: u64) -> Vec<u8> {
    buffer(BufferType::HttpResponseBody, start, len)
}

fn buffer(kind: BufferType, start: u64, len: u64) -> Vec<u8> {
    let (Ok(start), Ok(len)) = (usize::try_from(start), usize::try_from(len)) else {
        return Vec::new();
    };
    count("buffer read");
    hostcalls::get_buffer(kind, start, len)
        .ok()
        .flatten()
        .unwrap_or_default()
}

/// The filter's configuration, `size` bytes of it: the configure callback.
pub fn configuration(size: usize) -> Vec<u8> {
    buffer(BufferType::PluginConfiguration, 0, size as u64)
}

/// Answers the request: callbacks of the request, once; the callback then pauses.
pub fn reply(status: u32, headers: &[(&str, &str)], body: &str) {
    count("answer");
    let _ = hostcalls::send_http_response(status, headers.to_vec(), Some(body.as_bytes()));
}

/// A property of the stream: any phase of it.
pub fn property(path: &[&str]) -> Option<Vec<u8>> {
    count("property read");
    hostcalls::get_property(path.to_vec()).ok().flatten()
}

/// Lets a held request of this VM go: the tick. `root` is the caller's own context.
pub fn release(request: u32, root: u32) {
    if hostcalls::set_effective_context(request).is_ok() {
        let _ = hostcalls::resume_http_request();
    }
    let _ = hostcalls::set_effective_context(root);
}

/// Asks for the tick callback every `period_ms`.
pub fn tick_every(period_ms: u64) {
    let _ = hostcalls::set_tick_period(Duration::from_millis(period_ms));
}

/// Sends `GET path` to a cluster: the tick. The answer comes to the root context with the number
/// that this gives.
pub fn call(cluster: &str, path: &str, timeout_ms: u64) -> Result<u32, Refused> {
    let headers = vec![
        (":method", "GET"),
        (":path", path),
        (":authority", "admin"),
        (":scheme", "http"),
    ];
    let timeout = Duration::from_millis(timeout_ms);
    hostcalls::dispatch_http_call(cluster, headers, None, vec![], timeout).map_err(|_| Refused)
}

/// The answer's status: the answer's callback, and only if it has headers: without, the SDK
/// panics (ENVOY.md 10).
pub fn call_status() -> Option<Vec<u8>> {
    hostcalls::get_map_value_bytes(MapType::HttpCallResponseHeaders, ":status")
        .ok()
        .flatten()
}

/// The answer's body: the answer's callback.
pub fn call_body(size: usize) -> Vec<u8> {
    buffer(BufferType::HttpCallResponseBody, 0, size as u64)
}

/// Defines a counter, or finds it: any phase; costs 1.4 µs.
pub fn counter(name: &str) -> Option<Metric> {
    count("metric defined");
    hostcalls::define_metric(MetricType::Counter, name)
        .ok()
        .map(Metric)
}

/// Defines a gauge, or finds it.
pub fn gauge(name: &str) -> Option<Metric> {
    count("metric defined");
    hostcalls::define_metric(MetricType::Gauge, name)
        .ok()
        .map(Metric)
}

/// Defines a histogram, or finds it.
pub fn histogram(name: &str) -> Option<Metric> {
    count("metric defined");
    hostcalls::define_metric(MetricType::Histogram, name)
        .ok()
        .map(Metric)
}

/// Adds to a counter: any phase.
pub fn increment(metric: Option<Metric>, by: u32) {
    if let Some(Metric(id)) = metric {
        count("metric changed");
        let _ = hostcalls::increment_metric(id, i64::from(by));
    }
}

/// Sets a gauge, or adds a value to a histogram: any phase.
pub fn record(metric: Option<Metric>, value: u64) {
    if let Some(Metric(id)) = metric {
        count("metric changed");
        let _ = hostcalls::record_metric(id, value);
    }
}
