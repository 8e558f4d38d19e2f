//! Properties that hold for any cluster and any sequence of claims.

use std::collections::BTreeMap;

use drava_api::Quantity;
use proptest::prelude::*;
use serde_json::json;

use super::{BINPACK, SPREAD};
use crate::cluster::Cluster;
use crate::fixture::{ask, classes, cluster, node, request, share, slices};
use crate::placement::Placement;
use crate::usage::Grant;

/// What may happen next.
#[derive(Debug, Clone)]
enum Wish {
    Share {
        memory_gib: u64,
        cores: u64,
        count: u64,
    },
    Whole {
        count: u64,
    },
    /// Frees the claim at this position among those held.
    Free(prop::sample::Index),
}

fn wishes() -> impl Strategy<Value = Vec<Wish>> {
    let wish = prop_oneof![
        4 => (1..50_u64, 0..60_u64, 1..3_u64).prop_map(|(memory_gib, cores, count)| Wish::Share { memory_gib, cores, count }),
        1 => (1..3_u64).prop_map(|count| Wish::Whole { count }),
        2 => any::<prop::sample::Index>().prop_map(Wish::Free),
    ];
    prop::collection::vec(wish, 1..40)
}

fn nodes() -> impl Strategy<Value = Vec<Vec<u64>>> {
    prop::collection::vec(
        prop::collection::vec(prop_oneof![Just(16_u64), Just(80_u64)], 1..4),
        1..4,
    )
}

/// What one claim holds, as (card, memory, cores; none of both for a whole card): written from the results, without
/// the allocator's book-keeping.
type Held = Vec<(String, Option<(u64, u64)>)>;

fn held(placement: &Placement) -> Held {
    let whole_units = |amounts: &BTreeMap<String, Quantity>, name: &str| {
        amounts
            .get(name)
            .and_then(|amount| amount.to_u64_rounded_up())
            .unwrap_or_default()
    };
    placement.claims[0]
        .devices
        .iter()
        .map(|grant| {
            let amounts = match &grant.grant {
                Grant::Share(amounts) => Some((
                    whole_units(amounts, "memory"),
                    whole_units(amounts, "cores"),
                )),
                Grant::Exclusive | Grant::Admin(_) => None,
            };
            (grant.device.card.to_string(), amounts)
        })
        .collect()
}

/// The rules of a card, from scratch: whole for one claim, or shares that fit.
fn check(all: &BTreeMap<String, Held>, cards: &BTreeMap<String, u64>) -> Result<(), TestCaseError> {
    let mut by_card: BTreeMap<&str, Vec<Option<(u64, u64)>>> = BTreeMap::new();
    for (card, amounts) in all.values().flatten() {
        by_card.entry(card).or_default().push(*amounts);
    }
    for (card, holders) in by_card {
        let whole = holders.iter().filter(|holder| holder.is_none()).count();
        prop_assert!(
            whole == 0 || holders.len() == 1,
            "{card} is held whole and otherwise"
        );
        let (memory, cores) = holders
            .iter()
            .flatten()
            .fold((0, 0), |sum, held| (sum.0 + held.0, sum.1 + held.1));
        prop_assert!(memory <= cards[card] << 30, "{card}: {memory} bytes");
        prop_assert!(cores <= 100, "{card}: {cores} cores");
        prop_assert!(holders.len() <= 10, "{card}: {} tenants", holders.len());
    }
    Ok(())
}

/// Whether some node has room by the same rules: for one device, some card; for two, two cards of one node.
fn has_room(wish: &Wish, all: &BTreeMap<String, Held>, cards: &BTreeMap<String, u64>) -> bool {
    let mut free_by_node: BTreeMap<&str, u64> = BTreeMap::new();
    for (card, gib) in cards {
        let holders: Vec<_> = all
            .values()
            .flatten()
            .filter(|(held, _)| held == card)
            .map(|(_, amounts)| amounts)
            .collect();
        let (memory, cores) = holders
            .iter()
            .copied()
            .flatten()
            .fold((0, 0), |sum, held| (sum.0 + held.0, sum.1 + held.1));
        let fits = match wish {
            Wish::Share {
                memory_gib,
                cores: wanted,
                ..
            } => {
                holders.iter().all(|holder| holder.is_some())
                    && holders.len() < 10
                    && memory + (memory_gib << 30) <= gib << 30
                    && cores + wanted <= 100
            }
            Wish::Whole { .. } => holders.is_empty(),
            Wish::Free(_) => false,
        };
        let node = card.split('-').nth(1).unwrap_or_default();
        *free_by_node.entry(node).or_default() += u64::from(fits);
    }
    let count = match wish {
        Wish::Share { count, .. } | Wish::Whole { count } => *count,
        Wish::Free(_) => return false,
    };
    free_by_node.values().any(|free| *free >= count)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Never more than a card has, and never a refusal while there is room, whatever comes and goes.
    #[test]
    fn exact(shape in nodes(), wishes in wishes(), spread in any::<bool>()) {
        let policies = if spread { SPREAD } else { BINPACK };
        let named: Vec<(String, Vec<u64>)> =
            shape.into_iter().enumerate().map(|(index, cards)| (format!("n{index}"), cards)).collect();
        let borrowed: Vec<(&str, &[u64])> = named.iter().map(|(name, cards)| (name.as_str(), cards.as_slice())).collect();
        let mut cluster = cluster(&borrowed);
        let cards: BTreeMap<String, u64> = named
            .iter()
            .flat_map(|(node, cards)| cards.iter().enumerate().map(move |(card, gib)| (format!("GPU-{node}-{card}"), *gib)))
            .collect();
        let mut all: BTreeMap<String, Held> = BTreeMap::new();
        for (index, wish) in wishes.iter().enumerate() {
            let name = format!("c{index}");
            let claim = match wish {
                Wish::Free(which) => {
                    if !all.is_empty() {
                        let name = which.get(&all.keys().cloned().collect::<Vec<_>>()).clone();
                        all.remove(&name);
                        cluster.forget(&("default".to_owned(), name));
                    }
                    continue;
                }
                Wish::Share { memory_gib, cores, count } => request(&name, &json!({"deviceClassName": "vgpu.drava.dev", "count": count,
                    "capacity": {"requests": {"memory": format!("{memory_gib}Gi"), "cores": cores.to_string()}}})),
                Wish::Whole { count } => request(&name, &json!({"deviceClassName": "gpu.drava.dev", "count": count})),
            };
            let ask = ask(&cluster, &[claim]);
            let decision = cluster.decide(&ask, policies);
            let again = cluster.decide(&ask, policies);
            prop_assert_eq!(decision.as_ref().map(held).ok(), again.as_ref().map(held).ok(), "not deterministic");
            match decision {
                Ok(placement) => {
                    cluster.assume(&placement);
                    all.insert(name, held(&placement));
                    check(&all, &cards)?;
                }
                Err(explanation) => {
                    prop_assert!(!has_room(wish, &all, &cards), "refused with room left: {}", explanation.summary());
                    let nodes = named.len();
                    let prefix = format!("0/{nodes} nodes: ");
                    prop_assert!(explanation.summary().starts_with(&prefix));
                }
            }
        }
    }

    /// The order in which objects arrive does not matter.
    #[test]
    fn arrival_order(seed in any::<prop::sample::Index>(), memory in 1..90_u64) {
        let straight = cluster(&[("n1", &[80, 16]), ("n2", &[80]), ("n3", &[16])]);
        let mut shuffled = Cluster::default();
        let mut objects: Vec<_> = [("n1", &[80, 16][..]), ("n2", &[80]), ("n3", &[16])]
            .iter()
            .flat_map(|(name, cards)| slices(name, cards))
            .collect();
        let by = seed.index(objects.len());
        objects.rotate_left(by);
        objects.reverse();
        for slice in &objects {
            shuffled.upsert_slice(slice);
        }
        for name in ["n3", "n1", "n2"] {
            shuffled.upsert_node(&node(name));
        }
        for class in classes() {
            shuffled.upsert_class(class);
        }
        let claim = share("a", &format!("{memory}Gi"), "10");
        let outcome = |cluster: &Cluster| {
            cluster
                .decide(&ask(cluster, std::slice::from_ref(&claim)), BINPACK)
                .map(|placement| (placement.node.clone(), held(&placement)))
                .map_err(|explanation| explanation.summary())
        };
        prop_assert_eq!(outcome(&straight), outcome(&shuffled));
    }
}
