//! Both allocators decide the same. `DRAVA_ORACLE_CASES` sets the cases per class and release, `DRAVA_ORACLE_SEED` the
//! seed.

#![expect(
    clippy::unwrap_used,
    reason = "a failure of the harness fails the test"
)]

use std::io::Write as _;

use drava_cluster::Kubernetes;
use drava_oracle::batch::{self, Range};
use drava_oracle::exception::Exception;
use drava_oracle::generator::Class;
use drava_oracle::program;

fn compare(test: &str, release: Kubernetes, class: Class) {
    if let Some(reason) = program::missing_prerequisite() {
        let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
        return;
    }
    let range = Range::from_environment().unwrap();
    let report = batch::run(release, class, range, None).unwrap();
    let _ = writeln!(
        std::io::stderr(),
        "Kubernetes {release}, {class:?}, seed {}: {} cases, {report}",
        range.seed,
        range.cases
    );
    if let Err(error) = batch::check(release, class, range, &report) {
        panic!("{error}");
    }
    if matches!(class, Class::OneGpu | Class::LateSelectors) {
        let given_up = report.listed.get(&Exception::SearchLimit);
        assert_eq!(
            given_up, None,
            "the search finds what upstream finds: {report}"
        );
    }
    if range.cases >= 100 {
        let near_the_limit = report.decisions() / 10;
        assert!(
            report.feasible > near_the_limit && report.infeasible > near_the_limit,
            "the cases are not near the limit: {report}"
        );
    }
}

macro_rules! classes {
    ($($name:ident: $class:ident,)*) => {
        mod kubernetes_1_36 {
            use super::*;
            $(#[test] fn $name() {
                compare(stringify!($name), Kubernetes::V1_36, Class::$class);
            })*
        }
        mod kubernetes_1_37 {
            use super::*;
            $(#[test] fn $name() {
                compare(stringify!($name), Kubernetes::V1_37, Class::$class);
            })*
        }
        #[test]
        fn compares_every_class() {
            assert_eq!(Class::EVERY, [$(Class::$class),*]);
        }
    };
}

classes! {
    decides_shares_and_whole_gpus: Shares,
    rounds_requests: Rounding,
    charges_counters_of_partitions: Partitions,
    excludes_unusable_pools: Pools,
    respects_taints: Taints,
    evaluates_selectors: Selectors,
    respects_constraints: Constraints,
    selects_alternatives: Alternatives,
    allocates_all: All,
    grants_admin_access: AdminAccess,
    decides_several_claims: SeveralClaims,
    selects_first_device_that_fits: FirstFit,
    finds_gpu_with_many_devices: OneGpu,
    leaves_devices_for_late_selectors: LateSelectors,
}
