//! Servers and clients of the multi-process service.

use super::*;
use crate::protocol::{
    MpsReply, MpsRequest, MpsServerKey, MpsServerState, MpsStatus, ThreadPercentage, Work,
};

const SECRET: u64 = 99;
const MS: Nanos = 1_000_000;
const TERMINATED: u32 = 810;
const SERVER_LOST: u32 = 806;
const LAUNCH_FAILED: u32 = 719;
const ILLEGAL_ADDRESS: u32 = 700;

fn percent(text: &str) -> ThreadPercentage {
    text.parse().unwrap()
}

fn ask(kernel: &mut Kernel, client: ClientId, request: MpsRequest) -> Reply {
    kernel.handle(client, &Request::Mps(request))
}

/// Makes a process of this PID the server of the first GPU.
fn server(kernel: &mut Kernel, pid: u32) -> (ClientId, MpsServerKey) {
    let owner = cuda_client(kernel, pid);
    let serve = MpsRequest::Serve {
        gpus: vec![GPU],
        percentage: ThreadPercentage::ALL,
        secret: SECRET,
    };
    match ask(kernel, owner, serve) {
        Reply::Mps(MpsReply::Serving { server }) => {
            let secret = SECRET;
            (owner, MpsServerKey { server, secret })
        }
        reply => panic!("{reply:?}"),
    }
}

fn join(kernel: &mut Kernel, key: MpsServerKey, pid: u32) -> (ClientId, Reply) {
    let client = cuda_client(kernel, pid);
    let percentage = None;
    (
        client,
        ask(kernel, client, MpsRequest::Join { key, percentage }),
    )
}

fn member(kernel: &mut Kernel, key: MpsServerKey, pid: u32) -> (ClientId, ContextId) {
    let (client, reply) = join(kernel, key, pid);
    assert!(
        matches!(reply, Reply::Mps(MpsReply::Joined { .. })),
        "{reply:?}"
    );
    (client, context(kernel, client))
}

fn state(kernel: &mut Kernel, asking: ClientId, key: MpsServerKey) -> MpsServerState {
    match ask(kernel, asking, MpsRequest::State { key }) {
        Reply::Mps(MpsReply::State(state)) => state,
        reply => panic!("{reply:?}"),
    }
}

fn spin(kernel: &mut Kernel, client: ClientId, context: ContextId, nanos: Nanos) {
    let command = Command {
        at: kernel.now,
        context,
        stream: 0,
        ticket: 1,
        action: Action::Submit(Work::Kernel {
            nanos,
            multiprocessors: 1,
        }),
    };
    kernel.command(client, command, kernel.now).unwrap();
}

/// Failures since the last call.
fn failures(kernel: &mut Kernel) -> Vec<(ClientId, u32)> {
    let effects = kernel.take_effects().into_iter();
    let failures = effects.filter_map(|effect| match effect {
        Effect::Fail { client, error } => Some((client, error)),
        _ => None,
    });
    failures.collect()
}

#[test]
fn requires_the_secret_of_a_live_server() {
    let mut kernel = kernel();
    let (owner, key) = server(&mut kernel, 1);
    let wrong = MpsServerKey { secret: 1, ..key };
    let refused = Reply::Refused(Refusal::NotFound);
    assert_eq!(join(&mut kernel, wrong, 7).1, refused);
    let (client, _) = member(&mut kernel, key, 8);
    for request in [
        MpsRequest::State { key: wrong },
        MpsRequest::Close { key: wrong },
        MpsRequest::Terminate { key: wrong, pid: 8 },
    ] {
        assert_eq!(ask(&mut kernel, client, request), refused);
    }
    kernel.disconnect(owner);
    assert_eq!(join(&mut kernel, key, 9).1, refused);
}

#[test]
fn process_joins_once_and_before_it_has_contexts() {
    let mut kernel = kernel();
    let (_, key) = server(&mut kernel, 1);
    let (client, _) = member(&mut kernel, key, 7);
    let plain = cuda_client(&mut kernel, 8);
    context(&mut kernel, plain);
    for client in [client, plain] {
        let percentage = None;
        let join = MpsRequest::Join { key, percentage };
        let refused = Reply::Refused(Refusal::Invalid);
        assert_eq!(ask(&mut kernel, client, join), refused);
    }
}

#[test]
fn client_cannot_exceed_the_percentage_of_its_server() {
    let mut kernel = kernel();
    let (_, key) = server(&mut kernel, 1);
    let mut joined = |server: &str, asked: Option<&str>, pid| {
        let percentage = percent(server);
        let admin = cuda_client(&mut kernel, 100 + pid);
        let set = MpsRequest::SetPercentage { key, percentage };
        assert_eq!(ask(&mut kernel, admin, set), Reply::Done);
        let client = cuda_client(&mut kernel, pid);
        let percentage = asked.map(percent);
        match ask(&mut kernel, client, MpsRequest::Join { key, percentage }) {
            Reply::Mps(MpsReply::Joined { gpus, percentage }) => {
                assert_eq!(gpus, [GPU]);
                percentage
            }
            reply => panic!("{reply:?}"),
        }
    };
    assert_eq!(joined("50", None, 7), percent("50"));
    assert_eq!(joined("50", Some("80"), 8), percent("50"));
    assert_eq!(joined("50", Some("20"), 9), percent("20"));
}

#[test]
fn server_has_as_many_clients_as_the_architecture_allows() {
    for (yaml, most) in [(T4, 48), (H100X2, 60)] {
        let mut kernel = Kernel::new(MachineDescription::parse(yaml).unwrap(), 0);
        let (_, key) = server(&mut kernel, 1);
        let clients: Vec<ClientId> = (0..most)
            .map(|pid| join(&mut kernel, key, 1000 + pid).0)
            .collect();
        let full = Reply::Refused(Refusal::MpsFull);
        assert_eq!(join(&mut kernel, key, 7).1, full);
        kernel.disconnect(clients[0]);
        member(&mut kernel, key, 8);
        assert_eq!(join(&mut kernel, key, 9).1, full);
    }
}

#[test]
fn fault_fails_all_clients_and_no_other_process() {
    let mut kernel = kernel();
    let (owner, key) = server(&mut kernel, 1);
    let (other_owner, other_key) = server(&mut kernel, 2);
    let (first, _) = member(&mut kernel, key, 7);
    let (second, busy) = member(&mut kernel, key, 8);
    member(&mut kernel, other_key, 9);
    let plain = cuda_client(&mut kernel, 10);
    let plain_context = context(&mut kernel, plain);
    spin(&mut kernel, second, busy, 100 * MS);
    spin(&mut kernel, plain, plain_context, MS);
    let error = ILLEGAL_ADDRESS;
    assert_eq!(
        ask(&mut kernel, first, MpsRequest::Fault { error }),
        Reply::Done
    );
    assert_eq!(failures(&mut kernel), [(first, error), (second, error)]);
    // Its work is gone, and later work is not executed.
    assert!(!kernel.has_work(second));
    spin(&mut kernel, second, busy, MS);
    assert!(!kernel.has_work(second));
    assert!(kernel.has_work(plain));
    assert_eq!(state(&mut kernel, owner, key).status, MpsStatus::Fault);
    let other = state(&mut kernel, other_owner, other_key);
    assert_eq!(other.status, MpsStatus::Active);

    // No client until all that failed are gone.
    let refused = Reply::Refused(Refusal::MpsNotReady);
    assert_eq!(join(&mut kernel, key, 11).1, refused);
    let again = Request::CreateContext { gpu: GPU };
    let failed = Reply::Refused(Refusal::MpsFailed);
    assert_eq!(kernel.handle(second, &again), failed);
    kernel.disconnect(first);
    assert_eq!(join(&mut kernel, key, 12).1, refused);
    kernel.disconnect(second);
    assert_eq!(state(&mut kernel, owner, key).status, MpsStatus::Active);
    member(&mut kernel, key, 13);
    assert_eq!(failures(&mut kernel), []);
}

#[test]
fn only_a_client_reports_faults() {
    let mut kernel = kernel();
    let (owner, _) = server(&mut kernel, 1);
    let plain = cuda_client(&mut kernel, 7);
    for client in [owner, plain] {
        let fault = MpsRequest::Fault { error: 700 };
        let refused = Reply::Refused(Refusal::Invalid);
        assert_eq!(ask(&mut kernel, client, fault), refused);
    }
}

#[test]
fn end_with_work_in_flight_is_a_fault_of_the_others() {
    let mut kernel = kernel();
    let (_, key) = server(&mut kernel, 1);
    let (idle, _) = member(&mut kernel, key, 7);
    let (busy, busy_context) = member(&mut kernel, key, 8);
    let (other, _) = member(&mut kernel, key, 9);
    kernel.disconnect(idle);
    assert_eq!(failures(&mut kernel), []);
    spin(&mut kernel, busy, busy_context, 100 * MS);
    kernel.disconnect(busy);
    assert!(failures(&mut kernel).contains(&(other, LAUNCH_FAILED)));
}

#[test]
fn end_of_a_terminated_client_disturbs_nothing() {
    let mut kernel = kernel();
    let (owner, key) = server(&mut kernel, 1);
    let (busy, busy_context) = member(&mut kernel, key, 7);
    let (other, other_context) = member(&mut kernel, key, 8);
    spin(&mut kernel, busy, busy_context, 100 * MS);
    spin(&mut kernel, other, other_context, 100 * MS);
    let terminate = |pid| MpsRequest::Terminate { key, pid };
    let unknown = Reply::Refused(Refusal::NotFound);
    assert_eq!(ask(&mut kernel, owner, terminate(9)), unknown);
    assert_eq!(ask(&mut kernel, owner, terminate(7)), Reply::Done);
    assert_eq!(failures(&mut kernel), [(busy, TERMINATED)]);
    let now = state(&mut kernel, owner, key);
    assert_eq!((now.status, now.clients.len()), (MpsStatus::Active, 2));
    kernel.disconnect(busy);
    assert_eq!(failures(&mut kernel), []);
    assert!(kernel.has_work(other));
    assert_eq!(state(&mut kernel, owner, key).clients.len(), 1);
}

#[test]
fn clients_fail_when_their_server_ends() {
    let mut kernel = kernel();
    let (owner, key) = server(&mut kernel, 1);
    let (client, _) = member(&mut kernel, key, 7);
    kernel.disconnect(owner);
    assert_eq!(failures(&mut kernel), [(client, SERVER_LOST)]);
    kernel.disconnect(client);
    assert_eq!(used(&kernel), 0);
}

#[test]
fn closed_server_keeps_its_clients() {
    let mut kernel = kernel();
    let (owner, key) = server(&mut kernel, 1);
    member(&mut kernel, key, 7);
    assert_eq!(
        ask(&mut kernel, owner, MpsRequest::Close { key }),
        Reply::Done
    );
    let refused = Reply::Refused(Refusal::MpsNotReady);
    assert_eq!(join(&mut kernel, key, 8).1, refused);
    assert_eq!(state(&mut kernel, owner, key).clients.len(), 1);
    assert_eq!(failures(&mut kernel), []);
}

#[test]
fn lists_clients_of_a_server_apart() {
    let mut kernel = kernel();
    let (owner, key) = server(&mut kernel, 1);
    member(&mut kernel, key, 7);
    let listed = match kernel.handle(owner, &Request::GpuState { gpu: GPU }) {
        Reply::GpuState(state) => state.processes,
        reply => panic!("{reply:?}"),
    };
    let listed = listed.iter().map(|one| (one.pid, one.is_mps_client));
    assert_eq!(listed.collect::<Vec<_>>(), [(1, false), (7, true)]);
}

#[test]
fn clients_are_not_checkpointed() {
    let mut kernel = kernel();
    let (_, key) = server(&mut kernel, 1);
    let (client, _) = member(&mut kernel, key, 7);
    let action = CheckpointAction::Lock;
    let lock = Request::Checkpoint { pid: 7, action };
    let refused = Reply::Refused(Refusal::NotSupported);
    assert_eq!(kernel.handle(client, &lock), refused);
}

#[test]
fn exclusive_mode_admits_one_process_and_clients_of_its_server() {
    use crate::protocol::ComputeMode;

    let mut kernel = kernel();
    let create = Request::CreateContext { gpu: GPU };
    let unavailable = Reply::Refused(Refusal::Unavailable);
    let set = |kernel: &mut Kernel, mode| {
        let admin = cuda_client(kernel, 100);
        let set = Request::SetComputeMode { gpu: GPU, mode };
        assert_eq!(kernel.handle(admin, &set), Reply::Done);
        kernel.disconnect(admin);
    };
    set(&mut kernel, ComputeMode::ExclusiveProcess);
    let (owner, key) = server(&mut kernel, 1);
    let plain = cuda_client(&mut kernel, 7);
    assert_eq!(kernel.handle(plain, &create), unavailable);
    member(&mut kernel, key, 8);
    member(&mut kernel, key, 9);
    kernel.disconnect(owner);
    kernel.disconnect(ClientId(8));
    kernel.disconnect(ClientId(9));
    // One process, with several contexts.
    context(&mut kernel, plain);
    context(&mut kernel, plain);
    let other = cuda_client(&mut kernel, 10);
    assert_eq!(kernel.handle(other, &create), unavailable);
    set(&mut kernel, ComputeMode::Default);
    context(&mut kernel, other);
    set(&mut kernel, ComputeMode::Prohibited);
    assert_eq!(kernel.handle(other, &create), unavailable);
}
