//! `kubectl drava console`: a page that shows nodes with their GPUs, tenants, the queue and quotas.
//!
//! The command serves the page on loopback with the permissions of the user's kubeconfig, and only reads. Nothing is
//! exposed in the cluster. [`access`] defines which requests are answered.

use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use kube::Client;
use tokio::net::TcpListener;

use crate::decision::DecisionOptions;
use access::Guard;
use drava_explanation::snapshot::Objects;
use live::Live;

mod access;
mod live;
mod server;
mod view;
mod watch;

/// Options of the command.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Port on 127.0.0.1; 0 selects a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,

    /// Show the output of `kubectl drava dump` instead of the cluster.
    #[arg(long, value_name = "FILE")]
    dump: Option<PathBuf>,

    #[command(flatten)]
    decision: DecisionOptions,
}

impl Options {
    /// Returns the recorded state to show; `None` for the cluster's.
    pub(crate) fn dump(&self) -> Option<&Path> {
        self.dump.as_deref()
    }
}

/// Source of the state.
pub(crate) enum Source {
    /// The cluster, with the name of its context and the namespace that is shown if the user may not read all.
    Cluster {
        client: Client,
        context: String,
        namespace: String,
    },
    /// A recorded state.
    Dump(Box<Objects>),
}

/// Serves the page until Ctrl-C.
///
/// # Errors
/// If the port is in use.
pub(crate) async fn run(source: Source, options: Options) -> anyhow::Result<()> {
    let live = match source {
        Source::Dump(objects) => Arc::new(Live::recorded(*objects, options.decision)),
        Source::Cluster {
            client,
            context,
            namespace,
        } => {
            let live = Arc::new(Live::new(context, options.decision));
            watch::start(&client, &namespace, &live);
            live
        }
    };
    tokio::spawn(Arc::clone(&live).prepare());
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, options.port))
        .await
        .with_context(|| {
            format!(
                "cannot listen on 127.0.0.1:{}; --port 0 selects a free port",
                options.port
            )
        })?;
    let port = listener.local_addr()?.port();
    let guard = Guard::new();
    let mut stdout = std::io::stdout().lock();
    writeln!(
        stdout,
        "http://127.0.0.1:{port}/{}/\nThe address contains a secret and gives access with your permissions: do not share it. Ctrl-C ends the console.",
        guard.token()
    )
    .and_then(|()| stdout.flush())
    .context("cannot write to standard output")?;
    drop(stdout);
    let served = axum::serve(listener, server::router(live, guard));
    tokio::select! {
        result = async { served.await } => result.context("cannot serve the console"),
        // Open event streams of pages end with the program.
        result = tokio::signal::ctrl_c() => result.context("cannot wait for Ctrl-C"),
    }
}
