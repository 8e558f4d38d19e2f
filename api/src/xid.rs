//! XIDs: error numbers of the NVIDIA driver, with their effect on the health of a GPU.
//!
//! Classes follow the "immediate action" of NVIDIA's [XID catalog]: XIDs that call for a restart of the program are
//! errors of the application, XIDs that call for a reset or a reboot make the GPU unhealthy. `cargo xtask codegen` writes
//! `docs/reference/health.md` from this table.
//!
//! [XID catalog]: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html

use std::collections::BTreeSet;

use crate::node_profile::XidOverrides;

/// Effect of an XID on the health of its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum XidClass {
    /// A program failed; the GPU is healthy.
    Application,
    /// A report about the GPU that needs no action.
    Informational,
    /// An XID that this version does not know. The GPU stays healthy.
    Unknown,
    /// The GPU is unhealthy until a reset or a reboot.
    Unhealthy,
    /// The GPU has left the bus.
    Lost,
}

impl XidClass {
    /// All classes.
    pub const ALL: [Self; 5] = [
        Self::Application,
        Self::Informational,
        Self::Unknown,
        Self::Unhealthy,
        Self::Lost,
    ];

    /// Returns the name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Application => "application",
            Self::Informational => "informational",
            Self::Unknown => "unknown",
            Self::Unhealthy => "unhealthy",
            Self::Lost => "lost",
        }
    }

    /// Returns the effect on the GPU.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Application => {
                "A program failed. The GPU stays healthy; the XID is only counted."
            }
            Self::Informational => {
                "A report that needs no action. The GPU stays healthy; the XID is only counted."
            }
            Self::Unknown => {
                "An XID that this version of drava does not know: newer drivers report XIDs that need no action. The GPU stays \
                 healthy; the event `GpuDegraded` of the node names the XID."
            }
            Self::Unhealthy => "The GPU is unhealthy until it recovers.",
            Self::Lost => "The GPU has left the bus. It is unhealthy until it recovers.",
        }
    }

    /// Returns whether the GPU is unhealthy after the XID.
    #[must_use]
    pub const fn is_fatal(self) -> bool {
        match self {
            Self::Application | Self::Informational | Self::Unknown => false,
            Self::Unhealthy | Self::Lost => true,
        }
    }
}

/// XIDs of one class and meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Xids {
    /// First number.
    pub first: u64,
    /// Last number.
    pub last: u64,
    /// Class.
    pub class: XidClass,
    /// Meaning, a phrase without a final period.
    pub meaning: &'static str,
}

macro_rules! xids {
    ($($first:literal $(..= $last:literal)?: $class:ident, $meaning:literal;)*) => {
        /// Known XIDs in ascending order.
        pub const XIDS: &[Xids] = &[$(Xids {
            first: $first,
            last: xids!(@last $first $($last)?),
            class: XidClass::$class,
            meaning: $meaning,
        }),*];
    };
    (@last $first:literal) => { $first };
    (@last $first:literal $last:literal) => { $last };
}

xids! {
    8: Application, "a channel of a program did not become idle";
    11: Application, "invalid or corrupted command stream";
    13: Application, "exception of the graphics engine, such as an access beyond an array";
    31: Application, "page fault by an invalid memory access";
    32: Application, "invalid or corrupted command stream";
    39..=41: Application, "exception of a copy engine";
    43: Application, "the channel of a program was reset";
    45: Application, "cleanup after an earlier error or the end of a program";
    46: Unhealthy, "the GPU stopped processing";
    48: Unhealthy, "uncorrectable double-bit ECC error";
    60: Application, "exception of the security engine";
    61: Unhealthy, "breakpoint of the internal microcontroller";
    62: Unhealthy, "halt of the internal microcontroller";
    63: Informational, "a memory page or row was retired";
    64: Unhealthy, "a memory page or row could not be retired";
    65: Application, "exception of the video encoder";
    68: Application, "exception of the video decoder";
    69: Application, "invalid class of a graphics method";
    70..=72: Application, "exception of a copy engine";
    73: Application, "exception of the video encoder";
    74: Unhealthy, "NVLink error";
    75..=77: Application, "exception of a copy engine";
    79: Lost, "the GPU has fallen off the bus";
    80: Application, "corrupted data sent to the GPU";
    82: Application, "exception of the JPEG decoder";
    83..=84: Application, "exception of the video decoder";
    85: Application, "exception of a copy engine";
    86: Application, "exception of the optical flow accelerator";
    88..=89: Application, "exception of the video decoder";
    92: Informational, "high rate of corrected single-bit ECC errors";
    93: Informational, "the configuration memory exceeded its number of writes";
    94: Application, "uncorrectable memory error, contained to one program";
    95: Unhealthy, "uncontained uncorrectable memory error";
    96..=98: Application, "exception of the video decoder";
    99..=105: Application, "exception of the JPEG decoder";
    106..=107: Informational, "test message of the management bus";
    108: Informational, "address translation of an NVLink peer failed";
    109: Unhealthy, "time-out of a context switch";
    110: Unhealthy, "security fault";
    119: Unhealthy, "time-out of the GPU system processor (GSP)";
    120: Unhealthy, "error of the GPU system processor (GSP)";
    121: Informational, "corrected error of the chip-to-chip link (C2C)";
    126..=135: Application, "exception of a copy engine";
    136: Unhealthy, "training of an NVLink link failed";
    137: Application, "access to memory of another GPU without privilege";
    139: Application, "exception of the optical flow accelerator";
    140: Unhealthy, "uncorrected ECC error";
    141: Informational, "error of the fast path of a channel";
    143: Unhealthy, "initialization of the GPU failed";
    144..=150: Unhealthy, "NVLink error";
    154: Informational, "the recovery action of the GPU changed; NVML reports the action";
    155: Unhealthy, "NVLink error defined by software";
    156: Unhealthy, "a resource of the GPU was retired";
    157: Informational, "a resource of the GPU could not be retired";
    158: Unhealthy, "fatal time-out of the GPU";
    160: Informational, "a memory channel was retired";
    161: Informational, "a memory channel could not be retired";
}

/// Returns the row of an XID; `None` for an unknown XID.
#[must_use]
pub fn find(xid: u64) -> Option<&'static Xids> {
    XIDS.iter()
        .find(|xids| (xids.first..=xids.last).contains(&xid))
}

/// Returns whether the GPU works again only after a reset or a reboot, by NVIDIA's catalog.
#[must_use]
pub fn needs_reset(xid: u64) -> bool {
    find(xid).is_some_and(|xids| xids.class == XidClass::Unhealthy)
}

/// Returns the meaning of an XID.
#[must_use]
pub fn meaning(xid: u64) -> &'static str {
    find(xid).map_or("an error that this version does not know", |xids| {
        xids.meaning
    })
}

/// Classes of XIDs with the overrides of an administrator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct XidPolicy {
    /// XIDs that do not change the health of a GPU.
    pub ignored: BTreeSet<u64>,
    /// XIDs that make a GPU unhealthy; takes precedence over `ignored`.
    pub fatal: BTreeSet<u64>,
}

impl XidPolicy {
    /// Returns the policy with the overrides of a node profile, which take precedence.
    #[must_use]
    pub fn overridden(&self, overrides: &XidOverrides) -> Self {
        let of_profile =
            |xids: &[u32]| -> BTreeSet<u64> { xids.iter().map(|xid| (*xid).into()).collect() };
        let (ignored, fatal) = (of_profile(&overrides.ignore), of_profile(&overrides.fatal));
        Self {
            ignored: &(&self.ignored - &fatal) | &ignored,
            fatal: &(&self.fatal - &ignored) | &fatal,
        }
    }

    /// Returns the class of an XID.
    #[must_use]
    pub fn class(&self, xid: u64) -> XidClass {
        let class = find(xid).map_or(XidClass::Unknown, |xids| xids.class);
        if self.fatal.contains(&xid) {
            class.max(XidClass::Unhealthy)
        } else if self.ignored.contains(&xid) {
            class.min(XidClass::Informational)
        } else {
            class
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_ordered_and_disjoint() {
        for xids in XIDS {
            assert!(xids.first <= xids.last, "{xids:?}");
            assert!(!xids.meaning.ends_with('.'), "{xids:?}");
        }
        for pair in XIDS.windows(2) {
            assert!(pair[0].last < pair[1].first, "{pair:?}");
        }
    }

    #[test]
    fn separates_application_errors_from_faults_of_the_gpu() {
        let policy = XidPolicy::default();
        for xid in [13, 31, 43, 45, 60, 68, 94, 126, 135, 139] {
            assert_eq!(policy.class(xid), XidClass::Application, "{xid}");
        }
        for xid in [
            46, 48, 61, 62, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, 147, 156, 158,
        ] {
            assert_eq!(policy.class(xid), XidClass::Unhealthy, "{xid}");
        }
        assert_eq!(policy.class(79), XidClass::Lost);
        for xid in [63, 108, 141, 157, 160, 161] {
            assert_eq!(policy.class(xid), XidClass::Informational, "{xid}");
        }
        for xid in [162, 173, 9999] {
            assert_eq!(policy.class(xid), XidClass::Unknown, "{xid}");
        }
    }

    #[test]
    fn overrides_replace_the_class() {
        let policy = XidPolicy {
            ignored: BTreeSet::from([13, 74, 79, 9999]),
            fatal: BTreeSet::from([31, 74]),
        };
        assert!(policy.class(31).is_fatal());
        assert!(policy.class(74).is_fatal(), "fatal takes precedence");
        for xid in [13, 79, 9999] {
            assert!(!policy.class(xid).is_fatal(), "{xid}");
        }
        assert!(!policy.class(43).is_fatal());
        let profile = policy.overridden(&XidOverrides {
            ignore: vec![31, 48],
            fatal: vec![13],
        });
        for (xid, is_fatal) in [
            (31, false),
            (48, false),
            (13, true),
            (74, true),
            (79, false),
        ] {
            assert_eq!(profile.class(xid).is_fatal(), is_fatal, "{xid}");
        }
    }
}
