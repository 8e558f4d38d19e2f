//! Answers to users who may not read everything, and to requests that are not fulfilled, as programs against a server that
//! answers by path.
#![expect(clippy::expect_used, reason = "tests")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;

use drava_explanation::fixture;
use serde_json::{Value, json};

use suspension::Share;

mod prometheus;
mod resize;
mod suspension;

/// Returns status and body for a method and a path.
type Answer = fn(&str, &str) -> (u16, Value);

/// What a command prints.
#[derive(Debug)]
struct Printed {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

/// Runs a command of namespace `a` against an API server with these answers.
fn run(
    answer: impl Fn(&str, &str) -> (u16, Value) + Send + 'static,
    arguments: &[&str],
) -> Printed {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    // The thread ends with the process of the tests.
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            serve(stream, &answer);
        }
    });
    run_with(address, arguments)
}

/// Runs a command of namespace `a` with the API server at this address.
fn run_with(address: SocketAddr, arguments: &[&str]) -> Printed {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    });
    std::fs::write(file.path(), config.to_string()).expect("written");
    let output = Command::new(env!("CARGO_BIN_EXE_kubectl-drava"))
        .args(arguments)
        .args(["-n", "a", "--kubeconfig"])
        .arg(file.path())
        .output()
        .expect("kubectl-drava runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Printed {
        code: output.status.code(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

/// Answers one request, and closes the connection.
fn serve(stream: TcpStream, answer: &impl Fn(&str, &str) -> (u16, Value)) {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    if reader.read_line(&mut line).is_err() {
        return;
    }
    let mut words = line.split(' ').map(str::to_owned);
    let (method, target) = (words.next(), words.next());
    let mut length = 0;
    loop {
        let mut header = String::new();
        if reader.read_line(&mut header).is_err() || header.trim().is_empty() {
            break;
        }
        let header = header.to_ascii_lowercase();
        if let Some(value) = header.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or_default();
        }
    }
    let mut body = vec![0; length];
    let _ = reader.read_exact(&mut body);
    let target = target.unwrap_or_default();
    let path: &str = match target.split_once('?') {
        // An answer of Prometheus depends on the query, and events are those of an object.
        Some((path, _)) if !path.ends_with("/api/v1/query") && !path.ends_with("/events") => path,
        _ => &target,
    };
    let (status, body) = answer(&method.unwrap_or_default(), path);
    let body = body.to_string();
    let mut stream = reader.into_inner();
    let _ = write!(
        stream,
        "HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
}

fn failure(code: u16) -> (u16, Value) {
    let message = format!("the server says {code}");
    let reason = if code == 404 { "NotFound" } else { "" };
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code, "message": message, "reason": reason,
    });
    (code, body)
}

fn list(items: &Value) -> (u16, Value) {
    (
        200,
        json!({"metadata": {"resourceVersion": "1"}, "items": items}),
    )
}

fn pod() -> Value {
    json!({
        "metadata": {"name": "p", "namespace": "a", "uid": "p"},
        "spec": {"containers": [{"name": "c"}], "resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}]},
        "status": {"conditions": [
            {"type": "gpu.drava.dev/Allocated", "status": "False", "message": "0/1 nodes: 1 InsufficientMemory"},
        ]},
    })
}

fn claim() -> Value {
    json!({"metadata": {"name": "c", "namespace": "a", "uid": "c"}, "spec": {"devices": {"requests": [
        {"name": "gpu", "exactly": {"deviceClassName": "vgpu.drava.dev"}},
    ]}}})
}

fn allocated_claim() -> Value {
    let mut claim = claim();
    claim["metadata"]["name"] = json!("used");
    claim["status"] = json!({
        "allocation": {"devices": {"results": [{
            "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu", "shareID": "s",
            "consumedCapacity": {"memory": "8Gi", "cores": "30", "slots": "1"},
        }]}},
        "reservedFor": [{"resource": "pods", "name": "user", "uid": "u"}],
    });
    claim
}

/// The user reads all but what the leader reserves.
fn without_reservations(_: &str, path: &str) -> (u16, Value) {
    match path {
        path if path.contains("/gpucontrollerleaders/") => failure(403),
        "/apis/storage.k8s.io/v1/storageclasses" => failure(403),
        "/api/v1/pods" => list(&json!([pod()])),
        "/apis/resource.k8s.io/v1/resourceclaims" => list(&json!([claim()])),
        _ => list(&json!([])),
    }
}

/// What an answer does not know is named, because it could be another.
#[test]
fn names_what_an_answer_leaves_out() {
    let manifest = tempfile::NamedTempFile::new().unwrap();
    let pod = r#"{"kind": "Pod", "metadata": {"name": "new"}, "spec": {"containers": []}}"#;
    std::fs::write(manifest.path(), pod).unwrap();
    for command in [
        &["explain", "pod", "p"][..],
        &["explain", "claim", "c"],
        &["top"],
        &["simulate", "-f", manifest.path().to_str().unwrap()],
    ] {
        let printed = run(without_reservations, command);
        assert_eq!(
            printed.stderr,
            "note: you may not read storageclasses, gpucontrollerleaders (what is reserved for other pods); the answer does not \
             consider them\n",
            "{command:?}: {printed:?}"
        );
        assert_eq!(printed.code, Some(0), "{printed:?}");
    }
}

/// The user reads all objects, and not the metrics of a node driver.
fn without_metrics(_: &str, path: &str) -> (u16, Value) {
    let driver = json!({
        "metadata": {"name": "driver", "namespace": "drava-system", "uid": "d"},
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "ports": [{"name": "http", "containerPort": 9394}]}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1"},
    });
    match path {
        path if path.contains("/gpucontrollerleaders/") => failure(404),
        "/api/v1/pods" => list(&json!([driver])),
        "/api/v1/namespaces/drava-system/pods/driver:9394/proxy/metrics" => failure(403),
        _ => list(&json!([])),
    }
}

#[test]
fn names_permission_that_usage_needs() {
    let printed = run(without_metrics, &["top", "--usage"]);
    assert_eq!(
        printed.stderr,
        "note: what claims use is not shown: you may not read the metrics of the node drivers, subresource pods/proxy in their \
         namespace: the server says 403\n"
    );
    assert_eq!(printed.code, Some(0), "{printed:?}");
}

#[test]
fn names_lack_of_node_drivers_and_of_their_answers() {
    let printed = run(with_gpus, &["top", "--usage"]);
    assert_eq!(
        printed.stderr,
        "note: what claims use is not shown: no pod of the node driver runs; `kubectl drava doctor` names the cause\n"
    );
    assert!(!printed.stdout.contains("USED"), "{printed:?}");
    // A node driver that has just started reports nothing so far.
    let printed = run(
        |method, path| match path {
            "/api/v1/pods" => without_metrics(method, path),
            path if path.ends_with("/proxy/metrics") => (200, json!("")),
            path => with_gpus(method, path),
        },
        &["top", "--usage"],
    );
    assert!(
        printed.stderr.starts_with(
            "note: what claims use is shown in part: the node drivers do not report claim a/w on node n1; they do so a moment after"
        ),
        "{printed:?}"
    );
}

/// Two GPUs: one has claims of namespace `default`, the other one is used by a pod of `a`.
fn with_gpus(_: &str, path: &str) -> (u16, Value) {
    match path {
        path if path.contains("/gpucontrollerleaders/") => failure(404),
        "/apis/resource.k8s.io/v1/resourceslices" => list(&json!(fixture::slices())),
        "/apis/resource.k8s.io/v1/resourceclaims" => {
            let mut claims = fixture::snapshot().claims;
            for claim in &mut claims {
                match claim.metadata.name.as_deref() {
                    Some("w") => claim.metadata.namespace = Some("a".to_owned()),
                    // Without a pod.
                    _ => claim
                        .status
                        .iter_mut()
                        .for_each(|status| status.reserved_for = None),
                }
            }
            list(&json!(claims))
        }
        _ => list(&json!([])),
    }
}

#[test]
fn top_shows_gpus_of_the_namespace() {
    let printed = run(with_gpus, &["top"]);
    let rows: Vec<&str> = printed.stdout.lines().skip(1).collect();
    assert!(
        matches!(rows[..], [row] if row.starts_with("n1     gpu-1 ") && row.ends_with("a/w (w-pod)")),
        "{printed:?}"
    );
}

#[test]
fn names_server_that_cannot_be_reached() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    drop(listener);
    let printed = run_with(address, &["top"]);
    assert_eq!(printed.code, Some(1), "{printed:?}");
    assert_eq!(
        printed.stderr,
        format!("error: cannot reach http://{address}/: Connection refused (os error 111)\n")
    );
}

/// The user reads pods, and no PodGroups; one of their APIs is served.
fn without_pod_groups(_: &str, path: &str) -> (u16, Value) {
    match path {
        "/apis/scheduling.volcano.sh/v1beta1" => (
            200,
            json!({"kind": "APIResourceList", "groupVersion": "scheduling.volcano.sh/v1beta1", "resources": []}),
        ),
        path if path.ends_with("/podgroups") => failure(403),
        path if path.starts_with("/apis/scheduling") => failure(404),
        _ => list(&json!([])),
    }
}

#[test]
fn names_pod_groups_that_gangs_leave_out() {
    let printed = run(without_pod_groups, &["gangs"]);
    assert_eq!(
        printed.stderr,
        "note: you may not list podgroups of scheduling.volcano.sh; the gangs that they define are left out\n"
    );
    assert_eq!(printed.code, Some(0), "{printed:?}");
}

/// A tenant; what the creation of an explanation answers is the test's.
fn tenant(method: &str, path: &str, creation: (u16, Value)) -> (u16, Value) {
    let named = "/apis/gpu.drava.dev/v1alpha1/namespaces/a/placementexplanations";
    match (method, path) {
        ("POST", path) if path == named => creation,
        ("GET", path) if path.starts_with(named) => (
            200,
            json!({"metadata": {"name": "x", "namespace": "a"}, "spec": {"podName": "p"}, "status": {
                "state": "Infeasible", "summary": "0/1 nodes: 1 InsufficientMemory (of the controller)",
                "blockers": [{"node": "n1", "device": "gpu-0-vgpu", "reason": "InsufficientMemory", "detail": "1 GiB"}],
                "changes": ["request at most 1Mi of memory (claim gpu, request gpu)"],
            }}),
        ),
        (_, "/api/v1/namespaces/a/pods/p") => (200, pod()),
        (_, "/api/v1/namespaces/a/pods") => list(&json!([pod()])),
        (_, "/apis/resource.k8s.io/v1/namespaces/a/resourceclaims") => {
            list(&json!([claim(), allocated_claim()]))
        }
        _ => failure(403),
    }
}

fn asks(method: &str, path: &str) -> (u16, Value) {
    let object = json!({"metadata": {"name": "x", "namespace": "a"}, "spec": {"podName": "p"}});
    tenant(method, path, (201, object))
}

fn may_not_ask(method: &str, path: &str) -> (u16, Value) {
    tenant(method, path, failure(403))
}

fn without_definition(method: &str, path: &str) -> (u16, Value) {
    tenant(method, path, failure(404))
}

fn with_failing_server(method: &str, path: &str) -> (u16, Value) {
    tenant(method, path, failure(500))
}

/// The line names where the answer comes from, and a failure is no answer.
#[test]
fn names_the_source_of_an_explanation() {
    let of_condition = "the answer comes from the condition of the pod, because";
    for (answer, source) in [
        (
            asks as Answer,
            "the answer comes from the controller".to_owned(),
        ),
        (
            may_not_ask,
            format!("{of_condition} you may not create placementexplanations"),
        ),
        (
            without_definition,
            format!("{of_condition} the API server does not serve placementexplanations"),
        ),
    ] {
        for command in [["explain", "pod", "p"], ["explain", "claim", "c"]] {
            let printed = run(answer, &command);
            assert_eq!(printed.code, Some(0), "{printed:?}");
            let (limit, rest) = printed.stderr.split_once("; ").expect("a note");
            assert!(limit.starts_with("note: you may not list "), "{limit}");
            assert_eq!(rest, format!("{source}\n"), "{command:?}");
            assert!(printed.stdout.contains("pod a/p: 0/1 nodes"), "{printed:?}");
        }
    }
    let printed = run(with_failing_server, &["explain", "pod", "p"]);
    assert_eq!(
        (printed.code, printed.stdout.as_str()),
        (Some(1), ""),
        "{printed:?}"
    );
    assert!(
        printed.stderr.contains("the server says 500"),
        "{printed:?}"
    );
}

#[test]
fn refuses_options_that_the_controller_does_not_follow() {
    for option in [
        ["--node-policy", "spread"],
        ["--gpu-policy", "spread"],
        ["--scheduler-name", "x"],
    ] {
        for command in [["explain", "pod", "p"], ["explain", "claim", "c"]] {
            let printed = run(asks, &[&command[..], &option[..]].concat());
            assert_eq!(printed.code, Some(1), "{printed:?}");
            assert!(
                printed.stderr.starts_with("error: you may not list ")
                    && printed.stderr.ends_with(&format!(
                        " in all namespaces, so the controller decides with its own settings; leave out {}\n",
                        option[0]
                    )),
                "{printed:?}"
            );
        }
    }
}

/// Kueue's second version is served, and its workload is of the job.
fn with_kueue(_: &str, path: &str) -> (u16, Value) {
    let suspended = json!({
        "metadata": {"name": "j", "namespace": "a", "uid": "j"}, "spec": {"suspend": true, "template": {}},
    });
    let workload = |owner: &str, message: &str| {
        json!({
            "metadata": {"name": owner, "namespace": "a", "ownerReferences": [
                {"apiVersion": "batch/v1", "kind": "Job", "name": owner, "uid": owner},
            ]},
            "status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": message}]},
        })
    };
    match path {
        "/apis/batch/v1/namespaces/a/jobs/j" => (200, suspended),
        "/apis/kueue.x-k8s.io/v1beta1/namespaces/a/workloads" => list(&json!([
            workload("other", "no"),
            workload("j", "insufficient quota")
        ])),
        "/version" => failure(403),
        _ => failure(404),
    }
}

#[test]
fn explains_suspended_job_by_its_workload() {
    let printed = run(with_kueue, &["explain", "job/j"]);
    assert_eq!(
        printed.stdout,
        "job a/j: suspended by Kueue, workload j: QuotaReserved is False: insufficient quota\n",
        "{printed:?}"
    );
    let printed = run(with_kueue, &["explain", "job", "other"]);
    assert!(
        printed
            .stderr
            .contains("cannot find job other in namespace a"),
        "{printed:?}"
    );
}

/// A pod of a tenant with the gate of Kueue, whose workload waits.
fn with_gated_pod(_: &str, path: &str) -> (u16, Value) {
    let pod = json!({
        "metadata": {"name": "p", "namespace": "a", "uid": "j"},
        "spec": {
            "containers": [], "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}],
        },
    });
    let claim = json!({
        "metadata": {"name": "c", "namespace": "a", "uid": "c"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "vgpu.drava.dev"}}]}},
    });
    let class = json!({
        "metadata": {"name": "vgpu.drava.dev"},
        "spec": {"selectors": [{"cel": {"expression": "device.driver == 'gpu.drava.dev'"}}]},
    });
    match path {
        "/api/v1/namespaces/a/pods/p" => (200, pod),
        "/api/v1/pods" => list(&json!([pod])),
        "/apis/resource.k8s.io/v1/resourceclaims" => list(&json!([claim])),
        "/apis/resource.k8s.io/v1/deviceclasses" => list(&json!([class])),
        "/apis/kueue.x-k8s.io/v1beta1/namespaces/a/workloads" => with_kueue("GET", path),
        "/apis/kueue.x-k8s.io/v1beta2/namespaces/a/workloads" => failure(404),
        _ if path.starts_with("/apis/gpu.drava.dev") => failure(404),
        _ => list(&json!([])),
    }
}

#[test]
fn explains_gated_pod_by_its_workload() {
    let printed = run(with_gated_pod, &["explain", "pod/p"]);
    assert!(
        printed.stdout.contains(
            "the pod has scheduling gates kueue.x-k8s.io/admission; the controller ignores the pod until they are removed; \
             Kueue, workload j: QuotaReserved is False: insufficient quota\n"
        ),
        "{printed:?}"
    );
}

/// The controller recommends for a Deployment, for a claim that pods name, and for a workload without pods.
fn with_recommendations(_: &str, path: &str) -> (u16, Value) {
    let object = |spec: Value, status: Value| json!({"metadata": {"namespace": "a", "name": "x"}, "spec": spec, "status": status});
    let chat = object(
        json!({"kind": "Deployment", "name": "chat", "claim": "gpu", "request": "gpu"}),
        json!({
            "shares": 2, "confidence": "High", "notes": ["allTimeWasUsed"],
            "current": {"memory": "10Gi", "cores": 40}, "used": {"memory": "4Gi", "cores": 11},
            "request": {"memory": "4736Mi", "cores": 15}, "limit": {"memory": "5248Mi"},
            "history": {"observedSeconds": 691_200, "memoryPeaks": [], "gpuTime": []},
        }),
    );
    let shared = object(
        json!({"kind": "ResourceClaim", "name": "shared", "claim": "shared", "request": "gpu/small"}),
        json!({
            "shares": 1, "confidence": "Low", "current": {"memory": "2Gi", "cores": 0}, "used": {"memory": "4Gi", "cores": 11},
            "request": {"memory": "5Gi"}, "limit": {"memory": "9Gi"},
        }),
    );
    let paused = object(
        json!({"kind": "Deployment", "name": "paused", "claim": "gpu", "request": "gpu"}),
        json!({"shares": 0, "request": {"memory": "5Gi"}}),
    );
    match path {
        "/apis/gpu.drava.dev/v1alpha1/namespaces/a/gpusharerecommendations" => {
            list(&json!([chat, shared, paused]))
        }
        _ => failure(403),
    }
}

#[test]
fn shows_what_the_controller_recommends() {
    let table = "\
NAMESPACE   WORKLOAD               REQUEST            CLAIMS   OBSERVED   CONFIDENCE   MEMORY   PEAK   RECOMMENDED   LIMIT    CORES   USED   RECOMMENDED
a           deployment/chat        gpu/gpu            2        192h       High         10Gi     4Gi    4736Mi        5248Mi   40      11     15
a           resourceclaim/shared   shared/gpu/small   1        0h         Low          2Gi      4Gi    5Gi           9Gi      -       -      -
a/deployment/chat: all guaranteed GPU time was used; with more, the programs may be faster
all together: 7936Mi less of memory, 50 less cores
";
    let printed = run(with_recommendations, &["recommend"]);
    assert_eq!(printed.stdout, table, "{printed:?}");
    let wide = run(with_recommendations, &["recommend", "-o", "wide"]).stdout;
    let changes = wide.strip_prefix(table).expect("the table");
    assert_eq!(
        changes,
        r#"a/deployment/chat, claim gpu: {"spec":{"spec":{"devices":{"requests":[{"exactly":{"capacity":{"requests":{"cores":"15","memory":"4736Mi"}}},"name":"gpu"}]}}}}
a/resourceclaim/shared, claim shared: {"spec":{"devices":{"requests":[{"firstAvailable":[{"capacity":{"requests":{"memory":"5Gi"}},"name":"small"}],"name":"gpu"}]}}}
"#
    );
    let report = document(with_recommendations, &["recommend"]);
    let one = &report["recommendations"][0];
    assert_eq!(
        (
            &one["confidence"],
            &one["memoryLimitMib"],
            &one["patch"]["spec"]["spec"]["devices"]["requests"][0]["name"]
        ),
        (&json!("High"), &json!(5248), &json!("gpu")),
        "{report}"
    );
}

#[test]
fn says_what_recommendations_need() {
    let hint = "there is no GpuShareRecommendation: install the chart with recommendations.enabled=true and wait for some minutes, or \
                name a Prometheus with --prometheus\n";
    let printed = run(without_objects, &["recommend"]);
    assert_eq!(
        (printed.code, printed.stderr),
        (Some(1), format!("error: {hint}"))
    );
    let printed = run(|_, _| list(&json!([])), &["recommend"]);
    assert_eq!((printed.code, printed.stdout), (Some(0), hint.to_owned()));
    let printed = run(may_not_ask, &["recommend"]);
    assert_eq!(
        printed.stderr,
        "error: you may not list gpusharerecommendations in namespace a: the server says 403\n"
    );
    let printed = run(may_not_ask, &["recommend", "--since", "1h"]);
    assert!(printed.stderr.contains("--prometheus"), "{printed:?}");
}

fn document(answer: Answer, command: &[&str]) -> Value {
    let printed = run(answer, &[command, &["-o", "json"]].concat());
    assert_eq!(printed.code, Some(0), "{printed:?}");
    serde_json::from_str(&printed.stdout).expect("JSON")
}

/// Scripts read the answers of all users.
#[test]
fn documents_have_one_schema() {
    let pod = document(asks, &["explain", "pod", "p"]);
    assert_eq!(
        pod,
        json!({
            "pod": "a/p", "state": "Infeasible", "summary": "0/1 nodes: 1 InsufficientMemory (of the controller)",
            "blockers": [{"node": "n1", "device": "gpu-0-vgpu", "reason": "InsufficientMemory", "detail": "1 GiB"}],
            "changes": [{"kind": "described", "text": "request at most 1Mi of memory (claim gpu, request gpu)"}],
        })
    );
    assert_eq!(
        document(asks, &["explain", "claim", "c"]),
        json!({"claim": "a/c", "state": "Pending", "pods": [pod]})
    );
    let top = document(asks, &["top"]);
    let gpu = &top["gpus"][0];
    assert_eq!(
        (&gpu["node"], &gpu["gpu"], &gpu["mode"]),
        (&json!("n1"), &json!("gpu-0"), &json!("shared"))
    );
    assert_eq!(gpu["memory"], json!({"allocated": 8_u64 << 30}));
    assert_eq!(gpu["claims"][0]["pods"], json!(["user"]));
    assert_eq!(top["problems"], json!([]));
}

fn without_objects(_: &str, _: &str) -> (u16, Value) {
    failure(404)
}

/// The user reads the pod, its claims and the prices, and changes nothing.
fn viewer(method: &str, path: &str) -> (u16, Value) {
    match (method, path) {
        ("GET", "/apis/resource.k8s.io/v1/namespaces/a/resourceclaims") => {
            list(&json!([Share::idle().claim]))
        }
        ("GET", "/api/v1/configmaps") => list(&json!([])),
        ("GET", path) if !path.contains("/proxy/") => {
            let mut share = Share::idle();
            share.claim["metadata"]["annotations"] =
                json!({"gpu.drava.dev/suspend-requested": "true"});
            share.answer(method, path)
        }
        _ => failure(403),
    }
}

/// What fails is one line that names the object, the namespace and what helps, not the answer of the server as a structure.
#[test]
fn names_missing_objects_and_permissions_in_one_line() {
    let missing = "error: cannot find pod p in namespace a; use -n for another namespace\n";
    let may_not = |action: &str| format!("error: you may not {action}: the server says 403\n");
    let resize = ["resize", "p", "--memory", "9Gi"];
    let cost = ["cost", "--prometheus", "monitoring/prometheus:9090"];
    for (command, is_missing, is_forbidden) in [
        (
            &["suspend", "p"][..],
            missing.to_owned(),
            may_not("patch resourceclaim c in namespace a"),
        ),
        (
            &["resume", "pod/p"],
            missing.to_owned(),
            may_not("patch resourceclaim c in namespace a"),
        ),
        (
            &resize,
            missing.to_owned(),
            may_not("create resourceclaims in namespace a"),
        ),
        (
            &cost,
            "error: cannot list configmaps in all namespaces: the server says 404\n".to_owned(),
            may_not("query Prometheus at monitoring/prometheus:9090"),
        ),
    ] {
        assert_eq!(run(without_objects, command).stderr, is_missing);
        assert_eq!(run(viewer, command).stderr, is_forbidden);
    }
    let with_prices = [&cost[..], &["--prices", "/dev/null"]].concat();
    assert_eq!(
        run(without_objects, &with_prices).stderr,
        "error: cannot query Prometheus at monitoring/prometheus:9090: the server says 404; name it as NAMESPACE/SERVICE:PORT: `kubectl \
         get services -A` lists the services\n"
    );
}

/// The user reads all, and the namespace has no claim with a device.
fn with_free_gpu(_: &str, path: &str) -> (u16, Value) {
    match path {
        path if path.contains("/gpucontrollerleaders/") => failure(404),
        "/apis/resource.k8s.io/v1/resourceslices" => list(&json!([{
            "metadata": {"name": "s"},
            "spec": {
                "driver": "gpu.drava.dev", "nodeName": "n1",
                "pool": {"name": "n1/gpus", "generation": 1, "resourceSliceCount": 1},
                "devices": [{
                    "name": "gpu-0",
                    "attributes": {"type": {"string": "gpu"}, "uuid": {"string": "GPU-0"}, "parentUUID": {"string": "GPU-0"}},
                    "capacity": {"memory": {"value": "80Gi"}, "cores": {"value": "100"}},
                }],
            },
        }])),
        _ => list(&json!([])),
    }
}

#[test]
fn names_namespace_without_claims() {
    let printed = run(with_free_gpu, &["top"]);
    assert_eq!(
        printed.stdout, "no claim of namespace a is allocated\n",
        "{printed:?}"
    );
    let printed = run(without_slices, &["top"]);
    assert!(
        printed.stdout.starts_with("no node publishes devices"),
        "{printed:?}"
    );
}

fn without_slices(_: &str, path: &str) -> (u16, Value) {
    match path {
        path if path.contains("/gpucontrollerleaders/") => failure(404),
        _ => list(&json!([])),
    }
}
