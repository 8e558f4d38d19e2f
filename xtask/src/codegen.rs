//! `cargo xtask codegen`: the checked-in generated files.
//!
//! The kubelet bindings of the node driver come from its own minimal `.proto` files (no protoc: protox parses them), the
//! pages of events, health and metrics from the tables in `drava-api`, the chart's custom resource definitions from its
//! types, and the pages of the charts from their values. Generated files are checked in, so that building the driver needs none of this; `--check` fails when one is stale.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

mod chart_values;
mod crd_reference;
mod crds;
mod events;
mod health;
mod metrics;

/// Command line of `cargo xtask codegen`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Change nothing; fail when a checked-in file is stale.
    #[arg(long)]
    check: bool,
}

/// One `.proto` file and its Rust file.
struct Binding {
    /// Path below `dra-driver/proto`.
    proto: &'static str,
    /// File below `dra-driver/src/kubelet/proto`.
    rust: &'static str,
    /// Protobuf package, which is also the name of the generator's file.
    package: &'static str,
    /// Rust module with the messages, where this package equals an older one on the wire. Then only the service is
    /// generated, and both versions share one set of types.
    messages_of: Option<&'static str>,
}

const BINDINGS: [Binding; 4] = [
    Binding {
        proto: "pluginregistration/v1.proto",
        rust: "registration.rs",
        package: "pluginregistration",
        messages_of: None,
    },
    Binding {
        proto: "dra/v1.proto",
        rust: "dra_v1.rs",
        package: "k8s.io.kubelet.pkg.apis.dra.v1",
        messages_of: None,
    },
    Binding {
        proto: "dra-health/v1.proto",
        rust: "health_v1.rs",
        package: "v1",
        messages_of: None,
    },
    Binding {
        proto: "dra-health/v1alpha1.proto",
        rust: "health_v1alpha1.rs",
        package: "v1alpha1",
        messages_of: Some("crate::kubelet::proto::health_v1"),
    },
];

/// Generates everything, or with `--check` compares it with what is checked in.
pub(crate) fn run(args: &Args) -> Result<()> {
    let Args { check } = args;
    let root = repository_root();
    let driver = root.join("dra-driver");
    let mut files = vec![
        (root.join(crd_reference::PATH), crd_reference::render()?),
        (root.join(events::PATH), events::render()),
        (root.join(health::PATH), health::render()),
        (root.join(metrics::PATH), metrics::render()),
    ];
    for (path, text) in crds::render()? {
        files.push((root.join(path), text));
    }
    for (path, text) in chart_values::render(&root)? {
        files.push((root.join(path), text));
    }
    for binding in &BINDINGS {
        let path = driver.join("src/kubelet/proto").join(binding.rust);
        files.push((path, generate(binding, &driver.join("proto"))?));
    }
    let mut stale = Vec::new();
    for (path, wanted) in files {
        if fs::read_to_string(&path).is_ok_and(|present| present == wanted) {
            continue;
        }
        if *check {
            stale.push(path.display().to_string());
        } else {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::write(&path, wanted).with_context(|| format!("write {}", path.display()))?;
            println!("wrote {}", path.display());
        }
    }
    if !stale.is_empty() {
        bail!(
            "stale generated files: {}; run `cargo xtask codegen`",
            stale.join(", ")
        );
    }
    Ok(())
}

/// Rust source of one binding.
fn generate(binding: &Binding, protos: &Path) -> Result<String> {
    let descriptors = protox::compile([binding.proto], [protos])
        .with_context(|| format!("parse {}", protos.join(binding.proto).display()))?;
    // The generator writes files only.
    let out = repository_root().join("target/codegen");
    fs::create_dir_all(&out).with_context(|| format!("create {}", out.display()))?;
    let mut builder = tonic_prost_build::configure()
        .out_dir(&out)
        .build_transport(false);
    if let Some(module) = binding.messages_of {
        builder = builder.extern_path(format!(".{}", binding.package), module);
    }
    builder
        .compile_fds(descriptors)
        .with_context(|| format!("generate bindings of {}", binding.proto))?;
    let generated = out.join(format!("{}.rs", binding.package));
    fs::read_to_string(&generated).with_context(|| format!("read {}", generated.display()))
}

fn repository_root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_path_buf()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Write as _;
    use std::process::Command;

    use super::*;

    const KUBELET_MODULE: &str = "k8s.io/kubelet@v0.37.1";

    /// What the wire format depends on, by full name: fields of messages, values of enums, methods of services.
    fn wire(file: &str, include: &Path) -> BTreeMap<String, String> {
        let set = protox::compile([file], [include]).unwrap();
        let mut facts = BTreeMap::new();
        for file in &set.file {
            let package = file.package();
            for message in &file.message_type {
                let name = format!("{package}.{}", message.name());
                facts.insert(format!("message {name}"), String::new());
                for (owner, field) in message
                    .field
                    .iter()
                    .map(|field| (name.clone(), field))
                    .chain(message.nested_type.iter().flat_map(|nested| {
                        let owner = format!("{name}.{}", nested.name());
                        nested.field.iter().map(move |field| (owner.clone(), field))
                    }))
                {
                    facts.insert(
                        format!("field {owner}#{}", field.number()),
                        format!(
                            "{} {:?} {:?} {} optional={}",
                            field.name(),
                            field.label(),
                            field.r#type(),
                            field.type_name(),
                            field.proto3_optional()
                        ),
                    );
                }
            }
            for r#enum in &file.enum_type {
                for value in &r#enum.value {
                    facts.insert(
                        format!("enum {package}.{}.{}", r#enum.name(), value.name()),
                        value.number().to_string(),
                    );
                }
            }
            for service in &file.service {
                for method in &service.method {
                    facts.insert(
                        format!("rpc {package}.{}/{}", service.name(), method.name()),
                        format!(
                            "({} stream={}) -> ({} stream={})",
                            method.input_type(),
                            method.client_streaming(),
                            method.output_type(),
                            method.server_streaming()
                        ),
                    );
                }
            }
        }
        facts
    }

    /// The API definitions of the kubelet module, which Go fetches into its cache. Reports `test` as skipped without Go.
    fn upstream(test: &str) -> Option<PathBuf> {
        let Ok(output) = Command::new("go")
            .args(["mod", "download", "-json", KUBELET_MODULE])
            .output()
        else {
            // `eprintln!` would be hidden for a test that passes.
            let line = format!("skipped: codegen::tests::{test}: no Go\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            return None;
        };
        let module: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let directory = module["Dir"]
            .as_str()
            .unwrap_or_else(|| panic!("cannot fetch {KUBELET_MODULE}: {module}"));
        Some(Path::new(directory).join("pkg/apis"))
    }

    #[test]
    fn own_protos_equal_kubelet_protos_on_the_wire() {
        let Some(upstream) = upstream("own_protos_equal_kubelet_protos_on_the_wire") else {
            return;
        };
        let own = repository_root().join("dra-driver/proto");
        for binding in &BINDINGS {
            let ours = wire(binding.proto, &own);
            let original = format!("{}/api.proto", binding.proto.trim_end_matches(".proto"));
            assert_eq!(ours, wire(&original, &upstream), "{}", binding.proto);
        }
    }

    #[test]
    fn checked_in_files_are_fresh() {
        run(&Args { check: true }).unwrap();
    }

    /// Premise of `messages_of`: the newer version has every field of the older version, with the same number.
    #[test]
    fn shared_messages_fit_both_versions() {
        let own = repository_root().join("dra-driver/proto");
        let newer = wire("dra-health/v1.proto", &own);
        for (key, fact) in wire("dra-health/v1alpha1.proto", &own) {
            let [key, fact] = [key, fact].map(|text| text.replace("v1alpha1.", "v1."));
            assert_eq!(newer.get(&key), Some(&fact), "{key}");
        }
    }
}
