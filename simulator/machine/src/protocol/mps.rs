//! Multi-process service (MPS): servers, and the clients that run in their time slices.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::GpuIndex;

/// Names a server, and proves that its shared memory is accessible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MpsServerKey {
    /// Id, unique on the machine.
    pub server: u64,
    /// Secret of the server.
    pub secret: u64,
}

/// Part of the threads of a GPU, and so of its multiprocessors, in tenths of a percent, at most 1000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ThreadPercentage {
    tenths: u32,
}

impl ThreadPercentage {
    /// The whole GPU.
    pub const ALL: Self = Self { tenths: 1000 };

    /// Returns the multiprocessors of a GPU with `all` that a client may use: rounded up to whole pairs, as blocks are placed
    /// on pairs that share hardware.
    #[must_use]
    pub fn multiprocessors(self, all: u32) -> u32 {
        let part = (u64::from(all) * u64::from(self.tenths)).div_ceil(1000);
        let part = u32::try_from(part).unwrap_or(all);
        part.next_multiple_of(2).clamp(1, all.max(1))
    }
}

impl FromStr for ThreadPercentage {
    type Err = NoPercentage;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let percent: f64 = text.trim().parse().map_err(|_| NoPercentage)?;
        if !(percent > 0.0 && percent <= 100.0) {
            return Err(NoPercentage);
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 0 and 1000"
        )]
        let tenths = (percent * 10.0).round().max(1.0) as u32;
        Ok(Self { tenths })
    }
}

impl fmt::Display for ThreadPercentage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.tenths / 10, self.tenths % 10)
    }
}

/// The text is not a percentage of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a percentage above 0 and up to 100")]
pub struct NoPercentage;

/// Request about the multi-process service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum MpsRequest {
    /// Makes this process a server.
    Serve {
        /// GPUs of its clients.
        gpus: Vec<GpuIndex>,
        /// Limit of each client.
        percentage: ThreadPercentage,
        /// Secret that clients must know.
        secret: u64,
    },
    /// Makes this process a client, before it has contexts.
    Join {
        /// Server.
        key: MpsServerKey,
        /// Limit that the client sets itself.
        percentage: Option<ThreadPercentage>,
    },
    /// Reports that a kernel of this client has failed.
    Fault {
        /// `CUresult`.
        error: u32,
    },
    /// Query the state of a server.
    State {
        /// Server.
        key: MpsServerKey,
    },
    /// Sets the limit of later clients.
    SetPercentage {
        /// Server.
        key: MpsServerKey,
        /// New limit of each client.
        percentage: ThreadPercentage,
    },
    /// The server takes no further client.
    Close {
        /// Server.
        key: MpsServerKey,
    },
    /// Ends the work of a client.
    Terminate {
        /// Server.
        key: MpsServerKey,
        /// PID of the client.
        pid: u32,
    },
}

/// Result of an [`MpsRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum MpsReply {
    /// To [`MpsRequest::Serve`].
    Serving {
        /// Id of the server.
        server: u64,
    },
    /// To [`MpsRequest::Join`].
    Joined {
        /// GPUs of the server.
        gpus: Vec<GpuIndex>,
        /// Limit of the client.
        percentage: ThreadPercentage,
    },
    /// To [`MpsRequest::State`].
    State(MpsServerState),
}

/// State of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MpsServerState {
    /// Whether it takes clients.
    pub status: MpsStatus,
    /// Limit of each later client.
    pub percentage: ThreadPercentage,
    /// Connected clients, also those that have failed.
    pub clients: Vec<MpsClientState>,
}

/// Whether a server takes clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MpsStatus {
    /// It does.
    Active,
    /// A client has failed; those it affected must end first.
    Fault,
}

/// One client of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MpsClientState {
    /// PID; 0 outside of the caller's PID namespace.
    pub pid: u32,
    /// GPUs on which it has a context.
    pub gpus: Vec<GpuIndex>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_and_prints_percentages() {
        for (text, printed) in [
            ("50", "50.0"),
            (" 33.33\n", "33.3"),
            ("100", "100.0"),
            ("0.01", "0.1"),
        ] {
            let parsed: ThreadPercentage = text.parse().unwrap();
            assert_eq!(parsed.to_string(), printed);
        }
        for text in ["", "0", "-1", "100.1", "nan", "half"] {
            assert_eq!(
                text.parse::<ThreadPercentage>(),
                Err(NoPercentage),
                "{text}"
            );
        }
    }

    #[test]
    fn rounds_multiprocessors_up_to_pairs() {
        let of = |text: &str, all| {
            text.parse::<ThreadPercentage>()
                .unwrap()
                .multiprocessors(all)
        };
        assert_eq!(of("50", 132), 66);
        assert_eq!(of("33", 132), 44);
        assert_eq!(of("10", 132), 14);
        assert_eq!(of("1", 132), 2);
        assert_eq!(of("100", 131), 131);
        assert_eq!(of("99.9", 131), 131);
        assert_eq!(of("1", 1), 1);
    }
}
