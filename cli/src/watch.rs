//! Live view: a command's output, again and again.

use std::io::IsTerminal as _;
use std::time::Duration;

use crate::output;

/// Clears the screen and moves the cursor to its start.
const CLEAR: &str = "\x1b[2J\x1b[H";

/// Options of a live view.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Options {
    /// Show the current state again and again, until Ctrl-C.
    #[arg(short, long)]
    watch: bool,

    /// Time between two updates, in seconds.
    #[arg(long, default_value_t = 5, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600), requires = "watch")]
    interval: u64,
}

impl Options {
    /// Prints what `produce` returns: once, or in a live view until it fails.
    ///
    /// # Errors
    /// Those of `produce`, and when standard output cannot be written.
    pub(crate) async fn run(
        self,
        mut produce: impl AsyncFnMut() -> anyhow::Result<String>,
    ) -> anyhow::Result<()> {
        if !self.watch {
            output::print(&produce().await?)?;
            return Ok(());
        }
        let is_terminal = std::io::stdout().is_terminal();
        loop {
            let text = produce().await?;
            if output::print(&frame(&text, is_terminal))? == output::Printed::Closed {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_secs(self.interval)).await;
        }
    }
}

/// Returns one update: it replaces the one before on a terminal, and follows it in a file.
fn frame(text: &str, is_terminal: bool) -> String {
    if is_terminal {
        format!("{CLEAR}{text}")
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_the_last_update_on_a_terminal_only() {
        assert_eq!(frame("MODE\n", false), "MODE\n");
        assert_eq!(frame("MODE\n", true), "\x1b[2J\x1b[HMODE\n");
    }

    #[tokio::test]
    async fn prints_once_without_watch() {
        let options = Options {
            watch: false,
            interval: 5,
        };
        let mut count = 0;
        let printed = options.run(async || {
            count += 1;
            Ok(String::new())
        });
        assert!(printed.await.is_ok());
        assert_eq!(count, 1);
    }
}
