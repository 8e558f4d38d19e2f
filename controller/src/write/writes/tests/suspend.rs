//! Writes of intents to suspend claims, under faults.

use std::sync::Arc;

use drava_api::{names, suspension};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::server::{Fault, start};
use crate::action::SuspensionWrite;
use crate::fixture::claim;

#[tokio::test]
async fn writes_and_withdraws_intent_in_the_version_of_the_decision() {
    // The faults, whether the claim has the label then, and whether the outcome says so.
    let cases = [
        (vec![], true, true),
        (vec![Fault::ResponseLost], true, true),
        // Another writer was first: the planner decides again.
        (vec![Fault::ChangedBefore], false, false),
        (vec![Fault::RequestLost], false, false),
    ];
    for (faults, has_label, is_written) in cases {
        for is_intended in [true, false] {
            let mut claim = claim("a", "1Gi");
            if !is_intended {
                let label = (names::SUSPEND_LABEL.to_owned(), names::SUSPEND.to_owned());
                claim.metadata.labels = Some([label].into());
            }
            let (writer, server) = start(
                std::slice::from_ref(&claim),
                &faults,
                &CancellationToken::new(),
            );
            let write = SuspensionWrite {
                claim: Arc::new(claim),
                is_intended,
                suspended_for: is_intended.then(|| "pod default/urgent".to_owned()),
            };
            let outcome = writer.write_suspension(write).await;
            assert_eq!(outcome.is_written, is_written, "{faults:?}");
            let newest = outcome.claim.unwrap();
            let stored = &server.lock().unwrap().objects["a"]["metadata"];
            assert_eq!(
                json!(newest.metadata.resource_version),
                stored["resourceVersion"],
                "{faults:?}"
            );
            let expected = is_intended == has_label;
            let label = &stored["labels"][names::SUSPEND_LABEL];
            assert_eq!(label == names::SUSPEND, expected, "{faults:?}");
            assert_eq!(suspension::is_intended(&newest.metadata), expected);
            let pod = suspension::suspended_for(&newest.metadata);
            let is_named = is_intended && has_label;
            assert_eq!(pod, is_named.then_some("pod default/urgent"), "{faults:?}");
        }
    }
}
