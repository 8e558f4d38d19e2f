//! Versioned structs: known versions are filled, others rejected. Structs and version numbers are
//! those of nvidia-ml-py.

use simulator_machine::description::H100X2;
use simulator_machine::testing::{Machine, python};

/// Calls each function with the right version, none, another number and another size.
const SCRIPT: &str = r#"
import ctypes, pynvml
from pynvml import *

nvmlInit()
gpu = nvmlDeviceGetHandleByIndex(0)
assert nvmlDeviceSetMigMode(gpu, 1) == NVML_SUCCESS
profile = nvmlDeviceGetGpuInstanceProfileInfo(gpu, NVML_GPU_INSTANCE_PROFILE_1_SLICE)
instance = nvmlDeviceCreateGpuInstance(gpu, profile.id)
other = nvmlDeviceGetHandleByIndex(1)
uuid = nvmlDeviceGetUUID(other).encode()

def by_uuid(struct):
    struct.type = NVML_UUID_TYPE_ASCII
    struct.value.str = uuid
    return nvml("nvmlDeviceGetHandleByUUIDV")(ctypes.byref(struct), ctypes.byref(c_nvmlDevice_t()))

def nvml(name):
    return pynvml._nvmlGetFunctionPointer(name)

def of(name, *arguments, before=other):
    return lambda struct: nvml(name)(before, *arguments, ctypes.byref(struct))

CALLS = [
    (of("nvmlDeviceGetMemoryInfo_v2"), c_nvmlMemory_v2_t, nvmlMemory_v2),
    (of("nvmlDeviceGetPciInfoExt"), nvmlPciInfoExt_v1_t, nvmlPciInfoExt_v1),
    (of("nvmlDeviceGetGpuFabricInfoV"), c_nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v2),
    (of("nvmlDeviceGetGpuFabricInfoV"), c_nvmlGpuFabricInfo_v3_t, nvmlGpuFabricInfo_v3),
    (of("nvmlDeviceGetTemperatureV"), c_nvmlTemperature_v1_t, nvmlTemperature_v1),
    (of("nvmlDeviceGetAddressingMode"), c_nvmlDeviceAddressingMode_t, nvmlDeviceAddressingMode_v1),
    (of("nvmlDeviceGetRunningProcessDetailList"), c_nvmlProcessDetailList_v1_t, nvmlProcessDetailList_v1),
    (of("nvmlDeviceGetGpuInstanceProfileInfoV", 0, before=gpu), c_nvmlGpuInstanceProfileInfo_v2_t, nvmlGpuInstanceProfileInfo_v2),
    (of("nvmlGpuInstanceGetComputeInstanceProfileInfoV", 0, 0, before=instance), c_nvmlComputeInstanceProfileInfo_v2_t, nvmlComputeInstanceProfileInfo_v2),
    (by_uuid, c_nvmlUUID_t, nvmlUUID_v1),
    (lambda struct: nvml("nvmlSystemGetDriverBranch")(ctypes.byref(struct), 80), c_nvmlSystemDriverBranchInfo_v1_t, SystemDriverBranchInfo_v1),
]
for index, (call, kind, version) in enumerate(CALLS):
    assert version & 0xffffff == ctypes.sizeof(kind), (index, hex(version))
    def answer(given):
        # No struct of another version is larger than that.
        room = (ctypes.c_byte * 4096)()
        struct = kind.from_buffer(room)
        struct.version = given
        return call(struct), struct.version
    assert answer(version) == (NVML_SUCCESS, version), (index, answer(version))
    for wrong in (0, 1, version + 1, version + (8 << 24), 77 << 24):
        code, left = answer(wrong)
        assert code == NVML_ERROR_ARGUMENT_VERSION_MISMATCH, (index, hex(wrong), code)
        assert left == wrong, (index, "is written to")
print(len(CALLS))
"#;

#[test]
fn fills_known_struct_versions_and_rejects_others() -> anyhow::Result<()> {
    if python::is_unavailable() {
        return Ok(());
    }
    let machine = Machine::start(H100X2)?;
    let output = machine
        .command(python::clients()?.join("python"))
        .args(["-c", SCRIPT])
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "11\n", "{error}");
    Ok(())
}
