//! What the elements of arrays take, by their `CUarray_format`.
//!
//! Formats that CUDA does not describe to the byte count as the most that they may take, and those that this version does
//! not know as eight bytes a channel, the most of any.

/// How the elements of a format lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// So many bytes for each channel that the array is made with.
    Channels(u64),
    /// So many bytes each, whose channels the format says itself.
    Whole(u64),
    /// Squares of [`BLOCK_SIDE`] elements a side, so many bytes each.
    Blocks(u64),
}

/// Elements along a side of a compressed block.
const BLOCK_SIDE: u64 = 4;

impl Layout {
    const fn of(format: u32) -> Self {
        match format {
            // UNSIGNED_INT and SIGNED_INT of 8, 16 and 32 bits, HALF, FLOAT.
            0x01 | 0x08 => Self::Channels(1),
            0x02 | 0x09 | 0x10 => Self::Channels(2),
            0x03 | 0x0a | 0x20 => Self::Channels(4),
            // UNORM and SNORM of 8 and 16 bits, X1, X2, X4.
            0xc0 | 0xc6 => Self::Whole(1),
            0xc1 | 0xc7 | 0xc3 | 0xc9 => Self::Whole(2),
            0xc2 | 0xc8 | 0xc4 | 0xca => Self::Whole(4),
            0xc5 | 0xcb => Self::Whole(8),
            // UNORM_INT_101010_2, AYUV, Y410, UINT8_PACKED_444; Y416.
            0x50 | 0xa8 | 0xa9 | 0x52 => Self::Whole(4),
            0xb1 => Self::Whole(8),
            // YUY2, Y210, Y216 have two channels; of UINT8_PACKED_422 CUDA does not say whether an element is one or two pixels.
            0xa5 => Self::Whole(2),
            0xa6 | 0xa7 | 0x51 => Self::Whole(4),
            // In planes, of which CUDA does not say how they are aligned: there is always a third or more to spare.
            // With 4:2:0 sampling NV12 and others of 8 bits, which are 1½ bytes; P010, P016 and others of 16 bits.
            0xb0 | 0x53 | 0x59 => Self::Whole(2),
            0x9f | 0xa1 | 0x54 | 0x5a => Self::Whole(4),
            // With 4:2:2 sampling NV16, P210, P216 and others.
            0xa2 | 0x55 | 0x5b => Self::Whole(3),
            0xa3 | 0xa4 | 0x56 | 0x5c => Self::Whole(6),
            // With 4:4:4 sampling.
            0xb2 | 0xb4 | 0x57 | 0x5d => Self::Whole(4),
            0xb3 | 0xb5 | 0x58 | 0x5e => Self::Whole(8),
            // BC1 and BC4; BC2, BC3, BC5, BC6H, BC7.
            0x91 | 0x92 | 0x97 | 0x98 => Self::Blocks(8),
            0x93..=0x96 | 0x99..=0x9e => Self::Blocks(16),
            _ => Self::Channels(8),
        }
    }
}

/// Bytes of so many elements along each side, with so many channels each.
pub(crate) fn bytes(format: u32, channels: u32, [width, height, depth]: [u64; 3]) -> u64 {
    let (each, sides) = match Layout::of(format) {
        Layout::Channels(bytes) => (
            bytes.saturating_mul(u64::from(channels.max(1))),
            [width, height, depth],
        ),
        Layout::Whole(bytes) => (bytes, [width, height, depth]),
        Layout::Blocks(bytes) => {
            let blocks = |side: u64| side.div_ceil(BLOCK_SIDE);
            (bytes, [blocks(width), blocks(height), depth])
        }
    };
    sides
        .into_iter()
        .fold(each, |bytes, side| bytes.saturating_mul(side))
}
