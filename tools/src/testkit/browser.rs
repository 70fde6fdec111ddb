//! A headless Chromium that opens pages, clicks, and says what went wrong in them.
//!
//! Guarantee: every question has an answer or an error within [`ANSWER_LIMIT`]; the browser ends
//! with its value. It is spoken to through two pipes (`--remote-debugging-pipe`), which needs
//! neither a port nor a driver. Not here: what a page should show.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use base64::Engine as _;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// A page of ours answers in milliseconds; a machine that compiles takes longer.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// The names under which distributions install it.
const NAMES: [&str; 4] = [
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
];

/// Chromium reads commands from file 3 and writes answers to file 4.
const PIPES: &str = "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1";

/// Problems that are kept; a page with more is broken anyway.
const PROBLEMS_MAX: usize = 100;

/// A running browser.
pub struct Browser {
    shared: Arc<Shared>,
    reader: JoinHandle<()>,
    _child: Child,
    /// Its profile; goes with it.
    _profile: TempDir,
}

struct Shared {
    state: Mutex<State>,
    input: tokio::sync::Mutex<ChildStdin>,
}

#[derive(Default)]
struct State {
    next: u64,
    waiting: BTreeMap<u64, oneshot::Sender<Value>>,
    problems: Vec<String>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn call(&self, session: Option<&str>, method: &str, params: Value) -> Result<Value> {
        let (sender, receiver) = oneshot::channel();
        let id = {
            let mut state = self.lock();
            state.next += 1;
            let id = state.next;
            state.waiting.insert(id, sender);
            id
        };
        let mut message = json!({"id": id, "method": method, "params": params});
        if let (Some(session), Some(fields)) = (session, message.as_object_mut()) {
            fields.insert("sessionId".into(), session.into());
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        let mut input = self.input.lock().await;
        input
            .write_all(&bytes)
            .await
            .context("the browser is gone")?;
        drop(input);
        let answer = timeout(ANSWER_LIMIT, receiver).await;
        let answer = answer.with_context(|| format!("no answer to {method}"))?;
        let answer = answer.context("the browser is gone")?;
        if let Some(error) = answer.get("error") {
            bail!("{method}: {error}");
        }
        Ok(answer.get("result").cloned().unwrap_or_default())
    }
}

impl Browser {
    /// Where a Chromium is installed; `None` if there is none.
    #[must_use]
    pub fn find() -> Option<PathBuf> {
        let path = std::env::var_os("PATH")?;
        let folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
        let files = NAMES
            .iter()
            .flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
        files.into_iter().find(|file| file.is_file())
    }

    /// Starts it.
    pub async fn start(program: &Path) -> Result<Self> {
        let profile = tempfile::tempdir()?;
        let mut child = Command::new("sh")
            .args(["-c", PIPES])
            .arg(program)
            // No sandbox: it only ever opens our own page, and tests run as root, which has none.
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
            ])
            .args([
                "--remote-debugging-pipe",
                "--no-first-run",
                "--disable-dev-shm-usage",
            ])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .env("HOME", profile.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start the browser")?;
        let input = child.stdin.take().context("no pipe to the browser")?;
        let output = child.stdout.take().context("no pipe from the browser")?;
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            input: tokio::sync::Mutex::new(input),
        });
        let reader = tokio::spawn(read(output, Arc::clone(&shared)));
        Ok(Self {
            shared,
            reader,
            _child: child,
            _profile: profile,
        })
    }

    /// Opens a page in a window of this many CSS pixels.
    pub async fn open(&self, url: &str, width: u32, height: u32, dark: bool) -> Result<Tab> {
        let made = self
            .shared
            .call(None, "Target.createTarget", json!({"url": "about:blank"}));
        let target = text(&made.await?, "/targetId").to_owned();
        let params = json!({"targetId": target, "flatten": true});
        let attached = self
            .shared
            .call(None, "Target.attachToTarget", params)
            .await?;
        let session = text(&attached, "/sessionId").to_owned();
        let shared = Arc::clone(&self.shared);
        let tab = Tab { shared, session };
        for domain in ["Page", "Runtime", "Log", "Network"] {
            tab.call(&format!("{domain}.enable"), json!({})).await?;
        }
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        tab.call("Emulation.setDeviceMetricsOverride", size).await?;
        tab.set_dark(dark).await?;
        tab.call("Page.navigate", json!({"url": url})).await?;
        Ok(tab)
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// A page in a browser.
pub struct Tab {
    shared: Arc<Shared>,
    session: String,
}

impl Tab {
    async fn call(&self, method: &str, params: Value) -> Result<Value> {
        self.shared.call(Some(&self.session), method, params).await
    }

    /// The colours that the reader is said to prefer.
    pub async fn set_dark(&self, dark: bool) -> Result<()> {
        let value = if dark { "dark" } else { "light" };
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": value}]});
        self.call("Emulation.setEmulatedMedia", features).await?;
        Ok(())
    }

    /// The value of a JavaScript expression, a promise's included.
    pub async fn eval(&self, expression: &str) -> Result<Value> {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", params).await?;
        if let Some(thrown) = answer.get("exceptionDetails") {
            bail!("{expression}: {thrown}");
        }
        Ok(answer.pointer("/result/value").cloned().unwrap_or_default())
    }

    /// Presses and releases a key, as `Tab` or `Enter`.
    pub async fn press(&self, key: &str, code: u32) -> Result<()> {
        for kind in ["rawKeyDown", "char", "keyUp"] {
            // Only Enter is a character.
            if kind == "char" && key != "Enter" {
                continue;
            }
            let text = if kind == "char" { "\r" } else { "" };
            let params = json!({"type": kind, "key": key, "code": key, "text": text,
                                "windowsVirtualKeyCode": code});
            self.call("Input.dispatchKeyEvent", params).await?;
        }
        Ok(())
    }

    /// Names and roles of everything that a screen reader is told of.
    pub async fn accessible(&self) -> Result<Vec<(String, String)>> {
        let tree = self.call("Accessibility.getFullAXTree", json!({})).await?;
        let nodes = tree.pointer("/nodes").and_then(Value::as_array);
        let shown = nodes
            .into_iter()
            .flatten()
            .filter(|node| node.get("ignored") != Some(&Value::Bool(true)));
        let owned = |node, pointer| text(node, pointer).to_owned();
        Ok(shown
            .map(|node| (owned(node, "/role/value"), owned(node, "/name/value")))
            .collect())
    }

    /// A picture of the whole page, as PNG.
    pub async fn screenshot(&self, file: &Path) -> Result<()> {
        self.call("Page.bringToFront", json!({})).await?;
        let params = json!({"format": "png", "captureBeyondViewport": true});
        let answer = self.call("Page.captureScreenshot", params).await?;
        let data = text(&answer, "/data");
        let bytes = base64::engine::general_purpose::STANDARD.decode(data)?;
        std::fs::write(file, bytes).with_context(|| format!("cannot write {}", file.display()))
    }

    /// What went wrong in any page so far: errors and warnings of the console, exceptions,
    /// requests that failed.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        self.shared.lock().problems.clone()
    }
}

async fn read(output: ChildStdout, shared: Arc<Shared>) {
    let mut output = BufReader::new(output);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        match output.read_until(0, &mut bytes).await {
            Ok(count) if count > 0 => {}
            _ => return,
        }
        bytes.pop();
        let Ok(message) = serde_json::from_slice::<Value>(&bytes) else {
            continue;
        };
        let mut state = shared.lock();
        if let Some(id) = message.get("id").and_then(Value::as_u64) {
            if let Some(waiting) = state.waiting.remove(&id) {
                let _ = waiting.send(message);
            }
        } else if let Some(problem) = problem(&message)
            && state.problems.len() < PROBLEMS_MAX
        {
            state.problems.push(problem);
        }
    }
}

/// What an event says that is wrong.
fn problem(message: &Value) -> Option<String> {
    let params = message.get("params")?;
    let bad = |pointer| matches!(text(params, pointer), "error" | "warning" | "assert");
    let wrong = match text(message, "/method") {
        "Runtime.exceptionThrown" => true,
        "Runtime.consoleAPICalled" => bad("/type"),
        "Log.entryAdded" => bad("/entry/level"),
        // A stream that ends with its page was cancelled.
        "Network.loadingFailed" => params.get("canceled") != Some(&Value::Bool(true)),
        _ => false,
    };
    wrong.then(|| params.to_string())
}

/// A text in an answer; empty if there is none.
fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    let found = value.pointer(pointer).and_then(Value::as_str);
    found.unwrap_or_default()
}
