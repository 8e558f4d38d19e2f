//! Device taints and the tolerations of requests (KEP-5055).

use drava_api::names;
use k8s_openapi::api::resource::v1 as dra;

/// A taint that excludes a device from requests that do not tolerate it.
#[derive(Debug, Clone, PartialEq, Eq)]
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
