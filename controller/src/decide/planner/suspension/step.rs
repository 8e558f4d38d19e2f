//! What is done for a claim with an intent or a wish to be suspended, from what the claim says.

use drava_api::suspension;
use k8s_openapi::api::resource::v1::ResourceClaim;

use crate::pods::claim;

/// What the node driver says of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// Its processes run, or none of the following is known.
    Running,
    /// They are suspended.
    Suspended,
    /// They are suspended, and their state is lost.
    Lost,
    /// They are being resumed, or the answer is of an earlier intent.
    Resuming,
    /// They cannot be suspended.
    Refused,
}

/// What a step depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct View {
    is_allocated: bool,
    is_wished: bool,
    is_intended: bool,
    pub(super) answer: Answer,
    /// Whether a pod waits for the suspension.
    is_awaited: bool,
    rest: Rest,
}

/// Whether a share stays suspended although there is room for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rest {
    /// It is resumed when there is room.
    None,
    /// It is suspended because it was idle, and no program has called CUDA since.
    Idle,
    /// It was to be suspended for that, and has used its GPU before it was.
    Over,
    /// It is suspended for that, and a user wishes so, too: from then on it is suspended for the user, who can resume it.
    Wished,
}

impl Rest {
    fn of(claim: &ResourceClaim) -> Self {
        if suspension::is_wished(&claim.metadata) && suspension::is_for_idleness(&claim.metadata) {
            Self::Wished
        } else if suspension::cause(&claim.metadata) != Some(suspension::Cause::Idleness)
            || suspension::is_demanded(claim)
        {
            Self::None
        } else if suspension::is_suspended(claim) || suspension::idle_since(claim).is_some() {
            Self::Idle
        } else {
            Self::Over
        }
    }
}

/// What is done for a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Nothing,
    /// Write the intent, unless something is against it.
    Intend,
    /// Write the intent again, as that of a user.
    TakeOver,
    /// Withdraw the intent.
    Withdraw,
    /// Withdraw the intent if the share fits.
    Resume,
    /// Evict the pod.
    Evict,
}

impl View {
    pub(super) fn of(claim: &ResourceClaim, is_awaited: bool) -> Self {
        let is_intended = suspension::is_intended(&claim.metadata);
        let has_answer = |status: &str| {
            let mut answers = suspension::answers(claim);
            answers.any(|answer| answer.status == status)
        };
        let mut answers = suspension::answers(claim);
        let answer = if suspension::is_lost(claim) {
            Answer::Lost
        } else if suspension::is_suspended(claim) {
            Answer::Suspended
        } else if suspension::refusal(claim).is_some() {
            Answer::Refused
        } else if answers.any(suspension::is_resuming) || has_answer("True") {
            Answer::Resuming
        } else {
            Answer::Running
        };
        Self {
            is_allocated: claim::is_allocated(claim),
            is_wished: suspension::is_wished(&claim.metadata),
            is_intended,
            answer,
            is_awaited,
            rest: Rest::of(claim),
        }
    }

    const fn is_idle(self) -> bool {
        matches!(self.rest, Rest::Idle)
    }

    /// Returns what is done for the claim.
    pub(super) const fn step(self) -> Step {
        match (self.is_intended, self.answer) {
            (true, _) if !self.is_allocated => Step::Withdraw,
            (true, Answer::Lost) => Step::Evict,
            (true, _) if matches!(self.rest, Rest::Wished) => Step::TakeOver,
            (true, _) if self.is_wished => Step::Nothing,
            // It has made room for a pod that takes it next.
            (true, Answer::Suspended) if self.is_awaited => Step::Nothing,
            // Its programs need no GPU until one of them calls CUDA.
            (true, Answer::Suspended | Answer::Running) if self.is_idle() => Step::Nothing,
            (true, Answer::Suspended) => Step::Resume,
            (true, Answer::Refused) => Step::Withdraw,
            (true, Answer::Running | Answer::Resuming) if self.is_awaited => Step::Nothing,
            (true, Answer::Running | Answer::Resuming) => Step::Withdraw,
            // An intent now would meet the answer to the one before.
            (false, Answer::Resuming | Answer::Suspended | Answer::Lost | Answer::Refused) => {
                Step::Nothing
            }
            (false, _) if self.is_allocated && self.is_wished => Step::Intend,
            (false, _) => Step::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acts_on_levels() {
        let view = |is_intended, is_wished, answer, is_awaited| View {
            is_allocated: true,
            is_wished,
            is_intended,
            answer,
            is_awaited,
            rest: Rest::None,
        };
        use Answer::{Lost, Refused, Resuming, Running, Suspended};
        let cases = [
            // Nothing is wanted.
            (view(false, false, Running, false), Step::Nothing),
            // A user wishes it, and then no longer.
            (view(false, true, Running, false), Step::Intend),
            (view(true, true, Running, false), Step::Nothing),
            (view(true, true, Suspended, false), Step::Nothing),
            (view(true, true, Refused, false), Step::Nothing),
            (view(true, false, Running, false), Step::Withdraw),
            (view(true, false, Suspended, false), Step::Resume),
            // A pod waits for it.
            (view(true, false, Running, true), Step::Nothing),
            (view(true, false, Refused, true), Step::Withdraw),
            (view(true, false, Suspended, true), Step::Nothing),
            // The node was restarted.
            (view(true, false, Lost, true), Step::Evict),
            (view(true, true, Lost, false), Step::Evict),
            (view(false, true, Lost, false), Step::Nothing),
            // The answer to the intent before has not been taken back.
            (view(false, true, Suspended, false), Step::Nothing),
            (view(false, true, Resuming, false), Step::Nothing),
            (view(false, true, Refused, false), Step::Nothing),
        ];
        for (view, step) in cases {
            assert_eq!(view.step(), step, "{view:?}");
        }
        let idle = |answer, rest| View {
            rest,
            ..view(true, false, answer, false)
        };
        let of_idle = [
            (idle(Running, Rest::Idle), Step::Nothing),
            (idle(Running, Rest::Over), Step::Withdraw),
            (idle(Refused, Rest::Idle), Step::Withdraw),
            (idle(Suspended, Rest::Idle), Step::Nothing),
            (idle(Suspended, Rest::None), Step::Resume),
        ];
        for (view, step) in of_idle {
            assert_eq!(view.step(), step, "{view:?}");
        }
        let released = View {
            is_allocated: false,
            ..view(true, true, Suspended, false)
        };
        assert_eq!(released.step(), Step::Withdraw);
    }
}
