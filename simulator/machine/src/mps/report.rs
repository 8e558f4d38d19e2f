//! Answers to commands of the shell, as text.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::protocol::{GpuIndex, MpsServerState, MpsStatus};

/// A server with its state.
#[derive(Clone, Debug)]
pub(super) struct Reported {
    pub(super) pid: u32,
    pub(super) state: MpsServerState,
}

pub(super) fn status(status: MpsStatus) -> &'static str {
    match status {
        MpsStatus::Active => "ACTIVE",
        MpsStatus::Fault => "FAULT",
    }
}

/// PIDs, one a line.
pub(super) fn pids(pids: impl IntoIterator<Item = u32>) -> String {
    let lines: Vec<String> = pids.into_iter().map(|pid| pid.to_string()).collect();
    lines.join("\n")
}

/// GPUs with the PIDs of their clients.
pub(super) fn clients_by_gpu(servers: &[Reported], uuids: &[String]) -> String {
    let mut clients: BTreeMap<GpuIndex, Vec<String>> = BTreeMap::new();
    for client in servers.iter().flat_map(|server| &server.state.clients) {
        for gpu in &client.gpus {
            clients
                .entry(*gpu)
                .or_default()
                .push(client.pid.to_string());
        }
    }
    let line = |(gpu, pids): (&GpuIndex, &Vec<String>)| {
        format!("{}: {}", uuid(uuids, *gpu), pids.join(" "))
    };
    let lines: Vec<String> = clients.iter().map(line).collect();
    lines.join("\n")
}

/// Table of clients and GPUs, of one client or of all.
pub(super) fn processes(servers: &[Reported], uuids: &[String], only: Option<u32>) -> String {
    let mut lines = vec![line([
        "PID",
        "ID",
        "SERVER",
        "DEVICE",
        "NAMESPACE",
        "COMMAND",
    ])];
    for server in servers {
        let clients = server.state.clients.iter();
        for client in clients.filter(|client| only.is_none_or(|pid| pid == client.pid)) {
            for gpu in &client.gpus {
                lines.push(line([
                    &client.pid.to_string(),
                    "0",
                    &server.pid.to_string(),
                    uuid(uuids, *gpu).get(..21).unwrap_or("-"),
                    &namespace(client.pid),
                    &command(client.pid),
                ]));
            }
        }
    }
    lines.join("\n")
}

fn line([pid, id, server, device, namespace, command]: [&str; 6]) -> String {
    format!("{pid:<9} {id:<5} {server:<8} {device:<22} {namespace:<12} {command}")
}

fn uuid(uuids: &[String], gpu: GpuIndex) -> &str {
    let index = usize::try_from(gpu.0).ok();
    index
        .and_then(|index| uuids.get(index))
        .map_or("-", String::as_str)
}

/// Unknown without `/proc`.
fn namespace(pid: u32) -> String {
    let inode = fs::metadata(format!("/proc/{pid}/ns/pid"));
    inode.map_or_else(|_| "-".to_owned(), |found| found.ino().to_string())
}

fn command(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm"));
    name.map_or_else(|_| "-".to_owned(), |name| name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{MpsClientState, ThreadPercentage};

    #[test]
    fn lists_each_client_by_gpu() {
        let client = |pid, gpus: &[u32]| MpsClientState {
            pid,
            gpus: gpus.iter().map(|gpu| GpuIndex(*gpu)).collect(),
        };
        let servers = [Reported {
            pid: 5,
            state: MpsServerState {
                status: MpsStatus::Active,
                percentage: ThreadPercentage::ALL,
                clients: vec![client(u32::MAX, &[0, 1]), client(8, &[1])],
            },
        }];
        let uuids = ["GPU-ab", "GPU-cd"].map(|start| format!("{start}000000-0000-0000-0000"));
        assert_eq!(
            clients_by_gpu(&servers, &uuids),
            format!("{}: 4294967295\n{}: 4294967295 8", uuids[0], uuids[1])
        );
        let table = processes(&servers, &uuids, None);
        let rows: Vec<Vec<&str>> = table
            .lines()
            .map(|row| row.split_whitespace().collect())
            .collect();
        assert_eq!(rows.len(), 4);
        assert_eq!(
            rows[1][..5],
            ["4294967295", "0", "5", "GPU-ab000000-0000-000", "-"]
        );
        assert_eq!(processes(&servers, &uuids, Some(8)).lines().count(), 2);
    }
}
