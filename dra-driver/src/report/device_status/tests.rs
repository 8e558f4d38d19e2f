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
