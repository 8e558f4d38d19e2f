//! The baseline: HAMi-core's published algorithm, run by the tenants themselves (`hami_baseline.h`).

use anyhow::Result;

use gpu_tenants::{Tenant, TestBed};

/// Starts a tenant that limits itself by HAMi-core's algorithm.
pub(crate) fn tenant(test_bed: &TestBed, percent: u32) -> Result<Tenant> {
    let mut tenant = test_bed.tenant(None, "dlsym")?;
    tenant.ok(&format!("hami {percent}"))?;
    Ok(tenant)
}
