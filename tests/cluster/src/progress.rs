//! Progress of a long command: a spinner with the elapsed time and the current wait, or plain lines where the output is
//! no terminal.

use std::cell::Cell;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// One step of a long command. Ends with [`Progress::done`]; a value dropped before means that the step failed.
pub struct Progress {
    title: String,
    bar: ProgressBar,
    begun: Instant,
    finished: bool,
    /// Time of the last line, where there is no terminal.
    said: Cell<Instant>,
}

impl Progress {
    /// Starts a step.
    #[must_use]
    pub fn step(title: impl Into<String>) -> Self {
        let title = title.into();
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) =
            ProgressStyle::with_template("  {spinner} {prefix} ({elapsed}) {wide_msg:.dim}")
        {
            bar.set_style(style);
        }
        bar.set_prefix(title.clone());
        if bar.is_hidden() {
            eprintln!("  … {title}");
        } else {
            bar.enable_steady_tick(Duration::from_millis(120));
        }
        Self {
            title,
            bar,
            begun: Instant::now(),
            finished: false,
            said: Cell::new(Instant::now()),
        }
    }

    /// Reports the current wait of the step: at once on a terminal, otherwise one line every 30 s.
    pub fn note(&self, note: impl Into<String>) {
        let note = note.into();
        if self.bar.is_hidden() && self.said.get().elapsed() > Duration::from_secs(30) {
            self.said.set(Instant::now());
            eprintln!(
                "    {} ({}): {note}",
                self.title,
                elapsed(self.begun.elapsed())
            );
        }
        self.bar.set_message(note);
    }

    /// Ends the step with success.
    pub fn done(mut self) {
        self.finish("✓", "");
    }

    /// Ends the step with success and its outcome.
    pub fn done_with(mut self, outcome: &str) {
        self.finish("✓", &format!(": {outcome}"));
    }

    fn finish(&mut self, mark: &str, outcome: &str) {
        self.finished = true;
        self.bar.finish_and_clear();
        eprintln!(
            "  {mark} {}{outcome} ({})",
            self.title,
            elapsed(self.begun.elapsed())
        );
    }

    /// Returns the elapsed time of the step.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if !self.finished {
            self.finish("✗", "");
        }
    }
}

fn elapsed(time: Duration) -> String {
    match time.as_secs() {
        0..60 => format!("{:.1} s", time.as_secs_f32()),
        seconds => format!("{} min {} s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_elapsed_time() {
        assert_eq!(elapsed(Duration::from_millis(1240)), "1.2 s");
        assert_eq!(elapsed(Duration::from_secs(80)), "1 min 20 s");
    }
}
