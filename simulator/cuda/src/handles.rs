//! Handles of objects. As in the real driver, where a handle is the address of an object, the handle of a destroyed
//! object recurs soon, for an object of any kind.

use std::collections::BTreeSet;

use crate::State;

/// First handle: above every mappable address.
const FIRST: usize = 0x0100_6375_6461_0000;
const STEP: usize = 16;
/// Up to this number of handles, those of destroyed objects are searched whenever none is known.
const FEW: usize = 512;

#[derive(Debug, Default)]
pub(crate) struct Handles {
    /// Handles ever used.
    count: usize,
    /// Handles of destroyed objects.
    unused: Vec<usize>,
    /// Handles used since the last search.
    since: usize,
}

impl Handles {
    fn is_search_due(&self) -> bool {
        self.unused.is_empty() && (self.count <= FEW || self.since > self.count / 2)
    }

    fn search(&mut self, live: &BTreeSet<usize>) {
        let all = (1..=self.count).map(|number| FIRST + number * STEP);
        self.unused = all.filter(|handle| !live.contains(handle)).collect();
        self.since = 0;
    }

    fn take(&mut self) -> usize {
        self.since += 1;
        self.unused.pop().unwrap_or_else(|| {
            self.count += 1;
            FIRST + self.count * STEP
        })
    }
}

impl State {
    /// Returns a handle, a multiple of 16, for an object that is inserted before the next call.
    pub(crate) fn handle(&mut self) -> usize {
        if self.handles.is_search_due() {
            let live = self.live_handles();
            self.handles.search(&live);
        }
        self.handles.take()
    }

    fn live_handles(&self) -> BTreeSet<usize> {
        let contexts = self.contexts.keys().map(|context| context.0);
        contexts
            .chain(self.streams.handles())
            .chain(self.events.handles())
            .chain(self.modules.handles())
            .chain(self.libraries.handles())
            .chain(self.links.handles())
            .chain(self.arrays.handles())
            .chain(self.pools.handles())
            .chain(self.virtual_memory.handles())
            .chain(self.graphs.handles())
            .chain(self.greens.handles())
            .chain(self.externals.handles())
            .chain(
                self.multicasts
                    .keys()
                    .filter_map(|object| usize::try_from(*object).ok()),
            )
            .collect()
    }
}
