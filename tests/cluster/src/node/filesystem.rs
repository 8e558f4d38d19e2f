//! The node's root file system: a tmpfs with the host's programs and the cluster's own disk.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_bind_recursive,
    mount_change, mount_remount, unmount,
};
use rustix::process::pivot_root;

use crate::cgroup::Layout;
use crate::config::{NodeIndex, SIMULATED_ROOT, STATE_DIR, hosts};
use crate::plan::Plan;
use crate::state::{NodeDir, short_hash};

/// Directories (or symbolic links) at the host's root that hold programs and libraries.
const PROGRAMS: [&str; 9] = [
    "bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr", "nix", "gnu",
];
/// Device nodes that programs and containers need.
const DEVICES: [&str; 7] = ["null", "zero", "full", "random", "urandom", "tty", "fuse"];
/// Files of the host's `/etc` that configure the dynamic loader.
const LOADER_FILES: [&str; 2] = ["ld.so.cache", "alternatives"];
/// Kernel settings of the whole host that kubelet would change. The node sees the values that kubelet expects.
const SETTINGS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// Builds the root file system and makes it this process's root.
pub(super) fn assemble(state: &NodeDir, node: NodeIndex, plan: &Plan) -> Result<()> {
    // The layout must be read before the host's mounts are gone.
    let cgroups = Layout::detect()?;
    let root = state.root();
    tmpfs(&root, c"mode=755")?;
    programs(&root)?;
    disk(state, node, plan, &root)?;
    devices(&root.join("dev"))?;
    for bind in &plan.binds {
        bind_read_only(&bind.source, &below(&root, &bind.target))?;
    }
    bind_dir(state.path(), &below(&root, Path::new(STATE_DIR)))?;
    for dir in ["run", "tmp", SIMULATED_ROOT] {
        tmpfs(&below(&root, Path::new(dir)), c"mode=755")?;
    }
    make_dir(&root.join("root"))?;
    kernel(&root)?;
    make_dir(&root.join("sys/fs/cgroup"))?;
    cgroups.mount(&root.join("sys/fs/cgroup"))?;
    enter(&root)
}

fn programs(root: &Path) -> Result<()> {
    for name in PROGRAMS {
        let (source, target) = (Path::new("/").join(name), root.join(name));
        let Ok(metadata) = fs::symlink_metadata(&source) else {
            continue;
        };
        if metadata.is_symlink() {
            let link = fs::read_link(&source)
                .with_context(|| format!("read the link {}", source.display()))?;
            symlink(link, &target).with_context(|| format!("link {}", target.display()))?;
        } else if metadata.is_dir() {
            bind_read_only(&source, &target)?;
        }
    }
    Ok(())
}

/// `/etc` and `/var`, stored on the host's disk.
fn disk(state: &NodeDir, node: NodeIndex, plan: &Plan, root: &Path) -> Result<()> {
    let (etc, var) = (state.disk().join("etc"), state.disk().join("var"));
    for dir in [
        &etc,
        // As on every node with containerd. The file of this containerd is another, so that tests can write one here.
        &etc.join("containerd"),
        &var,
        &var.join("lib"),
        &var.join("log"),
        &var.join("cache"),
    ] {
        make_dir(dir)?;
    }
    let link = var.join("run");
    if fs::symlink_metadata(&link).is_err() {
        symlink("../run", &link).with_context(|| format!("link {}", link.display()))?;
    }
    for (name, text) in [
        ("hosts", hosts(plan.nodes.iter().map(|node| node.index))),
        ("hostname", format!("{}\n", node.name())),
        ("resolv.conf", String::new()),
        ("nsswitch.conf", "hosts: files dns\n".into()),
        (
            "passwd",
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n".into(),
        ),
        ("group", "root:x:0:\nnogroup:x:65534:\n".into()),
        // 32 hexadecimal digits, constant per node.
        (
            "machine-id",
            format!("{:0>32}\n", short_hash(plan_identity(state).as_bytes())),
        ),
    ] {
        fs::write(etc.join(name), text).with_context(|| format!("write the node's /etc/{name}"))?;
    }
    bind_dir(&etc, &root.join("etc"))?;
    bind_dir(&var, &root.join("var"))?;
    for name in LOADER_FILES {
        let source = Path::new("/etc").join(name);
        if source.is_dir() {
            bind_read_only(&source, &root.join("etc").join(name))?;
        } else if source.is_file() {
            bind_file(&source, &root.join("etc").join(name))?;
        }
    }
    Ok(())
}

fn plan_identity(state: &NodeDir) -> String {
    state.path().display().to_string()
}

fn devices(dev: &Path) -> Result<()> {
    tmpfs(dev, c"mode=755")?;
    for name in DEVICES {
        let source = Path::new("/dev").join(name);
        if source.exists() {
            bind_file(&source, &dev.join(name))?;
        }
    }
    for (target, link) in [
        ("pts/ptmx", "ptmx"),
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
        // kubelet reads the kernel's log for out-of-memory kills; the host's messages must not reach it.
        ("null", "kmsg"),
    ] {
        symlink(target, dev.join(link)).with_context(|| format!("link the node's /dev/{link}"))?;
    }
    let (pts, shm) = (dev.join("pts"), dev.join("shm"));
    make_dir(&pts)?;
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    mount(
        "devpts",
        &pts,
        "devpts",
        flags,
        Some(c"newinstance,ptmxmode=0666,mode=0620"),
    )
    .context("mount the node's /dev/pts")?;
    tmpfs(&shm, c"mode=1777")
}

fn kernel(root: &Path) -> Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    for (name, kind) in [("proc", "proc"), ("sys", "sysfs")] {
        let target = root.join(name);
        make_dir(&target)?;
        mount(kind, &target, kind, flags, None)
            .with_context(|| format!("mount the node's /{name}"))?;
    }
    // Where programs on a GPU node read the driver's files, of the simulated machine and not of the host.
    let driver = below(root, Path::new(SIMULATED_ROOT)).join("proc/driver");
    make_dir(&driver)?;
    bind_dir(&driver, &root.join("proc/driver"))?;
    let settings = root.join("run/kernel-settings");
    make_dir(&settings)?;
    for (name, value) in SETTINGS {
        let (file, setting) = (
            settings.join(name.replace('/', ".")),
            root.join("proc/sys").join(name),
        );
        fs::write(&file, format!("{value}\n"))
            .with_context(|| format!("write {}", file.display()))?;
        if setting.exists() {
            mount_bind(&file, &setting)
                .with_context(|| format!("cover the kernel setting {name}"))?;
        }
    }
    Ok(())
}

/// Makes `root` the root and unmounts the host's file system.
fn enter(root: &Path) -> Result<()> {
    std::env::set_current_dir(root).with_context(|| format!("change to {}", root.display()))?;
    pivot_root(".", ".").context("change the root file system")?;
    unmount(".", UnmountFlags::DETACH).context("unmount the host's file system")?;
    std::env::set_current_dir("/").context("change to the node's root")?;
    // Shared propagation, as on a usual node: mounts of a driver under its host paths reach other pods.
    mount_change(
        "/",
        MountPropagationFlags::SHARED | MountPropagationFlags::REC,
    )
    .context("share the node's mounts among its pods")
}

fn below(root: &Path, path: &Path) -> std::path::PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn make_dir(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))
}

fn tmpfs(target: &Path, options: &std::ffi::CStr) -> Result<()> {
    make_dir(target)?;
    mount("tmpfs", target, "tmpfs", MountFlags::NOSUID, Some(options))
        .with_context(|| format!("mount a tmpfs at {}", target.display()))
}

fn bind_dir(source: &Path, target: &Path) -> Result<()> {
    make_dir(target)?;
    mount_bind(source, target)
        .with_context(|| format!("bind {} to {}", source.display(), target.display()))
}

fn bind_file(source: &Path, target: &Path) -> Result<()> {
    File::create(target).with_context(|| format!("create {}", target.display()))?;
    mount_bind(source, target)
        .with_context(|| format!("bind {} to {}", source.display(), target.display()))
}

fn bind_read_only(source: &Path, target: &Path) -> Result<()> {
    make_dir(target)?;
    mount_bind_recursive(source, target)
        .with_context(|| format!("bind {} to {}", source.display(), target.display()))?;
    mount_remount(target, MountFlags::BIND | MountFlags::RDONLY, "")
        .with_context(|| format!("make {} read-only", target.display()))
}
