//! Builds the claim of a pod.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, CapacityRequirements, DeviceClaim, DeviceClaimConfiguration,
    DeviceConstraint, DeviceRequest, DeviceSelector, ExactDeviceRequest, OpaqueDeviceConfiguration,
    ResourceClaimSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as RawQuantity;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use sha2::{Digest, Sha256};

use drava_api::config::{self, ComputePolicy, MemoryConfig, Percent, Priority, VgpuConfig};
use drava_api::{Quantity, names};

use super::amounts::{ContainerAmounts, DeviceAmounts, DeviceKind, Memory};
use super::annotations::{Mode, PodOptions};
use super::finding::{Findings, MAX_DEVICES, RefusalCause, WarningCause};
use super::pod::ContainerRef;
use super::{ContainerEdit, Settings, ShareClass};

/// Claim and the use of its requests.
pub(super) struct Built {
    pub(super) spec: ResourceClaimSpec,
    pub(super) containers: Vec<ContainerEdit>,
}

/// A request with its container.
struct Request<'a> {
    name: String,
    container: ContainerRef<'a>,
    device: DeviceRequest,
    config: Option<VgpuConfig>,
    count: u64,
    is_share: bool,
}

pub(super) struct Builder<'a> {
    pub(super) settings: &'a Settings,
    pub(super) options: &'a PodOptions,
    pub(super) findings: &'a mut Findings,
}

impl Builder<'_> {
    pub(super) fn build(mut self, asks: &[(ContainerRef<'_>, ContainerAmounts)]) -> Built {
        let mut requests: Vec<Request<'_>> = Vec::new();
        let mut edits = Vec::new();
        // Main containers first: an init container uses a request of theirs.
        let (sequential, concurrent): (Vec<_>, Vec<_>) = asks
            .iter()
            .partition(|(container, _)| container.is_sequential());
        for (container, amounts) in concurrent.into_iter().chain(sequential) {
            let request = amounts.device.as_ref().map(|device| {
                let request = self.request(*container, device);
                self.place(&mut requests, request, &device.field)
            });
            if !amounts.resources.is_empty() {
                edits.push(ContainerEdit {
                    list: container.list,
                    index: container.index,
                    resources: amounts.resources.clone(),
                    request,
                });
            }
        }
        let count = requests.iter().map(|request| request.count).sum();
        if count > MAX_DEVICES && requests.iter().all(|request| request.count <= MAX_DEVICES) {
            self.findings
                .refuse("spec.containers", RefusalCause::TooManyDevices { count });
        }
        Built {
            spec: ResourceClaimSpec {
                devices: Some(DeviceClaim {
                    config: non_empty(configs(&requests)),
                    constraints: non_empty(self.constraints(&requests)),
                    requests: Some(requests.into_iter().map(|request| request.device).collect()),
                }),
            },
            containers: edits,
        }
    }

    /// Adds a request, unless its container can use an existing one. Returns the name of the request.
    fn place<'r>(
        &mut self,
        requests: &mut Vec<Request<'r>>,
        request: Request<'r>,
        field: &str,
    ) -> String {
        if request.container.is_sequential() {
            let equal = requests.iter().find(|other| {
                other.device.exactly == request.device.exactly && other.config == request.config
            });
            if let Some(equal) = equal {
                return equal.name.clone();
            }
            self.findings.warn(field, WarningCause::HeldByInitContainer);
        }
        let name = request.name.clone();
        requests.push(request);
        name
    }

    fn request<'r>(&mut self, container: ContainerRef<'r>, ask: &DeviceAmounts) -> Request<'r> {
        let mut config = VgpuConfig {
            placement: self.options.placement,
            ..VgpuConfig::default()
        };
        let mut capacity = BTreeMap::new();
        let mut selectors = self.options.selectors.clone();
        let class = match &ask.kind {
            DeviceKind::WholeGpu => {
                if self.options.mode == Some(Mode::Mig) {
                    self.refuse_partition(&ask.field, names::capacity::MEMORY);
                }
                names::class::GPU
            }
            DeviceKind::Partition { profile } => {
                selectors.push(format!(
                    "device.attributes[\"{}\"].{} == {}",
                    names::DRIVER,
                    names::attribute::PROFILE,
                    serde_json::Value::from(profile.as_str())
                ));
                names::class::MIG
            }
            DeviceKind::Share {
                memory,
                cores,
                memory_resource,
            } => {
                let class = self.share_class(ask.count, *memory);
                self.memory(
                    *memory,
                    class,
                    &ask.field,
                    memory_resource,
                    &mut config,
                    &mut capacity,
                );
                if *cores > 0 {
                    let amount = Quantity::count(*cores);
                    capacity.insert(names::capacity::CORES.to_owned(), RawQuantity::from(amount));
                    self.cap_cores(&container, class, &mut config);
                }
                if class != names::class::MIG {
                    config.priority = low_priority(ask.priority);
                }
                class
            }
        };
        if class == names::class::MIG && ask.count > 1 {
            let several = WarningCause::PartitionsOfDifferentGpus;
            self.findings.warn(&ask.field, several);
        }
        let is_default = config == VgpuConfig::default();
        if !is_default {
            config.api_version = names::API_VERSION.to_owned();
            config.kind = config::KIND.to_owned();
        }
        let name = container.container.name.clone();
        let selectors = selectors.into_iter().map(|expression| DeviceSelector {
            cel: Some(CELDeviceSelector { expression }),
        });
        Request {
            device: DeviceRequest {
                name: name.clone(),
                exactly: Some(ExactDeviceRequest {
                    device_class_name: class.to_owned(),
                    count: (ask.count > 1).then(|| i64::try_from(ask.count).unwrap_or(i64::MAX)),
                    capacity: (!capacity.is_empty()).then_some(CapacityRequirements {
                        requests: Some(capacity),
                    }),
                    selectors: non_empty(selectors.collect()),
                    ..ExactDeviceRequest::default()
                }),
                first_available: None,
            },
            name,
            container,
            config: (!is_default).then_some(config),
            count: ask.count,
            is_share: ask.kind != DeviceKind::WholeGpu,
        }
    }

    /// Returns the class of a share. `fraction.drava.dev` provides one device and needs an amount of memory.
    fn share_class(&self, count: u64, memory: Memory) -> &'static str {
        match (self.options.mode, self.settings.share_class) {
            (Some(Mode::Mig), _) => names::class::MIG,
            (None, ShareClass::Fraction) if count == 1 && matches!(memory, Memory::Mib(_)) => {
                names::class::FRACTION
            }
            (Some(Mode::Vgpu) | None, ShareClass::Vgpu | ShareClass::Fraction) => {
                names::class::VGPU
            }
        }
    }

    fn memory(
        &mut self,
        memory: Memory,
        class: &str,
        field: &str,
        resource: &str,
        config: &mut VgpuConfig,
        capacity: &mut BTreeMap<String, RawQuantity>,
    ) {
        match memory {
            // A partition of any size would satisfy a request without an amount.
            Memory::All | Memory::Percent(_) if class == names::class::MIG => {
                self.refuse_partition(field, resource);
            }
            Memory::All => {}
            Memory::Mib(mib) => {
                let mib = self.largest(mib, class, field);
                let amount = Quantity::bytes(mib << 20);
                capacity.insert(
                    names::capacity::MEMORY.to_owned(),
                    RawQuantity::from(amount),
                );
            }
            Memory::Percent(percent) => {
                config.memory = Some(MemoryConfig {
                    percent: Percent::try_from(i64::from(percent)).ok(),
                    ..MemoryConfig::default()
                });
            }
        }
    }

    /// Reduces the memory to that of the largest device of the class.
    fn largest(&mut self, requested_mib: u64, class: &str, field: &str) -> u64 {
        let (share, partition) = (
            self.settings.largest_share_bytes,
            self.settings.largest_partition_bytes,
        );
        let largest = match class {
            names::class::MIG => partition,
            names::class::FRACTION => share.max(partition),
            _ => share,
        };
        match largest.map(|bytes| bytes >> 20) {
            Some(largest_mib) if largest_mib > 0 && requested_mib > largest_mib => {
                let reduced = WarningCause::MemoryReduced {
                    requested_mib,
                    largest_mib,
                };
                self.findings.warn(field, reduced);
                largest_mib
            }
            _ => requested_mib,
        }
    }

    fn refuse_partition(&mut self, field: &str, resource: &str) {
        let resource = resource.to_owned();
        self.findings
            .refuse(field, RefusalCause::PartitionWithoutMemory { resource });
    }

    /// Makes the guarantee a cap, as the other systems do. A partition is a cap by itself.
    fn cap_cores(&mut self, container: &ContainerRef<'_>, class: &str, config: &mut VgpuConfig) {
        if class == names::class::MIG {
            return;
        }
        if container.variable("GPU_CORE_UTILIZATION_POLICY") == Some("disable") {
            let field = format!("{container}.env[GPU_CORE_UTILIZATION_POLICY]");
            self.findings.warn(field, WarningCause::CoresNotCapped);
        } else {
            config.compute_policy = Some(ComputePolicy::Fixed);
        }
    }

    /// Several GPUs of a container are different GPUs.
    fn constraints(&self, requests: &[Request<'_>]) -> Vec<DeviceConstraint> {
        let several = requests.iter().filter(|request| request.count > 1);
        several
            .flat_map(|request| {
                let of_request =
                    |distinct: Option<&str>, matching: Option<&str>| DeviceConstraint {
                        distinct_attribute: distinct.map(qualified),
                        match_attribute: matching.map(qualified),
                        requests: Some(vec![request.name.clone()]),
                    };
                let distinct = request
                    .is_share
                    .then(|| of_request(Some(names::attribute::UUID), None));
                let matching = self
                    .options
                    .binds_numa
                    .then(|| of_request(None, Some(names::attribute::NUMA_NODE)));
                distinct.into_iter().chain(matching)
            })
            .collect()
    }
}

/// A claim may only lower its priority below that of its class, which is 0 by default.
fn low_priority(level: u64) -> Option<Priority> {
    let level = i64::try_from(level.min(100)).unwrap_or(100);
    (level > 0)
        .then(|| Priority::try_from(-level).ok())
        .flatten()
}

fn qualified(attribute: &str) -> String {
    if attribute.contains('/') {
        attribute.to_owned()
    } else {
        format!("{}/{attribute}", names::DRIVER)
    }
}

/// Returns each config once, with the requests to which it applies.
fn configs(requests: &[Request<'_>]) -> Vec<DeviceClaimConfiguration> {
    let mut configs: Vec<(&VgpuConfig, Vec<String>)> = Vec::new();
    for request in requests {
        let Some(config) = &request.config else {
            continue;
        };
        match configs.iter_mut().find(|(other, _)| *other == config) {
            Some((_, names)) => names.push(request.name.clone()),
            None => configs.push((config, vec![request.name.clone()])),
        }
    }
    let configuration = |(config, requests): (&VgpuConfig, Vec<String>)| DeviceClaimConfiguration {
        opaque: Some(OpaqueDeviceConfiguration {
            driver: names::DRIVER.to_owned(),
            // A struct of strings and numbers.
            parameters: RawExtension(serde_json::to_value(config).unwrap_or_default()),
        }),
        requests: Some(requests),
    };
    configs.into_iter().map(configuration).collect()
}

fn non_empty<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

/// Returns `gpu-` and 64 bits of the SHA-256 of the claim's JSON, whose keys are in a fixed order.
#[must_use]
pub fn template_name(spec: &ResourceClaimSpec) -> String {
    let json = serde_json::to_vec(spec).unwrap_or_default();
    let digest = Sha256::digest(&json);
    let mut name = "gpu-".to_owned();
    for byte in digest.iter().take(8) {
        name.push_str(&format!("{byte:02x}"));
    }
    name
}
