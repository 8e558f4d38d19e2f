//! The directories that the driver works in, made and proved to be writable before anything else.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::conditions::{Condition, Conditions};
use crate::files;
use crate::layout::Layout;

/// Time between two attempts.
const RETRY: Duration = Duration::from_secs(5);

/// Makes the directories, trying again until it works.
pub async fn make(layout: &Layout, conditions: &Conditions) {
    loop {
        match try_make(layout) {
            Ok(()) => return conditions.set(Condition::Directories, Ok(())),
            Err(reason) => conditions.set(Condition::Directories, Err(reason)),
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn try_make(layout: &Layout) -> Result<(), String> {
    // The CDI directory is the runtime's too; claims and locks are nobody else's.
    let wanted: [(PathBuf, u32); 4] = [
        (layout.claims(), 0o755),
        (layout.locks(), 0o700),
        (layout.usages(), 0o755),
        (layout.cdi_dir().to_owned(), 0o755),
    ];
    for (path, mode) in wanted {
        let made = DirBuilder::new()
            .recursive(true)
            .mode(mode)
            .create(&path)
            .and_then(|()| probe(&path));
        made.map_err(|error| {
            format!(
                "cannot write to {}: {error}; the driver runs as root with its directories mounted from the node",
                path.display()
            )
        })?;
    }
    Ok(())
}

/// Whether files can be made in `dir`: a read-only file system shows only when it is tried.
fn probe(dir: &Path) -> io::Result<()> {
    let path = files::temporary_beside(&dir.join("probe"));
    fs::write(&path, b"")?;
    fs::remove_file(&path)
}
