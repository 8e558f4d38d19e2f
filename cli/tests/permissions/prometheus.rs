//! `cost`, `recommend` and measured use: what is read of Prometheus and of the node drivers, and whose objects are believed.

use serde_json::{Value, json};

use super::{failure, list, may_not_ask, run};

/// Prometheus behind the proxy of the API server, and the prices of the chart.
fn with_prometheus(_: &str, path: &str) -> (u16, Value) {
    const PROXY: &str = "/api/v1/namespaces/monitoring/services/prometheus:9090/proxy";
    let query = path
        .strip_prefix(PROXY)
        .and_then(|path| path.strip_prefix("/api/v1/query?"));
    match (path, query) {
        (_, Some(query)) => answer_to(query),
        ("/api/v1/configmaps", None) => list(&json!([
            {"metadata": {"name": "drava-prices"}, "data": {
                "prices.yaml": "{\"currency\":\"EUR\",\"gpuHour\":2.5,\"memoryGibHour\":0.5,\"models\":{}}",
            }},
        ])),
        _ => failure(403),
    }
}

/// Answers a query for the integral of an amount over a week: 10 hours of a GPU, of which 4 were used, and others.
fn answer_to(query: &str) -> (u16, Value) {
    const HOUR: u64 = 3600;
    let mut parameters = form_urlencoded::parse(query.as_bytes());
    let (_, query) = parameters.next().expect("a query");
    let expression = query.strip_prefix("sum_over_time((");
    let expression = expression.and_then(|rest| rest.strip_suffix(")[604800s:303s])"));
    let expression = expression.expect("an integral");
    let value = [
        ("drava_share_gpu_time_guaranteed_ratio", 10 * HOUR),
        ("drava_share_gpu_time_seconds_total", 4 * HOUR),
        ("drava_share_memory_limit_bytes", (6 * HOUR) << 30),
        ("access=\"partition\"", HOUR),
    ];
    let mut value = value.iter().filter(|(part, _)| expression.contains(part));
    let value = match (value.next(), value.next()) {
        // Energy is divided by GPU time. 500 W for four hours.
        _ if expression.contains("drava_gpu_energy_joules_total") => &(500 * 4 * HOUR),
        (Some((_, value)), None) => value,
        _ => panic!("{expression}"),
    };
    let metric = json!({"namespace": "a", "claim": "c", "model": "L4"});
    // Each of the values that are summed up stands for a step.
    let sum = *value as f64 / 303.0;
    let series = json!({"metric": metric, "value": [1, sum.to_string()]});
    (
        200,
        json!({"status": "success", "data": {"result": [series]}}),
    )
}

#[test]
fn asks_prometheus_through_the_api_server() {
    let service = ["cost", "--prometheus", "monitoring/prometheus:9090"];
    let printed = run(with_prometheus, &service);
    assert_eq!(
        printed.stdout,
        "\
NAMESPACE   GPU HOURS   USED   IDLE   GIB HOURS   KWH   COST (EUR)   IDLE COST (EUR)
a           10.0        4.0    6.0    6.0         2.0   28.00        15.00
without 1.0 hours of MIG partitions, whose size the metrics do not show
",
        "{printed:?}"
    );
    let for_opencost = [&service[..], &["-o", "opencost"]].concat();
    let printed = run(with_prometheus, &for_opencost);
    let response: Value = serde_json::from_str(&printed.stdout).expect("JSON");
    assert_eq!(response["currency"], "EUR", "{printed:?}");
    assert_eq!(response["costs"][0]["billedCost"], 28.0, "{printed:?}");
    let printed = run(may_not_ask, &["cordon", "n1", "-o", "opencost"]);
    assert!(
        printed
            .stderr
            .contains("format of `kubectl drava cost` only"),
        "{printed:?}"
    );
    let printed = run(may_not_ask, &service);
    assert!(
        printed
            .stderr
            .starts_with("note: you may not list configmaps"),
        "{printed:?}"
    );
    assert_eq!(printed.code, Some(1), "{printed:?}");
}

#[test]
fn costs_of_workloads_need_their_pods() {
    let cost = [
        "cost",
        "--prometheus",
        "monitoring/prometheus:9090",
        "--workloads",
    ];
    let printed = run(
        |method, path| match path {
            "/api/v1/namespaces/a/pods" => list(&json!([{
                "metadata": {"namespace": "a", "name": "p"},
                "spec": {"containers": [], "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]},
                "status": {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "c"}]},
            }])),
            path => with_prometheus(method, path),
        },
        &cost,
    );
    assert!(
        printed
            .stdout
            .contains("\na           pod/p      10.0        4.0 "),
        "{printed:?}"
    );
    let printed = run(with_prometheus, &cost);
    assert_eq!(printed.code, Some(1), "{printed:?}");
    assert!(
        printed.stderr.starts_with("error: cannot list pods; "),
        "{printed:?}"
    );
    let both = [&cost[..], &["--claims"]].concat();
    assert_eq!(run(with_prometheus, &both).code, Some(2));
}

/// Prices and a pod of a node driver, each of drava and of a tenant. The server shows those of all namespaces too.
fn with_imitations(path: &str, names_namespace: bool) -> (u16, Value) {
    let prices = |namespace: &str, price: &str| {
        json!({
            "metadata": {"name": "drava-prices", "namespace": namespace},
            "data": {"prices.yaml": format!("{{gpuHour: {price}}}")},
        })
    };
    let driver = |namespace: &str| {
        json!({
            "metadata": {"name": "driver", "namespace": namespace, "uid": "d"},
            "spec": {"nodeName": "n1", "containers": [{"name": "c", "ports": [{"name": "http", "containerPort": 9394}]}]},
            "status": {"phase": "Running", "podIP": "10.0.0.1"},
        })
    };
    match path {
        "/apis/resource.k8s.io/v1/deviceclasses/gpu.drava.dev" if names_namespace => (
            200,
            json!({"metadata": {
                "name": "gpu.drava.dev", "annotations": {"gpu.drava.dev/namespace": "drava-system"},
            }}),
        ),
        "/api/v1/configmaps" => list(&json!([prices("a", "0"), prices("drava-system", "2.5")])),
        "/api/v1/namespaces/drava-system/configmaps" => {
            list(&json!([prices("drava-system", "2.5")]))
        }
        "/api/v1/pods" => list(&json!([driver("a"), driver("drava-system")])),
        "/api/v1/namespaces/drava-system/pods" => list(&json!([driver("drava-system")])),
        "/api/v1/namespaces/drava-system/pods/driver:9394/proxy/metrics" => failure(500),
        path if path.contains("/proxy/api/v1/query") => with_prometheus("", path),
        path if path.contains("/proxy/metrics") => panic!("a pod of a tenant is asked: {path}"),
        path if path.contains("/gpucontrollerleaders/") => failure(404),
        _ => list(&json!([])),
    }
}

#[test]
fn takes_prices_and_figures_from_the_namespace_of_drava() {
    let cost = ["cost", "--prometheus", "monitoring/prometheus:9090"];
    let printed = run(|_, path| with_imitations(path, true), &cost);
    assert!(printed.stdout.contains("25.00"), "{printed:?}");
    let printed = run(|_, path| with_imitations(path, false), &cost);
    assert_eq!(printed.code, Some(1), "{printed:?}");
    assert!(
        printed
            .stderr
            .contains("ConfigMaps with prices exist in several namespaces, a and drava-system"),
        "{printed:?}"
    );
    let printed = run(|_, path| with_imitations(path, true), &["top", "--usage"]);
    assert!(
        printed
            .stderr
            .contains("cannot read the metrics of the node driver of n1: "),
        "{printed:?}"
    );
    let printed = run(|_, path| with_imitations(path, false), &["top", "--usage"]);
    assert!(
        printed.stderr.contains(
            "pods with the labels of node drivers exist in several namespaces, a and drava-system"
        ),
        "{printed:?}"
    );
}

const GIB: f64 = 1_073_741_824.0;

/// Prometheus with the shares of a pod that has 10 GiB and 40 cores.
fn with_usage(_: &str, path: &str) -> (u16, Value) {
    let Some((_, query)) = path.split_once("/api/v1/query?") else {
        return match path {
            "/api/v1/namespaces/a/pods" => list(&json!([{
                "metadata": {"namespace": "a", "name": "p"},
                "spec": {"containers": [], "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]},
                "status": {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "p-gpu-abcde"}]},
            }])),
            _ => failure(403),
        };
    };
    let mut parameters = form_urlencoded::parse(query.as_bytes());
    let (_, query) = parameters.next().expect("a query");
    assert!(query.ends_with(")[604800s:303s])"), "{query}");
    let values = [
        ("max_over_time(", "drava_share_memory_peak_bytes", 4.0 * GIB),
        ("max_over_time(", "drava_share_memory_denials_total", 0.0),
        (
            "last_over_time(",
            "drava_share_memory_limit_bytes - (drava_share_burst_bytes or drava_share_memory_limit_bytes * 0)",
            10.0 * GIB,
        ),
        (
            "last_over_time(",
            "drava_share_gpu_time_guaranteed_ratio",
            0.4,
        ),
        (
            "quantile_over_time(0.95, ",
            "rate(drava_share_gpu_time_seconds_total[5m])",
            0.1,
        ),
        // Two days.
        (
            "count_over_time(",
            "drava_share_memory_peak_bytes",
            172_800.0 / 303.0,
        ),
    ];
    let is_asked = |(function, metric, _): &&(&str, &str, f64)| {
        query.starts_with(function) && query.contains(&format!("({metric})"))
    };
    let mut value = values.iter().filter(is_asked);
    let (Some((.., value)), None) = (value.next(), value.next()) else {
        panic!("{query}");
    };
    let metric = json!({"namespace": "a", "claim": "p-gpu-abcde", "request": "gpu"});
    let series = json!({"metric": metric, "value": [1, value.to_string()]});
    (
        200,
        json!({"status": "success", "data": {"result": [series]}}),
    )
}

#[test]
fn recommends_by_queries_of_prometheus() {
    let service = ["recommend", "--prometheus", "monitoring/prometheus:9090"];
    let printed = run(with_usage, &service);
    assert_eq!(
        printed.stdout,
        "\
NAMESPACE   WORKLOAD   REQUEST   CLAIMS   OBSERVED   MEMORY   PEAK   RECOMMENDED   CORES   USED   RECOMMENDED
a           pod/p      gpu/gpu   1        48h        10Gi     4Gi    4736Mi        40      10     15
all together: 5504Mi less of memory, 25 less cores
",
        "{printed:?}"
    );
}
