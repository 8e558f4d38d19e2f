//! GPU time of tenants in every stretch of a measurement, compared with what their share permits.
//!
//! The time of a stretch is known only within the time that its two readings took, so each bound uses the length that
//! favors the share.

use std::time::{Duration, Instant};

use drava_vgpu_abi::bucket::{BURST_US, LEASE_US};
use gpu_tenants::{Share, Tenant, TestBed};

/// Readings of a measurement, and the time between two. In the whole of it a share of 10% runs kernels for 200 ms, several
/// times what the bounds allow for.
const READINGS: u32 = 21;
const INTERVAL: Duration = Duration::from_millis(100);

/// Length of a measurement, without delays.
pub(crate) const LENGTH: Duration = INTERVAL.saturating_mul(READINGS - 1);

/// Tolerance below a share, percent of the GPU: events include the time of the host between two calls, which is charged.
const BELOW: f64 = 2.0;

/// Tolerance below a share in the best measurement, percent of the GPU.
const BELOW_ONCE: f64 = 3.0;

/// Measurements in which a share may be reached. More would accept a share that is reached by chance.
const ATTEMPTS: usize = 12;

/// A part of the GPU for tenants that keep their queues filled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Due {
    percent: f64,
    launch_ms: f64,
    correction: Option<Duration>,
}

impl Due {
    /// Returns this percentage of the GPU for launches of at most `launch_ms`.
    pub(crate) fn new(percent: u32, launch_ms: f64) -> Self {
        Self {
            percent: percent.into(),
            launch_ms,
            correction: None,
        }
    }

    /// As [`Self::new`], while the own-time fraction of the share is corrected each `period`. A fraction is measured over a
    /// period and applied after it, so it can be wrong for two, and for as long as delays of the host that it includes.
    /// Then charges for at most the share of that time are missing, and the share gets at most the rest of the GPU.
    pub(crate) fn corrected(self, period: Duration) -> Self {
        Self {
            correction: Some(period),
            ..self
        }
    }

    fn correction_ms(self, host_delay: Duration) -> f64 {
        let part = self.percent.min(100.0 - self.percent) / 100.0;
        let wrong = self.correction.map(|period| 2 * period + host_delay);
        part * ms(wrong.unwrap_or_default())
    }

    fn ms_in(self, length: Duration) -> f64 {
        self.percent / 100.0 * ms(length)
    }

    /// The bucket's promise for any stretch: the rate, the credit saved before, the rest of a lease, one overdraft, and the
    /// refund for one launch before the stretch that was charged more than its duration.
    fn most_ms(self, length: Duration, host_delay: Duration) -> f64 {
        let credit_ms = self.ms_in(Duration::from_micros(BURST_US));
        let lease_ms = ms(Duration::from_micros(LEASE_US));
        let own_ms = credit_ms + lease_ms + 2.0 * self.launch_ms;
        self.ms_in(length) + own_ms + self.correction_ms(host_delay)
    }

    /// The rate, less the overdraft of a launch before the measurement, which the share repays in it, and less the time in
    /// which the host delayed the tenant: a launch that is late leaves the GPU idle, and one that is late between its events
    /// is charged for that.
    fn least_ms(self, length: Duration, host_delay: Duration) -> f64 {
        let tolerance_ms = BELOW / 100.0 * ms(length) + ms(host_delay);
        self.ms_in(length) - self.launch_ms - self.correction_ms(host_delay) - tolerance_ms
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// GPU time of each tenant at some moment from `begun` to `ended`.
struct Reading {
    used: Vec<Duration>,
    begun: Instant,
    ended: Instant,
}

/// Readings of several tenants.
pub(crate) struct Measurement {
    readings: Vec<Reading>,
    /// Time in which a thread of the tenant or of the simulated GPU was ready and waited for a processor.
    host_delays: Vec<Duration>,
}

impl Measurement {
    /// Measures for [`LENGTH`].
    pub(crate) fn of(test_bed: &TestBed, tenants: &[&Tenant]) -> Self {
        let pids: Vec<u32> = tenants.iter().map(|tenant| tenant.pid()).collect();
        let waited = || {
            let of_gpu = time_without_processor(test_bed.machine().daemon_pid());
            let tenants = pids.iter().map(|pid| time_without_processor(*pid) + of_gpu);
            tenants.collect::<Vec<Duration>>()
        };
        let before = waited();
        let mut readings = Vec::new();
        for reading in 0..READINGS {
            if reading > 0 {
                std::thread::sleep(INTERVAL);
            }
            let begun = Instant::now();
            let (used, ended) = test_bed.used(&pids).unwrap();
            readings.push(Reading { used, begun, ended });
        }
        let delays = waited().into_iter().zip(before);
        Self {
            readings,
            host_delays: delays
                .map(|(after, before)| after.saturating_sub(before))
                .collect(),
        }
    }

    /// Returns the measurement of all its tenants as one.
    pub(crate) fn merged(self) -> Self {
        let readings = self.readings.into_iter().map(|reading| Reading {
            used: vec![reading.used.iter().sum()],
            ..reading
        });
        Self {
            readings: readings.collect(),
            host_delays: vec![self.host_delays.iter().sum()],
        }
    }

    fn used_ms(&self, tenant: usize, from: usize, until: usize) -> f64 {
        let used = |reading: usize| self.readings[reading].used[tenant];
        ms(used(until).saturating_sub(used(from)))
    }

    /// Checks that the tenant with this index gets no more than its part in any stretch of the measurement.
    pub(crate) fn assert_no_excess(&self, tenant: usize, due: Due) {
        let delay = self.host_delays[tenant];
        for until in 1..self.readings.len() {
            for from in 0..until {
                let length = self.readings[until].ended - self.readings[from].begun;
                let used = self.used_ms(tenant, from, until);
                let most = due.most_ms(length, delay);
                assert!(
                    used <= most,
                    "tenant {tenant}: {used:.1} ms in {length:.1?} from {from} to {until}, at most {most:.1} ms by {due:?}, \
                     delays of {delay:.1?}"
                );
            }
        }
    }

    /// Checks that the tenant gets its part in the whole measurement, as far as the host lets it launch.
    pub(crate) fn assert_no_lack(&self, tenant: usize, due: Due) {
        let last = self.readings.len() - 1;
        let length = self.readings[last].begun - self.readings[0].ended;
        let delay = self.host_delays[tenant];
        let used = self.used_ms(tenant, 0, last);
        let least = due.least_ms(length, delay);
        assert!(
            used >= least,
            "tenant {tenant}: {used:.1} ms in {length:.1?}, at least {least:.1} ms by {due:?}, delays of {delay:.1?}"
        );
    }

    /// Checks that each tenant gets its part and no more.
    fn assert_all(&self, due: &[Due]) {
        for (tenant, due) in due.iter().enumerate() {
            self.assert_no_excess(tenant, *due);
            self.assert_no_lack(tenant, *due);
        }
    }

    /// Returns the percentage of the GPU that the tenant got.
    pub(crate) fn percent(&self, tenant: usize) -> f64 {
        let last = self.readings.len() - 1;
        let length = self.readings[last].begun - self.readings[0].ended;
        self.used_ms(tenant, 0, last) / ms(length) * 100.0
    }
}

/// Measures until each tenant has its part in a whole measurement, whatever the host delays. No measurement may show an
/// excess, or a lack that no delay explains.
pub(crate) fn await_parts(due: &[Due], mut measure: impl FnMut(usize) -> Measurement) {
    let mut seen = Vec::new();
    for attempt in 0..ATTEMPTS {
        let measured = measure(attempt);
        measured.assert_all(due);
        let got: Vec<f64> = (0..due.len())
            .map(|tenant| measured.percent(tenant))
            .collect();
        let mut pairs = got.iter().zip(due);
        if pairs.all(|(got, due)| *got >= due.percent - BELOW_ONCE) {
            return;
        }
        seen.push(got);
    }
    panic!("{seen:.1?} instead of {due:?}");
}

/// Checks the time that the share counted since the tenant's start. Events include the time of the host between two calls,
/// so more is expected than the GPU's.
pub(crate) fn assert_counted(test_bed: &TestBed, tenant: &Tenant, share: &Share) {
    let counted = share.counted().unwrap();
    let used = test_bed.used(&[tenant.pid()]).unwrap().0[0];
    assert!(
        counted >= used.mul_f64(0.85) && counted <= used.mul_f64(1.4),
        "counted {counted:.1?} of {used:.1?}"
    );
}

/// Returns how long threads of the process were ready and waited for a processor.
pub(crate) fn time_without_processor(pid: u32) -> Duration {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let waited = threads.filter_map(|thread| {
        // The thread may have ended.
        let statistics = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        let nanos = statistics.split(' ').nth(1)?.parse().ok()?;
        Some(Duration::from_nanos(nanos))
    });
    waited.sum()
}
