//! Command line. Parsed by hand: subcommands with one or two flags need no library in every container.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use drava_cdi::THEN;

/// A subcommand and its arguments.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Insert a library at the start of `/etc/ld.so.preload`, unless all stubs lead to it.
    Preload {
        /// Absolute path in the container.
        library: String,
        /// Absolute paths in the container.
        stubs: Vec<String>,
    },
    /// Add libraries to `/etc/ld.so.cache`.
    LdCache {
        /// Absolute paths in the container.
        libraries: Vec<String>,
    },
    /// Prefer the CUDA compatibility libraries of an image that is newer than the NVIDIA driver.
    Compat(NodeDriver),
    /// Limit the GPU memory of the container by the NVIDIA driver.
    Limit(LimitedShare),
    /// Mask the parameters of the NVIDIA kernel driver.
    Params,
    /// Empty a file in mounted directories, which shows that the runtime has applied the edits.
    Mark {
        /// The files.
        files: MountedFiles,
    },
    /// Create symbolic links.
    Symlinks {
        /// The links.
        links: Vec<Link>,
    },
}

/// The NVIDIA driver of the node.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NodeDriver {
    /// Version of the driver.
    pub(crate) version: String,
    /// Newest CUDA version that the driver supports.
    pub(crate) cuda: Option<String>,
}

/// A share whose memory the NVIDIA driver limits.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LimitedShare {
    /// Socket of the node driver.
    pub(crate) socket: String,
    /// UID of the claim.
    pub(crate) claim: String,
    /// ID of the share.
    pub(crate) share: String,
}

/// Files with one name in directories that are mounted at paths of one form.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MountedFiles {
    /// Absolute path in the container before the name that varies, with a slash at its end.
    pub(crate) before: String,
    /// Rest of the path of the directory after that name.
    pub(crate) after: String,
    /// Name of the file.
    pub(crate) name: String,
}

/// A symbolic link.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// Target of the link.
    pub(crate) target: String,
    /// Absolute path in the container.
    pub(crate) path: String,
}

/// The command line is invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ArgumentsError {
    #[error(
        "usage: drava-cdi-hook preload --library PATH [--stub PATH]... | ldcache --library PATH... | symlinks --link TARGET::PATH... | compat --driver-version VERSION [--cuda-version VERSION] | params | mark --files DIRECTORY/*/DIRECTORY/NAME | limit --socket PATH --claim UID --share ID; several actions are separated by \"then\""
    )]
    Usage,
    #[error("unexpected argument {0:?} of {1}")]
    Unexpected(String, &'static str),
    #[error("{0} needs a value")]
    NoValue(&'static str),
    #[error("{0} needs {1}")]
    Missing(&'static str, &'static str),
    #[error("{0} takes one value, not {1}")]
    Several(&'static str, usize),
    #[error("{0:?} is not an absolute path to a file without '.', '..', white space and colons")]
    Path(String),
    #[error("{0:?} is not TARGET::PATH")]
    Link(String),
    #[error("{0:?} is not an absolute path with one directory of any name (*)")]
    Files(String),
    #[error("an argument is not UTF-8")]
    NotUtf8,
}

/// Parses the arguments after the program's name: actions, separated by [`THEN`].
pub(crate) fn parse(
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<Vec<Action>, ArgumentsError> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let actions = arguments.split(|argument| argument == THEN);
    actions
        .map(|arguments| parse_action(arguments.iter().cloned()))
        .collect()
}

fn parse_action(arguments: impl IntoIterator<Item = OsString>) -> Result<Action, ArgumentsError> {
    let mut arguments = arguments.into_iter().map(|argument| {
        String::from_utf8(argument.into_vec()).map_err(|_| ArgumentsError::NotUtf8)
    });
    match arguments.next().transpose()?.as_deref() {
        Some("preload") => {
            let (mut libraries, mut stubs) = (Vec::new(), Vec::new());
            for (flag, value) in flags(arguments, "preload", &["--library", "--stub"])? {
                let of_flag = if flag == "--stub" {
                    &mut stubs
                } else {
                    &mut libraries
                };
                of_flag.push(path(value)?);
            }
            let library = single(libraries, "preload", "--library")?;
            Ok(Action::Preload { library, stubs })
        }
        Some("mark") => {
            let files = mounted_files(path(value(arguments, "mark", "--files")?)?)?;
            Ok(Action::Mark { files })
        }
        Some("limit") => {
            let known = &["--socket", "--claim", "--share"];
            let given = flags(arguments, "limit", known)?;
            let one = |flag| {
                let values = given.iter().filter(|(of, _)| *of == flag);
                single(
                    values.map(|(_, value)| value.clone()).collect(),
                    "limit",
                    flag,
                )
            };
            Ok(Action::Limit(LimitedShare {
                socket: path(one("--socket")?)?,
                claim: one("--claim")?,
                share: one("--share")?,
            }))
        }
        Some("compat") => {
            let (mut versions, mut cuda) = (Vec::new(), None);
            for (flag, value) in
                flags(arguments, "compat", &["--driver-version", "--cuda-version"])?
            {
                match flag {
                    "--cuda-version" => cuda = Some(value),
                    _ => versions.push(value),
                }
            }
            let version = single(versions, "compat", "--driver-version")?;
            Ok(Action::Compat(NodeDriver { version, cuda }))
        }
        Some("params") => match arguments.next().transpose()? {
            None => Ok(Action::Params),
            Some(argument) => Err(ArgumentsError::Unexpected(argument, "params")),
        },
        Some("ldcache") => {
            let libraries = values(arguments, "ldcache", "--library")?;
            Ok(Action::LdCache {
                libraries: libraries.into_iter().map(path).collect::<Result<_, _>>()?,
            })
        }
        Some("symlinks") => {
            let links = values(arguments, "symlinks", "--link")?;
            Ok(Action::Symlinks {
                links: links.into_iter().map(link).collect::<Result<_, _>>()?,
            })
        }
        Some(_) | None => Err(ArgumentsError::Usage),
    }
}

/// Returns pairs of a flag among `known` and its value.
fn flags(
    mut arguments: impl Iterator<Item = Result<String, ArgumentsError>>,
    subcommand: &'static str,
    known: &[&'static str],
) -> Result<Vec<(&'static str, String)>, ArgumentsError> {
    let mut flags = Vec::new();
    while let Some(argument) = arguments.next().transpose()? {
        let Some(flag) = known.iter().find(|flag| **flag == argument) else {
            return Err(ArgumentsError::Unexpected(argument, subcommand));
        };
        let value = arguments.next().transpose()?;
        flags.push((*flag, value.ok_or(ArgumentsError::NoValue(flag))?));
    }
    Ok(flags)
}

/// Returns the values of `flag`, which can be repeated.
fn values(
    arguments: impl Iterator<Item = Result<String, ArgumentsError>>,
    subcommand: &'static str,
    flag: &'static str,
) -> Result<Vec<String>, ArgumentsError> {
    let values = flags(arguments, subcommand, &[flag])?;
    if values.is_empty() {
        Err(ArgumentsError::Missing(subcommand, flag))
    } else {
        Ok(values.into_iter().map(|(_, value)| value).collect())
    }
}

/// Returns the value of `flag`, which must occur once.
fn value(
    arguments: impl Iterator<Item = Result<String, ArgumentsError>>,
    subcommand: &'static str,
    flag: &'static str,
) -> Result<String, ArgumentsError> {
    single(values(arguments, subcommand, flag)?, subcommand, flag)
}

fn single(
    values: Vec<String>,
    subcommand: &'static str,
    flag: &'static str,
) -> Result<String, ArgumentsError> {
    if values.is_empty() {
        return Err(ArgumentsError::Missing(subcommand, flag));
    }
    <[String; 1]>::try_from(values)
        .map(|[value]| value)
        .map_err(|values| ArgumentsError::Several(flag, values.len()))
}

/// Checks an absolute path to a file. White space and colons separate the names in `ld.so.preload`.
fn path(path: String) -> Result<String, ArgumentsError> {
    let parts = path.strip_prefix('/').map(|rest| rest.split('/'));
    let plain = parts.is_some_and(|mut parts| parts.all(|part| !matches!(part, "" | "." | "..")));
    let separates = |c: char| c.is_whitespace() || c.is_control() || c == ':' || c == '#';
    if plain && !path.contains(separates) {
        Ok(path)
    } else {
        Err(ArgumentsError::Path(path))
    }
}

fn mounted_files(path: String) -> Result<MountedFiles, ArgumentsError> {
    let parts = path.split_once("/*/").and_then(|(before, rest)| {
        let (after, name) = rest.rsplit_once('/')?;
        let files = MountedFiles {
            before: format!("{before}/"),
            after: format!("/{after}"),
            name: name.to_owned(),
        };
        (!rest.contains('*')).then_some(files)
    });
    parts.ok_or(ArgumentsError::Files(path))
}

fn link(argument: String) -> Result<Link, ArgumentsError> {
    match argument.split_once("::") {
        Some((target, link)) if !target.is_empty() => Ok(Link {
            target: target.to_owned(),
            path: path(link.to_owned())?,
        }),
        Some(_) | None => Err(ArgumentsError::Link(argument)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Action, ArgumentsError> {
        parse_action(arguments.iter().map(OsString::from))
    }

    #[test]
    fn parses_subcommands() {
        assert_eq!(
            parsed(&["preload", "--library", "/a/b"]),
            Ok(Action::Preload {
                library: "/a/b".into(),
                stubs: Vec::new()
            })
        );
        assert_eq!(
            parsed(&["preload", "--library", "/a", "--stub", "/b", "--stub", "/c"]),
            Ok(Action::Preload {
                library: "/a".into(),
                stubs: vec!["/b".into(), "/c".into()]
            })
        );
        assert_eq!(
            parsed(&["ldcache", "--library", "/a", "--library", "/b"]),
            Ok(Action::LdCache {
                libraries: vec!["/a".into(), "/b".into()]
            })
        );
        let flags = ["--socket", "/a", "--claim", "b", "--share", "c"];
        let limited = Action::Limit(LimitedShare {
            socket: "/a".into(),
            claim: "b".into(),
            share: "c".into(),
        });
        assert_eq!(parsed(&[&["limit"], &flags[..]].concat()), Ok(limited));
        assert_eq!(
            parsed(&["limit", "--socket", "/a", "--claim", "b"]),
            Err(ArgumentsError::Missing("limit", "--share"))
        );
        assert_eq!(
            parsed(&["symlinks", "--link", "b.so.1::/a/b.so"]),
            Ok(Action::Symlinks {
                links: vec![Link {
                    target: "b.so.1".into(),
                    path: "/a/b.so".into()
                }]
            })
        );
    }

    #[test]
    fn rejects_invalid_arguments_with_cause() {
        for (arguments, message) in [
            (&[][..], "usage:"),
            (&["run"], "usage:"),
            (&["then"], "usage:"),
            (&["params", "then"], "usage:"),
            (
                &["params", "then", "preload", "--stub", "/a"],
                "preload needs --library",
            ),
            (&["preload"], "preload needs --library"),
            (&["preload", "--library"], "--library needs a value"),
            (
                &["preload", "--library", "/a", "--library", "/b"],
                "--library takes one value, not 2",
            ),
            (
                &["preload", "--library", "a"],
                "\"a\" is not an absolute path",
            ),
            (
                &["preload", "--library", "/a b"],
                "\"/a b\" is not an absolute path",
            ),
            (
                &["preload", "--library", "/a:b"],
                "\"/a:b\" is not an absolute path",
            ),
            (
                &["ldcache", "--library", "/a/../b"],
                "\"/a/../b\" is not an absolute path",
            ),
            (
                &["ldcache", "--library", "/a/"],
                "\"/a/\" is not an absolute path",
            ),
            (
                &["ldcache", "--library", "/"],
                "\"/\" is not an absolute path",
            ),
            (&["compat"], "compat needs --driver-version"),
            (&["params", "/a"], "unexpected argument \"/a\" of params"),
            (
                &["preload", "--stub", "a", "--library", "/a"],
                "\"a\" is not an absolute path",
            ),
            (
                &["mark", "--files", "/a/b"],
                "\"/a/b\" is not an absolute path with one",
            ),
            (
                &["mark", "--files", "/a/*/b"],
                "\"/a/*/b\" is not an absolute path with one",
            ),
            (
                &["mark", "--files", "/a/*/b/*/c"],
                "\"/a/*/b/*/c\" is not an absolute path with one",
            ),
            (&["ldcache", "/a"], "unexpected argument \"/a\" of ldcache"),
            (&["symlinks", "--link", "a"], "\"a\" is not TARGET::PATH"),
            (
                &["symlinks", "--link", "::/a"],
                "\"::/a\" is not TARGET::PATH",
            ),
            (
                &["symlinks", "--link", "a::b"],
                "\"b\" is not an absolute path",
            ),
        ] {
            let error = parse(arguments.iter().map(OsString::from))
                .unwrap_err()
                .to_string();
            assert!(error.contains(message), "{arguments:?}: {error}");
        }
    }

    #[test]
    fn parses_arguments_written_by_drava_cdi() {
        let hook = drava_cdi::HookProgram::new("/var/lib/drava/bin/x/drava-cdi-hook");
        let link = drava_cdi::Link {
            target: "libcuda.so.580.65.06".into(),
            path: "/usr/lib64/libcuda.so.1".into(),
        };
        let mut hooks = vec![hook.preload("/usr/local/lib/drava/libvgpu.so", &[])];
        hooks.extend(hook.ldcache(&["/usr/lib64/libcuda.so.1".to_owned()]));
        hooks.extend(hook.symlinks(&[link]));
        hooks.push(hook.preload("/opt/libvgpu.so", &["/usr/lib64/libcuda.so.1".to_owned()]));
        hooks.push(hook.compat("580.65.06", None));
        hooks.push(hook.compat("580.65.06", Some("13.0")));
        hooks.push(hook.params());
        hooks.push(hook.mark("/run/drava/*/usage/pending"));
        let joined = hook.joined(hooks);
        assert_eq!(joined.len(), 1);
        let arguments = joined.into_iter().flat_map(|hook| hook.args);
        let actions = parse(arguments.skip(1).map(OsString::from)).unwrap();
        assert_eq!(
            actions,
            [
                Action::Preload {
                    library: "/usr/local/lib/drava/libvgpu.so".into(),
                    stubs: Vec::new()
                },
                Action::LdCache {
                    libraries: vec!["/usr/lib64/libcuda.so.1".into()]
                },
                Action::Symlinks {
                    links: vec![Link {
                        target: "libcuda.so.580.65.06".into(),
                        path: "/usr/lib64/libcuda.so.1".into()
                    }]
                },
                Action::Preload {
                    library: "/opt/libvgpu.so".into(),
                    stubs: vec!["/usr/lib64/libcuda.so.1".into()]
                },
                Action::Compat(NodeDriver {
                    version: "580.65.06".into(),
                    cuda: None
                }),
                Action::Compat(NodeDriver {
                    version: "580.65.06".into(),
                    cuda: Some("13.0".into())
                }),
                Action::Params,
                Action::Mark {
                    files: MountedFiles {
                        before: "/run/drava/".into(),
                        after: "/usage".into(),
                        name: "pending".into(),
                    }
                },
            ]
        );
    }
}
