//! Limits pages and regions: several, changed and damaged.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use drava_vgpu_abi::snapshot::Snapshot;
use drava_vgpu_abi::{BrokenRegion, Limits, REGION_SIZE, update};

use crate::test_process::{Container, GIB, GPUS, MIB};

#[test]
fn sums_shares_of_one_gpu() {
    let container = Container::new();
    container.add_share("first", GPUS[0], &Limits::memory(GIB));
    container.add_share("second", GPUS[0], &Limits::memory(2 * GIB));
    let mut process = container.process();
    assert_eq!(process.memory_info(), (3 * GIB, 3 * GIB));
    // A partial charge to one share is returned when another share denies.
    process.denied(&format!("alloc {}", 3 * GIB + 1));
    assert_eq!(process.memory_info(), (3 * GIB, 3 * GIB));
    let large = process.alloc(3 * GIB);
    process.denied("alloc 1");
    process.ok(&format!("free {large}"));
    assert_eq!(process.memory_info(), (3 * GIB, 3 * GIB));
    assert_eq!(process.fill(100 * MIB), 30 * 100 * MIB);
}

#[test]
fn separates_shares_of_two_gpus() {
    let container = Container::new();
    container.add_share("first", GPUS[0], &Limits::memory(GIB));
    container.add_share("second", GPUS[1], &Limits::memory(2 * GIB));
    let mut process = container.process();
    process.alloc(GIB);
    process.denied("alloc 1");
    process.init(1);
    process.alloc(2 * GIB);
    process.denied("alloc 1");
}

#[test]
fn applies_changed_limits_to_running_processes() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.denied(&format!("alloc {}", 2 * GIB));
    let page = OpenOptions::new()
        .read(true)
        .write(true)
        .open(container.page("share"))
        .unwrap();
    let content = fs::read(container.page("share")).unwrap();
    for write in update(&content, &Limits::memory(2 * GIB)).unwrap() {
        page.write_all_at(write.bytes(), write.offset()).unwrap();
    }
    assert_eq!(process.memory_info().1, 2 * GIB);
    assert_eq!(process.ok("total 0"), [2 << 30]);
    process.alloc(2 * GIB);
}

#[test]
fn charges_driver_excess_until_returned() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let half = process.alloc(GIB / 2);
    let change = |driver_excess_bytes: u64| {
        let path = container.page("share");
        let limits = Limits {
            driver_excess_bytes,
            ..Limits::memory(GIB)
        };
        let writes = update(&fs::read(&path).unwrap(), &limits).unwrap();
        let page = OpenOptions::new().write(true).open(path).unwrap();
        for write in writes {
            page.write_all_at(write.bytes(), write.offset()).unwrap();
        }
    };
    change(100 * MIB);
    assert_eq!(process.memory_info(), (GIB / 2 - 100 * MIB, GIB));
    process.denied(&format!("alloc {}", GIB / 2 - 98 * MIB));
    let rest = process.alloc(GIB / 2 - 100 * MIB);
    change(200 * MIB);
    assert_eq!(process.memory_info(), (0, GIB));
    // Freed memory first repays the excess.
    process.ok(&format!("free {rest}"));
    process.denied(&format!("alloc {}", GIB / 2 - 100 * MIB));
    change(0);
    process.alloc(GIB / 2);
    process.ok(&format!("free {half}"));
    // An excess above the limit denies all requests and has no other effect.
    change(u64::MAX);
    assert_eq!(process.memory_info(), (0, GIB));
    process.denied("alloc 1");
}

/// Changes the limits of the share in place, as the agent does.
fn change(container: &Container, limits: &Limits) {
    let path = container.page("share");
    let writes = update(&fs::read(&path).unwrap(), limits).unwrap();
    let page = OpenOptions::new().write(true).open(path).unwrap();
    for write in writes {
        page.write_all_at(write.bytes(), write.offset()).unwrap();
    }
}

/// The agent found that the contexts are charged too much.
#[test]
fn grants_surplus_of_driver_charges() {
    let container = Container::new();
    let limits = Limits {
        driver_reserve_bytes: 512 * MIB,
        ..Limits::memory(GIB)
    };
    container.add_share("share", GPUS[0], &limits);
    let mut process = container.process();
    process.alloc(512 * MIB);
    process.denied("alloc 1");
    let limits = Limits {
        driver_surplus_bytes: 100 * MIB,
        ..limits
    };
    change(&container, &limits);
    assert_eq!(process.memory_info(), (100 * MIB, GIB));
    process.denied(&format!("alloc {}", 102 * MIB));
    process.alloc(100 * MIB);
    assert_eq!(process.memory_info(), (0, GIB));
}

/// Other shares use 600 MiB of the limit: the program sees all of it, and waits for what is lent.
#[test]
fn waits_for_guaranteed_memory_that_others_use() {
    let container = Container::with_memory(GIB);
    let lent = Limits {
        lent_bytes: 600 * MIB,
        ..Limits::memory(GIB)
    };
    change(&container, &lent);
    let mut process = container.process();
    assert_eq!(process.memory_info(), (GIB, GIB));
    let demand = || {
        let region = fs::read(container.region("share")).unwrap();
        let usage = Snapshot::decode(&region).unwrap().share();
        (usage.memory_demand_us, usage.denied)
    };
    let first = process.alloc(400 * MIB);
    assert_eq!(demand(), (0, 0), "no demand for what the page has");
    // More than the guarantee is denied at once, and no share gives memory back for it.
    process.denied(&format!("alloc {GIB}"));
    assert_eq!(demand(), (0, 1));
    std::thread::scope(|scope| {
        let container = &container;
        let agent = scope.spawn(move || {
            // As the agent does, which gives back in two parts.
            while demand().0 == 0 {
                std::thread::yield_now();
            }
            let less = Limits {
                lent_bytes: 300 * MIB,
                ..lent
            };
            change(container, &less);
            change(container, &Limits::memory(GIB));
        });
        process.alloc(600 * MIB);
        agent.join().unwrap();
    });
    assert_eq!(demand().1, 1, "the wait counts as no denial");
    assert_eq!(process.memory_info(), (GIB - 1000 * MIB, GIB));
    // What is not given back is denied in the end. An agent that is gone gives nothing back.
    process.ok(&format!("free {first}"));
    let lent = Limits {
        lent_bytes: 400 * MIB,
        ..lent
    };
    change(&container, &lent);
    process.denied(&format!("alloc {}", 300 * MIB));
    assert_eq!(demand().1, 2);
}

/// The page names the surplus of two contexts, one of which has ended since the agent's last scan.
#[test]
fn grants_no_surplus_of_ended_processes() {
    let container = Container::new();
    let limits = Limits {
        driver_reserve_bytes: 512 * MIB,
        driver_surplus_bytes: 400 * MIB,
        ..Limits::memory(2 * GIB)
    };
    container.add_share("share", GPUS[0], &limits);
    let mut process = container.process();
    let ended = container.process();
    assert_eq!(process.memory_info().0, GIB + 400 * MIB);
    ended.kill();
    process.denied(&format!("alloc {}", GIB + 512 * MIB + 256 * MIB + 1));
    process.alloc(GIB + 512 * MIB + 256 * MIB);
    process.denied("alloc 1");
}

#[test]
fn prefers_page_over_environment() {
    let container = Container::with_memory(GIB);
    let mut process = container.start_with("dlsym", |command| {
        command
            .env("DRAVA_MEMORY_LIMIT", "4Gi")
            .env("CUDA_DEVICE_MEMORY_LIMIT", "4g");
    });
    process.init(0);
    assert_eq!(process.memory_info().1, GIB);
}

#[test]
fn denies_and_reports_damaged_page() {
    let container = Container::with_memory(GIB);
    let mut content = fs::read(container.page("share")).unwrap();
    content[64..512].fill(0xee);
    fs::write(container.page("share"), content).unwrap();
    let errors = container.run_dir().join("stderr");
    let mut process = container.start_with("dlsym", |command| {
        command.stderr(fs::File::create(&errors).unwrap());
    });
    process.denied("init 0");
    process.end();
    let errors = fs::read_to_string(errors).unwrap();
    assert!(errors.contains("libvgpu: limits page of share"), "{errors}");
    assert!(errors.contains("denying GPU memory"), "{errors}");
}

#[test]
fn denies_or_allows_unusable_region_as_page_specifies() {
    for (policy, is_denied) in [(BrokenRegion::Closed, true), (BrokenRegion::Open, false)] {
        let container = Container::new();
        let limits = Limits {
            broken_region: policy,
            ..Limits::memory(GIB)
        };
        container.add_share("share", GPUS[0], &limits);
        fs::write(container.region("share"), vec![0xee; REGION_SIZE]).unwrap();
        let errors = container.run_dir().join("stderr");
        let mut process = container.start_with("dlsym", |command| {
            command.stderr(fs::File::create(&errors).unwrap());
        });
        process.init(0);
        let answer = process.query(&format!("alloc {}", 4 * MIB));
        assert_eq!(answer[0] != 0, is_denied, "{policy:?}");
        process.end();
        let errors = fs::read_to_string(errors).unwrap();
        assert_eq!(errors.matches("not a usage region").count(), 1, "{errors}");
    }
}

#[test]
fn charges_context_at_largest_driver_reserve() {
    for reserves in [[100 * MIB, 300 * MIB], [300 * MIB, 100 * MIB]] {
        let container = Container::new();
        for (share, driver_reserve_bytes) in ["first", "second"].into_iter().zip(reserves) {
            let limits = Limits {
                driver_reserve_bytes,
                ..Limits::memory(GIB)
            };
            container.add_share(share, GPUS[0], &limits);
        }
        let mut process = container.process();
        assert_eq!(process.memory_info(), (2 * GIB - 300 * MIB, 2 * GIB));
    }
}

#[test]
fn lifts_limit_of_gpu_with_unlimited_share() {
    let container = Container::new();
    container.add_share("limited", GPUS[0], &Limits::memory(GIB));
    let unlimited = Limits {
        memory_limit_bytes: None,
        ..Limits::memory(GIB)
    };
    container.add_share("unlimited", GPUS[0], &unlimited);
    container.process().alloc(2 * GIB);
}

/// A share with an unusable region counts nothing and grants nothing; the GPU's other share determines the limit.
#[test]
fn ignores_limit_of_share_with_unusable_region() {
    let container = Container::new();
    for share in ["good", "broken"] {
        container.add_share(share, GPUS[0], &Limits::memory(GIB));
    }
    fs::write(container.region("broken"), vec![0xee; REGION_SIZE]).unwrap();
    let mut process = container.process();
    process.denied(&format!("alloc {}", GIB + 2 * MIB));
    process.alloc(GIB);
    process.denied("alloc 1");
}

#[test]
fn creates_missing_region_accessible_to_all_users() {
    use std::os::unix::fs::PermissionsExt;
    let container = Container::with_memory(GIB);
    container.process().alloc(GIB);
    let file = fs::metadata(container.region("share")).unwrap();
    assert_eq!(file.len(), REGION_SIZE as u64);
    assert_eq!(file.permissions().mode() & 0o777, 0o666);
}

#[test]
fn limits_damage_of_random_region_to_its_share() {
    let container = Container::with_memory(GIB);
    container.add_share("other", GPUS[1], &Limits::memory(GIB));
    let mut process = container.process();
    let region = OpenOptions::new()
        .write(true)
        .open(container.region("share"))
        .unwrap();
    // All words except magic and version.
    region
        .write_all_at(&vec![0xee; REGION_SIZE - 16], 16)
        .unwrap();
    process.denied("alloc 1");
    process.init(1);
    process.alloc(GIB);
    process.denied("alloc 1");
}
