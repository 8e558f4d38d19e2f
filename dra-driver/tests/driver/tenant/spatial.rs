//! Attacks on spatial shares, and the containers that have them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use gpu_tenants::library;
use k8s_openapi::api::resource::v1::ResourceClaimConsumerReference;
use serde_json::{Value, json};
use simulator_machine::description::H100X2;
use simulator_machine::testing::Machine;

use super::{Attack, CGROUPS, Container, Node, fails, has_no_effect, held, in_runtime, json_of};
use crate::api_server::eventually;
use crate::cluster::kubelet_claim;
use crate::driver_limits::{SHARE_BYTES, b200};
use crate::fixture::Allocated::Share;
use crate::fixture::{claim_with, config};

const SPATIAL_TEST: &str = "tenant::spatial::root_of_a_container_redirects_no_spatial_share";

const REMOVAL_TEST: &str = "tenant::spatial::removed_files_hide_no_process";

const OLD_RELEASE_TEST: &str = "tenant::spatial::daemon_of_driver_580_has_the_usual_interface";

const NEW_RELEASE_TEST: &str = "tenant::spatial::daemon_of_driver_615_has_the_usual_interface";

const KILL_TEST: &str =
    "tenant::spatial::client_beyond_its_limit_is_killed_and_its_neighbor_goes_on";

const BESIDE_TEST: &str = "tenant::spatial::container_with_spatial_claim_has_no_other_one";

/// What a process sees of the GPU after an attack on its spatial share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sees {
    /// Its part.
    Part,
    /// All multiprocessors: MPS of this release does not force a process, see the condition `Enforced`.
    All,
}

/// Multiprocessors of a B200, and half of them.
const ALL: u64 = 148;
const HALF: u64 = 74;

/// Attacks on a share of the multiprocessors; `$PIPE` is the pipe directory of the container, `$CONTROL` the control program of
/// MPS, which an image can bring.
const SPATIAL_ATTACKS: [(Attack, Sees); 14] = [
    (has_no_effect("nothing", "true"), Sees::Part),
    (
        has_no_effect(
            "a percentage of its own",
            "export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100",
        ),
        Sees::All,
    ),
    (
        has_no_effect("no percentage", "unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
        Sees::All,
    ),
    (
        has_no_effect("no MPS", "export CUDA_MPS_PIPE_DIRECTORY=/none"),
        Sees::All,
    ),
    (
        has_no_effect(
            "a pipe directory of its own",
            "export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)",
        ),
        Sees::All,
    ),
    (fails("another socket", "rm -f $PIPE/*"), Sees::Part),
    (fails("one more socket", "touch $PIPE/other"), Sees::Part),
    (
        fails("the mode of the directory", "chmod 777 $PIPE"),
        Sees::Part,
    ),
    (
        fails(
            "a remount of the directory",
            "mount -o remount,bind,rw $PIPE",
        ),
        Sees::Part,
    ),
    (
        fails(
            "another directory in its place",
            "mkdir -p /tmp/own && mount --bind /tmp/own $PIPE",
        ),
        Sees::Part,
    ),
    (fails("no directory", "umount $PIPE"), Sees::Part),
    (
        fails("the directories of the daemons", "test -e $RUN"),
        Sees::Part,
    ),
    (
        fails("all memory of the node", "fallocate -l 2G /dev/shm/fill"),
        Sees::Part,
    ),
    (
        // The daemon knows users, not containers. The ceiling of a process is what its variable says.
        has_no_effect(
            "a command",
            "echo set_default_active_thread_percentage 100 | $CONTROL",
        ),
        Sees::Part,
    ),
];

#[test]
fn root_of_a_container_redirects_no_spatial_share() {
    in_runtime(SPATIAL_TEST, async {
        let node = Node::start().await;
        let class = json!({"memory": {"enforcement": "driver"}, "computePolicy": "spatial"});
        let cgroups = ["/kubepods/pod/one", "/kubepods/pod/two"];
        let one = node.prepare(1, "50", &class).await;
        let two = node.prepare(2, "50", &class).await;
        let condition = node.condition("claim-1").await;
        assert_eq!(condition["reason"], "Partly", "{condition}");
        let message = condition["message"].as_str().unwrap();
        assert!(
            message.contains("which its programs can leave"),
            "{message}"
        );
        let mut tenant = node.limited_container(&one, cgroups[0]);
        let mut neighbor = node.limited_container(&two, cgroups[1]);
        let limits = BTreeMap::from(cgroups.map(|cgroup| (cgroup.to_owned(), SHARE_BYTES)));
        let gpu = node.machine.gpu(0).unwrap().uuid;
        let record = node.node.layout().mps_gpu(&gpu).join("daemon.json");
        let daemon = fs::read_to_string(&record).unwrap();
        let both = "$PROBE info --output json && exec $PROBE fill --output json";
        let parts = |output: &str| {
            let mut lines = output.lines().filter(|line| line.starts_with('{'));
            let mut next = || -> Value { serde_json::from_str(lines.next().unwrap()).unwrap() };
            let multiprocessors = next()["devices"][0]["multiprocessors"].as_u64().unwrap();
            (multiprocessors, next()["allocatedBytes"].as_u64().unwrap())
        };
        for (attack, sees) in SPATIAL_ATTACKS {
            let name = attack.name;
            let (seen, bytes) = parts(&tenant.attack(&attack, both));
            let expected = match sees {
                Sees::Part => HALF,
                Sees::All => ALL,
            };
            assert_eq!(seen, expected, "{name}");
            assert!(bytes < SHARE_BYTES, "{name}: {bytes}");
            assert_eq!(held(&node.machine), limits, "{name}");
            let (seen, bytes) = parts(&neighbor.run(both).0);
            assert_eq!(seen, HALF, "{name}: the neighbor");
            assert!(bytes > SHARE_BYTES / 2, "{name}: the neighbor has {bytes}");
            assert_eq!(fs::read_to_string(&record).unwrap(), daemon, "{name}");
        }

        // A tenant can end the daemon of its namespace, and so can the kernel. It is started again, and each claim has an event.
        // Told to quit without a time, or stopped, it takes no program while the neighbor's runs: it is replaced.
        let hold = "$PROBE alloc --mib 1 --hold 600 > /tmp/held & until grep -q ^allocated /tmp/held; do sleep 0.02; done";
        let quits = |text| Some(has_no_effect("an end", text));
        let ends = [
            ("quit -t", quits("echo quit -t 1 | $CONTROL")),
            ("quit", quits("echo quit | $CONTROL > /dev/null 2>&1 &")),
            ("SIGSTOP", None),
            ("SIGKILL", None),
        ];
        for (number, (name, attack)) in ends.iter().enumerate() {
            neighbor.run(hold);
            let before = fs::read_to_string(&record).unwrap();
            let (pid, servers) = daemon_and_servers(&before);
            match attack {
                Some(attack) => drop(tenant.attack(attack, "true")),
                None => {
                    let signal = format!("-{}", name.trim_start_matches("SIG"));
                    run("kill", &[&signal, &pid]);
                }
            }
            eventually("another daemon", || {
                let record = fs::read_to_string(&record).ok()?;
                (record != before).then_some(())
            })
            .await;
            let restarts = format!(
                "drava_mps_faults_total{{part=\"daemon\"}} {}.0\n",
                number + 1
            );
            node.driver.await_metrics(&restarts).await;
            // No server is left beside that of the next daemon.
            for server in servers {
                assert!(has_ended(&server), "{name}");
            }
            let (seen, _) = parts(&neighbor.run(both).0);
            assert_eq!(seen, HALF, "the neighbor after {name}");
            assert_eq!(held(&node.machine), limits, "{name}");
        }
        eventually("the events", || {
            let events = node.api.events();
            let told = events.iter().filter(|(reason, note)| {
                reason == "MpsFault" && note.contains("was started again")
            });
            (told.count() == 2).then_some(())
        })
        .await;
        let faults = "drava_mps_faults_total{part=\"server\"}";
        node.driver.await_metrics(&format!("{faults} 0.0\n")).await;
        tenant.run("$PROBE fault > /dev/null");
        node.driver.await_metrics(&format!("{faults} 1.0\n")).await;
    });
}

fn run(program: &str, args: &[&str]) {
    let status = Command::new(program).args(args).status();
    assert!(status.unwrap().success(), "{program} {args:?}");
}

/// Returns the processes of the daemon with this record, and of its servers.
fn daemon_and_servers(record: &str) -> (String, Vec<String>) {
    let pid: Value = serde_json::from_str(record).unwrap();
    let pid = pid["pid"].to_string();
    let servers = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let servers: Vec<_> = servers.split_whitespace().map(str::to_owned).collect();
    assert!(!servers.is_empty(), "the daemon {pid} has no server");
    (pid, servers)
}

fn has_ended(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| stat.contains(") Z"))
}

#[test]
fn removed_files_hide_no_process() {
    in_runtime(REMOVAL_TEST, async {
        let node = Node::start().await;
        let class = json!({"computePolicy": "spatial"});
        let edits = node.prepare(1, "50", &class).await;
        let mut tenant = node.container(&edits, "/kubepods/pod/one");
        tenant.run("$PROBE alloc --mib 1");
        let gpu = node.machine.gpu(0).unwrap().uuid;
        let files = node.node.layout().mps_gpu(&gpu);
        let record = files.join("daemon.json");
        let (pid, servers) = daemon_and_servers(&fs::read_to_string(&record).unwrap());
        run("umount", &["-l", files.join("shm").to_str().unwrap()]);
        fs::remove_dir_all(&files).unwrap();
        eventually("another daemon", || record.exists().then_some(())).await;
        // Both would keep memory of the GPU.
        for process in [pid].into_iter().chain(servers) {
            assert!(has_ended(&process), "{process}");
        }
    });
}

/// Since driver 615 MPS has another interface, v3, which a variable selects. The node driver uses that of all releases.
async fn check_interface(machine: impl FnOnce() -> Machine, all: u64) {
    let node = Node::start_with(machine, &[("CUDA_MPS_PROTOCOL_VERSION", "3")]).await;
    let class = json!({"computePolicy": "spatial", "memory": {"enforcement": "library"}});
    let edits = node.prepare(1, "50", &class).await;
    let mut tenant = node.container(&edits, "/kubepods/pod/one");
    let seen = json_of(&tenant.run("$PROBE info --output json").0);
    assert_eq!(seen["devices"][0]["multiprocessors"], all / 2);
    let gpu = node.machine.gpu(0).unwrap().uuid;
    let record = node.node.layout().mps_gpu(&gpu).join("daemon.json");
    let (_, servers) = daemon_and_servers(&fs::read_to_string(&record).unwrap());
    let server = &servers[0];
    // The commands that the node driver gives, in an environment that selects the other interface.
    let script = format!(
        "export CUDA_MPS_PROTOCOL_VERSION=3; file=$(mktemp); $PROBE alloc --mib 1 --hold 600 > $file & \
         until grep -q ^allocated $file; do sleep 0.02; done; echo get_server_list | $CONTROL; \
         echo get_server_status {server} | $CONTROL; echo get_client_list {server} | $CONTROL; \
         echo terminate_client {server} $! | $CONTROL; kill -KILL $!"
    );
    let (output, _) = tenant.run(&script);
    let answers: Vec<&str> = output.split_whitespace().collect();
    let [listed, status, client, terminated] = answers[..] else {
        panic!("{output}")
    };
    assert_eq!((listed, status, terminated), (&**server, "ACTIVE", "0"));
    assert!(client.parse::<u32>().is_ok(), "{output}");
}

#[test]
fn daemon_of_driver_580_has_the_usual_interface() {
    in_runtime(OLD_RELEASE_TEST, async {
        check_interface(|| Machine::start(H100X2).unwrap(), 132).await;
    });
}

#[test]
fn daemon_of_driver_615_has_the_usual_interface() {
    in_runtime(NEW_RELEASE_TEST, async {
        check_interface(|| b200(Path::new(CGROUPS), "dmem"), ALL).await;
    });
}

/// The programs of the claim are without libvgpu, as static ones: one has more memory than its share, another a kernel without end. A
/// client that ends in the middle of a kernel makes those of its neighbors fail.
#[test]
fn client_beyond_its_limit_is_killed_and_its_neighbor_goes_on() {
    in_runtime(KILL_TEST, async {
        let node = Node::start().await;
        let class = json!({
            "computePolicy": "spatial", "enforcement": "required", "memory": {"enforcement": "library"},
        });
        let one = node.prepare(1, "50", &class).await;
        let two = node.prepare(2, "50", &class).await;
        let mut tenant = node.container(&one, "/kubepods/pod/one");
        let mut neighbor = node.container(&two, "/kubepods/pod/two");
        let library = library::shipped().unwrap().display().to_string();
        // Of the programs of both containers, in the background.
        let start = |container: &mut Container, name: &str, preload: &str, arguments: &str| {
            let file = node.directory.path().join(name).display().to_string();
            let program = format!("LD_PRELOAD='{preload}' $PROBE {arguments}");
            container.run(&format!("( {program}; echo STATUS $? ) > {file} 2>&1 &"));
            file
        };
        let output = |file: &str| fs::read_to_string(file).unwrap_or_default();
        let train = start(&mut neighbor, "train", &library, "train --mib 64");
        eventually("the neighbor", || {
            output(&train).contains("started").then_some(())
        })
        .await;
        let stuck = "launch --ms 600000 --blocks 8";
        let stuck = start(&mut tenant, "stuck", "", stuck);
        let greedy = "alloc --mib 9000 --hold 600";
        let greedy = start(&mut tenant, "greedy", "", greedy);
        let gpu = node.machine.gpu(0).unwrap().uuid;
        let record = node.node.layout().mps_gpu(&gpu).join("daemon.json");
        let daemon = fs::read_to_string(&record).unwrap();
        let (_, servers) = daemon_and_servers(&daemon);
        let [server] = &servers[..] else {
            panic!("several servers: {servers:?}")
        };
        let mut clients = || {
            let list = format!("echo get_client_list {server} | $CONTROL");
            neighbor.run(&list).0.split_whitespace().count()
        };
        eventually("the end of both programs", || {
            let ended = [&stuck, &greedy].map(|file| output(file).contains("STATUS"));
            (ended == [true; 2]).then_some(())
        })
        .await;
        assert!(output(&greedy).contains("allocated 9000 MiB"));
        for file in [&stuck, &greedy] {
            let output = output(file);
            assert!(output.contains("STATUS 137"), "{output}");
        }
        let log = fs::read_to_string(record.with_file_name("log").join("control.log")).unwrap();
        assert!(log.contains("terminate_client"), "{log}");
        let killed = eventually("the event", || {
            let mut events = node.api.events_with_kind().into_iter();
            events.find(|(reason, _, kind)| kind == "ResourceClaim" && reason == "ProcessKilled")
        })
        .await;
        assert!(killed.1.contains("enforcement: required"), "{killed:?}");

        let kernels = |text: &str| {
            let lines = text.lines().rev();
            let mut events = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
            let checked = events.find(|event| event["event"] == "checked");
            checked.map_or(0, |event| {
                assert_eq!(event["wrongBlocks"], 0, "{event}");
                event["kernels"].as_u64().unwrap()
            })
        };
        let before = kernels(&output(&train));
        eventually("further kernels of the neighbor", || {
            let text = output(&train);
            assert!(!text.contains("STATUS"), "{text}");
            (kernels(&text) > before).then_some(())
        })
        .await;
        assert_eq!(clients(), 1);
        assert_eq!(fs::read_to_string(&record).unwrap(), daemon);
        assert_eq!(daemon_and_servers(&daemon).1, servers);
        let faults = "drava_mps_faults_total{part=\"server\"} 0.0\n";
        node.driver.await_metrics(faults).await;
    });
}

#[test]
fn container_with_spatial_claim_has_no_other_one() {
    in_runtime(BESIDE_TEST, async {
        let node = Node::start().await;
        let class = config("FromClass", &json!({"computePolicy": "spatial"}));
        let put_pod = |containers: Value| {
            let claims = [1, 2].map(|number| {
                json!({"name": format!("gpu-{number}"), "resourceClaimName": format!("claim-{number}")})
            });
            node.api.put_pod(&json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": "pod", "namespace": "default", "uid": "pod-uid"},
                "spec": {"resourceClaims": claims, "containers": containers},
            }));
        };
        let container = |name: &str, claims: &[u32]| {
            let claims: Vec<Value> = claims
                .iter()
                .map(|number| json!({"name": format!("gpu-{number}")}))
                .collect();
            json!({"name": name, "resources": {"claims": claims}})
        };
        for number in [1, 2] {
            let mut found = claim_with(number, &[Share(0, "8Gi", "30")], &class);
            found.status.as_mut().unwrap().reserved_for =
                Some(vec![ResourceClaimConsumerReference {
                    resource: "pods".to_owned(),
                    name: "pod".to_owned(),
                    uid: "pod-uid".to_owned(),
                    ..Default::default()
                }]);
            node.api.put_claim(&found);
        }
        put_pod(json!([container("one", &[1, 2])]));
        node.plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
        // kubelet tries again. The conditions say no success, also not between two tries.
        let mut refusals = BTreeMap::new();
        for _ in 0..3 {
            for number in [2, 1] {
                let refused = node.plugin.prepare_one(&kubelet_claim(number)).await;
                let error = format!("{:?}", refused.unwrap_err());
                for part in [
                    "of pod default/pod has the claim",
                    "give it one of the claims",
                ] {
                    assert!(error.contains(part), "{part} is missing in: {error}");
                }
            }
            for claim in ["claim-1", "claim-2"] {
                let refused = eventually("a refused claim", || {
                    let prepared = node.api.condition(claim, "Prepared")?;
                    (prepared["reason"] == "IncompatibleClaims").then_some(prepared)
                })
                .await;
                assert_eq!(node.api.condition(claim, "Enforced"), None);
                refusals.insert(claim, refused);
            }
        }
        let statuses = || {
            let writes = node.api.writes().into_iter();
            let of_claims = writes.filter(|write| {
                ["claim-1/", "claim-2/"]
                    .iter()
                    .any(|claim| write.contains(claim))
            });
            of_claims.count()
        };
        // The first refusal of each, and what was written before it: a report of each later one would come before that of another claim.
        let before = statuses();
        for number in [2, 1] {
            let refused = node.plugin.prepare_one(&kubelet_claim(number)).await;
            refused.unwrap_err();
        }
        node.prepare(3, "0", &json!({"computePolicy": "spatial"}))
            .await;
        node.condition("claim-3").await;
        assert_eq!(statuses(), before);
        for (claim, refused) in refusals {
            assert_eq!(node.api.condition(claim, "Prepared"), Some(refused));
        }
        // One claim for each container.
        put_pod(json!([container("one", &[1]), container("two", &[2])]));
        for number in [2, 1] {
            let prepared = node.plugin.prepare_one(&kubelet_claim(number)).await;
            prepared.unwrap();
        }
        for claim in ["claim-1", "claim-2"] {
            eventually("a prepared claim", || {
                let prepared = node.api.condition(claim, "Prepared")?;
                (prepared["status"] == "True").then_some(prepared)
            })
            .await;
            let enforced = node.api.condition(claim, "Enforced");
            assert_eq!(enforced.unwrap()["reason"], "Partly");
        }
    });
}
