//! `kubectl drava console` in headless Chromium, with a recorded cluster of one node and one of 500.
//!
//! Screenshots of all views are written to `target/console`.
#![expect(clippy::expect_used, clippy::unwrap_used, reason = "tests")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

mod browser;
mod cluster;

use browser::{Browser, Scheme};

/// The program with a recorded cluster.
struct Console {
    child: Child,
    address: String,
    _dump: NamedTempFile,
}

impl Console {
    fn start(nodes: usize) -> Result<Self> {
        Self::show(&cluster::dump(nodes))
    }

    fn show(dump: &Value) -> Result<Self> {
        let mut file = NamedTempFile::new()?;
        serde_json::to_writer(file.as_file_mut(), dump)?;
        let mut child = Command::new(env!("CARGO_BIN_EXE_kubectl-drava"))
            .args(["console", "--dump"])
            .arg(file.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let address = lines.next().context("the console has ended")??;
        Ok(Self {
            child,
            address,
            _dump: file,
        })
    }

    /// Sends a request with these lines, and returns the response.
    fn request(&self, line: &str, headers: &[&str]) -> Result<String> {
        let host = self.address.split('/').nth(2).context("no host")?;
        let mut stream = TcpStream::connect(host)?;
        let headers: String = headers
            .iter()
            .map(|header| format!("{header}\r\n"))
            .collect();
        write!(
            stream,
            "{line} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n"
        )?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        Ok(response)
    }

    fn host(&self) -> String {
        format!("Host: {}", self.address.split('/').nth(2).unwrap_or(""))
    }

    fn token(&self) -> &str {
        self.address.split('/').nth(3).unwrap_or("")
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        // The program may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn screenshot(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../target/console")
        .join(format!("{name}.png"))
}

/// Checks that the page has loaded its own files only, without errors, and is not wider than the window.
fn check_page(browser: &mut Browser, console: &Console) -> Result<()> {
    ensure!(browser.errors.is_empty(), "{:?}", browser.errors);
    let foreign: Vec<&String> = browser
        .requested
        .iter()
        .filter(|address| {
            !address.starts_with(&console.address)
                && !address.starts_with("data:")
                && *address != "about:blank"
        })
        .collect();
    ensure!(foreign.is_empty(), "{foreign:?}");
    let excess = browser
        .evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")?;
    ensure!(excess == 0, "the page is {excess} pixels too wide");
    Ok(())
}

/// Shows every view in light and dark.
fn show_all_views(nodes: usize) -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(nodes)?;
    for scheme in [Scheme::Light, Scheme::Dark] {
        let height = if nodes == 1 { 720 } else { 900 };
        browser.emulate((1440, height), scheme)?;
        let mut backgrounds = Vec::new();
        for view in ["gpus", "tenants", "queue", "quotas"] {
            browser.open(&console.address, view)?;
            check_page(&mut browser, &console)?;
            let name = format!("{view}-{nodes}-{}", scheme.name());
            browser.screenshot(&screenshot(&name))?;
            backgrounds.push(
                browser.evaluate("getComputedStyle(document.documentElement).backgroundColor")?,
            );
        }
        let expected = match scheme {
            Scheme::Light => "rgb(245, 246, 249)",
            Scheme::Dark => "rgb(15, 18, 24)",
        };
        assert_eq!(backgrounds, [expected; 4]);
    }
    Ok(())
}

#[test]
fn shows_all_views_of_one_node() -> Result<()> {
    show_all_views(1)
}

#[test]
fn shows_all_views_of_500_nodes() -> Result<()> {
    show_all_views(500)
}

#[test]
fn draws_gpus_to_scale() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(5)?;
    browser.emulate((1440, 900), Scheme::Light)?;
    browser.open(&console.address, "gpus")?;
    // Node 5 has L40S: 46068 of the 81559 MiB of an H100.
    let script = "(() => {
        const width = (selector) => document.querySelector(selector).getBoundingClientRect().width;
        const bar = (node, gpu) => `[aria-label='Node ${node}'] .gpu:nth-of-type(${gpu}) .bar`;
        const shares = [...document.querySelectorAll(`${bar('gpu-001', 3)} .memory .segment`)];
        const largest = Math.max(...shares.map((share) => share.getBoundingClientRect().width));
        return [width(bar('gpu-005', 1)) / width(bar('gpu-001', 1)), largest / width(bar('gpu-001', 3))];
    })()";
    let measured = browser.evaluate(script)?;
    let ratio = |index: usize| measured[index].as_f64().expect("a ratio");
    assert!((ratio(0) - 46_068.0 / 81_559.0).abs() < 0.01, "{measured}");
    assert!((ratio(1) - 0.40).abs() < 0.01, "{measured}");
    let counts = browser.evaluate(
        "[...document.querySelectorAll('#legend button')].map((key) => key.textContent)",
    )?;
    let states = counts.as_array().expect("a list").len();
    assert_eq!(states, 6, "{counts}");
    Ok(())
}

#[test]
fn can_be_used_without_mouse() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(40)?;
    browser.emulate((1440, 900), Scheme::Light)?;
    browser.open(&console.address, "gpus")?;
    browser.press("3")?;
    browser.wait("document.querySelector('[data-view=queue] #pods tr')")?;
    browser.press("1")?;
    browser.wait("document.querySelectorAll('.tile').length === 40")?;
    // The filter, then a tile by arrows, then its details.
    browser.press("/")?;
    browser.type_text("tesla")?;
    browser.wait("document.querySelectorAll('.tile').length === 4")?;
    browser.press("Escape")?;
    browser.wait("document.querySelectorAll('.tile').length === 40")?;
    browser.evaluate("document.querySelector('.tile').focus()")?;
    browser.press("ArrowRight")?;
    browser.wait("document.activeElement === document.querySelectorAll('.tile')[1]")?;
    browser.press("ArrowDown")?;
    browser.wait("document.activeElement !== document.querySelectorAll('.tile')[1] && document.activeElement.matches('.tile')")?;
    browser.press("Enter")?;
    browser.wait("document.getElementById('detail').open")?;
    browser.screenshot(&screenshot("detail"))?;
    browser.press("Escape")?;
    browser.wait("!document.getElementById('detail').open")?;
    browser.press("m")?;
    browser.wait("document.querySelectorAll('.node').length === 40")?;
    // Everything that reacts to the mouse can have the focus.
    let unreachable = browser.evaluate(
        "[...document.querySelectorAll('[onclick], .key, .tile, .head, .reason')].filter((one) => one.tabIndex < 0).length",
    )?;
    assert_eq!(unreachable, json!(0));
    check_page(&mut browser, &console)
}

#[test]
fn shows_names_of_tenants_as_text() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(1)?;
    browser.open(&console.address, "queue")?;
    let text = browser.evaluate("document.getElementById('pods').textContent")?;
    assert!(
        text.as_str()
            .is_some_and(|text| text.contains("<img src=x onerror=alert(1)>")),
        "{text}"
    );
    assert_eq!(
        browser.evaluate("document.querySelectorAll('img').length")?,
        json!(0)
    );
    check_page(&mut browser, &console)
}

#[test]
fn fits_narrow_windows() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(3)?;
    browser.emulate((720, 900), Scheme::Light)?;
    for view in ["gpus", "tenants", "queue", "quotas"] {
        browser.open(&console.address, view)?;
        check_page(&mut browser, &console).context(view)?;
    }
    browser.screenshot(&screenshot("narrow"))
}

#[test]
fn answers_reads_with_secret_only() -> Result<()> {
    let console = Console::start(1)?;
    let (host, token) = (console.host(), console.token().to_owned());
    let page = console.request(&format!("GET /{token}/"), &[&host])?;
    assert!(page.starts_with("HTTP/1.1 200 "), "{page}");
    for header in [
        "content-security-policy: default-src 'none'",
        "cache-control: no-store",
        "referrer-policy: no-referrer",
        "x-content-type-options: nosniff",
        "x-frame-options: DENY",
    ] {
        assert!(page.contains(header), "{header}: {page}");
    }
    for (line, headers, status) in [
        ("GET /".to_owned(), vec![host.as_str()], 404),
        ("GET /view.json".to_owned(), vec![&host], 404),
        (
            format!("GET /{}/view.json", "0".repeat(32)),
            vec![&host],
            404,
        ),
        (
            format!("GET /{token}/view.json"),
            vec!["Host: attacker.example"],
            403,
        ),
        (
            format!("GET /{token}/view.json"),
            vec![&host, "Origin: http://attacker.example"],
            403,
        ),
        (
            format!("GET /{token}/view.json"),
            vec![&host, "Sec-Fetch-Site: cross-site"],
            403,
        ),
        (format!("POST /{token}/view.json"), vec![&host], 405),
        (format!("DELETE /{token}/"), vec![&host], 405),
    ] {
        let response = console.request(&line, &headers)?;
        let expected = format!("HTTP/1.1 {status} ");
        assert!(
            response.starts_with(&expected),
            "{line} {headers:?}: {response}"
        );
        assert!(!response.contains("GPU-"), "{line}: {response}");
    }
    Ok(())
}

#[test]
fn serves_model_of_recorded_cluster() -> Result<()> {
    let console = Console::start(1)?;
    let line = format!("GET /{}/view.json", console.token());
    let response = console.request(&line, &[&console.host()])?;
    let (_, body) = response.split_once("\r\n\r\n").context("no body")?;
    let view: Value = serde_json::from_str(body)?;
    assert_eq!(view["source"], json!({"kind": "dump"}));
    assert_eq!(
        view["totals"]["gpus"],
        json!({"whole": 2, "shared": 2, "partitioned": 1, "free": 1, "unhealthy": 1, "excluded": 1})
    );
    assert_eq!(
        view["totals"]["memory"]["total"],
        json!(8 * cluster::h100_bytes())
    );
    assert_eq!(view["queue"].as_array().map(Vec::len), Some(5));
    Ok(())
}
