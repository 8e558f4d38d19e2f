//! Private mount namespaces for tests that mount.

use std::io::Write as _;
use std::process::Command;

/// Set in the process inside the namespace.
const INSIDE: &str = "DRAVA_TEST_IN_MOUNT_NAMESPACE";

/// A `/dev` of its own, in which a node driver may create the device files of the simulated machine.
const OWN_DEV: &str = "mount -t tmpfs -o mode=755 none /dev; cd /dev; mknod null c 1 3; mknod zero c 1 5; \
                       mknod random c 1 8; mknod urandom c 1 9; chmod 666 *; exec \"$@\"";

/// Runs `check` in a private mount namespace: the test with this path is started again in it, as a process. Reports the test
/// as skipped where namespaces cannot be created.
pub(crate) fn in_mount_namespace(test: &str, check: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return check();
    }
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "--"])
        .args(["sh", "-euc", OWN_DEV, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env(INSIDE, "1")
        .output();
    match output {
        Ok(output) if output.status.success() => {
            // A test of another name runs nothing, and that succeeds.
            let told = String::from_utf8_lossy(&output.stdout);
            assert!(told.contains("1 passed"), "no test {test}: {told}");
            // Measurements and reports of skipped tests.
            std::io::stdout().write_all(&output.stdout).unwrap();
            std::io::stderr().write_all(&output.stderr).unwrap();
        }
        Ok(output) if String::from_utf8_lossy(&output.stderr).contains("unshare failed") => {
            let error = String::from_utf8_lossy(&output.stderr);
            report_skipped(test, error.lines().next().unwrap_or_default());
        }
        Ok(output) => panic!(
            "{}\n{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => report_skipped(test, &format!("cannot run unshare: {error}")),
    }
}

/// Returns whether this process has a `/dev` of its own.
pub(crate) fn has_own_dev() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Writes to stderr directly, because `eprintln!` is captured for passing tests.
fn report_skipped(test: &str, reason: &str) {
    let line = format!("skipped: {test}: {reason}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}
