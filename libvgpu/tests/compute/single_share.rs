//! One tenant gets its share of the GPU and no more, whatever it launches.

use std::time::{Duration, Instant};

use drava_vgpu_abi::ComputePolicy;
use drava_vgpu_abi::cost::SAMPLING_INTERVAL;

use crate::SETTLE;
use crate::measurement::{Due, LENGTH, Measurement, assert_counted, time_without_processor};
use gpu_tenants::{Share, Tenant, TestBed, library, share};

/// A tenant with a fixed share, and the share.
fn tenant(test_bed: &TestBed, percent: u32) -> (Tenant, Share) {
    let limits = share(ComputePolicy::Fixed, percent).unwrap();
    let share = test_bed.share("share", &limits).unwrap();
    let tenant = test_bed.tenant(Some(&share), "dlsym").unwrap();
    (tenant, share)
}

/// Checks that a tenant gets its percentage under a load with launches of at most `launch_ms`.
fn assert_share(percent: u32, launch_ms: f64, load: &str) {
    let test_bed = crate::test_bed();
    let (mut tenant, share) = tenant(&test_bed, percent);
    tenant.ok(&format!("start {load}")).unwrap();
    crate::assert_part(&test_bed, &tenant, Due::new(percent, launch_ms));
    assert_counted(&test_bed, &tenant, &share);
    tenant.ok("stop").unwrap();
}

#[test]
fn enforces_10_percent() {
    assert_share(10, 2.0, "kernel ns=2000000 depth=8");
}

#[test]
fn enforces_50_percent_with_mixed_kernel_lengths() {
    assert_share(
        50,
        5.0,
        "kernel ns=5000000,1000000,300000 depth=16 random=1",
    );
}

#[test]
fn enforces_90_percent() {
    assert_share(90, 5.0, "ex ns=5000000 depth=16");
}

#[test]
fn enforces_share_with_kernels_longer_than_slices() {
    assert_share(30, 60.0, "cooperative ns=60000000 depth=2 blocks=1000");
}

#[test]
fn enforces_share_with_rarely_sampled_short_kernels() {
    // One measured launch corrects the charge of all until the next one.
    let corrected_ms = f64::from(SAMPLING_INTERVAL) * 0.02;
    assert_share(10, corrected_ms, "kernel ns=20000 depth=256");
}

/// An event takes several times as long as a short kernel, which must not be charged for it.
#[test]
fn charges_short_kernels_without_time_of_events() {
    const EVENT_NS: u32 = 20_000;
    let machine = simulator_machine::description::H100X2;
    let usual = "    ecc: true\n";
    assert!(machine.contains(usual));
    let perturbed = format!("{usual}    perturbation: {{eventNanoseconds: {EVENT_NS}}}\n");
    let machine = machine.replacen(usual, &perturbed, 1);
    for ns in [1_000u32, 5_000, 20_000] {
        let test_bed = TestBed::with_machine(library::shipped().unwrap(), &machine).unwrap();
        let (mut tenant, share) = tenant(&test_bed, 60);
        // The tenant's own events are few.
        tenant
            .ok(&format!("start kernel ns={ns} depth=4096 burst=512 idle=1"))
            .unwrap();
        crate::wait_until(
            || share.usage().unwrap().1[0].launches > 20_000,
            || "too few launches".to_owned(),
        );
        let counted_ns = share.counted().unwrap().as_nanos() as f64;
        let charged_ns = counted_ns / share.usage().unwrap().1[0].launches as f64;
        let kernel_ns = f64::from(ns);
        // A loaded host makes some kernels seem longer.
        let longest_ns = (kernel_ns + f64::from(EVENT_NS) / 8.0).max(1.5 * kernel_ns);
        assert!(
            (0.7 * kernel_ns..longest_ns).contains(&charged_ns),
            "a kernel of {ns} ns is charged {charged_ns} ns"
        );
    }
}

/// A kind whose first launches take no time at all is not free for ever.
#[test]
fn learns_cost_of_kind_that_was_free() {
    let test_bed = crate::test_bed();
    let (mut tenant, _share) = tenant(&test_bed, 20);
    tenant.ok("start kernel ns=0 depth=64").unwrap();
    std::thread::sleep(SETTLE);
    tenant.ok("stop").unwrap();
    tenant.ok("start kernel ns=1000000 depth=8").unwrap();
    crate::assert_part(&test_bed, &tenant, Due::new(20, 2.0));
    tenant.ok("stop").unwrap();
}

#[test]
fn enforces_share_of_synchronized_loops() {
    assert_share(30, 5.0, "kernel ns=5000000 depth=0");
}

#[test]
fn counts_overlapping_streams_once() {
    // The GPU runs four of these kernels concurrently.
    assert_share(40, 0.2, "kernel ns=200000 streams=4 depth=64 blocks=264");
}

#[test]
fn enforces_share_of_graphs() {
    assert_share(30, 3.0, "graph ns=300000 kernels=10 depth=8");
}

#[test]
fn enforces_share_of_per_thread_default_streams() {
    let test_bed = crate::test_bed();
    let limits = share(ComputePolicy::Fixed, 25).unwrap();
    let share = test_bed.share("share", &limits).unwrap();
    let mut tenant = test_bed.tenant(Some(&share), "ptsz").unwrap();
    tenant.ok("start kernel ns=3000000 depth=8").unwrap();
    crate::assert_part(&test_bed, &tenant, Due::new(25, 3.0));
}

#[test]
fn meters_only_the_gpu_with_a_share() {
    let test_bed = crate::test_bed();
    let limits = share(ComputePolicy::Fixed, 30).unwrap();
    let share = test_bed.share("share", &limits).unwrap();
    let mut tenant = test_bed
        .tenant_with(Some(&share), "dlsym", |command| {
            command.env("CUDA_VISIBLE_DEVICES", "0,1");
        })
        .unwrap();
    tenant.ok("start kernel ns=4000000 depth=8").unwrap();
    crate::assert_part(&test_bed, &tenant, Due::new(30, 4.0));
    tenant.ok("stop").unwrap();
    // The same process, thread and function on the other GPU.
    tenant.ok("init 1").unwrap();
    let counted = share.counted().unwrap();
    for _ in 0..20 {
        tenant.ok("once 5000000").unwrap();
    }
    assert_eq!(share.counted().unwrap(), counted);
    tenant.ok("init 0").unwrap();
    tenant.ok("once 50000000").unwrap();
    // A request for GPU time collects the results of completed launches.
    for _ in 0..4 {
        tenant.ok("once 1000000").unwrap();
    }
    assert!(share.counted().unwrap() > counted);
}

#[test]
fn limits_bursts_to_saved_credit() {
    // Demands half of the GPU, in bursts of 50 ms.
    let test_bed = crate::test_bed();
    let (mut tenant, _share) = tenant(&test_bed, 20);
    tenant
        .ok("start kernel ns=5000000 depth=16 burst=10 idle=50")
        .unwrap();
    std::thread::sleep(SETTLE);
    Measurement::of(&test_bed, &[&tenant]).assert_no_excess(0, Due::new(20, 5.0));
}

#[test]
fn spends_idle_credit_in_burst() {
    // 8 ms of every 68 ms or more, from a share that earns 12 ms in 60 ms of idle time and keeps 10 ms.
    let test_bed = crate::test_bed();
    let (mut tenant, share) = tenant(&test_bed, 20);
    tenant
        .ok("start kernel ns=1000000 depth=16 burst=8 idle=60")
        .unwrap();
    std::thread::sleep(SETTLE);
    let process = || share.usage().unwrap().1[0];
    let delayed = || {
        let pids = [tenant.pid(), test_bed.machine().daemon_pid()];
        pids.into_iter()
            .map(time_without_processor)
            .sum::<Duration>()
    };
    let (before, delayed_before, begun) = (process(), delayed(), Instant::now());
    std::thread::sleep(LENGTH);
    let (after, length) = (process(), begun.elapsed());
    let delay = delayed().saturating_sub(delayed_before);
    let waited = Duration::from_micros(after.throttled_us - before.throttled_us);
    assert!(after.launches > before.launches + 50, "{after:?}");
    // A share without savings would wait for a third of the time. A delay of the host between the events of a kernel is
    // charged, and a share of 20% repays it in five times as long.
    let most = length / 10 + delay * 5;
    assert!(
        waited < most,
        "{waited:?} of {length:?}, delays of {delay:?}"
    );
}

/// Fills and copies cost little GPU time and, on the simulated GPU, much host time. So this test checks only that they
/// are counted and throttled.
#[test]
fn counts_and_throttles_fills_and_copies() {
    let test_bed = crate::test_bed();
    let (mut tenant, share) = tenant(&test_bed, 10);
    tenant.ok("memory 2097152").unwrap();
    for load in ["fill", "copy"] {
        let process = || share.usage().unwrap().1[0];
        // With a debt they wait: 100 ms of GPU time take a second to repay.
        tenant.ok("once 100000000").unwrap();
        let before = process();
        tenant
            .ok(&format!("start {load} ns=1048576 depth=1"))
            .unwrap();
        crate::wait_until(
            || process().throttled_us - before.throttled_us > 500_000,
            || format!("a {load} is not throttled despite debt"),
        );
        crate::wait_until(
            || process().launches > before.launches + 3,
            || format!("{load}s are not counted"),
        );
        tenant.ok("stop").unwrap();
    }
}

#[test]
fn enforces_share_of_fills_and_copies() {
    const BLOCK: u64 = 4 << 10;
    for (load, launch_ms) in [("fill", 10.0), ("copy", 20.0)] {
        let test_bed = TestBed::with_slow_memory(library::shipped().unwrap()).unwrap();
        let (mut tenant, share) = tenant(&test_bed, 30);
        tenant.ok(&format!("memory {BLOCK}")).unwrap();
        tenant
            .ok(&format!("start {load} ns={BLOCK} depth=8"))
            .unwrap();
        crate::assert_part(&test_bed, &tenant, Due::new(30, launch_ms));
        assert_counted(&test_bed, &tenant, &share);
    }
}

/// A fill of 32 GiB takes the GPU 10 ms and a copy 20 ms. The simulated driver takes about as long before it submits
/// them, or many times as long on a loaded host.
#[test]
fn charges_fills_and_copies_their_gpu_time() {
    const BLOCK: u64 = 32 << 30;
    for load in ["fill", "copy"] {
        let test_bed = crate::test_bed();
        let (mut tenant, share) = tenant(&test_bed, 90);
        tenant.ok(&format!("memory {BLOCK}")).unwrap();
        tenant
            .ok(&format!("start {load} ns={BLOCK} depth=1"))
            .unwrap();
        crate::wait_until(
            || share.usage().unwrap().1[0].launches > 30,
            || format!("no {load} completes"),
        );
        tenant.ok("stop").unwrap();
        // A request for GPU time collects the results of completed launches.
        for _ in 0..4 {
            tenant.ok("once 1000000").unwrap();
        }
        let used = test_bed.used(&[tenant.pid()]).unwrap().0[0].as_secs_f64();
        let ratio = share.counted().unwrap().as_secs_f64() / used;
        assert!((0.7..1.4).contains(&ratio), "{load}: {ratio} of {used} s");
    }
}

#[test]
fn reports_long_kernels() {
    let test_bed = crate::test_bed();
    let (mut tenant, share) = tenant(&test_bed, 90);
    tenant.ok("once 700000000").unwrap();
    tenant.ok("once 1000").unwrap();
    let process = share.usage().unwrap().1[0];
    assert_eq!(process.long_kernels, 1);
    // Event times are 32-bit floats: 0.1% exceeds their rounding error.
    assert!(process.longest_kernel_us >= 699_300, "{process:?}");
}

#[test]
fn preserves_errno_across_throttled_launch() {
    let test_bed = crate::test_bed();
    let (mut tenant, share) = tenant(&test_bed, 10);
    tenant.ok("once 50000000").unwrap();
    let answer = tenant.ok("once 50000000").unwrap();
    assert!(share.usage().unwrap().1[0].throttled_us > 0);
    assert_eq!(answer[1], 77, "errno");
}

#[test]
fn starts_forked_child_without_parents_leases() {
    let test_bed = crate::test_bed();
    let (mut tenant, share) = tenant(&test_bed, 50);
    for _ in 0..20 {
        tenant.ok("once 100000").unwrap();
    }
    // CUDA does not work in a forked child. The child must not launch on its parent's account either.
    let counted = share.counted().unwrap();
    tenant.ok("fork").unwrap();
    tenant.send("queue 1000000").unwrap();
    let answer = tenant.receive().unwrap();
    assert!(!answer.starts_with("0 "), "{answer}");
    assert_eq!(share.counted().unwrap(), counted);
}

#[test]
fn enforces_share_from_environment() {
    for variable in [
        "DRAVA_CORES",
        "CUDA_DEVICE_SM_LIMIT",
        "CUDA_DEVICE_SM_LIMIT_0",
    ] {
        let test_bed = crate::test_bed();
        let mut tenant = test_bed
            .tenant_with(None, "dlsym", |command| {
                command
                    .env("LD_PRELOAD", gpu_tenants::library::shipped().unwrap())
                    .env("DRAVA_JOB", format!("test-{}", std::process::id()))
                    .env(variable, "30");
            })
            .unwrap();
        tenant.ok("start kernel ns=4000000 depth=8").unwrap();
        crate::assert_part(&test_bed, &tenant, Due::new(30, 4.0));
    }
}

#[test]
fn returns_driver_functions_without_metering() {
    let test_bed = crate::test_bed();
    let unmetered = share(ComputePolicy::None, 30).unwrap();
    let unmetered = test_bed.share("unmetered", &unmetered).unwrap();
    let metered = share(ComputePolicy::Fixed, 30).unwrap();
    let metered = test_bed.share("metered", &metered).unwrap();
    for (share, library) in [(&unmetered, "libcuda.so.1"), (&metered, "libvgpu.so")] {
        let mut tenant = test_bed.tenant(Some(share), "dlsym").unwrap();
        // Without `cuGraphLaunch`, which charges the graph's memory, and without the functions that begin captures and
        // end streams, which track allocations and frees.
        for name in [
            "cuLaunchKernel",
            "cuLaunchKernel_ptsz",
            "cuMemsetD8Async",
            "cuMemcpyDtoDAsync_v2_ptsz",
            "cuLaunchCooperativeKernel",
            "cuLaunchKernelEx",
        ] {
            let answer = tenant.request(&format!("lookup {name}")).unwrap();
            assert_eq!(answer, [library], "{name}");
        }
    }
}
