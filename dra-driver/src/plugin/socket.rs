//! Unix sockets: their paths, and serving on one for as long as the driver runs.

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

/// Longest path of a Unix socket (`sun_path` less its NUL).
const MAX_PATH: usize = 107;

/// Time between two attempts to bind, and between two looks whether the socket is still there.
const INTERVAL: Duration = Duration::from_secs(2);

/// Time that calls in progress get to finish when the driver stops.
pub const DRAIN: Duration = Duration::from_secs(5);

/// Paths of the driver's sockets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sockets {
    /// Where kubelet's plugin watcher finds the driver.
    pub registration: PathBuf,
    /// Where kubelet then calls it.
    pub dra: PathBuf,
}

/// kubelet's directory leaves no room for a socket's name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "socket path {} has more than {MAX_PATH} bytes; move kubelet's root directory (--kubelet-dir) to a shorter path",
    .0.display()
)]
pub struct PathTooLong(PathBuf);

impl Sockets {
    /// Below kubelet's root directory. With a pod UID the names are this pod's own; a UID that makes a path too long
    /// is replaced by a hash of it.
    ///
    /// # Errors
    /// When even that is too long.
    pub fn new(kubelet_dir: &Path, pod_uid: Option<&str>) -> Result<Self, PathTooLong> {
        let registry = kubelet_dir.join("plugins_registry");
        let data = kubelet_dir.join("plugins").join(names::DRIVER);
        // kubelet dials this socket with its path, percent-encoded, as the HTTP/2 `:authority` (1.37.1,
        // pluginmanager/operationexecutor; without WithAuthority). The http crate refuses a host with a percent
        // sign but not user information with one, and grpc-go leaves `@` as it is: so the path becomes the user
        // information of a host called `localhost`.
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

/// Serves `router` on `path` until `stop`: binds, calls `bound`, and binds again if the socket disappears. What keeps
/// it from binding goes to `trouble`, and it tries again.
pub(super) async fn serve(
    path: &Path,
    router: impl Fn() -> Router,
    bound: &impl Fn(),
    trouble: &impl Fn(String),
    stop: &CancellationToken,
) {
    let mut reported = None;
    while !stop.is_cancelled() {
        match bind(path).await {
            Ok((listener, inode)) => {
                reported = None;
                tracing::info!("serving");
                bound();
                let server = router().serve_with_incoming_shutdown(
                    UnixListenerStream::new(listener),
                    stop.cancelled(),
                );
                let served = tokio::select! {
                    served = server => served,
                    // Connections that are open go on being served by tasks of their own.
                    () = disappeared(path, inode, stop) => {
                        tracing::warn!("the socket has disappeared, making it again");
                        continue;
                    }
                };
                if let Err(error) = served {
                    trouble(format!("serve {}: {error}", path.display()));
                }
            }
            Err(error) => {
                let reason = error.to_string();
                if reported.as_ref() != Some(&reason) {
                    tracing::warn!(%reason, "cannot serve yet, trying again");
                    trouble(reason.clone());
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
        "kubelet's directory {} does not exist: is kubelet running, and is --kubelet-dir its --root-dir and mounted \
         into this pod?",
        .0.display()
    )]
    NoKubelet(PathBuf),
    #[error("another instance of the driver serves {}; waiting until it stops", .0.display())]
    Taken(PathBuf),
    #[error("{} is in the way and is not a socket; remove it", .0.display())]
    NotASocket(PathBuf),
    #[error("bind {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

async fn bind(path: &Path) -> Result<(UnixListener, u64), BindError> {
    let error = |source| BindError::Io {
        path: path.to_owned(),
        source,
    };
    let dir = path.parent().unwrap_or(path);
    if !dir.is_dir() {
        // The registry is kubelet's; the driver's own directory below `plugins` is made here.
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
            // Its owner died without removing it.
            fs::remove_file(path).map_err(error)?;
        }
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => {}
        Err(other) => return Err(error(other)),
    }
    let listener = UnixListener::bind(path).map_err(error)?;
    let inode = fs::symlink_metadata(path).map_err(error)?.ino();
    Ok((listener, inode))
}

/// Returns when `path` is not the socket with this inode any more; never once the driver stops, which removes it.
async fn disappeared(path: &Path, inode: u64, stop: &CancellationToken) {
    while stop.is_cancelled()
        || fs::symlink_metadata(path).is_ok_and(|present| present.ino() == inode)
    {
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Removes the sockets of this process.
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
    fn names_are_kubelets_and_fit() {
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
    fn a_deep_directory_gets_hashed_names_and_then_an_error() {
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
