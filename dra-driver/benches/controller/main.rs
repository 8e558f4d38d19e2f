//! What the controller achieves for simulated shares in virtual time, as one row of the table in
//! `docs/results/raw/ablation.md`: `cargo bench -p drava-dra-driver --bench controller`.

#![expect(
    dead_code,
    clippy::unwrap_used,
    reason = "the simulated shares belong to the tests"
)]

use std::iter::once;

use drava_vgpu_abi::ComputePolicy;
use simulator_machine::kernel::engine::Timing;

#[path = "../../tests/agent/simulated_gpu.rs"]
mod simulated_gpu;
#[path = "../../tests/agent/simulated_share.rs"]
mod simulated_share;
#[path = "../../tests/agent/workload.rs"]
mod workload;

use simulated_gpu::{H200, SimulatedGpu};
use workload::Workload;

/// Kernel lengths of the shares in turn, µs.
const KERNELS: [&[u64]; 7] = [
    &[100],
    &[1_000],
    &[8_000],
    &[20_000],
    &[200, 5_000],
    &[300, 20_000],
    &[1_500, 3_000],
];

/// Shares that use the whole GPU, percent.
const FULL: [&[u32]; 6] = [
    &[30, 70],
    &[10, 90],
    &[42, 58],
    &[10, 20, 70],
    &[50, 50],
    &[12; 8],
];

/// Shares that use less, or leave what switches between contexts take.
const WITH_GAPS: [&[u32]; 4] = [&[45, 45], &[60, 30], &[30, 30], &[40, 20]];

/// Mean and maximum of errors.
fn mean_and_worst(errors: &[f64]) -> String {
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    format!("{mean:.2}, {:.1}", largest(errors.iter().copied()))
}

fn largest(errors: impl Iterator<Item = f64>) -> f64 {
    errors.map(f64::abs).fold(0.0, f64::max)
}

/// Returns shares with kernels of these lengths in turn.
fn loads(policy: ComputePolicy, cores: &[u32], kernels: &[u64]) -> Vec<Workload> {
    let loads = cores.iter().zip(kernels.iter().cycle());
    loads
        .map(|(cores, us)| Workload::new(*cores, policy, *us))
        .collect()
}

/// Returns shares with kernels of 0.1, 1 and 10 ms in an order that is the same in each run.
fn mixed(cores: &[u32]) -> Vec<Workload> {
    let mut loads = loads(ComputePolicy::Balance, cores, &[1_000]);
    for (load, seed) in loads.iter_mut().zip(1_u64..) {
        let mut state = seed;
        load.kernels_us.clear();
        for _ in 0..97 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            load.kernels_us
                .push([100, 1_000, 10_000][(state >> 33) as usize % 3]);
        }
    }
    loads
}

/// What shares that always have work got.
struct Divided {
    /// Largest errors of the parts, points of what all got.
    errors: Vec<f64>,
    /// Largest difference between what a share was charged and what it used, points.
    charges: Vec<f64>,
    /// Least use of the GPU, percent.
    sum: f64,
}

fn divide(timing: Timing) -> Divided {
    let (mut errors, mut charges, mut sum) = (Vec::new(), Vec::new(), f64::MAX);
    for cores in FULL {
        let sets = KERNELS
            .iter()
            .map(|kernels| loads(ComputePolicy::Balance, cores, kernels));
        for set in sets.chain(once(mixed(cores))) {
            let mut gpu = SimulatedGpu::of(timing, &set);
            gpu.run(2.0);
            let charged = gpu.run_charged(5.0);
            let used = gpu.run(5.0);
            let all: f64 = used.iter().sum();
            let due = f64::from(cores.iter().sum::<u32>());
            let shares = used.iter().zip(cores);
            errors.push(largest(shares.map(|(used, cores)| {
                used * 100.0 / all - f64::from(*cores) * 100.0 / due
            })));
            let pairs = charged.iter().zip(&used);
            charges.push(largest(pairs.map(|(charged, used)| charged - used)));
            sum = sum.min(all);
        }
    }
    Divided {
        errors,
        charges,
        sum,
    }
}

/// Errors of `fixed` shares that use less than the GPU.
fn with_gaps() -> Vec<f64> {
    let mut errors = Vec::new();
    for cores in WITH_GAPS {
        for kernels in KERNELS {
            let mut gpu = SimulatedGpu::new(&loads(ComputePolicy::Fixed, cores, kernels));
            gpu.run(2.0);
            let used = gpu.run(5.0);
            let shares = used.iter().zip(cores);
            errors.push(largest(
                shares.map(|(used, cores)| used - f64::from(*cores)),
            ));
        }
    }
    errors
}

/// Errors of two shares of which the second, or both, launch 50 to 800 ms of kernels at once and wait for them.
fn batches() -> Vec<f64> {
    let mut errors = Vec::new();
    for (cores, depth) in [[30, 70], [10, 90]]
        .into_iter()
        .flat_map(|cores| [50, 150, 300, 800].map(|depth| (cores, depth)))
    {
        for waits in [[false, true], [true, true]] {
            let mut set = loads(ComputePolicy::Balance, &cores, &[1_000]);
            for (load, waits) in set.iter_mut().zip(waits) {
                if waits {
                    (load.is_batch, load.depth) = (true, depth);
                }
            }
            let mut gpu = SimulatedGpu::new(&set);
            gpu.run(6.0);
            let used = gpu.run(5.0);
            let all: f64 = used.iter().sum();
            errors.push((used[1] * 100.0 / all - f64::from(cores[1])).abs());
        }
    }
    errors
}

/// A share of 70% starts beside one of 30%, ends and returns. Returns its errors between 300 and 800 ms after its start, points,
/// and its deficits in the first 500 ms after its return, ms.
fn changes() -> (Vec<f64>, Vec<f64>) {
    let is_active = |us: u64| (2_000_000..4_000_000).contains(&us) || us >= 6_000_000;
    let (mut new, mut reclaim) = (Vec::new(), Vec::new());
    for kernels in KERNELS {
        let mut set = loads(ComputePolicy::Balance, &[30, 70], kernels);
        set[1].is_active = is_active;
        let mut gpu = SimulatedGpu::new(&set);
        gpu.run(2.3);
        let used = gpu.run(0.5);
        let all: f64 = used.iter().sum();
        new.push((used[1] * 100.0 / all - 70.0).abs());
        gpu.run(6.0 - gpu.now_s());
        let used = gpu.run(0.5);
        let due = 70.0 * used.iter().sum::<f64>() / 100.0;
        // A percent of 500 ms is 5 ms.
        reclaim.push((due - used[1]).max(0.0) * 5.0);
    }
    (new, reclaim)
}

fn main() {
    let uneven = Timing {
        slice_deviation_percent: 40,
        ..H200
    };
    let balance = divide(H200);
    let on_uneven = divide(uneven);
    let (new, reclaim) = changes();
    let columns = [
        mean_and_worst(&balance.errors),
        mean_and_worst(&on_uneven.errors),
        format!("{:.1}", balance.sum),
        mean_and_worst(&balance.charges),
        mean_and_worst(&batches()),
        mean_and_worst(&with_gaps()),
        mean_and_worst(&new),
        mean_and_worst(&reclaim),
    ];
    println!("| {} |", columns.join(" | "));
}
