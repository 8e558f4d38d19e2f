//! Unix sockets of the plugin: paths, binding, recreation.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use drava_api::names;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Router;

/// Maximum length of a socket path (`sun_path` without NUL).
const MAX_PATH: usize = 107;

/// Time between two attempts to bind, and between two checks of the socket file.
const INTERVAL: Duration = Duration::from_secs(2);

/// Time limit of calls in progress when the driver stops.
pub const DRAIN: Duration = Duration::from_secs(5);

/// Paths of the driver's sockets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sockets {
    /// Registration socket, which kubelet's plugin watcher finds.
    pub registration: PathBuf,
    /// DRA socket.
    pub dra: PathBuf,
}

/// The path of a socket is too long.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "socket path {} exceeds {MAX_PATH} bytes; move kubelet's root directory (--kubelet-dir) to a shorter path",
    .0.display()
)]
pub struct PathTooLong(PathBuf);

impl Sockets {
    /// Returns the socket paths below kubelet's root directory. Names contain the pod UID, or its hash when the path would
    /// be too long.
    ///
    /// # Errors
    /// When the path with the hash is too long.
    pub fn new(kubelet_dir: &Path, pod_uid: Option<&str>) -> Result<Self, PathTooLong> {
        let registry = kubelet_dir.join("plugins_registry");
        let data = kubelet_dir.join("plugins").join(names::DRIVER);
        // Kubelet sends the percent-encoded path as the HTTP/2 `:authority` (1.37.1, pluginmanager/operationexecutor,
        // without WithAuthority). The http crate rejects a percent sign in a host but accepts it in user information,
        // and grpc-go does not encode `@`: the path becomes the user information of the host `localhost`.
        let registration =
            |id: &str| registry.join(format!("{}{id}-reg.sock@localhost", names::DRIVER));
        let dra = |id: &str| data.join(format!("dra{id}.sock"));
        Ok(Self {
            registration: fitting(registration, pod_uid)?,
            dra: fitting(dra, pod_uid)?,
        })
    }
}

fn fitting(path: impl Fn(&str) -> PathBuf, pod_uid: Option<&str>) -> Result<PathBuf, PathTooLong> {
    let candidates = match pod_uid {
        None => vec![String::new()],
        Some(uid) => vec![
            format!("-{uid}"),
            format!("-{:08x}", crc32fast::hash(uid.as_bytes())),
        ],
    };
    let mut paths = candidates.iter().map(|id| path(id));
    paths
        .find(|path| path.as_os_str().len() <= MAX_PATH)
        .ok_or_else(|| PathTooLong(path("")))
}

/// Serves `router` on `path` until `stop`. Calls `on_bound` after each bind, binds again when the socket file is deleted,
/// and retries after errors, which are passed to `on_error`.
pub(super) async fn serve(
    path: &Path,
    router: impl Fn() -> Router,
    on_bound: &impl Fn(),
    on_error: &impl Fn(String),
    stop: &CancellationToken,
) {
    let mut reported = None;
    while !stop.is_cancelled() {
        match bind(path).await {
            Ok((listener, inode)) => {
                reported = None;
                tracing::info!("serving");
                on_bound();
                let server = router().serve_with_incoming_shutdown(
                    UnixListenerStream::new(listener),
                    stop.cancelled(),
                );
                let served = tokio::select! {
                    served = server => served,
                    // Open connections are served by their own tasks.
                    () = deleted(path, inode, stop) => {
                        tracing::warn!("socket file deleted; recreating it");
                        continue;
                    }
                };
                if let Err(error) = served {
                    on_error(format!("cannot serve {}: {error}", path.display()));
                }
            }
            Err(error) => {
                let reason = error.to_string();
                if reported.as_ref() != Some(&reason) {
                    tracing::warn!(%reason, "cannot bind the socket; retrying");
                    on_error(reason.clone());
                    reported = Some(reason);
                }
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = tokio::time::sleep(INTERVAL) => {}
                }
            }
        }
    }
}

/// A socket could not be bound.
#[derive(Debug, thiserror::Error)]
enum BindError {
    #[error(
        "kubelet directory {} does not exist; start kubelet, set --kubelet-dir to kubelet's --root-dir and mount it \
         into this pod",
        .0.display()
    )]
    NoKubelet(PathBuf),
    #[error("another instance of the driver serves {}; waiting until it stops", .0.display())]
    Taken(PathBuf),
    #[error("{} exists and is not a socket; remove it", .0.display())]
    NotASocket(PathBuf),
    #[error("cannot bind {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

async fn bind(path: &Path) -> Result<(UnixListener, u64), BindError> {
    let error = |source| BindError::Io {
        path: path.to_owned(),
        source,
    };
    let dir = path.parent().unwrap_or(path);
    if !dir.is_dir() {
        // Kubelet creates the registry; the driver creates its own directory below `plugins`.
        let above = dir.parent().unwrap_or(dir);
        if dir.file_name().is_none_or(|name| name != names::DRIVER) || !above.is_dir() {
            return Err(BindError::NoKubelet(dir.to_owned()));
        }
        fs::create_dir(dir).map_err(error)?;
    }
    match fs::symlink_metadata(path) {
        Ok(present) if !present.file_type().is_socket() => {
            return Err(BindError::NotASocket(path.to_owned()));
        }
        Ok(_) => {
            if UnixStream::connect(path).await.is_ok() {
                return Err(BindError::Taken(path.to_owned()));
            }
            // A crashed instance left the file.
            fs::remove_file(path).map_err(error)?;
        }
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => {}
        Err(other) => return Err(error(other)),
    }
    let listener = UnixListener::bind(path).map_err(error)?;
    let inode = fs::symlink_metadata(path).map_err(error)?.ino();
    Ok((listener, inode))
}

/// Returns when `path` no longer has this inode. Never returns after `stop`, because the driver removes the file then.
async fn deleted(path: &Path, inode: u64, stop: &CancellationToken) {
    while stop.is_cancelled()
        || fs::symlink_metadata(path).is_ok_and(|present| present.ino() == inode)
    {
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Time between two checks whether a socket has a listener.
const STALE_AFTER: Duration = Duration::from_secs(1);

/// Removes sockets without a listener: those of pods of the driver that were killed. Kubelet would repeat registration on
/// them.
///
/// An instance that starts at this moment binds first and listens next, so a socket is checked twice.
pub(super) async fn sweep(own: &Sockets) {
    let mut refusing = Vec::new();
    for path in others(own) {
        refusing.extend(without_listener(&path).await.map(|inode| (path, inode)));
    }
    if refusing.is_empty() {
        return;
    }
    tokio::time::sleep(STALE_AFTER).await;
    for (path, inode) in refusing {
        if without_listener(&path).await != Some(inode) {
            continue;
        }
        match fs::remove_file(&path) {
            Ok(()) => tracing::info!(path = %path.display(), "removed a socket without a listener"),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot remove a socket without a listener");
            }
        }
    }
}

/// Returns whether another instance serves a registration socket, and this instance does not.
pub(super) async fn is_only_other_registered(own: &Sockets) -> bool {
    let is_served = async |path: &Path| UnixStream::connect(path).await.is_ok();
    if is_served(&own.registration).await {
        return false;
    }
    for path in registrations(own) {
        if is_served(&path).await {
            return true;
        }
    }
    false
}

/// Returns the paths of the sockets of other instances.
fn others(own: &Sockets) -> Vec<PathBuf> {
    let is_dra = |name: &str| name.starts_with("dra-") && name.ends_with(".sock");
    let mut paths = registrations(own);
    paths.extend(entries(&own.dra, &is_dra));
    paths
}

/// Returns the paths of the registration sockets of other instances.
fn registrations(own: &Sockets) -> Vec<PathBuf> {
    let is_registration = |name: &str| {
        let rest = name.strip_prefix(names::DRIVER);
        rest.is_some_and(|rest| rest.starts_with('-') && rest.ends_with("-reg.sock@localhost"))
    };
    entries(&own.registration, &is_registration)
}

/// Returns the other entries of the directory of `sibling` with a matching name.
fn entries(sibling: &Path, is_match: &dyn Fn(&str) -> bool) -> Vec<PathBuf> {
    let listed = sibling.parent().and_then(|dir| fs::read_dir(dir).ok());
    let named = listed.into_iter().flatten().flatten().filter(|entry| {
        let name = entry.file_name();
        name.to_str().is_some_and(is_match)
    });
    let paths = named.map(|entry| entry.path());
    paths.filter(|path| path != sibling).collect()
}

/// Returns the inode of a socket without a listener; `None` for any other file.
async fn without_listener(path: &Path) -> Option<u64> {
    let present = fs::symlink_metadata(path).ok()?;
    if !present.file_type().is_socket() {
        return None;
    }
    let refused = UnixStream::connect(path).await.err()?;
    (refused.kind() == io::ErrorKind::ConnectionRefused).then(|| present.ino())
}

/// Removes the socket files of this process.
pub(super) fn remove(sockets: &Sockets) {
    for path in [&sockets.registration, &sockets.dra] {
        match fs::remove_file(path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot remove the socket")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sockets_as_kubelet_expects() {
        let kubelet = Path::new("/var/lib/kubelet");
        let uid = "8d5a1c3e-0000-4000-8000-000000000001";
        let sockets = Sockets::new(kubelet, None).unwrap();
        assert_eq!(
            sockets.registration,
            kubelet.join("plugins_registry/gpu.drava.dev-reg.sock@localhost")
        );
        assert_eq!(sockets.dra, kubelet.join("plugins/gpu.drava.dev/dra.sock"));
        let sockets = Sockets::new(kubelet, Some(uid)).unwrap();
        assert_eq!(
            sockets.registration,
            kubelet.join(format!(
                "plugins_registry/gpu.drava.dev-{uid}-reg.sock@localhost"
            ))
        );
        assert_eq!(
            sockets.dra,
            kubelet.join(format!("plugins/gpu.drava.dev/dra-{uid}.sock"))
        );
    }

    #[test]
    fn hashes_pod_uid_when_the_path_is_too_long() {
        let uid = "8d5a1c3e-0000-4000-8000-000000000001";
        let deep = PathBuf::from(format!("/{}", "k".repeat(45)));
        let sockets = Sockets::new(&deep, Some(uid)).unwrap();
        assert!(!sockets.registration.to_string_lossy().contains(uid));
        assert_ne!(
            sockets,
            Sockets::new(&deep, Some("other-pod-that-is-as-long-as-a-uid-is")).unwrap()
        );
        for path in [&sockets.registration, &sockets.dra] {
            assert!(path.as_os_str().len() <= MAX_PATH, "{}", path.display());
        }
        let error =
            Sockets::new(Path::new(&format!("/{}", "k".repeat(100))), Some(uid)).unwrap_err();
        assert!(error.to_string().contains("--kubelet-dir"), "{error}");
    }
}
