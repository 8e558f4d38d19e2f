//! What a new instance makes of what it finds on the node.

use std::fs;
use std::time::Duration;

use drava_dra_driver::driver::Config;

use crate::api_server::eventually;
use crate::fixture::Result::Share;
use crate::fixture::claim;
use crate::harness::{World, inode, kubelet_claim, refusal};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_claims_survive_a_killed_driver_and_a_reboot() {
    let world = World::new().await;
    let (running, plugin) = world.ready().await;
    let found = claim(1, &[Share(0, "8Gi", "30")]);
    world.api.put_claim(&found);
    let devices = plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let complete = world.node.traces();
    let page = complete
        .0
        .iter()
        .find(|name| name.ends_with("/page"))
        .unwrap()
        .clone();
    let page = world.node.root.path().join(page);
    let before = inode(&page);

    running.kill().await;
    let (running, plugin) = world.ready().await;
    assert_eq!(
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap(),
        devices
    );
    assert_eq!(
        (world.node.traces(), inode(&page)),
        (complete.clone(), before)
    );

    // A reboot empties the run directories; kubelet need not ask again.
    running.kill().await;
    world.node.tmpfs.reboot();
    fs::remove_file(world.spec(1)).unwrap();
    let (_running, plugin) = world.ready().await;
    eventually("restoration", || {
        (world.node.traces() == complete).then_some(())
    })
    .await;
    assert_eq!(inode(&page), before);
    assert_eq!(
        plugin.prepare_one(&kubelet_claim(1)).await.unwrap(),
        devices
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
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
    eventually("claim 1 is gone", || {
        (!world.spec(1).exists() && !world.record(1).exists()).then_some(())
    })
    .await;
    eventually("claim 3 is gone", || {
        (!world.spec(3).exists()).then_some(())
    })
    .await;
    assert!(world.spec(2).exists() && world.record(2).exists());
    assert!(world.node.paths.cdi_dir.join("other-vendor.json").exists());
    assert_eq!(world.node.tmpfs.mounted().len(), 1);
    eventually("event", || {
        world
            .api
            .events()
            .into_iter()
            .find(|(reason, _)| reason == "OrphanRemoved")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_gone_keeps_its_devices_until_the_grace_has_passed() {
    let world = World::new().await;
    let patient = Config {
        orphan_grace: Duration::from_secs(3600),
        ..world.config()
    };
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
    let error = refusal(&plugin, 2).await;
    assert!(
        error.contains("is prepared for other claims: default/claim-1"),
        "{error}"
    );
    plugin.unprepare_one(&kubelet_claim(1)).await.unwrap();
    plugin.prepare_one(&kubelet_claim(2)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_record_is_rebuilt_from_the_api_server() {
    let world = World::new().await;
    let (running, plugin) = world.ready().await;
    world.api.put_claim(&claim(1, &[Share(0, "50Gi", "0")]));
    plugin.prepare_one(&kubelet_claim(1)).await.unwrap();
    let sound = fs::read(world.record(1)).unwrap();
    running.kill().await;
    fs::write(world.record(1), &sound[..sound.len() - 9]).unwrap();
    let (_running, plugin) = world.ready().await;
    eventually("rebuilt", || {
        (fs::read(world.record(1)).ok()? == sound).then_some(())
    })
    .await;
    let event = eventually("event", || {
        world
            .api
            .events()
            .into_iter()
            .find(|(reason, _)| reason == "ClaimStateRepaired")
    });
    assert!(event.await.1.contains("cut short"));
    world.api.put_claim(&claim(2, &[Share(0, "50Gi", "0")]));
    let error = refusal(&plugin, 2).await;
    assert!(
        error.contains("is prepared for other claims: default/claim-1"),
        "{error}"
    );
}
