//! Command line of `drava-cdi-hook`, as written into specifications.

use crate::{Hook, HookName};

/// Name of the program, and its `argv[0]`.
const NAME: &str = "drava-cdi-hook";

/// Argument between two actions of one command line. No value of an action equals it.
pub const THEN: &str = "then";

/// Keeps a command line far below the limits of Linux: 128 KiB per argument and some MiB in all.
const PATHS_PER_CALL: usize = 512;

/// The hook program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookProgram {
    path: String,
}

/// A symbolic link in the container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Link {
    /// Target: a file name in the same directory, or an absolute path in the container.
    pub target: String,
    /// Path of the link in the container.
    pub path: String,
}

impl HookProgram {
    /// Returns the program at `path` on the node.
    #[must_use]
    pub fn new(path: impl Into<String>) -> Self {
        Self { path: path.into() }
    }

    /// Ensures that the container's programs load `library` (a path in the container): through stubs, if all these paths
    /// in the container have one; otherwise from the start of the container's `/etc/ld.so.preload`.
    #[must_use]
    pub fn preload(&self, library: &str, stubs: &[String]) -> Hook {
        let mut arguments = vec!["--library".to_owned(), library.to_owned()];
        let stubs = stubs.iter();
        arguments.extend(stubs.flat_map(|stub| ["--stub".to_owned(), stub.clone()]));
        self.call("preload", arguments)
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

    /// Creates symbolic links in the container.
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

    /// Empties a file of the node driver in each directory that is mounted into the container at the directory of `files`
    /// (a path in the container), in which `*` stands for one name. An empty or missing file shows that the runtime has
    /// applied the edits; a runtime with CDI disabled ignores them silently. The hook stops a container without such a
    /// directory.
    #[must_use]
    pub fn mark(&self, files: &str) -> Hook {
        self.call("mark", ["--files".to_owned(), files.to_owned()])
    }

    /// Prefers the CUDA compatibility libraries of an image that is newer than the NVIDIA driver `driver_version` of the
    /// node, unless the image requires no newer CUDA version than `cuda_version`, which the driver supports. Runs after
    /// [`Self::ldcache`].
    #[must_use]
    pub fn compat(&self, driver_version: &str, cuda_version: Option<&str>) -> Hook {
        let mut arguments = vec!["--driver-version".to_owned(), driver_version.to_owned()];
        if let Some(version) = cuda_version {
            arguments.extend(["--cuda-version".to_owned(), version.to_owned()]);
        }
        self.call("compat", arguments)
    }

    /// Has the node driver at `socket` limit the GPU memory of the container for a share of a claim. The call is a process of its
    /// own at another stage than the others, in the namespaces of the node.
    #[must_use]
    pub fn limit(&self, socket: &str, claim: &str, share: &str) -> Hook {
        let flags = [("--socket", socket), ("--claim", claim), ("--share", share)];
        let arguments = flags.map(|(flag, value)| [flag.to_owned(), value.to_owned()]);
        Hook {
            hook_name: HookName::CreateRuntime,
            ..self.call("limit", arguments.into_iter().flatten())
        }
    }

    /// Hides from NVIDIA's libraries in the container that they may create device files: they would create those of all
    /// GPUs, and change the modes of present ones.
    #[must_use]
    pub fn params(&self) -> Hook {
        self.call("params", [])
    }

    /// Joins calls of this program to one process, which runs the actions in this order. The first error ends it.
    #[must_use]
    pub fn joined(&self, hooks: Vec<Hook>) -> Vec<Hook> {
        let actions = hooks.into_iter().map(|hook| {
            // The first argument is the name of the program.
            hook.args.into_iter().skip(1).collect()
        });
        let actions: Vec<Vec<String>> = actions.collect();
        if actions.is_empty() {
            return Vec::new();
        }
        let mut args = vec![NAME.to_owned()];
        args.extend(actions.join(&THEN.to_owned()));
        vec![self.hook(args)]
    }

    fn call(&self, subcommand: &str, arguments: impl IntoIterator<Item = String>) -> Hook {
        let mut args = vec![NAME.to_owned(), subcommand.to_owned()];
        args.extend(arguments);
        self.hook(args)
    }

    fn hook(&self, args: Vec<String>) -> Hook {
        Hook {
            hook_name: HookName::CreateContainer,
            path: self.path.clone(),
            args,
            env: Vec::new(),
        }
    }
}
