//! Repeated launches of a kernel, and the part of the GPU time that they get.

use std::ffi::{CString, c_int};
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use crate::cuda::{Cuda, Event};
use crate::{Output, print};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Duration of one launch, in milliseconds.
    #[arg(long)]
    ms: u64,
    /// Total time, in seconds; default: one launch.
    #[arg(long)]
    seconds: Option<u64>,
    /// Blocks of 256 threads per launch; default: one per multiprocessor.
    #[arg(long)]
    blocks: Option<u32>,
    /// Launches in flight; 1 waits for each, like a training loop that reads its loss.
    #[arg(long, default_value_t = NonZeroUsize::MIN)]
    in_flight: NonZeroUsize,
    /// Time of uncounted launches before and after the total time, in seconds.
    #[arg(long, default_value_t = 0, requires = "seconds")]
    margin: u64,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Launched {
    launches: u64,
    elapsed_milliseconds: u128,
    /// Launches × duration ÷ elapsed time: 1 for a process without co-located work.
    share: f64,
}

/// Completed launches between two times after the start.
struct Window {
    from: Duration,
    to: Duration,
    start: Duration,
    end: Duration,
    launches: u64,
}

impl Window {
    fn new(from: Duration, length: Duration) -> Self {
        Self {
            from,
            to: from + length,
            start: Duration::ZERO,
            end: Duration::ZERO,
            launches: 0,
        }
    }

    /// Counts a launch that completed at `at`. The window starts and ends with the completion of a launch, so whole
    /// launches are counted.
    fn complete(&mut self, at: Duration) {
        if at < self.from {
            self.start = at;
        } else if self.launches == 0 || self.end < self.to {
            self.launches += 1;
            self.end = at;
        }
    }

    /// Returns the counted time.
    fn length(&self) -> Duration {
        self.end.saturating_sub(self.start)
    }
}

/// Keeps launches in flight, and counts those that complete.
pub(crate) fn run(
    cuda: &Cuda,
    output: Output,
    device: c_int,
    arguments: &Arguments,
) -> anyhow::Result<()> {
    let blocks = match arguments.blocks {
        Some(blocks) => blocks,
        None => cuda.multiprocessors(device)?.unsigned_abs(),
    };
    let image = CString::new(include_str!("spin.ptx"))?;
    let kernel = cuda.kernel(&image, c"spin")?;
    let length = Duration::from_millis(arguments.ms);
    let nanoseconds = u64::try_from(length.as_nanos()).context("--ms is too long")?;
    let events = (0..arguments.in_flight.get()).map(|_| cuda.event());
    let events: Vec<Event> = events.collect::<Result<_, _>>()?;
    let launch = |event: Event| {
        cuda.launch(kernel, blocks, nanoseconds)?;
        cuda.record(event)
    };
    let margin = Duration::from_secs(arguments.margin);
    let total = Duration::from_secs(arguments.seconds.unwrap_or(0));
    let mut window = Window::new(margin, total);
    let start = Instant::now();
    events.iter().try_for_each(|event| launch(*event))?;
    for event in events.iter().cycle() {
        cuda.wait(*event)?;
        let at = start.elapsed();
        window.complete(at);
        if at >= total + 2 * margin {
            break;
        }
        launch(*event)?;
    }
    cuda.synchronize()?;
    let elapsed = window.length();
    let busy = length.as_secs_f64() * f64::from(u32::try_from(window.launches).unwrap_or(u32::MAX));
    let launched = Launched {
        launches: window.launches,
        elapsed_milliseconds: elapsed.as_millis(),
        share: busy / elapsed.as_secs_f64().max(f64::MIN_POSITIVE),
    };
    print(output, &launched, |launched| {
        let Launched {
            launches,
            elapsed_milliseconds,
            share,
        } = launched;
        format!(
            "{launches} launches in {elapsed_milliseconds} ms, {:.1}% of GPU time\n",
            share * 100.0
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(from: u64, length: u64, completions: &[u64]) -> (u64, u64) {
        let mut window = Window::new(Duration::from_secs(from), Duration::from_secs(length));
        for at in completions {
            window.complete(Duration::from_secs(*at));
        }
        (window.launches, window.length().as_secs())
    }

    #[test]
    fn counts_first_launch_without_total_time() {
        assert_eq!(counted(0, 0, &[3]), (1, 3));
    }

    #[test]
    fn counts_all_launches_without_margin() {
        assert_eq!(counted(0, 5, &[2, 4, 6]), (3, 6));
    }

    #[test]
    fn excludes_launches_in_margins() {
        // From the last completion before the margin ends, to the first after the counted time.
        assert_eq!(counted(10, 5, &[3, 8, 12, 14, 17, 20, 24]), (3, 9));
    }
}
