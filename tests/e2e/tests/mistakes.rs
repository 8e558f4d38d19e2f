//! The rows of docs/mistakes.md: each mistake is made, and answered at each place that the page names.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use drava_e2e::manifest::{pod, pod_with_request, pod_with_share};
use drava_e2e::{Namespace, TestCluster, wait};

const PAGE: &str = include_str!("../../../docs/mistakes.md");

/// A row of the page.
struct Row {
    mistake: &'static str,
    places: Vec<Place>,
    /// What `kubectl apply`, `explain` and `simulate` print.
    text: &'static str,
}

/// Where a mistake is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Warning,
    Refusal,
    PodEvent,
    ClaimEvent,
    Explain,
    Simulate,
}

impl Place {
    /// Reads an answer of the page.
    fn read(answer: &str) -> Result<Vec<Self>> {
        Ok(match answer {
            "warning at `kubectl apply`" | "warning where the pod is created" => {
                vec![Self::Warning]
            }
            "`kubectl apply` fails" => vec![Self::Refusal],
            "event of the pod and the claim" => vec![Self::PodEvent, Self::ClaimEvent],
            "event of the pod" | "event of kube-scheduler" => vec![Self::PodEvent],
            "`explain`" => vec![Self::Explain],
            "`simulate`" => vec![Self::Simulate],
            unknown => bail!("no place: {unknown}"),
        })
    }
}

/// Returns the rows of the page.
fn rows() -> Result<Vec<Row>> {
    let lines = PAGE.lines().filter(|line| line.starts_with("| ")).skip(1);
    let rows = lines.map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [mistake, answers, text] = cells[..] else {
            bail!("no row: {line}");
        };
        let places: Vec<Vec<Place>> = answers
            .split(", ")
            .map(Place::read)
            .collect::<Result<_>>()?;
        Ok(Row {
            mistake,
            places: places.concat(),
            text: text.trim_matches('`'),
        })
    });
    rows.collect()
}

/// Returns the manifest of a mistake, and what its events say.
fn manifest(mistake: &str) -> Result<(String, &'static str)> {
    let share = |capacity: &str| pod_with_share("mistake", "vgpu.drava.dev", capacity);
    let configured = |config: &str| {
        let request = "{deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 8Gi}}}";
        pod_with_request("mistake", request, config)
    };
    let own = |fields: &str| {
        let config = format!("{{apiVersion: gpu.drava.dev/v1alpha1, kind: VgpuConfig, {fields}}}");
        configured(&format!(
            "[{{opaque: {{driver: gpu.drava.dev, parameters: {config}}}}}]"
        ))
    };
    Ok(
        match mistake.split([':', '`']).next().unwrap_or_default().trim() {
            "more memory than a share can have" => {
                (share("{memory: 100Gi}"), "exceeds the largest GPU")
            }
            "misspelled device class" => (
                pod_with_share("mistake", "vgpu.drava.io", "{memory: 8Gi}"),
                "vgpu.drava.io",
            ),
            "misspelled or invalid field of the config" => (own("memory: {percent: 101}"), ""),
            "suspension without its field" => (own("suspend: true"), ""),
            "a limit that the class does not allow" => {
                (own("memory: {limit: 8Gi, reclaim: kill}"), "")
            }
            "config for another driver" => (
                configured("[{opaque: {driver: drava.dev, parameters: {}}}]"),
                "",
            ),
            "memory without a unit" => (share("{memory: \"8000\"}"), ""),
            "memory in the wrong unit" => (share("{memory: 8Mi}"), ""),
            "no memory" => (share("{cores: \"30\"}"), ""),
            "more than one GPU's time" => (share("{memory: 8Gi, cores: \"130\"}"), "exceeds 100"),
            "a fraction as cores" => (share("{memory: 8Gi, cores: \"0.3\"}"), ""),
            "no amount" => (share("{memory: \"0\"}"), "0 is not an amount"),
            "an amount below zero" => (share("{memory: 8Gi, cores: \"-5\"}"), "-5 is negative"),
            "misspelled capacity" => (share("{memory: 8Gi, mem: 8Gi}"), "no capacity \"mem\""),
            "no container has" => (
                share("{memory: 8Gi}").replace("resources: {claims: [{name: gpu}]}", ""),
                "",
            ),
            "missing claim template" => (
                pod("mistake", "resourceClaimTemplateName: nosuch"),
                "nosuch",
            ),
            unknown => bail!("no manifest for {unknown:?}"),
        },
    )
}

/// Waits until a place answers, and returns the time of the answer.
fn answered(
    cluster: &TestCluster,
    tenant: &Namespace<'_>,
    place: Place,
    text: &str,
    manifest: &std::path::Path,
) -> Result<Duration> {
    let start = Instant::now();
    let file = manifest.to_str().context("a path")?;
    let command = match place {
        Place::Explain => vec!["explain", "pod", "mistake"],
        Place::Simulate => vec!["simulate", "-f", file],
        Place::PodEvent => {
            tenant.event("mistake", text)?;
            return Ok(start.elapsed());
        }
        Place::ClaimEvent => {
            let claim = tenant.claim_of("mistake")?;
            tenant.event(&claim, text)?;
            return Ok(start.elapsed());
        }
        Place::Warning | Place::Refusal => bail!("answered by kubectl apply"),
    };
    let command = [&command[..], &["-n", tenant.name()]].concat();
    wait(&format!("{command:?} says {text:?}"), || {
        let start = Instant::now();
        let output = cluster.drava(&command)?;
        Ok(output.stdout.contains(text).then(|| start.elapsed()))
    })
}

/// Prints the times until each report, for a dated run of the page: a time depends on the load of the machine, so that none fails the
/// test.
#[test]
fn answers_mistakes_where_the_page_says() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("mistakes")?;
    let file = std::env::temp_dir().join(format!("drava-mistake-{}.yaml", std::process::id()));
    let rows = rows()?;
    ensure!(rows.len() == 16, "{} rows", rows.len());
    let mut longest = Duration::ZERO;
    for row in &rows {
        let (manifest, in_event) = manifest(row.mistake)?;
        std::fs::write(&file, &manifest)?;
        let start = Instant::now();
        let applied = tenant.apply_with_warnings(&manifest);
        let at_apply = start.elapsed();
        let is_refused = applied.is_err();
        let printed = applied.unwrap_or_else(|refusal| format!("{refusal:#}"));
        let mut times = Vec::new();
        for place in &row.places {
            let time = match place {
                Place::Warning | Place::Refusal => {
                    let is_expected = is_refused == (*place == Place::Refusal);
                    ensure!(
                        is_expected && printed.contains(row.text),
                        "{}: {printed}",
                        row.mistake
                    );
                    at_apply
                }
                Place::PodEvent | Place::ClaimEvent => {
                    answered(&cluster, &tenant, *place, in_event, &file)?
                }
                Place::Explain | Place::Simulate => {
                    answered(&cluster, &tenant, *place, row.text, &file)
                        .with_context(|| row.mistake.to_owned())?
                }
            };
            longest = longest.max(time);
            times.push(format!("{place:?} {:.2} s", time.as_secs_f64()));
        }
        eprintln!("{}: {}", row.mistake, times.join(", "));
        for object in ["pod", "resourceclaimtemplate"] {
            let ignored = ["--grace-period=1", "--ignore-not-found"];
            tenant.kubectl(&[&["delete", object, "mistake"][..], &ignored].concat())?;
        }
        tenant.kubectl(&["delete", "events", "--all"])?;
    }
    std::fs::remove_file(&file)?;
    eprintln!("longest: {:.2} s", longest.as_secs_f64());
    let sound = pod_with_share("sound", "vgpu.drava.dev", "{memory: 8Gi, cores: \"30\"}");
    let warnings = tenant.apply_with_warnings(&sound)?;
    ensure!(warnings.is_empty(), "{warnings}");
    Ok(())
}
