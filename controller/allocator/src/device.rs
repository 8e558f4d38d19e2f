//! One published device, parsed from a ResourceSlice.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use drava_api::quantity::ParseQuantityError;
use drava_api::{DeviceType, Quantity, names};
use k8s_openapi::api::resource::v1 as dra;

use crate::attribute::Attribute;
use crate::attribute::is_of_gpu;
use crate::capacity::Capacity;
use crate::known::Known;
use crate::selector::{DeviceValue, MatchCache, Selector, SelectorError, Selectors};
use crate::taint::Taint;
use crate::turn::Turn;

/// What a device publishes, apart from what differs from GPU to GPU. The nodes of a cluster have few shapes in common, and
/// each is kept [once](Known).
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    /// Name, unique in its pool.
    pub name: Arc<str>,
    /// Attributes by name as published, qualified or not, without those of the GPU.
    attributes: BTreeMap<String, Attribute>,
    /// Capacities by name as published.
    pub capacity: BTreeMap<String, Capacity>,
    /// Whether the device can be allocated to several claims at once (KEP-5075).
    pub shared: bool,
    /// Counters that the device consumes while it is allocated (KEP-4815).
    pub consumes: Vec<Consumption>,
    /// Taints, without the taint that reserves devices for this controller.
    pub taints: Vec<Taint>,
    /// Conditions that must be true before a pod is bound (KEP-5007), copied to results.
    pub binding_conditions: Vec<String>,
    /// Conditions that release the device (KEP-5007), copied to results.
    pub binding_failure_conditions: Vec<String>,
    /// The `type` attribute; `None` for an unknown type.
    pub kind: Option<DeviceType>,
}

/// A shape with what is known of its devices.
#[derive(Debug)]
pub(crate) struct KnownShape {
    shape: Shape,
    value: OnceLock<DeviceValue>,
    /// Results of the selectors that read nothing of the GPU.
    matches: MatchCache,
}

impl KnownShape {
    /// Returns what devices of the shape publish.
    pub(crate) const fn published(&self) -> &Shape {
        &self.shape
    }
}

impl PartialEq for KnownShape {
    fn eq(&self, other: &Self) -> bool {
        self.shape == other.shape
    }
}

impl Eq for KnownShape {}

impl PartialOrd for KnownShape {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for KnownShape {
    fn cmp(&self, other: &Self) -> Ordering {
        self.shape.cmp(&other.shape)
    }
}

/// A published device, parsed once.
#[derive(Debug)]
pub struct Device {
    /// GPU of the device: the `uuid` attribute, or the name of a device without one.
    pub gpu: Arc<str>,
    /// Attributes of the GPU, which its devices have in common.
    of_gpu: Arc<BTreeMap<String, Attribute>>,
    shape: Arc<KnownShape>,
    /// Results of the selectors that read something of the GPU.
    matches: MatchCache,
}

impl Deref for Device {
    type Target = Shape;

    fn deref(&self) -> &Shape {
        &self.shape.shape
    }
}

impl Device {
    /// Returns whether both publish the same.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let is_same_shape =
            Arc::ptr_eq(&self.shape, &other.shape) || self.shape.shape == other.shape.shape;
        is_same_shape && self.of_gpu == other.of_gpu
    }
}

/// Counters consumed from one counter set.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Consumption {
    /// Name of the set.
    pub set: String,
    /// Amounts by counter name.
    pub counters: BTreeMap<String, Quantity>,
}

/// Why a device of a slice is malformed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// An attribute has a value of unknown type or a malformed version.
    #[error("device {device}: attribute {attribute}: {problem}")]
    Attribute {
        /// Name of the device.
        device: String,
        /// Name of the attribute.
        attribute: String,
        /// The problem.
        problem: String,
    },
    /// A quantity does not parse.
    #[error("device {device}: {field}: {source}")]
    Quantity {
        /// Name of the device.
        device: String,
        /// Path of the field.
        field: String,
        /// The parse error.
        source: ParseQuantityError,
    },
}

impl Device {
    /// Parses a device of a slice.
    ///
    /// # Errors
    /// When a field is malformed.
    pub fn parse(device: &dra::Device) -> Result<Self, DeviceError> {
        let attributes = device
            .attributes
            .iter()
            .flatten()
            .map(|(name, value)| {
                let attribute =
                    Attribute::parse(value).map_err(|problem| DeviceError::Attribute {
                        device: device.name.clone(),
                        attribute: name.clone(),
                        problem,
                    })?;
                Ok((name.clone(), attribute))
            })
            .collect::<Result<BTreeMap<_, _>, DeviceError>>()?;
        let in_field = |field: &str| {
            let (device, field) = (device.name.clone(), field.to_owned());
            move |source| DeviceError::Quantity {
                device,
                field,
                source,
            }
        };
        let capacity = device
            .capacity
            .iter()
            .flatten()
            .map(|(name, entry)| {
                Capacity::parse(entry)
                    .map(|capacity| (name.clone(), capacity))
                    .map_err(in_field(&format!("capacity {name}")))
            })
            .collect::<Result<BTreeMap<_, _>, DeviceError>>()?;
        let consumes = device
            .consumes_counters
            .iter()
            .flatten()
            .map(|consumption| {
                Ok(Consumption {
                    set: consumption.counter_set.clone(),
                    counters: counters(&consumption.counters).map_err(in_field(&format!(
                        "consumesCounters {}",
                        consumption.counter_set
                    )))?,
                })
            })
            .collect::<Result<Vec<_>, DeviceError>>()?;
        let text = |name| match attributes.get(name) {
            Some(Attribute::String(value)) => Some(value.as_str()),
            _ => None,
        };
        let gpu = Arc::from(text(names::attribute::UUID).unwrap_or(&device.name));
        let kind = text(names::attribute::TYPE).and_then(DeviceType::parse);
        let (of_gpu, attributes) = attributes.into_iter().partition(|(name, _)| {
            let name = name.rsplit('/').next();
            name.is_some_and(is_of_gpu)
        });
        let shape = Shape {
            name: Arc::from(device.name.as_str()),
            capacity,
            shared: device.allow_multiple_allocations.unwrap_or_default(),
            consumes,
            taints: device
                .taints
                .iter()
                .flatten()
                .filter_map(Taint::foreign)
                .collect(),
            binding_conditions: device.binding_conditions.clone().unwrap_or_default(),
            binding_failure_conditions: device
                .binding_failure_conditions
                .clone()
                .unwrap_or_default(),
            kind,
            attributes,
        };
        Ok(Self {
            gpu,
            of_gpu: Arc::new(of_gpu),
            shape: Arc::new(KnownShape {
                shape,
                value: OnceLock::new(),
                matches: MatchCache::default(),
            }),
            matches: MatchCache::default(),
        })
    }

    /// Shares what the device has in common with known ones, and with the device before it.
    pub(crate) fn share(&mut self, shapes: &mut Known<KnownShape>, before: Option<&Self>) {
        self.shape = shapes.shared(&self.shape);
        if let Some(before) = before
            && before.of_gpu == self.of_gpu
        {
            self.of_gpu = Arc::clone(&before.of_gpu);
            if before.gpu == self.gpu {
                self.gpu = Arc::clone(&before.gpu);
            }
        }
    }

    /// Returns the shape of the device.
    pub(crate) fn shape(&self) -> Arc<KnownShape> {
        Arc::clone(&self.shape)
    }

    /// Returns the cached results of a selector, for the device or for all of its shape.
    fn matches(&self, selector: &Selector) -> &MatchCache {
        match selector.reads_gpu() {
            true => &self.matches,
            false => &self.shape.matches,
        }
    }

    /// Returns whether a selector selects the device.
    ///
    /// # Errors
    /// When the selector cannot be evaluated, and when the turn is over.
    pub fn selected_by(
        &self,
        selectors: &Selectors,
        selector: &Selector,
        turn: &mut Turn,
    ) -> Result<bool, SelectorError> {
        let new = |of_gpu: &BTreeMap<String, Attribute>| {
            let attributes = self.attributes.iter().chain(of_gpu);
            DeviceValue::new(names::DRIVER, attributes, &self.capacity, self.shared)
        };
        let matches = self.matches(selector);
        if selector.reads_gpu() {
            return selectors.matches_cached(selector, || new(&self.of_gpu), matches, turn);
        }
        let value = || {
            self.shape
                .value
                .get_or_init(|| new(&BTreeMap::new()))
                .clone()
        };
        selectors.matches_cached(selector, value, matches, turn)
    }

    /// Returns whether the selector selects the device; one that fails does not. `None` when the turn is over.
    pub(crate) fn is_selected_by(
        &self,
        selectors: &Selectors,
        selector: &Selector,
        turn: &mut Turn,
    ) -> Option<bool> {
        if let Some(known) = self.matches(selector).get(selector) {
            return Some(known.unwrap_or(false));
        }
        match self.selected_by(selectors, selector, turn) {
            Ok(matched) => Some(matched),
            Err(SelectorError::Suspended) => None,
            Err(SelectorError::Compile(_) | SelectorError::Runtime(_)) => {
                self.matches(selector).set(selector, None);
                Some(false)
            }
        }
    }

    /// Returns an attribute by its fully qualified name. Attributes in the driver's domain may be published unqualified.
    #[must_use]
    pub fn attribute(&self, qualified: &str) -> Option<&Attribute> {
        self.published(qualified)
            .or_else(|| match qualified.split_once('/') {
                Some((names::DRIVER, id)) => self.published(id),
                _ => None,
            })
    }

    /// Returns an attribute by its name as published.
    #[must_use]
    pub fn published(&self, name: &str) -> Option<&Attribute> {
        let of_shape = self.attributes.get(name);
        of_shape.or_else(|| self.of_gpu.get(name))
    }

    /// Returns the total amount of a capacity.
    #[must_use]
    pub fn amount(&self, capacity: &str) -> Option<Quantity> {
        self.capacity.get(capacity).map(|entry| entry.value)
    }

    /// Returns the name of the GPU for texts.
    #[must_use]
    pub fn gpu_name(&self) -> &str {
        match self.kind {
            Some(DeviceType::Mig) => names::gpu_of_mig_device(&self.name).unwrap_or(&self.name),
            Some(DeviceType::Gpu | DeviceType::Vgpu) | None => self.display_name(),
        }
    }

    /// Returns the name for texts: without the suffix of the shareable device.
    #[must_use]
    pub fn display_name(&self) -> &str {
        match self.kind {
            Some(DeviceType::Vgpu) => self.name.strip_suffix("-vgpu").unwrap_or(&self.name),
            Some(DeviceType::Gpu | DeviceType::Mig) | None => &self.name,
        }
    }
}

/// Parses the counters of a set or of a consumption.
///
/// # Errors
/// When a value is not a quantity.
pub fn counters(
    counters: &BTreeMap<String, dra::Counter>,
) -> Result<BTreeMap<String, Quantity>, ParseQuantityError> {
    counters
        .iter()
        .map(|(name, counter)| Ok((name.clone(), Quantity::try_from(&counter.value)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_malformed_version() {
        let raw = dra::Device {
            name: "d".to_owned(),
            attributes: Some(BTreeMap::from([(
                "driverVersion".to_owned(),
                dra::DeviceAttribute {
                    version: Some("580.65.06".to_owned()),
                    ..dra::DeviceAttribute::default()
                },
            )])),
            ..dra::Device::default()
        };
        let error = Device::parse(&raw).unwrap_err();
        assert!(
            error.to_string().starts_with(
                "device d: attribute driverVersion: \"580.65.06\" is not a semantic version"
            ),
            "{error}"
        );
    }
}
