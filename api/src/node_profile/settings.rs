//! Settings of each GPU of a node, from the profiles. Pure.

use std::collections::{BTreeMap, BTreeSet};

use kube_core::ResourceExt as _;

use super::{
    DeviceOverride, Exclude, GpuNodeProfile, MigOffer, Mode, Offer, Oversubscription,
    PinnedPartition, Scaling, ShareDefaults, XidOverrides,
};
use crate::config::{MemoryPolicy, Settings};

/// Maximum number of shares of a GPU without a profile.
pub const DEFAULT_SPLIT_COUNT: u32 = 10;

/// Properties of a GPU that a profile can select.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuIdentity<'a> {
    /// UUID.
    pub uuid: &'a str,
    /// NVML index.
    pub index: u32,
    /// Product name.
    pub product_name: &'a str,
}

/// Settings of the GPUs of one node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeSettings {
    /// The profile that applies; `None` when no profile selects the node.
    pub profile: Option<ProfileVersion>,
    /// Other profiles that select the node, by name. They have no effect on the node.
    pub overridden: Vec<ProfileVersion>,
    /// Settings by UUID of the GPU. Other GPUs have the default settings.
    pub gpus: BTreeMap<String, GpuSettings>,
}

/// One version of a profile.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProfileVersion {
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
    /// `metadata.generation`.
    pub generation: i64,
}

/// Settings of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuSettings {
    /// Whether the GPU is not published.
    pub is_excluded: bool,
    /// Devices that the GPU is published as.
    pub mode: Mode,
    /// Memory of all shares.
    pub memory_scaling: Scaling,
    /// Policy of an oversubscribed GPU.
    pub oversubscription: Option<Oversubscription>,
    /// GPU time of all shares.
    pub core_scaling: Scaling,
    /// Maximum number of shares.
    pub split_count: u32,
    /// Percent of GPU time of a share that requests none.
    pub default_cores: u8,
    /// Options of shares that neither device class nor claim sets.
    pub defaults: ShareDefaults,
    /// Names of the published MIG profiles; `None` for all.
    pub mig_profiles: Option<BTreeSet<String>>,
    /// The published partitions; `None` for all placements.
    pub mig_layout: Option<BTreeSet<PinnedPartition>>,
    /// XIDs with another effect on the health.
    pub xids: XidOverrides,
    /// Host memory of all suspended shares of the node, bytes; `None`: no limit.
    pub suspend_host_memory: Option<u64>,
}

impl Default for GpuSettings {
    fn default() -> Self {
        Self {
            is_excluded: false,
            mode: Mode::default(),
            memory_scaling: Scaling::ONE,
            oversubscription: None,
            core_scaling: Scaling::ONE,
            split_count: DEFAULT_SPLIT_COUNT,
            default_cores: 0,
            defaults: ShareDefaults::default(),
            mig_profiles: None,
            mig_layout: None,
            xids: XidOverrides::default(),
            suspend_host_memory: None,
        }
    }
}

impl GpuSettings {
    /// Returns the memory of all shares of a GPU with `memory` to share. More than the GPU has needs a policy, without
    /// which it has no effect.
    #[must_use]
    pub fn share_memory(&self, memory: u64) -> u64 {
        match self.memory_scaling.oversubscribes() && self.oversubscription.is_none() {
            true => memory,
            false => self.memory_scaling.of(memory),
        }
    }

    /// Returns whether the shares get more memory than the GPU has.
    #[must_use]
    pub fn is_oversubscribed(&self) -> bool {
        self.memory_scaling.oversubscribes() && self.oversubscription.is_some()
    }

    /// Returns the options of a share before those of device class and claim.
    #[must_use]
    pub fn share_defaults(&self) -> Settings {
        let ShareDefaults {
            compute_policy,
            memory,
            enforcement,
        } = &self.defaults;
        let of_oversubscription = match self.oversubscription {
            Some(Oversubscription::Spill) if self.is_oversubscribed() => MemoryPolicy::Spill,
            Some(Oversubscription::Spill | Oversubscription::BestEffort) | None => {
                MemoryPolicy::default()
            }
        };
        let memory_policy = memory.as_ref().and_then(|memory| memory.policy);
        Settings {
            compute_policy: compute_policy.unwrap_or_default(),
            memory_policy: memory_policy.unwrap_or(of_oversubscription),
            memory_enforcement: memory
                .as_ref()
                .and_then(|memory| memory.enforcement)
                .unwrap_or_default(),
            enforcement: enforcement.unwrap_or_default(),
            ..Settings::default()
        }
    }

    /// Returns whether partitions of this MIG profile are published.
    #[must_use]
    pub fn allows_mig_profile(&self, name: &str) -> bool {
        self.mig_profiles
            .as_ref()
            .is_none_or(|allowed| allowed.contains(name))
    }

    /// Returns whether the partition of this MIG profile at memory slice `start` is published.
    #[must_use]
    pub fn allows_mig_placement(&self, profile: &str, start: u32) -> bool {
        let is_allowed = |layout: &BTreeSet<PinnedPartition>| {
            let mut pinned = layout.iter();
            pinned.any(|pinned| pinned.profile == profile && pinned.start == start)
        };
        self.mig_layout.as_ref().is_none_or(is_allowed)
    }

    /// Sets the fields that `offer` has.
    fn set(&mut self, offer: &Offer) {
        let Offer {
            mode,
            memory_scaling,
            oversubscription,
            core_scaling,
            split_count,
            default_cores,
            defaults,
            mig,
            xids,
        } = offer;
        self.mode = mode.unwrap_or(self.mode);
        self.memory_scaling = memory_scaling.unwrap_or(self.memory_scaling);
        self.oversubscription = oversubscription.or(self.oversubscription);
        self.core_scaling = core_scaling.unwrap_or(self.core_scaling);
        self.split_count = split_count.unwrap_or(self.split_count).max(1);
        self.default_cores = default_cores.unwrap_or(self.default_cores);
        if let Some(ShareDefaults {
            compute_policy,
            memory,
            enforcement,
        }) = defaults
        {
            let present = &mut self.defaults;
            present.compute_policy = compute_policy.or(present.compute_policy);
            present.memory = memory.clone().or(present.memory.take());
            present.enforcement = enforcement.or(present.enforcement);
        }
        if let Some(MigOffer { profiles, layout }) = mig {
            if let Some(profiles) = profiles {
                self.mig_profiles = Some(profiles.iter().cloned().collect());
            }
            if let Some(layout) = layout {
                self.mig_layout = Some(layout.iter().cloned().collect());
            }
        }
        if let Some(xids) = xids {
            self.xids.clone_from(xids);
        }
    }
}

impl NodeSettings {
    /// Returns the settings of a node with these labels and GPUs.
    #[must_use]
    pub fn resolve<'a>(
        profiles: impl IntoIterator<Item = &'a GpuNodeProfile>,
        labels: &BTreeMap<String, String>,
        gpus: impl IntoIterator<Item = GpuIdentity<'a>>,
    ) -> Self {
        let mut selecting: Vec<&GpuNodeProfile> = profiles
            .into_iter()
            .filter(|profile| profile.selects(labels))
            .collect();
        selecting.sort_by_key(|profile| profile.name_any());
        let mut selecting = selecting.into_iter();
        let Some(profile) = selecting.next() else {
            return Self::default();
        };
        let gpus = gpus.into_iter().map(|gpu| {
            let settings = profile.gpu_settings(gpu);
            (gpu.uuid.to_owned(), settings)
        });
        Self {
            profile: Some(profile.to_version()),
            overridden: selecting.map(GpuNodeProfile::to_version).collect(),
            gpus: gpus.collect(),
        }
    }

    /// Returns the settings of a GPU.
    #[must_use]
    pub fn gpu(&self, uuid: &str) -> GpuSettings {
        self.gpus.get(uuid).cloned().unwrap_or_default()
    }
}

impl GpuNodeProfile {
    /// Returns whether the profile selects a node with these labels.
    #[must_use]
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        let selector = &self.spec.node_selector;
        selector
            .iter()
            .all(|(key, value)| labels.get(key) == Some(value))
    }

    /// Returns the version of this object.
    #[must_use]
    pub fn to_version(&self) -> ProfileVersion {
        ProfileVersion {
            name: self.name_any(),
            uid: self.metadata.uid.clone().unwrap_or_default(),
            generation: self.metadata.generation.unwrap_or_default(),
        }
    }

    fn gpu_settings(&self, gpu: GpuIdentity<'_>) -> GpuSettings {
        let spec = &self.spec;
        let mut settings = GpuSettings {
            is_excluded: spec
                .exclude
                .as_ref()
                .is_some_and(|exclude| exclude.has(gpu)),
            suspend_host_memory: spec.suspend.and_then(|suspend| {
                // A value that is no amount has no effect.
                let bytes = suspend.host_memory?.to_i64()?;
                u64::try_from(bytes).ok()
            }),
            ..GpuSettings::default()
        };
        settings.set(&spec.offer);
        for entry in spec.devices.iter().filter(|entry| entry.selects(gpu)) {
            settings.set(&entry.offer);
        }
        settings
    }
}

impl Exclude {
    fn has(&self, gpu: GpuIdentity<'_>) -> bool {
        let Self {
            uuids,
            indices,
            product_names,
        } = self;
        uuids.iter().any(|uuid| uuid == gpu.uuid)
            || indices.contains(&gpu.index)
            || product_names.iter().any(|name| name == gpu.product_name)
    }
}

impl DeviceOverride {
    fn selects(&self, gpu: GpuIdentity<'_>) -> bool {
        match (&self.uuid, self.index, &self.product_name) {
            (Some(uuid), None, None) => uuid == gpu.uuid,
            (None, Some(index), None) => index == gpu.index,
            (None, None, Some(name)) => name == gpu.product_name,
            // Rejected by the API server.
            _ => false,
        }
    }
}
