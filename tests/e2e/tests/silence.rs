//! Connections between the controller and the API server are lost without being closed.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, Proxy, TestCluster};

/// Time within which a new pod has its reason: a watch ends by itself after 25 s, and a silent connection is closed after 35 s.
const REASON_LIMIT: Duration = Duration::from_secs(60);
/// Time in which new connections are silent, too: longer than the lease, shorter than a failure of the liveness probe.
const BLACKOUT: Duration = Duration::from_secs(25);

/// The controllers reach the API server through a proxy, until the value is dropped.
struct Detour<'c>(&'c TestCluster);

impl<'c> Detour<'c> {
    fn start(cluster: &'c TestCluster, proxy: &Proxy) -> Result<Self> {
        let detour = Self(cluster);
        let address = proxy.address();
        detour.set(
            &format!("KUBERNETES_SERVICE_HOST={}", address.ip()),
            &format!("KUBERNETES_SERVICE_PORT={}", address.port()),
        )?;
        Ok(detour)
    }

    fn set(&self, host: &str, port: &str) -> Result<()> {
        let deployment = [
            "-n",
            "drava-system",
            "set",
            "env",
            "deployment/drava-controller",
        ];
        self.0.kubectl(deployment.iter().chain(&[host, port]))?;
        self.0.drava_ready()
    }
}

impl Drop for Detour<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.set("KUBERNETES_SERVICE_HOST-", "KUBERNETES_SERVICE_PORT-") {
            eprintln!("cannot remove the detour of the controllers: {error:#}");
        }
    }
}

/// Allocates pods at the same time, so that the controller has many connections.
fn open_connections(tenant: &Namespace<'_>, round: &str) -> Result<()> {
    let names: Vec<String> = (0..8).map(|index| format!("{round}-{index}")).collect();
    let share = |name: &String| pod_with_share(name, "vgpu.drava.dev", "{memory: 4Gi}");
    let manifests: Vec<String> = names.iter().map(share).collect();
    tenant.apply(&manifests.join("\n---\n"))?;
    names.iter().try_for_each(|name| tenant.running(name))
}

/// Creates a pod that fits nowhere and one that fits, and waits for the reason of one and the start of the other.
fn serves_new_pods(tenant: &Namespace<'_>, round: &str) -> Result<()> {
    let begun = Instant::now();
    let (large, small) = (format!("{round}-large"), format!("{round}-small"));
    for (name, memory) in [(&large, "100Gi"), (&small, "1Gi")] {
        let capacity = format!("{{memory: {memory}}}");
        tenant.apply(&pod_with_share(name, "vgpu.drava.dev", &capacity))?;
    }
    tenant.event(&large, "InsufficientMemory")?;
    let took = begun.elapsed();
    eprintln!("{round}: the reason after {} s", took.as_secs_f32());
    ensure!(took < REASON_LIMIT, "{round}: the reason after {took:?}");
    tenant.running(&small)
}

#[test]
fn gives_reasons_after_silent_loss_of_connections() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("silence")?;
    cluster.drava_ready()?;
    let proxy = Proxy::start(&cluster)?;
    let _detour = Detour::start(&cluster, &proxy)?;
    let before = cluster.controller_restarts()?;

    open_connections(&tenant, "lost")?;
    let forgotten = proxy.forget();
    ensure!(forgotten > 10, "the replicas had {forgotten} connections");
    serves_new_pods(&tenant, "lost")?;
    cluster.check_allocations()?;
    tenant.delete_all_pods()?;

    // The path to the API server is dead, and comes back.
    open_connections(&tenant, "dark")?;
    proxy.forget_new(true);
    ensure!(proxy.forget() > 10, "the replicas use the proxy");
    sleep(BLACKOUT);
    proxy.forget_new(false);
    serves_new_pods(&tenant, "dark")?;
    cluster.check_allocations()?;
    tenant.delete_all_pods()?;

    // The replicas before the detour may have been ending at first.
    let mut after = cluster.controller_restarts()?.into_iter();
    ensure!(
        after.all(|(replica, restarts)| before.get(&replica) == Some(&restarts)),
        "a replica was restarted"
    );
    Ok(())
}
