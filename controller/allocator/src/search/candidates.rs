//! Devices that may serve a request regardless of usage: selectors of class and claim, and taints.

use std::sync::Arc;

use drava_api::names;

use super::input::{DeviceRef, PoolView};
use crate::claim::{Alternative, ClaimSpec};
use crate::device::Device;
use crate::reason::Rejection;
use crate::selector::{Selector, SelectorError, Selectors};
use crate::turn::Turn;

/// A selector that cannot be evaluated; the pod is unschedulable, as in kube-scheduler.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{owner}: cannot evaluate selector #{index}{device}: {source}")]
pub struct SelectionError {
    /// `class c` or `claim ns/name`.
    pub owner: String,
    /// Position of the selector.
    pub index: usize,
    /// ` on device …`; empty for a selector that does not compile.
    pub device: String,
    /// The failure.
    pub source: SelectorError,
}

/// An alternative with the devices that its selectors select.
pub(super) struct Candidates<'a> {
    pub(super) alternative: &'a Alternative,
    /// Devices that may serve the alternative.
    pub(super) selected: Vec<DeviceRef>,
    /// All other devices, with the reason.
    pub(super) rejected: Vec<(DeviceRef, Rejection)>,
}

impl Candidates<'_> {
    /// Returns the devices that only a taint excludes.
    pub(super) fn tainted(&self) -> impl Iterator<Item = DeviceRef> {
        self.rejected
            .iter()
            .filter(|(_, rejection)| matches!(rejection, Rejection::Tainted(_)))
            .map(|(device, _)| *device)
    }
}

impl<'a> Candidates<'a> {
    pub(super) fn new(
        spec: &ClaimSpec,
        alternative: &'a Alternative,
        pools: &[PoolView<'_>],
        selectors: &Selectors,
        turn: &mut Turn,
    ) -> Result<Self, SelectionError> {
        let mut candidates = Self {
            alternative,
            selected: Vec::new(),
            rejected: Vec::new(),
        };
        for (pool, view) in pools.iter().enumerate() {
            for (index, device) in view.pool.devices.iter().enumerate() {
                let candidate = DeviceRef { pool, index };
                match reject(spec, alternative, (view, device), selectors, turn)? {
                    None => candidates.selected.push(candidate),
                    Some(rejection) => candidates.rejected.push((candidate, rejection)),
                }
            }
        }
        Ok(candidates)
    }
}

/// Returns why the device is no candidate, `None` for a candidate.
fn reject(
    spec: &ClaimSpec,
    alternative: &Alternative,
    (view, device): (&PoolView<'_>, &Device),
    selectors: &Selectors,
    turn: &mut Turn,
) -> Result<Option<Rejection>, SelectionError> {
    let mut all_match = |list: &[Arc<Selector>],
                         owner: &dyn Fn() -> String|
     -> Result<bool, SelectionError> {
        for (index, selector) in list.iter().enumerate() {
            let matched = device
                .selected_by(selectors, selector, turn)
                .map_err(|source| SelectionError {
                    owner: owner(),
                    index,
                    device: match source {
                        SelectorError::Compile(_) | SelectorError::Suspended => String::new(),
                        SelectorError::Runtime(_) => {
                            format!(" on device {}/{}/{}", names::DRIVER, view.name, device.name)
                        }
                    },
                    source,
                })?;
            if !matched {
                return Ok(false);
            }
        }
        Ok(true)
    };
    if !all_match(&alternative.class_selectors, &|| {
        format!("class {}", alternative.class)
    })? {
        return Ok(Some(Rejection::ClassMismatch {
            class: alternative.class.clone(),
        }));
    }
    if !all_match(&alternative.selectors, &|| format!("claim {}", spec.id))? {
        return Ok(Some(Rejection::SelectorMismatch));
    }
    let taint = view
        .pool
        .taints(device)
        .find(|taint| !taint.tolerated_by(&alternative.tolerations));
    Ok(taint.cloned().map(Rejection::Tainted))
}
