//! Init process of a cluster's node. `drava_cluster::up` starts the program; it has no use on the command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    drava_cluster::node::main()
}
