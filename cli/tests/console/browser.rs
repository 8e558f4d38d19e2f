//! Headless Chromium, driven through its pipe (Chrome DevTools Protocol).

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine as _;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A browser with one page.
pub(crate) struct Browser {
    child: Child,
    requests: ChildStdin,
    messages: BufReader<ChildStdout>,
    session: String,
    last_id: u64,
    /// Addresses that the page has requested.
    pub(crate) requested: Vec<String>,
    /// Errors of scripts and violations of the content security policy.
    pub(crate) errors: Vec<String>,
    _profile: TempDir,
}

/// Appearance that the system asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scheme {
    Light,
    Dark,
}

impl Scheme {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Light => "light",
            Self::Dark => "dark",
        }
    }
}

/// Returns the browser, or reports the present test as skipped, in the form that `cargo xtask test` reads.
pub(crate) fn start_or_skip() -> Result<Option<Browser>> {
    let Some(program) = program() else {
        let test = std::thread::current();
        let line = format!(
            "skipped: {}: no Chromium; install the package chromium, or set DRAVA_CHROMIUM\n",
            test.name().unwrap_or("a test")
        );
        // `eprintln!` would be hidden for a test that passes.
        let _ = std::io::stderr().write_all(line.as_bytes());
        return Ok(None);
    };
    Browser::start(&program).map(Some)
}

/// Returns the first installed browser.
fn program() -> Option<PathBuf> {
    if let Some(program) = std::env::var_os("DRAVA_CHROMIUM") {
        return Some(program.into());
    }
    let path = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let mut candidates =
        std::env::split_paths(&path).flat_map(|directory| names.map(|name| directory.join(name)));
    candidates.find(|candidate| candidate.is_file())
}

impl Browser {
    fn start(program: &Path) -> Result<Self> {
        let profile = tempfile::tempdir()?;
        let log = File::create(profile.path().join("log"))?;
        // The browser reads requests from descriptor 3 and writes messages to 4.
        let mut child = Command::new("sh")
            .args(["-c", r#"exec "$@" 3<&0 4>&1 </dev/null >/dev/null"#, "sh"])
            .arg(program)
            .args([
                "--remote-debugging-pipe",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--disable-dev-shm-usage",
            ])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let mut browser = Self {
            requests: child.stdin.take().context("a pipe")?,
            messages: BufReader::new(child.stdout.take().context("a pipe")?),
            child,
            session: String::new(),
            last_id: 0,
            requested: Vec::new(),
            errors: Vec::new(),
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", &json!({"url": "about:blank"}))?;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", &attach)?;
        session["sessionId"]
            .as_str()
            .context("no session")?
            .clone_into(&mut browser.session);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), &json!({}))?;
        }
        Ok(browser)
    }

    /// Calls a method of the protocol and returns its result.
    fn call(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.last_id += 1;
        let mut request = json!({"id": self.last_id, "method": method, "params": params});
        if !self.session.is_empty() {
            request["sessionId"] = json!(self.session);
        }
        let mut bytes = serde_json::to_vec(&request)?;
        bytes.push(0);
        self.requests.write_all(&bytes)?;
        loop {
            let mut message = Vec::new();
            self.messages.read_until(0, &mut message)?;
            ensure!(message.pop().is_some(), "{method}: the browser has ended");
            let mut message: Value = serde_json::from_slice(&message)?;
            if message["id"] == self.last_id {
                ensure!(message["error"].is_null(), "{method}: {}", message["error"]);
                return Ok(message["result"].take());
            }
            self.note(&message["params"], message["method"].as_str().unwrap_or(""));
        }
    }

    fn note(&mut self, params: &Value, method: &str) {
        match method {
            "Network.requestWillBeSent" => {
                let address = params["request"]["url"].as_str().unwrap_or_default();
                self.requested.push(address.to_owned());
            }
            "Runtime.exceptionThrown" => {
                self.errors.push(params["exceptionDetails"].to_string());
            }
            "Log.entryAdded" if params["entry"]["level"] == "error" => {
                self.errors.push(params["entry"].to_string());
            }
            _ => {}
        }
    }

    /// Sets size and appearance of the page. Narrow windows are those of phones.
    pub(crate) fn emulate(&mut self, (width, height): (u32, u32), scheme: Scheme) -> Result<()> {
        let is_phone = width < 500;
        let metrics = json!({
            "width": width, "height": height, "deviceScaleFactor": if is_phone { 1.5 } else { 1.0 }, "mobile": is_phone,
        });
        self.call("Emulation.setDeviceMetricsOverride", &metrics)?;
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme.name()}, {"name": "prefers-reduced-motion", "value": "reduce"}]});
        self.call("Emulation.setEmulatedMedia", &media)?;
        Ok(())
    }

    /// Opens an address and waits until the page shows the view.
    pub(crate) fn open(&mut self, address: &str, view: &str) -> Result<()> {
        // The same document with another fragment is not loaded again.
        self.call("Page.navigate", &json!({"url": "about:blank"}))?;
        let result = self.call(
            "Page.navigate",
            &json!({"url": format!("{address}#{view}")}),
        )?;
        ensure!(result["errorText"].is_null(), "{result}");
        self.wait(&format!(
            "document.documentElement?.dataset.ready?.startsWith('{view} ')"
        ))
    }

    /// Evaluates an expression in the page.
    pub(crate) fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let params = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let mut result = self.call("Runtime.evaluate", &params)?;
        if !result["exceptionDetails"].is_null() {
            bail!("{expression}: {}", result["exceptionDetails"]);
        }
        Ok(result["result"]["value"].take())
    }

    /// Waits until a condition holds in the page.
    pub(crate) fn wait(&mut self, condition: &str) -> Result<()> {
        let script = format!(
            "new Promise((resolve, reject) => {{
                const end = performance.now() + 120000;
                (function check() {{
                    if ({condition}) resolve(true);
                    else if (performance.now() > end) reject(new Error('not reached'));
                    else setTimeout(check, 20);
                }})();
            }})"
        );
        // A navigation may replace the document in which the script waits.
        let is_replaced = |error: &anyhow::Error| {
            let text = error.to_string();
            text.contains("context was destroyed") || text.contains("navigated")
        };
        match self.evaluate(&script) {
            Err(error) if is_replaced(&error) => self.evaluate(&script).map(drop),
            result => result.map(drop),
        }
    }

    /// Presses a key.
    pub(crate) fn press(&mut self, key: &str) -> Result<()> {
        let mut event = json!({"type": "keyDown", "key": key, "code": key});
        if key.chars().count() == 1 {
            event["text"] = json!(key);
        } else {
            event["windowsVirtualKeyCode"] = json!(match key {
                "Enter" => 13,
                "Escape" => 27,
                "Tab" => 9,
                "ArrowLeft" => 37,
                "ArrowUp" => 38,
                "ArrowRight" => 39,
                "ArrowDown" => 40,
                _ => bail!("unknown key {key}"),
            });
            if key == "Enter" {
                event["text"] = json!("\r");
            }
        }
        self.call("Input.dispatchKeyEvent", &event)?;
        event["type"] = json!("keyUp");
        self.call("Input.dispatchKeyEvent", &event)?;
        Ok(())
    }

    /// Types a text.
    pub(crate) fn type_text(&mut self, text: &str) -> Result<()> {
        self.call("Input.insertText", &json!({"text": text}))?;
        Ok(())
    }

    /// Writes what the page shows as PNG, without scroll bars: those of a phone fade.
    pub(crate) fn screenshot(&mut self, path: &Path) -> Result<()> {
        let hide = |hidden: bool| json!({"hidden": hidden});
        self.call("Emulation.setScrollbarsHidden", &hide(true))?;
        // The space of the bars is free in the next frame.
        let frame =
            "new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))";
        self.evaluate(&format!("{frame}.then(() => true)"))?;
        let result = self.call("Page.captureScreenshot", &json!({"format": "png"}))?;
        self.call("Emulation.setScrollbarsHidden", &hide(false))?;
        let data = result["data"].as_str().context("no screenshot")?;
        let png = base64::engine::general_purpose::STANDARD.decode(data)?;
        ensure!(png.starts_with(b"\x89PNG"), "no PNG");
        std::fs::create_dir_all(path.parent().context("no directory")?)?;
        std::fs::write(path, png).with_context(|| format!("cannot write {}", path.display()))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
