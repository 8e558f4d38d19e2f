//! Mistakes in claims and pods that the API server accepts: what they mean, and what was probably meant.
//!
//! The admission webhook says so when the object is created, `explain` and `simulate` when the pod is. Nothing is refused here:
//! every object may be meant as it is.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::claim;
use drava_allocator::reason::bytes;
use drava_allocator::selector::Selectors;
use drava_api::Quantity;
use drava_api::config;
use drava_api::names::{self, capacity, class};
use drava_api::request::{RequestError, check_capacity};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{
    CapacityRequirements, Device, DeviceClass, ResourceClaim, ResourceClaimSpec, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as RawQuantity;

/// Names of the capacities that devices of this driver publish.
const CAPACITIES: [&str; 9] = [
    capacity::MEMORY,
    capacity::CORES,
    capacity::SLOTS,
    capacity::MULTIPROCESSORS,
    capacity::COPY_ENGINES,
    capacity::DECODERS,
    capacity::ENCODERS,
    capacity::JPEG_ENGINES,
    capacity::OFA_ENGINES,
];

/// Memory that a CUDA context takes on any GPU, MiB.
const SMALLEST_CONTEXT_MIB: u64 = 32;

/// Memory above which no GPU has a share, where the GPUs are unknown, bytes.
const LARGEST_GPU_BYTES: u64 = 1 << 39;

/// Most edits (Levenshtein) between a name and what was meant.
const MAX_EDITS: usize = 3;

/// What the shares of the published GPUs can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Shares {
    /// Memory of the largest share, bytes.
    pub largest_bytes: Option<u64>,
    /// Estimated memory of a CUDA context on the GPU where it is smallest, bytes: no program runs in a smaller share.
    pub context_bytes: Option<u64>,
}

impl Shares {
    /// Returns what the shares of the slice can be.
    #[must_use]
    pub fn of(slice: &ResourceSlice) -> Self {
        let devices = slice.spec.devices.iter().flatten();
        devices.map(Self::of_device).fold(Self::default(), Self::or)
    }

    fn of_device(device: &Device) -> Self {
        let is_shared = device.allow_multiple_allocations == Some(true);
        let bytes = share_bytes(device).filter(|_| is_shared);
        let attributes = device.attributes.as_ref();
        let product = attributes.and_then(|attributes| {
            attributes
                .get(names::attribute::PRODUCT_NAME)?
                .string
                .as_deref()
        });
        Self {
            largest_bytes: bytes,
            context_bytes: bytes.map(|_| context_bytes(product.unwrap_or_default())),
        }
    }

    /// Returns what the shares of both can be.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        let contexts = self.context_bytes.into_iter().chain(other.context_bytes);
        Self {
            largest_bytes: self.largest_bytes.max(other.largest_bytes),
            context_bytes: contexts.min(),
        }
    }
}

/// Returns the memory that one share of the device can have: less than that of all shares if the GPU is oversubscribed.
fn share_bytes(device: &Device) -> Option<u64> {
    let memory = device.capacity.as_ref()?.get(capacity::MEMORY)?;
    let policy = memory.request_policy.as_ref();
    let range = policy.and_then(|policy| policy.valid_range.as_ref());
    let largest = range.and_then(|range| range.max.as_ref());
    let bytes = Quantity::try_from(largest.unwrap_or(&memory.value)).ok()?;
    bytes.to_u64_rounded_up()
}

/// Returns the estimated memory of a CUDA context, by the words of a product name.
fn context_bytes(product: &str) -> u64 {
    let is_word = |name: &&(&str, u64)| {
        let mut words = product.split(|letter: char| !letter.is_ascii_alphanumeric());
        words.any(|word| word == name.0)
    };
    let known = names::CONTEXT_MIB.iter().find(is_word);
    known.map_or(SMALLEST_CONTEXT_MIB, |(_, mib)| *mib) << 20
}

/// What is known of the cluster.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    /// Device classes by name.
    pub classes: &'a BTreeMap<String, DeviceClass>,
    /// Compiled selectors.
    pub selectors: &'a Selectors,
    /// Shares of the published GPUs.
    pub shares: Shares,
}

/// A request or subrequest with the path of its fields.
struct Requested<'a> {
    /// Name in results: `main` or `main/sub`.
    name: String,
    path: String,
    class: &'a str,
    /// Observes devices without allocating them.
    is_admin: bool,
    capacity: Option<&'a CapacityRequirements>,
}

/// Returns the likely mistakes of the spec of a claim in a namespace, each with the path of its field. `root` is the path of the
/// spec.
#[must_use]
pub fn of_claim(
    namespace: &str,
    spec: &ResourceClaimSpec,
    root: &str,
    known: Known<'_>,
) -> Vec<String> {
    let requests = requested(spec, root);
    let mut advice: Vec<String> = requests
        .iter()
        .filter_map(|requested| {
            let unknown = unknown_class(requested.class, known.classes)?;
            Some(format!("{}.deviceClassName: {unknown}", requested.path))
        })
        .collect();
    if !claim::is_own(namespace, spec, known.classes, known.selectors) {
        return advice;
    }
    advice.extend(requests.iter().filter_map(|requested| {
        let class = known.classes.get(requested.class)?.spec.as_ref()?;
        let error = config::check_class(class.config.as_deref()?).err()?;
        Some(format!(
            "{}.deviceClassName: device class {} has an invalid config, so pods with the claim stay pending: {error}",
            requested.path, requested.class
        ))
    }));
    for requested in requests.iter().filter(|requested| !requested.is_admin) {
        amounts(requested, spec, known, &mut advice);
    }
    let configs = spec.devices.iter().flat_map(|devices| &devices.config);
    for (index, config) in configs.flatten().enumerate() {
        // A claim has devices of one driver.
        let other = config.opaque.as_ref().map(|opaque| opaque.driver.as_str());
        if let Some(other) = other.filter(|driver| *driver != names::DRIVER) {
            advice.push(format!(
                "{root}.devices.config[{index}].opaque.driver: config for driver {other} has no effect on devices of {driver}; \
                 did you mean {driver}?",
                driver = names::DRIVER
            ));
        }
    }
    advice
}

/// Returns why a class is unknown, if it is probably meant to be one of this driver.
#[must_use]
pub fn unknown_class(name: &str, classes: &BTreeMap<String, DeviceClass>) -> Option<String> {
    if classes.contains_key(name) {
        return None;
    }
    if class::ALL.contains(&name) {
        return Some(format!(
            "device class {name} does not exist; the chart of drava installs it"
        ));
    }
    let of_cluster = classes.iter().filter(|(_, class)| names_driver(class));
    let candidates = class::ALL
        .into_iter()
        .chain(of_cluster.map(|(name, _)| name.as_str()));
    let meant = closest(name, candidates)?;
    Some(format!(
        "device class {name} does not exist; did you mean {meant}?"
    ))
}

/// Returns whether a class has a selector that names this driver.
#[must_use]
pub fn names_driver(class: &DeviceClass) -> bool {
    let selectors = class.spec.iter().flat_map(|spec| &spec.selectors).flatten();
    let mut expressions = selectors.filter_map(|selector| selector.cel.as_ref());
    expressions.any(|cel| cel.expression.contains(names::DRIVER))
}

/// Returns the class of the claim that does not exist, and the one that is probably meant.
pub(crate) fn unknown_class_of(
    claim: &ResourceClaim,
    classes: &BTreeMap<String, DeviceClass>,
) -> Option<String> {
    let requests = requested(claim.spec.as_ref()?, "spec");
    let mut unknown = requests.iter().filter_map(|requested| {
        if classes.contains_key(requested.class) {
            return None;
        }
        let problem = unknown_class(requested.class, classes)
            .unwrap_or_else(|| format!("device class {} does not exist", requested.class));
        Some(format!("request {}: {problem}", requested.name))
    });
    unknown.next()
}

fn requested<'a>(spec: &'a ResourceClaimSpec, root: &str) -> Vec<Requested<'a>> {
    let devices = spec.devices.iter();
    let requests = devices.flat_map(|devices| devices.requests.iter().flatten());
    let requests = requests.enumerate().flat_map(|(index, request)| {
        let path = format!("{root}.devices.requests[{index}]");
        let exactly = request.exactly.iter().map(|exactly| Requested {
            name: request.name.clone(),
            path: format!("{path}.exactly"),
            class: &exactly.device_class_name,
            is_admin: exactly.admin_access == Some(true),
            capacity: exactly.capacity.as_ref(),
        });
        let subrequests = request.first_available.iter().flatten().enumerate();
        let alternatives = subrequests.map(|(sub, request_of)| Requested {
            name: format!("{}/{}", request.name, request_of.name),
            path: format!("{path}.firstAvailable[{sub}]"),
            class: &request_of.device_class_name,
            is_admin: false,
            capacity: request_of.capacity.as_ref(),
        });
        exactly.chain(alternatives).collect::<Vec<_>>()
    });
    requests.collect()
}

fn amounts(
    requested: &Requested<'_>,
    spec: &ResourceClaimSpec,
    known: Known<'_>,
    advice: &mut Vec<String>,
) {
    let requests = requested
        .capacity
        .and_then(|capacity| capacity.requests.as_ref());
    let path = format!("{}.capacity.requests", requested.path);
    for (name, raw) in requests.into_iter().flatten() {
        let problem = || match name.as_str() {
            capacity::MEMORY => memory(raw, requested.class, known.shares),
            capacity::CORES => cores(raw),
            _ => unknown_capacity(name),
        };
        let problem = no_amount(name, raw).or_else(problem);
        advice.extend(problem.map(|problem| format!("{path}.{name}: {problem}")));
    }
    let is_share = [class::VGPU, class::FRACTION].contains(&requested.class);
    let has_memory = requests.is_some_and(|requests| requests.contains_key(capacity::MEMORY));
    if is_share && !has_memory && !has_percent(requested, spec, known.classes) {
        advice.push(format!(
            "{path}: without memory the share has all memory of a GPU, and no other fits beside it, unless a GpuQuota sets \
             another default; did you mean memory: 8Gi?"
        ));
    }
}

/// Returns whether the config sets a percentage of a GPU's memory for the request.
fn has_percent(
    requested: &Requested<'_>,
    spec: &ResourceClaimSpec,
    classes: &BTreeMap<String, DeviceClass>,
) -> bool {
    let of_class = classes
        .get(requested.class)
        .and_then(|class| class.spec.as_ref());
    let of_class = of_class.and_then(|spec| spec.config.as_deref());
    let of_claim = spec
        .devices
        .as_ref()
        .and_then(|devices| devices.config.as_deref());
    let resolved = config::resolve_spec(
        of_class.unwrap_or_default(),
        of_claim.unwrap_or_default(),
        &requested.name,
    );
    // Invalid config is refused.
    resolved.map_or(true, |settings| settings.memory_percent.is_some())
}

/// Returns why no device can have the amount, whatever the request is for.
fn no_amount(name: &str, raw: &RawQuantity) -> Option<String> {
    let request = BTreeMap::from([(name.to_owned(), raw.clone())]);
    let (amount, meant) = match check_capacity(&request).err()? {
        RequestError::Negative { .. } => {
            let positive = raw.0.trim_start_matches('-');
            ("negative", format!("; did you mean {positive}?"))
        }
        RequestError::Zero { .. } => (
            "not an amount",
            format!("; request more, or omit {name} for its default"),
        ),
        RequestError::Quantity { .. } | RequestError::CoresAboveGpu { .. } => return None,
    };
    Some(format!(
        "{} is {amount}, so pods with the claim stay pending{meant}",
        raw.0
    ))
}

/// Whole GPUs and partitions have amounts of their own, so only those of shares are judged.
fn memory(raw: &RawQuantity, class: &str, shares: Shares) -> Option<String> {
    if ![class::VGPU, class::FRACTION].contains(&class) {
        return None;
    }
    let amount = Quantity::try_from(raw).ok()?;
    let requested = amount.to_u64_rounded_up().filter(|bytes| *bytes > 0)?;
    // A fraction may be a partition, which can be larger than all shares.
    let largest = shares.largest_bytes.filter(|_| class == class::VGPU);
    if let Some(largest) = largest.filter(|largest| requested > *largest) {
        return Some(format!(
            "{} exceeds the largest share of the GPUs of this cluster, {}Mi",
            bytes(amount),
            largest >> 20
        ));
    }
    let smallest = shares.context_bytes.unwrap_or(context_bytes(""));
    if requested >= smallest {
        return None;
    }
    let largest = shares.largest_bytes.unwrap_or(LARGEST_GPU_BYTES);
    let meant = |number: u64| {
        let units = [("Gi", 30), ("Mi", 20)];
        let plausible = units.into_iter().find(|(_, shift)| {
            let bytes = number.checked_mul(1 << shift);
            bytes.is_some_and(|bytes| (smallest..=largest).contains(&bytes))
        });
        plausible.map_or_else(String::new, |(unit, _)| {
            format!("; did you mean {number}{unit}?")
        })
    };
    let means = match requested >> 20 {
        // Without a unit.
        0 => format!("{} is {requested} bytes{}", raw.0, meant(requested)),
        mib => format!(
            "{} is less than a CUDA context, which takes about {} MiB{}",
            raw.0,
            smallest >> 20,
            meant(mib)
        ),
    };
    Some(means)
}

fn cores(raw: &RawQuantity) -> Option<String> {
    let amount = Quantity::try_from(raw).ok()?;
    if amount > Quantity::ZERO && amount < Quantity::count(1) {
        // Nano-units: two digits more.
        let percent = amount.with_nano(amount.nano().saturating_mul(100));
        return Some(format!(
            "{} is rounded up to 1% of the GPU time of one GPU; did you mean {percent}?",
            raw.0
        ));
    }
    (amount > Quantity::count(100)).then(|| {
        format!(
            "{} exceeds 100, the GPU time of one GPU; for several GPUs set count",
            raw.0
        )
    })
}

fn unknown_capacity(name: &str) -> Option<String> {
    if CAPACITIES.contains(&name) {
        return None;
    }
    // With the domain of the driver, as some tools write attributes.
    let short = name
        .strip_prefix(names::DRIVER)
        .and_then(|rest| rest.strip_prefix('/'));
    let meant = CAPACITIES
        .into_iter()
        .find(|known| short == Some(*known) || short.is_none() && known.starts_with(name))
        .or_else(|| closest(name, CAPACITIES));
    let meant = meant.map_or_else(String::new, |meant| format!("; did you mean {meant}?"));
    Some(format!(
        "no GPU of drava has this capacity: shares have memory, cores and slots{meant}"
    ))
}

/// Returns the candidate that the name most likely misspells; none if no candidate is close.
fn closest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = MAX_EDITS.min(name.len() / 3);
    let close = candidates.into_iter().filter_map(|candidate| {
        let edits = strsim::levenshtein(name, candidate);
        (edits <= limit).then_some((edits, candidate))
    });
    close.min().map(|(_, candidate)| candidate)
}

/// Returns the likely mistakes of a pod. `own` are the names in the pod of its claims for this driver.
#[must_use]
pub fn of_pod(pod: &Pod, own: &BTreeSet<String>) -> Vec<String> {
    let Some(spec) = &pod.spec else {
        return Vec::new();
    };
    let init = spec.init_containers.iter().flatten();
    let resources = init
        .chain(&spec.containers)
        .filter_map(|container| container.resources.as_ref());
    let used: BTreeSet<&str> = resources
        .flat_map(|resources| resources.claims.iter().flatten())
        .map(|claim| claim.name.as_str())
        .collect();
    let entries = spec.resource_claims.iter().flatten().enumerate();
    let unused = entries
        .filter(|(_, entry)| own.contains(&entry.name) && !used.contains(entry.name.as_str()));
    unused
        .map(|(index, entry)| {
            format!(
                "spec.resourceClaims[{index}]: no container names claim {0}, so none gets its GPUs; add resources: \
                 {{claims: [{{name: {0}}}]}} to a container",
                entry.name
            )
        })
        .collect()
}

#[cfg(test)]
mod tests;
