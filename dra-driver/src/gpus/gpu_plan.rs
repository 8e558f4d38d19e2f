//! Plan of one GPU: the devices that it can be published as, the counters that they consume, and the reasons for devices
//! that it cannot be published as. Pure.
//!
//! The publisher, the overcommit check and the resolution of allocated devices read the plan, so published and checked
//! devices agree.
//!
//! A GPU follows its MIG mode. With MIG mode off it is a whole GPU and shares; with MIG mode on it is one device for each
//! profile and placement. In the modes `mig` and `dynamic` of the node profile, MIG mode of a GPU that needs no reset follows
//! the claims instead, see [`crate::prepare::apply`]. The geometry is NVML's. The node profile withholds devices and sets the amounts of shares; a
//! withheld device stays in the plan, because a claim may hold it.

use std::collections::BTreeMap;

use drava_api::node_profile::{GpuSettings, Mode};
use drava_api::{DeviceType, names};
use drava_nvml::{
    ComputeMode, Gpu, GpuInstance, Mig, MigProfile, MigVariant, Placement as SlicePlacement,
};

use crate::gpus::capacity::{
    ALL_CORES, MIB, ShareOffer, ShareTotals, UnavailableReason, driver_reserve_bytes,
    usable_memory_bytes,
};

/// Amounts by counter name.
pub type Counters = BTreeMap<String, u64>;

/// Plan of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuPlan {
    /// Devices in published order: smaller partitions first, for allocators that take the first that fits.
    pub devices: Vec<PlannedDevice>,
    /// Amounts of the GPU.
    pub counters: Counters,
    /// Defect that excludes devices: the node reports it.
    pub unavailable: Option<UnavailableReason>,
    /// Why devices of other types are not in the plan.
    pub excluded: UnavailableReason,
}

/// One device of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedDevice {
    /// Name of the device.
    pub name: String,
    /// Type of the device with its amounts.
    pub kind: DeviceKind,
    /// Counters of the GPU that the device consumes.
    pub consumes: Counters,
    /// Why the device cannot be used at present.
    pub blocked: Option<UnavailableReason>,
    /// Why the node profile does not offer the device.
    pub withheld: Option<UnavailableReason>,
}

impl PlannedDevice {
    /// Returns the memory slices of a partition; `None` for other types, which use all of the GPU.
    #[must_use]
    pub const fn slices(&self) -> Option<SlicePlacement> {
        match self.kind {
            DeviceKind::Partition { placement, .. } => Some(placement),
            DeviceKind::Whole | DeviceKind::Shares(_) => None,
        }
    }
}

/// Type of a planned device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceKind {
    /// The whole GPU.
    Whole,
    /// Shares with these amounts.
    Shares(ShareOffer),
    /// A MIG partition.
    Partition {
        /// Profile of the GPU instance.
        profile: MigProfile,
        /// Memory slices of the GPU instance.
        placement: SlicePlacement,
    },
}

impl DeviceKind {
    /// Returns the value of the attribute `type`.
    #[must_use]
    pub const fn device_type(&self) -> DeviceType {
        match self {
            Self::Whole => DeviceType::Gpu,
            Self::Shares(_) => DeviceType::Vgpu,
            Self::Partition { .. } => DeviceType::Mig,
        }
    }
}

impl GpuPlan {
    /// Returns the plan of a GPU. `number` is that in the names of its devices; `foreign` are the MIG instances that drava did not create.
    #[must_use]
    pub fn new(
        gpu: &Gpu,
        number: u32,
        confidential_computing: bool,
        foreign: &[GpuInstance],
        settings: &GpuSettings,
    ) -> Self {
        let is_switched = matches!(settings.mode, Mode::Mig | Mode::Dynamic);
        let mut plan = match gpu.mig {
            Mig::Capable { .. } if is_switched && can_switch_mig_mode(gpu) => {
                Self::switchable(gpu, number, confidential_computing, foreign, settings)
            }
            Mig::Capable { enabled: true, .. } => Self::partitioned(gpu, number, foreign),
            Mig::Capable { enabled: false, .. } | Mig::NotCapable => {
                Self::unpartitioned(gpu, number, confidential_computing, settings)
            }
        };
        plan.withhold(settings);
        plan.require_reset(gpu, settings);
        plan
    }

    /// Returns the plan of a GPU whose MIG mode follows the claims: devices of both modes, which exclude each other by the
    /// counters.
    fn switchable(
        gpu: &Gpu,
        number: u32,
        confidential_computing: bool,
        foreign: &[GpuInstance],
        settings: &GpuSettings,
    ) -> Self {
        let mut plan = Self::unpartitioned(gpu, number, confidential_computing, settings);
        let partitioned = Self::partitioned(gpu, number, foreign);
        if !foreign.is_empty() {
            for device in &mut plan.devices {
                device.blocked = Some(UnavailableReason::ForeignInstance);
            }
        }
        plan.devices.extend(partitioned.devices);
        plan
    }

    /// Reports that MIG mode contradicts the mode of the node profile, on a GPU that needs a reset to switch it.
    fn require_reset(&mut self, gpu: &Gpu, settings: &GpuSettings) {
        let is_of_mode = match self.unavailable {
            None | Some(UnavailableReason::Mig | UnavailableReason::MigDisabled) => true,
            Some(_) => false,
        };
        if settings.is_excluded || can_switch_mig_mode(gpu) || !is_of_mode {
            return;
        }
        let reason = match (&gpu.mig, settings.mode) {
            (Mig::Capable { enabled: false, .. }, Mode::Mig | Mode::Dynamic) => {
                UnavailableReason::ResetForMig
            }
            (Mig::Capable { enabled: true, .. }, Mode::Exclusive | Mode::Vgpu | Mode::Dynamic) => {
                UnavailableReason::ResetForShares
            }
            (Mig::NotCapable, _)
            | (Mig::Capable { enabled: false, .. }, Mode::Auto | Mode::Exclusive | Mode::Vgpu)
            | (Mig::Capable { enabled: true, .. }, Mode::Auto | Mode::Mig) => return,
        };
        self.unavailable = Some(reason);
        self.excluded = reason;
    }

    fn unpartitioned(
        gpu: &Gpu,
        number: u32,
        confidential_computing: bool,
        settings: &GpuSettings,
    ) -> Self {
        let counters = counters(gpu);
        let whole = PlannedDevice {
            name: names::gpu_device(number),
            kind: DeviceKind::Whole,
            consumes: counters.clone(),
            blocked: None,
            withheld: None,
        };
        let shares = share_offer(gpu, confidential_computing, settings);
        let (devices, unavailable) = match (unusable(gpu), shares) {
            (Some(reason), _) => (Vec::new(), Some(reason)),
            (None, Err(reason)) => (vec![whole], Some(reason)),
            (None, Ok(offer)) => {
                let shares = PlannedDevice {
                    name: names::vgpu_device(number),
                    kind: DeviceKind::Shares(offer),
                    ..whole.clone()
                };
                (vec![whole, shares], None)
            }
        };
        Self {
            devices,
            counters,
            unavailable,
            excluded: unavailable.unwrap_or(UnavailableReason::MigDisabled),
        }
    }

    fn partitioned(gpu: &Gpu, number: u32, foreign: &[GpuInstance]) -> Self {
        let counters = counters(gpu);
        let mut devices = partitions(gpu, number);
        let mut used = Counters::new();
        for instance in foreign {
            add(&mut used, &consumption_of(gpu, instance));
        }
        for device in &mut devices {
            let mut sum = used.clone();
            add(&mut sum, &device.consumes);
            if device
                .consumes
                .keys()
                .any(|name| sum.get(name) > counters.get(name))
            {
                device.blocked = Some(UnavailableReason::ForeignInstance);
            }
        }
        let unavailable = match unusable(gpu) {
            Some(reason) => {
                devices.clear();
                Some(reason)
            }
            None => devices
                .is_empty()
                .then_some(UnavailableReason::NoMigProfiles),
        };
        Self {
            devices,
            counters,
            unavailable,
            excluded: unavailable.unwrap_or(UnavailableReason::Mig),
        }
    }

    /// Withholds the devices that the node profile does not offer.
    fn withhold(&mut self, settings: &GpuSettings) {
        for device in &mut self.devices {
            device.withheld = withheld(&device.kind, settings);
        }
        let is_nothing_offered = self.offered().next().is_none();
        let is_of_mode =
            |device: &PlannedDevice| device.withheld == Some(UnavailableReason::ProfileMode);
        if is_nothing_offered && self.devices.iter().any(is_of_mode) {
            // The GPU has only devices of the other MIG mode: the text names the command that switches it.
            self.unavailable = Some(self.excluded);
        }
    }

    /// Withholds all devices, because the GPU has another owner.
    #[must_use]
    pub(crate) fn without_offer(mut self, reason: UnavailableReason) -> Self {
        for device in &mut self.devices {
            device.withheld.get_or_insert(reason);
        }
        self.unavailable = Some(reason);
        self
    }

    /// Returns the devices that the node profile offers.
    pub fn offered(&self) -> impl Iterator<Item = &PlannedDevice> {
        let devices = self.devices.iter();
        devices.filter(|device| device.withheld.is_none())
    }

    /// Returns the device with this name, offered or withheld.
    #[must_use]
    pub fn device(&self, name: &str) -> Option<&PlannedDevice> {
        self.devices.iter().find(|device| device.name == name)
    }

    /// Returns whether the devices are partitions.
    #[must_use]
    pub fn is_partitioned(&self) -> bool {
        let is_partition =
            |device: &PlannedDevice| matches!(device.kind, DeviceKind::Partition { .. });
        self.devices.iter().any(is_partition)
    }

    /// Returns the amounts of the shares; `None` if the GPU has no shares.
    #[must_use]
    pub fn share_offer(&self) -> Option<ShareOffer> {
        self.devices.iter().find_map(|device| match device.kind {
            DeviceKind::Shares(offer) => Some(offer),
            DeviceKind::Whole | DeviceKind::Partition { .. } => None,
        })
    }
}

/// Returns whether the GPU switches MIG mode without a reset: Hopper and newer.
#[must_use]
pub fn can_switch_mig_mode(gpu: &Gpu) -> bool {
    gpu.compute_capability.major >= 9
}

/// Returns the partitions of a GPU in published order, whether or not MIG mode is on.
#[must_use]
pub fn partitions(gpu: &Gpu, number: u32) -> Vec<PlannedDevice> {
    let totals = counters(gpu);
    let mut profiles: Vec<&MigProfile> = profiles(gpu).iter().collect();
    profiles.sort_by_key(|profile| {
        let is_variant = profile.variant != MigVariant::Plain;
        (profile.memory_bytes, profile.slices, is_variant, profile.id)
    });
    let placements = profiles.into_iter().flat_map(|profile| {
        // From the end: large profiles start at the first slices.
        let placements = profile.placements.iter().rev();
        placements.map(move |placement| (profile, *placement))
    });
    placements
        .map(|(profile, placement)| PlannedDevice {
            name: names::mig_device(number, &profile.name, placement.start),
            kind: DeviceKind::Partition {
                profile: profile.clone(),
                placement,
            },
            consumes: consumption(profile, placement, &totals),
            blocked: None,
            withheld: None,
        })
        .collect()
}

/// Adds `more` to `sum`.
pub(crate) fn add(sum: &mut Counters, more: &Counters) {
    for (name, amount) in more {
        let total = sum.entry(name.clone()).or_default();
        *total = total.saturating_add(*amount);
    }
}

fn profiles(gpu: &Gpu) -> &[MigProfile] {
    match &gpu.mig {
        Mig::NotCapable => &[],
        Mig::Capable { profiles, .. } => profiles,
    }
}

/// Returns the counters of a GPU: memory slices of NVML's placements, and the engines of the largest profile. A GPU without
/// MIG has one counter `gpu`, so that whole GPU and shares exclude each other.
fn counters(gpu: &Gpu) -> Counters {
    let profiles = profiles(gpu);
    let slices = profiles
        .iter()
        .flat_map(|profile| &profile.placements)
        .map(|placement| placement.start + placement.size)
        .max();
    let Some(slices) = slices else {
        return Counters::from([("gpu".to_owned(), 1)]);
    };
    let mut counters: Counters = (0..slices).map(|slice| (memory_slice(slice), 1)).collect();
    for (name, engines) in ENGINES {
        let most = profiles.iter().map(engines).max().unwrap_or(0);
        if most > 0 {
            counters.insert(name.to_owned(), u64::from(most));
        }
    }
    let media = profiles
        .iter()
        .filter(|profile| has_media_extensions(profile))
        .map(|profile| profile.instance_count)
        .max();
    if let Some(media) = media {
        counters.insert(MEDIA_EXTENSIONS.to_owned(), u64::from(media));
    }
    counters
}

/// Returns the engines of a profile.
type EnginesOf = fn(&MigProfile) -> u32;

/// Engine counters.
const ENGINES: [(&str, EnginesOf); 5] = [
    ("copy-engines", |profile| profile.copy_engines),
    ("decoders", |profile| profile.decoders),
    ("encoders", |profile| profile.encoders),
    ("jpeg-engines", |profile| profile.jpeg_engines),
    ("ofa-engines", |profile| profile.ofa_engines),
];

/// Counter of instances with media extensions.
const MEDIA_EXTENSIONS: &str = "media-extensions";

fn memory_slice(slice: u32) -> String {
    format!("memory-slice-{slice}")
}

fn has_media_extensions(profile: &MigProfile) -> bool {
    match profile.variant {
        MigVariant::MediaExtensions | MigVariant::AllMediaExtensions => true,
        MigVariant::Plain | MigVariant::NoMediaExtensions | MigVariant::Graphics => false,
    }
}

fn consumption(profile: &MigProfile, placement: SlicePlacement, totals: &Counters) -> Counters {
    let mut consumed = slices(placement);
    for (name, engines) in ENGINES {
        let engines = u64::from(engines(profile));
        if engines > 0 {
            consumed.insert(name.to_owned(), engines);
        }
    }
    let media = match profile.variant {
        MigVariant::MediaExtensions => Some(1),
        MigVariant::AllMediaExtensions => totals.get(MEDIA_EXTENSIONS).copied(),
        MigVariant::Plain | MigVariant::NoMediaExtensions | MigVariant::Graphics => None,
    };
    consumed.extend(media.map(|media| (MEDIA_EXTENSIONS.to_owned(), media)));
    consumed
}

fn slices(placement: SlicePlacement) -> Counters {
    let SlicePlacement { start, size } = placement;
    (start..start.saturating_add(size))
        .map(|slice| (memory_slice(slice), 1))
        .collect()
}

/// Returns the counters that an existing instance consumes. Of an unknown profile only the memory slices are known.
fn consumption_of(gpu: &Gpu, instance: &GpuInstance) -> Counters {
    profiles(gpu)
        .iter()
        .find(|profile| profile.id == instance.profile_id)
        .map_or_else(
            || slices(instance.placement),
            |profile| consumption(profile, instance.placement, &counters(gpu)),
        )
}

/// Returns why the GPU cannot be used at all.
fn unusable(gpu: &Gpu) -> Option<UnavailableReason> {
    match gpu.compute_mode {
        ComputeMode::Prohibited => Some(UnavailableReason::Prohibited),
        ComputeMode::Default | ComputeMode::ExclusiveProcess | ComputeMode::Unknown => None,
    }
}

/// Returns why the node profile does not offer a device.
fn withheld(kind: &DeviceKind, settings: &GpuSettings) -> Option<UnavailableReason> {
    if settings.is_excluded {
        return Some(UnavailableReason::ProfileExcluded);
    }
    let is_in_mode = match (settings.mode, kind) {
        (Mode::Auto | Mode::Dynamic, _)
        | (Mode::Exclusive, DeviceKind::Whole)
        | (Mode::Vgpu, DeviceKind::Shares(_))
        | (Mode::Mig, DeviceKind::Partition { .. }) => true,
        (Mode::Exclusive | Mode::Vgpu | Mode::Mig, _) => false,
    };
    match kind {
        _ if !is_in_mode => Some(UnavailableReason::ProfileMode),
        DeviceKind::Partition { profile, .. } if !settings.allows_mig_profile(&profile.name) => {
            Some(UnavailableReason::ProfileMigProfiles)
        }
        DeviceKind::Partition { profile, placement }
            if !settings.allows_mig_placement(&profile.name, placement.start) =>
        {
            Some(UnavailableReason::ProfileMigLayout)
        }
        DeviceKind::Whole | DeviceKind::Shares(_) | DeviceKind::Partition { .. } => None,
    }
}

/// Returns the amounts of the shares of a GPU, or why it has none.
fn share_offer(
    gpu: &Gpu,
    confidential_computing: bool,
    settings: &GpuSettings,
) -> Result<ShareOffer, UnavailableReason> {
    match gpu.compute_mode {
        ComputeMode::ExclusiveProcess => return Err(UnavailableReason::ExclusiveProcess),
        ComputeMode::Default | ComputeMode::Prohibited | ComputeMode::Unknown => {}
    }
    if gpu.has_mps_clients {
        return Err(UnavailableReason::Mps);
    }
    if confidential_computing {
        return Err(UnavailableReason::ConfidentialComputing);
    }
    let usable = usable_memory_bytes(gpu).ok_or(UnavailableReason::NoMemoryFigure)?;
    let reserve = driver_reserve_bytes(gpu).next_multiple_of(MIB);
    let physical = usable.saturating_sub(reserve);
    let scaled = settings.share_memory(physical);
    let memory_bytes = scaled - scaled % MIB;
    if memory_bytes == 0 {
        return Err(UnavailableReason::NoMemory);
    }
    let cores = settings.core_scaling.of(ALL_CORES);
    Ok(ShareOffer {
        totals: ShareTotals {
            memory_bytes,
            cores,
            slots: u64::from(settings.split_count),
        },
        max_memory_bytes: memory_bytes.min(physical),
        default_cores: u64::from(settings.default_cores).min(cores.min(ALL_CORES)),
        is_oversubscribed: settings.is_oversubscribed(),
    })
}
