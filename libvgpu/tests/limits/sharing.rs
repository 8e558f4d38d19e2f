//! Physical memory with handles, and memory that processes share with each other.

use crate::subject::{CONTEXT_BYTES, Container, GIB, MIB, Place, Subject};

const BYTES: u64 = 600 * MIB;

fn create(process: &mut Subject, bytes: u64) -> Place {
    process.ok(&format!("create {bytes} 0 1"))[0]
}

/// Maps physical memory at an address of its own.
fn map(process: &mut Subject, handle: Place, bytes: u64) -> Place {
    let address = process.ok(&format!("reserve {bytes}"))[0];
    process.ok(&format!("map {address} {bytes} {handle} 0"));
    address
}

/// Exports physical memory and imports it in another process.
fn send(from: &mut Subject, handle: Place, to: &mut Subject) -> Place {
    let descriptor = from.ok(&format!("export {handle}"))[0];
    let imported = to.ok(&format!("import {} {descriptor}", from.pid()))[0];
    from.ok(&format!("close {descriptor}"));
    imported
}

fn taken(container: &Container) -> u64 {
    let card = container.machine.card(0).unwrap();
    card.used_bytes - CONTEXT_BYTES * card.processes.len() as u64
}

#[test]
fn physical_memory_is_charged_until_its_last_handle_and_mapping_are_gone() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.refused(&format!("create {} 0 1", GIB + 2 * MIB));
    let handle = create(&mut process, BYTES);
    let first = map(&mut process, handle, BYTES);
    let second = map(&mut process, handle, BYTES);
    assert_eq!(process.memory_info().0, GIB - BYTES);
    process.ok(&format!("release {handle}"));
    process.ok(&format!("unmap {first} {BYTES}"));
    assert_eq!(process.memory_info().0, GIB - BYTES);
    assert_eq!(taken(&container), BYTES);
    process.refused(&format!("create {BYTES} 0 1"));
    process.ok(&format!("unmap {second} {BYTES}"));
    assert_eq!(process.memory_info().0, GIB);
    assert_eq!(taken(&container), 0);
}

#[test]
fn exported_memory_stays_charged_while_it_may_be_open_elsewhere() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let handle = create(&mut process, BYTES);
    process.ok(&format!("export {handle}"));
    process.ok(&format!("release {handle}"));
    assert_eq!(taken(&container), BYTES);
    process.refused(&format!("create {BYTES} 0 1"));
}

#[test]
fn memory_imported_in_the_same_share_is_paid_for_once() {
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
    // The memory outlives the process that made it, and the one that imported it goes on paying.
    one.kill();
    container
        .machine
        .wait_for_card(0, |card| card.processes.len() == 1)
        .unwrap();
    assert_eq!(taken(&container), BYTES);
    other.refused(&format!("alloc {BYTES}"));
    assert_eq!(other.memory_info().0, GIB - BYTES);
    other.ok(&format!("unmap {address} {BYTES}"));
    other.ok(&format!("release {imported}"));
    assert_eq!(taken(&container), 0);
    other.alloc(GIB);
}

#[test]
fn memory_imported_from_another_share_is_paid_for_by_both() {
    let container = Container::with_memory(GIB);
    let (large, small) = (container.tenant(GIB), container.tenant(BYTES / 2));
    let mut one = container.process();
    let handle = create(&mut one, BYTES);
    let mut other = container.process_of(&large);
    let imported = send(&mut one, handle, &mut other);
    let address = map(&mut other, imported, BYTES);
    assert_eq!(other.memory_info().0, GIB - BYTES);
    assert_eq!(one.memory_info().0, GIB - BYTES);
    let mut poor = container.process_of(&small);
    let imported_too = send(&mut one, handle, &mut poor);
    let place = poor.ok(&format!("reserve {BYTES}"))[0];
    poor.refused(&format!("map {place} {BYTES} {imported_too} 0"));
    assert_eq!(poor.memory_info().0, BYTES / 2);
    other.ok(&format!("release {imported}"));
    assert_eq!(other.memory_info().0, GIB - BYTES);
    other.ok(&format!("unmap {address} {BYTES}"));
    assert_eq!(other.memory_info().0, GIB);
}

/// Opens by IPC handle what another process has allocated.
fn open(from: &mut Subject, pointer: Place, to: &mut Subject) -> String {
    let answer = from.say(&format!("ipcget {pointer}"));
    let handle = answer.strip_prefix("0 ").unwrap().to_owned();
    to.say(&format!("ipcopen {handle}"))
}

fn place_of(answer: &str) -> Place {
    let mut numbers = answer.split(' ').map(|number| number.parse::<i64>());
    assert_eq!(numbers.next(), Some(Ok(0)), "{answer}");
    numbers.next().unwrap().unwrap()
}

#[test]
fn memory_opened_by_ipc_handle_is_paid_for_by_each_share_once() {
    let container = Container::with_memory(GIB);
    let (large, small) = (container.tenant(GIB), container.tenant(BYTES / 2));
    let mut one = container.process();
    let pointer = one.alloc(BYTES);
    let mut same = container.process();
    let opened = place_of(&open(&mut one, pointer, &mut same));
    assert_eq!(same.memory_info().0, GIB - BYTES);
    let mut other = container.process_of(&large);
    let elsewhere = place_of(&open(&mut one, pointer, &mut other));
    assert_eq!(other.memory_info().0, GIB - BYTES);
    let mut poor = container.process_of(&small);
    let answer = open(&mut one, pointer, &mut poor);
    assert!(answer.starts_with("2 "), "{answer}");
    assert_eq!(poor.memory_info().0, BYTES / 2);
    other.ok(&format!("ipcclose {elsewhere}"));
    assert_eq!(other.memory_info().0, GIB);
    // Freed by the one, it lives on with the one that opened it, which pays from then on.
    one.ok(&format!("free {pointer}"));
    assert_eq!(same.memory_info().0, GIB - BYTES);
    assert_eq!(taken(&container), BYTES);
    same.ok(&format!("ipcclose {opened}"));
    assert_eq!(same.memory_info().0, GIB);
    assert_eq!(taken(&container), 0);
}
