//! Jobs of Volcano: one Job per task, whose pods form a gang.
//!
//! Names of pods and host names stay `<job>-<task>-<index>`, because the Jobs are indexed.

use std::collections::BTreeMap;

use drava_api::names;
use drava_compatibility::Settings;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Refused, Translated, metadata_beside, workload};

/// Retries of a job without `maxRetry`.
const DEFAULT_RETRIES: u64 = 3;

/// Scheduler of a job without `schedulerName`.
const VOLCANO: &str = "volcano";

/// Fields of a job with an equivalent; other ones are refused by name.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct JobSpec {
    min_available: Option<u64>,
    #[serde(default)]
    tasks: Vec<Task>,
    scheduler_name: Option<String>,
    queue: Option<String>,
    max_retry: Option<u64>,
    priority_class_name: Option<String>,
    ttl_seconds_after_finished: Option<i64>,
    #[serde(default)]
    policies: Vec<Policy>,
    #[serde(default)]
    plugins: BTreeMap<String, Option<Vec<String>>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Task {
    #[serde(default)]
    name: String,
    replicas: Option<u64>,
    min_available: Option<u64>,
    template: Value,
    #[serde(default)]
    policies: Vec<Policy>,
    max_retry: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct Policy {
    event: Option<String>,
    #[serde(default)]
    events: Vec<String>,
    action: String,
}

/// Translates a job. The objects are a Service for the plugin `svc`, ResourceClaimTemplates and Jobs.
pub(super) fn translate(object: &Value, settings: &Settings) -> Result<Translated, Refused> {
    let Some(name) = object["metadata"]["name"].as_str() else {
        return Err(Refused::one(
            "metadata.name: the Jobs of the tasks need a name; replace generateName",
        ));
    };
    let spec: JobSpec = serde_json::from_value(object["spec"].clone())
        .map_err(|error| Refused::one(format!("spec: no equivalent: {error}")))?;
    check(&spec)?;
    let mut result = Translated::default();
    if spec.plugins.contains_key("svc") {
        result.objects.push(service(object, name));
        result.changes.push(
            "spec.plugins[svc]: pods have the same host names, but no VC_*_HOSTS variables"
                .to_owned(),
        );
    }
    let mut requests_gpu = false;
    for (index, task) in spec.tasks.iter().enumerate() {
        let (objects, has_claim) = task_objects(
            object,
            name,
            &spec,
            index,
            task,
            settings,
            &mut result.changes,
        )?;
        requests_gpu |= has_claim;
        result.objects.extend(objects);
    }
    result.changes.extend(changes(&spec, requests_gpu));
    Ok(result)
}

/// Checks what has no equivalent.
fn check(spec: &JobSpec) -> Result<(), Refused> {
    let mut reasons = Vec::new();
    if spec.tasks.is_empty() {
        reasons.push("spec.tasks: the job has no task".to_owned());
    }
    let pods = pods(spec);
    if let Some(min) = spec.min_available.filter(|min| *min > pods) {
        reasons.push(format!(
            "spec.minAvailable: {min} exceeds the {pods} pods of the job, so that it would never start"
        ));
    }
    for plugin in spec.plugins.keys() {
        if !matches!(plugin.as_str(), "env" | "svc") {
            reasons.push(format!(
                "spec.plugins[{plugin}]: the plugin has no equivalent; set up what it provides in the pod template"
            ));
        }
    }
    let mut tasks: Vec<&str> = spec.tasks.iter().map(|task| task.name.as_str()).collect();
    tasks.sort_unstable();
    tasks.dedup();
    if tasks.len() != spec.tasks.len() {
        reasons.push("spec.tasks: two tasks have the same name".to_owned());
    }
    if reasons.is_empty() {
        Ok(())
    } else {
        Err(Refused(reasons))
    }
}

/// Returns the number of pods of the job.
fn pods(spec: &JobSpec) -> u64 {
    spec.tasks.iter().map(replicas).fold(0, u64::saturating_add)
}

fn replicas(task: &Task) -> u64 {
    task.replicas.unwrap_or(1)
}

/// Returns the objects of one task, and whether its pods request a GPU.
fn task_objects(
    owner: &Value,
    job: &str,
    spec: &JobSpec,
    index: usize,
    task: &Task,
    settings: &Settings,
    changes: &mut Vec<String>,
) -> Result<(Vec<Value>, bool), Refused> {
    let field = format!("spec.tasks[{index}].template");
    let mut pod = task.template.clone();
    if !pod["spec"].is_object() {
        return Err(Refused::one(format!(
            "{field}: the task has no pod template"
        )));
    }
    // Volcano's scheduler does not see the pods of a Job as one job.
    let scheduler = spec.scheduler_name.as_deref().unwrap_or(VOLCANO);
    let scheduler = pod["spec"]["schedulerName"].as_str().unwrap_or(scheduler);
    if scheduler == VOLCANO {
        if let Some(spec) = pod["spec"].as_object_mut() {
            spec.remove("schedulerName");
        }
    } else {
        let scheduler = scheduler.to_owned();
        set(&mut pod, &["spec", "schedulerName"], json!(scheduler));
    }
    let (claim, warnings) = workload::claim(&mut pod, &field, owner, settings)?;
    changes.extend(warnings);
    let min = spec.min_available.unwrap_or_else(|| pods(spec));
    // A single pod is no gang.
    if min > 1 {
        let gang = [
            (names::GANG_ANNOTATION, json!(job)),
            (names::GANG_MIN_ANNOTATION, json!(min.to_string())),
        ];
        for (name, value) in gang {
            set(&mut pod, &["metadata", "annotations", name], value);
        }
    }
    if let Some(class) = &spec.priority_class_name
        && pod["spec"].get("priorityClassName").is_none()
    {
        set(&mut pod, &["spec", "priorityClassName"], json!(class));
    }
    if spec.plugins.contains_key("svc") {
        set(&mut pod, &["spec", "subdomain"], json!(job));
        set(&mut pod, &["metadata", "labels", JOB_LABEL], json!(job));
    }
    if spec.plugins.contains_key("env") {
        add_index(&mut pod);
    }
    let policy = &pod["spec"]["restartPolicy"];
    if !matches!(policy.as_str(), Some("OnFailure" | "Never")) {
        set(&mut pod, &["spec", "restartPolicy"], json!("OnFailure"));
        changes.push(format!(
            "{field}.spec.restartPolicy: becomes OnFailure, because pods of a Job end"
        ));
    }
    let name = if task.name.is_empty() {
        job.to_owned()
    } else {
        format!("{job}-{}", task.name)
    };
    let mut metadata = metadata_beside(owner, &name);
    if let Some(labels) = owner["metadata"].get("labels") {
        metadata["labels"] = labels.clone();
    }
    let replicas = replicas(task);
    let mut job = json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": replicas,
            "parallelism": replicas,
            "backoffLimit": task.max_retry.or(spec.max_retry).unwrap_or(DEFAULT_RETRIES),
            "template": pod,
        },
    });
    if let Some(ttl) = spec.ttl_seconds_after_finished {
        job["spec"]["ttlSecondsAfterFinished"] = json!(ttl);
    }
    let has_claim = claim.is_some();
    let mut objects = Vec::from_iter(claim);
    objects.push(job);
    Ok((objects, has_claim))
}

/// Label of the pods behind the Service.
const JOB_LABEL: &str = "gpu.drava.dev/volcano-job";

/// Headless Service of the plugin `svc`.
fn service(owner: &Value, job: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_beside(owner, job),
        "spec": {"clusterIP": "None", "selector": {(JOB_LABEL): job}},
    })
}

/// Adds the variables of the plugin `env`.
fn add_index(pod: &mut Value) {
    let field = "metadata.annotations['batch.kubernetes.io/job-completion-index']";
    for list in ["initContainers", "containers"] {
        let containers = pod["spec"].get_mut(list).and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten() {
            let variables = ["VC_TASK_INDEX", "VK_TASK_INDEX"]
                .map(|name| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}));
            match container.get_mut("env").and_then(Value::as_array_mut) {
                Some(env) => env.extend(variables),
                None => set(container, &["env"], json!(variables)),
            }
        }
    }
}

/// Sets a member, with the objects on its path.
fn set(object: &mut Value, path: &[&str], value: Value) {
    let mut target = object;
    for name in path {
        if !target.is_object() {
            *target = json!({});
        }
        let Some(members) = target.as_object_mut() else {
            return;
        };
        target = members.entry(*name).or_insert(Value::Null);
    }
    *target = value;
}

/// Returns the changes of meaning of the job.
fn changes(spec: &JobSpec, requests_gpu: bool) -> Vec<String> {
    let mut changes = Vec::new();
    if spec.tasks.len() > 1 {
        changes.push(format!(
            "spec.tasks: become {} Jobs, which end and are deleted separately",
            spec.tasks.len()
        ));
    }
    if !requests_gpu {
        changes.push(
            "the job requests no GPU; drava orders its pods only as members of a gang, and has no queue for CPU and memory"
                .to_owned(),
        );
    }
    if let Some(queue) = spec.queue.as_deref().filter(|queue| *queue != "default") {
        changes.push(format!(
            "spec.queue: limits and weight of queue {queue:?} do not apply; limit the namespace with a ResourceQuota or \
             GpuQuota"
        ));
    }
    if spec.tasks.iter().any(|task| task.min_available.is_some()) {
        changes.push(
            "spec.tasks[*].minAvailable: only the minimum of the job counts, over the pods of all tasks".to_owned(),
        );
    }
    let policies = spec
        .policies
        .iter()
        .chain(spec.tasks.iter().flat_map(|task| &task.policies));
    for policy in policies {
        let events = policy.event.iter().chain(&policy.events);
        let events = events.map(String::as_str).collect::<Vec<_>>().join(", ");
        changes.push(format!(
            "spec.policies: the action {} after {events} does not happen; each Job replaces failed and evicted pods",
            policy.action
        ));
    }
    changes
}
