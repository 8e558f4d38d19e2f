//! What kubelet and the API server see of a running driver.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use drava_dra_driver::conditions::Condition;
use drava_dra_driver::driver::Config;
use drava_dra_driver::injection;
use drava_dra_driver::inventory::Source;
use drava_dra_driver::report::PodRef;
use drava_fake_kubelet::HealthStatus;
use futures::StreamExt as _;
use serde_json::{Value, json};

use crate::api_server::{CLAIMS, SLICES, eventually};
use crate::fixture::Result::{Share, Whole};
use crate::fixture::{CARDS, POOL, claim, claim_ref, claim_with, config, share_id};
use crate::harness::{World, free_address, get, inode, kubelet_claim};

/// Needs several threads: the driver and its test block each other otherwise.
macro_rules! scenario {
    ($(#[$attribute:meta])* async fn $name:ident() $body:block) => {
        $(#[$attribute])*
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() $body
    };
}

scenario! {
    async fn a_claim_is_prepared_the_same_way_each_time_and_unprepared_without_a_trace() {
        let world = World::new().await;
        let (running, plugin) = world.ready().await;
        assert_eq!(
            plugin.info.supported_versions,
            ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"]
        );
        world.api.put_claim(&claim(1, &[Share(0, "8Gi", "30"), Whole(1)]));
        let devices = plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
        let uid = claim_ref(1).uid;
        let [share, whole] = devices.as_slice() else { panic!("{devices:?}") };
        assert_eq!((share.request_names.as_slice(), share.pool_name.as_str()), (["gpu".to_owned()].as_slice(), POOL));
        assert_eq!(share.share_id, Some(share_id(1, 0)));
        assert_eq!(share.cdi_device_ids, [format!("gpu.drava.dev/claim={uid}-gpu-gpu-0-vgpu-{}", share_id(1, 0))]);
        assert_eq!((whole.device_name.as_str(), &whole.share_id), ("gpu-1", &None));
        assert_eq!(whole.cdi_device_ids, [format!("gpu.drava.dev/claim={uid}-gpu1-gpu-1")]);
        let spec = fs::read(world.spec(1)).unwrap();
        assert_eq!(plugin.prepare_one(&kubelet_claim(1)).await.unwrap(), devices);
        assert_eq!(fs::read(world.spec(1)).unwrap(), spec);

        for _ in 0..2 {
            plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
        }
        assert_eq!(world.node.traces(), (Vec::new(), Default::default()));
        assert!(fs::read_dir(world.node.layout().locks()).unwrap().all(|lock| {
            !lock.unwrap().file_name().to_string_lossy().starts_with("claim-")
        }));

        running.stop().await;
        assert_eq!(world.kubelet.registry().unwrap(), Vec::<PathBuf>::new(), "own sockets are removed on a clean stop");
    }
}

scenario! {
    async fn old_kubelets_are_served_in_v1beta1() {
        let world = World::new().await;
        let (_running, plugin) = world.ready().await;
        world.api.put_claim(&claim(1, &[Share(0, "8Gi", "30")]));
        let plugin = plugin.in_v1beta1();
        assert_eq!(plugin.prepare_one(&kubelet_claim(1)).await.unwrap().len(), 1);
        plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    }
}

scenario! {
    async fn errors_are_per_claim_and_name_claim_field_and_remedy() {
        let world = World::new().await;
        let (_running, plugin) = world.ready().await;
        world.api.put_claim(&claim(1, &[Share(0, "8Gi", "30")]));
        world.api.put_claim(&claim_with(2, &[Share(0, "8Gi", "0")], &config("FromClaim", &json!({"colour": "red"}))));
        world.api.put_claim(&claim(3, &[Share(0, "8Gi", "101")]));
        world.api.put_claim(&claim(4, &[Share(5, "8Gi", "0")]));
        let claims = [1, 2, 3, 4, 5].map(kubelet_claim);
        let outcomes = plugin.prepare(&claims).await.unwrap();
        assert!(outcomes[&claims[0].uid].is_ok());
        for (number, text) in [
            (2, "request gpu: config field colour: unknown field `colour`"),
            (3, "consumedCapacity.cores of device gpu-0-vgpu is 101, it must be a whole number from 0 to 100"),
            (4, "device gpu-5-vgpu is not on this node any more"),
            (5, "it does not exist in the API server any more"),
        ] {
            let error = outcomes[&kubelet_claim(number).uid].as_ref().unwrap_err();
            assert!(error.contains(text) && error.contains(&format!("default/claim-{number}")), "{error}");
        }
        let mut hostile = kubelet_claim(6);
        hostile.uid = "../../etc/passwd".to_owned();
        assert!(plugin.prepare_one(&hostile).await.unwrap_err().to_string().contains("is no claim UID"));
        assert!(plugin.unprepare_one(&hostile).await.is_err());

        world.api.set_down(true);
        let error = plugin.prepare_one(&kubelet_claim(7)).await.unwrap_err().to_string();
        assert!(error.contains("get it from the API server"), "{error}");
        // Unprepare needs no API server.
        plugin.unprepare_one(&claims[0]).await.unwrap();
    }
}

scenario! {
    async fn two_claims_at_once_do_not_over_commit_a_card() {
        let world = World::new().await;
        let (_running, plugin) = world.ready().await;
        let claims = [1, 2].map(kubelet_claim);
        for number in [1, 2] {
            world.api.put_claim(&claim(number, &[Share(0, "50Gi", "0")]));
        }
        let (first, second) = tokio::join!(plugin.prepare_one(&claims[0]), plugin.prepare_one(&claims[1]));
        let refused: Vec<_> = [first, second].into_iter().filter_map(Result::err).collect();
        assert_eq!(refused.len(), 1);
        let error = refused[0].to_string();
        assert!(error.contains("51200 MiB of memory is allocated to this claim, but 51200 MiB of 80480 MiB"), "{error}");
    }
}

scenario! {
    async fn a_claim_waits_for_the_card_of_one_that_is_leaving() {
        let world = World::new().await;
        let patient = Config { leaving_patience: Duration::from_secs(3600), ..world.config() };
        let running = world.start_with(patient, world.source());
        let plugin = world.kubelet.register("gpu.drava.dev").await.unwrap();
        running.is_ready().await;
        for number in [1, 2] {
            world.api.put_claim(&claim(number, &[Whole(0)]));
        }
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
        // The first is there to stay: no waiting.
        let error = plugin.prepare_one(&kubelet_claim(2)).await.unwrap_err().to_string();
        assert!(error.contains("holds it as a whole card"), "{error}");

        // Its pod is deleted by force: the API server forgets the claim before kubelet has ended the containers.
        world.api.delete_claim(&claim(1, &[]));
        let claims = [1, 2].map(kubelet_claim);
        let looked_up = || world.api.lookups("claim-2");
        let before = looked_up();
        let (waiting, left) = tokio::join!(plugin.prepare_one(&claims[1]), async {
            // It is looked up at each attempt. The second attempt comes only after a refusal that was not passed on.
            eventually("a second attempt", || (looked_up() >= before + 2).then_some(())).await;
            plugin.unprepare_one(&claims[0]).await
        });
        left.unwrap();
        waiting.unwrap();
    }
}

scenario! {
    async fn status_devices_say_what_was_prepared_and_are_written_once() {
        let world = World::new().await;
        let (_running, plugin) = world.ready().await;
        world.api.put_claim(&claim(1, &[Share(0, "8Gi", "30")]));
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
        let devices = eventually("status.devices", || {
            let claim = world.api.claim("claim-1");
            claim["status"]["devices"].as_array().cloned()
        });
        let device = devices.await.remove(0);
        assert_eq!(device["data"]["uuid"], CARDS[0]);
        assert_eq!(device["data"]["memoryBytes"], json!(8u64 << 30));
        assert_eq!(device["shareID"], json!(share_id(1, 0)));
        let condition = |kind: &str| {
            let conditions = device["conditions"].as_array().unwrap();
            conditions.iter().find(|condition| condition["type"] == kind).cloned().unwrap()
        };
        assert_eq!(condition("Prepared")["status"], "True");
        assert_eq!(condition("Enforced")["status"], "True");
        assert!(condition("Enforced")["message"].as_str().unwrap().contains("8192 MiB"));
        let status_writes = || world.api.writes().iter().filter(|write| write.contains("/status")).count();
        assert_eq!(status_writes(), 1);
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
        world.api.put_claim(&claim(2, &[Share(0, "8Gi", "30")]));
        plugin.prepare_one(&kubelet_claim(2)).await.unwrap();
        eventually("the second claim's status", || (status_writes() == 2).then_some(())).await;
    }
}

scenario! {
    async fn slices_that_kubelet_wipes_or_somebody_edits_are_published_again() {
        let world = World::new().await;
        let (_running, _plugin) = world.ready().await;
        let published = world.api.slices();
        assert_eq!(published.len(), 2);
        world.api.wipe_slices();
        eventually("republication", || (world.api.slices().len() == 2).then_some(())).await;

        let name = published.keys().find(|name| name.contains("devices")).unwrap();
        let taints = |slice: &Value| slice["spec"]["devices"][0]["taints"].clone();
        let before = taints(&published[name]);
        world.api.edit_slice(name, |slice| slice["spec"]["devices"][0]["taints"] = Value::Null);
        eventually("repair", || (taints(&world.api.slices()[name]) == before).then_some(())).await;
        world.api.edit_slice(name, |slice| slice["metadata"]["ownerReferences"] = Value::Null);
        eventually("owner", || world.api.slices()[name]["metadata"]["ownerReferences"].as_array().map(drop)).await;
    }
}

scenario! {
    async fn a_restarted_driver_writes_no_slice_that_is_right() {
        let world = World::new().await;
        let (running, _plugin) = world.ready().await;
        running.stop().await;
        let writes = world.api.writes().len();
        let (_running, _plugin) = world.ready().await;
        assert_eq!(world.api.writes().len(), writes);
    }
}

scenario! {
    async fn a_server_that_drops_counters_gets_whole_cards_and_an_event_with_the_gate() {
        let world = World::new().await;
        world.api.drop_fields(&["sharedCounters", "consumesCounters"]);
        let (_running, _plugin) = world.ready().await;
        let slices = world.api.slices();
        let names: Vec<Value> =
            slices.values().flat_map(|slice| slice["spec"]["devices"].as_array().unwrap().clone()).map(|d| d["name"].clone()).collect();
        assert_eq!(names, ["gpu-0", "gpu-1"]);
        let event = eventually("event", || world.api.events().into_iter().find(|(reason, _)| reason == "FieldsDropped"));
        assert!(event.await.1.contains("DRAPartitionableDevices"));
        // No fight: it stays as it is.
        let writes = world.api.writes().len();
        // The slices are looked at after each change; a write that the first look found necessary precedes the second.
        // One more, because the list with which a watch begins is taken for a look.
        for _ in 0..3 {
            let looks = world.api.lists(SLICES);
            world.api.edit_slice(slices.keys().next().unwrap(), |_| {});
            eventually("a look at the slices", || (world.api.lists(SLICES) > looks).then_some(())).await;
        }
        assert_eq!(world.api.writes().len(), writes);
    }
}

scenario! {
    async fn a_card_that_vanishes_is_tainted_refused_and_unhealthy_and_comes_back() {
        let world = World::new().await;
        let (_running, plugin) = world.ready().await;
        let mut stream = plugin.watch_health().await.unwrap();
        let health = |message: &drava_dra_driver::proto::health_v1::NodeWatchResourcesResponse, name: &str| {
            let device = message.devices.iter().find(|device| device.device.as_ref().unwrap().device_name == name);
            device.unwrap().health()
        };
        let first = stream.next().await.unwrap().unwrap();
        assert_eq!(first.devices.len(), 4);
        assert_eq!(health(&first, "gpu-1-vgpu"), HealthStatus::Healthy);

        let mut taken = None;
        world.gpus.change(|inventory| taken = Some(inventory.cards.remove(1)));
        let unhealthy = |slices: &std::collections::BTreeMap<String, Value>| {
            slices.values().any(|slice| slice.to_string().contains("gpu.drava.dev/unhealthy"))
        };
        eventually("taint", || unhealthy(&world.api.slices()).then_some(())).await;
        let next = stream.next().await.unwrap().unwrap();
        assert_eq!(health(&next, "gpu-1-vgpu"), HealthStatus::Unhealthy);
        assert_eq!(health(&next, "gpu-0-vgpu"), HealthStatus::Healthy);
        world.api.put_claim(&claim(1, &[Share(1, "8Gi", "0")]));
        let error = plugin.prepare_one(&kubelet_claim(1)).await.unwrap_err().to_string();
        assert!(error.contains("device gpu-1-vgpu is not on this node any more (present: gpu-0, gpu-0-vgpu)"), "{error}");

        world.gpus.change(|inventory| inventory.cards.extend(taken));
        eventually("recovery", || (!unhealthy(&world.api.slices())).then_some(())).await;
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    }
}

scenario! {
    async fn a_lost_card_outlives_the_driver_while_a_claim_holds_it_and_is_withdrawn_then() {
        let world = World::new().await;
        let (running, _plugin) = world.ready().await;
        world.api.put_claim(&claim(1, &[Share(1, "8Gi", "0")]));
        running.stop().await;
        world.gpus.change(|inventory| drop(inventory.cards.remove(1)));

        let impatient = Config { gone_grace: Duration::ZERO, ..world.config() };
        let running = world.start_with(impatient, world.source());
        world.kubelet.register("gpu.drava.dev").await.unwrap();
        running.is_ready().await;
        let tainted = || {
            let slices = world.api.slices();
            let devices = slices.values().flat_map(|slice| slice["spec"]["devices"].as_array().cloned().unwrap_or_default());
            let is_unhealthy = |device: &Value| device["taints"].to_string().contains("gpu.drava.dev/unhealthy");
            devices.filter(is_unhealthy).map(|device| device["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        // It could have been withdrawn each time that the claims were listed.
        eventually("two looks at the claims", || (world.api.lists(CLAIMS) >= 2).then_some(())).await;
        assert_eq!(tainted(), ["gpu-1", "gpu-1-vgpu"]);
        // Kubelet deletes all slices of its node when it restarts.
        world.api.wipe_slices();
        eventually("publication anew", || (tainted().len() == 2).then_some(())).await;

        world.api.delete_claim(&claim(1, &[]));
        eventually("withdrawal", || tainted().is_empty().then_some(())).await;
        assert_eq!(world.api.slices().len(), 2);
    }
}

scenario! {
    async fn a_node_without_driver_libraries_says_where_it_looked_and_recovers() {
        let world = World::new().await;
        let root = world.node.root.path().join("driver-root");
        fs::create_dir(&root).unwrap();
        let source = Source { rescan: Duration::from_millis(100), ..Source::nvml(root.clone(), root.clone()) };
        let running = world.start_with(world.config(), source);
        let plugin = world.kubelet.register("gpu.drava.dev").await.unwrap();
        let reason = running.complains(Condition::Gpus, "libnvidia-ml.so.1").await;
        assert!(reason.contains(&*root.to_string_lossy()) && reason.contains("usr/lib64") && reason.contains("--driver-root"), "{reason}");
        world.api.put_claim(&claim(1, &[Share(0, "8Gi", "0")]));
        let error = plugin.prepare_one(&kubelet_claim(1)).await.unwrap_err().to_string();
        assert!(error.contains("default/claim-1") && error.contains("libnvidia-ml.so.1"), "{error}");
        plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
        let event = eventually("event", || world.api.events().into_iter().find(|(reason, _)| reason == "NotReady"));
        assert!(event.await.1.contains("libnvidia-ml.so.1"));
        assert!(world.api.slices().is_empty());

        // The simulated machine's own NVML, loaded as on a node.
        fs::remove_dir(&root).unwrap();
        std::os::unix::fs::symlink(crate::fixture::machine_root(), &root).unwrap();
        running.is_ready().await;
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
        insta::assert_json_snapshot!(published_devices(&world));
    }
}

/// Names and some figures of what is published, without what changes from run to run.
fn published_devices(world: &World) -> Vec<Value> {
    let slices = world.api.slices();
    let devices = slices.values().flat_map(|slice| {
        slice["spec"]["devices"]
            .as_array()
            .cloned()
            .unwrap_or_default()
    });
    let entry = |device: Value| {
        json!({
            "name": device["name"],
            "uuid": device["attributes"]["uuid"]["string"],
            "productName": device["attributes"]["productName"]["string"],
            "driverVersion": device["attributes"]["driverVersion"]["version"],
            "memory": device["capacity"]["memory"]["value"],
            "counters": device["consumesCounters"][0]["counters"],
        })
    };
    devices.map(entry).collect()
}

scenario! {
    async fn a_missing_kubelet_directory_is_named_and_waited_for() {
        let world = World::new().await;
        let registry = world.node.paths.kubelet_dir.join("plugins_registry");
        fs::remove_dir(&registry).unwrap();
        let running = world.start();
        let reason = running.complains(Condition::Registered, "does not exist").await;
        assert!(reason.contains(&*registry.to_string_lossy()) && reason.contains("--kubelet-dir"), "{reason}");
        fs::create_dir(&registry).unwrap();
        world.kubelet.register("gpu.drava.dev").await.unwrap();
        running.is_ready().await;
    }
}

scenario! {
    async fn kubelets_refusal_is_shown_until_it_accepts() {
        let world = World::new().await;
        let running = world.start();
        world.kubelet.refuse("gpu.drava.dev", "the endpoint is already registered").await.unwrap();
        running.complains(Condition::Registered, "kubelet refuses the driver: the endpoint is already registered").await;
        world.kubelet.register("gpu.drava.dev").await.unwrap();
        running.is_ready().await;
    }
}

scenario! {
    async fn a_socket_that_disappears_is_made_again() {
        let world = World::new().await;
        let (_running, _plugin) = world.ready().await;
        let [socket] = world.kubelet.registry().unwrap().try_into().unwrap();
        fs::remove_file(&socket).unwrap();
        eventually("socket", || socket.exists().then_some(())).await;
        world.kubelet.register("gpu.drava.dev").await.unwrap();
    }
}

scenario! {
    async fn stale_sockets_of_a_killed_driver_are_replaced() {
        let world = World::new().await;
        let (running, _plugin) = world.ready().await;
        running.kill().await;
        assert_eq!(world.kubelet.registry().unwrap().len(), 1, "nobody cleaned up");
        world.ready().await;
    }
}

scenario! {
    async fn running_claims_survive_a_killed_driver_and_a_reboot() {
        let world = World::new().await;
        let (running, plugin) = world.ready().await;
        let found = claim(1, &[Share(0, "8Gi", "30")]);
        world.api.put_claim(&found);
        let devices = plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
        let complete = world.node.traces();
        let page = complete.0.iter().find(|name| name.ends_with("/page")).unwrap().clone();
        let page = world.node.root.path().join(page);
        let before = inode(&page);

        running.kill().await;
        let (running, plugin) = world.ready().await;
        assert_eq!(plugin.prepare_one(&kubelet_claim(1)).await.unwrap(), devices);
        assert_eq!((world.node.traces(), inode(&page)), (complete.clone(), before));

        // A reboot empties the run directories; kubelet need not ask again.
        running.kill().await;
        world.node.tmpfs.reboot();
        fs::remove_file(world.spec(1)).unwrap();
        let (_running, plugin) = world.ready().await;
        eventually("restoration", || (world.node.traces() == complete).then_some(())).await;
        assert_eq!(inode(&page), before);
        assert_eq!(plugin.prepare_one(&kubelet_claim(1)).await.unwrap(), devices);
    }
}

scenario! {
    async fn orphans_are_removed_at_start() {
        let world = World::new().await;
        let (running, plugin) = world.ready().await;
        for number in [1, 2] {
            let found = claim(number, &[Share(0, "8Gi", "0")]);
            world.api.put_claim(&found);
            plugin.prepare_one(&kubelet_claim(number)).await.unwrap();
        }
        running.kill().await;
        // Claim 1 is deleted by force; claim 3 has only a spec, and one file is somebody else's.
        world.api.delete_claim(&claim(1, &[]));
        fs::copy(world.spec(1), world.spec(3)).unwrap();
        fs::write(world.node.paths.cdi_dir.join("other-vendor.json"), "{}").unwrap();
        let (_running, _plugin) = world.ready().await;
        eventually("claim 1 is gone", || (!world.spec(1).exists() && !world.record(1).exists()).then_some(())).await;
        eventually("claim 3 is gone", || (!world.spec(3).exists()).then_some(())).await;
        assert!(world.spec(2).exists() && world.record(2).exists());
        assert!(world.node.paths.cdi_dir.join("other-vendor.json").exists());
        assert_eq!(world.node.tmpfs.mounted().len(), 1);
        eventually("event", || world.api.events().into_iter().find(|(reason, _)| reason == "OrphanRemoved")).await;
    }
}

scenario! {
    async fn a_claim_that_is_gone_keeps_its_devices_until_the_grace_has_passed() {
        let world = World::new().await;
        let patient = Config { orphan_grace: Duration::from_secs(3600), ..world.config() };
        let (running, plugin) = world.ready().await;
        world.api.put_claim(&claim(1, &[Share(0, "50Gi", "0")]));
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
        running.stop().await;
        world.api.delete_claim(&claim(1, &[]));
        fs::remove_file(world.spec(1)).unwrap();
        let running = world.start_with(patient, world.source());
        let plugin = world.kubelet.register("gpu.drava.dev").await.unwrap();
        running.is_ready().await;
        // Its pod may still run: the card is not free.
        world.api.put_claim(&claim(2, &[Share(0, "50Gi", "0")]));
        let error = plugin.prepare_one(&kubelet_claim(2)).await.unwrap_err().to_string();
        assert!(error.contains("is prepared for other claims: default/claim-1"), "{error}");
        plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
        plugin.prepare_one(&kubelet_claim(2)).await.unwrap();
    }
}

scenario! {
    async fn a_damaged_record_is_rebuilt_from_the_api_server() {
        let world = World::new().await;
        let (running, plugin) = world.ready().await;
        world.api.put_claim(&claim(1, &[Share(0, "50Gi", "0")]));
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
        let sound = fs::read(world.record(1)).unwrap();
        running.kill().await;
        fs::write(world.record(1), &sound[..sound.len() - 9]).unwrap();
        let (_running, plugin) = world.ready().await;
        eventually("rebuilt", || (fs::read(world.record(1)).ok()? == sound).then_some(())).await;
        let event = eventually("event", || world.api.events().into_iter().find(|(reason, _)| reason == "ClaimStateRepaired"));
        assert!(event.await.1.contains("cut short"));
        world.api.put_claim(&claim(2, &[Share(0, "50Gi", "0")]));
        let error = plugin.prepare_one(&kubelet_claim(2)).await.unwrap_err().to_string();
        assert!(error.contains("is prepared for other claims: default/claim-1"), "{error}");
    }
}

scenario! {
    async fn a_missing_node_object_and_an_unusable_directory_are_named() {
        let world = World::new().await;
        let running = world.start_with(Config { node: "node-b".to_owned(), ..world.config() }, world.source());
        let reason = running.complains(Condition::Published, "no Node object node-b").await;
        assert!(reason.contains("--node-name"), "{reason}");
        running.stop().await;

        let mut broken = world.config();
        broken.paths.state_dir = world.node.root.path().join("image/libvgpu.so");
        let running = world.start_with(broken, world.source());
        let reason = running.complains(Condition::Directories, "cannot write to").await;
        assert!(reason.contains("image/libvgpu.so/claims"), "{reason}");
        running.stop().await;
    }
}

/// A pod named `pod` whose container uses `claim-<number>` and is in this state.
fn pod(number: u32, state: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "pod", "namespace": "default", "uid": "pod-uid"},
        "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "any"}],
            "containers": [
                {"name": "app", "resources": {"claims": [{"name": "gpu"}]}},
                {"name": "sidecar"},
            ],
        },
        "status": {
            "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": format!("claim-{number}")}],
            "containerStatuses": [
                {"name": "app", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state},
                {"name": "sidecar", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                 "state": {"running": {}}},
            ],
        },
    })
}

#[test]
fn only_a_started_container_that_uses_the_claim_counts() {
    let wanted = PodRef {
        namespace: "default".to_owned(),
        name: "pod".to_owned(),
        uid: "pod-uid".to_owned(),
    };
    let runs = |pod: Value, number: u32| {
        injection::runs_with(
            &serde_json::from_value(pod).unwrap(),
            &wanted,
            &claim_ref(number),
        )
    };
    assert!(runs(pod(1, &json!({"running": {}})), 1));
    assert!(runs(pod(1, &json!({"terminated": {"exitCode": 1}})), 1));
    assert!(
        !runs(pod(1, &json!({"waiting": {}})), 1),
        "the sidecar does not use the claim"
    );
    assert!(!runs(pod(1, &json!({"running": {}})), 2));
    let mut other = pod(1, &json!({"running": {}}));
    other["metadata"]["uid"] = json!("another pod of this name");
    assert!(!runs(other, 1));
    let mut direct = pod(1, &json!({"running": {}}));
    direct["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": "claim-7"}]);
    direct["status"]["resourceClaimStatuses"] = json!([]);
    assert!(runs(direct, 7));
}

scenario! {
    async fn a_container_runtime_that_ignores_cdi_is_noticed() {
        let world = World::new().await;
        let (_running, plugin) = world.ready().await;
        for number in [1, 2] {
            world.api.put_claim(&claim(number, &[Share(0, "8Gi", "30")]));
            plugin.prepare_one(&kubelet_claim(number)).await.unwrap();
        }
        // Claim 1 was injected: the hook has left its mark.
        let mounted = world.node.tmpfs.mounted();
        let usage = mounted.iter().find(|path| path.to_string_lossy().contains(claim_ref(1).uid.as_str())).unwrap();
        fs::write(usage.join("injected"), "").unwrap();
        let mut both = pod(1, &json!({"running": {}}));
        both["status"]["resourceClaimStatuses"] =
            json!([{"name": "gpu", "resourceClaimName": "claim-1"}, {"name": "gpu", "resourceClaimName": "claim-2"}]);
        world.api.put_pod(&both);
        let told = || {
            let events = world.api.events_with_kind();
            let about = |kind: &str| {
                let about = |event: &&(String, String, String)| event.0 == "CdiIgnored" && event.2 == kind;
                events.iter().find(about).map(|event| event.1.clone())
            };
            about("Pod").zip(about("ResourceClaim"))
        };
        let (of_pod, of_claim) = eventually("events on pod and claim", told).await;
        assert_eq!(of_pod, of_claim);
        assert!(of_pod.contains("default/claim-2") && of_pod.contains("enable_cdi = true"), "{of_pod}");
        assert!(world.api.events().iter().all(|(reason, note)| reason != "CdiIgnored" || !note.contains("claim-1")));
        let enforced = || {
            let claim = world.api.claim("claim-2");
            let conditions = claim["status"]["devices"][0]["conditions"].as_array()?.clone();
            conditions.into_iter().find(|condition| condition["type"] == "Enforced" && condition["status"] == "False")
        };
        assert_eq!(eventually("condition", enforced).await["reason"], "CdiIgnored");
    }
}

scenario! {
    async fn readyz_says_what_is_missing_and_the_node_is_told_each_reason() {
        let world = World::new().await;
        let mut config = world.config();
        config.paths.artifacts_dir = world.node.root.path().join("no-image");
        config.listen = free_address();
        let running = world.start_with(config.clone(), world.source());
        running.complains(Condition::Artifacts, "libvgpu.so").await;
        let get = |path: &'static str| get(config.listen, path);
        assert!(get("/healthz").await.starts_with("HTTP/1.0 200"));
        let unready = get("/readyz").await;
        assert!(unready.starts_with("HTTP/1.0 503"), "{unready}");
        assert!(unready.contains("artifacts: read") && unready.contains("--artifacts-dir"), "{unready}");
        let told = |text: &'static str| {
            let events = world.api.events();
            events.into_iter().find(|(reason, note)| reason == "NotReady" && note.starts_with(text)).map(drop)
        };
        eventually("an event about the artifacts", || told("artifacts: read")).await;
        eventually("an event about kubelet", || told("registered: kubelet has not registered")).await;

        fs::create_dir(world.node.root.path().join("no-image")).unwrap();
        for artifact in ["libvgpu.so", "drava-cdi-hook"] {
            fs::copy(world.node.paths.artifacts_dir.join(artifact), config.paths.artifacts_dir.join(artifact)).unwrap();
        }
        world.kubelet.register("gpu.drava.dev").await.unwrap();
        running.is_ready().await;
        assert!(get("/readyz").await.ends_with("ready\n"));
    }
}
