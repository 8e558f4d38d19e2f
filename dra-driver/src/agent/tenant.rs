//! A share as the agent follows it: its files, and what it did since the last look.

use std::io;
use std::os::fd::OwnedFd;

use drava_api::config::Enforcement;
use drava_nvml::GpuUuid;
use drava_vgpu_abi::ComputePolicy;
use drava_vgpu_abi::bucket::TokenSlice;
use drava_vgpu_abi::contention::ALL_PPM;
use drava_vgpu_abi::snapshot::ProcessUsage;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::arrivals::Arrivals;
use super::control::{Measured, Terms};
use super::detect::{GpuProcess, RegionProblem, ShareView};
use super::progress::{Done, Progress};
use super::reserve::{Reserve, Shown};
use super::share::{Glance, Page, Scratch, Usage};
use super::share_metrics::{self, CounterTotals};
use super::token::Contender;
use crate::claim::{ClaimUid, ShareId};
use crate::layout::Layout;
use crate::mounts::MountedShare;
use crate::prepare::record::ClaimRecord;
use crate::prepare::{Prepared, Share};

mod lending;
mod metrics;
mod rank;

use lending::Lending;
pub use rank::Rank;

/// For how long a share that took time or waited for it still wants it, µs: two of the longest sleeps of a launch that
/// waits, and some.
const WANTS_FOR_US: u64 = 15_000;

/// Debt that is believed, µs: a kernel of that length may be running.
const DEBT_BELIEVED_US: u64 = 1_000_000;

/// Rates that differ by less than one part in so many are the same.
const SAME_RATE: u32 = 256;

/// A share whose processes have no context counts as one without processes after so long without demand, µs: a process
/// that was killed leaves its slot to the next one that looks.
const LINGERS_US: u64 = 10_000_000;

/// Which share, in the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(pub u32);

/// A share.
pub struct Tenant {
    /// Its claim.
    pub claim: ClaimUid,
    /// Its ID.
    pub share: ShareId,
    /// Its card.
    pub card: GpuUuid,
    /// What happens to processes that break its limits.
    pub enforcement: Enforcement,
    /// When the agent first saw it, µs.
    pub since_us: u64,
    /// Whether others use what is guaranteed to it while it is idle.
    lending: Lending,
    /// How it stands to the other shares of the card.
    pub rank: Rank,
    page: Page,
    usage: Usage,
    /// Whether it is the only device of its claim.
    is_alone: bool,
    presence: Presence,
    reserve: Reserve,
    /// What the page said when it was opened.
    opened_reserve_bytes: u64,
    progress: Progress,
    /// Since its last turn that was settled.
    progress_in_turns: Progress,
    /// The region's sign of demand at the last look.
    wanted_us: u64,
    /// The same when it was last seen to wake or to rest, if that was later.
    turned_us: u64,
    was_idle: bool,
    own_parts: u32,
    /// Mean length of the launches of the last step that had some, µs.
    launch_us: u64,
    /// The longest kernel that was told, µs.
    longest_told_us: u64,
    /// Ends of its processes.
    pidfds: Vec<OwnedFd>,
    totals: CounterTotals,
    /// Figures of the last look.
    figures: Option<share_metrics::Figures>,
}

/// One look in so many at a share without processes finds what inotify does not tell.
const LOOKS_AWAY: u32 = 10;

/// Whether a share has processes, which have to be looked at in each step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    /// It may have some.
    Here,
    /// It had none when the agent began to wait for the next one.
    Leaving,
    /// It had none either in a look after that, and nobody has come since.
    Away {
        /// Looks for which it was left alone.
        unseen: u32,
    },
}

/// What a share did since the last look.
#[derive(Debug, Clone, Copy)]
pub struct Activity {
    /// For the controller.
    pub measured: Measured,
    /// A kernel that is much longer than any told before, µs.
    pub long_kernel_us: Option<u64>,
}

impl Tenant {
    /// Opens the files of a share.
    ///
    /// # Errors
    /// When its limits page cannot be used. A region that cannot be is a breach, not an error.
    pub fn open(
        layout: &Layout,
        record: &ClaimRecord,
        device: &Prepared,
        share: &Share,
        now_us: u64,
    ) -> io::Result<Self> {
        let uid = &record.claim.uid;
        let page = Page::open(&layout.limits(uid, &share.id))?;
        let usage = Usage::open(&layout.usage(uid, &share.id));
        Ok(Self {
            claim: uid.clone(),
            share: share.id.clone(),
            card: GpuUuid::new(device.card.uuid.clone()),
            enforcement: share.enforcement,
            since_us: now_us,
            lending: Lending::default(),
            rank: Rank::default(),
            presence: Presence::Here,
            reserve: Reserve::default(),
            opened_reserve_bytes: page.limits().driver_reserve_bytes,
            is_alone: record.devices.len() == 1,
            page,
            usage,
            progress: Progress::default(),
            progress_in_turns: Progress::default(),
            wanted_us: 0,
            turned_us: 0,
            was_idle: true,
            own_parts: ALL_PPM,
            launch_us: 0,
            longest_told_us: 0,
            pidfds: Vec::new(),
            totals: CounterTotals::default(),
            figures: None,
        })
    }

    /// Whether it is this share.
    #[must_use]
    pub fn is(&self, mounted: &MountedShare) -> bool {
        (&mounted.claim, &mounted.share) == (&self.claim, &self.share)
    }

    /// What it is entitled to; `None` if its compute is not metered.
    #[must_use]
    pub fn terms(&self) -> Option<Terms> {
        let limits = self.page.limits();
        let metered = limits.compute_policy != ComputePolicy::None;
        let policy = match limits.compute_policy {
            ComputePolicy::Token if !self.takes_turns() => ComputePolicy::Balance,
            policy => policy,
        };
        metered.then_some(Terms {
            cores: limits.cores,
            policy,
            priority: limits.priority,
        })
    }

    /// Whether it takes turns. A share of a claim with several devices does not: a collective over two cards would wait
    /// for both turns.
    #[must_use]
    pub fn takes_turns(&self) -> bool {
        self.is_alone && self.page.limits().compute_policy == ComputePolicy::Token
    }

    /// Whether it may have processes.
    #[must_use]
    pub fn is_here(&self) -> bool {
        !matches!(self.presence, Presence::Away { .. })
    }

    /// Somebody has come to it.
    pub fn arrive(&mut self) {
        self.presence = Presence::Here;
    }

    /// Whether it is to be looked at in this look, which comes once a second; counts those that it is left out of.
    pub fn is_due(&mut self) -> bool {
        match &mut self.presence {
            Presence::Here | Presence::Leaving => true,
            Presence::Away { unseen } => {
                *unseen += 1;
                *unseen >= LOOKS_AWAY
            }
        }
    }

    /// Takes what a look has shown of it; `listed` is what NVML lists on the card, if it does.
    pub fn settle(
        &mut self,
        key: Key,
        now_us: u64,
        view: &ShareView<Key>,
        listed: Option<&[GpuProcess<Key>]>,
        arrivals: &mut Arrivals<Key>,
    ) {
        // One that was damaged is looked at until it is mended.
        let is_inhabited = view.region.as_ref().map_or(true, |region| {
            let has_context = |process: &ProcessUsage| {
                listed.is_none_or(|listed| listed.iter().any(|l| l.owner == process.owner))
            };
            let lingers = self.wanted_us.max(self.since_us).saturating_add(LINGERS_US) > now_us;
            region.processes.iter().any(has_context) || (lingers && !region.processes.is_empty())
        });
        let uses_card = |listed: &[GpuProcess<Key>]| listed.iter().any(|l| l.shares.contains(&key));
        let is_inhabited = is_inhabited || listed.is_some_and(uses_card);
        self.presence = match self.presence {
            _ if is_inhabited => Presence::Here,
            Presence::Here if arrivals.wait_for(key, self.usage.dir()) => Presence::Leaving,
            Presence::Here => Presence::Here,
            Presence::Leaving | Presence::Away { .. } => {
                // Shares that were prepared together are not looked at together.
                let unseen = key.0 % LOOKS_AWAY;
                Presence::Away {
                    unseen: if self.presence == Presence::Leaving {
                        unseen
                    } else {
                        0
                    },
                }
            }
        };
    }

    /// Reads its page again if somebody else has changed it, and says whether it still is the one at its path.
    #[must_use]
    pub fn is_current(&mut self) -> bool {
        // What cannot be read now says what it said.
        let _ = self.page.refresh();
        self.page.is_current()
    }

    /// What it did since the last call. A region that cannot be read did nothing.
    pub fn measure(&mut self, now_us: u64, scratch: &mut Scratch) -> Activity {
        let idle = Activity {
            measured: Measured {
                used_us: 0,
                launches: 0,
                waited: false,
                launch_us: self.launch_us,
                rests: false,
            },
            long_kernel_us: None,
        };
        if !self.is_here() {
            self.was_idle = true;
            return idle;
        }
        let Ok(glance) = self.usage.glance(scratch) else {
            return idle;
        };
        let has_acted = glance.share.last_demand_us != self.wanted_us;
        // One whose time others use since it was seen to rest has done nothing more.
        let rests = self.is_lent() && glance.share.last_demand_us == self.turned_us;
        self.wanted_us = glance.share.last_demand_us;
        self.turned_us = self.wanted_us;
        let is_in_debt = self.is_in_debt(&glance, now_us);
        let rests = rests && !is_in_debt;
        if !has_acted {
            self.was_idle = !is_in_debt;
            let measured = Measured {
                waited: is_in_debt,
                rests,
                ..idle.measured
            };
            return Activity { measured, ..idle };
        }
        let Ok(region) = self.usage.view(scratch) else {
            return idle;
        };
        let Done {
            used_us,
            throttled_us,
            launches,
            long_kernel_us,
        } = self.progress.since(&region.processes);
        let long_kernel_us = long_kernel_us.filter(|us| us / 2 >= self.longest_told_us);
        self.longest_told_us = long_kernel_us.unwrap_or(self.longest_told_us);
        // One that wakes may want all it can get; what it used so far says nothing. One that asked and got nothing waits:
        // how long is only counted when the wait is over.
        let got_nothing = used_us == 0 && launches == 0;
        let waited = throttled_us > 0 || is_in_debt || self.was_idle || got_nothing;
        let waited = waited && !rests;
        self.was_idle = rests;
        if let Some(mean_us) = used_us.checked_div(launches).filter(|us| *us > 0) {
            self.launch_us = mean_us;
        }
        let measured = Measured {
            used_us,
            launches,
            waited,
            launch_us: self.launch_us,
            rests,
        };
        Activity {
            measured,
            long_kernel_us,
        }
    }

    /// Whether what it has launched is not yet repaid. The credit is only filled when somebody looks at it.
    fn is_in_debt(&self, glance: &Glance, now_us: u64) -> bool {
        let rate = u64::from(self.page.limits().rate_us_per_s.unwrap_or(0));
        let gained = now_us
            .saturating_sub(glance.refilled_us)
            .saturating_mul(rate)
            / 1_000_000;
        let debt = glance
            .share
            .credit_us
            .min(0)
            .unsigned_abs()
            .min(DEBT_BELIEVED_US);
        glance.share.last_demand_us > 0 && debt > gained
    }

    /// Sets the rate, unless it is about the same.
    ///
    /// # Errors
    /// When the page cannot be written.
    pub fn set_rate(&mut self, rate_us_per_s: u32) -> io::Result<()> {
        if let Some(present) = self.page.limits().rate_us_per_s
            && present.abs_diff(rate_us_per_s) <= rate_us_per_s / SAME_RATE
        {
            return Ok(());
        }
        self.page
            .change(|limits| limits.rate_us_per_s = Some(rate_us_per_s))
    }

    /// Says what the driver takes by itself in its processes. `estimate_bytes` is what it takes in a context on a card of
    /// this model, where that is known.
    ///
    /// # Errors
    /// When the page cannot be written.
    pub fn correct(&mut self, estimate_bytes: Option<u64>, shown: &[Shown]) -> io::Result<()> {
        let estimate_bytes = estimate_bytes.unwrap_or(self.opened_reserve_bytes);
        let correction = self.reserve.look(estimate_bytes, shown);
        let limits = self.page.limits();
        if limits.driver_reserve_bytes == correction.reserve_bytes
            && limits.driver_excess_bytes == correction.excess_bytes
        {
            return Ok(());
        }
        self.page.change(|limits| {
            limits.driver_reserve_bytes = correction.reserve_bytes;
            limits.driver_excess_bytes = correction.excess_bytes;
        })
    }

    /// Gives it its next turn with the token, or a longer one.
    ///
    /// # Errors
    /// When the page cannot be written.
    pub fn set_turn(&mut self, turn: TokenSlice) -> io::Result<()> {
        self.page.set_turn(turn)
    }

    /// Ends its turn at `until_us`; a moment that has passed says that somebody else has the token.
    ///
    /// # Errors
    /// When the page cannot be written.
    pub fn end_turn(&mut self, until_us: u64) -> io::Result<()> {
        self.page.end_turn(until_us)
    }

    /// Says which part of what its events measure is its own, unless it is about the same.
    ///
    /// # Errors
    /// When the page cannot be written.
    pub fn set_own_time(&mut self, parts: u32) -> io::Result<()> {
        if parts.abs_diff(self.own_parts) <= ALL_PPM / 200
            && (parts == ALL_PPM) == (self.own_parts == ALL_PPM)
        {
            return Ok(());
        }
        self.own_parts = parts;
        self.page.set_own_time(parts)
    }

    /// How it stands in the ring of its card.
    pub fn contender(
        &self,
        key: Key,
        now_us: u64,
        gives_way: bool,
        scratch: &mut Scratch,
    ) -> Contender<Key> {
        let glance = self.is_here().then(|| self.usage.glance(scratch));
        let wants = match glance {
            // It says itself for how long it is at work, unless it has just been told to.
            Some(Ok(Glance { share, .. })) if self.rank.calls && share.busy_until_us > 0 => {
                self.at_work_until_us(&share, now_us) > now_us && !self.is_dead()
            }
            Some(Ok(Glance { share, .. })) => {
                // Debt is time of kernels that were launched and may still run.
                let debt = share.credit_us.min(0).unsigned_abs().min(DEBT_BELIEVED_US);
                share
                    .last_demand_us
                    .min(now_us)
                    .saturating_add(debt)
                    .saturating_add(WANTS_FOR_US)
                    > now_us
                    && !self.is_dead()
            }
            Some(Err(_)) | None => false,
        };
        Contender {
            id: key,
            cores: self.page.limits().cores.percent(),
            wants,
            gives_way,
        }
    }

    /// GPU time that it was charged since the last call, µs. A region that cannot be read used none.
    pub fn used_in_turns(&mut self, scratch: &mut Scratch) -> u64 {
        let view = self.usage.view(scratch);
        view.map_or(0, |region| {
            self.progress_in_turns.since(&region.processes).used_us
        })
    }

    /// Follows the ends of these processes.
    pub fn follow(&mut self, pidfds: Vec<OwnedFd>) {
        self.pidfds = pidfds;
    }

    /// Whether all processes that are known have ended.
    fn is_dead(&self) -> bool {
        let mut fds: Vec<PollFd<'_>> = self
            .pidfds
            .iter()
            .map(|fd| PollFd::new(fd, PollFlags::IN))
            .collect();
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        !fds.is_empty() && poll(&mut fds, Some(&at_once)) == Ok(fds.len())
    }

    /// Looks closely: at the size of the region and at all of its figures.
    pub fn view(&mut self, key: Key, scratch: &mut Scratch) -> ShareView<Key> {
        let usage = &mut self.usage;
        let region = usage.verify().and_then(|()| usage.view(scratch));
        ShareView {
            id: key,
            limit_bytes: self.page.limits().memory_limit_bytes,
            region,
        }
    }

    /// What the region's problem is, if it has one that shows at a glance.
    ///
    /// # Errors
    /// The problem.
    pub fn glance(&self, scratch: &mut Scratch) -> Result<Glance, RegionProblem> {
        self.usage.glance(scratch)
    }
}
