//! Certificate of the webhook server with the certificates that the API server trusts. No I/O, no clock.
//!
//! A self-managed certificate is issued by a certificate authority of its own, whose key is dropped at once. The bundle of
//! trusted certificates holds that authority and the one before, so both certificates are accepted during a rotation.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::VerifierBuilderError;
use rustls::{RootCertStore, ServerConfig};
use time::OffsetDateTime;

use crate::operate::metrics::CertificateValidity;

/// Keys of the Secret, as cert-manager names them.
const CERTIFICATE_KEY: &str = "tls.crt";
const PRIVATE_KEY_KEY: &str = "tls.key";
const BUNDLE_KEY: &str = "ca.crt";

/// Time before its creation from which a certificate is valid: the clocks of the nodes differ.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// Why a certificate cannot be created or used.
#[derive(Debug, thiserror::Error)]
pub(super) enum CertificateError {
    /// The Secret lacks a key.
    #[error("the Secret has no {0}")]
    Missing(&'static str),
    /// A value of the Secret is not PEM.
    #[error("cannot parse {0} of the Secret")]
    Malformed(&'static str, #[source] pem::Error),
    /// A value of the Secret is PEM of no certificate.
    #[error("{0} of the Secret is not an X.509 certificate")]
    Encoding(&'static str),
    /// The certificate and its private key do not match, or are of an unsupported type.
    #[error("cannot use the certificate")]
    Unusable(#[source] rustls::Error),
    /// The certificate is expired, for another name, or not issued by the trusted authority.
    #[error("the certificate is not valid for {0}")]
    Invalid(String, #[source] rustls::Error),
    /// The trusted certificates cannot be used.
    #[error("cannot use the trusted certificates")]
    Untrusted(#[source] VerifierBuilderError),
    /// The name of the server is not a DNS name.
    #[error("{0} is not a DNS name")]
    Name(String),
    /// The validity exceeds the range of dates.
    #[error("the validity exceeds the range of dates")]
    Validity,
    /// A certificate cannot be issued.
    #[error("cannot issue a certificate")]
    Issue(#[from] rcgen::Error),
}

/// See the [module](self).
#[derive(Clone)]
pub(super) struct Certificate {
    chain_pem: String,
    key_pem: String,
    bundle_pem: String,
}

impl Certificate {
    /// Issues a certificate for `name` that is valid from now on for `lifetime`. `previous` is the bundle trusted so far.
    ///
    /// # Errors
    /// When no key can be generated, or the lifetime is out of range.
    pub(super) fn issue(
        name: &str,
        now: Timestamp,
        lifetime: Duration,
        previous: Option<&str>,
    ) -> Result<Self, CertificateError> {
        let params = |common_name: &str, names: Vec<String>| {
            let mut params = CertificateParams::new(names)?;
            params
                .distinguished_name
                .push(DnType::CommonName, common_name);
            params.not_before = date(now, |now| now.checked_sub(CLOCK_SKEW))?;
            params.not_after = date(now, |now| now.checked_add(lifetime))?;
            Ok::<_, CertificateError>(params)
        };
        let mut authority = params(&format!("drava webhook {}", now.as_second()), Vec::new())?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let authority_key = KeyPair::generate()?;
        let authority_pem = authority.self_signed(&authority_key)?.pem();
        let issuer = Issuer::new(authority, authority_key);

        let mut server = params(name, vec![name.to_owned()])?;
        server.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        server.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let chain_pem = server.signed_by(&key, &issuer)?.pem();

        // Of a longer bundle only the newest authority is in use.
        let previous = previous.and_then(first_certificate).unwrap_or_default();
        Ok(Self {
            chain_pem,
            key_pem: key.serialize_pem(),
            bundle_pem: format!("{authority_pem}{previous}"),
        })
    }

    /// Returns the certificate in a Secret.
    ///
    /// # Errors
    /// When a key is missing. The values are checked when they are used.
    pub(super) fn of_secret(secret: &Secret) -> Result<Self, CertificateError> {
        let value = |key| text(secret, key).ok_or(CertificateError::Missing(key));
        Ok(Self {
            chain_pem: value(CERTIFICATE_KEY)?,
            key_pem: value(PRIVATE_KEY_KEY)?,
            bundle_pem: value(BUNDLE_KEY)?,
        })
    }

    /// Writes the certificate into a Secret.
    pub(super) fn write_to(&self, secret: &mut Secret) {
        let data = secret.data.get_or_insert_default();
        for (key, value) in [
            (CERTIFICATE_KEY, &self.chain_pem),
            (PRIVATE_KEY_KEY, &self.key_pem),
            (BUNDLE_KEY, &self.bundle_pem),
        ] {
            data.insert(key.to_owned(), ByteString(value.clone().into_bytes()));
        }
    }

    /// Returns the trusted certificates in PEM.
    pub(super) fn bundle(&self) -> &str {
        &self.bundle_pem
    }

    /// Returns the configuration of a server with this certificate.
    ///
    /// # Errors
    /// When the certificate or its key is malformed, or they do not match.
    pub(super) fn server_config(&self) -> Result<Arc<ServerConfig>, CertificateError> {
        let key = PrivateKeyDer::from_pem_slice(self.key_pem.as_bytes())
            .map_err(|error| CertificateError::Malformed(PRIVATE_KEY_KEY, error))?;
        let chain = certificates(&self.chain_pem, CERTIFICATE_KEY)?;
        let config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
            .map_err(CertificateError::Unusable)?;
        Ok(Arc::new(config))
    }

    /// Returns the validity of the server's certificate.
    ///
    /// # Errors
    /// When it is malformed.
    pub(super) fn validity(&self) -> Result<CertificateValidity, CertificateError> {
        let chain = certificates(&self.chain_pem, CERTIFICATE_KEY)?;
        let server = chain
            .first()
            .ok_or(CertificateError::Missing(CERTIFICATE_KEY))?;
        let (_, parsed) = x509_parser::parse_x509_certificate(server)
            .map_err(|_| CertificateError::Encoding(CERTIFICATE_KEY))?;
        let validity = parsed.validity();
        Ok(CertificateValidity {
            start: validity.not_before.timestamp(),
            end: validity.not_after.timestamp(),
        })
    }

    /// Checks that clients accept the certificate at a time, and that the server can use it.
    ///
    /// # Errors
    /// When it is malformed, expired, for another name, or not issued by a trusted authority.
    pub(super) fn verify(&self, name: &str, at: Timestamp) -> Result<(), CertificateError> {
        self.server_config()?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.bundle_pem, BUNDLE_KEY)? {
            roots.add(certificate).map_err(CertificateError::Unusable)?;
        }
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
            .build()
            .map_err(CertificateError::Untrusted)?;
        let chain = certificates(&self.chain_pem, CERTIFICATE_KEY)?;
        let Some((server, intermediates)) = chain.split_first() else {
            return Err(CertificateError::Missing(CERTIFICATE_KEY));
        };
        let server_name =
            ServerName::try_from(name).map_err(|_| CertificateError::Name(name.to_owned()))?;
        let since_epoch = Duration::from_secs(u64::try_from(at.as_second()).unwrap_or_default());
        verifier
            .verify_server_cert(
                server,
                intermediates,
                &server_name,
                &[],
                UnixTime::since_unix_epoch(since_epoch),
            )
            .map(|_| ())
            .map_err(|error| CertificateError::Invalid(name.to_owned(), error))
    }
}

/// Returns the trusted certificates in a Secret, in PEM.
pub(super) fn bundle_of(secret: &Secret) -> Option<String> {
    text(secret, BUNDLE_KEY)
}

fn text(secret: &Secret, key: &str) -> Option<String> {
    let value = secret.data.as_ref()?.get(key)?;
    let text = String::from_utf8(value.0.clone()).ok()?;
    (!text.is_empty()).then_some(text)
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn certificates(
    pem: &str,
    key: &'static str,
) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|error| CertificateError::Malformed(key, error))
}

/// Returns the first certificate of a bundle.
fn first_certificate(bundle: &str) -> Option<&str> {
    const END: &str = "-----END CERTIFICATE-----";
    certificates(bundle, BUNDLE_KEY).ok()?;
    let end = bundle.find(END)? + END.len();
    bundle.get(..end)
}

fn date(
    now: Timestamp,
    change: impl FnOnce(Timestamp) -> Result<Timestamp, jiff::Error>,
) -> Result<OffsetDateTime, CertificateError> {
    let second = change(now)
        .map_err(|_| CertificateError::Validity)?
        .as_second();
    OffsetDateTime::from_unix_timestamp(second).map_err(|_| CertificateError::Validity)
}

#[cfg(test)]
mod tests;
