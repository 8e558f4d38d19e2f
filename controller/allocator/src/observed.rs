//! One way in: which fields of an object decisions read, and what it adds to the [`Cluster`].
//!
//! Watches, snapshots, dumps and the console feed the cluster through [`Observed`], so that all of them decide alike.

use drava_api::listed::Unreadable;
use drava_api::names::{GANG_ANNOTATION, GANG_MIN_ANNOTATION, VOLCANO_GROUP_ANNOTATION};
use drava_api::policy::GpuPolicy;
use drava_api::quota::GpuQuota;
use k8s_openapi::api::core::v1::{
    Container, ContainerStatus, EphemeralVolumeSource, Namespace, Node, NodeStatus,
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec, PersistentVolumeSpec, Pod,
    PodSpec, PodStatus, Probe, Volume,
};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use k8s_openapi::api::resource::v1beta2;
use k8s_openapi::api::storage::v1::StorageClass;

use crate::cluster::{Cluster, is_zone_label};
use crate::object::ObjectKey;
use crate::taint::rule_from_v1beta2;

/// Annotation of kubectl, which repeats the object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// A kind of objects that decisions depend on.
pub trait Observed: Sized {
    /// Removes the fields that no decision reads: they cost memory, and some hold secrets.
    fn trim(&mut self) {}

    /// Adds the object to the cluster, or replaces its last version.
    fn apply(&self, cluster: &mut Cluster);

    /// Removes the object with this key and UID.
    fn remove(cluster: &mut Cluster, key: &ObjectKey, uid: &str);

    /// Applies a version that this build cannot read: the last one that could be read stays.
    fn apply_unreadable(_object: &Unreadable, _cluster: &mut Cluster) {}
}

impl Observed for Pod {
    fn trim(&mut self) {
        if let Some(annotations) = self.metadata.annotations.as_mut() {
            let read = [
                GANG_ANNOTATION,
                GANG_MIN_ANNOTATION,
                VOLCANO_GROUP_ANNOTATION,
            ];
            annotations.retain(|name, _| read.contains(&name.as_str()));
        }
        let annotations = self.metadata.annotations.take();
        self.metadata.annotations = annotations.filter(|all| !all.is_empty());
        if let Some(spec) = self.spec.as_mut() {
            trim_volumes(spec);
            spec.ephemeral_containers = None;
            let init = spec.init_containers.iter_mut().flatten();
            init.chain(&mut spec.containers).for_each(trim_container);
        }
        if let Some(status) = self.status.as_mut() {
            trim_pod_status(status);
        }
    }

    fn apply(&self, cluster: &mut Cluster) {
        cluster.upsert_pod(self);
    }

    fn remove(cluster: &mut Cluster, _key: &ObjectKey, uid: &str) {
        cluster.remove_pod(uid);
    }
}

impl Observed for ResourceClaim {
    fn trim(&mut self) {
        if let Some(annotations) = self.metadata.annotations.as_mut() {
            annotations.remove(LAST_APPLIED);
        }
        let Some(status) = self.status.as_mut() else {
            return;
        };
        for device in status.devices.iter_mut().flatten() {
            device.data = None;
            device.network_data = None;
        }
        shrink(&mut status.devices);
        shrink(&mut status.reserved_for);
        let allocation = status.allocation.as_mut();
        if let Some(devices) = allocation.and_then(|allocation| allocation.devices.as_mut()) {
            shrink(&mut devices.config);
            shrink(&mut devices.results);
        }
        let spec = self.spec.as_mut();
        if let Some(devices) = spec.and_then(|spec| spec.devices.as_mut()) {
            shrink(&mut devices.requests);
        }
    }

    fn apply(&self, cluster: &mut Cluster) {
        cluster.upsert_claim(self);
    }

    fn remove(cluster: &mut Cluster, key: &ObjectKey, _uid: &str) {
        cluster.remove_claim(key);
    }

    /// The devices of the claim count as taken.
    fn apply_unreadable(object: &Unreadable, cluster: &mut Cluster) {
        cluster.upsert_unreadable_claim(object);
    }
}

impl Observed for Node {
    fn trim(&mut self) {
        self.metadata.annotations = None;
        self.status = self.status.take().map(|status| NodeStatus {
            allocatable: status.allocatable,
            conditions: status.conditions,
            ..NodeStatus::default()
        });
    }

    fn apply(&self, cluster: &mut Cluster) {
        cluster.upsert_node(self);
    }

    fn remove(cluster: &mut Cluster, (_, name): &ObjectKey, _uid: &str) {
        cluster.remove_node(name);
    }
}

impl Observed for Namespace {
    fn trim(&mut self) {
        self.metadata.annotations = None;
    }

    fn apply(&self, cluster: &mut Cluster) {
        cluster.upsert_namespace(self);
    }

    fn remove(cluster: &mut Cluster, (_, name): &ObjectKey, _uid: &str) {
        cluster.remove_namespace(name);
    }
}

impl Observed for PersistentVolumeClaim {
    fn trim(&mut self) {
        self.metadata.annotations = None;
        self.metadata.labels = None;
        self.status = None;
        self.spec = self.spec.take().map(|spec| PersistentVolumeClaimSpec {
            volume_name: spec.volume_name,
            storage_class_name: spec.storage_class_name,
            ..PersistentVolumeClaimSpec::default()
        });
    }

    fn apply(&self, cluster: &mut Cluster) {
        cluster.upsert_volume_claim(self);
    }

    fn remove(cluster: &mut Cluster, key: &ObjectKey, _uid: &str) {
        cluster.remove_volume_claim(key);
    }
}

impl Observed for PersistentVolume {
    fn trim(&mut self) {
        self.metadata.annotations = None;
        if let Some(labels) = &mut self.metadata.labels {
            labels.retain(|name, _| is_zone_label(name));
        }
        self.status = None;
        self.spec = self.spec.take().map(|spec| PersistentVolumeSpec {
            node_affinity: spec.node_affinity,
            ..PersistentVolumeSpec::default()
        });
    }

    fn apply(&self, cluster: &mut Cluster) {
        cluster.upsert_volume(self);
    }

    fn remove(cluster: &mut Cluster, (_, name): &ObjectKey, _uid: &str) {
        cluster.remove_volume(name);
    }
}

/// Implements [`Observed`] for cluster-scoped kinds of which all fields are kept.
macro_rules! observed {
    ($($kind:ty: $apply:expr, $remove:ident;)*) => {
        $(impl Observed for $kind {
            fn apply(&self, cluster: &mut Cluster) {
                let apply: fn(&mut Cluster, &Self) = $apply;
                apply(cluster, self);
            }

            fn remove(cluster: &mut Cluster, (_, name): &ObjectKey, _uid: &str) {
                cluster.$remove(name);
            }
        })*
    };
}

observed! {
    ResourceSlice: |cluster, slice| { cluster.upsert_slice(slice); }, remove_slice;
    DeviceClass: |cluster, class| { cluster.upsert_class(class.clone()); }, remove_class;
    DeviceTaintRule: |cluster, rule| { cluster.upsert_taint_rule(rule); }, remove_taint_rule;
    v1beta2::DeviceTaintRule:
        |cluster, rule| { cluster.upsert_taint_rule(&rule_from_v1beta2(rule.clone())); },
        remove_taint_rule;
    GpuQuota: |cluster, quota| { cluster.upsert_quota(quota); }, remove_quota;
    GpuPolicy: |cluster, policy| { cluster.upsert_policy(policy); }, remove_policy;
    StorageClass: |cluster, class| cluster.upsert_storage_class(class), remove_storage_class;
}

/// Frees what a list does not use: one that was read element by element has room for four.
fn shrink<T>(list: &mut Option<Vec<T>>) {
    if let Some(list) = list {
        list.shrink_to_fit();
    }
}

/// Keeps the volumes of a pod that have a claim.
fn trim_volumes(spec: &mut PodSpec) {
    let volumes = spec.volumes.take().unwrap_or_default().into_iter();
    let claimed = volumes
        .filter(|volume| volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some());
    let reduced = claimed.map(|volume| Volume {
        name: volume.name,
        persistent_volume_claim: volume.persistent_volume_claim,
        ephemeral: volume.ephemeral.map(|_| EphemeralVolumeSource::default()),
        ..Volume::default()
    });
    let kept: Vec<Volume> = reduced.collect();
    spec.volumes = (!kept.is_empty()).then_some(kept);
}

fn trim_container(container: &mut Container) {
    let ports = container.ports.take();
    let ports = ports.map(|mut ports| {
        ports.retain(|port| port.host_port.is_some());
        ports
    });
    *container = Container {
        name: std::mem::take(&mut container.name),
        ports: ports.filter(|ports| !ports.is_empty()),
        resources: container.resources.take(),
        restart_policy: container.restart_policy.take(),
        // Whether there is one decides whether the pod can be suspended.
        liveness_probe: container.liveness_probe.take().map(|_| Probe::default()),
        startup_probe: container.startup_probe.take().map(|_| Probe::default()),
        ..Container::default()
    };
}

fn trim_pod_status(status: &mut PodStatus) {
    // What the containers have, where kubelet does not report the sums of the pod.
    let has_sums = status.allocated_resources.is_some() && status.resources.is_some();
    for statuses in [
        &mut status.container_statuses,
        &mut status.init_container_statuses,
    ] {
        if has_sums || statuses.as_ref().is_some_and(Vec::is_empty) {
            *statuses = None;
        }
        for status in statuses.iter_mut().flatten() {
            *status = ContainerStatus {
                name: std::mem::take(&mut status.name),
                allocated_resources: status.allocated_resources.take(),
                resources: status.resources.take(),
                ..ContainerStatus::default()
            };
        }
    }
    status.ephemeral_container_statuses = None;
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    fn trimmed<K: Observed + DeserializeOwned>(object: Value) -> K {
        let mut object: K = serde_json::from_value(object).unwrap();
        object.trim();
        object
    }

    #[test]
    fn drops_unneeded_pod_fields() {
        let pod: Pod = trimmed(json!({
            "metadata": {"name": "p", "annotations": {"a": "b", "gpu.drava.dev/gang": "g"}},
            "spec": {
                "volumes": [{"name": "v"}],
                "containers": [{"name": "c", "image": "i", "env": [{"name": "E"}], "resources": {"requests": {"cpu": "1"}}}],
            },
            "status": {"phase": "Pending", "containerStatuses": []},
        }));
        assert_eq!(
            serde_json::to_value(&pod).unwrap(),
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": "p", "annotations": {"gpu.drava.dev/gang": "g"}},
                "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]},
                "status": {"phase": "Pending"},
            })
        );
    }

    #[test]
    fn drops_unneeded_claim_fields() {
        let claim: ResourceClaim = trimmed(json!({
            "metadata": {"name": "c", "annotations": {"a": "b", "kubectl.kubernetes.io/last-applied-configuration": "{}"}},
            "spec": {"devices": {"requests": [{"name": "gpu"}]}},
            "status": {"devices": [{
                "driver": "gpu.drava.dev", "pool": "p", "device": "d", "data": {"key": "value"}, "conditions": [],
            }]},
        }));
        assert_eq!(
            serde_json::to_value(&claim).unwrap(),
            json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
                "metadata": {"name": "c", "annotations": {"a": "b"}},
                "spec": {"devices": {"requests": [{"name": "gpu"}]}},
                "status": {"devices": [{"driver": "gpu.drava.dev", "pool": "p", "device": "d", "conditions": []}]},
            })
        );
    }

    #[test]
    fn keeps_what_decides_about_volumes_and_resizes() {
        let volume: PersistentVolume = trimmed(json!({
            "metadata": {"name": "v", "labels": {"topology.kubernetes.io/zone": "a", "app": "b"}},
        }));
        let labels = volume.metadata.labels.unwrap().into_keys();
        assert_eq!(labels.collect::<Vec<_>>(), ["topology.kubernetes.io/zone"]);
        let amounts = json!({"cpu": "1"});
        let containers = json!([{
            "name": "c", "image": "i", "imageID": "i", "ready": true, "restartCount": 7,
            "allocatedResources": amounts, "resources": {"requests": amounts},
        }]);
        let pod = |status: Value| -> PodStatus {
            let pod: Pod = trimmed(json!({"metadata": {"name": "p"}, "status": status}));
            pod.status.unwrap()
        };
        let status = pod(json!({"containerStatuses": containers}));
        let kept = &status.container_statuses.unwrap()[0];
        assert_eq!((kept.name.as_str(), kept.restart_count), ("c", 0));
        assert!(kept.allocated_resources.is_some() && kept.resources.is_some());
        let sums = pod(json!({
            "containerStatuses": containers, "allocatedResources": amounts, "resources": {"requests": amounts},
        }));
        assert_eq!(sums.container_statuses, None, "the sums of the pod suffice");
    }
}
