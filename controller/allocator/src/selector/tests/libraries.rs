//! Functions of addresses, networks, URLs and named formats, with the results that Kubernetes documents.

use super::{Error, Expect, Match, NoMatch, check};

#[test]
fn evaluates_addresses_as_kubernetes() {
    let cases: &[(&str, Expect)] = &[
        (
            r#"ip("127.0.0.1").family() == 4 && ip("::1").family() == 6"#,
            Match,
        ),
        (
            r#"ip("127.0.0.256") == ip("::1")"#,
            Error(r#"CEL runtime error: IP Address "127.0.0.256" parse error"#),
        ),
        (r#"isIP("127.0.0.1") && isIP("::1")"#, Match),
        (r#"isIP(":::1") || isIP("127.0.0.01") || isIP("")"#, NoMatch),
        (r#"isIP("::ffff:1.2.3.4") || isIP("fe80::1%eth0")"#, NoMatch),
        (
            r#"ip("::ffff:1.2.3.4") == ip("1.2.3.4")"#,
            Error(r#"IPv4-mapped IPv6 address "::ffff:1.2.3.4" is not allowed"#),
        ),
        (
            r#"ip("fe80::1%eth0") == ip("1.2.3.4")"#,
            Error("with zone value is not allowed"),
        ),
        (
            r#"ip.isCanonical("127.0.0.1") && ip.isCanonical("2001:db8::abcd")"#,
            Match,
        ),
        (
            r#"ip.isCanonical("2001:DB8::ABCD") || ip.isCanonical("2001:db8::0:0:0:abcd")"#,
            NoMatch,
        ),
        (
            r#"ip("0.0.0.0").isUnspecified() && ip("::").isUnspecified() && !ip("::1").isUnspecified()"#,
            Match,
        ),
        (
            r#"ip("127.9.9.9").isLoopback() && ip("::1").isLoopback() && !ip("192.168.0.1").isLoopback()"#,
            Match,
        ),
        (
            r#"ip("224.0.0.1").isLinkLocalMulticast() && ip("ff02::1").isLinkLocalMulticast()"#,
            Match,
        ),
        (
            r#"ip("224.0.1.1").isLinkLocalMulticast() || ip("fd00::1").isLinkLocalMulticast()"#,
            NoMatch,
        ),
        (
            r#"ip("169.254.169.254").isLinkLocalUnicast() && ip("fe80::1").isLinkLocalUnicast()"#,
            Match,
        ),
        (
            r#"ip("192.168.0.1").isGlobalUnicast() && ip("2001:db8::abcd").isGlobalUnicast()"#,
            Match,
        ),
        (
            r#"ip("255.255.255.255").isGlobalUnicast() || ip("ff00::1").isGlobalUnicast() || ip("::").isGlobalUnicast()"#,
            NoMatch,
        ),
        (r#"string(ip("2001:DB8::0")) == "2001:db8::""#, Match),
    ];
    check(cases);
}

#[test]
fn evaluates_networks_as_kubernetes() {
    let cases: &[(&str, Expect)] = &[
        (r#"isCIDR("192.168.0.0/16") && isCIDR("::1/128")"#, Match),
        (
            r#"isCIDR("192.168.0.0/33") || isCIDR("::1/129") || isCIDR("1.2.3.4") || isCIDR("1.2.3.4/08")"#,
            NoMatch,
        ),
        (
            r#"isCIDR("::ffff:1.2.3.4/24") || isCIDR("1.2.3.4/") || isCIDR("1.2.3.4/+8")"#,
            NoMatch,
        ),
        (
            r#"cidr("192.168.0.0/33") == cidr("::1/128")"#,
            Error("network address parse error during conversion from string"),
        ),
        (
            r#"cidr("192.168.0.0/24").containsIP(ip("192.168.0.1")) && cidr("::/0").containsIP("::1")"#,
            Match,
        ),
        (
            r#"cidr("192.168.0.0/24").containsIP("192.168.1.1") || cidr("0.0.0.0/0").containsIP("::1")"#,
            NoMatch,
        ),
        (
            r#"cidr("192.168.0.0/24").containsIP("x")"#,
            Error("CEL runtime error: no such overload"),
        ),
        (
            r#"cidr("192.168.0.0/16").containsCIDR(cidr("192.168.10.0/24"))"#,
            Match,
        ),
        (
            r#"cidr("192.168.1.0/24").containsCIDR("192.168.2.0/24") || cidr("10.1.0.0/16").containsCIDR("10.0.0.0/8")"#,
            NoMatch,
        ),
        (
            r#"cidr("192.168.0.0/16").containsCIDR("x")"#,
            Error("netip.ParsePrefix(\"x\"): no '/'"),
        ),
        (
            r#"cidr("192.168.0.1/24").ip() == ip("192.168.0.1") && cidr("::1/128").ip().family() == 6"#,
            Match,
        ),
        (
            r#"cidr("192.168.0.1/24").masked() == cidr("192.168.0.0/24")"#,
            Match,
        ),
        (
            r#"cidr("192.168.0.1/24") == cidr("192.168.0.1/24").masked()"#,
            NoMatch,
        ),
        (
            r#"cidr("192.168.0.0/16").prefixLength() == 16 && string(cidr("::1/128")) == "::1/128""#,
            Match,
        ),
    ];
    check(cases);
}

#[test]
fn evaluates_urls_as_kubernetes() {
    let cases: &[(&str, Expect)] = &[
        (
            r#"isURL("https://user:pass@example.com:80/path?query=val#fragment") && isURL("/absolute-path")"#,
            Match,
        ),
        (
            r#"isURL("https://a:b:c/") || isURL("http://a:b:1/") || isURL("../relative-path") || isURL("")"#,
            NoMatch,
        ),
        (
            r#"url("../relative-path").getHost() == """#,
            Error(
                r#"URL parse error during conversion from string: parse "../relative-path": invalid URI for request"#,
            ),
        ),
        (
            r#"url("/path").getScheme() == "" && url("HTTPS://example.com/").getScheme() == "https""#,
            Match,
        ),
        (
            r#"url("https://example.com:80/").getHost() == "example.com:80" && url("/path").getHost() == """#,
            Match,
        ),
        (
            r#"url("https://[::1]:80/").getHost() == "[::1]:80" && url("https://[::1]:80/").getHostname() == "::1""#,
            Match,
        ),
        (
            r#"url("https://example.com:80/").getPort() == "80" && url("https://[::1]/").getPort() == """#,
            Match,
        ),
        (
            r#"url("https://example.com/path with spaces/").getEscapedPath() == "/path%20with%20spaces/""#,
            Match,
        ),
        (
            r#"url("https://example.com").getEscapedPath() == "" && url("https://example.com/a%2fb").getEscapedPath() == "/a%2fb""#,
            Match,
        ),
        (
            r#"url("https://example.com/path?k1=a&k2=b&k2=c").getQuery() == {"k1": ["a"], "k2": ["b", "c"]}"#,
            Match,
        ),
        (
            r#"url("https://example.com/path?key with spaces=value+2").getQuery() == {"key with spaces": ["value 2"]}"#,
            Match,
        ),
        (
            r#"url("https://example.com/path?a;b=1&%zz=2").getQuery().size() == 0"#,
            Match,
        ),
        (
            r#"url("HTTP://e.com/%41") == url("http://e.com/%41") && url("http://e.com/%41") != url("http://e.com/A")"#,
            Match,
        ),
        (
            r#"url("file:///a") == url("file:/a") || url("http://e.com/") == url("http://e.com/?")"#,
            NoMatch,
        ),
        (
            r#"isURL("http://e.com:8x/") || isURL("http://[::1") || isURL("http://a b/") || isURL("http://u ser@e.com/")"#,
            NoMatch,
        ),
        (
            r#"isURL("http://[fe80::1%25en0]/") && isURL("mailto:x") && isURL("*") && isURL("ftp://a:b:1/")"#,
            Match,
        ),
        (
            r#"isURL("http://e.com/\n") || isURL(":x") || isURL("http://[1.2.3.4]/")"#,
            NoMatch,
        ),
    ];
    check(cases);
}

#[test]
fn validates_named_formats_as_kubernetes() {
    let cases: &[(&str, Expect)] = &[
        (
            r#"format.dns1123Label().validate("my-label-name").hasValue()"#,
            NoMatch,
        ),
        (
            r#"format.dns1123Label().validate("a.b").value() == ["must not contain dots"]"#,
            Match,
        ),
        (
            r#"format.named("dns1035Label").value().validate("1a").value()[0].startsWith("a DNS-1035 label must")"#,
            Match,
        ),
        (
            r#"format.named("x").hasValue() || format.named("").hasValue()"#,
            NoMatch,
        ),
        (
            r#"format.named("uuid").value() == format.uuid() && format.uuid() != format.byte()"#,
            Match,
        ),
        (
            r#"format.dns1123LabelPrefix().validate("my-label-prefix-").hasValue()"#,
            NoMatch,
        ),
        (
            r#"format.dns1123SubdomainPrefix().validate("mysubdomain.prefix.-").hasValue()"#,
            NoMatch,
        ),
        (
            r#"format.dns1035LabelPrefix().validate("my-label-prefix-").hasValue()"#,
            NoMatch,
        ),
        (
            r#"format.qualifiedName().validate("apiextensions.k8s.io/v1beta1").hasValue()"#,
            NoMatch,
        ),
        (
            r#"format.qualifiedName().validate("/").value().size() == 3 && format.qualifiedName().validate("a/b/c").hasValue()"#,
            Match,
        ),
        (
            r#"format.labelValue().validate("").hasValue() || !format.labelValue().validate("-").hasValue()"#,
            NoMatch,
        ),
        (
            r#"format.uri().validate("x").value() == ["parse \"x\": invalid URI for request"]"#,
            Match,
        ),
        (
            r#"format.uuid().validate("123E4567-e89b-12d3-a456-426614174000").hasValue()"#,
            NoMatch,
        ),
        (
            r#"format.byte().validate("aGVsbG8=").hasValue() || !format.byte().validate("aGVsbG8").hasValue()"#,
            NoMatch,
        ),
        (
            r#"format.date().validate("2024-02-29").hasValue() || format.date().validate("2000-12-31").hasValue()"#,
            NoMatch,
        ),
        (
            r#"["2021-02-29", "1900-02-29", "2021-13-01", "2021-1-1", "2021-04-31"].all(d, format.date().validate(d).value() == ["invalid date"])"#,
            Match,
        ),
        (
            r#"format.datetime().validate("2021-01-01t00:00:00.5+01:00").hasValue()"#,
            NoMatch,
        ),
        (
            r#"["2021-01-01T24:00:00Z", "2021-01-01", "2021-01-01T00:00:00"].all(d, format.datetime().validate(d).hasValue())"#,
            Match,
        ),
        (
            r#"format.nosuch().validate("x").hasValue()"#,
            Error("CEL compile error: undeclared reference to 'nosuch'"),
        ),
    ];
    check(cases);
}
