//! Device capacities and the amount that a request consumes: defaults and rounding of KEP-5075.

use drava_api::Quantity;
use drava_api::config::Percent;
use drava_api::quantity::ParseQuantityError;
use k8s_openapi::api::resource::v1 as dra;

/// A published capacity of a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Capacity {
    /// Total amount.
    pub value: Quantity,
    /// Amounts that one request may consume; any if `None`.
    pub policy: Option<RequestPolicy>,
}

/// Amounts that one request may consume of a capacity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestPolicy {
    /// Consumed by a request that does not name the capacity.
    pub default: Option<Quantity>,
    /// Valid amounts.
    pub valid: ValidAmounts,
}

/// Valid amounts of a request.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum ValidAmounts {
    /// Any amount.
    Any,
    /// From `min` to `max`, in steps counted from `min`.
    Range {
        /// Minimum; smaller requests are rounded up.
        min: Quantity,
        /// Maximum of one request.
        max: Option<Quantity>,
        /// Requests are rounded up to `min` plus a multiple of this amount.
        step: Option<Quantity>,
    },
    /// One of these, ascending; requests are rounded up to the next.
    Values(Vec<Quantity>),
}

/// Why a request can never consume from a capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CapacityError {
    /// The amount exceeds the maximum of one request.
    AboveMaximum {
        /// Requested amount, rounded.
        requested: Quantity,
        /// Maximum of one request.
        maximum: Quantity,
    },
    /// The amount is below zero.
    Negative,
}

impl Capacity {
    /// Parses a published capacity.
    ///
    /// # Errors
    /// When a value is not a quantity.
    pub fn parse(capacity: &dra::DeviceCapacity) -> Result<Self, ParseQuantityError> {
        Ok(Self {
            value: Quantity::try_from(&capacity.value)?,
            policy: capacity
                .request_policy
                .as_ref()
                .map(RequestPolicy::parse)
                .transpose()?,
        })
    }

    /// Returns what a request consumes; `None` if the request does not name the capacity.
    ///
    /// # Errors
    /// When the policy does not allow the amount.
    pub fn consumption(&self, requested: Option<Quantity>) -> Result<Quantity, CapacityError> {
        let policy = self.policy.as_ref();
        let default = policy.and_then(|policy| policy.default);
        let amount = match (requested, policy.map(|policy| &policy.valid)) {
            (None, _) => default.unwrap_or(self.value),
            (Some(requested), None) => requested,
            (Some(requested), Some(valid)) => valid.round_up(requested),
        };
        if amount.is_negative() {
            return Err(CapacityError::Negative);
        }
        // An amount equal to the default is always allowed.
        if default == Some(amount) {
            return Ok(amount);
        }
        match policy.and_then(|policy| policy.valid.maximum()) {
            Some(maximum) if amount > maximum => Err(CapacityError::AboveMaximum {
                requested: amount,
                maximum,
            }),
            _ => Ok(amount),
        }
    }
}

impl Capacity {
    /// Returns the maximum of one request.
    #[must_use]
    pub fn maximum(&self) -> Quantity {
        let policy = self.policy.as_ref();
        let maximum = policy.and_then(|policy| policy.valid.maximum());
        maximum.unwrap_or(self.value).min(self.value)
    }

    /// Returns what a request for a percentage of the device consumes. 100% is the amount that a request consumes by
    /// default. Steps are rounded down, so that percentages that add up to 100 fit together.
    ///
    /// # Errors
    /// When the policy does not allow the amount.
    pub fn fraction(&self, percent: Percent) -> Result<Quantity, CapacityError> {
        let whole = self.consumption(None)?;
        let part = whole.nano().saturating_mul(i128::from(percent.get())) / 100;
        let (min, step) = match self.policy.as_ref().map(|policy| &policy.valid) {
            Some(ValidAmounts::Range { min, step, .. }) => (*min, *step),
            _ => (Quantity::ZERO, None),
        };
        let step = step.unwrap_or(Quantity::count(1)).nano();
        let above = part.saturating_sub(min.nano());
        self.consumption(Some(whole.with_nano(part - above.rem_euclid(step))))
    }
}

impl RequestPolicy {
    fn parse(policy: &dra::CapacityRequestPolicy) -> Result<Self, ParseQuantityError> {
        let optional = |raw: Option<&_>| raw.map(Quantity::try_from).transpose();
        let valid = match (&policy.valid_range, policy.valid_values.as_deref()) {
            (Some(range), _) => ValidAmounts::Range {
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
                ValidAmounts::Values(values)
            }
            (None, _) => ValidAmounts::Any,
        };
        Ok(Self {
            default: optional(policy.default.as_ref())?,
            valid,
        })
    }
}

impl ValidAmounts {
    fn round_up(&self, requested: Quantity) -> Quantity {
        match self {
            Self::Any => requested,
            Self::Range { min, step, .. } => match step {
                _ if requested < *min => *min,
                None => requested,
                Some(step) => {
                    let above = (requested - *min).nano();
                    let steps = above.div_euclid(step.nano())
                        + i128::from(above.rem_euclid(step.nano()) != 0);
                    step.with_nano(min.nano().saturating_add(step.nano().saturating_mul(steps)))
                }
            },
            Self::Values(values) => values
                .iter()
                .copied()
                .find(|value| requested <= *value)
                .unwrap_or(requested),
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

/// Amounts by capacity name, in the order of the names. A cluster has several for each claim, of few capacities each, so they are
/// a list: a map has room for eleven.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Amounts(Vec<(String, Quantity)>);

impl Amounts {
    /// Returns no amounts.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    fn position(&self, name: &str) -> Result<usize, usize> {
        self.0
            .binary_search_by(|(known, _)| known.as_str().cmp(name))
    }

    /// Returns the amount of a capacity.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Quantity> {
        let (_, amount) = self.0.get(self.position(name).ok()?)?;
        Some(amount)
    }

    /// Returns the amount of a capacity, to change it.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Quantity> {
        let position = self.position(name).ok()?;
        let (_, amount) = self.0.get_mut(position)?;
        Some(amount)
    }

    /// Sets the amount of a capacity to what `change` returns of the amount before, which is zero if there is none.
    pub fn change(&mut self, name: &str, change: impl FnOnce(Quantity) -> Quantity) {
        match self.get_mut(name) {
            Some(amount) => *amount = change(*amount),
            None => self.insert(name.to_owned(), change(Quantity::ZERO)),
        }
    }

    /// Sets the amount of a capacity.
    pub fn insert(&mut self, name: String, amount: Quantity) {
        match self.position(&name) {
            Ok(_) => self.change(&name, |_| amount),
            Err(position) => self.0.insert(position, (name, amount)),
        }
    }

    /// Returns whether there is an amount of a capacity.
    #[must_use]
    pub fn contains_key(&self, name: &str) -> bool {
        self.position(name).is_ok()
    }

    /// Returns the names of the capacities.
    pub fn keys(&self) -> impl Iterator<Item = &String> {
        self.0.iter().map(|(name, _)| name)
    }

    /// Returns the amounts with the names of their capacities.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &Quantity)> {
        self.into_iter()
    }

    /// Removes the amounts of which `is_kept` returns false.
    pub fn retain(&mut self, mut is_kept: impl FnMut(&str, Quantity) -> bool) {
        self.0.retain(|(name, amount)| is_kept(name, *amount));
    }
}

impl FromIterator<(String, Quantity)> for Amounts {
    fn from_iter<I: IntoIterator<Item = (String, Quantity)>>(amounts: I) -> Self {
        let mut all = Self::new();
        for (name, amount) in amounts {
            all.insert(name, amount);
        }
        all.0.shrink_to_fit();
        all
    }
}

impl<const COUNT: usize> From<[(String, Quantity); COUNT]> for Amounts {
    fn from(amounts: [(String, Quantity); COUNT]) -> Self {
        amounts.into_iter().collect()
    }
}

impl<'a> IntoIterator for &'a Amounts {
    type Item = (&'a String, &'a Quantity);
    type IntoIter = std::iter::Map<
        std::slice::Iter<'a, (String, Quantity)>,
        fn(&'a (String, Quantity)) -> Self::Item,
    >;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter().map(|(name, amount)| (name, amount))
    }
}

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
    fn rounds_requests_as_kep_5075() {
        let range =
            json!({"default": "4Gi", "validRange": {"min": "1Gi", "max": "16Gi", "step": "2Gi"}});
        let open = json!({"default": "0", "validRange": {"min": "0"}});
        let values = json!({"default": "1", "validValues": ["4", "1", "2"]});
        let odd_default = json!({"default": "3Gi", "validRange": {"min": "1Gi", "max": "2Gi"}});
        let cases = [
            // Not requested: the default, or the total.
            (capacity("80Gi", &json!(null)), None, "80Gi"),
            (capacity("80Gi", &range), None, "4Gi"),
            (capacity("100", &open), None, "0"),
            // Rounded up from the minimum by steps.
            (capacity("80Gi", &range), Some("1"), "1Gi"),
            (capacity("80Gi", &range), Some("0"), "1Gi"),
            (capacity("80Gi", &range), Some("1Gi"), "1Gi"),
            (capacity("80Gi", &range), Some("1025Mi"), "3Gi"),
            (capacity("80Gi", &range), Some("3Gi"), "3Gi"),
            (capacity("80Gi", &range), Some("14Gi"), "15Gi"),
            (capacity("80Gi", &range), Some("15.5Gi"), "above"),
            (capacity("80Gi", &range), Some("16Gi"), "above"),
            // With steps, fractions of a unit are rounded up.
            (
                capacity(
                    "100",
                    &json!({"default": "0", "validRange": {"min": "0", "max": "100", "step": "1"}}),
                ),
                Some("100m"),
                "1",
            ),
            (capacity("100", &open), Some("100m"), "100m"),
            // The default is valid even outside the range.
            (capacity("80Gi", &odd_default), None, "3Gi"),
            (capacity("80Gi", &odd_default), Some("3Gi"), "3Gi"),
            (capacity("80Gi", &odd_default), Some("2.5Gi"), "above"),
            // The next value of a list.
            (capacity("8", &values), Some("3"), "4"),
            (capacity("8", &values), Some("1"), "1"),
            (capacity("8", &values), Some("5"), "above"),
            (capacity("8", &values), None, "1"),
            // Without a policy: the requested amount.
            (capacity("80Gi", &json!(null)), Some("100Gi"), "100Gi"),
            (capacity("80Gi", &json!(null)), Some("-1"), "negative"),
            (capacity("80Gi", &range), Some("-1"), "1Gi"),
        ];
        for (capacity, requested, expected) in cases {
            let outcome = match capacity.consumption(requested.map(|text| text.parse().unwrap())) {
                Ok(amount) => amount.to_string(),
                Err(CapacityError::AboveMaximum { .. }) => "above".to_owned(),
                Err(CapacityError::Negative) => "negative".to_owned(),
            };
            assert_eq!(outcome, expected, "{requested:?} of {capacity:?}");
        }
    }

    #[test]
    fn rounds_percentages_down() {
        let policy =
            json!({"default": "10Gi", "validRange": {"min": "1Mi", "max": "10Gi", "step": "1Mi"}});
        let shared = capacity("10Gi", &policy);
        // Memory of an oversubscribed GPU: the percentage is one of the GPU's own memory.
        let scaled = capacity("20Gi", &policy);
        let cases = [
            (&shared, 100, "10Gi"),
            (&shared, 50, "5Gi"),
            (&shared, 33, "3379Mi"),
            (&shared, 1, "102Mi"),
            (&scaled, 50, "5Gi"),
            (&capacity("10", &json!(null)), 25, "2"),
        ];
        for (capacity, percent, expected) in cases {
            let percent = Percent::try_from(percent).unwrap();
            let amount = capacity.fraction(percent).unwrap();
            assert_eq!(amount.to_string(), expected, "{percent:?} of {capacity:?}");
        }
    }

    #[test]
    fn amounts_are_sorted_by_name() {
        let of = |name: &str, count| (name.to_owned(), Quantity::count(count));
        let mut amounts = Amounts::from([of("b", 1), of("c", 2), of("a", 3), of("b", 4)]);
        assert_eq!(amounts, Amounts::from([of("a", 3), of("b", 4), of("c", 2)]));
        amounts.change("b", |before| before + Quantity::count(1));
        amounts.change("aa", |before| before + Quantity::count(7));
        amounts.retain(|name, _| name != "c");
        assert_eq!(amounts.keys().collect::<Vec<_>>(), ["a", "aa", "b"]);
        assert_eq!(
            amounts,
            Amounts::from([of("aa", 7), of("b", 5), of("a", 3)])
        );
        assert_eq!((amounts.get("c"), amounts.contains_key("aa")), (None, true));
    }

    #[test]
    fn ignores_step_of_zero() {
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
