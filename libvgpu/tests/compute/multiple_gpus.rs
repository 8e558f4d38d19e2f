//! Processes with shares of two GPUs.

use std::time::{Duration, Instant};

use drava_vgpu_abi::{ComputePolicy, Limits};

use gpu_tenants::{Tenant, share};

/// Models a collective operation: each process launches on both GPUs, and one of its shares has no rate, as if the other
/// process had to launch there first. The admission time-out resolves the deadlock.
#[test]
fn avoids_deadlock_of_processes_across_two_gpus() {
    let test_bed = crate::test_bed();
    let limits = share(ComputePolicy::Balance, 50).unwrap();
    let stopped = Limits {
        rate_us_per_s: Some(0),
        ..limits
    };
    let containers =
        ["one", "other"].map(|name| test_bed.share_of_each_gpu(name, &limits).unwrap());
    for (index, shares) in containers.iter().enumerate() {
        shares[1 - index].change(&stopped).unwrap();
    }
    let mut tenants: Vec<Tenant> = containers
        .iter()
        .map(|shares| {
            let all = |command: &mut std::process::Command| {
                command.env("CUDA_VISIBLE_DEVICES", "0,1");
            };
            test_bed
                .tenant_with(Some(&shares[0]), "dlsym", all)
                .unwrap()
        })
        .collect();
    const ROUNDS: u64 = 2;
    let launch_on_both = |tenant: &mut Tenant, own: usize| {
        for gpu in [own, 1 - own] {
            tenant.ok(&format!("init {gpu}")).unwrap();
            tenant.ok("queue 1000000").unwrap();
        }
    };
    let pids: Vec<u32> = tenants.iter().map(Tenant::pid).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(&mut tenants)
            .map(|(own, tenant)| {
                scope.spawn(move || (0..ROUNDS).for_each(|_| launch_on_both(tenant, own)))
            })
            .collect();
        let deadline = Instant::now() + Duration::from_secs(60);
        while threads.iter().any(|thread| !thread.is_finished()) {
            if Instant::now() > deadline {
                // Wakes the waiting threads.
                for pid in &pids {
                    // SAFETY: a child that was not waited for.
                    unsafe { libc::kill(i32::try_from(*pid).unwrap(), libc::SIGKILL) };
                }
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    for (index, shares) in containers.iter().enumerate() {
        let timeouts = shares[1 - index].usage().unwrap().0.admission_timeouts;
        assert!(timeouts > 0, "the process also had time on the other GPU");
    }
}

/// Kernels of two processes, each on its own GPU, wait on the GPU for flags of each other.
#[test]
fn exchanges_flags_of_two_processes_on_two_gpus() {
    const ROUNDS: u32 = 50;
    const PERCENT: u32 = 25;
    /// The kernels, 50 ms, are repaid in 200 ms. A charged wait of a second would be repaid in four.
    const STALL: Duration = Duration::from_secs(4);
    for policy in [ComputePolicy::Fixed, ComputePolicy::Balance] {
        let test_bed = crate::test_bed();
        let limits = share(policy, PERCENT).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let flags = directory.path().join("flags");
        std::fs::write(&flags, [0; 4096]).unwrap();
        let shares =
            ["one", "other"].map(|name| test_bed.share_of_each_gpu(name, &limits).unwrap());
        let shares: Vec<_> = (0..).zip(&shares).map(|(own, of)| &of[own]).collect();
        let mut tenants: Vec<Tenant> = (0..)
            .zip(&shares)
            .map(|(own, share)| {
                let both = |command: &mut std::process::Command| {
                    command.env("CUDA_VISIBLE_DEVICES", "0,1");
                };
                let mut tenant = test_bed.tenant_with(Some(share), "dlsym", both).unwrap();
                tenant.ok(&format!("init {own}")).unwrap();
                tenant
            })
            .collect();
        for (own, tenant) in tenants.iter_mut().enumerate() {
            let flags = flags.display();
            tenant
                .send(&format!("exchange {flags} {own} {ROUNDS} 1000000"))
                .unwrap();
            tenant.send("synchronize").unwrap();
        }
        std::thread::scope(|scope| {
            let ends: Vec<_> = tenants
                .iter_mut()
                .map(|tenant| {
                    scope.spawn(|| [tenant.receive().unwrap(), tenant.receive().unwrap()])
                })
                .collect();
            for end in ends {
                assert_eq!(end.join().unwrap(), ["0", "0"], "{policy:?}");
            }
        });
        for share in &shares {
            let (header, processes) = share.usage().unwrap();
            assert_eq!(header.admission_timeouts, 0, "{policy:?}");
            let throttled = Duration::from_micros(processes[0].throttled_us);
            assert!(throttled < STALL, "{policy:?}: {throttled:?}");
        }
    }
}

/// GPU time that one GPU's share was charged in excess is not deducted from what the other GPU's share counts.
#[test]
fn counts_time_of_each_gpu_in_its_own_share() {
    const LONG_NS: u64 = 200_000_000;
    const KERNELS: u32 = 3;
    const KERNEL: Duration = Duration::from_millis(100);
    let test_bed = crate::test_bed();
    let limits = share(ComputePolicy::Fixed, 100).unwrap();
    let shares = test_bed.share_of_each_gpu("both", &limits).unwrap();
    let both = |command: &mut std::process::Command| {
        command.env("CUDA_VISIBLE_DEVICES", "0,1");
    };
    let mut tenant = test_bed
        .tenant_with(Some(&shares[0]), "dlsym", both)
        .unwrap();
    for _ in 0..5 {
        tenant.ok(&format!("once {LONG_NS}")).unwrap();
    }
    // Charged as the long ones, and corrected by a launch on the other GPU.
    tenant.ok("once 1000").unwrap();
    tenant.ok("init 1").unwrap();
    for _ in 0..KERNELS {
        tenant.ok(&format!("once {}", KERNEL.as_nanos())).unwrap();
    }
    // A request for GPU time collects the results of completed launches.
    for _ in 0..4 {
        tenant.ok("once 1000 64").unwrap();
    }
    let counted = shares[1].counted().unwrap();
    // A loaded host may delay the sample of the first kernel, which is then charged as an unknown one.
    assert!(counted >= KERNEL * (KERNELS - 1), "{counted:?}");
}
