//! Multi-process service: servers, clients and their common faults.
//!
//! A server has a context on each of its GPUs; the contexts of its clients run in the time slices of that context. A fatal fault
//! of one client fails all clients that share a GPU with it, directly or through others. A failed client must end: its calls
//! fail, and the server takes no client until all that failed together have ended. A client that ends with work in flight is a
//! fault of the others, unless its work was terminated before.

use std::collections::{BTreeMap, BTreeSet};

use crate::description::Architecture;
use crate::protocol::{
    ContextId, GpuEvent, GpuIndex, MpsClientState, MpsReply, MpsRequest, MpsServerKey,
    MpsServerState, MpsStatus, Refusal, Reply, ThreadPercentage,
};

use super::{ClientId, Effect, Kernel};

/// Servers by id.
pub(super) type MpsServers = BTreeMap<u64, Server>;

#[derive(Debug)]
pub(super) struct Server {
    owner: ClientId,
    secret: u64,
    percentage: ThreadPercentage,
    contexts: BTreeMap<GpuIndex, ContextId>,
    is_closed: bool,
}

/// A client's place at a server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Membership {
    server: u64,
    percentage: ThreadPercentage,
    failure: Option<Failure>,
}

/// Why the calls of a client fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// A client of the server had a fatal fault with this `CUresult`.
    Fault(u32),
    /// An administrator ended the client's work.
    Terminated,
    /// The server has ended.
    ServerLost,
}

impl Failure {
    /// `CUresult`
    fn code(self) -> u32 {
        match self {
            Self::Fault(code) => code,
            Self::Terminated => 810,
            Self::ServerLost => 806,
        }
    }
}

/// `CUDA_ERROR_LAUNCH_FAILED`: what others see of a client that ended with work in flight.
const LAUNCH_FAILED: u32 = 719;

/// Most clients of a server on a GPU.
fn most_clients(architecture: Architecture) -> usize {
    match architecture {
        Architecture::Turing | Architecture::Ampere | Architecture::Ada => 48,
        Architecture::Hopper | Architecture::Blackwell => 60,
    }
}

impl Kernel {
    /// Answers a request about the multi-process service.
    pub(super) fn mps(&mut self, client: ClientId, request: &MpsRequest) -> Result<Reply, Refusal> {
        match *request {
            MpsRequest::Serve {
                ref gpus,
                percentage,
                secret,
            } => self.serve_mps(client, gpus, percentage, secret),
            MpsRequest::Join { key, percentage } => self.join_mps(client, key, percentage),
            MpsRequest::Fault { error } => {
                self.membership(client).ok_or(Refusal::Invalid)?;
                self.fail_together(client, error);
                Ok(Reply::Done)
            }
            MpsRequest::State { key } => {
                let percentage = self.mps_server(key)?.percentage;
                Ok(Reply::Mps(MpsReply::State(MpsServerState {
                    status: self.mps_status(key.server),
                    percentage,
                    clients: self.mps_clients(key.server),
                })))
            }
            MpsRequest::SetPercentage { key, percentage } => {
                self.mps_server(key)?.percentage = percentage;
                Ok(Reply::Done)
            }
            MpsRequest::Close { key } => {
                self.mps_server(key)?.is_closed = true;
                Ok(Reply::Done)
            }
            MpsRequest::Terminate { key, pid } => {
                self.mps_server(key)?;
                let found = self.members_of(key.server).into_iter();
                let mut found = found.filter(|id| {
                    let client = self.clients.get(id);
                    client.is_some_and(|client| client.pid == pid)
                });
                let found: ClientId = found.next().ok_or(Refusal::NotFound)?;
                self.fail(found, Failure::Terminated);
                Ok(Reply::Done)
            }
        }
    }

    /// Whether a process is a client of a server.
    pub(super) fn is_mps_client(&self, client: ClientId) -> bool {
        self.membership(client).is_some()
    }

    /// Whether the calls of a client fail.
    pub(super) fn has_failed(&self, client: ClientId) -> bool {
        self.membership(client)
            .is_some_and(|membership| membership.failure.is_some())
    }

    /// The server's context and the multiprocessors of a new context of a client; `None` without MPS.
    pub(super) fn place_in_server(
        &self,
        client: ClientId,
        gpu: GpuIndex,
    ) -> Result<Option<(ContextId, u32)>, Refusal> {
        let Some(membership) = self.membership(client) else {
            return Ok(None);
        };
        if membership.failure.is_some() {
            return Err(Refusal::MpsFailed);
        }
        if self.mps_status(membership.server) == MpsStatus::Fault {
            return Err(Refusal::MpsNotReady);
        }
        let server = self.mps_servers.get(&membership.server);
        let server = server.ok_or(Refusal::MpsFailed)?;
        let leader = *server.contexts.get(&gpu).ok_or(Refusal::NotFound)?;
        let all = self.gpu(gpu)?.model.compute.multiprocessors;
        Ok(Some((leader, membership.percentage.multiprocessors(all))))
    }

    /// Ends the service of or for a client that is about to be removed.
    pub(super) fn end_mps(&mut self, client: ClientId) {
        if self.is_mps_client(client) && !self.has_failed(client) && self.has_work(client) {
            self.fail_together(client, LAUNCH_FAILED);
        }
        let owned = self.mps_servers.iter();
        let owned = owned.filter(|(_, server)| server.owner == client);
        let owned: Vec<u64> = owned.map(|(id, _)| *id).collect();
        for server in owned {
            self.mps_servers.remove(&server);
            for member in self.members_of(server) {
                self.fail(member, Failure::ServerLost);
            }
        }
    }

    fn serve_mps(
        &mut self,
        client: ClientId,
        gpus: &[GpuIndex],
        percentage: ThreadPercentage,
        secret: u64,
    ) -> Result<Reply, Refusal> {
        if gpus.is_empty() {
            return Err(Refusal::Invalid);
        }
        for gpu in gpus {
            if self.gpu(*gpu)?.partitions.is_enabled() {
                return Err(Refusal::NotSupported);
            }
        }
        let mut contexts = BTreeMap::new();
        for gpu in gpus {
            // What was created before a refusal ends with the server.
            if let Reply::ContextCreated { context } = self.create_context(client, *gpu)? {
                contexts.insert(*gpu, context);
            }
        }
        let id = self.id();
        let server = Server {
            owner: client,
            secret,
            percentage,
            contexts,
            is_closed: false,
        };
        self.mps_servers.insert(id, server);
        Ok(Reply::Mps(MpsReply::Serving { server: id }))
    }

    fn join_mps(
        &mut self,
        client: ClientId,
        key: MpsServerKey,
        asked: Option<ThreadPercentage>,
    ) -> Result<Reply, Refusal> {
        let has_context = self
            .contexts
            .values()
            .any(|context| context.client == client);
        if has_context || self.is_mps_client(client) {
            return Err(Refusal::Invalid);
        }
        let server = self.mps_server(key)?;
        let gpus: Vec<GpuIndex> = server.contexts.keys().copied().collect();
        let percentage = server
            .percentage
            .min(asked.unwrap_or(ThreadPercentage::ALL));
        if server.is_closed || self.mps_status(key.server) == MpsStatus::Fault {
            return Err(Refusal::MpsNotReady);
        }
        let most = gpus.iter().filter_map(|gpu| self.gpu(*gpu).ok());
        let most = most.map(|gpu| most_clients(gpu.model.architecture)).min();
        if self.members_of(key.server).len() >= most.unwrap_or(0) {
            return Err(Refusal::MpsFull);
        }
        let joining = self.clients.get_mut(&client).ok_or(Refusal::NotFound)?;
        joining.membership = Some(Membership {
            server: key.server,
            percentage,
            failure: None,
        });
        Ok(Reply::Mps(MpsReply::Joined { gpus, percentage }))
    }

    fn mps_server(&mut self, key: MpsServerKey) -> Result<&mut Server, Refusal> {
        let server = self.mps_servers.get_mut(&key.server);
        let server = server.filter(|server| server.secret == key.secret);
        server.ok_or(Refusal::NotFound)
    }

    fn mps_status(&self, server: u64) -> MpsStatus {
        let has_faulted = |client: &ClientId| {
            let membership = self.membership(*client);
            membership.is_some_and(|one| matches!(one.failure, Some(Failure::Fault(_))))
        };
        match self.members_of(server).iter().any(has_faulted) {
            true => MpsStatus::Fault,
            false => MpsStatus::Active,
        }
    }

    fn mps_clients(&self, server: u64) -> Vec<MpsClientState> {
        let members = self.members_of(server).into_iter();
        let state = |id: ClientId| {
            Some(MpsClientState {
                pid: self.clients.get(&id)?.pid,
                gpus: self.gpus_of(id).into_iter().collect(),
            })
        };
        members.filter_map(state).collect()
    }

    fn membership(&self, client: ClientId) -> Option<&Membership> {
        self.clients.get(&client)?.membership.as_ref()
    }

    fn members_of(&self, server: u64) -> Vec<ClientId> {
        let clients = self.clients.iter();
        let members = clients.filter(|(_, client)| {
            let membership = client.membership.as_ref();
            membership.is_some_and(|membership| membership.server == server)
        });
        members.map(|(id, _)| *id).collect()
    }

    /// GPUs on which a client has a context.
    fn gpus_of(&self, client: ClientId) -> BTreeSet<GpuIndex> {
        let contexts = self.contexts.values();
        let own = contexts.filter(|context| context.client == client);
        own.map(|context| context.gpu).collect()
    }

    /// Fails a client and all that share a GPU with it, directly or through others.
    fn fail_together(&mut self, faulty: ClientId, error: u32) {
        let Some(server) = self.membership(faulty).map(|membership| membership.server) else {
            return;
        };
        let members = self.members_of(server).into_iter();
        let used = members.map(|client| (client, self.gpus_of(client)));
        for client in sharing_gpus(faulty, &used.collect()) {
            self.fail(client, Failure::Fault(error));
        }
        for gpu in self.gpus_of(faulty) {
            let code = xid_of(error);
            let event = GpuEvent::Xid {
                gpu,
                code,
                instance: None,
            };
            // A GPU with a context exists.
            let _ = self.raise(event);
        }
    }

    /// Drops the work of a client and makes its calls fail. The first failure stays.
    fn fail(&mut self, client: ClientId, failure: Failure) {
        let membership = self.clients.get_mut(&client);
        let Some(membership) = membership.and_then(|client| client.membership.as_mut()) else {
            return;
        };
        if membership.failure.is_some() {
            return;
        }
        membership.failure = Some(failure);
        let contexts = self.contexts.iter();
        let own = contexts.filter(|(_, context)| context.client == client);
        let own: Vec<(ContextId, GpuIndex)> = own.map(|(id, context)| (*id, context.gpu)).collect();
        for (context, gpu) in own {
            if let Ok(gpu) = self.gpu_mut(gpu) {
                gpu.engine.cancel(context);
            }
        }
        let error = failure.code();
        self.effects.push(Effect::Fail { client, error });
    }
}

/// Returns the XID that the NVIDIA driver reports for a fault: an MMU fault, or an exception of the graphics engine.
const fn xid_of(error: u32) -> u64 {
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`
    const ILLEGAL_ADDRESS: u32 = 700;
    match error {
        ILLEGAL_ADDRESS => 31,
        _ => 13,
    }
}

/// Returns a client and all that share a GPU with it, directly or through others.
fn sharing_gpus(
    first: ClientId,
    used: &BTreeMap<ClientId, BTreeSet<GpuIndex>>,
) -> BTreeSet<ClientId> {
    let mut clients = BTreeSet::from([first]);
    let mut gpus = used.get(&first).cloned().unwrap_or_default();
    loop {
        let reached = used.iter().find(|(client, own)| {
            !clients.contains(client) && own.iter().any(|gpu| gpus.contains(gpu))
        });
        let Some((client, own)) = reached else {
            return clients;
        };
        clients.insert(*client);
        gpus.extend(own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_reaches_clients_through_shared_gpus() {
        let used = |client, gpus: &[u32]| {
            let gpus = gpus.iter().map(|gpu| GpuIndex(*gpu));
            (ClientId(client), gpus.collect())
        };
        let used = BTreeMap::from([
            used(1, &[0]),
            used(2, &[0, 1]),
            used(3, &[1]),
            used(4, &[2]),
            used(5, &[]),
        ]);
        let reached = |client| {
            let reached = sharing_gpus(ClientId(client), &used);
            reached.iter().map(|client| client.0).collect::<Vec<u64>>()
        };
        assert_eq!(reached(1), [1, 2, 3]);
        assert_eq!(reached(3), [1, 2, 3]);
        assert_eq!(reached(4), [4]);
        assert_eq!(reached(5), [5]);
    }
}
