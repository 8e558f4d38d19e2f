//! Full and fragmented GPUs.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use drava_e2e::manifest::pod_with_request;
use drava_e2e::{TestCluster, wait};

use crate::{
    CARD, NODE, device_of, pod_with_memory, pod_with_profile, sees_only, wait_until_clean,
};

/// A full GPU queues the next pod. Free slices that do not adjoin hold no larger partition; once they adjoin, they do.
#[test]
fn fills_and_refills_fragmented_gpu() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("fragments")?;
    let names: Vec<String> = (0..7).map(|index| format!("pod-{index}")).collect();
    let manifests: Vec<String> = names
        .iter()
        .map(|name| pod_with_memory(name, "3000Mi"))
        .collect();
    tenant.apply(&manifests.join("\n---\n"))?;
    // Pods by the first slice of their partitions.
    let mut pods = BTreeMap::new();
    for name in &names {
        tenant.running(name)?;
        let device = device_of(&tenant, name)?;
        let start = device.strip_prefix("gpu-1-mig-1g-5gb-").context("start")?;
        pods.insert(start.parse::<u32>()?, name.clone());
    }
    ensure!(pods.len() == 7, "{pods:?}");
    ensure!(cluster.node(NODE)?.mig_instances(CARD)?.len() == 7);

    tenant.apply(&pod_with_memory("next", "3000Mi"))?;
    let why = tenant.event("next", "ExclusiveConflict")?;
    ensure!(
        why.contains("0/2 nodes")
            && why.contains("node-1/gpu-1 has no free slices for the partition"),
        "{why}"
    );
    let mut end = |start: u32| -> Result<()> {
        let pod = pods.remove(&start).context("no pod")?;
        tenant.delete_pods(&[&pod])
    };
    end(4)?;
    tenant.running("next")?;
    ensure!(device_of(&tenant, "next")? == "gpu-1-mig-1g-5gb-4");

    // Slices 1, 3 and 5.
    for start in [1, 3, 5] {
        end(start)?;
    }
    tenant.apply(&pod_with_profile("half", "3g.20gb"))?;
    tenant.event("half", "has no free slices for the partition")?;
    // Slices 4 to 7.
    tenant.delete_pods(&["next"])?;
    end(6)?;
    tenant.running("half")?;
    ensure!(device_of(&tenant, "half")? == "gpu-1-mig-3g-20gb-4");
    sees_only(&tenant, "half", "3g.20gb")?;
    // Slices 1 and 3 are free still.
    for name in ["refill-0", "refill-1"] {
        tenant.apply(&pod_with_memory(name, "3000Mi"))?;
    }
    for name in ["refill-0", "refill-1"] {
        tenant.running(name)?;
    }
    cluster.check_allocations()?;
    tenant.kubectl(&[
        "delete",
        "pods",
        "--all",
        "--grace-period=1",
        "--timeout=90s",
    ])?;
    wait_until_clean(&cluster)
}

/// A GPU with partitions, and two of its profiles.
pub(crate) struct Partitioned {
    pub(crate) node: &'static str,
    /// Index and minor number.
    pub(crate) card: usize,
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
            self.product, self.card
        );
        let exactly = format!(
            r#"{{deviceClassName: mig.drava.dev, selectors: [{{cel: {{expression: "{expression}"}}}}]}}"#
        );
        pod_with_request(name, &exactly, "")
    }

    fn device(&self, profile: &str, start: usize) -> String {
        let profile = profile.replace('.', "-");
        format!("gpu-{}-mig-{profile}-{start}", self.card)
    }

    /// Fills the GPU, frees slices that do not adjoin, then slices that do, and fills it again.
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
        ensure!(node.mig_instances(self.card)?.len() == self.count);
        let list = tenant
            .exec("pod-0", "app", &["nvidia-smi", "-L"])?
            .success()?;
        ensure!(
            list.lines().count() == 2 && list.contains(&format!("MIG {} ", self.small)),
            "pod-0 sees\n{list}"
        );

        let mut end = |start: usize| -> Result<()> {
            let pod = by_start.remove(&start).context("no pod")?;
            tenant.delete_pods(&[&pod])
        };
        for start in (1..self.count).step_by(2) {
            end(start)?;
        }
        tenant.apply(&self.pod("large", self.large))?;
        tenant.event("large", "has no free slices for the partition")?;
        for start in (0..self.slices).step_by(2) {
            end(start)?;
        }
        tenant.running("large")?;
        ensure!(device_of(&tenant, "large")? == self.device(self.large, 0));
        tenant.apply(&self.pod("refill", self.small))?;
        tenant.running("refill")?;
        cluster.check_allocations()?;
        tenant.kubectl(&[
            "delete",
            "pods",
            "--all",
            "--grace-period=1",
            "--timeout=90s",
        ])?;
        wait("the GPU has no instance", || {
            Ok(node.mig_instances(self.card)?.is_empty().then_some(()))
        })?;
        node.wait_until_clean()
    }
}

#[test]
fn fills_and_refills_a30() -> Result<()> {
    let a30 = Partitioned {
        node: NODE,
        card: 2,
        product: "A30",
        small: "1g.6gb",
        count: 4,
        large: "2g.12gb",
        slices: 2,
    };
    a30.fills_fragments_and_refills(&TestCluster::attach()?, "a30")
}
