//! A tenant that is root in its container, against the memory limit by the NVIDIA driver and against MPS: the node driver and the
//! CDI hook as processes, on the simulated machine. A directory stands for cgroup v2.
//!
//! Its programs run without libvgpu, as a static program does, so that only the limit by the driver is left. The container has
//! the mounts of the CDI spec, cgroups that are read-only, the capabilities of containerd's default, and nothing of the node.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};

use drava_fake_kubelet::{FakeKubelet, Plugin};
use serde_json::{Value, json};
use simulator_machine::root::MPS_CONTROL;
use simulator_machine::testing::Machine;
use tempfile::TempDir;

use crate::api_server::{ApiServer, eventually};
use crate::cluster::kubelet_claim;
use crate::driver_limits::{CONTAINER, SHARE_BYTES, b200};
use crate::driver_process::DriverProcess;
use crate::fixture::Allocated::Share;
use crate::fixture::{NODE, claim_with, config};
use crate::namespace::in_mount_namespace;
use crate::node::{TestNode, lacks_device_files, spec_of};

mod spatial;

const MEMORY_TEST: &str = "tenant::root_of_a_container_cannot_change_its_memory_limit";

const CGROUPS: &str = "/sys/fs/cgroup";

/// Pipe directory of MPS in a container.
const PIPE: &str = "/tmp/nvidia-mps";

/// Bit of `CAP_SYS_ADMIN`.
const SYS_ADMIN: u32 = 21;

/// Capabilities of containerd's default.
const CAPABILITIES: &str = "-all,+chown,+dac_override,+fsetid,+fowner,+mknod,+net_raw,+setgid,+setuid,+setfcap,+setpcap,\
                            +net_bind_service,+sys_chroot,+kill,+audit_write";

/// A program that asks NVML to remove the limit of the cgroup that is its argument.
const RAISE: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
struct limits { char *name_space; unsigned long long soft, hard; };
int main(int argc, char **argv) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *device;
    int (*init)(void) = dlsym(nvml, "nvmlInit_v2");
    int (*handle)(unsigned, void **) = dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*set)(void *, struct limits *) = dlsym(nvml, "nvmlDeviceSetMemoryLimits_v1");
    struct limits none = {argv[argc - 1], 0, ~0ULL};
    if (init() || handle(0, &device)) return 100;
    int code = set(device, &none);
    printf("NVML: %d\n", code);
    return code;
}
"#;

/// What a tenant tries.
struct Attack {
    name: &'static str,
    /// A script. `$CGROUP` is the directory of its cgroup, `$SHARE` that of its share, `$STATE` and `$RUN` directories of the node
    /// driver, `$PROBE` and `$RAISE` programs.
    script: &'static str,
    /// Whether the script fails; what succeeds has no effect.
    fails: bool,
}

const fn fails(name: &'static str, script: &'static str) -> Attack {
    Attack {
        name,
        script,
        fails: true,
    }
}

const fn has_no_effect(name: &'static str, script: &'static str) -> Attack {
    Attack {
        name,
        script,
        fails: false,
    }
}

const ATTACKS: [Attack; 20] = [
    has_no_effect("no libvgpu", "unset LD_PRELOAD"),
    has_no_effect(
        "variables that set limits elsewhere",
        "export DRAVA_MEMORY_LIMIT=1Ti CUDA_DEVICE_MEMORY_LIMIT=1024g CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1024G",
    ),
    has_no_effect(
        "variables that select GPUs",
        "export NVIDIA_VISIBLE_DEVICES=all CUDA_VISIBLE_DEVICES=0",
    ),
    fails(
        "several processes at once",
        "file=$(mktemp); $PROBE alloc --mib 5000 --hold 60 > $file & first=$!; \
         until grep -q ^allocated $file; do kill -0 $first || exit 0; sleep 0.02; done; \
         $PROBE alloc --mib 5000; status=$?; kill $first; exit $status",
    ),
    fails("a cgroup below its own", "mkdir $CGROUP/below"),
    fails(
        "the root of the cgroups",
        "echo 0 > /sys/fs/cgroup/cgroup.procs",
    ),
    fails("the cgroup of the pod", "echo 0 > $CGROUP/../cgroup.procs"),
    fails("the limit of the kernel", "echo max > $CGROUP/dmem.max"),
    fails(
        "the controller",
        "echo -dmem > $CGROUP/../cgroup.subtree_control",
    ),
    fails(
        "a remount of the cgroups",
        "mount -o remount,bind,rw /sys/fs/cgroup",
    ),
    fails(
        "other cgroups in their place",
        "mount -t tmpfs none /sys/fs/cgroup",
    ),
    fails(
        "a user namespace in which the cgroups are mounted again",
        "unshare --user --map-root-user --mount mount -o remount,bind,rw /sys/fs/cgroup",
    ),
    fails("NVML", "$RAISE $CGROUP"),
    fails(
        "NVML with all capabilities of a user namespace",
        "unshare --user --map-root-user $RAISE $CGROUP",
    ),
    fails("the socket of the node driver", "test -e $RUN"),
    fails("the hook and the record of the claim", "test -e $STATE"),
    fails("the limits page", "echo 1 > $SHARE/limits/page"),
    fails(
        "a remount of the limits page",
        "mount -o remount,bind,rw $SHARE/limits",
    ),
    fails(
        "another page in its place",
        "mkdir -p /tmp/own && mount --bind /tmp/own $SHARE/limits",
    ),
    has_no_effect(
        "a forged usage region",
        "head -c 65536 /dev/zero > $SHARE/usage/region",
    ),
];

/// Returns the CDI hook, built for the test.
fn hook() -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
        .args([
            "build",
            "--quiet",
            "--message-format=json",
            "-p",
            "drava-cdi-hook",
        ])
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success());
    let output = String::from_utf8(output.stdout).unwrap();
    let messages = output
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut programs = messages.filter_map(|message| Some(message["executable"].as_str()?.into()));
    programs.next().unwrap()
}

/// The container of a claim: a shell that is root in it.
struct Container {
    process: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Container {
    /// Starts it with the variables and mounts of a CDI spec, in a cgroup.
    fn start(
        node: &TestNode,
        machine: &Machine,
        edits: &Value,
        programs: &Path,
        cgroup: &str,
    ) -> Self {
        let mut setup = String::from("set -eu\nmount -t tmpfs none /run\n");
        let inside = |to: &str| {
            ["/run/", PIPE, "/dev/shm"]
                .iter()
                .any(|of| to.starts_with(of))
        };
        for mount in edits["mounts"].as_array().unwrap() {
            let [from, to] = ["hostPath", "containerPath"].map(|end| mount[end].as_str().unwrap());
            if inside(to) {
                setup += &format!("mkdir -p {to}; mount --bind {from} {to}\n");
            }
            let mut options = mount["options"].as_array().unwrap().iter();
            if inside(to) && options.any(|option| option == "ro") {
                setup += &format!("mount -o remount,bind,ro {to}\n");
            }
        }
        // Nothing of the node.
        let root = node.root.path().display();
        setup += &format!("mount -t tmpfs none {root}\nmount -o remount,bind,ro {CGROUPS}\n");
        setup += &format!("exec setpriv --bounding-set={CAPABILITIES} --inh-caps=-all sh\n");
        let probe = machine.program("cuda-probe").unwrap();
        let control = machine.root().join("usr/bin").join(MPS_CONTROL);
        let share = edits["mounts"][1]["containerPath"].as_str().unwrap();
        let variables = edits["env"].as_array().into_iter().flatten();
        let variables = variables.filter_map(|one| one.as_str()?.split_once('='));
        let directory = format!("{CGROUPS}{cgroup}");
        fs::create_dir_all(&directory).unwrap();
        let mut process = machine
            .command("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", &setup])
            .envs(variables)
            .env("CGROUP", &directory)
            .env("SHARE", Path::new(share).parent().unwrap())
            .env("STATE", &node.paths.state_dir)
            .env("RUN", &node.paths.run_dir)
            .env("PIPE", PIPE)
            .env("PROBE", probe.get_program())
            .env("CONTROL", control)
            .env("RAISE", programs.join("raise"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = process.stdin.take().unwrap();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        let procs = Path::new(&directory).join("cgroup.procs");
        fs::write(procs, process.id().to_string()).unwrap();
        let mut container = Self {
            process,
            stdin,
            stdout,
        };
        let (capabilities, _) = container.run("grep CapEff /proc/self/status");
        let mask = capabilities.split_whitespace().nth(1).unwrap();
        let mask = u64::from_str_radix(mask, 16).unwrap();
        assert_eq!(mask >> SYS_ADMIN & 1, 0, "{capabilities}");
        container
    }

    /// Makes an attack, and returns the output of a script after it. What has an effect on the own process only is followed by the
    /// script in that process.
    fn attack(&mut self, attack: &Attack, script: &str) -> String {
        let attempt = match attack.fails {
            true => format!("( {}\n)", attack.script),
            false => attack.script.to_owned(),
        };
        let (output, _) = self.run(&format!("{attempt}\necho \"STATUS $?\"\n{script}"));
        let mut statuses = output
            .lines()
            .filter_map(|line| line.strip_prefix("STATUS "));
        let status = statuses.next();
        let name = attack.name;
        assert_eq!(
            status.map(|one| one != "0"),
            Some(attack.fails),
            "{name}: {output}"
        );
        output
    }

    /// Runs a script in a subshell. Returns its output and its status.
    fn run(&mut self, script: &str) -> (String, i32) {
        writeln!(self.stdin, "( {script}\n) 2>&1; echo; echo END $?").unwrap();
        let mut output = String::new();
        loop {
            let mut line = String::new();
            assert_ne!(
                self.stdout.read_line(&mut line).unwrap(),
                0,
                "{script}: {output}"
            );
            if let Some(status) = line.strip_prefix("END ") {
                return (output, status.trim().parse().unwrap());
            }
            output += &line;
        }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs the hook of a CDI spec for a process, as a runtime does.
fn run_hook(hook: &Value, pid: u32, bundle: &Path) -> Output {
    let strings = |value: &Value| -> Vec<String> {
        let all = value.as_array().into_iter().flatten();
        all.map(|one| one.as_str().unwrap().to_owned()).collect()
    };
    let arguments = strings(&hook["args"]);
    let mut process = Command::new(hook["path"].as_str().unwrap())
        .args(&arguments[1..])
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let state = json!({"ociVersion": "1.2.0", "id": "c", "status": "creating", "pid": pid, "bundle": bundle});
    let mut stdin = process.stdin.take().unwrap();
    stdin.write_all(state.to_string().as_bytes()).unwrap();
    drop(stdin);
    process.wait_with_output().unwrap()
}

/// Shows a process in a cgroup of version 2; this machine may have version 1 only.
fn show_cgroup(pid: u32, text: &str, directory: &Path) {
    let file = directory.join(format!("cgroup-of-{pid}"));
    fs::write(&file, text).unwrap();
    mount(&[
        "--bind",
        file.to_str().unwrap(),
        &format!("/proc/{pid}/cgroup"),
    ]);
}

/// Mounts in the mount namespace of the test.
fn mount(arguments: &[&str]) {
    let status = Command::new("mount").args(arguments).status();
    assert!(status.unwrap().success(), "{arguments:?}");
}

fn held(machine: &Machine) -> BTreeMap<String, u64> {
    let limits = machine.gpu(0).unwrap().memory_limits.into_iter();
    limits
        .map(|limit| (limit.cgroup, limit.limits.hard_bytes))
        .collect()
}

/// A node with a node driver, on which claims are prepared.
struct Node {
    // Ends first: it starts daemons again.
    driver: DriverProcess,
    _daemons: MpsDaemons,
    directory: TempDir,
    machine: Machine,
    node: TestNode,
    api: ApiServer,
    plugin: Plugin,
    _kubelet: FakeKubelet,
}

/// The daemons of MPS whose records are in a directory. They outlive the node driver.
struct MpsDaemons(PathBuf);

impl Drop for MpsDaemons {
    fn drop(&mut self) {
        for gpu in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let record = fs::read(gpu.path().join("daemon.json")).unwrap_or_default();
            let record: Value = serde_json::from_slice(&record).unwrap_or_default();
            let Some(pid) = record["pid"].as_u64() else {
                continue;
            };
            let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
            let children = children.unwrap_or_default();
            let pids = children.split_whitespace().map(str::to_owned);
            for pid in pids.chain([pid.to_string()]) {
                let _ = Command::new("kill").args(["-KILL", &pid]).status();
            }
        }
    }
}

impl Node {
    /// Starts a node driver on a machine with one B200 and driver 615.
    async fn start() -> Self {
        Self::start_with(|| b200(Path::new(CGROUPS), "dmem"), &[]).await
    }

    /// Starts a node driver with these variables. A directory takes the place of the cgroups of this mount namespace.
    async fn start_with(machine: impl FnOnce() -> Machine, variables: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let cgroups = directory.path().join("cgroups");
        fs::create_dir_all(cgroups.join("kubepods/pod")).unwrap();
        fs::write(cgroups.join("cgroup.controllers"), "cpu dmem").unwrap();
        for ancestor in ["", "kubepods", "kubepods/pod"] {
            fs::write(cgroups.join(ancestor).join("cgroup.subtree_control"), "").unwrap();
            fs::write(cgroups.join(ancestor).join("cgroup.procs"), "").unwrap();
        }
        mount(&["--bind", cgroups.to_str().unwrap(), CGROUPS]);
        fs::write(directory.path().join("raise.c"), RAISE).unwrap();
        let compiled = Command::new("cc")
            .args(["raise.c", "-o", "raise", "-ldl"])
            .current_dir(directory.path())
            .status();
        assert!(compiled.unwrap().success());
        let bundle = directory.path().join("bundle");
        fs::create_dir_all(bundle.join("rootfs")).unwrap();
        // What an image or a pod sets has no part in the limit.
        let image = json!(["DRAVA_MEMORY_LIMIT=1Ti", "SHARE=b", "CLAIM=b"]);
        let content = json!({"root": {"path": "rootfs"}, "process": {"env": image}});
        fs::write(bundle.join("config.json"), content.to_string()).unwrap();

        let machine = machine();
        let mut node = TestNode::new();
        node.paths.driver_root_mount = machine.root().to_owned();
        fs::copy(hook(), node.paths.artifacts_dir.join("drava-cdi-hook")).unwrap();
        let kubelet = FakeKubelet::start(&node.paths.kubelet_dir).unwrap();
        let api = ApiServer::start(NODE).await;
        let driver = DriverProcess::start(&node, &api, variables);
        let plugin = kubelet.register("gpu.drava.dev").await.unwrap();
        driver.await_ready().await;
        Self {
            driver,
            _daemons: MpsDaemons(node.layout().mps()),
            directory,
            machine,
            node,
            api,
            plugin,
            _kubelet: kubelet,
        }
    }

    /// Prepares a claim of 8 GiB, and returns the edits of its CDI spec.
    async fn prepare(&self, number: u32, cores: &'static str, class: &Value) -> Value {
        let class = config("FromClass", class);
        let found = claim_with(number, &[Share(0, "8Gi", cores)], &class);
        self.api.put_claim(&found);
        let prepared = self.plugin.prepare_one(&kubelet_claim(number)).await;
        prepared.unwrap();
        let spec = fs::read(spec_of(&self.node, number)).unwrap();
        let spec: Value = serde_json::from_slice(&spec).unwrap();
        spec["devices"][0]["containerEdits"].clone()
    }

    async fn condition(&self, claim: &str) -> Value {
        let condition = || self.api.condition(claim, "Enforced");
        eventually("the condition", condition).await
    }

    fn run_hook(&self, edits: &Value, pid: u32) -> Output {
        let mut hooks = edits["hooks"].as_array().unwrap().iter();
        let hook = hooks.find(|hook| hook["hookName"] == "createRuntime");
        run_hook(hook.unwrap(), pid, &self.directory.path().join("bundle"))
    }

    fn container(&self, edits: &Value, cgroup: &str) -> Container {
        Container::start(
            &self.node,
            &self.machine,
            edits,
            self.directory.path(),
            cgroup,
        )
    }

    /// Starts a container with the limit of its share.
    fn limited_container(&self, edits: &Value, cgroup: &str) -> Container {
        let container = self.container(edits, cgroup);
        let pid = container.process.id();
        show_cgroup(pid, &format!("0::{cgroup}\n"), self.directory.path());
        let output = self.run_hook(edits, pid);
        assert!(output.status.success(), "{output:?}");
        container
    }
}

fn in_runtime(test: &'static str, check: impl Future<Output = ()>) {
    if lacks_device_files() {
        return;
    }
    in_mount_namespace(test, || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(check);
    });
}

/// The JSON in the output of a program.
fn json_of(output: &str) -> Value {
    let json = output.lines().find(|line| line.starts_with('{'));
    let parsed = json.map(|line| serde_json::from_str(line).unwrap());
    parsed.unwrap_or_else(|| panic!("{output}"))
}

#[test]
fn root_of_a_container_cannot_change_its_memory_limit() {
    in_runtime(MEMORY_TEST, async {
        let node = Node::start().await;
        let required = json!({"memory": {"enforcement": "driver"}});
        let edits = node.prepare(1, "0", &required).await;
        // Attribute, condition and CDI spec agree.
        let attributes = node.api.slices().into_values().find_map(|slice| {
            let devices = slice["spec"]["devices"].as_array()?.iter();
            let mut shares = devices.filter(|device| device["name"] == "gpu-0-vgpu");
            Some(shares.next()?["attributes"].clone())
        });
        let attributes = attributes.unwrap();
        assert_eq!(attributes["memoryEnforcement"]["string"], "driver");
        assert_eq!(attributes["memoryEnforcementObstacle"]["string"], "none");
        let condition = node.condition("claim-1").await;
        assert_eq!(condition["reason"], "LimitedByDriver", "{condition}");

        let mut tenant = node.container(&edits, CONTAINER);
        let pid = tenant.process.id();
        // A node with version 1 only: the container does not start, and says why.
        show_cgroup(pid, "1:memory:/a\n", node.directory.path());
        let line = rejection(&node.run_hook(&edits, pid));
        assert!(line.contains("has no cgroup of version 2"), "{line}");
        show_cgroup(pid, &format!("0::{CONTAINER}\n"), node.directory.path());
        let output = node.run_hook(&edits, pid);
        assert!(output.status.success(), "{output:?}");
        let limit = BTreeMap::from([(CONTAINER.to_owned(), SHARE_BYTES)]);
        assert_eq!(held(&node.machine), limit);

        for attack in ATTACKS {
            let name = attack.name;
            let output = tenant.attack(&attack, "exec $PROBE fill --output json");
            let bytes = json_of(&output)["allocatedBytes"].as_u64().unwrap();
            // Its context takes some of it.
            let expected = SHARE_BYTES / 2..SHARE_BYTES;
            assert!(expected.contains(&bytes), "{name}: {bytes}");
            assert_eq!(held(&node.machine), limit, "{name}");
        }

        // Its end removes the limit, although the cgroup stays; another start is refused.
        let unprepared = node.plugin.unprepare_one(&kubelet_claim(1)).await;
        unprepared.unwrap();
        assert_eq!(held(&node.machine), BTreeMap::new());
        let line = rejection(&node.run_hook(&edits, pid));
        assert!(line.contains("has no share"), "{line}");
        assert_eq!(held(&node.machine), BTreeMap::new());
    });
}

fn rejection(output: &Output) -> String {
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}
