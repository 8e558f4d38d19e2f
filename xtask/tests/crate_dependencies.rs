//! Allowed dependencies between crates, checked against `cargo metadata`.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

/// Product crates and the simulated machine, each with the crates of the workspace that it may depend on.
const ALLOWED: [(&str, &[&str]); 17] = [
    ("drava-api", &[]),
    ("drava-compatibility", &["drava-api"]),
    ("drava-connection", &[]),
    ("drava-cdi", &[]),
    ("drava-cdi-hook", &["drava-cdi"]),
    ("drava-vgpu-abi", &[]),
    ("libvgpu", &["drava-vgpu-abi"]),
    ("drava-nvml", &[]),
    (
        "drava-dra-driver",
        &[
            "drava-api",
            "drava-connection",
            "drava-cdi",
            "drava-vgpu-abi",
            "drava-nvml",
        ],
    ),
    ("drava-cel", &["drava-api"]),
    ("drava-allocator", &["drava-api", "drava-cel"]),
    (
        "drava-explanation",
        &["drava-api", "drava-allocator", "drava-compatibility"],
    ),
    (
        "drava-controller",
        &[
            "drava-api",
            "drava-compatibility",
            "drava-connection",
            "drava-allocator",
            "drava-explanation",
        ],
    ),
    (
        "kubectl-drava",
        &[
            "drava-api",
            "drava-compatibility",
            "drava-allocator",
            "drava-explanation",
        ],
    ),
    // Simulates an NVIDIA machine for any program, so it knows nothing of drava.
    ("simulator-machine", &[]),
    ("simulator-nvml", &["simulator-machine"]),
    ("simulator-cuda", &["simulator-machine"]),
];

/// Pairs that must not depend on each other even in tests: they communicate through the API server and share `drava-api`.
const SEPARATE: [(&str, &str); 2] = [
    ("drava-controller", "drava-dra-driver"),
    ("drava-dra-driver", "drava-controller"),
];

/// Banned crates: unmaintained YAML, and TLS stacks other than rustls on ring.
const BANNED: [&str; 6] = [
    "serde_yaml",
    "serde_yml",
    "openssl-sys",
    "native-tls",
    "aws-lc-rs",
    "aws-lc-sys",
];

/// Forbidden dependencies in `metadata`.
fn violations(metadata: &Value) -> Vec<String> {
    let packages = array(metadata, "packages");
    let members: Vec<&Value> = packages
        .iter()
        .filter(|package| package["source"].is_null())
        .collect();
    let is_member = |name: &str| members.iter().any(|member| member["name"] == name);
    let mut found = vec![];
    for member in &members {
        let (name, manifest) = (text(member, "name"), text(member, "manifest_path"));
        let root = text(metadata, "workspace_root");
        let folder = Path::new(manifest)
            .strip_prefix(root)
            .unwrap_or(Path::new(manifest));
        let is_test = folder.starts_with("tests") || folder.starts_with("xtask");
        let allowed = ALLOWED
            .iter()
            .find(|(from, _)| *from == name)
            .map(|(_, to)| *to);
        match (is_test, allowed) {
            (false, Some(allowed)) => {
                found.extend(
                    dependencies(member)
                        .filter(|(to, _)| is_member(to))
                        .filter_map(|(to, is_dev)| {
                            // Tests of a product crate may depend on tests/* and simulator/*.
                            let is_allowed = if is_dev {
                                to != "xtask"
                            } else {
                                allowed.contains(&to)
                            };
                            let is_allowed = is_allowed && !SEPARATE.contains(&(name, to));
                            (!is_allowed).then(|| format!("{name} must not depend on {to}"))
                        }),
                );
            }
            (false, None) => found.push(format!(
                "{name} is a product crate without allowed dependencies; add it to this test and to the architecture"
            )),
            (true, Some(_)) => found.push(format!(
                "{name} is a product crate and must not be in {}",
                folder.display()
            )),
            (true, None) => {}
        }
    }
    found.extend(
        packages
            .iter()
            .map(|package| text(package, "name"))
            .filter(|name| BANNED.contains(name))
            .map(|name| {
                format!("{name} is banned; `cargo tree --invert {name}` shows the dependents")
            }),
    );
    found
}

/// Names of a package's dependencies, and whether each is a dev-dependency.
fn dependencies(package: &Value) -> impl Iterator<Item = (&str, bool)> {
    array(package, "dependencies")
        .iter()
        .map(|dependency| (text(dependency, "name"), dependency["kind"] == "dev"))
}

fn array<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key]
        .as_array()
        .unwrap_or_else(|| panic!("no array {key}"))
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key]
        .as_str()
        .unwrap_or_else(|| panic!("no text {key}"))
}

#[test]
fn workspace_has_only_allowed_dependencies() {
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version=1",
            "--locked",
            "--manifest-path",
        ])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = violations(&metadata);
    assert!(found.is_empty(), "{}", found.join("\n"));
    for (name, _) in ALLOWED {
        let is_member = array(&metadata, "packages")
            .iter()
            .any(|package| package["name"] == name);
        assert!(is_member, "{name} is not in the workspace");
    }
}

fn package(name: &str, folder: &str, dependencies: &Value) -> Value {
    json!({"name": name, "source": null, "manifest_path": format!("/w/{folder}/Cargo.toml"), "dependencies": dependencies})
}

fn violations_of(packages: &Value) -> Vec<String> {
    violations(&json!({"workspace_root": "/w", "packages": packages}))
}

#[test]
fn reports_forbidden_dependency() {
    let api = package(
        "drava-api",
        "api",
        &json!([{"name": "drava-allocator", "kind": null}]),
    );
    let allocator = package(
        "drava-allocator",
        "controller/allocator",
        &json!([{"name": "drava-api", "kind": null}]),
    );
    assert_eq!(
        violations_of(&json!([api, allocator])),
        ["drava-api must not depend on drava-allocator"]
    );
}

#[test]
fn allows_test_crates_as_dev_dependencies_only() {
    let simulator = package("simulator-machine", "simulator/machine", &json!([]));
    let depends = |kind: Value| {
        package(
            "drava-nvml",
            "dra-driver/nvml",
            &json!([{"name": "simulator-machine", "kind": kind}]),
        )
    };
    assert_eq!(
        violations_of(&json!([simulator, depends(json!("dev"))])),
        [""; 0]
    );
    for kind in [Value::Null, json!("build")] {
        assert_eq!(
            violations_of(&json!([simulator, depends(kind)])),
            ["drava-nvml must not depend on simulator-machine"]
        );
    }
}

#[test]
fn separates_controller_and_driver_in_tests() {
    let controller = package(
        "drava-controller",
        "controller",
        &json!([{"name": "drava-dra-driver", "kind": "dev"}]),
    );
    let driver = package("drava-dra-driver", "dra-driver", &json!([]));
    assert_eq!(
        violations_of(&json!([controller, driver])),
        ["drava-controller must not depend on drava-dra-driver"]
    );
}

#[test]
fn reports_banned_crates_and_unknown_members() {
    let banned = json!({"name": "openssl-sys", "source": "registry+https://github.com/rust-lang/crates.io-index", "dependencies": []});
    let unknown = package("drava-extra", "extra", &json!([]));
    let found = violations_of(&json!([banned, unknown]));
    assert!(
        found
            .iter()
            .any(|line| line.starts_with("openssl-sys is banned")),
        "{found:?}"
    );
    assert!(
        found
            .iter()
            .any(|line| line
                .starts_with("drava-extra is a product crate without allowed dependencies")),
        "{found:?}"
    );
}
