//! Matching of requests to what only few of them can use: an upper bound of what fits at the same time.

/// A request that needs several different resources out of some.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Need {
    /// How many.
    pub(super) count: usize,
    /// Positions of the resources.
    pub(super) among: Vec<usize>,
}

/// Returns whether the needs can be met at the same time, given how many of them can use the resource at each position.
/// Augments along alternating paths (Kuhn), as the number of needs is small.
pub(super) fn can_meet_all(needs: &[Need], capacities: &[usize]) -> bool {
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); capacities.len()];
    needs.iter().enumerate().all(|(need, of)| {
        (0..of.count).all(|_| {
            let mut is_visited = vec![false; capacities.len()];
            assign(need, needs, capacities, &mut users, &mut is_visited)
        })
    })
}

fn assign(
    need: usize,
    needs: &[Need],
    capacities: &[usize],
    users: &mut Vec<Vec<usize>>,
    is_visited: &mut Vec<bool>,
) -> bool {
    let among = needs.get(need).map_or(&[][..], |need| &need.among);
    for &resource in among {
        let (Some(of), Some(&capacity), Some(visited)) = (
            users.get(resource),
            capacities.get(resource),
            is_visited.get_mut(resource),
        ) else {
            continue;
        };
        if *visited || of.contains(&need) {
            continue;
        }
        *visited = true;
        let is_free = of.len() < capacity;
        // Another user may move to a resource that is free.
        let moved = match is_free {
            true => None,
            false => {
                let users_now = of.clone();
                let moved = users_now
                    .into_iter()
                    .find(|user| assign(*user, needs, capacities, users, is_visited));
                match moved {
                    Some(user) => Some(user),
                    None => continue,
                }
            }
        };
        if let Some(of) = users.get_mut(resource) {
            of.retain(|user| Some(*user) != moved);
            of.push(need);
        }
        return true;
    }
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Tries every assignment.
    fn brute_force(needs: &[Need], capacities: &[usize]) -> bool {
        let Some((first, rest)) = needs.split_first() else {
            return true;
        };
        (0..1_usize << first.among.len())
            .filter(|mask| mask.count_ones() as usize == first.count)
            .any(|mask| {
                let mut left = capacities.to_vec();
                let chosen = first.among.iter().enumerate();
                let chosen = chosen.filter(|(index, _)| mask >> index & 1 == 1);
                let fits = chosen.into_iter().all(|(_, resource)| {
                    let left = &mut left[*resource];
                    let is_free = *left > 0;
                    *left = left.saturating_sub(1);
                    is_free
                });
                fits && brute_force(rest, &left)
            })
    }

    fn needs() -> impl Strategy<Value = Vec<Need>> {
        let need = (0..4_usize, prop::collection::btree_set(0..5_usize, 0..5)).prop_map(
            |(count, among)| Need {
                count,
                among: among.into_iter().collect(),
            },
        );
        prop::collection::vec(need, 0..5)
    }

    proptest! {
        #[test]
        fn agrees_with_brute_force(
            needs in needs(),
            capacities in prop::collection::vec(0..3_usize, 5),
        ) {
            prop_assert_eq!(
                can_meet_all(&needs, &capacities),
                brute_force(&needs, &capacities)
            );
        }
    }
}
