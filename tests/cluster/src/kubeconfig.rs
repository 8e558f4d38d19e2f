//! Kubeconfig files with embedded keys and certificates, so that each file can be copied anywhere.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::pki::{Authority, Identity};

/// Returns a kubeconfig with the credentials of `identity` for the API server at `server`.
pub(crate) fn kubeconfig(server: &str, authority: &Authority, identity: &Identity) -> Value {
    let name = "drava";
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": name,
            "cluster": {"server": server, "certificate-authority-data": STANDARD.encode(authority.certificate_pem())},
        }],
        "users": [{
            "name": identity.name,
            "user": {
                "client-certificate-data": STANDARD.encode(&identity.certificate_pem),
                "client-key-data": STANDARD.encode(&identity.key_pem),
            },
        }],
        "contexts": [{"name": name, "context": {"cluster": name, "user": identity.name}}],
        "current-context": name,
    })
}
