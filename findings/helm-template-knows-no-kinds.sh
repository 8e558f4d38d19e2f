#!/usr/bin/env bash
# Helm v4.3.1, `helm template` without a cluster: .Capabilities.APIVersions has groups with versions, but no kinds, and
# --kube-version changes .Capabilities.KubeVersion only. So a chart of a DRA driver that asks for
# "resource.k8s.io/v1/DeviceClass" never renders it, and one that asks for "resource.k8s.io/v1" renders it for Kubernetes 1.20,
# too, which is older than the API. Charts need --api-versions, or must compare KubeVersion.
#
# Seen with v4.3.1: the same answers for 1.20.0 and 1.37.1, with and without a kind.
#
# Needs Go 1.26 or later (or GOTOOLCHAIN=auto). Exits 1 if the behavior changes.
set -euo pipefail
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"
GOBIN="$work" go install helm.sh/helm/v4/cmd/helm@v4.3.1 >log 2>&1 || { cat log; exit 1; }
mkdir -p chart/templates
printf 'apiVersion: v2\nname: chart\nversion: 0.1.0\n' > chart/Chart.yaml
cat > chart/templates/capabilities.yaml <<'YAML'
kubernetes: {{ .Capabilities.KubeVersion }}
resource.k8s.io/v1: {{ .Capabilities.APIVersions.Has "resource.k8s.io/v1" }}
resource.k8s.io/v1/DeviceClass: {{ .Capabilities.APIVersions.Has "resource.k8s.io/v1/DeviceClass" }}
apps/v1/Deployment: {{ .Capabilities.APIVersions.Has "apps/v1/Deployment" }}
YAML
for version in 1.20.0 1.37.1; do
  ./helm template chart --kube-version "$version" | grep -v '^\(---\|#\)'
done | tee seen
cat > expected <<'OUT'
kubernetes: v1.20.0
resource.k8s.io/v1: true
resource.k8s.io/v1/DeviceClass: false
apps/v1/Deployment: false
kubernetes: v1.37.1
resource.k8s.io/v1: true
resource.k8s.io/v1/DeviceClass: false
apps/v1/Deployment: false
OUT
diff expected seen || { echo "the behavior has changed"; exit 1; }
echo "helm template v4.3.1 knows groups of its own release, whatever --kube-version is, and no kinds"
