use proptest::prelude::*;

use super::*;
use crate::description::{H100X2, T4};
use crate::protocol::CheckpointAction;

mod memory_limits;
mod mps;

const GPU: GpuIndex = GpuIndex(0);

fn kernel() -> Kernel {
    Kernel::new(MachineDescription::parse(T4).unwrap(), 0)
}

fn cuda_client(kernel: &mut Kernel, pid: u32) -> ClientId {
    let client = ClientId(pid.into());
    kernel.connect(client, pid);
    let hello = Request::Hello {
        protocol: PROTOCOL,
        kind: ClientKind::Cuda,
    };
    assert!(matches!(
        kernel.handle(client, &hello),
        Reply::Welcome { .. }
    ));
    client
}

fn context(kernel: &mut Kernel, client: ClientId) -> ContextId {
    match kernel.handle(client, &Request::CreateContext { gpu: GPU }) {
        Reply::ContextCreated { context } => context,
        reply => panic!("{reply:?}"),
    }
}

fn used(kernel: &Kernel) -> u64 {
    kernel.status().gpus[0].used_bytes
}

#[test]
fn denies_memory_beyond_the_last_page() {
    let mut kernel = kernel();
    let client = cuda_client(&mut kernel, 7);
    let context = context(&mut kernel, client);
    let free = kernel.status().gpus[0].free_bytes;
    let too_much = Request::Allocate {
        context,
        bytes: free + 1,
    };
    assert_eq!(
        kernel.handle(client, &too_much),
        Reply::Refused(Refusal::OutOfMemory)
    );
    let whole = free / PAGE_BYTES * PAGE_BYTES;
    let all = Request::Allocate {
        context,
        bytes: whole,
    };
    assert!(
        matches!(kernel.handle(client, &all), Reply::Allocated { bytes, .. } if bytes == whole)
    );
    let one = Request::Allocate { context, bytes: 1 };
    assert_eq!(
        kernel.handle(client, &one),
        Reply::Refused(Refusal::OutOfMemory)
    );
    kernel.disconnect(client);
    assert_eq!(used(&kernel), 0);
}

#[test]
fn rejects_an_overflowing_size() {
    let mut kernel = kernel();
    let client = cuda_client(&mut kernel, 7);
    let context = context(&mut kernel, client);
    for bytes in [u64::MAX, u64::MAX - PAGE_BYTES, 1 << 63] {
        let request = Request::Allocate { context, bytes };
        assert_eq!(
            kernel.handle(client, &request),
            Reply::Refused(Refusal::OutOfMemory)
        );
    }
}

#[test]
fn rejects_access_to_memory_of_other_processes() {
    let mut kernel = kernel();
    let owner = cuda_client(&mut kernel, 7);
    let other = cuda_client(&mut kernel, 8);
    let context = context(&mut kernel, owner);
    let allocate = Request::Allocate { context, bytes: 1 };
    let Reply::Allocated { allocation, .. } = kernel.handle(owner, &allocate) else {
        panic!("not allocated");
    };
    let before = used(&kernel);
    for request in [
        allocate,
        Request::Free { allocation },
        Request::DestroyContext { context },
    ] {
        assert_eq!(
            kernel.handle(other, &request),
            Reply::Refused(Refusal::NotFound)
        );
    }
    assert_eq!(used(&kernel), before);
}

#[test]
fn requires_a_matching_hello() {
    let mut kernel = kernel();
    let client = ClientId(1);
    kernel.connect(client, 7);
    let early = kernel.handle(client, &Request::CreateContext { gpu: GPU });
    assert_eq!(early, Reply::Refused(Refusal::Invalid));
    let hello = |protocol| Request::Hello {
        protocol,
        kind: ClientKind::Cuda,
    };
    assert_eq!(
        kernel.handle(client, &hello(PROTOCOL + 1)),
        Reply::Refused(Refusal::Protocol)
    );
    assert!(matches!(
        kernel.handle(client, &hello(PROTOCOL)),
        Reply::Welcome { .. }
    ));
    assert_eq!(
        kernel.handle(client, &hello(PROTOCOL)),
        Reply::Refused(Refusal::Invalid)
    );
}

#[test]
fn charges_processes_on_the_gpu_they_use() {
    let mut kernel = Kernel::new(MachineDescription::parse(H100X2).unwrap(), 0);
    let client = cuda_client(&mut kernel, 7);
    let reply = kernel.handle(client, &Request::CreateContext { gpu: GpuIndex(1) });
    assert!(matches!(reply, Reply::ContextCreated { .. }));
    let status = kernel.status();
    assert_eq!(status.gpus[0].processes, []);
    assert_eq!(status.gpus[1].processes[0].pid, 7);
    assert_eq!(
        status.gpus[1].processes[0].used_bytes,
        status.gpus[1].used_bytes
    );
    let missing = kernel.handle(client, &Request::CreateContext { gpu: GpuIndex(2) });
    assert_eq!(missing, Reply::Refused(Refusal::NotFound));
}

#[test]
fn frees_memory_with_its_last_holder() {
    let mut kernel = kernel();
    let (maker, other) = (cuda_client(&mut kernel, 7), cuda_client(&mut kernel, 8));
    let create = Request::CreateMemory {
        gpu: GPU,
        bytes: PAGE_BYTES,
    };
    let Reply::Allocated { allocation, .. } = kernel.handle(maker, &create) else {
        panic!("not created");
    };
    let by = |kernel: &Kernel, pid| {
        let processes = &kernel.status().gpus[0].processes;
        let process = processes.iter().find(|process| process.pid == pid);
        process.map_or(0, |process| process.used_bytes)
    };
    // Memory that is not shared cannot be opened; memory that is not held cannot be exported.
    for request in [Request::Open { allocation }, Request::Export { allocation }] {
        let reply = kernel.handle(other, &request);
        assert_eq!(reply, Reply::Refused(Refusal::NotFound));
    }
    let Reply::Exported { export } = kernel.handle(maker, &Request::Export { allocation }) else {
        panic!("not exported");
    };
    assert!(matches!(
        kernel.import(other, export),
        Reply::Opened { offset: 0, .. }
    ));
    assert_eq!((by(&kernel, 7), by(&kernel, 8)), (PAGE_BYTES, 0));
    kernel.disconnect(maker);
    assert_eq!((by(&kernel, 7), by(&kernel, 8)), (0, PAGE_BYTES));
    kernel.disconnect(other);
    assert_eq!(used(&kernel), PAGE_BYTES);
    kernel.unexport(export);
    assert_eq!(used(&kernel), 0);
    let late = cuda_client(&mut kernel, 9);
    let gone = kernel.import(late, export);
    assert_eq!(gone, Reply::Refused(Refusal::NotFound));
}

#[test]
fn charges_context_free_memory_to_its_instance() {
    let mut kernel = kernel();
    let client = cuda_client(&mut kernel, 7);
    let context = context(&mut kernel, client);
    let alone = kernel.bytes_by_context(GPU)[&context];
    let create = Request::CreateMemory {
        gpu: GPU,
        bytes: PAGE_BYTES,
    };
    assert!(matches!(
        kernel.handle(client, &create),
        Reply::Allocated { .. }
    ));
    // The limit of the GPU instance.
    assert_eq!(kernel.bytes_by_context(GPU)[&context], alone + PAGE_BYTES);
    kernel.handle(client, &Request::DestroyContext { context });
    let processes = &kernel.status().gpus[0].processes;
    assert_eq!((processes[0].pid, processes[0].used_bytes), (7, PAGE_BYTES));
    assert_eq!(used(&kernel), PAGE_BYTES);
}

#[derive(Clone, Debug)]
enum Step {
    Connect,
    Disconnect(usize),
    Context(usize),
    Destroy(usize),
    Allocate(usize, u64),
    Free(usize),
    Create(usize, u64),
    Release(usize),
    Open(usize, usize),
    Export(usize),
    Import(usize, usize),
    Close(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        Just(Step::Connect),
        any::<usize>().prop_map(Step::Disconnect),
        any::<usize>().prop_map(Step::Context),
        any::<usize>().prop_map(Step::Destroy),
        (any::<usize>(), 0u64..6 << 30).prop_map(|(at, bytes)| Step::Allocate(at, bytes)),
        any::<usize>().prop_map(Step::Free),
        (any::<usize>(), 0u64..6 << 30).prop_map(|(at, bytes)| Step::Create(at, bytes)),
        any::<usize>().prop_map(Step::Release),
        any::<(usize, usize)>().prop_map(|(at, which)| Step::Open(at, which)),
        any::<usize>().prop_map(Step::Export),
        any::<(usize, usize)>().prop_map(|(at, which)| Step::Import(at, which)),
        any::<usize>().prop_map(Step::Close),
    ]
}

fn pick<T: Copy>(list: &[T], at: usize) -> Option<T> {
    (!list.is_empty()).then(|| list[at % list.len()])
}

proptest! {
    /// The ledger equals the sum over processes after every step, and ends empty.
    #[test]
    fn keeps_ledger_equal_to_the_sum_of_holders(steps in prop::collection::vec(step(), 0..60)) {
        let mut kernel = kernel();
        let (mut clients, mut contexts, mut allocations) = (vec![], vec![], vec![]);
        let (mut held, mut exports) = (vec![], vec![]);
        for (pid, step) in (1u32..).zip(steps) {
            match step {
                Step::Connect => clients.push(cuda_client(&mut kernel, pid)),
                Step::Disconnect(at) => if let Some(client) = pick(&clients, at) {
                    kernel.disconnect(client);
                    clients.retain(|other| *other != client);
                },
                Step::Context(at) => if let Some(client) = pick(&clients, at) {
                    let reply = kernel.handle(client, &Request::CreateContext { gpu: GPU });
                    if let Reply::ContextCreated { context } = reply {
                        contexts.push((client, context));
                    }
                },
                Step::Destroy(at) => if let Some((client, context)) = pick(&contexts, at) {
                    kernel.handle(client, &Request::DestroyContext { context });
                },
                Step::Allocate(at, bytes) => if let Some((client, context)) = pick(&contexts, at) {
                    let reply = kernel.handle(client, &Request::Allocate { context, bytes });
                    if let Reply::Allocated { allocation, .. } = reply {
                        allocations.push((client, allocation));
                    }
                },
                Step::Free(at) => if let Some((client, allocation)) = pick(&allocations, at) {
                    kernel.handle(client, &Request::Free { allocation });
                },
                Step::Create(at, bytes) => if let Some(client) = pick(&clients, at) {
                    let reply = kernel.handle(client, &Request::CreateMemory { gpu: GPU, bytes });
                    if let Reply::Allocated { allocation, .. } = reply {
                        held.push((client, allocation));
                    }
                },
                Step::Release(at) => if let Some((client, allocation)) = pick(&held, at) {
                    kernel.handle(client, &Request::Release { allocation });
                },
                Step::Open(at, which) => if let (Some(client), Some((owner, allocation))) = (pick(&clients, at), pick(&allocations, which)) {
                    kernel.handle(owner, &Request::Share { allocation });
                    let reply = kernel.handle(client, &Request::Open { allocation });
                    if let Reply::Opened { allocation, .. } = reply {
                        held.push((client, allocation));
                    }
                },
                Step::Export(at) => if let Some((client, allocation)) = pick(&held, at) {
                    let reply = kernel.handle(client, &Request::Export { allocation });
                    if let Reply::Exported { export } = reply {
                        exports.push(export);
                    }
                },
                Step::Import(at, which) => if let (Some(client), Some(export)) = (pick(&clients, at), pick(&exports, which))
                    && let Reply::Opened { allocation, .. } = kernel.import(client, export)
                {
                    held.push((client, allocation));
                },
                Step::Close(at) => if let Some(export) = pick(&exports, at) {
                    kernel.unexport(export);
                    exports.retain(|other| *other != export);
                },
            }
            let gpu = &kernel.status().gpus[0];
            let accounts: u64 = gpu.processes.iter().map(|process| process.used_bytes).sum();
            // Memory held by descriptors is charged to no process.
            prop_assert!(gpu.used_bytes == accounts || gpu.used_bytes > accounts && !exports.is_empty());
            prop_assert_eq!(gpu.used_bytes + gpu.free_bytes + gpu.reserved_bytes, gpu.total_bytes);
        }
        for client in clients {
            kernel.disconnect(client);
        }
        for export in exports {
            kernel.unexport(export);
        }
        prop_assert_eq!(used(&kernel), 0);
    }
}

#[test]
fn keeps_high_water_mark_of_memory() {
    let mut kernel = kernel();
    let client = cuda_client(&mut kernel, 7);
    let context = context(&mut kernel, client);
    let peak = |kernel: &Kernel| kernel.status().gpus[0].peak_bytes;
    let before = used(&kernel);
    let bytes = 8 * PAGE_BYTES;
    let reply = kernel.handle(client, &Request::Allocate { context, bytes });
    let Reply::Allocated { allocation, .. } = reply else {
        panic!("{reply:?}");
    };
    kernel.handle(client, &Request::Free { allocation });
    assert_eq!((used(&kernel), peak(&kernel)), (before, before + bytes));
    kernel.reset_peak(GPU).unwrap();
    assert_eq!(peak(&kernel), before);
}

#[test]
fn counts_memory_freed_at_exit_since_reset() {
    let mut kernel = kernel();
    let freed = |kernel: &Kernel| kernel.status().gpus[0].freed_at_exit_bytes;
    let (first, second) = (cuda_client(&mut kernel, 7), cuda_client(&mut kernel, 8));
    let bytes = 8 * PAGE_BYTES;
    for client in [first, second] {
        let context = context(&mut kernel, client);
        kernel.handle(client, &Request::Allocate { context, bytes });
    }
    let each = used(&kernel) / 2;
    assert_eq!(freed(&kernel), 0);
    kernel.disconnect(first);
    assert_eq!((used(&kernel), freed(&kernel)), (each, each));
    kernel.reset_peak(GPU).unwrap();
    assert_eq!(freed(&kernel), 0);
    kernel.disconnect(second);
    assert_eq!((used(&kernel), freed(&kernel)), (0, each));
}

#[test]
fn delays_and_rounds_samples_of_perturbed_gpu() {
    const MS: Nanos = 1_000_000;
    let mut description = MachineDescription::parse(T4).unwrap();
    for model in description.models.values_mut() {
        model.perturbation.nvml_delay_milliseconds = 300;
        model.perturbation.nvml_step_percent = 7;
    }
    let mut kernel = Kernel::new(description, 0);
    let client = cuda_client(&mut kernel, 7);
    let context = context(&mut kernel, client);
    let work = crate::protocol::Work::Kernel {
        nanos: 80 * MS,
        multiprocessors: 1,
    };
    let command = Command {
        at: 0,
        context,
        stream: 0,
        ticket: 1,
        action: Action::Submit(work),
    };
    kernel.command(client, command, 0).unwrap();
    let since = 0;
    let samples = |kernel: &mut Kernel| {
        let request = Request::Samples { gpu: GPU, since };
        match kernel.handle(client, &request) {
            Reply::Samples(samples) => samples,
            reply => panic!("{reply:?}"),
        }
    };
    kernel.advance(400 * MS);
    assert_eq!(samples(&mut kernel), []);
    kernel.advance(500 * MS);
    // 48% of the period.
    assert_eq!(samples(&mut kernel)[0].processes[0].gpu_percent, 42);
}

#[test]
fn nvml_shows_checkpointed_process_late() {
    const MS: Nanos = 1_000_000;
    for delay in [500, 0] {
        let mut description = MachineDescription::parse(T4).unwrap();
        assert_eq!(description.checkpoints.nvml_delay_milliseconds, 500);
        description.checkpoints.nvml_delay_milliseconds = delay;
        let mut kernel = Kernel::new(description, 0);
        let client = cuda_client(&mut kernel, 7);
        let context = context(&mut kernel, client);
        let allocate = Request::Allocate { context, bytes: 1 };
        kernel.handle(client, &allocate);
        let before = used(&kernel);
        let shown =
            |kernel: &mut Kernel| match kernel.handle(client, &Request::GpuState { gpu: GPU }) {
                Reply::GpuState(state) => {
                    let bytes = state.processes.iter().map(|process| process.used_bytes);
                    let pids = state.processes.iter().map(|process| process.pid);
                    (state.used_bytes, bytes.sum(), pids.collect())
                }
                reply => panic!("{reply:?}"),
            };
        let act = |kernel: &mut Kernel, action| {
            let request = Request::Checkpoint { pid: 7, action };
            assert!(matches!(kernel.handle(client, &request), Reply::Phase(_)));
        };
        let (all, nothing) = ((before, before, vec![7]), (0, 0, vec![]));
        for now in [3000, 5000] {
            kernel.set_now(now * MS);
            assert_eq!(shown(&mut kernel), all);
            act(&mut kernel, CheckpointAction::Lock);
            act(&mut kernel, CheckpointAction::Checkpoint);
            // The ledger does not lag.
            assert_eq!(used(&kernel), 0);
            kernel.set_now((now + 499) * MS);
            let expected = if delay == 0 { &nothing } else { &all };
            assert_eq!(&shown(&mut kernel), expected, "{delay}");
            kernel.set_now((now + 500) * MS);
            assert_eq!(shown(&mut kernel), nothing);
            act(&mut kernel, CheckpointAction::Restore);
            act(&mut kernel, CheckpointAction::Unlock);
        }
        // What is restored in the meantime is shown once.
        act(&mut kernel, CheckpointAction::Lock);
        act(&mut kernel, CheckpointAction::Checkpoint);
        act(&mut kernel, CheckpointAction::Restore);
        assert_eq!(shown(&mut kernel), all);
        // What has ended is not shown.
        act(&mut kernel, CheckpointAction::Checkpoint);
        kernel.disconnect(client);
        let other = cuda_client(&mut kernel, 8);
        let state = kernel.handle(other, &Request::GpuState { gpu: GPU });
        assert!(matches!(state, Reply::GpuState(state) if state.used_bytes == 0));
    }
}
