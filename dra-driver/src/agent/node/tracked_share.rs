//! A share that the agent follows: its files, and its state.

use std::collections::BTreeSet;
use std::io;

use drava_api::config::{Enforcement, Priority};
use drava_nvml::GpuUuid;
use drava_vgpu_abi::bucket::SECOND_US;
use drava_vgpu_abi::contention::{ALL_PPM, OwnTime};
use drava_vgpu_abi::page;
use drava_vgpu_abi::snapshot::ProcessUsage;
use drava_vgpu_abi::{ComputePolicy, Limits};

use super::region_watch::RegionWatch;
use super::usage_region::{LiveUse, ReadBuffer, UsageRegion};
use super::{ShareKey, now_us};
use crate::agent::policy::activity::{Activity, ActivityTracker};
use crate::agent::policy::burst::{Loan, ShareMemory};
use crate::agent::policy::control::{ActivityChange, Decision, Entitlement};
use crate::agent::policy::detection::{GpuProcess, ShareView, SuspectedViolation, Unenforced};
use crate::agent::policy::idle::{Evidence, IdleTracker};
use crate::agent::policy::occupancy::Occupancy;
use crate::agent::policy::reserve::{ProcessMemory, Reserve};
use crate::agent::policy::share_metrics::{self, CoresOf, CounterTotals, ShareMetrics};
use crate::agent::policy::usage_counters::UsageCounters;
use crate::gpus::capacity::ShareTotals;
use crate::node::claim::{ClaimRef, ClaimUid, ShareId};
use crate::node::layout::Layout;
use crate::node::limits_page::Page;
use crate::node::mounts::MountedShare;
use crate::prepare::limits;
use crate::prepare::record::ClaimRecord;
use crate::prepare::{Prepared, Share};

mod lending;

pub use lending::Reclaim;
use lending::{LENDING_PAUSE_US, Lending, Lowered};

/// Rates that differ by less than one part in this number are not written.
const RATE_RESOLUTION: u32 = 256;

/// Own times that differ by less are not written: parts per million, or one part of an interruption in this number.
const OWN_TIME_RESOLUTION_PPM: u32 = ALL_PPM / 200;
const INTERRUPTION_RESOLUTION: u32 = 100;

/// A share whose processes have no context counts as empty after so long without demand, µs. A killed process leaves its
/// slot to the next process that reclaims it.
const ORPHANED_SLOT_US: u64 = 10_000_000;

/// GPU time of a yielding share that may be queued on the GPU while a share of higher priority has processes, µs: it bounds
/// the wait of that share, apart from one running kernel.
const WINDOW_US: u32 = 250;

/// What the agent may assume of the memory of a share that it opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opened {
    /// Its limit was never above that of its page.
    New,
    /// An earlier agent may have lent it memory up to its limit.
    Again,
}

/// Memory of a share by its record.
#[derive(Debug, Clone, Copy)]
struct RecordedMemory {
    held_bytes: u64,
    kept_bytes: u64,
    limit_bytes: Option<u64>,
    bursts_idle: bool,
    lends_idle: bool,
    priority: Priority,
}

impl RecordedMemory {
    fn of(share: &Share) -> Self {
        Self {
            held_bytes: share.held().memory_bytes,
            kept_bytes: share.kept().memory_bytes,
            limit_bytes: share.limit_bytes,
            bursts_idle: share.bursts_idle,
            lends_idle: share.lends_idle,
            priority: share.priority,
        }
    }
}

/// Role of a share by its priority.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PriorityRole {
    /// Shares of lower priority yield to it, so it notifies the agent when it starts to use the GPU.
    pub notifies_agent: bool,
    /// It yields to shares of higher priority.
    pub yields: bool,
}

/// Returns the memory limit of a share that keeps `kept` by its record, with this limit and use, bytes. Memory that it does not
/// keep stays usable until its use fits without it: what is given back, and what a damaged record has lost, which may come back
/// at any time later. A limit that was lowered is not raised again by a use that came later.
fn memory_limit(kept: u64, present: u64, used: impl FnOnce() -> u64) -> u64 {
    if present <= kept || used() <= kept {
        kept
    } else {
        present
    }
}

/// A share.
pub struct TrackedShare {
    /// Claim of the share.
    pub claim: ClaimUid,
    /// Names of the claim.
    pub claim_ref: ClaimRef,
    /// ID of the share.
    pub share: ShareId,
    /// GPU of the share.
    pub gpu: GpuUuid,
    /// All GPUs of its claim.
    pub claim_gpus: BTreeSet<GpuUuid>,
    /// Whether processes that violate its limits are killed.
    pub enforcement: Enforcement,
    /// Whether its cores are multiprocessors, and its programs clients of MPS.
    pub is_spatial: bool,
    /// Whether the NVIDIA driver limits its memory, too.
    is_limited_by_driver: bool,
    /// When the agent opened its files, µs.
    pub since_us: u64,
    /// Its role by priority.
    pub role: PriorityRole,
    /// What it keeps by its record, until the page has it.
    kept: Option<ShareTotals>,
    /// Whether its processes that are not yet on the GPU wait, by its record. `None` leaves the page as it is: the share was
    /// never suspended, or its record was lost, and the driver finds the wait in the page.
    is_suspended: Option<bool>,
    memory: RecordedMemory,
    /// Whether the GPU has what the share is guaranteed, so that its limit may be raised to that.
    pub is_backed: bool,
    lending: Lending,
    /// Limits that it had and below which its use is not known to have fallen, the latest last.
    lowered: Vec<Lowered>,
    /// Whether it must give back all memory beyond its guarantee.
    pub reclaim: Option<Reclaim>,
    /// Its limits page.
    pub page: Page,
    region: UsageRegion,
    occupancy: Occupancy,
    activity: ActivityTracker,
    counters: UsageCounters,
    /// How fast the GPU does its work at least, by the last decision, µs per second.
    pace_us_per_s: u32,
    reserve: Reserve,
    /// Driver reserve in the page when it was opened.
    initial_reserve_bytes: u64,
    /// Sums of its counters, for metrics.
    pub totals: CounterTotals,
    /// Values of the last scan.
    figures: Option<share_metrics::Figures>,
    /// Since when it is idle.
    idle: IdleTracker,
}

impl TrackedShare {
    /// Opens the files of a share.
    ///
    /// # Errors
    /// If its limits page cannot be used. A damaged region is a violation, not an error.
    pub fn open(
        layout: &Layout,
        record: &ClaimRecord,
        device: &Prepared,
        share: &Share,
        opened: Opened,
        idle_after_us: u64,
        now_us: u64,
    ) -> io::Result<Self> {
        let uid = &record.claim.uid;
        let page = Page::open(&layout.limits(uid, &share.id))?;
        let memory = RecordedMemory::of(share);
        let present = page.limits().memory_limit_bytes.unwrap_or(0);
        let lent = memory.limit_bytes.map(|limit| limit.max(present));
        let lent = lent.filter(|_| present > memory.held_bytes || opened == Opened::Again);
        let lent_bytes = page.limits().lent_bytes;
        let lowered = lent
            .or((lent_bytes > 0).then_some(present))
            .map(|from_bytes| Lowered {
                at_us: now_us,
                from_bytes,
            });
        let paused_until_us = match lent_bytes {
            0 => now_us.saturating_add(LENDING_PAUSE_US),
            // It goes on.
            1.. => now_us,
        };
        let lending = Lending {
            paused_until_us,
            ..Lending::default()
        };
        Ok(Self {
            memory,
            lending,
            is_backed: true,
            lowered: lowered.into_iter().collect(),
            reclaim: None,
            claim_ref: record.claim.clone(),
            claim: uid.clone(),
            share: share.id.clone(),
            gpu: GpuUuid::new(device.gpu.uuid.clone()),
            claim_gpus: record.gpus(),
            enforcement: share.enforcement,
            is_spatial: share.is_spatial(),
            is_limited_by_driver: share.limited_by_driver,
            since_us: now_us,
            role: PriorityRole::default(),
            region: UsageRegion::open(&layout.usage(uid, &share.id)),
            occupancy: Occupancy::default(),
            activity: ActivityTracker::default(),
            counters: UsageCounters::default(),
            pace_us_per_s: 0,
            reserve: Reserve::default(),
            initial_reserve_bytes: page.limits().driver_reserve_bytes,
            kept: Some(share.kept()),
            is_suspended: share.is_suspended(),
            page,
            totals: CounterTotals::default(),
            figures: None,
            idle: IdleTracker::new(idle_after_us),
        })
    }

    /// Whether a container has this share.
    #[must_use]
    pub fn is(&self, mounted: &MountedShare) -> bool {
        (&mounted.claim, &mounted.share) == (&self.claim, &self.share)
    }

    /// Returns the share as containers have it.
    #[must_use]
    pub fn mounted(&self) -> MountedShare {
        MountedShare {
            claim: self.claim.clone(),
            share: self.share.clone(),
        }
    }

    /// Returns its entitlement; `None` if its GPU time is not metered.
    #[must_use]
    pub fn entitlement(&self) -> Option<Entitlement> {
        let limits = self.page.limits();
        (limits.compute_policy != ComputePolicy::None).then_some(Entitlement {
            cores: limits.cores,
            policy: limits.compute_policy,
            priority: limits.priority,
        })
    }

    /// Whether it may have processes.
    #[must_use]
    pub fn is_occupied(&self) -> bool {
        self.occupancy.is_occupied()
    }

    /// Applies the start of a process.
    pub fn mark_occupied(&mut self) {
        self.occupancy = Occupancy::Occupied;
    }

    /// Returns whether this scan, one per second, includes the share.
    pub fn is_scan_due(&mut self) -> bool {
        self.occupancy.is_scan_due()
    }

    /// Rereads its page if it has changed, and returns whether the page is still the one at its path.
    #[must_use]
    pub fn is_current(&mut self) -> bool {
        // The limits of an unreadable page stay as last read.
        let _ = self.page.refresh();
        self.page.is_current()
    }

    /// Measures what it did since the last tick.
    pub fn measure(&mut self, now_us: u64, buffer: &mut ReadBuffer) -> Activity {
        if !self.is_occupied() {
            return self.activity.measure_empty();
        }
        let Ok(header) = self.region.header(buffer) else {
            return self.activity.unchanged();
        };
        let is_in_debt = self
            .activity
            .is_in_debt(&header, now_us, self.pace_us_per_s);
        let is_limited = u64::from(self.rate()) < SECOND_US;
        let (region, counters) = (&self.region, &mut self.counters);
        self.activity.measure(&header, is_in_debt, is_limited, || {
            let view = region.view(buffer).ok()?;
            Some(counters.advance(&view.processes))
        })
    }

    /// Returns whether it has resumed or gone idle since the last measurement or change. What it did meanwhile is left to
    /// the next measurement.
    pub fn poll_activity(
        &mut self,
        now_us: u64,
        buffer: &mut ReadBuffer,
    ) -> Option<ActivityChange> {
        if !(self.is_polled(now_us) && self.is_occupied()) {
            return None;
        }
        let header = self.region.header(buffer).ok()?;
        let is_in_debt = self
            .activity
            .is_in_debt(&header, now_us, self.pace_us_per_s);
        self.activity.poll(now_us, &header, is_in_debt)
    }

    /// Whether other shares use its time, so that it notifies the agent when it resumes.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.activity.is_lent()
    }

    /// Whether it may resume or go idle before the next tick.
    #[must_use]
    pub fn is_polled(&self, now_us: u64) -> bool {
        self.activity.is_polled(now_us)
    }

    fn rate(&self) -> u32 {
        self.page.limits().rate_us_per_s.unwrap_or(0)
    }

    /// Writes what the controller decided, as far as it differs from the page.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn apply(&mut self, decision: Decision) -> io::Result<()> {
        self.pace_us_per_s = decision.pace_us_per_s;
        let rate = decision.rate_us_per_s;
        let present = self.page.limits().rate_us_per_s;
        if present.is_none_or(|present| present.abs_diff(rate) > rate / RATE_RESOLUTION) {
            self.page
                .change(|limits| limits.rate_us_per_s = Some(rate))?;
        }
        if differs(decision.own_time, self.page.own_time()) {
            self.page.set(&page::own_time(decision.own_time))?;
        }
        // A share without processes cannot resume before one starts.
        self.activity
            .set_lent(decision.is_lent && self.is_occupied());
        self.page.set(&page::lent(self.is_lent()))
    }

    /// Writes the driver's memory in its processes to the page. `estimate_bytes` is the memory of a context on a GPU of this
    /// model, if known.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn correct_reserve(
        &mut self,
        estimate_bytes: Option<u64>,
        processes: &[ProcessMemory],
    ) -> io::Result<()> {
        let correction = self
            .reserve
            .update(self.estimate_bytes(estimate_bytes), processes);
        let limits = self.page.limits();
        if limits.driver_reserve_bytes == correction.reserve_bytes
            && limits.driver_excess_bytes == correction.excess_bytes
            && limits.driver_surplus_bytes == correction.surplus_bytes
        {
            return Ok(());
        }
        self.page.change(|limits| {
            limits.driver_reserve_bytes = correction.reserve_bytes;
            limits.driver_excess_bytes = correction.excess_bytes;
            limits.driver_surplus_bytes = correction.surplus_bytes;
        })
    }

    /// Withdraws what only a running agent may grant: the surplus of processes, which end at any time.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn end(&mut self) -> io::Result<()> {
        self.page.change(|limits| limits.driver_surplus_bytes = 0)
    }

    /// Applies a change of its record.
    pub fn set_recorded(&mut self, share: &Share) {
        self.kept = Some(share.kept());
        self.is_suspended = share.is_suspended();
        self.memory = RecordedMemory::of(share);
    }

    /// Returns whether it may use more memory than it is guaranteed.
    #[must_use]
    pub const fn can_burst(&self) -> bool {
        self.memory.limit_bytes.is_some()
    }

    /// Returns whether memory that it was lent is not known to be back.
    #[must_use]
    pub const fn is_giving_back(&self) -> bool {
        !self.lowered.is_empty() || self.reclaim.is_some()
    }

    /// Returns what divides the memory of its GPU. The use is not read.
    #[must_use]
    pub fn memory(&self, key: ShareKey) -> ShareMemory<Option<ShareKey>> {
        let memory = self.memory;
        let lowered = self.lowered.iter().map(|lowered| lowered.from_bytes);
        ShareMemory {
            id: Some(key),
            priority: memory.priority,
            held_bytes: memory.held_bytes,
            kept_bytes: memory.kept_bytes,
            limit_bytes: memory.limit_bytes,
            bursts_idle: memory.bursts_idle,
            loan: Loan {
                lent_bytes: self.page.limits().lent_bytes,
                idle_bytes: 0,
                is_recalled: self.lending.recalled_us.is_some(),
            },
            present_bytes: self.usable_bytes().unwrap_or(u64::MAX),
            unreturned_bytes: lowered.max().unwrap_or(0),
            used_bytes: None,
            is_reclaimed: self.reclaim.is_some(),
        }
    }

    /// Returns what it may use by its page: its limit without what it lends, bytes; `None` without a limit.
    #[must_use]
    pub fn usable_bytes(&self) -> Option<u64> {
        let limits = self.page.limits();
        let limit_bytes = limits.memory_limit_bytes?;
        Some(limit_bytes.saturating_sub(limits.lent_bytes))
    }

    /// Returns whether it may use what other shares lend.
    #[must_use]
    pub const fn bursts_idle(&self) -> bool {
        self.memory.bursts_idle
    }

    /// Returns what its living processes have requested, by its region; `None` if that cannot be read.
    pub fn live_use(&mut self, buffer: &mut ReadBuffer) -> Option<LiveUse> {
        self.region.verify().ok()?;
        self.region.live_use(buffer).ok()
    }

    /// Writes the suspension and the capacity of its record to the page, as far as the use allows it. An unreadable region counts as full.
    ///
    /// # Errors
    /// If the page cannot be written. It is tried again.
    pub fn follow_record(&mut self, buffer: &mut ReadBuffer) -> io::Result<()> {
        match self.is_suspended {
            // Each suspension has a word of its own, which stays as long as it does.
            Some(true) if !self.page.is_suspended() => {
                self.page.set(&page::suspended(now_us().max(1)))?;
            }
            Some(false) => self.page.set(&page::suspended(0))?,
            Some(true) | None => {}
        }
        let limits = self.page.limits();
        let Some((kept, present)) = self.kept.zip(limits.memory_limit_bytes) else {
            return Ok(());
        };
        let used = || used_bytes(&self.region, limits, buffer).unwrap_or(u64::MAX);
        let memory = if self.can_burst() || (present < kept.memory_bytes && !self.is_backed) {
            present
        } else if present > kept.memory_bytes && limits.lent_bytes > 0 {
            // What it lends comes back first: the rest of the page would be less than it uses.
            present
        } else {
            memory_limit(kept.memory_bytes, present, used)
        };
        let cores = limits::cores(kept.cores);
        self.page.change(|limits| {
            limits.memory_limit_bytes = Some(memory);
            limits.cores = cores;
        })?;
        if memory == kept.memory_bytes || self.can_burst() {
            self.kept = None;
        }
        Ok(())
    }

    /// Writes its priority role to the page.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn set_role(&mut self, role: PriorityRole) -> io::Result<()> {
        self.role = role;
        let window_us = if role.yields { WINDOW_US } else { 0 };
        self.page.set(&page::window(window_us))?;
        self.page.set(&page::notify(role.notifies_agent))
    }

    /// Returns the directory of its region.
    #[must_use]
    pub fn usage_dir(&self) -> &std::path::Path {
        self.region.dir()
    }

    /// Returns until when it works by its own report, µs; 0 without a report.
    pub fn busy_until_us(&self, buffer: &mut ReadBuffer) -> u64 {
        let header = (self.role.notifies_agent && self.is_occupied())
            .then(|| self.region.header(buffer))
            .and_then(Result::ok);
        header.map_or(0, |header| header.share.busy_until_us)
    }

    /// Returns the driver's memory of a context: `known_bytes`, or what the page had when it was opened.
    fn estimate_bytes(&self, known_bytes: Option<u64>) -> u64 {
        known_bytes.unwrap_or(self.initial_reserve_bytes)
    }

    /// Returns its limit, the size of its region and all values of the region. `estimate_bytes` is as in
    /// [`Self::correct_reserve`].
    pub fn view(
        &mut self,
        key: ShareKey,
        estimate_bytes: Option<u64>,
        buffer: &mut ReadBuffer,
    ) -> ShareView<ShareKey> {
        let estimate_bytes = self.estimate_bytes(estimate_bytes);
        let region = &mut self.region;
        // A share that gives memory back still may use it.
        let lowered = self.lowered.iter().map(|lowered| lowered.from_bytes);
        let limit_bytes = self.page.limits().memory_limit_bytes;
        ShareView {
            id: key,
            limit_bytes: limit_bytes.map(|limit| lowered.fold(limit, u64::max)),
            estimate_bytes,
            region: region.verify().and_then(|()| region.view(buffer)),
            without_library: match (self.is_limited_by_driver, self.page.limits().compute_policy) {
                (false, _) => Unenforced::All,
                (true, ComputePolicy::Balance | ComputePolicy::Fixed) => Unenforced::GpuTime,
                (true, ComputePolicy::None) => Unenforced::Nothing,
            },
        }
    }

    /// Applies a scan to its occupancy and its metrics; `listed` are the processes that NVML lists on the GPU, if it does.
    pub fn apply_scan(
        &mut self,
        now_us: u64,
        view: &ShareView<ShareKey>,
        listed: Option<&[GpuProcess<ShareKey>]>,
        suspected: &[(ShareKey, SuspectedViolation)],
        watch: &mut RegionWatch,
    ) {
        let key = view.id;
        // A damaged region is read until it is repaired.
        let has_processes = view.region.as_ref().map_or(true, |region| {
            let has_context = |process: &ProcessUsage| {
                listed.is_none_or(|listed| listed.iter().any(|l| l.owner == process.owner))
            };
            let last_us = self.activity.demand_us().max(self.since_us);
            let is_recent = last_us.saturating_add(ORPHANED_SLOT_US) > now_us;
            region.processes.iter().any(has_context) || (is_recent && !region.processes.is_empty())
        });
        let uses_gpu = |listed: &[GpuProcess<ShareKey>]| {
            listed.iter().any(|process| process.shares.contains(&key))
        };
        let has_processes = has_processes || listed.is_some_and(uses_gpu);
        let dir = self.region.dir();
        self.occupancy
            .update(has_processes, key.0, || watch.await_process(key, dir));
        // An unreadable region leaves the metrics as they are.
        if let Ok(region) = &view.region {
            self.totals.update(now_us, &region.processes);
            self.figures = Some(share_metrics::figures(key, region, listed, suspected));
        }
    }

    /// Applies a scan to its idle time. `is_busy` tells whether NVML shows kernels of its processes, if it tells at all, and
    /// `has_processes` whether it lists any.
    pub fn apply_idle(&mut self, now_us: u64, has_processes: bool, is_busy: Option<bool>) {
        let is_metered = self.page.limits().compute_policy != ComputePolicy::None;
        let evidence = Evidence {
            gpu_time_us: self.totals.gpu_time_us(),
            last_demand_us: self.figures.map_or(0, |figures| figures.last_demand_us),
            is_busy: is_busy == Some(true),
            is_unknown: has_processes && (!is_metered || is_busy.is_none()),
            is_suspended: self.page.is_suspended(),
        };
        self.idle.update(now_us, evidence);
    }

    /// Returns its metrics; `None` before the first scan.
    #[must_use]
    pub fn metrics(&self) -> Option<ShareMetrics> {
        let limits = self.page.limits();
        Some(ShareMetrics {
            claim: self.claim.clone(),
            share: self.share.clone(),
            limit_bytes: limits.memory_limit_bytes,
            burst_bytes: self
                .memory
                .limit_bytes
                .and(limits.memory_limit_bytes)
                .map(|limit| limit.saturating_sub(self.memory.held_bytes)),
            lent_bytes: self.memory.lends_idle.then_some(limits.lent_bytes),
            guaranteed_percent: limits.cores.percent(),
            cores_of: match limits.compute_policy {
                ComputePolicy::Balance | ComputePolicy::Fixed => CoresOf::Time,
                ComputePolicy::None if self.is_spatial => CoresOf::Multiprocessors,
                ComputePolicy::None => CoresOf::Nothing,
            },
            gpu_time_us: self.totals.gpu_time_us(),
            throttled_us: self.totals.throttled_us(),
            // A share without processes is scanned rarely.
            utilization_percent: if self.is_occupied() {
                self.totals.utilization_percent()
            } else {
                0
            },
            idle_since_us: self.idle.idle_since_us(),
            figures: self.figures?,
        })
    }
}

/// Returns the memory that the programs of a share use, with these limits, as libvgpu counts it but for the surplus of their
/// contexts, which they may lose at any time; `None` without a readable region.
pub(crate) fn used_bytes(
    region: &UsageRegion,
    limits: &Limits,
    buffer: &mut ReadBuffer,
) -> Option<u64> {
    let counted = region.live_use(buffer).ok()?;
    Some(counted.bytes.saturating_add(limits.driver_excess_bytes))
}

/// Returns whether the difference of two own times is worth a write.
fn differs(new: OwnTime, old: OwnTime) -> bool {
    match (new, old) {
        (OwnTime::Part(new), OwnTime::Part(old))
        | (OwnTime::Saturating(new), OwnTime::Saturating(old)) => {
            new.abs_diff(old) > OWN_TIME_RESOLUTION_PPM || (new == ALL_PPM) != (old == ALL_PPM)
        }
        (OwnTime::Interrupted(new), OwnTime::Interrupted(old)) => {
            new.abs_diff(old) > old / INTERRUPTION_RESOLUTION
        }
        (OwnTime::Part(_) | OwnTime::Saturating(_) | OwnTime::Interrupted(_), _) => true,
    }
}
