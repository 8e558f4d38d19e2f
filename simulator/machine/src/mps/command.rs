//! Commands of the shell.

use std::time::Duration;

use crate::protocol::ThreadPercentage;

/// A command of the shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    ServerList,
    ServerStatus {
        server: u32,
    },
    StartServer {
        user: u32,
    },
    ShutdownServer {
        server: u32,
        is_forced: bool,
    },
    ClientList {
        server: u32,
    },
    DeviceClientList {
        server: Option<u32>,
    },
    Processes {
        client: Option<u32>,
    },
    DefaultPercentage,
    SetDefaultPercentage(ThreadPercentage),
    Percentage {
        server: u32,
    },
    SetPercentage {
        server: u32,
        percentage: ThreadPercentage,
    },
    TerminateClient {
        server: u32,
        client: u32,
    },
    Quit {
        timeout: Option<Duration>,
    },
}

impl Command {
    /// Parses a line.
    ///
    /// # Errors
    /// The text for the user.
    pub(super) fn parse(line: &str) -> Result<Self, String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (name, arguments) = words.split_first().ok_or("no command")?;
        match (*name, arguments) {
            ("get_server_list", []) => Ok(Self::ServerList),
            ("get_server_status", [server]) => Ok(Self::ServerStatus {
                server: number(server)?,
            }),
            ("start_server", ["-uid", user]) => Ok(Self::StartServer {
                user: number(user)?,
            }),
            ("shutdown_server", [server]) => Ok(Self::ShutdownServer {
                server: number(server)?,
                is_forced: false,
            }),
            ("shutdown_server", [server, "-f"] | ["-f", server]) => Ok(Self::ShutdownServer {
                server: number(server)?,
                is_forced: true,
            }),
            ("get_client_list", [server]) => Ok(Self::ClientList {
                server: number(server)?,
            }),
            ("get_device_client_list", []) => Ok(Self::DeviceClientList { server: None }),
            ("get_device_client_list", [server]) => Ok(Self::DeviceClientList {
                server: Some(number(server)?),
            }),
            ("ps", []) => Ok(Self::Processes { client: None }),
            ("ps", ["-p", client]) => Ok(Self::Processes {
                client: Some(number(client)?),
            }),
            ("get_default_active_thread_percentage", []) => Ok(Self::DefaultPercentage),
            ("set_default_active_thread_percentage", [value]) => {
                Ok(Self::SetDefaultPercentage(percentage(value)?))
            }
            ("get_active_thread_percentage", [server]) => Ok(Self::Percentage {
                server: number(server)?,
            }),
            ("set_active_thread_percentage", [server, value]) => Ok(Self::SetPercentage {
                server: number(server)?,
                percentage: percentage(value)?,
            }),
            ("terminate_client", [server, client]) => Ok(Self::TerminateClient {
                server: number(server)?,
                client: number(client)?,
            }),
            ("quit", []) => Ok(Self::Quit { timeout: None }),
            ("quit", ["-t", seconds]) => Ok(Self::Quit {
                timeout: Some(Duration::from_secs(number(seconds)?.into())),
            }),
            _ => Err(format!("Unrecognized command: {line}")),
        }
    }
}

fn number(word: &str) -> Result<u32, String> {
    word.parse().map_err(|_| format!("Invalid number: {word}"))
}

fn percentage(word: &str) -> Result<ThreadPercentage, String> {
    word.parse()
        .map_err(|_| format!("Invalid percentage: {word}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_commands_with_their_arguments() {
        let cases = [
            ("  get_server_list ", Command::ServerList),
            (
                "start_server -uid 1000",
                Command::StartServer { user: 1000 },
            ),
            (
                "quit -t 5",
                Command::Quit {
                    timeout: Some(Duration::from_secs(5)),
                },
            ),
            (
                "shutdown_server 7 -f",
                Command::ShutdownServer {
                    server: 7,
                    is_forced: true,
                },
            ),
            (
                "terminate_client 7 8",
                Command::TerminateClient {
                    server: 7,
                    client: 8,
                },
            ),
            ("ps -p 8", Command::Processes { client: Some(8) }),
        ];
        for (line, expected) in cases {
            assert_eq!(Command::parse(line), Ok(expected));
        }
    }

    #[test]
    fn rejects_what_is_no_command() {
        for line in [
            "",
            "help",
            "get_server_status",
            "get_server_status x",
            "set_default_active_thread_percentage 101",
            "terminate_client 7",
            "quit now",
        ] {
            assert!(Command::parse(line).is_err(), "{line}");
        }
    }
}
