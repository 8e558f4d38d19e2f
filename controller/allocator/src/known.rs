//! Values of which equal ones are kept once, as long as they are in use.

use std::collections::BTreeSet;
use std::sync::Arc;

/// See the [module](self).
#[derive(Debug)]
pub struct Known<T> {
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
    /// Returns the number of known values.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns the known value that equals this one, which becomes known otherwise.
    pub fn shared(&mut self, value: &Arc<T>) -> Arc<T> {
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
    use super::*;

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
