//! Full and fragmented GPUs.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use drava_e2e::manifest::pod_with_request;
use drava_e2e::{TestCluster, wait};

use crate::{GPU, NODE, device_of};

/// A GPU with partitions, and two of its profiles.
pub(crate) struct Partitioned {
    pub(crate) node: &'static str,
    /// Index and minor number.
    pub(crate) gpu: usize,
    /// Part of the product name.
    pub(crate) product: &'static str,
    pub(crate) small: &'static str,
    /// Number of small partitions on the GPU.
    pub(crate) count: usize,
    pub(crate) large: &'static str,
    /// Slices of the large profile.
    pub(crate) slices: usize,
}

impl Partitioned {
    /// A pod with a partition of the profile.
    pub(crate) fn pod(&self, name: &str, profile: &str) -> String {
        let gpu = "device.attributes['gpu.drava.dev']";
        let expression = format!(
            "{gpu}.profile == '{profile}' && {gpu}.productName.contains('{}') && {gpu}.index == {}",
            self.product, self.gpu
        );
        let exactly = format!(
            r#"{{deviceClassName: mig.drava.dev, selectors: [{{cel: {{expression: "{expression}"}}}}]}}"#
        );
        pod_with_request(name, &exactly, "")
    }

    fn device(&self, profile: &str, start: usize) -> String {
        let profile = profile.replace('.', "-");
        format!("gpu-{}-mig-{profile}-{start}", self.gpu)
    }

    /// Fills the GPU, with one pod too many; frees slices that do not adjoin, then slices that do, and fills it again.
    pub(crate) fn fills_fragments_and_refills(
        &self,
        cluster: &TestCluster,
        name: &str,
    ) -> Result<()> {
        let tenant = cluster.namespace(name)?;
        let node = cluster.node(self.node)?;
        let names: Vec<String> = (0..self.count)
            .map(|index| format!("pod-{index}"))
            .collect();
        let pods: Vec<String> = names
            .iter()
            .map(|name| self.pod(name, self.small))
            .collect();
        tenant.apply(&pods.join("\n---\n"))?;
        let mut by_start = BTreeMap::new();
        for name in &names {
            tenant.running(name)?;
            let device = device_of(&tenant, name)?;
            let start = (0..self.count).find(|&start| device == self.device(self.small, start));
            by_start.insert(start.with_context(|| device.clone())?, name.clone());
        }
        ensure!(by_start.len() == self.count, "{by_start:?}");
        ensure!(node.mig_instances(self.gpu)?.len() == self.count);
        let list = tenant
            .exec("pod-0", "app", &["nvidia-smi", "-L"])?
            .success()?;
        ensure!(
            list.lines().count() == 2 && list.contains(&format!("MIG {} ", self.small)),
            "pod-0 sees\n{list}"
        );

        tenant.apply(&self.pod("next", self.small))?;
        let why = tenant.event("next", "ExclusiveConflict")?;
        let no_slices = format!(
            "{}/gpu-{} has no free slices for the partition",
            self.node, self.gpu
        );
        ensure!(why.contains(&no_slices), "{why}");
        let last = self.count - 1;
        let pod = by_start.insert(last, "next".to_owned());
        tenant.delete_pods(&[&pod.context("no pod")?])?;
        tenant.running("next")?;
        ensure!(device_of(&tenant, "next")? == self.device(self.small, last));

        let mut end = |start: usize| -> Result<()> {
            let pod = by_start.remove(&start).context("no pod")?;
            tenant.delete_pods(&[&pod])
        };
        for start in (1..self.count).step_by(2) {
            end(start)?;
        }
        tenant.apply(&self.pod("large", self.large))?;
        tenant.event("large", &no_slices)?;
        for start in (0..self.slices).step_by(2) {
            end(start)?;
        }
        tenant.running("large")?;
        ensure!(device_of(&tenant, "large")? == self.device(self.large, 0));
        tenant.apply(&self.pod("refill", self.small))?;
        tenant.running("refill")?;
        cluster.check_allocations()?;
        tenant.delete_pods(&["--all"])?;
        wait("the GPU has no instance", || {
            Ok(node.mig_instances(self.gpu)?.is_empty().then_some(()))
        })?;
        node.wait_until_clean()
    }
}

#[test]
fn fills_and_refills_a100() -> Result<()> {
    let a100 = Partitioned {
        node: NODE,
        gpu: GPU,
        product: "A100",
        small: "1g.5gb",
        count: 7,
        large: "3g.20gb",
        slices: 4,
    };
    a100.fills_fragments_and_refills(&TestCluster::attach()?, "a100")
}

#[test]
fn fills_and_refills_a30() -> Result<()> {
    let a30 = Partitioned {
        node: NODE,
        gpu: 2,
        product: "A30",
        small: "1g.6gb",
        count: 4,
        large: "2g.12gb",
        slices: 2,
    };
    a30.fills_fragments_and_refills(&TestCluster::attach()?, "a30")
}
