//! `resize` with what the API server answers to it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::json;

use crate::suspension::Share;
use crate::{list, run};

/// Nothing is created that waits for ever, and a dry run promises nothing.
#[test]
fn resize_refuses_what_can_never_be() {
    let answer = |method: &str, path: &str| match (method, path.split('?').next()) {
        ("GET", Some("/apis/resource.k8s.io/v1/namespaces/a/resourceclaims")) => {
            list(&json!([Share::idle().claim]))
        }
        ("GET", Some("/apis/resource.k8s.io/v1/resourceslices")) => {
            let capacity = json!({"memory": {"value": "80Gi"}, "cores": {"value": "100"}});
            list(&json!([{"metadata": {"name": "s"}, "spec": {
                "driver": "gpu.drava.dev", "nodeName": "n1",
                "pool": {"name": "n1/gpus", "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "gpu-0-vgpu", "capacity": capacity}],
            }}]))
        }
        ("GET", _) => Share::idle().answer(method, path),
        _ => panic!("{method} {path}"),
    };
    for dry_run in [&["--dry-run"][..], &[]] {
        let command = [&["resize", "p", "--memory", "900Gi"], dry_run].concat();
        let printed = run(answer, &command);
        assert!(
            printed
                .stderr
                .contains("the share can never have 921600 MiB"),
            "{printed:?}"
        );
        assert_eq!(printed.code, Some(1));
    }
    let printed = run(answer, &["resize", "p", "--memory", "9Gi", "--dry-run"]);
    assert!(
        printed
            .stdout
            .contains("\nif gpu-0-vgpu of pool n1/gpus has that free then"),
        "{printed:?}"
    );
    let printed = run(answer, &["resize", "p", "--memory", "0"]);
    assert_eq!(
        printed.stderr,
        "error: a share without memory does not exist: --memory 8192Mi gives back all that it has gained\n"
    );
}

/// Another resize creates its claim between the plan and the creation.
#[test]
fn resize_goes_on_from_one_that_came_first() {
    let (created, answered) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let seen = Arc::clone(&answered);
    let printed = run(
        move |method, path| {
            let base = Share::idle().claim;
            let is_list = path == "/apis/resource.k8s.io/v1/namespaces/a/resourceclaims";
            match method {
                "POST" => {
                    created.fetch_add(1, Ordering::SeqCst);
                    let conflict = json!({
                        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "AlreadyExists",
                        "message": "it exists", "code": 409,
                    });
                    (409, conflict)
                }
                "GET" if is_list && created.load(Ordering::SeqCst) == 0 => list(&json!([base])),
                "GET" if is_list => {
                    seen.fetch_add(1, Ordering::SeqCst);
                    let mut companion = base.clone();
                    companion["metadata"]["name"] = json!("c-more-1");
                    companion["metadata"]["uid"] = json!("more");
                    companion["metadata"]["labels"] =
                        json!({"gpu.drava.dev/companion-of": base["metadata"]["uid"]});
                    companion["metadata"]["ownerReferences"] = json!([
                        {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "p", "controller": true}
                    ]);
                    companion["status"] = json!({});
                    list(&json!([base, companion]))
                }
                _ => Share::idle().answer(method, path),
            }
        },
        &["resize", "p", "--memory", "9Gi", "--timeout", "30"],
    );
    assert!(
        printed.stderr.contains("c-more-1") && !printed.stderr.contains("409"),
        "{printed:?}"
    );
    assert_eq!(answered.load(Ordering::SeqCst), 1);
}

/// Left alone, the claim that is to replace a larger one would be added to it when there is room.
#[test]
fn resize_that_cannot_replace_leaves_no_claim() {
    let deleted = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&deleted);
    let printed = run(
        move |method, path| {
            let base = Share::idle().claim;
            let of_companion = |name: &str, memory: &str| {
                let mut companion = base.clone();
                companion["metadata"] = json!({
                    "name": name, "namespace": "a", "uid": name,
                    "labels": {"gpu.drava.dev/companion-of": base["metadata"]["uid"]},
                    "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "p", "controller": true}],
                });
                let result = &mut companion["status"]["allocation"]["devices"]["results"][0];
                result["consumedCapacity"] = json!({"memory": memory, "cores": "0", "slots": "1"});
                companion["status"]["devices"] = json!([{
                    "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu", "shareID": "s",
                    "conditions": [{"type": "Granted", "status": "True", "reason": "Granted", "message": "",
                        "lastTransitionTime": "2026-11-28T00:00:00Z"}],
                }]);
                companion
            };
            let mut waits = of_companion("c-more-2", "4Gi");
            waits["status"] = json!({});
            match (method, path.rsplit('/').next().unwrap_or_default()) {
                ("DELETE", name) => {
                    let mut deleted = seen.lock().expect("a list");
                    deleted.push(name.to_owned());
                    (200, waits)
                }
                ("POST", _) => (201, waits),
                ("GET", "c-more-2") => (200, waits),
                ("GET", "resourceclaims") => list(&json!([base, of_companion("c-more-1", "20Gi")])),
                _ => Share::idle().answer(method, path),
            }
        },
        &["resize", "p", "--memory", "12Gi", "--timeout", "1"],
    );
    assert!(
        printed.stderr.contains("did not change in time") && printed.stderr.contains("c-more-2"),
        "{printed:?}"
    );
    assert_eq!(printed.code, Some(1));
    let deleted = deleted.lock().expect("a list");
    assert_eq!(*deleted, ["c-more-2"], "the share keeps what it has");
}
