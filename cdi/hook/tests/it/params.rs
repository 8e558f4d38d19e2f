//! The copy of the kernel driver's parameters.

use crate::bundle::{Bundle, stderr};

const PARAMS: &str = "/proc/driver/nvidia/params";
const ALLOWED: &str = "ModifyDeviceFiles: 1\nDeviceFileUID: 0\n";
const MASKED: &str = "ModifyDeviceFiles: 0\nDeviceFileUID: 0\n";

/// Runs the hook twice, and then prints the file, changes of it, and the other names in its directory.
const SCRIPT: &str = r#"
state=$(cat)
printf %s "$state" | "$HOOK" params
printf %s "$state" | "$HOOK" params
cd "$ROOT/proc/driver/nvidia"
cat params
echo changed 2>/dev/null >params || echo read-only
ls
exit 0"#;

#[test]
fn masks_permission_to_create_device_files() {
    let bundle = Bundle::empty();
    bundle.write(PARAMS, ALLOWED);
    bundle.write("/proc/driver/nvidia/version", "580.65.06");
    let output = bundle.hook_after(SCRIPT, &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        format!("{MASKED}read-only\nparams\nversion\n")
    );
    // The node's file is unchanged.
    assert_eq!(bundle.read(PARAMS), ALLOWED);
}

#[test]
fn leaves_container_without_kernel_driver_alone() {
    let bundle = Bundle::empty();
    bundle.hook_succeeds(&["params"]);
    assert!(!bundle.root().join("proc").exists());
    bundle.write(PARAMS, MASKED);
    bundle.hook_succeeds(&["params"]);
}
