//! Whether a share has processes, and how often a share without processes is scanned. Pure.

/// One scan in so many of an empty share detects what file events do not report.
const SCANS_WHILE_EMPTY: u32 = 10;

/// Whether a share has processes. Only the regions of shares that may have some are read on each tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Occupancy {
    /// It may have processes.
    #[default]
    Occupied,
    /// It had none in the last scan. A watch reports the next process.
    Draining,
    /// It had none in a scan after the watch was added, and the watch has reported none.
    Empty {
        /// Scans that have skipped the share.
        skipped: u32,
    },
}

impl Occupancy {
    /// Whether the share may have processes.
    #[must_use]
    pub fn is_occupied(self) -> bool {
        !matches!(self, Self::Empty { .. })
    }

    /// Returns whether this scan includes the share, and counts scans that skip it.
    pub fn is_scan_due(&mut self) -> bool {
        match self {
            Self::Occupied | Self::Draining => true,
            Self::Empty { skipped } => {
                *skipped += 1;
                *skipped >= SCANS_WHILE_EMPTY
            }
        }
    }

    /// Applies a scan that has found processes or none. `watch` adds a watch for the next process and returns whether
    /// that was possible. Shares with different `phase` are scanned at different times.
    pub fn update(&mut self, has_processes: bool, phase: u32, watch: impl FnOnce() -> bool) {
        *self = match self {
            _ if has_processes => Self::Occupied,
            Self::Occupied if watch() => Self::Draining,
            Self::Occupied => Self::Occupied,
            Self::Draining => Self::Empty {
                skipped: phase % SCANS_WHILE_EMPTY,
            },
            Self::Empty { .. } => Self::Empty { skipped: 0 },
        };
    }
}
