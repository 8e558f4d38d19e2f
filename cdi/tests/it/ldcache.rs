//! The loader's cache, compared with `ldconfig`.

use std::fs;
use std::path::Path;
use std::process::Command;

use drava_cdi::elf::Machine;
use drava_cdi::ldcache::{Entry, LdCache, ParseError};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::driver_root::elf_of_host;

/// Returns the output of `ldconfig -p`: one library per line, in the file's order.
fn printed(cache: &Path) -> Vec<String> {
    let output = ldconfig().arg("-p").arg("-C").arg(cache).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines()
        .filter(|line| line.contains("=>"))
        .map(str::to_owned)
        .collect()
}

fn ldconfig() -> Command {
    let found = ["/sbin/ldconfig", "/usr/sbin/ldconfig"]
        .into_iter()
        .find(|path| Path::new(path).exists());
    Command::new(found.expect("ldconfig is part of glibc"))
}

/// Builds a cache with `ldconfig`: names that are hard to sort, and variants for processors.
fn made_by_ldconfig(format: &str) -> (tempfile::TempDir, Vec<u8>) {
    let root = tempfile::tempdir().unwrap();
    let mut names = Vec::new();
    for stem in [
        "liba",
        "libA",
        "lib10",
        "lib9",
        "lib_x",
        "lib-x",
        "lib.x",
        "libnvidia-ml",
        "libcuda",
        "libz",
    ] {
        for version in ["1", "2", "10", "1.2", "1.10", "0"] {
            names.push(format!("{stem}.so.{version}"));
        }
    }
    let directory = root.path().join("usr/lib");
    for subdirectory in ["", "glibc-hwcaps/x86-64-v2", "glibc-hwcaps/x86-64-v3"] {
        let directory = directory.join(subdirectory);
        fs::create_dir_all(&directory).unwrap();
        for name in names
            .iter()
            .filter(|name| subdirectory.is_empty() || name.starts_with("liba"))
        {
            fs::write(directory.join(name), elf_of_host(Some(name))).unwrap();
        }
    }
    fs::create_dir(root.path().join("etc")).unwrap();
    fs::write(root.path().join("etc/ld.so.conf"), "/usr/lib\n").unwrap();
    let output = ldconfig()
        .arg("-r")
        .arg(root.path())
        .args(["-c", format])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let cache = fs::read(root.path().join("etc/ld.so.cache")).unwrap();
    (root, cache)
}

#[test]
fn writes_cache_in_order_of_ldconfig() {
    let (root, bytes) = made_by_ldconfig("new");
    let expected = printed(&root.path().join("etc/ld.so.cache"));
    assert!(expected.len() > 60, "{expected:?}");
    let ours = root.path().join("ours");
    let cache = LdCache::parse(&bytes).unwrap();
    fs::write(&ours, cache.to_bytes().unwrap()).unwrap();
    assert_eq!(printed(&ours), expected);

    // The same libraries after a cache of the old format, which `ldconfig -p` of glibc 2.36 prints wrongly.
    let (_root, compatible) = made_by_ldconfig("compat");
    assert!(compatible.starts_with(b"ld.so-1.7.0"));
    let compatible = LdCache::parse(&compatible).unwrap();
    fs::write(&ours, compatible.to_bytes().unwrap()).unwrap();
    assert_eq!(printed(&ours), expected);

    // Only the old format.
    let (old_root, old) = made_by_ldconfig("old");
    let old = LdCache::parse(&old).unwrap();
    fs::write(&ours, old.to_bytes().unwrap()).unwrap();
    assert_eq!(
        printed(&ours),
        printed(&old_root.path().join("etc/ld.so.cache"))
    );

    // The order depends on names and variants, not on the order of the parsed file.
    let count = cache.entries().len();
    let mut reversed = bytes[..48].to_vec();
    for entry in bytes[48..48 + 24 * count].rchunks_exact(24) {
        reversed.extend_from_slice(entry);
    }
    reversed.extend_from_slice(&bytes[48 + 24 * count..]);
    let reversed = LdCache::parse(&reversed).unwrap();
    assert_eq!(reversed.entries()[0], cache.entries()[count - 1]);
    fs::write(&ours, reversed.to_bytes().unwrap()).unwrap();
    assert_eq!(printed(&ours), expected);
}

#[test]
fn round_trips_cache_of_this_machine() {
    let path = Path::new("/etc/ld.so.cache");
    let cache = LdCache::parse(&fs::read(path).unwrap()).unwrap();
    let ours = tempfile::NamedTempFile::new().unwrap();
    fs::write(ours.path(), cache.to_bytes().unwrap()).unwrap();
    assert_eq!(printed(ours.path()), printed(path));
    assert_eq!(
        LdCache::parse(&fs::read(ours.path()).unwrap())
            .unwrap()
            .entries(),
        cache.entries()
    );
}

#[test]
fn inserted_library_replaces_all_of_its_name() {
    let (root, bytes) = made_by_ldconfig("new");
    let mut cache = LdCache::parse(&bytes).unwrap();
    cache.insert(Entry::new("liba.so.1", "/opt/liba.so.1", Machine::HOST));
    let ours = root.path().join("ours");
    fs::write(&ours, cache.to_bytes().unwrap()).unwrap();
    let lines = printed(&ours);
    let of_name: Vec<&String> = lines
        .iter()
        .filter(|line| line.trim_start().starts_with("liba.so.1 "))
        .collect();
    assert_eq!(of_name.len(), 1, "{of_name:?}");
    assert!(of_name[0].ends_with("=> /opt/liba.so.1"), "{of_name:?}");
}

#[test]
fn rejects_files_that_are_not_a_cache() {
    assert_eq!(LdCache::parse(b""), Err(ParseError::Magic));
    let mut bytes = LdCache::default().to_bytes().unwrap();
    bytes[28] = 3;
    assert_eq!(LdCache::parse(&bytes), Err(ParseError::ByteOrder));
    let mut bytes = LdCache::default().to_bytes().unwrap();
    bytes[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(LdCache::parse(&bytes), Err(ParseError::Truncated));
}

#[test]
fn rejects_entry_for_processor_without_name() {
    let mut cache = LdCache::default();
    let hwcap = 1 << 62;
    let entry = Entry::new("libx.so.1", "/libx.so.1", Machine::HOST);
    cache.insert(Entry { hwcap, ..entry });
    assert_eq!(
        LdCache::parse(&cache.to_bytes().unwrap()),
        Err(ParseError::Truncated)
    );
}

/// The order of `compare` in `elf/cache.c` of glibc: more bits first, then the larger number.
#[test]
fn orders_old_variants_by_their_number_of_bits() {
    let expected = [0b1110_0000, 0b0000_0111, 0b1100_0000, 1 << 50, 1 << 5, 0];
    for rotation in 0..expected.len() {
        let mut file_order = expected;
        file_order.rotate_left(rotation);
        file_order.swap(0, 3);
        let mut cache = LdCache::default();
        for (index, hwcap) in file_order.into_iter().enumerate() {
            let entry = Entry::new(format!("lib{index}.so"), "/x.so", Machine::HOST);
            cache.insert(Entry { hwcap, ..entry });
        }
        // Insertion keeps one entry of a name, so all get the name of the first afterwards.
        let mut bytes = cache.to_bytes().unwrap();
        let name = bytes[48 + 4..48 + 8].to_vec();
        for index in 1..expected.len() {
            let entry = 48 + 24 * index;
            bytes[entry + 4..entry + 8].copy_from_slice(&name);
        }
        let cache = LdCache::parse(&bytes).unwrap();
        let sorted = LdCache::parse(&cache.to_bytes().unwrap()).unwrap();
        let hwcaps: Vec<u64> = sorted.entries().iter().map(|entry| entry.hwcap).collect();
        assert_eq!(hwcaps, expected, "{file_order:?}");
    }
}

#[test]
fn bounds_memory_of_entries_that_share_a_string() {
    let mut cache = LdCache::default();
    cache.insert(Entry::new("n", "p".repeat(4000), Machine::HOST));
    let small = cache.to_bytes().unwrap();
    let count = 40_000_usize;
    let mut bytes = small[..48].to_vec();
    bytes[20..24].copy_from_slice(&u32::try_from(count).unwrap().to_le_bytes());
    bytes[32..36].copy_from_slice(&[0; 4]);
    let strings = u32::try_from(48 + 24 * count).unwrap();
    for _ in 0..count {
        bytes.extend_from_slice(&0x0303_u32.to_le_bytes());
        bytes.extend_from_slice(&strings.to_le_bytes());
        bytes.extend_from_slice(&strings.to_le_bytes());
        bytes.extend_from_slice(&[0; 12]);
    }
    bytes.extend_from_slice("p".repeat(4000).as_bytes());
    bytes.push(0);
    assert_eq!(LdCache::parse(&bytes), Err(ParseError::Truncated));
}

fn entry() -> impl Strategy<Value = Entry> {
    (
        "[a-zA-Z0-9._-]{1,8}",
        "[a-z/]{1,8}",
        prop_oneof![Just(Machine::X86_64), Just(Machine::Aarch64)],
    )
        .prop_map(|(name, path, machine)| Entry::new(name, path, machine))
}

proptest! {
    #[test]
    fn round_trips_written_cache(entries in vec(entry(), 0..24)) {
        let mut cache = LdCache::default();
        for entry in &entries {
            cache.insert(entry.clone());
        }
        let bytes = cache.to_bytes().unwrap();
        let read = LdCache::parse(&bytes).unwrap();
        prop_assert_eq!(read.entries().len(), cache.entries().len());
        for entry in cache.entries() {
            prop_assert!(read.entries().contains(entry));
        }
        prop_assert_eq!(read.to_bytes().unwrap(), bytes);
    }

    #[test]
    fn parser_survives_any_file(
        mut bytes in vec(any::<u8>(), 0..512),
        magic in prop_oneof![Just(&b""[..]),Just(&b"ld.so-1.7.0"[..]), Just(&b"glibc-ld.so.cache1.1"[..])],
    ) {
        let length = magic.len().min(bytes.len());
        bytes[..length].copy_from_slice(&magic[..length]);
        let _ = LdCache::parse(&bytes);
    }

    #[test]
    fn parser_survives_damaged_cache(
        entries in vec(entry(), 1..8),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        length in any::<prop::sample::Index>(),
    ) {
        let mut cache = LdCache::default();
        entries.into_iter().for_each(|entry| cache.insert(entry));
        let mut bytes = cache.to_bytes().unwrap();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let length = length.index(bytes.len()) + 1;
        if let Ok(read) = LdCache::parse(&bytes[..length]) {
            // A parsed cache can be written and parsed again.
            LdCache::parse(&read.to_bytes().unwrap()).unwrap();
        }
    }
}
