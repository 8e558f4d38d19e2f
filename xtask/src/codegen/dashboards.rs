//! `deploy/helm/drava/files/dashboards`: Grafana dashboards, from the tables in [`tables`].

use serde_json::{Value, json};

pub(crate) mod tables;

use tables::{Dashboard, Panel, View};

/// Directory below the repository root.
const DIRECTORY: &str = "deploy/helm/drava/files/dashboards";
/// Width of a dashboard in grid units.
const WIDTH: u32 = 24;
/// Height of a panel in grid units.
const HEIGHT: u32 = 8;
/// Oldest version of Grafana whose schema the dashboards have.
const SCHEMA_VERSION: u32 = 39;

/// Returns path and text of each dashboard.
pub(crate) fn files() -> Vec<(String, String)> {
    let file = |dashboard: &Dashboard| {
        let path = format!("{DIRECTORY}/{}.json", dashboard.name);
        // A map of strings and numbers is always valid JSON.
        let mut text = serde_json::to_string_pretty(&render(dashboard)).unwrap_or_default();
        text.push('\n');
        (path, text)
    };
    tables::ALL.iter().map(file).collect()
}

fn render(dashboard: &Dashboard) -> Value {
    let mut panels = Vec::new();
    let (mut x, mut y) = (0, 0);
    for (index, panel) in dashboard.panels.iter().enumerate() {
        if x + panel.width > WIDTH {
            (x, y) = (0, y + HEIGHT);
        }
        let position = json!({"x": x, "y": y, "w": panel.width, "h": HEIGHT});
        panels.push(render_panel(index + 1, panel, &position));
        x += panel.width;
    }
    let mut variables = vec![json!({
        "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus",
    })];
    variables.extend(dashboard.variables.iter().map(|variable| {
        json!({
            "name": variable.name, "label": variable.label, "type": "query",
            "datasource": data_source(),
            "query": {"query": format!("label_values({}, {})", variable.metric, variable.name), "refId": "variable"},
            "refresh": 2, "sort": 1, "multi": true, "includeAll": true, "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        })
    }));
    json!({
        "uid": format!("drava-{}", dashboard.name),
        "title": format!("drava / {}", dashboard.title),
        "tags": ["drava"],
        "editable": false,
        "schemaVersion": SCHEMA_VERSION,
        "refresh": "1m",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": variables},
        "annotations": {"list": []},
        "panels": panels,
    })
}

fn data_source() -> Value {
    json!({"type": "prometheus", "uid": "${datasource}"})
}

fn render_panel(id: usize, panel: &Panel, position: &Value) -> Value {
    let is_table = panel.view == View::Table;
    let targets: Vec<Value> = panel
        .queries
        .iter()
        .zip('A'..)
        .map(|((legend, query), letter)| {
            json!({
                "refId": letter.to_string(), "expr": query, "legendFormat": legend,
                "datasource": data_source(),
                "format": if is_table { "table" } else { "time_series" },
                "instant": panel.view != View::Graph, "range": panel.view == View::Graph,
            })
        })
        .collect();
    json!({
        "id": id, "title": panel.title, "description": panel.description,
        "type": panel.view.plugin(), "gridPos": position, "datasource": data_source(),
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": panel.view.options(),
    })
}

impl View {
    const fn plugin(self) -> &'static str {
        match self {
            Self::Graph => "timeseries",
            Self::Number => "stat",
            Self::Bars => "bargauge",
            Self::Table => "table",
        }
    }

    /// Returns all options that Grafana's schema requires, with its defaults where nothing else is said.
    fn options(self) -> Value {
        let values = json!({"calcs": ["lastNotNull"]});
        match self {
            Self::Graph => json!({
                "legend": {
                    "displayMode": "table", "placement": "bottom", "showLegend": true, "calcs": ["lastNotNull"],
                },
                "tooltip": {"mode": "multi", "sort": "desc"},
            }),
            Self::Number => json!({
                "reduceOptions": values, "orientation": "auto", "graphMode": "area", "colorMode": "value",
                "justifyMode": "auto", "textMode": "auto", "wideLayout": true, "showPercentChange": false,
                "percentChangeColorMode": "standard",
            }),
            Self::Bars => json!({
                "reduceOptions": values, "orientation": "horizontal", "displayMode": "gradient", "valueMode": "color",
                "namePlacement": "auto", "showUnfilled": true, "sizing": "auto", "minVizWidth": 8, "minVizHeight": 16,
                "maxVizHeight": 300,
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": false, "calcs": []},
            }),
            Self::Table => json!({"frameIndex": 0, "showHeader": true}),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn panels_do_not_overlap() {
        for dashboard in tables::ALL {
            let mut cells = BTreeSet::new();
            let rendered = render(dashboard);
            for panel in rendered["panels"].as_array().expect("panels") {
                let position = |name: &str| panel["gridPos"][name].as_u64().expect("a number");
                assert!(position("x") + position("w") <= u64::from(WIDTH), "{panel}");
                for x in position("x")..position("x") + position("w") {
                    assert!(cells.insert((x, position("y"))), "{panel}");
                }
            }
        }
    }

    #[test]
    fn queries_use_declared_variables_only() {
        for dashboard in tables::ALL {
            let names: Vec<String> = dashboard
                .variables
                .iter()
                .map(|variable| format!("${}\"", variable.name))
                .collect();
            for (_, query) in dashboard.panels.iter().flat_map(|panel| panel.queries) {
                let rest = names
                    .iter()
                    .fold((*query).to_owned(), |rest, name| rest.replace(name, "\""));
                assert!(!rest.contains('$'), "{query}");
            }
        }
    }
}
