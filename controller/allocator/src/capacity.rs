//! How much of a capacity a request consumes: defaults and rounding of KEP-5075.

use std::collections::BTreeMap;

use drava_api::Quantity;
use drava_api::quantity::ParseQuantityError;
use k8s_openapi::api::resource::v1 as dra;

/// A published capacity of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capacity {
    /// The whole amount.
    pub value: Quantity,
    /// What one request may take of it.
    pub policy: Option<Policy>,
}

/// What one request may take of a capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Taken by a request that does not name the capacity.
    pub default: Option<Quantity>,
    /// Amounts allowed.
    pub rule: Rule,
}

/// Amounts that a request may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rule {
    /// Any amount.
    Any,
    /// From `min` to `max`, in steps counted from `min`.
    Range {
        /// Least amount; smaller requests are rounded up to it.
        min: Quantity,
        /// Largest amount of one request.
        max: Option<Quantity>,
        /// Requests are rounded up to `min` plus a multiple of it.
        step: Option<Quantity>,
    },
    /// One of these, ascending; requests are rounded up to the next.
    Values(Vec<Quantity>),
}

/// Why a request cannot take from a capacity, however much is free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// More than one request may take.
    AboveMaximum {
        /// The amount asked for, rounded.
        asked: Quantity,
        /// The most that is allowed.
        maximum: Quantity,
    },
    /// The amount is below zero.
    Negative,
}

impl Capacity {
    /// Parses a published capacity.
    ///
    /// # Errors
    /// When a value is no quantity.
    pub fn parse(capacity: &dra::DeviceCapacity) -> Result<Self, ParseQuantityError> {
        Ok(Self {
            value: Quantity::try_from(&capacity.value)?,
            policy: capacity
                .request_policy
                .as_ref()
                .map(Policy::parse)
                .transpose()?,
        })
    }

    /// What a request for `asked` (`None`: not named) takes.
    ///
    /// # Errors
    /// When the policy allows no such amount.
    pub fn consumption(&self, asked: Option<Quantity>) -> Result<Quantity, Refusal> {
        let policy = self.policy.as_ref();
        let default = policy.and_then(|policy| policy.default);
        let amount = match (asked, policy.map(|policy| &policy.rule)) {
            (None, _) => default.unwrap_or(self.value),
            (Some(asked), None) => asked,
            (Some(asked), Some(rule)) => rule.round_up(asked),
        };
        if amount.is_negative() {
            return Err(Refusal::Negative);
        }
        // An amount equal to the default is always allowed.
        if default == Some(amount) {
            return Ok(amount);
        }
        match policy.and_then(|policy| policy.rule.maximum()) {
            Some(maximum) if amount > maximum => Err(Refusal::AboveMaximum {
                asked: amount,
                maximum,
            }),
            _ => Ok(amount),
        }
    }
}

impl Policy {
    fn parse(policy: &dra::CapacityRequestPolicy) -> Result<Self, ParseQuantityError> {
        let optional = |raw: Option<&_>| raw.map(Quantity::try_from).transpose();
        let rule = match (&policy.valid_range, policy.valid_values.as_deref()) {
            (Some(range), _) => Rule::Range {
                min: Quantity::try_from(&range.min)?,
                max: optional(range.max.as_ref())?,
                step: optional(range.step.as_ref())?.filter(|step| *step > Quantity::ZERO),
            },
            (None, Some(values)) if !values.is_empty() => {
                let mut values = values
                    .iter()
                    .map(Quantity::try_from)
                    .collect::<Result<Vec<_>, _>>()?;
                values.sort();
                Rule::Values(values)
            }
            (None, _) => Rule::Any,
        };
        Ok(Self {
            default: optional(policy.default.as_ref())?,
            rule,
        })
    }
}

impl Rule {
    fn round_up(&self, asked: Quantity) -> Quantity {
        match self {
            Self::Any => asked,
            Self::Range { min, step, .. } => match step {
                _ if asked < *min => *min,
                None => asked,
                Some(step) => {
                    let above = (asked - *min).nano();
                    let steps = above.div_euclid(step.nano())
                        + i128::from(above.rem_euclid(step.nano()) != 0);
                    step.with_nano(min.nano().saturating_add(step.nano().saturating_mul(steps)))
                }
            },
            Self::Values(values) => values
                .iter()
                .copied()
                .find(|value| asked <= *value)
                .unwrap_or(asked),
        }
    }

    fn maximum(&self) -> Option<Quantity> {
        match self {
            Self::Any => None,
            Self::Range { max, .. } => *max,
            Self::Values(values) => values.last().copied(),
        }
    }
}

/// Amounts by capacity name.
pub type Amounts = BTreeMap<String, Quantity>;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn capacity(value: &str, policy: &serde_json::Value) -> Capacity {
        let raw: dra::DeviceCapacity =
            serde_json::from_value(json!({"value": value, "requestPolicy": policy})).unwrap();
        Capacity::parse(&raw).unwrap()
    }

    #[test]
    fn consumption() {
        let range =
            json!({"default": "4Gi", "validRange": {"min": "1Gi", "max": "16Gi", "step": "2Gi"}});
        let open = json!({"default": "0", "validRange": {"min": "0"}});
        let values = json!({"default": "1", "validValues": ["4", "1", "2"]});
        let odd_default = json!({"default": "3Gi", "validRange": {"min": "1Gi", "max": "2Gi"}});
        let cases = [
            // Not asked for: the default, or everything.
            (capacity("80Gi", &json!(null)), None, "80Gi"),
            (capacity("80Gi", &range), None, "4Gi"),
            (capacity("100", &open), None, "0"),
            // Rounded up from the least amount by steps.
            (capacity("80Gi", &range), Some("1"), "1Gi"),
            (capacity("80Gi", &range), Some("0"), "1Gi"),
            (capacity("80Gi", &range), Some("1Gi"), "1Gi"),
            (capacity("80Gi", &range), Some("1025Mi"), "3Gi"),
            (capacity("80Gi", &range), Some("3Gi"), "3Gi"),
            (capacity("80Gi", &range), Some("14Gi"), "15Gi"),
            (capacity("80Gi", &range), Some("15.5Gi"), "above"),
            (capacity("80Gi", &range), Some("16Gi"), "above"),
            // Fractions of a unit count as a whole one when there are steps.
            (
                capacity(
                    "100",
                    &json!({"default": "0", "validRange": {"min": "0", "max": "100", "step": "1"}}),
                ),
                Some("100m"),
                "1",
            ),
            (capacity("100", &open), Some("100m"), "100m"),
            // The default is allowed even where the rule would refuse it.
            (capacity("80Gi", &odd_default), None, "3Gi"),
            (capacity("80Gi", &odd_default), Some("3Gi"), "3Gi"),
            (capacity("80Gi", &odd_default), Some("2.5Gi"), "above"),
            // The next value of a list.
            (capacity("8", &values), Some("3"), "4"),
            (capacity("8", &values), Some("1"), "1"),
            (capacity("8", &values), Some("5"), "above"),
            (capacity("8", &values), None, "1"),
            // Without a policy what is asked for.
            (capacity("80Gi", &json!(null)), Some("100Gi"), "100Gi"),
            (capacity("80Gi", &json!(null)), Some("-1"), "negative"),
            (capacity("80Gi", &range), Some("-1"), "1Gi"),
        ];
        for (capacity, asked, expected) in cases {
            let outcome = match capacity.consumption(asked.map(|text| text.parse().unwrap())) {
                Ok(amount) => amount.to_string(),
                Err(Refusal::AboveMaximum { .. }) => "above".to_owned(),
                Err(Refusal::Negative) => "negative".to_owned(),
            };
            assert_eq!(outcome, expected, "{asked:?} of {capacity:?}");
        }
    }

    #[test]
    fn a_step_of_nothing_is_no_step() {
        let capacity = capacity(
            "8",
            &json!({"default": "1", "validRange": {"min": "0", "step": "0"}}),
        );
        assert_eq!(
            capacity.consumption(Some(Quantity::count(3))),
            Ok(Quantity::count(3))
        );
    }
}
