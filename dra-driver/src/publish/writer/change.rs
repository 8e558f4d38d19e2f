//! Single writes of ResourceSlices, and watch events of writes by other clients.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::runtime::watcher;

use crate::publish::Features;
use crate::publish::diff::{self, Change};

/// The slices could not be synchronized.
#[derive(Debug, thiserror::Error)]
pub(super) enum SyncError {
    #[error(
        "cannot find Node object {0}; set --node-name (NODE_NAME) to the name that kubelet registered"
    )]
    NoNode(String),
    #[error("cannot {operation} {object}")]
    Api {
        operation: &'static str,
        object: String,
        #[source]
        source: kube::Error,
    },
}

/// Returns the features that the API server would store, without a write.
pub(super) async fn dry_run(
    slices: &Api<ResourceSlice>,
    change: &Change,
) -> Result<Features, SyncError> {
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let (slice, stored) = match change {
        Change::Delete { .. } => return Ok(Features::ALL),
        Change::Update(slice) => {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            (slice, slices.replace(name, &params, slice).await)
        }
        Change::Create(slice) => (slice, slices.create(&params, slice).await),
    };
    let stored = stored.map_err(|source| SyncError::Api {
        operation: "try to write",
        object: format!(
            "ResourceSlice {}",
            slice.metadata.name.as_deref().unwrap_or_default()
        ),
        source,
    })?;
    Ok(diff::dropped(slice, &stored))
}

/// Performs one write. Returns the features that the API server stored.
pub(super) async fn apply(
    slices: &Api<ResourceSlice>,
    change: &Change,
    own: &mut BTreeMap<String, String>,
) -> Result<Features, SyncError> {
    let api = |operation, name: &str, source| SyncError::Api {
        operation,
        object: format!("ResourceSlice {name}"),
        source,
    };
    let (sent, stored) = match change {
        Change::Delete { name, uid } => {
            tracing::info!(slice = name, "deleting the ResourceSlice");
            let params = DeleteParams {
                preconditions: Some(Preconditions {
                    uid: Some(uid.clone()),
                    resource_version: None,
                }),
                ..DeleteParams::default()
            };
            return match slices.delete(name, &params).await {
                Ok(_) => Ok(Features::ALL),
                // Already deleted or replaced; the watch event triggers the next synchronization.
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {
                    Ok(Features::ALL)
                }
                Err(source) => Err(api("delete", name, source)),
            };
        }
        Change::Update(slice) => {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            tracing::info!(
                slice = name,
                generation = slice.spec.pool.generation,
                "updating the ResourceSlice"
            );
            let stored = slices.replace(name, &PostParams::default(), slice).await;
            (slice, stored.map_err(|source| api("update", name, source))?)
        }
        Change::Create(slice) => {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            tracing::info!(
                slice = name,
                generation = slice.spec.pool.generation,
                "creating the ResourceSlice"
            );
            let stored = slices.create(&PostParams::default(), slice).await;
            (slice, stored.map_err(|source| api("create", name, source))?)
        }
    };
    own.insert(
        stored.metadata.name.clone().unwrap_or_default(),
        version(&stored),
    );
    Ok(diff::dropped(sent, &stored))
}

/// Returns whether a watch event shows a change by another client.
pub(super) fn is_foreign_change(
    event: &watcher::Event<ResourceSlice>,
    own: &BTreeMap<String, String>,
) -> bool {
    match event {
        watcher::Event::Apply(slice) | watcher::Event::InitApply(slice) => {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            own.get(name) != Some(&version(slice))
        }
        watcher::Event::Delete(_) | watcher::Event::InitDone => true,
        watcher::Event::Init => false,
    }
}

/// Returns UID and resource version of a slice.
fn version(slice: &ResourceSlice) -> String {
    let metadata = &slice.metadata;
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    format!(
        "{}@{}",
        part(&metadata.uid),
        part(&metadata.resource_version)
    )
}
