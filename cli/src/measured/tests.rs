//! Metrics as the library of the node driver encodes them.

use std::fmt;

use drava_api::metric::exposition;
use drava_explanation::fixture::snapshot;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::*;
use crate::top::{self, Measured};

/// A claim whose names need escapes, as no object of Kubernetes has them.
const ODD: &str = "a\"b\\c\nd,e=\"}{ f";

const GIB: f64 = (1 << 30) as f64;

#[derive(Debug)]
struct NodeDriver {
    seconds: f64,
}

impl Collector for NodeDriver {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let device = |claim, device, gpu, access, share| {
            (
                ["default", claim, "uid", "gpu", device, gpu, access, share],
                1.0,
            )
        };
        let devices = [
            device("a", "gpu-0-vgpu", "GPU-0", "share", "s1"),
            device(ODD, "gpu-0-vgpu", "GPU-0", "share", "s2"),
            device("w", "gpu-1", "GPU-1", "whole", ""),
            device("m", "gpu-2-mig", "GPU-2", "partition", ""),
            device("new", "gpu-0-vgpu", "GPU-0", "share", "s3"),
        ];
        metric::CLAIM_DEVICE_INFO.encode(&mut encoder, devices)?;
        let memory = [
            (["default", "a", "s1"], 3.0 * GIB),
            (["default", ODD, "s2"], 7.0),
        ];
        metric::SHARE_MEMORY_USED_BYTES.encode(&mut encoder, memory)?;
        // Share s2 has no memory.limit.
        let limits = [
            (["default", "a", "s1"], 12.0 * GIB),
            (["default", ODD, "s2"], 8.0 * GIB),
        ];
        metric::SHARE_MEMORY_LIMIT_BYTES.encode(&mut encoder, limits)?;
        let burst = [(["default", "a", "s1"], 4.0 * GIB)];
        metric::SHARE_BURST_BYTES.encode(&mut encoder, burst)?;
        metric::SHARE_LENT_BYTES.encode(&mut encoder, [(["default", ODD, "s2"], 5.0 * GIB)])?;
        let seconds = [(["default", "a", "s1"], self.seconds)];
        metric::SHARE_GPU_TIME_SECONDS.encode(&mut encoder, seconds)?;
        let gpus = [(["GPU-1"], 5e9), (["GPU-2"], 6e9)];
        metric::GPU_MEMORY_USED_BYTES.encode(&mut encoder, gpus)?;
        metric::GPU_UTILIZATION_RATIO.encode(&mut encoder, [(["GPU-1"], 0.42)])
    }
}

fn key(claim: &str, device: &str) -> Key {
    ["default", claim, device].map(str::to_owned)
}

fn read(seconds: f64) -> BTreeMap<Key, Figures> {
    figures(&exposition(NodeDriver { seconds }).expect("text"))
}

#[test]
fn reads_what_the_library_writes() {
    let figures = |memory, time, burst| Figures {
        memory,
        time,
        burst,
        lent: None,
    };
    let burst = Burst {
        memory_limit: 12 << 30,
        lent_memory: 4 << 30,
    };
    let expected = [
        (
            key("a", "gpu-0-vgpu"),
            figures(3.0 * GIB, Time::Seconds(2.5), Some(burst)),
        ),
        (
            key(ODD, "gpu-0-vgpu"),
            Figures {
                lent: Some(5.0 * GIB),
                ..figures(7.0, Time::Unknown, None)
            },
        ),
        (key("w", "gpu-1"), figures(5e9, Time::Ratio(0.42), None)),
    ];
    // Nothing is measured of a partition, nor of a share without a reading.
    assert_eq!(read(2.5), expected.into());
}

#[test]
fn gpu_time_is_that_since_the_reading_before() {
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let counter = |seconds| Counter { seconds, at: start };
    let of = |seconds, before: Option<Counter>, at| {
        let time = Time::Seconds(seconds);
        let figures = Figures {
            time,
            ..Figures::default()
        };
        measured(figures, before.as_ref(), at).cores
    };
    assert_eq!(of(10.0, None, after(4)), None);
    assert_eq!(of(10.0, Some(counter(9.0)), after(4)), Some(25));
    assert_eq!(of(10.0, Some(counter(10.0)), after(4)), Some(0));
    // A lease late.
    assert_eq!(of(10.0, Some(counter(5.0)), after(4)), Some(100));
    // Another share, the same moment, or too long ago.
    assert_eq!(of(1.0, Some(counter(9.0)), after(4)), None);
    assert_eq!(of(10.0, Some(counter(9.0)), after(0)), None);
    assert_eq!(of(10.0, Some(counter(9.0)), after(3600)), None);
}

#[test]
fn table_shows_what_claims_use() {
    let at = Instant::now();
    let found = read(2.5).into_iter();
    let found = found.map(|(key, figures)| (key, measured(figures, None, at)));
    let mut gpus = top::gpus(&snapshot());
    Use(found.collect()).add_to(&mut gpus);
    // Claim b of the first GPU was not measured, and the GPU time of claim a is not known yet.
    let table = top::text(&gpus, &[], false);
    let lines: Vec<&str> = table.lines().collect();
    assert!(
        lines[0].contains("USED MEMORY   USED CORES   CLAIMS"),
        "{table}"
    );
    assert!(
        lines[1].contains("2 / 10   ?             ?            2 claims"),
        "{table}"
    );
    assert!(
        lines[2].contains("0 / 10   4.6 GiB       42           default/w"),
        "{table}"
    );
    let wide = top::text(&gpus, &[], true);
    assert!(
        wide.contains(
            "default/a on gpu-0-vgpu (a-pod), uses 3 GiB and ? cores, limit 12 GiB with 4 GiB lent\n"
        ),
        "{wide}"
    );
    gpus[0].claims[1].measured = Some(Measured {
        memory: 1 << 30,
        lends_memory: Some(5 << 30),
        ..Measured::default()
    });
    let wide = top::text(&gpus, &[], true);
    assert!(
        wide.contains("uses 1 GiB and ? cores, lends 5 GiB\n"),
        "{wide}"
    );
    let lender = serde_json::to_value(gpus[0].claims[1].measured).expect("JSON");
    let expected = serde_json::json!({"memory": 1_u64 << 30, "lendsMemory": 5_u64 << 30});
    assert_eq!(lender, expected);
    let claim = serde_json::to_value(gpus[0].claims[0].measured).expect("JSON");
    let expected = serde_json::json!({"memory": 3_u64 << 30, "memoryLimit": 12_u64 << 30, "lentMemory": 4_u64 << 30});
    assert_eq!(claim, expected);
    let whole = serde_json::to_value(gpus[1].claims[0].measured).expect("JSON");
    assert_eq!(
        whole,
        serde_json::json!({"memory": 5_000_000_000_u64, "cores": 42})
    );
}

#[test]
fn names_claims_without_figures() {
    let mut gpus = top::gpus(&snapshot());
    Use::default().add_to(&mut gpus);
    assert_eq!(
        unreported(&gpus, None).as_deref(),
        Some(
            "what claims use is shown in part: the node drivers do not report claim default/a on node n1, nor 1 more; they do so a \
             moment after the pod or the node driver starts"
        ),
        "claim b has no pod"
    );
    let found = read(2.5).into_iter();
    let at = Instant::now();
    let found = found.map(|(key, figures)| (key, measured(figures, None, at)));
    Use(found.collect()).add_to(&mut gpus);
    assert_eq!(unreported(&gpus, None), None);
    // Nothing is measured of partitions and suspended shares, nor of what adds to another share.
    Use::default().add_to(&mut gpus);
    gpus[0].claims[0].access = Access::Suspended;
    gpus[1].claims[0].access = Access::Partition;
    assert_eq!(unreported(&gpus, None), None);
    gpus[0].claims[0].access = Access::Share;
    assert!(unreported(&gpus, None).is_some());
    assert!(unreported(&gpus, Some("default")).is_some());
    assert_eq!(unreported(&gpus, Some("other")), None);
    gpus[0].claims[0].adds_to = Some("base".to_owned());
    assert_eq!(unreported(&gpus, None), None);
}

#[test]
fn gap_names_first_node() {
    let failing = |nodes: &[&str]| {
        let failing = nodes
            .iter()
            .map(|node| ((*node).to_owned(), format!("no route to {node}")));
        of_failing(failing.collect()).map(|gap| gap.to_string())
    };
    assert_eq!(failing(&[]), None);
    assert_eq!(
        failing(&["n10", "n2", "n3"]).as_deref(),
        Some(
            "what claims use is shown in part: cannot read the metrics of the node driver of n2, nor of 2 more nodes: no route to n2"
        )
    );
}
