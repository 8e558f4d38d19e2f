//! `kubectl drava node`: the GPUs of one node, also as the extended resources of device plugins.
//!
//! Under DRA the allocatable resources of a Node have no GPUs; these amounts are read from the ResourceSlices and claims.

use anyhow::ensure;
use serde::Serialize;

use crate::top::{self, Gpu, Mode};
use drava_explanation::snapshot::Snapshot;
use drava_explanation::table;

/// Amounts of a node as the extended resources of device plugins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Classic {
    resources: Vec<Resource>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Resource {
    name: &'static str,
    allocatable: u64,
    allocated: u64,
}

/// Returns the GPUs of a node.
///
/// # Errors
/// If the node publishes no device of drava.
pub(crate) fn gpus(snapshot: &Snapshot, node: &str) -> anyhow::Result<Vec<Gpu>> {
    let mut gpus = top::gpus(snapshot);
    gpus.retain(|gpu| gpu.node == node);
    ensure!(
        !gpus.is_empty(),
        "node {node}: no devices are published; run kubectl drava doctor"
    );
    Ok(gpus)
}

/// Adds up the GPUs. A whole GPU takes all slots of its GPU.
pub(crate) fn classic(gpus: &[Gpu]) -> Classic {
    let resource = |name, amounts: &dyn Fn(&Gpu) -> (u64, u64)| {
        gpus.iter().map(amounts).fold(
            Resource {
                name,
                allocatable: 0,
                allocated: 0,
            },
            |sum, (allocatable, allocated)| Resource {
                name,
                allocatable: sum.allocatable + allocatable,
                allocated: sum.allocated + allocated,
            },
        )
    };
    let slots = |gpu: &Gpu| match gpu.mode {
        Mode::Whole => (gpu.slots.total, gpu.slots.total),
        Mode::Free | Mode::Shared | Mode::Partitioned => (gpu.slots.total, gpu.slots.allocated),
    };
    // Device plugins count the memory that nvidia-smi shows; a whole GPU has all of it.
    let memory = |gpu: &Gpu| {
        let reserved = gpu.reserved_bytes;
        let allocated = match gpu.mode {
            Mode::Whole => gpu.memory.allocated + reserved,
            Mode::Free | Mode::Shared | Mode::Partitioned => gpu.memory.allocated,
        };
        ((gpu.memory.total + reserved) >> 20, allocated >> 20)
    };
    let cores = |gpu: &Gpu| (gpu.cores.total, gpu.cores.allocated);
    let whole = |gpu: &Gpu| (1, u64::from(gpu.mode == Mode::Whole));
    Classic {
        resources: vec![
            resource("volcano.sh/vgpu-number", &slots),
            resource("volcano.sh/vgpu-memory", &memory),
            resource("volcano.sh/vgpu-cores", &cores),
            resource("nvidia.com/gpu", &whole),
        ],
    }
}

impl Classic {
    pub(crate) fn text(&self) -> String {
        let rows = self.resources.iter().map(|resource| {
            vec![
                resource.name.to_owned(),
                resource.allocatable.to_string(),
                resource.allocated.to_string(),
            ]
        });
        table(&["RESOURCE", "ALLOCATABLE", "ALLOCATED"], rows.collect())
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::resource::v1::ResourceSlice;
    use serde_json::{Value, json};

    use super::*;
    use drava_explanation::fixture::snapshot;

    #[test]
    fn adds_up_eight_gpus_of_ten_slots() {
        let devices: Vec<Value> = (0..8)
            .flat_map(|minor| {
                let attributes = |kind: &str| {
                    json!({
                        "type": {"string": kind}, "uuid": {"string": format!("GPU-{minor}")},
                        "memoryMib": {"int": 24564},
                    })
                };
                // nvidia-smi shows 24564 MiB, of which the NVIDIA driver reserves 420.
                let memory = json!({"value": "24144Mi"});
                [
                    json!({
                        "name": format!("gpu-{minor}"), "attributes": attributes("gpu"),
                        "capacity": {"memory": memory, "cores": {"value": "100"}},
                    }),
                    json!({
                        "name": format!("gpu-{minor}-vgpu"), "attributes": attributes("vgpu"),
                        "allowMultipleAllocations": true,
                        "capacity": {"memory": memory, "cores": {"value": "100"}, "slots": {"value": "10"}},
                    }),
                ]
            })
            .collect();
        let slice: ResourceSlice = serde_json::from_value(json!({
            "metadata": {"name": "s"},
            "spec": {
                "driver": "gpu.drava.dev", "nodeName": "n", "devices": devices,
                "pool": {"name": "n/gpus", "generation": 1, "resourceSliceCount": 1},
            },
        }))
        .expect("a slice");
        let snapshot = Snapshot::new(&[], &[slice], &[], &[], Vec::new(), Vec::new());
        assert_eq!(
            classic(&gpus(&snapshot, "n").expect("the node")).text(),
            "\
RESOURCE                 ALLOCATABLE   ALLOCATED
volcano.sh/vgpu-number   80            0
volcano.sh/vgpu-memory   196512        0
volcano.sh/vgpu-cores    800           0
nvidia.com/gpu           8             0
"
        );
    }

    #[test]
    fn counts_shares_and_whole_gpus() {
        assert_eq!(
            classic(&gpus(&snapshot(), "n1").expect("the node")).text(),
            "\
RESOURCE                 ALLOCATABLE   ALLOCATED
volcano.sh/vgpu-number   20            12
volcano.sh/vgpu-memory   163840        106496
volcano.sh/vgpu-cores    200           130
nvidia.com/gpu           2             1
"
        );
    }

    #[test]
    fn names_node_without_devices() {
        let error = gpus(&snapshot(), "other").expect_err("no devices");
        assert_eq!(
            error.to_string(),
            "node other: no devices are published; run kubectl drava doctor"
        );
    }
}
