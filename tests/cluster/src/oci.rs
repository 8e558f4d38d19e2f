//! Container images without a container engine: one layer of files, written as an OCI archive.
//!
//! The same files give the same archive, byte for byte: entries are sorted, times are zero, the owner is root.

mod layer;
pub(crate) mod libraries;

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use oci_spec::image::{
    ANNOTATION_REF_NAME, Arch, ConfigBuilder, Descriptor, DescriptorBuilder, Digest,
    ImageConfigurationBuilder, ImageIndexBuilder, ImageManifestBuilder, MediaType,
    OciLayoutBuilder, Os, RootFsBuilder, SCHEMA_VERSION,
};
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

pub use layer::Layer;

/// An image.
#[derive(Clone, Debug)]
pub struct Image {
    /// Full name, such as `localhost/drava-controller:dev`.
    pub name: String,
    /// Program and fixed arguments.
    pub entrypoint: Vec<String>,
    /// Default arguments, or the whole command where there is no entrypoint.
    pub command: Vec<String>,
    /// User and group, such as `65532:65532`; root when empty.
    pub user: String,
    /// Labels of the configuration, such as `org.opencontainers.image.version`.
    pub labels: BTreeMap<String, String>,
    /// File system.
    pub layer: Layer,
}

/// A blob of the archive.
struct Blob {
    descriptor: Descriptor,
    bytes: Vec<u8>,
}

impl Blob {
    fn new(media_type: MediaType, bytes: Vec<u8>) -> Result<Self> {
        let digest: Digest = format!("sha256:{}", sha256(&bytes)).parse()?;
        let descriptor = DescriptorBuilder::default()
            .media_type(media_type)
            .digest(digest)
            .size(u64::try_from(bytes.len())?)
            .build()?;
        Ok(Self { descriptor, bytes })
    }

    fn path(&self) -> String {
        format!("blobs/sha256/{}", self.descriptor.digest().digest())
    }
}

impl Image {
    /// Writes the archive to `file` atomically, and returns the digest of the image (`sha256:…`).
    pub fn write(&self, file: &Path) -> Result<String> {
        let unfinished = file.with_extension("unfinished");
        let written = self.archive().and_then(|(bytes, digest)| {
            let mut output = File::create(&unfinished)?;
            output.write_all(&bytes)?;
            fs::rename(&unfinished, file)?;
            Ok(digest)
        });
        written.with_context(|| format!("write the image {} to {}", self.name, file.display()))
    }

    /// Returns the archive and the digest of the manifest.
    fn archive(&self) -> Result<(Vec<u8>, String)> {
        let layer = Blob::new(MediaType::ImageLayer, self.layer.tar()?)?;
        let config = Blob::new(MediaType::ImageConfig, self.configuration(&layer)?)?;
        let manifest = ImageManifestBuilder::default()
            .schema_version(SCHEMA_VERSION)
            .media_type(MediaType::ImageManifest)
            .config(config.descriptor.clone())
            .layers(vec![layer.descriptor.clone()])
            .build()?;
        let mut manifest = Blob::new(MediaType::ImageManifest, json(&manifest)?)?;
        // containerd reads the full name from its own annotation; other programs read the tag from the standard
        // annotation.
        manifest.descriptor.set_annotations(Some(
            [
                ("io.containerd.image.name".to_owned(), self.name.clone()),
                (ANNOTATION_REF_NAME.to_owned(), self.name.clone()),
            ]
            .into(),
        ));
        let index = ImageIndexBuilder::default()
            .schema_version(SCHEMA_VERSION)
            .media_type(MediaType::ImageIndex)
            .manifests(vec![manifest.descriptor.clone()])
            .build()?;
        let layout = OciLayoutBuilder::default()
            .image_layout_version("1.0.0")
            .build()?;
        let mut tar = tar::Builder::new(vec![]);
        let mut append = |path: &str, bytes: &[u8]| {
            tar.append_data(&mut layer::header(0o644, bytes.len()), path, bytes)
        };
        append("oci-layout", &json(&layout)?)?;
        append("index.json", &json(&index)?)?;
        for blob in [&manifest, &config, &layer] {
            append(&blob.path(), &blob.bytes)?;
        }
        let digest = manifest.descriptor.digest().to_string();
        Ok((tar.into_inner()?, digest))
    }

    fn configuration(&self, layer: &Blob) -> Result<Vec<u8>> {
        let mut config = ConfigBuilder::default()
            .env(["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()])
            .entrypoint(self.entrypoint.clone());
        if !self.command.is_empty() {
            config = config.cmd(self.command.clone());
        }
        if !self.user.is_empty() {
            config = config.user(&self.user);
        }
        if !self.labels.is_empty() {
            config = config.labels(self.labels.clone().into_iter().collect::<HashMap<_, _>>());
        }
        let root = RootFsBuilder::default()
            .typ("layers")
            .diff_ids([layer.descriptor.digest().to_string()])
            .build()?;
        let configuration = ImageConfigurationBuilder::default()
            .architecture(Arch::default())
            .os(Os::Linux)
            .config(config.build()?)
            .rootfs(root)
            .build()?;
        json(&configuration)
    }
}

/// JSON with sorted keys: the model's maps have a random order.
fn json(value: &impl Serialize) -> Result<Vec<u8>> {
    Ok(sorted(serde_json::to_value(value)?)
        .to_string()
        .into_bytes())
}

fn sorted(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let map: BTreeMap<_, _> = map
                .into_iter()
                .map(|(key, value)| (key, sorted(value)))
                .collect();
            map.into_iter().collect()
        }
        Value::Array(values) => values.into_iter().map(sorted).collect(),
        other => other,
    }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn image() -> Image {
        let mut layer = Layer::with_merged_usr();
        layer.file("/usr/bin/tool", b"tool".to_vec(), 0o755);
        layer.file("/etc/passwd", b"root:x:0:0::/:\n".to_vec(), 0o644);
        Image {
            name: "localhost/tool:dev".into(),
            entrypoint: vec!["/usr/bin/tool".into()],
            command: vec![],
            user: "65532:65532".into(),
            labels: [
                ("org.opencontainers.image.title".into(), "tool".into()),
                ("org.opencontainers.image.version".into(), "1.2.3".into()),
            ]
            .into(),
            layer,
        }
    }

    fn entries(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut archive = tar::Archive::new(archive);
        let read = |entry: std::io::Result<tar::Entry<'_, &[u8]>>| {
            let mut entry = entry.unwrap();
            let mut bytes = vec![];
            entry.read_to_end(&mut bytes).unwrap();
            (entry.path().unwrap().display().to_string(), bytes)
        };
        archive.entries().unwrap().map(read).collect()
    }

    fn json(entries: &BTreeMap<String, Vec<u8>>, digest: &Value) -> Value {
        let path = format!("blobs/{}", digest.as_str().unwrap().replace(':', "/"));
        let bytes = &entries[&path];
        assert_eq!(
            path,
            format!("blobs/sha256/{}", sha256(bytes)),
            "a blob's file name is its digest"
        );
        serde_json::from_slice(bytes).unwrap()
    }

    #[test]
    fn every_blob_is_reachable_from_index() {
        let (archive, digest) = image().archive().unwrap();
        let entries = entries(&archive);
        assert_eq!(entries["oci-layout"], br#"{"imageLayoutVersion":"1.0.0"}"#);
        let index: Value = serde_json::from_slice(&entries["index.json"]).unwrap();
        assert_eq!(
            index["manifests"][0]["annotations"]["io.containerd.image.name"],
            "localhost/tool:dev"
        );
        assert_eq!(index["manifests"][0]["digest"], *digest);
        let manifest = json(&entries, &index["manifests"][0]["digest"]);
        let config = json(&entries, &manifest["config"]["digest"]);
        assert_eq!(config["config"]["Entrypoint"][0], "/usr/bin/tool");
        assert_eq!(config["config"]["User"], "65532:65532");
        let labels = &config["config"]["Labels"];
        assert_eq!(labels["org.opencontainers.image.version"], "1.2.3");
        assert_eq!(
            config["rootfs"]["diff_ids"][0],
            manifest["layers"][0]["digest"]
        );
    }

    #[test]
    fn same_files_give_same_archive() {
        assert_eq!(image().archive().unwrap(), image().archive().unwrap());
    }

    #[test]
    fn writes_archive_atomically() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tool.tar");
        let digest = image().write(&file).unwrap();
        let archive = image().archive().unwrap();
        assert_eq!((fs::read(&file).unwrap(), digest), archive);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
