//! Explanations and simulations on request.
//!
//! They are decided on a snapshot that is read for them, apart from the planner: a request delays no allocation, and every
//! replica answers. Requests of the same seconds share a snapshot, and one request is decided at a time.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use drava_explanation::explain::{self, ExplainError, Settings};
use drava_explanation::simulate::{self, SimulateError};
use drava_explanation::snapshot::{self, ListError, Objects};
use kube::Client;
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::task::JoinError;
use tokio::time::Instant;

/// Time for which requests share a snapshot.
const SHARED_FOR: Duration = Duration::from_secs(2);
/// Maximum number of pods of one simulation.
const MAX_PODS: usize = 200;

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ExplainerError {
    /// The cluster cannot be read.
    #[error("cannot read the cluster")]
    List(#[from] ListError),
    /// The pod does not exist.
    #[error(transparent)]
    Explain(#[from] ExplainError),
    /// The manifests cannot be simulated.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
    /// The decision panicked.
    #[error("the decision was aborted")]
    Aborted(#[from] JoinError),
}

/// See the [module](self).
pub struct Explainer {
    client: Client,
    settings: Settings,
    /// Whether the controller may read claim templates.
    has_templates: bool,
    latest: Mutex<Option<Latest>>,
}

impl fmt::Debug for Explainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Explainer").finish_non_exhaustive()
    }
}

struct Latest {
    read_at: Instant,
    objects: Arc<Objects>,
}

impl Explainer {
    /// Creates an explainer. Without the permission for claim templates, simulations know those of the manifests only.
    #[must_use]
    pub fn new(client: Client, settings: Settings, has_templates: bool) -> Arc<Self> {
        Arc::new(Self {
            client,
            settings,
            has_templates,
            latest: Mutex::new(None),
        })
    }

    /// Explains a pod.
    ///
    /// # Errors
    /// When the cluster cannot be read, or the pod does not exist.
    pub async fn explain(
        self: &Arc<Self>,
        namespace: &str,
        name: &str,
    ) -> Result<explain::Report, ExplainerError> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        let settings = self.settings.clone();
        self.decide(move |objects| {
            let (mut snapshot, _) = objects.into_snapshot();
            Ok(explain::pod_with_changes(
                &mut snapshot,
                &namespace,
                &name,
                &settings,
            )?)
        })
        .await
    }

    /// Simulates the pods of manifests; those without a namespace are of `namespace`.
    ///
    /// # Errors
    /// When the cluster cannot be read, or the manifests cannot be simulated.
    pub async fn simulate(
        self: &Arc<Self>,
        namespace: &str,
        documents: Vec<Value>,
    ) -> Result<simulate::Report, ExplainerError> {
        let namespace = namespace.to_owned();
        let settings = self.settings.clone();
        self.decide(move |objects| {
            let (mut snapshot, templates) = objects.into_snapshot();
            Ok(simulate::run(
                &mut snapshot,
                templates,
                documents,
                &namespace,
                None,
                MAX_PODS,
                &settings,
            )?)
        })
        .await
    }

    /// Decides on the objects of the cluster, outside the tasks that must not wait.
    async fn decide<R: Send + 'static>(
        self: &Arc<Self>,
        decide: impl FnOnce(Objects) -> Result<R, ExplainerError> + Send + 'static,
    ) -> Result<R, ExplainerError> {
        let mut latest = self.latest.lock().await;
        let objects = match latest.as_ref() {
            Some(latest) if latest.read_at.elapsed() < SHARED_FOR => Arc::clone(&latest.objects),
            _ => {
                *latest = None;
                let objects = Arc::new(self.read().await?);
                *latest = Some(Latest {
                    read_at: Instant::now(),
                    objects: Arc::clone(&objects),
                });
                self.forget_later();
                objects
            }
        };
        let decided = tokio::task::spawn_blocking(move || decide(objects.as_ref().clone())).await?;
        drop(latest);
        decided
    }

    async fn read(&self) -> Result<Objects, ListError> {
        let objects = if self.has_templates {
            Box::pin(snapshot::fetch_with_templates(&self.client)).await
        } else {
            Box::pin(snapshot::fetch(&self.client)).await
        };
        Ok(objects?.trimmed())
    }

    /// Frees the memory of the snapshot when it is not shared any more.
    fn forget_later(self: &Arc<Self>) {
        let explainer = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(SHARED_FOR).await;
            if let Some(explainer) = explainer.upgrade() {
                let mut latest = explainer.latest.lock().await;
                latest.take_if(|latest| latest.read_at.elapsed() >= SHARED_FOR);
            }
        });
    }
}
