//! `kubectl drava doctor`: faults of nodes, of the API server and of certificates, each injected, found with its fix, fixed,
//! and green again.

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use drava_e2e::doctor::{finds, patch, remove_rule};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{TestCluster, wait};
use serde_json::json;

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/helm/drava");
const NODE: &str = "node-0";
const SYSTEM: &str = "drava-system";
const DRIVER: &str = "app.kubernetes.io/component=driver";

/// Runs shell commands on the node.
fn on_node(cluster: &TestCluster, script: &str) -> Result<()> {
    cluster.on_node("sh", &["-ec", script]).map(drop)
}

#[test]
fn finds_missing_node_of_unified_memory() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("uvm")?;
    finds(
        &cluster,
        &["UvmMissing"],
        ("pod e2e-uvm/waits", "nvidia-modprobe -u -c 0"),
        || {
            on_node(
                &cluster,
                "mv /opt/drava-sim/dev/nvidia-uvm /opt/drava-sim/dev/moved",
            )?;
            tenant.apply(&pod_with_share("waits", "vgpu.drava.dev", "{memory: 1Gi}"))
        },
        || {
            on_node(
                &cluster,
                "mv /opt/drava-sim/dev/moved /opt/drava-sim/dev/nvidia-uvm",
            )?;
            tenant.running("waits")
        },
    )
}

#[test]
fn finds_records_of_newer_driver() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let file = "/var/lib/drava/claims/11111111-1111-4111-8111-111111111111.json";
    // Header of a record in format version 99, after its CRC-32.
    let header = r#"935bc135 {"version":99,"gpus":[],"crc32":"00000000"}"#;
    finds(
        &cluster,
        &["RecordsNewer"],
        (
            "node node-0",
            "run the version of drava that wrote the records",
        ),
        || {
            on_node(
                &cluster,
                &format!("printf '%s\\n{{}}\\n' '{header}' > {file}"),
            )
        },
        || on_node(&cluster, &format!("rm {file}")),
    )
}

/// Right after the test of newer records: their report must not explain this fault.
#[test]
fn finds_wrong_driver_root() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let set_root = |root: &str| {
        let value = format!("driver.driverRoot={root}");
        let upgrade = ["-n", SYSTEM, "upgrade", "drava", CHART, "--reuse-values"];
        let set = ["--force-conflicts", "--set", &value];
        cluster.helm(upgrade.iter().chain(&set)).map(drop)
    };
    on_node(&cluster, "mkdir -p /opt/empty/usr/lib")?;
    finds(
        &cluster,
        &["DriverRootWrong"],
        ("node node-0", "set driver.driverRoot"),
        || {
            set_root("/opt/empty")?;
            // The working pod serves until the new one can; after a reboot of the node it would be gone.
            cluster.kubectl(["-n", SYSTEM, "delete", "pod", "-l", DRIVER])?;
            Ok(())
        },
        || {
            set_root("/opt/drava-sim")?;
            cluster.drava_ready()
        },
    )
}

#[test]
fn finds_killed_driver_by_its_socket() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("stale")?;
    let taint = |taint: &str| cluster.kubectl(["taint", "node", NODE, taint]).map(drop);
    finds(
        &cluster,
        &["StaleSocket", "DriverPodMissing"],
        ("pod e2e-stale/waits", "restart the node driver"),
        || {
            // A stopped process accepts connections, and does not remove its sockets when it is killed.
            ensure!(cluster.first_node().signal("drava-dra-driver", "STOP")? > 0);
            tenant.apply(&pod_with_share("waits", "vgpu.drava.dev", "{memory: 1Gi}"))?;
            wait("the pod is bound to the node", || {
                let pod = tenant.find("pod", "waits")?.context("pod")?;
                Ok((pod["spec"]["nodeName"] == NODE).then_some(()))
            })?;
            taint("example.com/reserved=:NoSchedule")?;
            let delete = ["-n", SYSTEM, "delete", "pod", "--grace-period=1"];
            cluster.kubectl(delete.iter().chain(&["-l", DRIVER]))?;
            Ok(())
        },
        || {
            taint("example.com/reserved-")?;
            cluster.drava_ready()?;
            tenant.running("waits")
        },
    )
}

#[test]
fn support_dump_has_state_of_drava_alone() -> Result<()> {
    let cluster = TestCluster::attach()?;
    cluster.wait_for_faults(&[])?;
    let tenant = cluster.namespace("dump")?;
    let container = "    command: [sleep, infinity]\n";
    let env = "    env: [{name: PASSWORD, value: of-the-pod}]\n";
    let pod = pod_with_share("secretive", "vgpu.drava.dev", "{memory: 1Gi}");
    tenant.apply(&pod.replacen(container, &format!("{container}{env}"), 1))?;
    for kind in [&["secret", "generic"][..], &["configmap"]] {
        let literal = ["of-the-tenant", "--from-literal=key=of-the-tenants-object"];
        tenant.kubectl(&[&["create"], kind, &literal].concat())?;
    }
    tenant.running("secretive")?;
    let claim = tenant.claim_of("secretive")?;
    let dump = cluster.drava(&["dump", "--support"])?;
    ensure!(dump.code == 0, "{dump:?}");
    let text = dump.success()?;
    let dump: serde_json::Value = serde_json::from_str(&text)?;
    let has = |list: &str, name: &str| {
        let items = dump[list].as_array().into_iter().flatten();
        items
            .filter_map(|item| item["metadata"]["name"].as_str())
            .any(|one| one.starts_with(name))
    };
    for (list, name) in [
        ("nodes", NODE),
        ("resourceSlices", NODE),
        ("deviceClasses", "vgpu.drava.dev"),
        ("resourceClaims", &claim),
        ("daemonSets", "drava-dra-driver"),
        ("deployments", "drava-controller"),
        ("pods", "drava-dra-driver-"),
        ("pods", "drava-controller-"),
        ("leases", "drava-controller"),
        ("admissionPolicies", "drava-"),
        ("admissionPolicyBindings", "drava-"),
    ] {
        ensure!(has(list, name), "{list} have no {name}");
    }
    ensure!(dump["diagnosis"]["findings"] == json!([]), "{dump}");
    ensure!(!has("pods", "secretive"), "pods of tenants");
    for secret in [
        "of-the-pod",
        "of-the-tenant",
        "managedFields",
        "PRIVATE KEY",
    ] {
        ensure!(!text.contains(secret), "{secret} is in the dump");
    }
    Ok(())
}

#[test]
fn finds_old_kubelet() -> Result<()> {
    let cluster = TestCluster::attach()?;
    cluster.wait_for_faults(&[])?;
    let found = wait("doctor finds the kubelet", || {
        // As an old kubelet reports itself; this one corrects it within 10 s.
        let status = json!({"status": {"nodeInfo": {"kubeletVersion": "v1.33.4"}}});
        patch(
            &cluster,
            &["node", NODE, "--subresource=status"],
            "merge",
            &status,
        )?;
        let output = cluster.drava(&["doctor"])?;
        Ok((output.code == 1).then_some(output.stdout))
    })?;
    ensure!(
        found.starts_with("node node-0: kubelet v1.33.4 is older than 1.34")
            && found.contains("; upgrade the kubelet")
            && found
                .lines()
                .filter(|line| !line.starts_with("note: "))
                .count()
                == 1,
        "{found}"
    );
    // kubelet reports its version when its status changes, or after five minutes.
    cluster
        .kubernetes()
        .control_plane()
        .restart(drava_cluster::Component::Kubelet)?;
    cluster.wait_for_faults(&[])?;
    Ok(())
}

#[test]
fn finds_expired_certificate() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let mut params = rcgen::CertificateParams::new(vec!["drava".to_owned()])?;
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2021, 1, 1);
    let expired = params.self_signed(&rcgen::KeyPair::generate()?)?.pem();
    let role = cluster.get(&["clusterrole", "drava-controller"])?;
    finds(
        &cluster,
        &["WebhookUntrusted", "PermissionMissing"],
        ("mutatingwebhookconfiguration drava-webhook", "kubectl logs"),
        || {
            // The controller would write the certificate again.
            remove_rule(&cluster, "mutatingwebhookconfigurations")?;
            let configuration = cluster.get(&["mutatingwebhookconfiguration", "drava-webhook"])?;
            let webhooks = configuration["webhooks"].as_array().context("webhooks")?;
            let replace = |index| {
                let path = format!("/webhooks/{index}/clientConfig/caBundle");
                json!({"op": "replace", "path": path, "value": BASE64.encode(&expired)})
            };
            let operations: Vec<_> = (0..webhooks.len()).map(replace).collect();
            let object = ["mutatingwebhookconfiguration", "drava-webhook"];
            patch(&cluster, &object, "json", &json!(operations))
        },
        || {
            let rules = json!({"rules": role["rules"]});
            patch(
                &cluster,
                &["clusterrole", "drava-controller"],
                "merge",
                &rules,
            )
        },
    )
}

#[test]
fn finds_nvidia_as_default_runtime_in_both_generations() -> Result<()> {
    let cluster = TestCluster::attach()?;
    for plugin in ["io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"] {
        let config =
            format!("[plugins.\"{plugin}\".containerd]\ndefault_runtime_name = \"nvidia\"\n");
        finds(
            &cluster,
            &["NvidiaDefaultRuntime"],
            ("node node-0", "set default_runtime_name = \"runc\""),
            || {
                let write = format!(
                    "mkdir -p /etc/containerd; printf '%s' '{config}' > /etc/containerd/config.toml"
                );
                on_node(&cluster, &write)
            },
            || on_node(&cluster, "rm /etc/containerd/config.toml"),
        )?;
    }
    Ok(())
}

#[test]
fn finds_cdi_off() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let config = "[plugins.\"io.containerd.cri.v1.runtime\"]\nenable_cdi = false\n";
    finds(
        &cluster,
        &["CdiOff"],
        ("node node-0", "set enable_cdi = true"),
        || {
            let write = format!(
                "mkdir -p /etc/containerd; printf '%s' '{config}' > /etc/containerd/config.toml"
            );
            on_node(&cluster, &write)
        },
        || on_node(&cluster, "rm /etc/containerd/config.toml"),
    )
}

/// A slice as an API server without the feature gates stores it: without counters, sharing and taints.
#[test]
fn finds_feature_gates_off() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("gates")?;
    let slice = "
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: without-gates}
spec:
  driver: gpu.drava.dev
  nodeName: without-gates
  pool: {name: without-gates/gpus, generation: 1, resourceSliceCount: 1}
  devices:
  - name: gpu-0-vgpu
    attributes: {type: {string: vgpu}, uuid: {string: GPU-00000000-0000-0000-0000-000000000000}}
    capacity: {memory: {value: 1Gi}}
";
    for gate in [
        "DRAConsumableCapacity=true",
        "DRAPartitionableDevices=true",
        "DRADeviceTaints=true",
    ] {
        finds(
            &cluster,
            &["FieldsDropped"],
            ("API server", &format!("--feature-gates={gate}")),
            || tenant.apply(slice),
            || {
                let delete = ["delete", "resourceslice", "without-gates"];
                cluster.kubectl(delete).map(drop)
            },
        )?;
    }
    Ok(())
}
