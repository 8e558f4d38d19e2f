//! `kubectl drava suspend` and `kubectl drava resume`: the wish of a user that the share of a running pod is suspended.
//!
//! The wish is an annotation of the claim. The controller writes the intent, and the node driver answers in the condition
//! `Suspended` ([`drava_api::suspension`]); the commands wait for this answer.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use drava_allocator::pod::claims as claims_of;
use drava_allocator::usage::AllocatedDevice;
use drava_api::condition::ConditionReason;
use drava_api::event::EventReason;
use drava_api::{names, suspension};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use serde::Serialize;
use serde_json::json;
use tokio::time::Instant;

/// Time between two reads of the claim.
const POLL: Duration = Duration::from_millis(250);

/// Arguments of the commands.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The pod: `NAME` or `pod/NAME`.
    #[arg(value_name = "POD")]
    pod: String,

    /// Longest wait until the share is suspended or its programs go on, in seconds; 0 does not wait.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
}

/// Outcome of a command.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    pod: String,
    claim: String,
    state: State,
    /// What the node driver says.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

/// State of the share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
enum State {
    /// The command has not waited for the answer.
    Requested,
    Suspended,
    Running,
}

impl Report {
    /// Formats the outcome as text.
    pub(crate) fn text(&self) -> String {
        let Self { pod, claim, .. } = self;
        let state = match self.state {
            State::Requested => "the request is written",
            State::Suspended => "suspended",
            State::Running => "running",
        };
        let message = self.message.iter().map(|message| format!(": {message}"));
        let message: String = message.collect();
        format!("pod {pod}: share of claim {claim}: {state}{message}\n")
    }
}

/// Answer to the wish, as the claim has it.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// What was wished is so.
    Done,
    /// It is on its way, or waits.
    Waiting,
    Refused(String),
}

/// Returns the answer to the wish.
fn answer(claim: &ResourceClaim, is_suspended_wished: bool) -> Answer {
    if is_suspended_wished {
        return match (suspension::is_suspended(claim), suspension::refusal(claim)) {
            (true, _) => Answer::Done,
            (false, Some(refusal)) if is_final(claim, refusal) => {
                Answer::Refused(refusal.message.clone())
            }
            (false, _) => Answer::Waiting,
        };
    }
    let mut answers = suspension::answers(claim);
    let is_over = answers.all(|answer| answer.status != "True" && !suspension::is_resuming(answer));
    match is_over && !suspension::is_intended(&claim.metadata) {
        true => Answer::Done,
        false => Answer::Waiting,
    }
}

/// Returns whether the node driver does not try again: it does after a failure. An answer without the intent is one to an
/// earlier wish.
fn is_final(claim: &ResourceClaim, refusal: &Condition) -> bool {
    let is_refused = refusal.reason == ConditionReason::SuspendRefused.as_str();
    is_refused && suspension::is_intended(&claim.metadata)
}

/// Returns the last failure of a suspension that the node driver tries again.
fn last_failure(claim: &ResourceClaim) -> Option<String> {
    let failure = suspension::refusal(claim)?;
    let is_tried_again = suspension::is_intended(&claim.metadata) && !is_final(claim, failure);
    is_tried_again.then(|| format!("{}; it is tried again", failure.message))
}

/// Writes the wish of a user, and waits for the answer.
pub(crate) async fn run(
    client: &Client,
    namespace: &str,
    options: &Options,
    is_suspended_wished: bool,
) -> anyhow::Result<Report> {
    let name = options.pod.strip_prefix("pod/").unwrap_or(&options.pod);
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    let pod = pods
        .get(name)
        .await
        .with_context(|| format!("cannot get pod {namespace}/{name}"))?;
    let mut own = Vec::new();
    for (_, claim) in claims_of(&pod) {
        let Some(claim) = claim else { continue };
        let claim = claims.get(claim).await;
        let claim =
            claim.with_context(|| format!("cannot get a claim of pod {namespace}/{name}"))?;
        if !AllocatedDevice::of_claim(&claim).is_empty() {
            own.push(claim);
        }
    }
    let claim = match &own[..] {
        [claim] => claim,
        [] => bail!(
            "pod {namespace}/{name} has no claim with a device of {}",
            names::DRIVER
        ),
        _ => bail!(
            "pod {namespace}/{name} has several claims with devices of {}: only pods with one share can be suspended",
            names::DRIVER
        ),
    };
    ensure!(
        !is_suspended_wished || pod.metadata.deletion_timestamp.is_none(),
        "pod {namespace}/{name} is being deleted"
    );
    let claim_name = claim.name_any();
    let report = |state, claim: &ResourceClaim| Report {
        pod: format!("{namespace}/{name}"),
        claim: claim_name.clone(),
        state,
        message: suspension::answers(claim)
            .next()
            .map(|answer| answer.message.clone()),
    };
    let value = is_suspended_wished.then_some(names::SUSPEND);
    let patch = json!({"metadata": {
        "uid": claim.metadata.uid,
        "annotations": {names::SUSPEND_WISH_ANNOTATION: value},
    }});
    let written = claims
        .patch(&claim_name, &PatchParams::default(), &Patch::Merge(&patch))
        .await;
    let mut found = written.with_context(|| format!("cannot patch claim {claim_name}"))?;
    if options.timeout == 0 {
        return Ok(report(State::Requested, &found));
    }
    let deadline = Instant::now() + Duration::from_secs(options.timeout);
    loop {
        match answer(&found, is_suspended_wished) {
            Answer::Done => {
                let state = if is_suspended_wished {
                    State::Suspended
                } else {
                    State::Running
                };
                return Ok(report(state, &found));
            }
            Answer::Refused(why) => bail!(
                "the share cannot be suspended: {why}. Take the request back with `kubectl drava resume {name} -n {namespace}`"
            ),
            Answer::Waiting if Instant::now() >= deadline => {
                let why = match last_failure(&found).filter(|_| is_suspended_wished) {
                    Some(failure) => failure,
                    None => last_event(client, &pod).await,
                };
                let what = if is_suspended_wished {
                    "suspended"
                } else {
                    "resumed"
                };
                bail!("the share was not {what} in time: {why}. It is {what} as soon as it can be");
            }
            Answer::Waiting => tokio::time::sleep(POLL).await,
        }
        let read = claims.get(&claim_name).await;
        found = read.with_context(|| format!("cannot get claim {claim_name}"))?;
    }
}

/// Returns what the controller has said last of the suspension of the pod's share.
async fn last_event(client: &Client, pod: &Pod) -> String {
    let events: Api<Event> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let of_pod = format!("involvedObject.uid={}", pod.uid().unwrap_or_default());
    let found = match events.list(&ListParams::default().fields(&of_pod)).await {
        Ok(found) => found.items,
        Err(error) => return format!("its events cannot be read ({error})"),
    };
    let reasons = [
        EventReason::ShareSuspended,
        EventReason::ShareResumed,
        EventReason::SuspensionRefused,
    ];
    let own = found.into_iter().filter(|event| {
        let reason = event.reason.as_deref();
        reasons.iter().any(|own| reason == Some(own.as_str()))
    });
    let own: Vec<Event> = own.collect();
    let newest = crate::resize::newest_event(&own);
    newest.and_then(|event| event.message.clone()).unwrap_or_else(|| {
        "the controller has not answered; shares are suspended with scheduling.mode=managed only".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(labels: &serde_json::Value, status: &str, reason: &str) -> ResourceClaim {
        let device = json!({"driver": names::DRIVER, "pool": "n1/gpus", "device": "gpu-0-vgpu", "shareID": "s"});
        let mut reported = device.clone();
        reported["conditions"] = json!([{
            "type": "Suspended", "status": status, "reason": reason, "message": "why",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }]);
        let mut result = device;
        result["request"] = json!("gpu");
        serde_json::from_value(json!({
            "metadata": {"name": "a", "namespace": "default", "uid": "u", "labels": labels},
            "spec": {},
            "status": {"allocation": {"devices": {"results": [result]}}, "devices": [reported]},
        }))
        .unwrap()
    }

    #[test]
    fn waits_for_answer_to_wish() {
        let (intended, none) = (json!({names::SUSPEND_LABEL: names::SUSPEND}), json!({}));
        let refused = || Answer::Refused("why".to_owned());
        let cases = [
            (
                claim(&none, "False", "Resumed"),
                Answer::Waiting,
                Answer::Done,
            ),
            (
                claim(&intended, "False", "Resumed"),
                Answer::Waiting,
                Answer::Waiting,
            ),
            (
                claim(&intended, "True", "Suspended"),
                Answer::Done,
                Answer::Waiting,
            ),
            (
                claim(&none, "True", "Suspended"),
                Answer::Waiting,
                Answer::Waiting,
            ),
            (
                claim(&none, "False", "Resuming"),
                Answer::Waiting,
                Answer::Waiting,
            ),
            (
                claim(&intended, "False", "SuspendRefused"),
                refused(),
                Answer::Waiting,
            ),
            (
                claim(&none, "False", "SuspendRefused"),
                Answer::Waiting,
                Answer::Done,
            ),
            // The node driver tries again.
            (
                claim(&intended, "False", "SuspendFailed"),
                Answer::Waiting,
                Answer::Waiting,
            ),
        ];
        for (claim, suspended, resumed) in cases {
            assert_eq!(answer(&claim, true), suspended, "{claim:?}");
            assert_eq!(answer(&claim, false), resumed, "{claim:?}");
        }
    }

    #[test]
    fn names_last_failure_that_is_tried_again() {
        let (intended, none) = (json!({names::SUSPEND_LABEL: names::SUSPEND}), json!({}));
        let failed = claim(&intended, "False", "SuspendFailed");
        assert_eq!(
            last_failure(&failed).as_deref(),
            Some("why; it is tried again")
        );
        for other in [
            claim(&intended, "False", "SuspendRefused"),
            claim(&none, "False", "SuspendFailed"),
        ] {
            assert_eq!(last_failure(&other), None, "{other:?}");
        }
    }
}
