//! `kubectl drava cordon|drain|uncordon`: DeviceTaintRules that keep devices from being allocated (KEP-5055).
//!
//! The rules are the only state. A node has one rule, which covers all its devices; a GPU has one rule for each of its
//! published devices, because a rule selects devices by name. [`targeted`] and [`holders`] are pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use drava_api::listed::{Listed, Unreadable};
use drava_api::names;
use k8s_openapi::api::resource::v1::{Device, DeviceTaintRule, ResourceClaim, ResourceSlice};
use k8s_openapi::api::resource::v1beta2;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::Instant;

use drava_explanation::table;

/// Field manager of the rules.
const MANAGER: &str = "kubectl-drava";

/// Time between two checks whether the devices are free.
const POLL: Duration = Duration::from_secs(1);

/// Arguments of `cordon` and `uncordon`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// A node (`node-a`) or one of its GPUs (`node-a/gpu-0`, `node-a/GPU-<uuid>`).
    #[arg(value_name = "NODE[/GPU]")]
    target: String,

    /// Let the API server check the request without storing it.
    #[arg(long)]
    dry_run: bool,
}

/// Arguments of `drain`.
#[derive(Debug, Args)]
pub(crate) struct DrainOptions {
    #[command(flatten)]
    options: Options,

    /// Longest wait for the end of the pods, in seconds; 0 does not wait.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
}

/// Change of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Action {
    Cordon,
    Drain,
    Uncordon,
}

impl Action {
    /// Returns the effect of the taint; `None` removes the taint.
    const fn effect(self) -> Option<&'static str> {
        match self {
            Self::Cordon => Some("NoSchedule"),
            Self::Drain => Some("NoExecute"),
            Self::Uncordon => None,
        }
    }

    const fn past(self) -> &'static str {
        match self {
            Self::Cordon => "cordoned",
            Self::Drain => "drained",
            Self::Uncordon => "uncordoned",
        }
    }
}

/// Name of the rule of all devices of a node, or of one device. Names of devices have no dot, so that it is unique.
fn rule_name(node: &str, device: Option<&str>) -> String {
    match device {
        None => format!("drava-node.{node}"),
        Some(device) => format!("drava-device.{device}.{node}"),
    }
}

/// Returns the device whose rule of a node has this name.
fn device_of_rule<'a>(name: &'a str, node: &str) -> Option<&'a str> {
    let device = name.strip_prefix("drava-device.")?;
    let device = device.strip_suffix(node)?.strip_suffix('.')?;
    (!device.contains('.')).then_some(device)
}

/// A rule of a target.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    name: String,
    pool: String,
    /// `None` selects all devices of the pool.
    device: Option<String>,
}

/// What a target selects.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Targeted {
    rules: Vec<Rule>,
    pool: String,
    devices: BTreeSet<String>,
}

/// A claim that holds a selected device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Holder {
    namespace: String,
    claim: String,
    devices: Vec<String>,
    pods: Vec<String>,
}

/// Outcome of a command.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    target: String,
    action: Action,
    dry_run: bool,
    /// Names of the DeviceTaintRules that were written or removed.
    rules: Vec<String>,
    devices: BTreeSet<String>,
    /// Claims that hold the devices.
    claims: Vec<Holder>,
}

impl Report {
    /// Formats the report as text.
    pub(crate) fn text(&self) -> String {
        let past = self.action.past();
        let dry_run = match self.dry_run {
            true => " (dry run)",
            false => "",
        };
        let mut text = match (self.action, self.rules.is_empty()) {
            (Action::Uncordon, true) => format!("{} was not cordoned\n", self.target),
            _ => format!("{} {past}{dry_run}\n", self.target),
        };
        for rule in &self.rules {
            text.push_str(&format!("  devicetaintrule/{rule}\n"));
        }
        if self.action == Action::Uncordon || self.claims.is_empty() {
            return text;
        }
        text.push_str(match self.action {
            Action::Cordon => {
                "\nThese claims keep their devices; `kubectl drava drain` evicts their pods:\n"
            }
            Action::Drain | Action::Uncordon => "\nThese claims hold devices:\n",
        });
        let rows = self.claims.iter().map(|holder| {
            vec![
                format!("{}/{}", holder.namespace, holder.claim),
                holder.devices.join(", "),
                holder.pods.join(", "),
            ]
        });
        text.push_str(&table(&["CLAIM", "DEVICES", "PODS"], rows.collect()));
        text
    }
}

/// Runs `cordon`.
pub(crate) async fn cordon(client: &Client, options: &Options) -> anyhow::Result<Report> {
    change(client, options, Action::Cordon).await
}

/// Runs `uncordon`.
pub(crate) async fn uncordon(client: &Client, options: &Options) -> anyhow::Result<Report> {
    change(client, options, Action::Uncordon).await
}

/// Runs `drain`: waits until no pod uses the devices.
pub(crate) async fn drain(client: &Client, drain: &DrainOptions) -> anyhow::Result<Report> {
    let DrainOptions { options, timeout } = drain;
    let mut report = change(client, options, Action::Drain).await?;
    let deadline = Instant::now() + Duration::from_secs(*timeout);
    let pool = names::pool(node_of(&options.target));
    while !options.dry_run && *timeout > 0 && !report.claims.is_empty() {
        if Instant::now() >= deadline {
            let claims: Vec<String> = report
                .claims
                .iter()
                .map(|holder| format!("{}/{}", holder.namespace, holder.claim))
                .collect();
            bail!(
                "cannot drain {} within {timeout} s: pods use the claims {}; the rules stay: wait with a longer --timeout, \
                 delete pods whose claims tolerate every taint, or run `kubectl drava uncordon {}`",
                report.target,
                claims.join(", "),
                report.target
            );
        }
        tokio::time::sleep(POLL).await;
        report.claims = holders(&claims(client).await?, &pool, &report.devices);
    }
    Ok(report)
}

async fn change(client: &Client, options: &Options, action: Action) -> anyhow::Result<Report> {
    let Options { target, dry_run } = options;
    let wanted = ListParams::default().fields(&format!("spec.driver={}", names::DRIVER));
    let slices: Api<Listed<ResourceSlice>> = Api::all(client.clone());
    let slices = slices.list(&wanted).await.context(
        "cannot list resourceslices; `kubectl auth can-i list resourceslices` shows whether you may",
    )?;
    let (slices, _) = Listed::split(slices.items);
    let targeted = match targeted(&slices, target) {
        Ok(targeted) => targeted,
        Err(error) if action == Action::Uncordon => {
            // A retired node or GPU publishes nothing, and its rules still exist.
            let rules = rule_names(client).await?;
            retired(&rules, target).ok_or(error)?
        }
        Err(error) => return Err(error),
    };
    let mut rules = Vec::new();
    for rule in &targeted.rules {
        let is_changed = match write::<DeviceTaintRule>(client, rule, action, *dry_run).await {
            Err(error) if is_not_served(&error) => {
                write::<v1beta2::DeviceTaintRule>(client, rule, action, *dry_run).await
            }
            written => written,
        };
        if is_changed.map_err(|error| explain(error, rule, action))? {
            rules.push(rule.name.clone());
        }
    }
    let claims = match action {
        Action::Cordon | Action::Drain => {
            holders(&claims(client).await?, &targeted.pool, &targeted.devices)
        }
        Action::Uncordon => Vec::new(),
    };
    Ok(Report {
        target: target.clone(),
        action,
        dry_run: *dry_run,
        rules,
        devices: targeted.devices,
        claims,
    })
}

/// Returns the names of all DeviceTaintRules.
async fn rule_names(client: &Client) -> anyhow::Result<Vec<String>> {
    const FAILED: &str = "cannot list devicetaintrules";
    let all = ListParams::default();
    let rules: Api<Listed<DeviceTaintRule>> = Api::all(client.clone());
    let named = |name: Option<&String>| name.cloned().unwrap_or_default();
    match rules.list(&all).await {
        Err(error) if is_not_served(&error) => {
            let rules: Api<Listed<v1beta2::DeviceTaintRule>> = Api::all(client.clone());
            let listed = rules.list(&all).await.context(FAILED)?.items;
            Ok(listed
                .iter()
                .map(|rule| named(rule.meta().name.as_ref()))
                .collect())
        }
        listed => {
            let listed = listed.context(FAILED)?.items;
            Ok(listed
                .iter()
                .map(|rule| named(rule.meta().name.as_ref()))
                .collect())
        }
    }
}

/// Returns the existing rules of a node or GPU that publishes no devices; none if there are none.
fn retired(rules: &[String], target: &str) -> Option<Targeted> {
    let node = node_of(target);
    let pool = names::pool(node);
    let of_target = rules.iter().filter_map(|name| {
        let device = match target.split_once('/') {
            None => (*name == rule_name(node, None)).then_some(None),
            Some((_, gpu)) => {
                let device = device_of_rule(name, node)?;
                let rest = device.strip_prefix(gpu)?;
                (rest.is_empty() || rest.starts_with('-')).then(|| Some(device.to_owned()))
            }
        };
        Some(Rule {
            name: name.clone(),
            pool: pool.clone(),
            device: device?,
        })
    });
    let rules: Vec<Rule> = of_target.collect();
    (!rules.is_empty()).then(|| Targeted {
        devices: rules
            .iter()
            .filter_map(|rule| rule.device.clone())
            .collect(),
        rules,
        pool,
    })
}

/// Writes or deletes a rule. Returns whether the rule exists or existed.
async fn write<K>(client: &Client, rule: &Rule, action: Action, dry_run: bool) -> kube::Result<bool>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let rules: Api<Listed<K>> = Api::all(client.clone());
    let Some(effect) = action.effect() else {
        let params = DeleteParams {
            dry_run,
            ..DeleteParams::default()
        };
        return match rules.delete(&rule.name, &params).await {
            Ok(_) => Ok(true),
            // The status of a missing object names the object; that of a missing kind does not.
            Err(kube::Error::Api(status))
                if status.code == 404 && status.message.contains(&rule.name) =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        };
    };
    let params = PatchParams {
        dry_run,
        ..PatchParams::apply(MANAGER).force()
    };
    let object = object(&K::api_version(&()), rule, effect);
    rules
        .patch(&rule.name, &params, &Patch::Apply(object))
        .await
        .map(|_| true)
}

fn object(api_version: &str, rule: &Rule, effect: &str) -> Value {
    let mut selector = json!({"driver": names::DRIVER, "pool": rule.pool});
    if let Some(device) = &rule.device {
        selector["device"] = json!(device);
    }
    json!({
        "apiVersion": api_version,
        "kind": "DeviceTaintRule",
        "metadata": {"name": rule.name},
        "spec": {
            "deviceSelector": selector,
            "taint": {"key": names::CORDONED_TAINT, "value": "true", "effect": effect},
        },
    })
}

fn is_not_served(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

fn explain(error: kube::Error, rule: &Rule, action: Action) -> anyhow::Error {
    let verb = match action {
        Action::Cordon | Action::Drain => "write",
        Action::Uncordon => "delete",
    };
    let hint = match &error {
        kube::Error::Api(status) if status.code == 403 => {
            "; you need the verbs create, patch and delete on devicetaintrules.resource.k8s.io"
        }
        kube::Error::Api(status) if status.code == 404 => {
            "; the API server does not serve DeviceTaintRules: they are available since Kubernetes 1.37, and in 1.36 with \
             the feature gate DRADeviceTaintRules and the API resource.k8s.io/v1beta2"
        }
        _ => "",
    };
    let text = format!("cannot {verb} DeviceTaintRule {}{hint}", rule.name);
    anyhow::Error::new(error).context(text)
}

async fn claims(client: &Client) -> anyhow::Result<Vec<Listed<ResourceClaim>>> {
    let claims: Api<Listed<ResourceClaim>> = Api::all(client.clone());
    let listed = claims.list(&ListParams::default()).await;
    let listed = listed.context(
        "cannot list resourceclaims in all namespaces; `kubectl auth can-i list resourceclaims -A` shows whether you may",
    )?;
    Ok(listed.items)
}

fn node_of(target: &str) -> &str {
    target.split_once('/').map_or(target, |(node, _)| node)
}

/// Returns the rules and devices of a target.
///
/// # Errors
/// When no slice has the node or the GPU.
fn targeted(slices: &[ResourceSlice], target: &str) -> anyhow::Result<Targeted> {
    let node = node_of(target);
    let pool = names::pool(node);
    let mut nodes = BTreeSet::new();
    let mut devices: Vec<&Device> = Vec::new();
    for slice in slices {
        nodes.extend(slice.spec.node_name.as_deref());
        if slice.spec.pool.name == pool {
            devices.extend(slice.spec.devices.iter().flatten());
        }
    }
    if !nodes.contains(node) {
        let nodes: Vec<&str> = nodes.into_iter().collect();
        bail!(
            "node {node} publishes no GPUs of driver {}; nodes that do: {}",
            names::DRIVER,
            list(&nodes)
        );
    }
    let names = |devices: &[&Device]| devices.iter().map(|device| device.name.clone()).collect();
    let Some((_, gpu)) = target.split_once('/') else {
        let rules = vec![Rule {
            name: rule_name(node, None),
            pool: pool.clone(),
            device: None,
        }];
        return Ok(Targeted {
            rules,
            devices: names(&devices),
            pool,
        });
    };
    let mut gpus: BTreeMap<String, Vec<&Device>> = BTreeMap::new();
    for device in devices {
        if let Some((name, uuid)) = gpu_of(device) {
            let is_wanted = gpu == name || gpu.eq_ignore_ascii_case(&uuid);
            let key = if is_wanted { gpu.to_owned() } else { name };
            gpus.entry(key).or_default().push(device);
        }
    }
    let Some(devices) = gpus.get(gpu) else {
        let gpus: Vec<&str> = gpus.keys().map(String::as_str).collect();
        bail!("node {node} has no GPU {gpu}; its GPUs: {}", list(&gpus));
    };
    let rule = |device: &&Device| Rule {
        name: rule_name(node, Some(&device.name)),
        pool: pool.clone(),
        device: Some(device.name.clone()),
    };
    Ok(Targeted {
        rules: devices.iter().map(rule).collect(),
        devices: names(devices),
        pool,
    })
}

/// Returns name (`gpu-0`) and UUID of the GPU of a device.
fn gpu_of(device: &Device) -> Option<(String, String)> {
    let attributes = device.attributes.as_ref()?;
    let minor = attributes.get(names::attribute::MINOR)?.int?;
    let uuid = attributes.get(names::attribute::UUID)?.string.clone()?;
    Some((names::gpu_device(u32::try_from(minor).ok()?), uuid))
}

fn list(names: &[&str]) -> String {
    match names {
        [] => "none".to_owned(),
        names => names.join(", "),
    }
}

/// Returns the claims whose pods use the devices. Admin access does not count. A claim that cannot be read may have pods.
fn holders(
    claims: &[Listed<ResourceClaim>],
    pool: &str,
    devices: &BTreeSet<String>,
) -> Vec<Holder> {
    let holder = |claim: &ResourceClaim| {
        let status = claim.status.as_ref()?;
        let allocation = status.allocation.as_ref()?.devices.as_ref()?;
        let results = allocation.results.iter().flatten().filter(|result| {
            result.driver == names::DRIVER
                && result.pool == pool
                && result.admin_access != Some(true)
                && devices.contains(&result.device)
        });
        let devices: Vec<String> = results.map(|result| result.device.clone()).collect();
        let consumers = status.reserved_for.iter().flatten();
        let pods: Vec<String> = consumers.map(|consumer| consumer.name.clone()).collect();
        let is_holder = !devices.is_empty() && !pods.is_empty();
        is_holder.then(|| Holder {
            namespace: claim.metadata.namespace.clone().unwrap_or_default(),
            claim: claim.metadata.name.clone().unwrap_or_default(),
            devices,
            pods,
        })
    };
    let unreadable = |claim: &Unreadable| {
        let held = claim.devices.iter().filter(|device| {
            device.driver == names::DRIVER
                && device.pool == pool
                && devices.contains(&device.device)
        });
        let devices: Vec<String> = held.map(|device| device.device.clone()).collect();
        (!devices.is_empty()).then(|| Holder {
            namespace: claim.metadata.namespace.clone().unwrap_or_default(),
            claim: claim.metadata.name.clone().unwrap_or_default(),
            devices,
            pods: vec![format!("unknown ({})", claim.cause)],
        })
    };
    let claims = claims.iter();
    claims
        .filter_map(|claim| match claim {
            Listed::Object(claim) => holder(claim),
            Listed::Unreadable(claim) => unreadable(claim),
        })
        .collect()
}

#[cfg(test)]
mod tests;
