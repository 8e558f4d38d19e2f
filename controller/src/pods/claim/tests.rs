use serde_json::{Value, json};

use super::*;

/// Returns a companion with two devices that is being deleted, changed at a JSON pointer.
fn ending(pointer: &str, value: Value) -> ResourceClaim {
    let condition = |kind: &str, reason: &str| {
        json!({
            "type": kind, "status": "False", "reason": reason, "message": "",
            "lastTransitionTime": "2026-01-01T00:00:30Z",
        })
    };
    let conditions = [
        condition("Healthy", "NoFault"),
        condition("Granted", "Released"),
    ];
    let of = |device: &str, mut entry: Value| {
        let ids = json!({"driver": "gpu.drava.dev", "pool": "n1/gpus", "device": device, "shareID": device});
        let Value::Object(ids) = ids else {
            unreachable!("an object")
        };
        entry.as_object_mut().unwrap().extend(ids);
        entry
    };
    let mut claim = json!({
        "metadata": {
            "name": "more", "labels": {"gpu.drava.dev/companion-of": "uid-a"},
            "deletionTimestamp": "2026-01-01T00:00:30Z",
        },
        "spec": {},
        "status": {
            "allocation": {"devices": {"results": [
                of("gpu-0-vgpu", json!({"request": "one"})), of("gpu-1-vgpu", json!({"request": "two"})),
            ]}},
            "devices": [
                of("gpu-0-vgpu", json!({"conditions": conditions})),
                of("gpu-1-vgpu", json!({"conditions": conditions})),
            ],
        },
    });
    if !pointer.is_empty() {
        *claim.pointer_mut(pointer).unwrap() = value;
    }
    serde_json::from_value(claim).unwrap()
}

#[test]
fn companion_is_given_back_once_all_its_devices_are() {
    assert!(is_given_back(&ending("", json!(null))));
    for (pointer, value) in [
        ("/metadata/labels", json!({})),
        ("/metadata/deletionTimestamp", json!(null)),
        ("/status/allocation", json!(null)),
        ("/status/devices", json!([])),
        ("/status/devices/1/shareID", json!("another")),
        ("/status/devices/1/conditions", json!([])),
        ("/status/devices/1/conditions/1/reason", json!("InUse")),
        ("/status/devices/1/conditions/1/type", json!("Healthy")),
    ] {
        assert!(!is_given_back(&ending(pointer, value)), "{pointer}");
    }
}
