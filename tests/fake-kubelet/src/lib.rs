//! Drives a DRA plugin over its real sockets, as kubelet does.
//!
//! The fake follows `pkg/kubelet/cm/dra` and the plugin watcher of Kubernetes 1.37: it watches the registry directory for
//! sockets, requests the plugin's info, selects the first known service of the plugin's list, and rejects the answers that
//! kubelet rejects (a missing or unknown claim, a device without a pool or with a CDI ID that is not fully qualified).
//! Like kubelet since 1.34, the fake calls the DRA socket with the HTTP/2 `:authority` `localhost`, and the registration
//! socket with its percent-encoded path, which servers with strict HTTP parsers reject.
//!
//! The fake stores no state of claims: tests decide which calls happen when.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use drava_dra_driver::kubelet::proto::dra_v1::dra_plugin_client::DraPluginClient;
use drava_dra_driver::kubelet::proto::dra_v1::{
    NodePrepareResourcesRequest, NodeUnprepareResourcesRequest,
};
use drava_dra_driver::kubelet::proto::health_v1::dra_resource_health_client::DraResourceHealthClient;
use drava_dra_driver::kubelet::proto::health_v1::{
    NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use drava_dra_driver::kubelet::proto::health_v1alpha1::dra_resource_health_client::DraResourceHealthClient as DraResourceHealthClientV1alpha1;
use drava_dra_driver::kubelet::proto::registration::registration_client::RegistrationClient;
use drava_dra_driver::kubelet::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

pub use drava_dra_driver::kubelet::proto::dra_v1::{Claim, Device};
pub use drava_dra_driver::kubelet::proto::health_v1::{DeviceHealth, HealthStatus};

/// Time-out for the registration of a plugin.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(30);

/// kubelet's time-out of prepare and unprepare calls.
const CALL_TIMEOUT: Duration = Duration::from_secs(45);

/// DRA services that this kubelet supports.
const SERVICES: [&str; 1] = ["v1.DRAPlugin"];

/// A kubelet with its own root directory.
#[derive(Debug)]
pub struct FakeKubelet {
    root: PathBuf,
}

/// A registered plugin.
#[derive(Debug, Clone)]
pub struct Plugin {
    /// Info that the plugin reported.
    pub info: PluginInfo,
    channel: Channel,
}

impl FakeKubelet {
    /// Starts on `root` and creates the directories that kubelet creates.
    ///
    /// # Errors
    /// If a directory cannot be created.
    pub fn start(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        for directory in ["plugins_registry", "plugins"] {
            let directory = root.join(directory);
            fs::create_dir_all(&directory)
                .with_context(|| format!("create {}", directory.display()))?;
        }
        Ok(Self { root })
    }

    /// Returns the sockets in the registry.
    ///
    /// # Errors
    /// If the directory cannot be read.
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
    /// If no plugin appears, or kubelet would reject its info.
    pub async fn register(&self, driver: &str) -> Result<Plugin> {
        let (mut registration, plugin) = self.await_plugin(driver).await?;
        let accepted = RegistrationStatus {
            plugin_registered: true,
            error: String::new(),
        };
        registration.notify_registration_status(accepted).await?;
        Ok(plugin)
    }

    /// Waits for a plugin of this driver and rejects it.
    ///
    /// # Errors
    /// If no plugin appears.
    pub async fn reject(&self, driver: &str, error: &str) -> Result<()> {
        let (mut registration, _) = self.await_plugin(driver).await?;
        let rejected = RegistrationStatus {
            plugin_registered: false,
            error: error.to_owned(),
        };
        registration.notify_registration_status(rejected).await?;
        Ok(())
    }

    /// Waits for the registration socket of `driver` and checks the plugin's info.
    async fn await_plugin(&self, driver: &str) -> Result<(RegistrationClient<Channel>, Plugin)> {
        let deadline = tokio::time::Instant::now() + REGISTRATION_TIMEOUT;
        loop {
            let mut failure = anyhow::anyhow!("no registration socket");
            for socket in self.registry()? {
                match request_info(&socket).await {
                    Ok((registration, info)) if info.name == driver => {
                        let plugin = accept(info).await?;
                        return Ok((registration, plugin));
                    }
                    Ok((_, other)) => failure = anyhow::anyhow!("found only plugin {}", other.name),
                    Err(error) => failure = error,
                }
            }
            if tokio::time::Instant::now() > deadline {
                return Err(failure.context(format!(
                    "{driver} did not register within {REGISTRATION_TIMEOUT:?}"
                )));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

async fn request_info(socket: &Path) -> Result<(RegistrationClient<Channel>, PluginInfo)> {
    let authority = encode_authority(&socket.to_string_lossy());
    let mut registration = RegistrationClient::new(connect(socket, &authority).await?);
    let info = registration.get_info(InfoRequest {}).await?.into_inner();
    Ok((registration, info))
}

/// Checks the info of a plugin as kubelet's plugin handler does, and connects to it.
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
    let mut offered = info.supported_versions.iter();
    ensure!(
        offered.any(|offered| SERVICES.contains(&offered.as_str())),
        "none of services supported by the plugin ({:?}) are supported by the kubelet ({SERVICES:?})",
        info.supported_versions
    );
    let channel = connect(&endpoint, "localhost").await?;
    Ok(Plugin { info, channel })
}

/// Encodes a socket path as grpc-go encodes a target (`encodeAuthority` in `clientconn.go`).
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
    // The server uses the same parser and answers an authority that fails here with PROTOCOL_ERROR.
    Endpoint::from_shared(format!("http://{authority}"))
        .with_context(|| format!("cannot use authority {authority:?} with HTTP/2"))?
        .connect_with_connector(connector)
        .await
        .with_context(|| format!("connect to {}", socket.display()))
}

impl Plugin {
    /// Prepares claims and returns the devices or the plugin's error of each, by UID.
    ///
    /// # Errors
    /// If the call fails, or kubelet would reject the answer.
    pub async fn prepare(
        &self,
        claims: &[Claim],
    ) -> Result<HashMap<String, Result<Vec<Device>, String>>> {
        let request = NodePrepareResourcesRequest {
            claims: claims.to_vec(),
        };
        let mut client = DraPluginClient::new(self.channel.clone());
        let call = client.node_prepare_resources(request);
        let answer = tokio::time::timeout(CALL_TIMEOUT, call)
            .await??
            .into_inner();
        check_claims("NodePrepareResources", claims, &answer.claims)?;
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
    /// If the call or the claim fails, with the text of kubelet's event.
    pub async fn prepare_one(&self, claim: &Claim) -> Result<Vec<Device>> {
        let mut outcomes = self.prepare(std::slice::from_ref(claim)).await?;
        let outcome = outcomes
            .remove(&claim.uid)
            .context("no answer for the claim")?;
        outcome.map_err(|error| {
            anyhow::anyhow!(
                "NodePrepareResources failed for ResourceClaim {}: {error}",
                claim.name
            )
        })
    }

    /// Unprepares claims and returns the plugin's error, if any, of each, by UID.
    ///
    /// # Errors
    /// If the call fails, or kubelet would reject the answer.
    pub async fn unprepare(&self, claims: &[Claim]) -> Result<HashMap<String, Result<(), String>>> {
        let request = NodeUnprepareResourcesRequest {
            claims: claims.to_vec(),
        };
        let mut client = DraPluginClient::new(self.channel.clone());
        let call = client.node_unprepare_resources(request);
        let answer = tokio::time::timeout(CALL_TIMEOUT, call)
            .await??
            .into_inner();
        check_claims("NodeUnprepareResources", claims, &answer.claims)?;
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
    /// If the call or the claim fails.
    pub async fn unprepare_one(&self, claim: &Claim) -> Result<()> {
        let mut outcomes = self.unprepare(std::slice::from_ref(claim)).await?;
        outcomes
            .remove(&claim.uid)
            .context("no answer for the claim")?
            .map_err(|error| {
                anyhow::anyhow!(
                    "NodeUnprepareResources failed for ResourceClaim {}: {error}",
                    claim.name
                )
            })
    }

    /// Opens the health stream.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn watch_health(&self) -> Result<Streaming<NodeWatchResourcesResponse>> {
        let mut client = DraResourceHealthClient::new(self.channel.clone());
        Ok(client
            .node_watch_resources(NodeWatchResourcesRequest {})
            .await?
            .into_inner())
    }

    /// Opens the health stream of `v1alpha1`, as older kubelets do.
    ///
    /// # Errors
    /// If the call fails.
    pub async fn watch_health_v1alpha1(&self) -> Result<Streaming<NodeWatchResourcesResponse>> {
        let mut client = DraResourceHealthClientV1alpha1::new(self.channel.clone());
        Ok(client
            .node_watch_resources(NodeWatchResourcesRequest {})
            .await?
            .into_inner())
    }
}

/// Checks that the answer has exactly the claims of the request.
fn check_claims<T>(call: &str, claims: &[Claim], answers: &HashMap<String, T>) -> Result<()> {
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
        let is_segment = |text: &str| !text.is_empty() && !text.contains('/');
        ensure!(
            is_segment(vendor) && is_segment(class) && is_segment(name),
            "CDI device {id:?} is not fully qualified"
        );
    }
    Ok(())
}
