//! Drives a DRA plugin over its real sockets, as kubelet does.
//!
//! It follows `pkg/kubelet/cm/dra` and the plugin watcher of Kubernetes 1.37: it watches the registry directory for a
//! socket, asks who is there, takes the first service of the plugin's list that it knows, and refuses answers that
//! kubelet would refuse (a claim left out, an unknown one put in, a device without a pool or with a CDI id that is not
//! fully qualified). Like kubelet since 1.34 it calls the DRA socket with the HTTP/2 `:authority` `localhost`, and the
//! registration socket with its percent-encoded path, which servers with strict HTTP parsers refuse.
//!
//! It keeps no state about claims: a test says what is called when.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use drava_dra_driver::proto::dra_v1::dra_plugin_client::DraPluginClient;
use drava_dra_driver::proto::dra_v1::{
    NodePrepareResourcesRequest, NodePrepareResourcesResponse, NodeUnprepareResourcesRequest,
};
use drava_dra_driver::proto::dra_v1beta1::dra_plugin_client::DraPluginClient as DraPluginClientV1beta1;
use drava_dra_driver::proto::health_v1::dra_resource_health_client::DraResourceHealthClient;
use drava_dra_driver::proto::health_v1::{NodeWatchResourcesRequest, NodeWatchResourcesResponse};
use drava_dra_driver::proto::registration::registration_client::RegistrationClient;
use drava_dra_driver::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

pub use drava_dra_driver::proto::dra_v1::{Claim, Device};
pub use drava_dra_driver::proto::health_v1::{DeviceHealth, HealthStatus};

/// How long the plugin has to do what it must do by itself.
const PATIENCE: Duration = Duration::from_secs(30);

/// kubelet's time-out of prepare and unprepare calls.
const CALL_TIMEOUT: Duration = Duration::from_secs(45);

/// DRA services that this kubelet knows.
const SERVICES: [&str; 2] = ["v1.DRAPlugin", "v1beta1.DRAPlugin"];

/// A kubelet with a root directory of its own.
#[derive(Debug)]
pub struct FakeKubelet {
    root: PathBuf,
}

/// A plugin that the kubelet has registered.
#[derive(Debug, Clone)]
pub struct Plugin {
    /// What the plugin said about itself.
    pub info: PluginInfo,
    service: &'static str,
    channel: Channel,
}

impl FakeKubelet {
    /// Starts on `root`, and makes the directories that kubelet makes.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn start(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        for directory in ["plugins_registry", "plugins"] {
            let directory = root.join(directory);
            fs::create_dir_all(&directory)
                .with_context(|| format!("create {}", directory.display()))?;
        }
        Ok(Self { root })
    }

    /// Sockets in the registry now.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn registry(&self) -> Result<Vec<PathBuf>> {
        let mut sockets = Vec::new();
        for entry in fs::read_dir(self.root.join("plugins_registry"))? {
            sockets.push(entry?.path());
        }
        sockets.sort();
        Ok(sockets)
    }

    /// Waits for a plugin of this driver and registers it.
    ///
    /// # Errors
    /// When none appears, or it says something that kubelet does not accept.
    pub async fn register(&self, driver: &str) -> Result<Plugin> {
        let (mut registration, plugin) = self.meet(driver).await?;
        let accepted = RegistrationStatus {
            plugin_registered: true,
            error: String::new(),
        };
        registration.notify_registration_status(accepted).await?;
        Ok(plugin)
    }

    /// Waits for a plugin of this driver and refuses it.
    ///
    /// # Errors
    /// When none appears.
    pub async fn refuse(&self, driver: &str, error: &str) -> Result<()> {
        let (mut registration, _) = self.meet(driver).await?;
        let refused = RegistrationStatus {
            plugin_registered: false,
            error: error.to_owned(),
        };
        registration.notify_registration_status(refused).await?;
        Ok(())
    }

    /// Waits for the registration socket of `driver` and checks what it says.
    async fn meet(&self, driver: &str) -> Result<(RegistrationClient<Channel>, Plugin)> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let mut failure = anyhow::anyhow!("no registration socket");
            for socket in self.registry()? {
                match introduce(&socket).await {
                    Ok((registration, info)) if info.name == driver => {
                        let plugin = accept(info).await?;
                        return Ok((registration, plugin));
                    }
                    Ok((_, other)) => failure = anyhow::anyhow!("only {} is there", other.name),
                    Err(error) => failure = error,
                }
            }
            if tokio::time::Instant::now() > deadline {
                return Err(
                    failure.context(format!("{driver} did not register within {PATIENCE:?}"))
                );
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

async fn introduce(socket: &Path) -> Result<(RegistrationClient<Channel>, PluginInfo)> {
    let authority = encode_authority(&socket.to_string_lossy());
    let mut registration = RegistrationClient::new(connect(socket, &authority).await?);
    let info = registration.get_info(InfoRequest {}).await?.into_inner();
    Ok((registration, info))
}

/// What kubelet's plugin handler checks before it takes a plugin.
async fn accept(info: PluginInfo) -> Result<Plugin> {
    ensure!(
        info.r#type == "DRAPlugin",
        "the plugin has type {:?}",
        info.r#type
    );
    let endpoint = PathBuf::from(&info.endpoint);
    ensure!(
        endpoint.is_absolute(),
        "the endpoint {:?} is not an absolute path",
        info.endpoint
    );
    let service = info
        .supported_versions
        .iter()
        .find_map(|offered| SERVICES.into_iter().find(|known| known == offered));
    let Some(service) = service else {
        bail!(
            "none of services supported by the plugin ({:?}) are supported by the kubelet ({SERVICES:?})",
            info.supported_versions
        )
    };
    let channel = connect(&endpoint, "localhost").await?;
    Ok(Plugin {
        info,
        service,
        channel,
    })
}

/// What grpc-go makes of a socket path that it is given as a target (`encodeAuthority` in `clientconn.go`).
fn encode_authority(target: &str) -> String {
    let mut encoded = String::new();
    for byte in target.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]@".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

async fn connect(socket: &Path, authority: &str) -> Result<Channel> {
    let path = socket.to_owned();
    let connector = service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
    });
    // The parser is the server's too: what it does not take here the server would answer with PROTOCOL_ERROR.
    Endpoint::from_shared(format!("http://{authority}"))
        .with_context(|| format!("the plugin's HTTP/2 refuses the authority {authority:?}"))?
        .connect_with_connector(connector)
        .await
        .with_context(|| format!("connect to {}", socket.display()))
}

impl Plugin {
    /// Prepares claims. Each has its devices or the plugin's error, by UID.
    ///
    /// # Errors
    /// When the call fails, or the answer is one that kubelet refuses.
    pub async fn prepare(
        &self,
        claims: &[Claim],
    ) -> Result<HashMap<String, Result<Vec<Device>, String>>> {
        let request = NodePrepareResourcesRequest {
            claims: claims.to_vec(),
        };
        let answer = tokio::time::timeout(CALL_TIMEOUT, self.call_prepare(request)).await??;
        complete("NodePrepareResources", claims, &answer.claims)?;
        let mut outcomes = HashMap::new();
        for (uid, answer) in answer.claims {
            if !answer.error.is_empty() {
                outcomes.insert(uid, Err(answer.error));
                continue;
            }
            for device in &answer.devices {
                check_device(device)?;
            }
            outcomes.insert(uid, Ok(answer.devices));
        }
        Ok(outcomes)
    }

    /// Prepares one claim.
    ///
    /// # Errors
    /// When the call or the claim fails: the text of kubelet's event.
    pub async fn prepare_one(&self, claim: &Claim) -> Result<Vec<Device>> {
        let mut outcomes = self.prepare(std::slice::from_ref(claim)).await?;
        let outcome = outcomes.remove(&claim.uid).context("no answer")?;
        outcome.map_err(|error| {
            anyhow::anyhow!(
                "NodePrepareResources failed for ResourceClaim {}: {error}",
                claim.name
            )
        })
    }

    /// Unprepares claims. Each has nothing or the plugin's error, by UID.
    ///
    /// # Errors
    /// When the call fails, or the answer is one that kubelet refuses.
    pub async fn unprepare(&self, claims: &[Claim]) -> Result<HashMap<String, Result<(), String>>> {
        let request = NodeUnprepareResourcesRequest {
            claims: claims.to_vec(),
        };
        let call = async {
            match self.service {
                "v1.DRAPlugin" => {
                    DraPluginClient::new(self.channel.clone())
                        .node_unprepare_resources(request)
                        .await
                }
                _ => {
                    DraPluginClientV1beta1::new(self.channel.clone())
                        .node_unprepare_resources(request)
                        .await
                }
            }
        };
        let answer = tokio::time::timeout(CALL_TIMEOUT, call)
            .await??
            .into_inner();
        complete("NodeUnprepareResources", claims, &answer.claims)?;
        let outcomes = answer.claims.into_iter().map(|(uid, answer)| {
            let outcome = if answer.error.is_empty() {
                Ok(())
            } else {
                Err(answer.error)
            };
            (uid, outcome)
        });
        Ok(outcomes.collect())
    }

    /// Unprepares one claim.
    ///
    /// # Errors
    /// When the call or the claim fails.
    pub async fn unprepare_one(&self, claim: &Claim) -> Result<()> {
        let mut outcomes = self.unprepare(std::slice::from_ref(claim)).await?;
        outcomes
            .remove(&claim.uid)
            .context("no answer")?
            .map_err(|error| {
                anyhow::anyhow!(
                    "NodeUnprepareResources failed for ResourceClaim {}: {error}",
                    claim.name
                )
            })
    }

    /// Talks to the plugin as an older kubelet would, in `v1beta1`.
    #[must_use]
    pub fn in_v1beta1(mut self) -> Self {
        self.service = "v1beta1.DRAPlugin";
        self
    }

    /// Opens the health stream.
    ///
    /// # Errors
    /// When the call fails.
    pub async fn watch_health(&self) -> Result<Streaming<NodeWatchResourcesResponse>> {
        let mut client = DraResourceHealthClient::new(self.channel.clone());
        Ok(client
            .node_watch_resources(NodeWatchResourcesRequest {})
            .await?
            .into_inner())
    }

    async fn call_prepare(
        &self,
        request: NodePrepareResourcesRequest,
    ) -> Result<NodePrepareResourcesResponse> {
        let answer = match self.service {
            "v1.DRAPlugin" => {
                DraPluginClient::new(self.channel.clone())
                    .node_prepare_resources(request)
                    .await
            }
            _ => {
                DraPluginClientV1beta1::new(self.channel.clone())
                    .node_prepare_resources(request)
                    .await
            }
        };
        Ok(answer?.into_inner())
    }
}

/// Every claim of the request and no other must be in the answer.
fn complete<T>(call: &str, claims: &[Claim], answers: &HashMap<String, T>) -> Result<()> {
    for uid in answers.keys() {
        ensure!(
            claims.iter().any(|claim| claim.uid == *uid),
            "{call} returned result for unknown claim UID {uid}"
        );
    }
    let skipped = claims
        .iter()
        .filter(|claim| !answers.contains_key(&claim.uid))
        .count();
    ensure!(skipped == 0, "{call} skipped {skipped} ResourceClaims");
    Ok(())
}

fn check_device(device: &Device) -> Result<()> {
    ensure!(
        !device.pool_name.is_empty() && !device.device_name.is_empty(),
        "a device has no pool or name: {device:?}"
    );
    for id in &device.cdi_device_ids {
        let parts = id
            .split_once('=')
            .and_then(|(kind, name)| Some((kind.split_once('/')?, name)));
        let Some(((vendor, class), name)) = parts else {
            bail!("CDI device {id:?} is not fully qualified")
        };
        let word = |text: &str| !text.is_empty() && !text.contains('/');
        ensure!(
            word(vendor) && word(class) && word(name),
            "CDI device {id:?} is not fully qualified"
        );
    }
    Ok(())
}
