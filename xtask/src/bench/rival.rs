//! The yardstick: what HAMi-core publicly describes, done by the tenants themselves (`rival.h`).

use anyhow::Result;

use gpu_tenants::{Ground, Tenant};

/// A tenant that limits itself by HAMi-core's algorithm.
pub(crate) fn tenant(ground: &Ground, percent: u32) -> Result<Tenant> {
    let mut tenant = ground.tenant(None, "dlsym")?;
    tenant.ok(&format!("rival {percent}"))?;
    Ok(tenant)
}
