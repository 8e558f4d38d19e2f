//! What simulated shares are charged, in virtual time, and work that is charged before the GPU does it.

use crate::balance::{POINTS, assert_near};
use crate::simulated_gpu::SimulatedGpu;
use crate::workload::Workload;

/// Shares that leave time between their kernels use less than 90% of the GPU, so that none of them always waits for the
/// other.
#[test]
fn charges_shares_with_gaps_for_their_use() {
    for (kernel_us, host_us) in [(1_000, 1_300), (1_000, 1_500), (400, 400), (500, 700)] {
        let mut load = Workload::balance(50, kernel_us);
        (load.depth, load.host_us) = (1, host_us);
        let mut gpu = SimulatedGpu::new(&[load.clone(), load]);
        gpu.run(3.0);
        let charged = gpu.run_charged(10.0);
        let used = gpu.run(10.0);
        let what = format!("kernels of {kernel_us} µs after {host_us} µs");
        assert_near(&charged, &used, POINTS, &what);
    }
}

/// Shares that use the whole GPU are charged for what they used. The largest one is charged a mean part of its measured time, and
/// of eight equal ones each interrupts the others by chance.
#[test]
fn charges_shares_of_full_gpu_for_their_use() {
    let sets: [(&[u32], f64); 6] = [
        (&[30, 70], 4.0),
        (&[10, 90], 4.0),
        (&[42, 58], 4.0),
        (&[10, 20, 70], 6.0),
        (&[40, 20, 40], 4.0),
        (&[12; 8], 8.0),
    ];
    for (cores, points) in sets {
        for kernels in [[100, 100], [1_000, 1_000], [8_000, 8_000], [300, 20_000]] {
            let loads = cores.iter().zip(kernels.iter().cycle());
            let loads: Vec<_> = loads
                .map(|(cores, us)| Workload::balance(*cores, *us))
                .collect();
            let mut gpu = SimulatedGpu::new(&loads);
            gpu.run(3.0);
            let charged = gpu.run_charged(5.0);
            let used = gpu.run(5.0);
            for (charged, used) in charged.iter().zip(&used) {
                let error = (charged - used).abs();
                assert!(
                    error <= points,
                    "{cores:?}, {kernels:?}: {charged:.1} for {used:.1}"
                );
            }
        }
    }
}

/// A program launches kernels for several ticks at once and waits for all of them, as a training step does: in most ticks it
/// makes no launch, but the GPU has its work.
#[test]
fn keeps_shares_of_programs_that_wait_for_batches() {
    for cores in [[30, 70], [50, 50], [10, 90]] {
        for (kernel_us, depth) in [
            (1_000, 50),
            (1_000, 150),
            (1_000, 300),
            (1_000, 800),
            (10_000, 30),
        ] {
            for is_batch in [[true, true], [true, false], [false, true]] {
                let loads = cores.iter().zip(is_batch).map(|(cores, is_batch)| {
                    let mut load = Workload::balance(*cores, kernel_us);
                    if is_batch {
                        (load.is_batch, load.depth) = (true, depth);
                    }
                    load
                });
                let loads: Vec<_> = loads.collect();
                let mut gpu = SimulatedGpu::new(&loads);
                // Until the decision for both, the first one launches as if alone.
                gpu.run(6.0);
                let due = cores.map(f64::from);
                let what =
                    format!("{cores:?} with {depth} kernels of {kernel_us} µs, {is_batch:?}");
                assert_near(&gpu.run(5.0), &due, POINTS, &what);
            }
        }
    }
}
