//! Switching of MIG mode.

use super::*;

#[test]
fn reports_no_utilization_in_mig_mode() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let (mig, gpu) = Mig::partitioned(H100X2)?;
    let mut rates = nvml_wrapper_sys::bindings::nvmlUtilization_t { gpu: 0, memory: 0 };
    let mut count = 0;
    assert_eq!(
        call!(mig, nvmlDeviceGetUtilizationRates(gpu, &raw mut rates)),
        NOT_SUPPORTED
    );
    assert_eq!(
        call!(
            mig,
            nvmlDeviceGetProcessUtilization(gpu, null_mut(), &raw mut count, 0)
        ),
        NOT_SUPPORTED
    );
    let mut kind = 0;
    assert_eq!(
        call!(
            mig,
            nvmlDeviceGetSamples(gpu, 1, 0, &raw mut kind, &raw mut count, null_mut())
        ),
        NOT_SUPPORTED
    );
    Ok(())
}

#[test]
fn rejects_instances_without_mig_mode() -> anyhow::Result<()> {
    let mig = Mig::start(H100X2)?;
    let gpu = mig.gpu()?;
    assert_eq!(mig.create(gpu, 19), Err(NOT_SUPPORTED));
    assert_eq!(mig.device(gpu, 0), Err(NOT_FOUND));
    assert_eq!(mig.device(gpu, 7), Err(INVALID_ARGUMENT));
    assert_eq!(mig.set_mode(gpu, 2).0, INVALID_ARGUMENT);
    let nowhere = call!(mig, nvmlDeviceSetMigMode(gpu, 1, null_mut()));
    assert_eq!(nowhere, INVALID_ARGUMENT);
    let mut instance = null_mut();
    let no_placement = call!(
        mig,
        nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 19, null(), &raw mut instance)
    );
    assert_eq!(no_placement, INVALID_ARGUMENT);
    Ok(())
}

#[test]
fn defers_mig_mode_of_a_gpu_in_use() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let mig = Mig::start(H100X2)?;
    let gpu = mig.gpu()?;
    let root = DriverRoot::new(mig.machine.root());
    let (mut cuda, _welcome) = Connection::open(&root, ClientKind::Cuda)?;
    cuda.request(&Request::CreateContext { gpu: GpuIndex(0) })?;
    assert_eq!(mig.set_mode(gpu, 1), (SUCCESS, IN_USE));
    assert_eq!(mig.mode(gpu), (0, 1));
    let reset = Command::Reset { gpu: GpuIndex(0) };
    assert!(mig.machine.control(&reset).is_err());
    drop(cuda);
    mig.machine
        .wait_for_gpu(0, |gpu| gpu.processes.is_empty())?;
    assert_eq!(mig.set_mode(gpu, 1), (SUCCESS, SUCCESS));
    assert_eq!(mig.mode(gpu), (1, 1));
    Ok(())
}

#[test]
fn defers_mig_mode_of_an_open_a30_until_reset() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let mig = Mig::start(A30X2)?;
    let gpu = mig.gpu()?;
    let script = "import pynvml; pynvml.nvmlInit(); print('open', flush=True); input()";
    let mut watching = mig
        .machine
        .command(python::clients()?.join("python"))
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut said = String::new();
    let stdout = watching.stdout.take().context("missing stdout pipe")?;
    BufReader::new(stdout).read_line(&mut said)?;
    assert_eq!(said.trim(), "open");
    assert_eq!(mig.set_mode(gpu, 1), (SUCCESS, IN_USE));
    watching.kill()?;
    watching.wait()?;
    assert_eq!(mig.mode(gpu), (0, 1));
    mig.machine.control(&Command::Reset { gpu: GpuIndex(0) })?;
    assert_eq!(mig.mode(gpu), (1, 1));
    mig.create(gpu, 14).unwrap();
    mig.machine.control(&Command::Reset { gpu: GpuIndex(0) })?;
    assert_eq!(mig.machine.gpu(0)?.mig.gpu_instances, []);
    Ok(())
}
