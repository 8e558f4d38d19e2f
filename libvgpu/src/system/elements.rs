//! Size of array elements by their `CUarray_format`.
//!
//! A format that CUDA does not define to the byte counts with its largest possible size; an unknown format counts
//! as eight bytes per channel, the largest of any.

/// Memory layout of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Bytes per channel; the array defines the channels.
    Channels(u64),
    /// Bytes per element; the format defines the channels.
    Whole(u64),
    /// Bytes per square of [`BLOCK_SIDE`]×[`BLOCK_SIDE`] elements.
    Blocks(u64),
}

/// Elements per side of a compressed block.
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
            // YUY2, Y210, Y216 have two channels; CUDA does not define whether an element of UINT8_PACKED_422 is
            // one or two pixels.
            0xa5 => Self::Whole(2),
            0xa6 | 0xa7 | 0x51 => Self::Whole(4),
            // Planar formats of undefined alignment: the size includes at least a third to spare. 4:2:0 sampling:
            // NV12 and others of 8 bits with 1½ bytes; P010, P016 and others of 16 bits.
            0xb0 | 0x53 | 0x59 => Self::Whole(2),
            0x9f | 0xa1 | 0x54 | 0x5a => Self::Whole(4),
            // 4:2:2 sampling: NV16, P210, P216 and others.
            0xa2 | 0x55 | 0x5b => Self::Whole(3),
            0xa3 | 0xa4 | 0x56 | 0x5c => Self::Whole(6),
            // 4:4:4 sampling.
            0xb2 | 0xb4 | 0x57 | 0x5d => Self::Whole(4),
            0xb3 | 0xb5 | 0x58 | 0x5e => Self::Whole(8),
            // BC1 and BC4; BC2, BC3, BC5, BC6H, BC7.
            0x91 | 0x92 | 0x97 | 0x98 => Self::Blocks(8),
            0x93..=0x96 | 0x99..=0x9e => Self::Blocks(16),
            _ => Self::Channels(8),
        }
    }
}

/// Returns the bytes of an array with the given sides in elements.
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
