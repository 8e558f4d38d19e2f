//! One published device, parsed from a ResourceSlice.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use drava_api::quantity::ParseQuantityError;
use drava_api::{DeviceType, Quantity, names};
use k8s_openapi::api::resource::v1 as dra;

use crate::attribute::Attribute;
use crate::capacity::Capacity;
use crate::selector::{Answers, DeviceValue, Selector, SelectorError, Selectors};
use crate::taint::Taint;

/// A device, with everything a decision needs already parsed.
#[derive(Debug)]
pub struct Device {
    /// Name, unique in its pool.
    pub name: Arc<str>,
    /// Attributes by name as published, qualified or not.
    pub attributes: BTreeMap<String, Attribute>,
    /// Capacities by name as published.
    pub capacity: BTreeMap<String, Capacity>,
    /// Whether several claims may hold it at once (KEP-5075).
    pub shared: bool,
    /// Counters it takes from the card when it is in use (KEP-4815).
    pub consumes: Vec<Consumption>,
    /// Taints, without the one that reserves devices for this controller.
    pub taints: Vec<Taint>,
    /// Conditions that must hold before a pod is bound (KEP-5007), copied into results.
    pub binding_conditions: Vec<String>,
    /// Conditions that give the device up (KEP-5007), copied into results.
    pub binding_failure_conditions: Vec<String>,
    /// The card it belongs to: the `uuid` attribute, or its own name where there is none.
    pub card: Arc<str>,
    /// Type by the `type` attribute; `None` for a type that this build does not know.
    pub kind: Option<DeviceType>,
    value: OnceLock<DeviceValue>,
    answers: Answers,
}

/// Counters taken from one counter set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Consumption {
    /// Name of the set.
    pub set: String,
    /// Amounts by counter name.
    pub counters: BTreeMap<String, Quantity>,
}

/// Why a device of a slice cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// An attribute has no value that this build knows, or a version that is none.
    #[error("device {device}: attribute {attribute}: {problem}")]
    Attribute {
        /// Name of the device.
        device: String,
        /// Name of the attribute.
        attribute: String,
        /// What is wrong.
        problem: String,
    },
    /// A quantity does not parse.
    #[error("device {device}: {field}: {source}")]
    Quantity {
        /// Name of the device.
        device: String,
        /// Where it stands.
        field: String,
        /// What is wrong.
        source: ParseQuantityError,
    },
}

impl Device {
    /// Parses a device of a slice.
    ///
    /// # Errors
    /// Names the field that cannot be used.
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
        let card = Arc::from(text(names::attribute::UUID).unwrap_or(&device.name));
        let kind = text(names::attribute::TYPE).and_then(DeviceType::parse);
        Ok(Self {
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
            card,
            kind,
            attributes,
            value: OnceLock::new(),
            answers: Answers::default(),
        })
    }

    /// Whether a selector selects the device.
    ///
    /// # Errors
    /// When the selector gives no answer.
    pub fn selected_by(
        &self,
        selectors: &Selectors,
        selector: &Selector,
    ) -> Result<bool, SelectorError> {
        let value = self.value.get_or_init(|| {
            DeviceValue::new(names::DRIVER, &self.attributes, &self.capacity, self.shared)
        });
        selectors.answer(selector, value, &self.answers)
    }

    /// An attribute by its fully qualified name; a name in the driver's domain is found unqualified, too.
    #[must_use]
    pub fn attribute(&self, qualified: &str) -> Option<&Attribute> {
        self.attributes
            .get(qualified)
            .or_else(|| match qualified.split_once('/') {
                Some((names::DRIVER, id)) => self.attributes.get(id),
                _ => None,
            })
    }

    /// The published amount of a capacity.
    #[must_use]
    pub fn amount(&self, capacity: &str) -> Option<Quantity> {
        self.capacity.get(capacity).map(|entry| entry.value)
    }

    /// Name for people: that of the card's device, without the suffix of the share.
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
/// When a value is no quantity.
pub fn counters(
    counters: &BTreeMap<String, dra::Counter>,
) -> Result<BTreeMap<String, Quantity>, ParseQuantityError> {
    counters
        .iter()
        .map(|(name, counter)| Ok((name.clone(), Quantity::try_from(&counter.value)?)))
        .collect()
}
