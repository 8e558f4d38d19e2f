//! What the shares of a GPU divide.

use std::sync::Arc;

use drava_api::config::Settings;

/// What the shares of a GPU divide. All shares of a GPU divide the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Division {
    /// GPU time.
    #[default]
    Time,
    /// The multiprocessors (`computePolicy: spatial`), among claims of this namespace only: a fault of one program stops those of
    /// all.
    Multiprocessors(Arc<str>),
}

impl Division {
    /// Returns the division of a share of a claim in `namespace` with this config.
    #[must_use]
    pub fn of(settings: &Settings, namespace: &str) -> Self {
        match settings.is_spatial() {
            true => Self::Multiprocessors(namespace.into()),
            false => Self::Time,
        }
    }
}
