//! Output to a closed pipe.

use std::process::{Command, Stdio};

#[test]
fn ends_quietly_on_closed_pipe() {
    for arguments in [["version", "-ojson"].as_slice(), &["--help"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = Command::new(env!("CARGO_BIN_EXE_kubectl-drava"))
            .args(arguments)
            .stdout(writer)
            .stderr(Stdio::piped())
            .output()
            .expect("kubectl-drava starts");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
    }
}
