//! Finds the NVIDIA driver's libraries and the names by which programs load them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use super::parts;
use super::{DriverRoot, Part};
use crate::Link;
use crate::elf::{self, Machine};
use crate::ldcache::LdCache;

/// Directories searched in addition to those of the loader's cache: Ubuntu, Debian's packages of the NVIDIA driver, Red
/// Hat and SUSE, other distributions (for GKE's Container-Optimized OS under its own root), Talos, NixOS, WSL.
#[cfg(target_arch = "x86_64")]
const DIRECTORIES: [&str; 10] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib",
    "/lib",
    "/usr/local/glibc/usr/lib",
    "/run/opengl-driver/lib",
    "/usr/lib/wsl/lib",
];
#[cfg(not(target_arch = "x86_64"))]
const DIRECTORIES: [&str; 9] = [
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/lib64",
    "/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib",
    "/lib",
    "/usr/local/glibc/usr/lib",
    "/run/opengl-driver/lib",
];

/// Library that is also the backend of GBM.
const GBM_BACKEND: &str = "libnvidia-allocator.so.1";

const LD_CACHE: &str = "/etc/ld.so.cache";
/// Size limit of the cache; a desktop's cache has some hundred KiB.
const MAX_CACHE: u64 = 16 << 20;

/// A library of the NVIDIA driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// Part of the driver.
    pub part: Part,
    /// Path in the driver root and in containers, free of symbolic links.
    pub path: String,
    /// Name by which programs and other libraries load the library.
    pub soname: String,
    /// Name without version (`libcuda.so`) in the same directory, for programs that load that name.
    pub unversioned: Option<String>,
}

/// A drava library that replaces a library of the NVIDIA driver in containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Substitute {
    /// SONAME of both libraries.
    pub soname: String,
    /// The replacement's path on the node.
    pub host_path: String,
    /// Path of the NVIDIA library in containers.
    pub original: String,
}

pub(super) struct Found {
    /// Sorted by path.
    pub(super) libraries: Vec<Library>,
    pub(super) version: Option<String>,
    pub(super) searched: Vec<String>,
}

impl Library {
    pub(super) fn is_cuda(&self) -> bool {
        self.file_name().starts_with("libcuda.so") || self.soname == "libcuda.so.1"
    }

    fn file_name(&self) -> &str {
        self.path
            .rsplit_once('/')
            .map_or(self.path.as_str(), |(_, name)| name)
    }

    fn sibling(&self, name: &str) -> String {
        let directory = self
            .path
            .rsplit_once('/')
            .map_or("", |(directory, _)| directory);
        format!("{directory}/{name}")
    }

    /// Returns the links that a container needs: those in the file's directory, the first to the file and each other to
    /// the previous, and the name by which GBM loads its backend.
    pub(super) fn container_links(&self) -> Vec<Link> {
        let mut links = Vec::new();
        if self.soname == GBM_BACKEND {
            links.push(Link {
                target: format!("../{GBM_BACKEND}"),
                path: self.sibling("gbm/nvidia-drm_gbm.so"),
            });
        }
        let mut target = self.file_name();
        for name in [Some(&self.soname), self.unversioned.as_ref()]
            .into_iter()
            .flatten()
        {
            if name != target {
                links.push(Link {
                    target: target.to_owned(),
                    path: self.sibling(name),
                });
                target = name;
            }
        }
        links
    }

    /// Returns the paths under which a container's loader cache lists the library.
    pub(super) fn container_names(&self) -> Vec<String> {
        [Some(&self.soname), self.unversioned.as_ref()]
            .into_iter()
            .flatten()
            .map(|name| self.sibling(name))
            .collect()
    }
}

/// Searches the directories in the driver root's loader cache, then [`DIRECTORIES`].
///
/// Uninstalled drivers leave files behind. Of several versions, that of the kernel driver counts; if it is unknown or no
/// file has it, that of the file to which `libcuda.so.1` leads.
pub(super) fn find(root: &DriverRoot, kernel_version: Option<&str>) -> Found {
    let mut searched = Vec::new();
    let mut files: Vec<(String, BTreeSet<String>)> = Vec::new();
    for directory in cached_directories(root)
        .into_iter()
        .chain(DIRECTORIES.map(str::to_owned))
    {
        let Some((real, _)) = root.resolve(&directory).filter(|(_, kind)| kind.is_dir()) else {
            continue;
        };
        if searched.contains(&real) {
            continue;
        }
        files.extend(files_in(root, &real));
        // The backend of VDPAU has its own directory on Debian.
        let vdpau = root.resolve(&format!("{real}/vdpau"));
        if let Some((vdpau, _)) = vdpau.filter(|(_, kind)| kind.is_dir()) {
            files.extend(files_in(root, &vdpau));
        }
        searched.push(real);
    }
    let mut libraries: Vec<Library> = files
        .into_iter()
        .filter_map(|(path, names)| library(root, path, &names))
        .collect();
    let version = driver_version(root, &searched, &libraries, kernel_version);
    let mut sonames = BTreeSet::new();
    libraries.retain(|library| {
        // Excludes libraries of another driver version. Of several files with one SONAME the first wins, as in the
        // loader.
        let stale = match (self::version(library.file_name()), &version) {
            (Some(of_file), Some(of_driver)) => of_file != *of_driver,
            _ => false,
        };
        !stale && sonames.insert(library.soname.clone())
    });
    libraries.sort_by(|a, b| a.path.cmp(&b.path));
    Found {
        libraries,
        version,
        searched: searched_or_known(searched),
    }
}

fn driver_version(
    root: &DriverRoot,
    directories: &[String],
    libraries: &[Library],
    kernel_version: Option<&str>,
) -> Option<String> {
    let cuda = || libraries.iter().filter(|library| library.is_cuda());
    let of_kernel = kernel_version.and_then(|wanted| {
        let mut versions = cuda().filter_map(|cuda| version(cuda.file_name()));
        versions.find(|version| version == wanted)
    });
    of_kernel.or_else(|| {
        let mut links = directories.iter().filter_map(|directory| {
            let path = root.file(&format!("{directory}/libcuda.so.1"))?;
            cuda().find(|cuda| cuda.path == path)
        });
        let library = links.next().or_else(|| cuda().next())?;
        version(library.file_name())
    })
}

fn searched_or_known(searched: Vec<String>) -> Vec<String> {
    if searched.is_empty() {
        DIRECTORIES.map(str::to_owned).into()
    } else {
        searched
    }
}

/// Returns the directories of NVIDIA libraries in the driver root's loader cache, in the cache's order. A missing or
/// malformed cache has none.
fn cached_directories(root: &DriverRoot) -> Vec<String> {
    let mut bytes = Vec::new();
    let Ok(file) = root.read(LD_CACHE) else {
        return Vec::new();
    };
    if file.take(MAX_CACHE).read_to_end(&mut bytes).is_err() {
        return Vec::new();
    }
    let cache = LdCache::parse(&bytes).unwrap_or_default();
    let mut directories: Vec<String> = Vec::new();
    for entry in cache.entries() {
        let (Ok(name), Ok(path)) = (
            std::str::from_utf8(&entry.name),
            std::str::from_utf8(&entry.path),
        ) else {
            continue;
        };
        let Some((directory, _)) = path.rsplit_once('/') else {
            continue;
        };
        if parts::of_library(name).is_some() && !directories.iter().any(|known| known == directory)
        {
            directories.push(directory.to_owned());
        }
    }
    directories
}

/// Returns the NVIDIA libraries to which names in `directory` lead, each with those names.
fn files_in(root: &DriverRoot, directory: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut files: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for name in root.names(directory) {
        if parts::of_library(&name).is_none() {
            continue;
        }
        if let Some(path) = root.file(&format!("{directory}/{name}")) {
            files.entry(path).or_default().insert(name);
        }
    }
    files
}

fn library(root: &DriverRoot, path: String, names: &BTreeSet<String>) -> Option<Library> {
    let part = names.iter().find_map(|name| parts::of_library(name))?;
    let shared = elf::inspect(&root.read(&path).ok()?).ok()??;
    if shared.machine != Machine::HOST {
        return None;
    }
    let file_name = path
        .rsplit_once('/')
        .map_or(path.as_str(), |(_, name)| name);
    // A library without SONAME is loaded by the shortest versioned name that leads to it.
    let versioned = |name: &&String| name.contains(".so.");
    let soname = shared
        .soname
        .or_else(|| {
            names
                .iter()
                .filter(versioned)
                .min_by_key(|name| name.len())
                .cloned()
        })
        .unwrap_or_else(|| file_name.to_owned());
    let unversioned = names
        .iter()
        .find(|name| name.ends_with(".so") && **name != soname)
        .cloned();
    Some(Library {
        part,
        path,
        soname,
        unversioned,
    })
}

/// Returns the driver version at the end of a file name: three digits, a dot, digits, optionally further components.
fn version(file_name: &str) -> Option<String> {
    let (_, version) = file_name.split_once(".so.")?;
    let mut numbers = version.split('.');
    let major = numbers.next()?;
    let all_digits = version
        .split('.')
        .all(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()));
    (major.len() == 3 && numbers.next().is_some() && all_digits).then(|| version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognizes_driver_versions() {
        assert_eq!(
            version("libcuda.so.580.65.06").as_deref(),
            Some("580.65.06")
        );
        assert_eq!(version("libcuda.so.535.161").as_deref(), Some("535.161"));
        for name in [
            "libcuda.so.1",
            "libcuda.so",
            "libnvidia-egl-gbm.so.1.1.2",
            "libcuda.so.580",
            "libx.so.580.a",
        ] {
            assert_eq!(version(name), None, "{name}");
        }
    }

    #[test]
    fn returns_links_and_names_for_containers() {
        let library = Library {
            part: Part::Compute,
            path: "/usr/lib64/libcuda.so.580.65.06".into(),
            soname: "libcuda.so.1".into(),
            unversioned: Some("libcuda.so".into()),
        };
        assert_eq!(
            library.container_links(),
            [
                Link {
                    target: "libcuda.so.580.65.06".into(),
                    path: "/usr/lib64/libcuda.so.1".into()
                },
                Link {
                    target: "libcuda.so.1".into(),
                    path: "/usr/lib64/libcuda.so".into()
                },
            ]
        );
        assert_eq!(
            library.container_names(),
            ["/usr/lib64/libcuda.so.1", "/usr/lib64/libcuda.so"]
        );

        let versioned = Library {
            soname: "libnvidia-eglcore.so.580.65.06".into(),
            path: "/usr/lib64/libnvidia-eglcore.so.580.65.06".into(),
            part: Part::Graphics,
            unversioned: None,
        };
        assert_eq!(versioned.container_links(), []);
        assert_eq!(
            versioned.container_names(),
            ["/usr/lib64/libnvidia-eglcore.so.580.65.06"]
        );
    }
}
