//! Expressions with addresses, networks, URLs and named formats. Their texts are put together from parts, valid and invalid
//! ones.

use crate::random::Random;

/// An expression of type bool with an address.
pub(super) fn address(random: &mut Random) -> String {
    let text = address_text(random);
    match random.between(0, 5) {
        0 => format!(r#"isIP("{text}")"#),
        1 => format!(r#"ip.isCanonical("{text}")"#),
        2 => format!(r#"ip("{text}").family() == {}"#, random.choose(&["4", "6"])),
        3 => format!(r#"ip("{text}") == ip("{}")"#, address_text(random)),
        4 => format!(r#"string(ip("{text}")) == "{}""#, address_text(random)),
        _ => format!(
            r#"ip("{text}").{}()"#,
            random.choose(&[
                "isUnspecified",
                "isLoopback",
                "isLinkLocalMulticast",
                "isLinkLocalUnicast",
                "isGlobalUnicast"
            ])
        ),
    }
}

/// An expression of type bool with a network.
pub(super) fn network(random: &mut Random) -> String {
    let text = network_text(random);
    let other = network_text(random);
    let ip = address_text(random);
    match random.between(0, 8) {
        0 => format!(r#"isCIDR("{text}")"#),
        1 => format!(r#"cidr("{text}").containsIP("{ip}")"#),
        2 => format!(r#"cidr("{text}").containsIP(ip("{ip}"))"#),
        3 => format!(r#"cidr("{text}").containsCIDR("{other}")"#),
        4 => format!(r#"cidr("{text}").containsCIDR(cidr("{other}"))"#),
        5 => format!(r#"cidr("{text}").ip() == ip("{ip}")"#),
        6 => format!(r#"cidr("{text}").masked() == cidr("{other}")"#),
        7 => format!(
            r#"cidr("{text}").prefixLength() > {}"#,
            random.between(0, 64)
        ),
        _ => format!(r#"string(cidr("{text}").masked()) == "{other}""#),
    }
}

/// An expression of type bool with a URL.
pub(super) fn url(random: &mut Random) -> String {
    let text = url_text(random);
    match random.between(0, 5) {
        0 | 1 => format!(r#"isURL("{text}")"#),
        2 => format!(r#"url("{text}") == url("{}")"#, url_text(random)),
        3 => format!(
            r#"url("{text}").getQuery() == {}"#,
            random.choose(&[
                "{}",
                r#"{"k": ["v"]}"#,
                r#"{"k": [""]}"#,
                r#"{"k": ["a b", "+"]}"#
            ])
        ),
        4 => {
            let (method, values): (_, &[&str]) = match random.between(0, 3) {
                0 => ("getScheme", &["", "http", "ftp", "a+b"]),
                1 => ("getHost", &["", "e.com", "e.com:80", "[::1]", "é"]),
                2 => ("getHostname", &["", "e.com", "::1", "1.2.3.4"]),
                _ => ("getPort", &["", "80", "8x"]),
            };
            let value = random.choose(values);
            format!(r#"url("{text}").{method}() == "{value}""#)
        }
        _ => format!(
            r#"url("{text}").getEscapedPath().size() % 3 == {}"#,
            random.between(0, 2)
        ),
    }
}

/// An expression of type bool with a named format.
pub(super) fn format(random: &mut Random) -> String {
    const NAMES: [&str; 13] = [
        "dns1123Label",
        "dns1123Subdomain",
        "dns1035Label",
        "qualifiedName",
        "dns1123LabelPrefix",
        "dns1123SubdomainPrefix",
        "dns1035LabelPrefix",
        "labelValue",
        "uri",
        "uuid",
        "byte",
        "date",
        "datetime",
    ];
    let name = random.choose(&NAMES);
    let text = match name {
        "uri" => url_text(random),
        "uuid" | "byte" => encoded_text(random),
        "date" | "datetime" => time_text(random),
        _ => name_text(random),
    };
    match random.between(0, 4) {
        0 | 1 => format!(r#"format.{name}().validate("{text}").hasValue()"#),
        2 => format!(
            r#"format.named("{}").hasValue()"#,
            random.choose(&["uuid", "date", "dns1123Label", "x", "UUID", ""])
        ),
        // The texts are equal if their sizes are, as good as always.
        3 => format!(
            r#"format.named("{name}").value().validate("{text}").orValue(["",""]).all(x, x.size() % 3 != {})"#,
            random.between(0, 2)
        ),
        _ => format!(
            r#"format.{name}().validate("{text}").orValue([""])[0].size() % 5 == {}"#,
            random.between(0, 4)
        ),
    }
}

/// Parts, each one of a list.
fn concatenated(random: &mut Random, parts: &[&[&str]]) -> String {
    parts.iter().map(|choices| random.choose(choices)).collect()
}

fn address_text(random: &mut Random) -> String {
    match random.between(0, 5) {
        0 | 1 => {
            let number: &[&str] = &["0", "1", "10", "127", "169", "192", "224", "255"];
            let unusual: &[&str] = &["0", "1", "254", "255", "256", "01", ""];
            concatenated(
                random,
                &[
                    number,
                    &["."],
                    &["0", "168", "254", "255"],
                    &["."],
                    &["0", "1", "255"],
                    &["."],
                    unusual,
                ],
            )
        }
        2 => concatenated(
            random,
            &[
                &[
                    "::",
                    "::1",
                    "fe80::1",
                    "ff02::1",
                    "2001:db8::",
                    "2001:DB8::1",
                    "fd00::",
                    "",
                ],
                &["", "", "", "%eth0", "%", ":1", ":1.2.3.4", ":0:0"],
            ],
        ),
        3 => {
            let group: &[&str] = &["0:", "1:", "ff:", "00ab:", "12345:", "0:0:", ":"];
            concatenated(
                random,
                &[
                    group,
                    group,
                    group,
                    group,
                    group,
                    group,
                    &["0", "1", ":", "1.2.3.4"],
                ],
            )
        }
        4 => concatenated(
            random,
            &[
                &["::ffff:", "::", "64:ff9b::"],
                &["1.2.3.4", "0102:0304", "0"],
            ],
        ),
        _ => random
            .choose(&[
                "127.0.0.1",
                "::1",
                "255.255.255.255",
                "192.168.0.1",
                "x",
                "1.2.3",
                "1.2.3.4.5",
            ])
            .to_owned(),
    }
}

fn network_text(random: &mut Random) -> String {
    let bits = [
        "/0", "/8", "/16", "/24", "/31", "/32", "/33", "/64", "/128", "/129", "/", "", "/08",
        "/+8", "/-1", "/300", "/8/8", "/x",
    ];
    match random.between(0, 3) {
        0 => random
            .choose(&[
                "192.168.0.0/16",
                "192.168.10.0/24",
                "10.0.0.0/8",
                "::1/128",
                "fe80::/10",
            ])
            .to_owned(),
        _ => address_text(random) + random.choose(&bits),
    }
}

fn url_text(random: &mut Random) -> String {
    let authority: &[&str] = &[
        "//e.com",
        "//e.com:80",
        "//e.com:",
        "//e.com:8x",
        "//[::1]",
        "//[::1]:80",
        "//[fe80::1%25en0]",
        "//[fe80::1%en0]",
        "//[1.2.3.4]",
        "//[::1",
        "//a[b",
        "//u@e.com",
        "//u:p@e.com",
        "//u%40:p%zz@e.com",
        "//u ser@e.com",
        "//a@b@c",
        "//a:b:1",
        "//%41.com",
        "//%C3%A9",
        "//é",
        "//a b",
        "//<x>",
        "//",
        "//1.2.3.4:65536",
        "",
        "",
        "/",
        "//E.com",
    ];
    concatenated(
        random,
        &[
            &[
                "http:", "HTTP:", "https:", "ftp:", "a+b:", "1a:", "a b:", ":", "", "", "mailto:",
            ],
            authority,
            &[
                "", "/", "/p", "/a b", "/%41", "/%2f", "/%zz", "/%2", "/é", "/a:b", "//x", "/*",
                "*", "x", "/[a]", "/\\n",
            ],
            &[
                "",
                "",
                "?",
                "??",
                "?k=v",
                "?k=a+b&k=%2B",
                "?k",
                "?k=v;x",
                "?%zz=1&k=v",
                "?a&&k=v#",
                "?k=v&=1",
            ],
            &["", "", "#", "#f", "#%zz", "#a b", "#é"],
        ],
    )
}

fn name_text(random: &mut Random) -> String {
    let part: &[&str] = &["a", "my-name", "A", "1", "-", ".", "_", "/", "é", ""];
    let long = ["a".repeat(62), "b".repeat(253), "a.".repeat(126)];
    let mut text = concatenated(random, &[part, part, part, &["", "", "-", "/a", "a-", "1"]]);
    if random.chance(15) {
        text += random.choose(&long.each_ref().map(String::as_str));
    }
    text
}

fn encoded_text(random: &mut Random) -> String {
    match random.between(0, 2) {
        0 => {
            let dash: &[&str] = &["-", "-", "-", "", "--"];
            concatenated(
                random,
                &[
                    &["123e4567", "123E4567", "123g4567", "123e456"],
                    dash,
                    &["e89b"],
                    dash,
                    &["12d3"],
                    dash,
                    &["a456", "A45"],
                    dash,
                    &["426614174000", "42661417400", "4266141740001"],
                ],
            )
        }
        _ => {
            let part: &[&str] = &["aGVs", "a+/9", "aGVsbG8=", "a", "", "=="];
            concatenated(
                random,
                &[part, part, &["", "ab==", "abc=", "a===", "-_ab", "="]],
            )
        }
    }
}

fn time_text(random: &mut Random) -> String {
    concatenated(
        random,
        &[
            &["2021", "2024", "1900", "2000", "0000", "21", "+2021"],
            &["-"],
            &["01", "02", "04", "12", "13", "00", "1"],
            &["-"],
            &["01", "28", "29", "30", "31", "32", "00", "1"],
            &["", "", "T", "t", "T", " ", "TT"],
            &[
                "", "00:00:00", "23:59:59", "24:00:00", "00:60:00", "00:00:60", "1:00:00",
            ],
            &["", "", ".5", ",5", ".", "é1"],
            &["", "Z", "z", "+01:00", "-99:99", "+0100", "ZT"],
        ],
    )
}
