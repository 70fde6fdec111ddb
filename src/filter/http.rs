//! The HTTP callbacks of one request: host facts in, steps of request.rs, host actions out.
//!
//! Guarantee: a request is never changed but for the routing header, never answered by us unless
//! `on_saturated` says so, and let go in every case. Not here: JSON, hashing, arithmetic, the choice of a host.

use std::rc::Rc;

use log::{debug, error};
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

use super::answer::Answer;
use super::hooks::Hooks;
use super::host::{self, Headers};
use super::metrics::Metrics;
use super::pool::Pool;
use super::worker::Worker;
use crate::config::DebugHeaders;
use crate::load::{Changes, Seat};
use crate::names;
use crate::payload::{End, Head, Reader};
use crate::pool::Placed;
use crate::prefix::Prompt;
use crate::request::{Facts, Next, Request};
use crate::route::{Abstain, Decision};
use crate::watchdog::Verdict;

/// Why Envoy answered as it did.
const CODE_DETAILS: [&str; 2] = ["response", "code_details"];
/// Envoy's reason when a body is larger than what it may buffer.
const TOO_LARGE: &[u8] = b"request_payload_too_large";

/// One request.
pub struct Http {
    id: u32,
    worker: Rc<Worker>,
    request: Request,
    /// Bytes of the body that the proxy holds.
    buffered: u64,
    /// How many of them are waited for.
    bytes_max: u64,
    placed: Option<Placed>,
    /// Why it is not placed, if it is not.
    passed: Abstain,
    /// The API of the request's body.
    api: &'static str,
    /// The pool that serves it, as far as it is known.
    pool: Option<usize>,
    answer: Answer,
    /// How long its body is, if its headers say so.
    answer_bytes: Option<u64>,
    /// Whether the answer is no error.
    is_well: bool,
    debug_headers: bool,
    /// Whether it came from an internal address; known only if debug headers may be asked for.
    internal: bool,
    hooks: Hooks,
}

impl Http {
    /// A request that the proxy calls `id`.
    pub fn new(id: u32, worker: Rc<Worker>) -> Self {
        let request = Request::default();
        Self {
            id,
            worker,
            request,
            buffered: 0,
            bytes_max: 0,
            placed: None,
            // As long as it was not let go for another reason.
            passed: Abstain::NotAPrompt,
            api: "",
            pool: None,
            answer: Answer::default(),
            answer_bytes: None,
            is_well: false,
            debug_headers: false,
            internal: false,
            hooks: Hooks::default(),
        }
    }

    fn admit(&mut self, headers: &Headers, end_of_stream: bool) -> Action {
        let header = |name| headers.value(name).unwrap_or_default();
        // Before anything else: it counts for requests without a prompt as well.
        let selector = &self.worker.selector;
        self.pool = selector.by_head(header(":path"), |name| headers.values(name));
        self.choose_route();
        let content_type = header("content-type");
        let facts = Facts {
            method: header(":method"),
            content_type,
            upgrade: headers.value("upgrade").is_some(),
            end_of_stream,
        };
        if !facts.may_carry_a_prompt() {
            return self.abstain(Abstain::NotAPrompt);
        }
        let now_ms = host::now_ms();
        if !self.worker.watchdog.borrow_mut().may_hold(now_ms) {
            return self.abstain(Abstain::Watchdog);
        }
        let content_encoding = headers.values("content-encoding").unwrap_or_default();
        let tenant_header = self.worker.config.request.tenant_header.as_deref();
        let tenant = tenant_header.and_then(|name| headers.values(name));
        let head = Head {
            path: header(":path"),
            content_type,
            content_encoding: &content_encoding,
            tenant: tenant.as_deref(),
        };
        self.bytes_max = self.worker.bytes_max(headers.length());
        let pool = self.worker.pool(self.pool);
        let plan = pool.map_or(&self.worker.plan, |pool| &pool.plan);
        self.request.hold(Reader::with(&head, plan));
        let mut watchdog = self.worker.watchdog.borrow_mut();
        watchdog.hold(self.id, self.pool, now_ms);
        Action::Pause
    }

    /// Names the pool to the routes, unless the proxy's own route leads to it.
    fn choose_route(&self) {
        if let Some(pool) = self.worker.pool(self.pool)
            && !pool.config.default
        {
            host::set_request_header(names::ROUTE_POOL, &pool.config.name);
        }
    }

    fn abstain(&mut self, why: Abstain) -> Action {
        self.request.free();
        self.passed = why;
        if let Some(metrics) = self.metrics() {
            metrics.abstained(why);
        }
        Action::Continue
    }

    fn metrics(&self) -> Option<&Metrics> {
        self.worker.metrics(self.pool)
    }

    /// How much of the body is waited for; nothing if the request is not held, or no longer.
    fn waits_for(&mut self, buffered: u64) -> Option<u64> {
        if !self.request.is_held() {
            return None;
        }
        let bounds = self.worker.watchdog_bounds();
        let now_ms = host::now_ms();
        let mut watchdog = self.worker.watchdog.borrow_mut();
        let verdict = watchdog.body(self.id, now_ms, bounds);
        drop(watchdog);
        match verdict {
            Verdict::Held => return Some(self.worker.bytes_max_now(self.bytes_max, buffered)),
            Verdict::Late => return Some(buffered),
            Verdict::LetGo => {}
            Verdict::FlagUnset => {
                if let Some(metrics) = self.metrics() {
                    metrics.flag_unset();
                }
                error!(
                    "Envoy holds back request bodies: set allow_on_headers_stop_iteration: true \
                     in the wasm filter's config (Envoy 1.35 or later); until then requests pass \
                     unrouted"
                );
            }
        }
        self.request.free();
        self.passed = Abstain::Watchdog;
        None
    }

    /// Reads what is there of the body; places the request when it is all there.
    fn read(&mut self, end: bool) -> Action {
        let Some(bytes_max) = self.waits_for(self.buffered) else {
            return Action::Continue;
        };
        // Ends: each turn reads a whole window or the rest of the body.
        loop {
            match self.request.next(self.buffered, end, bytes_max) {
                Next::Pass => return Action::Continue,
                Next::Wait => return Action::Pause,
                Next::Read { start, len } => {
                    self.request.feed(&host::request_body(start, len), len);
                }
                Next::Place(read) => {
                    if !end {
                        self.request.still_uploads();
                    }
                    return self.place(read);
                }
            }
        }
    }

    /// The body ends, before or after the request is placed.
    fn uploaded(&mut self) {
        let worker = Rc::clone(&self.worker);
        if let (Some(pool), Some(placed)) = (worker.pool(self.pool), &mut self.placed) {
            worker.write(pool.uploaded(placed, &mut self.request));
        }
    }

    fn place(&mut self, end: End) -> Action {
        self.worker.watchdog.borrow_mut().done(self.id);
        let Some(prompt) = self.request.prompt(end) else {
            return Action::Continue;
        };
        self.api = prompt.api;
        if self.pool.is_none() {
            self.pool = self.worker.selector.by_model(prompt.model.as_deref());
            self.choose_route();
        }
        if let Some(metrics) = self.metrics() {
            metrics.payload(prompt.api);
            if let Some(reason) = prompt.coverage.label() {
                metrics.unread(reason);
            }
        }
        // A reference of its own, since placing changes the request.
        let worker = Rc::clone(&self.worker);
        match worker.pool(self.pool) {
            Some(pool) => self.place_in(pool, &prompt),
            None => self.abstain(Abstain::NoPool),
        }
    }

    fn place_in(&mut self, pool: &Pool, prompt: &Prompt) -> Action {
        let worker = Rc::clone(&self.worker);
        let refresh = || worker.refresh();
        let placed = pool.place(prompt, &mut self.request, &worker.ledger, refresh);
        for (name, value) in pool.route_headers(&placed.placement.hosts) {
            host::set_request_header(name, &value);
        }
        debug!(
            "request {}: {} of {}",
            self.id,
            placed.placement.decision.label(),
            prompt.api
        );
        let refused = pool.refuses(&placed);
        self.placed = Some(placed);
        if refused {
            host::reply(429, &names::REJECT_HEADERS, names::REJECT_BODY);
            return Action::Pause;
        }
        Action::Continue
    }

    fn write(&self, changes: Changes) {
        self.worker.write(changes);
    }

    fn write_debug_headers(&self, served_by: Option<&str>, obeyed: Option<bool>) {
        let decision = match &self.placed {
            Some(placed) => placed.placement.decision,
            None => Decision::Abstain(self.passed),
        };
        let mut decision = decision.describe();
        let pool = self.worker.pool(self.pool);
        if self.placed.is_some() && pool.is_some_and(Pool::observes) {
            decision.push_str(" (observed)");
        }
        if obeyed == Some(false) {
            decision.push_str(" (served elsewhere)");
        }
        host::set_response_header(names::DEBUG_DECISION, &decision);
        if let Some(pool) = pool {
            host::set_response_header(names::DEBUG_POOL, &pool.config.name);
        }
        if let Some(address) = served_by {
            host::set_response_header(names::DEBUG_HOST, address);
        }
        if let Some(Placed {
            key: Some(key),
            position,
            ..
        }) = &self.placed
        {
            // It would tell strangers which prompts are alike.
            if self.internal {
                host::set_response_header(names::DEBUG_KEY, &format!("{:016x}", key.0));
            }
            host::set_response_header(names::DEBUG_CHECKPOINT, &position.to_string());
        }
    }

    /// Whether the proxy sent the request where it was told to; `None` if it was not told, or if no
    /// host answered.
    fn obeyed(&self, served_by: Option<Seat>, address: Option<&str>) -> Option<bool> {
        let pool = self.worker.pool(self.pool)?;
        let chosen = self.placed.as_ref()?.placement.hosts.first()?;
        let is_told = address.is_some() && !pool.observes();
        is_told.then_some(Some(chosen.seat) == served_by)
    }

    /// What the answer says is compared with what was expected of the chosen host.
    fn begin_answer(&mut self, obeyed: Option<bool>, headers: &Headers) {
        let (Some(placed), Some(pool)) = (&self.placed, self.worker.pool(self.pool)) else {
            return;
        };
        // Where decisions are only told, any host's answer says what the proxy's choice finds.
        let is_observed = pool.observes() && !placed.placement.hosts.is_empty();
        if obeyed == Some(true) || is_observed {
            self.answer
                .begin(&self.worker, pool, placed, self.api, headers);
        }
    }

    fn end_answer(&mut self, complete: bool) {
        if let (Some(placed), Some(pool)) = (&self.placed, self.worker.pool(self.pool)) {
            self.answer.end(pool, placed, self.api, complete);
        }
    }

    /// What is still pending of an answer in one piece is the request's own again.
    fn give_back(&mut self) {
        let worker = Rc::clone(&self.worker);
        if let (Some(pool), Some(placed)) = (worker.pool(self.pool), &self.placed) {
            worker.write(pool.give_back(placed, &mut self.request));
        }
    }

    /// A first byte of the answer's body passes.
    fn answered(&mut self) {
        let worker = Rc::clone(&self.worker);
        let changes = match (worker.pool(self.pool), &self.placed) {
            (Some(pool), Some(placed)) => pool.answered(placed, &mut self.request, self.is_well),
            _ => self.request.answered(),
        };
        worker.write(changes);
    }

    /// The whole body of the answer passes at once.
    fn completed(&mut self) {
        let worker = Rc::clone(&self.worker);
        match (worker.pool(self.pool), &mut self.placed) {
            (Some(pool), Some(placed)) => pool.completed(placed, &mut self.request),
            _ => self.request.completed(),
        }
    }

    fn finish(&mut self) {
        self.give_back();
        self.end_answer(false);
        self.worker.watchdog.borrow_mut().done(self.id);
        let changes = self.request.end();
        self.write(changes);
    }
}

impl Context for Http {}

impl HttpContext for Http {
    fn on_http_request_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        let headers = Headers::of_request();
        self.hooks.read(&headers);
        self.hooks.at("request_headers");
        // Early header mutation strips them as well; this covers a config without it.
        for name in names::ROUTE_HEADERS {
            if headers.value(name).is_some() {
                host::remove_request_header(name);
            }
        }
        self.debug_headers = match self.worker.config.debug_headers {
            DebugHeaders::Off => false,
            DebugHeaders::Always => true,
            // It must come from an internal address.
            DebugHeaders::OnRequest => {
                headers.value(names::DEBUG_REQUEST).is_some() && headers.say_internal()
            }
        };
        // Only here: the request's headers are out of reach when the answer comes.
        self.internal = self.debug_headers && headers.say_internal();
        self.admit(&headers, end_of_stream)
    }

    fn on_http_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        self.hooks.at("request_body");
        self.buffered = size as u64;
        if end_of_stream {
            self.uploaded();
        }
        self.read(end_of_stream)
    }

    fn on_http_request_trailers(&mut self, _count: usize) -> Action {
        // With trailers, no body callback ever says that the body ends (ENVOY.md 5).
        self.uploaded();
        self.read(true)
    }

    fn on_http_response_headers(&mut self, _count: usize, end_of_stream: bool) -> Action {
        self.hooks.at("response_headers");
        let address = host::property(&["upstream", "address"])
            .and_then(|address| String::from_utf8(address).ok());
        self.worker
            .learn_host(self.pool, self.placed.as_ref(), address.as_deref());
        let seat = address
            .as_deref()
            .and_then(|address| self.worker.seat_of(address));
        let obeyed = self.obeyed(seat, address.as_deref());
        if let (Some(obeyed), Some(pool)) = (obeyed, self.worker.pool(self.pool)) {
            pool.served(obeyed);
        }
        // Before the booking moves.
        self.give_back();
        let changes = self.request.served_by(seat);
        self.write(changes);
        let headers = Headers::of_response();
        if !end_of_stream {
            self.begin_answer(obeyed, &headers);
        }
        self.answer_bytes = headers.length();
        let status = headers.value(":status").unwrap_or_default();
        self.is_well = status.starts_with(b"2");
        if status.starts_with(b"5") {
            let changes = self.request.failed();
            self.write(changes);
        } else if end_of_stream {
            self.completed();
        }
        if self.worker.strict_health() {
            // Envoy's stateful_session tells clients of another host than the first choice.
            host::remove_response_header(names::ROUTE_FIRST);
        }
        if self.debug_headers {
            self.write_debug_headers(address.as_deref(), obeyed);
        }
        Action::Continue
    }

    fn on_http_response_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        if size > 0 {
            if self.answer_bytes == Some(size as u64) {
                self.completed();
            } else {
                self.answered();
            }
            self.answer.pass(size as u64);
        }
        if end_of_stream {
            self.end_answer(true);
        }
        Action::Continue
    }

    fn on_http_response_trailers(&mut self, _count: usize) -> Action {
        // With trailers, no body callback ever says that the body ends.
        self.end_answer(true);
        Action::Continue
    }

    fn on_log(&mut self) {
        self.hooks.at("log");
        if self.request.is_held() && host::property(&CODE_DETAILS).as_deref() == Some(TOO_LARGE) {
            self.worker.body_refused(self.pool, self.buffered);
        }
        self.finish();
        self.hooks.ended();
    }
}

impl Drop for Http {
    /// The proxy always logs first, as far as it was seen (ENVOY.md 4); if it ever does not, the
    /// request is released here.
    fn drop(&mut self) {
        self.finish();
    }
}
