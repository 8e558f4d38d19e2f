//! Log of the commands of a control daemon: whether it was told to quit.
//!
//! Root in a container of the GPU can give commands, and with them fill the log. Only what is new is read, in parts of
//! bounded size.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Start of a line that is kept, with one blank for each run of them: the command is in it.
const LINE_BYTES: usize = 256;

/// What was read of the log of a daemon.
#[derive(Debug, Default)]
pub(super) struct ControlLog {
    /// Device and inode: another daemon has another log.
    file: Option<(u64, u64)>,
    /// End of what was read.
    offset: u64,
    /// Start of the last line, which has no end yet.
    line: Vec<u8>,
    was_told_to_quit: bool,
}

impl ControlLog {
    /// Reads what is new, and returns whether the daemon was ever told to quit. Another program may have emptied the log, which is
    /// shorter than before then, and new as a whole.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub(super) fn was_told_to_quit(&mut self, path: &Path) -> io::Result<bool> {
        let mut log = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            log => log?,
        };
        let found = log.metadata()?;
        let file = Some((found.dev(), found.ino()));
        if self.file != file {
            *self = Self {
                file,
                ..Self::default()
            };
        }
        if found.len() < self.offset {
            self.rewind();
        }
        log.seek(SeekFrom::Start(self.offset))?;
        let mut part = [0; 1 << 14];
        loop {
            let read = log.read(&mut part)?;
            let Some(read) = part.get(..read).filter(|read| !read.is_empty()) else {
                return Ok(self.was_told_to_quit);
            };
            self.offset += read.len() as u64;
            self.add(read);
        }
    }

    /// Empties the log if it has at least `bytes`, unless the daemon was told to quit: the log tells the next node driver, too. What came
    /// since the last look is read before.
    ///
    /// # Errors
    /// When the log cannot be read or emptied.
    pub(super) fn empty(&mut self, path: &Path, bytes: u64) -> io::Result<()> {
        if path.metadata()?.len() < bytes {
            return Ok(());
        }
        let log = File::options().write(true).open(path)?;
        // A line may come while the log is read: the log is emptied only as it was read. One that comes between the comparison and
        // the end of the log, two system calls, is lost; the daemon then takes no program, and is replaced for that.
        while !self.was_told_to_quit(path)? {
            if log.metadata()?.len() == self.offset {
                log.set_len(0)?;
                self.rewind();
                break;
            }
        }
        Ok(())
    }

    fn rewind(&mut self) {
        self.offset = 0;
        self.line.clear();
    }

    fn add(&mut self, read: &[u8]) {
        for part in read.split_inclusive(|byte| *byte == b'\n') {
            for byte in part {
                let is_run = byte.is_ascii_whitespace()
                    && self.line.last().is_some_and(u8::is_ascii_whitespace);
                if self.line.len() < LINE_BYTES && !is_run {
                    self.line.push(*byte);
                }
            }
            if part.ends_with(b"\n") {
                self.was_told_to_quit |= is_quit(&String::from_utf8_lossy(&self.line));
                self.line.clear();
            }
        }
    }
}

/// Whether a line, as `[2026-02-06 09:34:17.770 Control 17] Cmd:quit`, is that of the command.
fn is_quit(line: &str) -> bool {
    let command = line
        .split_once("] ")
        .and_then(|(_, text)| text.strip_prefix("Cmd:"));
    command.is_some_and(|command| command.split_ascii_whitespace().next() == Some("quit"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::os::unix::fs::FileExt as _;
    use std::path::PathBuf;

    use tempfile::TempDir;

    use super::*;

    struct Daemon {
        _dir: TempDir,
        path: PathBuf,
        seen: ControlLog,
    }

    impl Daemon {
        fn start() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("control.log");
            Self {
                _dir: dir,
                path,
                seen: ControlLog::default(),
            }
        }

        fn log(&self, text: &str) {
            let options = File::options().append(true).create(true).open(&self.path);
            options.unwrap().write_all(text.as_bytes()).unwrap();
        }

        fn quits(&mut self) -> bool {
            self.seen.was_told_to_quit(&self.path).unwrap()
        }

        fn len(&self) -> u64 {
            self.path.metadata().unwrap().len()
        }
    }

    fn line(text: &str) -> String {
        format!("[2026-02-06 09:34:17.770 Control    17] {text}\n")
    }

    #[test]
    fn finds_quit_in_log() {
        for quit in ["Cmd:quit", "Cmd:quit -t 100000", "Cmd: quit "] {
            assert!(is_quit(&line(quit)), "{quit}");
        }
        for other in ["Cmd:quitter", "Cmd:say Cmd:quit", "quit", "NEW UI"] {
            assert!(!is_quit(&line(other)), "{other}");
        }
        assert!(!is_quit("Cmd:quit"));
    }

    #[test]
    fn reads_only_what_is_new() {
        let mut daemon = Daemon::start();
        assert!(!daemon.quits(), "no log so far");
        let (other, quit) = (line("Cmd:look"), line("Cmd:quit"));
        daemon.log(&other);
        assert!(!daemon.quits());
        // What was read once is read no more.
        let written = File::options().write(true).open(&daemon.path).unwrap();
        written.write_all_at(quit.as_bytes(), 0).unwrap();
        assert!(!daemon.quits());
        // A line that is written in parts, and one that is longer than any command.
        daemon.log(&line(&"x".repeat(100_000)));
        let (start, end) = quit.split_at(quit.len() - 3);
        daemon.log(start);
        assert!(!daemon.quits());
        daemon.log(end);
        assert!(daemon.quits());
        assert!(daemon.quits(), "for as long as it runs");
        // Blanks do not hide the command.
        let mut blank = Daemon::start();
        blank.log(&line(&format!("Cmd:{}quit", " ".repeat(1000))));
        assert!(blank.quits());
        // The next daemon has a log of its own.
        let next = daemon.path.with_extension("next");
        fs::write(&next, &other).unwrap();
        fs::rename(&next, &daemon.path).unwrap();
        assert!(!daemon.quits());
    }

    #[test]
    fn finds_quit_just_before_and_after_log_is_emptied() {
        let mut daemon = Daemon::start();
        daemon.log(&line("Cmd:look").repeat(10));
        assert!(!daemon.quits());
        let all = daemon.len();
        daemon.seen.empty(&daemon.path, all + 1).unwrap();
        assert_eq!(daemon.len(), all, "not large");
        daemon.seen.empty(&daemon.path, all).unwrap();
        assert_eq!(daemon.len(), 0);
        // Emptied by another program, too, at any size.
        for emptied in [false, true] {
            let mut after = Daemon::start();
            after.log(&line("Cmd:look").repeat(10));
            assert!(!after.quits());
            match emptied {
                true => after.seen.empty(&after.path, 1).unwrap(),
                false => fs::write(&after.path, "").unwrap(),
            }
            after.log(&line("Cmd:quit"));
            assert!(after.quits(), "{emptied}");
        }
        // No look was between the command and the end of the log.
        daemon.log(&line("Cmd:quit"));
        daemon.log(&line("Cmd:look").repeat(10));
        let all = daemon.len();
        daemon.seen.empty(&daemon.path, 1).unwrap();
        assert_eq!(daemon.len(), all, "a next node driver reads it, too");
        assert!(daemon.quits());
        let mut next = ControlLog::default();
        assert!(next.was_told_to_quit(&daemon.path).unwrap());
    }
}
