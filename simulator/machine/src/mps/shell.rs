//! `nvidia-cuda-mps-control`: starts the daemon, or passes the lines of standard input to it.

use std::io::{self, BufRead, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, bail, ensure};

use crate::client::{Connection, connected};
use crate::protocol::ClientKind;
use crate::wire;

use super::control::{self, Mode};
use super::message::{FromDaemon, ToDaemon};
use super::{control_socket, root_of};

const USAGE: &str =
    "usage: nvidia-cuda-mps-control [-d | -f] [-multiuser-server] [-p 2 | -p 3 (driver 615)]";

/// First release of the driver with interface 3.
const PROTOCOL_RELEASE: u32 = 615;

/// Selects the interface of a daemon, before the option.
const PROTOCOL_VARIABLE: &str = "CUDA_MPS_PROTOCOL_VERSION";

/// Runs the program.
pub(super) fn run(program: &Path, arguments: &[String]) -> ExitCode {
    let done = parse(arguments).and_then(|(mode, option)| {
        let variable = std::env::var(PROTOCOL_VARIABLE).ok();
        // Without either, the release makes no difference.
        if option.is_some() || variable.is_some() {
            let (_, welcome) = Connection::open(&root_of(program), ClientKind::Mps)?;
            let release = welcome.machine.driver_release();
            check_protocol(release, mode.is_some(), option, variable.as_deref())?;
        }
        match mode {
            None => pass_commands(),
            Some(mode) => control::run(program, mode),
        }
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The output may be closed.
            let _ = writeln!(io::stderr(), "{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns how to run the daemon, if at all, and the interface that an option selects.
///
/// # Errors
/// If the arguments are not understood.
fn parse(arguments: &[String]) -> anyhow::Result<(Option<Mode>, Option<&str>)> {
    let (mut background, mut foreground, mut is_multi_user) = (false, false, false);
    let mut protocol = None;
    let mut arguments = arguments.iter().map(String::as_str);
    while let Some(argument) = arguments.next() {
        match argument {
            "-d" => background = true,
            "-f" => foreground = true,
            "-M" | "-multiuser-server" | "--multiuser-server" => is_multi_user = true,
            "-p" | "--protocol" => protocol = Some(arguments.next().context(USAGE)?),
            _ => bail!(USAGE),
        }
    }
    let mode = match (background, foreground, is_multi_user) {
        (true, true, _) | (false, false, true) => bail!(USAGE),
        (false, false, false) => None,
        (is_in_background, _, is_multi_user) => Some(Mode {
            is_in_background,
            is_multi_user,
        }),
    };
    Ok((mode, protocol))
}

/// Checks that the interface 2 is selected, which is the one of all releases; a program that starts no daemon follows the present one.
///
/// # Errors
/// If the release has no such option, or another interface is selected.
fn check_protocol(
    release: u32,
    starts_daemon: bool,
    option: Option<&str>,
    variable: Option<&str>,
) -> anyhow::Result<()> {
    if release < PROTOCOL_RELEASE {
        // It knows no such variable.
        ensure!(option.is_none(), USAGE);
        return Ok(());
    }
    match variable.or(option) {
        _ if !starts_daemon => Ok(()),
        Some("3") => bail!("the simulated daemon does not have the interface 3 of MPS"),
        Some("2") | None => Ok(()),
        Some(_) => bail!(USAGE),
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
            let (mode, protocol) = parse(&arguments).ok()?;
            Some((mode, protocol.map(str::to_owned)))
        };
        let mode = |is_in_background, is_multi_user| {
            Some(Mode {
                is_in_background,
                is_multi_user,
            })
        };
        assert_eq!(parsed(&[]), Some((None, None)));
        assert_eq!(parsed(&["-d"]), Some((mode(true, false), None)));
        let multi_user = Some((mode(false, true), None));
        assert_eq!(parsed(&["-f", "-multiuser-server"]), multi_user);
        assert_eq!(parsed(&["-M", "-d"]), Some((mode(true, true), None)));
        for protocol in ["-p", "--protocol"] {
            let expected = Some((mode(true, false), Some("3".to_owned())));
            assert_eq!(parsed(&["-d", protocol, "3"]), expected);
        }
        for wrong in [&["-M"][..], &["-d", "-f"], &["-x"], &["-d", "-p"]] {
            assert_eq!(parsed(wrong), None);
        }
    }

    #[test]
    fn interface_3_begins_with_driver_615() {
        let is_accepted = |release, starts, option, variable| {
            check_protocol(release, starts, option, variable).is_ok()
        };
        for (release, option, variable, expected) in [
            (580, None, Some("3"), true),
            (580, Some("2"), None, false),
            (615, None, None, true),
            (615, Some("2"), None, true),
            (615, Some("3"), None, false),
            (615, None, Some("3"), false),
            // The variable is the stronger one.
            (615, Some("3"), Some("2"), true),
            (615, Some("2"), Some("3"), false),
            (620, Some("4"), None, false),
        ] {
            let accepted = is_accepted(release, true, option, variable);
            assert_eq!(accepted, expected, "{release} {option:?} {variable:?}");
        }
        // The shell follows the daemon.
        assert!(is_accepted(615, false, Some("3"), Some("3")));
    }
}
