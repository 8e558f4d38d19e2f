//! The controller divides the time of a simulated GPU among shares, in virtual time.

use drava_vgpu_abi::ComputePolicy;

use crate::simulated_gpu::{H200, NO_SWITCHES, SimulatedGpu};
use crate::workload::Workload;

/// Tolerance over 10 s, percentage points.
pub(crate) const POINTS: f64 = 2.0;

/// The same on a GPU that loses no time to switches between contexts: the agent assumes those of an H200.
const WITHOUT_SWITCHES: f64 = 5.0;

/// Tolerance for random active sets, percentage points: the estimate has the mean only if other shares interrupt some
/// launches and others not.
const ANY: f64 = 6.0;

/// The same if no share fills the gaps: kernels of several slices meet others by chance.
const WITH_GAPS: f64 = 10.0;

/// The same if switches between contexts take the rest of the GPU.
const NEARLY_FULL: f64 = 5.0;

/// Least use of the GPU by saturating shares, percent. The rest are switches between contexts: 9% if each has its whole
/// slice, more if short kernels of throttled shares end slices early.
const LEAST_SUM: f64 = 85.0;

/// Compares parts of the GPU time, percent. On a full GPU all shares lose the same part of it to switches between contexts.
#[track_caller]
pub(crate) fn assert_near(used: &[f64], due: &[f64], points: f64, what: &str) {
    let all: f64 = due.iter().sum();
    let available = if all >= 99.0 && due.len() > 1 {
        used.iter().sum::<f64>() / all
    } else {
        1.0
    };
    let near = used
        .iter()
        .zip(due)
        .all(|(used, due)| (used - due * available).abs() <= points);
    assert!(near, "{what}: {used:.1?} instead of {due:.1?}");
}

#[test]
fn limits_fixed_share_to_its_cores() {
    for kernel_us in [100, 1_000, 7_000, 40_000] {
        for cores in [10, 30, 50, 70, 90] {
            let mut gpu = SimulatedGpu::new(&[Workload::fixed(cores, kernel_us)]);
            gpu.run(1.0);
            let used = gpu.run(10.0);
            assert_near(
                &used,
                &[f64::from(cores)],
                POINTS,
                &format!("{cores}% with kernels of {kernel_us} µs"),
            );
        }
    }
}

#[test]
fn lends_whole_gpu_to_single_balance_share() {
    for depth in [1, 2, 8] {
        let mut load = Workload::balance(10, 500);
        load.depth = depth;
        let mut gpu = SimulatedGpu::new(&[load]);
        gpu.run(0.3);
        assert!(gpu.run(2.0)[0] >= 97.0);
    }
}

#[test]
fn keeps_shares_for_any_kernel_lengths() {
    let splits: [&[u32]; 6] = [
        &[50, 50],
        &[30, 70],
        &[10, 90],
        &[10, 20, 70],
        &[25; 4],
        &[12; 8],
    ];
    let lengths: [&[u64]; 5] = [&[100], &[1_000], &[10_000], &[200, 5_000], &[300, 20_000]];
    for split in splits {
        for kernels in lengths {
            let loads: Vec<_> = split
                .iter()
                .enumerate()
                .map(|(index, cores)| Workload::balance(*cores, kernels[index % kernels.len()]))
                .collect();
            let sum: u32 = split.iter().sum();
            let due: Vec<f64> = split
                .iter()
                .map(|cores| f64::from(*cores) * 100.0 / f64::from(sum))
                .collect();
            for (hardware, points, least_sum) in [
                (H200, POINTS, LEAST_SUM),
                (NO_SWITCHES, WITHOUT_SWITCHES, 97.0),
            ] {
                let mut gpu = SimulatedGpu::of(hardware, &loads);
                gpu.run(3.0);
                let used = gpu.run(10.0);
                let what = format!("{split:?} with kernels of {kernels:?} µs, {hardware:?}");
                assert_near(&used, &due, points, &what);
                assert!(used.iter().sum::<f64>() >= least_sum, "{what}: {used:.1?}");
            }
        }
    }
}

#[test]
fn gives_new_share_its_time_within_300_ms() {
    let from_2_to_4 = |us: u64| (2_000_000..4_000_000).contains(&us);
    let mut gpu = SimulatedGpu::new(&[
        Workload::balance(70, 500),
        Workload::balance(30, 500).active_when(from_2_to_4),
    ]);
    gpu.run(2.3);
    assert_near(&gpu.run(0.5), &[70.0, 30.0], 4.0, "after 300 ms");
    gpu.run(4.3 - gpu.now_s());
    let remaining = gpu.run(0.5)[0];
    assert!(
        remaining >= LEAST_SUM,
        "after the second share stops: {remaining:.1}"
    );
}

#[test]
fn gives_new_share_of_any_size_its_time_within_300_ms() {
    let from_2 = |us: u64| us >= 2_000_000;
    for (resident, new) in [(10, 90), (30, 70), (50, 50), (70, 30), (90, 10)] {
        for kernels in [[100, 100], [200, 200], [1_000, 1_000], [200, 5_000]] {
            let mut gpu = SimulatedGpu::new(&[
                Workload::balance(resident, kernels[0]),
                Workload::balance(new, kernels[1]).active_when(from_2),
            ]);
            gpu.run(2.3);
            let what = format!("{resident}:{new} with kernels of {kernels:?} µs");
            let due = [f64::from(resident), f64::from(new)];
            assert_near(&gpu.run(0.5), &due, 4.0, &what);
        }
    }
}

#[test]
fn keeps_gpu_busy_when_share_starts() {
    let from_2 = |us: u64| us >= 2_000_000;
    for (resident, new, kernels) in [(70, 30, [300, 20_000]), (10, 90, [20_000, 300])] {
        let mut gpu = SimulatedGpu::new(&[
            Workload::balance(resident, kernels[0]),
            Workload::balance(new, kernels[1]).active_when(from_2),
        ]);
        gpu.run(2.0);
        let used = gpu.run(1.0);
        let sum: f64 = used.iter().sum();
        assert!(sum >= LEAST_SUM, "{resident}:{new}: {used:.1?}");
    }
}

/// A share alone on the GPU lengthens its kernels when a second share starts.
#[test]
fn bounds_gain_from_lengthened_kernels() {
    const PART: f64 = 30.0;
    // Seconds of GPU time: the first longer kernels are charged as the shorter ones.
    const MAX_GAIN_S: f64 = 0.2;
    let from_2 = |us: u64| us >= 2_000_000;
    let scales: [fn(u64) -> u64; 4] = [
        |us| if us < 2_000_000 { 1 } else { 2 },
        |us| if us < 2_000_000 { 1 } else { 4 },
        |us| if us < 2_000_000 { 1 } else { 10 },
        |us| if us < 2_000_000 { 1 } else { 40 },
    ];
    for (scale, kernel_us) in scales
        .into_iter()
        .flat_map(|scale| [(scale, 100), (scale, 500)])
    {
        let what = format!("{} times {kernel_us} µs", scale(2_000_000));
        let mut gpu = SimulatedGpu::new(&[
            Workload::balance(30, kernel_us).scale_kernels(scale),
            Workload::balance(70, 500).active_when(from_2),
        ]);
        gpu.run(2.0);
        let mut gained = 0.0;
        for _ in 0..20 {
            gained += (gpu.run(0.1)[0] - PART) / 100.0 * 0.1;
            assert!(gained <= MAX_GAIN_S, "{what}: {gained:.3} s too much");
        }
        // At a multiple of a slice the number of interruptions is uncertain by one.
        let is_multiple = (scale(2_000_000) * kernel_us).is_multiple_of(2_000);
        let points = if is_multiple { 3.0 } else { POINTS };
        assert_near(&gpu.run(10.0), &[PART, 70.0], points, &what);
    }
}

#[test]
fn gives_returning_share_its_time_within_300_ms() {
    let is_active = |us: u64| (2_000_000..6_000_000).contains(&us) || us >= 8_000_000;
    let mut gpu = SimulatedGpu::new(&[
        Workload::balance(70, 500),
        Workload::balance(30, 500).active_when(is_active),
    ]);
    gpu.run(8.3);
    assert_near(&gpu.run(0.5), &[70.0, 30.0], 4.0, "after 300 ms");
}

/// The owner of most of the GPU resumes while the borrower uses all of it.
#[test]
fn reclaims_lent_time_within_50_ms() {
    const WATCHED_S: f64 = 0.5;
    let from_2 = |us: u64| us >= 2_000_000;
    let kernels = [200, 500, 1_000, 3_000, 10_000];
    for kernel_us in kernels {
        for borrowers in [20, 30, 45] {
            let what = format!("{borrowers}% borrows, kernels of {kernel_us} µs");
            let owner = f64::from(100 - borrowers);
            let mut gpu = SimulatedGpu::new(&[
                Workload::balance(borrowers, kernel_us),
                Workload::balance(100 - borrowers, kernel_us).active_when(from_2),
            ]);
            gpu.run(2.0);
            let lent = gpu.rates()[0].unwrap();
            assert!(lent >= 1_000_000, "{what}: no time lent: {lent}");
            let early = gpu.run(0.05);
            let rate = gpu.rates()[0].unwrap();
            assert!(rate <= (borrowers * 15_000).min(500_000), "{what}: {rate}");
            let later = gpu.run(WATCHED_S - 0.05);
            let got_s = (early[1] * 0.05 + later[1] * (WATCHED_S - 0.05)) / 100.0;
            // Without the time of switches between contexts.
            let both = [&early, &later].map(|used| used.iter().sum::<f64>());
            let busy_s = (both[0] * 0.05 + both[1] * (WATCHED_S - 0.05)) / 100.0;
            let lacks_ms = 1e3 * (busy_s - got_s * 100.0 / owner);
            assert!(lacks_ms <= 50.0, "{what}: the owner lacks {lacks_ms:.0} ms");
        }
    }
}

#[test]
fn lends_idle_time_to_balance_shares_only() {
    let until_5 = |us: u64| us < 5_000_000;
    let mut gpu = SimulatedGpu::new(&[
        Workload::fixed(40, 500),
        Workload::balance(20, 500),
        Workload::balance(40, 500).active_when(until_5),
    ]);
    gpu.run(2.0);
    assert_near(&gpu.run(3.0), &[40.0, 20.0, 40.0], POINTS, "all active");
    gpu.run(1.0);
    assert_near(&gpu.run(10.0), &[40.0, 60.0, 0.0], POINTS, "one idle");
}

#[test]
fn does_not_throttle_share_below_its_guarantee() {
    // 1 ms of kernel and 4 ms on the host: at most a fifth of the GPU, half is guaranteed.
    let mut light = Workload::balance(50, 1_000);
    (light.depth, light.host_us) = (1, 4_000);
    let alone = {
        let mut gpu = SimulatedGpu::new(std::slice::from_ref(&light));
        gpu.run(1.0);
        gpu.run(5.0)[0]
    };
    let mut gpu = SimulatedGpu::new(&[light, Workload::balance(50, 1_000)]);
    gpu.run(2.0);
    let used = gpu.run(5.0);
    // Its kernels share the hardware's time slices with the other share.
    assert!(used[0] >= alone * 0.8, "{used:.1?}, alone {alone:.1}");
    assert!(used.iter().sum::<f64>() >= LEAST_SUM, "{used:.1?}");
}

#[test]
fn prefers_higher_priority_without_starvation() {
    let mut gpu = SimulatedGpu::new(&[
        Workload::balance(30, 500).priority(10),
        Workload::balance(30, 500),
        Workload::balance(0, 500).priority(-10),
    ]);
    gpu.run(2.0);
    let used = gpu.run(10.0);
    assert_near(&used, &[69.0, 30.0, 1.0], POINTS, "by priority");
    assert!(used[2] >= 0.5, "{used:.1?}");
}

#[test]
fn gives_remaining_time_to_best_effort_shares() {
    let mut gpu = SimulatedGpu::new(&[
        Workload::fixed(60, 500),
        Workload::balance(0, 500),
        Workload::balance(0, 2_000),
    ]);
    gpu.run(2.0);
    assert_near(
        &gpu.run(10.0),
        &[60.0, 20.0, 20.0],
        POINTS,
        "two without guarantee",
    );
}

#[test]
fn accumulates_no_credit_or_deficit_over_long_times() {
    let is_active = |us: u64| !(3_000_000..20_000_000).contains(&us);
    let mut gpu = SimulatedGpu::new(&[
        Workload::balance(50, 500),
        Workload::balance(50, 500).active_when(is_active),
    ]);
    gpu.run(20.3);
    assert_near(&gpu.run(1.0), &[50.0, 50.0], 4.0, "after 17 s idle");

    // A kernel every few seconds, each longer than many control periods.
    let mut gpu = SimulatedGpu::new(&[Workload::balance(10, 300_000), Workload::balance(90, 500)]);
    gpu.run(10.0);
    assert_near(
        &gpu.run(60.0),
        &[10.0, 90.0],
        POINTS,
        "kernels of 300 ms at 10%",
    );
}

#[test]
fn keeps_guarantee_of_bursty_share() {
    // 100 ms active, 100 ms idle.
    let bursts = |us: u64| (us / 100_000).is_multiple_of(2);
    let mut gpu = SimulatedGpu::new(&[
        Workload::balance(50, 500).active_when(bursts),
        Workload::balance(50, 500),
    ]);
    gpu.run(2.0);
    let used = gpu.run(10.0);
    assert!(
        used[0] >= 25.0 - 3.0,
        "half of the GPU half of the time: {used:.1?}"
    );
    // Each burst is detected within one poll.
    assert!(used.iter().sum::<f64>() >= 93.0, "{used:.1?}");
}

#[test]
fn keeps_last_rates_without_agent() {
    let mut gpu = SimulatedGpu::new(&[Workload::fixed(30, 500), Workload::fixed(60, 500)]);
    gpu.run(3.0);
    gpu.stop_agent();
    // The corrections stay valid for the same active set.
    assert_near(&gpu.run(10.0), &[30.0, 60.0], 6.0, "without the agent");
}

#[test]
fn divides_gpu_time_among_mixed_policies() {
    let policies = [ComputePolicy::Balance, ComputePolicy::Fixed];
    let loads: Vec<_> = (0..6)
        .map(|index| Workload::new(10, policies[index % 2], 300 << index))
        .collect();
    let mut gpu = SimulatedGpu::new(&loads);
    gpu.run(3.0);
    let used = gpu.run(10.0);
    let due = [70.0 / 3.0, 10.0, 70.0 / 3.0, 10.0, 70.0 / 3.0, 10.0];
    assert_near(&used, &due, POINTS, "three fixed, three balance");
}

/// Returns a generator of pseudo-random numbers that are the same in each run. Bounds on a control loop are empirical, so
/// new random cases in each run would fail on unrelated changes.
pub(crate) fn pseudo_random(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed
        .wrapping_mul(2_862_933_555_777_941_757)
        .wrapping_add(3_037_000_493);
    move |below| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}

#[test]
fn keeps_guarantees_for_random_active_sets() {
    for seed in 0..80 {
        let mut number = pseudo_random(seed);
        let mut unallocated = 100;
        let loads: Vec<_> = (0..=number(5))
            .map(|_| {
                let cores = u32::try_from(number(60) + 1).unwrap().min(unallocated);
                unallocated -= cores;
                let policy = match number(2) {
                    0 => ComputePolicy::Fixed,
                    _ => ComputePolicy::Balance,
                };
                Workload::new(cores, policy, (number(80) + 1) * 100)
            })
            .filter(|load| load.entitlement.cores.percent() > 0)
            .collect();
        let mut gpu = SimulatedGpu::new(&loads);
        gpu.run(3.0);
        let used = gpu.run(10.0);
        let active_set: Vec<_> = loads
            .iter()
            .map(|load| {
                (
                    load.entitlement.cores.percent(),
                    load.entitlement.policy,
                    load.kernels_us[0],
                )
            })
            .collect();
        let sum: f64 = used.iter().sum();
        let all: f64 = active_set.iter().map(|(cores, ..)| f64::from(*cores)).sum();
        let is_filled = loads
            .iter()
            .any(|load| load.entitlement.policy == ComputePolicy::Balance);
        // A full GPU loses time to switches between contexts, and all shares the same part of it.
        let (available, points) = if is_filled || all >= 99.0 {
            (sum / 100.0, ANY)
        } else {
            (1.0, WITH_GAPS)
        };
        for (load, used_percent) in loads.iter().zip(&used) {
            let guarantee = f64::from(load.entitlement.cores.percent());
            let is_kept = *used_percent >= guarantee * available - points;
            let is_limited = load.entitlement.policy == ComputePolicy::Balance
                || *used_percent <= guarantee + points;
            assert!(
                is_kept && is_limited,
                "{seed}: {used:.1?} of {active_set:?}"
            );
        }
        if is_filled {
            assert!(sum >= LEAST_SUM, "sum {seed}: {used:.1?} of {active_set:?}");
        }
    }
}

/// Shares with `fixed` that leave less of the GPU than switches between contexts take: nearly all of it is in use, so that one
/// of them always waits for the others.
#[test]
fn keeps_fixed_shares_that_nearly_use_whole_gpu() {
    let sets: [&[u32]; 5] = [
        &[45, 45],
        &[60, 30],
        &[48, 42],
        &[30, 30, 30],
        &[40, 30, 20],
    ];
    for cores in sets {
        for first in [500, 1_500, 3_500, 15_000] {
            for second in [500, 3_500, 15_000] {
                let kernels = [first, second, 1_000];
                let loads = cores.iter().zip(kernels);
                let loads: Vec<_> = loads
                    .map(|(cores, us)| Workload::fixed(*cores, us))
                    .collect();
                let mut gpu = SimulatedGpu::new(&loads);
                gpu.run(3.0);
                let due: Vec<f64> = cores.iter().map(|cores| f64::from(*cores)).collect();
                let what = format!("{cores:?} with kernels of {kernels:?} µs");
                assert_near(&gpu.run(10.0), &due, NEARLY_FULL, &what);
            }
        }
    }
}

/// Shares that need nearly half of a round beside a share that always has work: whether a launch is interrupted decides
/// about most of its measured time.
#[test]
fn divides_gpu_between_shares_of_similar_size() {
    for (cores, policy) in [50, 55, 58, 62, 67].into_iter().flat_map(|cores| {
        [
            (cores, ComputePolicy::Balance),
            (cores, ComputePolicy::Fixed),
        ]
    }) {
        for kernels in [
            [100, 100],
            [400, 1_000],
            [1_500, 400],
            [3_000, 100],
            [1_000, 8_000],
        ] {
            let loads = [
                Workload::new(cores, policy, kernels[0]),
                Workload::balance(100 - cores, kernels[1]),
            ];
            let due = [f64::from(cores), f64::from(100 - cores)];
            let measure = |hardware| {
                let mut gpu = SimulatedGpu::of(hardware, &loads);
                gpu.run(3.0);
                gpu.run(10.0)
            };
            let what = format!("{cores}% {policy:?} with kernels of {kernels:?} µs");
            assert_near(&measure(H200), &due, POINTS, &what);
            let what = format!("{what}, no switches");
            assert_near(&measure(NO_SWITCHES), &due, WITHOUT_SWITCHES, &what);
        }
    }
}
