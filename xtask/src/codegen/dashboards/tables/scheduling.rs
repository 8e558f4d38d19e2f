//! The dashboard of the controller and its queue.

use super::*;

pub(super) const SCHEDULING: Dashboard = Dashboard {
    name: "scheduling",
    title: "Scheduling",
    variables: &[],
    panels: &[
        Panel {
            title: "Pending pods by reason",
            description: "None is before the first decision and after an allocation.",
            unit: "short",
            view: View::Graph,
            width: 12,
            queries: &[(
                "{{reason}}",
                "sum by (reason) (drava_controller_pending_pods)",
            )],
        },
        Panel {
            title: "Wait for an allocation",
            description: "Time from the creation of a pod until its claims are allocated.",
            unit: "s",
            view: View::Graph,
            width: 12,
            queries: &[
                (
                    "median",
                    "histogram_quantile(0.5, sum by (le) (rate(drava_controller_pod_wait_seconds_bucket[10m])))",
                ),
                (
                    "95th percentile",
                    "histogram_quantile(0.95, sum by (le) (rate(drava_controller_pod_wait_seconds_bucket[10m])))",
                ),
            ],
        },
        Panel {
            title: "Allocations",
            description: "Allocation jobs and releases per minute.",
            unit: "short",
            view: View::Graph,
            width: 12,
            queries: &[
                (
                    "{{outcome}}",
                    "sum by (outcome) (rate(drava_controller_allocation_jobs_total[5m])) * 60",
                ),
                (
                    "released",
                    "sum(rate(drava_controller_releases_total[5m])) * 60",
                ),
            ],
        },
        Panel {
            title: "Duration of decisions",
            description: "One pass over the pods that are due.",
            unit: "s",
            view: View::Graph,
            width: 12,
            queries: &[(
                "95th percentile",
                "histogram_quantile(0.95, sum by (le) (rate(drava_controller_decision_seconds_bucket[5m])))",
            )],
        },
        Panel {
            title: "Leaders",
            description: "One replica leads.",
            unit: "short",
            view: View::Number,
            width: 6,
            queries: &[("leaders", "sum(drava_controller_leader)")],
        },
        Panel {
            title: "Excluded pools",
            description: "Pools that are incomplete or malformed; see the events of their nodes.",
            unit: "short",
            view: View::Number,
            width: 6,
            queries: &[("pools", "sum(drava_controller_excluded_pools)")],
        },
        Panel {
            title: "Usage of quotas",
            description: "Part of the limit that the namespaces of a GpuQuota use.",
            unit: "percentunit",
            view: View::Bars,
            width: 12,
            queries: &[(
                "{{quota}} {{resource}}",
                "max by (quota, resource) (drava_quota_used / drava_quota_limit)",
            )],
        },
        Panel {
            title: "Memory allocated by device",
            description: "Part of the memory of each shareable device.",
            unit: "percentunit",
            view: View::Bars,
            width: 12,
            queries: &[(
                "{{node}}/{{device}}",
                r#"drava_device_allocated{capacity="memory"} / drava_device_capacity{capacity="memory"}"#,
            )],
        },
    ],
};
