//! Compute mode: which processes may create contexts on a GPU.

use crate::protocol::{ComputeMode, GpuIndex, Refusal};

use super::{ClientId, Kernel};

impl Kernel {
    /// Errors if the compute mode of a GPU does not let a process create a context. The mode restricts an MPS server, not its
    /// clients.
    pub(super) fn check_compute_mode(
        &self,
        client: ClientId,
        gpu: GpuIndex,
    ) -> Result<(), Refusal> {
        let is_available = match self.gpu(gpu)?.compute_mode {
            ComputeMode::Default => true,
            ComputeMode::ExclusiveProcess => {
                self.is_mps_client(client) || !self.has_other_process(client, gpu)
            }
            ComputeMode::Prohibited => false,
        };
        match is_available {
            true => Ok(()),
            false => Err(Refusal::Unavailable),
        }
    }

    /// Whether another process has a context on a GPU.
    fn has_other_process(&self, client: ClientId, gpu: GpuIndex) -> bool {
        let pid_of = |client: &ClientId| self.clients.get(client).map(|client| client.pid);
        let own = pid_of(&client);
        let mut contexts = self.contexts.values();
        contexts.any(|context| context.gpu == gpu && pid_of(&context.client) != own)
    }
}
