//! Serves the CDI hooks that ask for memory limits by the NVIDIA driver, and keeps these limits equal to the limits pages.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use super::until;
use crate::kubelet::claims::blocking;
use crate::prepare::cgroup_limits::{CgroupLimits, LimitRequest, READ_EVERY};

/// Time between two comparisons with the limits pages, as of the node agent.
const PERIOD: Duration = Duration::from_millis(100);
/// Time between two attempts to listen.
const RETRY: Duration = Duration::from_secs(1);
/// Longest time for a request.
const REQUEST: Duration = Duration::from_secs(20);
/// Longest time for its limit: the rest is for the answer.
const ANSWER: Duration = Duration::from_secs(18);
/// Size limit of a request: two IDs and the path of a cgroup.
const MAX_REQUEST: u64 = 16 << 10;

/// Serves until `stop`.
pub(super) async fn run(limits: Arc<CgroupLimits>, socket: PathBuf, stop: CancellationToken) {
    tokio::join!(
        serve(Arc::clone(&limits), &socket, &stop),
        follow(limits, &stop)
    );
}

async fn serve(limits: Arc<CgroupLimits>, socket: &Path, stop: &CancellationToken) {
    let listener = loop {
        match listen(socket) {
            Ok(listener) => break listener,
            Err(error) => {
                let path = socket.display();
                tracing::warn!(%path, %error, "cannot listen for CDI hooks; containers with a memory limit by the NVIDIA driver wait");
            }
        }
        if !until(stop, tokio::time::sleep(RETRY)).await {
            return;
        }
    };
    let turn = Arc::new(Mutex::new(()));
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let answered = answer(Arc::clone(&limits), Arc::clone(&turn), stream);
                tokio::spawn(tokio::time::timeout(REQUEST, answered));
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept requests of CDI hooks");
                if !until(stop, tokio::time::sleep(RETRY)).await {
                    return;
                }
            }
        }
    }
}

/// Only root of the node reaches the socket.
fn listen(socket: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Answers a request. Limits are set one after the other: a request whose turn does not come, because NVML hangs, ends without
/// a call.
async fn answer(
    limits: Arc<CgroupLimits>,
    turn: Arc<Mutex<()>>,
    mut stream: UnixStream,
) -> io::Result<()> {
    let mut line = String::new();
    let (reader, mut writer) = stream.split();
    let mut reader = BufReader::new(reader.take(MAX_REQUEST));
    reader.read_line(&mut line).await?;
    let answer = match serde_json::from_str::<LimitRequest>(&line) {
        Err(error) => error.to_string(),
        Ok(request) => {
            let limited = async {
                let turn = turn.lock_owned().await;
                blocking(move || {
                    // Over when NVML has answered or is waited for no longer, however long the caller waits.
                    let _turn = turn;
                    limits.limit(&request)
                })
                .await
            };
            match tokio::time::timeout(ANSWER, limited).await {
                Ok(Ok(Ok(()))) => "ok".to_owned(),
                Ok(Ok(Err(error))) => describe(&error),
                Ok(Err(error)) => describe(&error),
                Err(_) => "the NVIDIA driver does not answer".to_owned(),
            }
        }
    };
    writer.write_all(format!("{answer}\n").as_bytes()).await
}

async fn follow(limits: Arc<CgroupLimits>, stop: &CancellationToken) {
    // Passes since each failure was seen: limits are read back in some passes only.
    let mut reported: BTreeMap<String, u32> = BTreeMap::new();
    while until(stop, tokio::time::sleep(PERIOD)).await {
        let limits = Arc::clone(&limits);
        let failures: Vec<String> = match blocking(move || limits.follow()).await {
            Ok(failures) => failures.iter().map(|error| describe(error)).collect(),
            Err(error) => vec![describe(&error)],
        };
        for error in failures {
            if reported.insert(error.clone(), 0).is_none() {
                tracing::warn!(error, "cannot follow the memory limit of a share");
            }
        }
        reported.retain(|_, age| {
            *age += 1;
            *age <= 2 * READ_EVERY
        });
    }
}
