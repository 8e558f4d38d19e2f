//! Memory limits by the NVIDIA driver: what the hook asks the node driver.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;
use std::thread;

use crate::bundle::{Bundle, stderr};

/// Answers one request and returns it.
fn answering(listener: UnixListener, answer: &'static str) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut request = String::new();
        BufReader::new(&stream).read_line(&mut request).unwrap();
        (&stream).write_all(answer.as_bytes()).unwrap();
        request
    })
}

fn own_cgroup() -> String {
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap();
    let mut lines = cgroups.lines();
    let own = lines.find_map(|line| line.strip_prefix("0::"));
    own.unwrap().to_owned()
}

#[test]
fn asks_for_limit_of_the_cgroup_of_the_process() {
    let bundle = Bundle::empty();
    // Nothing that an image or a pod sets has a part in it.
    bundle.write_config(r#""process": {"env": ["DRAVA_MEMORY=1Ti", "SHARE=b", "CLAIM=b"]}"#);
    let socket = bundle.outside("limits.sock");
    let arguments = ["limit", "--socket", socket.to_str().unwrap()];
    let arguments = [&arguments[..], &["--claim", "a", "--share", "s"]].concat();
    let node_driver = answering(UnixListener::bind(&socket).unwrap(), "ok\n");
    let output = bundle.hook_for(std::process::id(), &arguments);
    assert!(output.status.success(), "{}", stderr(&output));
    let request: serde_json::Value = serde_json::from_str(&node_driver.join().unwrap()).unwrap();
    let expected = serde_json::json!({"claim": "a", "share": "s", "cgroup": own_cgroup()});
    assert_eq!(request, expected);
}

#[test]
fn rejects_container_that_the_node_driver_does_not_limit() {
    let bundle = Bundle::empty();
    let socket = bundle.outside("limits.sock");
    let arguments = ["limit", "--socket", socket.to_str().unwrap()];
    let arguments = [&arguments[..], &["--claim", "a", "--share", "s"]].concat();
    for answer in ["no such claim\n", ""] {
        let _ = fs::remove_file(&socket);
        let node_driver = answering(UnixListener::bind(&socket).unwrap(), answer);
        let output = bundle.hook_for(std::process::id(), &arguments);
        assert!(!output.status.success());
        let line = stderr(&output);
        assert!(
            line.contains("cannot limit the GPU memory") && line.contains(answer.trim_end()),
            "{line}"
        );
        node_driver.join().unwrap();
    }
    let output = bundle.hook_for(0, &arguments);
    assert!(stderr(&output).contains("cgroup of process 0"));
}
