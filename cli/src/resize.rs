//! `kubectl drava resize`: grows and shrinks the share of a running pod by companion claims.
//!
//! Claims are immutable, so what a share gains is another claim, a companion: it has a label with the UID of the base claim, the
//! pod as its owner, and requests the difference. The controller allocates it on the GPU of the base, and the node driver adds it
//! to the limits. Deleting it gives the capacity back. [`plan`] is pure; nothing but claims of the user's namespace is written.

use std::fmt;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use drava_api::condition::{ConditionReason, ConditionType};
use drava_api::{Quantity, names};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::{DeviceRequest, DeviceRequestAllocationResult, ResourceClaim};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::Instant;

/// Time between two reads of the claims.
const POLL: Duration = Duration::from_millis(250);

/// 1 MiB, the least memory of a claim.
const MIB: u64 = 1 << 20;

/// Arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The pod: `NAME` or `pod/NAME`.
    #[arg(value_name = "POD")]
    pod: String,

    /// Total memory of the share, such as 12Gi.
    #[arg(long)]
    memory: Option<Quantity>,

    /// Total guarantee of GPU time of the share, in percent.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u64).range(0..=100))]
    cores: Option<u64>,

    /// The claim of the share, by its name in the pod; needed if several claims of the pod have shares.
    #[arg(long)]
    claim: Option<String>,

    /// The request of the share; needed if the claim has several shares.
    #[arg(long)]
    request: Option<String>,

    /// Print the claim that would be created and the names of those that would be deleted, and change nothing.
    #[arg(long)]
    dry_run: bool,

    /// Longest wait until the program has the new limits, in seconds; 0 does not wait.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    timeout: u64,
}

/// Amounts of a share: memory in bytes, GPU time in percent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Amounts {
    memory_bytes: u64,
    cores: u64,
}

impl Amounts {
    fn of(result: &DeviceRequestAllocationResult) -> Self {
        let consumed = |name: &str| {
            let amount = result.consumed_capacity.as_ref()?.get(name)?;
            let amount = Quantity::try_from(amount).ok()?;
            amount.to_u64_rounded_up()
        };
        Self {
            memory_bytes: consumed(names::capacity::MEMORY).unwrap_or_default(),
            cores: consumed(names::capacity::CORES).unwrap_or_default(),
        }
    }

    const fn plus(self, other: Self) -> Self {
        Self {
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            cores: self.cores.saturating_add(other.cores),
        }
    }

    const fn minus(self, other: Self) -> Self {
        Self {
            memory_bytes: self.memory_bytes.saturating_sub(other.memory_bytes),
            cores: self.cores.saturating_sub(other.cores),
        }
    }

    const fn fits(self, limit: Self) -> bool {
        self.memory_bytes <= limit.memory_bytes && self.cores <= limit.cores
    }
}

impl fmt::Display for Amounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.memory_bytes.div_ceil(MIB);
        write!(f, "{mib} MiB, {}% of GPU time", self.cores)
    }
}

/// The share of a running pod.
#[derive(Debug, Clone)]
struct Share {
    /// Its claim.
    base: ResourceClaim,
    /// Name of its request.
    request: String,
    /// Its device class.
    class: String,
    /// Amounts of the claim itself.
    own: Amounts,
    /// What its companions add, oldest first.
    companions: Vec<(String, Amounts)>,
}

impl Share {
    fn total(&self) -> Amounts {
        let added = self.companions.iter().map(|(_, added)| *added);
        added.fold(self.own, Amounts::plus)
    }
}

/// What the command changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Plan {
    /// What a new companion adds.
    #[serde(skip_serializing_if = "Option::is_none")]
    add: Option<Amounts>,
    /// Names of the companions to delete afterwards.
    delete: Vec<String>,
}

/// Returns the changes that give a share these amounts. The oldest companions stay; the new one comes before the deletions, so
/// that the share never has less than both amounts.
fn plan(share: &Share, wanted: Amounts) -> anyhow::Result<Plan> {
    ensure!(
        share.own.fits(wanted),
        "claim {} itself has {}, which cannot shrink: claims are immutable",
        share.base.name_any(),
        share.own
    );
    let mut kept = share.own;
    let mut delete = Vec::new();
    for (name, added) in &share.companions {
        let with = kept.plus(*added);
        if delete.is_empty() && with.fits(wanted) {
            kept = with;
        } else {
            delete.push(name.clone());
        }
    }
    let mut missing = wanted.minus(kept);
    if missing.cores > 0 && missing.memory_bytes == 0 {
        // A share without memory does not exist.
        missing.memory_bytes = MIB;
    }
    Ok(Plan {
        add: (missing != Amounts::default()).then_some(missing),
        delete,
    })
}

/// Outcome of the command.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    pod: String,
    claim: String,
    request: String,
    dry_run: bool,
    before: Amounts,
    after: Amounts,
    /// The created companion; with `--dry-run`, the one to create.
    #[serde(skip_serializing_if = "Option::is_none")]
    created: Option<Value>,
    deleted: Vec<String>,
}

impl Report {
    /// Formats the outcome as text.
    pub(crate) fn text(&self) -> String {
        let Self {
            pod,
            claim,
            request,
            before,
            after,
            ..
        } = self;
        if before == after {
            return format!("pod {pod}: request {request} of claim {claim} has {after} already\n");
        }
        let verb = if self.dry_run { "would have" } else { "has" };
        let mut text = format!(
            "pod {pod}: request {request} of claim {claim} {verb} {after} (before: {before})\n"
        );
        if self.dry_run {
            if let Some(created) = &self.created {
                let json = serde_json::to_string_pretty(created).unwrap_or_default();
                text.push_str(&format!("would create:\n{json}\n"));
            }
            for name in &self.deleted {
                text.push_str(&format!("would delete: resourceclaim/{name}\n"));
            }
        }
        text
    }
}

/// Changes the share of a pod, and waits until its programs have the new limits.
pub(crate) async fn run(
    client: &Client,
    namespace: &str,
    options: &Options,
) -> anyhow::Result<Report> {
    let name = options.pod.strip_prefix("pod/").unwrap_or(&options.pod);
    ensure!(
        options.memory.is_some() || options.cores.is_some(),
        "say what the share is to have: --memory 12Gi, --cores 40"
    );
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    let pod = pods
        .get(name)
        .await
        .with_context(|| format!("cannot get pod {namespace}/{name}"))?;
    let is_bound = pod
        .spec
        .as_ref()
        .is_some_and(|spec| spec.node_name.is_some());
    ensure!(
        is_bound,
        "pod {name} is not bound to a node: change the request in its claim or template instead"
    );
    let all = claims
        .list(&ListParams::default())
        .await
        .context("cannot list the claims")?;
    let share = find(&pod, &all.items, options)?;
    let before = share.total();
    let wanted = Amounts {
        memory_bytes: options
            .memory
            .map_or(Some(before.memory_bytes), |memory| {
                memory.to_u64_rounded_up()
            })
            .context("--memory is out of range")?,
        cores: options.cores.unwrap_or(before.cores),
    };
    ensure!(
        wanted.memory_bytes >= MIB,
        "--memory {} is less than 1Mi: did you mean {}Mi?",
        wanted.memory_bytes,
        wanted.memory_bytes
    );
    let plan = plan(&share, wanted)?;
    let companion = plan.add.map(|add| companion(&pod, &share, add));
    let mut created = companion;
    if !options.dry_run {
        let deadline = Instant::now() + Duration::from_secs(options.timeout);
        if let Some(companion) = created.take() {
            let companion: ResourceClaim = serde_json::from_value(companion)?;
            let stored = claims.create(&PostParams::default(), &companion).await;
            let stored = stored.context("cannot create the companion claim")?;
            if options.timeout > 0 {
                wait_for_growth(client, &claims, &stored, deadline).await?;
            }
            created = Some(json!({"name": stored.name_any()}));
        }
        for name in &plan.delete {
            let deleted = claims.delete(name, &DeleteParams::default()).await;
            deleted.with_context(|| format!("cannot delete the companion claim {name}"))?;
        }
        if options.timeout > 0 {
            for name in &plan.delete {
                wait_for_shrinking(&claims, name, deadline).await?;
            }
        }
    }
    Ok(Report {
        pod: format!("{namespace}/{name}"),
        claim: share.base.name_any(),
        request: share.request.clone(),
        dry_run: options.dry_run,
        before,
        after: wanted,
        created,
        deleted: plan.delete,
    })
}

/// Finds the share of a pod that the options select.
fn find(pod: &Pod, claims: &[ResourceClaim], options: &Options) -> anyhow::Result<Share> {
    let mut found = Vec::new();
    let mut others = Vec::new();
    for (entry, name) in drava_allocator::pod::claims(pod) {
        let claim = claims
            .iter()
            .find(|claim| Some(claim.name_any().as_str()) == name);
        let Some(claim) = claim.filter(|_| options.claim.as_deref().is_none_or(|of| of == entry))
        else {
            continue;
        };
        for result in results(claim) {
            let request = main_request(&result.request);
            if options.request.as_deref().is_some_and(|of| of != request) {
                continue;
            }
            if result.driver == names::DRIVER && result.share_id.is_some() {
                found.push((entry, claim, result));
            } else if result.driver == names::DRIVER {
                others.push(format!(
                    "{entry}/{request} has device {}, no share",
                    result.device
                ));
            }
        }
    }
    let name = pod.name_any();
    let [(_, claim, result)] = &found[..] else {
        if found.is_empty() {
            let others = match others.is_empty() {
                true => "none of its claims is allocated by drava".to_owned(),
                false => others.join("; "),
            };
            bail!(
                "pod {name} has no such share of a GPU ({others}): whole GPUs and MIG partitions do not grow"
            );
        }
        let shares = found
            .iter()
            .map(|(entry, _, result)| format!("{entry}/{}", main_request(&result.request)));
        let shares: Vec<String> = shares.collect();
        bail!(
            "pod {name} has several shares ({}): select one with --claim and --request",
            shares.join(", ")
        );
    };
    let request = main_request(&result.request).to_owned();
    let class = class_of(claim, &result.request)
        .with_context(|| format!("claim {} has no request {request}", claim.name_any()))?;
    let uid = claim.uid().unwrap_or_default();
    let mut companions: Vec<&ResourceClaim> = claims
        .iter()
        .filter(|other| other.labels().get(names::COMPANION_LABEL) == Some(&uid))
        .filter(|other| other.metadata.deletion_timestamp.is_none())
        .collect();
    companions.sort_by_key(|companion| companion.creation_timestamp().map(|created| created.0));
    let added = companions.iter().filter_map(|companion| {
        let mut results = results(companion);
        let result = results.find(|result| main_request(&result.request) == request)?;
        Some((companion.name_any(), Amounts::of(result)))
    });
    let waiting = companions
        .iter()
        .find(|companion| results(companion).next().is_none());
    if let Some(waiting) = waiting {
        bail!(
            "claim {} of an earlier resize waits for its allocation; withdraw it with `kubectl delete resourceclaim {} -n {}`",
            waiting.name_any(),
            waiting.name_any(),
            waiting.namespace().unwrap_or_default()
        );
    }
    Ok(Share {
        companions: added.collect(),
        base: (*claim).clone(),
        own: Amounts::of(result),
        class,
        request,
    })
}

fn results(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let status = claim.status.iter();
    let allocation = status.filter_map(|status| status.allocation.as_ref());
    let devices = allocation.filter_map(|allocation| allocation.devices.as_ref());
    devices.flat_map(|devices| devices.results.iter().flatten())
}

fn main_request(request: &str) -> &str {
    request.split_once('/').map_or(request, |(main, _)| main)
}

/// Returns the class of a request, or of its alternative.
fn class_of(claim: &ResourceClaim, result: &str) -> Option<String> {
    let devices = claim.spec.as_ref()?.devices.as_ref()?;
    let mut requests = devices.requests.iter().flatten();
    let request: &DeviceRequest = requests.find(|request| request.name == main_request(result))?;
    if let Some(exactly) = &request.exactly {
        return Some(exactly.device_class_name.clone());
    }
    let (_, name) = result.split_once('/')?;
    let mut alternatives = request.first_available.iter().flatten();
    let alternative = alternatives.find(|alternative| alternative.name == name)?;
    Some(alternative.device_class_name.clone())
}

/// Returns the companion that adds these amounts to a share.
fn companion(pod: &Pod, share: &Share, add: Amounts) -> Value {
    let base = share.base.name_any();
    let memory = format!("{}Mi", add.memory_bytes.div_ceil(MIB));
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "generateName": format!("{base}-more-"),
            "namespace": share.base.namespace(),
            "labels": {names::COMPANION_LABEL: share.base.uid()},
            "ownerReferences": [{
                "apiVersion": "v1", "kind": "Pod", "name": pod.name_any(), "uid": pod.uid(), "controller": true,
            }],
        },
        "spec": {"devices": {"requests": [{
            "name": share.request,
            "exactly": {
                "deviceClassName": share.class,
                "capacity": {"requests": {
                    names::capacity::MEMORY: memory,
                    names::capacity::CORES: add.cores.to_string(),
                }},
            },
        }]}},
    })
}

/// Returns reason and message of the condition `Granted` of a companion.
fn granted(claim: &ResourceClaim) -> Option<(String, String)> {
    let devices = claim
        .status
        .iter()
        .flat_map(|status| status.devices.iter().flatten());
    let mut conditions = devices.flat_map(|device| device.conditions.iter().flatten());
    let condition =
        conditions.find(|condition| condition.type_ == ConditionType::Granted.as_str())?;
    Some((condition.reason.clone(), condition.message.clone()))
}

/// Waits until the limits of the share include a companion.
async fn wait_for_growth(
    client: &Client,
    claims: &Api<ResourceClaim>,
    companion: &ResourceClaim,
    deadline: Instant,
) -> anyhow::Result<()> {
    let name = companion.name_any();
    loop {
        let found = claims
            .get(&name)
            .await
            .with_context(|| format!("cannot get claim {name}"))?;
        match granted(&found) {
            Some((reason, _)) if reason == ConditionReason::Granted.as_str() => return Ok(()),
            Some((reason, message)) if reason == ConditionReason::Refused.as_str() => {
                bail!("claim {name}: {message}")
            }
            Some(_) | None => {}
        }
        if Instant::now() >= deadline {
            let why = why_waiting(client, &found).await;
            bail!(
                "the share did not grow in time: {why}. Claim {name} waits on; withdraw it with `kubectl delete resourceclaim {name} \
                 -n {}`",
                found.namespace().unwrap_or_default()
            );
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Returns why a companion has no effect so far, from its newest event.
async fn why_waiting(client: &Client, companion: &ResourceClaim) -> String {
    if results(companion).next().is_some() {
        return "it is allocated, and the node driver has not added it to the limits so far"
            .to_owned();
    }
    let events: Api<Event> =
        Api::namespaced(client.clone(), &companion.namespace().unwrap_or_default());
    let of_claim = format!("involvedObject.uid={}", companion.uid().unwrap_or_default());
    match events.list(&ListParams::default().fields(&of_claim)).await {
        Ok(found) => match found
            .items
            .into_iter()
            .next_back()
            .and_then(|event| event.message)
        {
            Some(message) => message,
            None => {
                "the controller has not answered; shares grow with scheduling.mode=managed only"
                    .to_owned()
            }
        },
        Err(error) => format!("it is not allocated, and its events cannot be read ({error})"),
    }
}

/// Waits until a share has given back what a companion added.
async fn wait_for_shrinking(
    claims: &Api<ResourceClaim>,
    name: &str,
    deadline: Instant,
) -> anyhow::Result<()> {
    loop {
        let found = claims
            .get_opt(name)
            .await
            .with_context(|| format!("cannot get claim {name}"))?;
        let Some(found) = found else {
            return Ok(());
        };
        if Instant::now() >= deadline {
            let message =
                granted(&found).map_or_else(String::new, |(_, message)| format!(": {message}"));
            bail!(
                "the share did not give back claim {name} in time{message}. It does so as soon as it can"
            );
        }
        tokio::time::sleep(POLL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn amounts(gib: u64, cores: u64) -> Amounts {
        Amounts {
            memory_bytes: gib * GIB,
            cores,
        }
    }

    fn share(companions: &[(u64, u64)]) -> Share {
        let companions = companions.iter().enumerate();
        Share {
            base: ResourceClaim::default(),
            request: "gpu".to_owned(),
            class: names::class::VGPU.to_owned(),
            own: amounts(8, 20),
            companions: companions
                .map(|(index, (gib, cores))| (format!("c{index}"), amounts(*gib, *cores)))
                .collect(),
        }
    }

    #[test]
    fn plans_companions_for_wanted_total() {
        let add = |gib, cores| Some(amounts(gib, cores));
        let cases: [(&[(u64, u64)], Amounts, Option<Amounts>, &[&str]); 7] = [
            (&[], amounts(12, 20), add(4, 0), &[]),
            (&[], amounts(8, 20), None, &[]),
            // What is there stays.
            (&[(4, 0)], amounts(14, 30), add(2, 10), &[]),
            // Newest first.
            (&[(4, 0), (2, 10)], amounts(12, 20), None, &["c1"]),
            (&[(4, 0), (2, 10)], amounts(8, 20), None, &["c0", "c1"]),
            // A part of one: the rest comes before the deletion.
            (&[(4, 0)], amounts(11, 20), add(3, 0), &["c0"]),
            (&[(4, 10)], amounts(12, 20), add(4, 0), &["c0"]),
        ];
        for (companions, wanted, add, delete) in cases {
            let plan = plan(&share(companions), wanted).unwrap();
            assert_eq!(
                (plan.add, &plan.delete[..]),
                (
                    add,
                    &delete
                        .iter()
                        .map(|name| (*name).to_owned())
                        .collect::<Vec<_>>()[..]
                ),
                "{companions:?} {wanted}"
            );
        }
        let cores_only = plan(&share(&[]), amounts(8, 50)).unwrap().add;
        assert_eq!(
            cores_only,
            Some(Amounts {
                memory_bytes: MIB,
                cores: 30
            })
        );
    }

    #[test]
    fn refuses_less_than_claim_itself_has() {
        for wanted in [amounts(7, 20), amounts(8, 10)] {
            let error = plan(&share(&[]), wanted).unwrap_err().to_string();
            assert!(
                error.contains("8192 MiB, 20% of GPU time, which cannot shrink"),
                "{error}"
            );
        }
    }
}
