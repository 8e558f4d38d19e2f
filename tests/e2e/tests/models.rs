//! Requests in the style of the published guides of Volcano's vGPU and HAMi, on machines as their users have them: one T4
//! and one A100 in MIG mode on `node-0`, eight RTX 4090 on `node-1`.

use anyhow::{Context as _, Result, ensure};
use drava_e2e::{Namespace, TestCluster, wait};

const T4_AND_A100: &str = "node-0";
const RTX_4090: &str = "node-1";

fn enabled<'c>(cluster: &'c TestCluster, name: &str) -> Result<Namespace<'c>> {
    let tenant = cluster.namespace(name)?;
    let label = "gpu.drava.dev/compatibility=true";
    cluster.kubectl(["label", "namespace", tenant.name(), label])?;
    Ok(tenant)
}

/// Container with these resources, such as `limits: {nvidia.com/gpu: 1}`.
fn container(name: &str, resources: &str) -> String {
    format!(
        "{{name: {name}, image: 'localhost/drava-demo:dev', imagePullPolicy: IfNotPresent, command: [sleep, infinity], \
         resources: {{{resources}}}}}"
    )
}

/// Spec of a pod on a node.
fn spec(node: &str, containers: &[String], more: &str) -> String {
    let containers = containers.join(", ");
    format!(
        "{{terminationGracePeriodSeconds: 1, nodeSelector: {{kubernetes.io/hostname: {node}}}, containers: [{containers}], {more}}}"
    )
}

fn pod(name: &str, annotations: &str, spec: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, annotations: {{{annotations}}}}}, spec: {spec}}}"
    )
}

/// A pod `a` with one container on a node.
fn simple(node: &str, annotations: &str, limits: &str) -> String {
    let app = container("app", &format!("limits: {{{limits}}}"));
    pod("a", annotations, &spec(node, &[app], ""))
}

/// Runs the pod `a`, and returns the MiB of each GPU as nvidia-smi reports them.
fn runs_with(tenant: &Namespace<'_>, manifest: &str) -> Result<Vec<String>> {
    tenant.apply(manifest)?;
    tenant.running("a")?;
    totals(tenant, "a", "app")
}

fn totals(tenant: &Namespace<'_>, pod: &str, container: &str) -> Result<Vec<String>> {
    let query = "--query-gpu=memory.total";
    let query = ["nvidia-smi", query, "--format=csv,noheader,nounits"];
    let output = tenant.exec(pod, container, &query)?.success()?;
    Ok(output.split_whitespace().map(str::to_owned).collect())
}

/// Returns the device classes of the claim of the pod `a`.
fn class(tenant: &Namespace<'_>) -> Result<String> {
    let claim = tenant.claim_of("a")?;
    let claim = tenant.find("resourceclaim", &claim)?.context("no claim")?;
    let class = &claim["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"];
    Ok(class.as_str().context("no class")?.to_owned())
}

#[test]
fn shows_thousand_mib_of_a_t4() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "t4")?;
    tenant.apply(&simple(
        T4_AND_A100,
        "nvidia.com/use-gputype: T4",
        "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 1000, volcano.sh/vgpu-cores: 10",
    ))?;
    tenant.running("a")?;
    let screen = tenant.exec("a", "app", &["nvidia-smi"])?.success()?;
    ensure!(screen.contains("Tesla T4"), "{screen}");
    ensure!(screen.replace(' ', "").contains("0MiB/1000MiB"), "{screen}");
    Ok(())
}

#[test]
fn gives_two_gpus_of_three_thousand_mib() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "two-gpus")?;
    let limits =
        "volcano.sh/vgpu-number: 2, volcano.sh/vgpu-memory: 3000, volcano.sh/vgpu-cores: 50";
    let totals = runs_with(&tenant, &simple(RTX_4090, "", limits))?;
    ensure!(totals == ["3000", "3000"], "{totals:?}");
    let devices = tenant.devices_of("a")?;
    ensure!(
        devices.len() == 2 && devices[0] != devices[1],
        "{devices:?}"
    );
    Ok(())
}

#[test]
fn clips_memory_beyond_the_gpu_with_a_warning() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "clipped")?;
    let limits = "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 30000";
    let manifest = simple(RTX_4090, "volcano.sh/vgpu-mode: hami-core", limits);
    let warnings = tenant.apply_with_warnings(&manifest)?;
    ensure!(
        warnings.contains("30000 MiB are reduced to 23632 MiB"),
        "{warnings}"
    );
    tenant.running("a")?;
    let totals = totals(&tenant, "a", "app")?;
    ensure!(totals == ["23632"], "{totals:?}");
    Ok(())
}

#[test]
fn gives_percentage_of_memory() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "percentage")?;
    let limits = "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory-percentage: 50";
    let totals = runs_with(&tenant, &simple(RTX_4090, "", limits))?;
    ensure!(totals == ["11816"], "{totals:?}");
    Ok(())
}

#[test]
fn memory_without_number_is_one_gpu() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "no-number")?;
    let totals = runs_with(
        &tenant,
        &simple(RTX_4090, "", "volcano.sh/vgpu-memory: 2000"),
    )?;
    ensure!(totals == ["2000"], "{totals:?}");
    Ok(())
}

#[test]
fn mode_mig_gives_smallest_partition() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "mig")?;
    let limits = "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 3000";
    tenant.apply(&simple(T4_AND_A100, "volcano.sh/vgpu-mode: mig", limits))?;
    tenant.running("a")?;
    let list = tenant.exec("a", "app", &["nvidia-smi", "-L"])?.success()?;
    ensure!(list.contains("MIG 1g.5gb "), "{list}");
    Ok(())
}

#[test]
fn mode_hami_core_gives_share() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "hami-core")?;
    let limits = "nvidia.com/gpu: 1, nvidia.com/gpumem: 3000";
    let manifest = simple(T4_AND_A100, "nvidia.com/vgpu-mode: hami-core", limits);
    let totals = runs_with(&tenant, &manifest)?;
    ensure!(totals == ["3000"], "{totals:?}");
    ensure!(class(&tenant)? == "vgpu.drava.dev");
    let devices = tenant.devices_of("a")?;
    ensure!(devices == ["gpu-0-vgpu"], "{devices:?}");
    Ok(())
}

#[test]
fn without_mode_the_better_kind_is_chosen() -> Result<()> {
    let cluster = TestCluster::attach()?;
    // The T4 has a share of exactly this size.
    let tenant = enabled(&cluster, "either")?;
    let limits = |mib| format!("volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: {mib}");
    let totals = runs_with(&tenant, &simple(T4_AND_A100, "", &limits(3000)))?;
    ensure!(totals == ["3000"], "{totals:?}");
    ensure!(class(&tenant)? == "fraction.drava.dev");
    // Only a partition of the A100 has so much memory.
    let other = enabled(&cluster, "either-large")?;
    other.apply(&simple(T4_AND_A100, "", &limits(18_000)))?;
    other.running("a")?;
    let list = other.exec("a", "app", &["nvidia-smi", "-L"])?.success()?;
    ensure!(
        list.contains("MIG 3g.20gb ") || list.contains("MIG 4g.20gb "),
        "{list}"
    );
    Ok(())
}

#[test]
fn number_alone_is_whole_gpus() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "whole")?;
    let totals = runs_with(&tenant, &simple(RTX_4090, "", "nvidia.com/gpu: 2"))?;
    ensure!(totals == ["24564", "24564"], "{totals:?}");
    ensure!(class(&tenant)? == "gpu.drava.dev");
    Ok(())
}

#[test]
fn requests_count_as_limits_do() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "requests")?;
    let app = container(
        "app",
        "requests: {volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 1500}",
    );
    let totals = runs_with(&tenant, &pod("a", "", &spec(RTX_4090, &[app], "")))?;
    ensure!(totals == ["1500"], "{totals:?}");
    Ok(())
}

#[test]
fn several_and_init_containers_have_their_own_amounts() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "containers")?;
    let limits = |mib| format!("limits: {{nvidia.com/gpu: 1, nvidia.com/gpumem: {mib}}}");
    let containers = [
        container("app", &limits(2000)),
        container("side", &limits(1000)),
    ];
    // The init container checks the amount that it shares with the first container.
    let init = container("init", &limits(2000)).replace(
        "[sleep, infinity]",
        "[sh, -c, 'nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | grep -x 2000']",
    );
    let spec = spec(RTX_4090, &containers, &format!("initContainers: [{init}]"));
    let first = runs_with(&tenant, &pod("a", "", &spec))?;
    let second = totals(&tenant, "a", "side")?;
    ensure!(
        first == ["2000"] && second == ["1000"],
        "{first:?} {second:?}"
    );
    Ok(())
}

#[test]
fn runs_jobs_with_generated_names() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "generated")?;
    let limits = "limits: {volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 1000}";
    let app = container("app", limits).replace("[sleep, infinity]", "[nvidia-smi]");
    let spec = spec(RTX_4090, &[app], "restartPolicy: Never");
    let job = format!(
        "{{apiVersion: batch/v1, kind: Job, metadata: {{generateName: train-}}, spec: {{template: {{spec: {spec}}}}}}}"
    );
    let name = tenant.create(&job)?;
    tenant.kubectl(&["wait", "--for=condition=complete", "--timeout=120s", &name])?;
    let log = tenant.kubectl(&["logs", &name])?;
    ensure!(log.replace(' ', "").contains("/1000MiB"), "{log}");
    Ok(())
}

#[test]
fn pod_of_unserved_scheduler_says_so() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "volcano")?;
    let app = container("app", "limits: {volcano.sh/vgpu-number: 1}");
    let spec = spec(RTX_4090, &[app], "schedulerName: volcano");
    let warnings = tenant.apply_with_warnings(&pod("a", "", &spec))?;
    ensure!(warnings.contains("scheduling.schedulerNames"), "{warnings}");
    let event = tenant.event("a", "SchedulerNotServed")?;
    ensure!(event.contains("volcano"), "{event}");
    Ok(())
}

#[test]
fn unknown_resource_waits_and_is_never_refused_by_kubelet() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "unknown")?;
    // A name that differs from the one of the plugin ended in UnexpectedAdmissionError: kubelet refused the bound pod.
    tenant.apply(&simple(RTX_4090, "", "example.com/vgpu-number: 1"))?;
    let event = tenant.event("a", "Insufficient example.com/vgpu-number")?;
    ensure!(event.starts_with("FailedScheduling"), "{event}");
    let pod = tenant.find("pod", "a")?.context("no pod")?;
    ensure!(pod["status"]["phase"] == "Pending", "{pod}");
    Ok(())
}

#[test]
fn resource_names_change_in_one_place() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "renamed")?;
    let family = serde_json::json!({
        "count": "example.com/gpus", "memory": "example.com/mem", "memoryPercentage": "example.com/mem-percent",
        "cores": "example.com/cores", "countAlone": "share", "memoryFactor": 256,
    });
    let settings = serde_json::json!({"resources": {"families": [family]}});
    let settings = format!("compatibility.settings={settings}");
    let chart = drava_cluster::workspace_root().join("deploy/helm/drava");
    let chart = chart.display().to_string();
    let upgrade = [
        "-n",
        "drava-system",
        "upgrade",
        "drava",
        &chart,
        "--reuse-values",
    ];
    let wait = ["--wait", "--timeout", "3m"];
    let renamed = cluster
        .helm(
            upgrade
                .iter()
                .chain(&["--set-json", &settings])
                .chain(&wait),
        )
        .and_then(|_| cluster.drava_ready())
        .and_then(|()| {
            let limits = "example.com/gpus: 1, example.com/mem: 4";
            runs_with(&tenant, &simple(RTX_4090, "", limits))
        });
    let rollback = ["-n", "drava-system", "rollback", "drava"];
    cluster.helm(rollback.iter().chain(&wait))?;
    cluster.drava_ready()?;
    let totals = renamed?;
    ensure!(totals == ["1024"], "{totals:?}");
    Ok(())
}

#[test]
fn limit_range_is_not_lost() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "limit-range")?;
    tenant.apply(
        "{apiVersion: v1, kind: LimitRange, metadata: {name: gpus}, spec: {limits: [{type: Container, max: \
         {nvidia.com/gpumem: 2000}}]}}",
    )?;
    let manifest = simple(RTX_4090, "", "nvidia.com/gpu: 1, nvidia.com/gpumem: 1000");
    let text = wait("the LimitRange is respected", || {
        Ok(match tenant.apply(&manifest) {
            Err(rejection) => Some(format!("{rejection:#}")),
            Ok(()) => {
                tenant.delete_pods(&["a"])?;
                None
            }
        })
    })?;
    ensure!(
        text.contains("LimitRange gpus limits nvidia.com/gpumem"),
        "{text}"
    );
    Ok(())
}

#[test]
fn node_classic_shows_figures_of_the_device_plugin() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let text = cluster.drava(&["node", RTX_4090, "--classic"])?.success()?;
    for (resource, amount) in [
        ("volcano.sh/vgpu-number", "80"),
        ("volcano.sh/vgpu-memory", "196512"),
        ("volcano.sh/vgpu-cores", "800"),
        ("nvidia.com/gpu", "8"),
    ] {
        let is_shown = text.lines().any(|line| {
            let mut words = line.split_whitespace();
            words.next() == Some(resource) && words.next() == Some(amount)
        });
        ensure!(is_shown, "no {amount} of {resource} in\n{text}");
    }
    Ok(())
}
