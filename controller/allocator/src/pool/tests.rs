//! Sound and malformed pools.

use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::json;

use super::*;
use crate::fixture::{cluster, partitioned_slices, slices};
use crate::placement::Policies;
use crate::steps;

fn assemble(slices: &[ResourceSlice]) -> Result<Pool, String> {
    let mut shapes = Shapes::default();
    let parsed = slices.iter().map(|slice| Slice::parse(slice, &mut shapes));
    let parsed: Vec<_> = parsed.collect();
    Pool::assemble(&parsed, &mut shapes).map_err(|problem| problem.to_string())
}

#[test]
fn assembles_slices_in_published_order() {
    let pool = assemble(&slices("n1", &[80, 16])).unwrap();
    assert_eq!(pool.node, "n1");
    let names: Vec<_> = pool
        .devices
        .iter()
        .map(|device| device.name.as_ref())
        .collect();
    assert_eq!(names, ["gpu-0", "gpu-0-vgpu", "gpu-1", "gpu-1-vgpu"]);
    assert_eq!(pool.index_of("gpu-1"), Some(2));
    assert!(
        pool.devices.iter().all(|device| device.taints.is_empty()),
        "the taint of this driver is ignored"
    );
    assert_eq!(pool.devices[0].gpu, pool.devices[1].gpu);
    assert_eq!(pool.devices[1].display_name(), "gpu-0");
}

#[test]
fn ignores_old_generations() {
    let mut all = slices("n1", &[80]);
    let mut old = slices("n1", &[80, 80, 80]);
    for (index, slice) in old.iter_mut().enumerate() {
        slice.spec.pool.generation = 0;
        slice.metadata.name = Some(format!("old-{index}"));
    }
    all.extend(old);
    assert_eq!(assemble(&all).unwrap().devices.len(), 2);
}

#[test]
fn names_problem_of_slice() {
    type Change = fn(&mut Vec<ResourceSlice>);
    let cases: [(&str, Change); 8] = [
        ("generation 1 is incomplete: 1 of 2 slices", |slices| {
            slices.truncate(1)
        }),
        (
            "slice 00001-n1: spec.nodeName is n2, in other slices of the pool n1",
            |slices| {
                slices[1].spec.node_name = Some("n2".to_owned());
            },
        ),
        ("slice 00001-n1: spec.nodeName is not set", |slices| {
            slices[1].spec.node_name = None
        }),
        ("slice 00001-n1: duplicate device gpu-0", |slices| {
            let devices = slices[1].spec.devices.as_mut().unwrap();
            devices[1].name = "gpu-0".to_owned();
        }),
        ("slice 00000-n1: duplicate counter set gpu-0", |slices| {
            let sets = slices[0].spec.shared_counters.as_mut().unwrap();
            sets.push(sets[0].clone());
        }),
        (
            "slice (pool): device gpu-0 consumes unknown counter gpu-0/gpu",
            |slices| {
                let sets = slices[0].spec.shared_counters.as_mut().unwrap();
                sets[0].counters =
                    serde_json::from_value(json!({"other": {"value": "1"}})).unwrap();
            },
        ),
        (
            "slice 00001-n1: device gpu-0: capacity memory: \"lots\" is not a quantity: expected a number with an optional suffix, such as 8Gi, 500m or 1e3",
            |slices| {
                let capacity = slices[1].spec.devices.as_mut().unwrap()[0]
                    .capacity
                    .as_mut()
                    .unwrap();
                capacity.get_mut("memory").unwrap().value.0 = "lots".to_owned();
            },
        ),
        (
            "slice 00001-n1: device gpu-0: attribute type: unsupported attribute value",
            |slices| {
                let attributes = slices[1].spec.devices.as_mut().unwrap()[0]
                    .attributes
                    .as_mut()
                    .unwrap();
                attributes.get_mut("type").unwrap().string = None;
            },
        ),
    ];
    for (expected, change) in cases {
        let mut broken = slices("n1", &[80]);
        change(&mut broken);
        assert_eq!(assemble(&broken).unwrap_err(), expected);
    }
    assert!(assemble(&[]).is_err());
}

#[test]
fn equal_nodes_share_their_shapes() {
    let shapes = |nodes: usize| {
        let names: Vec<String> = (0..nodes).map(|index| format!("n{index}")).collect();
        let nodes: Vec<(&str, &[u64])> = names
            .iter()
            .map(|name| (name.as_str(), &[80, 80][..]))
            .collect();
        let mut cluster = cluster(&nodes);
        for name in &names {
            for slice in partitioned_slices(&format!("{name}-mig"), 2) {
                cluster.upsert_slice(&slice);
            }
        }
        let shapes = cluster.shapes();
        (shapes.devices.len(), shapes.layouts.len())
    };
    assert_eq!(shapes(3), shapes(6));
    assert_eq!(shapes(3).1, 2);
}

#[test]
fn selector_is_evaluated_once_for_equal_devices() {
    let evaluations = |nodes: usize| {
        let names: Vec<String> = (0..nodes).map(|index| format!("n{index}")).collect();
        let nodes: Vec<(&str, &[u64])> = names
            .iter()
            .map(|name| (name.as_str(), &[80, 80][..]))
            .collect();
        let cluster = cluster(&nodes);
        let claims = [crate::fixture::share("a", "4Gi", "0")];
        let request = crate::fixture::pod_request(&cluster, &claims);
        let policies = Policies {
            node: NodePlacementPolicy::Binpack,
            gpu: GpuPlacementPolicy::Binpack,
        };
        steps::of(|| cluster.decide(&request, policies).unwrap()).0
    };
    assert!(evaluations(4) > 0, "nothing is counted");
    assert_eq!(evaluations(4), evaluations(8));
}
