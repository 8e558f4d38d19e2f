//! Random histories of shares that begin, end, grow, shrink, burst and lend, while the agent is killed and the host restarts.
//!
//! Programs obey the pages of their shares, as libvgpu does, and give memory back late. An allocation may be charged later than it was
//! admitted, by a page that has been lowered meanwhile. At each step no byte is promised twice, and none is in use twice; in the end each
//! share has what it is guaranteed.

use std::collections::BTreeMap;
use std::mem::offset_of;

use drava_dra_driver::agent::node::nvml_observer::ObservedProcess;
use drava_dra_driver::prepare::Share;
use drava_vgpu_abi::region::Header;

use crate::balance::pseudo_random;
use crate::burst::{SteppedAgent, grant, limits};
use crate::node::{GIB, TestNode};
use crate::virtual_clock::FakeProcess;

/// Memory of the GPU.
const GPU_GIB: u64 = 16;
const SHARES: u64 = 6;
const HISTORIES: u64 = 12;
const STEPS: u64 = 120;

/// Periods of 100 ms after which an allocation is charged at most: 200 ms after its limit was lowered. The agent expects 250 ms.
const LATEST_CHARGE: u64 = 3;

/// A prepared share.
struct Prepared {
    /// Guarantee of its claim and its companions, GiB.
    held_gib: u64,
    /// A companion that is given back, GiB.
    ending_gib: u64,
    can_burst: bool,
    process: Option<FakeProcess>,
    used_bytes: u64,
    /// An allocation that was admitted and is not yet charged.
    admitted: Option<Admitted>,
    /// Steps in which it fits without what is given back.
    fits: u32,
}

struct Admitted {
    bytes: u64,
    /// Periods until it is charged.
    periods: u64,
}

struct Model {
    node: TestNode,
    agent: SteppedAgent,
    shares: BTreeMap<u32, Prepared>,
    log: Vec<String>,
    /// What has happened, to see that the histories are not empty.
    counts: BTreeMap<&'static str, u64>,
}

impl Model {
    fn new() -> Self {
        let node = TestNode::new();
        Self {
            agent: SteppedAgent::new(&node),
            node,
            shares: BTreeMap::new(),
            log: Vec::new(),
            counts: BTreeMap::new(),
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Returns what the page of a share allows, bytes, and what of its limit is lent.
    fn page(&self, number: u32) -> (u64, u64) {
        let page = self.node.page(number);
        let limit = page.memory_limit_bytes.unwrap();
        (limit.saturating_sub(page.lent_bytes), page.lent_bytes)
    }

    fn held_gib(&self) -> u64 {
        self.shares.values().map(|share| share.held_gib).sum()
    }

    fn change(&self, number: u32, change: impl Fn(&mut Share)) {
        self.node.node.change_record(number, change).unwrap();
    }

    fn prepare(&mut self, number: u32, random: &mut impl FnMut(u64) -> u64) {
        let held_gib = 1 + random(8);
        if self.held_gib() + held_gib > GPU_GIB {
            return;
        }
        let kind = random(4);
        // As the driver does: a page beside shares that can burst begins without memory.
        let has_bursting = self.shares.values().any(|share| share.can_burst);
        let page_gib = if has_bursting { 0 } else { held_gib };
        self.node.prepare(number, &limits(page_gib));
        let limit_gib = held_gib + 1 + random(12);
        self.change(number, |share| {
            share.memory_bytes = held_gib * GIB;
            match kind {
                0 => {}
                1 => share.lends_idle = true,
                _ => {
                    share.limit_bytes = Some(limit_gib * GIB);
                    share.bursts_idle = kind == 3;
                }
            }
        });
        let share = Prepared {
            held_gib,
            ending_gib: 0,
            can_burst: kind > 1,
            process: None,
            used_bytes: 0,
            admitted: None,
            fits: 0,
        };
        self.shares.insert(number, share);
        self.log
            .push(format!("prepare {number}: {held_gib} GiB, kind {kind}"));
        self.count("prepared");
    }

    fn unprepare(&mut self, number: u32) {
        self.shares.remove(&number);
        self.node.unprepare(number);
        std::fs::remove_dir_all(self.node.node.container(number)).unwrap();
        self.log.push(format!("unprepare {number}"));
    }

    fn set_use(&mut self, number: u32, bytes: u64) {
        let node = &self.node;
        let share = self.shares.get_mut(&number).unwrap();
        share.used_bytes = bytes;
        let process = share
            .process
            .get_or_insert_with(|| FakeProcess::new(node, number));
        process.charge(bytes, 0);
        self.log.push(format!("use {number}: {bytes}"));
    }

    fn end_process(&mut self, number: u32) {
        let share = self.shares.get_mut(&number).unwrap();
        if let Some(process) = share.process.take() {
            process.charge(0, 0);
            process.exit();
        }
        share.used_bytes = 0;
        share.admitted = None;
        self.log.push(format!("end {number}"));
    }

    /// A program wants this much: it gets what its page allows, at once or after some periods, or says that it waits.
    fn allocate(&mut self, number: u32, bytes: u64, periods: u64) {
        let (usable, lent) = self.page(number);
        let share = self.shares.get_mut(&number).unwrap();
        if share.admitted.is_some() {
            return;
        }
        let added = bytes.saturating_sub(share.used_bytes);
        if bytes <= usable && added > 0 && periods > 0 {
            share.admitted = Some(Admitted {
                bytes: added,
                periods,
            });
            self.log.push(format!("admit {number}: {added} more"));
        } else if bytes <= usable {
            self.set_use(number, bytes);
            self.count("allocated");
        } else if bytes <= usable + lent {
            let now_us = self.agent.now_us;
            let node = &self.node;
            let share = self.shares.get_mut(&number).unwrap();
            let process = share
                .process
                .get_or_insert_with(|| FakeProcess::new(node, number));
            process.write(offset_of!(Header, memory_demand_us), now_us);
            self.log.push(format!("demand {number}"));
            self.count("demanded");
        }
    }

    fn crash_agent(&mut self) {
        let mut agent = SteppedAgent::new(&self.node);
        agent.now_us = self.agent.now_us;
        self.agent = agent;
        self.log.push("agent killed".to_owned());
    }

    /// Lets something happen, or several things at the same time, and runs the agent for a while.
    fn step(&mut self, random: &mut impl FnMut(u64) -> u64) {
        for _ in 0..1 + random(3) {
            self.act(random);
        }
        // NVML does not answer at times.
        self.agent.is_observed = random(8) > 0;
        for _ in 0..1 + random(12) {
            self.advance(random);
        }
    }

    fn act(&mut self, random: &mut impl FnMut(u64) -> u64) {
        let number = u32::try_from(1 + random(SHARES)).unwrap();
        let action = random(20);
        let gib = 1 + random(6);
        let known = self.shares.get(&number).map(|share| {
            let process = share.process.is_some();
            (share.held_gib, share.ending_gib, share.used_bytes, process)
        });
        match (known, action) {
            (None, 0..15) => self.prepare(number, random),
            (Some((.., false)), 0..2) => self.unprepare(number),
            (Some((held, ..)), 2) if self.held_gib() + gib <= GPU_GIB && held < 12 => {
                self.change(number, |share| share.grants.push(grant(gib, false)));
                self.shares.get_mut(&number).unwrap().held_gib += gib;
                self.log.push(format!("grow {number} by {gib}"));
                self.count("grown");
            }
            (Some((_, 0, ..)), 3..5) => {
                let record = std::cell::Cell::new(0);
                self.change(number, |share| {
                    if let Some(last) = share.grants.last_mut() {
                        last.is_ending = true;
                        record.set(last.memory_bytes / GIB);
                    }
                });
                let ending = record.get();
                self.shares.get_mut(&number).unwrap().ending_gib = ending;
                self.log.push(format!("shrink {number} by {ending}"));
            }
            (Some(_), 5..12) => {
                let (usable, lent) = self.page(number);
                let wanted = (usable + lent) * (1 + random(16)) / 16;
                self.allocate(number, wanted, random(LATEST_CHARGE + 1));
            }
            (Some(_), 12..14) => self.end_process(number),
            (_, 18) => self.crash_agent(),
            (_, 19) if random(4) == 0 => {
                // The host restarts: all programs end.
                let numbers: Vec<u32> = self.shares.keys().copied().collect();
                numbers
                    .into_iter()
                    .for_each(|number| self.end_process(number));
                self.crash_agent();
                self.count("restarted");
            }
            _ => {}
        }
    }

    /// Runs the agent for one period, and what programs and driver do meanwhile.
    fn advance(&mut self, random: &mut impl FnMut(u64) -> u64) {
        let processes = self.shares.iter().filter_map(|(number, share)| {
            let process = share.process.as_ref()?;
            Some(ObservedProcess {
                used_bytes: Some(share.used_bytes),
                ..process.listed(*number)
            })
        });
        self.agent.processes = processes.collect();
        self.agent.step(1);
        let numbers: Vec<u32> = self.shares.keys().copied().collect();
        for number in numbers {
            self.charge_admitted(number);
            let (usable, lent) = self.page(number);
            let share = &self.shares[&number];
            if share.used_bytes > usable {
                self.count("over");
                if random(6) == 0 {
                    // Trimmed, or killed.
                    match random(2) {
                        0 => self.set_use(number, usable.min(share_use(&self.shares, number))),
                        _ => self.end_process(number),
                    }
                }
            }
            if lent > 0 {
                self.count("lent");
            }
            self.give_back(number);
            self.check(number);
        }
        self.check_sums();
    }

    /// Charges what was admitted, when its time is over.
    fn charge_admitted(&mut self, number: u32) {
        let (usable, _) = self.page(number);
        let share = self.shares.get_mut(&number).unwrap();
        if let Some(admitted) = &mut share.admitted {
            admitted.periods -= 1;
        }
        let Some(due) = share.admitted.take_if(|admitted| admitted.periods == 0) else {
            return;
        };
        let used = share.used_bytes + due.bytes;
        self.set_use(number, used);
        if used > usable {
            self.count("charged late");
        }
    }

    /// As the driver does: a companion ends when limit and use have fit for a while.
    fn give_back(&mut self, number: u32) {
        let limit = self.node.page(number).memory_limit_bytes.unwrap();
        let share = self.shares.get_mut(&number).unwrap();
        let kept = (share.held_gib - share.ending_gib) * GIB;
        if share.ending_gib == 0 {
            return;
        }
        let fits = limit <= kept && share.used_bytes <= kept;
        share.fits = if fits { share.fits + 1 } else { 0 };
        if share.fits > 3 {
            share.held_gib -= share.ending_gib;
            share.ending_gib = 0;
            share.fits = 0;
            self.change(number, |share| {
                share.grants.retain(|grant| !grant.is_ending)
            });
            self.log.push(format!("given back {number}"));
            self.count("given back");
        }
    }

    #[track_caller]
    fn check(&self, number: u32) {
        let page = self.node.page(number);
        let limit = page.memory_limit_bytes.unwrap();
        assert!(page.lent_bytes <= limit, "{number} lends what it has not");
    }

    #[track_caller]
    fn check_sums(&self) {
        let (mut used, mut promised) = (0, 0);
        for (number, share) in &self.shares {
            used += share.used_bytes;
            promised += self.page(*number).0.max(share.used_bytes);
        }
        assert!(used <= GPU_GIB * GIB, "{used} bytes in use");
        let pages = || -> Vec<_> {
            let shares = self.shares.iter();
            let page = |(number, share): (&u32, &Prepared)| {
                let (usable, lent) = self.page(*number);
                (*number, share.held_gib, usable, lent, share.used_bytes)
            };
            shares.map(page).collect()
        };
        assert!(
            promised <= GPU_GIB * GIB,
            "{promised} bytes promised: share, GiB held, bytes of its page, lent and used: {:?}",
            pages()
        );
    }

    /// All programs end, and those of lenders need all they are guaranteed.
    fn settle(&mut self, random: &mut impl FnMut(u64) -> u64) {
        let numbers: Vec<u32> = self.shares.keys().copied().collect();
        for number in &numbers {
            self.end_process(*number);
        }
        self.agent.is_observed = true;
        for _ in 0..60 {
            for number in &numbers {
                let (usable, lent) = self.page(*number);
                if lent > 0 {
                    self.allocate(*number, usable + lent, 0);
                }
            }
            self.advance(random);
        }
        for (number, share) in &self.shares {
            let guarantee = share.held_gib - share.ending_gib;
            let (usable, _) = self.page(*number);
            assert!(
                usable >= guarantee * GIB,
                "{number} has {usable} bytes of {guarantee} GiB"
            );
        }
    }
}

fn share_use(shares: &BTreeMap<u32, Prepared>, number: u32) -> u64 {
    shares[&number].used_bytes
}

#[test]
fn promises_no_byte_twice_in_random_histories() {
    let first: u64 = std::env::var("DRAVA_MODEL_FIRST").map_or(1, |seed| seed.parse().unwrap());
    let count: u64 =
        std::env::var("DRAVA_MODEL_SEEDS").map_or(HISTORIES, |count| count.parse().unwrap());
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in first..first + count {
        let mut random = pseudo_random(seed);
        let mut model = Model::new();
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..STEPS {
                model.step(&mut random);
            }
            model.settle(&mut random);
        }));
        if checked.is_err() {
            let last = model.log.len().saturating_sub(25);
            panic!("seed {seed}:\n{}", model.log[last..].join("\n"));
        }
        for (what, number) in model.counts {
            *counts.entry(what).or_default() += number;
        }
    }
    if count == HISTORIES {
        for what in [
            "prepared",
            "allocated",
            "demanded",
            "grown",
            "given back",
            "over",
            "charged late",
            "lent",
            "restarted",
        ] {
            assert!(
                counts.contains_key(what),
                "no history has {what}: {counts:?}"
            );
        }
    }
}
