//! Who may set which field, and what a set of documents amounts to.

use std::fmt;

use super::{ComputePolicy, Enforcement, MemoryPolicy, Percent, Placement, Priority, VgpuConfig};

/// Where a config document comes from.
///
/// | Field | class | claim |
/// |---|---|---|
/// | `computePolicy` | any | `fixed` |
/// | `priority` | any | up to the class's `maxPriority` |
/// | `maxPriority`, `memory.policy`, `enforcement`, `unmetered` | any | – |
/// | `memory.percent` | – | any |
/// | `placement` | any | any |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    /// The DeviceClass: the administrator.
    Class,
    /// The ResourceClaim: the tenant.
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

/// A field was set by a layer that may not set it (so).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("config field {path}: a {layer} may not set it{hint}")]
pub struct ForbiddenField {
    /// Path of the field.
    pub path: &'static str,
    /// Who tried.
    pub layer: Layer,
    /// What is allowed, with its separator.
    hint: String,
}

impl ForbiddenField {
    fn new(path: &'static str, layer: Layer, allowed: &str) -> Self {
        Self {
            path,
            layer,
            hint: format!(" ({allowed})"),
        }
    }
}

/// Config with every field decided.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Settings {
    /// How the compute share is enforced.
    pub compute_policy: ComputePolicy,
    /// Priority among the tenants of the card.
    pub priority: Priority,
    /// Highest priority that a claim may choose; the class's priority when it names no maximum.
    pub max_priority: Option<Priority>,
    /// Share of the card's memory that replaces a capacity request.
    pub memory_percent: Option<Percent>,
    /// What happens at the memory limit.
    pub memory_policy: MemoryPolicy,
    /// What happens to a process that escapes or exceeds its limits.
    pub enforcement: Enforcement,
    /// Placement policies asked for; the controller's own where `None`.
    pub placement: Placement,
    /// Whether the parts of the driver that no limit covers are mounted.
    pub unmetered: bool,
}

impl Settings {
    /// These settings with one more document laid over them.
    ///
    /// # Errors
    /// Names the field that `layer` may not set so.
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
                // Fixed by the class, so that a second claim document cannot climb from what the first one chose.
                Layer::Claim => Some(self.claim_priority_limit()),
            },
            memory_percent: memory.percent.or(self.memory_percent),
            memory_policy: memory.policy.unwrap_or(self.memory_policy),
            enforcement: config.enforcement.unwrap_or(self.enforcement),
            placement: Placement {
                node: placement.node.or(self.placement.node),
                gpu: placement.gpu.or(self.placement.gpu),
            },
            unmetered: config.unmetered.unwrap_or(self.unmetered),
        })
    }

    fn claim_priority_limit(&self) -> Priority {
        self.max_priority.unwrap_or(self.priority)
    }

    fn check_claim(&self, config: &VgpuConfig) -> Result<(), ForbiddenField> {
        let forbidden = |path, allowed: &str| Err(ForbiddenField::new(path, Layer::Claim, allowed));
        let class_only = "only a device class may";
        if !matches!(config.compute_policy, None | Some(ComputePolicy::Fixed)) {
            return forbidden("computePolicy", "it may only choose fixed");
        }
        if let Some(priority) = config.priority
            && priority > self.claim_priority_limit()
        {
            return forbidden(
                "priority",
                &format!(
                    "{} is above the class's maximum of {}",
                    priority.get(),
                    self.claim_priority_limit().get()
                ),
            );
        }
        if config.max_priority.is_some() {
            return forbidden("maxPriority", class_only);
        }
        if config.memory.is_some_and(|memory| memory.policy.is_some()) {
            return forbidden("memory.policy", class_only);
        }
        if config.enforcement.is_some() {
            return forbidden("enforcement", class_only);
        }
        if config.unmetered.is_some() {
            return forbidden("unmetered", class_only);
        }
        Ok(())
    }
}

fn check_class(config: &VgpuConfig) -> Result<(), ForbiddenField> {
    if config.memory.is_some_and(|memory| memory.percent.is_some()) {
        return Err(ForbiddenField::new(
            "memory.percent",
            Layer::Class,
            "only a claim may",
        ));
    }
    Ok(())
}
