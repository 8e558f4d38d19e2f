//! Creates the driver's directories and checks at start that they are writable.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::node::files;
use crate::node::layout::Layout;
use crate::report::conditions::{Condition, Conditions};

/// Time between two attempts.
const RETRY: Duration = Duration::from_secs(5);

/// Creates the directories; retries until they are writable.
pub async fn create(layout: &Layout, conditions: &Conditions) {
    loop {
        match try_create(layout) {
            Ok(()) => return conditions.set(Condition::Directories, Ok(())),
            Err(reason) => conditions.set(Condition::Directories, Err(reason)),
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn try_create(layout: &Layout) -> Result<(), String> {
    // Claims and locks belong to the driver; the CDI directory is shared with the container runtime.
    let wanted: [(PathBuf, u32); 4] = [
        (layout.claims(), 0o755),
        (layout.locks(), 0o700),
        (layout.usages(), 0o755),
        (layout.cdi_dir().to_owned(), 0o755),
    ];
    for (path, mode) in wanted {
        let created = DirBuilder::new()
            .recursive(true)
            .mode(mode)
            .create(&path)
            .and_then(|()| probe(&path));
        created.map_err(|error| {
            format!(
                "cannot write to {}: {error}; run the driver as root and mount the directory from the node",
                path.display()
            )
        })?;
    }
    Ok(())
}

/// Creates and removes a file in `dir`: a read-only file system fails only on a write.
fn probe(dir: &Path) -> io::Result<()> {
    let path = files::temporary_path(&dir.join("probe"));
    fs::write(&path, b"")?;
    fs::remove_file(&path)
}
