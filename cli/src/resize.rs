//! `kubectl drava resize`: grows and shrinks the share of a running pod by companion claims.
//!
//! Claims are immutable, so what a share gains is another claim, a companion: it has a label with the UID of the base claim, the
//! pod as its owner, and requests the difference. The controller allocates it on the GPU of the base, and the node driver adds it
//! to the limits. Deleting it gives the capacity back. [`plan`] is pure; nothing but claims of the user's namespace is written.

use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use drava_api::{Quantity, names};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use self::share::{Amounts, Cores, MIB, Share};
use crate::{pod, tenant};

mod share;
mod wait;

pub(crate) use wait::newest as newest_event;

/// Time until a resize looks at the share again that met another one.
const CONFLICT: Duration = Duration::from_millis(250);

/// Longest part of a claim's name in the names of its companions, bytes; a name has at most 253.
const LONGEST_BASE: usize = 230;

/// Arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The pod: `NAME` or `pod/NAME`.
    #[arg(value_name = "POD")]
    pod: String,

    /// Total memory of the share, such as 12Gi.
    #[arg(long, allow_hyphen_values = true)]
    memory: Option<Quantity>,

    /// Total guarantee of GPU time of the share, in percent.
    #[arg(long, value_name = "PERCENT", allow_hyphen_values = true, value_parser = clap::value_parser!(u64).range(0..=100))]
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

    /// Longest wait until the program has the new limits, in seconds; 0 does not wait, and is refused where a claim replaces others.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    timeout: u64,
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

impl Plan {
    /// Returns what the share has after the changes: more memory than is wanted where a companion for GPU time alone needs some.
    fn result(&self, share: &Share) -> Amounts {
        let kept = share.companions.iter();
        let kept = kept.filter(|(name, _)| !self.delete.contains(name));
        let added = kept.map(|(_, added)| *added).chain(self.add);
        added.fold(share.own, Amounts::plus)
    }
}

/// Returns the changes that give a share these amounts. The oldest companions stay; the new one comes before the deletions, so
/// that the share never has less than both amounts.
fn plan(share: &Share, wanted: Amounts) -> anyhow::Result<Plan> {
    ensure!(
        share.own.fits(wanted),
        "claim {} itself has {}, which cannot shrink: claims are immutable",
        share.base.name_any(),
        share.cores.text(share.own)
    );
    ensure!(
        share.cores == Cores::Time || wanted.cores <= share.total().cores,
        "the share has computePolicy: spatial, whose programs read their part of the multiprocessors when they start: its memory \
         grows, its cores stay at {}%",
        share.total().cores
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
    ensure!(
        missing.memory_bytes != MIB,
        "a share cannot grow by exactly 1 MiB, which stands for a companion for GPU time only: ask for 2 MiB"
    );
    if missing.cores > 0 && missing.memory_bytes == 0 {
        // A share without memory does not exist.
        missing.memory_bytes = MIB;
    }
    Ok(Plan {
        add: (missing != Amounts::default()).then_some(missing),
        delete,
    })
}

/// Refuses to give something back before its replacement has an effect.
fn check_order(plan: &Plan, timeout: u64) -> anyhow::Result<()> {
    ensure!(
        timeout > 0 || plan.add.is_none() || plan.delete.is_empty(),
        "this resize replaces {} by a new claim, which may not fit: --timeout 0 would delete what the share has before that is \
         known; set a time",
        plan.delete.join(", ")
    );
    Ok(())
}

/// Outcome of the command.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    pod: String,
    claim: String,
    request: String,
    dry_run: bool,
    /// What the cores of the share are a part of.
    #[serde(skip)]
    cores: Cores,
    /// Name of the GPU and its pool.
    #[serde(skip)]
    gpu: String,
    /// Whether the command has seen that the programs have the new limits.
    #[serde(skip)]
    is_complete: bool,
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
            gpu,
            ..
        } = self;
        let [before, after] = [self.before, self.after].map(|amounts| self.cores.text(amounts));
        if self.before == self.after {
            return format!("pod {pod}: request {request} of claim {claim} has {after} already\n");
        }
        let verb = match (self.dry_run, self.is_complete) {
            (true, _) => "would have",
            (false, true) => "has",
            (false, false) => "is to have",
        };
        let mut text = format!(
            "pod {pod}: request {request} of claim {claim} {verb} {after} (before: {before})\n"
        );
        if self.dry_run {
            if self.created.is_some() {
                text.push_str(&format!(
                    "if {gpu} has that free then, and quotas allow it: no other GPU counts, and nothing is evicted for it\n"
                ));
            }
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
    let name = pod::name(&options.pod)?;
    ensure!(
        options.memory.is_some() || options.cores.is_some(),
        "say what the share is to have: --memory 12Gi, --cores 40"
    );
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
    let pod: Pod = tenant::get(client, namespace, name).await?;
    share::check_runs(&pod)?;
    let deadline = Instant::now() + Duration::from_secs(options.timeout);
    let (change, created) = loop {
        let change = Change::of(client, namespace, &pod, options).await?;
        let Some(companion) = change.companion.clone() else {
            break (change, None);
        };
        if options.dry_run {
            break (change, Some(companion));
        }
        let companion: ResourceClaim = serde_json::from_value(companion)?;
        match claims.create(&PostParams::default(), &companion).await {
            Ok(stored) => {
                if options.timeout > 0 {
                    let replaces = !change.plan.delete.is_empty();
                    wait::for_growth(client, &claims, &stored, replaces, deadline).await?;
                }
                break (change, Some(json!({"name": stored.name_any()})));
            }
            // Another resize has added to the share meanwhile: this one goes on from there.
            Err(kube::Error::Api(status)) if status.code == 409 && Instant::now() < deadline => {
                tokio::time::sleep(CONFLICT).await;
            }
            Err(error) => {
                let action = format!("create resourceclaims in namespace {namespace}");
                return Err(tenant::refused(error, &action));
            }
        }
    };
    let Change {
        share,
        before,
        wanted,
        plan,
        ..
    } = change;
    if !options.dry_run {
        for name in &plan.delete {
            let deleted = claims.delete(name, &DeleteParams::default()).await;
            let action = format!("delete resourceclaim {name} in namespace {namespace}");
            deleted.map_err(|error| tenant::refused(error, &action))?;
        }
        if options.timeout > 0 {
            for name in &plan.delete {
                wait::for_shrinking(&claims, name, deadline).await?;
            }
        }
    }
    Ok(Report {
        pod: format!("{namespace}/{name}"),
        claim: share.base.name_any(),
        request: share.request.clone(),
        cores: share.cores,
        gpu: format!("{} of pool {}", share.device.0, share.device.1),
        dry_run: options.dry_run,
        is_complete: options.timeout > 0,
        before,
        after: wanted,
        created,
        deleted: plan.delete,
    })
}

/// The change of a share.
struct Change {
    share: Share,
    before: Amounts,
    wanted: Amounts,
    plan: Plan,
    /// The companion that is to be created.
    companion: Option<Value>,
}

impl Change {
    /// Reads the claims of the namespace, and plans the change.
    async fn of(
        client: &Client,
        namespace: &str,
        pod: &Pod,
        options: &Options,
    ) -> anyhow::Result<Self> {
        let all: Vec<ResourceClaim> = tenant::list(client, namespace).await?;
        let selected = (options.claim.as_deref(), options.request.as_deref());
        let share = share::find(pod, &all, selected)?;
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
            wanted.memory_bytes > 0,
            "a share without memory does not exist: --memory {}Mi gives back all that it has gained",
            share.own.memory_bytes.div_ceil(MIB)
        );
        ensure!(
            wanted.memory_bytes >= MIB,
            "--memory {} is less than 1Mi: did you mean {}Mi?",
            wanted.memory_bytes,
            wanted.memory_bytes
        );
        let wanted = Amounts {
            // As the devices count it.
            memory_bytes: wanted
                .memory_bytes
                .checked_next_multiple_of(MIB)
                .context("--memory is out of range")?,
            ..wanted
        };
        let plan = plan(&share, wanted)?;
        if plan.add.is_some() {
            share::check_grows(pod, &share.base)?;
            let slices = slices_of(client, &share.device.1).await?;
            if let Some(published) = share::published(&share, &slices) {
                share::check_size(&share, plan.result(&share), published)?;
            }
        }
        if !options.dry_run {
            check_order(&plan, options.timeout)?;
        }
        let name = companion_name(&share.base.name_any(), &all);
        let companion = plan.add.map(|add| companion(pod, &share, &name, add));
        Ok(Self {
            share,
            before,
            wanted,
            plan,
            companion,
        })
    }
}

/// Reads the slices of a pool; none if the user may not, which is so for most tenants: the controller refuses what never fits.
async fn slices_of(client: &Client, pool: &str) -> anyhow::Result<Vec<ResourceSlice>> {
    let node = names::node_of_pool(pool).unwrap_or(pool);
    let fields = format!("spec.driver={},spec.nodeName={node}", names::DRIVER);
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    match slices.list(&ListParams::default().fields(&fields)).await {
        Ok(slices) => Ok(slices.items),
        Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404) => Ok(Vec::new()),
        Err(error) => Err(tenant::refused(error, "list resourceslices")),
    }
}

/// Returns the name of the next companion of a claim. Two resizes at the same time choose the same name, so the API server refuses one.
fn companion_name(base: &str, all: &[ResourceClaim]) -> String {
    let prefix = format!("{}-more-", base.get(..LONGEST_BASE).unwrap_or(base));
    let number = |claim: &ResourceClaim| claim.name_any().strip_prefix(&prefix)?.parse().ok();
    let last: u32 = all.iter().filter_map(number).max().unwrap_or_default();
    format!("{prefix}{}", last.saturating_add(1))
}

/// Returns the companion that adds these amounts to a share.
fn companion(pod: &Pod, share: &Share, name: &str, add: Amounts) -> Value {
    let memory = format!("{}Mi", add.memory_bytes.div_ceil(MIB));
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "name": name,
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

#[cfg(test)]
mod tests;
