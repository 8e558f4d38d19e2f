//! MIG devices in CUDA: selection and memory limit.

use std::process::{Child, Stdio};

use serde_json::Value;
use simulator_machine::client::Connection;
use simulator_machine::description::{H100X2, MIB};
use simulator_machine::protocol::{
    ClientKind, GpuIndex, InstanceId, MigReply, MigRequest, Reply, Request,
};
use simulator_machine::root::DriverRoot;
use simulator_machine::testing::Machine;

/// A child process that is killed when the test ends.
struct Background(Child);

impl Drop for Background {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Both GPUs in MIG mode; the first has a 3g.40gb and a 1g.10gb. Returns their UUIDs.
fn partitioned() -> anyhow::Result<(Machine, [String; 2])> {
    let machine = Machine::start(H100X2)?;
    let (mut nvml, _welcome) =
        Connection::open(&DriverRoot::new(machine.root()), ClientKind::Nvml)?;
    let mut ask = |gpu, request| {
        let gpu = GpuIndex(gpu);
        nvml.request(&Request::Mig { gpu, request })
    };
    for gpu in [0, 1] {
        ask(gpu, MigRequest::SetMode { enabled: true })?;
    }
    for (profile, compute) in [(9, 2), (19, 0)] {
        let start = None;
        let created = ask(0, MigRequest::CreateGpuInstance { profile, start })?;
        let Reply::Mig(MigReply::Created(gpu_instance)) = created else {
            anyhow::bail!("{created:?}")
        };
        let profile = compute;
        ask(
            0,
            MigRequest::CreateComputeInstance {
                gpu_instance,
                profile,
                start,
            },
        )?;
    }
    let uuids = machine
        .gpu(0)?
        .mig
        .gpu_instances
        .into_iter()
        .map(|gpu_instance| gpu_instance.compute_instances[0].uuid.clone());
    let uuids: Vec<String> = uuids.collect();
    let [large, small] = &uuids[..] else {
        anyhow::bail!("{uuids:?}")
    };
    Ok((machine, [large.clone(), small.clone()]))
}

/// The JSON output of `cuda-probe`.
fn probe(machine: &Machine, visible: Option<&str>, arguments: &[&str]) -> anyhow::Result<Value> {
    let mut command = machine.program("cuda-probe")?;
    command.args(arguments).args(["--output", "json"]);
    if let Some(visible) = visible {
        command.env("CUDA_VISIBLE_DEVICES", visible);
    }
    Ok(serde_json::from_slice(&command.output()?.stdout)?)
}

fn names(shown: &Value) -> Vec<&str> {
    let devices = shown["devices"].as_array();
    let devices = devices.into_iter().flatten();
    devices
        .filter_map(|device| device["name"].as_str())
        .collect()
}

#[test]
fn selects_one_mig_device_per_process() -> anyhow::Result<()> {
    let (machine, [large, small]) = partitioned()?;
    let (three, one) = (
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    );
    // A GPU without instances is not a device.
    assert_eq!(names(&probe(&machine, None, &["info"])?), [three]);
    assert_eq!(names(&probe(&machine, Some(&large), &["info"])?), [three]);
    let shown = probe(&machine, Some(&format!("{small},{large}")), &["info"])?;
    assert_eq!(names(&shown), [one]);
    assert_eq!(shown["devices"][0]["multiprocessors"], 16);
    assert_eq!(shown["devices"][0]["totalBytes"], 9984 * MIB);
    let unknown = machine
        .program("cuda-probe")?
        .arg("info")
        .env(
            "CUDA_VISIBLE_DEVICES",
            "MIG-00000000-0000-0000-0000-000000000000",
        )
        .output()?;
    assert!(!unknown.status.success());
    Ok(())
}

#[test]
fn skips_mig_devices_without_capabilities() -> anyhow::Result<()> {
    let (machine, [large, small]) = partitioned()?;
    let instances = machine.gpu(0)?.mig.gpu_instances;
    let access = format!(
        "proc/driver/nvidia/capabilities/gpu0/mig/gi{}/access",
        instances[0].id
    );
    std::fs::remove_file(machine.root().join(access))?;
    let shown = probe(&machine, None, &["info"])?;
    assert_eq!(names(&shown), ["NVIDIA H100 80GB HBM3 MIG 1g.10gb"]);
    assert!(probe(&machine, Some(&large), &["info"]).is_err());
    assert!(probe(&machine, Some(&small), &["info"]).is_ok());
    Ok(())
}

#[test]
fn limits_memory_to_the_instance() -> anyhow::Result<()> {
    let (machine, [large, small]) = partitioned()?;
    let mut program = machine.program("cuda-probe")?;
    let fill = program.args(["fill", "--hold", "600"]);
    let fill = fill.env("CUDA_VISIBLE_DEVICES", &small);
    let holder = Background(fill.stdout(Stdio::null()).spawn()?);
    let of = |gpu: &simulator_machine::kernel::GpuStatus, at: usize| {
        gpu.mig.gpu_instances[at].used_bytes
    };
    // All of it, to the last page.
    let full = machine.wait_for_gpu(0, |gpu| of(gpu, 1) == 9984 * MIB)?;
    assert_eq!(of(&full, 0), 0);
    assert_eq!(full.processes.len(), 1);
    let at = full.processes[0]
        .instance
        .map(|InstanceId { gpu_instance, .. }| gpu_instance);
    assert_eq!(at, Some(full.mig.gpu_instances[1].id));
    let refused = probe(&machine, Some(&small), &["alloc", "--mib", "100"]);
    assert!(refused.is_err() || refused.is_ok_and(|shown| !shown["error"].is_null()));
    let other = probe(&machine, Some(&large), &["alloc", "--mib", "30000"])?;
    assert_eq!(other["error"], Value::Null);
    assert_eq!(other["after"]["totalBytes"], 40448 * MIB);
    drop(holder);
    machine.wait_for_gpu(0, |gpu| gpu.used_bytes == 0)?;
    Ok(())
}

#[test]
fn charges_context_free_memory_to_the_instance() -> anyhow::Result<()> {
    let (machine, _) = partitioned()?;
    let root = DriverRoot::new(machine.root());
    let (mut cuda, _welcome) = Connection::open(&root, ClientKind::Cuda)?;
    let gpu = GpuIndex(0);
    let Reply::ContextCreated { context } = cuda.request(&Request::CreateContext { gpu })? else {
        anyhow::bail!("no context")
    };
    let small = &machine.gpu(0)?.mig.gpu_instances[1];
    let instance = InstanceId {
        gpu_instance: small.id,
        compute: small.compute_instances[0].id,
    };
    let request = MigRequest::Enter { context, instance };
    cuda.request(&Request::Mig { gpu, request })?;
    let used = || anyhow::Ok(machine.gpu(0)?.mig.gpu_instances[1].used_bytes);
    let context_bytes = used()?;
    let bytes = 5000 * MIB;
    cuda.request(&Request::CreateMemory { gpu, bytes })?;
    assert_eq!(used()?, context_bytes + bytes);
    assert!(cuda.request(&Request::CreateMemory { gpu, bytes }).is_err());
    assert_eq!(machine.gpu(0)?.processes.len(), 1);
    Ok(())
}
