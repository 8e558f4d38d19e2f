//! Connection to the API server.

use anyhow::{Context as _, bail};
use clap::Args;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

/// Options for the connection to the API server.
#[derive(Debug, Args)]
pub(crate) struct Connection {
    /// Kubeconfig file; default: $KUBECONFIG or ~/.kube/config.
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<std::path::PathBuf>,

    /// Context of the kubeconfig; default: its current context.
    #[arg(long, global = true)]
    context: Option<String>,

    /// Namespace; default: that of the context, and all namespaces for lists.
    #[arg(short, long, global = true)]
    pub(crate) namespace: Option<String>,
}

impl Connection {
    /// Returns the name of the selected context, for display.
    pub(crate) fn context_name(&self) -> String {
        let kubeconfig = match &self.kubeconfig {
            Some(file) => Kubeconfig::read_from(file),
            None => Kubeconfig::read(),
        };
        let current = || kubeconfig.ok()?.current_context;
        let named = self.context.clone().or_else(current);
        named.unwrap_or_else(|| "cluster".to_owned())
    }
}

/// Returns a client and the selected namespace.
pub(crate) async fn connect(connection: &Connection) -> anyhow::Result<(Client, String)> {
    let options = KubeConfigOptions {
        context: connection.context.clone(),
        ..KubeConfigOptions::default()
    };
    let config = match &connection.kubeconfig {
        Some(file) => {
            let kubeconfig = Kubeconfig::read_from(file)
                .with_context(|| format!("cannot read the kubeconfig {}", file.display()))?;
            Config::from_custom_kubeconfig(kubeconfig, &options).await
        }
        None => Config::from_kubeconfig(&options).await,
    }
    .context("cannot use the kubeconfig; set $KUBECONFIG, or use --kubeconfig and --context")?;
    let namespace = connection
        .namespace
        .clone()
        .unwrap_or_else(|| config.default_namespace.clone());
    let address = config.cluster_url.to_string();
    let client = Client::try_from(config).context("cannot create a client from the kubeconfig")?;
    match client.apiserver_version().await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 401 => {
            bail!("{address} does not accept the credentials of the kubeconfig")
        }
        // Some clusters show the version to administrators only.
        Err(kube::Error::Api(_)) => {}
        Err(error) => bail!("cannot reach {address}: {}", innermost(&error)),
    }
    Ok((client, namespace))
}

/// Returns the cause of a failed connection, such as `Connection refused`.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}
