//! Seeded random numbers: the same seed gives the same cases on every machine.

/// Generator `SplitMix64`.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Creates the generator of one case: `stream` and `index` select independent sequences of a seed.
    #[must_use]
    pub fn new(seed: u64, stream: u64, index: u64) -> Self {
        let mut random = Self(seed);
        for part in [stream, index] {
            let mixed = random.next();
            random = Self(mixed ^ part.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        }
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high.saturating_sub(low) + 1)
    }

    /// Returns true in `percent` of 100 calls.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }

    /// Returns one of `choices`.
    ///
    /// # Panics
    /// Without choices.
    pub fn choose<T: Copy>(&mut self, choices: &[T]) -> T {
        let index = self.between(0, choices.len() as u64 - 1);
        choices[usize::try_from(index).unwrap_or_default()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_depend_on_seed_stream_and_index() {
        let first = |seed, stream, index| Random::new(seed, stream, index).next();
        assert_eq!(first(1, 2, 3), first(1, 2, 3));
        let others = [first(2, 2, 3), first(1, 3, 3), first(1, 2, 4)];
        assert!(!others.contains(&first(1, 2, 3)));
    }
}
