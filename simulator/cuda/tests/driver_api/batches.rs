//! Batches of copies, and copies with attributes.

use cudarc::driver::sys;
use simulator_machine::description::{MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_VALUE, call};

const NONE: Handle = std::ptr::null_mut();

fn attributes() -> sys::CUmemcpyAttributes {
    let mut attributes: sys::CUmemcpyAttributes = unsafe { std::mem::zeroed() };
    attributes.srcAccessOrder = sys::CUmemcpySrcAccessOrder_enum::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    attributes
}

fn pointer(address: u64, row: usize) -> sys::CUmemcpy3DOperand {
    sys::CUmemcpy3DOperand {
        type_: sys::CUmemcpy3DOperandType::CU_MEMCPY_OPERAND_TYPE_POINTER,
        op: sys::CUmemcpy3DOperand_st__bindgen_ty_1 {
            ptr: sys::CUmemcpy3DOperand_st__bindgen_ty_1__bindgen_ty_1 {
                ptr: address,
                rowLength: row,
                layerHeight: 0,
                locHint: unsafe { std::mem::zeroed() },
            },
        },
    }
}

fn in_array(array: Handle) -> sys::CUmemcpy3DOperand {
    sys::CUmemcpy3DOperand {
        type_: sys::CUmemcpy3DOperandType::CU_MEMCPY_OPERAND_TYPE_ARRAY,
        op: sys::CUmemcpy3DOperand_st__bindgen_ty_1 {
            array: sys::CUmemcpy3DOperand_st__bindgen_ty_1__bindgen_ty_2 {
                array: array.cast(),
                offset: sys::CUoffset3D { x: 0, y: 0, z: 0 },
            },
        },
    }
}

fn volume(
    src: sys::CUmemcpy3DOperand,
    dst: sys::CUmemcpy3DOperand,
    [width, height, depth]: [usize; 3],
) -> sys::CUDA_MEMCPY3D_BATCH_OP {
    sys::CUDA_MEMCPY3D_BATCH_OP {
        src,
        dst,
        extent: sys::CUextent3D {
            width,
            height,
            depth,
        },
        srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
        flags: 0,
    }
}

/// Buffers of 256 bytes: two with patterns, two empty.
struct Buffers {
    full: [u64; 2],
    empty: [u64; 2],
}

impl Buffers {
    fn new(api: &Api) -> Self {
        let buffer = || api.allocate(256).unwrap();
        let buffers = Self {
            full: [buffer(), buffer()],
            empty: [buffer(), buffer()],
        };
        api.write(buffers.full[0], &[7; 256]);
        api.write(buffers.full[1], &[9; 256]);
        buffers
    }
}

/// The copies of one batch.
struct Batch<'a> {
    from: &'a [u64],
    to: &'a [u64],
    sizes: &'a [usize],
    /// First copy of each attribute.
    starts: &'a [usize],
    stream: Handle,
}

impl Batch<'_> {
    /// Calls the first version, which reports the failing copy; 77 if it reports none.
    fn first(&self, api: &Api) -> (u32, usize) {
        let mut values = vec![attributes(); self.starts.len()];
        let mut failed = 77;
        let code = call!(
            api,
            "cuMemcpyBatchAsync",
            self.to.as_ptr(),
            self.from.as_ptr(),
            self.sizes.as_ptr(),
            self.sizes.len(),
            values.as_mut_ptr(),
            self.starts.as_ptr(),
            self.starts.len(),
            &raw mut failed,
            self.stream
        );
        (code, failed)
    }

    fn second(&self, api: &Api) -> u32 {
        let mut values = vec![attributes(); self.starts.len()];
        call!(
            api,
            "cuMemcpyBatchAsync_v2",
            self.to.as_ptr(),
            self.from.as_ptr(),
            self.sizes.as_ptr(),
            self.sizes.len(),
            values.as_mut_ptr(),
            self.starts.as_ptr(),
            self.starts.len(),
            self.stream
        )
    }
}

#[test]
fn copies_every_element_of_a_batch() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let stream = api.stream(1);
    for form in [1, 2] {
        let buffers = Buffers::new(&api);
        let batch = Batch {
            from: &buffers.full,
            to: &buffers.empty,
            sizes: &[256, 16],
            starts: &[0, 1],
            stream,
        };
        let code = match form {
            1 => batch.first(&api).0,
            _ => batch.second(&api),
        };
        assert_eq!(code, 0, "form {form}");
        api.synchronize();
        assert_eq!(api.read(buffers.empty[0], 256), [7; 256], "form {form}");
        assert_eq!(api.read(buffers.empty[1], 17)[..16], [9; 16], "form {form}");
        assert_eq!(api.read(buffers.empty[1], 17)[16], 0, "form {form}");
    }
}

#[test]
fn reports_the_failing_copy_of_a_batch() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let stream = api.stream(1);
    let buffers = Buffers::new(&api);
    let run = |sizes: [usize; 2], starts: &[usize], stream: Handle| {
        let batch = Batch {
            from: &buffers.full,
            to: &buffers.empty,
            sizes: &sizes,
            starts,
            stream,
        };
        batch.first(&api)
    };
    // Far outside the second buffer.
    assert_eq!(run([16, 4096 * 4096], &[0], stream), (INVALID_VALUE, 1));
    assert_eq!(run([0, 16], &[0], stream), (INVALID_VALUE, 0));
    // Attributes that do not start at the first copy, no attributes, and the default stream.
    assert_eq!(run([16, 16], &[1], stream), (INVALID_VALUE, usize::MAX));
    assert_eq!(run([16, 16], &[], stream), (INVALID_VALUE, usize::MAX));
    assert_eq!(run([16, 16], &[0], NONE), (INVALID_VALUE, usize::MAX));
    assert_eq!(run([16, 16], &[0], stream), (0, 77));
}

#[test]
fn charges_gpu_time_for_device_copies_only() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let stream = api.stream(1);
    let (first, second) = (
        api.allocate(64 * MIB).unwrap(),
        api.allocate(64 * MIB).unwrap(),
    );
    let mut host = vec![0u8; 64 << 20];
    let host = host.as_mut_ptr().expose_provenance() as u64;
    let copy = |to: u64, from: u64| {
        let before = machine.gpu(0).unwrap().busy_nanos;
        let batch = Batch {
            from: &[from],
            to: &[to],
            sizes: &[64 << 20],
            starts: &[0],
            stream,
        };
        assert_eq!(batch.second(&api), 0);
        api.synchronize();
        machine.gpu(0).unwrap().busy_nanos - before
    };
    assert!(copy(second, first) > 0);
    assert_eq!(copy(host, first), 0);
    assert_eq!(copy(first, host), 0);
}

#[test]
fn copies_3d_batches() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let stream = api.stream(1);
    let descriptor = sys::CUDA_ARRAY_DESCRIPTOR {
        Width: 8,
        Height: 4,
        Format: sys::CUarray_format::CU_AD_FORMAT_FLOAT,
        NumChannels: 1,
    };
    let mut array = NONE;
    let code = call!(
        api,
        "cuArrayCreate_v2",
        &raw mut array,
        &raw const descriptor
    );
    assert_eq!(code, 0);
    let rows: Vec<u8> = (0..128).collect();
    let (from, to) = (api.allocate(128).unwrap(), api.allocate(256).unwrap());
    api.write(from, &rows);
    let into = volume(pointer(from, 8), in_array(array), [8, 4, 1]);
    // The first four elements of each row, into rows of sixteen.
    let out = volume(in_array(array), pointer(to, 16), [4, 4, 1]);
    let bad = volume(in_array(array), pointer(to, 16), [9, 4, 1]);
    type Copies = Vec<sys::CUDA_MEMCPY3D_BATCH_OP>;
    let first = |mut copies: Copies| {
        let mut failed = 0usize;
        let code = call!(
            api,
            "cuMemcpy3DBatchAsync",
            copies.len(),
            copies.as_mut_ptr(),
            &raw mut failed,
            0u64,
            stream
        );
        (code, failed)
    };
    let second = |mut copies: Copies| {
        call!(
            api,
            "cuMemcpy3DBatchAsync_v2",
            copies.len(),
            copies.as_mut_ptr(),
            0u64,
            stream
        )
    };
    let single = |mut copies: Copies| {
        let of_one = |copy: &mut _| {
            call!(
                api,
                "cuMemcpy3DWithAttributesAsync",
                std::ptr::from_mut::<sys::CUDA_MEMCPY3D_BATCH_OP>(copy),
                0u64,
                stream
            )
        };
        copies.iter_mut().map(of_one).max().unwrap()
    };
    for round in 0..3 {
        assert_eq!(call!(api, "cuMemsetD8_v2", to, 0u8, 256usize), 0);
        let copies = vec![into, out];
        let code = match round {
            0 => first(copies).0,
            1 => second(copies),
            _ => single(copies),
        };
        assert_eq!(code, 0, "{round}");
        api.synchronize();
        let read = api.read(to, 256);
        for row in 0..4 {
            assert_eq!(read[row * 64..][..16], rows[row * 32..][..16], "{round}");
            assert_eq!(read[row * 64 + 16..][..48], [0; 48], "{round}");
        }
    }
    assert_eq!(first(vec![into, bad]), (INVALID_VALUE, 1));
    assert_eq!(second(vec![bad]), INVALID_VALUE);
}

#[test]
fn copies_with_attributes() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let buffers = Buffers::new(&api);
    let mut value = attributes();
    let copy = |value: &mut sys::CUmemcpyAttributes| {
        let value = std::ptr::from_mut(value);
        call!(
            api,
            "cuMemcpyWithAttributesAsync",
            buffers.empty[0],
            buffers.full[1],
            256usize,
            value,
            NONE
        )
    };
    assert_eq!(copy(&mut value), 0);
    api.synchronize();
    assert_eq!(api.read(buffers.empty[0], 256), [9; 256]);
    value.srcAccessOrder = sys::CUmemcpySrcAccessOrder_enum::CU_MEMCPY_SRC_ACCESS_ORDER_INVALID;
    assert_eq!(copy(&mut value), INVALID_VALUE);
}
