//! Synchronizes MIG capabilities in the driver root with the existing instances.

use std::io::Write;

use crate::control;
use crate::protocol::{GpuIndex, MigRequest, Reply, Request};

use super::Server;

impl Server {
    /// After a request of a library.
    pub(super) fn sync_after_request(&self, request: &Request, reply: &Reply) {
        let Request::Mig { gpu, request } = request else {
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
            self.show_instances(*gpu);
        }
    }

    /// After a control command.
    pub(super) fn sync_after_command(&self, command: &control::Command) {
        if let control::Command::Reset { gpu } | control::Command::Mig { gpu, .. } = command {
            self.show_instances(*gpu);
        }
    }

    pub(super) fn show_instances(&self, gpu: GpuIndex) {
        let Some(state) = self.kernel.mig_state(gpu) else {
            return;
        };
        let nodes = self.kernel.description().capability_nodes;
        if let Err(error) = self.root.lay_out_instances(gpu, &state, nodes) {
            // The instance exists; only its capability files are missing.
            let _ = writeln!(
                std::io::stderr(),
                "simulator-machine: gpu {}: cannot write MIG capabilities: {error}",
                gpu.0
            );
        }
    }
}
