//! IP addresses and networks: `ip`, `isIP`, `ip.isCanonical`, `cidr`, `isCIDR` and their methods, as in
//! `k8s.io/apiserver/pkg/cel/library`. IPv4-mapped IPv6 addresses and zones are invalid.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use cel::common::types::{CelBool, CelInt, CelString, Type};
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload};

use crate::opaque::{Content, Opaque};

/// A network: an address, which may have bits beyond the prefix, and the length of the prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Network {
    address: IpAddr,
    prefix_bits: u8,
}

type Ip = Opaque<IpAddr>;
type Cidr = Opaque<Network>;

impl Content for IpAddr {
    fn cel_type() -> &'static Type {
        static TYPE: Type = Type::new_unspecified_type("net.IP");
        &TYPE
    }
}

impl Content for Network {
    fn cel_type() -> &'static Type {
        static TYPE: Type = Type::new_unspecified_type("net.CIDR");
        &TYPE
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_bits)
    }
}

impl Network {
    /// Returns the network without the bits beyond its prefix.
    fn masked(self) -> Self {
        Self {
            address: masked(self.address, self.prefix_bits),
            ..self
        }
    }

    fn contains(self, address: IpAddr) -> bool {
        self.address.is_ipv4() == address.is_ipv4()
            && masked(self.address, self.prefix_bits) == masked(address, self.prefix_bits)
    }
}

/// Returns `address` with its first bits only.
fn masked(address: IpAddr, bits: u8) -> IpAddr {
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
            IpAddr::V4((address.to_bits() & mask).into())
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
            IpAddr::V6((address.to_bits() & mask).into())
        }
    }
}

pub(crate) fn register(env: &mut Env) -> Result<(), DeclarationError> {
    add_overload!(env, fn ip: (CelString) -> Result<Ip>)?;
    add_overload!(env, fn is_ip: (CelString) -> CelBool, name = "isIP")?;
    add_overload!(env, fn is_canonical: (CelString) -> Result<CelBool>, name = "ip.isCanonical")?;
    add_overload!(env, fn ip_string: (Ip) -> CelString, name = "string")?;
    add_member_overload!(env, fn family: (Ip) -> CelInt)?;
    add_member_overload!(env, fn is_unspecified: (Ip) -> CelBool)?;
    add_member_overload!(env, fn is_loopback: (Ip) -> CelBool)?;
    add_member_overload!(env, fn is_link_local_multicast: (Ip) -> CelBool)?;
    add_member_overload!(env, fn is_link_local_unicast: (Ip) -> CelBool)?;
    add_member_overload!(env, fn is_global_unicast: (Ip) -> CelBool)?;

    add_overload!(env, fn cidr: (CelString) -> Result<Cidr>)?;
    add_overload!(env, fn is_cidr: (CelString) -> CelBool, name = "isCIDR")?;
    add_overload!(env, fn cidr_string: (Cidr) -> CelString, name = "string")?;
    add_member_overload!(env, fn contains_ip: (Cidr, Ip) -> CelBool, name = "containsIP")?;
    add_member_overload!(env, fn contains_ip_text: (Cidr, CelString) -> Result<CelBool>, name = "containsIP")?;
    add_member_overload!(env, fn contains_cidr: (Cidr, Cidr) -> CelBool, name = "containsCIDR")?;
    add_member_overload!(env, fn contains_cidr_text: (Cidr, CelString) -> Result<CelBool>, name = "containsCIDR")?;
    add_member_overload!(env, fn cidr_ip: (Cidr) -> Ip, name = "ip")?;
    add_member_overload!(env, fn cidr_masked: (Cidr) -> Cidr, name = "masked")?;
    add_member_overload!(env, fn prefix_length: (Cidr) -> CelInt)
}

/// Parses an address with an optional zone, as Go's `netip.ParseAddr`. Returns the address without the zone.
pub(crate) fn parse_with_zone(text: &str) -> Option<(IpAddr, &str)> {
    match text.split_once('%') {
        None => Some((text.parse().ok()?, "")),
        Some((_, "")) => None,
        Some((address, zone)) => Some((address.parse::<Ipv6Addr>().ok()?.into(), zone)),
    }
}

fn parse_ip(text: &str) -> Result<IpAddr, String> {
    let (address, zone) = parse_with_zone(text).ok_or_else(|| {
        format!(
            "IP Address {text:?} parse error during conversion from string: ParseAddr({text:?}): unable to parse IP"
        )
    })?;
    if !zone.is_empty() {
        return Err(format!(
            "IP address {text:?} with zone value is not allowed"
        ));
    }
    reject_mapped(address, text)
}

fn reject_mapped(address: IpAddr, text: &str) -> Result<IpAddr, String> {
    match address {
        IpAddr::V6(address) if address.to_ipv4_mapped().is_some() => {
            Err(format!("IPv4-mapped IPv6 address {text:?} is not allowed"))
        }
        address => Ok(address),
    }
}

fn parse_cidr(text: &str) -> Result<Network, String> {
    let failed = |problem: &str| {
        // The prefix is doubled in Kubernetes.
        let prefix = "network address parse error during conversion from string: ";
        format!("{prefix}{prefix}netip.ParsePrefix({text:?}): {problem}")
    };
    let (address, bits) = text.rsplit_once('/').ok_or_else(|| failed("no '/'"))?;
    let address: IpAddr = address
        .parse()
        .map_err(|_| failed(&format!("ParseAddr({address:?}): unable to parse IP")))?;
    let bad_bits = || failed(&format!("bad bits after slash: {bits:?}"));
    let is_number = bits.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number || bits.is_empty() || bits.len() > 1 && bits.starts_with('0') {
        return Err(bad_bits());
    }
    let limit = if address.is_ipv4() { 32 } else { 128 };
    let prefix_bits = bits
        .parse::<u8>()
        .ok()
        .filter(|bits| *bits <= limit)
        .ok_or_else(|| failed("prefix length out of range"))?;
    reject_mapped(address, text)
        .map(|address| Network {
            address,
            prefix_bits,
        })
        .map_err(|error| {
            format!("network address parse error during conversion from string: {error}")
        })
}

/// Kubernetes' text is the whole error.
fn failed(text: String) -> ExecutionError {
    ExecutionError::InternalError(text)
}

fn ip(text: &CelString<'_>) -> Result<Ip, ExecutionError> {
    parse_ip(text.inner()).map(Opaque).map_err(failed)
}

fn is_ip(text: &CelString<'_>) -> CelBool {
    parse_ip(text.inner()).is_ok().into()
}

fn is_canonical(text: &CelString<'_>) -> Result<CelBool, ExecutionError> {
    let address = parse_ip(text.inner()).map_err(failed)?;
    Ok((address.to_string() == text.inner()).into())
}

fn ip_string(this: &Ip) -> CelString<'static> {
    this.0.to_string().into()
}

fn family(this: &Ip) -> CelInt {
    CelInt::from(if this.0.is_ipv4() { 4 } else { 6 })
}

fn is_unspecified(this: &Ip) -> CelBool {
    this.0.is_unspecified().into()
}

fn is_loopback(this: &Ip) -> CelBool {
    this.0.is_loopback().into()
}

/// 224.0.0.0/24 or ff02::/16 with any flags.
fn is_link_local_multicast(this: &Ip) -> CelBool {
    match this.0 {
        IpAddr::V4(address) => matches!(address.octets(), [224, 0, 0, _]),
        IpAddr::V6(address) => address.segments()[0] & 0xff0f == 0xff02,
    }
    .into()
}

fn is_link_local_unicast(this: &Ip) -> CelBool {
    has_link_local_prefix(this.0).into()
}

fn has_link_local_prefix(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

fn is_global_unicast(this: &Ip) -> CelBool {
    let is_broadcast = matches!(this.0, IpAddr::V4(address) if address.is_broadcast());
    let is_special = this.0.is_unspecified() || this.0.is_loopback() || this.0.is_multicast();
    (!is_broadcast && !is_special && !has_link_local_prefix(this.0)).into()
}

fn cidr(text: &CelString<'_>) -> Result<Cidr, ExecutionError> {
    parse_cidr(text.inner()).map(Opaque).map_err(failed)
}

fn is_cidr(text: &CelString<'_>) -> CelBool {
    parse_cidr(text.inner()).is_ok().into()
}

fn cidr_string(this: &Cidr) -> CelString<'static> {
    this.0.to_string().into()
}

fn contains_ip(this: &Cidr, address: &Ip) -> CelBool {
    this.0.contains(address.0).into()
}

/// Kubernetes hides why the text is invalid.
fn contains_ip_text(this: &Cidr, text: &CelString<'_>) -> Result<CelBool, ExecutionError> {
    let address = parse_ip(text.inner()).map_err(|_| failed("no such overload".to_owned()))?;
    Ok(this.0.contains(address).into())
}

fn contains_cidr(this: &Cidr, other: &Cidr) -> CelBool {
    (this.0.prefix_bits <= other.0.prefix_bits && this.0.contains(other.0.address)).into()
}

fn contains_cidr_text(this: &Cidr, text: &CelString<'_>) -> Result<CelBool, ExecutionError> {
    Ok(contains_cidr(this, &cidr(text)?))
}

fn cidr_ip(this: &Cidr) -> Ip {
    Opaque(this.0.address)
}

fn cidr_masked(this: &Cidr) -> Cidr {
    Opaque(this.0.masked())
}

fn prefix_length(this: &Cidr) -> CelInt {
    CelInt::from(i64::from(this.0.prefix_bits))
}
