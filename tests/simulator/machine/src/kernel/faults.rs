//! How a card can fail on demand.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::protocol::{CardIndex, Figure, MigRequest, Refusal, Request};

use super::Kernel;

/// Faults of one card, from now on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Faults {
    /// It fell off the bus: whatever asks for it is told that it is lost.
    pub lost: bool,
    /// Every answer about it takes so much longer.
    pub delay: Duration,
    /// No more contexts, as when the card's memory is full.
    pub refuses_contexts: bool,
    /// No more GPU or compute instances, whatever is free.
    pub refuses_instances: bool,
    /// Figures that NVML does not have.
    pub unsupported: BTreeSet<Figure>,
}

impl Kernel {
    /// Replaces the faults of a card.
    ///
    /// # Errors
    /// When there is no such card.
    pub fn break_card(&mut self, card: CardIndex, faults: Faults) -> Result<(), Refusal> {
        self.card_mut(card)?.faults = faults;
        Ok(())
    }

    /// How much longer the answer to a request takes.
    #[must_use]
    pub fn delay(&self, request: &Request) -> Duration {
        let card = self
            .card_asked_about(request)
            .and_then(|card| self.card(card).ok());
        card.map_or(Duration::ZERO, |card| card.faults.delay)
    }

    /// Refuses a request about a card that cannot answer it.
    pub(super) fn check_faults(&self, request: &Request) -> Result<(), Refusal> {
        let Some(faults) = self
            .card_asked_about(request)
            .and_then(|card| self.card(card).ok())
        else {
            return Ok(());
        };
        let faults = &faults.faults;
        match request {
            _ if faults.lost => Err(Refusal::Lost),
            Request::CreateContext { .. } if faults.refuses_contexts => Err(Refusal::OutOfMemory),
            Request::Mig {
                request:
                    MigRequest::CreateGpuInstance { .. } | MigRequest::CreateComputeInstance { .. },
                ..
            } if faults.refuses_instances => Err(Refusal::InsufficientResources),
            _ => Ok(()),
        }
    }

    /// The card that a request is about. Giving back is never about a card: it always works.
    fn card_asked_about(&self, request: &Request) -> Option<CardIndex> {
        match request {
            Request::CardState { card }
            | Request::Samples { card, .. }
            | Request::Counters { card, .. }
            | Request::Accounting { card, .. }
            | Request::Mig { card, .. }
            | Request::RegisterEvents { card }
            | Request::CreateContext { card }
            | Request::CreateMemory { card, .. }
            | Request::MemoryInfo { card } => Some(*card),
            Request::Allocate { context, .. } => Some(self.contexts.get(context)?.card),
            Request::Hello { .. }
            | Request::Checkpoint { .. }
            | Request::DestroyContext { .. }
            | Request::Free { .. }
            | Request::Release { .. }
            | Request::Share { .. }
            | Request::Open { .. }
            | Request::Export { .. }
            | Request::Import => None,
        }
    }
}
