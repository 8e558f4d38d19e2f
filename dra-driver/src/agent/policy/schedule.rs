//! What the agent does at which time. Pure.

/// Control period, µs.
const TICK_US: u64 = 100_000;

/// Time between two polls of lent shares, µs.
const LENT_POLL_US: u64 = 20_000;

/// GPUs without an NVML observation for so long are scanned without one, µs.
const SCAN_TIMEOUT_US: u64 = 2_000_000;

/// Time between two publications of metrics, µs.
const METRICS_US: u64 = 1_000_000;

/// State of one GPU that decides what is due.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuState {
    /// Nothing has happened for so long that each further tick would decide the same.
    pub is_quiet: bool,
    /// Some shares may have processes.
    pub is_occupied: bool,
    /// Lent shares may resume, or resumed shares may go idle, at any time.
    pub is_lent: bool,
    /// Next poll of shares to which others yield; `None` if none does.
    pub next_priority_poll_us: Option<u64>,
    /// Last scan.
    pub scanned_us: u64,
}

/// What is due for one GPU, in this order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuTasks {
    /// A tick: assign priority roles, measure the shares, set their rates.
    pub tick: bool,
    /// Scan without an NVML observation.
    pub scan: bool,
}

/// What is due for the node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeTasks {
    /// A tick: follow claims and processes, and update watches.
    pub tick: bool,
    /// Publish metrics.
    pub publish_metrics: bool,
}

/// Times of the next tasks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Schedule {
    next_tick_us: u64,
    next_metrics_us: u64,
    is_odd_tick: bool,
}

impl Schedule {
    /// Returns what is due for the node at `now_us`, and schedules the next tasks.
    pub fn start(&mut self, now_us: u64) -> NodeTasks {
        let tick = now_us >= self.next_tick_us;
        if !tick {
            return NodeTasks::default();
        }
        self.next_tick_us = now_us + TICK_US;
        self.is_odd_tick = !self.is_odd_tick;
        let publish_metrics = now_us >= self.next_metrics_us;
        if publish_metrics {
            self.next_metrics_us = now_us + METRICS_US;
        }
        NodeTasks {
            tick,
            publish_metrics,
        }
    }

    /// Returns what is due for a GPU. A quiet GPU skips every second tick, and all of them without processes: the pages of
    /// its shares already permit the use of idle time.
    #[must_use]
    pub fn gpu_tasks(&self, now_us: u64, node: NodeTasks, gpu: &GpuState) -> GpuTasks {
        let skips_tick = gpu.is_quiet && (self.is_odd_tick || !gpu.is_occupied);
        GpuTasks {
            tick: node.tick && !skips_tick,
            scan: node.tick && now_us.saturating_sub(gpu.scanned_us) > SCAN_TIMEOUT_US,
        }
    }

    /// Returns the time of the next task, µs. Without notifications shares of other priorities are polled, too.
    #[must_use]
    pub fn next_us(
        &self,
        now_us: u64,
        has_notifications: bool,
        gpus: impl Iterator<Item = GpuState>,
    ) -> u64 {
        let after = |is_needed: bool, us: u64| if is_needed { now_us + us } else { u64::MAX };
        let first_us = self
            .next_tick_us
            .min(after(!has_notifications, LENT_POLL_US));
        gpus.fold(first_us, |next_us, gpu| {
            next_us
                .min(after(gpu.is_lent, LENT_POLL_US))
                .min(gpu.next_priority_poll_us.unwrap_or(u64::MAX))
        })
    }
}
