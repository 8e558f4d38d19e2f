//! The dashboards: their variables, panels and queries.

mod scheduling;

use scheduling::SCHEDULING;

/// A dashboard.
pub(crate) struct Dashboard {
    /// Name of the file.
    pub(crate) name: &'static str,
    /// Title after `drava / `.
    pub(crate) title: &'static str,
    pub(crate) variables: &'static [Variable],
    pub(crate) panels: &'static [Panel],
}

/// A variable: the values of a label.
pub(crate) struct Variable {
    /// Name of the variable and of the label.
    pub(crate) name: &'static str,
    /// Title.
    pub(crate) label: &'static str,
    /// Metric with the label.
    pub(crate) metric: &'static str,
}

/// A panel.
pub(crate) struct Panel {
    pub(crate) title: &'static str,
    /// Explanation for the reader.
    pub(crate) description: &'static str,
    /// Unit of Grafana.
    pub(crate) unit: &'static str,
    pub(crate) view: View,
    /// Width in grid units; a dashboard has 24.
    pub(crate) width: u32,
    /// Legend and PromQL expression.
    pub(crate) queries: &'static [(&'static str, &'static str)],
}

/// Representation of a panel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    /// Values over time.
    Graph,
    /// The last value as a number.
    Number,
    /// The last value of each series as a bar.
    Bars,
    /// The last values as a table.
    Table,
}

/// All dashboards.
pub(crate) const ALL: &[Dashboard] = &[CLUSTER, GPUS, WORKLOADS, SCHEDULING];

const NODE: Variable = Variable {
    name: "node",
    label: "Node",
    metric: "drava_gpu_info",
};

const CLUSTER: Dashboard = Dashboard {
    name: "cluster",
    title: "Cluster",
    variables: &[Variable {
        name: "namespace",
        label: "Namespace",
        metric: "drava_namespace_allocated_devices",
    }],
    panels: &[
        Panel {
            title: "GPUs",
            description: "GPUs of all nodes, and those that NVML cannot read.",
            unit: "short",
            view: View::Number,
            width: 6,
            queries: &[
                ("GPUs", "count(drava_gpu_info)"),
                ("unhealthy", "sum(1 - drava_gpu_healthy)"),
            ],
        },
        Panel {
            title: "Pending pods",
            description: "Unbound pods with claims for GPUs.",
            unit: "short",
            view: View::Number,
            width: 6,
            queries: &[("pending", "sum(drava_controller_pending_pods)")],
        },
        Panel {
            title: "Allocated memory",
            description: "Part of the memory of shareable GPUs that claims have.",
            unit: "percentunit",
            view: View::Number,
            width: 6,
            queries: &[(
                "allocated",
                r#"sum(drava_device_allocated{capacity="memory"}) / sum(drava_device_capacity{capacity="memory"})"#,
            )],
        },
        Panel {
            title: "Guaranteed GPU time",
            description: "Part of the GPU time of shareable GPUs that is guaranteed to claims.",
            unit: "percentunit",
            view: View::Number,
            width: 6,
            queries: &[(
                "guaranteed",
                r#"sum(drava_device_allocated{capacity="cores"}) / sum(drava_device_capacity{capacity="cores"})"#,
            )],
        },
        Panel {
            title: "Allocated and used memory",
            description: "What claims have, what is charged to shares, and what the GPUs report.",
            unit: "bytes",
            view: View::Graph,
            width: 12,
            queries: &[
                (
                    "capacity",
                    r#"sum(drava_device_capacity{capacity="memory"})"#,
                ),
                (
                    "allocated",
                    r#"sum(drava_device_allocated{capacity="memory"})"#,
                ),
                ("charged to shares", "sum(drava_share_memory_used_bytes)"),
                ("used on GPUs", "sum(drava_gpu_memory_used_bytes)"),
            ],
        },
        Panel {
            title: "Busy GPUs",
            description: "Average part of the time with a running kernel, by model.",
            unit: "percentunit",
            view: View::Graph,
            width: 12,
            queries: &[(
                "{{model}}",
                "avg by (model) (drava_gpu_utilization_ratio * on (gpu) group_left (model) drava_gpu_info)",
            )],
        },
        Panel {
            title: "Cost: memory by namespace",
            description: "Memory that claims had in the last hour, in byte-seconds.",
            unit: "bytes",
            view: View::Bars,
            width: 8,
            queries: &[(
                "{{namespace}}",
                r#"sum by (namespace) (increase(drava_namespace_memory_byte_seconds_total{namespace=~"$namespace"}[1h]))"#,
            )],
        },
        Panel {
            title: "Cost: guaranteed GPU time by namespace",
            description: "GPU time that was guaranteed to claims in the last hour: 3600 s for a whole GPU.",
            unit: "s",
            view: View::Bars,
            width: 8,
            queries: &[(
                "{{namespace}}",
                r#"sum by (namespace) (increase(drava_namespace_gpu_seconds_total{namespace=~"$namespace"}[1h]))"#,
            )],
        },
        Panel {
            title: "Cost: devices by namespace",
            description: "GPUs, shares and partitions that claims had in the last hour: 3600 s for each.",
            unit: "s",
            view: View::Bars,
            width: 8,
            queries: &[(
                "{{namespace}}",
                r#"sum by (namespace) (increase(drava_namespace_device_seconds_total{namespace=~"$namespace"}[1h]))"#,
            )],
        },
        Panel {
            title: "Allocated memory by namespace",
            description: "Memory that claims have.",
            unit: "bytes",
            view: View::Graph,
            width: 12,
            queries: &[(
                "{{namespace}}",
                r#"sum by (namespace) (drava_namespace_allocated_memory_bytes{namespace=~"$namespace"})"#,
            )],
        },
        Panel {
            title: "GPU time by namespace",
            description: "GPU time that the shares of each namespace use, in GPUs.",
            unit: "short",
            view: View::Graph,
            width: 12,
            queries: &[(
                "{{namespace}}",
                r#"sum by (namespace) (rate(drava_share_gpu_time_seconds_total{namespace=~"$namespace"}[5m]))"#,
            )],
        },
    ],
};

const GPUS: Dashboard = Dashboard {
    name: "gpus",
    title: "Nodes and GPUs",
    variables: &[NODE],
    panels: &[
        Panel {
            title: "GPUs",
            description: "GPUs of the nodes.",
            unit: "short",
            view: View::Table,
            width: 24,
            queries: &[("", r#"drava_gpu_info{node=~"$node"}"#)],
        },
        Panel {
            title: "Memory in use",
            description: "Part of the usable memory of each GPU.",
            unit: "percentunit",
            view: View::Graph,
            width: 12,
            queries: &[(
                "{{node}} {{gpu}}",
                r#"drava_gpu_memory_used_bytes{node=~"$node"} / (drava_gpu_memory_total_bytes{node=~"$node"} - drava_gpu_memory_reserved_bytes{node=~"$node"})"#,
            )],
        },
        Panel {
            title: "Utilization",
            description: "Part of the time with a running kernel.",
            unit: "percentunit",
            view: View::Graph,
            width: 12,
            queries: &[(
                "{{node}} {{gpu}}",
                r#"drava_gpu_utilization_ratio{node=~"$node"}"#,
            )],
        },
        Panel {
            title: "Temperature",
            description: "An alert fires above 85 °C.",
            unit: "celsius",
            view: View::Graph,
            width: 8,
            queries: &[(
                "{{node}} {{gpu}}",
                r#"drava_gpu_temperature_celsius{node=~"$node"}"#,
            )],
        },
        Panel {
            title: "Power",
            description: "Power draw.",
            unit: "watt",
            view: View::Graph,
            width: 8,
            queries: &[(
                "{{node}} {{gpu}}",
                r#"drava_gpu_power_watts{node=~"$node"}"#,
            )],
        },
        Panel {
            title: "Errors",
            description: "XIDs and uncorrected ECC errors of the last hour.",
            unit: "short",
            view: View::Graph,
            width: 8,
            queries: &[
                (
                    "{{node}} {{gpu}} XID {{xid}}",
                    r#"increase(drava_gpu_xid_errors_total{node=~"$node"}[1h])"#,
                ),
                (
                    "{{node}} {{gpu}} ECC",
                    r#"increase(drava_gpu_ecc_errors_total{node=~"$node", kind="uncorrected"}[1h])"#,
                ),
            ],
        },
        Panel {
            title: "Conditions of the node driver",
            description: "1 is met. See the message of the event NotReady on the node.",
            unit: "short",
            view: View::Table,
            width: 12,
            queries: &[("", r#"drava_driver_condition{node=~"$node"}"#)],
        },
        Panel {
            title: "Duration of prepare and unprepare",
            description: "95th percentile; errors per minute.",
            unit: "s",
            view: View::Graph,
            width: 12,
            queries: &[
                (
                    "{{operation}}",
                    r#"histogram_quantile(0.95, sum by (operation, le) (rate(drava_claim_operation_seconds_bucket{node=~"$node"}[5m])))"#,
                ),
                (
                    "{{operation}} errors",
                    r#"sum by (operation) (rate(drava_claim_operation_errors_total{node=~"$node"}[5m])) * 60"#,
                ),
            ],
        },
    ],
};

const WORKLOADS: Dashboard = Dashboard {
    name: "workloads",
    title: "Workloads",
    variables: &[Variable {
        name: "namespace",
        label: "Namespace",
        metric: "drava_claim_device_info",
    }],
    panels: &[
        Panel {
            title: "Claims",
            description: "Devices of the claims, with their GPUs.",
            unit: "short",
            view: View::Table,
            width: 12,
            queries: &[("", r#"drava_claim_device_info{namespace=~"$namespace"}"#)],
        },
        Panel {
            title: "Pods",
            description: "Pods that use the claims.",
            unit: "short",
            view: View::Table,
            width: 12,
            queries: &[("", r#"drava_claim_pod_info{namespace=~"$namespace"}"#)],
        },
        Panel {
            title: "Memory of the limit",
            description: "Part of its limit that each share uses.",
            unit: "percentunit",
            view: View::Graph,
            width: 12,
            queries: &[(
                "{{namespace}}/{{claim}}",
                r#"drava_share_memory_used_bytes{namespace=~"$namespace"} / drava_share_memory_limit_bytes{namespace=~"$namespace"}"#,
            )],
        },
        Panel {
            title: "Memory",
            description: "Memory charged to each share, and its highest value.",
            unit: "bytes",
            view: View::Graph,
            width: 12,
            queries: &[
                (
                    "{{namespace}}/{{claim}}",
                    r#"drava_share_memory_used_bytes{namespace=~"$namespace"}"#,
                ),
                (
                    "{{namespace}}/{{claim}} peak",
                    r#"drava_share_memory_peak_bytes{namespace=~"$namespace"}"#,
                ),
            ],
        },
        Panel {
            title: "GPU time, guaranteed and used",
            description: "Idle time of others can be used beyond the guarantee.",
            unit: "percentunit",
            view: View::Graph,
            width: 12,
            queries: &[
                (
                    "{{namespace}}/{{claim}} used",
                    r#"rate(drava_share_gpu_time_seconds_total{namespace=~"$namespace"}[5m])"#,
                ),
                (
                    "{{namespace}}/{{claim}} guaranteed",
                    r#"drava_share_gpu_time_guaranteed_ratio{namespace=~"$namespace"}"#,
                ),
            ],
        },
        Panel {
            title: "Waiting for GPU time",
            description: "Time that launches wait, in seconds per second, summed over processes.",
            unit: "short",
            view: View::Graph,
            width: 12,
            queries: &[(
                "{{namespace}}/{{claim}}",
                r#"rate(drava_share_throttled_seconds_total{namespace=~"$namespace"}[5m])"#,
            )],
        },
        Panel {
            title: "Denied allocations",
            description: "Allocations of the last hour that the memory limit denied.",
            unit: "short",
            view: View::Graph,
            width: 8,
            queries: &[(
                "{{namespace}}/{{claim}}",
                r#"increase(drava_share_memory_denials_total{namespace=~"$namespace"}[1h])"#,
            )],
        },
        Panel {
            title: "Processes",
            description: "Processes with a context; escaped ones are without libvgpu.",
            unit: "short",
            view: View::Graph,
            width: 8,
            queries: &[(
                "{{namespace}}/{{claim}} {{state}}",
                r#"drava_share_processes{namespace=~"$namespace"}"#,
            )],
        },
        Panel {
            title: "Idle shares",
            description: "Time since a process of the share last used the GPU.",
            unit: "s",
            view: View::Bars,
            width: 8,
            queries: &[(
                "{{namespace}}/{{claim}}",
                r#"time() - drava_share_last_activity_timestamp_seconds{namespace=~"$namespace"}"#,
            )],
        },
    ],
};
