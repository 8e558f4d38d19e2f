//! Start of kernels: which run at the same time, on how many multiprocessors.

use std::collections::{BTreeMap, BTreeSet};

use super::Engine;
use super::context::{Candidate, Running};
use crate::protocol::{ContextId, Nanos};

impl Engine {
    /// Starts kernels at stream heads, oldest first, while multiprocessors are free. Returns whether any of them takes no time.
    pub(super) fn start_kernels(&mut self) -> bool {
        let contexts = self.contexts.iter();
        let candidates = contexts.flat_map(|(id, context)| context.candidates(*id, self.now));
        let mut candidates: Vec<Candidate> = candidates.collect();
        if candidates.is_empty() {
            return false;
        }
        // Free multiprocessors of the part of each holder.
        let mut free: BTreeMap<ContextId, u32> = BTreeMap::new();
        for (&id, context) in &self.contexts {
            let turns = self.parts.get(&context.part);
            let all = turns.map_or(0, |turns| turns.multiprocessors);
            let free = free.entry(context.holder(id)).or_insert(all);
            *free = free.saturating_sub(context.occupied());
        }
        candidates.sort_unstable();
        let mut full: BTreeSet<ContextId> = BTreeSet::new();
        let mut timeless = false;
        for candidate in candidates {
            let Some(context) = self.contexts.get_mut(&candidate.context) else {
                continue;
            };
            if candidate.nanos == 0 {
                let running = Running {
                    left: 0,
                    multiprocessors: 0,
                };
                context.running.insert(candidate.stream, running);
                timeless = true;
                continue;
            }
            let turns = self.parts.get(&context.part);
            let all = turns.map_or(0, |turns| turns.multiprocessors).max(1);
            let most = context.membership.map(|client| client.multiprocessors);
            let running = fit(&candidate, all, most);
            let Some(free) = free.get_mut(&context.holder(candidate.context)) else {
                continue;
            };
            let own = most.unwrap_or(all).saturating_sub(context.occupied());
            if full.contains(&candidate.context) || running.multiprocessors > own {
                // Blocks are placed in order: a later kernel of the context does not overtake.
                full.insert(candidate.context);
            } else if running.multiprocessors > *free {
                // Nor does a later one of another client, or a large kernel would never start.
                *free = 0;
            } else {
                *free -= running.multiprocessors;
                context.running.insert(candidate.stream, running);
            }
        }
        timeless
    }
}

/// Returns the run of a kernel on a part of `all` multiprocessors. A client of an MPS server fills at most `most` of them, and
/// its kernel takes longer in proportion.
fn fit(candidate: &Candidate, all: u32, most: Option<u32>) -> Running {
    let wanted = candidate.multiprocessors.clamp(1, all);
    let multiprocessors = wanted.min(most.unwrap_or(all)).max(1);
    let nanos = u128::from(candidate.nanos) * u128::from(wanted) / u128::from(multiprocessors);
    Running {
        left: Nanos::try_from(nanos).unwrap_or(Nanos::MAX),
        multiprocessors,
    }
}
