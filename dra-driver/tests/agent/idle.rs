//! What the agent does not do: its looks at shares are counted, in virtual time.

use std::fs::{File, OpenOptions};
use std::mem::offset_of;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use drava_dra_driver::agent::Agent;
use drava_dra_driver::agent::observe::{Listed, Observation};
use drava_dra_driver::agent::process::Described;
use drava_nvml::GpuUuid;
use drava_vgpu_abi::ledger::Owner;
use drava_vgpu_abi::region::{Header, REGION_ABI_VERSION, REGION_MAGIC, SLOTS_OFFSET, Slot};
use drava_vgpu_abi::{ComputePolicy, Cores, Limits};
use gpu_tenants::{Ground, library};
use simulator_machine::description::H200X8;

use crate::node::{GIB, Node};

pub(crate) const SECOND_US: u64 = 1_000_000;
pub(crate) const STEP_US: u64 = 100_000;

/// An agent that is given its time and what NVML says.
pub(crate) struct Clockwork {
    agent: Agent,
    pub(crate) node: Node,
    pub(crate) cards: Vec<GpuUuid>,
    pub(crate) listed: Vec<(GpuUuid, Listed)>,
    pub(crate) now_us: u64,
    looked_us: u64,
}

impl Clockwork {
    /// On a node with such claims on each of eight cards.
    fn new(cores: &[u32]) -> Self {
        let node = Node::on(Ground::with_machine(library::shipped().unwrap(), H200X8).unwrap());
        let machine = node.ground.machine().status().unwrap();
        let claims = machine
            .cards
            .iter()
            .flat_map(|card| cores.iter().map(move |cores| (card, *cores)));
        for (number, (card, cores)) in (0..).zip(claims) {
            let limits = Limits {
                cores: Cores::new(cores).unwrap(),
                compute_policy: ComputePolicy::Balance,
                ..Limits::memory(GIB)
            };
            node.prepare_on(&card.uuid, number, &limits);
        }
        Self::on(node)
    }

    pub(crate) fn on(node: Node) -> Self {
        let machine = node.ground.machine().status().unwrap();
        let mut config = node.config();
        config.open = Arc::new(|| Err("NVML is played by the test".to_owned()));
        Self {
            agent: Agent::new(config),
            node,
            cards: machine
                .cards
                .iter()
                .map(|card| GpuUuid::new(card.uuid.clone()))
                .collect(),
            listed: Vec::new(),
            now_us: 1000 * SECOND_US,
            looked_us: 0,
        }
    }

    /// Does all that is due for so long; returns how often regions were read.
    pub(crate) fn run(&mut self, duration_us: u64) -> u64 {
        let (before, end_us) = (self.agent.reads(), self.now_us + duration_us);
        while self.now_us < end_us {
            if self.now_us >= self.looked_us + SECOND_US {
                self.looked_us = self.now_us;
                for card in &self.cards {
                    let on_card = self.listed.iter().filter(|(on, _)| on == card);
                    let observation = Observation {
                        card: card.clone(),
                        processes: Some(on_card.map(|(_, listed)| listed.clone()).collect()),
                    };
                    assert_eq!(self.agent.observed(self.now_us, &observation), []);
                }
            }
            assert_eq!(self.agent.pass(self.now_us), []);
            self.now_us = self.agent.next_us(self.now_us).min(end_us);
        }
        self.agent.reads() - before
    }
}

/// What libvgpu writes in a region for one process.
pub(crate) struct Forged {
    region: File,
    pid: u32,
}

impl Forged {
    pub(crate) fn new(node: &Node, number: u32) -> Self {
        Self::at(&node.region(number))
    }

    pub(crate) fn at(region: &Path) -> Self {
        let region = OpenOptions::new().write(true).open(region).unwrap();
        let forged = Self { region, pid: 7 };
        for (offset, value) in [
            (offset_of!(Header, magic), REGION_MAGIC),
            (offset_of!(Header, abi_version), REGION_ABI_VERSION),
            (offset_of!(Header, slots_in_use), 1),
            (SLOTS_OFFSET + offset_of!(Slot, pid), u64::from(forged.pid)),
            (SLOTS_OFFSET + offset_of!(Slot, start_time), 1),
            (SLOTS_OFFSET + offset_of!(Slot, pid_namespace), 1),
            (SLOTS_OFFSET + offset_of!(Slot, state), 0x101),
        ] {
            forged.write(offset, value);
        }
        forged
    }

    pub(crate) fn write(&self, offset: usize, value: u64) {
        self.region
            .write_all_at(&value.to_ne_bytes(), offset as u64)
            .unwrap();
    }

    /// Calls the agent, as libvgpu does.
    pub(crate) fn calls(&self) {
        let now = std::time::SystemTime::now();
        let times = std::fs::FileTimes::new()
            .set_accessed(now)
            .set_modified(now);
        self.region.set_times(times).unwrap();
    }

    /// Its process ends as one does that is killed: the slot stays, here as free.
    pub(crate) fn ends(&self) {
        self.write(SLOTS_OFFSET + offset_of!(Slot, state), 0x100);
    }

    /// Its process has used so much of the card until now, and wants more.
    pub(crate) fn works(&self, now_us: u64, gpu_time_us: u64) {
        self.write(offset_of!(Header, wanted_us), now_us);
        self.write(SLOTS_OFFSET + offset_of!(Slot, gpu_time_us), gpu_time_us);
        self.write(SLOTS_OFFSET + offset_of!(Slot, throttled_us), now_us);
    }

    /// NVML's list has it.
    pub(crate) fn listed(&self, number: u32) -> Listed {
        Listed {
            pid: 100_000 + number,
            used_bytes: Some(0),
            described: Described {
                owner: Owner {
                    pid: self.pid,
                    start_time: 1,
                    pid_namespace: 1,
                },
                name: "forged".to_owned(),
                shares: vec![Node::share_id(number).as_str().to_owned()],
            },
        }
    }
}

#[test]
fn claims_without_processes_are_hardly_ever_looked_at() {
    let mut clockwork = Clockwork::new(&[12; 8]);
    clockwork.run(10 * SECOND_US);
    // One look in ten seconds at each of 64.
    assert!((64..=2 * 64).contains(&clockwork.run(10 * SECOND_US)));
    // Those that are unprepared never again.
    let mut unprepared = Clockwork::new(&[12; 8]);
    unprepared.run(10 * SECOND_US);
    for number in 0..64 {
        unprepared.node.unprepare(number);
    }
    unprepared.run(SECOND_US);
    assert_eq!(unprepared.run(20 * SECOND_US), 0);
    // Somebody comes to one: it is looked at in each step from the next one on, and the others are not.
    let forged = Forged::new(&clockwork.node, 5);
    assert!(clockwork.run(STEP_US) > 0, "not seen");
    let card = clockwork.cards[0].clone();
    clockwork.listed.push((card, forged.listed(5)));
    let mut reads = 0;
    for step in 0..100 {
        forged.works(clockwork.now_us, step * STEP_US);
        reads += clockwork.run(STEP_US);
    }
    assert!((100..=64 + 400).contains(&reads), "{reads}");
}

#[test]
fn one_that_comes_to_a_busy_card_is_governed_in_the_next_step() {
    let mut clockwork = Clockwork::new(&[20, 80]);
    let card = clockwork.cards[0].clone();
    let busy = Forged::new(&clockwork.node, 0);
    clockwork.listed.push((card, busy.listed(0)));
    for step in 0..100 {
        busy.works(clockwork.now_us, step * STEP_US);
        clockwork.run(STEP_US);
    }
    let rates = |clockwork: &Clockwork| {
        [0, 1].map(|number| clockwork.node.page(number).rate_us_per_s.unwrap())
    };
    // The other one is told what it may use before anybody looks again, although the first has the card.
    assert_eq!(rates(&clockwork), [1_000_000, 800_000]);
    let comes = Forged::new(&clockwork.node, 1);
    for step in 0..2 {
        busy.works(clockwork.now_us, (100 + step) * STEP_US);
        comes.works(clockwork.now_us, (1 + step) * 1000);
        clockwork.run(STEP_US);
    }
    assert!(rates(&clockwork)[0] <= 210_000, "{:?}", rates(&clockwork));
}

#[test]
fn busy_claims_are_looked_at_in_each_step_and_no_more() {
    let mut clockwork = Clockwork::new(&[12; 8]);
    let card = clockwork.cards[0].clone();
    let busy: Vec<Forged> = (0..8)
        .map(|number| {
            let forged = Forged::new(&clockwork.node, number);
            clockwork.listed.push((card.clone(), forged.listed(number)));
            forged
        })
        .collect();
    let mut reads = 0;
    for step in 0..150 {
        // Kernels are longer than a step: in some nobody has used anything.
        for forged in busy.iter().filter(|_| step % 2 == 0) {
            forged.works(clockwork.now_us, step * STEP_US / 8);
        }
        let read = clockwork.run(STEP_US);
        reads += if step < 50 { 0 } else { read };
    }
    // Header and slots, ten times a second and once for the look; the other 56 are away.
    assert!(reads <= 8 * 2 * 11 * 10 + 100, "{reads}");
}

#[test]
fn what_others_write_into_a_page_is_kept_and_obeyed() {
    let mut clockwork = Clockwork::new(&[20, 80]);
    let card = clockwork.cards[0].clone();
    let both = [0, 1].map(|number| {
        let forged = Forged::new(&clockwork.node, number);
        clockwork.listed.push((card.clone(), forged.listed(number)));
        forged
    });
    let mut step = 0;
    let mut work = |clockwork: &mut Clockwork, seconds: u64| {
        for _ in 0..seconds * SECOND_US / STEP_US {
            step += 1;
            for forged in &both {
                forged.works(clockwork.now_us, step * STEP_US / 2);
            }
            clockwork.run(STEP_US);
        }
        clockwork.node.page(0).rate_us_per_s.unwrap()
    };
    assert!(work(&mut clockwork, 3) < 300_000);
    // In place.
    let cores = |percent| Cores::new(percent).unwrap();
    clockwork.node.change_page(0, |limits| {
        (limits.cores, limits.memory_limit_bytes) = (cores(60), Some(3 * GIB));
    });
    clockwork
        .node
        .change_page(1, |limits| limits.cores = cores(40));
    assert!(work(&mut clockwork, 3) > 500_000);
    let page = clockwork.node.page(0);
    assert_eq!(
        (page.cores, page.memory_limit_bytes),
        (cores(60), Some(3 * GIB))
    );
    // Also what the agent has not seen yet when it writes itself, between two looks: the other one rests, and this one's
    // rate changes.
    let rate = clockwork.node.page(1).rate_us_per_s;
    clockwork.run(STEP_US);
    clockwork
        .node
        .change_page(1, |limits| limits.memory_limit_bytes = Some(2 * GIB));
    for _ in 0..8 {
        both[1].works(clockwork.now_us, clockwork.now_us);
        clockwork.run(STEP_US);
    }
    let page = clockwork.node.page(1);
    assert!(page.rate_us_per_s > rate, "{rate:?} {page:?}");
    assert_eq!(page.memory_limit_bytes, Some(2 * GIB));
    // By another page: the agent turns to that one.
    for (number, percent) in [(0, 10), (1, 90)] {
        let limits = Limits {
            cores: cores(percent),
            compute_policy: ComputePolicy::Balance,
            ..Limits::memory(GIB)
        };
        clockwork
            .node
            .replace_page(card.as_str(), number, number == 0, &limits);
    }
    assert!(work(&mut clockwork, 3) < 200_000);
    assert_eq!(clockwork.node.page(0).cores, cores(10));
}

/// Two claims with a card's share each on both cards, in token mode: were turns taken, a kernel that waits for the one on
/// the other card would wait for both turns.
#[test]
fn a_claim_with_two_cards_takes_no_turns_and_one_that_is_not_metered_nothing() {
    let node = Node::on(Ground::with_machine(library::shipped().unwrap(), H200X8).unwrap());
    let machine = node.ground.machine().status().unwrap();
    let [first, second] = [0, 1].map(|index| machine.cards[index].uuid.clone());
    let token = Limits {
        cores: Cores::new(40).unwrap(),
        compute_policy: ComputePolicy::Token,
        ..Limits::memory(GIB)
    };
    for number in [1, 2] {
        let shares = [(first.as_str(), number), (second.as_str(), 10 + number)];
        node.prepare_shares(number, &shares, &token);
    }
    node.prepare_on(&first, 3, &token);
    node.prepare_on(&first, 4, &Limits::memory(GIB));
    let regions = [1, 2].map(|number| node.region(number));
    let mut clockwork = Clockwork::on(node);
    let card = clockwork.cards[0].clone();
    let alone = [3, 4].map(|number| Forged::new(&clockwork.node, number));
    let paired = regions.map(|region| Forged::at(&region));
    for (number, forged) in (1..).zip(paired.iter().chain(&alone)) {
        clockwork.listed.push((card.clone(), forged.listed(number)));
    }
    for step in 0..20 {
        for forged in paired.iter().chain(&alone) {
            forged.works(clockwork.now_us, step * STEP_US / 2);
        }
        clockwork.run(STEP_US);
    }
    let [one, two, alone, free] = [1, 2, 3, 4].map(|number| clockwork.node.words(number)[0]);
    assert_eq!((one, two, free), (0, 0, 0));
    assert!(alone > 0, "one with a single device does take turns");
    assert!(clockwork.node.page(1).rate_us_per_s.is_some());
    assert_eq!(clockwork.node.page(4), Limits::memory(GIB));
}

#[test]
fn a_process_that_avoids_its_region_is_found_by_nvml_where_nobody_was() {
    let mut clockwork = Clockwork::new(&[100]);
    clockwork.run(5 * SECOND_US);
    let number = 3;
    let escapes = Listed {
        pid: 100_000,
        used_bytes: Some(GIB),
        described: Described {
            owner: Owner {
                pid: 9,
                start_time: 9,
                pid_namespace: 9,
            },
            name: "static".to_owned(),
            shares: vec![Node::share_id(number).as_str().to_owned()],
        },
    };
    let observation = Observation {
        card: clockwork.cards[number as usize].clone(),
        processes: Some(vec![escapes]),
    };
    let mut found = Vec::new();
    for _ in 0..2 {
        clockwork.now_us += SECOND_US;
        found.extend(clockwork.agent.observed(clockwork.now_us, &observation));
    }
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].share, Node::share_id(number));
    // And it is there: its share is looked at in each step again.
    assert!(clockwork.run(STEP_US * 3) > 0);
}

#[test]
fn a_region_that_is_damaged_while_nobody_is_there_is_looked_at_again() {
    let mut clockwork = Clockwork::new(&[100]);
    clockwork.run(10 * SECOND_US);
    std::fs::remove_file(clockwork.node.region(3)).unwrap();
    let mut looks = 0;
    let found = loop {
        looks += 1;
        clockwork.now_us += SECOND_US;
        let mut found = clockwork.agent.pass(clockwork.now_us);
        let observation = Observation {
            card: clockwork.cards[3].clone(),
            processes: Some(Vec::new()),
        };
        found.extend(clockwork.agent.observed(clockwork.now_us, &observation));
        if !found.is_empty() {
            break found;
        }
        assert!(looks < 3, "three seconds are promised");
    };
    assert_eq!(found[0].share, Node::share_id(3));
}
