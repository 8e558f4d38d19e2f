use super::*;
use crate::gpus::capacity::{MIB, ShareTotals};
use crate::gpus::inventory::fixture::one_gpu;
use crate::prepare::record::fixture;

fn record(gib: u64) -> ClaimRecord {
    let amounts = ShareTotals {
        memory_bytes: gib * 1024 * MIB,
        cores: 20,
        slots: 1,
    };
    fixture::record(1, "node-1/gpus", amounts)
}

fn write(record: &ClaimRecord, injection: &Injection, written: &Value) -> Value {
    let (inventory, health) = (one_gpu(), HealthByGpu::new());
    let observed = Observed {
        inventory: &inventory,
        health: &health,
        injection,
    };
    Value::Array(statuses(record, &observed, written, Timestamp::UNIX_EPOCH))
}

fn enforced_of(written: &Value) -> &Value {
    written_condition(written.get(0), ConditionType::Enforced).unwrap()
}

#[test]
fn unchecked_share_has_new_amounts_unless_it_was_found_unenforced() {
    let grown = |written: &Value| write(&record(12), &Injection::Unchecked, written);
    let interposed = write(&record(8), &Injection::Expected, &Value::Null);
    for written in [Value::Null, interposed] {
        let written = grown(&written);
        let message = enforced_of(&written)["message"].as_str().unwrap();
        assert!(message.contains("limits memory to 12288 MiB"), "{message}");
    }
    let violation = Violation {
        reason: ConditionReason::MemoryOverLimit,
        message: "processes use more".to_owned(),
    };
    let share = record(8).devices[0].share().unwrap().id.clone();
    let violated = Injection::Observed([(share, violation)].into());
    for found in [violated, Injection::Ignored] {
        let written = write(&record(8), &found, &Value::Null);
        let grown = grown(&written);
        assert_eq!(enforced_of(&grown), enforced_of(&written));
        assert_eq!(grown[0]["data"]["memoryBytes"], json!(12_288 * MIB));
    }
}

/// The conditions say no success where no container starts, also after a report of the health of the GPU.
#[test]
fn refused_claim_is_not_prepared_and_has_no_enforced() {
    let refused = Injection::Incompatible("one claim only".to_owned());
    let conditions = |written: &Value| {
        let conditions = written[0]["conditions"].as_array().unwrap().iter();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let fields = ["type", "status", "reason", "message"];
        let shown = conditions.map(|condition| fields.map(|field| text(&condition[field])));
        shown.collect::<Vec<_>>()
    };
    let expected =
        [["Prepared", "False", "IncompatibleClaims", "one claim only"].map(str::to_owned)];
    let prepared = write(&record(8), &Injection::Expected, &Value::Null);
    for before in [&Value::Null, &prepared] {
        let written = write(&record(8), &refused, before);
        assert_eq!(conditions(&written), expected);
        let reported = write(&record(8), &Injection::Unchecked, &written);
        assert_eq!(conditions(&reported), expected);
        let again = write(&record(8), &Injection::Expected, &written);
        assert_eq!(conditions(&again), conditions(&prepared));
    }
}

/// What the record says is what `prepare` has set up: the condition names no other wall.
#[test]
fn names_memory_and_time_limits_of_every_kind_of_share() {
    let walls = [
        (
            true,
            "LimitedByDriver",
            "the NVIDIA driver and libvgpu limit",
        ),
        (false, "Interposed", "libvgpu limits"),
    ];
    let policies = [
        (ComputePolicy::Balance, "20% of GPU time guaranteed"),
        (ComputePolicy::Fixed, "GPU time limited to 20%"),
        (
            ComputePolicy::Spatial,
            "MPS gives it 20% of the multiprocessors, which its programs can leave",
        ),
        (ComputePolicy::None, "GPU time is not metered"),
    ];
    for (limited_by_driver, reason, limits) in walls {
        for (compute_policy, time) in policies {
            let mut record = record(8);
            let share = record.devices[0].share_mut().unwrap();
            share.limited_by_driver = limited_by_driver;
            share.compute_policy = compute_policy;
            let written = write(&record, &Injection::Expected, &Value::Null);
            let enforced = enforced_of(&written);
            let (reason, status) = match compute_policy {
                ComputePolicy::Spatial => ("Partly", "False"),
                ComputePolicy::Balance | ComputePolicy::Fixed | ComputePolicy::None => {
                    (reason, "True")
                }
            };
            assert_eq!(enforced["reason"], reason, "{time}");
            assert_eq!(enforced["status"], status, "{time}");
            let message = format!("{limits} memory to 8192 MiB; {time}");
            assert_eq!(enforced["message"], message);
        }
    }
}
