//! `cargo xtask image`: the images of drava as OCI archives, without a container engine.
//!
//! Programs use the C library of this machine, which is copied into the images with every other library that they load.
//! The same sources on the same machine produce the same archives. Beside each archive lies its bill of materials; `images.txt`
//! lists the images with their digests, and `values.yaml` has the digests for the chart.

mod sbom;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use drava_cluster::oci::{Image, Layer};
use drava_cluster::{
    Artifacts, Profile, Progress, build_preload, build_static, build_workspace, target_dir,
};
use simulator_machine::description::BUNDLED;

/// Command line of `cargo xtask image`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Cargo profile of the programs in the images.
    #[arg(long, default_value_t)]
    profile: Profile,
    /// Directory for the archives [default: target/images].
    #[arg(long)]
    out: Option<PathBuf>,
}

const DRIVER: &str = "drava-dra-driver";
const CONTROLLER: &str = "drava-controller";
const DEMO: &str = "drava-demo";
/// Image of the simulated machine.
pub(crate) const SIMULATOR: &str = "gpu-simulator";

/// All images.
pub(crate) const ALL: [&str; 4] = [DRIVER, DEMO, CONTROLLER, SIMULATOR];

/// Images of a release. That of the demo has programs of the build machine.
pub(crate) const RELEASED: [&str; 3] = [DRIVER, CONTROLLER, SIMULATOR];

/// Packages of each image for users.
pub(crate) const PACKAGES: [(&str, &[&str]); 2] = [
    (DRIVER, &[DRIVER, "libvgpu", "drava-cdi-hook"]),
    (CONTROLLER, &[CONTROLLER]),
];

/// Packages of the image of the simulated machine.
pub(crate) const SIMULATOR_PACKAGES: (&str, &[&str]) = (
    SIMULATOR,
    &[
        "simulator-machine",
        "simulator-cuda",
        "simulator-nvml",
        "gpu-view",
    ],
);

/// Runs the task.
pub(crate) fn run(args: Args) -> Result<()> {
    let out = args.out.unwrap_or_else(|| target_dir().join("images"));
    for archive in write(
        &build_workspace(args.profile)?,
        args.profile,
        &out,
        &ALL,
        "dev",
    )? {
        println!("{}", archive.display());
    }
    let list = out.join(LIST);
    let images = fs::read_to_string(&list).with_context(|| format!("read {}", list.display()))?;
    print!("{images}");
    for file in write_bills(&PACKAGES, "container", &out)? {
        println!("{}", file.display());
    }
    Ok(())
}

/// Writes the bill of materials of each component of this type, and returns the files.
pub(crate) fn write_bills(
    components: &[(&str, &[&str])],
    kind: &str,
    out: &Path,
) -> Result<Vec<PathBuf>> {
    let metadata = sbom::metadata()?;
    let write = |(name, packages): &(&str, &[&str])| {
        let file = out.join(format!("{name}.cdx.json"));
        let bill = sbom::bill(name, kind, packages, &metadata)?;
        let text = serde_json::to_string_pretty(&bill)? + "\n";
        fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
        Ok(file)
    };
    components.iter().map(write).collect()
}

/// File with the images and their digests.
const LIST: &str = "images.txt";
/// File with the digests as values of the chart.
const VALUES: &str = "values.yaml";

/// User and group of programs without privileges.
const UNPRIVILEGED: &str = "65532:65532";

/// Programs of this machine that the pods of the demo call.
const DEMO_PROGRAMS: [&str; 14] = [
    "cat", "cp", "date", "echo", "env", "grep", "head", "id", "ls", "mkdir", "rm", "sh", "sleep",
    "touch",
];

/// Writes the images `names` with this tag into the directory `out` and returns the archives.
pub(crate) fn write(
    programs: &Artifacts,
    profile: Profile,
    out: &Path,
    names: &[&str],
    tag: &str,
) -> Result<Vec<PathBuf>> {
    let hook = build_static("drava-cdi-hook", profile)?;
    let preload = build_preload()?;
    let step = Progress::step("Write the images");
    fs::create_dir_all(out).with_context(|| format!("create {}", out.display()))?;
    let mut archives = Vec::new();
    let mut released: Vec<Released> = Vec::new();
    for name in names {
        let image = match *name {
            DRIVER => driver(programs, &hook, &preload),
            CONTROLLER => controller(programs),
            DEMO => demo(programs),
            SIMULATOR => simulator(programs),
            other => bail!("no image {other}"),
        };
        let image = Image {
            name: format!("localhost/{name}:{tag}"),
            ..image?
        };
        let archive = out.join(format!("{name}.tar"));
        let digest = image.write(&archive)?;
        match *name {
            DRIVER => released.push(("driver", DRIVER, digest)),
            CONTROLLER => released.push(("controller", CONTROLLER, digest)),
            _ => {}
        }
        archives.push(archive);
    }
    for (file, text) in [(LIST, list(&released)), (VALUES, values(&released))] {
        let file = out.join(file);
        fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
    }
    step.done();
    Ok(archives)
}

/// Component in the values of the chart, name, and digest of an image for users.
type Released = (&'static str, &'static str, String);

/// Lists the images as they are mirrored.
fn list(images: &[Released]) -> String {
    let line = |(_, name, digest): &Released| format!("{name}@{digest}\n");
    images.iter().map(line).collect()
}

/// Returns the digests as values of the chart.
fn values(images: &[Released]) -> String {
    let line = |(component, _, digest): &Released| format!("    {component}: {digest}\n");
    let digests: String = images.iter().map(line).collect();
    format!("image:\n  digests:\n{digests}")
}

fn driver(programs: &Artifacts, hook: &Path, preload: &Path) -> Result<Image> {
    let mut layer = base();
    layer.program("/usr/bin/drava-dra-driver", programs.file(DRIVER)?)?;
    // NVIDIA's libraries, which the node driver opens on the node, load these.
    layer.companions(&["libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"])?;
    layer.copy("/opt/drava/libvgpu.so", preload, 0o755)?;
    layer.copy("/opt/drava/drava-cdi-hook", hook, 0o755)?;
    Ok(image(DRIVER, "", layer))
}

fn controller(programs: &Artifacts) -> Result<Image> {
    let mut layer = base();
    layer.program("/usr/bin/drava-controller", programs.file(CONTROLLER)?)?;
    Ok(image(CONTROLLER, UNPRIVILEGED, layer))
}

/// The programs of the quickstart. Its `nvidia-smi` is the project's viewer, `gpu-view`.
fn demo(programs: &Artifacts) -> Result<Image> {
    let mut layer = base();
    for program in DEMO_PROGRAMS {
        let host = Path::new("/usr/bin").join(program);
        let host = fs::canonicalize(&host).with_context(|| format!("find {}", host.display()))?;
        layer.program(&format!("/usr/bin/{program}"), &host)?;
    }
    layer.program("/usr/bin/cuda-probe", programs.file("cuda-probe")?)?;
    layer.program("/usr/bin/nvidia-smi", programs.file("gpu-view")?)?;
    // CUDA programs load these.
    layer.companions(&[
        "libdl.so.2",
        "libm.so.6",
        "libpthread.so.0",
        "librt.so.1",
        "libgcc_s.so.1",
    ])?;
    Ok(Image {
        entrypoint: vec![],
        command: vec!["/bin/sh".into()],
        ..image(DEMO, "", layer)
    })
}

/// The simulated machine with what a driver root needs. Its libraries and `gpu-view` run in containers of users.
fn simulator(programs: &Artifacts) -> Result<Image> {
    let program = "simulator-machine";
    let mut layer = base();
    layer.program(&format!("/usr/bin/{program}"), programs.file(program)?)?;
    for library in ["libsimulator_cuda.so", "libsimulator_nvml.so"] {
        let path = format!("/opt/gpu-simulator/{library}");
        layer.copy(&path, programs.file(library)?, 0o755)?;
    }
    let view = programs.file("gpu-view")?;
    layer.copy("/opt/gpu-simulator/nvidia-smi", view, 0o755)?;
    for (name, text) in BUNDLED {
        let path = format!("/opt/gpu-simulator/machines/{name}.yaml");
        layer.file(&path, text.as_bytes().to_vec(), 0o644);
    }
    Ok(Image {
        entrypoint: vec![format!("/usr/bin/{program}")],
        ..image(SIMULATOR, "", layer)
    })
}

fn base() -> Layer {
    let mut layer = Layer::with_merged_usr();
    let passwd = "root:x:0:0:root:/:/bin/sh\nnonroot:x:65532:65532:nonroot:/:/bin/false\n";
    layer.file("/etc/passwd", passwd.into(), 0o644);
    layer.file("/etc/group", "root:x:0:\nnonroot:x:65532:\n".into(), 0o644);
    layer.file("/etc/nsswitch.conf", "hosts: files dns\n".into(), 0o644);
    layer
}

fn image(name: &str, user: &str, layer: Layer) -> Image {
    Image {
        name: name.to_owned(),
        entrypoint: vec![format!("/usr/bin/{name}")],
        command: vec![],
        user: user.into(),
        labels: labels(name),
        layer,
    }
}

/// Labels of an image, as registries and scanners show them.
fn labels(name: &str) -> BTreeMap<String, String> {
    [
        ("title", name),
        ("vendor", "drava"),
        ("version", env!("CARGO_PKG_VERSION")),
        ("licenses", env!("CARGO_PKG_LICENSE")),
    ]
    .map(|(key, value)| (format!("org.opencontainers.image.{key}"), value.to_owned()))
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bills_list_crates_of_released_images() {
        let metadata = sbom::metadata().unwrap();
        for (image, packages) in PACKAGES {
            let bill = sbom::bill(image, "container", packages, &metadata).unwrap();
            let bill = bill.to_string();
            for package in packages {
                assert!(
                    bill.contains(&format!("\"{package}\"")),
                    "{image}: {package}"
                );
            }
            assert!(bill.contains("pkg:cargo/libc@"), "{image}");
            assert!(!bill.contains("simulator"), "{image}: crates of tests");
        }
    }

    #[test]
    fn lists_digests_for_mirrors_and_for_chart() {
        let images = [
            ("driver", "drava-dra-driver", "sha256:aa".to_owned()),
            ("controller", "drava-controller", "sha256:bb".to_owned()),
        ];
        assert_eq!(
            list(&images),
            "drava-dra-driver@sha256:aa\ndrava-controller@sha256:bb\n"
        );
        assert_eq!(
            values(&images),
            "image:\n  digests:\n    driver: sha256:aa\n    controller: sha256:bb\n"
        );
    }

    #[test]
    fn images_name_version_and_license() {
        let labels = labels("drava-controller");
        assert_eq!(labels["org.opencontainers.image.licenses"], "Apache-2.0");
        assert_eq!(
            labels["org.opencontainers.image.version"],
            env!("CARGO_PKG_VERSION")
        );
    }
}
