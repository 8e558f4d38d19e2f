//! A candidate as a state machine: which request follows from which response. No I/O.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};

use super::term::Term;
use super::{LEASE_DURATION, LEASE_NAME, VALIDITY};
use crate::operate::clock::Clock;

/// Next step of a round.
#[derive(Debug)]
pub(super) enum Step {
    /// Read the lease.
    Read,
    /// Create the lease.
    Create(Box<Lease>),
    /// Replace the lease, guarded by its resource version.
    Replace(Box<Lease>),
    /// The round has ended.
    Wait,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Candidate {
    identity: String,
    clock: Clock,
    /// The lease as this candidate has written it; renewed without another read.
    held: Option<Lease>,
    /// Resource version of the lease of another holder, and when it was observed first.
    observed: Option<(Option<String>, Duration)>,
    term: Option<Arc<Term>>,
}

impl Candidate {
    pub(super) fn new(identity: String, clock: Clock) -> Self {
        Self {
            identity,
            clock,
            held: None,
            observed: None,
            term: None,
        }
    }

    pub(super) fn identity(&self) -> &str {
        &self.identity
    }

    /// Starts a round.
    pub(super) fn start(&self, wall_time: &MicroTime) -> Step {
        match &self.held {
            Some(lease) => Step::Replace(Box::new(self.renewal(lease.clone(), wall_time))),
            None => Step::Read,
        }
    }

    /// Continues a round after a read.
    pub(super) fn read(&mut self, lease: Option<Lease>, wall_time: &MicroTime) -> Step {
        let Some(lease) = lease else {
            self.end_term();
            // The deleted lease of another holder is valid until it would have expired.
            return if self.observed.is_some() && !self.has_expired() {
                Step::Wait
            } else {
                Step::Create(Box::new(self.renewal(Lease::default(), wall_time)))
            };
        };
        let holder = lease
            .spec
            .as_ref()
            .and_then(|spec| spec.holder_identity.as_deref())
            .unwrap_or_default();
        if holder == self.identity {
            return Step::Replace(Box::new(self.renewal(lease, wall_time)));
        }
        self.end_term();
        if !holder.is_empty() {
            let version = &lease.metadata.resource_version;
            if self.observed.as_ref().map(|(observed, _)| observed) != Some(version) {
                self.observed = Some((version.clone(), self.clock.now()));
            }
            if !self.has_expired() {
                return Step::Wait;
            }
        }
        Step::Replace(Box::new(self.renewal(lease, wall_time)))
    }

    /// Ends a round: the lease was written by a request sent at `sent_at`. Returns the term if it starts.
    ///
    /// The response may be late, so the validity starts with the request.
    pub(super) fn written(&mut self, lease: Lease, sent_at: Duration) -> Option<Arc<Term>> {
        self.held = Some(lease);
        self.observed = None;
        let valid_until = sent_at + VALIDITY;
        if self
            .term
            .as_ref()
            .is_some_and(|term| term.extend(valid_until))
        {
            return None;
        }
        let term = Arc::new(Term::new(self.clock.clone(), valid_until));
        self.term = Some(Arc::clone(&term));
        term.is_valid().then_some(term)
    }

    /// Continues a round after a conflict: another candidate, or a late request of this one, has changed the lease.
    pub(super) fn conflicted(&mut self) -> Step {
        match self.held.take() {
            Some(_) => Step::Read,
            None => Step::Wait,
        }
    }

    /// Ends the term. Returns the lease without holder if `lease` is held by this candidate.
    pub(super) fn released(&mut self, mut lease: Lease) -> Option<Lease> {
        self.end_term();
        let holder = &mut lease.spec.as_mut()?.holder_identity;
        if holder.as_deref() != Some(&self.identity) {
            return None;
        }
        *holder = Some(String::new());
        Some(lease)
    }

    fn end_term(&mut self) {
        self.held = None;
        if let Some(term) = self.term.take() {
            term.revoke();
        }
    }

    /// Returns whether the observed lease was not changed for its duration, by the clock of this replica.
    fn has_expired(&self) -> bool {
        self.observed
            .as_ref()
            .is_some_and(|(_, since)| self.clock.now().saturating_sub(*since) > LEASE_DURATION)
    }

    /// Returns the lease, acquired or renewed by this candidate.
    fn renewal(&self, lease: Lease, wall_time: &MicroTime) -> Lease {
        let is_new = lease.spec.is_none();
        let spec = lease.spec.unwrap_or_default();
        let is_held = spec.holder_identity.as_deref() == Some(&self.identity);
        let transitions = spec.lease_transitions.unwrap_or_default();
        Lease {
            metadata: ObjectMeta {
                name: Some(LEASE_NAME.to_owned()),
                ..lease.metadata
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.identity.clone()),
                lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
                acquire_time: if is_held {
                    spec.acquire_time
                } else {
                    Some(wall_time.clone())
                },
                renew_time: Some(wall_time.clone()),
                lease_transitions: Some(if is_held || is_new {
                    transitions
                } else {
                    transitions.saturating_add(1)
                }),
                ..spec
            }),
        }
    }
}
