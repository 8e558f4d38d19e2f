//! Access of one device to another one's memory. All devices of a machine can reach each other;
//! what has not been enabled is not refused.

use std::collections::BTreeSet;
use std::ffi::{c_int, c_uint};

use crate::abi::{Out, entry_points};
use crate::context::current_handle;
use crate::driver::driver;
use crate::error::CudaError;
use crate::types::{CUcontext, CUdevice};

/// Pairs of a context and one whose memory it may use.
#[derive(Debug, Default)]
pub(crate) struct Peers(BTreeSet<(CUcontext, CUcontext)>);

impl Peers {
    /// Forgets a context that is destroyed.
    pub(crate) fn forget_context(&mut self, context: CUcontext) {
        self.0
            .retain(|(from, to)| *from != context && *to != context);
    }
}

entry_points! {
    "cuDeviceCanAccessPeer" 4000 fn cuDeviceCanAccessPeer(can: Out<c_int>, device: CUdevice, peer: CUdevice) {
        let driver = driver()?;
        driver.device(device)?;
        driver.device(peer)?;
        can.set(c_int::from(device != peer))
    }

    "cuDeviceGetP2PAttribute" 8000 fn cuDeviceGetP2PAttribute(value: Out<c_int>, attribute: c_uint, device: CUdevice, peer: CUdevice) {
        const ACCESS_SUPPORTED: c_uint = 2;
        const LAST: c_uint = 5;
        let driver = driver()?;
        driver.device(device)?;
        driver.device(peer)?;
        if device == peer {
            return Err(CudaError::InvalidDevice);
        }
        if attribute == 0 || attribute > LAST {
            return Err(CudaError::InvalidValue);
        }
        value.set(c_int::from(attribute == ACCESS_SUPPORTED))
    }

    "cuCtxEnablePeerAccess" 4000 fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) {
        let driver = driver()?;
        let own = current_handle()?;
        let mut state = driver.state();
        let other = state.contexts.get(&peer).ok_or(CudaError::InvalidContext)?.device;
        if flags != 0 {
            return Err(CudaError::InvalidValue);
        }
        if state.current()?.device == other {
            return Err(CudaError::InvalidDevice);
        }
        match state.peers.0.insert((own, peer)) {
            true => Ok(()),
            false => Err(CudaError::PeerAccessAlreadyEnabled),
        }
    }

    "cuCtxDisablePeerAccess" 4000 fn cuCtxDisablePeerAccess(peer: CUcontext) {
        let own = current_handle()?;
        match driver()?.state().peers.0.remove(&(own, peer)) {
            true => Ok(()),
            false => Err(CudaError::PeerAccessNotEnabled),
        }
    }
}
