//! Process checkpoints: lock, checkpoint, restore, unlock.

use std::process::{Child, Stdio};

use simulator_machine::description::{MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{
    Api, Handle, ILLEGAL_STATE, INVALID_VALUE, Invoke, NOT_SUPPORTED, OUT_OF_MEMORY, call,
};
use crate::pools::{MANAGED, NOWHERE, allocate_from, create_pool};
use crate::virtual_memory::create;

/// `CUDA_ERROR_OPERATING_SYSTEM`
const OPERATING_SYSTEM: u32 = 304;
/// `CUDA_ERROR_TIMEOUT`
const TIMEOUT: u32 = 909;
const MS: u64 = 1_000_000;
const NONE: Handle = std::ptr::null_mut();
const RUNNING: u32 = 0;
const LOCKED: u32 = 1;
const CHECKPOINTED: u32 = 2;
const FAILED: u32 = 3;

/// A child process that is killed when the test ends.
struct Other(Child);

impl Other {
    fn start(machine: &Machine, arguments: &[&str]) -> Self {
        let mut command = machine.program("cuda-probe").unwrap();
        Self(
            command
                .args(arguments)
                .stdout(Stdio::null())
                .spawn()
                .unwrap(),
        )
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn change(api: &Api, what: &str, pid: u32) -> u32 {
    let symbol = api.symbol(&format!("cuCheckpointProcess{what}"));
    Invoke::invoke(symbol, (pid, NONE))
}

fn state(api: &Api, pid: u32) -> u32 {
    let mut state = 9u32;
    let code = call!(api, "cuCheckpointProcessGetState", pid, &raw mut state);
    assert_eq!(code, 0);
    state
}

#[test]
fn frees_and_restores_memory_of_a_checkpoint() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let own = machine.gpu(0).unwrap().used_bytes;
    let used = || machine.gpu(0).unwrap().used_bytes;
    let other = Other::start(&machine, &["alloc", "--mib", "1000", "--hold", "600"]);
    let full = machine
        .wait_for_gpu(0, |gpu| gpu.used_bytes >= 2 * own + 1000 * MIB)
        .unwrap();
    let pid = other.pid();
    assert_eq!(change(&api, "Checkpoint", pid), ILLEGAL_STATE);
    assert_eq!(change(&api, "Lock", u32::MAX), INVALID_VALUE);
    assert_eq!((change(&api, "Lock", pid), state(&api, pid)), (0, LOCKED));
    assert_eq!(
        (change(&api, "Unlock", pid), state(&api, pid)),
        (0, RUNNING)
    );
    assert_eq!(change(&api, "Lock", pid), 0);
    assert_eq!(
        (change(&api, "Checkpoint", pid), state(&api, pid)),
        (0, CHECKPOINTED)
    );
    assert_eq!(used(), own);
    assert_eq!(machine.gpu(0).unwrap().processes.len(), 1);
    assert_eq!(
        (change(&api, "Restore", pid), state(&api, pid)),
        (0, LOCKED)
    );
    assert_eq!(used(), full.used_bytes);
    assert_eq!(
        (change(&api, "Unlock", pid), state(&api, pid)),
        (0, RUNNING)
    );
    // A checkpointed process that dies has no memory to free.
    assert_eq!(change(&api, "Lock", pid), 0);
    assert_eq!(change(&api, "Checkpoint", pid), 0);
    drop(other);
    machine
        .wait_for_gpu(0, |gpu| gpu.processes.len() == 1)
        .unwrap();
    assert_eq!(used(), own);
}

/// As reported for driver 580.95.05 (NVIDIA/cuda-checkpoint, issue 44): only a kill is left.
#[test]
fn process_whose_restore_failed_is_never_restored() {
    let failure = "checkpoints: {showsFailure: true}\n";
    for (yaml, expected) in [
        (T4.to_owned(), CHECKPOINTED),
        (format!("{failure}{T4}"), FAILED),
    ] {
        let machine = Machine::start(&yaml).unwrap();
        let api = Api::start(&machine);
        let own = machine.gpu(0).unwrap().used_bytes;
        let other = Other::start(&machine, &["alloc", "--mib", "1000", "--hold", "600"]);
        machine
            .wait_for_gpu(0, |gpu| gpu.used_bytes >= 2 * own + 1000 * MIB)
            .unwrap();
        let pid = other.pid();
        assert_eq!(change(&api, "Lock", pid), 0);
        assert_eq!(change(&api, "Checkpoint", pid), 0);
        let all = api
            .allocate(api.memory_info().0 / (2 * MIB) * 2 * MIB)
            .unwrap();
        assert_eq!(change(&api, "Restore", pid), OUT_OF_MEMORY);
        api.free(all);
        for _ in 0..2 {
            assert_eq!(change(&api, "Restore", pid), OPERATING_SYSTEM);
            for action in ["Unlock", "Lock", "Checkpoint"] {
                assert_eq!(change(&api, action, pid), ILLEGAL_STATE, "{action}");
            }
            assert_eq!(state(&api, pid), expected);
        }
        assert_eq!(machine.gpu(0).unwrap().used_bytes, own);
        // It dies without memory to free.
        drop(other);
        machine
            .wait_for_gpu(0, |_| change(&api, "Restore", pid) == INVALID_VALUE)
            .unwrap();
        assert_eq!(machine.gpu(0).unwrap().used_bytes, own);
    }
}

#[test]
fn blocks_a_locked_process_in_its_next_call() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let other = Other::start(&machine, &["launch", "--ms", "5", "--seconds", "600"]);
    let kernels = |gpu: &simulator_machine::kernel::GpuStatus| {
        let mut of_other = gpu.processes.iter().filter(|one| one.pid == other.pid());
        of_other.next().map_or(0, |process| process.kernels)
    };
    machine.wait_for_gpu(0, |gpu| kernels(gpu) > 2).unwrap();
    assert_eq!(change(&api, "Lock", other.pid()), 0);
    // A running call completes; the next one blocks.
    let mut counts = Vec::new();
    for _ in 0..2 {
        api.spin(spin, NONE, 40, 200 * MS);
        api.synchronize();
        counts.push(kernels(&machine.gpu(0).unwrap()));
    }
    assert_eq!(counts[0], counts[1]);
    assert_eq!(change(&api, "Unlock", other.pid()), 0);
    machine
        .wait_for_gpu(0, |gpu| kernels(gpu) > counts[1])
        .unwrap();
}

#[test]
fn process_runs_on_if_its_work_takes_longer_than_the_lock_may() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let other = Other::start(&machine, &["launch", "--ms", "400", "--seconds", "600"]);
    let kernels = |gpu: &simulator_machine::kernel::GpuStatus| {
        let mut of_other = gpu.processes.iter().filter(|one| one.pid == other.pid());
        of_other.next().map_or(0, |process| process.kernels)
    };
    machine.wait_for_gpu(0, |gpu| kernels(gpu) > 0).unwrap();
    let mut arguments = [0u64; 8];
    arguments[0] = 1;
    let symbol = api.symbol("cuCheckpointProcessLock");
    let lock = |arguments: &mut [u64; 8]| {
        let arguments = arguments.as_mut_ptr().cast::<std::ffi::c_void>();
        Invoke::invoke(symbol, (other.pid(), arguments))
    };
    loop {
        match lock(&mut arguments) {
            // It was between two kernels.
            0 => assert_eq!(change(&api, "Unlock", other.pid()), 0),
            code => break assert_eq!(code, TIMEOUT),
        }
    }
    assert_eq!(state(&api, other.pid()), RUNNING);
    let before = kernels(&machine.gpu(0).unwrap());
    machine
        .wait_for_gpu(0, |gpu| kernels(gpu) > before + 1)
        .unwrap();
    // Without a limit it waits.
    assert_eq!(change(&api, "Lock", other.pid()), 0);
    assert_eq!(state(&api, other.pid()), LOCKED);
}

#[test]
fn rejects_checkpoint_with_exported_memory() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let pid = std::process::id();
    let memory = create(&api, 2 * MIB).unwrap();
    let mut descriptor = -1;
    let code = call!(
        api,
        "cuMemExportToShareableHandle",
        &raw mut descriptor,
        memory,
        1u32,
        0u64
    );
    assert_eq!(code, 0);
    let used = machine.gpu(0).unwrap().used_bytes;
    // Calls about the own process do not block.
    assert_eq!(change(&api, "Lock", pid), 0);
    assert_eq!(change(&api, "Checkpoint", pid), NOT_SUPPORTED);
    assert_eq!(
        (state(&api, pid), machine.gpu(0).unwrap().used_bytes),
        (LOCKED, used)
    );
    assert_eq!(change(&api, "Unlock", pid), 0);
    api.synchronize();
    assert_eq!(unsafe { libc::close(descriptor) }, 0);
}

#[test]
fn rejects_checkpoint_while_managed_memory_is_in_use() {
    let yaml = T4.replace("cudaVersion: \"13.0\"", "cudaVersion: \"13.2\"");
    let machine = Machine::start(&yaml).unwrap();
    let api = Api::start(&machine);
    let pid = std::process::id();
    let attempt = || {
        assert_eq!(change(&api, "Lock", pid), 0);
        let code = change(&api, "Checkpoint", pid);
        if code == 0 {
            assert_eq!(change(&api, "Restore", pid), 0);
        }
        assert_eq!((state(&api, pid), change(&api, "Unlock", pid)), (LOCKED, 0));
        code
    };
    let managed = || {
        let mut address = 0u64;
        let code = call!(api, "cuMemAllocManaged", &raw mut address, 2 * MIB, 1u32);
        assert_eq!(code, 0);
        address
    };
    assert_eq!(attempt(), 0);
    let (first, second) = (managed(), managed());
    assert_eq!(attempt(), NOT_SUPPORTED);
    api.free(first);
    assert_eq!(attempt(), NOT_SUPPORTED);
    api.free(second);
    assert_eq!(attempt(), 0);

    let pool = create_pool(&api, MANAGED, NOWHERE).unwrap();
    let address = allocate_from(&api, pool, MIB).unwrap();
    assert_eq!(attempt(), NOT_SUPPORTED);
    crate::pools::free(&api, address);
    // The pool keeps it until the next synchronization.
    assert_eq!(attempt(), NOT_SUPPORTED);
    api.synchronize();
    assert_eq!(attempt(), 0);

    // A context takes its memory with it.
    let mut context: Handle = NONE;
    let code = call!(api, "cuCtxCreate_v2", &raw mut context, 0u32, 0i32);
    assert_eq!(code, 0);
    managed();
    assert_eq!(attempt(), NOT_SUPPORTED);
    assert_eq!(call!(api, "cuCtxDestroy_v2", context), 0);
    assert_eq!(attempt(), 0);
}
