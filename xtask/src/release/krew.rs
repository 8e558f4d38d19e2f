//! The manifest of `kubectl drava` for krew, the package manager of kubectl plugins.

/// The archive of the plugin.
pub(super) struct Plugin<'a> {
    pub(super) version: &'a str,
    pub(super) homepage: &'a str,
    /// Address of the archive.
    pub(super) uri: &'a str,
    pub(super) sha256: &'a str,
    pub(super) architecture: &'a str,
}

impl Plugin<'_> {
    pub(super) fn manifest(&self) -> String {
        let Self {
            version,
            homepage,
            uri,
            sha256,
            architecture,
        } = self;
        format!(
            "\
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: drava
spec:
  version: v{version}
  homepage: {homepage}
  shortDescription: GPUs, their shares, and why pods wait
  description: |
    Shows which claims have which GPUs and shares of GPUs, explains why a pod waits, finds faults of an
    installation of drava, and takes GPUs out of service.
  platforms:
    - selector:
        matchLabels:
          os: linux
          arch: {architecture}
      uri: {uri}
      sha256: {sha256}
      bin: kubectl-drava
      files:
        - from: kubectl-drava
          to: .
        - from: LICENSE
          to: .
"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_archive_with_checksum() {
        let plugin = Plugin {
            version: "1.2.3",
            homepage: "https://example.com/drava",
            uri: "https://example.com/v1.2.3/kubectl-drava.tar.gz",
            sha256: "00ff",
            architecture: "arm64",
        };
        let manifest: serde_json::Value = serde_saphyr::from_str(&plugin.manifest()).unwrap();
        // krew finds the manifest and the program by this name.
        assert_eq!(manifest["metadata"]["name"], "drava");
        let spec = &manifest["spec"];
        assert_eq!(spec["version"], "v1.2.3");
        let platform = &spec["platforms"][0];
        assert_eq!(platform["selector"]["matchLabels"]["arch"], "arm64");
        assert_eq!(platform["uri"], plugin.uri);
        assert_eq!(platform["sha256"], "00ff");
        assert_eq!(platform["bin"], platform["files"][0]["from"]);
        // krew's index refuses longer ones.
        assert!(spec["shortDescription"].as_str().unwrap().len() <= 50);
    }
}
