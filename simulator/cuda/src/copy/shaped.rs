//! Copies of 2D and 3D shapes, and copies with arrays.

use super::Completion::{Awaited, Queued};
use super::{Completion, copy};
use crate::abi::{CudaResult, In, entry_points};
use crate::types::{
    CUarray, CUdeviceptr, CUmemcpy2D, CUmemcpy2DSide, CUmemcpy3D, CUmemcpy3DSide, CUstream,
    MemoryType,
};

impl CUmemcpy2DSide {
    fn in_space(&self) -> CUmemcpy3DSide {
        CUmemcpy3DSide {
            x: self.x,
            y: self.y,
            host: self.host,
            device: self.device,
            array: self.array,
            pitch: self.pitch,
            ..CUmemcpy3DSide::linear(self.memory_type, 0)
        }
    }
}

impl CUmemcpy2D {
    fn in_space(&self) -> CUmemcpy3D {
        CUmemcpy3D {
            from: self.from.in_space(),
            to: self.to.in_space(),
            width: self.width,
            height: self.height,
            depth: 1,
        }
    }
}

/// Part of an array's first row.
fn of_array(array: CUarray, offset: usize) -> CUmemcpy3DSide {
    CUmemcpy3DSide {
        x: offset,
        array,
        ..CUmemcpy3DSide::linear(MemoryType::ARRAY, 0)
    }
}

fn of_device(address: CUdeviceptr) -> CUmemcpy3DSide {
    CUmemcpy3DSide::linear(MemoryType::DEVICE, address)
}

fn line(
    to: CUmemcpy3DSide,
    from: CUmemcpy3DSide,
    bytes: usize,
    stream: CUstream,
    completion: Completion,
) -> CudaResult {
    copy(CUmemcpy3D::linear(to, from, bytes), stream, completion)
}

entry_points! {
    "cuMemcpy2D" 3020 fn cuMemcpy2D_v2(shape: In<CUmemcpy2D>) ptds(stream) cuMemcpy2D_v2_ptds { copy(shape.get()?.in_space(), stream, Awaited) }
    "cuMemcpy2DUnaligned" 3020 fn cuMemcpy2DUnaligned_v2(shape: In<CUmemcpy2D>) ptds(stream) cuMemcpy2DUnaligned_v2_ptds { copy(shape.get()?.in_space(), stream, Awaited) }
    "cuMemcpy2DAsync" 3020 fn cuMemcpy2DAsync_v2(shape: In<CUmemcpy2D>, stream: CUstream) ptsz(stream) cuMemcpy2DAsync_v2_ptsz { copy(shape.get()?.in_space(), stream, Queued) }
    "cuMemcpy3D" 3020 fn cuMemcpy3D_v2(shape: In<CUmemcpy3D>) ptds(stream) cuMemcpy3D_v2_ptds { copy(shape.get()?, stream, Awaited) }
    "cuMemcpy3DAsync" 3020 fn cuMemcpy3DAsync_v2(shape: In<CUmemcpy3D>, stream: CUstream) ptsz(stream) cuMemcpy3DAsync_v2_ptsz { copy(shape.get()?, stream, Queued) }
    "cuMemcpy3DPeer" 4000 fn cuMemcpy3DPeer(shape: In<CUmemcpy3D>) ptds(stream) cuMemcpy3DPeer_ptds { copy(shape.get()?, stream, Awaited) }
    "cuMemcpy3DPeerAsync" 4000 fn cuMemcpy3DPeerAsync(shape: In<CUmemcpy3D>, stream: CUstream) ptsz(stream) cuMemcpy3DPeerAsync_ptsz { copy(shape.get()?, stream, Queued) }

    "cuMemcpyDtoA" 3020 fn cuMemcpyDtoA_v2(to: CUarray, offset: usize, from: CUdeviceptr, bytes: usize) ptds(stream) cuMemcpyDtoA_v2_ptds { line(of_array(to, offset), of_device(from), bytes, stream, Awaited) }
    "cuMemcpyAtoD" 3020 fn cuMemcpyAtoD_v2(to: CUdeviceptr, from: CUarray, offset: usize, bytes: usize) ptds(stream) cuMemcpyAtoD_v2_ptds { line(of_device(to), of_array(from, offset), bytes, stream, Awaited) }
    "cuMemcpyAtoA" 3020 fn cuMemcpyAtoA_v2(to: CUarray, to_offset: usize, from: CUarray, offset: usize, bytes: usize) ptds(stream) cuMemcpyAtoA_v2_ptds { line(of_array(to, to_offset), of_array(from, offset), bytes, stream, Awaited) }
}
