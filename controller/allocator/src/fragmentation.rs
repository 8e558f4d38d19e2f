//! Fragmentation: how much of the idle GPUs of a node the requests of this cluster cannot use.
//!
//! The loss of a placement is the growth of the expected fragmentation (Weng et al., USENIX ATC 2023), over the requests that
//! the cluster has seen lately ([`mix`]). Two terms break near-ties: GPUs that are stranded, because the CPUs of the node do
//! not suffice to use them, and what stays free on the node (best fit). All amounts are GPUs.

use drava_api::Quantity;

use crate::capacity::Amounts;
use crate::device::Device;
use crate::usage::{DeviceAccess, GpuMemory};

pub mod mix;

use mix::{Amount, Mix, TypicalRequest};

/// Weight of stranded GPUs.
const STRANDED_WEIGHT: f64 = 0.5;
/// Weight of what stays free on the node, as a part of [`LARGE_NODE`].
const BEST_FIT_WEIGHT: f64 = 0.05;
/// CPUs and GPUs of a large node.
const LARGE_NODE: (f64, f64) = (128.0, 8.0);
/// Tolerance of comparisons.
const EPSILON: f64 = 1e-6;

/// Idle part of a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct IdleGpu<'a> {
    /// Position of its pool.
    pool: usize,
    /// Its key in the pool.
    gpu: &'a str,
    /// 0 to 1.
    idle: f64,
    /// Bytes.
    memory: f64,
}

impl<'a> IdleGpu<'a> {
    pub(crate) fn new(pool: usize, gpu: &'a str, memory: GpuMemory) -> Self {
        let (allocated, total) = (memory.allocated, memory.total);
        let (allocated, total) = (allocated.to_f64_lossy(), total.to_f64_lossy());
        let is_known = total > 0.0;
        Self {
            pool,
            gpu,
            idle: if is_known {
                (1.0 - allocated / total).clamp(0.0, 1.0)
            } else {
                0.0
            },
            memory: total,
        }
    }

    pub(crate) fn is(&self, pool: usize, gpu: &str) -> bool {
        (self.pool, self.gpu) == (pool, gpu)
    }
}

/// A typical request on this node.
#[derive(Debug, Clone, Copy)]
struct Typical {
    weight: f64,
    gpus: usize,
    /// Part of each GPU.
    part: f64,
    fits_before: bool,
    fits_after: bool,
}

/// CPUs and memory that are free on a node.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct NodeRoom {
    pub(crate) cpu: f64,
    pub(crate) memory: f64,
}

impl NodeRoom {
    /// Returns the CPUs and the memory of these amounts.
    pub(crate) fn of(amounts: &Amounts) -> Self {
        let amount = |name| {
            amounts
                .get(name)
                .copied()
                .unwrap_or_default()
                .to_f64_lossy()
        };
        Self {
            cpu: amount("cpu"),
            memory: amount("memory"),
        }
    }

    pub(crate) fn minus(self, other: Self) -> Self {
        Self {
            cpu: self.cpu - other.cpu,
            memory: self.memory - other.memory,
        }
    }

    fn holds(self, other: Self) -> bool {
        other.cpu <= self.cpu + EPSILON && other.memory <= self.memory + EPSILON
    }
}

/// What the loss of placements of a pod on a node depends on, besides the devices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LossBasis {
    pub(crate) room: NodeRoom,
    /// Number of the snapshot of the mix.
    pub(crate) snapshot: u64,
}

/// Loss of placements of one pod on one node.
#[derive(Debug)]
pub(crate) struct NodeLoss<'a> {
    gpus: Vec<IdleGpu<'a>>,
    requests: Vec<Typical>,
    before: NodeRoom,
    after: NodeRoom,
    /// Mean number of CPUs that pods request for each GPU.
    cpus_per_gpu: f64,
}

impl<'a> NodeLoss<'a> {
    /// Prepares the loss for a pod with this demand on a node with `room`. `accepts` returns whether the GPUs of the node
    /// match the selectors of a request.
    ///
    /// # Errors
    /// Those of `accepts`.
    pub(crate) fn new<E>(
        mix: &Mix,
        (room, demand): (NodeRoom, NodeRoom),
        gpus: Vec<IdleGpu<'a>>,
        mut accepts: impl FnMut(&TypicalRequest) -> Result<bool, E>,
    ) -> Result<Self, E> {
        let memory = gpus.iter().map(|gpu| gpu.memory).fold(0.0, f64::max);
        let after = room.minus(demand);
        let on_node = |request: &TypicalRequest| {
            let is_accepted = request.gpus == 0 || accepts(request)?;
            Ok(Typical {
                weight: request.weight,
                gpus: request.gpus,
                part: match request.amount {
                    Amount::Whole => 1.0,
                    Amount::Part(part) => part,
                    Amount::Memory(bytes) if memory > 0.0 => bytes / memory,
                    Amount::Memory(_) => 1.0,
                },
                fits_before: is_accepted && room.holds(request.room),
                fits_after: is_accepted && after.holds(request.room),
            })
        };
        let requests = mix.requests().iter().map(on_node);
        let requests: Vec<Typical> = requests.collect::<Result<_, E>>()?;
        let cpus = mix
            .requests()
            .iter()
            .map(|request| request.weight * request.room.cpu);
        let requested = requests.iter().map(|request| {
            let gpus = f64::from(u32::try_from(request.gpus).unwrap_or(u32::MAX));
            request.weight * gpus * request.part
        });
        let requested: f64 = requested.sum();
        Ok(Self {
            cpus_per_gpu: if requested > 0.0 {
                cpus.sum::<f64>() / requested
            } else {
                0.0
            },
            requests,
            gpus,
            before: room,
            after,
        })
    }

    /// Returns the loss of the whole node when these devices are allocated, each with the position of its pool; the lowest is
    /// preferred.
    pub(crate) fn of<'b>(
        &self,
        selected: impl Iterator<Item = (usize, &'b Device, &'b DeviceAccess)>,
    ) -> f64 {
        let idle_before = self.idle(std::iter::empty());
        let idle = self.idle(selected);
        let growth = self.fragmentation(&idle, |request| request.fits_after)
            - self.fragmentation(&idle_before, |request| request.fits_before);
        let stranded = self.stranded(&idle, self.after) - self.stranded(&idle_before, self.before);
        let (cpus, gpus) = LARGE_NODE;
        let left = 0.5 * (self.after.cpu / cpus) + 0.5 * (idle.iter().sum::<f64>() / gpus);
        growth + STRANDED_WEIGHT * stranded + BEST_FIT_WEIGHT * left
    }

    /// Returns the fragmentation of the node after the allocation of one more device; the lowest is preferred. `idle` are the
    /// idle parts of the GPUs before it.
    pub(crate) fn of_device(
        &self,
        idle: &[f64],
        pool: usize,
        device: &Device,
        access: &DeviceAccess,
    ) -> f64 {
        let mut idle = idle.to_vec();
        self.take(&mut idle, pool, device, access);
        self.fragmentation(&idle, |request| request.fits_after)
    }

    /// Returns the idle parts of the GPUs with these devices allocated.
    pub(crate) fn idle<'b>(
        &self,
        selected: impl Iterator<Item = (usize, &'b Device, &'b DeviceAccess)>,
    ) -> Vec<f64> {
        let mut idle: Vec<f64> = self.gpus.iter().map(|gpu| gpu.idle).collect();
        for (pool, device, access) in selected {
            self.take(&mut idle, pool, device, access);
        }
        idle
    }

    fn take(&self, idle: &mut [f64], pool: usize, device: &Device, access: &DeviceAccess) {
        let mut gpus = self.gpus.iter();
        let position = gpus.position(|gpu| gpu.is(pool, &device.gpu));
        let Some((gpu, idle)) =
            position.and_then(|at| Some((self.gpus.get(at)?, idle.get_mut(at)?)))
        else {
            return;
        };
        let memory = drava_api::names::capacity::MEMORY;
        let amount = match access {
            DeviceAccess::Admin(_) | DeviceAccess::Suspended(_) => return,
            DeviceAccess::Exclusive => device.amount(memory),
            DeviceAccess::Share(amounts, _) => amounts.get(memory).copied(),
        };
        let taken = match amount.map(Quantity::to_f64_lossy) {
            Some(amount) if gpu.memory > 0.0 => amount / gpu.memory,
            Some(_) | None => 1.0,
        };
        *idle = (*idle - taken).max(0.0);
    }

    /// Returns the idle GPUs that a typical request cannot use, in expectation.
    fn fragmentation(&self, idle: &[f64], fits: impl Fn(&Typical) -> bool) -> f64 {
        let all: f64 = idle.iter().sum();
        let unusable = |request: &Typical| {
            let is_usable = |idle: &&f64| **idle >= request.part - EPSILON;
            let usable = idle.iter().filter(is_usable);
            if request.gpus == 0 || !fits(request) || usable.clone().count() < request.gpus {
                return all;
            }
            all - usable.sum::<f64>()
        };
        let requests = self.requests.iter();
        requests
            .map(|request| request.weight * unusable(request))
            .sum()
    }

    /// Returns the idle GPUs beyond those that the free CPUs can use.
    fn stranded(&self, idle: &[f64], room: NodeRoom) -> f64 {
        if self.cpus_per_gpu <= 0.0 {
            return 0.0;
        }
        (idle.iter().sum::<f64>() - room.cpu / self.cpus_per_gpu).max(0.0)
    }
}

#[cfg(test)]
mod tests;
