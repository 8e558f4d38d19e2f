//! The same machine file on several nodes.

use super::MachineDescription;

/// Parameters of FNV-1a with 128 bits.
const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
/// Serial numbers have 13 digits.
const SERIALS: u128 = 10_u128.pow(13);

impl MachineDescription {
    /// Returns the machine of a node: with UUIDs and serial numbers that differ from those of other nodes with the same file, and
    /// that stay when the node restarts.
    #[must_use]
    pub fn on_node(mut self, node: &str) -> Self {
        for gpu in &mut self.gpus {
            let hash = hash(&[node, &gpu.uuid]);
            gpu.uuid = format!("GPU-{}", uuid(hash));
            gpu.serial = gpu
                .serial
                .as_ref()
                .map(|_| format!("{:013}", hash % SERIALS));
        }
        self
    }
}

fn hash(texts: &[&str]) -> u128 {
    let bytes = texts.iter().flat_map(|text| text.bytes().chain([0]));
    bytes.fold(OFFSET, |hash, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(PRIME)
    })
}

/// Formats a number as a UUID.
fn uuid(number: u128) -> String {
    let digits = format!("{number:032x}");
    let (first, rest) = digits.split_at(8);
    let (second, rest) = rest.split_at(4);
    let (third, rest) = rest.split_at(4);
    let (fourth, fifth) = rest.split_at(4);
    [first, second, third, fourth, fifth].join("-")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::description::{H100X2, T4};

    fn machine(file: &str, node: &str) -> MachineDescription {
        MachineDescription::parse(file).unwrap().on_node(node)
    }

    #[test]
    fn gpus_of_nodes_differ_and_stay() {
        let mut uuids = BTreeSet::new();
        let mut serials = BTreeSet::new();
        for node in ["node-0", "node-1", "kind-worker"] {
            let on_node = machine(H100X2, node);
            assert_eq!(on_node, machine(H100X2, node));
            assert_eq!(on_node.check(), Ok(()));
            for gpu in on_node.gpus {
                assert_eq!(gpu.serial.as_ref().map(String::len), Some(13));
                serials.insert(gpu.serial);
                uuids.insert(gpu.uuid);
            }
        }
        assert_eq!((uuids.len(), serials.len()), (6, 6));
    }

    #[test]
    fn changes_nothing_but_identity() {
        let file = MachineDescription::parse(T4).unwrap();
        let mut on_node = machine(T4, "node-0");
        for (changed, original) in on_node.gpus.iter_mut().zip(&file.gpus) {
            assert_ne!(changed.uuid, original.uuid);
            changed.uuid.clone_from(&original.uuid);
            changed.serial.clone_from(&original.serial);
        }
        assert_eq!(on_node, file);
    }
}
