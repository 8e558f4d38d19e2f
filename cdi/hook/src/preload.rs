//! `/etc/ld.so.preload`: libvgpu first, then the image's entries. Not changed where stubs lead to libvgpu.
//!
//! If two devices mount a file at one path, a container gets one of the files. The device of a whole GPU mounts the NVIDIA
//! libraries at the paths where a share's device has stubs; then only this file enforces the share's limits.
//!
//! The loader of Nix reads `/etc/ld-nix.so.preload` instead. Images with a store of Nix get both files, since they can have
//! programs of both kinds.
//!
//! The loader reads names separated by white space and colons; `#` starts a comment (`elf/rtld.c` of glibc).

use drava_cdi::elf;

use crate::root::{Root, RootError};

const PRELOAD: &str = "/etc/ld.so.preload";
const NIX_PRELOAD: &str = "/etc/ld-nix.so.preload";
const NIX_STORE: &str = "/nix/store";
/// Size limit of the image's file: room for thousands of libraries.
const MAX_BYTES: u64 = 1 << 20;

/// The library cannot be inserted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PreloadError {
    #[error(
        "{0} is not in the container; its mount is missing, and programs would run without limits"
    )]
    NoLibrary(String),
    #[error("cannot read the stub {path}")]
    Stub {
        path: String,
        source: std::io::Error,
    },
    #[error(transparent)]
    Root(#[from] RootError),
}

pub(crate) fn apply(root: &Root, library: &str, stubs: &[String]) -> Result<(), PreloadError> {
    // For a missing library, the loader only prints a warning and runs the program.
    if root.file(library)?.is_none() {
        return Err(PreloadError::NoLibrary(library.to_owned()));
    }
    let mut missing = stubs.is_empty();
    for stub in stubs {
        missing |= !leads_to(root, stub, library)?;
    }
    if !missing {
        return Ok(());
    }
    insert(root, PRELOAD, library)?;
    if !root.names(NIX_STORE, 1)?.is_empty() {
        insert(root, NIX_PRELOAD, library)?;
    }
    Ok(())
}

/// Returns whether `stub` is a shared library that needs `library` first.
fn leads_to(root: &Root, stub: &str, library: &str) -> Result<bool, PreloadError> {
    let Some(file) = root.file(stub)? else {
        return Ok(false);
    };
    let shared = elf::inspect(&file).map_err(|source| PreloadError::Stub {
        path: stub.to_owned(),
        source,
    })?;
    let first = shared.and_then(|shared| shared.needed.into_iter().next());
    Ok(first.as_deref() == Some(library))
}

fn insert(root: &Root, path: &str, library: &str) -> Result<(), RootError> {
    let present = root.read(path, MAX_BYTES)?;
    let wanted = merged(library, present.as_deref().unwrap_or_default());
    if present.as_deref() != Some(&wanted) {
        root.replace(path, &wanted)?;
    }
    Ok(())
}

/// Returns the contents with `library` first and at no other position. Lines without it stay unchanged.
fn merged(library: &str, present: &[u8]) -> Vec<u8> {
    let mut merged = library.as_bytes().to_vec();
    merged.push(b'\n');
    for line in present.split_inclusive(|byte| *byte == b'\n') {
        let names = line.split(|byte| *byte == b'#').next().unwrap_or_default();
        if !names
            .split(separates)
            .any(|name| name == library.as_bytes())
        {
            merged.extend_from_slice(line);
            continue;
        }
        let others: Vec<&[u8]> = names
            .split(separates)
            .filter(|name| !name.is_empty() && *name != library.as_bytes())
            .collect();
        if !others.is_empty() {
            merged.extend_from_slice(&others.join(&b' '));
            merged.push(b'\n');
        }
    }
    // The loader requires a separator after the last name.
    if !merged.ends_with(b"\n") {
        merged.push(b'\n');
    }
    merged
}

fn separates(byte: &u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b':')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OURS: &str = "/usr/local/lib/drava/libvgpu.so";

    /// Returns the names that the loader reads from the file (`elf/rtld.c`).
    fn names(file: &[u8]) -> Vec<Vec<u8>> {
        let mut file = file.to_vec();
        let mut comment = false;
        for byte in &mut file {
            comment = (comment || *byte == b'#') && *byte != b'\n';
            if comment {
                *byte = b' ';
            }
        }
        file.split(separates)
            .filter(|name| !name.is_empty())
            .map(<[u8]>::to_vec)
            .collect()
    }

    #[test]
    fn inserts_library_first_and_once() {
        for (present, expected) in [
            ("", "OURS\n"),
            ("/lib/a.so\n", "OURS\n/lib/a.so\n"),
            ("/lib/a.so", "OURS\n/lib/a.so\n"),
            ("OURS\n", "OURS\n"),
            ("OURS\n/lib/a.so\n", "OURS\n/lib/a.so\n"),
            ("/lib/a.so\nOURS\n", "OURS\n/lib/a.so\n"),
            (
                "/lib/a.so:OURS /lib/b.so # why\n",
                "OURS\n/lib/a.so /lib/b.so\n",
            ),
            ("# OURS is not loaded\n", "OURS\n# OURS is not loaded\n"),
            ("OURS.old\n", "OURS\nOURS.old\n"),
        ] {
            let ours = |text: &str| text.replace("OURS", OURS);
            let merged = merged(OURS, ours(present).as_bytes());
            assert_eq!(
                String::from_utf8(merged).unwrap(),
                ours(expected),
                "{present:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn keeps_other_libraries_in_order_behind_ours(
            present in proptest::collection::vec(
                prop_oneof![
                    Just(OURS.as_bytes().to_vec()),
                    Just(b"/lib/a.so".to_vec()),
                    proptest::collection::vec(any::<u8>(), 0..3),
                    proptest::sample::select(vec![b" ".to_vec(), b"\n".to_vec(), b":".to_vec(), b"#".to_vec()]),
                ],
                0..24,
            )
        ) {
            let present = present.concat();
            let merged = merged(OURS, &present);
            let mut expected = vec![OURS.as_bytes().to_vec()];
            expected.extend(names(&present).into_iter().filter(|name| name != OURS.as_bytes()));
            prop_assert_eq!(names(&merged), expected);
            prop_assert_eq!(super::merged(OURS, &merged), merged);
        }
    }
}
