//! The first process of a cluster's node. `drava_cluster::up` starts it; it is of no use by hand.

use std::process::ExitCode;

fn main() -> ExitCode {
    drava_cluster::node::main()
}
