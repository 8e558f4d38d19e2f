//! Arrays and mipmapped arrays.

use crate::test_process::{CONTEXT_BYTES, Container, GIB, MIB};

#[test]
fn charges_arrays_until_destroyed() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    for (make, destroy, bytes) in [
        // Four bytes per element.
        ("array 4096 4096 0 1", "destroyarray", 64 * MIB),
        ("array 256 256 64 1", "destroyarray", 16 * MIB),
        // Four channels.
        ("array 1024 1024 0 4", "destroyarray", 16 * MIB),
        // 64 MiB plus a third for the levels, in whole blocks.
        ("mipmapped 4096 4096 13", "destroymipmapped", 86 * MIB),
        // Three layers and six faces of 4 MiB plus a third: each level has all layers.
        ("mipmapped 1024 1024 11 3 1", "destroymipmapped", 16 * MIB),
        ("mipmapped 1024 1024 11 6 4", "destroymipmapped", 32 * MIB),
        // UNORM_INT8X4, SNORM_INT16X4.
        ("array 4096 4096 0 4 194", "destroyarray", 64 * MIB),
        ("array 1024 1024 2 4 203", "destroyarray", 16 * MIB),
        // BC1 and BC7: blocks of 4 × 4 elements.
        ("array 4096 4096 0 4 145", "destroyarray", 8 * MIB),
        ("array 4093 4095 0 4 157", "destroyarray", 16 * MIB),
        ("array 100 100 0 1", "destroyarray", 2 * MIB),
    ] {
        let array = process.ok(make)[0];
        assert_eq!(process.memory_info().0, GIB - bytes, "{make}");
        assert_eq!(container.ledger_bytes() - CONTEXT_BYTES, bytes, "{make}");
        process.ok(&format!("{destroy} {array}"));
        assert_eq!(process.memory_info().0, GIB, "{make}");
        assert_eq!(container.ledger_bytes(), CONTEXT_BYTES, "{make}");
    }
    process.denied("array 16384 16384 2 1");
}

#[test]
fn denies_small_arrays_beyond_limit() {
    for width in [100, 300, 419, 700, 1000] {
        let container = Container::with_memory(64 * MIB);
        let mut process = container.process();
        let command = format!("array {width} {width} 0 1");
        let mut arrays = Vec::new();
        loop {
            let answer = process.query(&command);
            if answer[0] != 0 {
                break;
            }
            arrays.push(answer[1]);
        }
        let taken = container.ledger_bytes() - CONTEXT_BYTES;
        assert!(taken <= 64 * MIB, "{taken} of {width}");
        assert!(taken >= 62 * MIB, "{taken} of {width}");
        for array in arrays {
            process.ok(&format!("destroyarray {array}"));
        }
        process.fill(2 * MIB);
        assert_eq!(container.ledger_bytes() - CONTEXT_BYTES, 64 * MIB);
    }
}
