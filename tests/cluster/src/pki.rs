//! The cluster's certificate authority and certificates.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};

use crate::config::{NodeIndex, SERVICE_IP};

/// Extended key usage of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Usage {
    Client,
    Server,
    /// Both: etcd's peer connections need both.
    Both,
}

/// A certificate to issue.
#[derive(Clone, Debug)]
struct Request {
    /// Stem of the file names.
    name: &'static str,
    /// Common name: the user of a client.
    common_name: String,
    /// Organization: the group of a client.
    organization: Option<&'static str>,
    /// DNS names and addresses of a server.
    subject_alt_names: Vec<String>,
    usage: Usage,
}

impl Request {
    fn client(
        name: &'static str,
        common_name: impl Into<String>,
        organization: Option<&'static str>,
    ) -> Self {
        Self {
            name,
            common_name: common_name.into(),
            organization,
            subject_alt_names: vec![],
            usage: Usage::Client,
        }
    }

    fn server(
        name: &'static str,
        subject_alt_names: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        Self {
            name,
            common_name: name.to_owned(),
            organization: None,
            subject_alt_names: subject_alt_names.into_iter().map(Into::into).collect(),
            usage: Usage::Server,
        }
    }
}

/// Certificates of the control plane.
fn control_plane_requests() -> Vec<Request> {
    let loopback = ["localhost", "127.0.0.1"];
    let mut etcd = Request::server("etcd", loopback);
    etcd.usage = Usage::Both;
    vec![
        etcd,
        Request::client("etcd-client", "kube-apiserver", None),
        Request::server(
            "kube-apiserver",
            [
                "kubernetes",
                "kubernetes.default",
                "kubernetes.default.svc",
                "kubernetes.default.svc.cluster.local",
                "localhost",
                "127.0.0.1",
                &SERVICE_IP.to_string(),
                &NodeIndex::CONTROL_PLANE.address().to_string(),
            ],
        ),
        Request::client(
            "kube-apiserver-kubelet-client",
            "kube-apiserver-kubelet-client",
            Some("system:masters"),
        ),
        Request::client("admin", "kubernetes-admin", Some("system:masters")),
        Request::client(
            "kube-controller-manager",
            "system:kube-controller-manager",
            None,
        ),
        Request::server("kube-controller-manager-serving", loopback),
        Request::client("kube-scheduler", "system:kube-scheduler", None),
        Request::server("kube-scheduler-serving", loopback),
    ]
}

/// Certificates of a node.
fn node_requests(node: NodeIndex) -> Vec<Request> {
    let (name, address) = (node.name(), node.address().to_string());
    vec![
        Request::client(KUBELET, format!("system:node:{name}"), Some("system:nodes")),
        Request::server("kubelet-serving", [name, address, "127.0.0.1".to_owned()]),
    ]
}

/// Name of the identity with which kubelet calls the API server.
pub(crate) const KUBELET: &str = "kubelet";

/// The certificate authority.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate_pem: String,
    key_pem: String,
}

impl Authority {
    fn issue_all(&self, requests: &[Request]) -> Result<Identities> {
        let issue = |request: &Request| {
            self.issue(request)
                .with_context(|| format!("issue the certificate {}", request.name))
        };
        Ok(Identities(
            requests.iter().map(issue).collect::<Result<_>>()?,
        ))
    }

    fn new() -> Result<Self> {
        let mut params = CertificateParams::new(vec![])?;
        params.distinguished_name = distinguished_name("drava test cluster", None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::CrlSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        let key = KeyPair::generate()?;
        let key_pem = key.serialize_pem();
        let certificate_pem = params.self_signed(&key)?.pem();
        Ok(Self {
            issuer: Issuer::new(params, key),
            certificate_pem,
            key_pem,
        })
    }

    /// Certificate of the authority.
    pub(crate) fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    fn issue(&self, request: &Request) -> Result<Identity> {
        let mut params = CertificateParams::new(request.subject_alt_names.clone())?;
        params.distinguished_name = distinguished_name(&request.common_name, request.organization);
        params.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
        ];
        params.extended_key_usages = match request.usage {
            Usage::Client => vec![ExtendedKeyUsagePurpose::ClientAuth],
            Usage::Server => vec![ExtendedKeyUsagePurpose::ServerAuth],
            Usage::Both => vec![
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ],
        };
        let key = KeyPair::generate()?;
        let certificate_pem = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Identity {
            name: request.name,
            certificate_pem,
            key_pem: key.serialize_pem(),
        })
    }
}

/// A private key and its certificate.
pub(crate) struct Identity {
    pub(crate) name: &'static str,
    pub(crate) certificate_pem: String,
    pub(crate) key_pem: String,
}

/// Identities of one machine.
pub(crate) struct Identities(Vec<Identity>);

impl Identities {
    /// Returns the identity `name`.
    pub(crate) fn get(&self, name: &str) -> Result<&Identity> {
        self.0
            .iter()
            .find(|identity| identity.name == name)
            .with_context(|| format!("unknown certificate {name}"))
    }

    /// Writes `<name>.crt` and `<name>.key` of all identities into `dir`; keys are readable by their owner only.
    fn write(&self, dir: &Path) -> Result<()> {
        for identity in &self.0 {
            write_private(
                &dir.join(format!("{}.crt", identity.name)),
                &identity.certificate_pem,
            )?;
            write_private(
                &dir.join(format!("{}.key", identity.name)),
                &identity.key_pem,
            )?;
        }
        Ok(())
    }
}

/// Certificate authority of the cluster and identities of the control plane.
pub(crate) struct Pki {
    pub(crate) authority: Authority,
    pub(crate) control_plane: Identities,
    service_account: KeyPair,
}

impl Pki {
    pub(crate) fn generate() -> Result<Self> {
        let authority = Authority::new().context("create the cluster's certificate authority")?;
        let control_plane = authority.issue_all(&control_plane_requests())?;
        Ok(Self {
            authority,
            control_plane,
            service_account: KeyPair::generate()?,
        })
    }

    /// Issues the certificates of a node and writes them into `dir`, with those of the control plane where it runs.
    pub(crate) fn write_node(&self, node: NodeIndex, dir: &Path) -> Result<Identities> {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        write_private(&dir.join("ca.crt"), &self.authority.certificate_pem)?;
        if node == NodeIndex::CONTROL_PLANE {
            write_private(&dir.join("ca.key"), &self.authority.key_pem)?;
            write_private(
                &dir.join("service-account.pub"),
                &self.service_account.public_key_pem(),
            )?;
            write_private(
                &dir.join("service-account.key"),
                &self.service_account.serialize_pem(),
            )?;
            self.control_plane.write(dir)?;
        }
        let identities = self.authority.issue_all(&node_requests(node))?;
        identities.write(dir)?;
        Ok(identities)
    }
}

/// Writes a file that only its owner can read.
pub(crate) fn write_private(path: &Path, text: &str) -> Result<()> {
    fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("write {}", path.display()))
}

fn distinguished_name(common_name: &str, organization: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    if let Some(organization) = organization {
        name.push(DnType::OrganizationName, organization);
    }
    name.push(DnType::CommonName, common_name);
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(name: &str) -> Request {
        control_plane_requests()
            .into_iter()
            .find(|request| request.name == name)
            .unwrap()
    }

    fn nodes() -> [NodeIndex; 2] {
        NodeIndex::all(2).unwrap().try_into().unwrap()
    }

    #[test]
    fn server_certificate_covers_every_api_server_address() {
        let names = request("kube-apiserver").subject_alt_names;
        for name in [
            "127.0.0.1",
            "10.96.0.1",
            "10.95.0.1",
            "kubernetes.default.svc",
        ] {
            assert!(names.iter().any(|known| known == name), "{name}");
        }
    }

    #[test]
    fn kubelet_certificate_satisfies_node_authorizer() {
        for (node, name) in nodes().into_iter().zip(["node-0", "node-1"]) {
            let kubelet = node_requests(node).remove(0);
            assert_eq!(kubelet.name, KUBELET);
            assert_eq!(kubelet.common_name, format!("system:node:{name}"));
            assert_eq!(kubelet.organization, Some("system:nodes"));
            assert_eq!(kubelet.usage, Usage::Client);
        }
    }

    #[test]
    fn only_administrator_and_api_server_are_in_system_masters() {
        let masters: Vec<_> = control_plane_requests()
            .into_iter()
            .chain(nodes().into_iter().flat_map(node_requests))
            .filter(|r| r.organization == Some("system:masters"))
            .map(|r| r.name)
            .collect();
        assert_eq!(masters, ["kube-apiserver-kubelet-client", "admin"]);
    }

    #[test]
    fn writes_private_keys_where_they_are_used() {
        use std::os::unix::fs::PermissionsExt as _;
        let pki = Pki::generate().unwrap();
        let [control_plane, worker] = nodes();
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        pki.write_node(control_plane, dirs[0].path()).unwrap();
        pki.write_node(worker, dirs[1].path()).unwrap();
        let mode = |dir: &tempfile::TempDir, file: String| {
            let metadata = fs::metadata(dir.path().join(file)).ok()?;
            Some(metadata.permissions().mode() & 0o777)
        };
        for request in control_plane_requests() {
            for suffix in ["crt", "key"] {
                let file = format!("{}.{suffix}", request.name);
                assert_eq!(mode(&dirs[0], file.clone()), Some(0o600), "{file}");
                assert_eq!(mode(&dirs[1], file.clone()), None, "{file}");
            }
        }
        for dir in &dirs {
            for file in ["ca.crt", "kubelet.key", "kubelet-serving.key"] {
                assert_eq!(mode(dir, file.to_owned()), Some(0o600), "{file}");
            }
        }
        assert_eq!(mode(&dirs[1], "ca.key".to_owned()), None);
    }
}
