//! Random mutations, reproducible by their seed.

use crate::seed::{Kind, Seed, seal};

/// Boundary values of comparisons.
const WORDS: [u64; 8] = [
    0,
    1,
    2,
    101,
    u32::MAX as u64,
    (1 << 48) - 1,
    1 << 63,
    u64::MAX,
];

/// Ranges of a page that end with a checksum: the identity, and the records.
const SEALED: [(usize, usize); 3] = [(64, 152), (256, 128), (384, 128)];

/// Generates mutations.
pub(crate) struct Mutator {
    state: u64,
}

impl Mutator {
    pub(crate) fn new(begin: u64) -> Self {
        Self { state: begin }
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % (end.max(1) as u64)).unwrap()
    }

    /// Copies an input to `bytes` and mutates the copy; returns the input.
    pub(crate) fn change_one_of<'a>(
        &mut self,
        seeds: &[&'a Seed],
        bytes: &mut Vec<u8>,
    ) -> &'a Seed {
        let seed = seeds[self.below(seeds.len())];
        bytes.clone_from(&seed.bytes);
        for _ in 0..=self.below(6) {
            let other = seeds[self.below(seeds.len())];
            self.change(bytes, other);
        }
        // Content with a wrong checksum is not decoded.
        if seed.kind == Kind::Page && self.below(2) == 0 {
            for (at, length) in SEALED {
                if let Some(stretch) = bytes.get_mut(at..at + length) {
                    seal(stretch);
                }
            }
        }
        seed
    }

    fn change(&mut self, bytes: &mut Vec<u8>, other: &Seed) {
        let offset = self.offset(bytes.len());
        match self.below(8) {
            0 => bytes.truncate(offset),
            1 => bytes.resize(bytes.len() + self.below(64), 0xff),
            // A torn copy: a range of another input.
            2 => {
                let length = self.below(300);
                let end = (offset + length).min(bytes.len()).min(other.bytes.len());
                if offset < end {
                    bytes[offset..end].copy_from_slice(&other.bytes[offset..end]);
                }
            }
            3 | 4 => {
                let word = WORDS[self.below(WORDS.len())].to_le_bytes();
                let offset = offset / 8 * 8;
                if let Some(target) = bytes.get_mut(offset..offset + 8) {
                    target.copy_from_slice(&word);
                }
            }
            5 => {
                if let Some(byte) = bytes.get_mut(offset) {
                    *byte = self.next().to_le_bytes()[0];
                }
            }
            _ => {
                if let Some(byte) = bytes.get_mut(offset) {
                    *byte ^= 1 << self.below(8);
                }
            }
        }
    }

    /// Mostly within the used part.
    fn offset(&mut self, size: usize) -> usize {
        match self.below(4) {
            0 => self.below(size),
            1 => 4096 + self.below(2048),
            _ => self.below(size.min(640)),
        }
    }
}
