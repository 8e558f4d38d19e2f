//! Sizes of global variables in images. The tests of limits have cubins and containers.

use crate::accounts::image::global_bytes;

/// The bytes that PTX declares, in memory and as a file, which has no zero byte at its end.
fn ptx(text: &str) -> u64 {
    let terminated = format!("{text}\0.global .b8 after_the_end[64];");
    // SAFETY: PTX with a zero byte.
    let in_memory = unsafe { global_bytes(terminated.as_ptr().cast(), None) };
    // SAFETY: of this length.
    let in_file = unsafe { global_bytes(text.as_ptr().cast(), Some(text.len())) };
    assert_eq!(in_memory, in_file, "{text}");
    in_memory
}

#[test]
fn adds_variables_of_ptx() {
    for (text, bytes) in [
        (".version 8.0", 0),
        (".global .b8 a;", 1),
        (".visible .global .align 16 .b8 a[100];", 100),
        (".global .u16 a[3];", 6),
        (".global .f32 a[2][3];", 24),
        (".global .v4 .f32 a[5];", 80),
        (".global .f16x2 a[5];", 20),
        (".global .b64 a[0x10];", 128),
        (".weak .global .b64 a[4];", 32),
        (".global .b128 a;", 16),
        (".global .attribute(.managed) .align 4 .u32 a[7];", 28),
        (".global .attribute(.unified(19, 95)) .f32 a[7];", 28),
        (".global .attribute(.managed, .unified(19, 95)) .f32 a;", 4),
        (".global .align 4 .b8 a[4] = {1, 2, 3, 4};", 4),
        (
            ".global .u64 a[2] = {generic(b), b + 8}; .global .b8 b;",
            17,
        ),
        (".global .s32 a = -1;", 4),
        (".global .texref a;", 0),
        (".extern .global .b8 a[100]; .global .b8 b[7];", 7),
        (
            "// .global .b8 a[8];\n.global .b8 c[4]; // .global .b8 b[8];",
            4,
        ),
        ("\n\t.global\n.b8\ta [ 12 ]\n;", 12),
        (
            "/* .global .b8 a[8];\n * .global .b8 b[8]; **/ .global .b8 c[4] /* [3] */;",
            4,
        ),
        (".global .b8 a[4]; /* .global .b8 b[8];", 4),
        ("/*/ .global .b8 a[8]; */ .global .b8 b[2];", 2),
        (".file 1 \"/*\"\n.global .b8 a[8];", 8),
        (".file 1 \"a//b\", 1, 2 .global .b8 a[8];", 8),
        (".file 1 \".global .b8 a[8];\"\n.global .b8 b[2];", 2),
        (".file 1 \"a\n.global .b8 a[8];", 8),
        (".global .b8 a[4];\n.file 1 \"a", 4),
        ("// \"\n.global .b8 a[8]; /* \" */ .global .b8 b[2];", 10),
    ] {
        assert_eq!(ptx(text), bytes, "{text}");
    }
}

#[test]
fn ignores_functions_of_ptx() {
    let text = ".version 8.0\n.target sm_90\n.global .b8 a[8];\n\
        .extern .func f (.param .b64 p);\n\
        .visible .entry k(.param .u64 .ptr .global .align 8 p, .param .b32 q) .maxntid 128\n{\n\
        .reg .b32 %r<4>; .local .align 8 .b8 depot[64]; .shared .b8 s[1024];\n\
        ld.global.u32 %r1, [%rd1]; { st.global.u32 [%rd1], %r1; }\nret;\n}\n\
        .const .b8 c[4096];\n.global .b8 b[16];\n";
    assert_eq!(ptx(text), 24);
}

#[test]
fn counts_nothing_in_damaged_images() {
    let damaged: [&[u8]; 8] = [
        b"",
        b"any image",
        b"\x7fELF",
        b".global .b8 a[",
        b".global .b8 a[999999999999999999999999",
        b".global .u32 a[] = {1, {2",
        b"\x50\xed\x55\xba\x01\x00\x10\x00\xff\xff\xff\xff\xff\xff\xff\xff\x02\x00",
        b"\xb1\x43\x62\x46\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
    ];
    for image in damaged {
        // SAFETY: of this length.
        let bytes = unsafe { global_bytes(image.as_ptr().cast(), Some(image.len())) };
        assert!(bytes == 0 || image.starts_with(b".global"), "{image:?}");
    }
    // SAFETY: null.
    assert_eq!(unsafe { global_bytes(std::ptr::null(), None) }, 0);
    // Tables beyond the end, and sizes whose sum overflows.
    let mut cubin = [0xff; 1024];
    cubin[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\x41");
    cubin[18..20].copy_from_slice(&[190, 0]);
    // SAFETY: of this length.
    let bytes = unsafe { global_bytes(cubin.as_ptr().cast(), Some(cubin.len())) };
    assert_eq!(bytes, 0);
}
