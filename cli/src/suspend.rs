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
use drava_api::{names, suspension};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use serde::Serialize;
use serde_json::json;
use tokio::time::Instant;

use self::events::{Events, Published};
use crate::{pod, tenant};

mod events;

/// Time between two reads of the claim.
const POLL: Duration = Duration::from_millis(250);

/// Time between two reads of the events of the pod and the claim.
const POLL_EVENTS: Duration = Duration::from_secs(1);

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
    /// Whether the share was in this state before, so that nothing is written.
    is_unchanged: bool,
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
        let already = if self.is_unchanged { "already " } else { "" };
        let message = self.message.iter().map(|message| format!(": {message}"));
        let message: String = message.collect();
        format!("pod {pod}: share of claim {claim}: {already}{state}{message}\n")
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

/// Returns whether nothing is to do: the same was wished before, and it is so.
fn is_unchanged(claim: &ResourceClaim, is_suspended_wished: bool) -> bool {
    let annotations = claim.metadata.annotations.as_ref();
    let wish = annotations.and_then(|all| all.get(names::SUSPEND_WISH_ANNOTATION));
    let is_wished = wish.is_some() == is_suspended_wished;
    is_wished && answer(claim, is_suspended_wished) == Answer::Done
}

/// Returns what the node driver says of the share.
fn said(claim: &ResourceClaim) -> Option<String> {
    let said = suspension::answers(claim).next();
    said.map(|said| said.message.clone())
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

/// Refuses to suspend a share that is not of one running pod alone.
fn check_own(pod: &Pod, claim: &ResourceClaim) -> anyhow::Result<()> {
    ensure!(
        pod.metadata.deletion_timestamp.is_none(),
        "pod {} is being deleted",
        pod.name_any()
    );
    let status = claim.status.iter();
    let consumers = status.flat_map(|status| status.reserved_for.iter().flatten());
    let names: Vec<&str> = consumers.map(|consumer| consumer.name.as_str()).collect();
    ensure!(
        names.len() < 2,
        "claim {} is reserved for several pods ({}): only the share of one pod alone can be suspended",
        claim.name_any(),
        names.join(", ")
    );
    Ok(())
}

/// Returns the only claim of a pod that has a device.
async fn claim_of(client: &Client, namespace: &str, pod: &Pod) -> anyhow::Result<ResourceClaim> {
    pod::check_unfinished(pod)?;
    let name = pod.name_any();
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    let action = format!("get resourceclaims in namespace {namespace}");
    let mut own = Vec::new();
    for (_, claim) in claims_of(pod) {
        let Some(claim) = claim else { continue };
        let claim = claims.get_opt(claim).await;
        let claim = claim.map_err(|error| tenant::refused(error, &action))?;
        own.extend(claim.filter(|claim| !AllocatedDevice::of_claim(claim).is_empty()));
    }
    match (own.pop(), &own[..]) {
        (Some(claim), []) => Ok(claim),
        (None, _) if !pod::is_bound(pod) && claims_of(pod).next().is_some() => bail!(
            "pod {name} is pending and has no share so far; `kubectl drava explain pod {name} -n {namespace}` shows why"
        ),
        (None, _) => bail!(
            "pod {namespace}/{name} has no claim with a device of {}",
            names::DRIVER
        ),
        (Some(_), _) => bail!(
            "pod {namespace}/{name} has several claims with devices of {}: only pods with one share can be suspended",
            names::DRIVER
        ),
    }
}

/// Returns why the wish is not fulfilled so far.
fn delay(claim: &ResourceClaim, is_suspended_wished: bool, published: &Published) -> String {
    if suspension::is_intended(&claim.metadata) != is_suspended_wished {
        return published.text();
    }
    // The controller has answered.
    if let Some(failure) = last_failure(claim) {
        return failure;
    }
    let devices = AllocatedDevice::of_claim(claim);
    let pool = devices.first().map(|device| device.pool.as_str());
    let node = pool.and_then(names::node_of_pool).unwrap_or("?");
    match suspension::answers(claim).any(suspension::is_resuming) {
        true => format!("the node driver of node {node} has not ended its resumption"),
        false => format!("the node driver of node {node} has not answered"),
    }
}

/// Writes the wish of a user, and waits for the answer.
pub(crate) async fn run(
    client: &Client,
    namespace: &str,
    options: &Options,
    is_suspended_wished: bool,
) -> anyhow::Result<Report> {
    let name = pod::name(&options.pod)?;
    let pod: Pod = tenant::get(client, namespace, name).await?;
    let claim = claim_of(client, namespace, &pod).await?;
    if is_suspended_wished {
        check_own(&pod, &claim)?;
    }
    let (claim_name, is_unchanged) = (claim.name_any(), is_unchanged(&claim, is_suspended_wished));
    let report = |state, message| Report {
        pod: format!("{namespace}/{name}"),
        claim: claim_name.clone(),
        state,
        is_unchanged,
        message,
    };
    let wished = match is_suspended_wished {
        true => State::Suspended,
        false => State::Running,
    };
    if is_unchanged {
        return Ok(report(wished, said(&claim)));
    }
    let deadline = Instant::now() + Duration::from_secs(options.timeout);
    let events = match options.timeout {
        0 => None,
        _ => Some(Events::before_request(client, &pod, &claim).await),
    };
    if !is_suspended_wished && suspension::is_for_idleness(&claim.metadata) {
        take_over(client, namespace, &claim, deadline).await?;
    }
    let written = write_wish(client, namespace, &claim, is_suspended_wished).await?;
    let Some(events) = events else {
        return Ok(report(State::Requested, None));
    };
    let wait = Wait {
        client,
        namespace,
        is_suspended_wished,
        deadline,
        events,
    };
    match wait.run(written).await? {
        Outcome::Done(message) => Ok(report(wished, message)),
        Outcome::Refused(why) => bail!(
            "{why}. The request stays on claim {claim_name}; take it back with `kubectl drava resume {name} -n {namespace}`"
        ),
        Outcome::Late(why) if is_suspended_wished => bail!(
            "the share was not suspended in time: {why}. The request stays on claim {claim_name}, and the share is suspended as soon \
             as it can be; take the request back with `kubectl drava resume {name} -n {namespace}`"
        ),
        Outcome::Late(why) => {
            bail!("the share was not resumed in time: {why}. It is resumed as soon as it can be")
        }
    }
}

/// Makes the suspension of an idle share that of the user, who can then end it: until then only a call of CUDA does.
async fn take_over(
    client: &Client,
    namespace: &str,
    claim: &ResourceClaim,
    deadline: Instant,
) -> anyhow::Result<()> {
    let name = claim.name_any();
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    let action = format!("get resourceclaim {name} in namespace {namespace}");
    let mut claim = write_wish(client, namespace, claim, true).await?;
    while suspension::is_for_idleness(&claim.metadata) {
        if Instant::now() >= deadline {
            write_wish(client, namespace, &claim, false).await?;
            bail!(
                "the share of claim {name} is suspended because it was idle, and the controller has not handed it over in time \
                 (--timeout); its programs go on when one of them calls CUDA"
            );
        }
        tokio::time::sleep(POLL).await;
        let read = claims.get(&name).await;
        claim = read.map_err(|error| tenant::refused(error, &action))?;
    }
    Ok(())
}

/// Writes the wish in the claim.
async fn write_wish(
    client: &Client,
    namespace: &str,
    claim: &ResourceClaim,
    is_suspended_wished: bool,
) -> anyhow::Result<ResourceClaim> {
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    let name = claim.name_any();
    let value = is_suspended_wished.then_some(names::SUSPEND);
    let patch = json!({"metadata": {
        "uid": claim.metadata.uid,
        "annotations": {names::SUSPEND_WISH_ANNOTATION: value},
    }});
    let patch = Patch::Merge(&patch);
    let written = claims.patch(&name, &PatchParams::default(), &patch).await;
    let action = format!("patch resourceclaim {name} in namespace {namespace}");
    written.map_err(|error| tenant::refused(error, &action))
}

/// How the wait for an answer ended.
enum Outcome {
    /// It is done; what the node driver says.
    Done(Option<String>),
    /// The controller or the node driver says that it cannot be done.
    Refused(String),
    /// There was no answer in time; why.
    Late(String),
}

/// The wait for an answer.
struct Wait<'a> {
    client: &'a Client,
    namespace: &'a str,
    is_suspended_wished: bool,
    deadline: Instant,
    events: Events,
}

impl Wait<'_> {
    /// Waits for the answer, from the claim as it was written.
    async fn run(&self, mut claim: ResourceClaim) -> anyhow::Result<Outcome> {
        let is_wished = self.is_suspended_wished;
        let name = claim.name_any();
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), self.namespace);
        let action = format!("get resourceclaim {name} in namespace {}", self.namespace);
        let mut next_events = Instant::now() + POLL_EVENTS;
        loop {
            match answer(&claim, is_wished) {
                Answer::Done => {
                    return Ok(Outcome::Done(said(&claim)));
                }
                Answer::Refused(why) => {
                    return Ok(Outcome::Refused(format!(
                        "the share cannot be suspended: {why}"
                    )));
                }
                Answer::Waiting => {}
            }
            let now = Instant::now();
            let is_late = now >= self.deadline;
            if is_late || now >= next_events {
                next_events = now + POLL_EVENTS;
                let published = self.events.last().await;
                // With the intent the controller has accepted the wish.
                let is_open = is_wished && !suspension::is_intended(&claim.metadata);
                if let Some(why) = published.refusal().filter(|_| is_open) {
                    return Ok(Outcome::Refused(why.to_owned()));
                }
                if is_late {
                    return Ok(Outcome::Late(delay(&claim, is_wished, &published)));
                }
            }
            tokio::time::sleep(POLL).await;
            let found = claims.get_opt(&name).await;
            let found = found.map_err(|error| tenant::refused(error, &action))?;
            claim = found.with_context(|| format!("claim {name} was deleted"))?;
        }
    }
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
    fn says_that_nothing_is_to_do() {
        let (intended, none) = (json!({names::SUSPEND_LABEL: names::SUSPEND}), json!({}));
        let wish = |claim: ResourceClaim| {
            let mut claim = claim;
            let annotations = claim.metadata.annotations.get_or_insert_default();
            annotations.insert(
                names::SUSPEND_WISH_ANNOTATION.to_owned(),
                names::SUSPEND.to_owned(),
            );
            claim
        };
        // Suspended because it is idle: the wish of the user is new.
        let idle = claim(&intended, "True", "Suspended");
        let suspended = wish(idle.clone());
        let running = claim(&none, "False", "Resumed");
        let refused = wish(claim(&none, "False", "SuspendRefused"));
        for (claim, is_suspended, is_running) in [
            (&idle, false, false),
            (&suspended, true, false),
            (&running, false, true),
            (&refused, false, false),
        ] {
            assert_eq!(is_unchanged(claim, true), is_suspended, "{claim:?}");
            assert_eq!(is_unchanged(claim, false), is_running, "{claim:?}");
        }
        let report = Report {
            pod: "a/p".to_owned(),
            claim: "c".to_owned(),
            state: State::Suspended,
            is_unchanged: true,
            message: said(&suspended),
        };
        assert_eq!(
            report.text(),
            "pod a/p: share of claim c: already suspended: why\n"
        );
    }

    #[test]
    fn names_what_an_answer_waits_for() {
        let (intended, none) = (json!({names::SUSPEND_LABEL: names::SUSPEND}), json!({}));
        let controller = "the controller has not answered; shares are suspended with scheduling.mode=managed only";
        let driver = "the node driver of node n1 has not answered";
        let cases = [
            (
                &intended,
                "False",
                "SuspendFailed",
                true,
                "why; it is tried again",
            ),
            (&intended, "False", "Resumed", true, driver),
            (&none, "False", "SuspendFailed", true, controller),
            (&none, "True", "Suspended", false, driver),
            (
                &none,
                "False",
                "Resuming",
                false,
                "the node driver of node n1 has not ended its resumption",
            ),
            (&intended, "True", "Suspended", false, controller),
        ];
        for (labels, status, reason, is_suspended_wished, expected) in cases {
            let claim = claim(labels, status, reason);
            let delay = delay(&claim, is_suspended_wished, &Published::Nothing);
            assert_eq!(delay, expected, "{claim:?}");
        }
    }
}
