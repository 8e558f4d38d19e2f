//! Multi-process service: this process as a client of an MPS server.

use simulator_machine::client::{ClientError, Connection};
use simulator_machine::mps::client::{ConnectError, connect, own_percentage};
use simulator_machine::protocol::{
    GpuIndex, MpsReply, MpsRequest, Refusal, Reply, Request, ThreadPercentage,
};

use crate::abi::CudaResult;
use crate::error::CudaError;

/// What an MPS client has of the machine.
#[derive(Clone, Debug)]
pub(crate) struct MpsShare {
    /// GPUs of the server.
    pub(crate) gpus: Vec<GpuIndex>,
    /// Limit of the threads.
    pub(crate) percentage: ThreadPercentage,
}

/// Makes this process a client if there is a control daemon, before it has a context.
pub(crate) fn join(connection: &mut Connection) -> CudaResult<Option<MpsShare>> {
    let offer = connect().map_err(|error| match error {
        ConnectError::Failed => CudaError::MpsConnectionFailed,
        ConnectError::NotReady => CudaError::MpsServerNotReady,
    })?;
    let Some(offer) = offer else {
        return Ok(None);
    };
    let join = Request::Mps(MpsRequest::Join {
        key: offer.key,
        percentage: own_percentage(),
    });
    match connection.request(&join) {
        Ok(Reply::Mps(MpsReply::Joined { gpus, percentage })) => {
            Ok(Some(MpsShare { gpus, percentage }))
        }
        Ok(_) => Err(CudaError::Unknown),
        // The server has ended since.
        Err(ClientError::Refused(Refusal::NotFound)) => Err(CudaError::MpsConnectionFailed),
        Err(error) => Err(error.into()),
    }
}
