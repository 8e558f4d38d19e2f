//! Comparison of both allocators on one case.

use std::fmt;

use anyhow::{Context as _, Result, ensure};
use drava_api::names;
use drava_cluster::Kubernetes;
use serde_json::Value;

use crate::allocator::{self, Decision};
use crate::case::Case;
use crate::exception::{self, Disagreement, Exception};
use crate::program::{NodeAnswer, Program};
use crate::validator::{self, Placed};

/// Result for one node of a case.
#[derive(Debug, Clone)]
pub enum Verdict {
    /// Both have a solution, and ours is valid.
    Feasible,
    /// Neither has a solution.
    Infeasible,
    /// A listed difference.
    Listed(Exception),
    /// A difference that is not listed.
    Different(Difference),
}

/// A difference that is not listed.
#[derive(Debug, Clone)]
pub struct Difference {
    /// The kind, by which a reduced case is recognized.
    pub kind: DifferenceKind,
    /// Name of the node.
    pub node: String,
    /// Both results.
    pub text: String,
}

/// Kind of a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DifferenceKind {
    /// The allocators disagree.
    Disagreement(Disagreement),
    /// Our placement violates a rule.
    InvalidPlacement,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on node {}: {}", self.kind, self.node, self.text)
    }
}

/// Compares decisions with those of one release.
#[derive(Debug)]
pub struct Comparison {
    release: Kubernetes,
    program: Program,
    /// Both must select the same devices.
    is_first_fit: bool,
}

impl Comparison {
    /// Starts the program of a release.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(release: Kubernetes, is_first_fit: bool) -> Result<Self> {
        Ok(Self {
            release,
            program: Program::start(release)?,
            is_first_fit,
        })
    }

    /// Compares every node of a case.
    ///
    /// # Errors
    /// When the case is malformed or the program fails.
    pub fn compare(&mut self, json: &Value) -> Result<Vec<Verdict>> {
        self.compare_mutated(json, json)
    }

    /// As [`Self::compare`], where our allocator gets the case `mutated`.
    ///
    /// # Errors
    /// As [`Self::compare`].
    pub fn compare_mutated(&mut self, json: &Value, mutated: &Value) -> Result<Vec<Verdict>> {
        let mutated = Case::parse(mutated)?;
        ensure!(mutated.has_requests(), "a case without requests");
        self.program.send(&without_own_taint(json))?;
        let decisions = allocator::decide(&mutated)?;
        let answer = self.program.receive()?;
        let case = Case::parse(json)?;
        case.node_names()
            .zip(&decisions)
            .map(|(node, ours)| {
                let upstream = answer
                    .nodes
                    .get(node)
                    .with_context(|| format!("no answer for node {node}"))?;
                Ok(self.verdict(&case, &answer.selected, node, ours, upstream))
            })
            .collect()
    }

    fn verdict(
        &self,
        case: &Case,
        selected: &validator::Selected,
        node: &str,
        ours: &Decision,
        upstream: &NodeAnswer,
    ) -> Verdict {
        let placed = ours.as_ref().ok().map(validator::placed);
        if let Some(placed) = &placed {
            let violations = validator::violations(case, selected, node, placed);
            if !violations.is_empty() {
                return Verdict::Different(Difference {
                    kind: DifferenceKind::InvalidPlacement,
                    node: node.to_owned(),
                    text: format!("{violations:#?} in {placed:#?}"),
                });
            }
        }
        let fits = !upstream.allocations.is_empty();
        let disagreement = match (&placed, fits) {
            (Some(placed), true) if self.is_first_fit && *placed != devices(upstream) => {
                Disagreement::OtherDevices
            }
            (Some(_), true) => return Verdict::Feasible,
            (None, false) => return Verdict::Infeasible,
            (Some(_), false) => Disagreement::OnlyOurs,
            (None, true) => Disagreement::OnlyUpstream,
        };
        let violations = validator::violations(case, selected, node, &devices(upstream));
        match exception::find(
            self.release,
            case,
            node,
            disagreement,
            ours,
            upstream,
            &violations,
        ) {
            Some(exception) => Verdict::Listed(exception),
            None => Verdict::Different(Difference {
                kind: DifferenceKind::Disagreement(disagreement),
                node: node.to_owned(),
                text: format!(
                    "ours: {:?}, upstream: {:?} {}, which violates {violations:?}",
                    placed.ok_or_else(|| ours.as_ref().err()),
                    devices(upstream),
                    upstream.error
                ),
            }),
        }
    }
}

/// Returns the devices of upstream's allocations.
fn devices(upstream: &NodeAnswer) -> Vec<Placed> {
    let mut list = vec![];
    for (claim, allocation) in upstream.allocations.iter().enumerate() {
        let results = allocation
            .devices
            .iter()
            .filter_map(|devices| devices.results.as_ref())
            .flatten();
        list.extend(results.map(|result| Placed {
            claim,
            request: result.request.clone(),
            pool: result.pool.clone(),
            device: result.device.clone(),
            amounts: result.share_id.as_ref().map(|_| {
                let amounts = result.consumed_capacity.iter().flatten();
                amounts
                    .filter_map(|(name, raw)| Some((name.clone(), raw.try_into().ok()?)))
                    .collect()
            }),
            is_admin: result.admin_access.unwrap_or_default(),
        }));
    }
    list
}

/// Returns the case without the taint that reserves devices for our controller.
fn without_own_taint(json: &Value) -> Value {
    let mut case = json.clone();
    let slices = case["slices"].as_array_mut().into_iter().flatten();
    for slice in slices {
        let devices = slice["spec"]["devices"].as_array_mut();
        for device in devices.into_iter().flatten() {
            if let Some(taints) = device.get_mut("taints").and_then(Value::as_array_mut) {
                taints.retain(|taint| taint["key"] != names::MANAGED_TAINT);
            }
        }
    }
    case
}
