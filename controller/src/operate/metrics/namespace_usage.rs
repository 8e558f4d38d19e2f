//! What namespaces have, integrated over time: a basis for costs. No I/O, no clock.

use std::collections::BTreeMap;
use std::time::Duration;

use drava_allocator::quota::Charge;

/// Amounts of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct NamespaceAmounts {
    /// GPU memory in bytes.
    pub memory: f64,
    /// GPU time, 1 for that of one GPU.
    pub gpus: f64,
    /// Number of devices.
    pub devices: f64,
}

impl From<Charge> for NamespaceAmounts {
    fn from(charge: Charge) -> Self {
        Self {
            memory: charge.memory.to_f64_lossy(),
            gpus: charge.cores.to_f64_lossy() / 100.0,
            devices: charge.devices.to_f64_lossy(),
        }
    }
}

impl NamespaceAmounts {
    fn add(&mut self, other: Self, factor: f64) {
        self.memory += other.memory * factor;
        self.gpus += other.gpus * factor;
        self.devices += other.devices * factor;
    }
}

/// Amounts by namespace, and their integrals in seconds. Times are since any fixed moment, and do not run backwards.
#[derive(Debug, Clone, Default)]
pub(super) struct NamespaceUsage {
    current: BTreeMap<String, NamespaceAmounts>,
    since: Duration,
    integrals: BTreeMap<String, NamespaceAmounts>,
}

impl NamespaceUsage {
    /// Sets what the namespaces have from `now` on.
    pub(super) fn set(&mut self, current: BTreeMap<String, NamespaceAmounts>, now: Duration) {
        self.integrals = self.integrals(now);
        self.current = current;
        self.since = now;
    }

    /// Amounts by namespace.
    pub(super) const fn current(&self) -> &BTreeMap<String, NamespaceAmounts> {
        &self.current
    }

    /// Returns the integrals until `now`. A namespace stays after it has returned everything, as a counter must.
    pub(super) fn integrals(&self, now: Duration) -> BTreeMap<String, NamespaceAmounts> {
        let seconds = now.saturating_sub(self.since).as_secs_f64();
        let mut integrals = self.integrals.clone();
        for (namespace, amounts) in &self.current {
            let integral = integrals.entry(namespace.clone()).or_default();
            integral.add(*amounts, seconds);
        }
        integrals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn has(memory: f64, gpus: f64) -> BTreeMap<String, NamespaceAmounts> {
        let amounts = NamespaceAmounts {
            memory,
            gpus,
            devices: 1.0,
        };
        BTreeMap::from([("team-a".to_owned(), amounts)])
    }

    #[test]
    fn integrates_amounts_over_time() {
        let mut usage = NamespaceUsage::default();
        usage.set(has(8.0, 0.5), at(100));
        assert_eq!(usage.integrals(at(110))["team-a"].memory, 80.0);
        usage.set(has(4.0, 1.0), at(110));
        let integral = usage.integrals(at(112))["team-a"];
        assert_eq!(
            (integral.memory, integral.gpus, integral.devices),
            (88.0, 7.0, 12.0)
        );
        usage.set(BTreeMap::new(), at(112));
        assert_eq!(
            usage.integrals(at(1000))["team-a"],
            integral,
            "it has nothing"
        );
        assert!(usage.current().is_empty());
    }

    #[test]
    fn starts_without_usage_of_the_past() {
        let mut usage = NamespaceUsage::default();
        usage.set(has(8.0, 0.5), at(5000));
        assert_eq!(usage.integrals(at(5000))["team-a"].memory, 0.0);
    }
}
