//! Synchronizes MIG capabilities in the driver root with the existing instances.

use std::io::Write;

use crate::control;
use crate::protocol::{CardIndex, MigRequest, Reply, Request};

use super::Server;

impl Server {
    /// After a request of a library.
    pub(super) fn sync_after_request(&self, request: &Request, reply: &Reply) {
        let Request::Mig { card, request } = request else {
            return;
        };
        let changes = match request {
            MigRequest::SetMode { .. }
            | MigRequest::CreateGpuInstance { .. }
            | MigRequest::DestroyGpuInstance { .. }
            | MigRequest::CreateComputeInstance { .. }
            | MigRequest::DestroyComputeInstance { .. } => true,
            MigRequest::State
            | MigRequest::RemainingGpuInstances { .. }
            | MigRequest::RemainingComputeInstances { .. }
            | MigRequest::Enter { .. } => false,
        };
        if changes && !matches!(reply, Reply::Refused(_)) {
            self.show_instances(*card);
        }
    }

    /// After a control command.
    pub(super) fn sync_after_command(&self, command: &control::Command) {
        if let control::Command::Reset { card } | control::Command::Mig { card, .. } = command {
            self.show_instances(*card);
        }
    }

    pub(super) fn show_instances(&self, card: CardIndex) {
        let Some(state) = self.kernel.mig_state(card) else {
            return;
        };
        let nodes = self.kernel.description().capability_nodes;
        if let Err(error) = self.root.lay_out_instances(card, &state, nodes) {
            // The instance exists; only its capability files are missing.
            let _ = writeln!(
                std::io::stderr(),
                "simulator-machine: gpu {}: cannot write MIG capabilities: {error}",
                card.0
            );
        }
    }
}
