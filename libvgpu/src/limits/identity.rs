//! Identity of this process: PID, start time, PID namespace. Written to the slot for people and the node agent.

use drava_vgpu_abi::ledger::Owner;

use crate::system::sys;

/// Returns this process. A value that `/proc` does not provide is 0.
pub(crate) fn own() -> Owner {
    Owner {
        pid: sys::process_id(),
        start_time: start_time().unwrap_or(0),
        pid_namespace: pid_namespace().unwrap_or(0),
    }
}

fn start_time() -> Option<u64> {
    let mut buffer = [0; 1024];
    let fd = sys::open(None, c"/proc/self/stat", libc::O_RDONLY, 0)?;
    let length = sys::read(fd, &mut buffer);
    sys::close(fd);
    parse_start_time(buffer.get(..length?)?)
}

/// Parses field 22 of `/proc/<pid>/stat`. The name in field 2 may contain spaces and parentheses.
fn parse_start_time(stat: &[u8]) -> Option<u64> {
    let end_of_name = stat.iter().rposition(|&byte| byte == b')')?;
    let after = core::str::from_utf8(stat.get(end_of_name..)?).ok()?;
    after.split_ascii_whitespace().nth(20)?.parse().ok()
}

fn pid_namespace() -> Option<u64> {
    // The inode of the opened link needs no parsing.
    let fd = sys::open(None, c"/proc/self/ns/pid", libc::O_RDONLY, 0)?;
    let status = sys::status(fd);
    sys::close(fd);
    status.map(|status| status.inode)
}
