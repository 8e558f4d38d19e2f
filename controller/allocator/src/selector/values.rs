//! CEL values of a device: the variable `device` of an expression.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use cel::ExecutionError;
use cel::common::traits::{self, Container, Indexer, Iterable, Sizer};
use cel::common::types::{CelBool, CelInt, CelList, CelMap, CelMapKey, CelString, MAP_TYPE, Type};
use cel::common::value::{CowVal, StaticVal, Val};

use crate::attribute::Attribute;
use crate::capacity::Capacity;

/// The variable `device`; cheap to clone.
#[derive(Debug, Clone)]
pub struct DeviceValue(Arc<Fields>);

#[derive(Debug)]
struct Fields {
    driver: CelString<'static>,
    allow_multiple_allocations: CelBool,
    attributes: DomainMap,
    capacity: DomainMap,
}

impl DeviceValue {
    /// Creates the value of a device of `driver`; unqualified names belong to the domain of that driver.
    #[must_use]
    pub fn new<'a>(
        driver: &str,
        attributes: impl IntoIterator<Item = (&'a String, &'a Attribute)>,
        capacity: &BTreeMap<String, Capacity>,
        allow_multiple_allocations: bool,
    ) -> Self {
        let mut attribute_domains = DomainBuilder::new(driver);
        for (name, attribute) in attributes {
            attribute_domains.insert(name, attribute_value(attribute));
        }
        let mut capacity_domains = DomainBuilder::new(driver);
        for (name, entry) in capacity {
            capacity_domains.insert(name, drava_cel::quantity(entry.value));
        }
        Self(Arc::new(Fields {
            driver: CelString::from(driver.to_owned()),
            allow_multiple_allocations: allow_multiple_allocations.into(),
            attributes: attribute_domains.build(),
            capacity: capacity_domains.build(),
        }))
    }
}

fn attribute_value(attribute: &Attribute) -> Box<dyn Val> {
    match attribute {
        Attribute::Bool(value) => Box::new(CelBool::from(*value)),
        Attribute::Int(value) => Box::new(CelInt::from(*value)),
        Attribute::String(value) => Box::new(CelString::from(value.clone())),
        Attribute::Version(value) => drava_cel::version(value.clone()),
        Attribute::List(values) => Box::new(CelList::from(
            values.iter().map(attribute_value).collect::<Vec<_>>(),
        )),
    }
}

/// Groups qualified names into one map per domain.
struct DomainBuilder<'a> {
    default_domain: &'a str,
    domains: HashMap<&'a str, HashMap<CelMapKey<'static>, Box<dyn Val>>>,
}

impl<'a> DomainBuilder<'a> {
    fn new(default_domain: &'a str) -> Self {
        Self {
            default_domain,
            domains: HashMap::new(),
        }
    }

    fn insert(&mut self, name: &'a str, value: Box<dyn Val>) {
        let (domain, id) = name.split_once('/').unwrap_or((self.default_domain, name));
        self.domains
            .entry(domain)
            .or_default()
            .insert(key(id), value);
    }

    fn build(self) -> DomainMap {
        let domains: HashMap<CelMapKey<'static>, Box<dyn Val>> = self
            .domains
            .into_iter()
            .map(|(domain, names)| (key(domain), Box::new(CelMap::from(names)) as Box<dyn Val>))
            .collect();
        DomainMap {
            domains: CelMap::from(domains),
            unknown: CelMap::default(),
        }
    }
}

fn key(text: &str) -> CelMapKey<'static> {
    CelMapKey::String(CelString::from(text.to_owned()))
}

static DEVICE_TYPE: Type = Type::new_unspecified_type("kubernetes.DRADevice");

impl Val for DeviceValue {
    fn get_type(&self) -> &Type {
        &DEVICE_TYPE
    }

    fn cel_type() -> &'static Type {
        &DEVICE_TYPE
    }

    fn as_indexer<'b, 'v>(&'b self) -> Option<&'b (dyn Indexer + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v>
    where
        Self: 'v,
    {
        Box::new(self.clone())
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl StaticVal for DeviceValue {}

impl Indexer for DeviceValue {
    fn get<'b, 'v>(&'b self, field: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        let field = field
            .downcast_ref::<CelString>()
            .map_or("", |name| name.inner());
        match field {
            "driver" => Ok(CowVal::Borrowed(&self.0.driver)),
            "allowMultipleAllocations" => Ok(CowVal::Borrowed(&self.0.allow_multiple_allocations)),
            "attributes" => Ok(CowVal::Borrowed(&self.0.attributes)),
            "capacity" => Ok(CowVal::Borrowed(&self.0.capacity)),
            other => Err(ExecutionError::no_such_key(other)),
        }
    }

    fn steal<'v>(self: Box<Self>, field: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        self.get(field).map(CowVal::into_owned)
    }
}

/// A map from domains to maps of names. An unknown domain is an empty map.
#[derive(Debug, Clone)]
struct DomainMap {
    domains: CelMap<'static>,
    unknown: CelMap<'static>,
}

impl Val for DomainMap {
    fn get_type(&self) -> &Type {
        &MAP_TYPE
    }

    fn cel_type() -> &'static Type {
        &MAP_TYPE
    }

    fn as_container(&self) -> Option<&dyn Container> {
        Some(&self.domains)
    }

    fn as_indexer<'b, 'v>(&'b self) -> Option<&'b (dyn Indexer + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn as_iterable<'b, 'v>(&'b self) -> Option<&'b (dyn Iterable + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn as_sizer(&self) -> Option<&dyn Sizer> {
        Some(&self.domains)
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v>
    where
        Self: 'v,
    {
        Box::new(self.clone())
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl StaticVal for DomainMap {}

impl Iterable for DomainMap {
    fn iter<'b, 'v>(&'b self) -> Box<dyn traits::Iterator<'b, 'v> + 'b>
    where
        Self: 'v,
    {
        self.domains.iter()
    }
}

impl Indexer for DomainMap {
    fn get<'b, 'v>(&'b self, domain: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        match Indexer::get(&self.domains, domain) {
            Err(ExecutionError::NoSuchKey(_)) => Ok(CowVal::Borrowed(&self.unknown)),
            found => found,
        }
    }

    fn steal<'v>(self: Box<Self>, domain: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        self.get(domain).map(CowVal::into_owned)
    }
}
