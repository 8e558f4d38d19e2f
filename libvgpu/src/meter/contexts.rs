//! Records of contexts: a small number of entries probed from the hash of the handle, without locks.

use core::sync::atomic::{AtomicU64, Ordering};

const BITS: u32 = 6;
const CONTEXTS: usize = 1 << BITS;
/// Entries in which a context may have its record. A process with at most this many contexts, one per GPU of a machine,
/// keeps all their records.
const PROBES: usize = 8;

/// Handles are multiples of 16 below 2^60, so that a handle and a code fit in one word. Others are not recorded.
const HANDLE_SHIFT: u32 = 4;
const CODE: u64 = 0xff;

/// The codes of contexts, which are not 0. All zeroes is no record.
pub(crate) struct Contexts([AtomicU64; CONTEXTS]);

impl Contexts {
    /// Returns the code of a context.
    #[inline]
    pub(crate) fn code_of(&self, context: u64) -> Option<u8> {
        let word = self
            .probe(context)
            .map(|entry| entry.load(Ordering::Relaxed));
        word.map(|word| (word, code_of(word)))
            .find(|(word, code)| *code != 0 && *word == word_of(context, *code))
            .map(|(_, code)| code)
    }

    /// Records the code of a context, or drops its record without a code. Replaces another record if all probed entries
    /// are in use.
    pub(crate) fn set(&self, context: u64, code: Option<u8>) {
        let holds = |entry: &&AtomicU64| {
            let word = entry.load(Ordering::Relaxed);
            word != 0 && handle_of(word) == context
        };
        let is_free = |entry: &&AtomicU64| entry.load(Ordering::Relaxed) == 0;
        let own = self.probe(context).find(holds);
        let Some(word) = code.map(|code| word_of(context, code)) else {
            if let Some(entry) = own {
                entry.store(0, Ordering::Relaxed);
            }
            return;
        };
        if handle_of(word) != context {
            return;
        }
        let entry = own
            .or_else(|| self.probe(context).find(is_free))
            .or_else(|| self.probe(context).next());
        if let Some(entry) = entry {
            entry.store(word, Ordering::Relaxed);
        }
    }

    /// Drops the records of contexts for which `has_ended` is true.
    pub(crate) fn forget(&self, has_ended: impl Fn(u64) -> bool) {
        for entry in &self.0 {
            let found = entry.load(Ordering::Relaxed);
            if found != 0 && has_ended(handle_of(found)) {
                entry.store(0, Ordering::Relaxed);
            }
        }
    }

    #[inline]
    fn probe(&self, context: u64) -> impl Iterator<Item = &AtomicU64> {
        let hash = context.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - BITS);
        let start = usize::try_from(hash).unwrap_or(0).min(CONTEXTS);
        let (before, after) = self.0.split_at(start);
        after.iter().chain(before).take(PROBES)
    }
}

#[inline]
fn word_of(context: u64, code: u8) -> u64 {
    context << HANDLE_SHIFT | u64::from(code)
}

fn handle_of(word: u64) -> u64 {
    (word & !CODE) >> HANDLE_SHIFT
}

#[inline]
fn code_of(word: u64) -> u8 {
    let [code, ..] = word.to_le_bytes();
    code
}
