//! Comparison of the shares with NVML's list of processes, once per second.

use std::collections::BTreeMap;
use std::sync::Arc;

use drava_api::config::Enforcement;
use drava_vgpu_abi::ledger::Owner;

use super::{Gpu, Shares};
use crate::agent::FindingKind;
use crate::agent::node::ShareKey;
use crate::agent::node::nvml_observer::{BusyProcesses, Observation, ObservedProcess};
use crate::agent::node::tracked_share::TrackedShare;
use crate::agent::policy::detection::{GpuProcess, SuspectedViolation, detect};
use crate::agent::policy::reserve::process_memory;
use crate::node::process::ProcessInfo;

/// Age of a share from which its processes are killed for violations, µs: after a restart of the agent, processes may still
/// register.
const KILL_GRACE_US: u64 = 10_000_000;

impl Gpu {
    /// Scans the shares; without an observation, their regions only. `estimate_bytes` is the driver's memory of a context on
    /// this GPU, if known.
    pub fn scan(
        &mut self,
        now_us: u64,
        observation: Option<&Observation>,
        estimate_bytes: Option<u64>,
        shares: &mut Shares,
    ) -> Vec<(ShareKey, FindingKind)> {
        self.scanned_us = now_us;
        let observed = observation.and_then(|observation| observation.processes.as_deref());
        let processes: Option<Vec<GpuProcess<ShareKey>>> = observed.map(|observed| {
            let of = |observed| self.gpu_process(observed, &shares.tracked);
            observed.iter().map(of).collect()
        });
        let processes = processes.as_deref();
        let mut views = Vec::new();
        for key in &self.keys {
            let uses_gpu = |process: &GpuProcess<ShareKey>| process.shares.contains(key);
            let is_used = processes.is_some_and(|processes| processes.iter().any(uses_gpu));
            if let Some(share) = shares.tracked.get_mut(key)
                && (share.is_scan_due() || is_used)
            {
                views.push(share.view(*key, estimate_bytes, &mut shares.buffer));
            }
        }
        let suspected = detect(self.uuid.as_str(), &views, processes.unwrap_or_default());
        let has_processes = processes.is_some();
        // Processes of shares of other GPUs violate their limits here.
        let known: Vec<ShareKey> = shares.tracked.keys().copied().collect();
        let changes = self.violations.update(&known, &suspected, has_processes);
        let mut found: Vec<_> = changes
            .into_iter()
            .map(|(key, change)| (key, FindingKind::Violation(change)))
            .collect();
        let owners = processes.unwrap_or_default().iter();
        let owners = owners.map(|process| (process.pid, process.owner)).collect();
        found.extend(self.enforce(now_us, &suspected, &owners, shares));
        for view in &views {
            let key = view.id;
            if let Some(share) = shares.tracked.get_mut(&key) {
                share.apply_scan(now_us, view, processes, &suspected, &mut shares.watch);
            }
            let Some(processes) = processes else { continue };
            let memory = process_memory(key, &views, processes);
            shares.write(key, |share| share.correct_reserve(estimate_bytes, &memory));
        }
        if let Some(observation) = observation {
            self.follow_idle(now_us, observation, processes, shares);
        }
        let mut own = self.keys.iter().filter_map(|key| shares.tracked.get(key));
        self.is_occupied = own.any(TrackedShare::is_occupied);
        found
    }

    /// Applies a scan to the idle time of the shares. Kernels are shown by every fourth list only, whose samples cover the others.
    fn follow_idle(
        &self,
        now_us: u64,
        observation: &Observation,
        processes: Option<&[GpuProcess<ShareKey>]>,
        shares: &mut Shares,
    ) {
        if observation.busy == BusyProcesses::NotRead {
            return;
        }
        for key in &self.keys {
            let listed = processes.map(|processes| {
                let own = processes
                    .iter()
                    .filter(|process| process.shares.contains(key));
                own.map(|process| process.pid).collect::<Vec<u32>>()
            });
            let is_busy = match (&observation.busy, &listed) {
                (BusyProcesses::Known(busy), Some(listed)) => {
                    Some(listed.iter().any(|pid| busy.contains(pid)))
                }
                (_, _) => None,
            };
            let has_processes = listed.is_none_or(|listed| !listed.is_empty());
            if let Some(share) = shares.tracked.get_mut(key) {
                share.apply_idle(now_us, has_processes, is_busy);
            }
        }
    }

    /// Kills processes with confirmed violations, where the device class requires that.
    fn enforce(
        &self,
        now_us: u64,
        suspected: &[(ShareKey, SuspectedViolation)],
        owners: &BTreeMap<u32, Owner>,
        shares: &mut Shares,
    ) -> Vec<(ShareKey, FindingKind)> {
        let mut killed = Vec::new();
        for (key, violation) in suspected {
            let reason = violation.kind();
            let Some(share) = shares.tracked.get(key) else {
                continue;
            };
            let is_due = now_us.saturating_sub(share.since_us) >= KILL_GRACE_US;
            if share.enforcement != Enforcement::Required
                || !is_due
                || !self.violations.is_confirmed(*key, reason)
            {
                continue;
            }
            let pids: &[u32] = match violation {
                SuspectedViolation::OverLimit { pids, .. } => pids,
                SuspectedViolation::NotCounted { pid, .. } => std::slice::from_ref(pid),
                // libvgpu denies all memory itself if the region is damaged.
                // A container has access to other GPUs only by its privileges or volumes.
                SuspectedViolation::Region(_) | SuspectedViolation::OtherGpu { .. } => &[],
            };
            for &pid in pids {
                // Another process may have the PID by now.
                let is_target = |described: &ProcessInfo| {
                    owners.get(&pid) == Some(&described.owner)
                        && described.shares.iter().any(|mounted| share.is(mounted))
                };
                // A client of MPS that is killed with work in flight may disturb the others of its server.
                let is_killed = match share.is_spatial {
                    true => {
                        let (terminate, gpu) = (Arc::clone(&shares.terminate), self.uuid.clone());
                        let terminate = move || terminate(&gpu, pid);
                        shares.processes.kill_after(pid, is_target, terminate)
                    }
                    false => shares.processes.kill(pid, is_target),
                };
                if is_killed {
                    killed.push((*key, FindingKind::Killed { pid, reason }));
                }
            }
        }
        killed
    }

    pub(super) fn gpu_process(
        &self,
        observed: &ObservedProcess,
        tracked: &BTreeMap<ShareKey, TrackedShare>,
    ) -> GpuProcess<ShareKey> {
        let info = &observed.info;
        let has = |share: &TrackedShare| info.shares.iter().any(|mounted| share.is(mounted));
        let is_own = |key: &&ShareKey| tracked.get(key).is_some_and(has);
        let shares: Vec<ShareKey> = self.keys.iter().filter(is_own).copied().collect();
        let elsewhere = match shares.is_empty() {
            true => {
                let others: Vec<_> = tracked.iter().filter(|(_, share)| has(share)).collect();
                let mut claims = others.iter().map(|(_, share)| &share.claim_gpus);
                let lacks_gpu = claims.all(|gpus| !gpus.contains(&self.uuid));
                others.first().filter(|_| lacks_gpu).map(|(key, _)| **key)
            }
            false => None,
        };
        GpuProcess {
            pid: observed.pid,
            name: info.name.clone(),
            owner: info.owner,
            used_bytes: observed.used_bytes,
            shares,
            elsewhere,
        }
    }
}
