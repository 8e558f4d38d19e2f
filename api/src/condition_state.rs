//! Conditions of an object as a whole, such as a GpuPolicy.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Status, reason and message of a condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConditionState {
    /// Whether the status is `True`.
    pub is_true: bool,
    /// Reason.
    pub reason: &'static str,
    /// Message.
    pub message: String,
}

impl ConditionState {
    /// Returns the condition of this state. Its transition time is that of the condition of the same type in `before`, as long as the
    /// status is the same; else `now`.
    #[must_use]
    pub fn condition(
        self,
        type_: &str,
        before: &[Condition],
        generation: Option<i64>,
        now: &Time,
    ) -> Condition {
        let status = if self.is_true { "True" } else { "False" };
        let same = before
            .iter()
            .find(|before| before.type_ == type_ && before.status == status);
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: self.reason.to_owned(),
            message: self.message,
            last_transition_time: same.map_or(now, |same| &same.last_transition_time).clone(),
            observed_generation: generation,
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    #[test]
    fn transition_time_changes_with_status() {
        let time = |second| Time(Timestamp::from_second(second).unwrap());
        let (earlier, now) = (time(1), time(2));
        let state = |is_true| ConditionState {
            is_true,
            reason: "Reason",
            message: "message".to_owned(),
        };
        let before = [
            state(true).condition("Applied", &[], Some(1), &earlier),
            state(false).condition("Conflict", &[], Some(1), &earlier),
        ];
        for (type_, is_true, expected) in [
            ("Applied", true, &earlier),
            ("Applied", false, &now),
            ("Conflict", false, &earlier),
            // That of another type has this status.
            ("Conflict", true, &now),
            ("Other", true, &now),
        ] {
            let condition = state(is_true).condition(type_, &before, Some(2), &now);
            assert_eq!(&condition.last_transition_time, expected, "{condition:?}");
            assert_eq!(condition.observed_generation, Some(2));
        }
    }
}
