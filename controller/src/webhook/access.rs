//! Who a caller is, and what it may see: decided by the API server.

use std::collections::BTreeMap;

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use drava_api::error::describe;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};

/// Why a caller has no access.
#[derive(Debug, thiserror::Error)]
pub(super) enum AccessError {
    /// There is no valid token.
    #[error("no valid token")]
    Unauthenticated,
    /// The API server does not tell.
    #[error("{0}")]
    Unavailable(String),
}

/// An authenticated caller.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    user: String,
    uid: Option<String>,
    groups: Vec<String>,
    extra: BTreeMap<String, Vec<String>>,
}

impl Caller {
    /// Returns the name of the user.
    pub(super) fn name(&self) -> &str {
        &self.user
    }
}

/// See the [module](self).
#[derive(Clone)]
pub(super) struct Access(Client);

impl Access {
    pub(super) const fn new(client: Client) -> Self {
        Self(client)
    }

    /// Returns the caller that the bearer token names.
    pub(super) async fn authenticate(&self, headers: &HeaderMap) -> Result<Caller, AccessError> {
        let header = headers.get(AUTHORIZATION);
        let header = header.and_then(|value| value.to_str().ok());
        let token = header.and_then(|value| value.strip_prefix("Bearer "));
        let token = token.ok_or(AccessError::Unauthenticated)?.trim();
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                ..TokenReviewSpec::default()
            },
            ..TokenReview::default()
        };
        let reviews: Api<TokenReview> = Api::all(self.0.clone());
        let reviewed = reviews.create(&PostParams::default(), &review).await;
        let status = reviewed.map_err(|error| unavailable(&error))?.status;
        let status = status.ok_or(AccessError::Unauthenticated)?;
        match status.user {
            Some(user) if status.authenticated == Some(true) => Ok(Caller {
                user: user.username.unwrap_or_default(),
                uid: user.uid,
                groups: user.groups.unwrap_or_default(),
                extra: user.extra.unwrap_or_default(),
            }),
            _ => Err(AccessError::Unauthenticated),
        }
    }

    /// Returns whether the caller may do this to pods; without a namespace, to those of all namespaces.
    pub(super) async fn may(
        &self,
        caller: &Caller,
        verb: &str,
        namespace: &str,
        name: &str,
    ) -> Result<bool, AccessError> {
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(caller.user.clone()),
                uid: caller.uid.clone(),
                groups: Some(caller.groups.clone()),
                extra: Some(caller.extra.clone()),
                resource_attributes: Some(ResourceAttributes {
                    verb: Some(verb.to_owned()),
                    resource: Some("pods".to_owned()),
                    namespace: (!namespace.is_empty()).then(|| namespace.to_owned()),
                    name: (!name.is_empty()).then(|| name.to_owned()),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let reviews: Api<SubjectAccessReview> = Api::all(self.0.clone());
        let reviewed = reviews.create(&PostParams::default(), &review).await;
        let status = reviewed.map_err(|error| unavailable(&error))?.status;
        Ok(status.is_some_and(|status| status.allowed))
    }
}

fn unavailable(error: &kube::Error) -> AccessError {
    tracing::warn!(
        error = describe(error),
        "cannot review the access of a caller"
    );
    AccessError::Unavailable("the API server does not tell what the caller may do".to_owned())
}
