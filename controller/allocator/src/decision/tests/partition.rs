//! MIG partitions: the profile and the placement of a request.

use serde_json::json;

use super::{BINPACK, allocate};
use crate::cluster::Cluster;
use crate::fixture::{cluster, node, partitioned_slices, pod_request, request};

/// A cluster with one node of A100 40GB GPUs in MIG mode.
pub(super) fn partitioned(gpus: usize) -> Cluster {
    let mut cluster = cluster(&[]);
    cluster.upsert_node(&node("n1"));
    for slice in partitioned_slices("n1", gpus) {
        cluster.upsert_slice(&slice);
    }
    cluster
}

fn by_memory(name: &str, memory: &str) -> k8s_openapi::api::resource::v1::ResourceClaim {
    request(
        name,
        &json!({"deviceClassName": "mig.drava.dev", "capacity": {"requests": {"memory": memory}}}),
    )
}

fn take(cluster: &mut Cluster, name: &str, memory: &str) -> Result<String, String> {
    allocate(cluster, &[by_memory(name, memory)], BINPACK).map(|mut devices| devices.remove(0))
}

#[test]
fn allocates_smallest_profile_that_holds_memory() {
    for (memory, device) in [
        ("1Mi", "n1/gpu-0-mig-1g-5gb-6"),
        ("3000Mi", "n1/gpu-0-mig-1g-5gb-6"),
        ("4864Mi", "n1/gpu-0-mig-1g-5gb-6"),
        ("4865Mi", "n1/gpu-0-mig-1g-10gb-6"),
        ("12Gi", "n1/gpu-0-mig-3g-20gb-4"),
        ("20Gi", "n1/gpu-0-mig-7g-40gb-0"),
    ] {
        assert_eq!(
            take(&mut partitioned(1), "a", memory).as_deref(),
            Ok(device),
            "{memory}"
        );
    }
    assert_eq!(
        take(&mut partitioned(1), "a", "40Gi"),
        Err("0/1 nodes: 1 InsufficientMemory (requested memory 40 GiB exceeds the largest GPU, 39.2 GiB on n1/gpu-0-mig-7g-40gb-0)".to_owned())
    );
}

#[test]
fn keeps_large_placements_possible() {
    let mut cluster = partitioned(1);
    // Small partitions gather in the upper half: a partition of half the GPU still fits.
    for number in 0..3 {
        let device = take(&mut cluster, &format!("s{number}"), "3Gi").unwrap();
        let start: u32 = device.rsplit('-').next().unwrap().parse().unwrap();
        assert!((4..7).contains(&start), "{device}");
    }
    assert_eq!(
        take(&mut cluster, "large", "15Gi").as_deref(),
        Ok("n1/gpu-0-mig-3g-20gb-0")
    );
    assert_eq!(
        take(&mut cluster, "none", "3Gi"),
        Err(
            "0/1 nodes: 1 ExclusiveConflict (n1/gpu-0 has no free slices for the partition)"
                .to_owned()
        )
    );
    // A released slice is used again.
    cluster.forget(&("default".to_owned(), "s1".to_owned()));
    assert!(take(&mut cluster, "again", "3Gi").is_ok());
}

#[test]
fn fills_gpu_with_small_partitions() {
    let mut cluster = partitioned(1);
    for number in 0..7 {
        take(&mut cluster, &format!("s{number}"), "3Gi").unwrap();
    }
    assert!(take(&mut cluster, "s7", "3Gi").is_err());
}

#[test]
fn packs_partitions_onto_one_gpu() {
    let mut cluster = partitioned(2);
    let first = take(&mut cluster, "a", "3Gi").unwrap();
    let second = take(&mut cluster, "b", "3Gi").unwrap();
    assert_eq!(first[..8], second[..8], "{first} {second}");
}

#[test]
fn explains_profile_and_placement() {
    let cluster = partitioned(1);
    let pod_request = pod_request(&cluster, &[by_memory("a", "3Gi")]);
    let placement = cluster.decide(&pod_request, BINPACK).unwrap();
    assert_eq!(
        placement.reason(&placement.claims[0]),
        "node n1: only feasible node; gpu-0-mig-1g-5gb-6: only feasible GPU; smallest partition with the requested \
         capacity, 4.7 GiB; rules out 4 others"
    );
}
