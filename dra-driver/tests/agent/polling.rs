//! How often the agent reads regions, counted in virtual time.

use drava_dra_driver::agent::node::nvml_observer::{BusyProcesses, Observation, ObservedProcess};
use drava_dra_driver::node::process::ProcessInfo;
use drava_vgpu_abi::ledger::Owner;
use drava_vgpu_abi::{ComputePolicy, Cores, Limits};
use gpu_tenants::{TestBed, library};
use simulator_machine::description::H200X8;

use crate::node::{GIB, TestNode};
use crate::virtual_clock::{FakeProcess, SECOND_US, STEP_US, VirtualClockAgent};

#[test]
fn reads_claims_without_processes_every_10_s() {
    let mut agent = VirtualClockAgent::new(&[12; 8]);
    agent.run(10 * SECOND_US);
    // One read in 10 s for each of 64 claims.
    assert!((64..=2 * 64).contains(&agent.run(10 * SECOND_US)));
    // Unprepared claims are not read at all.
    let mut unprepared = VirtualClockAgent::new(&[12; 8]);
    unprepared.run(10 * SECOND_US);
    for number in 0..64 {
        unprepared.node.unprepare(number);
    }
    unprepared.run(SECOND_US);
    assert_eq!(unprepared.run(20 * SECOND_US), 0);
    // A claim with a process is read on each tick; the other claims are not.
    let process = FakeProcess::new(&agent.node, 5);
    assert!(agent.run(STEP_US) > 0, "process not detected");
    let gpu = agent.gpus[0].clone();
    agent.listed.push((gpu, process.listed(5)));
    let mut reads = 0;
    for step in 0..100 {
        process.record_usage(agent.now_us, step * STEP_US);
        reads += agent.run(STEP_US);
    }
    assert!((100..=64 + 400).contains(&reads), "{reads}");
}

#[test]
fn limits_borrower_on_next_tick_after_owner_starts() {
    let mut agent = VirtualClockAgent::new(&[20, 80]);
    let gpu = agent.gpus[0].clone();
    let busy = FakeProcess::new(&agent.node, 0);
    agent.listed.push((gpu, busy.listed(0)));
    for step in 0..100 {
        busy.record_usage(agent.now_us, step * STEP_US);
        agent.run(STEP_US);
    }
    let rates = |agent: &VirtualClockAgent| {
        [0, 1].map(|number| agent.node.page(number).rate_us_per_s.unwrap())
    };
    // The page of the idle owner has its rate before its first launch.
    assert_eq!(rates(&agent), [1_000_000, 800_000]);
    let owner = FakeProcess::new(&agent.node, 1);
    for step in 0..2 {
        busy.record_usage(agent.now_us, (100 + step) * STEP_US);
        owner.record_usage(agent.now_us, (1 + step) * 1000);
        agent.run(STEP_US);
    }
    assert!(rates(&agent)[0] <= 210_000, "{:?}", rates(&agent));
}

#[test]
fn reads_busy_claims_once_per_tick() {
    let mut agent = VirtualClockAgent::new(&[12; 8]);
    let gpu = agent.gpus[0].clone();
    let busy: Vec<FakeProcess> = (0..8)
        .map(|number| {
            let process = FakeProcess::new(&agent.node, number);
            agent.listed.push((gpu.clone(), process.listed(number)));
            process
        })
        .collect();
    let mut reads = 0;
    for step in 0..150 {
        // Kernels are longer than a tick: some ticks see no new usage.
        for process in busy.iter().filter(|_| step % 2 == 0) {
            process.record_usage(agent.now_us, step * STEP_US / 8);
        }
        let read = agent.run(STEP_US);
        reads += if step < 50 { 0 } else { read };
    }
    // Header and slots, ten times a second and once per scan; 56 claims are idle.
    assert!(reads <= 8 * 2 * 11 * 10 + 100, "{reads}");
}

#[test]
fn applies_page_changes_of_other_writers() {
    let mut agent = VirtualClockAgent::new(&[20, 80]);
    let gpu = agent.gpus[0].clone();
    let both = [0, 1].map(|number| {
        let process = FakeProcess::new(&agent.node, number);
        agent.listed.push((gpu.clone(), process.listed(number)));
        process
    });
    let mut step = 0;
    let mut work = |agent: &mut VirtualClockAgent, seconds: u64| {
        for _ in 0..seconds * SECOND_US / STEP_US {
            step += 1;
            for process in &both {
                process.record_usage(agent.now_us, step * STEP_US / 2);
            }
            agent.run(STEP_US);
        }
        agent.node.page(0).rate_us_per_s.unwrap()
    };
    assert!(work(&mut agent, 3) < 300_000);
    // Changed in place.
    let cores = |percent| Cores::new(percent).unwrap();
    agent.node.change_page(0, |limits| {
        (limits.cores, limits.memory_limit_bytes) = (cores(60), Some(3 * GIB));
    });
    agent.node.change_page(1, |limits| limits.cores = cores(40));
    assert!(work(&mut agent, 3) > 500_000);
    let page = agent.node.page(0);
    assert_eq!(
        (page.cores, page.memory_limit_bytes),
        (cores(60), Some(3 * GIB))
    );
    // A change that the agent has not read yet survives the agent's own write of a new rate.
    let rate = agent.node.page(1).rate_us_per_s;
    agent.run(STEP_US);
    agent
        .node
        .change_page(1, |limits| limits.memory_limit_bytes = Some(2 * GIB));
    for _ in 0..8 {
        both[1].record_usage(agent.now_us, agent.now_us);
        agent.run(STEP_US);
    }
    let page = agent.node.page(1);
    assert!(page.rate_us_per_s > rate, "{rate:?} {page:?}");
    assert_eq!(page.memory_limit_bytes, Some(2 * GIB));
    // Replaced by another page.
    for (number, percent) in [(0, 10), (1, 90)] {
        let limits = Limits {
            cores: cores(percent),
            compute_policy: ComputePolicy::Balance,
            ..Limits::memory(GIB)
        };
        agent.node.replace_page(gpu.as_str(), number, &limits);
    }
    assert!(work(&mut agent, 3) < 200_000);
    assert_eq!(agent.node.page(0).cores, cores(10));
}

/// The other share of the claim has no process, so that its page is not checked.
#[test]
fn opens_replaced_page_of_claim_with_two_shares() {
    let node = TestNode::on(TestBed::with_machine(library::shipped().unwrap(), H200X8).unwrap());
    let machine = node.test_bed.machine().status().unwrap();
    let [first, second] = [0, 1].map(|index| machine.gpus[index].uuid.clone());
    let limits = Limits {
        cores: Cores::new(40).unwrap(),
        compute_policy: ComputePolicy::Balance,
        ..Limits::memory(GIB)
    };
    node.prepare_shares(1, &[(&first, 1), (&second, 11)], &limits);
    let mut agent = VirtualClockAgent::on(node);
    let process = FakeProcess::new(&agent.node, 1);
    agent
        .listed
        .push((agent.gpus[0].clone(), process.listed(1)));
    let mut step = 0;
    let mut work = |agent: &mut VirtualClockAgent| {
        for _ in 0..15 * SECOND_US / STEP_US {
            step += 1;
            process.record_usage(agent.now_us, step * STEP_US / 2);
            agent.run(STEP_US);
        }
    };
    work(&mut agent);
    assert!(agent.node.page(1).rate_us_per_s.is_some());
    agent.node.replace_page(&first, 1, &limits);
    assert_eq!(agent.node.page(1).rate_us_per_s, None);
    work(&mut agent);
    assert!(agent.node.page(1).rate_us_per_s.is_some());
}

#[test]
fn leaves_page_of_unmetered_share_unchanged() {
    let node = TestNode::new();
    node.prepare(1, &Limits::memory(GIB));
    let mut agent = VirtualClockAgent::on(node);
    let process = FakeProcess::new(&agent.node, 1);
    let gpu = agent.gpus[0].clone();
    agent.listed.push((gpu, process.listed(1)));
    for step in 0..20 {
        process.record_usage(agent.now_us, step * STEP_US / 2);
        agent.run(STEP_US);
    }
    assert_eq!(agent.node.page(1), Limits::memory(GIB));
}

#[test]
fn detects_process_that_bypasses_region_of_idle_share() {
    let mut agent = VirtualClockAgent::new(&[100]);
    agent.run(5 * SECOND_US);
    let number = 3;
    let escapes = ObservedProcess {
        pid: 100_000,
        used_bytes: Some(GIB),
        info: ProcessInfo {
            owner: Owner {
                pid: 9,
                start_time: 9,
                pid_namespace: 9,
            },
            name: "static".to_owned(),
            shares: vec![TestNode::mounted(number)],
        },
    };
    let observation = Observation {
        gpu: agent.gpus[number as usize].clone(),
        requested_us: agent.now_us,
        is_extra: false,
        is_complete: true,
        ending: Vec::new(),
        processes: Some(vec![escapes]),
        busy: BusyProcesses::NotRead,
    };
    let mut found = Vec::new();
    for _ in 0..2 {
        agent.now_us += SECOND_US;
        found.extend(agent.agent.scan(agent.now_us, &observation));
    }
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].share, TestNode::share_id(number));
    // The share is read on each tick again.
    assert!(agent.run(STEP_US * 3) > 0);
}

#[test]
fn detects_damaged_region_of_idle_share_within_3_s() {
    let mut agent = VirtualClockAgent::new(&[100]);
    agent.run(10 * SECOND_US);
    std::fs::remove_file(agent.node.region(3)).unwrap();
    let mut scans = 0;
    let found = loop {
        scans += 1;
        agent.now_us += SECOND_US;
        let mut found = agent.agent.poll(agent.now_us);
        let observation = Observation {
            gpu: agent.gpus[3].clone(),
            requested_us: agent.now_us,
            is_extra: false,
            is_complete: true,
            ending: Vec::new(),
            processes: Some(Vec::new()),
            busy: BusyProcesses::NotRead,
        };
        found.extend(agent.agent.scan(agent.now_us, &observation));
        if !found.is_empty() {
            break found;
        }
        assert!(scans < 3, "not detected within 3 s");
    };
    assert_eq!(found[0].share, TestNode::share_id(3));
}
