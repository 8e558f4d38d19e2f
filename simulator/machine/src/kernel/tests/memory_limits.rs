//! Memory limits of cgroups.

use super::*;
use crate::description::{B200X8, MemoryLimitBackend};
use crate::protocol::{CgroupMemory, MemoryLimitsRequest, MemoryLimitsState};

const MIB: u64 = 1 << 20;
/// More than a context of the machine takes.
const LIMIT: u64 = 1000 * MIB;

fn kernel(backend: MemoryLimitBackend) -> Kernel {
    let mut machine = MachineDescription::parse(B200X8).unwrap();
    machine.memory_limits.backend = backend;
    Kernel::new(machine, 0)
}

fn client_in(kernel: &mut Kernel, pid: u32, cgroup: &str) -> (ClientId, ContextId) {
    let client = cuda_client(kernel, pid);
    kernel.set_cgroup(client, Some(cgroup.to_owned()));
    (client, context(kernel, client))
}

fn request(kernel: &mut Kernel, cgroup: &str, request: MemoryLimitsRequest) -> Reply {
    let client = ClientId(999);
    if kernel.kind(client).is_none() {
        cuda_client(kernel, 999);
    }
    let request = Request::MemoryLimits {
        gpu: GPU,
        cgroup: cgroup.to_owned(),
        request,
    };
    kernel.handle(client, &request)
}

fn limit(kernel: &mut Kernel, cgroup: &str, hard_bytes: u64) {
    let limits = MemoryLimitsState {
        soft_bytes: 0,
        hard_bytes,
    };
    let set = MemoryLimitsRequest::Set(limits);
    assert_eq!(request(kernel, cgroup, set), Reply::Done);
}

fn allocates(kernel: &mut Kernel, (client, context): (ClientId, ContextId), mib: u64) -> bool {
    let bytes = mib * MIB;
    match kernel.handle(client, &Request::Allocate { context, bytes }) {
        Reply::Allocated { .. } => true,
        Reply::Refused(Refusal::OutOfMemory) => false,
        reply => panic!("{reply:?}"),
    }
}

fn shown(kernel: &mut Kernel, client: ClientId) -> Option<CgroupMemory> {
    match kernel.handle(client, &Request::GpuState { gpu: GPU }) {
        Reply::GpuState(state) => state.cgroup_memory,
        reply => panic!("{reply:?}"),
    }
}

#[test]
fn refuses_memory_beyond_limit_of_cgroup_for_all_its_processes() {
    for backend in [MemoryLimitBackend::Dmem, MemoryLimitBackend::Misc] {
        let mut kernel = kernel(backend);
        limit(&mut kernel, "/a", 2 * LIMIT);
        let one = client_in(&mut kernel, 1, "/a");
        let two = client_in(&mut kernel, 2, "/a");
        let other = client_in(&mut kernel, 3, "/b");
        let left = (2 * LIMIT / MIB) - 2 * 560;
        assert!(allocates(&mut kernel, one, left / 2));
        assert!(!allocates(&mut kernel, two, left / 2 + 2));
        assert!(allocates(&mut kernel, two, left / 2));
        assert!(!allocates(&mut kernel, one, 2));
        assert!(allocates(&mut kernel, other, 4 * LIMIT / MIB));
        // Memory without a context is refused as well, also on the way around a context.
        let bare = Request::CreateMemory { gpu: GPU, bytes: 1 };
        assert_eq!(
            kernel.handle(one.0, &bare),
            Reply::Refused(Refusal::OutOfMemory)
        );
        let context = Request::CreateContext { gpu: GPU };
        assert_eq!(
            kernel.handle(one.0, &context),
            Reply::Refused(Refusal::OutOfMemory)
        );
        assert_eq!(
            kernel.status().gpus[0].memory_limits[0].used_bytes,
            2 * LIMIT
        );
        kernel.disconnect(one.0);
        assert!(allocates(&mut kernel, two, left / 2));
    }
}

#[test]
fn only_dmem_limits_cgroups_below() {
    for (backend, is_limited) in [
        (MemoryLimitBackend::Dmem, true),
        (MemoryLimitBackend::Misc, false),
    ] {
        let mut kernel = kernel(backend);
        limit(&mut kernel, "/a", LIMIT);
        let inner = client_in(&mut kernel, 1, "/a/b");
        let sibling = client_in(&mut kernel, 2, "/ab");
        assert_eq!(allocates(&mut kernel, inner, LIMIT / MIB), !is_limited);
        assert!(allocates(&mut kernel, sibling, LIMIT / MIB));
    }
}

#[test]
fn only_limit_of_own_cgroup_is_shown() {
    let mut kernel = kernel(MemoryLimitBackend::Dmem);
    let (client, _) = client_in(&mut kernel, 1, "/a/b");
    let info = |kernel: &mut Kernel| kernel.handle(client, &Request::MemoryInfo { gpu: GPU });
    let whole = info(&mut kernel);
    limit(&mut kernel, "/a", LIMIT);
    assert_eq!(shown(&mut kernel, client), None);
    assert_eq!(info(&mut kernel), whole);
    limit(&mut kernel, "/a/b", LIMIT);
    let used_bytes = 560 * MIB;
    assert_eq!(
        shown(&mut kernel, client),
        Some(CgroupMemory {
            hard_bytes: LIMIT,
            used_bytes
        })
    );
    assert_eq!(
        info(&mut kernel),
        Reply::MemoryInfo {
            free_bytes: LIMIT - used_bytes,
            total_bytes: LIMIT
        }
    );
    limit(&mut kernel, "/a/b", MemoryLimitsState::NO_LIMIT);
    assert_eq!(info(&mut kernel), whole);
}

#[test]
fn memory_stays_in_cgroup_that_a_process_leaves() {
    let mut kernel = kernel(MemoryLimitBackend::Dmem);
    limit(&mut kernel, "/a", LIMIT);
    let mover = client_in(&mut kernel, 1, "/a");
    assert!(allocates(&mut kernel, mover, 400));
    kernel.set_cgroup(mover.0, Some("/free".to_owned()));
    assert!(allocates(&mut kernel, mover, 2 * LIMIT / MIB));
    kernel.set_cgroup(mover.0, Some("/a".to_owned()));
    assert!(!allocates(&mut kernel, mover, 100));
    // The kernel knows the cgroup of every process.
    kernel.set_cgroup(mover.0, None);
    assert!(!allocates(&mut kernel, mover, 2));
}

#[test]
fn checkpoint_frees_memory_of_cgroup_and_restore_needs_it() {
    let mut kernel = kernel(MemoryLimitBackend::Dmem);
    limit(&mut kernel, "/a", 2 * LIMIT);
    let first = client_in(&mut kernel, 1, "/a");
    assert!(allocates(&mut kernel, first, 600));
    let second = client_in(&mut kernel, 2, "/a");
    assert!(!allocates(&mut kernel, second, 800));
    let act = |kernel: &mut Kernel, action| {
        let request = Request::Checkpoint { pid: 1, action };
        kernel.handle(second.0, &request)
    };
    act(&mut kernel, CheckpointAction::Lock);
    act(&mut kernel, CheckpointAction::Checkpoint);
    assert!(allocates(&mut kernel, second, 800));
    assert_eq!(
        act(&mut kernel, CheckpointAction::Restore),
        Reply::Refused(Refusal::OutOfMemory)
    );
}

#[test]
fn refuses_limits_without_backend_and_in_mig_mode() {
    let set = MemoryLimitsRequest::Set(MemoryLimitsState {
        soft_bytes: 0,
        hard_bytes: LIMIT,
    });
    let unsupported = Reply::Refused(Refusal::NotSupported);
    let mut without = kernel(MemoryLimitBackend::None);
    assert_eq!(request(&mut without, "/a", set), unsupported);
    let mut kernel = kernel(MemoryLimitBackend::Misc);
    let invalid = MemoryLimitsRequest::Set(MemoryLimitsState {
        soft_bytes: LIMIT + 1,
        hard_bytes: LIMIT,
    });
    assert_eq!(
        request(&mut kernel, "/a", invalid),
        Reply::Refused(Refusal::Invalid)
    );
    let enabled = true;
    kernel
        .administer(GPU, crate::protocol::MigRequest::SetMode { enabled })
        .unwrap();
    assert_eq!(request(&mut kernel, "/a", set), unsupported);
}

#[test]
fn limit_ends_with_its_cgroup_unless_memory_is_guaranteed_by_dmem() {
    for (backend, soft_bytes, stays) in [
        (MemoryLimitBackend::Dmem, 0, false),
        (MemoryLimitBackend::Dmem, LIMIT, true),
        (MemoryLimitBackend::Misc, LIMIT, false),
    ] {
        let mut kernel = kernel(backend);
        let set = MemoryLimitsRequest::Set(MemoryLimitsState {
            soft_bytes,
            hard_bytes: LIMIT,
        });
        assert_eq!(request(&mut kernel, "/a", set), Reply::Done);
        kernel.forget_cgroup("/a");
        assert_eq!(kernel.limited_cgroups().count(), usize::from(stays));
    }
}
