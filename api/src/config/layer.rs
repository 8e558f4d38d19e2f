//! Fields that each layer may set, and the settings that result from the documents.

use std::fmt;

use super::{
    ComputePolicy, Enforcement, MemoryBurst, MemoryEnforcement, MemoryPolicy, MemoryReclaim,
    Percent, Placement, Priority, Seconds, VgpuConfig,
};
use crate::Quantity;

/// Origin of a config document, with the values it may set.
///
/// | Field | class | claim |
/// |---|---|---|
/// | `computePolicy` | any | `fixed`, unless the class says `spatial` |
/// | `priority` | any | up to the class's `maxPriority` |
/// | `maxPriority`, `memory.policy`, `memory.enforcement`, `enforcement`, `unmetered` | any | – |
/// | `memory.maxLimit`, `memory.maxBurst`, `memory.lendIdle` | any | – |
/// | `memory.limit` | – | up to the class's `memory.maxLimit` |
/// | `memory.burst` | – | up to the class's `memory.maxBurst` |
/// | `memory.percent`, `memory.reclaim` | – | any |
/// | `placement` | any | any |
/// | `suspend.allowed` | any | `true` unless the class says `false` |
/// | `suspend.maxSuspendSeconds` | any | up to the class's |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    /// The DeviceClass, written by the administrator.
    Class,
    /// The ResourceClaim, written by the tenant.
    Claim,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Class => "device class",
            Self::Claim => "claim",
        })
    }
}

/// A field or value that its layer does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("config field {path}: not allowed in a {layer} ({hint})")]
pub struct ForbiddenField {
    /// Path of the field.
    pub path: &'static str,
    /// Layer of the document.
    pub layer: Layer,
    /// What is allowed instead.
    hint: String,
}

impl ForbiddenField {
    fn new(path: &'static str, layer: Layer, allowed: &str) -> Self {
        Self {
            path,
            layer,
            hint: allowed.to_owned(),
        }
    }
}

/// Config after all layers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Settings {
    /// Enforcement of GPU time.
    pub compute_policy: ComputePolicy,
    /// Priority among the shares of the GPU.
    pub priority: Priority,
    /// Highest priority that a claim may choose; default: the class's priority.
    pub max_priority: Option<Priority>,
    /// Percent of the GPU's memory that replaces a capacity request.
    pub memory_percent: Option<Percent>,
    /// Reaction to allocations beyond the memory limit.
    pub memory_policy: MemoryPolicy,
    /// What limits the memory.
    pub memory_enforcement: MemoryEnforcement,
    /// The most that the share may use while memory is free; see [`Settings::burst_limit`].
    pub memory_limit: Option<Quantity>,
    /// Highest limit that a claim may choose; default: none.
    pub max_memory_limit: Option<Quantity>,
    /// Memory that the share uses beyond its guarantee.
    pub memory_burst: MemoryBurst,
    /// The most that a claim may choose of that.
    pub max_memory_burst: MemoryBurst,
    /// Whether other shares may use what the share is guaranteed and does not use; see [`Settings::lends_idle`].
    pub memory_lend_idle: bool,
    /// How the share gives that memory back.
    pub memory_reclaim: Option<MemoryReclaim>,
    /// Reaction to a process that bypasses or exceeds its limits.
    pub enforcement: Enforcement,
    /// Requested placement policies; `None`: the controller's default.
    pub placement: Placement,
    /// Whether the graphics and video libraries, which no limit covers, are mounted.
    pub unmetered: bool,
    /// Whether the claim may be suspended; `None`: no layer says so, which means no.
    pub suspend_allowed: Option<bool>,
    /// Longest time for which the claim is suspended for other pods; default: no limit.
    pub max_suspend: Option<Seconds>,
}

impl Settings {
    /// Returns these settings with the fields of `config` applied.
    ///
    /// # Errors
    /// If `layer` does not allow a field or its value.
    pub fn under(self, config: &VgpuConfig, layer: Layer) -> Result<Self, ForbiddenField> {
        match layer {
            Layer::Class => check_class(config)?,
            Layer::Claim => self.check_claim(config)?,
        }
        let memory = config.memory.unwrap_or_default();
        let placement = config.placement.unwrap_or_default();
        Ok(Self {
            compute_policy: config.compute_policy.unwrap_or(self.compute_policy),
            priority: config.priority.unwrap_or(self.priority),
            max_priority: match layer {
                Layer::Class => config.max_priority.or(self.max_priority),
                // Fixed by the class, so that a second claim document cannot exceed the first one.
                Layer::Claim => Some(self.claim_priority_limit()),
            },
            memory_percent: memory.percent.or(self.memory_percent),
            memory_policy: memory.policy.unwrap_or(self.memory_policy),
            memory_enforcement: memory.enforcement.unwrap_or(self.memory_enforcement),
            memory_limit: memory.limit.or(self.memory_limit),
            max_memory_limit: memory.max_limit.or(self.max_memory_limit),
            memory_burst: memory.burst.unwrap_or(self.memory_burst),
            max_memory_burst: memory.max_burst.unwrap_or(self.max_memory_burst),
            memory_lend_idle: memory.lend_idle.unwrap_or(self.memory_lend_idle),
            memory_reclaim: memory.reclaim.or(self.memory_reclaim),
            enforcement: config.enforcement.unwrap_or(self.enforcement),
            placement: Placement {
                node: placement.node.or(self.placement.node),
                gpu: placement.gpu.or(self.placement.gpu),
            },
            unmetered: config.unmetered.unwrap_or(self.unmetered),
            suspend_allowed: suspend_allowed(config).or(self.suspend_allowed),
            max_suspend: max_suspend(config).or(self.max_suspend),
        })
    }

    /// Returns whether the claim may be suspended: not if it can use more memory than it is guaranteed, which may not be free when
    /// it is resumed.
    #[must_use]
    pub fn allows_suspend(&self) -> bool {
        self.suspend_allowed == Some(true) && self.memory_limit.is_none()
    }

    /// Returns whether the share has a part of the multiprocessors of its GPU.
    #[must_use]
    pub fn is_spatial(&self) -> bool {
        self.compute_policy == ComputePolicy::Spatial
    }

    /// Returns whether other shares may use what the share is guaranteed and does not use: not if it can use more itself, if it may be
    /// suspended, because a resumed share needs all of it at once, or if the programs are clients of MPS.
    #[must_use]
    pub fn lends_idle(&self) -> bool {
        self.memory_lend_idle
            && self.memory_limit.is_none()
            && !self.allows_suspend()
            && !self.is_spatial()
    }

    fn claim_priority_limit(&self) -> Priority {
        self.max_priority.unwrap_or(self.priority)
    }

    fn check_claim(&self, config: &VgpuConfig) -> Result<(), ForbiddenField> {
        let forbidden = |path, allowed: &str| Err(ForbiddenField::new(path, Layer::Claim, allowed));
        let class_only = "only in a device class";
        match config.compute_policy {
            None | Some(ComputePolicy::Fixed) => {}
            Some(ComputePolicy::Spatial) => return forbidden("computePolicy", class_only),
            Some(ComputePolicy::Balance | ComputePolicy::None) => {
                return forbidden("computePolicy", "only fixed");
            }
        }
        if config.compute_policy.is_some() && self.compute_policy == ComputePolicy::Spatial {
            return forbidden("computePolicy", "the class divides multiprocessors");
        }
        if let Some(priority) = config.priority
            && priority > self.claim_priority_limit()
        {
            return forbidden(
                "priority",
                &format!(
                    "{} exceeds the class's maximum of {}",
                    priority.get(),
                    self.claim_priority_limit().get()
                ),
            );
        }
        if config.max_priority.is_some() {
            return forbidden("maxPriority", class_only);
        }
        let memory = config.memory.unwrap_or_default();
        if memory.policy.is_some() {
            return forbidden("memory.policy", class_only);
        }
        if memory.enforcement.is_some() {
            return forbidden("memory.enforcement", class_only);
        }
        if memory.max_limit.is_some() {
            return forbidden("memory.maxLimit", class_only);
        }
        if memory.max_burst.is_some() {
            return forbidden("memory.maxBurst", class_only);
        }
        if memory.lend_idle.is_some() {
            return forbidden("memory.lendIdle", class_only);
        }
        if memory.burst > Some(self.max_memory_burst) {
            return forbidden("memory.burst", "the class has no memory.maxBurst: idle");
        }
        match (memory.limit, self.max_memory_limit) {
            (Some(_), None) => {
                return forbidden("memory.limit", "the class has no memory.maxLimit");
            }
            (Some(limit), Some(highest)) if limit > highest => {
                let allowed = format!("{limit} exceeds the class's maximum of {highest}");
                return forbidden("memory.limit", &allowed);
            }
            (Some(_) | None, _) => {}
        }
        if config.enforcement.is_some() {
            return forbidden("enforcement", class_only);
        }
        if config.unmetered.is_some() {
            return forbidden("unmetered", class_only);
        }
        if suspend_allowed(config) == Some(true) && self.suspend_allowed == Some(false) {
            return forbidden("suspend.allowed", "only false: the device class denies it");
        }
        if let (Some(own), Some(highest)) = (max_suspend(config), self.max_suspend)
            && own > highest
        {
            let allowed = format!("{own} exceeds the class's maximum of {highest}");
            return forbidden("suspend.maxSuspendSeconds", &allowed);
        }
        Ok(())
    }
}

fn suspend_allowed(config: &VgpuConfig) -> Option<bool> {
    config.suspend?.allowed
}

fn max_suspend(config: &VgpuConfig) -> Option<Seconds> {
    config.suspend?.max_suspend_seconds
}

fn check_class(config: &VgpuConfig) -> Result<(), ForbiddenField> {
    let memory = config.memory.unwrap_or_default();
    let claim_only = [
        ("memory.percent", memory.percent.is_some()),
        ("memory.limit", memory.limit.is_some()),
        ("memory.burst", memory.burst.is_some()),
        ("memory.reclaim", memory.reclaim.is_some()),
    ];
    match claim_only.into_iter().find(|(_, is_set)| *is_set) {
        Some((path, _)) => Err(ForbiddenField::new(path, Layer::Class, "only in a claim")),
        None => Ok(()),
    }
}
