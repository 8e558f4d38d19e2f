//! Observations of volumes. They limit the nodes of pods whose decision is due for another reason, so they wake no pod.

use drava_api::listed::Change;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

use super::Planner;

impl Planner {
    /// Observes a PersistentVolumeClaim.
    pub fn volume_claim(&mut self, change: Change<PersistentVolumeClaim>) {
        match change {
            Change::Applied(claim) => self.world.cluster.upsert_volume_claim(&claim),
            Change::Deleted(claim) => {
                self.world
                    .cluster
                    .remove_volume_claim(&(claim.namespace, claim.name));
            }
        }
    }

    /// Observes a PersistentVolume.
    pub fn volume(&mut self, change: Change<PersistentVolume>) {
        match change {
            Change::Applied(volume) => self.world.cluster.upsert_volume(&volume),
            Change::Deleted(volume) => self.world.cluster.remove_volume(&volume.name),
        }
    }

    /// Observes a StorageClass.
    pub fn storage_class(&mut self, change: Change<StorageClass>) {
        match change {
            Change::Applied(class) => self.world.cluster.upsert_storage_class(&class),
            Change::Deleted(class) => self.world.cluster.remove_storage_class(&class.name),
        }
    }
}
