//! Metrics of a share.

use super::super::detect::{GpuProcess, ShareView, Suspicion};
use super::super::share_metrics::{self, ShareMetrics};
use super::{Key, Tenant};

impl Tenant {
    /// Takes the figures of a look for its metrics. A region that cannot be read changes nothing.
    pub fn account(
        &mut self,
        view: &ShareView<Key>,
        listed: Option<&[GpuProcess<Key>]>,
        found: &[(Key, Suspicion)],
    ) {
        let Ok(region) = &view.region else {
            return;
        };
        self.totals.update(&region.processes);
        self.figures = Some(share_metrics::figures(view.id, region, listed, found));
    }

    /// Its metrics; `None` before the first look.
    #[must_use]
    pub fn metrics(&self) -> Option<ShareMetrics> {
        let limits = self.page.limits();
        Some(ShareMetrics {
            claim: self.claim.clone(),
            share: self.share.clone(),
            limit_bytes: limits.memory_limit_bytes,
            guaranteed_percent: limits.cores.percent(),
            gpu_time_us: self.totals.gpu_time_us(),
            throttled_us: self.totals.throttled_us(),
            figures: self.figures?,
        })
    }
}
