//! Event sets: delivery to registered clients only.

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::error::NvmlError;
use simulator_machine::control::Command;
use simulator_machine::description::H100X2;
use simulator_machine::protocol::{GpuEvent, GpuIndex};
use simulator_machine::testing::Machine;

#[test]
fn delivers_xid_to_the_registered_set() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let library = machine.lib_dir().join("libnvidia-ml.so.1");
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init()?;
    let xid = |gpu, code| {
        Command::Raise(GpuEvent::Xid {
            gpu: GpuIndex(gpu),
            code,
            instance: None,
        })
    };
    let device = nvml.device_by_index(1)?;
    assert_eq!(
        device.supported_event_types()?,
        EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR
    );
    let set = nvml.create_event_set()?;
    let set = device
        .register_events(EventTypes::CRITICAL_XID_ERROR, set)
        .map_err(|error| error.error)?;
    machine.control(&xid(0, 13))?;
    assert!(matches!(set.wait(0), Err(NvmlError::Timeout)));
    machine.control(&xid(1, 79))?;
    let event = set.wait(10_000)?;
    assert_eq!(event.device.index()?, 1);
    assert_eq!(format!("{:?}", event.event_data), "Some(Value(79))");
    assert!(machine.control(&xid(2, 79)).is_err());
    Ok(())
}

#[test]
fn rejects_unsupported_event_types() -> anyhow::Result<()> {
    let machine = Machine::start(H100X2)?;
    let library = machine.lib_dir().join("libnvidia-ml.so.1");
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init()?;
    let registered = nvml
        .device_by_index(0)?
        .register_events(EventTypes::PSTATE_CHANGE, nvml.create_event_set()?);
    assert!(registered.is_err_and(|error| matches!(error.error, NvmlError::NotSupported)));
    Ok(())
}
