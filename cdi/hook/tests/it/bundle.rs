//! An OCI bundle whose root has this machine's C library, a probe program, and the files of a test.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

pub(crate) const OURS: &str = "/usr/local/lib/drava/libvgpu.so";

#[cfg(target_arch = "x86_64")]
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
#[cfg(target_arch = "aarch64")]
const LOADER: &str = "/lib/ld-linux-aarch64.so.1";

/// Time after which a run counts as hung.
const HUNG_AFTER: Duration = Duration::from_secs(60);

pub(crate) struct Bundle {
    dir: TempDir,
}

impl Bundle {
    /// Returns a root with the loader, the C library and `/bin/probe`, without `/etc`.
    pub(crate) fn new() -> Self {
        let bundle = Self::empty();
        bundle.place("loader", LOADER);
        bundle.place("libc", libc().to_str().unwrap());
        bundle.place("probe", "/bin/probe");
        bundle
    }

    /// Returns an empty root.
    pub(crate) fn empty() -> Self {
        let bundle = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        fs::create_dir(bundle.root()).unwrap();
        fs::write(
            bundle.dir.path().join("config.json"),
            r#"{"root": {"path": "rootfs"}}"#,
        )
        .unwrap();
        bundle
    }

    /// Writes `config.json` with these fields besides the root.
    pub(crate) fn write_config(&self, fields: &str) {
        let config = format!(r#"{{"root": {{"path": "rootfs"}}, {fields}}}"#);
        fs::write(self.dir.path().join("config.json"), config).unwrap();
    }

    /// Writes `config.json` with mounts at these paths in the container.
    pub(crate) fn mounts(&self, paths: &[&str]) {
        let mount = |path: &&str| format!(r#"{{"destination": {path:?}}}"#);
        let mounts: Vec<String> = paths.iter().map(mount).collect();
        self.write_config(&format!(r#""mounts": [{}]"#, mounts.join(", ")));
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("rootfs")
    }

    /// Returns this process's path of a file in the root. Creates its directory.
    pub(crate) fn at(&self, path: &str) -> PathBuf {
        let path = self.root().join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    /// Returns a path outside the root: for the container, a path of the host.
    pub(crate) fn outside(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, path: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.at(path), contents).unwrap();
    }

    pub(crate) fn read(&self, path: &str) -> String {
        fs::read_to_string(self.at(path)).unwrap()
    }

    pub(crate) fn link(&self, path: &str, target: impl AsRef<Path>) {
        symlink(target, self.at(path)).unwrap();
    }

    /// Places a built file into the root. A hard link, not a copy: a program that another thread's child has open for
    /// writing cannot be executed.
    fn place(&self, name: &str, path: &str) {
        fs::hard_link(built().join(name), self.at(path)).unwrap();
    }

    /// As [`Bundle::place`], but with a copy: the loader loads hard links of one file once.
    fn copy(&self, name: &str, path: &str) {
        fs::copy(built().join(name), self.at(path)).unwrap();
    }

    /// Places a library with the function that the probe searches.
    pub(crate) fn answer(&self, path: &str) {
        self.copy("libanswer.so", path);
    }

    /// Places a library that prints `first` or `other` when it is loaded.
    pub(crate) fn hello(&self, name: &str, path: &str) {
        self.copy(&format!("lib{name}.so"), path);
    }

    /// Returns a state as a runtime writes it.
    pub(crate) fn state(&self) -> String {
        format!(
            r#"{{"ociVersion": "1.2.0", "id": "c", "status": "creating", "pid": 1, "bundle": {:?}}}"#,
            self.dir.path()
        )
    }

    /// Runs the hook as a runtime does.
    pub(crate) fn hook(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_drava-cdi-hook"));
        command.args(arguments);
        self.run_hook(command)
    }

    /// Runs the hook for a container whose first process has this PID.
    pub(crate) fn hook_for(&self, pid: u32, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_drava-cdi-hook"));
        command.args(arguments).env_clear();
        let state = self.state();
        run(
            command,
            &state.replace("\"pid\": 1", &format!("\"pid\": {pid}")),
        )
    }

    /// Runs the hook in a mount namespace in which `script` has run; `$ROOT` is the root.
    pub(crate) fn hook_after(&self, script: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new("unshare");
        if !rustix::process::geteuid().is_root() {
            command.arg("--map-root-user");
        }
        command.args(["--mount", "sh", "-euc"]);
        command
            .arg(format!("{script}\nexec \"$HOOK\" \"$@\""))
            .arg("sh")
            .args(arguments);
        self.run_hook(command)
    }

    /// Runs the hook as the runtime does for a pod with `hostUsers: false`: root of a user namespace, unprivileged
    /// outside.
    pub(crate) fn hook_in_user_namespace(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new("unshare");
        command
            .args([
                "--user",
                "--map-root-user",
                env!("CARGO_BIN_EXE_drava-cdi-hook"),
            ])
            .args(arguments);
        self.run_hook(command)
    }

    fn run_hook(&self, mut command: Command) -> Output {
        command
            .env_clear()
            .env("HOOK", env!("CARGO_BIN_EXE_drava-cdi-hook"))
            .env("ROOT", self.root())
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        run(command, &self.state())
    }

    /// Runs the hook and expects success without output.
    pub(crate) fn hook_succeeds(&self, arguments: &[&str]) {
        let output = self.hook(arguments);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!((stderr(&output), output.stdout.len()), (String::new(), 0));
    }

    /// Runs the hook, expects a failure, and returns the line on stderr.
    pub(crate) fn hook_fails(&self, arguments: &[&str]) -> String {
        failure(&self.hook(arguments))
    }

    /// Runs the probe in the root and returns the output of the probe and its libraries.
    pub(crate) fn probe(&self, libraries: &[&str]) -> Vec<String> {
        let mut command = if rustix::process::geteuid().is_root() {
            Command::new("chroot")
        } else {
            let mut command = Command::new("unshare");
            command.args(["--map-root-user", "chroot"]);
            command
        };
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.arg(self.root()).arg("/bin/probe").args(libraries);
        let output = run(command, "");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout)
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect()
    }
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the one line on stderr of a failed run.
pub(crate) fn failure(output: &Output) -> String {
    let line = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{line}");
    assert!(
        line.starts_with("drava-cdi-hook: ") && line.ends_with('\n'),
        "{line:?}"
    );
    assert_eq!(line.lines().count(), 1, "{line}");
    assert!(output.stdout.is_empty());
    line
}

fn run(mut command: Command, input: &str) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program runs");
    // A run that rejects its arguments does not read stdin.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > HUNG_AFTER {
            child.kill().unwrap();
            panic!("hung: {command:?}");
        }
        sleep(Duration::from_millis(1));
    }
    child.wait_with_output().unwrap()
}

/// Returns the path of this process's C library.
fn libc() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|path| path.contains("/libc.so.6"));
    PathBuf::from(path.expect("the tests are linked with glibc"))
}

/// Programs and libraries in C, compiled once.
fn built() -> &'static Path {
    static BUILT: OnceLock<TempDir> = OnceLock::new();
    let dir = BUILT.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        for (from, name) in [(Path::new(LOADER), "loader"), (&libc(), "libc")] {
            let status = Command::new("cp")
                .arg(from)
                .arg(dir.path().join(name))
                .status();
            assert!(status.unwrap().success());
        }
        compile(dir.path(), "probe.c", "probe", &["-ldl"]);
        compile(
            dir.path(),
            "answer.c",
            "libanswer.so",
            &["-shared", "-fPIC"],
        );
        for name in ["first", "other"] {
            let definition = format!("-DNAME=\"{name}\"");
            compile(
                dir.path(),
                "hello.c",
                &format!("lib{name}.so"),
                &["-shared", "-fPIC", &definition],
            );
        }
        dir
    });
    dir.path()
}

fn compile(into: &Path, source: &str, name: &str, flags: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/it/c")
        .join(source);
    let status = Command::new("cc")
        .arg("-o")
        .arg(into.join(name))
        .arg(source)
        .args(flags)
        .status();
    assert!(
        status
            .expect("a C compiler, which Rust needs too")
            .success()
    );
}
