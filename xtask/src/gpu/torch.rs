//! PyTorch under a share, with each of its allocators and ways to share memory.

use std::path::Path;
use std::process::Command;

use drava_cluster::process::{self, Limit};

use super::report::Row;
use super::setup::{Setup, Share};
use super::verdicts::{allocator, succeeds};

/// PyTorch sees the share, fills it, gets its own out-of-memory error, and computes correctly after that.
const FILL: &str = r#"
import json, torch
free, total = torch.cuda.mem_get_info()
pieces, piece = [], 512 << 20
while piece >= 2 << 20:
    try:
        pieces.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        piece //= 2
taken = sum(piece.numel() for piece in pieces)
del pieces
torch.cuda.empty_cache()
a = torch.randint(0, 8, (512, 512), device="cuda").double()
b = torch.randint(0, 8, (512, 512), device="cuda").double()
assert torch.equal((a @ b).cpu(), a.cpu() @ b.cpu()), "a matrix product is wrong"
print(json.dumps({"total": total, "free": free, "taken": taken}))
"#;

/// Captures in the mode of the first argument while another thread queries events, and replays.
const CAPTURE: &str = r#"
import sys, threading, torch
mode = sys.argv[1]
x = torch.ones(1 << 20, device="cuda")
stop = threading.Event()
def other():
    stream = torch.cuda.Stream()
    while not stop.is_set():
        with torch.cuda.stream(stream):
            torch.ones(16, device="cuda").add_(1)
        stream.query()
thread = threading.Thread(target=other)
if mode != "global":
    thread.start()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    y = x * 2
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode=mode):
    y = x * 2 + 1
x.fill_(20)
graph.replay()
torch.cuda.synchronize()
stop.set()
if mode != "global":
    thread.join()
assert bool((y == 41).all()), "a replayed graph is wrong"
"#;

/// A spawned process reads and writes a tensor of its parent.
const IPC: &str = r#"
import torch
import torch.multiprocessing as mp
def child(tensor, done):
    tensor.add_(1)
    torch.cuda.synchronize()
    done.set()
if __name__ == "__main__":
    mp.set_start_method("spawn")
    tensor, done = torch.zeros(1 << 20, device="cuda"), mp.Event()
    process = mp.Process(target=child, args=(tensor, done))
    process.start()
    process.join()
    assert process.exitcode == 0 and bool((tensor == 1).all()), "the child's write is lost"
"#;

/// Forked loaders, which have no context, feed a process with one.
const LOADERS: &str = r#"
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.ones(1, device="cuda")
data = TensorDataset(torch.arange(1024.0))
loader = DataLoader(data, batch_size=64, num_workers=2, pin_memory=True, multiprocessing_context="fork")
total = sum(float(batch.cuda().sum()) for (batch,) in loader)
assert total == 1023 * 1024 / 2, f"the sum is {total}"
"#;

const ALLOCATORS: &str = "PYTORCH_CUDA_ALLOC_CONF";

pub(super) fn rows(setup: &Setup, share: &Share, limit: u64) -> Vec<Row> {
    let python = |script: &str, arguments: &[&str]| {
        let mut command = setup.program(Some(share), Path::new("python3"));
        command.args(["-c", script]).args(arguments);
        command
    };
    let with = |setting: &str| {
        let mut command = python(FILL, &[]);
        command.env(ALLOCATORS, setting);
        command
    };
    let filled = [
        ("PyTorch, its own allocator", python(FILL, &[])),
        (
            "PyTorch, expandable segments",
            with("expandable_segments:True"),
        ),
        (
            "PyTorch, asynchronous allocator",
            with("backend:cudaMallocAsync"),
        ),
    ];
    let ran = [
        (
            "PyTorch, capture in mode global",
            python(CAPTURE, &["global"]),
        ),
        (
            "PyTorch, capture in mode thread_local",
            python(CAPTURE, &["thread_local"]),
        ),
        (
            "PyTorch, capture in mode relaxed",
            python(CAPTURE, &["relaxed"]),
        ),
        ("PyTorch, forked data loaders", python(LOADERS, &[])),
        (
            "PyTorch, memory of another process",
            file(setup, share, IPC),
        ),
    ];
    if !has_torch(setup) {
        let titles = filled.iter().chain(&ran).map(|(title, _)| *title);
        let reason = "python3 has no torch that can use the GPU";
        return titles.map(|title| Row::not_run(title, reason)).collect();
    }
    let filled = filled.map(|(title, command)| allocator(title, command, limit));
    let ran = ran.map(|(title, command)| succeeds(title, command));
    filled.into_iter().chain(ran).collect()
}

/// A script as a file: a spawned process imports it.
fn file(setup: &Setup, share: &Share, script: &str) -> Command {
    let path = setup.out.join("torch_ipc.py");
    let mut command = setup.program(Some(share), Path::new("python3"));
    // A script that cannot be written fails to run, with the reason.
    let _ = std::fs::write(&path, script);
    command.arg(path);
    command
}

pub(super) fn has_torch(setup: &Setup) -> bool {
    let mut probe = setup.program(None, Path::new("python3"));
    probe.args(["-c", "import torch; assert torch.cuda.is_available()"]);
    process::output(&mut probe, Limit::REQUEST).is_ok_and(|output| output.status.success())
}
