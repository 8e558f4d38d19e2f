//! Resolves every known entry point: with `dlsym` on the library, and with `cuGetProcAddress` for every version and
//! flag.
//!
//! The difference between runs with and without libvgpu is the set of functions that libvgpu replaces.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_void};
use std::ptr;

use anyhow::{Result, ensure};
use serde::Serialize;

/// Names and classes; libvgpu's tests use the same table.
const TABLE: &str = include_str!("../../../libvgpu/entry-points.tsv");

/// Suffixes that the table omits.
const SUFFIXES: [&str; 3] = ["", "_ptsz", "_ptds"];

/// `CUDA_VERSION`s at which the ABI of some function changed.
const VERSIONS: [i32; 14] = [
    2000, 3020, 4000, 6000, 7000, 9000, 10_020, 11_000, 11_030, 11_040, 12_000, 12_030, 12_080,
    13_000,
];

/// Default, legacy stream, stream per thread.
const FLAGS: [u64; 3] = [0, 1, 2];

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    name: String,
    class: &'static str,
    /// The result of `dlsym`; absent if the library has no such symbol.
    #[serde(skip_serializing_if = "Option::is_none")]
    symbol: Option<Location>,
    /// The results of `cuGetProcAddress`, with the versions and flags that return them (`version/flags`).
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    procedures: BTreeMap<String, Vec<String>>,
}

/// An address that can be compared between processes.
#[derive(Serialize, PartialEq, Eq, PartialOrd, Ord, Clone)]
struct Location(String);

impl Location {
    fn of(address: *const c_void) -> Self {
        // SAFETY: all zeroes is a value of this plain C struct.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: writes the struct; any address may be asked for.
        let found = unsafe { libc::dladdr(address, &raw mut info) };
        if found == 0 || info.dli_fname.is_null() {
            return Self("nowhere".to_owned());
        }
        // SAFETY: not null, hence a terminated string that lives as long as the library.
        let path = unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy();
        let file = path.rsplit('/').next().unwrap_or_default();
        // The build number at the end of the file name of NVIDIA's library is irrelevant.
        let library = file.split(".so").next().unwrap_or(file);
        let offset = address.addr() - info.dli_fbase.addr();
        Self(format!("{library}+{offset:#x}"))
    }
}

pub(crate) fn run() -> Result<()> {
    // SAFETY: a terminated string; loading runs the library's initializers, as in any program.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    ensure!(!library.is_null(), "cannot load libcuda.so.1");
    let find = |name: &str| -> Result<*mut c_void> {
        let name = CString::new(name)?;
        // SAFETY: a library that stays open and a terminated string.
        Ok(unsafe { libc::dlsym(library, name.as_ptr()) })
    };
    type Init = unsafe extern "C" fn(u32) -> i32;
    type Procedure = unsafe extern "C" fn(*const i8, *mut *mut c_void, i32, u64, *mut i32) -> i32;
    let (init, procedure) = (find("cuInit")?, find("cuGetProcAddress_v2")?);
    ensure!(!init.is_null(), "libcuda.so.1 has no cuInit");
    // SAFETY: the function of that name has this type.
    let init = unsafe { std::mem::transmute::<*mut c_void, Init>(init) };
    // SAFETY: the argument is a plain number.
    let code = unsafe { init(0) };
    ensure!(code == 0, "cuInit failed with {code}");

    let mut entries = Vec::new();
    for line in TABLE.lines().filter(|line| !line.starts_with('#')) {
        let mut columns = line.split('\t');
        let (Some(base), Some(class)) = (columns.next(), columns.next()) else {
            continue;
        };
        for suffix in SUFFIXES {
            let name = format!("{base}{suffix}");
            let symbol = find(&name)?;
            let mut procedures = BTreeMap::<String, Vec<String>>::new();
            if suffix.is_empty() && !procedure.is_null() {
                // SAFETY: the function of that name has this type.
                let resolve = unsafe { std::mem::transmute::<*mut c_void, Procedure>(procedure) };
                let text = CString::new(base)?;
                for version in VERSIONS {
                    for flags in FLAGS {
                        let mut address = ptr::null_mut();
                        let mut status = 0;
                        // SAFETY: a terminated string; writes a pointer and an integer.
                        let code = unsafe {
                            resolve(
                                text.as_ptr().cast(),
                                &raw mut address,
                                version,
                                flags,
                                &raw mut status,
                            )
                        };
                        if code == 0 && !address.is_null() {
                            let Location(location) = Location::of(address);
                            procedures
                                .entry(location)
                                .or_default()
                                .push(format!("{version}/{flags}"));
                        }
                    }
                }
            }
            if !symbol.is_null() || !procedures.is_empty() {
                entries.push(Entry {
                    name,
                    class,
                    symbol: (!symbol.is_null()).then(|| Location::of(symbol)),
                    procedures,
                });
            }
        }
    }
    crate::print(&entries)
}
