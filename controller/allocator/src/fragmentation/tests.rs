use serde_json::json;

use super::*;
use crate::claim::ClaimSpec;
use crate::fixture::{pod_request, request, share};

fn room(cpu: f64) -> NodeRoom {
    NodeRoom { cpu, memory: 1e12 }
}

fn gpu(allocated_gib: u64) -> GpuMemory {
    GpuMemory {
        allocated: Quantity::bytes(allocated_gib << 30),
        total: Quantity::bytes(80 << 30),
    }
}

/// GPUs of 80 GiB with this memory allocated.
fn gpus(allocated_gib: &[u64]) -> Vec<IdleGpu<'static>> {
    const NAMES: [&str; 3] = ["a", "b", "c"];
    let gpus = NAMES.iter().zip(allocated_gib);
    gpus.map(|(name, allocated)| IdleGpu::new(0, name, gpu(*allocated)))
        .collect()
}

fn claims(name: &str, memory: Option<&str>) -> Vec<ClaimSpec> {
    let cluster = crate::fixture::cluster(&[]);
    let claim = match memory {
        Some(memory) => share(name, memory, "0"),
        None => request(name, &json!({"deviceClassName": "gpu.drava.dev"})),
    };
    pod_request(&cluster, &[claim]).claims
}

/// The mix of pods with shares of this memory, or whole GPUs, each with 8 CPUs.
fn mix(requests: &[Option<&str>]) -> Mix {
    let mut mix = Mix::default();
    let cpus = Amounts::from([("cpu".to_owned(), Quantity::count(8))]);
    for memory in requests {
        mix.observe(&claims("a", *memory), &cpus);
    }
    mix
}

fn loss(mix: &Mix, cpus: f64, allocated_gib: &[u64]) -> NodeLoss<'static> {
    let accepts = |_: &TypicalRequest| Ok::<_, std::convert::Infallible>(true);
    let Ok(loss) = NodeLoss::new(mix, (room(cpus), room(8.0)), gpus(allocated_gib), accepts);
    loss
}

#[test]
fn free_memory_below_usual_request_is_fragmented() {
    let mix = mix(&[Some("40Gi")]);
    let fragmentation = |allocated: &[u64]| {
        let loss = loss(&mix, 64.0, allocated);
        loss.fragmentation(&loss.idle(std::iter::empty()), |request| {
            request.fits_before
        })
    };
    assert!(fragmentation(&[0, 40]) < EPSILON, "all is usable");
    assert!(
        (fragmentation(&[50, 0]) - 0.375).abs() < EPSILON,
        "30 GiB are not"
    );
    let poor = loss(&mix, 4.0, &[0]);
    let idle = poor.idle(std::iter::empty());
    let unusable = poor.fragmentation(&idle, |request| request.fits_before);
    assert!((unusable - 1.0).abs() < EPSILON, "without CPUs nothing is");
}

#[test]
fn snapshot_follows_number_of_pods() {
    let mut mix = Mix::default();
    let none = Amounts::new();
    let claims = claims("a", None);
    let renewed: Vec<u32> = (1..=70).filter(|_| mix.observe(&claims, &none)).collect();
    assert_eq!(renewed, [1, 4, 16, 64]);
    assert_eq!(mix.requests().len(), 1);
    assert!((mix.requests()[0].weight - 1.0).abs() < EPSILON);
}

#[test]
fn rarest_requests_make_room() {
    let mut mix = Mix::default();
    let usual = claims("a", None);
    for cpus in 0..2_000 {
        let amounts = Amounts::from([("cpu".to_owned(), Quantity::count(cpus))]);
        mix.observe(&usual, &amounts);
        mix.observe(&usual, &Amounts::new());
    }
    assert!(mix.counted.len() <= 512);
    assert!(mix.requests().len() <= 64);
    assert!(mix.requests()[0].weight > 0.3, "{:?}", mix.requests()[0]);
}
