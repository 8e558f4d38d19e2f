//! How `drava-cdi-hook` is called: the one place that spells its arguments on the driver's side.

use crate::{Hook, HookName};

/// Name of the program, and its `argv[0]`.
const NAME: &str = "drava-cdi-hook";

/// Arguments of one process are limited to 128 KiB each and some MiB together; this many paths are far below.
const PATHS_PER_CALL: usize = 512;

/// The hook program at its path on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookProgram {
    path: String,
}

/// A symbolic link to be made in the container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Link {
    /// What the link says: a file name beside it, or an absolute path in the container.
    pub target: String,
    /// Path of the link in the container.
    pub path: String,
}

impl HookProgram {
    /// The program at `path` on the node.
    #[must_use]
    pub fn new(path: impl Into<String>) -> Self {
        Self { path: path.into() }
    }

    /// Puts `library` (a path in the container) first in the container's `/etc/ld.so.preload`.
    #[must_use]
    pub fn preload(&self, library: &str) -> Hook {
        self.call("preload", ["--library".to_owned(), library.to_owned()])
    }

    /// Makes sure that the container's programs meet `library` (a path in the container) behind the stubs at these
    /// paths. If something else stands in the place of one, such as the driver's own library that another device of the
    /// container brought, `library` is put into `/etc/ld.so.preload` as [`Self::preload`] does.
    #[must_use]
    pub fn shim(&self, library: &str, stubs: &[String]) -> Hook {
        let mut arguments = vec!["--library".to_owned(), library.to_owned()];
        arguments.extend(
            stubs
                .iter()
                .flat_map(|stub| ["--stub".to_owned(), stub.clone()]),
        );
        self.call("shim", arguments)
    }

    /// Adds libraries (paths in the container) to the container's `/etc/ld.so.cache`, each under its file name.
    #[must_use]
    pub fn ldcache(&self, libraries: &[String]) -> Vec<Hook> {
        let call = |libraries: &[String]| {
            self.call(
                "ldcache",
                libraries
                    .iter()
                    .flat_map(|library| ["--library".to_owned(), library.clone()]),
            )
        };
        libraries.chunks(PATHS_PER_CALL).map(call).collect()
    }

    /// Makes symbolic links in the container.
    #[must_use]
    pub fn symlinks(&self, links: &[Link]) -> Vec<Hook> {
        let argument = |link: &Link| {
            [
                "--link".to_owned(),
                format!("{}::{}", link.target, link.path),
            ]
        };
        links
            .chunks(PATHS_PER_CALL)
            .map(|links| self.call("symlinks", links.iter().flat_map(argument)))
            .collect()
    }

    /// Makes an empty file at `file` (a path in the container). In a directory that the driver has mounted there, it
    /// tells the driver that the runtime has applied the edits; a runtime with CDI switched off leaves them out
    /// without a word. A hook that cannot make the file stops the container.
    #[must_use]
    pub fn mark(&self, file: &str) -> Hook {
        self.call("mark", ["--file".to_owned(), file.to_owned()])
    }

    fn call(&self, subcommand: &str, arguments: impl IntoIterator<Item = String>) -> Hook {
        let mut args = vec![NAME.to_owned(), subcommand.to_owned()];
        args.extend(arguments);
        Hook {
            hook_name: HookName::CreateContainer,
            path: self.path.clone(),
            args,
            env: Vec::new(),
        }
    }
}
