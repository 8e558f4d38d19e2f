//! Durations of the leader's passes of decisions, which stall its other tasks.

use anyhow::{Context, Result, ensure};
use drava_cluster::http;
use serde_json::Value;

/// Series of the histogram's buckets.
const BUCKETS: &str = "drava_controller_decision_seconds_bucket";

/// Upper bound in seconds and cumulative count of each bucket.
#[derive(Debug, PartialEq)]
pub(crate) struct Decisions(Vec<(f64, u64)>);

impl Decisions {
    /// Reads the metrics at this address.
    pub(crate) fn scrape(address: &str) -> Result<Self> {
        let decisions = Self::parse(&http::get(address, "/metrics")?)
            .context("read the metrics of the controller")?;
        ensure!(
            !decisions.0.is_empty(),
            "the controller has no series {BUCKETS}"
        );
        Ok(decisions)
    }

    fn parse(text: &str) -> Result<Self> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(BUCKETS));
        let buckets = lines.map(|line| {
            let bucket = line
                .strip_prefix("{le=\"")
                .and_then(|line| line.split_once("\"} "));
            let (bound, count) = bucket.with_context(|| format!("read bucket {line}"))?;
            // `f64` parses `+Inf`.
            Ok((bound.parse()?, count.parse()?))
        });
        buckets.collect::<Result<_>>().map(Self)
    }

    /// Returns the upper bound of the bucket of this percentile since `before`, in milliseconds; null beyond the last bound.
    pub(crate) fn percentile_ms(&self, before: &Self, percent: u64) -> Value {
        let counts = self.0.iter().zip(&before.0);
        let counts: Vec<(f64, u64)> = counts
            .map(|((bound, after), (_, before))| (*bound, after.saturating_sub(*before)))
            .collect();
        let all = counts.last().map_or(0, |(_, count)| *count);
        let rank = (all * percent).div_ceil(100);
        let bucket = counts.iter().find(|(_, count)| *count >= rank);
        bucket.map_or(Value::Null, |(bound, _)| (bound * 1e3).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decisions(counts: [u64; 3]) -> Decisions {
        let [first, second, all] = counts;
        let text = format!(
            "{BUCKETS}{{le=\"0.01\"}} {first}\n{BUCKETS}{{le=\"0.1\"}} {second}\n\
             {BUCKETS}{{le=\"+Inf\"}} {all}\ndrava_controller_decision_seconds_count {all}\n"
        );
        Decisions::parse(&text).unwrap()
    }

    #[test]
    fn percentiles_are_bounds_of_buckets_since_the_scrape_before() {
        let before = decisions([5, 10, 20]);
        let after = decisions([104, 110, 120]);
        assert_eq!(after.percentile_ms(&before, 99), 10.0);
        assert_eq!(after.percentile_ms(&before, 100), 100.0);
        let beyond = decisions([104, 110, 121]);
        assert_eq!(beyond.percentile_ms(&before, 100), Value::Null);
    }
}
