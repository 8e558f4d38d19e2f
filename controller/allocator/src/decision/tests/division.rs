//! Shares of the time of a GPU and shares of its multiprocessors.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimStatus};
use proptest::prelude::*;
use serde_json::json;

use super::{BINPACK, SPREAD};
use crate::claim::{Ownership, classify};
use crate::cluster::Cluster;
use crate::division::Division;
use crate::explanation::Explanation;
use crate::fixture::{class, cluster, object, pod, pod_request, request, share};
use crate::pod_request::PodRequest;
use crate::usage::{AllocatedDevice, DeviceAccess};

const CLASS: &str = "spatial.example.com";

fn with_class(mut cluster: Cluster) -> Cluster {
    let mut spatial = class(
        CLASS,
        r#"device.driver == "gpu.drava.dev" && device.attributes["gpu.drava.dev"].type == "vgpu""#,
    );
    let config = json!({"apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "computePolicy": "spatial"});
    let config = json!([{"opaque": {"driver": "gpu.drava.dev", "parameters": config}}]);
    let spec = spatial.spec.as_mut();
    spec.unwrap().config = Some(object(config));
    cluster.upsert_class(spatial);
    cluster
}

fn spatial(name: &str, memory: &str) -> ResourceClaim {
    request(
        name,
        &json!({"deviceClassName": CLASS, "capacity": {"requests": {"memory": memory, "cores": "20"}}}),
    )
}

/// Status of a claim with a share, and its config by this source.
fn allocated(source: &str, policy: &str) -> ResourceClaimStatus {
    object(json!({"allocation": {"devices": {
        "results": [{"request": "gpu", "driver": "gpu.drava.dev", "pool": "n1", "device": "gpu-0-vgpu",
            "shareID": "s", "consumedCapacity": {"memory": "10Gi"}}],
        "config": [{"source": source, "requests": ["gpu"], "opaque": {"driver": "gpu.drava.dev", "parameters":
            {"apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "computePolicy": policy}}}],
    }}}))
}

/// Request of a pod in a namespace with this claim.
fn of_namespace(cluster: &Cluster, namespace: &str, claim: &ResourceClaim) -> PodRequest {
    let mut claim = claim.clone();
    claim.metadata.namespace = Some(namespace.to_owned());
    pod_request(cluster, &[claim])
}

/// Decides and assumes; returns the device.
fn allocate(
    cluster: &mut Cluster,
    namespace: &str,
    claim: &ResourceClaim,
) -> Result<String, String> {
    let request = of_namespace(cluster, namespace, claim);
    let placement = cluster.decide(&request, BINPACK);
    let placement = placement.map_err(|explanation| explanation.summary())?;
    cluster.assume(&placement);
    Ok(placement.claims[0].devices[0].device.name.to_string())
}

#[test]
fn gpu_is_divided_in_one_way_for_one_namespace() {
    let mut cluster = with_class(cluster(&[("n1", &[80, 80, 80])]));
    let first = allocate(&mut cluster, "a", &spatial("a1", "10Gi")).unwrap();
    assert_eq!(
        allocate(&mut cluster, "a", &spatial("a2", "10Gi")).unwrap(),
        first
    );
    let second = allocate(&mut cluster, "b", &spatial("b1", "10Gi")).unwrap();
    assert_ne!(second, first);
    let third = allocate(&mut cluster, "a", &share("s1", "10Gi", "20")).unwrap();
    assert!(![first, second].contains(&third), "{third}");
    let error = allocate(&mut cluster, "c", &spatial("c1", "10Gi")).unwrap_err();
    assert!(error.contains("of another namespace or class"), "{error}");
    // Room on the GPU of its namespace, and of its kind.
    allocate(&mut cluster, "b", &spatial("b2", "60Gi")).unwrap();
    allocate(&mut cluster, "c", &share("s2", "60Gi", "20")).unwrap();
}

#[test]
fn refuses_spatial_share_beside_other_devices_of_its_claim() {
    let cluster = with_class(cluster(&[("n1", &[80, 80])]));
    let several = request("c", &json!({"deviceClassName": CLASS, "count": 2}));
    let Ownership::Rejected(error) = classify(&several, &cluster.classes, &cluster.selectors)
    else {
        panic!("accepted")
    };
    assert!(
        error.to_string().contains("request one share only"),
        "{error}"
    );
}

/// A program finds the MPS daemon of one GPU. The node driver refuses such pods after they are bound.
#[test]
fn refuses_container_with_spatial_and_other_claim() {
    let cluster = with_class(cluster(&[("n1", &[80, 80])]));
    let two = [spatial("a", "1Gi"), share("b", "1Gi", "0")];
    let refused = Err(
        "IncompatibleClaims: claim default/a: the container \"main\" has the claim default/b too; beside a claim with \
         computePolicy: spatial a container has no other claim for GPUs, because its programs find the MPS daemon of one GPU only: \
         give it one of the claims"
            .to_owned(),
    );
    let refusal = |cluster: &Cluster, pod: &Pod, claims: &[ResourceClaim]| {
        let name = |claim: &ResourceClaim| claim.metadata.name.clone().unwrap_or_default();
        let names: Vec<_> = claims.iter().map(name).collect();
        let named: Vec<_> = names.iter().map(String::as_str).zip(claims).collect();
        let request = PodRequest::new(pod, &named, &cluster.classes, &cluster.selectors);
        let claims = request.map(|request| request.claims.len());
        claims.map_err(|error| Explanation::from(error).summary())
    };
    let together = pod("p", &["a", "b"]);
    assert_eq!(refusal(&cluster, &together, &two), refused);
    // One of them is allocated already, for another pod.
    for (position, policy) in [(0, "spatial"), (1, "balance")] {
        let mut claims = two.clone();
        claims[position].status = Some(allocated("FromClass", policy));
        assert_eq!(refusal(&cluster, &together, &claims), refused, "{position}");
    }
    // Any two spatial ones, too, and in whatever order.
    let both = [spatial("a", "1Gi"), spatial("b", "1Gi")];
    assert_eq!(refusal(&cluster, &together, &both), refused);
    let turned = [share("b", "1Gi", "0"), spatial("a", "1Gi")];
    assert_eq!(refusal(&cluster, &together, &turned), refused);
    // A container for each claim, and the same claim under two names.
    let mut apart = together.clone();
    let containers = &mut apart.spec.as_mut().unwrap().containers;
    let mut second = containers[0].clone();
    "second".clone_into(&mut second.name);
    for (container, claim) in [(&mut containers[0], 0), (&mut second, 1)] {
        let claims = container
            .resources
            .as_mut()
            .unwrap()
            .claims
            .as_mut()
            .unwrap();
        *claims = vec![claims[claim].clone()];
    }
    containers.push(second);
    assert_eq!(refusal(&cluster, &apart, &two), Ok(2));
    let request = PodRequest::new(
        &pod("p", &["one", "two"]),
        &[("one", &two[0]), ("two", &two[0])],
        &cluster.classes,
        &cluster.selectors,
    );
    assert_eq!(request.unwrap().claims.len(), 1);
    // Two that take turns.
    let shares = [share("a", "1Gi", "0"), share("b", "1Gi", "0")];
    assert_eq!(refusal(&cluster, &together, &shares), Ok(2));
}

/// The allocation has the config of the class, also where a class has changed since.
#[test]
fn allocated_share_is_divided_as_its_allocation_says() {
    let division = |source: &str| {
        let mut claim = spatial("c", "10Gi");
        claim.status = Some(allocated(source, "spatial"));
        match &AllocatedDevice::of_claim(&claim)[0].access {
            DeviceAccess::Share(_, division) => division.clone(),
            access => panic!("{access:?}"),
        }
    };
    assert_eq!(
        division("FromClass"),
        Division::Multiprocessors("default".into())
    );
    // No claim can choose it.
    assert_eq!(division("FromClaim"), Division::Time);
}

proptest! {
    /// Whatever comes and goes, in whatever order.
    #[test]
    fn no_gpu_has_mixed_divisions(steps in prop::collection::vec((0..4_u8, 1..40_u64, any::<bool>()), 1..40)) {
        let mut cluster = with_class(cluster(&[("n1", &[80, 80]), ("n2", &[80])]));
        let mut held: Vec<Vec<(AllocatedDevice, Division)>> = Vec::new();
        for (position, (kind, gib, spreads)) in steps.into_iter().enumerate() {
            if kind == 3 && !held.is_empty() {
                let released = held.remove(position % held.len());
                let claim = &released[0].0.claim;
                cluster.forget(&(claim.namespace.clone(), claim.name.clone()));
                continue;
            }
            let (name, memory) = (format!("c{position}"), format!("{gib}Gi"));
            let claim = match kind {
                0 => share(&name, &memory, "10"),
                _ => spatial(&name, &memory),
            };
            let namespace = if kind == 1 { "a" } else { "b" };
            let request = of_namespace(&cluster, namespace, &claim);
            let Ok(placement) = cluster.decide(&request, if spreads { SPREAD } else { BINPACK }) else {
                continue;
            };
            cluster.assume(&placement);
            let wanted = match kind {
                0 => Division::Time,
                _ => Division::Multiprocessors(namespace.into()),
            };
            let devices = placement.claims[0].allocated_devices();
            held.push(devices.into_iter().map(|device| (device, wanted.clone())).collect());
            let all: Vec<_> = held.iter().flatten().collect();
            for (device, division) in &all {
                for (other, others) in &all {
                    let same = (&device.pool, &device.device) == (&other.pool, &other.device);
                    prop_assert!(!same || division == others, "{device:?} {other:?}");
                }
            }
        }
    }
}
