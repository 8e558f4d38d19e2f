//! `nvidia-cuda-mps-control`: starts the daemon, or passes the lines of standard input to it.

use std::io::{self, BufRead, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use crate::client::connected;
use crate::wire;

use super::control::{self, Mode};
use super::control_socket;
use super::message::{FromDaemon, ToDaemon};

const USAGE: &str = "usage: nvidia-cuda-mps-control [-d | -f] [-multiuser-server]";

/// Runs the program.
pub(super) fn run(program: &Path, arguments: &[String]) -> ExitCode {
    let done = match parse(arguments) {
        Some(None) => pass_commands(),
        Some(Some(mode)) => control::run(program, mode),
        None => Err(anyhow::anyhow!(USAGE)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The output may be closed.
            let _ = writeln!(io::stderr(), "{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns how to run the daemon, if at all; `None` if the arguments are not understood.
fn parse(arguments: &[String]) -> Option<Option<Mode>> {
    let (mut background, mut foreground, mut is_multi_user) = (false, false, false);
    for argument in arguments {
        match argument.as_str() {
            "-d" => background = true,
            "-f" => foreground = true,
            "-M" | "-multiuser-server" | "--multiuser-server" => is_multi_user = true,
            _ => return None,
        }
    }
    match (background, foreground, is_multi_user) {
        (true, true, _) | (false, false, true) => None,
        (false, false, false) => Some(None),
        (is_in_background, _, is_multi_user) => Some(Some(Mode {
            is_in_background,
            is_multi_user,
        })),
    }
}

fn pass_commands() -> anyhow::Result<()> {
    let daemon = connected(&control_socket())
        .map_err(|_| anyhow::anyhow!("Cannot find MPS control daemon process"))?;
    let mut output = io::stdout();
    for line in io::stdin().lock().lines() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        wire::send(daemon.as_fd(), &ToDaemon::Command(line), &[])?;
        match wire::receive(daemon.as_fd(), &mut Vec::new()) {
            Ok((FromDaemon::Text(text), _)) if text.is_empty() => {}
            Ok((FromDaemon::Text(text), _)) => {
                // The reader may have enough.
                let _ = writeln!(output, "{text}");
            }
            Ok(_) => {}
            // It has quit.
            Err(_) => return Ok(()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_options() {
        let parsed = |arguments: &[&str]| {
            let arguments: Vec<String> = arguments.iter().map(|one| (*one).to_owned()).collect();
            parse(&arguments)
        };
        let mode = |is_in_background, is_multi_user| {
            Some(Some(Mode {
                is_in_background,
                is_multi_user,
            }))
        };
        assert_eq!(parsed(&[]), Some(None));
        assert_eq!(parsed(&["-d"]), mode(true, false));
        assert_eq!(parsed(&["-f", "-multiuser-server"]), mode(false, true));
        assert_eq!(parsed(&["-M", "-d"]), mode(true, true));
        for wrong in [&["-M"][..], &["-d", "-f"], &["-x"]] {
            assert_eq!(parsed(wrong), None);
        }
    }
}
