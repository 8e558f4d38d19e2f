//! Tells the person at the terminal what a long command is doing: a spinner with the elapsed time and what it waits
//! for, or plain lines where the output is no terminal.

use std::cell::Cell;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// One step of a long command. Ends with [`Progress::done`]; when dropped before, the step failed.
pub struct Progress {
    title: String,
    bar: ProgressBar,
    begun: Instant,
    finished: bool,
    /// When the last line was printed, where there is no terminal.
    said: Cell<Instant>,
}

impl Progress {
    /// Begins a step.
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

    /// Says what the step is waiting for now: at once on a terminal, elsewhere a line every half minute.
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

    /// Ends the step well.
    pub fn done(mut self) {
        self.finish("✓", "");
    }

    /// Ends the step well, with what came of it.
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

    /// How long the step has lasted.
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
    fn times_are_told_as_people_do() {
        assert_eq!(elapsed(Duration::from_millis(1240)), "1.2 s");
        assert_eq!(elapsed(Duration::from_secs(80)), "1 min 20 s");
    }
}
