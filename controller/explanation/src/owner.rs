//! Names of pods and gangs in texts: a user may know those of their own namespace, and no others.

/// Returns whether a reader of a namespace may know the name of an object, `namespace/name`.
#[must_use]
pub fn is_known(reader: &str, qualified: &str) -> bool {
    let namespace = qualified.split_once('/').map(|(namespace, _)| namespace);
    namespace == Some(reader)
}

/// Returns what a text says in place of the name of an object of another namespace.
pub(crate) fn hidden(kind: &str) -> String {
    format!("a {kind} of another namespace")
}

/// Returns how a text for a reader of a namespace names an object of a kind, `namespace/name`.
#[must_use]
pub fn name_for(reader: &str, kind: &str, qualified: &str) -> String {
    match is_known(reader, qualified) {
        true => format!("{kind} {qualified}"),
        false => hidden(kind),
    }
}

/// Returns how a text for a reader of a namespace names objects of a kind, each `namespace/name`: those of other namespaces as
/// their number, at the end.
#[must_use]
pub fn names_for<'a>(
    reader: &str,
    kind: &str,
    qualified: impl IntoIterator<Item = &'a str>,
) -> Vec<String> {
    let (known, others): (Vec<&str>, Vec<&str>) = qualified
        .into_iter()
        .partition(|qualified| is_known(reader, qualified));
    let others = match others.len() {
        0 => None,
        1 => Some(hidden(kind)),
        count => Some(format!("{count} {kind}s of other namespaces")),
    };
    known.into_iter().map(str::to_owned).chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_objects_of_the_own_namespace_only() {
        assert_eq!(name_for("a", "pod", "a/x"), "pod a/x");
        for other in ["b/x", "ab/x", "a-b/x", "x", ""] {
            assert_eq!(name_for("a", "gang", other), "a gang of another namespace");
        }
    }

    #[test]
    fn counts_objects_of_other_namespaces() {
        let names = |qualified: &[&str]| names_for("a", "pod", qualified.iter().copied());
        assert_eq!(names(&[]), [""; 0]);
        assert_eq!(
            names(&["b/x", "a/x"]),
            ["a/x", "a pod of another namespace"]
        );
        assert_eq!(
            names(&["b/x", "a/x", "c/y"]),
            ["a/x", "2 pods of other namespaces"]
        );
    }
}
