//! The object that names the leader to the admission policy, see [`drava_api::leader`].

use drava_api::leader::{GpuControllerLeader, GpuControllerLeaderSpec, LEADER_NAME};
use kube::Api;
use kube::api::PostParams;

use super::term::Term;
use super::{RoundError, request};

/// Whether the object names a replica.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Named {
    Yes,
    /// The custom resource definition is missing.
    NotServed,
    /// The term has ended, so another replica may be the leader.
    TermEnded,
}

/// Names `identity` as the leader during `term`.
///
/// The term is checked between read and write. A leader that was stopped after the check cannot replace the name of its
/// successor, because the resource version has changed.
///
/// # Errors
/// When a request fails, or another replica has changed the object since it was read.
pub(super) async fn name(
    leaders: &Api<GpuControllerLeader>,
    identity: &str,
    term: &Term,
) -> Result<Named, RoundError> {
    let current = request("read the GpuControllerLeader", leaders.get_opt(LEADER_NAME)).await?;
    if !term.is_valid() {
        return Ok(Named::TermEnded);
    }
    let spec = GpuControllerLeaderSpec {
        holder: identity.to_owned(),
    };
    let parameters = PostParams::default();
    let written = match current {
        Some(leader) if leader.spec == spec => return Ok(Named::Yes),
        Some(leader) => {
            let replaced = GpuControllerLeader { spec, ..leader };
            request(
                "replace the GpuControllerLeader",
                leaders.replace(LEADER_NAME, &parameters, &replaced),
            )
            .await
        }
        None => {
            let created = GpuControllerLeader::new(LEADER_NAME, spec);
            let created = request(
                "create the GpuControllerLeader",
                leaders.create(&parameters, &created),
            )
            .await;
            if created.as_ref().is_err_and(RoundError::is_not_found) {
                return Ok(Named::NotServed);
            }
            created
        }
    };
    written.map(|_| Named::Yes)
}
