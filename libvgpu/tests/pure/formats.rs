//! Sizes of arrays by format.

use crate::system::elements;

/// A format, its number of channels, and half bytes per element.
const KNOWN: [(u32, u32, u64); 57] = [
    (0x01, 1, 2),
    (0x02, 2, 8),
    (0x03, 4, 32),
    (0x08, 4, 8),
    (0x09, 1, 4),
    (0x0a, 1, 8),
    (0x10, 4, 16),
    (0x20, 2, 16),
    // UNORM_INT8X1 to SNORM_INT16X4.
    (0xc0, 1, 2),
    (0xc1, 2, 4),
    (0xc2, 4, 8),
    (0xc3, 1, 4),
    (0xc4, 2, 8),
    (0xc5, 4, 16),
    (0xc6, 1, 2),
    (0xc7, 2, 4),
    (0xc8, 4, 8),
    (0xc9, 1, 4),
    (0xca, 2, 8),
    (0xcb, 4, 16),
    // BC1 to BC7.
    (0x91, 4, 1),
    (0x92, 4, 1),
    (0x93, 4, 2),
    (0x94, 4, 2),
    (0x95, 4, 2),
    (0x96, 4, 2),
    (0x97, 1, 1),
    (0x98, 1, 1),
    (0x99, 2, 2),
    (0x9a, 2, 2),
    (0x9b, 3, 2),
    (0x9c, 3, 2),
    (0x9d, 4, 2),
    (0x9e, 4, 2),
    // UNORM_INT_101010_2, YUY2, Y210, Y216, AYUV, Y410, Y416.
    (0x50, 4, 8),
    (0xa5, 2, 4),
    (0xa6, 2, 8),
    (0xa7, 2, 8),
    (0xa8, 4, 8),
    (0xa9, 4, 8),
    (0xb1, 4, 16),
    // UINT8_PACKED_422, with one element for two pixels, and UINT8_PACKED_444.
    (0x51, 4, 8),
    (0x52, 4, 8),
    // Planes of 8 bits: two colors for a quarter of the elements with 4:2:0 sampling, for half of them with 4:2:2.
    (0xb0, 3, 3),
    (0x53, 3, 3),
    (0x59, 3, 3),
    (0xa2, 3, 4),
    (0x55, 3, 4),
    (0xb2, 3, 6),
    (0xb4, 3, 6),
    (0x5d, 3, 6),
    // Planes of 10 and 16 bits.
    (0x9f, 3, 6),
    (0xa1, 3, 6),
    (0xa3, 3, 8),
    (0xa4, 3, 8),
    (0xb3, 3, 12),
    (0xb5, 3, 12),
];

const SIDE: u64 = 4096;

fn is_planar(format: u32) -> bool {
    matches!(format, 0x9f | 0xa1..=0xa4 | 0xb0 | 0xb2..=0xb5 | 0x53..=0x5e)
}

#[test]
fn charges_arrays_by_format() {
    for (format, channels, half_bytes) in KNOWN {
        let charged = elements::bytes(format, channels, [SIDE, SIDE, 1]);
        let taken = SIDE * SIDE * half_bytes / 2;
        if is_planar(format) {
            // Planes may be aligned.
            assert!(charged * 3 >= taken * 4, "{format:#x}");
            assert!(charged <= taken * 3 / 2, "{format:#x}");
        } else {
            assert_eq!(charged, taken, "{format:#x}");
        }
        assert_eq!(
            elements::bytes(format, channels, [SIDE, SIDE, 5]),
            charged * 5
        );
    }
}

#[test]
fn charges_16_bit_planes_twice_8_bit_planes() {
    for format in (0x53..=0x5d).step_by(2) {
        let bytes = |format| elements::bytes(format, 3, [SIDE, SIDE, 1]);
        assert_eq!(bytes(format + 1), 2 * bytes(format), "{format:#x}");
    }
}

#[test]
fn charges_unknown_format_the_maximum() {
    let known: Vec<u32> = KNOWN.iter().map(|(format, ..)| *format).collect();
    for format in (0..0x200).filter(|format| !known.contains(format) && !is_planar(*format)) {
        assert_eq!(elements::bytes(format, 3, [10, 10, 1]), 2400, "{format:#x}");
    }
    assert_eq!(elements::bytes(u32::MAX, 0, [1, 1, 1]), 8);
}

#[test]
fn charges_partial_blocks_in_full() {
    for (sides, blocks) in [
        ([1, 1, 1], 1),
        ([4, 4, 1], 1),
        ([5, 4, 1], 2),
        ([5, 5, 1], 4),
        ([16, 12, 2], 24),
    ] {
        assert_eq!(elements::bytes(0x91, 4, sides), blocks * 8, "{sides:?}");
        assert_eq!(elements::bytes(0x9d, 4, sides), blocks * 16, "{sides:?}");
    }
}

#[test]
fn saturates_overflowing_sizes() {
    let endless = [u64::MAX, u64::MAX, 2];
    for format in [0x01, 0x91, 0xc5] {
        assert_eq!(elements::bytes(format, 4, endless), u64::MAX);
    }
}
