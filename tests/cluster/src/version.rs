//! Supported releases of Kubernetes.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail};

/// A supported minor release, built at the newest patch release on the Go module proxy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kubernetes {
    /// Kubernetes 1.36, the oldest release that drava supports fully.
    V1_36,
    /// Kubernetes 1.37.
    #[default]
    V1_37,
}

impl Kubernetes {
    /// The oldest supported release.
    pub const OLDEST: Self = Self::V1_36;
    /// Every supported release, oldest first.
    pub const ALL: [Self; 2] = [Self::V1_36, Self::V1_37];

    /// Minor version as users write it: `1.37`.
    #[must_use]
    pub fn minor(self) -> &'static str {
        match self {
            Self::V1_36 => "1.36",
            Self::V1_37 => "1.37",
        }
    }

    /// The exact release: `v1.37.1`. The folder `go/kubernetes-<minor>` pins the same.
    #[must_use]
    pub fn version(self) -> &'static str {
        match self {
            Self::V1_36 => "v1.36.3",
            Self::V1_37 => "v1.37.1",
        }
    }
}

impl fmt::Display for Kubernetes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.minor())
    }
}

impl FromStr for Kubernetes {
    type Err = anyhow::Error;

    /// Reads `1.37`, `v1.37` or the exact release.
    fn from_str(text: &str) -> Result<Self> {
        let wanted = text.trim_start_matches('v');
        for release in Self::ALL {
            if wanted == release.minor() || wanted == release.version().trim_start_matches('v') {
                return Ok(release);
            }
        }
        let served =
            Self::ALL.map(|release| format!("{} ({})", release.minor(), release.version()));
        bail!(
            "unsupported Kubernetes release {text:?}: choose one of {}",
            served.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_minor_and_exact_versions() {
        for text in ["1.37", "v1.37", "1.37.1", "v1.37.1"] {
            assert_eq!(
                text.parse::<Kubernetes>().unwrap(),
                Kubernetes::V1_37,
                "{text}"
            );
        }
        assert_eq!("1.36".parse::<Kubernetes>().unwrap(), Kubernetes::V1_36);
    }

    #[test]
    fn error_lists_supported_releases() {
        let message = "1.35".parse::<Kubernetes>().unwrap_err().to_string();
        assert!(
            message.contains("1.36 (v1.36.3)") && message.contains("1.37 (v1.37.1)"),
            "{message}"
        );
        assert!("1.37.9".parse::<Kubernetes>().is_err());
    }

    #[test]
    fn go_modules_pin_supported_releases() {
        for release in Kubernetes::ALL {
            let go_mod = format!(
                "{}/go/kubernetes-{}/go.mod",
                env!("CARGO_MANIFEST_DIR"),
                release.minor()
            );
            let text = std::fs::read_to_string(&go_mod).unwrap();
            let pin = format!("k8s.io/kubernetes {} ", release.version());
            assert!(text.contains(&pin), "{go_mod} does not pin {pin}");
        }
    }
}
