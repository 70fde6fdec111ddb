//! A configuration in words.
//!
//! Guarantee: every option is told, whether it was set or not. Not here: what is valid.

use prefix_router::config::{Config, DebugHeaders, HostSource, Mode, Pool, Routing};
use prefix_router::names;
use prefix_router::payload::{CacheKey, Tools};

use crate::report::table::wrap_to;

const KIB: u32 = 1024;

/// One line for each thing that the configuration decides.
pub(super) fn of(config: &Config) -> Vec<String> {
    let mut lines = Vec::new();
    for pool in &config.pools {
        lines.push(format!("pool {}: cluster {}", pool.name, pool.cluster));
        lines.push(row("route", &route(pool)));
        lines.push(row("mode", &mode(pool)));
        lines.push(row("hosts", &hosts(&pool.hosts)));
        lines.push(row("routing", &routing(pool)));
        lines.push(row("limit", &limit(pool)));
        lines.push(row("health", health(pool)));
    }
    lines.push("requests".into());
    let request = &config.request;
    let held = format!(
        "held up to {} while read; given up if nothing comes for {} ms",
        size(request.body_bytes_max),
        request.body_idle_ms
    );
    lines.push(row("bodies", &held));
    let tenants = match &request.tenant_header {
        Some(header) => format!("kept apart by the header {header}"),
        None => "not told apart".into(),
    };
    lines.push(row("tenants", &tenants));
    lines.extend(read(config));
    lines.push("answers".into());
    let sample = match config.learning.sample {
        0 => "not read".into(),
        1 => "each is read for its usage".into(),
        one_in => format!("one in {one_in} is read for its usage"),
    };
    lines.push(row("learning", &sample));
    lines.push("what can be seen".into());
    let headers = match config.debug_headers {
        DebugHeaders::Off => "none",
        DebugHeaders::OnRequest => "when a request from inside asks",
        DebugHeaders::Always => "with every response, to everybody",
    };
    lines.push(row("debug headers", headers));
    let level = config.log.to_string().to_lowercase();
    lines.push(row("log", &format!("{level} and more severe")));
    let series = format!(
        "of their own for up to {} host addresses",
        config.host_series_max
    );
    lines.push(row("metrics", &series));
    lines
}

/// Columns before the text of a row.
const INDENT: usize = 17;

fn row(label: &str, text: &str) -> String {
    format!("{:<INDENT$}{text}", format!("  {label}"))
}

/// A line of [`of`] in lines of so many columns; what goes on of a row stands below its text.
pub(super) fn folded(line: &str, columns: usize) -> Vec<String> {
    let Some((label, text)) = line
        .split_at_checked(INDENT)
        .filter(|_| line.starts_with(' '))
    else {
        return wrap_to(line, columns);
    };
    let parts = wrap_to(text, columns - INDENT);
    let rows = parts.into_iter().enumerate();
    rows.map(|(number, part)| match number {
        0 => format!("{label}{part}"),
        _ => format!("{:INDENT$}{part}", ""),
    })
    .collect()
}

fn route(pool: &Pool) -> String {
    match pool.default {
        true => "Envoy's own; what no other pool takes".into(),
        false => format!("the one that matches {}: {}", names::ROUTE_POOL, pool.name),
    }
}

fn mode(pool: &Pool) -> String {
    let mode = match pool.mode {
        Mode::On => "on: hosts are chosen",
        Mode::Observe => "observe: decided and counted, Envoy chooses the host",
    };
    match pool.share {
        1.0 => mode.into(),
        share => format!("{mode}; for {} % of keys", share * 100.0),
    }
}

fn hosts(source: &HostSource) -> String {
    match source {
        HostSource::Admin { cluster, poll_ms } => format!(
            "with their health, every {poll_ms} ms from Envoy's admin through cluster {cluster}"
        ),
        HostSource::Static(hosts) => {
            format!("{}; their health is not known", hosts.join(", "))
        }
        HostSource::Learned => {
            "learned from who answers; one request in 64 stays with Envoy for that".into()
        }
    }
}

fn routing(pool: &Pool) -> String {
    match pool.routing {
        Routing::Adaptive { one_gateway, .. } => {
            let gateways = if one_gateway {
                "the only gateway"
            } else {
                "any number of gateways (for a single one, gateways: one is more even)"
            };
            format!("adaptive: by as much of a prompt as many others share; {gateways}")
        }
        Routing::Fixed { prefix_length } => format!(
            "fixed: by the first {prefix_length} characters of a prompt (bytes of a native body)"
        ),
    }
}

fn limit(pool: &Pool) -> String {
    let Some(limit) = pool.bounds.limit else {
        return "none".into();
    };
    let rule = if pool.bounds.panic_rule {
        "ignored while the mean is at least half of it"
    } else {
        "hard"
    };
    format!("{limit} requests in flight per host and gateway, {rule}")
}

fn health(pool: &Pool) -> &'static str {
    match (&pool.hosts, pool.strict_health) {
        (HostSource::Admin { .. }, false) => "as of the last poll",
        (HostSource::Admin { .. }, true) => {
            "as of the last poll; of the first choice as of sending"
        }
        (HostSource::Static(_) | HostSource::Learned, false) => "not known",
        (HostSource::Static(_) | HostSource::Learned, true) => {
            "known of the first choice, as of sending"
        }
    }
}

fn size(bytes: u32) -> String {
    match bytes {
        bytes if bytes % (KIB * KIB) == 0 => format!("{} MiB", bytes / (KIB * KIB)),
        bytes if bytes % KIB == 0 => format!("{} KiB", bytes / KIB),
        bytes => format!("{bytes} bytes"),
    }
}

fn read(config: &Config) -> [String; 6] {
    let read = &config.read;
    let seed = if read.seed == 0 {
        "none: outsiders can work out which prompts share a host"
    } else {
        "set; it has to be the same on every gateway"
    };
    let cache_key = match read.cache_key {
        CacheKey::Hint => "splits a prefix that is too hot",
        CacheKey::Seed => "prompts that differ in it share no key",
        CacheKey::Ignore => "not read",
    };
    let tools = match read.tools {
        Tools::ByModel => "rendered where the model's template is known to do it",
        Tools::BeforeSystem => "rendered in front of the system message",
        Tools::AfterSystem => "rendered behind the system message",
        Tools::BeforeLastUser => "rendered before the last user message: not in the key",
    };
    let images = format!(
        "an image counts as {} tokens, whatever its size",
        read.image_tokens
    );
    let native = format!("prompt at {}", list(&read.pointers));
    let inputs = format!("other values, other key: {}", list(&read.template_inputs));
    [
        row("seed", seed),
        row("cache key", &format!("prompt_cache_key: {cache_key}")),
        row("tools", tools),
        row("images", &images),
        row("other bodies", &native),
        row("template", &inputs),
    ]
}

fn list(items: &[String]) -> String {
    if items.is_empty() {
        return "none".into();
    }
    items.join(", ")
}
