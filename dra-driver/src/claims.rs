//! Kubelet's claims against the API server and the node: looks the claim up, takes its lock, prepares, reports.

use std::sync::Arc;
use std::time::Duration;

use drava_api::event::EventReason;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::args::Delivery;
use crate::artifacts::Installed;
use crate::claim::ClaimRef;
use crate::error::describe;
use crate::inventory::{Node, State};
use crate::lock::Lock;
use crate::plugin::service::Claims;
use crate::prepare::apply::{Applier, Environment, Failure, Repairs};
use crate::prepare::effects::Effects;
use crate::prepare::record::Record;
use crate::proto::dra_v1::Device;
use crate::report::{Injection, Reporter, Subject};

/// How long the API server has to say what a claim is; the client tries again by itself in that time.
const API_PATIENCE: Duration = Duration::from_secs(10);

/// How long a call waits for what the driver finds out when it starts.
const START_PATIENCE: Duration = Duration::from_secs(5);

/// How long a claim waits for the devices of a claim that is leaving: kubelet, told no, asks again only after a minute,
/// and waits for an answer for 45 s.
pub const LEAVING_PATIENCE: Duration = Duration::from_secs(20);

/// Time between two looks at claims that are leaving.
const LEAVING_POLL: Duration = Duration::from_millis(250);

/// A claim was not prepared.
#[derive(Debug)]
pub struct Refusal {
    /// The text for the pod's event.
    pub text: String,
    /// The claims that hold what it needs.
    pub holders: Vec<ClaimRef>,
}

impl From<String> for Refusal {
    fn from(text: String) -> Self {
        let holders = Vec::new();
        Self { text, holders }
    }
}

/// Prepares and unprepares the claims of one node.
pub struct ClaimService<E> {
    /// Pool of the node.
    pub pool: String,
    /// Makes and removes things on the node.
    pub applier: Arc<Applier<E>>,
    /// The API server.
    pub client: Client,
    /// The node's GPUs.
    pub gpus: watch::Receiver<State>,
    /// The installed artifacts, or why there are none; `None` while that is tried for the first time.
    pub installed: watch::Receiver<Option<Result<Installed, String>>>,
    /// How containers of claims to come get libvgpu.
    pub delivery: Delivery,
    /// Where it reports.
    pub reporter: Reporter,
    /// Wakes whoever tidies up.
    pub untidy: Arc<Notify>,
    /// How long a claim waits for the devices of a claim that is leaving.
    pub leaving_patience: Duration,
}

impl<E: Effects> ClaimService<E> {
    /// The claim as the API server has it now; `None` when there is none of this name.
    ///
    /// # Errors
    /// The text for the pod's event.
    pub async fn fetch(&self, claim: &ClaimRef) -> Result<Option<ResourceClaim>, String> {
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let failed =
            |reason: String| format!("claim {claim}: get it from the API server: {reason}");
        match tokio::time::timeout(API_PATIENCE, claims.get_opt(&claim.name)).await {
            Ok(found) => found.map_err(|error| failed(describe(&error))),
            Err(_) => Err(failed(format!(
                "no answer within {} s",
                API_PATIENCE.as_secs()
            ))),
        }
    }

    /// The GPUs and artifacts, or why nothing can be prepared. Waits a little while the driver starts.
    ///
    /// # Errors
    /// The text for the pod's event.
    pub async fn environment(&self, claim: &ClaimRef) -> Result<(Arc<Node>, Installed), String> {
        let looked = |state: &State| !matches!(state, State::Pending);
        let gpus = settled(self.gpus.clone(), looked).await;
        let node = match gpus {
            State::Known(node) => node,
            State::Unknown(reason) => {
                return Err(format!(
                    "claim {claim}: the GPUs of this node are not usable: {reason}"
                ));
            }
            State::Pending => {
                return Err(format!(
                    "claim {claim}: the driver has just started and still looks for the GPUs"
                ));
            }
        };
        match settled(self.installed.clone(), Option::is_some).await {
            Some(Ok(installed)) => Ok((node, installed)),
            Some(Err(reason)) => Err(format!("claim {claim}: {reason}")),
            None => Err(format!(
                "claim {claim}: the driver has just started and still installs libvgpu.so"
            )),
        }
    }

    async fn lock(&self, claim: &ClaimRef) -> Result<Lock, String> {
        let (applier, uid) = (Arc::clone(&self.applier), claim.uid.clone());
        blocking(move || applier.locks().claim(&uid))
            .await?
            .map_err(|error| format!("claim {claim}: {}", describe(&error)))
    }

    /// Prepares a claim whose lock is held and which the API server has as `found`.
    ///
    /// # Errors
    /// The text for the pod's event, and which claims are in the way.
    pub async fn prepare_locked(
        &self,
        claim: &ClaimRef,
        found: Option<ResourceClaim>,
        lock: Lock,
    ) -> Result<Record, Refusal> {
        let (node, installed) = self.environment(claim).await?;
        let (applier, pool, wanted) = (Arc::clone(&self.applier), self.pool.clone(), claim.clone());
        let delivery = self.delivery;
        let (outcome, found, node) = blocking(move || {
            let environment = Environment {
                pool: &pool,
                inventory: &node.inventory,
                driver: &node.driver,
                installed: &installed,
                delivery,
            };
            let outcome = applier.prepare(&wanted, found.as_ref(), &environment);
            // Held to here, whatever becomes of the call that waits for this.
            drop(lock);
            (outcome, found, node)
        })
        .await?;
        let (record, repairs) = outcome.map_err(|error| {
            if matches!(*error.failure, Failure::Unreadable(_)) {
                self.untidy.notify_one();
            }
            let holders = match error.failure.as_ref() {
                Failure::Conflict(conflict) => conflict.holders().to_vec(),
                _ => Vec::new(),
            };
            Refusal {
                text: describe(&error),
                holders,
            }
        })?;
        self.report_repairs(claim, repairs);
        if let Some(found) = &found {
            self.reporter
                .devices(found, &record, &node.inventory, &Injection::Expected);
        }
        Ok(record)
    }

    /// Whether one of the claims is not allocated any more, so that kubelet is about to unprepare it: the pod was deleted
    /// by force, and its containers still end.
    async fn is_any_leaving(&self, claims: &[ClaimRef]) -> bool {
        for claim in claims {
            let is_leaving = match self.fetch(claim).await {
                Ok(Some(found)) => {
                    found.metadata.uid.as_deref() != Some(claim.uid.as_str())
                        || found
                            .status
                            .is_none_or(|status| status.allocation.is_none())
                }
                Ok(None) => true,
                Err(_) => false,
            };
            if is_leaving {
                return true;
            }
        }
        false
    }

    /// Raises an event about what was out of order.
    pub fn report_repairs(&self, claim: &ClaimRef, Repairs(repairs): Repairs) {
        if !repairs.is_empty() {
            self.reporter.event(
                Subject::Claim(claim.clone()),
                EventReason::ClaimStateRepaired,
                repairs.join("; "),
            );
        }
    }
}

impl<E: Effects> Claims for ClaimService<E> {
    async fn prepare(&self, claim: &ClaimRef) -> Result<Vec<Device>, String> {
        let deadline = Instant::now() + self.leaving_patience;
        loop {
            let lock = self.lock(claim).await?;
            let found = self.fetch(claim).await?;
            let refusal = match self.prepare_locked(claim, found, lock).await {
                Ok(record) => return Ok(answer(&record)),
                Err(refusal) => refusal,
            };
            if Instant::now() >= deadline || !self.is_any_leaving(&refusal.holders).await {
                return Err(refusal.text);
            }
            tokio::time::sleep(LEAVING_POLL).await;
        }
    }

    async fn unprepare(&self, claim: &ClaimRef) -> Result<(), String> {
        let lock = self.lock(claim).await?;
        let (applier, wanted) = (Arc::clone(&self.applier), claim.clone());
        blocking(move || {
            applier
                .unprepare(&wanted)
                .map_err(|error| describe(&error))?;
            lock.remove();
            Ok(())
        })
        .await?
    }
}

/// The value once `is_settled`, or the present one after a while.
async fn settled<T: Clone>(mut value: watch::Receiver<T>, is_settled: impl Fn(&T) -> bool) -> T {
    let waited = tokio::time::timeout(START_PATIENCE, value.wait_for(|value| is_settled(value)));
    if let Ok(Ok(value)) = waited.await {
        return value.clone();
    }
    value.borrow().clone()
}

/// What kubelet is told: the same for the same record.
fn answer(record: &Record) -> Vec<Device> {
    let device = |device: &crate::prepare::Prepared| Device {
        request_names: vec![device.request.clone()],
        pool_name: device.pool.clone(),
        device_name: device.device.clone(),
        cdi_device_ids: vec![format!(
            "{}={}",
            drava_api::names::CDI_KIND,
            device.cdi_name(&record.claim.uid)
        )],
        share_id: device.share().map(|share| share.id.to_string()),
    };
    record.devices.iter().map(device).collect()
}

/// Runs what blocks where that is allowed. It is not interrupted when the caller goes away.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let span = tracing::Span::current();
    tokio::task::spawn_blocking(move || span.in_scope(work))
        .await
        .map_err(|error| format!("the driver failed: {error}"))
}
