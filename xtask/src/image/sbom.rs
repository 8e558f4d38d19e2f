//! Software bill of materials of an image: the crates that its programs are built from, in CycloneDX 1.6.
//!
//! Without a serial number and a time, so that the same sources give the same file.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use drava_cluster::process::{self, Limit};
use serde_json::{Value, json};

/// Output of `cargo metadata` for the target of the images.
///
/// # Errors
/// When cargo cannot resolve the workspace.
pub(super) fn metadata() -> Result<Value> {
    let mut cargo = drava_cluster::cargo_command();
    cargo.args(["metadata", "--locked", "--format-version", "1"]);
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    cargo.args(["--filter-platform", &target]);
    let output = process::output(cargo.stdin(Stdio::null()), Limit::REQUEST)?;
    ensure!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    serde_json::from_slice(&output.stdout).context("read the output of cargo metadata")
}

/// The bill of `component`, such as an image, whose programs are the packages `roots`; `kind` is its type in CycloneDX, and
/// `metadata` the output of `cargo metadata`. It lists the normal dependencies: those of builds and tests are not in it.
///
/// # Errors
/// When the metadata lacks a package.
pub(super) fn bill(component: &str, kind: &str, roots: &[&str], metadata: &Value) -> Result<Value> {
    let packages: BTreeMap<&str, &Value> = items(&metadata["packages"])
        .filter_map(|package| Some((package["id"].as_str()?, package)))
        .collect();
    let nodes: BTreeMap<&str, &Value> = items(&metadata["resolve"]["nodes"])
        .filter_map(|node| Some((node["id"].as_str()?, node)))
        .collect();
    let mut pending = Vec::new();
    for root in roots {
        let found = packages
            .iter()
            .find(|(_, package)| package["name"] == **root && package["source"].is_null());
        pending.push(*found.with_context(|| format!("no package {root}"))?.0);
    }
    let mut seen = BTreeSet::new();
    let mut components = BTreeMap::new();
    while let Some(id) = pending.pop() {
        if !seen.insert(id) {
            continue;
        }
        let package = packages
            .get(id)
            .with_context(|| format!("no package {id}"))?;
        let library = library(package);
        components.insert(library["bom-ref"].to_string(), library);
        let node = nodes.get(id).with_context(|| format!("no node {id}"))?;
        pending.extend(normal_dependencies(node));
    }
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {
            "type": kind,
            "name": component,
            "version": env!("CARGO_PKG_VERSION"),
        }},
        "components": components.into_values().collect::<Vec<_>>(),
    }))
}

fn library(package: &Value) -> Value {
    let (name, version) = (&package["name"], &package["version"]);
    let url = format!(
        "pkg:cargo/{}@{}",
        name.as_str().unwrap_or_default(),
        version.as_str().unwrap_or_default()
    );
    let mut component = json!({
        "type": "library",
        "bom-ref": url,
        "name": name,
        "version": version,
    });
    if !package["source"].is_null() {
        component["purl"] = json!(url);
    }
    if let Some(license) = package["license"].as_str() {
        // Old crates separate alternatives by a slash.
        component["licenses"] = json!([{"expression": license.replace('/', " OR ")}]);
    }
    component
}

/// Packages that `node` needs at run time.
fn normal_dependencies(node: &Value) -> impl Iterator<Item = &str> {
    items(&node["deps"])
        .filter(|dependency| items(&dependency["dep_kinds"]).any(|kind| kind["kind"].is_null()))
        .filter_map(|dependency| dependency["pkg"].as_str())
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(bill: &Value) -> Vec<&str> {
        items(&bill["components"])
            .filter_map(|component| component["name"].as_str())
            .collect()
    }

    #[test]
    fn lists_crates_that_are_in_the_program_only() {
        let metadata = json!({
            "packages": [
                {"id": "tool", "name": "tool", "version": "1.0.0", "source": null, "license": "Apache-2.0"},
                {"id": "used", "name": "used", "version": "2.0.0", "source": "registry", "license": "MIT/Apache-2.0"},
                {"id": "deep", "name": "deep", "version": "3.0.0", "source": "registry"},
                {"id": "tests", "name": "tests", "version": "4.0.0", "source": "registry"},
            ],
            "resolve": {"nodes": [
                {"id": "tool", "deps": [
                    {"pkg": "used", "dep_kinds": [{"kind": "dev"}, {"kind": null}]},
                    {"pkg": "tests", "dep_kinds": [{"kind": "dev"}]},
                ]},
                {"id": "used", "deps": [{"pkg": "deep", "dep_kinds": [{"kind": null}]}]},
                {"id": "deep", "deps": []},
                {"id": "tests", "deps": []},
            ]},
        });
        let bill = bill("image", "container", &["tool"], &metadata).unwrap();
        assert_eq!(names(&bill), ["deep", "tool", "used"]);
        assert_eq!(
            bill["components"][2],
            json!({
                "type": "library",
                "bom-ref": "pkg:cargo/used@2.0.0",
                "name": "used",
                "version": "2.0.0",
                "purl": "pkg:cargo/used@2.0.0",
                "licenses": [{"expression": "MIT OR Apache-2.0"}],
            })
        );
        assert!(super::bill("image", "container", &["absent"], &metadata).is_err());
    }
}
