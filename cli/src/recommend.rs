//! `kubectl drava recommend`: the memory and the GPU time that workloads need, by what their shares have used.
//!
//! The rules are those of the vertical pod autoscaler (kubernetes/autoscaler, `vertical-pod-autoscaler/pkg/recommender`): the
//! highest memory with a margin of 15%, 20% more than a limit that was reached, and a high percentile of the time with the same
//! margin. Nothing is changed: templates of claims cannot be, so a recommendation is for the next ones.

use std::collections::BTreeMap;

use drava_api::recommendation::{Confidence, MARGIN, MARGIN_AFTER_DENIAL, Note};
use drava_explanation::table;
use serde::Serialize;
use serde_json::{Value, json};

use crate::connection::{Connection, connect};
use crate::prometheus::{Prometheus, Series, Source, seconds};
use crate::workload::{Workload, Workloads};

mod objects;

/// A metric of shares by namespace, claim and request, in place of `VALUE`.
const BY_REQUEST: &str = include_str!("recommend/by_request.promql");

/// The memory that a share has requested: its limit without what others lend to it, bytes.
const REQUESTED_MEMORY: &str = "drava_share_memory_limit_bytes - (drava_share_burst_bytes or drava_share_memory_limit_bytes * 0)";

/// The GPU time of a share, as part of that of a GPU.
const GPU_TIME: &str = "rate(drava_share_gpu_time_seconds_total[5m])";

/// Part of the time in which the GPU time is no more than what the recommendation is for.
const QUANTILE: &str = "0.95";

/// Recommended memory is a multiple of this, MiB.
const MEMORY_STEP_MIB: f64 = 128.0;

/// Recommended cores are a multiple of this.
const CORES_STEP: f64 = 5.0;

/// Part of the guaranteed GPU time from which on all of it counts as used.
const ALL: f64 = 0.95;

/// Observed time below which a recommendation says little, seconds.
const LONG_SECONDS: f64 = 86_400.0;

const MIB: f64 = (1_u64 << 20) as f64;

/// Command line of `recommend`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Prometheus that scrapes the node drivers: a URL, or NAMESPACE/SERVICE:PORT, which is reached through the API server.
    ///
    /// Without it, the answer comes from the GpuShareRecommendations, which the controller writes if the chart was installed with
    /// recommendations.enabled=true.
    #[arg(long, value_name = "URL")]
    prometheus: Option<String>,

    /// Time until now, such as 12h, 7d or 4w.
    #[arg(long, default_value = "7d", value_parser = seconds, requires = "prometheus")]
    since: u64,
}

/// What the shares of a request have used.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Usage {
    /// Highest memory, bytes.
    peak_bytes: f64,
    /// Highest memory limit of a living share, bytes; 0 without.
    limit_bytes: f64,
    /// Denied allocations of the share with most of them.
    denials: f64,
    /// GPU time in [`QUANTILE`] of the time, as part of that of a GPU.
    gpu_time: f64,
    /// Highest guaranteed GPU time of a living share; 0 is best effort.
    guaranteed: f64,
    /// Observed time of all shares, seconds.
    observed_seconds: f64,
}

/// A current and a recommended amount, MiB or percent of the GPU time of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Amount {
    current: u64,
    used: u64,
    recommended: u64,
}

/// A recommendation for the shares of one request.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Recommendation {
    #[serde(flatten)]
    workload: Workload,
    /// Name of the request in the claim.
    request: String,
    /// Living claims.
    claims: usize,
    observed_hours: u64,
    /// Absent in an answer from Prometheus, like the limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    confidence: Option<Confidence>,
    /// Absent without a limit.
    #[serde(rename = "memoryMib", skip_serializing_if = "Option::is_none")]
    memory: Option<Amount>,
    /// Recommended `memory.limit`.
    #[serde(rename = "memoryLimitMib", skip_serializing_if = "Option::is_none")]
    memory_limit: Option<u64>,
    /// Absent without a guarantee.
    #[serde(skip_serializing_if = "Option::is_none")]
    cores: Option<Amount>,
    /// The recommended amounts, as the `capacity.requests` of a request.
    capacity: BTreeMap<&'static str, String>,
    /// The same as part of the claim, or of its template.
    patch: Value,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<Note>,
}

/// Recommendations of a cluster, or of a namespace.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    /// Time of an answer from Prometheus.
    #[serde(skip_serializing_if = "Option::is_none")]
    since_seconds: Option<u64>,
    recommendations: Vec<Recommendation>,
}

/// Returns what the controller recommends, or reads from Prometheus what the shares of the pods in the cluster have used, and
/// recommends amounts.
///
/// # Errors
/// When Prometheus or the API server does not answer.
pub(crate) async fn run(connection: &Connection, options: &Options) -> anyhow::Result<Report> {
    let (client, _) = connect(connection).await?;
    let namespace = connection.namespace.as_deref();
    let Some(prometheus) = options.prometheus.clone() else {
        let objects = objects::list(&client, namespace).await?;
        return Ok(Report {
            since_seconds: None,
            recommendations: objects::recommendations(&objects),
        });
    };
    let workloads = Workloads::read(&client, namespace).await?;
    let source = Source {
        prometheus,
        since: options.since,
    };
    let server = source.connect(connection).await?;
    let usages = usages(&server, &workloads).await?;
    Ok(Report {
        since_seconds: Some(options.since),
        recommendations: recommendations(&workloads, &usages),
    })
}

/// Use of the requests of workloads.
type Usages = BTreeMap<(Workload, String), Usage>;

/// What an amount of the use is, of all claims of a workload.
type Read = fn(&mut Usage, f64);

async fn usages(server: &Prometheus, workloads: &Workloads) -> anyhow::Result<Usages> {
    let step = server.step();
    let highest = "max_over_time(".to_owned();
    let last = "last_over_time(".to_owned();
    let quantile = format!("quantile_over_time({QUANTILE}, ");
    let queries: [(&String, &str, bool, Read); 5] = [
        (
            &highest,
            "drava_share_memory_peak_bytes",
            false,
            |usage, value| usage.peak_bytes = usage.peak_bytes.max(value),
        ),
        (
            &highest,
            "drava_share_memory_denials_total",
            false,
            |usage, value| usage.denials = usage.denials.max(value),
        ),
        (&quantile, GPU_TIME, false, |usage, value| {
            usage.gpu_time = usage.gpu_time.max(value);
        }),
        (&last, REQUESTED_MEMORY, true, |usage, value| {
            usage.limit_bytes = usage.limit_bytes.max(value)
        }),
        (
            &last,
            "drava_share_gpu_time_guaranteed_ratio",
            true,
            |usage, value| usage.guaranteed = usage.guaranteed.max(value),
        ),
    ];
    let mut usages = Usages::new();
    for (function, metric, is_of_living, read) in queries {
        let expression = BY_REQUEST.replace("VALUE", metric);
        let found = server.over_time(function, &expression).await?;
        add(&mut usages, workloads, &found, is_of_living, read);
    }
    let expression = BY_REQUEST.replace("VALUE", "drava_share_memory_peak_bytes");
    let mut observed = server.over_time("count_over_time(", &expression).await?;
    for samples in &mut observed {
        samples.value *= step;
    }
    add(&mut usages, workloads, &observed, false, |usage, value| {
        usage.observed_seconds += value;
    });
    Ok(usages)
}

/// Adds series to the use of the requests; of claims that are gone unless `is_of_living`.
fn add(
    usages: &mut Usages,
    workloads: &Workloads,
    found: &[Series],
    is_of_living: bool,
    read: Read,
) {
    for series in found {
        let (namespace, claim) = (series.label("namespace"), series.label("claim"));
        if is_of_living && !workloads.is_living(&namespace, &claim) {
            continue;
        }
        if let Some(workload) = workloads.find(&namespace, &claim) {
            let key = (workload.clone(), series.label("request"));
            read(usages.entry(key).or_default(), series.value);
        }
    }
}

/// Returns the recommendations for requests of living claims.
fn recommendations(workloads: &Workloads, usages: &Usages) -> Vec<Recommendation> {
    let recommend = |((workload, request), usage): (&(Workload, String), &Usage)| {
        let claims = workloads.counts.get(workload).copied()?;
        let mut notes = Vec::new();
        let memory = memory(usage, &mut notes);
        let cores = cores(usage, &mut notes);
        if usage.observed_seconds < LONG_SECONDS {
            notes.push(Note::ShortTime);
        }
        let capacity = capacity(memory, cores);
        Some(Recommendation {
            workload: workload.clone(),
            request: request.clone(),
            claims,
            observed_hours: whole(usage.observed_seconds / 3600.0),
            confidence: None,
            memory,
            memory_limit: None,
            cores,
            patch: patch(workload, request, &capacity),
            capacity,
            notes,
        })
    };
    usages.iter().filter_map(recommend).collect()
}

/// Returns the recommended amounts as the `capacity.requests` of a request.
fn capacity(memory: Option<Amount>, cores: Option<Amount>) -> BTreeMap<&'static str, String> {
    let mut capacity = BTreeMap::new();
    capacity.extend(memory.map(|amount| ("memory", mebibytes(amount.recommended))));
    capacity.extend(cores.map(|amount| ("cores", amount.recommended.to_string())));
    capacity
}

/// Returns what to change in the manifest of the claim of a workload, or of its template.
fn patch(workload: &Workload, request: &str, capacity: &BTreeMap<&str, String>) -> Value {
    let capacity = json!({"capacity": {"requests": capacity}});
    let request = match request.split_once('/') {
        Some((request, alternative)) => {
            let mut alternative = json!({"name": alternative});
            merge(&mut alternative, capacity);
            json!({"name": request, "firstAvailable": [alternative]})
        }
        None => json!({"name": request, "exactly": capacity}),
    };
    let spec = json!({"spec": {"devices": {"requests": [request]}}});
    match workload.kind.as_str() {
        "ResourceClaim" => spec,
        _ => json!({"spec": spec}),
    }
}

/// Adds the fields of an object to another.
fn merge(object: &mut Value, fields: Value) {
    if let (Value::Object(object), Value::Object(fields)) = (object, fields) {
        object.extend(fields);
    }
}

/// Returns the memory that a request needs; `None` without a limit, or without any use.
fn memory(usage: &Usage, notes: &mut Vec<Note>) -> Option<Amount> {
    if usage.limit_bytes <= 0.0 || usage.peak_bytes <= 0.0 {
        return None;
    }
    let stepped = |bytes: f64| (bytes / MIB / MEMORY_STEP_MIB).ceil() * MEMORY_STEP_MIB;
    let limit = (usage.limit_bytes / MIB).ceil();
    let needed = stepped(usage.peak_bytes * MARGIN);
    let recommended = if usage.denials > 0.0 {
        notes.push(Note::MemoryWasDenied);
        stepped(usage.limit_bytes * MARGIN_AFTER_DENIAL)
    } else if needed >= limit {
        notes.push(Note::AllMemoryWasUsed);
        limit
    } else {
        needed
    };
    Some(Amount {
        current: whole(limit),
        used: whole((usage.peak_bytes / MIB).ceil()),
        recommended: whole(recommended),
    })
}

/// Returns the cores that a request needs; `None` for best effort, or without any use.
fn cores(usage: &Usage, notes: &mut Vec<Note>) -> Option<Amount> {
    if usage.guaranteed <= 0.0 || usage.gpu_time <= 0.0 {
        return None;
    }
    if usage.gpu_time >= ALL * usage.guaranteed {
        notes.push(Note::AllTimeWasUsed);
    }
    let needed = (usage.gpu_time * 100.0 * MARGIN / CORES_STEP).ceil() * CORES_STEP;
    Some(Amount {
        current: whole((usage.guaranteed * 100.0).round()),
        used: whole((usage.gpu_time * 100.0).ceil()),
        recommended: whole(needed.min(100.0)),
    })
}

/// Returns a whole number, not below zero.
fn whole(number: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "saturates, and the fraction is meant to go"
    )]
    let whole = number as u64;
    whole
}

/// Formats an amount as a quantity of Kubernetes.
fn mebibytes(mib: u64) -> String {
    match mib % 1024 {
        0 => format!("{}Gi", mib / 1024),
        _ => format!("{mib}Mi"),
    }
}

impl Report {
    /// Formats the report as a table, notes, and what the recommendations free; with `is_wide` the changes of manifests, too.
    pub(crate) fn text(&self, is_wide: bool) -> String {
        if self.recommendations.is_empty() {
            return match self.since_seconds {
                Some(_) => "Prometheus has no shares of pods in the cluster\n".to_owned(),
                None => format!("{}\n", objects::NONE),
            };
        }
        let is_stored = self.since_seconds.is_none();
        let mut header = vec!["NAMESPACE", "WORKLOAD", "REQUEST", "CLAIMS", "OBSERVED"];
        header.extend(is_stored.then_some("CONFIDENCE"));
        header.extend(["MEMORY", "PEAK", "RECOMMENDED"]);
        header.extend(is_stored.then_some("LIMIT"));
        header.extend(["CORES", "USED", "RECOMMENDED"]);
        let row = |one: &Recommendation| {
            let mut row = vec![
                one.workload.namespace.clone(),
                one.workload_name(),
                format!("{}/{}", one.workload.claim, one.request),
                one.claims.to_string(),
                format!("{}h", one.observed_hours),
            ];
            let amounts = |amount: Option<Amount>, format: fn(u64) -> String| match amount {
                Some(amount) => [amount.current, amount.used, amount.recommended].map(format),
                None => ["-", "-", "-"].map(str::to_owned),
            };
            row.extend(
                one.confidence
                    .map(|confidence| confidence.as_str().to_owned()),
            );
            row.extend(amounts(one.memory, mebibytes));
            if is_stored {
                row.push(one.memory_limit.map_or_else(|| "-".to_owned(), mebibytes));
            }
            row.extend(amounts(one.cores, |cores| cores.to_string()));
            row
        };
        let mut text = table(&header, self.recommendations.iter().map(row).collect());
        for one in &self.recommendations {
            for note in &one.notes {
                let (namespace, name) = (&one.workload.namespace, one.workload_name());
                text.push_str(&format!("{namespace}/{name}: {}\n", note.text()));
            }
        }
        let memory = self.change(|one| one.memory, mebibytes);
        let cores = self.change(|one| one.cores, |cores| cores.to_string());
        text.push_str(&format!(
            "all together: {memory} of memory, {cores} cores\n"
        ));
        let changed = self.recommendations.iter();
        let changed = changed.filter(|one| is_wide && !one.capacity.is_empty());
        for one in changed {
            let (namespace, name) = (&one.workload.namespace, one.workload_name());
            let claim = &one.workload.claim;
            text.push_str(&format!(
                "{namespace}/{name}, claim {claim}: {}\n",
                one.patch
            ));
        }
        text
    }

    /// Returns how much less, or more, all living claims would have.
    fn change(
        &self,
        amount: fn(&Recommendation) -> Option<Amount>,
        format: fn(u64) -> String,
    ) -> String {
        let (mut current, mut recommended) = (0, 0);
        for one in &self.recommendations {
            let Some(amount) = amount(one) else { continue };
            let claims = u64::try_from(one.claims).unwrap_or(u64::MAX);
            current += claims.saturating_mul(amount.current);
            recommended += claims.saturating_mul(amount.recommended);
        }
        let difference = format(current.abs_diff(recommended));
        match recommended > current {
            true => format!("{difference} more"),
            false => format!("{difference} less"),
        }
    }
}

impl Recommendation {
    /// Returns kind and name of the workload.
    fn workload_name(&self) -> String {
        self.workload.reference()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use k8s_openapi::api::core::v1::Pod;

    use super::*;
    use crate::prometheus::fixture::series;

    const GIB: f64 = (1_u64 << 30) as f64;

    /// A share with a limit of 10 GiB and 40 cores that was observed for two days.
    fn usage(peak_gib: f64, gpu_time: f64) -> Usage {
        Usage {
            peak_bytes: peak_gib * GIB,
            limit_bytes: 10.0 * GIB,
            denials: 0.0,
            gpu_time,
            guaranteed: 0.4,
            observed_seconds: 2.0 * LONG_SECONDS,
        }
    }

    #[test]
    fn recommends_by_use_and_limit() {
        let denied = Usage {
            denials: 3.0,
            ..usage(9.9, 0.0)
        };
        let unlimited = Usage {
            limit_bytes: 0.0,
            ..usage(4.0, 0.0)
        };
        for (name, usage, expected, notes) in [
            // 4.6 GiB is 4710.4 MiB.
            ("less", usage(4.0, 0.0), Some(4736), vec![]),
            ("nothing", usage(0.0, 0.0), None, vec![]),
            (
                "all",
                usage(9.9, 0.0),
                Some(10_240),
                vec![Note::AllMemoryWasUsed],
            ),
            ("denied", denied, Some(12_288), vec![Note::MemoryWasDenied]),
            ("no limit", unlimited, None, vec![]),
        ] {
            let mut found = Vec::new();
            let memory = memory(&usage, &mut found);
            assert_eq!(memory.map(|amount| amount.recommended), expected, "{name}");
            assert_eq!(found, notes, "{name}");
        }
        let best_effort = Usage {
            guaranteed: 0.0,
            ..usage(1.0, 0.5)
        };
        for (name, usage, expected, notes) in [
            ("less", usage(1.0, 0.1), Some(15), vec![]),
            ("idle", usage(1.0, 0.0), None, vec![]),
            (
                "all",
                usage(1.0, 0.39),
                Some(45),
                vec![Note::AllTimeWasUsed],
            ),
            // What others have left to it.
            (
                "more",
                usage(1.0, 0.99),
                Some(100),
                vec![Note::AllTimeWasUsed],
            ),
            ("best effort", best_effort, None, vec![]),
        ] {
            let mut found = Vec::new();
            let cores = cores(&usage, &mut found);
            assert_eq!(cores.map(|amount| amount.recommended), expected, "{name}");
            assert_eq!(found, notes, "{name}");
        }
    }

    #[test]
    fn past_claims_count_for_use_and_not_for_limits() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"namespace": "a", "name": "db-0", "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "u", "controller": true},
            ]},
            "spec": {"containers": [], "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]},
            "status": {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "db-0-gpu-aaaaa"}]},
        }))
        .expect("a pod");
        let workloads = Workloads::of(&[pod], &[]);
        let of = |claim: &str, value: f64| {
            series(
                &[("namespace", "a"), ("claim", claim), ("request", "gpu")],
                value,
            )
        };
        let mut usages = Usages::new();
        let peaks = [
            of("db-0-gpu-aaaaa", GIB),
            of("db-1-gpu-bbbbb", 2.0 * GIB),
            of("other-gpu-ccccc", 9.0 * GIB),
        ];
        add(&mut usages, &workloads, &peaks, false, |usage, value| {
            usage.peak_bytes = usage.peak_bytes.max(value);
        });
        let limits = [
            of("db-0-gpu-aaaaa", 8.0 * GIB),
            of("db-1-gpu-bbbbb", 16.0 * GIB),
        ];
        add(&mut usages, &workloads, &limits, true, |usage, value| {
            usage.limit_bytes = usage.limit_bytes.max(value);
        });
        let report = Report {
            since_seconds: Some(60),
            recommendations: recommendations(&workloads, &usages),
        };
        assert_eq!(
            report.text(false),
            "\
NAMESPACE   WORKLOAD         REQUEST   CLAIMS   OBSERVED   MEMORY   PEAK   RECOMMENDED   CORES   USED   RECOMMENDED
a           statefulset/db   gpu/gpu   1        0h         8Gi      2Gi    2432Mi        -       -      -
a/statefulset/db: observed for less than a day
all together: 5760Mi less of memory, 0 less cores
"
        );
        let document = serde_json::to_value(&report).expect("JSON");
        let one = &document["recommendations"][0];
        assert_eq!(one["capacity"], json!({"memory": "2432Mi"}));
        assert_eq!(
            one["memoryMib"],
            json!({"current": 8192, "used": 2048, "recommended": 2432})
        );
        assert_eq!(one["notes"], json!(["shortTime"]));
    }

    proptest! {
        /// What was used fits what is recommended, and nothing grows without need.
        #[test]
        fn recommended_amounts_hold_what_was_used(
            peak in 1.0_f64..80.0, limit in 1.0_f64..80.0, time in 0.0_f64..1.0,
        ) {
            let used = Usage {
                peak_bytes: peak.min(limit) * GIB,
                limit_bytes: limit * GIB,
                ..usage(0.0, time)
            };
            let memory = memory(&used, &mut Vec::new()).expect("an amount");
            prop_assert!((memory.used..=memory.current).contains(&memory.recommended));
            if let Some(cores) = cores(&used, &mut Vec::new()) {
                prop_assert!(cores.recommended >= cores.used && cores.recommended <= 100);
            }
        }
    }
}
