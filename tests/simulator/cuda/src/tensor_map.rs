//! Tensor maps: 128 bytes that tell the memory unit of a Hopper card how a tensor lies in memory.
//!
//! They are encoded on the host, take no memory and start nothing. The real encoding is not public;
//! this one holds the arguments, so that two maps differ where their arguments do.

use std::ffi::{c_int, c_uint};
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::abi::{Address, Answer, In, InOut, Out, entry_points};
use crate::driver::driver;
use crate::error::CudaError;
use crate::types::CUtensorMap;

/// Elements are of one of these types at most.
const TYPES: c_uint = 15;

/// What all kinds of maps have in common.
struct Tensor {
    kind: c_uint,
    rank: u32,
    address: u64,
    sides: In<u64>,
    strides: In<u64>,
    steps: In<u32>,
}

impl Tensor {
    /// Checks the arguments, and encodes them together with those of the kind of map.
    fn encode(&self, least_rank: u32, rest: &[u64]) -> Answer<CUtensorMap> {
        driver()?;
        if self.kind > TYPES
            || !(least_rank..=5).contains(&self.rank)
            || self.address == 0
            || !self.address.is_multiple_of(16)
        {
            return Err(CudaError::InvalidValue);
        }
        let rank = self.rank as usize;
        let sides = self.sides.list(rank)?;
        let strides = self.strides.list(rank - 1)?;
        let steps = self.steps.list(rank)?;
        let in_range = |side: &u64| (1..=1 << 32).contains(side);
        if !sides.iter().all(in_range)
            || !strides
                .iter()
                .all(|stride| stride.is_multiple_of(16) && *stride < 1 << 40)
            || !steps.iter().all(|step| (1..=8).contains(step))
        {
            return Err(CudaError::InvalidValue);
        }
        let mut words = [0; 16];
        words[0] = self.address;
        words[1] = u64::from(self.kind) << 32 | u64::from(self.rank);
        for (word, side) in words.iter_mut().skip(2).zip(&sides) {
            *word = *side;
        }
        let mut hasher = DefaultHasher::new();
        (strides, steps, rest).hash(&mut hasher);
        words[15] = hasher.finish();
        Ok(CUtensorMap(words))
    }
}

fn signed(number: c_int) -> u64 {
    i64::from(number).cast_unsigned()
}

entry_points! {
    "cuTensorMapEncodeTiled" 12000 fn cuTensorMapEncodeTiled(
        map: Out<CUtensorMap>, kind: c_uint, rank: u32, address: Address, sides: In<u64>, strides: In<u64>, box_sides: In<u32>, steps: In<u32>,
        interleave: c_uint, swizzle: c_uint, promotion: c_uint, fill: c_uint,
    ) {
        let tensor = Tensor { kind, rank, address: address.number(), sides, strides, steps };
        let box_sides = box_sides.list(rank.min(5) as usize)?;
        if box_sides.iter().any(|side| !(1..=256).contains(side)) {
            return Err(CudaError::InvalidValue);
        }
        let mut rest = vec![interleave.into(), swizzle.into(), promotion.into(), fill.into()];
        rest.extend(box_sides.into_iter().map(u64::from));
        map.set(tensor.encode(1, &rest)?)
    }

    "cuTensorMapEncodeIm2col" 12000 fn cuTensorMapEncodeIm2col(
        map: Out<CUtensorMap>, kind: c_uint, rank: u32, address: Address, sides: In<u64>, strides: In<u64>, lower: In<c_int>, upper: In<c_int>,
        channels: u32, pixels: u32, steps: In<u32>, interleave: c_uint, swizzle: c_uint, promotion: c_uint, fill: c_uint,
    ) {
        let tensor = Tensor { kind, rank, address: address.number(), sides, strides, steps };
        let corners = rank.saturating_sub(2).min(3) as usize;
        let mut rest: Vec<u64> = [channels, pixels, interleave, swizzle, promotion, fill].map(u64::from).into();
        rest.extend(lower.list(corners)?.into_iter().chain(upper.list(corners)?).map(signed));
        map.set(tensor.encode(3, &rest)?)
    }

    "cuTensorMapEncodeIm2colWide" 12080 fn cuTensorMapEncodeIm2colWide(
        map: Out<CUtensorMap>, kind: c_uint, rank: u32, address: Address, sides: In<u64>, strides: In<u64>, lower: c_int, upper: c_int,
        channels: u32, pixels: u32, steps: In<u32>, interleave: c_uint, mode: c_uint, swizzle: c_uint, promotion: c_uint, fill: c_uint,
    ) {
        let tensor = Tensor { kind, rank, address: address.number(), sides, strides, steps };
        let mut rest: Vec<u64> = [channels, pixels, interleave, mode, swizzle, promotion, fill].map(u64::from).into();
        rest.extend([signed(lower), signed(upper)]);
        map.set(tensor.encode(3, &rest)?)
    }

    "cuTensorMapReplaceAddress" 12000 fn cuTensorMapReplaceAddress(map: InOut<CUtensorMap>, address: Address) {
        driver()?;
        let mut changed = map.get()?;
        if address.number() == 0 || !address.number().is_multiple_of(16) {
            return Err(CudaError::InvalidValue);
        }
        changed.0[0] = address.number();
        map.set(changed)
    }
}
