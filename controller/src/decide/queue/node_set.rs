//! Sets of nodes with one bit per node: thousands of pending pods have one each.

use std::collections::BTreeMap;

/// Numbers of the nodes.
#[derive(Debug, Default)]
pub(super) struct NodeNumbers {
    numbers: BTreeMap<String, usize>,
    /// Numbers of removed nodes.
    unused: Vec<usize>,
}

/// A set of nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NodeSet(
    /// The last word is not zero, so that equal sets are equal values.
    Vec<u64>,
);

impl NodeNumbers {
    /// Returns the set of these nodes.
    pub(super) fn set<'a>(&mut self, nodes: impl Iterator<Item = &'a str>) -> NodeSet {
        let mut set = NodeSet::default();
        for node in nodes {
            let number = match self.numbers.get(node) {
                Some(number) => *number,
                None => {
                    let next = self.numbers.len();
                    let number = self.unused.pop().unwrap_or(next);
                    self.numbers.insert(node.to_owned(), number);
                    number
                }
            };
            set.insert(number);
        }
        set
    }

    /// Returns the number of a node that was in a set.
    pub(super) fn get(&self, node: &str) -> Option<usize> {
        self.numbers.get(node).copied()
    }

    /// Removes a deleted node, and returns its number, which must be removed from all sets.
    pub(super) fn remove(&mut self, node: &str) -> Option<usize> {
        let number = self.numbers.remove(node)?;
        self.unused.push(number);
        Some(number)
    }
}

impl NodeSet {
    fn insert(&mut self, number: usize) {
        let word = number / 64;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        if let Some(bits) = self.0.get_mut(word) {
            *bits |= 1 << (number % 64);
        }
    }

    /// Returns whether the set has the node of that number.
    pub(super) fn contains(&self, number: usize) -> bool {
        let bits = self.0.get(number / 64).copied().unwrap_or_default();
        bits & (1 << (number % 64)) != 0
    }

    /// Removes the node of that number.
    pub(super) fn remove(&mut self, number: usize) {
        if let Some(bits) = self.0.get_mut(number / 64) {
            *bits &= !(1 << (number % 64));
        }
        while self.0.last() == Some(&0) {
            self.0.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuses_numbers_of_removed_nodes() {
        let mut numbers = NodeNumbers::default();
        let names: Vec<String> = (0..130).map(|index| format!("n{index}")).collect();
        let mut set = numbers.set(names.iter().map(String::as_str));
        let number = |numbers: &NodeNumbers, node: &str| numbers.get(node).unwrap();
        assert!(
            names
                .iter()
                .all(|name| set.contains(number(&numbers, name)))
        );
        let removed = numbers.remove("n70").unwrap();
        set.remove(removed);
        assert_eq!(numbers.get("n70"), None);
        let other = numbers.set(["new", "n129"].into_iter());
        assert_eq!(numbers.get("new"), Some(removed));
        assert!(other.contains(removed) && other.contains(number(&numbers, "n129")));
        assert!(!set.contains(removed) && set.contains(number(&numbers, "n129")));
        let mut last = numbers.set(["n0", "n129"].into_iter());
        last.remove(number(&numbers, "n129"));
        assert_eq!(last, numbers.set(std::iter::once("n0")));
        assert_eq!(
            numbers.set(std::iter::once("another")),
            numbers.set(std::iter::once("another"))
        );
        assert_eq!(
            numbers.get("another"),
            Some(130),
            "no number is in use twice"
        );
    }
}
