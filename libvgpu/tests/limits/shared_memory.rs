//! Physical memory with handles, and memory shared between processes.

use drava_vgpu_abi::Limits;

use crate::test_process::{CONTEXT_BYTES, Container, GIB, GPUS, MIB, ObjectId, TestProcess};

pub(crate) const BYTES: u64 = 600 * MIB;

pub(crate) fn create(process: &mut TestProcess, bytes: u64) -> ObjectId {
    process.ok(&format!("create {bytes} 0 1"))[0]
}

/// Maps physical memory at a new address.
pub(crate) fn map(process: &mut TestProcess, handle: ObjectId, bytes: u64) -> ObjectId {
    let address = process.ok(&format!("reserve {bytes}"))[0];
    process.ok(&format!("map {address} {bytes} {handle} 0"));
    address
}

/// Exports physical memory and imports it in another process.
pub(crate) fn send(from: &mut TestProcess, handle: ObjectId, to: &mut TestProcess) -> ObjectId {
    let descriptor = from.ok(&format!("export {handle}"))[0];
    let imported = to.ok(&format!("import {} {descriptor}", from.pid()))[0];
    from.ok(&format!("close {descriptor}"));
    imported
}

pub(crate) fn taken(container: &Container) -> u64 {
    let gpu = container.machine.gpu(0).unwrap();
    gpu.used_bytes - CONTEXT_BYTES * gpu.processes.len() as u64
}

#[test]
fn charges_physical_memory_until_last_reference() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.denied(&format!("create {} 0 1", GIB + 2 * MIB));
    let handle = create(&mut process, BYTES);
    let first = map(&mut process, handle, BYTES);
    let second = map(&mut process, handle, BYTES);
    assert_eq!(process.memory_info().0, GIB - BYTES);
    process.ok(&format!("release {handle}"));
    process.ok(&format!("unmap {first} {BYTES}"));
    assert_eq!(process.memory_info().0, GIB - BYTES);
    assert_eq!(taken(&container), BYTES);
    process.denied(&format!("create {BYTES} 0 1"));
    process.ok(&format!("unmap {second} {BYTES}"));
    assert_eq!(process.memory_info().0, GIB);
    assert_eq!(taken(&container), 0);
}

#[test]
fn keeps_charge_for_exported_memory() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let handle = create(&mut process, BYTES);
    let descriptor = process.ok(&format!("export {handle}"))[0];
    process.ok(&format!("release {handle}"));
    assert_eq!(taken(&container), BYTES);
    process.denied(&format!("create {BYTES} 0 1"));
    process.ok(&format!("close {descriptor}"));
    create(&mut process, BYTES);
    assert_eq!(taken(&container), BYTES);
}

/// Handle values recur: the next owner of a value must not meet the record of the previous one.
#[test]
fn forgets_exported_memory_with_its_last_reference() {
    const EACH: u64 = 64 * MIB;
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let mut values = std::collections::BTreeSet::new();
    for round in 0..1000 {
        let created = process.ok(&format!("create {EACH} 0 1"));
        values.insert(created[1]);
        let handle = created[0];
        let address = (round % 3 == 0).then(|| map(&mut process, handle, EACH));
        let descriptor = process.ok(&format!("export {handle}"))[0];
        process.ok(&format!("close {descriptor}"));
        process.ok(&format!("release {handle}"));
        if let Some(address) = address {
            process.ok(&format!("unmap {address} {EACH}"));
        }
        assert_eq!(process.memory_info().0, GIB, "round {round}");
    }
    assert!(values.len() < 10, "the driver has not recycled its handles");
    assert_eq!(taken(&container), 0);
    process.alloc(GIB);
}

/// A descriptor's number recurs as well.
#[test]
fn distinguishes_descriptors_of_same_number() {
    const EACH: u64 = 256 * MIB;
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let first = create(&mut process, EACH);
    let closed = process.ok(&format!("export {first}"))[0];
    process.ok(&format!("close {closed}"));
    let second = create(&mut process, EACH);
    let open = process.ok(&format!("export {second}"))[0];
    assert_eq!(closed, open, "the number has not recurred");
    process.ok(&format!("release {first}"));
    assert_eq!(process.memory_info().0, GIB - EACH);
    process.ok(&format!("release {second}"));
    assert_eq!(process.memory_info().0, GIB - EACH);
    process.ok(&format!("close {open}"));
    assert_eq!(process.memory_info().0, GIB);
    assert_eq!(taken(&container), 0);
}

/// The importing process is not charged, so the charge stays with the exporting one.
#[test]
fn keeps_charge_for_released_memory_open_in_same_share() {
    let container = Container::with_memory(GIB);
    let mut one = container.process();
    let mut other = container.process();
    let handle = create(&mut one, BYTES);
    let imported = send(&mut one, handle, &mut other);
    let address = map(&mut other, imported, BYTES);
    one.ok(&format!("release {handle}"));
    assert_eq!(taken(&container), BYTES);
    other.denied(&format!("alloc {BYTES}"));
    one.denied(&format!("alloc {BYTES}"));
    other.ok(&format!("unmap {address} {BYTES}"));
    other.ok(&format!("release {imported}"));
    assert_eq!(taken(&container), 0);
    one.alloc(GIB);
}

#[test]
fn charges_memory_imported_in_same_share_once() {
    let container = Container::with_memory(GIB);
    let mut one = container.process();
    let mut other = container.process();
    let handle = create(&mut one, BYTES);
    let imported = send(&mut one, handle, &mut other);
    let address = map(&mut other, imported, BYTES);
    for process in [&mut one, &mut other] {
        assert_eq!(process.memory_info().0, GIB - BYTES);
    }
    assert_eq!(taken(&container), BYTES);
    // The memory outlives its creator; the importing process stays charged.
    one.kill();
    container
        .machine
        .wait_for_gpu(0, |gpu| gpu.processes.len() == 1)
        .unwrap();
    assert_eq!(taken(&container), BYTES);
    other.denied(&format!("alloc {BYTES}"));
    assert_eq!(other.memory_info().0, GIB - BYTES);
    other.ok(&format!("unmap {address} {BYTES}"));
    other.ok(&format!("release {imported}"));
    assert_eq!(taken(&container), 0);
    other.alloc(GIB);
}

/// A third process, not the one that has the memory open, reclaims the dead process.
#[test]
fn keeps_charge_for_open_memory_of_dead_process() {
    let container = Container::with_memory(GIB);
    let mut third = container.process();
    let mut one = container.process();
    let mut others = [container.process(), container.process()];
    let handle = create(&mut one, BYTES);
    // Opened by two processes, it is still the same memory.
    let imported = others.each_mut().map(|other| send(&mut one, handle, other));
    let mut addresses = Vec::new();
    for (other, imported) in others.iter_mut().zip(imported) {
        addresses.push(map(other, imported, BYTES));
    }
    one.alloc(100 * MIB);
    one.kill();
    container
        .machine
        .wait_for_gpu(0, |gpu| gpu.processes.len() == 3)
        .unwrap();
    assert_eq!(taken(&container), BYTES);
    third.denied(&format!("alloc {BYTES}"));
    assert_eq!(third.memory_info().0, GIB - BYTES);
    let rest = third.alloc(GIB - BYTES);
    assert_eq!(taken(&container), GIB);
    third.denied("alloc 1");
    third.ok(&format!("free {rest}"));
    // It belongs to no listed process.
    let listed = container.processes_of("share");
    assert!(listed.iter().all(|listed| listed.used_bytes == 0));
    // Still open in the other process.
    let [mut first, mut second] = others;
    first.ok(&format!("unmap {} {BYTES}", addresses[0]));
    first.ok(&format!("release {}", imported[0]));
    third.denied(&format!("alloc {BYTES}"));
    assert_eq!(second.memory_info().0, GIB - BYTES);
    second.kill();
    container
        .machine
        .wait_for_gpu(0, |gpu| gpu.processes.len() == 2)
        .unwrap();
    third.alloc(GIB);
}

/// The share is full of a dead process's memory when memory of another share is opened: the import is charged once.
#[test]
fn charges_import_once_while_reclaiming_dead_slots() {
    let container = Container::with_memory(GIB);
    let large = container.tenant(GIB);
    let mut one = container.process();
    let handle = create(&mut one, BYTES);
    let mut other = container.process_of(&large);
    let mut victim = container.process_of(&large);
    victim.alloc(GIB);
    victim.kill();
    let imported = send(&mut one, handle, &mut other);
    map(&mut other, imported, BYTES);
    other.alloc(GIB - BYTES);
    other.denied("alloc 1");
}

#[test]
fn tolerates_handle_released_twice() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let handle = create(&mut process, BYTES);
    let address = map(&mut process, handle, BYTES);
    process.ok(&format!("release {handle}"));
    assert_ne!(process.query(&format!("release {handle}"))[0], 0);
    assert_eq!(process.memory_info().0, GIB - BYTES);
    process.ok(&format!("unmap {address} {BYTES}"));
    assert_eq!(process.memory_info().0, GIB);
}

#[test]
fn counts_retained_handle_as_reference() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let handle = create(&mut process, BYTES);
    let address = map(&mut process, handle, BYTES);
    let retained = process.ok(&format!("retain {address}"))[0];
    process.ok(&format!("release {handle}"));
    process.ok(&format!("unmap {address} {BYTES}"));
    assert_eq!(process.memory_info().0, GIB - BYTES);
    assert_eq!(taken(&container), BYTES);
    process.ok(&format!("release {retained}"));
    assert_eq!(process.memory_info().0, GIB);
    assert_eq!(taken(&container), 0);
}

#[test]
fn unmaps_range_of_several_mappings() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let half = BYTES / 2;
    let handles = [create(&mut process, half), create(&mut process, half)];
    let address = process.ok(&format!("reserve {BYTES}"))[0];
    process.ok(&format!("map {address} {half} {} 0", handles[0]));
    process.ok(&format!("map {address} {half} {} {half}", handles[1]));
    for handle in handles {
        process.ok(&format!("release {handle}"));
    }
    assert_eq!(process.memory_info().0, GIB - BYTES);
    process.ok(&format!("unmap {address} {BYTES}"));
    assert_eq!(process.memory_info().0, GIB);
    assert_eq!(taken(&container), 0);
}

/// Memory is charged on the GPU where it is located, not on that of the current context.
#[test]
fn charges_physical_memory_on_its_own_gpu() {
    let container = Container::with_memory(GIB);
    container.add_share("other", GPUS[1], &Limits::memory(2 * GIB));
    let mut process = container.process();
    let handle = process.ok(&format!("create {} 1 1", 2 * GIB))[0];
    assert_eq!(process.memory_info(), (GIB, GIB));
    process.denied(&format!("create {} 1 1", 2 * MIB));
    process.alloc(GIB);
    process.init(1);
    assert_eq!(process.memory_info(), (0, 2 * GIB));
    process.ok(&format!("release {handle}"));
    assert_eq!(process.memory_info(), (2 * GIB, 2 * GIB));
}

/// More than the GPU has, so that only the driver can deny it.
#[test]
fn refunds_physical_memory_denied_by_driver() {
    let container = Container::with_memory(200 * GIB);
    let mut process = container.process();
    let (free, _) = process.memory_info();
    for _ in 0..3 {
        process.denied(&format!("create {} 0 1", 100 * GIB));
    }
    assert_eq!(process.memory_info().0, free);
    process.denied(&format!("array {} {} 1024 1", 1 << 13, 1 << 13));
    assert_eq!(process.memory_info().0, free);
}

#[test]
fn charges_imported_memory_to_both_shares() {
    let container = Container::with_memory(GIB);
    let (large, small) = (container.tenant(GIB), container.tenant(BYTES / 2));
    let mut one = container.process();
    let handle = create(&mut one, BYTES);
    let mut other = container.process_of(&large);
    let imported = send(&mut one, handle, &mut other);
    let address = map(&mut other, imported, BYTES);
    assert_eq!(other.memory_info().0, GIB - BYTES);
    assert_eq!(one.memory_info().0, GIB - BYTES);
    // A mapping that the driver rejects is not charged.
    let wrong = other.query(&format!("map {address} {BYTES} {imported} 0"));
    assert_ne!(wrong[0], 0, "already mapped");
    assert_eq!(other.memory_info().0, GIB - BYTES);
    let mut limited = container.process_of(&small);
    let imported_too = send(&mut one, handle, &mut limited);
    let target = limited.ok(&format!("reserve {BYTES}"))[0];
    limited.denied(&format!("map {target} {BYTES} {imported_too} 0"));
    assert_eq!(limited.memory_info().0, BYTES / 2);
    other.ok(&format!("release {imported}"));
    assert_eq!(other.memory_info().0, GIB - BYTES);
    other.ok(&format!("unmap {address} {BYTES}"));
    assert_eq!(other.memory_info().0, GIB);
}

/// Opens memory of another process by IPC handle.
fn open(from: &mut TestProcess, pointer: ObjectId, to: &mut TestProcess) -> String {
    let answer = from.request(&format!("ipcget {pointer}"));
    let handle = answer.strip_prefix("0 ").unwrap().to_owned();
    to.request(&format!("ipcopen {handle}"))
}

pub(crate) fn object_id(answer: &str) -> ObjectId {
    let mut numbers = answer.split(' ').map(|number| number.parse::<i64>());
    assert_eq!(numbers.next(), Some(Ok(0)), "{answer}");
    numbers.next().unwrap().unwrap()
}

#[test]
fn charges_ipc_memory_to_each_share_once() {
    let container = Container::with_memory(GIB);
    let (large, small) = (container.tenant(GIB), container.tenant(BYTES / 2));
    let mut one = container.process();
    let pointer = one.alloc(BYTES);
    let mut same = container.process();
    let opened = object_id(&open(&mut one, pointer, &mut same));
    assert_eq!(same.memory_info().0, GIB - BYTES);
    let mut other = container.process_of(&large);
    let elsewhere = object_id(&open(&mut one, pointer, &mut other));
    assert_eq!(other.memory_info().0, GIB - BYTES);
    // Opened again, it is the same memory until it is closed as many times.
    let again = object_id(&open(&mut one, pointer, &mut other));
    assert_eq!(other.memory_info().0, GIB - BYTES);
    other.ok(&format!("ipcclose {again}"));
    assert_eq!(other.memory_info().0, GIB - BYTES);
    let mut limited = container.process_of(&small);
    let answer = open(&mut one, pointer, &mut limited);
    assert!(answer.starts_with("2 "), "{answer}");
    assert_eq!(limited.memory_info().0, BYTES / 2);
    other.ok(&format!("ipcclose {elsewhere}"));
    assert_eq!(other.memory_info().0, GIB);
    // Freed by its owner, it stays with the process that opened it, which is charged from then on.
    one.ok(&format!("free {pointer}"));
    assert_eq!(same.memory_info().0, GIB - BYTES);
    assert_eq!(taken(&container), BYTES);
    same.ok(&format!("ipcclose {opened}"));
    assert_eq!(same.memory_info().0, GIB);
    assert_eq!(taken(&container), 0);
}

/// The driver closes it with the context.
#[test]
fn charges_ipc_memory_until_context_ends() {
    const EACH: u64 = BYTES / 2;
    let container = Container::with_memory(GIB);
    let large = container.tenant(GIB);
    let mut one = container.process();
    let pointers = [one.alloc(EACH), one.alloc(EACH)];
    let mut other = container.process_of(&large);
    object_id(&open(&mut one, pointers[0], &mut other));
    let with_one = other.memory_info().0;
    let context = other.ok("context 0")[0];
    // Opened several times and never closed.
    for _ in 0..3 {
        object_id(&open(&mut one, pointers[1], &mut other));
    }
    assert_eq!(other.memory_info().0, with_one - EACH);
    other.ok(&format!("destroy {context}"));
    other.ok("init 0");
    assert_eq!(
        other.memory_info().0,
        with_one,
        "memory of the first context remains"
    );
    other.ok("releaseprimary 0");
    other.ok("releaseprimary 0");
    other.ok("init 0");
    assert_eq!(other.memory_info().0, with_one + EACH);
    // It can be opened again, and is charged again.
    let again = object_id(&open(&mut one, pointers[1], &mut other));
    assert_eq!(other.memory_info().0, with_one);
    other.ok(&format!("ipcclose {again}"));
    assert_eq!(other.memory_info().0, with_one + EACH);
    for pointer in pointers {
        one.ok(&format!("free {pointer}"));
    }
    assert_eq!(taken(&container), 0);
}

#[test]
fn trims_pool_before_denying_import() {
    let container = Container::with_memory(GIB);
    let large = container.tenant(GIB);
    let mut one = container.process();
    let pointer = one.alloc(BYTES);
    let mut other = container.process_of(&large);
    other.ok(&format!("keep {GIB}"));
    let place = other.ok(&format!("async {}", 900 * MIB))[0];
    other.ok(&format!("freeasync {place}"));
    other.ok("sync");
    object_id(&open(&mut one, pointer, &mut other));
    assert_eq!(other.memory_info().0, GIB - BYTES);
}

/// Opening a small allocation opens its block, which is already charged.
#[test]
fn charges_whole_block_of_opened_small_allocation() {
    let container = Container::with_memory(GIB);
    let large = container.tenant(GIB);
    let mut one = container.process();
    let pointer = one.alloc(256 << 10);
    let mut same = container.process();
    open(&mut one, pointer, &mut same);
    assert_eq!(same.memory_info().0, GIB - 2 * MIB);
    let mut other = container.process_of(&large);
    open(&mut one, pointer, &mut other);
    assert_eq!(other.memory_info().0, GIB - 2 * MIB);
}

/// A mapping that the driver rejects is not charged.
#[test]
fn does_not_charge_import_before_mapping() {
    let container = Container::with_memory(GIB);
    let large = container.tenant(GIB);
    let mut one = container.process();
    let handle = create(&mut one, BYTES);
    let mut other = container.process_of(&large);
    let imported = send(&mut one, handle, &mut other);
    assert_eq!(other.memory_info().0, GIB);
    let small = other.ok(&format!("reserve {}", 2 * MIB))[0];
    let answer = other.query(&format!("map {small} {BYTES} {imported} 0"));
    assert_ne!(answer[0], 0, "a range that is too small");
    assert_eq!(other.memory_info().0, GIB);
}

/// A row of eight tiles takes 512 KiB.
#[test]
fn charges_imported_memory_mapped_to_sparse_array() {
    let container = Container::with_memory(GIB);
    let (large, small) = (container.tenant(GIB), container.tenant(MIB));
    let mut one = container.process();
    let handle = create(&mut one, 4 * MIB);
    let mut other = container.process_of(&large);
    let imported = send(&mut one, handle, &mut other);
    let array = other.ok("sparse")[0];
    assert_eq!(other.memory_info().0, GIB);
    other.ok(&format!("tiles {array} {imported} 0 3"));
    assert_eq!(other.memory_info().0, GIB - 3 * MIB / 2);
    // Known memory is charged once, however it is mapped.
    other.ok(&format!("tiles {array} {imported} 3 4"));
    assert_eq!(other.memory_info().0, GIB - 2 * MIB);
    let address = map(&mut other, imported, 4 * MIB);
    assert_eq!(other.memory_info().0, GIB - 4 * MIB);
    other.ok(&format!("unmap {address} {}", 4 * MIB));
    other.ok(&format!("release {imported}"));
    assert_eq!(other.memory_info().0, GIB - 4 * MIB);
    other.ok(&format!("untile {array} 0 3 4"));
    assert_eq!(other.memory_info().0, GIB - 4 * MIB);
    other.ok(&format!("destroyarray {array}"));
    assert_eq!(other.memory_info().0, GIB);
    // Its own share is charged once.
    let mut same = container.process();
    let imported = send(&mut one, handle, &mut same);
    let array = same.ok("sparse")[0];
    same.ok(&format!("tiles {array} {imported} 0 8"));
    assert_eq!(same.memory_info().0, GIB - 4 * MIB);
    let mut limited = container.process_of(&small);
    let imported = send(&mut one, handle, &mut limited);
    let array = limited.ok("sparse")[0];
    limited.denied(&format!("tiles {array} {imported} 0 3"));
    assert_eq!(limited.memory_info().0, MIB);
    limited.ok(&format!("tiles {array} {imported} 0 2"));
    assert_eq!(limited.memory_info().0, 0);
    // A mapping that the driver rejects is not charged.
    assert_ne!(
        limited.query(&format!("tiles {array} {imported} 8 1"))[0],
        0
    );
    limited.ok(&format!("destroyarray {array}"));
    limited.ok(&format!("release {imported}"));
    assert_eq!(limited.memory_info().0, MIB);
}
