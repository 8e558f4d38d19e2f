//! The report of a simulation as text.

use super::{Outcome, Report, SimulatedPod};
use crate::changes::changes_text;
use crate::terminal::table;

impl Report {
    /// Returns whether every pod fits. The simulation cannot know it of pods that request GPUs as other systems do.
    #[must_use]
    pub fn all_fit(&self) -> bool {
        let mut pods = self.pods.iter();
        pods.all(|pod| match pod.outcome {
            Outcome::Placed { .. } | Outcome::NoGpuRequest => true,
            Outcome::Pending { .. } | Outcome::Untranslated { .. } => false,
        })
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
                        "requests {}, which is no claim of drava; translate the manifest with `kubectl drava migrate -f FILE`, and \
                         simulate its output",
                        resources.join(" and ")
                    ),
                ),
            };
            let name = match last.pod == first.pod {
                true => first.pod.clone(),
                false => format!("{} to {}", first.pod, last.pod),
            };
            vec![name, node.to_owned(), detail]
        });
        let mut text = table(&["POD", "NODE", "DETAIL"], rows.collect());
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
