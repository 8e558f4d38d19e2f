//! Steps of work, by which tests tell how an operation grows with the cluster: a time tells it on an idle machine only.
//!
//! Only builds for tests count them (feature `steps`); in all others this costs nothing and nothing is kept.

#[cfg(any(test, feature = "steps"))]
mod counter {
    use std::cell::Cell;

    thread_local! {
        static STEPS: Cell<u64> = const { Cell::new(0) };
    }

    pub(super) fn add(steps: usize) {
        let steps = u64::try_from(steps).unwrap_or(u64::MAX);
        STEPS.set(STEPS.get().saturating_add(steps));
    }

    /// Returns the steps that this thread counts during `operation`.
    pub fn of<T>(operation: impl FnOnce() -> T) -> (u64, T) {
        let before = STEPS.get();
        let result = operation();
        (STEPS.get() - before, result)
    }
}

#[cfg(any(test, feature = "steps"))]
pub use counter::of;

/// Counts steps of this thread.
pub fn count(steps: usize) {
    #[cfg(any(test, feature = "steps"))]
    counter::add(steps);
    #[cfg(not(any(test, feature = "steps")))]
    let _ = steps;
}

/// Counts a step for each item that is visited.
pub fn counted<I: IntoIterator>(items: I) -> impl Iterator<Item = I::Item> {
    items.into_iter().inspect(|_| count(1))
}
