//! The commands of the examples' READMEs name objects of their manifests, in an order that works, and remove what they create.

#![allow(
    clippy::expect_used,
    reason = "the files of the repository are there, or the test fails"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Kinds in commands, with the kinds of manifests.
const KINDS: [(&str, &str); 12] = [
    ("pod", "Pod"),
    ("pods", "Pod"),
    ("job", "Job"),
    ("deployment", "Deployment"),
    ("namespace", "Namespace"),
    ("gpunodeprofile", "GpuNodeProfile"),
    ("resourcequota", "ResourceQuota"),
    ("placementexplanation", "PlacementExplanation"),
    ("resourceclaim", "ResourceClaim"),
    ("gpupolicy", "GpuPolicy"),
    ("horizontalpodautoscaler", "HorizontalPodAutoscaler"),
    ("scaledobject", "ScaledObject"),
];

/// Verbs with an object of a kind: `describe pod a`, or `wait pod/a`.
const OF_KIND: [&str; 7] = [
    "wait", "status", "scale", "describe", "delete", "get", "explain",
];

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is below the repository root")
        .join("deploy/examples")
}

/// Kind and name.
type Object = (String, String);

/// Returns the objects of a manifest with their namespaces, and the pods that its workloads create.
fn objects(manifest: &Path) -> (Vec<(Object, Option<String>)>, Vec<Object>) {
    let text = fs::read_to_string(manifest).expect("a manifest that the README applies");
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
    let name = |object: &Value| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (text(&object["kind"]), text(&object["metadata"]["name"]))
    };
    let namespace = |object: &Value| {
        let namespace = object["metadata"]["namespace"].as_str();
        namespace.map(str::to_owned)
    };
    let found = documents
        .iter()
        .map(|object| (name(object), namespace(object)));
    let found = found.collect();
    let mut pods = Vec::new();
    for document in &documents {
        // The pods of an indexed Job have names of their own.
        let count = match document["kind"].as_str() {
            Some("Job") if document["spec"]["completionMode"] == "Indexed" => {
                document["spec"]["completions"].as_u64()
            }
            Some("StatefulSet") => document["spec"]["replicas"].as_u64(),
            _ => None,
        };
        let (_, workload) = name(document);
        pods.extend(
            (0..count.unwrap_or(0)).map(|index| ("Pod".to_owned(), format!("{workload}-{index}"))),
        );
    }
    (found, pods)
}

/// State of the cluster after the commands so far.
#[derive(Default)]
struct Walk {
    /// Objects with their namespaces.
    objects: BTreeMap<Object, Option<String>>,
    /// Pods of workloads.
    pods: BTreeSet<Object>,
    namespaces: BTreeSet<String>,
    /// Labels of objects that were there before: kind, name and key.
    labels: BTreeSet<[String; 3]>,
    /// Pods and Deployments that run, and explanations that have an answer.
    running: BTreeSet<String>,
}

impl Walk {
    /// Follows a command. Returns what is wrong with it.
    fn follow(&mut self, example: &Path, command: &str) -> Option<String> {
        let command = command.split(" #").next().unwrap_or_default();
        let words: Vec<&str> = command.split_whitespace().collect();
        let value = |option: &str| {
            let position = words.iter().position(|word| *word == option)?;
            words.get(position + 1).copied()
        };
        if let Some(namespace) =
            value("-n").filter(|namespace| !self.namespaces.contains(*namespace))
        {
            return Some(format!("namespace {namespace} does not exist"));
        }
        if words.starts_with(&["kubectl", "create", "namespace"]) {
            self.namespaces
                .extend(words.last().map(|name| (*name).to_owned()));
            return None;
        }
        let files = words.windows(2).filter(|pair| pair[0] == "-f");
        let files: Vec<PathBuf> = files.map(|pair| example.join(pair[1])).collect();
        match words.get(1).copied() {
            Some("apply") => {
                for file in files {
                    let (objects, pods) = objects(&file);
                    for ((kind, name), namespace) in objects {
                        if kind == "Namespace" {
                            self.namespaces.insert(name.clone());
                        }
                        let namespace = namespace.or_else(|| value("-n").map(str::to_owned));
                        self.objects.insert((kind, name), namespace);
                    }
                    self.pods.extend(pods);
                }
                return None;
            }
            Some("delete") if !files.is_empty() => {
                let may_miss = words.contains(&"--ignore-not-found");
                let objects = files.iter().flat_map(|file| objects(file).0);
                let objects: Vec<Object> = objects.map(|(object, _)| object).collect();
                let missing = objects.iter();
                let missing = missing.filter(|object| !self.objects.contains_key(*object));
                let missing: Vec<Object> = missing.cloned().collect();
                for object in &objects {
                    self.delete(object);
                }
                return (!missing.is_empty() && !may_miss)
                    .then(|| format!("not found: {missing:?}; add --ignore-not-found"));
            }
            Some("label") => {
                self.label(&words);
            }
            _ => {}
        }
        self.names(&words)
            .into_iter()
            .find_map(|(kind, name)| self.check(&words, kind, name))
    }

    /// Deletes an object, with those in it.
    fn delete(&mut self, object: &Object) {
        let (kind, name) = object;
        if kind == "Namespace" {
            self.objects
                .retain(|_, namespace| namespace.as_ref() != Some(name));
            self.namespaces.remove(name);
        }
        self.objects.remove(object);
        self.pods.remove(object);
    }

    /// Follows a label that is set or removed.
    fn label(&mut self, words: &[&str]) {
        let [_, _, kind, name, labels @ ..] = words else {
            return;
        };
        // The others are deleted with their labels.
        let was_there = *kind == "node" || *name == "default";
        for label in labels.iter().filter(|_| was_there) {
            let of = |key: &str| [kind, *name, key].map(str::to_owned);
            match (label.split_once('='), label.strip_suffix('-')) {
                (Some((key, _)), _) => self.labels.insert(of(key)),
                (None, Some(key)) => self.labels.remove(&of(key)),
                (None, None) => continue,
            };
        }
    }

    /// Returns what the commands have created and not removed.
    fn remains(&self) -> Vec<String> {
        let objects = self.objects.keys();
        let objects = objects.map(|(kind, name)| format!("{kind} {name}"));
        let namespaces = self.namespaces.iter();
        let namespaces = namespaces.map(|name| format!("Namespace {name}"));
        let labels = self.labels.iter();
        let labels = labels.map(|[kind, name, key]| format!("label {key} of {kind} {name}"));
        objects.chain(namespaces).chain(labels).collect()
    }

    /// Returns the objects that a command names, each with its kind in manifests.
    fn names<'a>(&self, words: &[&'a str]) -> Vec<(&'static str, &'a str)> {
        let kind_of = |word: &str| {
            let known = KINDS.iter().find(|(kind, _)| *kind == word);
            known.map(|(_, kind)| *kind)
        };
        let mut found = Vec::new();
        let mut kind = None;
        let mut is_value = false;
        let before = words
            .iter()
            .position(|word| *word == "--")
            .unwrap_or(words.len());
        let direct = ["exec", "logs", "resize", "suspend", "resume"];
        let verb = words
            .iter()
            .find(|word| direct.contains(word) || OF_KIND.contains(word));
        if verb.is_some_and(|verb| direct.contains(verb)) {
            kind = Some("Pod");
        }
        for word in words.iter().take(before).skip(1) {
            if std::mem::take(&mut is_value) || Some(word) == verb || *word == "drava" {
                continue;
            }
            if word.starts_with('-') {
                is_value = [
                    "-n",
                    "-c",
                    "-l",
                    "-o",
                    "-f",
                    "--memory",
                    "--cores",
                    "--as",
                    "--prometheus",
                    "--since",
                    "--replicas",
                    "--field-selector",
                ]
                .contains(word);
            } else if let Some((of, name)) = word.split_once('/') {
                found.extend(kind_of(of).map(|kind| (kind, name)));
            } else if let Some(of) = kind_of(word) {
                kind = Some(of);
            } else if let Some(kind) = kind.filter(|_| verb.is_some()) {
                found.push((kind, *word));
            }
        }
        found
    }

    fn check(&mut self, words: &[&str], kind: &str, name: &str) -> Option<String> {
        let object = (kind.to_owned(), name.to_owned());
        let exists = self.objects.contains_key(&object)
            || self.pods.contains(&object)
            || kind == "Namespace" && (name == "default" || self.namespaces.contains(name));
        if !exists && !name.starts_with('<') && !name.contains('=') {
            return Some(format!("no manifest that was applied has {kind} {name}"));
        }
        match words.get(1).copied() {
            Some("wait" | "rollout") => {
                self.running.insert(name.to_owned());
            }
            Some("delete") => {
                self.delete(&object);
            }
            Some("get") if kind == "PlacementExplanation" && !self.running.contains(name) => {
                return Some(format!("{name} may have no answer yet; wait for it"));
            }
            Some("exec" | "logs") if !self.running.contains(name) => {
                return Some(format!("{name} may not run yet; wait for it"));
            }
            Some("drava") if words.get(2) == Some(&"resize") && !self.running.contains(name) => {
                return Some(format!("{name} may not run yet; wait for it"));
            }
            _ => {}
        }
        None
    }
}

/// Returns the commands in the indented blocks of a README.
fn commands(readme: &str) -> impl Iterator<Item = &str> {
    let lines = readme.lines().filter_map(|line| line.strip_prefix("    "));
    lines.filter(|line| line.starts_with("kubectl "))
}

#[test]
fn commands_name_objects_that_exist_and_run() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for entry in fs::read_dir(examples()).expect("examples") {
        let example = entry.expect("an example").path();
        let readme = fs::read_to_string(example.join("README.md")).expect("a README");
        let mut walk = Walk::default();
        for command in commands(&readme) {
            count += 1;
            if let Some(why) = walk.follow(&example, command) {
                wrong.push(format!("{}: {command}: {why}", example.display()));
            }
        }
        for object in walk.remains() {
            let example = example.display();
            wrong.push(format!("{example}: {object} remains; delete it"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(count > 100, "{count} commands");
}

#[test]
fn finds_commands_that_fail() {
    let example = examples().join("quickstart");
    let mut walk = Walk::default();
    let mut follow = |command: &str| walk.follow(&example, command);
    assert!(
        follow("kubectl exec inference -- nvidia-smi").is_some(),
        "nothing is applied"
    );
    assert_eq!(follow("kubectl apply -f quickstart.yaml"), None);
    assert!(
        follow("kubectl exec inference -- nvidia-smi").is_some(),
        "it may not run"
    );
    assert!(follow("kubectl wait --for=condition=Ready pod/other --timeout=120s").is_some());
    assert_eq!(
        follow("kubectl wait --for=condition=Ready pod/inference --timeout=120s"),
        None
    );
    assert_eq!(follow("kubectl exec inference -- nvidia-smi"), None);
    assert_eq!(
        follow("kubectl drava explain pod distributed   # why"),
        None
    );
    assert!(follow("kubectl drava explain pod other").is_some());
    assert!(follow("kubectl delete pod inference other").is_some());
    assert!(
        follow("kubectl get pods -n research").is_some(),
        "no such namespace"
    );
    let again = follow("kubectl delete -f quickstart.yaml");
    assert!(
        again.is_some_and(|why| why.contains("inference")),
        "it is gone"
    );
}

#[test]
fn finds_what_commands_leave() {
    let example = examples().join("suspend");
    let mut walk = Walk::default();
    for command in [
        "kubectl create namespace team-a",
        "kubectl apply -n team-a -f suspend.yaml",
        "kubectl apply -f urgent.yaml",
        "kubectl label namespace default workload=notebooks",
        "kubectl label namespace team-a workload=notebooks",
    ] {
        assert_eq!(walk.follow(&example, command), None, "{command}");
    }
    assert_eq!(walk.follow(&example, "kubectl delete pod urgent"), None);
    assert_eq!(
        walk.follow(&example, "kubectl delete namespace team-a"),
        None
    );
    assert_eq!(
        walk.remains(),
        [
            "ResourceClaimTemplate urgent-gpu",
            "label workload of namespace default"
        ]
    );
    let end = "kubectl label namespace default workload-";
    assert_eq!(walk.follow(&example, end), None);
    assert_eq!(
        walk.follow(&example, "kubectl delete -f urgent.yaml --ignore-not-found"),
        None
    );
    assert!(walk.remains().is_empty());
}
