//! ConfigMaps of device plugins and schedulers become node profiles and policies; other ones pass.

use serde_json::{Map, Value};

use super::{Refused, Translated, device_config, node_config, scheduler_config};

/// Translates a ConfigMap. `defaults` are the amounts of all nodes.
///
/// # Errors
/// When the settings cannot be read.
pub(super) fn translate(
    object: &Value,
    defaults: &Map<String, Value>,
) -> Result<Translated, Refused> {
    let mut translated = Translated::default();
    let of_plugin = device_config::translate(object, &mut translated);
    let of_nodes = node_config::translate(object, defaults, &mut translated)?;
    let of_scheduler = scheduler_config::translate(object, &mut translated)?;
    if of_plugin || of_nodes || of_scheduler {
        Ok(translated)
    } else {
        Ok(Translated::unchanged(object.clone()))
    }
}
