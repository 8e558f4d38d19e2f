//! Log files in the format of the real programs.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A log file, or standard error.
#[derive(Debug)]
pub(super) struct Log<W> {
    to: W,
    part: &'static str,
}

impl Log<File> {
    /// Opens a log file for appending.
    pub(super) fn open(path: &Path, part: &'static str) -> io::Result<Self> {
        let to = fs::OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(path)?;
        Ok(Self { to, part })
    }

    pub(super) fn file(&self) -> &File {
        &self.to
    }
}

impl<W: Write> Log<W> {
    pub(super) fn new(to: W, part: &'static str) -> Self {
        Self { to, part }
    }

    /// Appends a line. Nothing depends on the log.
    pub(super) fn line(&mut self, text: &str) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let time = timestamp(since.unwrap_or_default());
        let pid = std::process::id();
        let _ = writeln!(self.to, "[{time} {:>7} {pid:>5}] {text}", self.part);
    }
}

/// Returns a UTC time as `2026-02-06 09:34:17.770`.
fn timestamp(since_epoch: Duration) -> String {
    let seconds = since_epoch.as_secs();
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01, in eras of 400 years; a year starts in March, so that the leap day is its last.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = match month {
        0..=9 => (month + 3, 0),
        _ => (month - 9, 1),
    };
    let year = era * 400 + year + next;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let millisecond = since_epoch.subsec_millis();
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{millisecond:03}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_times() {
        let cases = [
            (0, "1970-01-01 00:00:00.250"),
            (951_782_399, "2000-02-28 23:59:59.250"),
            (951_782_400, "2000-02-29 00:00:00.250"),
            (1_770_370_457, "2026-02-06 09:34:17.250"),
            (4_107_542_400, "2100-03-01 00:00:00.250"),
        ];
        for (seconds, expected) in cases {
            let since = Duration::from_secs(seconds) + Duration::from_millis(250);
            assert_eq!(timestamp(since), expected);
        }
    }
}
