//! The exporters, as Prometheus reads them: no complaint of promtool, and the labels of a shared claim.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use drava_cluster::http;
use drava_cluster::process::{self, Limit};
use drava_e2e::exporter::DRIVER_PORT;
use drava_e2e::{TestCluster, wait};

/// Returns an OpenMetrics exposition in Prometheus' text format, which promtool checks: names of counters have their suffix
/// in descriptions too, and there are no units and no end.
fn text_format(exposition: &str) -> String {
    let kind = |line: &str| {
        let (name, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
        (kind == "counter").then(|| name.to_owned())
    };
    let counters: BTreeSet<String> = exposition.lines().filter_map(kind).collect();
    let mut text = String::new();
    for line in exposition.lines() {
        if line.starts_with("# UNIT ") || line.starts_with("# EOF") {
            continue;
        }
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", word, name, rest] if counters.contains(name) => {
                text.push_str(&format!("# {word} {name}_total {rest}\n"));
            }
            _ => text.push_str(&format!("{line}\n")),
        }
    }
    text
}

#[test]
fn promtool_accepts_the_metrics_of_each_component() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("promtool")?;
    tenant.example("shared-claim")?;
    tenant.running("team")?;
    wait("metrics of the claim", || {
        let text = cluster.metrics("driver", DRIVER_PORT)?;
        Ok(text
            .contains("drava_share_memory_limit_bytes{")
            .then_some(()))
    })?;
    let promtool = drava_cluster::promtool().context("build promtool")?;
    for (component, port) in [("driver", 9394), ("controller", 8080)] {
        let text = text_format(&cluster.metrics(component, port)?);
        ensure!(text.lines().count() > 20, "{component}: {text}");
        let mut check = Command::new(&promtool);
        check
            .args(["check", "metrics"])
            .stdin(process::input(text.as_bytes())?);
        let output = process::output(&mut check, Limit::REQUEST)?;
        ensure!(
            output.status.success(),
            "{component}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

#[test]
fn labels_name_every_container_of_a_shared_claim() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("labels")?;
    tenant.example("shared-claim")?;
    tenant.running("team")?;
    let namespace = format!("namespace=\"{}\"", tenant.name());
    // Both containers that reference the claim, and not the third one.
    for container in ["first", "second"] {
        wait(&format!("a series of container {container}"), || {
            let text = cluster.metrics("driver", DRIVER_PORT)?;
            let mut series = text.lines().filter(|line| {
                line.starts_with("drava_container_device_info{") && line.contains(&namespace)
            });
            let is_complete = |line: &str| {
                line.contains("pod=\"team\"")
                    && line.contains(&format!("container=\"{container}\""))
            };
            Ok(series.any(is_complete).then_some(()))
        })?;
    }
    let has_limit = |line: &&str| {
        line.starts_with("drava_share_memory_limit_bytes{") && line.contains(&namespace)
    };
    // The node agent measures a share some time after its preparation.
    let text = wait("the limit of the share", || {
        let text = cluster.metrics("driver", DRIVER_PORT)?;
        let is_measured = text.lines().any(|line| has_limit(&line));
        Ok(is_measured.then_some(text))
    })?;
    ensure!(!text.contains("container=\"outsider\""), "{text}");
    ensure!(
        text.lines().filter(has_limit).count() == 1,
        "the share is counted more than once:\n{text}"
    );
    tenant.delete_pods(&["team"])?;
    wait("no series of the claim", || {
        Ok((!cluster.metrics("driver", DRIVER_PORT)?.contains(&namespace)).then_some(()))
    })
}

#[test]
fn log_filter_is_set_over_a_forwarded_port() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let port = http::free_port()?;
    let mut forward = cluster.kubernetes().kubectl();
    forward.args(["-n", "drava-system", "port-forward"]);
    let ports = format!("{port}:9395");
    let mut forward = forward
        .args(["daemonset/drava-dra-driver", &ports])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .context("start kubectl port-forward")?;
    let host = format!("127.0.0.1:{port}");
    let set = || -> Result<()> {
        let before = wait("the port is forwarded", || {
            Ok(http::get(&host, "/log-filter").ok())
        })?;
        let filter = "info,drava_dra_driver=debug";
        http::put(&host, "/log-filter", filter)?;
        let shown = http::get(&host, "/log-filter")?;
        http::put(&host, "/log-filter", before.trim())?;
        let mut parts: Vec<&str> = shown.trim().split(',').collect();
        parts.sort_unstable();
        ensure!(parts == ["drava_dra_driver=debug", "info"], "{shown}");
        Ok(())
    };
    let outcome = set();
    forward.kill()?;
    forward.wait()?;
    outcome
}
