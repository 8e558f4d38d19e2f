//! CUDA compatibility libraries of the image, which let programs of a newer CUDA release run on the node's older kernel
//! driver. NVIDIA's images have them in one directory, which the loader does not search.
//!
//! The libraries are preferred only if they are of a newer release branch than the NVIDIA driver of the node, since older
//! ones do not know the kernel driver, and if the image requires a CUDA version that the driver does not support. The node
//! driver runs this hook for GPUs of data centers only: on others, CUDA ends with error 804. A stub that loads libvgpu stays the library that programs find: without it, the share would
//! have no limits.

use drava_cdi::elf::{self, Machine};
use drava_cdi::ldcache::Entry;

use crate::arguments::NodeDriver;
use crate::container::Container;
use crate::ldcache::{self, LdCacheError};
use crate::root::Root;

/// Directory of the libraries; a link to that of the image's CUDA release.
const DIRECTORY: &str = "/usr/local/cuda/compat";

/// Limit of the files in the directory; NVIDIA's packages have about ten.
const MAX_NAMES: usize = 256;

/// Name by which programs load CUDA.
const LIBRARY: &str = "libcuda.so.1";

/// Prefix of the file whose name contains the version.
const CUDA: &str = "libcuda.so.";

/// Variable of NVIDIA's images with conditions separated by spaces, such as `cuda>=12.4`.
const REQUIREMENTS: &str = "NVIDIA_REQUIRE_CUDA";

pub(crate) fn apply(container: &Container, driver: &NodeDriver) -> Result<(), LdCacheError> {
    let root = &container.root;
    let required = container.variable(REQUIREMENTS).and_then(required_cuda);
    let supported = driver.cuda.as_deref().and_then(cuda_version);
    let is_sufficient = required
        .zip(supported)
        .is_some_and(|(required, supported)| required <= supported);
    let names = root.names(DIRECTORY, MAX_NAMES)?;
    if is_sufficient || !is_newer(&names, &driver.version) || is_stub(root)? {
        return Ok(());
    }
    let libraries = names.iter().filter(|name| name.contains(".so"));
    let entries: Vec<Entry> = libraries
        .filter_map(|name| {
            let path = format!("{DIRECTORY}/{name}");
            let file = root.file(&path).ok()??;
            let shared = elf::inspect(&file).ok()??;
            let is_loadable = shared.machine == Machine::HOST;
            is_loadable.then(|| Entry::new(name.as_str(), path, Machine::HOST))
        })
        .collect();
    if entries.is_empty() {
        return Ok(());
    }
    ldcache::add(root, entries)
}

/// Returns whether programs find a stub as libcuda.
fn is_stub(root: &Root) -> Result<bool, LdCacheError> {
    let Some(path) = ldcache::find(root, LIBRARY)? else {
        return Ok(false);
    };
    let Some(file) = root.file(&path)? else {
        return Ok(false);
    };
    let shared = elf::inspect(&file).map_err(|source| LdCacheError::Read { path, source })?;
    let needed = shared.map(|shared| shared.needed).unwrap_or_default();
    Ok(needed.iter().any(|name| name.ends_with("/libvgpu.so")))
}

/// Returns whether the only versioned library of CUDA among `names` is of a newer release branch than the driver.
fn is_newer(names: &[String], driver_version: &str) -> bool {
    let versions = names.iter().filter_map(|name| name.strip_prefix(CUDA));
    let mut branches = versions.filter(|version| version.contains('.')).map(branch);
    match (branches.next(), branches.next(), branch(driver_version)) {
        (Some(Some(of_image)), None, Some(of_node)) => of_image > of_node,
        // Several versions: the image leaves the choice to its start script.
        _ => false,
    }
}

/// Returns the CUDA version that an image requires: the first condition `cuda>=<version>`.
fn required_cuda(requirements: &str) -> Option<(u32, u32)> {
    let conditions = requirements.split([' ', ',']);
    let mut versions = conditions.filter_map(|condition| condition.strip_prefix("cuda>="));
    versions.next().and_then(cuda_version)
}

/// Parses `major.minor`.
fn cuda_version(version: &str) -> Option<(u32, u32)> {
    let (major, minor) = version.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Returns the release branch: the first number of a version.
fn branch(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_cuda_version_that_image_requires() {
        let of_image = "cuda>=12.4 brand=tesla,driver>=470,driver<471 brand=unknown,driver>=535";
        assert_eq!(required_cuda(of_image), Some((12, 4)));
        assert_eq!(required_cuda("driver>=470"), None);
        assert_eq!(required_cuda("cuda>=12"), None);
        assert!(cuda_version("13.0") > cuda_version("12.10"));
    }

    #[test]
    fn prefers_only_newer_release_branch() {
        let of = |files: &[&str]| {
            let names: Vec<String> = files.iter().map(|&file| file.to_owned()).collect();
            is_newer(&names, "580.65.06")
        };
        assert!(of(&["libcuda.so", "libcuda.so.1", "libcuda.so.590.44.01"]));
        assert!(!of(&["libcuda.so.1", "libcuda.so.580.95.05"]));
        assert!(!of(&["libcuda.so.1", "libcuda.so.535.54.03"]));
        assert!(!of(&["libcuda.so.590.44.01", "libcuda.so.600.1.1"]));
        assert!(!of(&["libcuda.so.1", "libcuda.so.x.y"]));
        assert!(!of(&[]));
    }
}
