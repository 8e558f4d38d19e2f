//! Switching of MIG mode.

use super::*;

#[test]
fn reports_no_utilization_in_mig_mode() -> anyhow::Result<()> {
    if skips_without_root() {
        return Ok(());
    }
    let (mig, card) = Mig::partitioned(H100X2)?;
    let mut rates = nvml_wrapper_sys::bindings::nvmlUtilization_t { gpu: 0, memory: 0 };
    let mut count = 0;
    assert_eq!(
        call!(mig, nvmlDeviceGetUtilizationRates(card, &raw mut rates)),
        NOT_SUPPORTED
    );
    assert_eq!(
        call!(
            mig,
            nvmlDeviceGetProcessUtilization(card, null_mut(), &raw mut count, 0)
        ),
        NOT_SUPPORTED
    );
    let mut kind = 0;
    assert_eq!(
        call!(
            mig,
            nvmlDeviceGetSamples(card, 1, 0, &raw mut kind, &raw mut count, null_mut())
        ),
        NOT_SUPPORTED
    );
    Ok(())
}

#[test]
fn rejects_instances_without_mig_mode() -> anyhow::Result<()> {
    let mig = Mig::start(H100X2)?;
    let card = mig.card()?;
    assert_eq!(mig.create(card, 19), Err(NOT_SUPPORTED));
    assert_eq!(mig.device(card, 0), Err(NOT_FOUND));
    assert_eq!(mig.device(card, 7), Err(INVALID_ARGUMENT));
    assert_eq!(mig.set_mode(card, 2).0, INVALID_ARGUMENT);
    let nowhere = call!(mig, nvmlDeviceSetMigMode(card, 1, null_mut()));
    assert_eq!(nowhere, INVALID_ARGUMENT);
    let mut instance = null_mut();
    let no_placement = call!(
        mig,
        nvmlDeviceCreateGpuInstanceWithPlacement(card, 19, null(), &raw mut instance)
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
    let card = mig.card()?;
    let root = DriverRoot::new(mig.machine.root());
    let (mut cuda, _welcome) = Connection::open(&root, ClientKind::Cuda)?;
    cuda.request(&Request::CreateContext { card: CardIndex(0) })?;
    assert_eq!(mig.set_mode(card, 1), (SUCCESS, IN_USE));
    assert_eq!(mig.mode(card), (0, 1));
    let reset = Command::Reset { card: CardIndex(0) };
    assert!(mig.machine.control(&reset).is_err());
    drop(cuda);
    mig.machine
        .wait_for_card(0, |card| card.processes.is_empty())?;
    assert_eq!(mig.set_mode(card, 1), (SUCCESS, SUCCESS));
    assert_eq!(mig.mode(card), (1, 1));
    Ok(())
}

#[test]
fn defers_mig_mode_of_an_open_a30_until_reset() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let mig = Mig::start(A30X2)?;
    let card = mig.card()?;
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
    assert_eq!(mig.set_mode(card, 1), (SUCCESS, IN_USE));
    watching.kill()?;
    watching.wait()?;
    assert_eq!(mig.mode(card), (0, 1));
    mig.machine
        .control(&Command::Reset { card: CardIndex(0) })?;
    assert_eq!(mig.mode(card), (1, 1));
    mig.create(card, 14).unwrap();
    mig.machine
        .control(&Command::Reset { card: CardIndex(0) })?;
    assert_eq!(mig.machine.card(0)?.mig.gpu_instances, []);
    Ok(())
}
