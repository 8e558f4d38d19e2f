//! Placement of MIG partitions under churn: requests for partitions arrive and end; a request that fits nowhere is dropped.
//!
//! The layouts of one GPU are few, so the accepted part of the requests is computed, not sampled: arrivals are a Poisson
//! process, lifetimes are exponential with mean 1, and the stationary distribution of the layouts follows. The optimum is
//! that of the Markov decision process that selects the placements and drops no request that fits.

use std::collections::HashMap;

use anyhow::{Context, Result};
use serde::Serialize;

pub mod allocator;

/// A profile: name, memory in MiB, first memory slices in the published order, memory slices, compute slices, media
/// extensions.
type Profile = (&'static str, u64, &'static [u32], u32, u32, u32);

/// Profiles of an A100 40GB, as the driver publishes them.
pub const A100: [Profile; 7] = [
    ("1g.5gb", 4864, &[6, 5, 4, 3, 2, 1, 0], 1, 1, 0),
    ("1g.10gb", 9856, &[6, 4, 2, 0], 2, 1, 0),
    ("2g.10gb", 9856, &[4, 2, 0], 2, 2, 0),
    ("3g.20gb", 19968, &[4, 0], 4, 3, 0),
    ("4g.20gb", 19968, &[0], 4, 4, 0),
    ("7g.40gb", 40192, &[0], 8, 7, 0),
    // Published, and never requested here.
    ("1g.5gb+me", 4864, &[6, 5, 4, 3, 2, 1, 0], 1, 1, 1),
];
/// Compute slices of a GPU.
const COMPUTE: u32 = 7;
/// Memory slices of a GPU.
const MEMORY: f64 = 8.0;

/// Parts of the requests for each profile of [`A100`].
pub type Mix = [f64; A100.len()];

/// Mixes of requests by name.
pub const MIXES: [(&str, Mix); 4] = [
    ("small", [0.6, 0.05, 0.2, 0.1, 0.04, 0.01, 0.0]),
    ("even", [0.2, 0.2, 0.2, 0.2, 0.1, 0.1, 0.0]),
    ("halves", [0.5, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0]),
    ("large", [0.1, 0.1, 0.2, 0.4, 0.2, 0.0, 0.0]),
];

/// Requested memory slices, as a part of those of the GPU.
pub const LOADS: [f64; 2] = [1.0, 1.5];

/// How a placement is selected among those that fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selection {
    /// The first memory slice.
    FirstFit,
    /// The published order, as kube-scheduler does.
    Published,
    /// The one that rules out the fewest other placements, as the allocator of the controller does.
    Count,
    /// The least loss of partitions that still fit, weighted with the mix of requests.
    ExpectedLoss,
    /// The solution of the decision process.
    Optimum,
}

impl Selection {
    /// All selections.
    pub const ALL: [Self; 5] = [
        Self::FirstFit,
        Self::Published,
        Self::Count,
        Self::ExpectedLoss,
        Self::Optimum,
    ];

    /// Returns the name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FirstFit => "firstFit",
            Self::Published => "published",
            Self::Count => "count",
            Self::ExpectedLoss => "expectedLoss",
            Self::Optimum => "optimum",
        }
    }
}

/// Accepted requests of a selection.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub struct Acceptance {
    /// Name of the mix.
    pub mix: &'static str,
    /// Requested memory slices, percent of those of the GPU.
    pub load_percent: f64,
    /// Name of the selection.
    pub selection: &'static str,
    /// Accepted part of the requests, percent.
    pub accepted_percent: f64,
}

/// Computes the accepted requests of each selection, mix and load.
///
/// # Errors
/// Never for these profiles.
pub fn acceptances() -> Result<Vec<Acceptance>> {
    let gpu = Gpu::new();
    let mut rows = Vec::new();
    for (name, mix) in MIXES {
        for load in LOADS {
            let churn = Churn::new(&gpu, mix, load)?;
            for selection in Selection::ALL {
                rows.push(Acceptance {
                    mix: name,
                    load_percent: load * 100.0,
                    selection: selection.name(),
                    accepted_percent: churn.accepted(selection)? * 100.0,
                });
            }
        }
    }
    Ok(rows)
}

/// A placement of a profile.
#[derive(Debug, Clone, Copy)]
struct Placement {
    profile: usize,
    start: u32,
    /// Memory slices.
    slices: u32,
    compute: u32,
    media: u32,
}

impl Placement {
    /// Returns whether no GPU has room for both.
    const fn excludes(self, other: Self) -> bool {
        self.slices & other.slices != 0
            || self.compute + other.compute > COMPUTE
            || self.media + other.media > 1
    }
}

/// Allocated placements, a set of bits.
type Layout = u32;

/// Placements and layouts of a GPU.
#[derive(Debug)]
pub struct Gpu {
    /// In the published order.
    placements: Vec<Placement>,
    /// Those that requests can lead to.
    layouts: Vec<Layout>,
    positions: HashMap<Layout, usize>,
}

impl Default for Gpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Gpu {
    /// Returns an A100 40GB.
    #[must_use]
    pub fn new() -> Self {
        let placements = A100.iter().enumerate().flat_map(|(profile, of)| {
            let (_, _, starts, size, compute, media) = *of;
            starts.iter().map(move |start| Placement {
                profile,
                start: *start,
                slices: ((1 << size) - 1) << start,
                compute,
                media,
            })
        });
        let mut gpu = Self {
            placements: placements.collect(),
            layouts: vec![0],
            positions: HashMap::from([(0, 0)]),
        };
        let mut next = 0;
        while let Some(layout) = gpu.layouts.get(next).copied() {
            next += 1;
            let larger: Vec<Layout> = gpu
                .open(layout)
                .filter(|(_, placement)| placement.media == 0)
                .map(|(index, _)| layout | 1 << index)
                .collect();
            for layout in larger {
                if !gpu.positions.contains_key(&layout) {
                    gpu.positions.insert(layout, gpu.layouts.len());
                    gpu.layouts.push(layout);
                }
            }
        }
        gpu
    }

    /// Returns the layouts.
    #[must_use]
    pub fn layouts(&self) -> &[Layout] {
        &self.layouts
    }

    fn allocated(&self, layout: Layout) -> impl Iterator<Item = (usize, Placement)> + '_ {
        let placements = self.placements.iter().copied().enumerate();
        placements.filter(move |(index, _)| layout & 1 << index != 0)
    }

    /// Returns the placements that fit.
    fn open(&self, layout: Layout) -> impl Iterator<Item = (usize, Placement)> + '_ {
        let (mut slices, mut compute, mut media) = (0, 0, 0);
        for (_, placement) in self.allocated(layout) {
            slices |= placement.slices;
            compute += placement.compute;
            media += placement.media;
        }
        let placements = self.placements.iter().copied().enumerate();
        placements.filter(move |(_, placement)| {
            placement.slices & slices == 0
                && placement.compute + compute <= COMPUTE
                && placement.media + media <= 1
        })
    }

    /// Returns the placements of a profile that fit.
    fn fitting(
        &self,
        layout: Layout,
        profile: usize,
    ) -> impl Iterator<Item = (usize, Placement)> + '_ {
        let open = self.open(layout);
        open.filter(move |(_, placement)| placement.profile == profile)
    }

    /// Returns the number of partitions that still fit, weighted with the mix.
    fn expected_room(&self, layout: Layout, mix: &Mix) -> f64 {
        let used: u32 = self.allocated(layout).map(|(_, of)| of.compute).sum();
        let profiles = mix.iter().enumerate();
        let room = profiles.map(|(profile, weight)| {
            let (_, _, _, _, compute, _) = A100[profile];
            // Placements of one profile do not overlap.
            let open = self.fitting(layout, profile).count();
            let by_compute = (COMPUTE - used) / compute;
            weight * f64::from(by_compute.min(u32::try_from(open).unwrap_or_default()))
        });
        room.sum()
    }

    /// Returns how many placements that fit now do not fit beside `selected`.
    fn ruled_out(&self, layout: Layout, selected: (usize, Placement)) -> usize {
        let others = self.open(layout).filter(|(index, _)| *index != selected.0);
        others
            .filter(|(_, other)| selected.1.excludes(*other))
            .count()
    }
}

/// Requests of a mix on one GPU.
#[derive(Debug)]
pub struct Churn<'a> {
    gpu: &'a Gpu,
    mix: Mix,
    /// Arrivals in the mean lifetime of a partition.
    arrivals: f64,
}

/// For each layout the position of the layout after a request for each profile; `None` if the profile does not fit.
type Successors = Vec<[Option<usize>; A100.len()]>;

/// Change of all values at which an iteration ends.
const TOLERANCE: f64 = 1e-9;
/// Most iterations.
const MAX_ITERATIONS: usize = 100_000;

impl<'a> Churn<'a> {
    /// Returns the churn at that load.
    ///
    /// # Errors
    /// When the mix is empty.
    pub fn new(gpu: &'a Gpu, mix: Mix, load: f64) -> Result<Self> {
        let profiles = mix.iter().zip(A100);
        let slices: f64 = profiles
            .map(|(weight, (_, _, _, size, _, _))| weight * f64::from(size))
            .sum();
        anyhow::ensure!(slices > 0.0, "the mix is empty");
        Ok(Self {
            gpu,
            mix,
            arrivals: load * MEMORY / slices,
        })
    }

    /// Returns the accepted part of the requests.
    ///
    /// # Errors
    /// Never for the layouts of the GPU.
    pub fn accepted(&self, selection: Selection) -> Result<f64> {
        let successors = match selection {
            Selection::Optimum => self.optimal()?,
            _ => self.successors(|layout, profile| self.select(selection, layout, profile))?,
        };
        let distribution = self.distribution(&successors)?;
        let layouts = distribution.iter().zip(&successors);
        let accepted = layouts.map(|(probability, successors)| {
            let served = successors.iter().zip(&self.mix);
            let served = served.filter(|(next, _)| next.is_some());
            probability * served.map(|(_, weight)| weight).sum::<f64>()
        });
        Ok(accepted.sum())
    }

    /// Returns the selected placement.
    #[must_use]
    pub fn select(&self, selection: Selection, layout: Layout, profile: usize) -> Option<usize> {
        let fitting = self.gpu.fitting(layout, profile);
        let loss = |index: usize| {
            let before = self.gpu.expected_room(layout, &self.mix);
            before - self.gpu.expected_room(layout | 1 << index, &self.mix)
        };
        let selected = match selection {
            Selection::FirstFit => fitting.min_by_key(|(_, placement)| placement.start),
            Selection::Published => fitting.min_by_key(|(index, _)| *index),
            Selection::Count | Selection::Optimum => {
                fitting.min_by_key(|of| (self.gpu.ruled_out(layout, *of), of.0))
            }
            Selection::ExpectedLoss => fitting.min_by(|one, other| {
                let by_count = |of| self.gpu.ruled_out(layout, of);
                let by_loss = loss(one.0).total_cmp(&loss(other.0));
                by_loss.then_with(|| by_count(*one).cmp(&by_count(*other)))
            }),
        };
        selected.map(|(index, _)| index)
    }

    /// Returns the layouts after each request.
    fn successors(&self, select: impl Fn(Layout, usize) -> Option<usize>) -> Result<Successors> {
        let layouts = self.gpu.layouts.iter();
        layouts
            .map(|layout| {
                let mut successors = [None; A100.len()];
                for (profile, weight) in self.mix.iter().enumerate() {
                    if *weight > 0.0
                        && let Some(index) = select(*layout, profile)
                    {
                        successors[profile] = Some(self.position(layout | 1 << index)?);
                    }
                }
                Ok(successors)
            })
            .collect()
    }

    fn position(&self, layout: Layout) -> Result<usize> {
        let position = self.gpu.positions.get(&layout).copied();
        position.with_context(|| format!("layout {layout:b} does not exist"))
    }

    /// Returns the layouts after the end of each partition.
    fn ends(&self) -> Result<Vec<Vec<usize>>> {
        let layouts = self.gpu.layouts.iter();
        layouts
            .map(|layout| {
                let allocated = self.gpu.allocated(*layout);
                allocated
                    .map(|(index, _)| self.position(layout & !(1 << index)))
                    .collect()
            })
            .collect()
    }

    /// Rate of steps: at least that of all events in any layout.
    fn rate(&self) -> f64 {
        self.arrivals + f64::from(COMPUTE)
    }

    /// Returns the stationary distribution of the layouts.
    fn distribution(&self, successors: &Successors) -> Result<Vec<f64>> {
        let ends = self.ends()?;
        let mut distribution = vec![1.0 / ends.len() as f64; ends.len()];
        for _ in 0..MAX_ITERATIONS {
            let mut next = vec![0.0; ends.len()];
            let layouts = distribution.iter().zip(successors).zip(&ends).enumerate();
            for (position, ((probability, successors), ends)) in layouts {
                let mut stays = 1.0;
                for (to, weight) in successors.iter().zip(&self.mix) {
                    if let Some(to) = to {
                        let moves = self.arrivals * weight / self.rate();
                        next[*to] += probability * moves;
                        stays -= moves;
                    }
                }
                for to in ends {
                    next[*to] += probability / self.rate();
                    stays -= 1.0 / self.rate();
                }
                next[position] += probability * stays;
            }
            let change: f64 = next
                .iter()
                .zip(&distribution)
                .map(|(a, b)| (a - b).abs())
                .sum();
            distribution = next;
            if change < TOLERANCE {
                break;
            }
        }
        Ok(distribution)
    }

    /// Returns the layouts after each request that the solution of the decision process selects.
    fn optimal(&self) -> Result<Successors> {
        let ends = self.ends()?;
        let choices = self.choices()?;
        let mut values = vec![0.0; ends.len()];
        for _ in 0..MAX_ITERATIONS {
            let successors = best(&choices, &values);
            let layouts = successors.iter().zip(&ends).enumerate();
            let mut next: Vec<f64> = layouts
                .map(|(position, (successors, ends))| {
                    let own = values[position];
                    let mut gain = 0.0;
                    for (to, weight) in successors.iter().zip(&self.mix) {
                        if let Some(to) = to {
                            gain += self.arrivals * weight * (1.0 + values[*to] - own);
                        }
                    }
                    let ended: f64 = ends.iter().map(|to| values[*to] - own).sum();
                    own + (gain + ended) / self.rate()
                })
                .collect();
            let base = next.first().copied().unwrap_or_default();
            for value in &mut next {
                *value -= base;
            }
            let changes = next.iter().zip(&values).map(|(a, b)| (a - b).abs());
            let change = changes.fold(0.0, f64::max);
            values = next;
            if change < TOLERANCE {
                break;
            }
        }
        Ok(best(&choices, &values))
    }

    /// Returns the layouts after each placement of each request.
    fn choices(&self) -> Result<Vec<Choices>> {
        let layouts = self.gpu.layouts.iter();
        layouts
            .map(|layout| {
                let mut choices = Choices::default();
                for (profile, weight) in self.mix.iter().enumerate() {
                    if *weight > 0.0 {
                        let fitting = self.gpu.fitting(*layout, profile);
                        let next = fitting.map(|(index, _)| self.position(layout | 1 << index));
                        choices[profile] = next.collect::<Result<_>>()?;
                    }
                }
                Ok(choices)
            })
            .collect()
    }
}

/// For each profile the positions of the layouts after its placements.
type Choices = [Vec<usize>; A100.len()];

/// Returns the layouts of the highest value after each request.
fn best(choices: &[Choices], values: &[f64]) -> Successors {
    let value = |position: &usize| values[*position];
    let highest = |choices: &Vec<usize>| {
        let choices = choices.iter().copied();
        choices.max_by(|one, other| value(one).total_cmp(&value(other)))
    };
    choices
        .iter()
        .map(|choices| choices.each_ref().map(highest))
        .collect()
}
