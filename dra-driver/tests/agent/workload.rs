//! Workloads of the shares of a simulated GPU.

use drava_dra_driver::agent::policy::control::Entitlement;
use drava_vgpu_abi::{ComputePolicy, Cores, Priority};

/// The workload of a share.
#[derive(Clone)]
pub(crate) struct Workload {
    pub(crate) entitlement: Entitlement,
    /// Kernel lengths, in turn.
    pub(crate) kernels_us: Vec<u64>,
    /// Most launches in flight: 1 waits for each kernel.
    pub(crate) depth: usize,
    /// Whether it launches that many kernels at once and waits for all of them.
    pub(crate) is_batch: bool,
    /// Time on the host after each kernel.
    pub(crate) host_us: u64,
    /// Returns whether the share is active at a time, µs.
    pub(crate) is_active: fn(u64) -> bool,
    /// Returns the factor of the kernel lengths at a time, µs.
    pub(crate) kernel_scale: fn(u64) -> u64,
}

impl Workload {
    pub(crate) fn new(cores: u32, policy: ComputePolicy, kernel_us: u64) -> Self {
        let entitlement = Entitlement {
            cores: Cores::new(cores).unwrap(),
            policy,
            priority: Priority::DEFAULT,
        };
        Self {
            entitlement,
            kernels_us: vec![kernel_us],
            // Launches run some slices ahead, as in a program that does not wait for each kernel.
            depth: usize::try_from(4_000 / kernel_us).unwrap().max(2),
            is_batch: false,
            host_us: 0,
            is_active: |_| true,
            kernel_scale: |_| 1,
        }
    }

    pub(crate) fn balance(cores: u32, kernel_us: u64) -> Self {
        Self::new(cores, ComputePolicy::Balance, kernel_us)
    }

    pub(crate) fn fixed(cores: u32, kernel_us: u64) -> Self {
        Self::new(cores, ComputePolicy::Fixed, kernel_us)
    }

    pub(crate) fn priority(mut self, priority: i32) -> Self {
        self.entitlement.priority = Priority::new(priority).unwrap();
        self
    }

    pub(crate) fn active_when(mut self, is_active: fn(u64) -> bool) -> Self {
        self.is_active = is_active;
        self
    }

    pub(crate) fn scale_kernels(mut self, kernel_scale: fn(u64) -> u64) -> Self {
        self.kernel_scale = kernel_scale;
        self
    }
}
