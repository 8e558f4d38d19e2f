//! Runs tasks alongside each other, each after the tasks that it needs.

use std::panic::resume_unwind;
use std::sync::mpsc;
use std::thread;

/// How a task loads the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    /// The task waits most of the time, or is short.
    Light,
    /// The task keeps processors busy; a few of them run at a time.
    Heavy,
    /// The task measures time; no other task runs meanwhile.
    Alone,
}

/// State of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Running,
    Done,
}

/// A task, named by its place in the list.
pub(crate) struct Task<'a, T> {
    pub(crate) load: Load,
    /// Places of tasks that come first, whether they succeed or not.
    pub(crate) after: Vec<usize>,
    pub(crate) work: Box<dyn FnOnce() -> T + Send + 'a>,
}

/// Runs all tasks, at most `heavy` heavy ones at a time, and returns their results in the order of the list.
pub(crate) fn run<T: Send>(tasks: Vec<Task<'_, T>>, heavy: usize) -> Vec<T> {
    let shape: Vec<(Load, Vec<usize>)> = tasks
        .iter()
        .map(|task| (task.load, task.after.clone()))
        .collect();
    let mut states = vec![State::Waiting; tasks.len()];
    let mut works: Vec<Option<_>> = tasks.into_iter().map(|task| Some(task.work)).collect();
    let mut results: Vec<Option<T>> = works.iter().map(|_| None).collect();
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        loop {
            while let Some(index) = next(&shape, &states, heavy) {
                let (Some(state), Some(work)) = (states.get_mut(index), works.get_mut(index))
                else {
                    break;
                };
                *state = State::Running;
                if let Some(work) = work.take() {
                    let sender = sender.clone();
                    scope.spawn(move || {
                        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                        // The receiver outlives every task.
                        let _ = sender.send((index, result));
                    });
                }
            }
            if !states.contains(&State::Running) {
                break;
            }
            let Ok((index, result)) = receiver.recv() else {
                break;
            };
            let result = result.unwrap_or_else(|panic| resume_unwind(panic));
            if let (Some(state), Some(slot)) = (states.get_mut(index), results.get_mut(index)) {
                *state = State::Done;
                *slot = Some(result);
            }
        }
    });
    results.into_iter().flatten().collect()
}

/// The first task that can start now.
fn next(tasks: &[(Load, Vec<usize>)], states: &[State], heavy: usize) -> Option<usize> {
    let running = |load| {
        let pairs = tasks.iter().zip(states);
        pairs
            .filter(|(task, state)| task.0 == load && **state == State::Running)
            .count()
    };
    if running(Load::Alone) > 0 {
        return None;
    }
    let is_idle = !states.contains(&State::Running);
    let is_done = |index: &usize| states.get(*index) == Some(&State::Done);
    let mut ready = tasks
        .iter()
        .enumerate()
        .filter(|(index, (_, after))| {
            states.get(*index) == Some(&State::Waiting) && after.iter().all(is_done)
        })
        .map(|(index, (load, _))| (index, *load));
    ready
        .find(|(_, load)| match load {
            Load::Light => true,
            Load::Heavy => running(Load::Heavy) < heavy,
            Load::Alone => is_idle,
        })
        .map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    use State::{Done, Running, Waiting};

    fn light(after: &[usize]) -> (Load, Vec<usize>) {
        (Load::Light, after.to_vec())
    }

    #[test]
    fn starts_tasks_after_those_they_need() {
        let tasks = [light(&[]), light(&[0])];
        assert_eq!(next(&tasks, &[Waiting, Waiting], 1), Some(0));
        assert_eq!(next(&tasks, &[Running, Waiting], 1), None);
        assert_eq!(next(&tasks, &[Done, Waiting], 1), Some(1));
    }

    #[test]
    fn limits_heavy_tasks_but_not_light_ones() {
        let heavy = (Load::Heavy, vec![]);
        let tasks = [heavy.clone(), heavy.clone(), heavy, light(&[])];
        assert_eq!(next(&tasks, &[Running, Waiting, Waiting, Done], 2), Some(1));
        assert_eq!(next(&tasks, &[Running, Running, Waiting, Done], 2), None);
        assert_eq!(
            next(&tasks, &[Running, Running, Waiting, Waiting], 2),
            Some(3)
        );
    }

    #[test]
    fn starts_nothing_beside_a_task_that_runs_alone() {
        let tasks = [light(&[]), (Load::Alone, vec![]), light(&[])];
        assert_eq!(next(&tasks, &[Running, Waiting, Done], 2), None);
        assert_eq!(next(&tasks, &[Done, Waiting, Done], 2), Some(1));
        assert_eq!(next(&tasks, &[Done, Running, Waiting], 2), None);
    }

    #[test]
    fn runs_tasks_side_by_side_and_keeps_their_order() {
        let barrier = Barrier::new(2);
        let task = |index: usize| Task {
            load: Load::Heavy,
            after: vec![],
            work: Box::new({
                let barrier = &barrier;
                move || {
                    // Returns only when both tasks run.
                    barrier.wait();
                    index
                }
            }) as Box<dyn FnOnce() -> usize + Send>,
        };
        assert_eq!(run(vec![task(0), task(1)], 2), [0, 1]);
    }
}
