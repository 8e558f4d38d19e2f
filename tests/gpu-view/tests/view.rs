//! Output for users and scripts, on the simulated machine.

use std::process::{Command, Output, Stdio};

use simulator_machine::client::Connection;
use simulator_machine::description::{H100X2, T4};
use simulator_machine::protocol::{ClientKind, GpuIndex, MigRequest, Request};
use simulator_machine::root::DriverRoot;
use simulator_machine::testing::Machine;

fn view(machine: &Machine, arguments: &[&str]) -> anyhow::Result<Output> {
    Ok(machine
        .command(env!("CARGO_BIN_EXE_gpu-view"))
        .args(arguments)
        .output()?)
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn prints_table_of_two_idle_gpus() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let output = view(&machine, &[])?;
    assert!(output.status.success());
    let table = text(&output);
    let (_date, table) = table.split_once('\n').unwrap();
    let widths: Vec<usize> = table
        .lines()
        .filter(|line| !line.is_empty())
        .map(str::len)
        .collect();
    assert!(
        widths.iter().all(|width| *width == 91),
        "{widths:?}\n{table}"
    );
    insta::assert_snapshot!(table);
    Ok(())
}

#[test]
fn prints_fields_as_csv() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let query = "--query-gpu=index,name,memory.total,memory.used,utilization.gpu,mig.mode.current";
    let forms = [
        (
            "csv",
            "index, name, memory.total [MiB], memory.used [MiB], utilization.gpu [%], mig.mode.current\n0, Tesla T4, 15360 MiB, 0 MiB, 0 %, [N/A]\n",
        ),
        (
            "csv,noheader",
            "0, Tesla T4, 15360 MiB, 0 MiB, 0 %, [N/A]\n",
        ),
        ("csv,noheader,nounits", "0, Tesla T4, 15360, 0, 0, [N/A]\n"),
    ];
    for (form, expected) in forms {
        let output = view(&machine, &[query, &format!("--format={form}")])?;
        assert_eq!(text(&output), expected);
    }
    let unknown = view(&machine, &["--query-gpu=nonsense", "--format=csv"])?;
    assert_eq!(unknown.status.code(), Some(2));
    assert!(text(&unknown).contains("\"nonsense\" is not a valid field"));
    Ok(())
}

#[test]
fn selects_gpu_by_index_uuid_and_bus_id() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let second = "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-c3d94b76-62fa-4a18-8c05-7b9e21f4d502)\n";
    for id in [
        "1",
        "GPU-c3d94b76-62fa-4a18-8c05-7b9e21f4d502",
        "0000:9d:00.0",
    ] {
        assert_eq!(text(&view(&machine, &["-L", "-i", id])?), second);
    }
    assert_eq!(view(&machine, &["-L", "-i", "2"])?.status.code(), Some(6));
    Ok(())
}

#[test]
fn reports_missing_library_driver_and_gpus() -> anyhow::Result<()> {
    let without_library = Command::new(env!("CARGO_BIN_EXE_gpu-view"))
        .env("LD_LIBRARY_PATH", "/nonexistent")
        .output()?;
    assert_eq!(without_library.status.code(), Some(12));
    assert!(text(&without_library).starts_with("NVIDIA-SMI couldn't find libnvidia-ml.so"));

    let machine = Machine::start(T4)?;
    std::fs::remove_file(machine.root().join("dev/nvidia0"))?;
    let without_gpu = view(&machine, &[])?;
    assert_eq!(
        (without_gpu.status.code(), text(&without_gpu)),
        (Some(6), "No devices were found\n".to_owned())
    );

    std::fs::remove_file(machine.root().join("dev/nvidiactl"))?;
    let without_driver = view(&machine, &[])?;
    assert_eq!(without_driver.status.code(), Some(9));
    Ok(())
}

#[test]
fn shows_mig_devices() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let root = DriverRoot::new(machine.root());
    let (mut nvml, _welcome) = Connection::open(&root, ClientKind::Nvml)?;
    let gpu = GpuIndex(0);
    let create = [
        MigRequest::SetMode { enabled: true },
        MigRequest::CreateGpuInstance {
            profile: 9,
            start: Some(0),
        },
        MigRequest::CreateComputeInstance {
            gpu_instance: 1,
            profile: 2,
            start: None,
        },
    ];
    for request in create {
        nvml.request(&Request::Mig { gpu, request })?;
    }
    let listed = text(&view(&machine, &["-L"])?);
    let lines: Vec<&str> = listed.lines().collect();
    assert_eq!(lines.len(), 3, "{listed}");
    assert!(
        lines[1].starts_with("  MIG 3g.40gb     Device  0: (UUID: MIG-"),
        "{listed}"
    );
    let table = text(&view(&machine, &[])?);
    assert!(table.contains("Enabled"), "{table}");
    let device = table.lines().find(|line| line.contains("3g.40gb")).unwrap();
    assert!(
        device.contains("0MiB /  40448MiB") && device.contains(" 60 "),
        "{table}"
    );
    assert_eq!(device.len(), 91, "{table}");
    Ok(())
}

#[test]
fn ends_quietly_on_closed_pipe() -> anyhow::Result<()> {
    let machine = Machine::start(T4)?;
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let output = machine
        .command(env!("CARGO_BIN_EXE_gpu-view"))
        .stdout(writer)
        .stderr(Stdio::piped())
        .output()?;
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    Ok(())
}
