//! The fields of volumes that decide where a pod can run.

use drava_allocator::cluster::is_zone_label;
use k8s_openapi::api::core::v1::{
    EphemeralVolumeSource, PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec,
    PersistentVolumeSpec, PodSpec, Volume,
};

pub(super) fn trim_claim(claim: &mut PersistentVolumeClaim) {
    claim.metadata.annotations = None;
    claim.metadata.labels = None;
    claim.status = None;
    claim.spec = claim.spec.take().map(|spec| PersistentVolumeClaimSpec {
        volume_name: spec.volume_name,
        storage_class_name: spec.storage_class_name,
        ..PersistentVolumeClaimSpec::default()
    });
}

pub(super) fn trim_volume(volume: &mut PersistentVolume) {
    volume.metadata.annotations = None;
    if let Some(labels) = &mut volume.metadata.labels {
        labels.retain(|name, _| is_zone_label(name));
    }
    volume.status = None;
    volume.spec = volume.spec.take().map(|spec| PersistentVolumeSpec {
        node_affinity: spec.node_affinity,
        ..PersistentVolumeSpec::default()
    });
}

/// Keeps the volumes of a pod that have a claim.
pub(super) fn trim_volumes(spec: &mut PodSpec) {
    let volumes = spec.volumes.take().unwrap_or_default();
    let claimed = volumes
        .into_iter()
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
