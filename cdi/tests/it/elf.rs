//! Parsing of valid and damaged shared libraries.

use std::io::Write;

use drava_cdi::elf::{Machine, SharedLibrary, inspect};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::driver_root::{OTHER, elf, elf_of_host};

fn read(bytes: &[u8]) -> Option<SharedLibrary> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    inspect(&file).unwrap()
}

#[test]
fn reads_machine_and_soname() {
    let library = read(&elf_of_host(Some("libx.so.1"))).unwrap();
    assert_eq!(
        (library.machine, library.soname.as_deref()),
        (Machine::HOST, Some("libx.so.1"))
    );
    assert_eq!(read(&elf_of_host(None)).unwrap().soname, None);
    assert_ne!(read(&elf(OTHER, None)).unwrap().machine, Machine::HOST);
}

#[test]
fn ignores_soname_that_is_not_a_file_name() {
    for name in ["", "../libx.so", "/libx.so", &"x".repeat(300)] {
        assert_eq!(
            read(&elf_of_host(Some(name))).unwrap().soname,
            None,
            "{name}"
        );
    }
}

proptest! {
    #[test]
    fn survives_damaged_files(
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        length in any::<prop::sample::Index>(),
    ) {
        let mut bytes = elf_of_host(Some("libx.so.1"));
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let length = length.index(bytes.len()) + 1;
        if let Some(SharedLibrary { soname: Some(name), .. }) = read(&bytes[..length]) {
            prop_assert!(!name.is_empty() && !name.contains('/'));
        }
    }
}
