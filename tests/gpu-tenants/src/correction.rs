//! The own-time correction that the node agent makes every 100 ms: the time of other shares' kernels is removed from
//! the time that a share measures.

use std::time::{Duration, Instant};

use drava_vgpu_abi::contention;

use crate::share::Share;
use crate::tenant::Tenant;
use crate::test_bed::TestBed;

impl TestBed {
    /// As [`Self::percents`], while the own-time fraction of each share is corrected every 100 ms, as the node agent
    /// does.
    pub fn percents_corrected(
        &self,
        tenants: &[&Tenant],
        shares: &[&Share],
        settle: Duration,
        measure: Duration,
    ) -> anyhow::Result<Vec<f64>> {
        let pids: Vec<u32> = tenants.iter().map(|tenant| tenant.pid()).collect();
        let mut correction = Correction::new(self, &pids, shares)?;
        let mut run = |length: Duration| -> anyhow::Result<()> {
            let end = Instant::now() + length;
            while Instant::now() < end {
                std::thread::sleep(Duration::from_millis(100));
                correction.step(self, &pids, shares)?;
            }
            Ok(())
        };
        run(settle)?;
        let (before, begun) = self.used(&pids)?;
        run(measure)?;
        let (after, ended) = self.used(&pids)?;
        let length = (ended - begun).as_secs_f64();
        let percent = |(after, before): (Duration, Duration)| {
            100.0 * after.saturating_sub(before).as_secs_f64() / length
        };
        Ok(after.into_iter().zip(before).map(percent).collect())
    }
}

/// The own-time fraction of each share.
struct Correction {
    counted: Vec<Duration>,
    used: Vec<Duration>,
    /// For each share: its fraction, and moving sums of measured and used seconds.
    shares: Vec<(u32, f64, f64)>,
}

impl Correction {
    fn new(test_bed: &TestBed, pids: &[u32], shares: &[&Share]) -> anyhow::Result<Self> {
        let counted = shares.iter().map(|share| share.counted());
        Ok(Self {
            counted: counted.collect::<anyhow::Result<_>>()?,
            used: test_bed.used(pids)?.0,
            shares: vec![(contention::ALL_PPM, 0.0, 0.0); shares.len()],
        })
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "microseconds of a few seconds"
    )]
    fn step(&mut self, test_bed: &TestBed, pids: &[u32], shares: &[&Share]) -> anyhow::Result<()> {
        const MEMORY: f64 = 0.8;
        const GAIN: f64 = 0.3;
        let now_used = test_bed.used(pids)?.0;
        let states = self.shares.iter_mut().zip(&mut self.counted);
        let figures = self.used.iter_mut().zip(now_used);
        for ((((own, counted_sum, used_sum), counted), (used, now_used)), share) in
            states.zip(figures).zip(shares)
        {
            let now_counted = share.counted()?;
            let more_counted = now_counted.saturating_sub(*counted).as_secs_f64();
            *counted_sum = MEMORY * *counted_sum + more_counted;
            *used_sum = MEMORY * *used_sum + now_used.saturating_sub(*used).as_secs_f64();
            *counted = now_counted;
            *used = now_used;
            if *counted_sum > 0.0 {
                let all = f64::from(contention::ALL_PPM);
                let own_part = f64::from(*own) * (*used_sum / *counted_sum).powf(GAIN);
                *own = own_part.clamp(1.0, all) as u32;
            }
            share.set_own_time(*own)?;
        }
        Ok(())
    }
}
