//! The chart `gpu-simulator`, and the values with which drava uses its GPUs.

use std::path::Path;

use anyhow::{Result, ensure};

use super::{Chart, DRAVA, Effect, render};

pub(super) const CHART: Chart = Chart {
    name: "gpu-simulator",
    namespace: "gpu-simulator",
    kustomize: "gpu-simulator/gpu-simulator.yaml",
    effects: &EFFECTS,
    rejected: &REJECTED,
};

const EFFECTS: [Effect; 3] = [
    Effect {
        name: "simulator machine",
        values: &["machine=b200x8", "driverRoot=/opt/gpus/root"],
        added: &[
            "--machine=/opt/gpu-simulator/machines/b200x8.yaml",
            "hostPath: {path: /opt/gpus/root, type: DirectoryOrCreate}",
        ],
        removed: &["h100x2", "/var/lib/gpu-simulator/root"],
    },
    Effect {
        name: "simulator file",
        values: &["machineFile=gpus: []"],
        added: &[
            "kind: ConfigMap",
            r#"machine.yaml: "gpus: []""#,
            "--machine=/machine/machine.yaml",
            "configMap: {name: gpu-simulator-machine}",
            "checksum/machine: ",
        ],
        removed: &["h100x2"],
    },
    Effect {
        name: "simulator pods",
        values: &[
            "image.registry=registry.example.com/mirror",
            "image.tag=dev",
            "imagePullSecrets[0].name=pull",
            "nodeSelector.pool=gpus",
            "tolerations[0].operator=Exists",
        ],
        added: &[
            "image: registry.example.com/mirror/gpu-simulator:dev",
            "- name: pull",
            "pool: gpus",
            "- operator: Exists",
        ],
        removed: &[],
    },
];

const REJECTED: [(&str, &str); 5] = [
    ("machine=h100", "'/machine'"),
    // drava mounts the parent of the driver root.
    ("driverRoot=/gpus", "'/driverRoot'"),
    ("driverRoot=/var/lib/../gpus", "'/driverRoot'"),
    ("machines=h100x2", "additional properties 'machines'"),
    (
        "image.repository=x",
        "'/image': additional properties 'repository'",
    ),
];

/// Checks that drava with the values of the chart reads the driver root of the chart, on its nodes.
pub(super) fn check_values(helm: &Path) -> Result<()> {
    let mut with_values = DRAVA.template(helm, &[]);
    with_values
        .arg("--values")
        .arg(CHART.directory().join("drava.yaml"));
    let drava = render(with_values)?;
    let simulator = render(CHART.template(helm, &[]))?;
    ensure!(
        drava.contains("--driver-root=/var/lib/gpu-simulator/root\n")
            && simulator.contains("path: /var/lib/gpu-simulator/root, "),
        "the driver roots differ"
    );
    let selector = "      nodeSelector:\n        kubernetes.io/os: linux\n";
    for (name, text) in [("drava", &drava), ("the simulator", &simulator)] {
        ensure!(text.contains(selector), "{name} selects other nodes");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use drava_cluster::workspace_root;
    use serde_json::Value;
    use simulator_machine::description::BUNDLED;

    #[test]
    fn schema_lists_machines_of_image() {
        let schema = workspace_root().join("deploy/helm/gpu-simulator/values.schema.json");
        let schema: Value =
            serde_json::from_str(&std::fs::read_to_string(schema).unwrap()).unwrap();
        let mut bundled: Vec<&str> = BUNDLED.iter().map(|(name, _)| *name).collect();
        bundled.sort_unstable();
        assert_eq!(
            schema["properties"]["machine"]["enum"],
            serde_json::json!(bundled)
        );
    }
}
