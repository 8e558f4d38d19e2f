//! What the devices and pools of a cluster have in common, each kept once.
//!
//! The nodes of a cluster are of few kinds. What a device publishes, apart from the identity of its GPU, is equal on all nodes
//! of a kind, and so is the layout of their pools.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::device::KnownShape;
use crate::pool::{CounterSets, Layout};

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Shapes {
    pub(crate) devices: Known<KnownShape>,
    pub(crate) counter_sets: Known<CounterSets>,
    pub(crate) layouts: Known<Layout>,
}

/// Values of which equal ones are kept once, as long as they are in use.
#[derive(Debug)]
pub(crate) struct Known<T> {
    values: BTreeSet<Arc<T>>,
    /// Number of values from which on those that are not in use any longer are forgotten.
    review_at: usize,
}

/// Fewest values that are reviewed.
const MIN_REVIEW: usize = 1024;

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self {
            values: BTreeSet::new(),
            review_at: MIN_REVIEW,
        }
    }
}

impl<T: Ord> Known<T> {
    /// Returns the known value that equals this one, which becomes known otherwise.
    pub(crate) fn shared(&mut self, value: &Arc<T>) -> Arc<T> {
        if let Some(known) = self.values.get(value) {
            return Arc::clone(known);
        }
        if self.values.len() >= self.review_at {
            self.values.retain(|value| Arc::strong_count(value) > 1);
            self.review_at = MIN_REVIEW.max(2 * self.values.len());
        }
        self.values.insert(Arc::clone(value));
        Arc::clone(value)
    }
}

#[cfg(test)]
mod tests {
    use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};

    use super::*;
    use crate::fixture::{cluster, partitioned_slices};
    use crate::placement::Policies;
    use crate::steps;

    #[test]
    fn equal_nodes_share_their_shapes() {
        let shapes = |nodes: usize| {
            let names: Vec<String> = (0..nodes).map(|index| format!("n{index}")).collect();
            let nodes: Vec<(&str, &[u64])> = names
                .iter()
                .map(|name| (name.as_str(), &[80, 80][..]))
                .collect();
            let mut cluster = cluster(&nodes);
            for name in &names {
                for slice in partitioned_slices(&format!("{name}-mig"), 2) {
                    cluster.upsert_slice(&slice);
                }
            }
            let shapes = cluster.shapes();
            (shapes.devices.values.len(), shapes.layouts.values.len())
        };
        assert_eq!(shapes(3), shapes(6));
        assert_eq!(shapes(3).1, 2);
    }

    #[test]
    fn selector_is_evaluated_once_for_equal_devices() {
        let evaluations = |nodes: usize| {
            let names: Vec<String> = (0..nodes).map(|index| format!("n{index}")).collect();
            let nodes: Vec<(&str, &[u64])> = names
                .iter()
                .map(|name| (name.as_str(), &[80, 80][..]))
                .collect();
            let cluster = cluster(&nodes);
            let claims = [crate::fixture::share("a", "4Gi", "0")];
            let request = crate::fixture::pod_request(&cluster, &claims);
            let policies = Policies {
                node: NodePlacementPolicy::Binpack,
                gpu: GpuPlacementPolicy::Binpack,
            };
            steps::of(|| cluster.decide(&request, policies).unwrap()).0
        };
        assert_eq!(evaluations(4), evaluations(8));
    }

    #[test]
    fn forgets_values_that_are_not_in_use() {
        let mut known = Known::default();
        let kept: Vec<Arc<usize>> = (0..10)
            .map(|value| known.shared(&Arc::new(value)))
            .collect();
        for value in 10..3 * MIN_REVIEW {
            known.shared(&Arc::new(value));
        }
        assert!(
            known.values.len() <= 2 * MIN_REVIEW,
            "{}",
            known.values.len()
        );
        assert!(
            kept.iter()
                .all(|value| Arc::ptr_eq(value, &known.shared(&Arc::new(**value))))
        );
    }
}
