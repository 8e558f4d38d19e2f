use super::*;

/// NVLink domain, NUMA node and PCIe root of a GPU; `none` and −1 are unknown.
type Place = (&'static str, i64, &'static str);

fn ranked(held: &[Place], free: &[Place], needed: usize) -> Vec<usize> {
    let (held, free) = (attributes(held), attributes(free));
    ranks(&locations(&held), &locations(&free), needed)
}

fn attributes(places: &[Place]) -> Vec<[Attribute; 3]> {
    let text = |text: &str| Attribute::String(text.to_owned());
    let place = |(nvlink, numa, pcie): &Place| [text(nvlink), Attribute::Int(*numa), text(pcie)];
    places.iter().map(place).collect()
}

fn is_unknown(value: &Attribute) -> bool {
    [Attribute::String("none".to_owned()), Attribute::Int(-1)].contains(value)
}

fn locations(attributes: &[[Attribute; 3]]) -> Vec<Location<'_>> {
    attributes
        .iter()
        .map(|values| {
            Location(
                values
                    .each_ref()
                    .map(|value| Some(value).filter(|value| !is_unknown(value))),
            )
        })
        .collect()
}

/// Two NUMA nodes with two PCIe roots each; no NVLink.
const SERVER: [Place; 8] = [
    ("none", 0, "a"),
    ("none", 0, "a"),
    ("none", 0, "b"),
    ("none", 0, "b"),
    ("none", 1, "c"),
    ("none", 1, "c"),
    ("none", 1, "d"),
    ("none", 1, "d"),
];

#[test]
fn prefers_smallest_group_with_enough_gpus() {
    // A pair on one PCIe root; four on one NUMA node; six fit on no NUMA node.
    assert_eq!(ranked(&[], &SERVER, 2), [0, 0, 1, 1, 2, 2, 2, 2]);
    assert_eq!(ranked(&[], &SERVER, 4), [0, 0, 0, 0, 2, 2, 2, 2]);
    assert_eq!(ranked(&[], &SERVER, 6), [0; 8]);
    // Of the first NUMA node one GPU is in use: a single GPU comes from there, four from the other.
    let free = &SERVER[1..];
    assert_eq!(ranked(&[], free, 1), [0, 1, 1, 2, 2, 2, 2]);
    assert_eq!(ranked(&[], free, 4), [2, 2, 2, 0, 0, 0, 0]);
}

#[test]
fn prefers_gpus_beside_those_of_the_pod() {
    assert_eq!(ranked(&SERVER[4..5], &SERVER[..4], 1), [0; 4]);
    assert_eq!(
        ranked(&SERVER[4..5], &SERVER[5..], 1),
        [0, 1, 1],
        "the same PCIe root"
    );
    let mut free = SERVER.to_vec();
    free.remove(4);
    assert_eq!(ranked(&SERVER[4..5], &free, 2), [2, 2, 2, 2, 0, 0, 0]);
}

#[test]
fn prefers_nvlink_to_other_connections() {
    // NVLink bridges connect pairs across NUMA nodes.
    let bridged = [("x", 0, "a"), ("y", 0, "a"), ("y", 1, "b"), ("z", 1, "b")];
    assert_eq!(ranked(&[], &bridged, 2), [3, 0, 0, 3]);
    // One NVLink domain: NUMA nodes decide.
    let switched = [("x", 0, "a"), ("x", 1, "b"), ("x", 1, "c"), ("x", 0, "d")];
    assert_eq!(ranked(&[], &switched, 2), [0, 2, 2, 0]);
}

#[test]
fn unknown_places_are_no_group() {
    let unknown = [
        ("none", -1, "none"),
        ("none", -1, "none"),
        ("none", 0, "a"),
        ("none", 0, "b"),
    ];
    assert_eq!(ranked(&[], &unknown, 2), [2, 2, 0, 0]);
    assert_eq!(ranked(&[], &unknown[..2], 2), [0, 0]);
}

#[test]
fn proximity_is_the_closest_connection() {
    let of = |places: &[Place]| proximity(&locations(&attributes(places)));
    assert_eq!(of(&[]), Proximity::Same);
    assert_eq!(of(&SERVER[..1]), Proximity::Same);
    assert_eq!(of(&SERVER[..2]), Proximity::PcieRoot);
    assert_eq!(of(&SERVER[1..3]), Proximity::NumaNode);
    assert_eq!(of(&SERVER[3..5]), Proximity::Node);
    assert_eq!(of(&[("x", 0, "a"), ("x", 1, "b")]), Proximity::NvlinkDomain);
    assert_eq!(
        of(&[("none", -1, "none"), ("none", -1, "none")]),
        Proximity::Node
    );
}

#[test]
fn groups_by_numa_node_only_with_numa() {
    let (held, free) = (attributes(&[]), attributes(&SERVER[2..]));
    let ranked = |needed| numa_ranks(&locations(&held), &locations(&free), needed);
    // The smallest NUMA node with enough free GPUs; PCIe roots do not count.
    assert_eq!(ranked(1), [0, 0, 2, 2, 2, 2]);
    assert_eq!(ranked(3), [2, 2, 0, 0, 0, 0]);
    assert_eq!(ranked(6), [0; 6]);
    let pair = attributes(&[SERVER[0], SERVER[3]]);
    assert_eq!(numa_proximity(&locations(&pair)), Proximity::NumaNode);
    let apart = attributes(&[("x", 0, "a"), ("x", 1, "c")]);
    assert_eq!(numa_proximity(&locations(&apart)), Proximity::Node);
    assert_eq!(proximity(&locations(&apart)), Proximity::NvlinkDomain);
}
