//! The report of a simulation as text.

use super::{Outcome, Report, SimulatedGrowth, SimulatedPod};
use crate::changes::changes_text;
use crate::terminal::table;

impl Report {
    /// Returns whether every pod and every companion fits. The simulation cannot know it of pods that request GPUs as other systems do.
    #[must_use]
    pub fn all_fit(&self) -> bool {
        let mut pods = self.pods.iter();
        let all_pods_fit = pods.all(|pod| match pod.outcome {
            Outcome::Placed { .. } | Outcome::NoGpuRequest => true,
            Outcome::Pending { .. } | Outcome::Untranslated { .. } => false,
        });
        all_pods_fit && self.growths.iter().all(|growth| growth.fits)
    }

    /// Formats the report as text.
    #[must_use]
    pub fn text(&self) -> String {
        let rows = self.rows().map(|pods| {
            let (first, last) = pods;
            let (node, detail) = match &first.outcome {
                Outcome::Placed {
                    node,
                    devices,
                    reason,
                } => (node.as_str(), format!("{} ({reason})", devices.join(", "))),
                Outcome::Pending { reason, .. } => ("–", reason.clone()),
                Outcome::NoGpuRequest => ("–", "requests no devices of drava".to_owned()),
                Outcome::Untranslated { resources } => (
                    "–",
                    format!(
                        "requests {}, which drava does not serve; translate the manifest with `kubectl drava migrate -f FILE`, and \
                         simulate its output",
                        resources.join(", ")
                    ),
                ),
            };
            let name = match last.pod == first.pod {
                true => first.pod.clone(),
                false => format!("{} to {}", first.pod, last.pod),
            };
            vec![name, node.to_owned(), detail]
        });
        let rows: Vec<Vec<String>> = rows.collect();
        let mut text = match rows.is_empty() && !self.growths.is_empty() {
            true => String::new(),
            false => table(&["POD", "NODE", "DETAIL"], rows),
        };
        for growth in &self.growths {
            let SimulatedGrowth {
                claim,
                fits,
                detail,
            } = growth;
            text.push_str(&match fits {
                true => format!("claim {claim} would add to the share on {detail}\n"),
                false => format!("claim {claim} would add to no share: {detail}\n"),
            });
        }
        if self.requesting > 1 {
            text.push_str(&format!(
                "{} of {} pods fit\n",
                self.fitting, self.requesting
            ));
        }
        for skipped in &self.skipped {
            text.push_str(&format!("{skipped}\n"));
        }
        for (first, _) in self.rows() {
            if let Outcome::Pending { changes, .. } = &first.outcome {
                text.push_str(&changes_text(&first.pod, changes));
            }
        }
        for advice in &self.advice {
            text.push_str(&format!("note: {advice}\n"));
        }
        text
    }

    /// Returns the first and last pod of each row: pods that follow each other and do not fit for the same reason share one.
    fn rows(&self) -> impl Iterator<Item = (&SimulatedPod, &SimulatedPod)> {
        let is_like = |one: &SimulatedPod, other: &SimulatedPod| match one.outcome {
            Outcome::Pending { .. } | Outcome::Untranslated { .. } => one.outcome == other.outcome,
            Outcome::Placed { .. } | Outcome::NoGpuRequest => false,
        };
        let chunks = self.pods.chunk_by(is_like);
        chunks.filter_map(|pods| Some((pods.first()?, pods.last()?)))
    }
}
