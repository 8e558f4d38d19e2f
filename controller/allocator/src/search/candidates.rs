//! Which devices may serve a request whatever is in use: selectors of class and claim, and taints.

use std::sync::Arc;

use drava_api::names;

use super::question::{DeviceRef, PoolView};
use crate::claim::{Alternative, ClaimSpec};
use crate::device::Device;
use crate::reason::Rejection;
use crate::selector::{Selector, SelectorError, Selectors};

/// A selector that gave no answer; fails the pod, as in kube-scheduler.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{owner}: selector #{index}{device}: {source}")]
pub struct SelectionError {
    /// `class c` or `claim ns/name`.
    pub owner: String,
    /// Position of the selector.
    pub index: usize,
    /// ` on device …`, empty for one that does not compile.
    pub device: String,
    /// What went wrong.
    pub source: SelectorError,
}

/// An alternative with the devices that its selectors select.
pub(super) struct Prepared<'a> {
    pub(super) alternative: &'a Alternative,
    /// Those that may serve, whatever is in use.
    pub(super) candidates: Vec<DeviceRef>,
    /// The others, with what excludes them.
    pub(super) unselected: Vec<(DeviceRef, Rejection)>,
}

impl<'a> Prepared<'a> {
    pub(super) fn new(
        spec: &ClaimSpec,
        alternative: &'a Alternative,
        pools: &[PoolView<'_>],
        selectors: &Selectors,
    ) -> Result<Self, SelectionError> {
        let mut prepared = Self {
            alternative,
            candidates: Vec::new(),
            unselected: Vec::new(),
        };
        for (pool, view) in pools.iter().enumerate() {
            for (index, device) in view.pool.devices.iter().enumerate() {
                let candidate = DeviceRef { pool, index };
                match select(spec, alternative, view.name, device, selectors)? {
                    None => prepared.candidates.push(candidate),
                    Some(rejection) => prepared.unselected.push((candidate, rejection)),
                }
            }
        }
        Ok(prepared)
    }
}

/// Why the device is no candidate whatever is in use, if it is none.
fn select(
    spec: &ClaimSpec,
    alternative: &Alternative,
    pool: &str,
    device: &Device,
    selectors: &Selectors,
) -> Result<Option<Rejection>, SelectionError> {
    let all_match =
        |list: &[Arc<Selector>], owner: &dyn Fn() -> String| -> Result<bool, SelectionError> {
            for (index, selector) in list.iter().enumerate() {
                let matched =
                    device
                        .selected_by(selectors, selector)
                        .map_err(|source| SelectionError {
                            owner: owner(),
                            index,
                            device: match source {
                                SelectorError::Compile(_) => String::new(),
                                SelectorError::Runtime(_) => {
                                    format!(" on device {}/{pool}/{}", names::DRIVER, device.name)
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
        return Ok(Some(Rejection::ClassMismatch));
    }
    if !all_match(&alternative.selectors, &|| format!("claim {}", spec.id))? {
        return Ok(Some(Rejection::SelectorMismatch));
    }
    let taint = device
        .taints
        .iter()
        .find(|taint| !taint.tolerated_by(&alternative.tolerations));
    Ok(taint.cloned().map(Rejection::Tainted))
}
