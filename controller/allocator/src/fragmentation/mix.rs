//! The mix of requests: how often the pods of this cluster have requested what, with less weight for older pods.
//!
//! Rankings of nodes follow from a snapshot of the mix. A new one is made when the number of pods has grown by
//! [`GROWTH`], or after [`RENEWAL`] pods.

use std::collections::BTreeMap;
use std::sync::Arc;

use drava_api::names;

use super::NodeRoom;
use crate::capacity::Amounts;
use crate::claim::{ClaimSpec, Count, Request};
use crate::selector::{MATCH_LIMIT, Selector};

/// Growth of the weight from one pod to the next: half of it is lost after about 7,000 pods.
const DECAY: f64 = 1.0001;
/// Weight of a pod at which all weights are scaled down.
const MAX_WEIGHT: f64 = 1e9;
/// Most different requests that are counted; the rarest make room for new ones.
const MAX_COUNTED: usize = 512;
/// Part of all pods that the requests of a snapshot cover.
const COVERAGE: f64 = 0.95;
/// Most requests in a snapshot.
const MAX_TYPICAL: usize = 64;
/// Most different selectors in a snapshot, so that the devices keep the results of all. Those of one tenant are evaluated in the
/// decisions of all others; requests with more are not typical.
const MAX_SELECTORS: usize = MATCH_LIMIT / 4;
/// See the [module](self).
const GROWTH: u64 = 4;
/// See the [module](self).
const RENEWAL: u64 = 8192;

/// Amount of each GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// A GPU without other claims.
    Whole,
    /// This part of its memory.
    Part(f64),
    /// This memory, bytes.
    Memory(f64),
}

/// A request that pods of this cluster make.
#[derive(Debug, Clone)]
pub struct TypicalRequest {
    /// Part of the pods.
    pub weight: f64,
    /// Number of GPUs.
    pub gpus: usize,
    /// Amount of each.
    pub amount: Amount,
    /// Selectors of classes and claims.
    pub selectors: Vec<Arc<Selector>>,
    pub(crate) room: NodeRoom,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Mix {
    pub(super) counted: BTreeMap<String, TypicalRequest>,
    /// Weight of the next pod.
    weight: f64,
    pods: u64,
    next_snapshot: u64,
    snapshot: Vec<TypicalRequest>,
    snapshots: u64,
}

impl Mix {
    /// Counts a new pod with these claims and requests. Returns whether there is a new snapshot.
    pub(crate) fn observe(&mut self, claims: &[ClaimSpec], requests: &Amounts) -> bool {
        let Some((key, request)) = typical(claims, requests) else {
            return false;
        };
        self.weight = if self.pods == 0 {
            1.0
        } else {
            self.weight * DECAY
        };
        self.pods += 1;
        let weight = self.weight;
        self.counted.entry(key).or_insert(request).weight += weight;
        if self.counted.len() > MAX_COUNTED {
            let by_weight = |one: &(&String, &TypicalRequest),
                             other: &(&String, &TypicalRequest)| {
                one.1.weight.total_cmp(&other.1.weight)
            };
            let rarest = self.counted.iter().min_by(by_weight);
            if let Some(rarest) = rarest.map(|(key, _)| key.clone()) {
                self.counted.remove(&rarest);
            }
        }
        if self.weight > MAX_WEIGHT {
            for request in self.counted.values_mut() {
                request.weight /= self.weight;
            }
            self.weight = 1.0;
        }
        let is_due = self.pods >= self.next_snapshot;
        if is_due {
            self.next_snapshot = (self.pods * GROWTH).min(self.pods + RENEWAL);
            self.renew();
        }
        is_due
    }

    fn renew(&mut self) {
        let mut requests: Vec<_> = self.counted.values().cloned().collect();
        requests.sort_by(|one, other| other.weight.total_cmp(&one.weight));
        let all: f64 = requests.iter().map(|request| request.weight).sum();
        let mut covered = 0.0;
        let mut selectors: Vec<Arc<Selector>> = Vec::new();
        requests.retain(|request| {
            let before = selectors.len();
            for selector in &request.selectors {
                if !selectors.contains(selector) {
                    selectors.push(Arc::clone(selector));
                }
            }
            let is_within = selectors.len() <= MAX_SELECTORS;
            if !is_within {
                selectors.truncate(before);
            }
            is_within
        });
        requests.truncate(MAX_TYPICAL);
        requests.retain(|request| {
            let is_typical = covered < COVERAGE * all;
            covered += request.weight;
            is_typical
        });
        let total: f64 = requests.iter().map(|request| request.weight).sum();
        for request in &mut requests {
            request.weight /= total;
        }
        self.snapshot = requests;
        self.snapshots += 1;
    }

    /// Returns the number of snapshots so far.
    pub(crate) const fn snapshots(&self) -> u64 {
        self.snapshots
    }

    /// Returns the typical requests; their weights add up to 1.
    #[must_use]
    pub fn requests(&self) -> &[TypicalRequest] {
        &self.snapshot
    }
}

/// Returns the request of a pod, and what distinguishes it from others; `None` for a pod that requests all devices or admin
/// access.
fn typical(claims: &[ClaimSpec], requests: &Amounts) -> Option<(String, TypicalRequest)> {
    let mut request = TypicalRequest {
        weight: 0.0,
        gpus: 0,
        amount: Amount::Part(0.0),
        selectors: Vec::new(),
        room: NodeRoom::of(requests),
    };
    for spec in claims.iter().flat_map(|claim| &claim.requests) {
        add(&mut request, spec)?;
    }
    let mut sources: Vec<&str> = request
        .selectors
        .iter()
        .map(|selector| selector.source())
        .collect();
    sources.sort_unstable();
    let key = format!(
        "{} {:?} {:?} {}",
        request.gpus,
        request.amount,
        request.room,
        sources.join("\n")
    );
    Some((key, request))
}

/// Adds one request of a claim: its preferred alternative counts.
fn add(typical: &mut TypicalRequest, request: &Request) -> Option<()> {
    let alternative = request.alternatives.first()?;
    let Count::Exactly(count) = alternative.count else {
        return None;
    };
    if alternative.admin_access {
        return None;
    }
    let memory = alternative.capacity.get(names::capacity::MEMORY);
    let amount = match (alternative.memory_percent, memory) {
        (Some(percent), _) => Amount::Part(f64::from(percent.get()) / 100.0),
        (None, Some(memory)) => Amount::Memory(memory.to_f64_lossy()),
        (None, None) => Amount::Whole,
    };
    typical.amount = match (typical.amount, amount) {
        (Amount::Whole, _) | (_, Amount::Whole) => Amount::Whole,
        (Amount::Part(one), Amount::Part(other)) => Amount::Part(one.max(other)),
        (Amount::Memory(one), Amount::Memory(other)) => Amount::Memory(one.max(other)),
        (Amount::Memory(memory), Amount::Part(_)) | (Amount::Part(_), Amount::Memory(memory)) => {
            Amount::Memory(memory)
        }
    };
    typical.gpus += count;
    let selectors = alternative.class_selectors.iter();
    typical
        .selectors
        .extend(selectors.chain(&alternative.selectors).cloned());
    Some(())
}
