//! The server: owns the contexts whose time slices its clients share. Its control daemon ends it; one that is killed leaves it.

use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::client::Connection;
use crate::description::MachineDescription;
use crate::protocol::{
    ClientKind, GpuIndex, MpsReply, MpsRequest, MpsServerKey, Reply, Request, ThreadPercentage,
};
use crate::root::DriverRoot;

use super::client::format_key;
use super::log::Log;
use super::{SHARED_MEMORY, root_of};

/// Argument with the limit of each client.
pub(super) const PERCENTAGE: &str = "--percentage";
/// Argument that opens the shared memory to all users.
pub(super) const MULTI_USER: &str = "--multi-user";
/// What the control daemon writes to end it.
pub(super) const STOP: &[u8] = b"stop";

/// Runs the server until its control daemon ends.
pub(super) fn run(program: &Path, arguments: &[String]) -> ExitCode {
    let mut log = Log::new(io::stderr(), "Server");
    match serve(program, arguments, &mut log) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log.line(&format!("Failed to start : {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn serve<W: Write>(program: &Path, arguments: &[String], log: &mut Log<W>) -> anyhow::Result<()> {
    let (percentage, is_multi_user) = match arguments {
        [option, value] if option == PERCENTAGE => (value, false),
        [option, value, all] if option == PERCENTAGE && all == MULTI_USER => (value, true),
        _ => bail!("invalid argument"),
    };
    let percentage: ThreadPercentage = percentage.parse()?;
    let root = root_of(program);
    let (mut connection, welcome) = Connection::open(&root, ClientKind::Mps)?;
    let selected = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let gpus = visible_gpus(&root, &welcome.machine);
    let gpus = selected_gpus(&gpus, selected.as_deref());
    let secret = RandomState::new().build_hasher().finish();
    let serve = Request::Mps(MpsRequest::Serve {
        gpus,
        percentage,
        secret,
    });
    let reply = connection.request(&serve)?;
    let Reply::Mps(MpsReply::Serving { server }) = reply else {
        bail!("unexpected answer {reply:?}");
    };
    let key = MpsServerKey { server, secret };
    let shared = Shared::create(key, is_multi_user)?;
    log.line(&format!("Created shared memory region {}", shared.name));
    log.line(&format!("Active Threads Percentage set to {percentage}"));
    log.line("Server has started");
    let mut output = io::stdout();
    write!(output, "{} {}", shared.name, format_key(key))?;
    output.flush()?;
    let mut told = Vec::new();
    io::stdin().read_to_end(&mut told)?;
    if told != STOP {
        // Its daemon was killed: it keeps its contexts and its clients, as long as there is a machine.
        while connection.next_event(Duration::from_secs(60)).is_ok() {}
    }
    log.line("Server is shutting down");
    Ok(())
}

/// A file in shared memory, removed when dropped.
struct Shared {
    name: String,
    path: PathBuf,
}

impl Shared {
    fn create(key: MpsServerKey, is_multi_user: bool) -> anyhow::Result<Self> {
        let user = rustix::process::geteuid().as_raw();
        // Machines may share the directory, so the id of the server is not enough.
        let name = format!("mps.shm.{user}.{}", std::process::id());
        let path = Path::new(SHARED_MEMORY).join(&name);
        // An earlier process with this PID may have been killed.
        let _ = fs::remove_file(&path);
        let mode = if is_multi_user { 0o644 } else { 0o600 };
        let mut options = fs::OpenOptions::new();
        let file = options.write(true).create_new(true).mode(mode).open(&path);
        let mut file = file.with_context(|| format!("cannot create {}", path.display()))?;
        file.write_all(format_key(key).as_bytes())?;
        Ok(Self { name, path })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // A leftover file names a server that is gone.
        let _ = fs::remove_file(&self.path);
    }
}

/// GPUs whose device nodes are visible, with their UUIDs.
fn visible_gpus(root: &DriverRoot, machine: &MachineDescription) -> Vec<(GpuIndex, String)> {
    let gpus = (0..).map(GpuIndex).zip(&machine.gpus);
    let visible = gpus.filter(|(gpu, _)| root.sees(*gpu));
    visible
        .map(|(gpu, described)| (gpu, described.uuid.clone()))
        .collect()
}

/// Selects GPUs as `CUDA_VISIBLE_DEVICES` does: by ordinals and beginnings of UUIDs, up to the first without a match.
fn selected_gpus(gpus: &[(GpuIndex, String)], selected: Option<&str>) -> Vec<GpuIndex> {
    let Some(selected) = selected else {
        return gpus.iter().map(|(gpu, _)| *gpu).collect();
    };
    let find = |name: &str| match name.parse::<usize>() {
        Ok(ordinal) => gpus.get(ordinal),
        Err(_) => gpus
            .iter()
            .find(|(_, uuid)| name.starts_with("GPU-") && uuid.starts_with(name)),
    };
    let mut found = Vec::new();
    for name in selected.split(',').map(str::trim) {
        match find(name) {
            Some((gpu, _)) if !found.contains(gpu) => found.push(*gpu),
            _ => break,
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selects_gpus_by_ordinal_and_uuid() {
        let gpus = ["GPU-ab", "GPU-cd", "GPU-ce"];
        let gpus = (0..).map(GpuIndex).zip(gpus.map(str::to_owned));
        let gpus: Vec<(GpuIndex, String)> = gpus.collect();
        let selected = |list| {
            let found = selected_gpus(&gpus, list).into_iter();
            found.map(|gpu| gpu.0).collect::<Vec<u32>>()
        };
        assert_eq!(selected(None), [0, 1, 2]);
        assert_eq!(selected(Some("2, GPU-a")), [2, 0]);
        assert_eq!(selected(Some("GPU-ce,9,0")), [2]);
        assert_eq!(selected(Some("1,1")), [1]);
        assert_eq!(selected(Some("")), [0u32; 0]);
    }
}
