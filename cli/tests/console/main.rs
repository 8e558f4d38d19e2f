//! `kubectl drava console` in headless Chromium, with a recorded cluster of one node and one of 500.
//!
//! Screenshots of all views are written to `target/console`; `cargo xtask screenshots` copies some of them to `docs/images`.
#![expect(clippy::expect_used, clippy::unwrap_used, reason = "tests")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

mod api;
mod browser;
mod cluster;

use browser::{Browser, Scheme};

/// The program with a recorded cluster.
struct Console {
    child: Child,
    address: String,
    _state: NamedTempFile,
}

impl Console {
    fn start(nodes: usize) -> Result<Self> {
        Self::show(&cluster::dump(nodes))
    }

    fn show(dump: &Value) -> Result<Self> {
        Self::run("--dump", dump)
    }

    /// Shows what a user sees who may read one namespace.
    fn start_as_tenant(nodes: usize, namespace: &'static str) -> Result<Self> {
        let kubeconfig = api::serve(cluster::dump(nodes), namespace)?;
        Self::run("--kubeconfig", &kubeconfig)
    }

    /// Starts the program with the name of a file that has this content.
    fn run(option: &str, content: &Value) -> Result<Self> {
        let mut file = NamedTempFile::new()?;
        serde_json::to_writer(file.as_file_mut(), content)?;
        let mut child = Command::new(env!("CARGO_BIN_EXE_kubectl-drava"))
            .args(["console", option])
            .arg(file.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let address = lines.next().context("the console has ended")??;
        Ok(Self {
            child,
            address,
            _state: file,
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

const VIEWS: [&str; 4] = ["gpus", "tenants", "queue", "quotas"];

/// Width and height of a phone.
const PHONE: (u32, u32) = (390, 844);

/// Widths between which the page changes its layout, from a phone to a large screen.
const WIDTHS: [u32; 6] = [390, 700, 1000, 1151, 1440, 2560];

/// Shows every view of a console.
fn show(browser: &mut Browser, console: &Console, name: &str) -> Result<()> {
    for view in VIEWS {
        browser.open(&console.address, view)?;
        check_page(browser, console).context(view)?;
        browser.screenshot(&screenshot(&format!("{view}-{name}")))?;
    }
    Ok(())
}

/// Shows every view in light or dark.
fn show_all_views(nodes: usize, height: u32, schemes: &[Scheme]) -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(nodes)?;
    for scheme in schemes {
        browser.emulate((1440, height), *scheme)?;
        let name = format!("{nodes}-{}", scheme.name());
        show(&mut browser, &console, &name)?;
        let background =
            browser.evaluate("getComputedStyle(document.documentElement).backgroundColor")?;
        let expected = match scheme {
            Scheme::Light => "rgb(245, 246, 249)",
            Scheme::Dark => "rgb(15, 18, 24)",
        };
        assert_eq!(background, expected);
    }
    Ok(())
}

#[test]
fn shows_all_views_of_one_node() -> Result<()> {
    show_all_views(1, 720, &[Scheme::Light, Scheme::Dark])
}

#[test]
fn shows_all_views_of_500_nodes() -> Result<()> {
    show_all_views(500, 900, &[Scheme::Dark])
}

#[test]
fn shows_all_views_on_phone() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(1)?;
    browser.emulate(PHONE, Scheme::Light)?;
    show(&mut browser, &console, "phone")
}

#[test]
fn shows_all_views_of_tenant() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start_as_tenant(5, "research")?;
    browser.emulate((1440, 620), Scheme::Light)?;
    show(&mut browser, &console, "tenant")?;
    browser.open(&console.address, "gpus")?;
    let text = browser.evaluate("document.body.innerText")?;
    let text = text.as_str().context("a text")?;
    for absent in [
        "0 nodes",
        "all ready",
        "kubectl drava doctor",
        "No node publishes",
    ] {
        assert!(!text.contains(absent), "{absent}: {text}");
    }
    assert!(text.contains("not visible to you"), "{text}");
    let notices = browser.evaluate("document.querySelectorAll('.notice').length")?;
    assert_eq!(notices, json!(1), "permissions are one notice");
    let details = browser
        .evaluate("[...document.querySelectorAll('.notice li')].map((item) => item.textContent)")?;
    let details = details.as_array().context("a list")?;
    let mut unique = details.clone();
    unique.dedup();
    assert_eq!(&unique, details);
    let claims = browser.evaluate("document.querySelectorAll('#own tr').length")?;
    assert!(claims.as_u64().is_some_and(|claims| claims > 1), "{claims}");
    browser.open(&console.address, "queue")?;
    let reason = browser.evaluate("document.getElementById('pods').innerText")?;
    assert!(
        reason
            .as_str()
            .is_some_and(|text| text.contains("InsufficientDevices (12 requested)")),
        "{reason}"
    );
    Ok(())
}

/// Measures each bar and claim of the page, and compares it with the model. Returns the number of lengths and the largest
/// deviation from the model as a fraction, with its place.
const MEASURE: &str = "(() => {
    const found = {lengths: 0, worst: 0, place: ''};
    const compare = (place, measured, expected) => {
        // Shorter than a pixel: nothing can be seen of its length.
        if (expected < 1) return;
        found.lengths += 1;
        const deviation = Math.abs(measured - expected) / expected;
        if (deviation > found.worst) Object.assign(found, {worst: deviation, place: `${place}: ${measured} instead of ${expected}`});
    };
    const {nodes} = ui.model;
    const largest = Math.max(...nodes.flatMap((node) => node.gpus.map((gpu) => gpu.memory.total)));
    const measure = (gpu, frame, bar, claims, side) => {
        const length = (element) => element.getBoundingClientRect()[side];
        compare(`${gpu.node} ${gpu.gpu}`, length(bar), length(frame) * gpu.memory.total / largest);
        gpu.claims.forEach((claim, index) =>
            compare(`${gpu.node} ${claim.name}`, length(claims[index]), length(bar) * claim.memory / gpu.memory.total));
    };
    for (const node of nodes) {
        document.querySelectorAll(`.node[aria-label='Node ${node.name}'] .gpu`).forEach((row, index) => {
            const gpu = node.gpus[index];
            const bar = row.querySelector('.bar');
            measure(gpu, row.querySelector('.scale'), bar, row.querySelectorAll('.memory .segment'), 'width');
            const time = gpu.claims.filter((claim) => claim.cores > 0);
            row.querySelectorAll('.time .segment').forEach((part, of) => compare(`GPU time of ${time[of].name}`,
                part.getBoundingClientRect().width, bar.getBoundingClientRect().width * time[of].cores / gpu.cores.total));
        });
        document.querySelectorAll(`.tile[aria-label^='Node ${node.name},'] .column`).forEach((column, index) =>
            measure(node.gpus[index], column.parentElement, column, column.querySelectorAll('.segment'), 'height'));
    }
    return found;
})()";

#[test]
fn draws_gpus_to_scale_at_every_width() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    // GPUs of four sizes, and shares of 1% and more.
    let console = Console::start(9)?;
    for width in WIDTHS {
        browser.emulate((width, 900), Scheme::Light)?;
        browser.open(&console.address, "gpus")?;
        for (layout, lengths) in [("list", 200), ("map", 100)] {
            browser.evaluate(&format!("ui.layout = '{layout}'; draw()"))?;
            let measured = browser.evaluate(MEASURE)?;
            let count = measured["lengths"].as_u64().unwrap_or_default();
            assert!(count >= lengths, "{width} {layout}: {measured}");
            let worst = measured["worst"].as_f64().context("a fraction")?;
            assert!(worst <= 0.03, "{width} {layout}: {measured}");
        }
    }
    Ok(())
}

#[test]
fn labels_claims_only_where_label_fits() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(5)?;
    for width in WIDTHS {
        browser.emulate((width, 900), Scheme::Light)?;
        browser.open(&console.address, "gpus")?;
        // Labels on the first line of a claim are visible.
        let labels = browser.evaluate(
            "(() => {
                const labels = [...document.querySelectorAll('.memory .label, .memory .segment small')].map((label) =>
                    [label.getBoundingClientRect(), label.parentElement.getBoundingClientRect(), label.textContent]);
                const visible = labels.filter(([label, claim]) => label.top < claim.bottom);
                const cut = visible.filter(([label, claim]) => label.right > claim.right + 0.1).map(([, , text]) => text);
                return {labels: labels.length, visible: visible.length, cut};
            })()",
        )?;
        assert_eq!(labels["cut"], json!([]), "{width}");
        let count = |name: &str| labels[name].as_u64().unwrap_or_default();
        assert!(count("visible") > 15, "{width}: {labels}");
        assert!(count("visible") < count("labels"), "{width}: {labels}");
    }
    Ok(())
}

#[test]
fn names_states_that_exist() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(1)?;
    browser.open(&console.address, "gpus")?;
    let names = "[...document.querySelectorAll('#legend button')].map((key) => key.textContent)";
    assert_eq!(
        browser.evaluate(names)?,
        json!([
            "Whole1",
            "Shared2",
            "Partitioned1",
            "Free1",
            "Reserved1",
            "Excluded1",
            "Unhealthy1"
        ])
    );
    let reserved = browser.evaluate("document.querySelector('.chip.reserved').textContent")?;
    assert_eq!(reserved, "for research/queued-1");
    // A state without a GPU has neither a key nor a part of the sum.
    browser.evaluate("Object.assign(ui.model.totals.gpus, {unhealthy: 0, free: 2}); draw()")?;
    let parts =
        "[...document.querySelectorAll('#summary .stack > span')].map((part) => part.className)";
    assert_eq!(
        browser.evaluate(parts)?,
        json!([
            "whole",
            "shared",
            "partitioned",
            "free",
            "reserved",
            "excluded"
        ])
    );
    let keys = browser.evaluate(names)?;
    assert_eq!(keys.as_array().map(Vec::len), Some(6), "{keys}");
    Ok(())
}

#[test]
fn names_colors_of_tenants() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let mut dump = cluster::dump(20);
    let claims = dump["resourceClaims"].as_array_mut().context("claims")?;
    for (number, claim) in claims.iter_mut().enumerate() {
        claim["metadata"]["namespace"] = json!(format!("team-{}", number % 41));
    }
    let console = Console::show(&dump)?;
    browser.open(&console.address, "gpus")?;
    browser
        .evaluate("document.querySelector('[data-choice=color] [data-value=tenant]').click()")?;
    let legend = browser.evaluate(
        "(() => {
            const keys = [...document.querySelectorAll('#legend .key:not(.free, .reserved, .excluded, .unhealthy)')];
            const color = (element) => getComputedStyle(element).backgroundColor;
            const named = new Map(keys.map((key) => [key.textContent, color(key.querySelector('i'))]));
            const wrong = ui.model.nodes.flatMap((node) => node.gpus.flatMap((gpu) => gpu.claims)).filter((claim) => {
                const drawn = [...document.querySelectorAll('.segment')].find((part) => part.title.startsWith(`${claim.name} `));
                return color(drawn) !== (named.get(claim.namespace) ?? named.get('29 others'));
            });
            return {keys: keys.map((key) => key.textContent), colors: new Set(named.values()).size, wrong};
        })()",
    )?;
    let keys = legend["keys"].as_array().context("keys")?;
    assert_eq!(keys.len(), 13, "{legend}");
    assert!(keys.contains(&json!("29 others")), "{legend}");
    assert_eq!(legend["colors"], json!(13), "{legend}");
    assert_eq!(legend["wrong"], json!([]));
    // A namespace keeps its color when another one grows.
    let colors = "JSON.stringify([...tenantColors])";
    let before = browser.evaluate(colors)?;
    browser.evaluate(
        "ui.model.tenants.find((tenant) => tenantColors.has(tenant.namespace)).memory *= 100;
        tenantColors = assignColors(ui.model.tenants, tenantColors)",
    )?;
    assert_eq!(browser.evaluate(colors)?, before);
    Ok(())
}

#[test]
fn draws_memory_of_tenants_as_part_of_cluster() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(5)?;
    browser.emulate((1440, 900), Scheme::Light)?;
    browser.open(&console.address, "tenants")?;
    let worst = browser.evaluate(
        "Math.max(...ui.model.tenants.filter((tenant) => tenant.memory > 0).map((tenant) => {
            const row = document.querySelector(`#tenants [data-key='${tenant.namespace}']`);
            const width = (selector) => row.querySelector(selector).getBoundingClientRect().width;
            const expected = tenant.memory / ui.model.totals.memory.total;
            return Math.abs(width('.meter > span') / width('.meter') - expected);
        }))",
    )?;
    assert!(worst.as_f64().is_some_and(|worst| worst < 0.005), "{worst}");
    Ok(())
}

#[test]
fn draws_gang_as_one_row() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(5)?;
    browser.open(&console.address, "queue")?;
    let found = browser.evaluate(
        "(() => {
            const rows = [...document.querySelectorAll('#pods tr')];
            const [gang] = rows.filter((row) => row.querySelector('details'));
            const cards = [...document.querySelectorAll('#reasons b')].map((pods) => Number(pods.textContent));
            return {
                rows: rows.length, gang: gang.querySelector('summary').textContent,
                members: gang.querySelectorAll('li').length, cards: cards.reduce((sum, pods) => sum + pods, 0),
            };
        })()",
    )?;
    assert_eq!(
        found,
        json!({"rows": 42, "gang": "research/train-agang, 7 pods", "members": 7, "cards": 48})
    );
    Ok(())
}

#[test]
fn names_part_of_view_that_filter_shows() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(5)?;
    browser.open(&console.address, "gpus")?;
    let hidden = "document.getElementById('result').hidden";
    assert_eq!(browser.evaluate(hidden)?, json!(true));
    let result = "document.getElementById('result').textContent";
    for (view, expected) in [
        (
            "gpus",
            "4 of 36 GPUs on 1 node match the filter. The summary counts all.",
        ),
        ("tenants", "0 of 9 tenants match"),
    ] {
        browser.open(&console.address, view)?;
        browser.evaluate("setFilter('L40S')")?;
        let text = browser.evaluate(result)?;
        let is_expected = text.as_str().is_some_and(|text| text.starts_with(expected));
        assert!(is_expected, "{view}: {text}");
    }
    browser.open(&console.address, "gpus")?;
    browser.evaluate("document.querySelector('.key.shared').click()")?;
    assert_eq!(browser.evaluate(hidden)?, json!(false));
    browser.evaluate("document.querySelector('#result button').click()")?;
    assert_eq!(browser.evaluate(hidden)?, json!(true));
    assert_eq!(browser.evaluate("ui.state")?, Value::Null);
    Ok(())
}

#[test]
fn draws_long_lists_in_parts() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(100)?;
    browser.emulate((1440, 900), Scheme::Light)?;
    browser.open(&console.address, "gpus")?;
    browser.evaluate("ui.layout = 'list'; draw()")?;
    assert_eq!(
        browser.evaluate("document.querySelectorAll('.node').length")?,
        json!(40)
    );
    assert_eq!(
        browser.evaluate("document.querySelector('.more').textContent")?,
        json!("40 of 100 nodes are shown: show more")
    );
    // The next part comes with its place.
    browser.evaluate("document.querySelector('.more').scrollIntoView()")?;
    browser.wait("document.querySelectorAll('.node').length === 80")?;
    browser.evaluate("document.querySelector('.more').click()")?;
    browser.wait(
        "document.querySelectorAll('.node').length === 100 && !document.querySelector('.more')",
    )?;
    // More nodes than the map draws at a time: the groups are complete at the end.
    browser.evaluate(
        "ui.model.nodes = Array.from({length: 600}, (_, index) => ({...ui.model.nodes[index % 100], name: `n-${index}`}));
        ui.layout = 'map'; draw()",
    )?;
    assert_eq!(
        browser.evaluate("document.querySelectorAll('.tile').length")?,
        json!(240)
    );
    browser.wait(
        "(document.querySelector('.more')?.scrollIntoView(), document.querySelectorAll('.tile').length === 600)",
    )?;
    // Thousands of pods.
    browser.evaluate(
        "ui.model.queue = Array.from({length: 5000}, (_, index) => ({...ui.model.queue[0], pod: `p-${index}`, gang: undefined}));
        location.hash = 'queue'",
    )?;
    browser.wait("document.querySelectorAll('#pods tr').length === 200")?;
    browser.evaluate("setFilter('p-4999')")?;
    assert_eq!(
        browser.evaluate("document.querySelectorAll('#pods tr').length")?,
        json!(1)
    );
    Ok(())
}

#[test]
fn writes_texts_for_amounts_and_names() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(1)?;
    browser.open(&console.address, "gpus")?;
    for (expression, expected) in [
        ("gpuTime(100)", json!("1 GPU")),
        ("gpuTime(102)", json!("1 GPU")),
        ("gpuTime(150)", json!("1.5 GPUs")),
        ("gpuTime(0)", json!("0 GPUs")),
        (
            "[...shortNames(['gpu-1', 'gpu-2']).values()]",
            json!(["gpu-1", "gpu-2"]),
        ),
        (
            "[...shortNames(['ip-10-0-1-7.eu-west-1.internal', 'ip-10-0-23-8.eu-west-1.internal']).values()]",
            json!(["1-7", "23-8"]),
        ),
        (
            "[...shortNames(['a-very-long-name', 'a-very-long-name-2']).values()]",
            json!(["name", "name-2"]),
        ),
    ] {
        assert_eq!(browser.evaluate(expression)?, expected, "{expression}");
    }
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
    let mut dump = cluster::dump(1);
    let hostile = "<img src=x onerror=alert(1)>";
    for pod in dump["pods"].as_array_mut().context("pods")? {
        // The API server does not validate values of annotations.
        pod["metadata"]["annotations"] = json!({"gpu.drava.dev/gang": hostile});
    }
    let console = Console::show(&dump)?;
    browser.open(&console.address, "queue")?;
    let text = browser.evaluate("document.getElementById('pods').textContent")?;
    assert!(
        text.as_str().is_some_and(|text| text.contains(hostile)),
        "{text}"
    );
    assert_eq!(
        browser.evaluate("document.querySelectorAll('img').length")?,
        json!(0)
    );
    check_page(&mut browser, &console)
}

#[test]
fn fits_every_width() -> Result<()> {
    let Some(mut browser) = browser::start_or_skip()? else {
        return Ok(());
    };
    let console = Console::start(3)?;
    for width in WIDTHS {
        browser.emulate((width, 844), Scheme::Light)?;
        for view in VIEWS {
            browser.open(&console.address, view)?;
            check_page(&mut browser, &console).with_context(|| format!("{view} at {width}"))?;
            let outside = browser.evaluate(
                "[...document.querySelectorAll('#main *')].filter((one) => one.getClientRects().length > 0 &&
                    !one.closest('.memory, thead') && one.getBoundingClientRect().right > innerWidth + 0.5)
                    .map((one) => one.outerHTML.slice(0, 80))",
            )?;
            assert_eq!(outside, json!([]), "{view} at {width}");
            let summary = browser
                .evaluate("document.getElementById('summary').getBoundingClientRect().height")?;
            assert!(
                summary.as_f64().is_some_and(|height| height < 140.0),
                "{view} at {width}: {summary}"
            );
        }
        // What half a window must not hide.
        browser.open(&console.address, "gpus")?;
        for part in [
            ".state.unhealthy",
            ".chip.cordoned",
            ".chip.reserved",
            ".time-amount",
        ] {
            let is_visible = browser.evaluate(&format!(
                "document.querySelector('{part}').checkVisibility()"
            ))?;
            assert_eq!(is_visible, json!(true), "{part} at {width}");
        }
        browser.evaluate("openNode('gpu-001')")?;
        let excess = browser.evaluate(
            "(({scrollWidth, clientWidth}) => scrollWidth - clientWidth)(byId('detail'))",
        )?;
        assert_eq!(excess, json!(0), "details at {width}");
    }
    browser.emulate(PHONE, Scheme::Light)?;
    browser.open(&console.address, "queue")?;
    let first =
        browser.evaluate("document.querySelector('#pods .why').getBoundingClientRect().top")?;
    assert!(
        first.as_f64().is_some_and(|top| top < 560.0),
        "the first reason is on the first screen: {first}"
    );
    Ok(())
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
        json!({
            "whole": 1, "shared": 2, "partitioned": 1, "free": 1, "reserved": 1, "unhealthy": 1, "excluded": 1,
        })
    );
    assert_eq!(
        view["totals"]["memory"]["total"],
        json!(8 * cluster::h100_bytes())
    );
    assert_eq!(view["queue"].as_array().map(Vec::len), Some(7));
    Ok(())
}
