//! Answers of `suspend` and `resume`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Printed, allocated_claim, claim, failure, list, pod, run};

/// The pod with a share, and its claim.
pub(super) struct Share {
    pod: Value,
    pub(super) claim: Value,
    /// The claim after the request.
    requested: Value,
    /// Events before the request.
    before: Vec<Value>,
    /// Events after it.
    after: Vec<Value>,
    is_requested: Arc<AtomicBool>,
}

impl Share {
    /// A share that runs, and to which nothing happens.
    pub(super) fn idle() -> Self {
        let mut pod = pod();
        pod["spec"]["nodeName"] = json!("n1");
        let mut claim = allocated_claim();
        claim["metadata"]["name"] = json!("c");
        claim["status"]["reservedFor"] = json!([{"resource": "pods", "name": "p", "uid": "p"}]);
        Self {
            pod,
            requested: claim.clone(),
            claim,
            before: Vec::new(),
            after: Vec::new(),
            is_requested: Arc::default(),
        }
    }

    fn run(self, arguments: &[&str]) -> Printed {
        run(move |method, path| self.answer(method, path), arguments)
    }

    pub(super) fn answer(&self, method: &str, path: &str) -> (u16, Value) {
        if method == "PATCH" {
            self.is_requested.store(true, Ordering::SeqCst);
        }
        let is_requested = self.is_requested.load(Ordering::SeqCst);
        match path.split_once('?').unwrap_or((path, "")) {
            ("/api/v1/namespaces/a/pods/p", _) => (200, self.pod.clone()),
            ("/apis/resource.k8s.io/v1/namespaces/a/resourceclaims/c", _) if is_requested => {
                (200, self.requested.clone())
            }
            ("/apis/resource.k8s.io/v1/namespaces/a/resourceclaims/c", _) => {
                (200, self.claim.clone())
            }
            ("/api/v1/namespaces/a/events", query) => {
                let after = self.after.iter().filter(|_| is_requested);
                let events = self.before.iter().chain(after);
                let is_of_object = |event: &&Value| {
                    let uid = event["involvedObject"]["uid"].as_str().unwrap_or_default();
                    let selector = format!("involvedObject.uid={uid}");
                    let mut parameters = form_urlencoded::parse(query.as_bytes());
                    parameters.any(|(_, value)| value == selector)
                };
                list(&events.filter(is_of_object).cloned().collect())
            }
            _ => failure(404),
        }
    }
}

/// An event of an object, all of the same second.
fn suspension_event(object: &str, name: &str, reason: &str, message: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "a", "uid": name, "resourceVersion": "1"},
        "involvedObject": {"uid": object}, "reason": reason, "message": message, "lastTimestamp": "2026-01-01T00:00:00Z",
    })
}

/// The controller answers at the pod, or at the claim if no pod alone has it. What it has said before is of an earlier request.
#[test]
fn ends_wait_when_controller_refuses_suspension() {
    for object in ["p", "c"] {
        let mut share = Share::idle();
        share.before = vec![suspension_event(object, "old", "SuspensionRefused", "no")];
        share.after = vec![suspension_event(
            object,
            "new",
            "SuspensionRefused",
            "its pod has a probe",
        )];
        let started = Instant::now();
        let printed = share.run(&["suspend", "p", "--timeout", "60"]);
        assert_eq!(
            printed.stderr,
            "error: its pod has a probe. The request stays on claim c; take it back with `kubectl drava resume p -n a`\n"
        );
        assert_eq!(printed.code, Some(1), "{printed:?}");
        assert!(started.elapsed() < Duration::from_secs(30), "at once");
    }
}

/// The status of devices whose share is suspended.
fn suspended(message: &str) -> Value {
    json!([{
        "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu", "shareID": "s",
        "conditions": [{
            "type": "Suspended", "status": "True", "reason": "Suspended", "message": message,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }],
    }])
}

/// A second request changes nothing, and says so without a wait.
#[test]
fn second_request_says_that_it_is_so() {
    let printed = Share::idle().run(&["resume", "p"]);
    assert_eq!(
        printed.stdout, "pod a/p: share of claim c: already running\n",
        "{printed:?}"
    );
    let mut share = Share::idle();
    share.claim["metadata"]["labels"] = json!({"gpu.drava.dev/suspend": "true"});
    share.claim["metadata"]["annotations"] = json!({"gpu.drava.dev/suspend-requested": "true"});
    share.claim["status"]["devices"] = suspended("others use its memory");
    let is_requested = Arc::clone(&share.is_requested);
    let printed = share.run(&["suspend", "p"]);
    assert_eq!(
        printed.stdout, "pod a/p: share of claim c: already suspended: others use its memory\n",
        "{printed:?}"
    );
    assert!(!is_requested.load(Ordering::SeqCst), "nothing is written");
}

/// What the message says at a timeout is so now, or has a date.
#[test]
fn names_what_suspension_waits_for() {
    let late = |why: &str| {
        format!(
            "error: the share was not suspended in time: {why}. The request stays on claim c, and the share is suspended as soon as it \
             can be; take the request back with `kubectl drava resume p -n a`\n"
        )
    };
    let suspend = ["suspend", "p", "--timeout", "1"];
    let resumed = || suspension_event("p", "old", "ShareResumed", "is being resumed");

    let mut silent = Share::idle();
    silent.before = vec![resumed()];
    assert_eq!(
        silent.run(&suspend).stderr,
        late(
            "the controller has published no answer since the request; its last event, of 2026-01-01T00:00:00Z, was: is being resumed"
        )
    );

    let never = Share::idle();
    assert_eq!(
        never.run(&suspend).stderr,
        late(
            "the controller has not answered; shares are suspended with scheduling.mode=managed only"
        )
    );

    let mut intended = Share::idle();
    intended.before = vec![resumed()];
    intended.requested["metadata"]["labels"] = json!({"gpu.drava.dev/suspend": "true"});
    assert_eq!(
        intended.run(&suspend).stderr,
        late("the node driver of node n1 has not answered")
    );

    let mut blocked = Share::idle();
    blocked.claim["metadata"]["labels"] = json!({"gpu.drava.dev/suspend": "true"});
    blocked.requested = blocked.claim.clone();
    blocked.after = vec![suspension_event(
        "p",
        "new",
        "ShareSuspended",
        "is resumed when there is room",
    )];
    assert_eq!(
        blocked.run(&["resume", "p", "--timeout", "1"]).stderr,
        "error: the share was not resumed in time: is resumed when there is room. It is resumed as soon as it can be\n"
    );
}

/// The answer that the claim has is one to an earlier request.
#[test]
fn prints_no_answer_without_a_wait() {
    let mut share = Share::idle();
    share.claim["metadata"]["annotations"] = json!({"gpu.drava.dev/suspend-requested": "true"});
    share.requested["status"]["devices"] = suspended("4 MiB went to host memory");
    let printed = share.run(&["resume", "p", "--timeout", "0"]);
    assert_eq!(
        printed.stdout, "pod a/p: share of claim c: the request is written\n",
        "{printed:?}"
    );
}

#[test]
fn refuses_pods_without_a_share_of_their_own() {
    let shared = {
        let mut share = Share::idle();
        share.claim["status"]["reservedFor"] = json!([
            {"resource": "pods", "name": "p", "uid": "p"}, {"resource": "pods", "name": "q", "uid": "q"},
        ]);
        share
    };
    let finished = {
        let mut share = Share::idle();
        share.pod["status"]["phase"] = json!("Succeeded");
        share
    };
    let pending = {
        let mut share = Share::idle();
        share.pod = pod();
        share.claim = claim();
        share
    };
    for (share, message) in [
        (
            shared,
            "claim c is reserved for several pods (p, q): only the share of one pod alone can be suspended",
        ),
        (
            finished,
            "pod p has finished (Succeeded): only running pods have shares",
        ),
        (
            pending,
            "pod p is pending and has no share so far; `kubectl drava explain pod p -n a` shows why",
        ),
    ] {
        let is_requested = Arc::clone(&share.is_requested);
        let printed = share.run(&["suspend", "p", "--timeout", "1"]);
        assert_eq!(printed.stderr, format!("error: {message}\n"));
        assert!(!is_requested.load(Ordering::SeqCst), "nothing is written");
    }
}

/// A share that the controller has suspended because it was idle.
fn suspended_for_idleness() -> Share {
    let mut share = Share::idle();
    share.claim["metadata"]["labels"] = json!({"gpu.drava.dev/suspend": "true"});
    share.claim["metadata"]["annotations"] = json!({"gpu.drava.dev/suspended-for": "idle"});
    share
}

#[test]
fn resume_takes_over_a_share_that_was_idle() {
    let share = suspended_for_idleness();
    let patches = Arc::new(AtomicUsize::new(0));
    let written = Arc::clone(&patches);
    let printed = run(
        move |method, path| {
            let is_claim = path.contains("/resourceclaims/c");
            if method == "PATCH" {
                written.fetch_add(1, Ordering::SeqCst);
            }
            match written.load(Ordering::SeqCst) {
                0 => share.answer("GET", path),
                // The controller hands it over after the request is read once more.
                1 if method == "PATCH" => (200, share.claim.clone()),
                1 if is_claim => {
                    let mut claim = share.claim.clone();
                    claim["metadata"]["annotations"] =
                        json!({"gpu.drava.dev/suspend-requested": "true"});
                    (200, claim)
                }
                _ if is_claim => (200, share.requested.clone()),
                _ => share.answer("GET", path),
            }
        },
        &["resume", "p", "--timeout", "30"],
    );
    assert_eq!(
        printed.stdout, "pod a/p: share of claim c: running\n",
        "{printed:?}"
    );
    assert_eq!(patches.load(Ordering::SeqCst), 2);
}

#[test]
fn resume_says_how_a_share_that_was_idle_goes_on_otherwise() {
    let mut share = suspended_for_idleness();
    share.requested = share.claim.clone();
    let printed = share.run(&["resume", "p", "--timeout", "0"]);
    assert_eq!(
        printed.stderr,
        "error: the share of claim c is suspended because it was idle, and the controller has not handed it over in time (--timeout); \
         its programs go on when one of them calls CUDA\n"
    );
}
