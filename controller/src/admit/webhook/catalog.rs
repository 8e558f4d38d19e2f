//! Device classes, claim templates, claims and limits, as far as the webhook's decisions need them. Each replica has its own.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use drava_allocator::claim;
use drava_allocator::selector::Selectors;
use drava_api::error::describe;
use drava_api::listed::Listed;
use drava_api::{DeviceType, Quantity, names};
use drava_connection::Limits;
use drava_explanation::advice::{Known, Shares};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{LimitRange, Pod, ResourceQuota};
use k8s_openapi::api::resource::v1::{
    Device, DeviceClass, ResourceClaim, ResourceClaimSpec, ResourceClaimTemplate, ResourceSlice,
};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::watch::objects::{Objects, readable};

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Catalog {
    classes: Objects<DeviceClass>,
    templates: Objects<ResourceClaimSpec>,
    claims: Objects<ResourceClaimSpec>,
    /// Shares, and bytes of the largest partition, of each ResourceSlice.
    slices: Objects<(Shares, Option<u64>)>,
    /// Whether pods are translated, which needs the objects below.
    is_translating: bool,
    /// Limited resources of each ResourceQuota and each LimitRange.
    quotas: Objects<Vec<String>>,
    limit_ranges: Objects<Vec<String>>,
    /// Classes by name, as the allocator reads them.
    classes_by_name: BTreeMap<String, DeviceClass>,
    selectors: Selectors,
}

impl Catalog {
    /// Returns whether all lists are complete.
    fn is_complete(&self) -> bool {
        let of_translation = [self.quotas.is_complete(), self.limit_ranges.is_complete()];
        self.classes.is_complete()
            && self.templates.is_complete()
            && self.claims.is_complete()
            && self.slices.is_complete()
            && (!self.is_translating || of_translation.into_iter().all(|complete| complete))
    }

    pub(super) fn slice(&mut self, event: watcher::Event<ResourceSlice>) {
        self.slices.apply(event, |slice| {
            let shares = Shares::of(&slice);
            let devices = slice.spec.devices?;
            let partition = devices.iter().filter_map(partition_bytes).max();
            (shares.largest_bytes.is_some() || partition.is_some()).then_some((shares, partition))
        });
    }

    pub(super) fn quota(&mut self, event: watcher::Event<ResourceQuota>) {
        self.quotas
            .apply(event, |quota| Some(keys(&quota.spec?.hard?)));
    }

    fn limit_range(&mut self, event: watcher::Event<LimitRange>) {
        self.limit_ranges.apply(event, |range| {
            let limits = range.spec?.limits;
            let limited = limits
                .iter()
                .flat_map(|item| [&item.max, &item.min, &item.max_limit_request_ratio]);
            Some(limited.flatten().flat_map(keys).collect())
        });
    }

    /// Returns what the shares of the cluster can be.
    pub(super) fn shares(&self) -> Shares {
        let shares = self.slices.iter().map(|(_, (shares, _))| *shares);
        shares.fold(Shares::default(), Shares::or)
    }

    /// Returns what advice depends on.
    pub(super) fn known(&self) -> Known<'_> {
        Known {
            classes: &self.classes_by_name,
            selectors: &self.selectors,
            shares: self.shares(),
        }
    }

    /// Returns the names in the pod of its claims for this driver.
    pub(super) fn own_claims(&self, pod: &Pod, namespace: &str) -> BTreeSet<String> {
        let entries = pod.spec.iter();
        let entries = entries.flat_map(|spec| spec.resource_claims.iter().flatten());
        let own = entries.filter(|entry| {
            let template = entry.resource_claim_template_name.as_deref();
            let of_template = template.and_then(|name| self.template_is_own(namespace, name));
            let claim = entry.resource_claim_name.as_deref();
            let named = claim.and_then(|name| self.claim_is_own(namespace, name));
            of_template.or(named) == Some(true)
        });
        own.map(|entry| entry.name.clone()).collect()
    }

    /// Returns the bytes of the largest MIG partition of the cluster.
    pub(super) fn largest_partition_bytes(&self) -> Option<u64> {
        self.slices
            .iter()
            .filter_map(|(_, (_, partition))| *partition)
            .max()
    }

    /// Returns the objects of a namespace that limit resources, with the names of the resources.
    pub(super) fn resource_limits<'a>(
        &'a self,
        namespace: &'a str,
    ) -> impl Iterator<Item = (String, &'a [String])> {
        let of_kind = move |kind: &'static str, objects: &'a Objects<Vec<String>>| {
            objects
                .iter()
                .filter(move |((of, _), _)| of == namespace)
                .map(move |((_, name), resources)| (format!("{kind} {name}"), resources.as_slice()))
        };
        of_kind("ResourceQuota", &self.quotas).chain(of_kind("LimitRange", &self.limit_ranges))
    }

    pub(super) fn class(&mut self, event: watcher::Event<DeviceClass>) {
        self.classes.apply(event, Some);
        let classes = self.classes.iter();
        self.classes_by_name = classes
            .map(|((_, name), class)| (name.clone(), class.clone()))
            .collect();
    }

    pub(super) fn template(&mut self, event: watcher::Event<ResourceClaimTemplate>) {
        self.templates.apply(event, |template| template.spec?.spec);
    }

    pub(super) fn claim(&mut self, event: watcher::Event<ResourceClaim>) {
        // No other pod may reference the claim of a template.
        let is_generated = |claim: &ResourceClaim| {
            let owners = claim.metadata.owner_references.iter().flatten();
            owners.into_iter().any(|owner| owner.kind == "Pod")
        };
        self.claims.apply(event, |claim| {
            let spec = (!is_generated(&claim)).then_some(claim.spec);
            spec.flatten()
        });
    }

    /// Returns the classes by name.
    pub(super) const fn classes(&self) -> &BTreeMap<String, DeviceClass> {
        &self.classes_by_name
    }

    /// Returns whether the template exists.
    pub(super) fn has_template(&self, namespace: &str, name: &str) -> bool {
        self.templates.get(namespace, name).is_some()
    }

    /// Returns whether claims of the template are for this driver; `None` for an unknown template.
    pub(super) fn template_is_own(&self, namespace: &str, name: &str) -> Option<bool> {
        let spec = self.templates.get(namespace, name);
        spec.map(|spec| self.is_own(namespace, spec))
    }

    /// Returns whether the claim is for this driver; `None` for an unknown claim.
    pub(super) fn claim_is_own(&self, namespace: &str, name: &str) -> Option<bool> {
        let spec = self.claims.get(namespace, name);
        spec.map(|spec| self.is_own(namespace, spec))
    }

    fn is_own(&self, namespace: &str, spec: &ResourceClaimSpec) -> bool {
        claim::is_own(namespace, spec, &self.classes_by_name, &self.selectors)
    }
}

/// Returns the memory of a MIG partition.
fn partition_bytes(device: &Device) -> Option<u64> {
    let kind = device.attributes.as_ref()?.get(names::attribute::TYPE)?;
    let is_partition = kind.string.as_deref() == Some(DeviceType::Mig.as_str());
    let memory = device.capacity.as_ref()?.get(names::capacity::MEMORY)?;
    let bytes = Quantity::try_from(&memory.value).ok()?;
    is_partition.then(|| bytes.to_u64_rounded_up()).flatten()
}

fn keys<V>(resources: &BTreeMap<String, V>) -> Vec<String> {
    resources.keys().cloned().collect()
}

/// The catalog, kept up to date by watches.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedCatalog(Arc<RwLock<Catalog>>);

impl SharedCatalog {
    /// Creates an empty catalog. A translation needs further objects.
    pub(super) fn new(is_translating: bool) -> Self {
        let catalog = Catalog {
            is_translating,
            ..Catalog::default()
        };
        Self(Arc::new(RwLock::new(catalog)))
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, Catalog> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, Catalog> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches the objects until the future is dropped. Sends `true` when all lists are complete.
    pub(super) async fn follow(&self, client: &Client, is_complete: &watch::Sender<bool>) {
        let all = || Limits::SHORT_WATCHES.watch();
        tokio::join!(
            self.follow_kind(client, all(), Catalog::class, is_complete),
            self.follow_kind(client, all(), Catalog::template, is_complete),
            // Those of templates are not needed, and are most claims. The admission policy labels them, except for claims that name
            // unknown classes or were created without the policy.
            self.follow_kind(
                client,
                all().labels(&format!("{}!={}", names::CLAIM_LABEL, names::GENERATED)),
                Catalog::claim,
                is_complete
            ),
            self.follow_kind(
                client,
                all().fields(&format!("spec.driver={}", names::DRIVER)),
                Catalog::slice,
                is_complete
            ),
            self.follow_translation(client, is_complete),
        );
    }

    async fn follow_translation(&self, client: &Client, is_complete: &watch::Sender<bool>) {
        if !self.read().is_translating {
            return;
        }
        let all = || Limits::SHORT_WATCHES.watch();
        tokio::join!(
            self.follow_kind(client, all(), Catalog::quota, is_complete),
            self.follow_kind(client, all(), Catalog::limit_range, is_complete),
        );
    }

    async fn follow_kind<K>(
        &self,
        client: &Client,
        config: watcher::Config,
        apply: fn(&mut Catalog, watcher::Event<K>),
        is_complete: &watch::Sender<bool>,
    ) where
        K: Resource<DynamicType = ()> + Clone + Default + DeserializeOwned + Debug + Send + 'static,
    {
        let api = Api::<Listed<K>>::all(client.clone());
        let events = watcher(api, config).default_backoff();
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    let Some(event) = readable(event) else {
                        continue;
                    };
                    let mut catalog = self.write();
                    apply(&mut catalog, event);
                    if catalog.is_complete() {
                        is_complete.send_replace(true);
                    }
                }
                Err(error) => tracing::warn!(
                    error = describe(&error),
                    kind = %K::kind(&()),
                    "watch of the webhook failed; restarting it"
                ),
            }
        }
    }
}
