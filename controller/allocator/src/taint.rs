//! Device taints, from slices and from DeviceTaintRules, and the tolerations of requests (KEP-5055).

use drava_api::names;
use k8s_openapi::api::resource::{v1 as dra, v1beta2};

/// A taint that excludes a device from requests that do not tolerate it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Taint {
    /// Key, such as `gpu.drava.dev/unhealthy`.
    pub key: String,
    /// Value; may be empty.
    pub value: String,
    /// `NoSchedule` or `NoExecute`.
    pub effect: String,
}

impl Taint {
    /// Returns the taint, unless its effect excludes nothing or it is the taint that reserves devices for this
    /// controller.
    #[must_use]
    pub fn foreign(taint: &dra::DeviceTaint) -> Option<Self> {
        let excludes = matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
        (excludes && taint.key != names::MANAGED_TAINT).then(|| Self {
            key: taint.key.clone(),
            value: taint.value.clone().unwrap_or_default(),
            effect: taint.effect.clone(),
        })
    }

    /// Returns whether the taint marks an unhealthy device.
    #[must_use]
    pub fn is_unhealthy(&self) -> bool {
        self.key == names::UNHEALTHY_TAINT
    }

    /// Returns whether one of `tolerations` tolerates the taint.
    #[must_use]
    pub fn tolerated_by(&self, tolerations: &[dra::DeviceToleration]) -> bool {
        tolerations.iter().any(|toleration| {
            let key = toleration.key.as_deref().unwrap_or_default();
            let effect = toleration.effect.as_deref().unwrap_or_default();
            let exists = toleration.operator.as_deref() == Some("Exists");
            let value_matches =
                exists || toleration.value.as_deref().unwrap_or_default() == self.value;
            let key_matches = key == self.key || (key.is_empty() && exists);
            key_matches && value_matches && (effect.is_empty() || effect == self.effect)
        })
    }
}

/// A DeviceTaintRule that can affect devices of this driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaintRule {
    /// Name of the pool; every pool if unset.
    pool: Option<String>,
    /// Name of the device; every device if unset.
    device: Option<String>,
    /// The taint of the selected devices.
    taint: Taint,
}

impl TaintRule {
    /// Parses a rule; `None` if it affects no device of this driver.
    #[must_use]
    pub fn parse(rule: &dra::DeviceTaintRule) -> Option<Self> {
        // A rule without a selector selects no device, a rule with an empty one all devices.
        let selector = rule.spec.device_selector.as_ref()?;
        let is_own = selector
            .driver
            .as_deref()
            .is_none_or(|driver| driver == names::DRIVER);
        let taint = Taint::foreign(&rule.spec.taint)?;
        is_own.then(|| Self {
            pool: selector.pool.clone(),
            device: selector.device.clone(),
            taint,
        })
    }

    /// Returns the name of the pool; `None` for every pool.
    pub(crate) fn pool(&self) -> Option<&str> {
        self.pool.as_deref()
    }

    /// Returns the taint if the rule selects the device.
    pub(crate) fn taint_of(&self, pool: &str, device: &str) -> Option<&Taint> {
        let selects =
            |name: &Option<String>, actual: &str| name.as_deref().is_none_or(|name| name == actual);
        (selects(&self.pool, pool) && selects(&self.device, device)).then_some(&self.taint)
    }
}

/// Converts a rule as Kubernetes 1.36 serves it; the fields are those of `v1`.
#[must_use]
pub fn rule_from_v1beta2(rule: v1beta2::DeviceTaintRule) -> dra::DeviceTaintRule {
    dra::DeviceTaintRule {
        metadata: rule.metadata,
        spec: dra::DeviceTaintRuleSpec {
            device_selector: rule
                .spec
                .device_selector
                .map(|selector| dra::DeviceTaintSelector {
                    device: selector.device,
                    driver: selector.driver,
                    pool: selector.pool,
                }),
            taint: dra::DeviceTaint {
                effect: rule.spec.taint.effect,
                key: rule.spec.taint.key,
                time_added: rule.spec.taint.time_added,
                value: rule.spec.taint.value,
            },
        },
        status: None,
    }
}

impl std::fmt::Display for Taint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.value.is_empty() {
            write!(f, "{}:{}", self.key, self.effect)
        } else {
            write!(f, "{}={}:{}", self.key, self.value, self.effect)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taint(key: &str, value: Option<&str>, effect: &str) -> dra::DeviceTaint {
        dra::DeviceTaint {
            key: key.to_owned(),
            value: value.map(str::to_owned),
            effect: effect.to_owned(),
            time_added: None,
        }
    }

    fn toleration(
        key: Option<&str>,
        operator: Option<&str>,
        value: Option<&str>,
        effect: Option<&str>,
    ) -> dra::DeviceToleration {
        dra::DeviceToleration {
            key: key.map(str::to_owned),
            operator: operator.map(str::to_owned),
            value: value.map(str::to_owned),
            effect: effect.map(str::to_owned),
            toleration_seconds: None,
        }
    }

    #[test]
    fn ignores_managed_taint_and_unknown_effects() {
        assert_eq!(
            Taint::foreign(&taint(names::MANAGED_TAINT, Some("true"), "NoSchedule")),
            None
        );
        assert_eq!(Taint::foreign(&taint("a", None, "None")), None);
        assert_eq!(Taint::foreign(&taint("a", None, "SomethingNew")), None);
        assert!(Taint::foreign(&taint("a", None, "NoExecute")).is_some());
    }

    #[test]
    fn parses_rules_for_own_devices() {
        let rule = |selector: serde_json::Value, effect: &str| {
            let spec = serde_json::json!({"deviceSelector": selector, "taint": {"key": "k", "effect": effect}});
            let rule: v1beta2::DeviceTaintRule = serde_json::from_value(
                serde_json::json!({"metadata": {"name": "r"}, "spec": spec}),
            )
            .unwrap();
            TaintRule::parse(&rule_from_v1beta2(rule))
        };
        let taints = |selector: serde_json::Value, pool: &str, device: &str| {
            rule(selector, "NoSchedule").is_some_and(|rule| rule.taint_of(pool, device).is_some())
        };
        use serde_json::json;
        assert_eq!(rule(json!({}), "None"), None);
        assert_eq!(
            rule(json!(null), "NoSchedule"),
            None,
            "no selector, no device"
        );
        assert!(taints(json!({}), "p", "d"));
        assert!(taints(json!({"driver": names::DRIVER}), "p", "d"));
        assert!(!taints(json!({"driver": "other.example.com"}), "p", "d"));
        assert!(taints(json!({"pool": "p", "device": "d"}), "p", "d"));
        assert!(!taints(json!({"pool": "p", "device": "d"}), "p", "e"));
        assert!(!taints(json!({"pool": "p"}), "q", "d"));
    }

    #[test]
    fn matches_tolerations_as_upstream() {
        let taint = Taint::foreign(&taint("a", Some("v"), "NoSchedule")).unwrap();
        for (toleration, tolerated) in [
            (toleration(None, Some("Exists"), None, None), true),
            (toleration(Some("a"), Some("Exists"), None, None), true),
            (toleration(Some("b"), Some("Exists"), None, None), false),
            (toleration(Some("a"), Some("Equal"), Some("v"), None), true),
            (
                toleration(Some("a"), None, Some("v"), Some("NoSchedule")),
                true,
            ),
            (toleration(Some("a"), None, Some("w"), None), false),
            (
                toleration(Some("a"), Some("Exists"), None, Some("NoExecute")),
                false,
            ),
            (toleration(None, None, Some("v"), None), false),
        ] {
            assert_eq!(
                taint.tolerated_by(std::slice::from_ref(&toleration)),
                tolerated,
                "{toleration:?}"
            );
        }
        assert!(!taint.tolerated_by(&[]));
    }
}
