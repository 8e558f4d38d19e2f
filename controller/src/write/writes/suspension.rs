//! Writes of the intent to suspend a claim.

use drava_allocator::object::object_key;
use drava_api::{names, suspension};
use serde_json::json;

use super::{WriteError, Writer};
use crate::action::{SuspensionOutcome, SuspensionWrite};

impl Writer {
    /// Writes the intent, or withdraws it, in the version of the claim for which it was decided. When it returns, the write is
    /// not executed any more.
    pub async fn write_suspension(&self, write: SuspensionWrite) -> SuspensionOutcome {
        let SuspensionWrite { claim, is_intended } = write;
        let value = is_intended.then_some(names::SUSPEND);
        let label = json!({"labels": {names::SUSPEND_LABEL: value}});
        let response = self.requests.patch_metadata(&claim, &label).await;
        let newest = match self.newest(claim.as_ref().clone(), response).await {
            Ok(newest) => Some(newest),
            Err(error) => {
                if !matches!(error, WriteError::Deleted(_)) {
                    tracing::warn!(%error, is_intended, "cannot write whether a claim is to be suspended");
                }
                error.into_claim()
            }
        };
        let is_written = newest
            .as_ref()
            .is_some_and(|newest| suspension::is_intended(&newest.metadata) == is_intended);
        SuspensionOutcome {
            key: object_key(&claim.metadata),
            claim: newest.map(Box::new),
            is_written,
        }
    }
}
