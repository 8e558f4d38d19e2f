//! Plan of one GPU: the devices that it can be published as, the counters that they consume, and the reasons for devices
//! that it cannot be published as. Pure.
//!
//! The publisher, the overcommit check and the resolution of allocated devices read the plan, so published and checked
//! devices agree.
//!
//! Mode `auto`: a GPU follows its MIG mode. With MIG mode off it is a whole GPU and shares; with MIG mode on it is one
//! device for each profile and placement. The geometry is NVML's.

use std::collections::BTreeMap;

use drava_api::{DeviceType, names};
use drava_nvml::{
    Card, ComputeMode, GpuInstance, Mig, MigProfile, MigVariant, Placement as SlicePlacement,
};

use crate::capacity::{
    ALL_CORES, DEFAULT_SPLIT_COUNT, MIB, ShareTotals, UnavailableReason, driver_reserve_bytes,
    usable_memory_bytes,
};

/// Amounts by counter name.
pub type Counters = BTreeMap<String, u64>;

/// Plan of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CardPlan {
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
    /// Shares with these totals.
    Shares(ShareTotals),
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

impl CardPlan {
    /// Returns the plan of a GPU. `foreign` are the MIG instances that drava did not create.
    #[must_use]
    pub fn new(card: &Card, confidential_computing: bool, foreign: &[GpuInstance]) -> Self {
        let counters = counters(card);
        if matches!(card.mig, Mig::Capable { enabled: true, .. }) {
            return Self::partitioned(card, counters, foreign);
        }
        let whole = PlannedDevice {
            name: names::gpu_device(card.minor),
            kind: DeviceKind::Whole,
            consumes: counters.clone(),
            blocked: None,
        };
        let (devices, unavailable) = match (unusable(card), totals(card, confidential_computing)) {
            (Some(reason), _) => (Vec::new(), Some(reason)),
            (None, Err(reason)) => (vec![whole], Some(reason)),
            (None, Ok(totals)) => {
                let shares = PlannedDevice {
                    name: names::vgpu_device(card.minor),
                    kind: DeviceKind::Shares(totals),
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

    fn partitioned(card: &Card, counters: Counters, foreign: &[GpuInstance]) -> Self {
        let mut devices = partitions(card);
        let mut used = Counters::new();
        for instance in foreign {
            add(&mut used, &consumption_of(card, instance));
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
        let unavailable = match unusable(card) {
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

    /// Returns the device with this name.
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

    /// Returns the totals of the shares; `None` if the GPU has no shares.
    #[must_use]
    pub fn share_totals(&self) -> Option<ShareTotals> {
        self.devices.iter().find_map(|device| match device.kind {
            DeviceKind::Shares(totals) => Some(totals),
            DeviceKind::Whole | DeviceKind::Partition { .. } => None,
        })
    }
}

/// Returns the partitions of a GPU in published order, whether or not MIG mode is on.
#[must_use]
pub fn partitions(card: &Card) -> Vec<PlannedDevice> {
    let totals = counters(card);
    let mut profiles: Vec<&MigProfile> = profiles(card).iter().collect();
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
            name: names::mig_device(card.minor, &profile.name, placement.start),
            kind: DeviceKind::Partition {
                profile: profile.clone(),
                placement,
            },
            consumes: consumption(profile, placement, &totals),
            blocked: None,
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

fn profiles(card: &Card) -> &[MigProfile] {
    match &card.mig {
        Mig::NotCapable => &[],
        Mig::Capable { profiles, .. } => profiles,
    }
}

/// Returns the counters of a GPU: memory slices of NVML's placements, and the engines of the largest profile. A GPU without
/// MIG has one counter `card`, so that whole GPU and shares exclude each other.
fn counters(card: &Card) -> Counters {
    let profiles = profiles(card);
    let slices = profiles
        .iter()
        .flat_map(|profile| &profile.placements)
        .map(|placement| placement.start + placement.size)
        .max();
    let Some(slices) = slices else {
        return Counters::from([("card".to_owned(), 1)]);
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
fn consumption_of(card: &Card, instance: &GpuInstance) -> Counters {
    profiles(card)
        .iter()
        .find(|profile| profile.id == instance.profile_id)
        .map_or_else(
            || slices(instance.placement),
            |profile| consumption(profile, instance.placement, &counters(card)),
        )
}

/// Returns why the GPU cannot be used at all.
fn unusable(card: &Card) -> Option<UnavailableReason> {
    match card.compute_mode {
        ComputeMode::Prohibited => Some(UnavailableReason::Prohibited),
        ComputeMode::Default | ComputeMode::ExclusiveProcess | ComputeMode::Unknown => None,
    }
}

/// Returns the totals of the shares of a GPU, or why it has none.
fn totals(card: &Card, confidential_computing: bool) -> Result<ShareTotals, UnavailableReason> {
    match card.compute_mode {
        ComputeMode::ExclusiveProcess => return Err(UnavailableReason::ExclusiveProcess),
        ComputeMode::Default | ComputeMode::Prohibited | ComputeMode::Unknown => {}
    }
    if confidential_computing {
        return Err(UnavailableReason::ConfidentialComputing);
    }
    let usable = usable_memory_bytes(card).ok_or(UnavailableReason::NoMemoryFigure)?;
    let reserve = driver_reserve_bytes(card).next_multiple_of(MIB);
    match usable.saturating_sub(reserve) {
        0 => Err(UnavailableReason::NoMemory),
        memory_bytes => Ok(ShareTotals {
            memory_bytes,
            cores: ALL_CORES,
            slots: DEFAULT_SPLIT_COUNT,
        }),
    }
}
