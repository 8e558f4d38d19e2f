//! The files of a share.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use drava_vgpu_abi::contention::OwnTime;
use drava_vgpu_abi::snapshot::{ProcessUsage, ShareUsage, Snapshot};
use drava_vgpu_abi::{ComputePolicy, Cores, Limits, PageWrite, own_time, paths, update};

/// Returns the limits of a share of `percent` of the GPU.
pub fn share(policy: ComputePolicy, percent: u32) -> anyhow::Result<Limits> {
    Ok(Limits {
        memory_limit_bytes: None,
        cores: Cores::new(percent).context("a share has at most 100%")?,
        compute_policy: policy,
        ..Limits::memory(0)
    })
}

/// A share of a GPU.
pub struct Share {
    container: PathBuf,
    name: String,
}

impl Share {
    pub(crate) fn in_container(container: PathBuf) -> Self {
        Self::named(container, "share")
    }

    pub(crate) fn named(container: PathBuf, name: &str) -> Self {
        let name = name.to_owned();
        Self { container, name }
    }

    /// The directory that its container sees as `/run/drava`.
    pub fn container(&self) -> &Path {
        &self.container
    }

    /// Its limits page.
    pub fn page(&self) -> PathBuf {
        let limits = self.container.join(&self.name).join(paths::LIMITS_DIR);
        limits.join(paths::PAGE_FILE)
    }

    /// Its usage region.
    pub fn region(&self) -> PathBuf {
        let usage = self.container.join(&self.name).join(paths::USAGE_DIR);
        usage.join(paths::REGION_FILE)
    }

    /// Changes its limits in place, as the agent does.
    pub fn change(&self, limits: &Limits) -> anyhow::Result<()> {
        self.write(&update(&fs::read(self.page())?, limits)?)
    }

    /// Sets the own-time fraction of the time that it measures.
    pub fn set_own_time(&self, parts_per_million: u32) -> anyhow::Result<()> {
        self.write(&[own_time(OwnTime::Part(parts_per_million))])
    }

    /// Writes to its page.
    pub fn write(&self, writes: &[PageWrite]) -> anyhow::Result<()> {
        let page = fs::OpenOptions::new().write(true).open(self.page())?;
        for write in writes {
            page.write_all_at(write.bytes(), write.offset())?;
        }
        Ok(())
    }

    /// Reads its usage and its processes from the region.
    pub fn usage(&self) -> anyhow::Result<(ShareUsage, Vec<ProcessUsage>)> {
        let region = fs::read(self.region())?;
        let snapshot = Snapshot::decode(&region)?;
        Ok((snapshot.share(), snapshot.processes().collect()))
    }

    /// GPU time that its processes counted.
    pub fn counted(&self) -> anyhow::Result<Duration> {
        let (_, processes) = self.usage()?;
        let us = processes.iter().map(|process| process.gpu_time_us);
        Ok(Duration::from_micros(us.sum()))
    }
}
