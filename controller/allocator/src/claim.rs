//! ResourceClaims, parsed and classified by driver.
//!
//! A claim is for this driver when its selectors, including those of its classes, name the driver; its other requests
//! may leave the driver open. A claim that also requests devices of another driver is rejected: an allocation is written
//! at once, by one allocator. A claim whose requests all leave the driver open is undetermined: the devices of this
//! driver match, and those of other drivers may.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use drava_api::config::{self, ConfigError, Percent, Placement};
use drava_api::policy::Preference;
use drava_api::{Quantity, names};
use k8s_openapi::api::resource::v1 as dra;

use crate::capacity::Amounts;
use crate::division::Division;
use crate::pod::IMPLICIT_RESOURCE_PREFIX;
use crate::selector::{Selector, Selectors};

mod drivers;

pub(crate) use drivers::class_match;
use drivers::{Drivers, RawRequest, class_selectors, compiled, drivers_of, raw_alternatives};

/// Most devices in one allocation (limit of the API).
pub const MAX_RESULTS: usize = 32;

/// Namespace, name and UID of a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimId {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
}

impl fmt::Display for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A claim whose requests are all for this driver.
#[derive(Debug, Clone)]
pub struct ClaimSpec {
    /// The claim.
    pub id: ClaimId,
    /// Requests in the order of the claim.
    pub requests: Vec<Request>,
    /// Constraints between the devices.
    pub constraints: Vec<Constraint>,
    /// Placement policies of the claim or its classes.
    pub placement: Placement,
    /// Placement policies of the claim alone.
    pub own_placement: Placement,
    /// Placement policies of the classes alone.
    pub class_placement: Placement,
    /// Preference of GpuPolicies for the device of requests that a share and a partition can serve.
    pub prefer: Option<Preference>,
}

/// One entry of `spec.devices.requests`: alternatives in the order of preference; a plain request has one.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Main name.
    pub name: String,
    /// Alternatives, the preferred one first.
    pub alternatives: Vec<Alternative>,
}

/// One alternative of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Alternative {
    /// Name in the result: `main`, or `main/sub` for an alternative of `firstAvailable`.
    pub name: String,
    /// Name of the device class.
    pub class: String,
    /// Selectors of the class.
    pub class_selectors: Vec<Arc<Selector>>,
    /// Selectors of the request.
    pub selectors: Vec<Arc<Selector>>,
    /// Number of devices.
    pub count: Count,
    /// Requested amounts by capacity name.
    pub capacity: Amounts,
    /// Requested percentage of a GPU's memory, instead of an amount.
    pub memory_percent: Option<Percent>,
    /// What a share is a part of.
    pub division: Division,
    /// Tolerated taints.
    pub tolerations: Vec<dra::DeviceToleration>,
    /// Admin access: may use devices that are allocated to other claims (KEP-5018).
    pub admin_access: bool,
}

/// Number of devices of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// This many.
    Exactly(usize),
    /// Every device that matches; at least one.
    All,
}

/// A constraint between the devices of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Constraint {
    /// Relation between the values.
    pub rule: ConstraintRule,
    /// Fully qualified attribute name.
    pub attribute: String,
    /// Requests in scope (`main` or `main/sub`); all when empty.
    pub requests: Vec<String>,
}

/// Relation between the attribute values of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConstraintRule {
    /// All equal.
    Match,
    /// All different.
    Distinct,
}

impl Constraint {
    /// Returns whether the constraint covers the request with result name `request`.
    #[must_use]
    pub fn covers(&self, request: &str) -> bool {
        let main = request.split_once('/').map_or(request, |(main, _)| main);
        self.requests.is_empty()
            || self
                .requests
                .iter()
                .any(|name| name == request || name == main)
    }
}

/// Which driver a claim is for.
#[derive(Debug, Clone)]
pub enum Ownership {
    /// Only for this driver.
    Ours(Box<ClaimSpec>),
    /// Not for this driver.
    Foreign,
    /// Devices of this driver match, but no selector names a driver; kube-scheduler may find devices of another driver.
    Undetermined(ClaimError),
    /// For this driver, but cannot be served.
    Rejected(ClaimError),
}

/// Why a claim for this driver can never be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("claim {claim}: {problem}")]
pub struct ClaimError {
    /// The claim.
    pub claim: Box<ClaimId>,
    /// The problem.
    pub problem: ClaimProblem,
}

/// Problem of a claim.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimProblem {
    /// Requests for several drivers.
    #[error(
        "request {ours} is for {}, request {other} for another driver; use one claim per driver",
        names::DRIVER
    )]
    MixedDrivers {
        /// A request for this driver.
        ours: String,
        /// A request for another driver.
        other: String,
    },
    /// No selector names a driver.
    #[error(
        "request {request}: no selector of device class {class} or of the request names a driver; for a GPU of drava add \
         the selector device.driver == \"{}\"{}",
        names::DRIVER,
        compile_error.as_ref().map(|error| format!(" ({error})")).unwrap_or_default()
    )]
    DriverUnspecified {
        /// Name of the request.
        request: String,
        /// Name of the class.
        class: String,
        /// Why a selector does not compile.
        compile_error: Option<String>,
    },
    /// A class does not exist.
    #[error("request {request}: device class {class} does not exist")]
    UnknownClass {
        /// Name of the request.
        request: String,
        /// Name of the class.
        class: String,
    },
    /// A requested amount is invalid.
    #[error("request {request}: {problem}")]
    Amount {
        /// Name of the request.
        request: String,
        /// The problem.
        problem: String,
    },
    /// The opaque config is invalid.
    #[error("request {request}: {problem}")]
    Config {
        /// Name of the request.
        request: String,
        /// The problem, with the field path.
        problem: String,
    },
    /// The claim uses a feature that is not supported.
    #[error("{feature} is not supported")]
    Unsupported {
        /// The feature.
        feature: String,
    },
    /// A container has a claim with `computePolicy: spatial` and another one.
    #[error(
        "the container {container:?} has the claim {other} too; {}",
        drava_api::reason::BESIDE_SPATIAL
    )]
    Incompatible {
        /// Name of the container.
        container: String,
        /// Name of the other claim.
        other: String,
    },
}

/// Source of device classes.
pub trait Classes {
    /// Returns a class by name.
    fn class(&self, name: &str) -> Option<&dra::DeviceClass>;

    /// Returns the class of an extended resource: of an implicit one by the name of the class, otherwise by its
    /// `extendedResourceName`. Of several classes with that name it is the one that kube-scheduler takes.
    fn of_extended_resource(&self, resource: &str) -> Option<&dra::DeviceClass>;
}

impl Classes for BTreeMap<String, dra::DeviceClass> {
    fn class(&self, name: &str) -> Option<&dra::DeviceClass> {
        self.get(name)
    }

    fn of_extended_resource(&self, resource: &str) -> Option<&dra::DeviceClass> {
        if let Some(name) = resource.strip_prefix(IMPLICIT_RESOURCE_PREFIX) {
            return self.get(name);
        }
        let mut named = self.values().filter(|class| {
            let spec = class.spec.as_ref();
            spec.and_then(|spec| spec.extended_resource_name.as_deref()) == Some(resource)
        });
        // Of several, kube-scheduler takes the newest, and of equally old ones the first by name.
        let first = named.next()?;
        let created = |class: &dra::DeviceClass| {
            let time = class.metadata.creation_timestamp.as_ref();
            time.map(|time| time.0)
        };
        Some(
            named.fold(first, |best, class| match created(class) > created(best) {
                true => class,
                false => best,
            }),
        )
    }
}

/// Returns whether a claim of this spec would be for this driver, rejected or not. kube-scheduler decides whether there are devices of
/// another driver.
#[must_use]
pub fn is_own(
    namespace: &str,
    spec: &dra::ResourceClaimSpec,
    classes: &impl Classes,
    selectors: &Selectors,
) -> bool {
    let mut claim = dra::ResourceClaim {
        spec: Some(spec.clone()),
        ..dra::ResourceClaim::default()
    };
    // Selectors are kept for each namespace, so that those of a tenant displace no others.
    claim.metadata.namespace = Some(namespace.to_owned());
    matches!(
        classify(&claim, classes, selectors),
        Ownership::Ours(_) | Ownership::Rejected(_)
    )
}

/// Parses a claim and determines which driver it is for.
#[must_use]
pub fn classify(
    claim: &dra::ResourceClaim,
    classes: &impl Classes,
    selectors: &Selectors,
) -> Ownership {
    let id = ClaimId::of(claim);
    let Some(devices) = claim.spec.as_ref().and_then(|spec| spec.devices.as_ref()) else {
        return Ownership::Foreign;
    };
    let requests: Vec<(String, Vec<RawRequest<'_>>)> = devices
        .requests
        .iter()
        .flatten()
        .map(|request| (request.name.clone(), raw_alternatives(request)))
        .collect();
    let error = |problem| ClaimError {
        claim: Box::new(id.clone()),
        problem,
    };
    match drivers_of(&id.namespace, &requests, classes, selectors) {
        Drivers::Own => {}
        Drivers::Other => return Ownership::Foreign,
        Drivers::Undetermined(problem) => return Ownership::Undetermined(error(problem)),
        Drivers::Invalid(problem) => return Ownership::Rejected(error(problem)),
    }
    match parse(&id, devices, requests, classes, selectors) {
        Ok(spec) => Ownership::Ours(Box::new(spec)),
        Err(problem) => Ownership::Rejected(error(problem)),
    }
}

/// Returns the device class of a request by its name in an allocation: `main` or `main/sub`.
#[must_use]
pub fn request_class<'a>(claim: &'a dra::ResourceClaim, request: &str) -> Option<&'a str> {
    let devices = claim.spec.as_ref()?.devices.as_ref()?;
    let requests = devices.requests.iter().flatten();
    let mut alternatives = requests.flat_map(raw_alternatives);
    let named = alternatives.find(|alternative| alternative.name == request)?;
    Some(named.class)
}

impl ClaimSpec {
    /// Returns whether the claim may get a share of the multiprocessors of a GPU.
    #[must_use]
    pub fn may_be_spatial(&self) -> bool {
        let mut alternatives = self
            .requests
            .iter()
            .flat_map(|request| &request.alternatives);
        alternatives.any(|alternative| alternative.division != Division::Time)
    }
}

impl ClaimId {
    /// Returns the identity of a claim object.
    #[must_use]
    pub fn of(claim: &dra::ResourceClaim) -> Self {
        Self {
            namespace: claim.metadata.namespace.clone().unwrap_or_default(),
            name: claim.metadata.name.clone().unwrap_or_default(),
            uid: claim.metadata.uid.clone().unwrap_or_default(),
        }
    }
}

fn class_config(class: Option<&dra::DeviceClass>) -> &[dra::DeviceClassConfiguration] {
    class
        .and_then(|class| class.spec.as_ref()?.config.as_deref())
        .unwrap_or_default()
}

fn parse(
    id: &ClaimId,
    devices: &dra::DeviceClaim,
    requests: Vec<(String, Vec<RawRequest<'_>>)>,
    classes: &impl Classes,
    selectors: &Selectors,
) -> Result<ClaimSpec, ClaimProblem> {
    let unsupported = |feature: String| ClaimProblem::Unsupported { feature };
    let [mut placement, mut own_placement, mut class_placement] = [Placement::default(); 3];
    let mut parsed = Vec::new();
    for (name, raws) in requests {
        let mut alternatives = Vec::new();
        for raw in raws {
            let class = classes.class(raw.class);
            let claim_config = devices.config.as_deref().unwrap_or_default();
            let invalid = |error: ConfigError| ClaimProblem::Config {
                request: raw.name.clone(),
                problem: error.for_class(raw.class),
            };
            let of_class = config::resolve_spec(class_config(class), &[], &raw.name);
            let of_class = of_class.map_err(|error| ClaimProblem::Config {
                request: raw.name.clone(),
                problem: format!("device class {}: {error}", raw.class),
            })?;
            let settings = config::resolve_spec(class_config(class), claim_config, &raw.name)
                .map_err(invalid)?;
            let own = config::claim_placement(claim_config, &raw.name).map_err(invalid)?;
            for (result, found) in [
                (&mut placement, settings.placement),
                (&mut own_placement, own),
                (&mut class_placement, of_class.placement),
            ] {
                result.node = result.node.or(found.node);
                result.gpu = result.gpu.or(found.gpu);
            }
            let mut alternative =
                alternative(&id.namespace, &raw, class_selectors(class), selectors)?;
            alternative.memory_percent = settings.memory_percent;
            alternative.division = Division::of(&settings, &id.namespace);
            if settings.memory_percent.is_some()
                && alternative.requested(names::capacity::MEMORY).is_some()
            {
                return Err(ClaimProblem::Config {
                    request: raw.name.clone(),
                    problem: "config field memory.percent: the request has capacity.requests.memory too, use one of them"
                        .to_owned(),
                });
            }
            let memory = alternative.requested(names::capacity::MEMORY);
            let memory_bytes = memory.and_then(|memory| u64::try_from(memory.to_i64()?).ok());
            if let Some(Err(error)) = memory_bytes.map(|bytes| settings.burst_limit(bytes)) {
                return Err(invalid(error.into()));
            }
            alternatives.push(alternative);
        }
        if alternatives.is_empty() {
            return Err(unsupported(format!("the type of request {name}")));
        }
        parsed.push(Request { name, alternatives });
    }
    let devices_at_least = devices_at_least(&parsed);
    let alternatives = parsed.iter().flat_map(|request| &request.alternatives);
    let mut spatial = alternatives.filter(|alternative| alternative.division != Division::Time);
    if let Some(spatial) = spatial.next().filter(|_| devices_at_least > 1) {
        return Err(ClaimProblem::Config {
            request: spatial.name.clone(),
            problem: "computePolicy: spatial serves one device of a claim; request one share only"
                .to_owned(),
        });
    }
    if devices_at_least > MAX_RESULTS {
        return Err(unsupported(format!(
            "a claim for {devices_at_least} devices (at most {MAX_RESULTS} devices)"
        )));
    }
    let constraints = devices
        .constraints
        .iter()
        .flatten()
        .map(|constraint| {
            let (rule, attribute) =
                match (&constraint.match_attribute, &constraint.distinct_attribute) {
                    (Some(attribute), _) => (ConstraintRule::Match, attribute),
                    (None, Some(attribute)) => (ConstraintRule::Distinct, attribute),
                    (None, None) => {
                        return Err(unsupported(
                            "a constraint without matchAttribute or distinctAttribute".to_owned(),
                        ));
                    }
                };
            Ok(Constraint {
                rule,
                attribute: attribute.clone(),
                requests: constraint.requests.clone().unwrap_or_default(),
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(ClaimSpec {
        id: id.clone(),
        requests: parsed,
        constraints,
        placement,
        own_placement,
        class_placement,
        prefer: None,
    })
}

fn alternative(
    namespace: &str,
    raw: &RawRequest<'_>,
    class_selectors: &[dra::DeviceSelector],
    selectors: &Selectors,
) -> Result<Alternative, ClaimProblem> {
    let unsupported = |feature: String| ClaimProblem::Unsupported { feature };
    if raw.derived_attributes {
        return Err(unsupported(format!(
            "derivedAttributes in request {}",
            raw.name
        )));
    }
    if class_selectors
        .iter()
        .chain(raw.selectors)
        .any(|selector| selector.cel.is_none())
    {
        return Err(unsupported(format!(
            "a selector without CEL expression in request {}",
            raw.name
        )));
    }
    let count = match raw.allocation_mode {
        None | Some("ExactCount" | "") => {
            let count = usize::try_from(raw.count.unwrap_or(1)).unwrap_or(usize::MAX);
            if count == 0 || count > MAX_RESULTS {
                return Err(unsupported(format!(
                    "count {} in request {} (1 to {MAX_RESULTS} devices)",
                    raw.count.unwrap_or(1),
                    raw.name
                )));
            }
            Count::Exactly(count)
        }
        Some("All") => Count::All,
        Some(mode) => {
            return Err(unsupported(format!(
                "allocationMode {mode} in request {}",
                raw.name
            )));
        }
    };
    let no_requests = BTreeMap::new();
    let requested = raw
        .capacity
        .and_then(|capacity| capacity.requests.as_ref())
        .unwrap_or(&no_requests);
    let capacity =
        drava_api::request::check_capacity(requested).map_err(|error| ClaimProblem::Amount {
            request: raw.name.clone(),
            problem: error.to_string(),
        })?;
    Ok(Alternative {
        name: raw.name.clone(),
        class: raw.class.to_owned(),
        class_selectors: compiled("", class_selectors, selectors).collect(),
        selectors: compiled(namespace, raw.selectors, selectors).collect(),
        count,
        capacity: capacity.into_iter().collect(),
        memory_percent: None,
        division: Division::Time,
        tolerations: raw.tolerations.to_vec(),
        admin_access: raw.admin_access,
    })
}

/// Returns the number of devices of the requests' smallest alternatives.
fn devices_at_least(requests: &[Request]) -> usize {
    let count = |alternative: &Alternative| match alternative.count {
        Count::Exactly(count) => count,
        Count::All => 0,
    };
    let requests = requests.iter();
    let smallest = requests.filter_map(|request| request.alternatives.iter().map(count).min());
    smallest.sum()
}

impl Alternative {
    /// Returns whether the other alternative is equal but for its name.
    pub(crate) fn is_alike(&self, other: &Self) -> bool {
        let Self {
            name: _,
            class,
            class_selectors,
            selectors,
            count,
            capacity,
            memory_percent,
            division,
            tolerations,
            admin_access,
        } = self;
        *class == other.class
            && *class_selectors == other.class_selectors
            && *selectors == other.selectors
            && *count == other.count
            && *capacity == other.capacity
            && *memory_percent == other.memory_percent
            && *division == other.division
            && *tolerations == other.tolerations
            && *admin_access == other.admin_access
    }

    /// Returns the requested amount of a capacity.
    #[must_use]
    pub fn requested(&self, capacity: &str) -> Option<Quantity> {
        self.capacity.get(capacity).copied()
    }
}
